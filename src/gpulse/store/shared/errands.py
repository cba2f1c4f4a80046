"""Questions to a file server that may never answer: nobody waits longer than a while, and nobody asks while others wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from gpulse.errors import GpulseError

T = TypeVar("T")


class _Errand(Generic[T]):
    """One question, in a thread of its own."""

    def __init__(self, question: Callable[[], T]) -> None:
        self._question = question
        self._done = threading.Event()
        self._found: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._ask, name="shared-question", daemon=True).start()

    def _ask(self) -> None:
        try:
            self._found.append(self._question())
        except BaseException as error:  # noqa: BLE001  whoever waits raises it
            self._error = error
        finally:
            self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def answer(self, seconds: float) -> T:
        if not self._done.wait(seconds):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._found[0]


class Errands:
    """Asks questions; safe to use from several threads."""

    def __init__(self, place: str, *, patience_seconds: float) -> None:
        """Prepare to ask.

        Args:
            place: What is asked, for errors.
            patience_seconds: So long an answer is waited for.
        """
        self._place = place
        self._patience_seconds = patience_seconds
        self._lost: list[_Errand[object]] = []

    def ask(self, question: Callable[[], T]) -> T:
        """The answer to a question.

        Raises:
            GpulseError: There was none in time, or an earlier question is still waiting for its own.
        """
        self._lost = [errand for errand in self._lost if not errand.is_done]
        if self._lost:
            raise self._silent()
        errand = _Errand(question)
        try:
            return errand.answer(self._patience_seconds)
        except TimeoutError:
            self._lost.append(errand)  # type: ignore[arg-type]  # nobody asks it for its answer
            raise self._silent() from None

    def _silent(self) -> GpulseError:
        return GpulseError(
            f"{self._place} does not answer",
            hint="see whether its file server is there: `df` and `dmesg`; it is asked again once it answers",
        )
