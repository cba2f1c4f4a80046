"""Checks of the soak on made-up observations: each passes on good ones and fails on bad ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from gpulse.cluster.protocol.answers import MissingFrames, SessionInterruption
from gpulse.terminal.cluster_status import describe_interruption
from tests.soak import checks
from tests.soak.observations import (
    DATABASE,
    HEAD,
    Claim,
    Contact,
    FindingSeen,
    FindingsPoll,
    Life,
    LogLine,
    Outage,
    PageEvent,
    Run,
    Scrape,
    SessionFile,
    Stored,
    Tolerance,
    Usage,
)

START = 1_800_000_000.0
RESTART = Outage(HEAD, "restart head", START + 100, START + 105)
FAULT = ("gpu-7", "0", "gpu_fault")
RUN = b"r" * 16
STRICT = Tolerance(warmup_seconds=10.0, memory_bytes=1000, memory_bytes_per_minute=10.0, files=2)


def event(seconds: float, kind: str, text: str = "") -> PageEvent:
    """An event of the staying tab."""
    return PageEvent(START + seconds, "staying", kind, text)


GOOD_PAGE = (
    event(0, "load"),
    event(0.5, "status", "connecting"),
    event(1, "status", "live"),
    event(100.1, "close", "ws"),
    event(100.2, "status", "disconnected: trying again"),
    event(101, "console", "error: WebSocket connection to 'ws' failed: net::ERR_CONNECTION_REFUSED"),
    event(101, "request failed", "http://head/ net::ERR_CONNECTION_REFUSED"),
    event(104, "http error", "503: http://head/"),
    event(106, "status", "live"),
)


def test_page_of_a_restarted_head() -> None:
    """A page that loses its connection while the head is restarted and gets it back is as it should be."""

    assert [] == checks.pages(GOOD_PAGE, [RESTART])


@pytest.mark.parametrize(
    "bad",
    [
        event(50, "close", "ws"),
        event(50, "status", "disconnected: trying again"),
        event(5, "status", "disconnected: right after the page was loaded"),
        event(50, "console", "error: WebSocket connection to 'ws' failed"),
        event(101, "console", "error: TypeError: x is undefined"),
        event(101, "page error", "x is undefined"),
        event(50, "request failed", "http://head/ net::ERR_EMPTY_RESPONSE"),
        event(50, "http error", "503: http://head/"),
        event(101, "http error", "500: http://head/"),
        event(50, "not filled", "who"),
    ],
    ids=lambda bad: f"{bad.kind} {bad.text}",
)
def test_page_without_cause(bad: PageEvent) -> None:
    """Whatever goes wrong in a page without a head restart, or is no consequence of one, is a violation."""

    assert 1 == len(checks.pages(sorted([*GOOD_PAGE, bad]), [RESTART]))


def test_page_that_stays_lost() -> None:
    """A page whose last status is not live is a violation, although the head was restarted."""

    assert 1 == len(checks.pages(GOOD_PAGE[:-1], [RESTART]))


def test_page_closed_long_after_a_restart() -> None:
    """A restart excuses a lost connection for a short time only."""

    late = event(105 + checks.GRACE_SECONDS + 1, "close", "ws")
    assert 1 == len(checks.pages([*GOOD_PAGE, late], [RESTART]))


def test_restart_of_another_part_excuses_no_page() -> None:
    """A page has no reason to lose the head because the database was killed."""

    database = Outage(DATABASE, "kill database", START + 49, START + 51)
    assert 1 == len(checks.pages(sorted([*GOOD_PAGE, event(50, "close", "ws")]), [RESTART, database]))


def test_stream() -> None:
    """Live messages may pause for a head restart, but neither without one nor at the end."""

    every_second = [START + second for second in range(200)]
    paused = [moment for moment in every_second if not 100 <= moment - START <= 135]
    restart = RESTART._replace(ready=START + 130)
    assert [] == checks.streams(paused, [restart], START + 200)
    assert 1 == len(checks.streams(paused, [], START + 200))
    assert 1 == len(checks.streams(every_second, [], START + 300))
    assert 1 == len(checks.streams([], [], START + 200))


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (LogLine(HEAD, START, "I", "gpu-1 is connected"), 0),
        (LogLine(HEAD, START, "W", "gpu-1 is lost"), 0),
        (LogLine(HEAD, START, "E", "sending failed"), 1),
        (LogLine(HEAD, START, "C", "out of memory"), 1),
        (LogLine(HEAD, None, "", "Traceback (most recent call last):"), 1),
        (LogLine("gpu-1", START + 100, "W", "lost the connection to 127.0.0.1"), 0),
        (LogLine("gpu-1", START + 50, "W", "lost the connection to 127.0.0.1"), 1),
    ],
)
def test_logs(line: LogLine, count: int) -> None:
    """Errors, tracebacks and connections that were lost without a head restart are violations."""

    assert count == len(checks.logs([line], [RESTART]))


def test_traceback() -> None:
    """A traceback is told by its exception."""

    lines = [
        LogLine(HEAD, None, "", " Traceback (most recent call last):"),
        LogLine(HEAD, None, "", "   File x"),
        LogLine(HEAD, None, "", " OSError: [Errno 9] Bad file descriptor"),
        LogLine(HEAD, START, "I", "gpu-1 is connected"),
    ]
    assert ["log of head: a traceback: OSError: [Errno 9] Bad file descriptor"] == checks.logs(lines, [])


def usages(memory: Sequence[int], files: Sequence[int]) -> list[Usage]:
    """A process that is looked at every ten seconds."""
    return [
        Usage(START + 10 * n, HEAD, 1, own, opened)
        for n, (own, opened) in enumerate(zip(memory, files, strict=True))
    ]


def test_growth() -> None:
    """Memory or open files that keep growing after the warm-up are a violation; a warm-up and a wobble are not."""

    flat, steady = [500, *[5000, 5200] * 10], [3, *[17, 18] * 10]
    assert [] == checks.growth(usages(flat, steady), STRICT)
    assert 1 == len(checks.growth(usages([5000 + 200 * n for n in range(21)], steady), STRICT))
    assert 1 == len(checks.growth(usages(flat, [17 + n for n in range(21)]), STRICT))
    assert [] == checks.growth(usages([0, 10_000, 20_000], [1, 10, 20]), STRICT), "too short to judge"


def life(*, killed: bool = False, counted: int | None = 10, spooled: frozenset[int] = frozenset()) -> Life:
    """A start of the agent of gpu-1."""
    return Life("gpu-1", 7, START, START + 5, killed, counted, {RUN: spooled})


def stored(numbers: Sequence[int], *, duplicates: int = 0, pid: int = 7) -> Stored:
    """The frames of that start, half a second apart."""
    return Stored([Run(RUN, "gpu-1", pid, {n: START + n / 2 for n in numbers})], duplicates, {})


@pytest.mark.parametrize(
    ("found", "lived"),
    [
        (stored(range(1, 11)), life()),
        (stored(range(1, 13)), life()),
        (stored(range(1, 8)), life(killed=True)),
        (stored(range(1, 11)), life(killed=True, spooled=frozenset({9, 10}))),
    ],
    ids=["all", "more than counted", "killed", "killed with a spool"],
)
def test_frames(found: Stored, lived: Life) -> None:
    """Every frame once, but for those of the last second before a kill, is as it should be."""

    assert [] == checks.frames(found, [lived], 0.5)


@pytest.mark.parametrize(
    ("found", "lived"),
    [
        (stored([1, 2, 4, 5, 6, 7, 8, 9, 10]), life()),
        (stored(range(2, 11)), life()),
        (stored(range(1, 10)), life()),
        (stored(range(1, 7)), life(killed=True)),
        (stored(range(1, 9)), life(killed=True, spooled=frozenset({9}))),
        (stored(range(1, 11), duplicates=1), life()),
        (Stored([], 0, {}), life()),
    ],
    ids=["hole", "first", "last", "killed and lost too much", "spooled and lost", "twice", "nothing"],
)
def test_frames_lost_or_doubled(found: Stored, lived: Life) -> None:
    """A frame that is missing or there twice is a violation."""

    assert 1 == len(checks.frames(found, [lived], 0.5))


def test_frames_of_nobody() -> None:
    """Frames of a process that the soak did not start are a violation."""

    assert 2 == len(checks.frames(stored(range(1, 11), pid=8), [life()], 0.5))


def test_frames_out_of_order() -> None:
    """A frame whose time is not after the one before it, or much later, is a violation."""

    backwards = Stored([Run(RUN, "gpu-1", 7, {1: START, 2: START - 1})], 0, {})
    silent = Stored([Run(RUN, "gpu-1", 7, {1: START, 2: START + 60})], 0, {})
    assert 1 == len(checks.frames(backwards, [life(counted=2)], 0.5))
    assert 1 == len(checks.frames(silent, [life(counted=2)], 0.5))


@pytest.mark.parametrize(
    ("other", "count"),
    [
        ({("gpu-1", "a"): [START + 0.0004, START + 0.5, START + 1]}, 0),
        ({("gpu-1", "a"): [START, START + 1]}, 1),
        ({("gpu-1", "a"): [START, START + 0.5, START + 1, START + 1.5]}, 1),
        ({("gpu-1", "a"): [START, START + 0.5, START + 0.5, START + 1]}, 1),
        ({}, 1),
        ({("gpu-1", "a"): [START, START + 0.5, START + 1], ("gpu-2", "b"): [START]}, 1),
    ],
    ids=["same", "missing", "extra", "twice", "no series", "another series"],
)
def test_same_times(other: Mapping[tuple[str, str], Sequence[float]], count: int) -> None:
    """Another place must have exactly the stored samples, to the millisecond."""

    ours = {("gpu-1", "a"): [START, START + 0.5, START + 1]}
    assert count == len(checks.same_times(ours, other, "database"))


def session(present: Sequence[bool] = (True,) * 10) -> SessionFile:
    """A session of ten steps in which gpu-1 has a sample in the middle of each."""
    return SessionFile(
        "whole",
        START,
        START + 5,
        0.5,
        list(range(1, 11)),
        [START + n / 2 for n in range(10)],
        {"gpu-1": present},
        {"gpu-1": sum(present)},
        [("gpu-7", "gpu_fault", "0", START, 1)],
        {("gpu-7", "0", "gpu_fault"): START},
    )


SAMPLES = Stored([], 0, {("gpu-1", "a"): [START + 0.25 + n / 2 for n in range(10)]})


@pytest.mark.parametrize(
    ("file", "count"),
    [
        (session(), 0),
        (session([True] * 9 + [False]), 0),
        (session([True] * 7 + [False] * 3), 1),
        (session([True, False] * 5), 1),
        (session()._replace(frame_ids=[1, 2, 3, 4, 4, 5, 6, 7, 8, 9]), 1),
        (session()._replace(times=[START + n for n in range(10)]), 1),
        (session()._replace(end=START + 10), 1),
        (session()._replace(frame_counts={"gpu-1": 9}), 1),
    ],
    ids=[
        "whole",
        "moved",
        "missing",
        "too many moved",
        "id twice",
        "wrong steps",
        "too few steps",
        "wrong count",
    ],
)
def test_session_file(file: SessionFile, count: int) -> None:
    """A session's file has every step once, and every node in the steps of its samples."""

    assert count == len(checks.session_file(file, SAMPLES))


