"""`gpulse.profile`: code blocks of this process, and the thread that reads the GPUs while any block is open."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from gpulse.errors import UsageError
from gpulse.profiling.block_report import BlockReport, ProfileSummary
from gpulse.profiling.block_usage import BlockEvent, BlockUsage, UsageTracker
from gpulse.profiling.import_lock import import_lock

if TYPE_CHECKING:
    from gpulse.model.finding import Finding
    from gpulse.profiling.gpu_sampling import ProfilingSampler


P = ParamSpec("P")
R = TypeVar("R")

_INTERVAL_SECONDS = 0.2
_FIRST_SECONDS = 0.1
"""Time between the first samples, which a caller may wait for."""
_SECONDS_PER_GPU = 0.025
"""The interval grows with the number of GPUs, so that sampling never uses more than a few percent of a CPU."""
_LINGER_SECONDS = 5.0
_NO_GPU_INTERVAL_SECONDS = 1.0
"""Time between two samples without a GPU."""
_SETTLE_SECONDS = 1.0
"""Maximum time that a report waits for the readings of a block that has just ended."""
_YIELD_SECONDS = 1e-3
"""Lets the block that starts the thread continue before the thread loads its modules."""
_FIRST_SAMPLES = 2
"""Slower readings, such as power, are complete at the second sample."""
_START_SECONDS = 5.0
_STOP_SECONDS = 2.0
_MAX_EVENTS = 20_000
"""Maximum number of queued events; beyond it, the thread that ends a run processes them."""
_MAX_NAMES = 1_000
_DEFAULT_NAME = "block"
_OVERFLOW_NAME = "(other blocks)"
"""Name of the block that collects all further names, for example when a program numbers its blocks."""

_log = logging.getLogger("gpulse.profile")


class Block:
    """A block of code. It can be entered any number of times, from any thread, also recursively.

    Figures cover all its runs together. Reading them right after the end of a run waits for the last readings, about
    0.2 s; reading them while the block is open does not wait.
    """

    def __init__(self, profiler: Profiler, usage: BlockUsage, *, is_named: bool) -> None:
        self.usage = usage
        self._is_named = is_named
        self._profiler = profiler
        self._append = profiler.events.append

    @property
    def name(self) -> str:
        """Name of the block."""
        return self.usage.name

    def __enter__(self) -> Self:
        self._append((monotonic(), self.usage, True))
        if self._profiler.is_idle:
            self._profiler.ensure_thread()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._append((monotonic(), self.usage, False))
        self._profiler.drain_overflow()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function, measured on every call; a coroutine is measured from its first step to its last.

        Raises:
            UsageError: It is not a function, or it is a generator, which continues after it returns.
        """
        check_function(function)
        block = self if self._is_named else self._profiler.get_block(block_name(function))
        wrapper: Any
        measured: Any = function
        if inspect.iscoroutinefunction(_called_function(function)):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                with block:
                    return await measured(*args, **kwargs)

        else:

            @functools.wraps(function)
            def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
                with block:
                    return function(*args, **kwargs)

        wrapper.profile = block
        return wrapper  # type: ignore[no-any-return]

    def report(self) -> BlockReport:
        """Return the report of the block."""
        return self._profiler.report(self.usage)

    @property
    def runs(self) -> int:
        """Number of runs."""
        return self.report().runs

    @property
    def seconds(self) -> float:
        """Time with at least one active run."""
        return self.report().seconds

    @property
    def energy_joules(self) -> float | None:
        """Energy of all its GPUs; None when unknown."""
        return self.report().energy_joules

    @property
    def memory_peak_bytes(self) -> int | None:
        """Peak memory use on one of its GPUs, by all processes; None when no reading fell into the block."""
        return self.report().memory_peak_bytes

    @property
    def process_memory_peak_bytes(self) -> int | None:
        """Peak memory use of this process alone."""
        return self.report().process_memory_peak_bytes

    @property
    def activity(self) -> dict[str, float]:
        """Mean activity of its GPUs by metric name; unknown metrics are absent."""
        return self.report().activity

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of its diagnosis, worst first; there are none for less than ten seconds."""
        return self.report().findings

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return self.report().to_dict()

    def __str__(self) -> str:
        return str(self.report())

    def __repr__(self) -> str:
        return f"<gpulse block {self.name!r}>"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


def check_function(function: object) -> None:
    """Check that a function can be measured from its call to its return.

    Raises:
        UsageError: It is not a function, or it is a generator.
    """
    if inspect.isclass(function):
        raise UsageError("cannot profile a class", hint="decorate its methods instead")
    if isinstance(function, classmethod | staticmethod):
        kind = type(function).__name__
        raise UsageError(f"cannot profile a {kind} object", hint=f"put @{kind} above @gpulse.profile")
    if not callable(function):
        raise UsageError(
            f"gpulse.profile takes a name or a function, not {type(function).__name__}",
            hint='use gpulse.profile("phase"), or @gpulse.profile above a function',
        )
    called = _called_function(function)
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise UsageError(
            "cannot profile a generator function: its body runs after the call has returned",
            hint="use `with gpulse.profile(...)` inside it",
        )


def _called_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a call runs: for a callable object, its `__call__`."""
    if inspect.isroutine(function) or isinstance(function, functools.partial):
        return function
    return type(function).__call__


