"""`gpulse.profile`: the blocks of this process, and the one thread that reads the GPUs while any of them is open."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from gpulse.profiling.account import Account, Event, Ledger
from gpulse.profiling.block import Block, check_function, name_of
from gpulse.profiling.loading import loading
from gpulse.profiling.report import Report
from gpulse.profiling.summary import Summary

if TYPE_CHECKING:
    from gpulse.profiling.machine import OwnMachine

P = ParamSpec("P")
R = TypeVar("R")

_INTERVAL_SECONDS = 0.2
_FIRST_SECONDS = 0.1
"""Time between the first looks, for which somebody may wait."""
_SECONDS_A_GPU = 0.025
"""Looks become rarer with the number of GPUs, so that they never cost more than a few hundredths of a CPU."""
_LINGER_SECONDS = 5.0
_RARE_SECONDS = 1.0
"""Time between two looks where there is no GPU."""
_SETTLE_SECONDS = 1.0
"""The longest that a report waits for the readings of a block that has just ended."""
_YIELD_SECONDS = 1e-3
"""So that the block that starts the thread need not wait until it has loaded what it needs."""
_FIRST_LOOKS = 2
"""What is read beside the tick, such as power, is there at the second look."""
_START_SECONDS = 5.0
_STOP_SECONDS = 2.0
_MOST_EVENTS = 20_000
"""Begins and ends that wait for the thread; from then on whoever ends a run takes them in."""
_MOST_NAMES = 1_000
_NAMELESS = "block"
_OTHERS = "(other blocks)"
"""Where blocks go whose names are too many: somebody numbers them."""

_log = logging.getLogger("gpulse.profile")


class Profiler:
    """Measures blocks of code; use it as `gpulse.profile`."""

    _condition: threading.Condition
    """Its lock guards the ledger; whoever waits for readings is told of each look."""
    _thread: threading.Thread | None
    _trouble: str | None

    def __init__(self, *, linger_seconds: float = _LINGER_SECONDS) -> None:
        """Prepare to measure.

        Args:
            linger_seconds: How long the thread goes on after the last block, since the next one mostly comes soon.
        """
        self._linger = linger_seconds
        self._events: deque[Event] = deque()
        """What threads append to without a lock; only who holds the lock takes from it."""
        self._blocks: dict[str, Block] = {}
        self._known: weakref.WeakSet[Block] = weakref.WeakSet()
        """Those without a name too."""
        self._interval: float | None = None
        self._gpus: str | None = None
        self._is_prepared = False
        self._forget()

    @overload
    def __call__(self, name: str | None = None, /) -> Block: ...
    @overload
    def __call__(self, name: Callable[P, R], /) -> Callable[P, R]: ...
    def __call__(self, name: str | Callable[..., Any] | None = None, /) -> Any:
        """The block of that name, for `with` and as a decorator; every use of a name adds to the same block.

        Args:
            name: Of the block; without one, a block of its own that no summary shows. A function is decorated with
                the block of its name.

        Raises:
            UsageError: It is neither a name nor a function that can be measured.
        """
        if name is None:
            return self._made(_NAMELESS, is_named=False)
        if isinstance(name, str):
            return self.named(name)
        check_function(name)
        return self.named(name_of(name))(name)

    def named(self, name: str) -> Block:
        """The block of a name."""
        block = self._blocks.get(name)
        if block is None:
            if len(self._blocks) >= _MOST_NAMES:
                name = _OTHERS
            block = self._blocks.setdefault(name, self._made(name, is_named=True))
        return block

    def _made(self, name: str, *, is_named: bool) -> Block:
        account = Account(name)
        block = Block(self, account, is_named=is_named)
        account.is_wanted = weakref.ref(block)
        self._known.add(block)
        return block

    def start(
        self, *, interval_seconds: float | None = None, gpus: Sequence[int | str] | None = None
    ) -> None:
        """Read the GPUs from now on until `stop`, so that the first block is measured from its first moment on.

        Args:
            interval_seconds: Time from one reading to the next, at least 0.05; without it 0.2, and more from nine
                GPUs on.
            gpus: Indexes or UUIDs of the GPUs that count; without it those of CUDA_VISIBLE_DEVICES.

        Raises:
            UsageError: The interval is too short, or endless.
        """
        with loading:
            from gpulse.sampling.sampler import checked_interval  # noqa: PLC0415  nothing is loaded before it is used

        wanted = None if interval_seconds is None else checked_interval(interval_seconds)
        words = None if gpus is None else ",".join(str(gpu) for gpu in gpus)
        if (wanted, words) != (self._interval, self._gpus):
            self.stop()
            self._interval, self._gpus = wanted, words
        self._is_pinned = True
        self.ensure()
        with self._condition:
            self._condition.wait_for(lambda: self._looks >= _FIRST_LOOKS or self.is_idle, _START_SECONDS)

    def stop(self) -> None:
        """Stop reading; a block that is opened later starts it again."""
        self._is_pinned = False
        thread, stopping = self._thread, self._stopping
        stopping.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_STOP_SECONDS)

    def reset(self) -> None:
        """Forget all that was measured; blocks that are open begin anew."""
        with self._condition:
            self._drain()
            for block in self._known:
                block.account.restart(monotonic())

    def summary(self) -> Summary:
        """All blocks with a name, in the order in which they were first used."""
        with self._condition:
            self._drain()
        used = [block.account for block in list(self._blocks.values()) if block.account.spans.count]
        return Summary(tuple(self.report(account) for account in used))

    def report(self, account: Account) -> Report:
        """What a block has used; one that has just ended is waited for until its last readings are there."""
        with loading:
            from gpulse.profiling.judging import judged  # noqa: PLC0415  the rules are loaded for who asks

        with self._condition:
            self._drain()
            ended = account.spans.ended_at
            if account.spans.depth == 0:
                self._condition.wait_for(
                    lambda: self.is_idle or self._ledger.is_settled(ended), _SETTLE_SECONDS
                )
            self._drain()
            diagnosis = judged(account, self._trouble)
            return Report.of(
                account,
                monotonic(),
                diagnosis,
                interval_seconds=self._pace,
                held=self._ledger.held,
                trouble=self._trouble,
            )

    @property
    def events(self) -> deque[Event]:
        """Where blocks say that they begin and end."""
        return self._events

    @property
    def is_idle(self) -> bool:
        """Whether no thread reads the GPUs."""
        return self._thread is None

    def ensure(self) -> None:
        """Have a thread that reads the GPUs."""
        with self._condition:
            if self._thread is not None:
                return
            if not self._is_prepared:
                self._is_prepared = True
                loading.prepare()
                os.register_at_fork(after_in_child=self._forget)
                atexit.register(self.stop)
            self._looks = 0
            self._stopping = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._stopping,), name="gpulse-profile", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:  # the interpreter is about to end, or there are too many threads
                self._thread = None
                self._trouble = f"no thread could be started: {error}"

    def relieve(self) -> None:
        """Take in what threads said, if nobody else is at it."""
        if len(self._events) > _MOST_EVENTS and self._condition.acquire(blocking=False):
            try:
                self._drain()
                self._ledger.tidy()
            finally:
                self._condition.release()

    def _forget(self) -> None:
        """Begin anew: in a forked process there is no thread, and locks may be held by those of the parent."""
        self._condition = threading.Condition()
        self._events.clear()
        self._ledger = Ledger()
        self._thread = None
        self._stopping = threading.Event()
        self._trouble = None
        self._is_pinned = False
        self._looks = 0
        self._pace = self._interval or _INTERVAL_SECONDS
        for block in self._known:
            block.account.begin()

    def _drain(self) -> None:
        """Take in what threads said; only for who holds the lock."""
        events, ledger = self._events, self._ledger
        for _ in range(len(events)):
            if not events:  # a block that ends in the collector of garbage can come in between
                break
            ledger.take_event(events.popleft())

    def _run(self, stopping: threading.Event) -> None:
        time.sleep(_YIELD_SECONDS)
        machine: OwnMachine | None = None
        try:
            with loading:
                import gpulse.diagnosis.digest  # noqa: F401, PLC0415  what the ledger will want
                from gpulse.profiling.machine import OwnMachine, own_pid  # noqa: PLC0415  loads the driver's binding
            variable = os.environ.get("CUDA_VISIBLE_DEVICES") if self._gpus is None else self._gpus
            machine = OwnMachine(self._interval or _INTERVAL_SECONDS, variable)
            with self._condition:
                self._ledger.pid = own_pid()
            due = monotonic()
            while not stopping.is_set():
                interval = self._look(machine)
                if self._is_over():
                    break
                due = max(due + interval, monotonic())
                stopping.wait(due - monotonic())
        except Exception as error:  # noqa: BLE001  the end of a thread that nobody watches: told by reports
            self._tell(f"a fault in gpulse: {error!r}")
        finally:
            with self._condition:
                if self._thread is threading.current_thread():
                    self._leave()
            if machine is not None:
                machine.close()

    def _look(self, machine: Any) -> float:
        """One look; the time until the next one."""
        look = machine.look(time.time())
        self._tell(look.trouble)
        with self._condition:
            self._drain()
            self._ledger.take(look.gpus, look.now, look.monotonic)
            if look.frame is not None:
                self._ledger.take_frame(look.frame)
            self._looks += 1
            self._condition.notify_all()
        self._pace = self._interval or max(_INTERVAL_SECONDS, _SECONDS_A_GPU * len(look.gpus))
        if self._looks < _FIRST_LOOKS:
            return min(_FIRST_SECONDS, self._pace)
        return self._pace if look.gpus else _RARE_SECONDS

    def _is_over(self) -> bool:
        """Whether nobody has been in a block for a while; from then on there is no thread."""
        with self._condition:
            last = self._ledger.last_end()
            if self._is_pinned or not self._ledger.is_idle:
                return False
            if last is not None and monotonic() - last < self._linger:
                return False
            self._leave()
            if self._events:  # somebody came in at the last moment and saw the thread still there
                self._thread = threading.current_thread()
                return False
            return True

    def _leave(self) -> None:
        """From now on there is no thread; only for who holds the lock."""
        self._thread = None
        self._ledger.stop()
        self._condition.notify_all()

    def _tell(self, trouble: str | None) -> None:
        """Keep in mind why there is less than there should be, and say it once."""
        if trouble is not None and trouble != self._trouble:
            _log.warning("%s", trouble)
        self._trouble = trouble


profile = Profiler()
"""What `gpulse.profile` is."""
