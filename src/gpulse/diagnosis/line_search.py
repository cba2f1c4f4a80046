"""Search for the lines of code behind findings: whose stacks to read, and what they show, once or in a stream that runs for months."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.diagnosis.code_lines import (
    KEEP_SECONDS,
    MIN_STACKS,
    DutyTrack,
    LineVerdict,
    ThreadSample,
    choose_views,
    describe_frame,
    find_lines,
)
from gpulse.diagnosis.rule import Rule
from gpulse.diagnosis.rule_registry import RULES_BY_ID
from gpulse.model.finding import (
    MAX_GAP_SECONDS,
    CodeLocation,
    CodeRole,
    Diagnosis,
    Finding,
    FindingKey,
    finding_from_document,
)
from gpulse.model.frame import Frame
from gpulse.model.process import ProcessReading
from gpulse.model.python_stack import ProcessStacks, StackFrame, StackProblem, StackTarget, is_given_up

MAX_WORKERS = 8
"""Number of workers of a job whose stacks are read."""
MAX_MAINS = 16
MIN_SUSPECTED = 2
"""Evaluations in a row that must show a finding before the job is read."""
_MAX_SUSPECTED = 4
"""A finding that was seen this often or more is followed for two more evaluations that do not show it."""
MAX_DUMPS = 200
"""Number of dumps of a job after which it is read again only for another finding."""
_MAX_SAMPLES = 5000
_MAX_APART_SECONDS = 1.6
_SPAN_SECONDS = 0.25
_Suspect = tuple[str, str | None]


class _GpuStacks:
    """What is known about the job on one GPU."""

    def __init__(self) -> None:
        self.duty = DutyTrack()
        self.workers: set[int] = set()


class LineSpan(NamedTuple):
    """A time in which the job was at one line of its code whenever it was read."""

    start: float
    end: float
    text: str
    """`train.py:84 tokenise`"""


class _Known(NamedTuple):
    """A thread at one time, and how busy each GPU was then."""

    sample: ThreadSample
    duties: Mapping[str, float]
    """By the GPU's label, as soon as it was sampled."""


