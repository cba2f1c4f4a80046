"""`gpulse harvest` and `gpu_mon` as people run them: real processes that open fake device files."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml
from tests.integration.cluster import Process, is_gone, until
from tests.integration.commands import run
from tests.integration.harvest_machine import HarvestMachine, HarvestProcess, gone

NOBODY_UID = 65534

GPU_MON_ALL = """\
[defaults]
; how frequently perform GPU and tty checks
interval_seconds=1

; configuration of GPUs to monitor for external program access. It could be several such sections with 'gpu-' prefix
[gpu-all]
; list of comma-separated gpu indices or ALL to handle all available gpus
gpus=ALL
; comma-separated list of programs which can access gpu and should be ignored
ignore_programs=nvidia-smi

[process-all]
dir=/tmp
cmd=work {all}
gpus=ALL
log={log}

[process-0]
dir=/tmp
cmd=work '{zero}'
gpus=0
log={log}

[tty]
enabled=True
whitelist=user1,root
idle_seconds=300
"""


@pytest.fixture
def machine(tmp_path: Path, fake_nvml: FakeNvml, nvml_library: Path) -> HarvestMachine:
    """Two idle GPUs."""
    return HarvestMachine(tmp_path, fake_nvml, nvml_library)


@contextmanager
def harvesting(machine: HarvestMachine, *options: str) -> Iterator[HarvestProcess]:
    """A harvest that is ended in the end."""
    process = HarvestProcess(machine, *options)
    try:
        yield process
    finally:
        process.end(signal.SIGKILL)


def test_a_whole_life(machine: HarvestMachine) -> None:
    """Started on idle GPUs, gone when somebody comes, back later, shown, and everything ended by Ctrl-C."""

    machine.configure(machine.program("fold", "each", command=f"work {machine.directory}/fold-{{gpu}}.told"))
    began = time.monotonic()
    with harvesting(machine) as harvest:
        first, second = machine.started("fold-0"), machine.started("fold-1")
        assert ["0", "1"] == [machine.starts(f"fold-{gpu}")[0][1] for gpu in (0, 1)]

        with machine.holding(0):
            gone(first)
            told = harvest.said("stopping fold-0")
            assert f"(pid {os.getpid()}) has opened GPU 0" in told
            status = machine.status()
        assert 0 == status["exit"]
        assert ["people", "harvested"] == [gpu["state"] for gpu in status["gpus"]]
        assert [1, 0] == [gpu["preemptions"] for gpu in status["gpus"]]
        assert ["fold-1"] == [run["program"] for run in status["runs"]]
        (preemption,) = status["preemptions"]
        assert "root" == preemption["by"]
        assert 0 <= preemption["took_seconds"] <= time.monotonic() - began

        again = machine.started("fold-0", 2)
        shown = machine.run("status", "--no-color")
        assert "GPUs given back" in shown.stdout
        refused = machine.run()
        assert 2 == refused.returncode
        assert f"pid {harvest.popen.pid}" in refused.stderr
        assert 0 == harvest.end(signal.SIGINT)
        assert all(map(is_gone, (first, second, again)))
    after = machine.status()
    assert (3, False) == (after["exit"], after["alive"])
    assert 0 < after["harvested_seconds"] <= 2 * (time.monotonic() - began)
    assert [] == list((machine.dev / "shm").iterdir())


def test_files_of_gpu_mon_work_unchanged(machine: HarvestMachine) -> None:
    """All GPUs idle: the program for all of them, without visible GPUs named; its output is appended to the log."""

    config = machine.directory / "home" / ".config" / "gpu_mon.conf"
    log = machine.directory / "out.log"
    log.write_text("before\n", encoding="utf-8")
    told = {"all": machine.told("all"), "zero": machine.told("zero"), "log": log}
    config.write_text(GPU_MON_ALL.format(**told), encoding="utf-8")
    code = f"""