def block_name(function: Callable[..., Any]) -> str:
    """Return the block name of a function: with its module, unless that is `__main__`."""
    named = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None)
    return named if module in (None, "__main__") else f"{module}.{named}"


class Profiler:
    """Measures blocks of code; use it as `gpulse.profile`."""

    _condition: threading.Condition
    """Guards the usage tracker; notifies threads that wait for readings of each sample."""
    _thread: threading.Thread | None
    _trouble: str | None

    def __init__(self, *, linger_seconds: float = _LINGER_SECONDS) -> None:
        """Create a profiler; its thread starts with the first block.

        Args:
            linger_seconds: How long the thread continues after the last block, because the next one usually follows soon.
        """
        self._linger = linger_seconds
        self._events: deque[BlockEvent] = deque()
        """Threads append to it without a lock; only the holder of the lock removes events."""
        self._blocks: dict[str, Block] = {}
        self._all_blocks: weakref.WeakSet[Block] = weakref.WeakSet()
        """All blocks, including unnamed ones."""
        self._interval: float | None = None
        self._gpus: str | None = None
        self._is_prepared = False
        self._reset_state()

    @overload
    def __call__(self, name: str | None = None, /) -> Block: ...
    @overload
    def __call__(self, name: Callable[P, R], /) -> Callable[P, R]: ...
    def __call__(self, name: str | Callable[..., Any] | None = None, /) -> Any:
        """Return the block with this name, for `with` and as a decorator; all uses of a name add to the same block.

        Args:
            name: Name of the block; None creates a separate block that the summary does not show. A function is
                decorated with the block of its name.

        Raises:
            UsageError: It is neither a name nor a function that can be measured.
        """
        if name is None:
            return self._create_block(_DEFAULT_NAME, is_named=False)
        if isinstance(name, str):
            return self.get_block(name)
        check_function(name)
        return self.get_block(block_name(name))(name)

    def get_block(self, name: str) -> Block:
        """Return the block with this name."""
        block = self._blocks.get(name)
        if block is None:
            if len(self._blocks) >= _MAX_NAMES:
                name = _OVERFLOW_NAME
            block = self._blocks.setdefault(name, self._create_block(name, is_named=True))
        return block

    def _create_block(self, name: str, *, is_named: bool) -> Block:
        usage = BlockUsage(name)
        block = Block(self, usage, is_named=is_named)
        usage.is_wanted = weakref.ref(block)
        self._all_blocks.add(block)
        return block

    def start(
        self, *, interval_seconds: float | None = None, gpus: Sequence[int | str] | None = None
    ) -> None:
        """Read the GPUs from now until `stop`, so that the first block is measured from its very beginning.

        Args:
            interval_seconds: Time between two readings, at least 0.05; default: 0.2, more with nine or more GPUs.
            gpus: Indexes or UUIDs of the GPUs to read; default: those of CUDA_VISIBLE_DEVICES.

        Raises:
            UsageError: The interval is too short or infinite.
        """
        with import_lock:
            from gpulse.sampling.sampler import check_interval  # noqa: PLC0415  deferred until first use

        wanted = None if interval_seconds is None else check_interval(interval_seconds)
        words = None if gpus is None else ",".join(str(gpu) for gpu in gpus)
        if (wanted, words) != (self._interval, self._gpus):
            self.stop()
            self._interval, self._gpus = wanted, words
        self._is_pinned = True
        self.ensure_thread()
        with self._condition:
            self._condition.wait_for(lambda: self._samples >= _FIRST_SAMPLES or self.is_idle, _START_SECONDS)

    def stop(self) -> None:
        """Stop reading; a block that is opened later restarts it."""
        self._is_pinned = False
        thread, stopping = self._thread, self._stopping
        stopping.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)

    def reset(self) -> None:
        """Discard all measurements; open blocks start over."""
        with self._condition:
            self._drain()
            for block in self._all_blocks:
                block.usage.restart(monotonic())

    def summary(self) -> ProfileSummary:
        """Return all named blocks, in the order of their first use."""
        with self._condition:
            self._drain()
        used = [block.usage for block in list(self._blocks.values()) if block.usage.run_times.count]
        return ProfileSummary(tuple(self.report(usage) for usage in used))

    def report(self, usage: BlockUsage) -> BlockReport:
        """Return the report of a block; if it has just ended, wait for its last readings."""
        with import_lock:
            from gpulse.profiling.block_diagnosis import diagnose_block  # noqa: PLC0415  the rules are loaded only for reports

        with self._condition:
            self._drain()
            ended = usage.run_times.ended_at
            if usage.run_times.depth == 0:
                self._condition.wait_for(
                    lambda: self.is_idle or self._tracker.is_settled(ended), _SETTLE_SECONDS
                )
            self._drain()
            diagnosis = diagnose_block(usage, self._trouble)
            return BlockReport.of(
                usage,
                monotonic(),
                diagnosis,
                interval_seconds=self._current_interval,
                used_uuids=self._tracker.used_uuids,
                trouble=self._trouble,
            )

    @property
    def events(self) -> deque[BlockEvent]:
        """Queue of starts and ends of runs."""
        return self._events

    @property
    def is_idle(self) -> bool:
        """Whether no thread reads the GPUs."""
        return self._thread is None

    def ensure_thread(self) -> None:
        """Start the thread that reads the GPUs, unless it runs."""
        with self._condition:
            if self._thread is not None:
                return
            if not self._is_prepared:
                self._is_prepared = True
                import_lock.prepare()
                os.register_at_fork(after_in_child=self._reset_state)
                atexit.register(self.stop)
            self._samples = 0
            self._stopping = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._stopping,), name="gpulse-profile", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:  # the interpreter is shutting down, or there are too many threads
                self._thread = None
                self._trouble = f"cannot start the profiling thread: {error}"

    def drain_overflow(self) -> None:
        """Process queued events, unless another thread does."""
        if len(self._events) > _MAX_EVENTS and self._condition.acquire(blocking=False):
            try:
                self._drain()
                self._tracker.tidy()
            finally:
                self._condition.release()

    def _reset_state(self) -> None:
        """Reset all state: a forked process has no thread, and locks may be held by threads of the parent."""
        self._condition = threading.Condition()
        self._events.clear()
        self._tracker = UsageTracker()
        self._thread = None
        self._stopping = threading.Event()
        self._trouble = None
        self._is_pinned = False
        self._samples = 0
        self._current_interval = self._interval or _INTERVAL_SECONDS
        for block in self._all_blocks:
            block.usage.begin()

    def _drain(self) -> None:
        """Process queued events; the caller must hold the lock."""
        events, tracker = self._events, self._tracker
        for _ in range(len(events)):
            if not events:  # a block that ends during garbage collection may have taken it
                break
            tracker.add_event(events.popleft())

    def _run(self, stopping: threading.Event) -> None:
        time.sleep(_YIELD_SECONDS)
        sampler: ProfilingSampler | None = None
        try:
            with import_lock:
                import gpulse.diagnosis.second_aggregator  # noqa: F401, PLC0415  the tracker needs it
                from gpulse.profiling.gpu_sampling import ProfilingSampler, driver_pid  # noqa: PLC0415  loads the driver's binding
            variable = os.environ.get("CUDA_VISIBLE_DEVICES") if self._gpus is None else self._gpus
            sampler = ProfilingSampler(self._interval or _INTERVAL_SECONDS, variable)
            with self._condition:
                self._tracker.pid = driver_pid()
            due = monotonic()
            while not stopping.is_set():
                interval = self._take_sample(sampler)
                if self._should_end():
                    break
                due = max(due + interval, monotonic())
                stopping.wait(due - monotonic())
        except Exception as error:  # noqa: BLE001  the thread ends; reports show the error
            self._set_trouble(f"internal error in gpulse: {error!r}")
        finally:
            with self._condition:
                if self._thread is threading.current_thread():
                    self._end_thread()
            if sampler is not None:
                sampler.close()

    def _take_sample(self, sampler: Any) -> float:
        """Take one sample, and return the time until the next one."""
        sample = sampler.sample(time.time())
        self._set_trouble(sample.trouble)
        with self._condition:
            self._drain()
            self._tracker.add_readings(sample.gpus, sample.now, sample.monotonic)
            if sample.frame is not None:
                self._tracker.add_frame(sample.frame)
            self._samples += 1
            self._condition.notify_all()
        self._current_interval = self._interval or max(_INTERVAL_SECONDS, _SECONDS_PER_GPU * len(sample.gpus))
        if self._samples < _FIRST_SAMPLES:
            return min(_FIRST_SECONDS, self._current_interval)
        return self._current_interval if sample.gpus else _NO_GPU_INTERVAL_SECONDS

    def _should_end(self) -> bool:
        """Whether no block was open for a while; the thread then ends."""
        with self._condition:
            last = self._tracker.last_end()
            if self._is_pinned or not self._tracker.is_idle:
                return False
            if last is not None and monotonic() - last < self._linger:
                return False
            self._end_thread()
            if self._events:  # a block was entered at the last moment and saw the thread still running
                self._thread = threading.current_thread()
                return False
            return True

    def _end_thread(self) -> None:
        """Mark the thread as ended; the caller must hold the lock."""
        self._thread = None
        self._tracker.stop()
        self._condition.notify_all()

    def _set_trouble(self, trouble: str | None) -> None:
        """Store why readings are missing, and log it once."""
        if trouble is not None and trouble != self._trouble:
            _log.warning("%s", trouble)
        self._trouble = trouble


profile = Profiler()
"""The profiler `gpulse.profile`."""