def test_session_file_that_invents() -> None:
    """A file with more frames of a node than it has samples is a violation."""

    few = Stored([], 0, {("gpu-1", "a"): [START + 0.25]})
    assert 1 == len(checks.session_file(session(), few))


@pytest.mark.parametrize(
    ("missing", "present", "count"),
    [
        ([], [True] * 10, 0),
        ([MissingFrames(node="gpu-1", seconds=16.0)], [True] * 10, 1),
        ([MissingFrames(node="gpu-1", seconds=90.0)], [True] * 10, 1),
        ([MissingFrames(node="gpu-1", seconds=4.0)], [True] * 3 + [False] * 4 + [True] * 3, 0),
        ([MissingFrames(node=node, seconds=4.0) for node in ("gpu-1", "gpu-2")], [False] * 10, 1),
    ],
    ids=["none", "seconds", "minutes", "true", "another node"],
)
def test_stated_gaps(missing: Sequence[MissingFrames], present: Sequence[bool], count: int) -> None:
    """Frames of a node may be said to be missing only where the session's file lacks them."""

    part = SessionInterruption(start_time="", end_time="", missing=missing, pending=())
    words = f"whole resumed after an interruption of 16s: {describe_interruption(part)}"
    assert count == len(checks.stated_gaps([(START, words)], session(present)))


