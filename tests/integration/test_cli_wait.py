"""`gpulse wait` with the fake driver: GPUs that are free, become free, stay in use, or are wanted by two at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gpulse.sources.gpu_claims import claim_path
from gpulse.sources.procfs import Roots
from tests.fakes.nvml import FakeNvml
from tests.integration.cluster import Process, until
from tests.integration.commands import Ended, run, terminal
from tests.integration.harvest_machine import HarvestMachine, HarvestProcess, gone

GIB = 1 << 30
SHOW = ("sh", "-c", "echo gpus=$CUDA_VISIBLE_DEVICES order=$CUDA_DEVICE_ORDER; exit 7")


class WaitMachine:
    """A machine with four GPUs, and programs that hold some of them."""

    def __init__(self, directory: Path, fake: FakeNvml, library: Path) -> None:
        self.fake = fake
        self.dev = directory / "dev"
        (self.dev / "shm").mkdir(parents=True)
        self._directory = directory
        self.environment = {**fake.env(library), "HOME": str(directory)}
        for index in range(4):
            fake.add(index)
            fake.gpu(index).util_gpu = 0
            for process in fake.gpu(index).processes:
                process.kind = 0

    def hold(self, *gpus: int, pid: int | None = None) -> None:
        """Let a process, this one by default, hold GPUs."""
        for gpu in gpus:
            self.fake.add_process(gpu, os.getpid() if pid is None else pid, 3 * GIB)

    def free(self, *gpus: int) -> None:
        """Let it release them."""
        for gpu in gpus:
            self.fake.remove_process(gpu, os.getpid())

    def arguments(self, *arguments: str) -> tuple[str, ...]:
        """The arguments of a wait on this machine, which takes GPUs at once."""
        return ("wait", "--dev-dir", str(self.dev), "--for", "0", *arguments)

    def wait(self, *arguments: str, **environment: str) -> Ended:
        """Wait to the end."""
        return run(*self.arguments(*arguments), env={**self.environment, **environment})

    @contextmanager
    def waiting(self, *arguments: str) -> Iterator[Process]:
        """Wait in the background."""
        process = Process(*self.arguments(*arguments), cwd=self._directory, env=self.environment)
        try:
            yield process
        finally:
            process.end()

    @property
    def claims(self) -> list[Path]:
        """The lock files that are left."""
        return list((self.dev / "shm").iterdir())


@pytest.fixture
def machine(fake_nvml: FakeNvml, nvml_library: Path, tmp_path: Path) -> WaitMachine:
    """A machine with four free GPUs."""
    return WaitMachine(tmp_path, fake_nvml, nvml_library)


def test_free_gpus_are_printed_at_once(machine: WaitMachine) -> None:
    """In the format of CUDA_VISIBLE_DEVICES; nothing is left behind."""
    machine.hold(0)

    assert Ended(0, "1,2\n", "") == machine.wait("--gpus", "2")
    assert [] == machine.claims


def test_json_has_the_gpus_and_who_holds_the_others(machine: WaitMachine) -> None:
    """A script can decide with it."""
    machine.hold(0)

    document = json.loads(machine.wait("--json").out)

    assert (["1"], False) == ([gpu["gpu"] for gpu in document["gpus"]], document["timed_out"])
    held = {gpu["gpu"]: gpu for gpu in document["others"]}["0"]
    assert "idle" == held["state"]
    assert Path(sys.executable).name in held["holders"][0]["program"]


def test_the_command_sees_only_its_gpus_and_its_code_is_passed_on(machine: WaitMachine) -> None:
    """As with harvest: indices in the order of the bus."""
    machine.hold(0, 2)

    assert Ended(7, "gpus=1,3 order=PCI_BUS_ID\n", "") == machine.wait("--gpus", "2", "--", *SHOW)


def test_it_says_who_holds_the_gpus_and_starts_the_command_when_they_are_free(machine: WaitMachine) -> None:
    """The line names the user, the program and since when."""
    machine.hold(0, 1, 2)
    with machine.waiting("--gpus", "2", "--", *SHOW) as waiting:
        line = waiting.said("waiting for 2 GPUs, 1 free now; GPUs 0-2: ")
        machine.free(1)
        waiting.said("gpus=1,3")

        assert 7 == waiting.popen.wait(60)
    assert " since " in line
    assert "held idle" in line
    assert [] == machine.claims


@pytest.mark.parametrize(
    ("hide", "environment", "arguments"),
    [
        (lambda fake: fake.add_mig(0, gpu_instance=7), {}, ()),
        (lambda fake: fake.lose(0), {}, ()),
        (lambda fake: fake.fail("nvmlDeviceGetComputeRunningProcesses_v3", gpu=0), {}, ()),
        (lambda _: None, {"CUDA_VISIBLE_DEVICES": "1,2,3"}, ()),
        (lambda fake: setattr(fake.gpu(0), "memory_used", fake.gpu(0).memory_total // 2), {}, ()),
    ],
    ids=["mig", "lost", "processes unknown", "not visible", "memory in use"],
)
def test_a_gpu_that_may_be_in_use_is_not_free(
    machine: WaitMachine,
    hide: Callable[[FakeNvml], None],
    environment: dict[str, str],
    arguments: tuple[str, ...],
) -> None:
    """Unknown is never free."""
    hide(machine.fake)

    assert Ended(0, "1,2,3\n", "") == machine.wait("--gpus", "3", *arguments, **environment)


def test_gpus_with_too_little_memory_do_not_count(machine: WaitMachine) -> None:
    """A request that no GPU can ever meet is refused."""
    machine.fake.gpu(0).memory_used = machine.fake.gpu(0).memory_reserved = GIB // 2
    total = machine.fake.gpu(0).memory_total

    assert "1\n" == machine.wait("--memory", f"{total - GIB // 4}").out
    refused = machine.wait("--memory", f"{total + 1}")
    assert (2, "gpulse: cannot wait for 1 GPU with this much memory: there is none") == (
        refused.code,
        refused.err.splitlines()[0],
    )
    assert f"the largest GPU has {total / 1e9:.1f} GB in total" in refused.err


def test_a_bad_lock_file_makes_only_its_gpu_unavailable(machine: WaitMachine) -> None:
    """Another user may have put a link there; the line says which file it is."""
    path = Path(claim_path(machine.fake.gpu(0).uuid.decode(), Roots(dev=str(machine.dev))))
    path.symlink_to("/etc/passwd")
    machine.hold(2, 3)

    assert Ended(7, "gpus=1 order=PCI_BUS_ID\n", "") == machine.wait("--", *SHOW)
    ended = machine.wait("--gpus", "2", "--timeout", "1")
    assert (124, True) == (ended.code, f"its lock file is not a regular file; remove {path}" in ended.err)


def test_the_timeout_has_an_exit_code_of_its_own(machine: WaitMachine) -> None:
    """The command is not started."""
    machine.hold(0, 1, 2, 3)

    ended = machine.wait("--timeout", "1", "--quiet", "--", *SHOW)

    assert (124, "", True) == (ended.code, ended.out, "timed out after" in ended.err)
    assert [] == machine.claims


def test_ctrl_c_leaves_nothing_behind(machine: WaitMachine) -> None:
    """On a terminal there is one line, which is erased."""
    machine.hold(0, 1, 2, 3)
    with terminal(*machine.arguments("--", *SHOW), env=machine.environment, columns=100) as shown:
        shown.until(b"waiting for 1 GPU, 0 free now; GPUs 0-3: ")
        shown.press_ctrl_c()
        seen = shown.to_the_end()

    assert 130 == shown.child.returncode
    assert b"\r\x1b[K" in seen
    assert b"Traceback" not in seen
    assert [] == machine.claims


def test_two_waiters_never_get_the_same_gpu(machine: WaitMachine) -> None:
    """Each command reports its GPUs and keeps them while it runs, though it has no context yet."""
    machine.hold(0, 1, 2, 3)
    lasting = ("sh", "-c", "echo gpus=$CUDA_VISIBLE_DEVICES; exec sleep 600")
    with ExitStack() as stack:
        waiters = [stack.enter_context(machine.waiting("--gpus", "2", "--", *lasting)) for _ in range(3)]
        for waiter in waiters:
            waiter.said("waiting for 2 GPUs")
        machine.free(0, 1, 2, 3)
        until(lambda: sum("gpus=" in waiter.text for waiter in waiters) == 2, "two commands")
        lines = [line for waiter in waiters for line in waiter.lines if line.startswith("gpus=")]
        late = next(waiter for waiter in waiters if "gpus=" not in waiter.text)

        assert ["gpus=0,1", "gpus=2,3"] == sorted(lines)
        assert late.popen.poll() is None


def test_a_harvest_gives_way_to_a_waiter(fake_nvml: FakeNvml, nvml_library: Path, tmp_path: Path) -> None:
    """Its program is stopped before the command starts, and is not started again while the command runs."""
    harvest = HarvestMachine(tmp_path, fake_nvml, nvml_library, gpus=1)
    harvest.configure(harvest.program("fold", 0), cooldown_seconds=600)
    fake_nvml.gpu(0).util_gpu = 0
    harvesting = HarvestProcess(harvest)
    try:
        folding = harvest.started("fold")
        fake_nvml.add_process(0, folding, GIB)
        with waiting_for(harvest, "sh", "-c", "echo started; exec sleep 600") as waiting:
            waiting.said("waiting until the harvest has given back 1 GPU")
            gone(folding)
            fake_nvml.remove_process(0, folding)
            waiting.said("started")

            assert "gpulse wait" in harvest.published()["gpus"][0]["why"]
            assert 1 == len(harvest.starts("fold"))
    finally:
        harvesting.end()


@contextmanager
def waiting_for(harvest: HarvestMachine, *argv: str) -> Iterator[Process]:
    """Wait for a GPU of a machine with a harvest."""
    options = ("--dev-dir", str(harvest.dev), "--for", "0")
    waiting = Process("wait", *options, "--", *argv, cwd=harvest.directory, env=harvest.environment)
    try:
        yield waiting
    finally:
        waiting.end()


def test_wrong_usage(machine: WaitMachine) -> None:
    """Options that would have no effect are refused."""
    for arguments in (
        ("--gpus", "5"),
        ("--node", "n1"),
        ("--spread",),
        ("--tls",),
        ("--json", "--", "true"),
    ):
        assert 2 == machine.wait(*arguments).code, arguments
    asked = machine.wait("--node", "n1", GPULSE_HEAD="127.0.0.1:1")
    assert "127.0.0.1:1" in asked.err


def test_a_command_that_does_not_exist(machine: WaitMachine) -> None:
    """As a shell says it."""
    assert 127 == machine.wait("--", "no-such-command-here").code


def test_sigterm_is_forwarded_to_the_command(machine: WaitMachine) -> None:
    """The command decides what to do with it."""
    script = "trap 'echo asked; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    with machine.waiting("--", "sh", "-c", script) as waiting:
        waiting.said("ready")
        waiting.popen.terminate()
        waiting.said("asked")

        assert 5 == waiting.popen.wait(60)
