"""Checks: pure functions from what was observed to a list of violations, each one sentence."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise, takewhile
from statistics import median
from time import gmtime, strftime
from typing import TypeVar

from tests.soak.observations import (
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

GRACE_SECONDS = 20.0
"""After an outage pages and agents have this long to be connected again."""
MAX_STREAM_SILENCE_SECONDS = 30.0
MAX_SAMPLING_GAP_SECONDS = 30.0
MAX_FRAMES_LOST_BY_KILL_SECONDS = 1.0
"""Documented: a frame is in the agent's spool one second after it was sampled."""
MAX_MOVED_FRAMES, MAX_MOVED_RATIO = 3, 0.05
"""So many samples may serve the frame beside their own in a session's file: agents start, and ticks come late."""
NODE_FINDINGS = "node_"
"""Findings about a node that does not report: right while the soak keeps its agent down."""
_MIN_USAGE_SAMPLES = 9
_MAX_LISTED = 5
_MILLISECOND = 0.0015
_ROUNDING_SECONDS = 1e-6
"""Differences of floating-point numbers that stand for the same time."""

_CONNECTION_FAILURES = re.compile(
    r"WebSocket connection to|net::ERR_|ERR_CONNECTION|ERR_EMPTY_RESPONSE|Failed to load resource|Failed to fetch"
)
_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)
_MISSING = re.compile(r"no frames from (\S+) for ([\d:]+)")


def is_excused(time: float, outages: Iterable[Outage], part: str, grace: float = GRACE_SECONDS) -> bool:
    """Return whether a part was down at a time because of the soak, or had just come back."""
    return any(
        outage.part == part
        and outage.start - _MILLISECOND <= time
        and (outage.ready is None or time <= outage.ready + grace)
        for outage in outages
    )


def pages(events: Sequence[PageEvent], outages: Sequence[Outage]) -> list[str]:
    """Check that pages lost their connection and reported errors only because the head was restarted."""
    found = []
    for event in events:
        is_down = is_excused(event.time, outages, HEAD)
        where = f"{event.tab} page at {_clock(event.time)}"
        match event.kind:
            case "status" if (
                not event.text.startswith("live") and not is_down and not _is_loading(event, events)
            ):
                found.append(f"{where}: the status changed to {event.text!r} without a head restart")
            case "close" if not is_down and not _is_loading(event, events):
                found.append(f"{where}: the WebSocket was closed without a head restart ({event.text})")
            case "page error" | "not filled":
                if event.kind == "page error" or not is_down:
                    found.append(f"{where}: {event.kind}: {event.text}")
            case "console" | "request failed":
                if not (is_down and _CONNECTION_FAILURES.search(event.text)):
                    found.append(f"{where}: {event.kind}: {event.text}")
            case "http error" if not (is_down and event.text.startswith("503")):
                found.append(f"{where}: HTTP {event.text}")
    for tab, own in _by(events, lambda event: event.tab):
        states = [event.text for event in own if event.kind == "status"]
        if not states or not states[-1].startswith("live"):
            found.append(f"{tab} page: the last status is {states[-1] if states else None!r}, not 'live'")
    return _shortened(found, "page")


def _is_loading(event: PageEvent, events: Sequence[PageEvent]) -> bool:
    """Return whether the soak loaded the page anew around that time."""
    loads = [load.time for load in events if load.kind == "load" and load.tab == event.tab]
    return any(
        load - 1.0 <= event.time <= load + GRACE_SECONDS for load in loads
    ) and not event.text.startswith("disconnected")


def streams(received: Sequence[float], outages: Sequence[Outage], end: float) -> list[str]:
    """Check that the page that stays open received live messages all the time.

    Args:
        received: Times of the messages.
        outages: What the soak kept down.
        end: When the page was closed.
    """
    found = []
    if not received:
        return ["the page that stays open never received a live message"]
    for before, after in pairwise([*received, end]):
        if after - before > MAX_STREAM_SILENCE_SECONDS and not is_excused(after, outages, HEAD):
            found.append(
                f"the page that stays open received nothing for {after - before:.0f} s before {_clock(after)}"
            )
    return _shortened(found, "live stream")


