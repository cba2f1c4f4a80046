"""The hook for unused GPUs: what it gets, as whom it runs, and how it ends."""

from __future__ import annotations

import os
import pwd
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulse.cluster.notify.idle_holdings import HeldPlace, Holder
from gpulse.cluster.notify.idle_hook import (
    MAX_OUTPUT_BYTES,
    HookCall,
    HookRefusedError,
    HookRunner,
    HookUser,
    build_hook_call,
    check_hook_program,
    find_hook_user,
    find_placeholders,
    has_values,
)
from gpulse.cluster.notify.idle_policy import IdlePolicy, Track
from gpulse.errors import UsageError
from tests.integration.cluster import is_gone, until
from tests.unit.frames import NOON

COMMAND = ("/usr/local/sbin/free-gpu", "{job_id}", "--user={user}", "{node}", "{gpus}", "{pids}")
PLACE = HeldPlace("node1", (("0", "GPU-0"), ("1", "GPU-1")), ((4242, 100.0), (4243, 100.0)))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run programs as another user")


def track(
    job: str | None = "slurm:4711", user: str | None = "ada", places: tuple[HeldPlace, ...] = (PLACE,)
) -> Track:
    """An idle job."""
    return Track(Holder(job), user, places, NOON, "unused", NOON, NOON, unused_seconds=4500.7)


def own_user() -> HookUser:
    """The user of this process."""
    account = pwd.getpwuid(os.geteuid())
    return HookUser(account.pw_name, account.pw_uid, account.pw_gid, (account.pw_gid,), account.pw_dir)


def run(script: str, *, timeout: float = 60.0) -> tuple[str, str]:
    """Run a shell script as the hook; how it ended and what it printed."""
    who = own_user()
    command = ("/bin/sh", "-c", script, "hook", *COMMAND[1:])
    outcome = HookRunner(who, timeout).run(build_hook_call(command, track(), who))
    return outcome.state, outcome.output


@pytest.fixture
def private() -> Iterator[Path]:
    """A directory that only this user can reach, unlike those in /tmp."""
    with tempfile.TemporaryDirectory(prefix=".gpulse-test-", dir=own_user().home) as directory:
        yield Path(directory)


def write_hook(path: Path, text: str = "echo ran") -> Path:
    """A program that prints a word."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook gets the facts as arguments and variables, and nothing else of the head."""

    monkeypatch.setenv("SECRET", "of the head")
    state, output = run('printf "%s\\n" "$@"; env | sort; pwd; umask')

    lines = output.splitlines()
    assert state == "ended"
    assert lines[:5] == ["4711", "--user=ada", "node1", "0,1", "4242,4243"]
    names = {line.partition("=")[0] for line in lines[5:-2]}
    assert names == {
        *("PATH", "LANG", "HOME", "USER", "LOGNAME", "PWD"),
        *("GPULSE_JOB", "GPULSE_JOB_ID", "GPULSE_USER", "GPULSE_NODE", "GPULSE_GPUS", "GPULSE_PIDS"),
        "GPULSE_IDLE_SECONDS",
    }
    assert "GPULSE_JOB=slurm:4711" in lines
    assert "GPULSE_IDLE_SECONDS=4500" in lines
    assert lines[-2:] == ["/", "0077"]


def test_several_nodes() -> None:
    """Of a job on several nodes, GPUs and processes have the node before them."""

    other = HeldPlace("node2", (("3:1", "MIG-1"),), ((7, 0.0),))
    call = build_hook_call(COMMAND, track(places=(PLACE, other)), own_user())

    assert call.command[3:] == ("node1,node2", "node1/0,node1/1,node2/3:1", "node1/4242,node1/4243,node2/7")


@pytest.mark.parametrize(
    "name",
    [
        "slurm:4711 4712",
        "slurm:'4711'",
        'slurm:"4711"',
        "slurm:4711\n4712",
        "slurm:4711;reboot",
        "slurm:$(reboot)",
        "slurm:`reboot`",
        "slurm:--all",
        "slurm:4711|sh",
        "slurm:",
        "slurm:~root",
        "slurm:4711#",
        "slurm:47%11",
        "slurm:47\\11",
        "slurm:..",
        "slurm:4711/../4712",
        "slurm:4711/..",
        "slurm:*",
        "-u",
        "slurm:4711\x1b[2J",
        "slurm:\u202e4711",
        "slurm:" + "9" * 300,
        "slurm:\udcff",
    ],
)
def test_hostile_names(name: str) -> None:
    """A hostile name is refused, and never becomes an argument."""

    with pytest.raises(HookRefusedError):
        build_hook_call(("/bin/free-gpu",), track(job=name), own_user())
    if name != "slurm:":  # an unknown user is none
        with pytest.raises(HookRefusedError):
            build_hook_call(("/bin/free-gpu",), track(user=name.removeprefix("slurm:")), own_user())