import gpulse.cli.harvest as harvest
from pathlib import Path
real = harvest.run
harvest.run = lambda **given: real(**given, dev_dir=Path({str(machine.dev)!r}))
harvest.run_gpu_mon()
"""
    gpu_mon = Process(
        cwd=machine.directory,
        env={**machine.environment, "CUDA_VISIBLE_DEVICES": "7"},
        command=[sys.executable, "-c", code],
    )
    try:
        pid = machine.started("all")
        assert "7" == machine.starts("all")[0][1]
        assert "/tmp" == os.readlink(f"/proc/{pid}/cwd")
        with machine.holding(1):
            gone(pid)
            single = machine.started("zero")
            assert "0" == machine.starts("zero")[0][1]
        again = machine.started("all", 2)
        assert is_gone(single)
        assert 0 == gpu_mon.end()
    finally:
        gpu_mon.kill()
    assert is_gone(again)
    assert "before\nat work\nat work\nat work\n" == log.read_text(encoding="utf-8")


def test_gpu_mon_writes_the_file_that_it_reads(machine: HarvestMachine) -> None:
    """Without one it names the command that writes it, which never replaces one unasked."""
    path = machine.directory / "home" / ".config" / "gpu_mon.conf"
    missing, written, again = (
        run(*words, program="gpu_mon", env=machine.environment) for words in ((), ("--init",), ("--init",))
    )
    text = path.read_text(encoding="utf-8")
    refused = run(program="gpu_mon", env=machine.environment)

    assert (
        2,
        f"gpu_mon: there is no file {path}\n  try: write a configuration to start from with: gpu_mon --init\n",
    ) == (missing.code, missing.err)
    assert (0, f"wrote {path}; add your command to it, then run: gpu_mon\n") == written[:2]
    assert (1, f"gpu_mon: {path} already exists\n  try: use --force to replace the file\n") == (
        again.code,
        again.err,
    )
    assert (
        f"gpu_mon: {path}:{text.splitlines().index('cmd=my-program') + 1}: cmd: there is no program"
        in refused.err
    )


def test_a_missing_configuration_names_the_command_that_writes_it(machine: HarvestMachine) -> None:
    """In the form that the file's name stands for."""
    hints = [
        machine.run("-c", str(machine.directory / name)).stderr.splitlines()[-1]
        for name in ("a.toml", "b.conf", "c")
    ]

    assert [
        f"  try: create one from a template with: gpulse harvest init {machine.directory}/a.toml",
        f"  try: create one from a template with: gpulse harvest init --format ini {machine.directory}/b.conf",
        f"  try: create one from a template with: gpulse harvest init --format ini {machine.directory}/c",
    ] == hints


def test_ignored_programs_and_flapping(machine: HarvestMachine) -> None:
    """nvidia-smi disturbs nobody; somebody who comes and goes is met once and left alone for a while."""

    machine.configure(cooldown_seconds=600, ignore_programs=["nvidia-smi"])
    with harvesting(machine) as harvest:
        pid = machine.started("fold")
        with machine.smi(0):
            machine.looks()
        assert not is_gone(pid), harvest.text
        with machine.holding(0):
            gone(pid)
        harvest.said("all processes of fold have ended")
        for _ in range(2):
            with machine.holding(0):
                machine.looks()
            machine.looks()
        assert 1 == len(machine.starts("fold"))
        assert "is in cooldown" in machine.status()["gpus"][0]["why"]
        assert 0 == harvest.end()


def test_work_that_the_driver_lists_counts(machine: HarvestMachine) -> None:
    """Also without an open file to be seen, as in a container; and so does a driver that is gone."""

    machine.configure()
    with harvesting(machine) as harvest:
        first = machine.started("fold")
        machine.fake.add_process(0, os.getppid(), 1 << 30)
        gone(first)
        machine.fake.remove_process(0, os.getppid())
        second = machine.started("fold", 2)
        machine.fake.unload_driver()
        gone(second)
        until(lambda: "unknown" == machine.status()["gpus"][0]["state"], "the GPU's state is unknown")
        machine.fake.load_driver()
        machine.started("fold", 3)
        assert 0 == harvest.end()


def test_killed_it_leaves_nothing_and_starts_no_second_copy(machine: HarvestMachine) -> None:
    """Its supervisors end what it ran; supervisors that were killed too leave orphans, which the next harvest ends first."""

    machine.configure()
    with harvesting(machine) as harvest:
        first = machine.started("fold")
        harvest.kill()
        gone(first)
    with harvesting(machine) as harvest:
        second = machine.started("fold", 2)
        supervisor = machine.supervisor()
        os.kill(supervisor, signal.SIGSTOP)
        harvest.popen.kill()
        harvest.popen.wait()
        os.kill(supervisor, signal.SIGKILL)
        assert not is_gone(second)
        with harvesting(machine) as after:
            after.said("1 process that an earlier harvest left running")
            gone(second)
            third = machine.started("fold", 3)
            assert "TWO AT ONCE" not in after.text
            assert 0 == after.end()
            assert is_gone(third)
        harvest.end()


