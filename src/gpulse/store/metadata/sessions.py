"""Which of two versions of a session counts: several heads may change it, and learn of each other's changes later."""

from __future__ import annotations

from gpulse.model.session import Session


def is_newer(session: Session, known: Session) -> bool:
    """Whether a version of a session replaces the one that is known, in whichever order the two arrive.

    A session that was stopped stays so. Otherwise what happened to it last counts, by the heads' clocks.
    """
    return _age(session) > _age(known)


def _age(session: Session) -> tuple[bool, float, bool]:
    moments = [session.created, session.end or 0.0]
    for gap in session.interruptions:
        moments += [gap.start, gap.end or 0.0]
    return session.state == "finished", max(moments), session.output is not None
