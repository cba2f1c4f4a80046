"""Which of two versions of one session counts: several heads may change it, and hear of each other's changes later."""

from __future__ import annotations

from gpulse.model.session import Session


def newer(known: Session, told: Session) -> Session:
    """The version that counts, whichever of them was heard of first.

    A session that was stopped stays so. Otherwise what happened to it last counts, by the heads' clocks.
    """
    return told if _age(told) > _age(known) else known


def _age(session: Session) -> tuple[bool, float, bool]:
    moments = [session.created, session.end or 0.0]
    for gap in session.interruptions:
        moments += [gap.start, gap.end or 0.0]
    return session.state == "finished", max(moments), session.output is not None
