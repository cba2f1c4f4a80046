"""Settings of a time-series database, and the state of remote write to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from gpulse.errors import GpulseError

_WRITE_PATH = "/api/v1/write"


class TsdbError(GpulseError):
    """The time-series database cannot be reached, reports an error, or sends an invalid answer."""


class TsdbConfig(NamedTuple):
    """Addresses and credentials of a time-series database such as VictoriaMetrics, Mimir, Thanos or Prometheus."""

    write_url: str
    """The remote-write endpoint."""
    query_url: str | None = None
    """Base URL of the query API, below which are `/api/v1/query` and `/api/v1/query_range`. None: nothing is read back."""
    headers: Mapping[str, str] = {}
    """Sent with every request, for example credentials or a tenant."""
    ca: str | None = None
    """PEM file with the certificate authorities to trust; None for those of the system."""
    labels: Mapping[str, str] = {}
    """Added to every series, and required by every query."""


def derive_query_url(write_url: str) -> str | None:
    """Return the base URL for queries that belongs to a remote-write URL; None if it cannot be derived."""
    base, found, rest = write_url.partition(_WRITE_PATH)
    return base if found and not rest.strip("/") else None


SendingState = Literal["ok", "behind", "failing", "refused"]


class RemoteWriteState(NamedTuple):
    """State of remote write to a time-series database."""

    state: SendingState
    """`behind`: samples are accepted but late; `failing`: it is retried; `refused`: the configuration must be fixed."""
    url: str
    """The remote-write URL without secrets."""
    error: str | None = None
    """The last error; in the states `ok` and `behind`, which samples the time-series database rejected."""
    hint: str | None = None
    since: float | None = None
    """Start of the current state in epoch seconds."""
    waiting_bytes: int = 0
    """Number of bytes of the log that are not sent yet."""
    waiting_records: int = 0
    """Number of records of the log that are on disk and not confirmed by the time-series database."""
    waiting_seconds: float = 0.0
    """Age of the oldest sample that is not sent yet."""
    samples_total: int = 0
    """Number of accepted samples since the head started, including resent ones."""
    refused_total: int = 0
    """Number of rejected samples."""
    lost_total: int = 0
    """Number of log records that were dropped unsent because the outage was too long."""
    resent_total: int = 0
    """Number of samples that were resent because they may have been lost."""
