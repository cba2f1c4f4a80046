"""What `gpulse deploy` does on a node: its shell script, run here with an agent that only pretends to be one."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpulse.deploy.ssh import ScriptAnswer, ScriptRequest, make_request, parse_answer
from tests.integration.cluster import until
from tests.integration.ssh_nodes import is_alive
from tests.prerequisites import TOOLS, require

_AGENT = f"""#!{sys.executable} -SE
import json, os, signal, sys
home, words = os.environ["HOME"], sys.argv[1:]
if words == ["--version"]:
    sys.exit(print("gpulse, version", open(home + "/version").read()))
if words[1] == "refuses:1":
    sys.exit("gpulse agent: the head refuses: go away (try: another head); see /x/agent.log")
state = words[words.index("--state-dir") + 1]
if words[1] == "waits:1":
    import time
    open(home + "/waits", "w").close()
    while not os.path.exists(home + "/go"):
        time.sleep(0.02)
log = words[words.index("--log-file") + 1] if "--background" in words else None
reading, writing = os.pipe()
if log and os.fork():
    os.close(writing)
    sys.exit(0 if os.read(reading, 1) else 1)
if log:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(1, 2)
if words[1] == "stubborn:1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if words[1] != "away:1":
    print("2026-01-01 00:00:00 I connected to", words[1], flush=True)
else:
    print("2026-01-01 00:00:00 W cannot connect to away:1 (nobody is there); trying again in 1.0 s", flush=True)
with open(state + "/words.json", "w") as file:
    json.dump(words, file)
os.makedirs(state + "/spool", exist_ok=True)
open(state + "/spool/1.log", "w").close()
with open(state + "/agent.pid.new", "w") as file:
    print(os.getpid(), file=file)
os.rename(state + "/agent.pid.new", state + "/agent.pid")
os.write(writing, b"+")
signal.pause()
"""
_SYSTEMD = {
    "loginctl": "echo Linger=yes",
    "systemctl": """echo "$*" >>"$HOME/systemctl"
case $2 in
  is-active) kill -0 "$(cat "$HOME/unit")" 2>/dev/null ;;
  stop) kill "$(cat "$HOME/unit")" 2>/dev/null ;;
esac""",
    "systemd-run": """while [ "$1" != /bin/sh ]; do shift; done
