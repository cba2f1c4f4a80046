"""State of sending to a time-series database."""

from __future__ import annotations

from typing import Literal, NamedTuple

Sending = Literal["ok", "behind", "failing", "refused"]


class RemoteState(NamedTuple):
    """How sending to a time-series database stands."""

    state: Sending
    """`behind`: it takes samples, but they are late; `failing`: it is tried again; `refused`: somebody has to help."""
    url: str
    """Where it is, without secrets."""
    error: str | None = None
    """What went wrong last; beside `ok` and `behind`, which samples the time-series database does not want."""
    hint: str | None = None
    since: float | None = None
    """Since when the state is what it is; epoch seconds."""
    waiting_bytes: int = 0
    """How much of the log is still to be sent."""
    waiting_seconds: float = 0.0
    """How old the oldest sample is that the time-series database does not have."""
    samples_total: int = 0
    """How many samples it took, since the head started; those that were sent again count again."""
    refused_total: int = 0
    """How many samples it did not want."""
    lost_total: int = 0
    """How many records of the log were given up because the time-series database was away for too long."""
    resent_total: int = 0
    """How many samples were sent again to be certain."""