def poll(seconds: float, *found: tuple[str, str | None, str, float]) -> FindingsPoll:
    """An answer of the head: node, label, id and start of each finding."""
    moment = START + seconds
    return FindingsPoll(moment, tuple(FindingSeen(moment, *one) for one in found))


HAS_FAULT = (*FAULT, START)


@pytest.mark.parametrize(
    ("polls", "count"),
    [
        ([poll(0, HAS_FAULT), poll(50, HAS_FAULT)], 0),
        ([poll(0, HAS_FAULT), poll(102), poll(150, HAS_FAULT)], 0),
        ([poll(0, HAS_FAULT), poll(50), poll(60, HAS_FAULT)], 1),
        ([poll(0, HAS_FAULT), poll(50, (*FAULT, START + 30))], 1),
        ([poll(0, HAS_FAULT, HAS_FAULT)], 1),
        ([poll(0, HAS_FAULT, ("gpu-1", "0", "gpu_idle_allocated", START))], 1),
        ([poll(102)], 1),
        ([poll(0, HAS_FAULT, ("gpu-1", None, "node_lost", START))], 1),
        ([poll(210, HAS_FAULT, ("gpu-1", None, "node_lost", START))], 0),
    ],
    ids=[
        "constant",
        "head down",
        "absent",
        "another start",
        "twice",
        "healthy node",
        "never",
        "lost",
        "lost and down",
    ],
)
def test_findings(polls: Sequence[FindingsPoll], count: int) -> None:
    """A constant fault is one finding with one start, and healthy nodes have none."""

    outage = Outage("gpu-1", "agent outage", START + 200, START + 220)
    assert count == len(checks.findings(polls, [RESTART, outage], faulty=FAULT, healthy=["gpu-1"]))


