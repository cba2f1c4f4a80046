"""Options of `gpulse head`: declare, check and convert them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import click
from click.core import ParameterSource

from gpulse.cli import common, option_types
from gpulse.errors import MissingExtraError, UsageError
from gpulse.model.safe_text import quoted
from gpulse.store.tsdb.config import TsdbConfig, derive_query_url

if TYPE_CHECKING:
    from gpulse.store.metadata.postgres_connection import DatabaseConfig


_MIN_LIMIT_BYTES = 64 << 20
_MIN_RETENTION_SECONDS = 3600.0
_MAX_PASSWORD_BYTES = 4096


class DatabaseOptions(NamedTuple):
    """Options that name a shared database."""

    database: str | None = None
    password_file: Path | None = None
    limit: int = 10 << 30

    def config(self) -> DatabaseConfig | None:
        """Return the configuration of the database, None without one.

        Raises:
            UsageError: The URL is not valid, or the password cannot be read.
        """
        if self.database is None:
            if self.password_file is not None:
                raise UsageError(
                    "--database-password-file requires --database URL",
                    hint="add --database postgresql://gpulse@db.example/gpulse",
                )
            return None
        if self.limit < _MIN_LIMIT_BYTES:
            raise UsageError(
                "--database-limit must be at least 64 MiB to bridge an outage", hint="--database-limit 10GiB"
            )
        try:
            from gpulse.store.metadata.postgres_connection import parse_database_url  # noqa: PLC0415  --help needs none of it
        except ImportError as error:
            raise MissingExtraError("--database", "postgres") from error
        password = None if self.password_file is None else _read_password(self.password_file)
        return parse_database_url(self.database, password, self.limit)


def _add_options(
    command: common.Command, *options: Callable[[common.Command], common.Command]
) -> common.Command:
    """Add options to a command, in the order in which `--help` shows them."""
    for option in reversed(options):
        command = option(command)
    return command


def database_options(command: common.Command) -> common.Command:
    """Add the options of a shared database; `pop_database_options` reads them."""
    return _add_options(
        command,
        click.option(
            "--database",
            envvar="GPULSE_DATABASE",
            callback=_reject_password,
            metavar="URL",
            help="Share sessions, events, processes and GPU time with other heads in this PostgreSQL database, such as "
            "postgresql://gpulse@db.example/gpulse (GPULSE_DATABASE).",
        ),
        click.option(
            "--database-password-file",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="File with the password for --database; ~/.pgpass works too.",
        ),
        click.option(
            "--database-limit",
            type=option_types.size,
            default="10GiB",
            show_default=True,
            metavar="SIZE",
            help="Keep at most this much unsent data on disk while the database does not answer.",
        ),
    )


def pop_database_options(given: dict[str, Any]) -> DatabaseOptions:
    """Remove these options from a command's parameters and return them."""
    return DatabaseOptions(
        given.pop("database"), given.pop("database_password_file"), given.pop("database_limit")
    )


def _reject_password(context: click.Context, parameter: click.Parameter, url: str | None) -> str | None:
    """Reject a password on the command line, which `ps` shows to everybody; one in GPULSE_DATABASE is fine."""
    source = context.get_parameter_source(parameter.name or "")
    if url is not None and source is ParameterSource.COMMANDLINE and _has_password(url):
        raise UsageError(
            "--database contains a password, which everybody on this machine can see",
            hint="put the password into a file for --database-password-file, or into ~/.pgpass, "
            "or set GPULSE_DATABASE to the whole URL",
        )
    return url