def logs(lines: Sequence[LogLine], outages: Sequence[Outage]) -> list[str]:
    """Check that no log has an error or traceback, and that agents lost the head only when it was down."""
    found = []
    for place, line in enumerate(lines):
        if "Traceback (most recent call last)" in line.text:
            found.append(f"log of {line.part}: a traceback: {_last_of_traceback(lines[place:])}")
        elif line.level in {"E", "C"}:
            found.append(f"log of {line.part}: error: {line.text}")
        elif (
            line.level == "W"
            and line.text.startswith("lost the connection")
            and line.time is not None
            and not is_excused(line.time + 1.0, outages, HEAD)  # times in logs are whole seconds
        ):
            found.append(f"log of {line.part} at {_clock(line.time)}: {line.text}")
    return _shortened(found, "log")


def _last_of_traceback(lines: Sequence[LogLine]) -> str:
    """Return the last line of the traceback with which the lines begin: the exception."""
    own = takewhile(lambda line: line.time is None and line.part == lines[0].part, lines)
    return list(own)[-1].text.strip()


def growth(usages: Sequence[Usage], allowed: Tolerance) -> list[str]:
    """Check that no process keeps growing: the last third of its life against the first third after its warm-up."""
    found = []
    for (part, pid), own in _by(usages, lambda usage: (usage.part, usage.pid)):
        compared = before_and_after(own, allowed.warmup_seconds)
        if compared is None:
            continue
        minutes, memory, files = compared
        grown = memory[1] - memory[0]
        if grown > allowed.memory_bytes and grown > allowed.memory_bytes_per_minute * minutes:
            found.append(
                f"{part} (pid {pid}): memory grew from {memory[0] / 2**20:.1f} to {memory[1] / 2**20:.1f} MiB"
                f" in {minutes:.1f} minutes"
            )
        if files[1] - files[0] > allowed.files:
            found.append(f"{part} (pid {pid}): open files grew from {files[0]:.0f} to {files[1]:.0f}")
    return found


def before_and_after(
    usages: Sequence[Usage], warmup_seconds: float
) -> tuple[float, tuple[float, float], tuple[float, float]] | None:
    """Return the minutes between, and medians of memory and files of the first and the last third after warm-up.

    None for a process that did not live long enough.
    """
    own = sorted(usages)
    warm = [usage for usage in own if usage.time >= own[0].time + warmup_seconds]
    if len(warm) < _MIN_USAGE_SAMPLES:
        return None
    third = len(warm) // 3
    first, last = warm[:third], warm[-third:]
    return (
        (median(u.time for u in last) - median(u.time for u in first)) / 60,
        (median(u.memory_bytes for u in first), median(u.memory_bytes for u in last)),
        (median(u.files for u in first), median(u.files for u in last)),
    )


def frames(stored: Stored, lives: Sequence[Life], interval_seconds: float) -> list[str]:
    """Check that every frame that an agent sampled is stored exactly once, but for the last second before a kill."""
    found = []
    if stored.duplicates:
        found.append(f"{stored.duplicates} samples are stored more than once")
    by_pid = {(life.node, life.pid): life for life in lives}
    runs: dict[tuple[str, int], list[Run]] = {}
    for run in stored.runs:
        runs.setdefault((run.node, run.pid), []).append(run)
    for (node, pid), own in runs.items():
        if (node, pid) not in by_pid:
            found.append(f"{node}: frames of pid {pid}, which the soak did not start")
        if len(own) > 1:
            found.append(f"{node}: {len(own)} runs of one start (pid {pid})")
    for key, life in by_pid.items():
        for run in runs.get(key, ()):
            found += _run(run, life, interval_seconds)
        if key not in runs and (life.counted or 0) > 3:
            found.append(
                f"{life.node}: nothing is stored of pid {life.pid}, which sampled {life.counted} frames"
            )
    return found


