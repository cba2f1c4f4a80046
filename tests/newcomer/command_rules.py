"""What the walk does with each command that the documents show: run it, keep it running, or leave it out and say why.

A command that no rule names is run as it is printed, and must exit with 0. The first rule that fits a command is taken: rules
about one document come before those about all. A rule that is never taken is an error, so that this list cannot
outlive the documents.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.newcomer.blocks import Command

HOSTS = ("HEAD", "gpu-head", "head", "head-a", "head-b", "scheduler")
"""Names of machines in the documents; during the walk each of them is this machine."""


class Rule(NamedTuple):
    """What to do with the commands that match a pattern."""

    document: str
    """The end of a document's path; nothing for every document."""
    pattern: str
    """Searched in the command's text."""
    skip: str = ""
    """Why the command cannot run here."""
    code: int = 0
    """The exit code that the documents promise where there is no GPU."""
    until: str = ""
    """The command runs on, and is up when it has printed this; later Ctrl-C ends it."""
    end_code: int = 0
    """The exit code after that Ctrl-C."""
    add: str = ""
    """Options that are added: what the command would find on a machine with GPUs."""
    before: tuple[tuple[str, str], ...] = ()
    """Commands that are started first and run on, and what they print when they are up: what the document takes for
    granted, such as a cluster to attach to."""
    ready: str = ""
    """A command that is run after those: it waits until they have something to show."""
    gone: str = ""
    """Pattern of a running command that ends by itself because of this one."""
    after: str = ""
    """A command that is run afterwards: it ends what this one has started in the background, or waits for it."""
    ends: tuple[str, ...] = ()
    """Patterns of running commands that are ended with Ctrl-C first, because this one takes their place."""
    kills: tuple[str, ...] = ()
    """Patterns of running commands that are killed first: the document is about a crash."""
    replace: tuple[str, str] = ("", "")
    """A placeholder in the command, and what stands there during the walk."""

    def fits(self, command: Command) -> bool:
        """Whether this rule is about a command."""
        return command.document.endswith(self.document) and re.search(self.pattern, command.text) is not None


def find_rule(command: Command) -> Rule | None:
    """Return the rule of a command, None for one that is run as it is printed."""
    return next((rule for rule in RULES if rule.fits(command)), None)


_DATABASE = "needs a time-series database, or PostgreSQL"
_ELSEWHERE = "needs another machine"
_GPU = "needs a GPU"
_JOB = "needs a job of a scheduler"
_KILLED = "needs a head that was killed"
_MACHINES = "needs machines that can be reached over ssh"
_OWN = "names a file of the reader's own"
_OWN_FINDING = "names a finding or a silence of the reader's own"
_OWN_SESSIONS = "names sessions of the reader's own"
_SLURM = "needs Slurm"
_TWO_HEADS = "needs two heads"
_TESTED = "is what continuous integration runs"

_LISTENS = "listening for agents on"
_CONNECTED = "connected to"
_SCRAPABLE = "metrics on"

_HEAD, _AGENT, _TOP = "^(gpulse head|gsprof start)", "^gpulse agent", "^gpulse top"
_REFUSED = 22
"""The exit code of curl for an answer that says what is wrong with the request."""
_DATA = "~/.local/state/gpulse/newcomer/head"
_EXIT = (
    "curl -sS -X POST http://localhost:8091/api/v1/exit && "
    f"for lock in {_DATA}/log/lock .gswarm_profiler_data/log/lock; do [ ! -e $lock ] || flock $lock true; done"
)
"""Waits until the head has ended, which releases its lock."""
_TRAINED = "until gpulse session show {} | grep -q '^frames  *[1-9]'; do sleep 0.2; done"
"""What people do between the start and the end of a session takes longer than it takes the walk."""
_SCRAPED = "until curl -s localhost:9400/metrics | grep -q {}; do sleep 0.2; done"
_CLUSTER = (
    ("gpulse head --host 0.0.0.0", _LISTENS),
    ("gpulse agent localhost:8090 --demo --node-name n1", _CONNECTED),
)
_PROFILED = f"gpulse session start training_run_1 && {_TRAINED.format('training_run_1')} && gpulse session stop training_run_1"
"""Leaves the file of a session where the document takes one for granted."""
_RECONNECTED = "until gpulse status | grep -q 'n1 *healthy'; do sleep 0.2; done; sleep 2"
"""Until the head has stored frames of the agent again."""
_REPORTED = "until curl -s localhost:8091/status | grep -q H200; do sleep 0.2; done"
"""Until the head has the agent's first frame."""
_OBSERVED = "until curl -s localhost:8091/api/v1/fleet/trends | grep -q gpu-node-1; do sleep 0.5; done"
"""The head observes its GPUs every two seconds, and repeats an answer for five."""
_DEMO = (("gpulse demo --port 8091", "Ctrl-C"),)
_USE_DEMO = "export GPULSE_HEAD=http://localhost:8091"
_DASK = (
    ("dask scheduler --host 127.0.0.1 --port 8786 --no-dashboard", "Scheduler at:"),
    ("dask worker tcp://127.0.0.1:8786 --nthreads 1 --no-dashboard", "Registered to"),
)

