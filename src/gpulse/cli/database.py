"""The options of `gpulse head` about the PostgreSQL database that several heads share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

import click
from click.core import ParameterSource

from gpulse.cli import service
from gpulse.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from gpulse.store.metadata.postgres import DatabaseConfig

Command = TypeVar("Command", bound=Callable[..., object])

_MIN_LIMIT_BYTES = 64 << 20
_MAX_PASSWORD_BYTES = 4096


class DatabaseOptions(NamedTuple):
    """What was given."""

    database: str | None = None
    password_file: Path | None = None
    limit: int = 10 << 30

    def config(self) -> DatabaseConfig | None:
        """Return the database that is meant, None for none.

        Raises:
            UsageError: The URL is not valid, or the password cannot be read.
        """
        if self.database is None:
            if self.password_file is not None:
                raise UsageError(
                    "--database-password-file requires --database URL",
                    hint="such as postgresql://gpulse@db.example/gpulse",
                )
            return None
        if self.limit < _MIN_LIMIT_BYTES:
            raise UsageError("--database-limit is too small to bridge an outage", hint="64MiB at least")
        try:
            from gpulse.store.metadata.postgres import database_config  # noqa: PLC0415  --help needs none of it
        except ImportError as error:
            raise MissingExtraError("--database", "postgres") from error
        password = None if self.password_file is None else _read_password(self.password_file)
        return database_config(self.database, password, self.limit)


def options(command: Command) -> Command:
    """Add the options; `taken` makes a DatabaseOptions of them."""
    for option in reversed(
        (
            click.option(
                "--database",
                envvar="GPULSE_DATABASE",
                callback=_without_password,
                metavar="URL",
                help="Share sessions, events, processes and GPU time with other heads in this PostgreSQL database, such as "
                "postgresql://gpulse@db.example/gpulse. Also read from GPULSE_DATABASE.",
            ),
            click.option(
                "--database-password-file",
                type=click.Path(path_type=Path, dir_okay=False),
                metavar="FILE",
                help="File with the password for --database; ~/.pgpass works too.",
            ),
            click.option(
                "--database-limit",
                type=service.size,
                default="10GiB",
                show_default=True,
                metavar="SIZE",
                help="Keep at most this much on disk for a database that does not answer.",
            ),
        )
    ):
        command = option(command)
    return command


def taken(given: dict[str, Any]) -> DatabaseOptions:
    """Return what the options say; they are taken out of what was given."""
    return DatabaseOptions(
        given.pop("database"), given.pop("database_password_file"), given.pop("database_limit")
    )


def _without_password(context: click.Context, parameter: click.Parameter, url: str | None) -> str | None:
    """Refuse a password on the command line, which `ps` shows to everybody; one in GPULSE_DATABASE is fine."""
    source = context.get_parameter_source(parameter.name or "")
    if url is not None and source is ParameterSource.COMMANDLINE and _has_password(url):
        raise UsageError(
            "--database has a password in it, which everybody on this machine can read",
            hint="put it into a file and name it with --database-password-file, or into ~/.pgpass, "
            "or set GPULSE_DATABASE to the whole URL",
        )
    return url


def _has_password(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:  # it is refused later
        return False
    in_query = "password" in parse_qs(parts.query, keep_blank_values=True)
    return parts.scheme in ("postgresql", "postgres") and (parts.password is not None or in_query)


def _read_password(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_PASSWORD_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"cannot read {path}: {reason}", hint="--database-password-file FILE") from error
    password = text.strip("\r\n")
    if not password:
        raise UsageError(f"{path} is empty", hint="write the password for --database into it")
    return password