def test_no_second_filling() -> None:
    """A value that looks like a placeholder is not filled in again."""

    call = build_hook_call(("/bin/free-gpu", "{job}/{user}"), track("slurm:1", "ada"), own_user())

    assert call.command[1] == "slurm:1/ada"
    with pytest.raises(HookRefusedError):
        build_hook_call(("/bin/free-gpu", "{job}"), track("{user}"), own_user())


def test_missing_value() -> None:
    """A placeholder without a value refuses the call."""

    without = track(None, "ada")

    assert has_values(find_placeholders(COMMAND), track())
    assert not has_values(find_placeholders(COMMAND), without)
    assert not has_values(find_placeholders(COMMAND), track(user=None))
    assert not has_values(frozenset({"pids"}), track(places=(PLACE._replace(processes=()),)))
    with pytest.raises(HookRefusedError, match="job_id"):
        build_hook_call(COMMAND, without, own_user())
    assert build_hook_call(("/bin/free-gpu",), without, own_user()).environment["GPULSE_JOB"] == ""


def test_timeout(tmp_path: Path) -> None:
    """A hook that takes too long is killed with all that it started."""

    pids = tmp_path / "pids"
    for seconds in (1.0, 30.0):  # a busy machine gets more time to begin
        state, output = run(f"echo begun; sleep 600 & echo $! >{pids}; sleep 600", timeout=seconds)
        if pids.exists() and pids.read_text():
            break

    assert (state, output) == ("timed_out", "begun")
    until(lambda: is_gone(int(pids.read_text())), "the end of the hook's child")


def test_child_runs_on(tmp_path: Path) -> None:
    """A hook whose child runs on ends when it ends itself."""

    release = tmp_path / "release"
    os.mkfifo(release)
    state, output = run(f"echo begun; (read line <{release}; echo late) & exit 0")

    assert (state, output) == ("ended", "begun")
    release.write_text("\n")


def test_output() -> None:
    """The output of a hook is bounded and made safe."""

    state, output = run(r"printf '\033[2Jx\377\n'; yes | head -c 1000000")

    assert state == "ended"
    assert output.startswith("?[2Jx")
    assert len(output) <= MAX_OUTPUT_BYTES


def test_failures() -> None:
    """A hook that fails says how."""

    runner = HookRunner(own_user(), 60.0)

    failed = runner.run(HookCall(("/bin/sh", "-c", "echo no such job >&2; exit 3"), {}))
    killed = runner.run(HookCall(("/bin/sh", "-c", "kill -9 $$"), {}))
    missing = runner.run(HookCall(("/no/such/program",), {}))

    assert (failed.state, failed.exit_code, failed.output) == ("failed", 3, "no such job")
    assert (killed.state, killed.reason) == ("failed", "killed by signal 9")
    assert (missing.state, missing.reason) == (
        "not_started",
        "[idle] hook: cannot find /no/such/program: No such file or directory",
    )


def test_stop(tmp_path: Path) -> None:
    """A head that stops ends the running hook and starts no other."""

    begun = tmp_path / "begun"
    runner = HookRunner(own_user(), 600.0)
    ended = []
    call = HookCall(("/bin/sh", "-c", f"touch {begun}; sleep 600"), {"PATH": "/usr/bin:/bin"})
    thread = threading.Thread(target=lambda: ended.append(runner.run(call).state))
    thread.start()
    until(begun.exists, "the start of the hook")
    runner.stop()
    thread.join(60.0)

    assert ended == ["stopped"]
    assert runner.run(call).state == "not_started"


@needs_root
def test_other_user() -> None:
    """The hook runs as its user, with that user's groups."""

    user = find_hook_user(IdlePolicy(hook_user="nobody"))
    script = 'id -u; id -g; id -G; grep -E "^(Uid|Gid)" /proc/self/status'
    ended = HookRunner(user, 60.0).run(HookCall(("/bin/sh", "-c", script), {"PATH": "/usr/bin:/bin"}))

    missing = HookRunner(user, 60.0).run(HookCall(("/no/such/program",), {}))
    nobody = pwd.getpwnam("nobody")
    uid, gid, groups, *rest = ended.output.splitlines()
    assert (uid, gid) == (str(nobody.pw_uid), str(nobody.pw_gid))
    assert set(groups.split()) == {str(group) for group in os.getgrouplist("nobody", nobody.pw_gid)}
    assert (missing.state, missing.reason) == (
        "not_started",
        "[idle] hook: cannot find /no/such/program: No such file or directory",
    )
    assert [line.split()[1:] for line in rest] == [[uid] * 4, [gid] * 4]