_OF_DOCUMENTS = (
    Rule("CONTRIBUTING.md", "", skip=_TESTED),
    Rule("/testing.md", "", skip=_TESTED),
    Rule("/containers-and-kubernetes.md", "", skip="needs a container with GPUs"),
    Rule("/watch-slurm-jobs.md", "", skip=_SLURM),
    Rule("/deploy-agents-over-ssh.md", "^cat node-list.txt"),
    Rule("/deploy-agents-over-ssh.md", "", skip=_MACHINES),
    Rule("/control-access.md", "^gpulse token", before=_CLUSTER),
    Rule(
        "/profile-with-sessions.md",
        "start training_run ",
        before=_CLUSTER,
        after=_TRAINED.format("training_run"),
    ),
    Rule("/profile-with-sessions.md", "start loading", after=_TRAINED.format("loading")),
    Rule("/profile-with-sessions.md", "^gpulse report training_run_1 ", ready=_PROFILED),
    Rule(
        *("/run-a-cluster.md", "^gpulse agent gpu-head"),
        before=_CLUSTER[:1],
        until=_CONNECTED,
        add=" --demo --node-name n1",
    ),
    Rule("/run-a-cluster.md", "^gpulse head --scrub"),
    Rule(
        "/run-a-cluster.md",
        "^gpulse head --repair",
        skip="needs a head that is stopped; another test runs it",
    ),
    Rule(
        "/profile-with-sessions.md", "recover --list --data-dir DIR", kills=(_HEAD,), replace=("DIR", _DATA)
    ),
    Rule("/profile-with-sessions.md", "--data-dir DIR", replace=("DIR", _DATA)),
    Rule("/profile-with-sessions.md", "recover training_run$", after=_RECONNECTED),
    Rule("/profile-with-sessions.md", "recover --list", kills=(_HEAD,), before=_CLUSTER[:1]),
    Rule("/use-the-dashboard.md", "^gpulse findings  ", before=_CLUSTER),
    Rule("/use-the-dashboard.md", "^gpulse findings ack", skip=_OWN_FINDING),
    Rule(
        *("/find-out-why-a-run-is-slow.md", "^gpulse agent gpu-head:8090 --lines"),
        before=_CLUSTER[:1],
        until=_CONNECTED,
    ),
    Rule("/http-api.md", "^gpulse agent", until=_CONNECTED),
    Rule("/http-api.md", "http://head:8091", skip=_ELSEWHERE),
    Rule("/http-api.md", "^curl http://localhost:8091/status$", ready=_REPORTED),
    Rule("/http-api.md", "/api/v1/fleet/trends", ready=_OBSERVED),
    Rule("/http-api.md", """ -d '{"name": "x"}'|nmae""", code=_REFUSED),
    Rule("/http-api.md", "sessions/recover", code=_REFUSED),
    Rule("/http-api.md", "findings/acknowledge|silences/[0-9a-f]+/end", skip=_OWN_FINDING),
    Rule("/http-api.md", "jobs/slurm:4711", skip=_JOB),
    Rule("/compare-two-runs.md", "^gpulse session compare", skip=_OWN_SESSIONS),
    Rule("/report-on-a-job.md", "^gpulse job 4711$", before=_DEMO, ready=_USE_DEMO),
    Rule("/report-on-a-job.md", "^gpulse job ", ready=_USE_DEMO),
    Rule("/http-api.md", "api/v1/exit$", gone=_HEAD),
    Rule(
        *("/prometheus-and-grafana.md", "gpulse_up"),
        ends=(_AGENT,),
        before=(("gpulse agent --metrics-port 9400 --demo", _SCRAPABLE),),
        ready=_SCRAPED.format("gpu_power_watts"),
    ),
    Rule(
        *("/prometheus-and-grafana.md", "SM_CLOCK"),
        ends=(_AGENT,),
        before=(("gpulse agent --metrics-port 9400 --dcgm-names --demo", _SCRAPABLE),),
        ready=_SCRAPED.format("SM_CLOCK"),
    ),
    Rule("/migrate-from-gswarm-profiler.md", "^gsprof start .*--freq"),
    Rule(
        *("/migrate-from-gswarm-profiler.md", "^gsprof profile"),
        before=(("gpulse agent localhost:8090 --demo", _CONNECTED),),
        after=_TRAINED.format("my_experiment"),
    ),
    Rule("/migrate-from-gswarm-profiler.md", "^gsprof connect gpu-head", skip=_ELSEWHERE),
    Rule("/migrate-from-gswarm-profiler.md", "^gsprof stat ", after=_EXIT),
    Rule("/migrate-from-gswarm-profiler.md", "^gsprof start ", ends=(_AGENT,), after=_EXIT),
    Rule("/migrate-from-gswarm-profiler.md", "^gsprof recover", skip=_KILLED),
    Rule("/dask-from-the-command-line.md", "--track tasks,mem-util", before=_DASK),
    Rule("/dask-from-the-command-line.md", "mem-utl", code=2),
    Rule("/dask-from-the-command-line.md", "--scheduler-file", skip=_OWN),
    Rule("/send-notifications.md", "^(gpulse|chmod)", skip=_OWN),
    Rule("/free-idle-gpus.md", ".", skip=_OWN),
    Rule("/run-a-queue-of-work.md", "dask scheduler$", until="Scheduler at:"),
    Rule("/run-a-queue-of-work.md", "^dask worker", until="Registered to"),
)
_OF_ALL = (
    Rule("", "^gpulse demo", until="Ctrl-C"),
    Rule("", "^gpulse top --head", until="nodes"),
    Rule("", _TOP, until="CPU"),
    Rule("", "^gpulse wait .*--gpus (8|16) --head", skip=_ELSEWHERE),
    Rule("", "^gpulse wait .*--node", skip=_ELSEWHERE),
    Rule("", "^gpulse wait --head"),
    Rule("", "^gpulse wait", skip=_GPU),
    Rule("", "^gpulse record -o night", until="Ctrl-C stops recording"),
    Rule("", "^gpulse why --pid 4711", skip=_GPU),
    Rule("", "^gpulse stacks", skip=_GPU),
    Rule("", "^gpulse why --compare before"),
    Rule("", "^gpulse why (run|--demo)", code=1),
    Rule("", "^gpulse why", code=3),
    Rule("", "^gpulse harvest init"),
    Rule("", "^gpulse harvest status", code=3),
    Rule("", "^(gpulse harvest|gpu_mon$)", code=1),
    Rule("", "--(remote-write|database) |^createdb", skip=_DATABASE),
    Rule("", "^gpulse head .*--background", ends=(_HEAD,), after=_EXIT),
    Rule("", "^gpulse head", until=_LISTENS, ends=(_HEAD, "^gpulse demo")),
    Rule("", "head-a:8090,head-b|--head head-b", skip=_TWO_HEADS),
    Rule("", "--head gpu-head", skip=_ELSEWHERE),
    Rule("", "^gpulse agent .*--metrics-port", until=_SCRAPABLE, ends=(_AGENT,)),
    Rule("", "^gpulse agent .*--demo", until=_CONNECTED, ends=(_AGENT,)),
    Rule("", "^gpulse agent", until=_CONNECTED, ends=(_AGENT,), add=" --demo"),
    Rule("", "^gpulse session start training_run_1", after=_TRAINED.format("training_run_1")),
    Rule("", "^promtool", skip="needs promtool"),
)
RULES = (*_OF_DOCUMENTS, *_OF_ALL)