def test_a_change_of_the_file(machine: HarvestMachine) -> None:
    """SIGHUP: a bad one leaves the old in force, a good one stops what changed and starts what is new."""

    machine.configure()
    with harvesting(machine) as harvest:
        first = machine.started("fold")
        machine.config.write_text("[harvest]\ninterval_secs = 1\n", encoding="utf-8")
        harvest.popen.send_signal(signal.SIGHUP)
        told = harvest.said("the old one stays in effect")
        assert f"{machine.config}:2" in told
        assert not is_gone(first)
        machine.configure(machine.program("other", 1))
        harvest.popen.send_signal(signal.SIGHUP)
        gone(first)
        machine.started("other")
        assert 0 == harvest.end()


def test_people_at_a_terminal(machine: HarvestMachine) -> None:
    """Somebody who types stops everything; one who is on the list does not."""

    people = '[people]\nenabled = true\nwhitelist = ["root"]\nidle_seconds = 300\n'
    machine.configure(people + machine.program("fold", 0))
    (machine.dev / "pts" / "0").touch()
    with harvesting(machine) as harvest:
        pid = machine.started("fold")
        terminal = machine.dev / "pts" / "1"
        terminal.touch()
        os.chown(terminal, NOBODY_UID, -1)
        gone(pid)
        assert "is logged in and active at pts/1" in harvest.said("stopping fold")
        os.utime(terminal, (1, 1))
        machine.started("fold", 2)
        assert 0 == harvest.end()


def test_nobody_who_reads_what_it_says_can_hold_it_up(machine: HarvestMachine) -> None:
    """Its output goes into a pipe that is full: it gives way all the same, and ends."""

    machine.configure(machine.program("fold", 0, log="/dev/null"))
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    command = [sys.executable, "-m", "gpulse", "harvest", "--dev-dir", str(machine.dev)]
    harvest = subprocess.Popen(
        command, env={**os.environ, **machine.environment}, stdout=writing, stderr=writing
    )
    try:
        pid = machine.started("fold")
        with machine.holding(0):
            gone(pid)
        harvest.terminate()
        assert 0 == harvest.wait(60)
    finally:
        harvest.kill()
        harvest.wait()
        os.close(reading)
        os.close(writing)


def test_one_that_was_stopped_leaves_no_program(machine: HarvestMachine) -> None:
    """Nobody would see who comes; it is started again when harvest goes on."""

    machine.configure(machine.program("fold", 0, backoff_seconds=0.1))
    with harvesting(machine) as harvest:
        pid = machine.started("fold")
        harvest.popen.send_signal(signal.SIGSTOP)
        gone(pid, 30.0)
        harvest.popen.send_signal(signal.SIGCONT)
        machine.started("fold", 2)
        assert 0 == harvest.end()