def _has_password(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:  # rejected later
        return False
    in_query = "password" in parse_qs(parts.query, keep_blank_values=True)
    return parts.scheme in ("postgresql", "postgres") and (parts.password is not None or in_query)


def _read_password(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_PASSWORD_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not text"
        raise UsageError(
            f"cannot read {path}: {reason}", hint="the file of --database-password-file must be a text file"
        ) from error
    password = text.strip("\r\n")
    if not password:
        raise UsageError(f"{path} is empty", hint="write the password for --database into this file")
    return password


_FILE = click.Path(path_type=Path, dir_okay=False)
_OPTIONS = ("write", "query", "headers", "ca", "labels", "limit")
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
_MAX_HEADERS_BYTES = 64 << 10


class TsdbOptions(NamedTuple):
    """Options that name a time-series database."""

    write: str | None = None
    query: str | None = None
    headers: Path | None = None
    ca: Path | None = None
    labels: tuple[str, ...] = ()
    limit: int = 10 << 30

    def config(self) -> TsdbConfig | None:
        """Return the configuration of the time-series database, None without one.

        Raises:
            UsageError: An option is not valid, or needs another one.
        """
        if self.write is None:
            self._check_alone()
            return None
        if self.limit < _MIN_LIMIT_BYTES:
            raise UsageError(
                "--remote-limit must be at least 64 MiB to bridge an outage", hint="--remote-limit 10GiB"
            )
        if self.ca is not None and not self.ca.is_file():
            raise UsageError(f"there is no file {self.ca}", hint="give a PEM file with --remote-ca")
        write = _check_url("--remote-write", self.write)
        query = derive_query_url(write) if self.query is None else _check_url("--remote-query", self.query)
        return TsdbConfig(
            write,
            query,
            _read_headers(self.headers) if self.headers else {},
            None if self.ca is None else str(self.ca.absolute()),
            _parse_labels(self.labels),
        )

    def _check_alone(self) -> None:
        """Reject options about a time-series database when none is named."""
        for name in ("query", "headers", "ca", "labels"):
            if getattr(self, name):
                option = "--remote-label" if name == "labels" else f"--remote-{name}"
                raise UsageError(
                    f"{option} requires --remote-write URL",
                    hint="add --remote-write http://vm:8428/api/v1/write",
                )


def tsdb_options(command: common.Command) -> common.Command:
    """Add the options of a time-series database; `pop_tsdb_options` reads them."""
    return _add_options(
        command,
        click.option(
            "--remote-write",
            metavar="URL",
            help="Also send every sample to this time-series database (Prometheus remote write), such as http://vm:8428/api/v1/write.",
        ),
        click.option(
            "--remote-query",
            metavar="URL",
            show_default="from --remote-write",
            help="Base URL for reading from the time-series database (PromQL), without /api/v1/query.",
        ),
        click.option(
            "--remote-headers",
            type=_FILE,
            metavar="FILE",
            help="File with headers for requests to the time-series database, one per line, such as `Authorization: Bearer ...`.",
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
            help="Label for every series, to tell clusters apart in one time-series database; repeatable.",
        ),
        click.option(
            "--remote-limit",
            type=option_types.size,
            default="10GiB",
            show_default=True,
            metavar="SIZE",
            help="Keep at most this much unsent data on disk while the time-series database does not answer; beyond that, drop the oldest.",
        ),
    )


def pop_tsdb_options(given: dict[str, Any]) -> TsdbOptions:
    """Remove these options from a command's parameters and return them."""
    return TsdbOptions(**{name: given.pop(f"remote_{name}") for name in _OPTIONS})


def _check_url(option: str, text: str) -> str:
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or not text.isprintable():
        raise UsageError(
            f"{option} {quoted(text, 100)} is not a URL",
            hint="give a URL such as http://vm:8428/api/v1/write",
        )
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            f"{option} contains a password, which everybody on this machine can see",
            hint="put `Authorization: Basic ...` into a file for --remote-headers",
        )
    if parts.query or parts.fragment:
        raise UsageError(
            f"{option} must not contain a query string (after ?)", hint="remove the query string from the URL"
        )
    return text.rstrip("/")


def _read_headers(path: Path) -> dict[str, str]:
    try:
        with path.open(encoding="latin-1") as file:
            text = file.read(_MAX_HEADERS_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", hint="give a text file with --remote-headers FILE"
        ) from error
    if len(text) > _MAX_HEADERS_BYTES:
        raise UsageError(
            f"{path} is too large for a file with headers",
            hint="write one header per line, such as X-Scope-OrgID: lab",
        )
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _HEADER.fullmatch(stripped)
        if match is None:  # the line itself may be a secret
            raise UsageError(
                f"line {number} of {path} is not a header", hint="write Name: value, one per line"
            )
        found[match[1]] = match[2].rstrip()
    return found


def _parse_labels(given: tuple[str, ...]) -> dict[str, str]:
    labels = option_types.labels(given)
    for name in labels:
        if not _LABEL.fullmatch(name) or name.startswith("__"):
            raise UsageError(
                f"{quoted(name)} is not a valid label name",
                hint="use letters, digits and _, as in cluster=lab",
            )
        if name in _OWN_LABELS:
            raise UsageError(
                f"the label {name} is reserved for gpulse", hint="choose another name, such as cluster"
            )
    return labels


class HeadStorage(NamedTuple):
    """Storage of a head besides its own data directory."""

    time_series: TsdbConfig | None
    database: DatabaseConfig | None
    local_seconds: float
    """How long samples stay on local disk."""


class HeadOptions(NamedTuple):
    """Options of `gpulse head`, as they were given."""

    host: str
    port: int
    http_port: int
    freq: int | None
    enable_bandwidth: bool | None
    enable_nvlink: bool | None
    data_dir: Path | None
    output_dir: Path
    retention: float
    disk_limit: int
    local_retention: float | None
    seal_after: float | None
    dcgm_names: bool
    auto_resume: bool
    token_file: Path | None
    insecure: bool
    private: bool
    public_read: bool
    origins: tuple[str, ...]
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    node_list: Path | None
    notify: Path | None
    theme_dir: Path | None
    with_agent: bool
    background: bool
    log_file: Path | None
    time_series: TsdbOptions
    database: DatabaseOptions

    @classmethod
    def pop_from(cls, given: dict[str, Any]) -> HeadOptions:
        """Remove these options from a command's parameters and return them."""
        return cls(time_series=pop_tsdb_options(given), database=pop_database_options(given), **given)

    @property
    def directory(self) -> Path:
        """The data directory."""
        return self.data_dir or common.state_dir("head")

    def check(self) -> None:
        """Check that options do not contradict each other and are in range.

        Raises:
            UsageError: They do, or one is not.
        """
        if self.port != 0 and self.port == self.http_port:
            raise UsageError("--port and --http-port must differ", hint="choose another --http-port")
        if self.insecure and self.token_file is not None:
            raise UsageError(
                "--insecure and --token-file cannot be used together", hint="leave out one of these options"
            )
        if self.insecure + self.private + self.public_read > 1:
            raise UsageError(
                "--insecure, --private and --public-read cannot be used together",
                hint="give only one of these options",
            )
        if self.retention < _MIN_RETENTION_SECONDS:
            raise UsageError("--retention must be at least one hour", hint="--retention 30d")
        if self.disk_limit < _MIN_LIMIT_BYTES:
            raise UsageError("--disk-limit must be at least 64 MiB", hint="--disk-limit 50GiB")

    def storage(self) -> HeadStorage:
        """Read the files that these options name, and return the storage that they describe.

        Raises:
            UsageError: A URL or a file is not valid, or samples could not be read back later.
            MissingExtraError: A library for it is not installed.
        """
        time_series, database = self.time_series.config(), self.database.config()
        local_seconds = self._local_seconds(time_series)
        if time_series is not None and importlib.util.find_spec("cramjam") is None:
            raise MissingExtraError("--remote-write", "head")
        return HeadStorage(time_series, database, local_seconds)

    def _local_seconds(self, time_series: TsdbConfig | None) -> float:
        """Return how long samples stay on local disk."""
        local = self.local_retention
        if local is None:
            return self.retention
        if time_series is None or time_series.query_url is None:
            raise UsageError(
                "--local-retention requires a time-series database to read older samples from",
                hint="add --remote-write URL; if the URL for reading cannot be derived from it, also add --remote-query URL",
            )
        if local < _MIN_RETENTION_SECONDS or local > self.retention:
            raise UsageError(
                "--local-retention must be between one hour and --retention", hint="--local-retention 2d"
            )
        return local
