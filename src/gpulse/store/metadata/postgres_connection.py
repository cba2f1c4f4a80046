"""Connections to the PostgreSQL database that several heads share: URL, deadlines, errors and schema."""

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
from gpulse.store.metadata.schema import VERSION, postgres_statements
from gpulse.store.metadata.sql_dialects import postgres_values, to_postgres

SCHEMA = "gpulse"
CONNECT_SECONDS = 5.0
MAX_IDLE_TRANSACTION_SECONDS = 15.0
"""The server ends an idle transaction of a stopped head after this time, so that other heads can write."""
_WRITE_LOCK = 0x6750_4274
"""Key of the lock that a head holds while it writes. Without it, two heads could apply the same frame at once."""
_MAX_MESSAGE_CHARS = 300
_MAX_NAME_CHARS = 63
_MAX_PORT = 65_535
_SLOW_HINT = "check the load and the locks of the PostgreSQL server, which is too slow"
_TIMEOUT_MESSAGE = "the server did not answer in time"
_EXAMPLE = "postgresql://gpulse@db.example/gpulse"
_HINTS = {
    "28P01": "check the user name, and the password in ~/.pgpass or --database-password-file",
    "28000": "check the user name, and whether the server's pg_hba.conf allows connections from this machine",
    "3D000": "create the database on the server: createdb --encoding UTF8 --owner USER NAME",
    "42501": "run on the server, in that database: CREATE SCHEMA gpulse AUTHORIZATION USER",
    "53100": "free some space on the PostgreSQL server: its disk is full",
    "53300": "increase max_connections on the server: every head uses up to six connections",
    "25006": "use the address of the primary server, not of a replica: this server is read-only",
    **dict.fromkeys(("57014", "55P03", "40P01"), _SLOW_HINT),
}
"""Hints by SQLSTATE."""
_BY_MESSAGE = (
    ("password authentication failed", "28P01"),
    ("no password supplied", "28P01"),
    ("pg_hba.conf", "28000"),
    ("No space left on device", "53100"),
    ("too many clients", "53300"),
    (_TIMEOUT_MESSAGE, "57014"),
)
"""SQLSTATE for messages that come without one: connection errors and our own timeout."""
_NO_DATABASE = re.compile(r'database ".*" does not exist')
UNREACHABLE_HINT = "check that PostgreSQL is running there and accepts connections from this machine; the head keeps running and catches up later"

DATA_ERRORS = (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded)
"""PostgreSQL rejected a value; ProgramLimitExceeded is for texts that are too long for an index."""

T = TypeVar("T")


class DatabaseError(GpulseError):
    """PostgreSQL cannot be reached, reports an error, or has tables of another version."""

    is_about_data = False
    """Whether PostgreSQL rejected a value, so that a retry cannot succeed."""


class DatabaseConfig(NamedTuple):
    """Settings of the connection to PostgreSQL."""

    parameters: tuple[tuple[str, str], ...]
    """Parameters for libpq, including the password."""
    limit_bytes: int = 10 << 30
    """Maximum number of bytes of the log that are kept for PostgreSQL."""

    @property
    def shown(self) -> str:
        """Display name of the database, without the password."""
        known = dict(self.parameters)
        host = known.get("host") or known.get("hostaddr") or known.get("service") or "localhost"
        port = f":{known['port']}" if "port" in known else ""
        return f"{host}{port}/{known.get('dbname', '')}"

    @property
    def password(self) -> str | None:
        """The password, if there is one."""
        return dict(self.parameters).get("password")


def parse_database_url(url: str, password: str | None, limit_bytes: int) -> DatabaseConfig:
    """Parse the URL of a database.

    Args:
        url: A libpq URL such as `postgresql://gpulse@db.example/gpulse`.
        password: Replaces the password in the URL.
        limit_bytes: Maximum number of bytes of the log that are kept for the database.

    Raises:
        UsageError: The URL is not valid. The message does not contain it, since it may include a password.
    """
    scheme = url.partition("://")[0]
    if "://" not in url or scheme not in ("postgresql", "postgres"):
        raise UsageError("--database must be a postgresql:// URL", hint=f"for example {_EXAMPLE}")
    try:
        known = {
            name: str(value) for name, value in conninfo.conninfo_to_dict(url).items() if value is not None
        }
    except psycopg.Error:
        known = {}
    if not _is_plausible(
        known
    ):  # an unescaped / or @ in a password is parsed as part of the host, port or database
        raise UsageError(
            "--database is not a valid postgresql:// URL",
            hint=f"for example {_EXAMPLE}; percent-encode special characters in a password, or use --database-password-file",
        )
    if not known.get("dbname") and "service" not in known:
        raise UsageError("--database has no database name", hint=f"for example {_EXAMPLE}")
    if password is not None:
        known["password"] = password
    return DatabaseConfig(tuple(known.items()), limit_bytes)