@needs_root
def test_root() -> None:
    """A head of root never runs the hook as root, unless that is said."""

    with pytest.raises(UsageError, match="hook_user is missing"):
        find_hook_user(IdlePolicy())

    assert find_hook_user(IdlePolicy(hook_user="root")).uid == 0


def test_cannot_change_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that cannot become the hook's user says so."""

    nobody = pwd.getpwnam("nobody")
    monkeypatch.setattr(os, "geteuid", lambda: nobody.pw_uid)

    with pytest.raises(UsageError, match="hook_user is daemon, but the head runs as user ID"):
        find_hook_user(IdlePolicy(hook_user="daemon"))
    with pytest.raises(UsageError, match="there is no user 'no-such-user'"):
        find_hook_user(IdlePolicy(hook_user="no-such-user"))
    assert find_hook_user(IdlePolicy()).name == "nobody"


def test_writable_hook(private: Path) -> None:
    """A hook that others can change is refused."""

    path = private / "hook"
    policy = IdlePolicy(hook=(str(path),))
    with pytest.raises(UsageError, match="cannot find"):
        check_hook_program(policy, own_user())
    path.write_text("#!/bin/sh\n")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="not a program"):
        check_hook_program(policy, own_user())
    for mode in (0o757, 0o775):
        path.chmod(mode)
        with pytest.raises(UsageError, match=f"other users can write to {path}"):
            check_hook_program(policy, own_user())
    path.chmod(0o755)
    check_hook_program(policy, own_user())


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_writable_directory(private: Path, mode: int) -> None:
    """Who can write a directory above the hook, or above a link to it, can put another program there."""

    above, safe = private / "above", private / "safe"
    (above / "below").mkdir(parents=True)
    safe.mkdir()
    hooks = [write_hook(above / "below" / "hook"), above / "file-link", safe / "hook"]
    hooks[1].symlink_to(write_hook(safe / "program"))
    hooks[2].symlink_to("../above/directory-link/program")
    (above / "directory-link").symlink_to(safe)
    for hook in hooks:
        check_hook_program(IdlePolicy(hook=(str(hook),)), own_user())
    above.chmod(mode)

    for hook in hooks:
        with pytest.raises(UsageError, match=f"other users can write to {above}"):
            check_hook_program(IdlePolicy(hook=(str(hook),)), own_user())


@needs_root
def test_hook_of_another_user(private: Path) -> None:
    """The program, a directory above it or a link to it may belong to the hook's user, but to nobody else."""

    nobody, daemon = find_hook_user(IdlePolicy(hook_user="nobody")), pwd.getpwnam("daemon")
    (private / "directory").mkdir()
    program = write_hook(private / "directory" / "hook")
    link = private / "link"
    link.symlink_to(program)
    policy = IdlePolicy(hook=(str(link),))
    for part in (program, program.parent, link):
        os.chown(part, daemon.pw_uid, -1, follow_symlinks=False)
        with pytest.raises(UsageError, match=f"{part} belongs to user ID {daemon.pw_uid}"):
            check_hook_program(policy, nobody)
        os.chown(part, nobody.uid, -1, follow_symlinks=False)

    check_hook_program(policy, nobody)


def test_hook_that_became_writable(private: Path) -> None:
    """It is checked again before each run, and the checked file is what runs."""

    link = private / "link"
    link.symlink_to(write_hook(private / "hook", 'echo "$0"'))
    runner, call = HookRunner(own_user(), 60.0), HookCall((str(link),), {})
    before = runner.run(call)
    private.chmod(0o777)
    after = runner.run(call)

    assert (before.state, before.output) == ("ended", str(private / "hook"))
    assert (after.state, after.output) == ("not_started", "")
    assert f"other users can write to {private}" in after.reason


def test_links_in_a_circle(private: Path) -> None:
    """They are not followed forever."""

    (private / "one").symlink_to("two")
    (private / "two").symlink_to("one")

    with pytest.raises(UsageError, match="Too many levels of symbolic links"):
        check_hook_program(IdlePolicy(hook=(str(private / "one"),)), own_user())
