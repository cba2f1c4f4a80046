"""Stacks under Yama's scope 1, on a kernel that has Yama: one in user space, over this machine's files, read-only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.commands import BIN
from tests.prerequisites import find, require

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
_INIT = """#!/bin/sh
mount -t proc proc /proc
echo 1 > /proc/sys/kernel/yama/ptrace_scope
setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=+dac_read_search --ambient-caps=+dac_read_search -- \\
    {python} -B {script}
echo o > /proc/sysrq-trigger
sleep 60
"""
_SCRIPT = """
import os, subprocess, sys, time
sys.path.insert(0, {source!r})
from gpulse.cli.why_sources import permit_reading
from gpulse.sources.python_stacks import StackReader
reader = StackReader({py_spy!r}, deadline_seconds=60.0)
program = "import os, time; print(os.fork(), flush=True); time.sleep(600)"
for name, before in (("plain", None), ("permitted", permit_reading())):
    child = subprocess.Popen(
        ["sh", "-c", 'exec "$0" -c "$1"', sys.executable, program],
        stdout=subprocess.PIPE, text=True, preexec_fn=before,
    )
    forked = int(child.stdout.readline())
    for who, pid in (("child", child.pid), ("forked", forked)):
        problem = reader.read(pid, time.time).problem
        print("RESULT", name, who, "stacks" if problem is None else problem.sentence, flush=True)
    os.kill(forked, 9)
    child.kill()
"""


def test_a_command_can_be_read_where_only_ancestors_may(tmp_path: Path) -> None:
    """The command itself permits it, before it starts; its own children do not, and other programs neither."""
    require("User-mode Linux", "util-linux")
    script, init = tmp_path / "script.py", tmp_path / "init"
    script.write_text(_SCRIPT.format(source=str(ROOT / "src"), py_spy=str(BIN / "py-spy")))
    init.write_text(_INIT.format(python=sys.executable, script=script))
    init.chmod(0o755)
    machine = subprocess.Popen(
        [
            find("linux.uml") or "linux.uml",
            *("mem=512M", "rootfstype=hostfs", "root=/dev/root", "ro", f"init={init}"),
            *("con=null", "con0=null,fd:1", "quiet"),
        ],
        env={**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = machine.communicate(timeout=240)[0].decode(errors="replace")
    finally:
        if machine.poll() is None:
            os.killpg(machine.pid, signal.SIGKILL)
            machine.wait()
    found = [line.split(maxsplit=3) for line in output.splitlines() if line.startswith("RESULT")]
    results = {f"{name} {who}": text.strip() for _, name, who, text in found}

    assert "stacks" == results.get("permitted child"), output
    assert {"plain child", "plain forked", "permitted forked"} == {
        who for who, text in results.items() if "kernel.yama.ptrace_scope is 1" in text
    }
