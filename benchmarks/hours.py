"""A whole cluster for two real hours: memory and open files of head, sealing, sender, agent and page."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from playwright.sync_api import Page
from tests.integration.browser import Tab, browsing, tab

from benchmarks import measure
from benchmarks.fake_machine import fake_machine
from benchmarks.measure import Report, Table, Target, child
from benchmarks.processes import Head, Process, memory, workplace

NAME = "hours"
_GPUS = 8
_SIMULATED_AGENTS = 16
_LOOK_SECONDS = 10.0
_ROWS = 12
"""Lines of the table, each the median of an equal part of the time."""
_WARM_ROWS = 3
"""Parts in which caches fill, the first files are sealed and the page has fetched its charts."""
_MAX_GROWTH_MB = 10.0
_MIB = 1 << 20


class _Use(NamedTuple):
    """What one process uses at a moment; a page has a heap instead of resident memory."""

    megabytes: float
    files: int | None


class _Cluster:
    """A head with its helper processes, an agent with a diagnosis, simulated agents, and an open page."""

    def __init__(self, stack: ExitStack, seconds: float) -> None:
        folder = stack.enter_context(workplace())
        sink = stack.enter_context(child("remote_sink", [], measure.child_environment()))
        remote = f"http://127.0.0.1:{sink.hear()['port']}/api/v1/write"
        self._head = stack.enter_context(
            Head(folder, "--freq", "1000", "--seal-after", "5m", "--remote-write", remote)
        )
        where = json.loads((self._head.data / "head.json").read_text())
        machine = stack.enter_context(fake_machine(_GPUS, 1))
        command = [sys.executable, "-m", "gpulse", "agent", self._head.address, "--node-name", "real"]
        self._agent = stack.enter_context(
            Process([*command, "--state-dir", f"{folder}/agent"], folder, environment=machine.environment)
        )
        command = [sys.executable, "-m", "benchmarks.fleet", self._head.address, "--jobs"]
        command += ["--agents", str(_SIMULATED_AGENTS), "--gpus", str(_GPUS), "--seconds", str(seconds)]
        command += ["--token-file", where["token_file"]]
        self._fleet = stack.enter_context(Process(command, folder))
        self._fleet.lines(1, 120.0)
        self._sender = self._head.until(lambda: _find_child(self._head.pid, b"tsdb.send_process"))
        browser = stack.enter_context(browsing())
        self._tab: Tab = stack.enter_context(tab(browser, int(where["http"].rpartition(":")[2])))
        self._tab.go()
        self._tab.settled()
        self._page: Page = self._tab.page
        self._debugger = self._page.context.new_cdp_session(self._page)

    def wait(self, seconds: float) -> None:
        """Let time pass; the browser's events are only handled while its page waits."""
        self._page.wait_for_timeout(1000 * seconds)

    def check(self) -> None:
        """See that everything still runs and that the page keeps its connection.

        Raises:
            RuntimeError: A process ended, or the page wrote to its console.
        """
        for process in (self._head, self._agent, self._fleet):
            process.check()
        if self._tab.complaints:
            raise RuntimeError("; ".join(self._tab.complaints))

    def uses(self) -> dict[str, _Use]:
        """Return what each part uses now; the sealing process is only there once it has work."""
        pids = {
            "head": self._head.pid,
            "sealing process": self._head.sealer,
            "sender": self._sender,
            "agent": self._agent.pid,
        }
        found = {name: _Use(memory(pid), _files(pid)) for name, pid in pids.items() if pid is not None}
        self._debugger.send("HeapProfiler.collectGarbage")
        heap = self._debugger.send("Runtime.getHeapUsage")["usedSize"] / _MIB
        return {**found, "page (heap)": _Use(heap, None)}


def _find_child(pid: int, module: bytes) -> int | None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            for found in (task / "children").read_text().split():
                if module in Path(f"/proc/{found}/cmdline").read_bytes():
                    return int(found)
    return None


def _files(pid: int) -> int | None:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return None


def _watch(cluster: _Cluster, seconds: float, said: Callable[[str], None]) -> list[dict[str, _Use]]:
    """Look at the cluster again and again; return the medians of equal parts of the time."""
    rows = []
    begun = time.monotonic()
    for number in range(1, _ROWS + 1):
        looks: dict[str, list[_Use]] = {}
        while True:
            cluster.wait(_LOOK_SECONDS)
            cluster.check()
            for name, use in cluster.uses().items():
                looks.setdefault(name, []).append(use)
            if time.monotonic() >= begun + number * seconds / _ROWS:
                break
        rows.append({name: _median(uses) for name, uses in looks.items()})
        said(
            f"{number} of {_ROWS}: "
            + ", ".join(f"{name} {use.megabytes:.1f} MB" for name, use in rows[-1].items())
        )
    return rows


def _median(uses: list[_Use]) -> _Use:
    files = [use.files for use in uses if use.files is not None]
    return _Use(median(use.megabytes for use in uses), round(median(files)) if files else None)


def run(*, quick: bool, minutes: float = 120.0) -> Report:
    """Let the cluster run, and compare its end with its beginning."""
    report = Report(NAME, "Two real hours of a cluster")
    seconds = 240.0 if quick else 60.0 * minutes
    with ExitStack() as stack:
        cluster = _Cluster(stack, seconds + 600.0)
        rows = _watch(cluster, seconds, lambda text: print(text, file=sys.stderr, flush=True))
    warm, last = rows[_WARM_ROWS], rows[-1]
    for name, use in last.items():
        before = warm.get(name)
        growth = None if before is None else use.megabytes - before.megabytes
        report.targets.append(
            Target(
                f"{name}: memory",
                "started later" if growth is None else f"{growth:+.1f} MB",
                f"less than {_MAX_GROWTH_MB:g} MB",
                None if growth is None else growth < _MAX_GROWTH_MB,
            )
        )
        if before is not None and use.files is not None and before.files is not None:
            more = use.files - before.files
            report.targets.append(Target(f"{name}: open files", f"{more:+d}", "0", more <= 0))
    names = list(last)
    table = Table(
        f"{_SIMULATED_AGENTS + 1} nodes with {_GPUS} GPUs at 1 Hz, remote write and one open page, {seconds / 60:.0f} "
        f"minutes. Medians; growth is counted from line {_WARM_ROWS + 1} on:",
        (
            "minutes",
            *(f"{name}, MB" for name in names),
            *(f"{name}, files" for name in names if last[name].files),
        ),
    )
    table.rows += [
        (
            f"{(number + 1) * seconds / _ROWS / 60:.0f}",
            *(f"{row[name].megabytes:.1f}" if name in row else "-" for name in names),
            *(str(row[name].files) if name in row else "-" for name in names if last[name].files),
        )
        for number, row in enumerate(rows)
    ]
    report.tables.append(table)
    return report


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"minutes": 120.0}).parse_args()
    measure.publish(run(quick=given.quick, minutes=given.minutes), write=given.write)
