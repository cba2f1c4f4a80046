"""Connections to the PostgreSQL database that several heads share: where it is, deadlines, errors, and its tables."""

from __future__ import annotations

import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import conninfo, sql
from psycopg.rows import TupleRow

from gpulse.errors import GpulseError, UsageError
from gpulse.store.metadata.database import postgres_values, to_postgres
from gpulse.store.metadata.schema import VERSION, postgres_tables

SCHEMA = "gpulse"
CONNECT_SECONDS = 5.0
MAX_IDLE_TRANSACTION_SECONDS = 15.0
"""The server ends a transaction whose head has stopped, so that other heads can write."""
_WRITE_LOCK = 0x6750_4274
"""Key of the lock that a head holds while it writes: without it the same frame could come through two heads at once."""
_MAX_MESSAGE_CHARS = 300
_MAX_NAME_CHARS = 63
_MAX_PORT = 65_535
_SLOW_HINT = "PostgreSQL is slow: check its load and locks"
_TOO_SLOW = "the server did not answer in time"
_EXAMPLE = "postgresql://gpulse@db.example/gpulse"
_HINTS = {
    "28P01": "check the user, and the password in ~/.pgpass or --database-password-file",
    "28000": "check the user, and whether the server's pg_hba.conf lets it connect from this machine",
    "3D000": "create it on the server: createdb --encoding UTF8 --owner USER NAME",
    "42501": "run on the server, in that database: CREATE SCHEMA gpulse AUTHORIZATION USER",
    "53100": "the disk of the PostgreSQL server is full: make room there",
    "53300": "raise max_connections on the server: every head uses up to six connections",
    "25006": "it does not accept changes: name the primary server, not a replica",
    **dict.fromkeys(("57014", "55P03", "40P01"), _SLOW_HINT),
}
"""What to do about an error, by its SQLSTATE."""
_BY_MESSAGE = (
    ("password authentication failed", "28P01"),
    ("no password supplied", "28P01"),
    ("pg_hba.conf", "28000"),
    ("No space left on device", "53100"),
    ("too many clients", "53300"),
    (_TOO_SLOW, "57014"),
)
"""Errors without an SQLSTATE: those of connecting, and our own."""
_NO_DATABASE = re.compile(r'database ".*" does not exist')
UNREACHABLE_HINT = (
    "see that PostgreSQL runs there and lets this machine connect; the head goes on, and catches up later"
)

DATA_ERRORS = (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded)
"""PostgreSQL refused a value; the last of them is about texts that are too long for an index."""

T = TypeVar("T")


class DatabaseError(GpulseError):
    """PostgreSQL cannot be reached, refuses, or has tables of another version."""

    is_about_data = False
    """Whether PostgreSQL refused a value, so that trying again is in vain."""


class DatabaseConfig(NamedTuple):
    """Where the database is, and how much may wait for it."""

    parameters: tuple[tuple[str, str], ...]
    """As libpq takes them, the password among them."""
    limit_bytes: int = 10 << 30
    """How much of the log may wait for it."""

    @property
    def shown(self) -> str:
        """How people name it, without a password."""
        known = dict(self.parameters)
        host = known.get("host") or known.get("hostaddr") or known.get("service") or "localhost"
        port = f":{known['port']}" if "port" in known else ""
        return f"{host}{port}/{known.get('dbname', '')}"

    @property
    def password(self) -> str | None:
        """The password, where one was given."""
        return dict(self.parameters).get("password")


def database_config(url: str, password: str | None, limit_bytes: int) -> DatabaseConfig:
    """Read the URL of a database.

    Args:
        url: As in libpq, such as `postgresql://gpulse@db.example/gpulse`.
        password: Replaces the one in the URL.
        limit_bytes: How much of the log may wait for the database.

    Raises:
        UsageError: It is not such a URL. The message does not repeat it, since a password may be in it.
    """
    scheme = url.partition("://")[0]
    if "://" not in url or scheme not in ("postgresql", "postgres"):
        raise UsageError("--database must be a postgresql:// URL", hint=f"such as {_EXAMPLE}")
    try:
        known = {
            name: str(value) for name, value in conninfo.conninfo_to_dict(url).items() if value is not None
        }
    except psycopg.Error:
        known = {}
    if not _is_plausible(known):  # a password with an unescaped / or @ is taken for a host, port or database
        raise UsageError(
            "--database is not a valid postgresql:// URL",
            hint=f"such as {_EXAMPLE}; write special characters of a password as %XX, or use --database-password-file",
        )
    if not known.get("dbname") and "service" not in known:
        raise UsageError("--database does not name a database", hint=f"such as {_EXAMPLE}")
    if password is not None:
        known["password"] = password
    return DatabaseConfig(tuple(known.items()), limit_bytes)


def _is_plausible(known: Mapping[str, str]) -> bool:
    """Whether a URL was split where its author meant it."""
    hosts = [host for host in known.get("host", "").split(",") if not host.startswith(("/", "@"))]
    ports = [port for port in known.get("port", "").split(",") if port]
    name = known.get("dbname", "")
    return (
        bool(known)
        and not any(set("@/").intersection(text) for text in (*hosts, name))
        and len(name) <= _MAX_NAME_CHARS
        and all(port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= _MAX_PORT for port in ports)
    )