setsid "$@" >/dev/null 2>&1 </dev/null &
echo $! >"$HOME"/unit""",
}


class Machine:
    """A home directory, and programs."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "my home"
        self.programs = directory / "bin"
        for place in (self.home, self.programs):
            place.mkdir()
        self.install("gpulse", _AGENT)
        self.install("loginctl", "#!/bin/sh\nexit 1\n")
        (self.home / "version").write_text("1.0")
        self.state = self.home / ".local" / "state" / "gpulse" / os.uname().nodename / "deploy"

    def install(self, name: str, text: str) -> None:
        """Put a program there."""
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def use(self, shell: str) -> None:
        """Have another shell there, which is `sh` to everybody."""
        (self.programs / "sh").symlink_to(shutil.which(shell) or "")

    def do(
        self,
        verb: str,
        parameters: Mapping[str, str] | None = None,
        words: Sequence[str] = (),
        pieces: Mapping[str, bytes] | None = None,
    ) -> ScriptAnswer:
        """Do there what a deploy does."""
        order = make_request(verb, {"patience": "1", **(parameters or {})}, words, pieces)
        done = subprocess.run(
            ["sh", "-c", order.command],
            input=order.data,
            env={"HOME": str(self.home), "PATH": f"{self.programs}:{os.environ['PATH']}"},
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert b"" == done.stderr
        return parse_answer(done.stdout, order.mark)

    def up(
        self, *words: str, head: str = "gpu-head:8090", token: bytes = b"secret", patience: str = "1"
    ) -> ScriptAnswer:
        """Start an agent."""
        return self.do("up", {**self.told(head), "patience": patience}, words, {"token": token})

    @staticmethod
    def told(head: str) -> dict[str, str]:
        """What an `up` for a head is told."""
        return {"head": head, "slug": head.replace(":", "_"), "target": head}

    def order(self, head: str, token: bytes = b"secret") -> ScriptRequest:
        """A request for another agent."""
        return make_request("up", {"patience": "1", **self.told(head)}, (), {"token": token})

    def started(self, order: ScriptRequest, **given: Any) -> subprocess.Popen[bytes]:
        """A deploy that is at work."""
        process = subprocess.Popen(
            ["sh", "-c", order.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"HOME": str(self.home), "PATH": f"{self.programs}:{os.environ['PATH']}"},
            **given,
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(order.data)
            process.stdin.close()
        process.stdin = None
        return process

    def run(self, order: ScriptRequest, **given: Any) -> ScriptAnswer:
        """Do what a request says, whatever standard error says."""
        with self.started(order, **given) as process:
            assert process.stdout is not None
            return parse_answer(process.stdout.read(), order.mark)

    def close(self) -> None:
        """End what is left."""
        for pid in self.agents():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def agents(self) -> list[int]:
        """The processes that work for this home."""
        wanted = f"--state-dir\0{self.home}/".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if wanted in path.read_bytes():
                    found.append(int(path.parent.name))
        return [pid for pid in found if is_alive(pid)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine where nothing runs yet."""
    made = Machine(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox", "mksh"])
def test_an_agent_is_started_once_and_ended(machine: Machine, shell: str) -> None:
    """In every shell that there is."""

    if shell in TOOLS:
        require(shell)
    machine.use(shell)
    assert ["absent", "no agent was running"] == [
        machine.do("status").first("state"),
        machine.do("down").first("did"),
    ]
    first = machine.up("--label", "rack='a b' $(date) `x` \\ \"q\"")
    pid = first.number("pid")
    assert pid
    assert ["started", "running", "connected", "session"] == [
        first.first(key) for key in ("did", "state", "link", "how")
    ]
    assert (
        '--label", "rack=\'a b\' $(date) `x` \\\\ \\"q\\""'
        in next(machine.state.glob("agent/*/words.json")).read_text()
    )
    again = machine.up("--label", "rack='a b' $(date) `x` \\ \"q\"")
    assert ["already running", pid] == [again.first("did"), again.number("pid")]
    assert "stopped" == machine.do("down").first("did")
    assert not is_alive(pid)
    assert "stopped" == machine.do("status").first("state")
    assert "removed" == machine.do("purge").first("did")
    assert [] == [path for path in machine.home.rglob("*") if path.is_file() and path.name != "version"]


def test_what_is_another_agent_replaces_the_first_and_is_told(machine: Machine) -> None:
    """Another head, version, token or option."""

    machine.up()
    assert "restarted (its head was gpu-head:8090)" == machine.up(head="other:1").first("did")
    (machine.home / "version").write_text("1.1")
    assert "restarted (its version was 1.0)" == machine.up(head="other:1").first("did")
    assert "restarted (its token changed)" == machine.up(head="other:1", token=b"new").first("did")
    assert (b"new", 0o600) == (
        (machine.state / "now" / "token").read_bytes(),
        (machine.state / "now" / "token").stat().st_mode & 0o777,
    )
    assert "restarted (its options changed)" == machine.up("--demo", head="other:1", token=b"new").first(
        "did"
    )
    assert 1 == sum(is_alive(int(file.read_text())) for file in machine.state.glob("agent/*/agent.pid"))


def test_certificates_are_kept_where_only_their_owner_reads_them(machine: Machine) -> None:
    """And are gone when they are no longer needed."""

    pieces = {"ca.pem": b"authority\n", "key.pem": b"key\n\n"}
    machine.do("up", {"head": "h:1", "slug": "h"}, ["--tls"], pieces)
    words = json.loads(next(machine.state.glob("agent/*/words.json")).read_text())
    assert str(machine.state / "now" / "ca.pem") == words[words.index("--tls-ca") + 1]
    assert (b"key\n\n", 0o600) == (
        (machine.state / "now" / "key.pem").read_bytes(),
        (machine.state / "now" / "key.pem").stat().st_mode & 0o777,
    )
    assert "--token-file" not in words
    other = machine.do("up", {"head": "h:1", "slug": "h"}, ["--tls"], {"ca.pem": b"another\n"})
    assert "restarted (its certificates changed)" == other.first("did")
    assert not (machine.state / "now" / "key.pem").exists()


def test_the_number_of_somebody_else_is_never_signalled(machine: Machine) -> None:
    """A number that was given to another process since, now or after a boot."""

    machine.up()
    pid = machine.do("status").number("pid")
    assert pid
    kept = (machine.state / "pid").read_text()
    os.kill(pid, signal.SIGKILL)
    for file in machine.state.glob("agent/*/agent.pid"):
        file.unlink()
    with subprocess.Popen(["sleep", "60"]) as other:
        _, ticks, boot, *rest = kept.split()
        own_ticks = Path(f"/proc/{other.pid}/stat").read_text().rpartition(") ")[2].split()[19]
        for words in (
            (other.pid, ticks, boot),
            (other.pid, own_ticks, "another-boot"),
            ("1", "1", boot),
            ("-1", "", ""),
        ):
            (machine.state / "pid").write_text(" ".join(map(str, (*words, *rest))))
            assert "ended" == machine.do("status").first("state")
            assert "no agent was running" == machine.do("down").first("did")
        assert is_alive(other.pid)
        other.kill()


def test_an_agent_that_ended_by_itself_is_seen_and_started_anew(machine: Machine) -> None:
    """With its last words."""

    pid = machine.up().number("pid")
    assert pid
    os.kill(pid, signal.SIGKILL)
    with (machine.state / "agent.log").open("a") as log:
        log.write("gpulse: the disk is gone\n  try: another\n")
    ended = machine.do("status")
    assert ["ended", "gpulse: the disk is gone"] == [ended.first("state"), ended.first("link")]
    assert "started (it had ended)" == machine.up().first("did")


def test_an_agent_whose_number_was_not_written_down_is_found(machine: Machine) -> None:
    """A deploy that was cut off in between."""

    pid = machine.up().number("pid")
    (machine.state / "pid").unlink()
    again = machine.up()
    assert ["already running", pid] == [again.first("did"), again.number("pid")]
    (machine.state / "pid").unlink()
    next(machine.state.glob("agent/*/agent.pid")).unlink()
    again = machine.up()
    assert ["already running", pid] == [again.first("did"), again.number("pid")]


def test_an_agent_that_is_refused_says_why(machine: Machine) -> None:
    """In its own words."""

    told = machine.up(head="refuses:1")

    assert ["the head refuses: go away", "another head"] == [told.first("error"), told.first("hint")]
    assert "absent" == machine.do("status").first("state")


def test_an_agent_that_does_not_listen_is_ended_by_force(machine: Machine) -> None:
    """After a while."""

    pid = machine.up(head="stubborn:1").number("pid")
    assert pid

    assert "stopped, by force" == machine.do("down").first("did")
    assert not is_alive(pid)


def test_two_deploys_at_once_start_one_agent(machine: Machine) -> None:
    """The second one waits, and finds it."""

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: machine.up(patience="30"), range(4)))

    assert ["already running"] * 3 + ["started"] == sorted(answer.first("did") or "" for answer in answers)


def test_a_lock_is_respected_until_its_owner_is_gone(machine: Machine) -> None:
    """Whoever has it is named by number and start."""

    machine.state.mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as owner:
        ticks = Path(f"/proc/{owner.pid}/stat").read_text().rpartition(") ")[2].split()[19]
        (machine.state / "lock").symlink_to(f"{owner.pid}.{ticks}")
        assert "another deploy is running on the node" == machine.up().first("error")
        owner.kill()
    assert "started" == machine.up().first("did")
    assert not (machine.state / "lock").is_symlink()


def test_a_user_whose_services_linger_gets_a_service(machine: Machine) -> None:
    """With words and environment as they are; one that does not come up says why, and the earlier one is back."""

    for name, text in _SYSTEMD.items():
        machine.install(name, f"#!/bin/sh\n{text}\n")
    told = machine.up("--label", "rack='a b' $(date) `x` \\ \"q\"")
    pid = told.number("pid")
    assert pid
    assert ["systemd", "connected"] == [told.first("how"), told.first("link")]
    assert (
        '--label", "rack=\'a b\' $(date) `x` \\\\ \\"q\\""'
        in next(machine.state.glob("agent/*/words.json")).read_text()
    )
    asked = (machine.home / "systemctl").read_text().splitlines()
    assert {"--user stop gpulse-deploy-agent", "--user is-active --quiet gpulse-deploy-agent"} <= set(asked)
    refused = machine.up(head="refuses:1")
    assert (
        "the new agent did not start, so the earlier one runs again: the head refuses: go away"
        == refused.first("error")
    )
    again = machine.do("status")
    assert ["running", "systemd"] == [again.first("state"), again.first("how")]
    assert not is_alive(pid)
    machine.install("systemd-run", "#!/bin/sh\nexit 1\n")
    assert "session" == machine.up(head="other:1").first("how"), "where there are no services after all"
    assert "stopped" == machine.do("down").first("did")
    assert [] == machine.agents()


def test_frames_that_no_head_has_survive_a_purge(machine: Machine) -> None:
    """Unless they are meant too."""

    machine.up(head="away:1")
    kept = machine.do("purge")
    assert "removed" == kept.first("did")
    assert "--spool" in (kept.first("note") or "")
    assert ["1.log"] == [path.name for path in machine.state.rglob("*.log")]
    assert [] == list(machine.state.rglob("token"))
    machine.do("purge", {"spool": "yes"})
    assert not machine.state.exists()


def test_what_a_node_cannot_do_is_said(machine: Machine) -> None:
    """No home, no gpulse, one that does not run."""

    machine.install("gpulse", "#!/bin/sh\necho broken >&2\nexit 1\n")
    assert "gpulse does not run there: broken" == machine.up().first("error")
    told = machine.do("up", {"head": "h", "slug": "h", "venv": "~/venv"})
    assert f"{machine.home}/venv/bin/python does not exist there" == told.first("error")
    told = machine.do("probe", {"python": "/nonexistent/python"})
    assert "cannot find /nonexistent/python there" == told.first("error")
    assert [] == list(machine.home.rglob("token"))


def test_a_new_agent_that_is_refused_leaves_the_earlier_one(machine: Machine) -> None:
    """With its files; one that did not run stays as it was."""

    machine.up("--demo")
    told = machine.up(head="refuses:1", token=b"another")
    assert [
        "the new agent did not start, so the earlier one runs again: the head refuses: go away",
        "another head",
    ] == [
        told.first("error"),
        told.first("hint"),
    ]
    again = machine.do("status")
    assert ["running", "gpu-head:8090", "connected"] == [
        again.first(key) for key in ("state", "head", "link")
    ]
    assert [again.number("pid")] == machine.agents()
    assert b"secret" == (machine.state / "now" / "token").read_bytes()
    assert "--demo" in next(machine.state.glob("agent/gpu-head*/words.json")).read_text()
    assert "already running" == machine.up("--demo").first("did")
    machine.do("down")
    assert "the head refuses: go away" == machine.up(head="refuses:1").first("error")
    assert ["stopped", "gpu-head:8090"] == [machine.do("status").first(key) for key in ("state", "head")]
    assert {"agent", "agent.log", "now"} == {path.name for path in machine.state.iterdir()}


def test_a_token_is_never_taken_away_by_chance(machine: Machine) -> None:
    """Somebody who has none cannot have meant to replace an agent that has one, unless they say so."""

    pid = machine.up().number("pid")
    told = machine.do("up", machine.told("gpu-head:8090"))
    assert "the agent there has a token, but no token was found here" == told.first("error")
    assert "--no-token" in (told.first("hint") or "")
    assert [pid] == machine.agents()
    told = machine.do("up", {**machine.told("gpu-head:8090"), "bare": "yes"})
    assert "restarted (its token changed)" == told.first("did")
    assert not (machine.state / "now" / "token").exists()


@pytest.mark.parametrize("cut", [1, 16, 20])
def test_a_connection_that_breaks_off_changes_nothing(machine: Machine, cut: int) -> None:
    """In the mark at the end, before it, or in a file."""

    pid = machine.up().number("pid")
    order = machine.order("other:1", b"another token")
    told = machine.run(order._replace(data=order.data[:-cut]))

    assert "the connection was interrupted" == told.first("error")
    assert [pid] == machine.agents()
    assert b"secret" == (machine.state / "now" / "token").read_bytes()
    assert [] == list(machine.state.glob("new*"))


def test_a_full_disk_leaves_the_agent_that_runs(machine: Machine) -> None:
    """And does not keep it from being ended."""

    def full() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    pid = machine.up().number("pid")
    told = machine.run(machine.order("other:1"), preexec_fn=full, stderr=subprocess.DEVNULL)
    assert "cannot write" in (told.first("error") or "")
    assert [pid] == machine.agents()
    machine.install("ln", "#!/bin/sh\nexit 1\n")
    assert "cannot write" in (machine.up(head="other:1").first("error") or ""), "no room for a lock"
    assert [pid] == machine.agents()
    assert "stopped" == machine.do("down").first("did")
    assert [] == machine.agents()
    assert "removed" == machine.do("purge").first("did")
    assert not machine.state.exists()


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("killed", ["exchange", "waiting", "both"])
def test_a_deploy_that_is_killed_leaves_one_agent(machine: Machine, killed: str) -> None:
    """Between the end of the earlier agent and the start of the new one, which is the worst moment."""

    machine.up("--demo")
    order = machine.order("waits:1")
    with machine.started(order) as process:
        until((machine.home / "waits").exists, "the new one begins")
        (exchange,) = _children(process.pid)
        for pid in {"exchange": [exchange], "waiting": [process.pid]}.get(killed, [exchange, process.pid]):
            os.kill(pid, signal.SIGKILL)
        if killed == "both":
            for pid in machine.agents():
                os.kill(pid, signal.SIGKILL)
        if killed == "waiting":
            assert "another deploy is running on the node" == machine.up().first("error")
        if killed != "exchange":
            (machine.home / "go").touch()
        assert process.stdout is not None
        told = parse_answer(process.stdout.read(), order.mark)

    if killed == "exchange":
        assert (
            "the new agent did not start, so the earlier one runs again: the deploy was interrupted there"
            == told.first("error")
        )
        assert "already running" == machine.up("--demo").first("did")
    elif killed == "waiting":
        until(lambda: machine.do("status").first("state") == "running", "the exchange goes on")
        assert "waits:1" == machine.do("status").first("head")
        assert "already running" == machine.up(head="waits:1").first("did")
    else:
        assert "ended" == machine.do("status").first("state")
        assert "started (it had ended)" == machine.do("up", {"keep": "yes", "force": "yes"}).first("did")
        assert "gpu-head:8090" == machine.do("status").first("head")
    assert [machine.do("status").number("pid")] == machine.agents()
    assert [] == [path for path in machine.state.iterdir() if path.name[:3] in ("old", "new", "gon", "loc")]


def test_a_restart_keeps_what_an_agent_was_started_with(machine: Machine) -> None:
    """Unless it is said otherwise, and then it is told."""

    machine.up("--label", "rack= a ", "--demo")
    first = json.loads(next(machine.state.glob("agent/*/words.json")).read_text())
    pid = machine.do("status").number("pid")
    told = machine.do("up", {"keep": "yes", "force": "yes"})
    assert "restarted (as requested)" == told.first("did")
    assert [told.number("pid")] == machine.agents() != [pid]
    assert first == json.loads(next(machine.state.glob("agent/*/words.json")).read_text())
    told = machine.do("up", {**machine.told("gpu-head:8090"), "force": "yes"}, (), {"token": b"secret"})
    assert "restarted (as requested, its options changed)" == told.first("did")
    machine.do("purge", {"spool": "yes"})
    assert "no agent has been started there yet" == machine.do("up", {"keep": "yes"}).first("error")


def test_the_name_in_a_list_is_no_reason_to_restart(machine: Machine) -> None:
    """Two lists may call one machine differently."""

    machine.up("--label", "ssh=gpu01")
    assert "already running" == machine.up("--label", "ssh=10.0.0.1").first("did")


def test_agents_of_another_head_are_left_alone(machine: Machine) -> None:
    """When one was named."""

    pid = machine.up().number("pid")
    for verb in ("down", "purge"):
        told = machine.do(verb, {"slug": "other_1"})
        assert ["left unchanged: its head is gpu-head:8090", "running"] == [
            told.first("did"),
            told.first("state"),
        ]
    assert "the agent there is for another head: gpu-head:8090" == machine.do(
        "logs", {"slug": "other_1"}
    ).first("error")
    assert [pid] == machine.agents()
    assert "stopped" == machine.do("down", {"slug": "gpu-head_8090"}).first("did")


def test_frames_are_kept_for_as_long_as_nobody_knows_better(machine: Machine) -> None:
    """After a purge that kept them, and after an agent for another head."""

    machine.up(head="away:1")
    machine.do("purge")
    assert "--spool" in (machine.do("purge").first("note") or "")
    assert ["away_1"] == [path.parts[-3] for path in machine.state.rglob("1.log")]
    machine.up(head="gpu-head:8090")
    machine.do("purge")
    assert ["away_1"] == [path.parts[-3] for path in machine.state.rglob("1.log")]
    machine.do("purge", {"spool": "yes"})
    assert not machine.state.exists()


def test_a_node_that_was_renamed_knows_its_agent(machine: Machine) -> None:
    """By the name that it had."""

    pid = machine.up().number("pid")
    machine.install("uname", "#!/bin/sh\necho renamed\n")
    again = machine.up()
    assert ["already running", pid] == [again.first("did"), again.number("pid")]
    assert "its host name was" in (again.first("note") or "")
    assert "stopped" == machine.do("down").first("did")
    assert [] == machine.agents()


def test_the_agent_of_another_machine_of_that_name_is_left_alone(machine: Machine) -> None:
    """Homes are shared, and names are given twice."""

    machine.up()
    (pid,) = machine.agents()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not machine.agents(), "it is gone from here")
    record = "4711 1 another-boot 1 session\n"
    (machine.state / "pid").write_text(record)
    with next(machine.state.glob("agent/*")).joinpath("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for told in (
            machine.up(head="other:1"),
            machine.do("down"),
            machine.do("purge"),
            machine.do("status"),
        ):
            assert "another machine with the host name" in (told.first("error") or "")
    assert record == (machine.state / "pid").read_text()
    assert "started (it had ended)" == machine.up().first("did"), "as after a boot"


def test_a_copy_of_gpulse_stays_for_others_and_is_believed_only_if_it_runs(machine: Machine) -> None:
    """Wherever they keep their state."""

    copies = machine.home / ".local" / "share" / "gpulse" / "deploy"
    for name in ("used", "unused", "broken"):
        (copies / name / "users").mkdir(parents=True)
        (copies / name / "ready").touch()
        (copies / name / "venv" / "bin").mkdir(parents=True)
        python = copies / name / "venv" / "bin" / "python"
        python.write_text(f"#!/bin/sh\n[ $3 = --version ] && echo 1.0 && [ {name} != broken ]\n")
        python.chmod(0o755)
    (copies / "used" / "users" / "gpu77").touch()
    (copies / "never-finished.lock").mkdir()
    assert ["unused", "used"] == sorted(machine.do("probe", {"python": sys.executable}).values["copy"])
    assert "gpulse does not run there: 1.0" == machine.do(
        "up", {**machine.told("h:1"), "install": "broken"}
    ).first("error")
    purged = machine.do("purge")
    assert ["used"] == [path.name for path in copies.iterdir()]
    assert "gpu77 uses it" in (purged.first("note") or "")


def test_a_copy_that_cannot_be_made_leaves_nothing(machine: Machine) -> None:
    """And says why."""

    order = {"install": "x", "interpreter": sys.executable, "wanted": "1"}
    assert "cannot unpack the wheels there" in (machine.do("push", order).first("error") or "")
    assert [] == list((machine.home / ".local" / "share" / "gpulse" / "deploy").iterdir())
