"""A profiling session: a named time interval of the frame stream, never a copy of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from gpulse.errors import RefusedError, UsageError

SessionState = Literal["active", "interrupted", "finished"]
"""active: running. interrupted: the head stopped during it, and it can be recovered. finished: stopped."""

SessionFormat = Literal["json", "jsonl", "csv", "parquet"]
"""File formats of a session."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MIN_INTERVAL_MS = 50
MAX_INTERVAL_MS = 3_600_000
MAX_LABEL_CHARS = 200
MAX_LABELS = 50


class Interruption(NamedTuple):
    """A time in which the head was down during the session."""

    start: float
    end: float | None = None
    """None until the session is recovered."""


class Session(NamedTuple):
    """One session."""

    id: str
    """Generated at the start, and never reused."""
    name: str
    start: float
    """Epoch seconds on the head's clock; before `created` when it was started for a past time."""
    created: float
    interval_ms: int
    """Time that one frame of its export covers."""
    state: SessionState = "active"
    end: float | None = None
    nodes: tuple[str, ...] = ()
    """Nodes in the session; all nodes when empty."""
    gpus: tuple[str, ...] = ()
    """GPUs in the session, as `node:index`, index or UUID; all GPUs when empty."""
    labels: Mapping[str, str] = {}
    bandwidth: bool = False
    nvlink: bool = False
    output: str | None = None
    """The file that it was written to, if any."""
    interruptions: tuple[Interruption, ...] = ()

    @property
    def is_active(self) -> bool:
        """True while new frames become part of it."""
        return self.state == "active"

    @property
    def last_time(self) -> float:
        """The last time at which something is known to have happened to it."""
        gaps = [time for gap in self.interruptions for time in gap if time is not None]
        return max(self.start, self.created, self.end or 0.0, *gaps, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the session as JSON types."""
        document = self._asdict()
        document["labels"] = dict(self.labels)
        document["interruptions"] = [list(part) for part in self.interruptions]
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Session:
        """Return the session of a `to_dict` document; fields of newer versions are ignored.

        Raises:
            ValueError: A field is missing or invalid.
        """
        try:
            known = {name: document[name] for name in cls._fields if name in document}
            known["nodes"], known["gpus"] = tuple(known.get("nodes", ())), tuple(known.get("gpus", ()))
            known["labels"] = dict(known.get("labels", {}))
            known["interruptions"] = tuple(Interruption(*part) for part in known.get("interruptions", ()))
            return _validate(cls(**known))
        except (TypeError, ValueError, OverflowError, UsageError) as error:
            raise ValueError(f"not a valid session: {error}") from error


def _validate(session: Session) -> Session:
    """Return the session if all of its fields are valid; anybody may have written it.

    Raises:
        ValueError: A field is invalid.
        UsageError: The name is not allowed.
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
        "text fields": all(isinstance(text, str) for text in texts) and bool(session.id),
        "times": all(map(_is_moment, moments)),
        "end times": all(moment is None or _is_moment(moment) for moment in (session.end, last_end)),
        "interval": _is_moment(session.interval_ms) and session.interval_ms > 0,
        "state": session.state in get_args(SessionState),
        "interruption": session.state != "interrupted" or bool(gaps),
        "end": session.state != "finished" or session.end is not None,
        "output": session.output is None or isinstance(session.output, str),
        "bandwidth": {type(session.bandwidth), type(session.nvlink)} == {bool},
    }
    wrong = [name for name, is_right in held.items() if not is_right]
    if wrong:
        raise ValueError(f"invalid {', '.join(wrong)}")
    check_session_name(session.name)
    return session


def _is_moment(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_session_name(name: str) -> str:
    """Return the name if it is a valid session name.

    Raises:
        UsageError: It is not.
    """
    if not _NAME.fullmatch(name):
        shown = name if len(name) <= 40 else f"{name[:40]}…"
        raise UsageError(
            f"invalid session name {shown!r}",
            hint="use at most 100 letters, digits, dots, dashes and underscores, starting with a letter or digit",
        )
    return name


def find_session(sessions: Sequence[Session], name: str) -> Session:
    """Return the session with this ID, or the newest with this name, preferring an active one.

    Raises:
        RefusedError: There is no such session.
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
            hint=f"use one of the existing sessions: {known}" if known else "start a session first",
        )
    return max(named, key=lambda session: (session.is_active, session.created))
