"""Makes the shared fixtures known to every test, and fails a test that leaves something running or open."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import prerequisites

pytest_plugins = ["tests.fakes.nvml.fixtures"]

EXAMPLES = int(os.environ.get("GPULSE_EXAMPLES", "40"))
"""Examples of a property test that does not say how many it needs; each run tries others."""
_GRACE_SECONDS = 30.0
"""For threads that were told to end and processes that were killed, also on a busy machine."""
_COLLECT_AFTER_SECONDS = 0.03
"""Most of them end by themselves within this time; collecting garbage among thousands of tests takes longer."""
_FOREIGN = ("/etc/", "/lib", "/usr/", "/var/cache/", "/var/lib/")
"""Where the system and its libraries have files that they keep open, such as libuuid its clock in /var/lib."""
_OWN = (str(Path(__file__).parents[1]), tempfile.gettempdir())
"""Where the tests have theirs, wherever that is."""


def pytest_configure() -> None:
    """Give the programs that tests start the same signals and bytecode, whoever started the tests.

    A shell without job control starts background jobs with SIGINT and SIGQUIT ignored, and `nohup` ignores SIGHUP; a
    program inherits that from its parent.
    """
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A busy machine makes every example slow, which says nothing about the code.
    settings.register_profile(
        "gpulse", max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("gpulse")
    # Tests start hundreds of interpreters; without bytecode on disk each of them compiles all that it imports.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_collectstart() -> None:
    """What is imported and collected stays: to look at it again and again takes a fifth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Thousands of tests and all that they import stay: whoever collects garbage need not look at them each time."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """In the end everything goes."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a program which this machine does not have."""
    for mark in item.iter_markers("requires"):
        prerequisites.require(*mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that is skipped where CI is set: nothing may go untested there but real GPUs."""
    report: pytest.TestReport = yield
    is_allowed = item.get_closest_marker("gpu") is not None or hasattr(report, "wasxfail")
    if os.environ.get("CI") and report.skipped and not is_allowed:
        report.outcome = "failed"
        report.longrepr = f"skipped, and with CI set nothing may be: {_reason(report)}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end what was not tested, and what to install for it."""
    lines = prerequisites.summary(_reason(report) for report in terminalreporter.stats.get("skipped", ()))
    if lines:
        terminalreporter.section("not tested here")
        for line in lines:
            terminalreporter.line(line)


def _reason(report: pytest.TestReport) -> str:
    """Return why a test was skipped."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run in a container, whose processes hold no GPU: the fake driver's numbers are meant as they are."""
    here = {os.readlink("/proc/self/ns/pid"), "pid:[4026531836]"}
    monkeypatch.setattr("gpulse.sources.processes._HOST_PID_NAMESPACES", here)


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads, child processes, open files or a changed logging behind."""
    before = _held()
    yield
    if request.node.get_closest_marker("gpu") is not None:
        return  # a real driver's library keeps event files open for as long as it is loaded
    left = _held() - before
    deadline = time.monotonic() + _GRACE_SECONDS
    pause_seconds = 0.001
    while left and time.monotonic() < deadline:
        time.sleep(pause_seconds)
        if pause_seconds >= _COLLECT_AFTER_SECONDS:
            gc.collect()
        pause_seconds = min(2 * pause_seconds, 4 * _COLLECT_AFTER_SECONDS)
        left = _held() - before
    assert set() == left


def _held() -> set[str]:
    return {*_threads(), *_children(), *_files(), *_logging()}


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if thread.is_alive():
            yield f"thread {thread.name} ({thread.ident})"


def _logging() -> Iterator[str]:
    """Yield the level and the handlers of the root logger, which decide what later tests read in `caplog`."""
    root = logging.getLogger()
    yield f"logging at {logging.getLevelName(root.level)}"
    for handler in root.handlers:
        if not type(handler).__module__.startswith("_pytest."):
            yield f"logging to {handler!r} ({id(handler)})"


def _children() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            yield from (f"process {pid}" for pid in file.read().split())


def _files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if not target.startswith("/proc/") and _is_ours(target):  # the listing's own
                yield f"file {descriptor}: {target}"


def _is_ours(target: str) -> bool:
    """Whether a test can have left this open: a socket, a pipe, a device or a file that is not the system's."""
    return target.startswith(_OWN) or not target.startswith(_FOREIGN)