def test_one_of_a_user_and_options_in_their_place(machine: HarvestMachine) -> None:
    """A second one is refused whatever its directory; an option before a command is not ignored in silence."""

    machine.configure()
    with harvesting(machine) as harvest:
        machine.started("fold")
        second = machine.run("--state-dir", str(machine.directory / "other"))
        assert 2 == second.returncode
        assert f"(pid {harvest.popen.pid})" in second.stderr
        assert 0 == harvest.end()
    stray = subprocess.run(
        [sys.executable, "-m", "gpulse", "harvest", "--once", "status"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 2 == stray.returncode
    assert "has no option --once; only `gpulse harvest`" in stray.stderr


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_is_closed_ends_it(machine: HarvestMachine, nohup: bool) -> None:
    """Unless it was started with nohup; a hangup else means to read the configuration again."""

    machine.configure(machine.program("fold", 0, log="/dev/null"))
    pid, terminal = pty.fork()
    if not pid:
        os.environ.update(machine.environment)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-m", "gpulse", "harvest", "--dev-dir", str(machine.dev)])
    try:
        program = machine.started("fold")
    finally:
        os.close(terminal)
    if nohup:
        machine.looks()
        assert not is_gone(program)
        os.kill(pid, signal.SIGTERM)
    gone(program)
    until(lambda: os.waitpid(pid, os.WNOHANG)[0], "its end")


def test_ctrl_c_while_orphans_are_ended(machine: HarvestMachine) -> None:
    """Nobody waits for their grace: they are killed, and that is the end."""

    machine.configure(
        machine.program(
            "deaf", 0, command=["sh", "-c", f"trap '' TERM; work {machine.told('deaf')}"], grace_seconds=60
        )
    )
    with harvesting(machine) as harvest:
        pid = machine.started("deaf")
        supervisor = machine.supervisor()
        os.kill(supervisor, signal.SIGSTOP)
        harvest.popen.kill()
        harvest.popen.wait()
        os.kill(supervisor, signal.SIGKILL)
        with harvesting(machine) as after:
            after.said("that an earlier harvest left running")
            assert not is_gone(pid)
            assert 130 == after.end(signal.SIGINT)
            assert is_gone(pid)
        harvest.end()


def test_dry_run_and_once(machine: HarvestMachine) -> None:
    """One says what it would do and does nothing; the other decides once and stays with what it started."""

    machine.configure()
    dry = machine.run("--dry-run", "--once")
    assert 0 == dry.returncode
    assert "would start fold on GPU 0" in dry.stderr
    assert [
        "GPU 0: would be harvested: fold",
        "GPU 1: waiting: no program is configured for it",
        "fold: would run",
    ] == (dry.stdout.splitlines())
    assert [] == machine.starts("fold")
    with machine.holding(0):
        once = machine.run("--once")
    assert 0 == once.returncode
    assert "fold: waiting: root's" in once.stdout
    assert "has opened GPU 0" in once.stdout
    assert [] == machine.starts("fold")
    machine.configure(machine.program("short", 0, command=f"cp /dev/null {machine.told('short')}"))
    assert 0 == machine.run("--once").returncode
    assert machine.told("short").exists()


def test_in_the_background(machine: HarvestMachine) -> None:
    """It says where its log is, goes on by itself, and a wrong configuration is told at once."""

    machine.configure()
    up = machine.run("--background")
    assert 0 == up.returncode
    pid = machine.started("fold")
    os.kill(machine.status()["pid"], signal.SIGTERM)
    gone(pid)
    until(lambda: machine.run("status").returncode == 3, "its end")
    machine.config.write_text("[[program]]\n", encoding="utf-8")
    assert 2 == machine.run("--background").returncode


@pytest.mark.parametrize(
    ("mode", "text", "line"),
    [
        (0o666, "", None),
        (0o644, "[harvest]\nintervall_seconds = 1\n", 2),
        (0o644, '[[program]]\nname = "x"\ncommand = ""\ngpus = 0\n', 3),
        (0o644, '[[program]]\nname = "x"\ncommand = "work x"\ngpus = 5\n', 4),
    ],
    ids=["writable", "unknown key", "empty command", "no such GPU"],
)
def test_a_wrong_configuration_is_refused(
    machine: HarvestMachine, mode: int, text: str, line: int | None
) -> None:
    """With the file, the line and the reason, and nothing is started."""

    path = machine.configure()
    if text:
        path.write_text(text, encoding="utf-8")
    path.chmod(mode)

    answer = machine.run()

    assert 2 == answer.returncode
    assert f"{path}:{line}:" in answer.stderr if line else str(path) in answer.stderr
    assert "Traceback" not in answer.stderr
    assert [] == machine.starts("fold")


def test_without_a_driver(tmp_path: Path) -> None:
    """A file that is not there is the first thing to say, then the driver."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gpulse", "harvest", *arguments],
            env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )

    missing = run("-c", str(tmp_path / "none.toml"))
    assert (2, True) == (missing.returncode, "no such file" in missing.stderr)
    assert 0 == run("init", str(tmp_path / "harvest.toml")).returncode
    if not os.path.exists("/dev/nvidia0"):
        no_driver = run("-c", str(tmp_path / "harvest.toml"))
        assert (1, True) == (no_driver.returncode, "driver" in no_driver.stderr)


def test_init_and_doctor(machine: HarvestMachine) -> None:
    """The first writes a file once; the second says what can be seen."""

    assert 0 == machine.run("doctor").returncode
    environment = {**os.environ, **machine.environment}
    command = [sys.executable, "-m", "gpulse", "harvest", "init"]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert str(machine.config) in first.stdout
    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert 1 == second.returncode
    assert "--force" in second.stderr


def test_a_program_that_cannot_be_run_is_named_with_its_file(machine: HarvestMachine) -> None:
    """In the log and in the status, whole, with what to do; its own name may be a mere number."""
    script = machine.bin / "broken"
    script.write_text("#!/no/such/python\n", encoding="utf-8")
    script.chmod(0o755)
    machine.configure(machine.program("0", 0, command="broken"))
    why = (
        f"cannot run {script}: No such file or directory; its first line names the interpreter /no/such/python, "
        "which does not exist; correct that line"
    )
    with harvesting(machine) as harvest:
        harvest.said(f"cannot start program 0: {why}")
        status = "".join(machine.run("status").stdout.split())  # long paths are wrapped anywhere

    assert "".join(f"! 0: failed to start: {why}".split()) in status
