"""A profiling session: a named interval over the stream of frames, never a copy of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from gpulse.errors import RefusedError, UsageError

State = Literal["active", "interrupted", "finished"]
"""active: it goes on. interrupted: the head ended under it, and it can be recovered. finished: stopped."""

Format = Literal["json", "jsonl", "csv", "parquet"]
"""The formats of a session's file."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MIN_INTERVAL_MS = 50
MAX_INTERVAL_MS = 3_600_000
LONGEST_LABEL = 200
MOST_LABELS = 50


class Interruption(NamedTuple):
    """A stretch in which the head was not there to keep the session."""

    start: float
    end: float | None = None
    """None while nobody has recovered the session."""


class Session(NamedTuple):
    """One session."""

    id: str
    """Made when it starts; never used again."""
    name: str
    start: float
    """Epoch seconds, on the head's clock; before `created` when it was started for a time in the past."""
    created: float
    interval_ms: int
    """One frame of its export covers this long."""
    state: State = "active"
    end: float | None = None
    nodes: tuple[str, ...] = ()
    """The only nodes in it; all of them when empty."""
    gpus: tuple[str, ...] = ()
    """The only GPUs in it, as `node:index`, index or UUID; all of them when empty."""
    labels: Mapping[str, str] = {}
    bandwidth: bool = False
    nvlink: bool = False
    output: str | None = None
    """The file it was written to, once it was."""
    interruptions: tuple[Interruption, ...] = ()

    @property
    def is_active(self) -> bool:
        """True while frames still become part of it."""
        return self.state == "active"

    def to_dict(self) -> dict[str, Any]:
        """The session as JSON spells it."""
        document = self._asdict()
        document["labels"] = dict(self.labels)
        document["interruptions"] = [list(part) for part in self.interruptions]
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Session:
        """Read what `to_dict` made; fields of newer versions are left out.

        Raises:
            ValueError: Something it needs is missing, or is of another kind.
        """
        try:
            known = {name: document[name] for name in cls._fields if name in document}
            known["nodes"], known["gpus"] = tuple(known.get("nodes", ())), tuple(known.get("gpus", ()))
            known["labels"] = dict(known.get("labels", {}))
            known["interruptions"] = tuple(Interruption(*part) for part in known.get("interruptions", ()))
            return _checked(cls(**known))
        except (TypeError, ValueError, OverflowError, UsageError) as error:
            raise ValueError(f"it is not a session: {error}") from error


def _checked(session: Session) -> Session:
    """The session, if everything in it is of its kind: it may have been written by anybody.

    Raises:
        ValueError: Something is not.
        UsageError: It cannot be called that.
    """
    gaps = session.interruptions
    last_end = gaps[-1].end if gaps else None
    texts = (
        session.id,
        session.name,
        *session.nodes,
        *session.gpus,
        *session.labels,
        *session.labels.values(),
    )
    moments = (session.start, session.created, *(gap.start for gap in gaps), *(gap.end for gap in gaps[:-1]))
    held = {
        "texts": all(isinstance(text, str) for text in texts) and bool(session.id),
        "moments": all(map(_is_moment, moments)),
        "ends": all(moment is None or _is_moment(moment) for moment in (session.end, last_end)),
        "interval": _is_moment(session.interval_ms) and session.interval_ms > 0,
        "state": session.state in get_args(State),
        "interruption": session.state != "interrupted" or bool(gaps),
        "end": session.state != "finished" or session.end is not None,
        "output": session.output is None or isinstance(session.output, str),
        "bandwidth": {type(session.bandwidth), type(session.nvlink)} == {bool},
    }
    wrong = [name for name, is_right in held.items() if not is_right]
    if wrong:
        raise ValueError(f"its {', '.join(wrong)} cannot be right")
    checked_name(session.name)
    return session


def _is_moment(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def checked_name(name: str) -> str:
    """The name, if a session may have it.

    Raises:
        UsageError: It may not.
    """
    if not _NAME.fullmatch(name):
        shown = name if len(name) <= 40 else f"{name[:40]}…"
        raise UsageError(
            f"a session cannot be called {shown!r}",
            hint="letters, digits, dots, dashes and underscores, at most 100, beginning with a letter or digit",
        )
    return name


def find_session(sessions: Sequence[Session], name: str) -> Session:
    """Return the session of that id, or the newest of that name; one that is active comes first.

    Raises:
        RefusedError: There is none.
    """
    for session in sessions:
        if session.id == name:
            return session
    named = [session for session in sessions if session.name == name]
    if not named:
        known = ", ".join(sorted({session.name for session in sessions})[:5])
        raise RefusedError(
            404,
            f"there is no session {name[:100]!r}",
            hint=f"existing sessions: {known}" if known else "start one first",
        )
    return max(named, key=lambda session: (session.is_active, session.created))