def _is_plausible(known: Mapping[str, str]) -> bool:
    """Whether the parts of a parsed URL are plausible."""
    hosts = [host for host in known.get("host", "").split(",") if not host.startswith(("/", "@"))]
    ports = [port for port in known.get("port", "").split(",") if port]
    name = known.get("dbname", "")
    return (
        bool(known)
        and not any(set("@/").intersection(text) for text in (*hosts, name))
        and len(name) <= _MAX_NAME_CHARS
        and all(port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= _MAX_PORT for port in ports)
    )


class DeadlineConnection(psycopg.Connection[TupleRow]):
    """A connection with a deadline for every wait, whatever the server does."""

    deadline: float | None = None
    """Monotonic seconds."""

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        """Wait for the server, at most until the deadline."""
        return super().wait(self._bounded(gen), *args, **kwargs)

    def _bounded(self, steps: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        """Run the steps of a request; psycopg resumes this generator at least every tenth of a second."""
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                if self.deadline is not None and time.monotonic() > self.deadline:
                    raise psycopg.OperationalError(_TIMEOUT_MESSAGE)
                wanted = steps.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result


class PostgresDatabase:
    """A connection to PostgreSQL (`metadata.database.Database`)."""

    is_shared = True

    def __init__(self, connection: DeadlineConnection) -> None:
        self.connection = connection

    def execute(self, statement: str, values: Sequence[Any] = ()) -> psycopg.Cursor[TupleRow]:
        """Run one statement."""
        return self.connection.execute(to_postgres(statement).encode(), postgres_values(values))

    def executemany(self, statement: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for several rows, in a pipeline."""
        if rows:
            with self.connection.cursor() as cursor:
                cursor.executemany(to_postgres(statement).encode(), map(postgres_values, rows))


def connect(config: DatabaseConfig, *, timeout_seconds: float) -> DeadlineConnection:
    """Open a connection with a timeout for statements.

    Raises:
        DatabaseError: Connecting failed.
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
        connection = DeadlineConnection.connect(conninfo.make_conninfo("", **known), autocommit=True)
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


def close(connection: DeadlineConnection) -> None:
    """Close a connection without waiting for the server."""
    with suppress(psycopg.Error, OSError):
        connection.close()


@contextmanager
def transaction(
    config: DatabaseConfig, connection: DeadlineConnection, seconds: float
) -> Iterator[PostgresDatabase]:
    """Run the block as one transaction with a time limit; a failed connection is closed afterwards.

    Raises:
        DatabaseError: The server reported an error, or did not answer in time.
    """
    with database_errors(config):
        connection.deadline = time.monotonic() + seconds
        try:
            with connection.transaction():
                yield PostgresDatabase(connection)
        finally:
            connection.deadline = None


def lock_for_writing(database: PostgresDatabase) -> None:
    """Wait until no other head writes, and keep others from writing until the end of the transaction."""
    database.execute("SELECT pg_advisory_xact_lock(?)", (_WRITE_LOCK,))


def prepare_schema(config: DatabaseConfig, connection: DeadlineConnection) -> None:
    """Create the tables if they do not exist, and check their version.

    Raises:
        DatabaseError: The tables have another version, or cannot be created.
    """
    with transaction(config, connection, 30.0) as database:
        lock_for_writing(database)
        encoding = database.execute("SHOW server_encoding").fetchone()
        if encoding is None or encoding[0] != "UTF8":
            raise DatabaseError(
                f"the encoding of database {config.shown} is not UTF8",
                hint="create another database: createdb --encoding UTF8 --template template0 NAME",
            )
        found = database.execute("SELECT to_regclass('gpulse.meta') IS NOT NULL").fetchone()
        if found is None or not found[0]:
            if database.execute("SELECT 1 FROM pg_namespace WHERE nspname = ?", (SCHEMA,)).fetchone() is None:
                database.execute(f"CREATE SCHEMA {SCHEMA}")
            for statement in postgres_statements():
                database.execute(statement)
            database.execute("INSERT INTO meta VALUES ('version', ?)", (str(VERSION),))
            return
        row = database.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
        version = "unknown" if row is None else row[0]
        if version != str(VERSION):
            raise DatabaseError(
                f"the tables in {config.shown} have format {version}; this version of gpulse uses format {VERSION}",
                hint="use another database, or run the version of gpulse that created the tables on all heads",
            )


@contextmanager
def database_errors(config: DatabaseConfig) -> Iterator[None]:
    """Raise errors of PostgreSQL as DatabaseErrors, in one line and without the password."""
    try:
        yield
    except psycopg.Error as error:
        raise to_database_error(config, error) from None


def to_database_error(config: DatabaseConfig, error: psycopg.Error) -> DatabaseError:
    """Return the DatabaseError for an error of PostgreSQL."""
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
    """Return the most informative line of PostgreSQL's message."""
    found = re.search(r"(?:FATAL|ERROR):\s+(.*)", text)
    if found:
        return found[1].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    line = lines[-1] if lines[0].startswith("Multiple connection attempts") else lines[0]
    return line.rsplit("failed: ", 1)[-1]