class Connection(psycopg.Connection[TupleRow]):
    """A connection that gives up at a deadline, whatever the server does."""

    deadline: float | None = None
    """Monotonic seconds."""

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        """Wait for the server, at most until the deadline."""
        return super().wait(self._bounded(gen), *args, **kwargs)

    def _bounded(self, steps: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        """Go through the steps of a request; psycopg asks again at least every tenth of a second."""
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                if self.deadline is not None and time.monotonic() > self.deadline:
                    raise psycopg.OperationalError(_TOO_SLOW)
                wanted = steps.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result


class PostgresDatabase:
    """A connection to PostgreSQL (`metadata.database.Database`)."""

    is_shared = True

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def execute(self, statement: str, values: Sequence[Any] = ()) -> psycopg.Cursor[TupleRow]:
        """Run one statement."""
        return self.connection.execute(to_postgres(statement).encode(), postgres_values(values))

    def executemany(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for each of several rows, without waiting for each of them."""
        if rows:
            with self.connection.cursor() as cursor:
                cursor.executemany(to_postgres(statement).encode(), map(postgres_values, rows))


def connect(config: DatabaseConfig, *, timeout_seconds: float) -> Connection:
    """Open a connection whose statements end after a time.

    Raises:
        DatabaseError: That is not possible.
    """
    with database_errors(config):
        known = {
            "connect_timeout": f"{CONNECT_SECONDS:.0f}",
            "keepalives_idle": "10",
            "tcp_user_timeout": "15000",
            "application_name": "gpulse",
            **dict(config.parameters),
            "client_encoding": "utf8",
        }
        connection = Connection.connect(conninfo.make_conninfo("", **known), autocommit=True)
        connection.deadline = time.monotonic() + CONNECT_SECONDS
        try:
            for name, value in (
                ("search_path", SCHEMA),
                ("work_mem", "64MB"),
                ("jit", "off"),
                ("statement_timeout", f"{timeout_seconds:g}s"),
                ("lock_timeout", f"{timeout_seconds:g}s"),
                ("idle_in_transaction_session_timeout", f"{MAX_IDLE_TRANSACTION_SECONDS:g}s"),
            ):
                connection.execute(sql.SQL("SET {} TO {}").format(sql.Identifier(name), sql.Literal(value)))
        except BaseException:
            close(connection)
            raise
        connection.deadline = None
        return connection


def close(connection: Connection) -> None:
    """Close a connection; it does not wait for the server."""
    with suppress(psycopg.Error, OSError):
        connection.close()


@contextmanager
def transaction(config: DatabaseConfig, connection: Connection, seconds: float) -> Iterator[PostgresDatabase]:
    """Run one transaction that ends in time, all of it or nothing; afterwards a failed connection is closed.

    Raises:
        DatabaseError: The server refused, or did not answer in time.
    """
    with database_errors(config):
        connection.deadline = time.monotonic() + seconds
        try:
            with connection.transaction():
                yield PostgresDatabase(connection)
        finally:
            connection.deadline = None


def lock_for_writing(database: PostgresDatabase) -> None:
    """Wait until no other head writes; until the end of the transaction none will."""
    database.execute("SELECT pg_advisory_xact_lock(?)", (_WRITE_LOCK,))


def prepare(config: DatabaseConfig, connection: Connection) -> None:
    """Make the tables where there are none, and check their version.

    Raises:
        DatabaseError: They are of another version, or may not be made.
    """
    with transaction(config, connection, 30.0) as database:
        lock_for_writing(database)
        encoding = database.execute("SHOW server_encoding").fetchone()
        if encoding is None or encoding[0] != "UTF8":
            raise DatabaseError(
                f"the database {config.shown} does not use the encoding UTF8",
                hint="create another one: createdb --encoding UTF8 --template template0 NAME",
            )
        found = database.execute("SELECT to_regclass('gpulse.meta') IS NOT NULL").fetchone()
        if found is None or not found[0]:
            if database.execute("SELECT 1 FROM pg_namespace WHERE nspname = ?", (SCHEMA,)).fetchone() is None:
                database.execute(f"CREATE SCHEMA {SCHEMA}")
            for statement in postgres_tables():
                database.execute(statement)
            database.execute("INSERT INTO meta VALUES ('version', ?)", (str(VERSION),))
            return
        row = database.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
        version = "unknown" if row is None else row[0]
        if version != str(VERSION):
            raise DatabaseError(
                f"the tables in {config.shown} are of format {version}; this gpulse uses format {VERSION}",
                hint="run the gpulse that made them on all heads, or name another database",
            )


@contextmanager
def database_errors(config: DatabaseConfig) -> Iterator[None]:
    """Raise what PostgreSQL refuses as a DatabaseError, in one line and without the password."""
    try:
        yield
    except psycopg.Error as error:
        raise to_error(config, error) from None


def to_error(config: DatabaseConfig, error: psycopg.Error) -> DatabaseError:
    """Return the error to raise for what PostgreSQL refused."""
    text = str(error)
    line = _reason(text) or type(error).__name__
    if config.password:
        line = line.replace(config.password, "***")
    code = error.sqlstate
    if code is None and _NO_DATABASE.search(text):
        code = "3D000"
    if code is None:
        code = next((code for words, code in _BY_MESSAGE if words in text), None)
    hint = _HINTS.get(code or "", UNREACHABLE_HINT)
    found = DatabaseError(f"PostgreSQL at {config.shown}: {line[:_MAX_MESSAGE_CHARS]}", hint=hint)
    found.is_about_data = isinstance(error, DATA_ERRORS)
    return found


def _reason(text: str) -> str:
    """Return the line of PostgreSQL's message that says what is wrong."""
    found = re.search(r"(?:FATAL|ERROR):\s+(.*)", text)
    if found:
        return found[1].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    line = lines[-1] if lines[0].startswith("Multiple connection attempts") else lines[0]
    return line.rsplit("failed: ", 1)[-1]
