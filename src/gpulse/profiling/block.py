"""A block of code that is measured: a context manager and a decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from gpulse.errors import UsageError

if TYPE_CHECKING:
    from gpulse.model.finding import Finding
    from gpulse.profiling.account import Account
    from gpulse.profiling.profiler import Profiler
    from gpulse.profiling.report import Report

P = ParamSpec("P")
R = TypeVar("R")


class Block:
    """One block of code: enter it as often as you like, from any thread, also within itself.

    Figures are of all its runs together. Asking for them right after its end waits for the readings of its last
    moment, some two tenths of a second; asking while it is open does not.
    """

    def __init__(self, profiler: Profiler, account: Account, *, is_named: bool) -> None:
        self.account = account
        self._is_named = is_named
        self._profiler = profiler
        self._append = profiler.events.append

    @property
    def name(self) -> str:
        """What it is called."""
        return self.account.name

    def __enter__(self) -> Self:
        self._append((monotonic(), self.account, True))
        if self._profiler.is_idle:
            self._profiler.ensure()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._append((monotonic(), self.account, False))
        self._profiler.relieve()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, measured whenever it runs; a coroutine from its first step to its last.

        Raises:
            UsageError: It is no function, or a generator, which is not over when it returns.
        """
        check_function(function)
        block = self if self._is_named else self._profiler.named(name_of(function))
        wrapper: Any
        measured: Any = function
        if inspect.iscoroutinefunction(_called(function)):

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

    def report(self) -> Report:
        """Everything that is known about it."""
        return self._profiler.report(self.account)

    @property
    def runs(self) -> int:
        """How often it was entered."""
        return self.report().runs

    @property
    def seconds(self) -> float:
        """Time with at least one run under way."""
        return self.report().seconds

    @property
    def energy_joules(self) -> float | None:
        """Of its GPUs together, None when nobody could say."""
        return self.report().energy_joules

    @property
    def memory_peak_bytes(self) -> int | None:
        """The most that was in use on one of its GPUs, None when no reading fell into the block."""
        return self.report().memory_peak_bytes

    @property
    def process_memory_peak_bytes(self) -> int | None:
        """The same of this process alone."""
        return self.report().process_memory_peak_bytes

    @property
    def activity(self) -> dict[str, float]:
        """How busy its GPUs were: means by catalogue name, of what could be had."""
        return self.report().activity

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What held it up, worst first; nothing is found in less than ten seconds."""
        return self.report().findings

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return self.report().to_dict()

    def __str__(self) -> str:
        return str(self.report())

    def __repr__(self) -> str:
        return f"<gpulse block {self.name!r}>"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


def check_function(function: object) -> None:
    """Refuse to measure what does not run from its call to its return.

    Raises:
        UsageError: It is no function, or a generator.
    """
    if inspect.isclass(function):
        raise UsageError("a class is not a block", hint="decorate its methods instead")
    if isinstance(function, classmethod | staticmethod):
        kind = type(function).__name__
        raise UsageError(f"a {kind} is not a function yet", hint=f"put @{kind} above @gpulse.profile")
    if not callable(function):
        raise UsageError(
            f"a block is a name or a function, not a {type(function).__name__}",
            hint='gpulse.profile("phase"), or @gpulse.profile above a function',
        )
    called = _called(function)
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise UsageError(
            "a generator is not over when it returns", hint="use `with gpulse.profile(...)` inside it"
        )


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """What runs when it is called: of an object, the method that makes it callable."""
    if inspect.isroutine(function) or isinstance(function, functools.partial):
        return function
    return type(function).__call__


def name_of(function: Callable[..., Any]) -> str:
    """What the block of a function is called: by its module too, but for the program's own."""
    named = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None)
    return named if module in (None, "__main__") else f"{module}.{named}"
