"""Address and credentials of a time-series database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpulse.errors import GpulseError

_WRITE_PATH = "/api/v1/write"


class TsdbError(GpulseError):
    """The time-series database cannot be reached, refuses, or answers nonsense."""


class TsdbConfig(NamedTuple):
    """Where a time-series database is, such as VictoriaMetrics, Mimir, Thanos or Prometheus, and how to speak to it."""

    write_url: str
    """Where remote write is taken."""
    query_url: str | None = None
    """The base of its query API: `/api/v1/query` and `/api/v1/query_range` are below it. None: nothing is read back."""
    headers: Mapping[str, str] = {}
    """Sent with every request: who we are, whose data it is."""
    ca: str | None = None
    """A PEM file with who vouches for it, the system's authorities when None."""
    labels: Mapping[str, str] = {}
    """Put on every series, and asked for with every query."""


def query_url_of(write_url: str) -> str | None:
    """Return the URL of queries that belongs to a URL of remote write, where one follows from the other."""
    base, found, rest = write_url.partition(_WRITE_PATH)
    return base if found and not rest.strip("/") else None
