"""What `gpulse deploy` does on a node: its shell script, run here with an agent that only pretends to be one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from gpulse.deploy.script import Answer, letter, read_answer
from tests.integration.ssh_nodes import is_alive

_AGENT = f"""#!{sys.executable} -SE
import json, os, signal, sys
home, words = os.environ["HOME"], sys.argv[1:]
if words == ["--version"]:
    sys.exit(print("gpulse, version", open(home + "/version").read()))
if words[1] == "refuses:1":
    sys.exit("gpulse agent: the head refuses: go away (try: another head); see /x/agent.log")
state = words[words.index("--state-dir") + 1]
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
    print("2026-01-01 00:00:00 W not connected to away:1 (nobody is there), trying again in 1.0 s", flush=True)
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
    "systemctl": "exit 0",
    "systemd-run": 'while [ "$1" != /bin/sh ]; do shift; done; setsid "$@" >/dev/null 2>&1 </dev/null &',
}


class Machine:
    """A home directory, and programs."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "my home"
        self.programs = directory / "bin"
        self.shell = "sh"
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

    def do(
        self,
        verb: str,
        parameters: Mapping[str, str] | None = None,
        words: Sequence[str] = (),
        pieces: Mapping[str, bytes] | None = None,
    ) -> Answer:
        """Do there what a deploy does."""
        order = letter(verb, {"patience": "1", **(parameters or {})}, words, pieces)
        done = subprocess.run(
            [
                shutil.which(self.shell) or "",
                *(["sh"] if self.shell == "busybox" else []),
                "-c",
                order.command,
            ],
            input=order.data,
            env={"HOME": str(self.home), "PATH": f"{self.programs}:{os.environ['PATH']}"},
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert b"" == done.stderr
        return read_answer(done.stdout, order.mark)

    def up(
        self, *words: str, head: str = "gpu-head:8090", token: bytes = b"secret", patience: str = "1"
    ) -> Answer:
        """Start an agent."""
        told = {"head": head, "slug": head.replace(":", "_"), "patience": patience}
        return self.do("up", told, words, {"token": token})

    def close(self) -> None:
        """End what is left."""
        for file in self.state.glob("agent/*/agent.pid"):
            with suppress(OSError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine where nothing runs yet."""
    made = Machine(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("shell", ["sh", "bash", "busybox", "mksh"])
def test_an_agent_is_started_once_and_ended(machine: Machine, shell: str) -> None:
    """In every shell that there is."""

    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    machine.shell = shell
    assert ["absent", "nothing ran"] == [machine.do("status").first("state"), machine.do("down").first("did")]
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
    assert "restarted (another token)" == machine.up(head="other:1", token=b"new").first("did")
    assert (b"new", 0o600) == (
        (machine.state / "token").read_bytes(),
        (machine.state / "token").stat().st_mode & 0o777,
    )
    assert "restarted (other options)" == machine.up("--demo", head="other:1", token=b"new").first("did")
    assert 1 == sum(is_alive(int(file.read_text())) for file in machine.state.glob("agent/*/agent.pid"))


def test_certificates_are_kept_where_only_their_owner_reads_them(machine: Machine) -> None:
    """And are gone when they are no longer needed."""

    pieces = {"ca.pem": b"authority\n", "key.pem": b"key\n\n"}
    machine.do("up", {"head": "h:1", "slug": "h"}, ["--tls"], pieces)
    words = json.loads(next(machine.state.glob("agent/*/words.json")).read_text())
    assert str(machine.state / "ca.pem") == words[words.index("--tls-ca") + 1]
    assert (b"key\n\n", 0o600) == (
        (machine.state / "key.pem").read_bytes(),
        (machine.state / "key.pem").stat().st_mode & 0o777,
    )
    assert "--token-file" not in words
    other = machine.do("up", {"head": "h:1", "slug": "h"}, ["--tls"], {"ca.pem": b"another\n"})
    assert "restarted (other certificates)" == other.first("did")
    assert not (machine.state / "key.pem").exists()


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
            assert "nothing ran" == machine.do("down").first("did")
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
        assert "another deploy is at work there" == machine.up().first("error")
        owner.kill()
    assert "started" == machine.up().first("did")
    assert not (machine.state / "lock").is_symlink()


def test_a_user_whose_services_linger_gets_a_service(machine: Machine) -> None:
    """With words and environment as they are."""

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
    assert "stopped" == machine.do("down").first("did")
    assert not is_alive(pid)


def test_frames_that_no_head_has_survive_a_purge(machine: Machine) -> None:
    """Unless they are meant too."""

    machine.up(head="away:1")
    kept = machine.do("purge")
    assert "removed" == kept.first("did")
    assert "--spool" in (kept.first("note") or "")
    assert ["1.log"] == [path.name for path in machine.state.rglob("*.log")]
    assert not (machine.state / "token").exists()
    machine.do("purge", {"spool": "yes"})
    assert not machine.state.exists()


def test_what_a_node_cannot_do_is_said(machine: Machine) -> None:
    """No home, no gpulse, one that does not run."""

    machine.install("gpulse", "#!/bin/sh\necho broken >&2\nexit 1\n")
    assert "gpulse does not run there: broken" == machine.up().first("error")
    told = machine.do("up", {"head": "h", "slug": "h", "venv": "~/venv"})
    assert f"{machine.home}/venv/bin/python is not there" == told.first("error")
    told = machine.do("probe", {"python": "/nonexistent/python"})
    assert "there is no /nonexistent/python" == told.first("error")
    assert [] == list(machine.home.rglob("token"))
