"""The systemd units of agent and head: systemd understands them, gpulse understands what they start, and it sees what it needs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.commands import BIN, run

UNITS = Path(__file__).parents[2] / "contrib" / "systemd"
NAMES = ["gpulse-agent.service", "gpulse-head.service"]
OTHERS = """
import os, sys, time
from gpulse.sources import processes
from gpulse.sources.processes import holds_gpu
from gpulse.sources.processes import ProcessReader
from gpulse.sources.procfs import Roots
processes._HOST_PID_NAMESPACES = {os.readlink("/proc/self/ns/pid")}  # the tests may run in a container
reading = ProcessReader().read(time.time(), [int(sys.argv[1])])[0][0]
print(reading.identity.owner.job, "read_bytes_total" in reading.values, holds_gpu(Roots(), f"/proc/{sys.argv[1]}"))
"""


def settings(unit: str) -> dict[str, str]:
    """What a unit sets, of what is set several times the first."""
    lines = (UNITS / unit).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("=", 1) for line in lines if "=" in line and not line.startswith("#")]
    return {name: value for name, value in reversed(pairs)}  # noqa: C416  the first wins


@pytest.mark.requires("systemd-analyze")
@pytest.mark.parametrize("unit", NAMES)
def test_systemd_has_nothing_to_say_of_them(tmp_path: Path, unit: str) -> None:
    """Every setting is known and has a value that it can have."""

    text = (UNITS / unit).read_text(encoding="utf-8")
    installed = tmp_path / unit
    installed.write_text(text.replace("/usr/local/bin/gpulse", str(BIN / "gpulse")), encoding="utf-8")

    done = subprocess.run(
        ["systemd-analyze", "verify", str(installed)], capture_output=True, text=True, check=False
    )

    assert (0, "") == (done.returncode, done.stderr)


@pytest.mark.parametrize("unit", NAMES)
def test_what_they_start_is_understood(tmp_path: Path, unit: str) -> None:
    """Every option on the command line is one that gpulse has."""

    meant = {
        "${STATE_DIRECTORY}": str(tmp_path),
        "${HEAD}": "head:8090",
        "${HOST}": "0.0.0.0",
        "$OPTIONS": "--help",
    }
    words = settings(unit)["ExecStart"]
    for written, word in meant.items():
        words = words.replace(written, word)
    _, *arguments = shlex.split(words)
    wrong = [word if word != "--help" else "--no-such-option" for word in arguments]

    assert (0, 2) == (run(*arguments).code, run(*wrong).code)


def _seen_with(rights: list[str], pid: int) -> list[str]:
    """What a process of root's with these capabilities sees of another one."""
    limits = ("setpriv", "--no-new-privs", f"--bounding-set={','.join(['-all', *rights])}", "--")
    command = [*limits, sys.executable, "-c", OTHERS, str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give up capabilities")
def test_an_agent_with_the_units_capabilities_sees_other_users_processes() -> None:
    """Their environment, their counters and what they have open; without the capabilities it would not."""

    child = subprocess.Popen(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--", "sleep", "600"],
        env={**os.environ, "SLURM_JOB_ID": "7"},
    )
    try:
        while Path(f"/proc/{child.pid}/comm").read_text(encoding="ascii") != "sleep\n":
            pass
        granted = (
            settings("gpulse-agent.service")["CapabilityBoundingSet"].lower().replace("cap_", "+").split()
        )
        seen = [_seen_with(rights, child.pid) for rights in (granted, [])]
    finally:
        child.kill()
        child.wait()

    assert [["slurm:7", "True", "False"], ["None", "False", "None"]] == seen
