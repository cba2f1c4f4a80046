"""The options of `gpulse head` about a time-series database."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import click

from gpulse.cli import service
from gpulse.errors import UsageError

if TYPE_CHECKING:
    from gpulse.store.tsdb.config import TsdbConfig

Command = TypeVar("Command", bound=Callable[..., object])

_FILE = click.Path(path_type=Path, dir_okay=False)
_OPTIONS = ("write", "query", "headers", "ca", "labels", "limit")
_LEAST_LIMIT = 64 << 20
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff]*)", re.ASCII)
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_OWN_LABELS = frozenset(
    [
        "node",
        "gpu",
        "uuid",
        "name",
        "disk",
        "mount_point",
        "device",
        "type",
        "interface",
        "host",
        "machine",
        "version",
    ]
)
_MOST_HEADERS_BYTES = 64 << 10


class EngineOptions(NamedTuple):
    """What was given."""

    write: str | None = None
    query: str | None = None
    headers: Path | None = None
    ca: Path | None = None
    labels: tuple[str, ...] = ()
    limit: int = 10 << 30

    def engine(self) -> TsdbConfig | None:
        """Return the time-series database that is meant, None for none.

        Raises:
            UsageError: What was given makes no sense.
        """
        if self.write is None:
            self._check_alone()
            return None
        from gpulse.store.tsdb.config import TsdbConfig, query_url_of  # noqa: PLC0415  --help needs none of it

        if self.limit < _LEAST_LIMIT:
            raise UsageError("--remote-limit is too small to bridge anything", hint="64MiB at least")
        if self.ca is not None and not self.ca.is_file():
            raise UsageError(f"there is no file {self.ca}", hint="--remote-ca wants certificates as PEM")
        write = _checked_url("--remote-write", self.write)
        query = query_url_of(write) if self.query is None else _checked_url("--remote-query", self.query)
        return TsdbConfig(
            write,
            query,
            _headers(self.headers) if self.headers else {},
            None if self.ca is None else str(self.ca.absolute()),
            _labels(self.labels),
        )

    def _check_alone(self) -> None:
        """Refuse options about a time-series database where none is named."""
        for name in ("query", "headers", "ca", "labels"):
            if getattr(self, name):
                option = "--remote-label" if name == "labels" else f"--remote-{name}"
                raise UsageError(
                    f"{option} requires --remote-write URL", hint="such as http://vm:8428/api/v1/write"
                )


def options(command: Command) -> Command:
    """The options; `taken` makes an EngineOptions of them."""
    for option in reversed(
        (
            click.option(
                "--remote-write",
                metavar="URL",
                help="Also send every sample to this time-series database (Prometheus remote write), such as http://vm:8428/api/v1/write.",
            ),
            click.option(
                "--remote-query",
                metavar="URL",
                help="Read from the time-series database at this URL (PromQL), without /api/v1/query; default: from --remote-write.",
            ),
            click.option(
                "--remote-headers",
                type=_FILE,
                metavar="FILE",
                help="Headers for every request to the time-series database: lines such as `Authorization: Bearer ...`.",
            ),
            click.option(
                "--remote-ca",
                type=_FILE,
                metavar="PEM",
                help="CA certificates to verify the time-series database with.",
            ),
            click.option(
                "--remote-label",
                "remote_labels",
                multiple=True,
                metavar="KEY=VALUE",
                help="Label on every series, to tell clusters apart in one time-series database; repeatable.",
            ),
            click.option(
                "--remote-limit",
                type=service.size,
                default="10GiB",
                show_default=True,
                metavar="SIZE",
                help="Keep at most this much on disk for a time-series database that does not answer; then drop the oldest.",
            ),
        )
    ):
        command = option(command)
    return command


def taken(given: dict[str, Any]) -> EngineOptions:
    """What the options say; they are taken out of what was given."""
    return EngineOptions(**{name: given.pop(f"remote_{name}") for name in _OPTIONS})


def _checked_url(option: str, text: str) -> str:
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or not text.isprintable():
        raise UsageError(f"{option} {text[:100]!a} is no URL", hint="such as http://vm:8428/api/v1/write")
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            f"{option} has a password in it, which everybody on this machine can read",
            hint="put `Authorization: Basic ...` into a file and name it with --remote-headers",
        )
    if parts.query or parts.fragment:
        raise UsageError(f"{option} has a query (after ?), which is not sent", hint="leave it out")
    return text.rstrip("/")


def _headers(path: Path) -> dict[str, str]:
    try:
        with path.open(encoding="latin-1") as file:
            text = file.read(_MOST_HEADERS_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="--remote-headers FILE") from error
    if len(text) > _MOST_HEADERS_BYTES:
        raise UsageError(
            f"{path} is too long for headers", hint="a line a header, such as X-Scope-OrgID: lab"
        )
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _HEADER.fullmatch(stripped)
        if match is None:  # the line itself may be a secret
            raise UsageError(f"line {number} of {path} is no header", hint="Name: value, one a line")
        found[match[1]] = match[2].rstrip()
    return found


def _labels(given: tuple[str, ...]) -> dict[str, str]:
    labels = service.labels(given)
    for name in labels:
        if not _LABEL.fullmatch(name) or name.startswith("__"):
            raise UsageError(
                f"{name[:60]!a} is no name for a label", hint="letters, digits and _, as in cluster=lab"
            )
        if name in _OWN_LABELS:
            raise UsageError(f"the label {name} is gpulse's own", hint="choose another name, such as cluster")
    return labels
