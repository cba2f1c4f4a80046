"""When a program that ended may be started again."""

from __future__ import annotations

from gpulse.harvest.policy.state import ProgramState
from gpulse.harvest.settings import Program

_WELL_SECONDS = 60.0
"""A program that ran for so long was well: what it did before is forgotten."""


def after_end(
    known: ProgramState, program: Program, status: int | None, ran: float, now: float
) -> ProgramState:
    """What is known of a program after it ended by itself.

    Args:
        known: What was known before.
        program: The program.
        status: Its exit code, or minus the signal that ended it; None when nobody saw how it ended.
        ran: For how many seconds.
        now: The time of its end.
    """
    brief = ran < _WELL_SECONDS
    known = known._replace(brief_at=now if brief else None)
    if status == 0:
        wait = 0.0 if ran >= program.backoff_seconds else program.backoff_seconds - ran
        return known._replace(
            failures=0,
            last_status=status,
            last_error=None,
            not_before=now + wait,
            done=program.restart != "always",
        )
    before = known.failures if brief else 0
    return _failed(known, program, before, now)._replace(last_status=status, last_error=None)


def after_failure(known: ProgramState, program: Program, why: str, now: float) -> ProgramState:
    """What is known of a program that could not even be started."""
    known = known._replace(brief_at=now)
    return _failed(known, program, known.failures, now)._replace(last_status=None, last_error=why)


def _failed(known: ProgramState, program: Program, before: int, now: float) -> ProgramState:
    doublings = min(before, 30)
    wait = min(program.longest_backoff_seconds, program.backoff_seconds * 2**doublings)
    return known._replace(failures=before + 1, not_before=now + wait, done=program.restart == "never")
