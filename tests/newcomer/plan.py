"""What the walk does with each command that the documents show: run it, keep it running, or leave it out and say why.

A command that no rule names is run as it is printed, and must exit with 0. A rule that fits no command is an error, so
that this list cannot outlive the documents.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.newcomer.blocks import Command

DOCUMENTS = (
    *(
        "README.md",
        "docs/recordings.md",
        "docs/cluster.md",
        "docs/sessions.md",
        "docs/http-api.md",
        "docs/dashboard.md",
    ),
    *("docs/prometheus.md", "docs/gsprof.md", "docs/dask.md", "docs/dask-cli.md", "docs/dask-plots.md"),
    *("docs/harvest.md", "docs/harvest-config.md", "docs/harvest-queue.md", "docs/job.md", "docs/slurm.md"),
    *("docs/containers.md", "docs/deploy.md", "docs/engine.md", "docs/scaling.md", "docs/python.md"),
    *("docs/diagnosis.md", "docs/diagnosis_live.md", "docs/metrics.md", "CONTRIBUTING.md", "docs/testing.md"),
)
"""In the order in which a newcomer reads them."""

HOSTS = ("HEAD", "gpu-head", "head", "head-a", "head-b", "scheduler")
"""Names of machines in the documents; during the walk each of them is this machine."""


class Rule(NamedTuple):
    """What to do with the commands of a document that match a pattern."""

    document: str
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

    def fits(self, command: Command) -> bool:
        """Whether this rule is about a command."""
        return command.document == self.document and re.search(self.pattern, command.text) is not None


_GPU = "needs a GPU"
_MACHINES = "needs machines that can be reached over ssh"
_DATABASE = "needs a time-series database"
_LISTENS = "listening for agents on"
_CONNECTED = "connected to"

_HEAD, _AGENT = "^(gpulse head|gsprof start)", "^gpulse agent"
_ELSEWHERE = "needs another machine"
_KILLED = "needs a head that was killed"
_SLURM = "needs Slurm"
_JOB = "needs a job of a scheduler"
_REFUSED = 22
"""The exit code of curl for an answer that says what is wrong with the request."""
_OWN = "names a file of the reader's own"
_EXIT = "curl -sS -X POST http://localhost:8091/api/v1/exit"
_TRAINED = "until gpulse session show {} | grep -q '^frames  *[1-9]'; do sleep 0.2; done"
"""What people do between the start and the end of a session takes longer than it takes the walk."""
_SCRAPED = "until curl -s localhost:9400/metrics | grep -q {}; do sleep 0.2; done"
_DASK = (
    ("dask scheduler --host 127.0.0.1 --port 8786 --no-dashboard", "Scheduler at:"),
    ("dask worker tcp://127.0.0.1:8786 --nthreads 1 --no-dashboard", "Registered to"),
)

RULES = (
    Rule("README.md", "^gpulse demo", until="Ctrl-C"),
    Rule("README.md", "^make test", skip="is what continuous integration runs", ends=("^gpulse demo",)),
    Rule("README.md", "^gpulse why --pid 4711", skip=_GPU),
    Rule("README.md", "^gpulse why($| -- python)", code=3),
    Rule("README.md", "^gpulse why (run|--demo)", code=1),
    Rule("README.md", "^gpulse top", until="CPU"),
    Rule("README.md", "^gpulse harvest (doctor|--dry-run|  )", code=1, ends=("^gpulse top",)),
    Rule("README.md", "^gpulse harvest status", code=3),
    Rule("README.md", "^gpulse dask attach", before=_DASK),
    Rule("README.md", "^gpulse head --host", until=_LISTENS, ends=("^dask",)),
    Rule("README.md", "^gpulse agent HEAD:8090  ", until=_CONNECTED, add=" --demo"),
    Rule("README.md", "^gpulse session start training_run_1", after=_TRAINED.format("training_run_1")),
    Rule("README.md", "^gpulse job 4711", skip=_JOB),
    Rule("README.md", "^gpulse agent --metrics-port", until="metrics on", ends=(_AGENT,)),
    Rule("README.md", "^gpulse agent HEAD:8090 --metrics-port", until=_CONNECTED, ends=(_AGENT,)),
    Rule("README.md", "^gpulse head --remote-write", skip=_DATABASE),
    Rule("README.md", "^gpulse agent head-a", skip="needs two heads"),
    Rule("README.md", "^gpulse deploy", skip=_MACHINES),
    Rule("docs/recordings.md", "^gpulse record -o night", until="Ctrl-C ends it"),
    Rule("docs/recordings.md", "^gpulse top", until="CPU"),
    Rule("docs/cluster.md", "^gpulse head --host 0.0.0.0    ", until=_LISTENS, ends=(_HEAD,)),
    Rule("docs/cluster.md", "^gpulse agent gpu-head", until=_CONNECTED, add=" --demo --node-name n1"),
    Rule("docs/cluster.md", "^gpulse head --background", ends=(_HEAD,), after=_EXIT),
    Rule("docs/cluster.md", "^gpulse head --host 0.0.0.0 --remote", skip=_DATABASE),
    Rule("docs/cluster.md", "^gpulse head", until=_LISTENS, ends=(_HEAD,)),
    Rule("docs/cluster.md", "^gpulse session list --head gpu-head", skip=_ELSEWHERE),
    Rule("docs/cluster.md", "^gpulse agent head-a", skip="needs two heads"),
    Rule("docs/cluster.md", "^gpulse session recover .*--data-dir DIR", skip=_OWN),
    Rule("docs/cluster.md", "^gpulse session (recover|show)", skip=_KILLED),
    Rule("docs/sessions.md", "^gpulse report training_run_1.json", skip=_OWN),
    Rule("docs/http-api.md", "^gpulse head", until=_LISTENS),
    Rule("docs/http-api.md", "^gpulse agent", until=_CONNECTED),
    Rule("docs/http-api.md", "http://head:8091", skip=_ELSEWHERE),
    Rule("docs/http-api.md", """ -d '{"name": "x"}'|nmae""", code=_REFUSED),
    Rule("docs/http-api.md", "sessions/recover", skip=_KILLED),
    Rule("docs/http-api.md", "jobs/slurm:4711", skip=_JOB),
    Rule("docs/http-api.md", "api/v1/exit$", gone=_HEAD),
    Rule("docs/dashboard.md", "^curl", before=(("gpulse head", _LISTENS),)),
    Rule("docs/prometheus.md", "^gpulse agent gpu-head", until="metrics on", ends=(_AGENT,)),
    Rule("docs/prometheus.md", "^gpulse agent", until="metrics on", ends=(_AGENT,)),
    Rule("docs/prometheus.md", "^gpulse head", until=_LISTENS),
    Rule(
        *("docs/prometheus.md", "gpulse_up"),
        ends=(_AGENT,),
        before=(("gpulse agent --metrics-port 9400 --demo", "metrics on"),),
        ready=_SCRAPED.format("gpu_power_watts"),
    ),
    Rule(
        *("docs/prometheus.md", "SM_CLOCK"),
        ends=(_AGENT,),
        before=(("gpulse agent --metrics-port 9400 --dcgm-names --demo", "metrics on"),),
        ready=_SCRAPED.format("SM_CLOCK"),
    ),
    Rule("docs/prometheus.md", "^promtool", skip="needs promtool"),
    Rule("docs/gsprof.md", "^gsprof start .*--freq"),
    Rule(
        "docs/gsprof.md",
        "^gsprof profile",
        before=(("gpulse agent localhost:8090 --demo", _CONNECTED),),
        after=_TRAINED.format("my_experiment"),
    ),
    Rule("docs/gsprof.md", "^gsprof connect gpu-head", skip=_ELSEWHERE),
    Rule("docs/gsprof.md", "^gsprof stat ", after=_EXIT),
    Rule("docs/gsprof.md", "^gsprof start ", ends=(_AGENT,), after=_EXIT),
    Rule("docs/gsprof.md", "^gsprof recover", skip=_KILLED),
    Rule("docs/dask-cli.md", "--track tasks,mem-util", before=_DASK),
    Rule("docs/dask-cli.md", "mem-utl", code=2),
    Rule("docs/dask-cli.md", "--scheduler-file|--custom", skip=_OWN),
    Rule("docs/harvest.md", "^gpulse harvest status", code=3),
    Rule("docs/harvest.md", "^gpulse harvest$", code=1),
    Rule("docs/harvest-config.md", "^gpulse harvest -c harvest.toml( --dry-run.*)?$", code=1),
    Rule("docs/harvest-queue.md", "dask scheduler$", until="Scheduler at:"),
    Rule("docs/harvest-queue.md", "^dask worker", until="Registered to"),
    Rule("docs/harvest-queue.md", "^gpulse harvest", code=1),
    Rule("docs/slurm.md", "", skip=_SLURM),
    Rule("docs/containers.md", "", skip="needs a container with GPUs"),
    Rule("docs/deploy.md", "^cat node-list.txt"),
    Rule("docs/deploy.md", "", skip=_MACHINES),
    Rule("docs/engine.md", "", skip=_DATABASE),
    Rule("docs/scaling.md", "", skip=_DATABASE),
    Rule("CONTRIBUTING.md", "", skip="is what continuous integration runs"),
    Rule("docs/testing.md", "", skip="is what continuous integration runs"),
)
