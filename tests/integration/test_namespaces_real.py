"""Processes on GPUs as a container with real PID namespaces sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pytest

from tests.fakes.nvml import FakeNvml

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, for a PID namespace")

INSIDE = """
import json, subprocess, sys, time
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.procfs import Roots
dev = sys.argv[1]
hold = "import sys, time; held = open(sys.argv[1]); print('ready', flush=True); time.sleep(600)"
holder = subprocess.Popen([sys.executable, "-c", hold, f"{dev}/nvidia0"], stdout=subprocess.PIPE)
holder.stdout.readline()
print(holder.pid, flush=True)
for _ in sys.stdin:
    local = LocalMachine(interval_seconds=0.25, watch_xids=False, roots=Roots(dev=dev))
    frame = local.sample(time.time(), patient=True)
    local.close()
    listed = [one.pid for one in frame.gpus[0].processes]
    shown = [[p.pid, p.identity.name, bool(p.values), p.identity.owner.user, p.pid in listed] for p in frame.processes]
    hidden = [entry.subject for entry in frame.health if entry.source == "processes"]
    print(json.dumps([shown, hidden]), flush=True)
holder.kill()
holder.wait()
"""


class Container:
    """A look from within a PID namespace of its own."""

    def __init__(self, dev: Path, env: dict[str, str], *options: str) -> None:
        dev.mkdir()
        (dev / "nvidia0").touch()
        self._process = subprocess.Popen(
            ["unshare", "--pid", "--fork", *options, sys.executable, "-c", INSIDE, str(dev)],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.holder = int(self._line())
        """Its process on the GPU, by its own number."""

    @property
    def outside(self) -> tuple[int, int]:
        """The one that looks, and the one on the GPU, by the host's numbers."""
        _, looker, holder = _descendants(self._process.pid)
        return looker, holder

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def look(self) -> tuple[list[list[Any]], list[str]]:
        """The processes it shows, and what it says it does not see."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        shown, hidden = json.loads(self._line())
        return shown, hidden

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


def _descendants(pid: int) -> list[int]:
    """The only child, its only child and so on."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [pid, *_descendants(int(children[0]))] if children else [pid]


def test_a_host_number_is_not_mixed_up_with_the_process_that_has_it_here(
    fake_nvml: FakeNvml, nvml_library: Path, tmp_path: Path
) -> None:
    """The driver lists one of ours and one of another container, whose number is that of ours in here."""

    with Container(tmp_path / "dev", fake_nvml.env(nvml_library), "--mount-proc") as inside:
        _, outside = inside.outside
        fake_nvml.add_process(0, inside.holder, 1 << 30)
        fake_nvml.add_process(0, outside, 2 << 30)
        shown, hidden = inside.look()

    assert inside.holder != outside
    assert sorted([[inside.holder, None, False, None, True], [outside, None, False, None, True]]) == sorted(
        shown
    )
    assert {f"pid {inside.holder}", f"pid {outside}"} == set(hidden)


def test_numbers_of_the_container_itself_are_believed(
    fake_nvml: FakeNvml, nvml_library: Path, tmp_path: Path
) -> None:
    """As a newer driver gives them."""

    with Container(tmp_path / "dev", fake_nvml.env(nvml_library), "--mount-proc") as inside:
        fake_nvml.add_process(0, inside.holder, 1 << 30)
        shown, hidden = inside.look()

    assert [[inside.holder, True, "root"]] == [[pid, values, user] for pid, _, values, user, _ in shown]
    assert [] == hidden


@pytest.mark.parametrize("is_translated", [True, False])
def test_a_container_that_sees_the_hosts_processes_knows_them(
    fake_nvml: FakeNvml, nvml_library: Path, tmp_path: Path, is_translated: bool
) -> None:
    """With the host's /proc every number can be found, whether the driver gives the container's or the host's."""

    with Container(tmp_path / "dev", fake_nvml.env(nvml_library)) as inside:
        _, outside = inside.outside
        fake_nvml.add_process(0, inside.holder if is_translated else outside, 1 << 30)
        shown, hidden = inside.look()

    assert inside.holder != outside
    assert [[outside, True, "root", True]] == [
        [pid, values, user, is_listed] for pid, _, values, user, is_listed in shown
    ]
    assert [] == hidden