class LineSearch:
    """Says whose stacks to read, joins them with what the GPUs did, and adds the lines to findings.

    It reads no clock and no process itself: `feed` it every frame, `suspect` the findings so far about once a second,
    read the processes that this returns, `add` their stacks, and `attach` the lines to the findings in the end.
    """

    def __init__(self) -> None:
        self._gpus: dict[str, _GpuStacks] = {}
        self._roles: dict[int, CodeRole] = {}
        self._seen: dict[_Suspect, int] = {}
        """How often each finding was seen lately."""
        self._suspected: dict[_Suspect, Finding] = {}
        self._dumps: dict[_Suspect, int] = {}
        """Number of dumps while each finding was suspected."""
        self._samples: list[_Known] = []
        self._open: list[tuple[float, dict[str, float]]] = []
        """Times and duties of the latest dumps, whose GPUs' next samples may be missing."""
        self._problems: dict[int, StackProblem] = {}
        self._failures: Counter[int] = Counter()
        """Number of failures in a row of each process."""
        self._fed_at: float | None = None
        self._read: set[int] = set()
        """Processes whose stacks could be read."""

    def feed(self, frame: Frame) -> None:
        """Add what the GPUs did."""
        self._fed_at = frame.time
        for gpu in frame.gpus:
            self._of(gpu.device.label).duty.add(frame.time, gpu)

    def suspect(self, findings: Iterable[Finding], frame: Frame) -> tuple[StackTarget, ...]:
        """Return the processes to read now, given the findings so far; none when no cause is in code."""
        shown = {
            (finding.id, finding.label): finding
            for finding in findings
            if (rule := find_code_rule(finding)) is not None
            and (finding.severity != "info" or rule.stacks == "all")
        }
        counts = {key: count - 1 for key, count in self._seen.items() if count > 1 and key not in shown}
        counts.update({key: min(self._seen.get(key, 0) + 1, _MAX_SUSPECTED) for key in shown})
        self._seen = counts
        self._suspected = {key: shown.get(key) or self._suspected[key] for key in counts}
        targets: dict[StackTarget, None] = {}
        for key, finding in self._suspected.items():
            if counts[key] >= MIN_SUSPECTED and self._dumps.get(key, 0) < MAX_DUMPS:
                targets.update(dict.fromkeys(self._targets(finding, frame)))
        self._roles.update({target.pid: target.role for target in targets})
        return tuple(targets)

    def add(self, dumps: Iterable[ProcessStacks]) -> None:
        """Add the stacks that were read."""
        for stacks in dumps:
            role = self._roles.get(stacks.pid, "main")
            if stacks.problem is not None:
                self._problems[stacks.pid] = stacks.problem
                self._failures[stacks.pid] += 1
                continue
            self._failures.pop(stacks.pid, None)
            self._read.add(stacks.pid)
            for key, count in self._seen.items():
                if count >= MIN_SUSPECTED and role == "main":
                    self._dumps[key] = self._dumps.get(key, 0) + 1
            views = choose_views(stacks, role)
            duties: dict[str, float] = {}
            self._open.append((stacks.time, duties))
            self._samples += [
                _Known(ThreadSample(stacks.time, stacks.pid, role, view, 1 / len(views)), duties)
                for view in views
            ]
        del self._samples[:-_MAX_SAMPLES], self._open[:-_MAX_SAMPLES]
        self._join()

    def attach(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis with the lines of its findings."""
        return diagnosis._replace(
            findings=tuple(map(self.attach_to, diagnosis.findings)),
            info=tuple(map(self.attach_to, diagnosis.info)),
        )

    def attach_to(self, finding: Finding) -> Finding:
        """Return a finding with its lines, or with the reason why there are none."""
        found = self._find(finding)
        if found is None:
            return finding
        pids = {*finding.pids, *self._workers_of(finding)}
        if not pids & self._read:
            problem = next((self._problems[pid] for pid in finding.pids if pid in self._problems), None)
            if problem is not None:
                return finding._replace(where_note=f"line of code unknown: {problem.sentence}")
            if finding.severity == "info":
                return finding
            return finding._replace(where_note=_NOT_TAKEN)
        hidden = [self._problems[pid] for pid in self._workers_of(finding) if pid in self._problems]
        refused = next((problem for problem in hidden if problem.code == "not_permitted"), None)
        if refused is not None and not self._workers_of(finding) & self._read:
            return finding._replace(
                where=found.where, where_note=f"stacks of the workers are missing: {refused.sentence}"
            )
        return finding._replace(where=found.where, where_note=found.note)

    def is_collecting(self, finding: Finding) -> bool:
        """Return whether stacks for a finding are being read, of which too few count so far."""
        key = finding.id, finding.label
        found = self._find(finding)
        if found is None or key not in self._seen or self._dumps.get(key, 0) >= MAX_DUMPS:
            return False
        is_readable = any(
            pid not in self._failures or not is_given_up(self._problems[pid], self._failures[pid])
            for pid in finding.pids
        )
        return is_readable and found.stacks < MIN_STACKS

    def line_spans(self, findings: Iterable[Finding]) -> dict[str, tuple[LineSpan, ...]]:
        """Return the lines over time of each GPU whose finding has stacks, by the GPU's label.

        They are those of one process: the one of the finding's first line, else the one that was read most often.
        """
        spans: dict[str, tuple[LineSpan, ...]] = {}
        for finding in findings:
            if finding.where is not None and finding.label is not None and finding.label not in spans:
                samples = self._samples_of(finding)
                reads = Counter(each.pid for each in samples if each.role == "main")
                pid = (
                    finding.where[0].pid if finding.where else max(reads, key=reads.__getitem__, default=None)
                )
                spans[finding.label] = tuple(_spans(each for each in samples if each.pid == pid))
        return spans

    def _samples_of(self, finding: Finding) -> list[ThreadSample]:
        pids, workers = set(finding.pids), self._workers_of(finding)
        return [
            each.sample._replace(duty=each.duties.get(finding.label or ""))
            for each in self._samples
            if each.sample.pid in (pids if each.sample.role == "main" else workers)
        ]

    def _find(self, finding: Finding) -> LineVerdict | None:
        """Return the lines of a finding so far; None when its cause is not in code."""
        rule = find_code_rule(finding)
        if rule is None or rule.stacks is None:
            return None
        self._join()
        return find_lines(self._samples_of(finding), rule.stacks, prefer_workers=rule.family == "input")

    def _join(self) -> None:
        """Note what the GPUs did when the latest stacks were taken; later only these notes are needed."""
        if (now := self._fed_at) is not None:
            self._open = [each for each in self._open if abs(now - each[0]) <= KEEP_SECONDS]
        for time, duties in self._open:
            for label, known in self._gpus.items():
                if (duty := known.duty.duty_at(time)) is not None:
                    duties[label] = duty

    def _workers_of(self, finding: Finding) -> set[int]:
        return set() if finding.label is None else self._of(finding.label).workers

    def _targets(self, finding: Finding, frame: Frame) -> list[StackTarget]:
        mains = list(finding.pids[:MAX_MAINS])
        workers = find_workers(frame, mains)
        if finding.label is not None:
            self._of(finding.label).workers.update(workers)
        return [
            *(StackTarget(pid, "main") for pid in mains),
            *(StackTarget(pid, "worker") for pid in workers),
        ]

    def _of(self, label: str) -> _GpuStacks:
        return self._gpus.setdefault(label, _GpuStacks())


_NOT_TAKEN = "line of code unknown: the cause was found too late to take stacks; watch for longer: gpulse why --window 60"


def _spans(samples: Iterable[ThreadSample]) -> Iterator[LineSpan]:
    """Yield the spans between two reads of the same process that found it at the same line."""
    open_span: LineSpan | None = None
    for each in sorted((each for each in samples if each.view.lines), key=lambda sample: sample.time):
        text = describe_frame(each.view.line)
        if open_span is not None and each.time - open_span.end <= _MAX_APART_SECONDS:
            if text == open_span.text:
                open_span = open_span._replace(end=each.time)
                continue
            open_span = open_span._replace(end=each.time)
        if open_span is not None:
            yield open_span
        open_span = LineSpan(each.time, each.time + _SPAN_SECONDS, text)
    if open_span is not None:
        yield open_span


def describe_where(finding: Finding) -> tuple[str, ...]:
    """Return the lines of a finding as texts, the most frequent first: what it says where there are none is last.

    The text of a line is `train.py:84 tokenise, 83% of 40 stacks taken while the GPU was idle; in json/encoder.py:258
    iterencode`.
    """
    rule = RULES_BY_ID.get(finding.id)
    idle = "" if rule is not None and rule.stacks == "all" else " taken while the GPU was idle"
    texts = []
    for place, location in enumerate(finding.where or ()):
        frame = StackFrame(location.file, location.line, location.function)
        of = f" of {location.stacks} stacks{idle}" if place == 0 else ""
        worker = " (in a worker)" if location.role == "worker" and place == 0 else ""
        doing = f"; in {location.doing}" if location.doing else ""
        texts.append(f"{describe_frame(frame)}{worker}, {location.share:.0%}{of}{doing}")
    return (*texts, *(() if finding.where_note is None else (finding.where_note,)))


def describe_first_line(documents: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the line that the first of some findings names, and on how many others it differs.

    Where none names a line, this is the reason; None when no stacks were taken.

    Args:
        documents: JSON documents of findings of one kind, worst first.
    """
    found = [finding_from_document(document) for document in documents]
    named = [finding for finding in found if finding.where]
    if named:
        others = {(finding.where or ())[0][2:4] for finding in named} - {(named[0].where or ())[0][2:4]}
        more = f" (and {len(others)} other {'line' if len(others) == 1 else 'lines'})" if others else ""
        return f"{describe_where(named[0])[0]}{more}"
    return next((finding.where_note for finding in found if finding.where_note is not None), None)


def find_code_rule(finding: Finding) -> Rule | None:
    """Return the rule of a finding about a GPU whose cause is in code; None for any other."""
    rule = RULES_BY_ID.get(finding.id)
    return rule if rule is not None and rule.stacks is not None and finding.label is not None else None


def find_workers(frame: Frame, pids: Iterable[int]) -> list[int]:
    """Return the descendants of processes that use no GPU themselves, those with the most CPU time first."""
    children: dict[int | None, list[ProcessReading]] = {}
    for process in frame.processes:
        if not process.on_gpu:
            children.setdefault(process.identity.parent_pid, []).append(process)
    found: dict[int, float] = {}
    queue = list(pids)
    known = set(queue)
    while queue:
        for process in children.get(queue.pop(), ()):
            if process.pid not in known:
                known.add(process.pid)
                queue.append(process.pid)
                found[process.pid] = process.values.get("cpu_seconds_total", 0.0)
    return sorted(found, key=lambda pid: (-found[pid], pid))[:MAX_WORKERS]


UPDATE_SECONDS = 30.0
"""A line that was named changes at most this often."""
SETTLE_SECONDS = 30.0
"""Time in which stacks are collected before a finding says that no line stands out."""
MIN_FIRST_STACKS = 15
"""Stacks that the first line needs before that time is over, because it stays for a while."""
RENEW_SECONDS = 1800.0
"""After this time the stacks of a finding that still holds are collected anew."""
_SUSPECT_SECONDS = 1.0
_JUDGE_SECONDS = 5.0

Watch = Callable[[Iterable[StackTarget]], None]
Take = Callable[[], Sequence[ProcessStacks]]


class _FindingLines:
    """Collection of stacks for one finding."""

    def __init__(self, finding: Finding, now: float) -> None:
        self.finding = finding
        self.last = now
        self.where: tuple[CodeLocation, ...] | None = None
        self.note: str | None = None
        self._shown_at = -math.inf
        self._judged_at = now
        self._start(now)

    def _start(self, now: float) -> None:
        self._search = LineSearch()
        self._began = now
        self._pids = set(self.finding.pids)
        self._wanted: set[int] = set()
        """Processes that were to be read for this finding."""
        self._has_answer = False
        """Whether a process on the GPU was read, or could not be read."""

    def holds(self, finding: Finding, now: float) -> bool:
        """Take the finding as of now; return False when it is about other processes."""
        if finding.pids and self._pids and self._pids.isdisjoint(finding.pids):
            return False
        self.finding, self.last = finding, now
        self._pids.update(finding.pids)
        return True

    def feed(self, frame: Frame) -> None:
        label = self.finding.label
        gpus = tuple(gpu for gpu in frame.gpus if label is None or gpu.device.label == label)
        self._search.feed(frame._replace(gpus=gpus))

    def add(self, dumps: Sequence[ProcessStacks]) -> None:
        own = [stacks for stacks in dumps if stacks.pid in self._wanted]
        self._search.add(own)
        self._has_answer = self._has_answer or any(stacks.pid in self._pids for stacks in own)

    def choose(self, frame: Frame) -> tuple[StackTarget, ...]:
        """Return the processes to read now."""
        if frame.monotonic - self._began >= RENEW_SECONDS:
            self._start(frame.monotonic)
        targets = self._search.suspect([self.finding], frame)
        self._wanted.update(target.pid for target in targets)
        return targets

    def judge(self, now: float) -> None:
        """Decide which lines the finding names from now on."""
        if now - self._judged_at < _JUDGE_SECONDS or not self._has_answer:
            return
        self._judged_at = now
        found = self._search.attach_to(self.finding._replace(pids=tuple(sorted(self._pids))))
        is_settled = now - self._began >= SETTLE_SECONDS
        if not found.where:
            if (found.where is not None and not is_settled) or (found.where is None and self.where):
                return  # what was found before is better than nothing
        elif not self.where and not is_settled and found.where[0].stacks < MIN_FIRST_STACKS:
            return
        if (self.where or not found.where) and now - self._shown_at < UPDATE_SECONDS:
            return
        self.where, self.note, self._shown_at = found.where, found.where_note, now


class LiveLines:
    """Names the lines of code behind the findings of a live stream.

    Only processes with a finding whose cause is in their code are read, for a limited number of stacks, and again half
    an hour later if the finding still holds. The lines of a finding change at most every `UPDATE_SECONDS`, so that
    whoever reports changes does not report a slightly different share every second.
    """

    def __init__(self, watch: Watch, take: Take) -> None:
        """Start without findings.

        Args:
            watch: Called about once a second with the processes to read from now on; never blocks.
            take: Returns the stacks that were read since the last call; never blocks.
        """
        self._watch = watch
        self._take = take
        self._collections: dict[FindingKey, _FindingLines] = {}
        self._chosen_at = -math.inf

    def __call__(self, frame: Frame, findings: Sequence[Finding]) -> list[Finding]:
        """Take the next frame and its findings; return these with their lines of code."""
        now = frame.monotonic
        for finding in findings:
            if find_code_rule(finding) is not None:
                collection = self._collections.get(finding.key)
                if collection is None or not collection.holds(finding, now):
                    self._collections[finding.key] = _FindingLines(finding, now)
        if not self._collections:
            return list(findings)
        for collection in self._collections.values():
            collection.feed(frame)
        if not 0 <= now - self._chosen_at < _SUSPECT_SECONDS:
            self._chosen_at = now
            self._collect(frame, {finding.key for finding in findings})
        return [self._with_lines(finding) for finding in findings]

    def _collect(self, frame: Frame, current: set[FindingKey]) -> None:
        """Distribute the stacks that were read, and choose the processes to read next."""
        now = frame.monotonic
        self._collections = {
            key: collection
            for key, collection in self._collections.items()
            if 0 <= now - collection.last <= MAX_GAP_SECONDS
        }
        dumps = self._take()
        targets: dict[StackTarget, None] = {}
        for key, collection in self._collections.items():
            collection.add(dumps)
            if key in current:
                targets.update(dict.fromkeys(collection.choose(frame)))
                collection.judge(now)
        self._watch(targets)

    def _with_lines(self, finding: Finding) -> Finding:
        collection = self._collections.get(finding.key)
        if collection is None or (collection.where is None and collection.note is None):
            return finding
        return finding._replace(where=collection.where, where_note=collection.note)
