"""Find the line of code that held a GPU up: the user's own code on each stack, joined with what the GPU did meanwhile."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Literal, NamedTuple

from gpulse.diagnosis.rule import StackChoice
from gpulse.diagnosis.second_aggregator import kernel_duty
from gpulse.model.finding import CodeLocation, CodeRole
from gpulse.model.frame import GpuReading
from gpulse.model.python_stack import ProcessStacks, StackFrame, ThreadStack

WaitsFor = Literal["gpu", "others"]

_STANDARD_LIBRARY = re.compile(
    r"/lib(?:64)?/python\d+(?:\.\d+)?t?/(?!(?:site|dist)-packages/)|/python\d+\.zip/"
)
_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/(?:[^/]+\.egg/)?([^/]+)")
_GENERATED = re.compile(r"^<(?!ipython-input)|/torchinductor_[^/]*/|/\.triton/cache/")
_RUNPY = re.compile(r"/runpy\.py$")
_SCRIPT = re.compile(r"^(.*)/bin/[^/.]+$")
_GPULSE = re.compile(r"/src/gpulse/")
_LOADER = re.compile(
    r"(?:site|dist)-packages/torch/utils/data/|(?:site|dist)-packages/torch/(?:_dynamo|_inductor)/"
)
_QUEUE_LOCK = "/multiprocessing/synchronize.py"
_PROCESS_START = ("multiprocessing/process.py", "_bootstrap")
_STARTED_BY_MULTIPROCESSING = re.compile(r"/multiprocessing/(?:spawn|forkserver|resource_tracker)\.py$")
_WAITING = re.compile(
    r"(?:^|/)(?:threading|queue|selectors|"
    r"multiprocessing/(?:queues|connection|pool|popen_fork|popen_spawn_posix|forkserver|resource_tracker)|"
    r"concurrent/futures/[a-z_]+|asyncio/[a-z_]+)\.py$"
)
_WAITS_FOR_GPU = re.compile(
    r"\.(?:item|cpu|tolist|numpy|block_until_ready)\(\s*\)|synchronize\(|device_get\(|"
    r"""\.to\(\s*(?:device\s*=\s*)?["']cpu|\bfloat\(\s*[\w.]*loss\w*\s*\)"""
)
"""Calls that copy a result to the host or wait for a stream.

`int(`, `print(` and `.get()` do so only for tensors, which the line does not show: they are work of the program. Of
`float(`, the one around a loss is such a call in all likelihood.
"""
_COMPREHENSION = re.compile(r"^(?:(.+?)\.<locals>\.)?<(?:listcomp|dictcomp|setcomp|genexpr)>")
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")


class StackView(NamedTuple):
    """What one stack shows."""

    lines: tuple[StackFrame, ...]
    """The frames of the user's own code, innermost first; empty when there are none."""
    innermost: StackFrame
    waits_for: WaitsFor | None = None
    """`gpu` for a call that returns when the GPU is done, `others` for another thread or process."""

    @property
    def line(self) -> StackFrame:
        """The line of the user's own code that runs."""
        return self.lines[0]


def view_stack(thread: ThreadStack) -> StackView:
    """Return the user's own frames of a stack, and what it waits for.

    Without own frames, the frames of the outermost installed package count, except the data loader's machinery and
    calls that only wait for the GPU.
    """
    frames = _since_process_start(thread.frames)
    waits: WaitsFor | None = None
    if _is_waiting(frames):
        waits = "others"
    elif thread.code is not None and _WAITS_FOR_GPU.search(thread.code):
        waits = "gpu"
    own = [
        frame
        for frame in frames
        if (is_own_code(frame) or _is_typed_program(frame, frames)) and not _is_launcher(frame, frames)
    ]
    if not own and waits != "gpu":
        own = _frames_of_outermost_package(frames)
    return StackView(tuple(_normalized(own)), frames[0], waits)


def choose_views(stacks: ProcessStacks, role: CodeRole) -> list[StackView]:
    """Return the views of the threads that matter in one dump of a process; empty when it has nothing to do.

    This is the main thread, also when it shows no code of the user: it counts as time spent elsewhere. Where it only
    waits for other threads, the running threads with code of the user count instead. A worker that waits for its next
    task has nothing to do.
    """
    if not stacks.threads:
        return []
    main = find_main_thread(stacks)
    view = view_stack(main)
    if view.lines and view.waits_for != "others":
        return [view]
    others = [view_stack(thread) for thread in stacks.threads if thread is not main and thread.is_active]
    working = [
        each for each in others if each.lines and each.waits_for != "others" and is_own_code(each.line)
    ]
    if working:
        return working
    return [view] if role == "main" or view.waits_for != "others" else []


def find_main_thread(stacks: ProcessStacks) -> ThreadStack:
    """Return the main thread of a process, else its first one."""
    named = [thread for thread in stacks.threads if thread.name == "MainThread"]
    same = [thread for thread in stacks.threads if thread.thread_id == stacks.pid]
    return (named or same or list(stacks.threads))[0]


def is_own_code(frame: StackFrame) -> bool:
    """Whether a frame is neither of the standard library nor of an installed package."""
    return not any(
        pattern.search(frame.file) for pattern in (_STANDARD_LIBRARY, _INSTALLED, _GENERATED, _RUNPY, _GPULSE)
    )


def _is_typed_program(frame: StackFrame, frames: Sequence[StackFrame]) -> bool:
    """Whether a frame is of a program without a file: `python -c`, standard input, or a notebook's cell.

    Other code without a file is generated, such as the methods of data classes, or is the command line with which
    multiprocessing starts its processes.
    """
    root = frames[-1]
    if len(frames) > 1 and _STARTED_BY_MULTIPROCESSING.search(frames[-2].file):
        return False
    return (
        frame.file == root.file
        and root.function == "<module>"
        and root.file.startswith("<")
        and not root.file.startswith("<frozen")
    )


def _is_launcher(frame: StackFrame, frames: Sequence[StackFrame]) -> bool:
    """Whether a frame is that of a command such as `torchrun`.

    The script of a command is in the `bin` directory of the environment whose package it calls; a user's own script
    may be in another directory of that name.
    """
    found = _SCRIPT.match(frame.file)
    if found is None:
        return False
    library = re.compile(re.escape(found[1]) + r"/lib(?:64)?/python[^/]*/(?:site|dist)-packages/")
    return any(library.match(each.file) for each in frames)


def _since_process_start(frames: tuple[StackFrame, ...]) -> tuple[StackFrame, ...]:
    """Return the frames of this process: a forked process still has those of its parent below."""
    file, function = _PROCESS_START
    for place, frame in enumerate(frames):
        if frame.file.endswith(file) and frame.function.endswith(function):
            return frames[:place] or frames
    return frames


def _frames_of_outermost_package(frames: Sequence[StackFrame]) -> list[StackFrame]:
    for frame in reversed(frames):
        found = _INSTALLED.search(frame.file)
        if found is None or _LOADER.search(frame.file):
            continue
        root = frame.file[: found.end()]
        return [each for each in frames if each.file.startswith(root) and not _LOADER.search(each.file)]
    return []


def _is_waiting(frames: Sequence[StackFrame]) -> bool:
    """Whether a thread waits in the standard library for another thread or process; a queue's lock is a part of it."""
    files = [frame.file for frame in frames[:2]]
    if files[0].endswith(_QUEUE_LOCK):
        files = files[1:]
    return (
        bool(files)
        and _STANDARD_LIBRARY.search(files[0]) is not None
        and _WAITING.search(files[0]) is not None
    )


def _normalized(frames: Sequence[StackFrame]) -> Iterator[StackFrame]:
    """Yield the frames with the names of functions in the source.

    A comprehension counts as a part of the function around it, and torch.compile's continuation of a function as that
    function.
    """
    last: StackFrame | None = None
    for place, frame in enumerate(frames):
        name = frame.function
        if (resumed := _RESUMED.match(name)) is not None:
            name = resumed[1]
        elif (within := _COMPREHENSION.match(name)) is not None:
            outer = next((each.function for each in frames[place + 1 :] if each.file == frame.file), name)
            name = within[1] or outer
        named = frame._replace(function=name)
        if named != last:
            yield named
        last = named


MIN_STACKS = 5
MIN_SHARE = 0.5
BUSY_DUTY = 0.9
"""Stacks taken while kernels ran for at least this part of the time do not count."""
PAUSE_DUTY = 0.1
"""A GPU that is less busy than this pauses."""
_MAX_SAMPLE_SECONDS = 2.5
"""A stack counts only if the GPU was sampled within this time after it was taken."""
_COMMON_SHARE = 0.95
"""A line that is on at least this part of all stacks, whatever the GPU did, is the program's frame, not a cause."""
KEEP_SECONDS = 10.0
"""How long a track knows what the GPU did: stacks come in within a few seconds."""
_MAX_DEVIATIONS = 2.0
"""Standard deviations by which a count of stacks may differ from its mean by chance."""
_MAX_LINES = 3
_MIN_OTHER_SHARE = 0.1


class DutyTrack:
    """How busy one GPU was in the last seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._duties: deque[tuple[float, bool]] = deque()
        """Duty, and whether it is exactly that of the time since the sample before."""

    def add(self, time: float, reading: GpuReading) -> None:
        """Add a reading of the GPU."""
        duty = kernel_duty(reading)
        if duty is None:
            return
        is_exact = reading.values.get("graphics_active_ratio") == duty
        if is_exact:
            time = reading.read_at.get("graphics", time)
        if self._times and time < self._times[-1] - _MAX_SAMPLE_SECONDS:  # the clock was set back
            self._times.clear()
            self._duties.clear()
        if self._times and time <= self._times[-1]:
            return  # the same reading again, or a slightly older one
        self._times.append(time)
        self._duties.append((min(1.0, max(0.0, duty)), is_exact))
        while self._times[0] < time - KEEP_SECONDS:
            self._times.popleft()
            self._duties.popleft()

    def duty_at(self, time: float) -> float | None:
        """Return the part of the time around `time` in which kernels ran; None when it was not sampled.

        Readings are means over the time before them, so the first one after `time` covers it. NVML's utilization is
        up to a period late: the reading after that one counts as well.
        """
        place = bisect_left(self._times, time)
        if place >= len(self._times) or self._times[place] - time > _MAX_SAMPLE_SECONDS:
            return None
        duty, is_exact = self._duties[place]
        if not is_exact and place + 1 < len(self._duties):
            return (duty + self._duties[place + 1][0]) / 2
        return duty


class ThreadSample(NamedTuple):
    """One thread of one process at one time."""

    time: float
    pid: int
    role: CodeRole
    view: StackView
    part: float = 1.0
    """Its part of the dump, where several threads share one."""
    duty: float | None = None
    """Part of the time around it in which kernels ran on the GPU; None when the GPU was not sampled then."""


class LineVerdict(NamedTuple):
    """The lines that held a GPU up, the most frequent first; empty when none stands out, with the reason."""

    where: tuple[CodeLocation, ...]
    note: str | None = None
    stacks: int = 0
    """Number of stacks that counted."""


class _Weighted(NamedTuple):
    """A sample, and how much of it counts."""

    sample: ThreadSample
    weight: float


class _Choice(NamedTuple):
    """The line that was chosen, and what its share is the share of."""

    line: StackFrame
    share: float
    kind: Literal["line", "function", "caller"]


def find_lines(
    samples: Sequence[ThreadSample], choice: StackChoice, *, prefer_workers: bool = False
) -> LineVerdict:
    """Return the line that the job was at while the GPU was idle.

    The line is that of the workers if the processes on the GPU wait for others more than they work.

    Args:
        samples: Threads of the processes on the GPU and of their workers.
        choice: Which stacks count.
        prefer_workers: Whether the workers are the cause wherever their stacks are known.
    """
    weighted = _weigh(samples, choice)
    main = [each for each in weighted if each.sample.role == "main"]
    workers = [each for each in weighted if each.sample.role == "worker"]
    waiting = _total(each for each in main if each.sample.view.waits_for == "others")
    working = _total(each for each in main if each.sample.view.waits_for is None)
    is_workers = _count_stacks(workers) >= MIN_STACKS and (prefer_workers or waiting >= max(working, 1.0))
    chosen, role = (workers, "worker") if is_workers else (main, "main")
    return _lines_of(chosen, [each for each in samples if each.role == role], choice)


def _weigh(samples: Sequence[ThreadSample], choice: StackChoice) -> list[_Weighted]:
    """Return the samples that count, and how much.

    A sample of the GPU covers a fifth of a second, in which it can be both busy and idle. Then a stack counts by the
    idle part. A thread that waits for the GPU does so while the GPU is busy, so the busy part is first taken from such
    stacks; only the rest is taken from all others. Of few stacks, more than the busy part can be waiting ones by
    chance: that many are taken as well.
    """
    if choice == "all":
        return [_Weighted(each, each.part) for each in samples]
    known = [(each, duty) for each in samples if (duty := each.duty) is not None]
    if choice == "pauses":
        return [_Weighted(each, each.part) for each, duty in known if duty < PAUSE_DUTY]
    known = [(each, duty) for each, duty in known if duty < BUSY_DUTY]
    found: list[_Weighted] = []
    for role in ("main", "worker"):
        of_role = [(each, duty) for each, duty in known if each.role == role]
        waiting = [(each, duty) for each, duty in of_role if each.view.waits_for == "gpu"]
        others = [(each, duty) for each, duty in of_role if each.view.waits_for != "gpu"]
        busy = sum(each.part * duty for each, duty in of_role)
        waited = sum(each.part for each, _ in waiting)
        idle = sum(each.part * (1 - duty) for each, duty in waiting)
        busy_others = sum(each.part * duty for each, duty in others)
        chance = _MAX_DEVIATIONS * sqrt(sum(each.part**2 * duty * (1 - duty) for each, duty in of_role))
        kept = max(0.0, waited - busy - chance) / idle if idle > 0 else 0.0
        taken = max(0.0, busy - waited) / busy_others if busy_others > 0 else 0.0
        found += [_Weighted(each, each.part * (1 - duty) * kept) for each, duty in waiting]
        found += [_Weighted(each, each.part * (1 - duty * taken)) for each, duty in others]
    return [each for each in found if each.weight > 0]


def _lines_of(
    counted: Sequence[_Weighted], everything: Sequence[ThreadSample], choice: StackChoice
) -> LineVerdict:
    total = _total(counted)
    stacks = _count_stacks(counted)
    lines: dict[StackFrame, float] = defaultdict(float)
    for sample, weight in counted:
        if sample.view.lines:
            lines[_key(sample.view.line)] += weight
    while_idle = "" if choice == "all" else " while the GPU was idle"
    if stacks < MIN_STACKS:
        named = f"; they show {_listed(lines, None)}" if lines else ""
        taken = len({(each.pid, each.time) for each in everything})
        return LineVerdict(
            (), f"no single line stands out: {_too_few(stacks, taken, while_idle)}{named}", stacks
        )
    chosen = _choose_line(counted, everything, lines, total)
    if chosen is None:
        found = f"{_listed(lines, total)} of {stacks} stacks taken{while_idle}"
        if not lines:
            found = f"none of the {stacks} stacks taken{while_idle} shows code of the program"
        return LineVerdict((), f"no single line stands out: {found}", stacks)
    line = chosen.line
    others = [
        each for each, weight in _most_frequent(lines) if each != line and weight / total >= _MIN_OTHER_SHARE
    ]
    where = [_location(line, chosen.share, stacks, _at_line(line, counted))]
    where += [_location(each, lines[each] / total, stacks, _at_line(each, counted)) for each in others]
    note = None
    if chosen.kind == "function":
        note = f"the percentage is for the whole function {line.function}; the line is its most frequent one"
    return LineVerdict(tuple(sorted(where, key=lambda each: -each.share)), note, stacks)


def _too_few(stacks: int, taken: int, while_idle: str) -> str:
    """Return how many stacks counted of those that were taken, as a clause."""
    if taken == 0:
        return "no stack shows code of the program"
    if stacks == 0:
        if taken == 1:
            return f"the only stack was not taken{while_idle}"
        return f"none of the {taken} stacks was captured{while_idle}"
    return f"too few stacks ({stacks}) were taken{while_idle}"


def _choose_line(
    counted: Sequence[_Weighted],
    everything: Sequence[ThreadSample],
    lines: Mapping[StackFrame, float],
    total: float,
) -> _Choice | None:
    """Return the line on at least half of the stacks; None when there is none.

    First the innermost line of the user's code; then the innermost function, with its most frequent line; then the
    innermost line that called what runs, unless it is on all stacks, whatever the GPU does.
    """
    if not lines:
        return None
    line, weight = max(lines.items(), key=lambda item: item[1])
    if weight / total >= MIN_SHARE:
        return _Choice(line, weight / total, "line")
    functions: dict[tuple[str, str], float] = defaultdict(float)
    for each, weight in lines.items():
        functions[each.file, each.function] += weight
    (file, function), weight = max(functions.items(), key=lambda item: item[1])
    if weight / total >= MIN_SHARE and function != "<module>":
        inside = {each: n for each, n in lines.items() if (each.file, each.function) == (file, function)}
        return _Choice(max(inside, key=lambda each: inside[each]), weight / total, "function")
    callers: dict[StackFrame, float] = defaultdict(float)
    depths: dict[StackFrame, float] = {}
    for sample, weight in counted:
        keys = {_key(frame): depth for depth, frame in enumerate(reversed(sample.view.lines))}
        for key, depth in keys.items():  # each once, however deep the recursion
            callers[key] += weight
            depths[key] = max(depths.get(key, 0), depth)
    common = Counter(key for each in everything for key in {_key(frame) for frame in each.view.lines})
    frequent = [
        key
        for key, weight in callers.items()
        if weight / total >= MIN_SHARE and common[key] < _COMMON_SHARE * len(everything)
    ]
    if not frequent:
        return None
    deepest = max(frequent, key=lambda key: depths[key])
    return _Choice(deepest, callers[deepest] / total, "caller")


def _count_stacks(counted: Sequence[_Weighted]) -> int:
    """Return the number of stacks that would say as much if each counted fully: their effective sample size."""
    squares = sum(weight * weight / sample.part for sample, weight in counted)
    return round(_total(counted) ** 2 / squares) if squares > 0 else 0


def _at_line(line: StackFrame, counted: Sequence[_Weighted]) -> list[_Weighted]:
    """Return the stacks whose innermost own line this is; without such, those that contain it."""
    innermost = [each for each in counted if [_key(f) for f in each.sample.view.lines[:1]] == [line]]
    return innermost or [
        each for each in counted if any(_key(frame) == line for frame in each.sample.view.lines)
    ]


def _location(line: StackFrame, share: float, stacks: int, at_line: Sequence[_Weighted]) -> CodeLocation:
    pids: dict[int, float] = defaultdict(float)
    doing: dict[str, float] = defaultdict(float)
    for sample, weight in at_line:
        pids[sample.pid] += weight
        inner = sample.view.innermost
        if (inner.file, inner.line) != (line.file, line.line):
            doing[describe_frame(inner)] += weight
    first = at_line[0].sample
    most = max(doing.items(), key=lambda item: item[1], default=("", 0.0))
    is_inside = most[1] > 0 and sum(doing.values()) * 2 >= _total(at_line)
    return CodeLocation(
        pid=max(pids, key=lambda pid: pids[pid]),
        role=first.role,
        file=line.file,
        line=line.line,
        function=line.function,
        share=round(share, 3),
        stacks=stacks,
        doing=most[0] if is_inside else None,
    )


def _listed(lines: Mapping[StackFrame, float], total: float | None) -> str:
    """Return the most frequent lines as text, with their shares of a total if it is given."""
    shown = [
        describe_frame(line) + ("" if total is None else f" {weight / total:.0%}")
        for line, weight in _most_frequent(lines)
    ]
    return ", ".join(shown)


def _most_frequent(lines: Mapping[StackFrame, float]) -> list[tuple[StackFrame, float]]:
    return sorted(lines.items(), key=lambda item: -item[1])[:_MAX_LINES]


def describe_frame(frame: StackFrame) -> str:
    """Return a frame as text: `json/encoder.py:258 iterencode`."""
    return f"{shorten_path(frame.shown_file)}:{frame.line} {frame.function}"


def shorten_path(path: str) -> str:
    """Return the end of a path that people recognize: its last two parts within a package, else its last."""
    parts = path.split("/")
    if not path.startswith("/"):
        return "/".join(parts[-3:])
    return "/".join(parts[-2:]) if parts[-1].startswith("__") else parts[-1]


def _key(frame: StackFrame) -> StackFrame:
    return frame._replace(short_file="") if frame.short_file else frame


def _total(entries: Iterable[_Weighted]) -> float:
    return sum(each.weight for each in entries)