@pytest.mark.parametrize(
    ("spans", "count"),
    [
        ([(START, None)], 0),
        ([], 1),
        ([(START, START + 5), (START + 6, None)], 1),
        ([(START, START + 5)], 1),
        ([(START + 30, None)], 1),
    ],
    ids=["one", "none", "two", "ended", "another start"],
)
def test_finding_spans(spans: Sequence[tuple[float, float | None]], count: int) -> None:
    """The history has the constant fault once, from its start until now."""

    assert count == len(checks.finding_spans(spans, START))


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ([("gpu-7", "gpu_fault", "0", START, 1)], 0),
        ([("gpu-7", "gpu_fault", "0", START, 3)], 1),
        ([], 1),
        ([("gpu-7", "gpu_fault", "0", START, 1), ("gpu-1", "gpu_fault", "0", START, 1)], 1),
        ([("gpu-7", "gpu_fault", "0", START, 1), ("gpu-1", "node_lost", None, START, 1)], 0),
        ([("gpu-7", "gpu_fault", "0", START, 1), ("gpu-2", "node_lost", None, START, 1)], 1),
    ],
)
def test_session_findings(listed: Sequence[tuple[str, str, str | None, float, int]], count: int) -> None:
    """A session's file has the constant fault once, and nothing of healthy nodes."""

    file = session()._replace(findings=listed)
    outage = Outage("gpu-1", "agent outage", START + 200, START + 220)
    healthy = ["gpu-1", "gpu-2"]
    assert count == len(checks.session_findings(file, [outage], faulty=FAULT, healthy=healthy))


def contact(seconds: float, *nodes: str) -> Contact:
    """The nodes that are connected at a time."""
    return Contact(START + seconds, frozenset(nodes))


def test_reconnects() -> None:
    """An agent that is not connected again soon after the head is back is a violation, unless it was down itself."""

    quick = [contact(106), contact(110, "gpu-1")]
    slow = [contact(106), contact(140), contact(148, "gpu-1")]
    never = [contact(106), contact(140)]
    down = Outage("gpu-1", "agent outage", START + 104)
    assert [] == checks.reconnects(quick, [RESTART], ["gpu-1"])
    assert ["gpu-1 was connected 43 s after"] == [
        one[:30] for one in checks.reconnects(slow, [RESTART], ["gpu-1"])
    ]
    assert 1 == len(checks.reconnects(never, [RESTART], ["gpu-1"]))
    assert [] == checks.reconnects(never, [RESTART, down], ["gpu-1"])


def test_scrapes() -> None:
    """A metrics page that is missing or malformed while its program runs is a violation."""

    good = Scrape(START, HEAD, None, 100)
    away = Scrape(START + 102, HEAD, "no answer")
    bad = Scrape(START + 50, HEAD, "the page is empty")
    assert [] == checks.scrapes([good, away], [RESTART])
    assert 1 == len(checks.scrapes([good, bad], [RESTART]))
    assert 1 == len(checks.scrapes([away], [RESTART]))


def test_times_agree() -> None:
    """Sources that state the same time agree within what they display; a lone source compares with nothing."""

    api = Claim("start", "API", START + 0.9, 0.001)
    page = Claim("start", "page", START, 1.0)
    file = Claim("start", "file", START + 0.95, 0.001)
    assert [] == checks.times_agree([api, page])
    assert 1 == len(checks.times_agree([api, page, file]))
    assert 1 == len(checks.times_agree([api, page._replace(time=START - 1)]))
    assert 1 == len(checks.times_agree([api]))
    exact = api._replace(resolution_seconds=0.0)
    assert 1 == len(checks.times_agree([exact, exact._replace(source="file", time=START + 0.901)]))