def _run(run: Run, life: Life, interval_seconds: float) -> Iterator[str]:
    name = f"{run.node} (pid {run.pid})"
    last = max(run.frames, default=0)
    missing = [number for number in range(1, last + 1) if number not in run.frames]
    if missing:
        yield f"{name}: {len(missing)} of {last} frames are missing: {_listed(missing)}"
    spooled = sorted(number for number in life.spooled.get(run.id, ()) if number not in run.frames)
    if spooled:
        yield f"{name}: frames that were in the spool are not stored: {_listed(spooled)}"
    lost = int(-(-MAX_FRAMES_LOST_BY_KILL_SECONDS // interval_seconds)) + 1 if life.killed else 0
    if life.counted is not None and last < life.counted - lost:
        yield f"{name}: {last} frames are stored, but the agent sampled at least {life.counted} and may lose {lost}"
    times = [run.frames[number] for number in sorted(run.frames)]
    for before, after in pairwise(times):
        if after <= before:
            yield f"{name}: a frame at {_clock(after)} is not later than the one before it"
            break
        if after - before > MAX_SAMPLING_GAP_SECONDS:
            yield f"{name}: no frame was sampled for {after - before:.0f} s before {_clock(after)}"


def same_times(
    stored: Mapping[tuple[str, str], Sequence[float]],
    other: Mapping[tuple[str, str], Sequence[float]],
    where: str,
) -> list[str]:
    """Check that another place has exactly the stored samples, each once; times may differ by a millisecond.

    Args:
        stored: Times by node and GPU.
        other: The same, as the other place has it.
        where: Its name.
    """
    found = []
    for key in sorted({*stored, *other}):
        ours, theirs = sorted(stored.get(key, ())), sorted(other.get(key, ()))
        lacking = _unmatched(ours, theirs)
        extra = _unmatched(theirs, ours)
        twice = sum(1 for before, after in pairwise(theirs) if after == before)
        name = f"{where}: {key[0]} {key[1]}"
        if lacking:
            found.append(
                f"{name}: {len(lacking)} of {len(ours)} samples are missing, the first of {_clock(lacking[0])}"
            )
        if extra:
            found.append(
                f"{name}: {len(extra)} samples are not stored at the head, the first of {_clock(extra[0])}"
            )
        if twice:
            found.append(f"{name}: {twice} samples are there twice")
    return _shortened(found, where)


def _unmatched(times: Sequence[float], others: Sequence[float]) -> list[float]:
    return [time for time in times if not _has_near(others, time)]


def _has_near(times: Sequence[float], wanted: float) -> bool:
    place = bisect_left(times, wanted - _MILLISECOND)
    return place < len(times) and times[place] <= wanted + _MILLISECOND


def session_file(file: SessionFile, stored: Stored) -> list[str]:
    """Check that a session's file has every step once, and a node in every step in which it has a sample."""
    found = []
    name = f"file of session {file.name}"
    if list(file.frame_ids) != list(range(1, len(file.frame_ids) + 1)):
        found.append(f"{name}: frame ids are not 1 to {len(file.frame_ids)}, each once")
    steps = [after - before for before, after in pairwise(file.times)]
    if any(abs(step - file.interval_seconds) > _MILLISECOND for step in steps):
        found.append(f"{name}: frames are not {file.interval_seconds:g} s apart")
    expected = (file.end - file.start) / file.interval_seconds
    if abs(len(file.times) - expected) > 1.0:
        found.append(f"{name}: {len(file.times)} frames, but {expected:.1f} intervals")
    by_node: dict[str, set[float]] = {}
    for (node, _), own in stored.samples.items():
        by_node.setdefault(node, set()).update(own)
    for node, sampled in by_node.items():
        times = sorted(time for time in sampled if file.start <= time < file.end)
        present = file.present.get(node, ())
        if file.frame_counts.get(node, 0) != sum(present):
            found.append(
                f"{name}: {node} has {sum(present)} frames, but {file.frame_counts.get(node)} are stated"
            )
        if sum(present) > len(times) + 1:
            found.append(f"{name}: {node} has {sum(present)} frames of only {len(times)} samples")
        lacking, moved = _lacking_steps(file, present, times)
        if lacking:
            found.append(
                f"{name}: {node} has samples but is missing in {len(lacking)} frames: {_listed(lacking)}"
            )
        if len(moved) > MAX_MOVED_FRAMES + MAX_MOVED_RATIO * len(times):
            found.append(
                f"{name}: {len(moved)} of {len(times)} samples of {node} are in a neighbouring frame: {_listed(moved)}"
            )
    return found


def _lacking_steps(
    file: SessionFile, present: Sequence[bool], times: Sequence[float]
) -> tuple[list[int], list[int]]:
    """Return the frames in which a node is missing although it has a sample, and those whose sample moved.

    A sample may serve the frame before or after its own when it was taken within half an interval of it: then the node
    is present in that one, or it is outside of the session.
    """
    lacking: set[int] = set()
    moved: set[int] = set()
    there = [*present, *[False] * (len(file.times) - len(present))]
    for time in times:
        step, rest = divmod(time - file.start, file.interval_seconds)
        place = int(step)
        is_within = 0.01 < rest < file.interval_seconds - 0.01 and place < len(file.times)
        if not is_within or there[place]:
            continue
        neighbour = place - 1 if rest < file.interval_seconds / 2 else place + 1
        is_moved = neighbour in (-1, len(there)) or there[neighbour]
        (moved if is_moved else lacking).add(file.frame_ids[place])
    return sorted(lacking), sorted(moved)


def stated_gaps(statements: Sequence[tuple[float, str]], file: SessionFile) -> list[str]:
    """Check that frames of a node are said to be missing only where the session's file lacks them.

    Args:
        statements: What commands said about the session, with times.
        file: Its file.
    """
    found = []
    for time, text in statements:
        for node, duration in _MISSING.findall(text):
            stated = 0
            for part in duration.split(":"):
                stated = stated * 60 + int(part)
            absent = (len(list(steps)) for here, steps in groupby(file.present.get(node, ())) if not here)
            longest = max(absent, default=0) * file.interval_seconds
            if stated > longest + 2.0:
                found.append(
                    f"at {_clock(time)} a command said {text.strip()!r},"
                    f" but the file has no gap of {node} longer than {longest:g} s"
                )
    return found


def findings(
    polls: Sequence[FindingsPoll],
    outages: Sequence[Outage],
    *,
    faulty: tuple[str, str, str],
    healthy: Collection[str],
) -> list[str]:
    """Check that the constant fault is one finding with one start, and that healthy nodes have no finding.

    Args:
        polls: Answers of the head.
        outages: What the soak kept down.
        faulty: Node, label and id of the constant fault.
        healthy: The nodes without any fault.
    """
    node, label, kind = faulty
    found: list[str] = []
    starts: list[FindingSeen] = []
    absent = []
    for poll in polls:
        own = [f for f in poll.findings if (f.node, f.label, f.id) == faulty]
        starts += own
        if len(own) > 1:
            found.append(f"{kind} of {node} GPU {label} is listed {len(own)} times at {_clock(poll.time)}")
        is_down = any(is_excused(poll.time, outages, part) for part in (HEAD, node))
        if not own and not is_down:
            absent.append(poll.time)
    if absent:
        found.append(
            f"{kind} of {node} GPU {label} was absent in {len(absent)} of {len(polls)} answers,"
            f" first at {_clock(absent[0])}"
        )
    if not starts:
        found.append(f"{kind} of {node} GPU {label} was never found")
    distinct = _distinct([seen.start for seen in starts if seen.start is not None])
    if len(distinct) > 1:
        found.append(
            f"{kind} of {node} GPU {label} has {len(distinct)} starts: {_listed(map(_clock, distinct))}"
        )
    wrong = {
        (seen.node, seen.id): seen
        for poll in polls
        for seen in poll.findings
        if seen.node in healthy
        and not (seen.id.startswith(NODE_FINDINGS) and is_excused(seen.time, outages, seen.node))
    }
    found += [
        f"{seen.node} is healthy but has the finding {seen.id} at {_clock(seen.time)}"
        for seen in wrong.values()
    ]
    return found


def _distinct(times: Iterable[float]) -> list[float]:
    """Return times that are more than a second apart."""
    kept: list[float] = []
    for time in sorted(times):
        if not kept or time - kept[-1] > 1.0:
            kept.append(time)
    return kept


def finding_spans(spans: Sequence[tuple[float, float | None]], start: float | None) -> list[str]:
    """Check that the history has the constant fault once, from its start until now.

    Args:
        spans: Start and end of the fault in the history of findings; an end of None is "still there".
        start: The start that the list of findings states.
    """
    if len(spans) != 1:
        return [f"the history of findings has the constant fault {len(spans)} times, not once"]
    found = []
    if spans[0][1] is not None:
        found.append(f"the history of findings ends the constant fault at {_clock(spans[0][1])}")
    if start is not None and abs(spans[0][0] - start) > 1.0:
        found.append(
            f"the constant fault began at {_clock(spans[0][0])} in the history,"
            f" but at {_clock(start)} in the list of findings"
        )
    return found


def session_findings(
    file: SessionFile,
    outages: Sequence[Outage],
    *,
    faulty: tuple[str, str, str],
    healthy: Collection[str],
) -> list[str]:
    """Check that a session's file has the constant fault once, and nothing of healthy nodes."""
    stopped = {outage.part for outage in outages}
    node, label, kind = faulty
    own = [one for one in file.findings if one[:3] == (node, kind, label)]
    found = []
    if len(own) != 1:
        found.append(f"file of session {file.name}: the constant fault is listed {len(own)} times, not once")
    found += [
        f"file of session {file.name}: the constant fault came up {times} times, not once"
        for *_, times in own
        if times != 1
    ]
    wrong = sorted(
        {
            (one[0], one[1])
            for one in file.findings
            if one[0] in healthy and not (one[1].startswith(NODE_FINDINGS) and one[0] in stopped)
        }
    )
    found += [f"file of session {file.name}: {node} is healthy but has {kind}" for node, kind in wrong]
    return found


def reconnects(contacts: Sequence[Contact], outages: Sequence[Outage], nodes: Collection[str]) -> list[str]:
    """Check that every agent that runs is connected again soon after the head is back."""
    found = []
    heads = [outage for outage in outages if outage.part == HEAD and outage.ready is not None]
    for place, outage in enumerate(heads):
        assert outage.ready is not None
        until = heads[place + 1].start if place + 1 < len(heads) else float("inf")
        after = [contact for contact in contacts if outage.ready <= contact.time < until]
        for node in sorted(nodes):
            back = next((contact.time for contact in after if node in contact.connected), None)
            waited = (after[-1].time if back is None and after else back or outage.ready) - outage.ready
            if waited > GRACE_SECONDS and not is_excused(outage.ready + waited, outages, node):
                state = "was connected" if back is not None else "was not connected even"
                found.append(
                    f"{node} {state} {waited:.0f} s after the head was back at {_clock(outage.ready)}"
                )
    return found


def scrapes(pages_read: Sequence[Scrape], outages: Sequence[Outage]) -> list[str]:
    """Check that every metrics page was there and well-formed whenever its program ran."""
    found = [
        f"metrics of {scrape.part} at {_clock(scrape.time)}: {scrape.problem}"
        for scrape in pages_read
        if scrape.problem is not None and not is_excused(scrape.time, outages, scrape.part)
    ]
    for part, own in _by(pages_read, lambda scrape: scrape.part):
        if not any(scrape.problem is None for scrape in own):
            found.append(f"metrics of {part}: no scrape succeeded")
    return _shortened(found, "scrape")


def times_agree(claims: Sequence[Claim]) -> list[str]:
    """Check that all sources state the same time, within what each of them displays."""
    found = []
    for subject, own in _by(claims, lambda claim: claim.subject):
        first, *others = sorted(own, key=lambda claim: claim.resolution_seconds)
        found += [
            f"{subject}: {first.source} says {_precise(first.time)}, {other.source} says {_precise(other.time)}"
            for other in others
            if abs(first.time - other.time) > other.resolution_seconds + _ROUNDING_SECONDS
        ]
        if not others:
            found.append(f"{subject}: only {first.source} states it")
    return found


def _by(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> list[tuple[_Key, list[_Item]]]:
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())


def _shortened(found: list[str], what: str) -> list[str]:
    """Return the first violations of a kind and the number of the others."""
    most = 4 * _MAX_LISTED
    if len(found) <= most:
        return found
    return [*found[:most], f"and {len(found) - most} more of the {what} checks"]


def _listed(items: Iterable[object]) -> str:
    listed = [str(item) for item in items]
    more = f" and {len(listed) - _MAX_LISTED} more" if len(listed) > _MAX_LISTED else ""
    return ", ".join(listed[:_MAX_LISTED]) + more


def _clock(time: float) -> str:
    return strftime("%H:%M:%S", gmtime(time))


def _precise(time: float) -> str:
    milliseconds = round(time * 1000)
    return f"{_clock(milliseconds // 1000)}.{milliseconds % 1000:03d}"
