"""A real PostgreSQL server as a process, for tests: one for all of them, and servers of their own for those that break it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Self

import psycopg

from tests.integration.cluster import free_port, until
from tests.prerequisites import find_postgres, require

PASSWORD = "sesame-%-open"
_COUNT = count(1)


class PostgresServer:
    """A server on a port of its own; root may not run one, so another user does."""

    def __init__(self, *settings: str, directory: Path | None = None) -> None:
        """Make the files of a server.

        Args:
            settings: As on its command line, such as `max_connections=20`.
            directory: Where they go, on a small disk perhaps; a directory of its own when None.
        """
        require("PostgreSQL")
        found = find_postgres()
        assert found is not None
        self._binaries = found
        self._settings = settings
        self.port = free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="gpulse-pg-")) if directory is None else directory
        self._popen: subprocess.Popen[bytes] | None = None
        password_file = self.directory / "password"
        password_file.write_text(PASSWORD)
        if os.geteuid() == 0:
            shutil.chown(self.directory, _user())
            shutil.chown(password_file, _user())
        self._run(
            "initdb",
            *("--pgdata", str(self.directory / "data"), "--no-sync", "--username", "postgres"),
            *("--auth", "scram-sha-256", "--pwfile", str(password_file), "--encoding", "UTF8"),
            *("--no-locale", "--no-instructions"),
        )

    def _command(self, program: str, *arguments: str) -> list[str]:
        command = [f"{self._binaries}/{program}", *arguments]
        return ["setpriv", f"--reuid={_user()}", "--clear-groups", *command] if os.geteuid() == 0 else command

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            self._command(program, *arguments),
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> Self:
        """Start it, again perhaps, and wait until it answers."""
        options = [
            *(f"port={self.port}", "listen_addresses=127.0.0.1", "unix_socket_directories="),
            *(
                "fsync=off",
                "dynamic_shared_memory_type=mmap",
                "shared_buffers=32MB",
                "max_wal_size=64MB",
                "min_wal_size=32MB",
                *self._settings,
            ),
        ]
        arguments = [word for option in options for word in ("-c", option)]
        until(lambda: not self._uses_data(), "the processes of the server before have ended")
        with (self.directory / "server.log").open("ab") as output:
            self._popen = subprocess.Popen(
                self._command("postgres", "-D", str(self.directory / "data"), *arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
            )
        until(self._answers, "PostgreSQL answers")
        return self

    def _uses_data(self) -> bool:
        """Return whether a process runs in the data directory; a killed one holds its shared memory for a moment."""
        data = str((self.directory / "data").resolve())
        for link in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):  # it has ended, or is another user's
                if os.readlink(link) == data:
                    return True
        return False

    def _answers(self) -> bool:
        assert self._popen is not None
        assert self._popen.poll() is None, self.log
        try:
            self.execute("postgres", "SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def log(self) -> str:
        """What the server wrote."""
        return (self.directory / "server.log").read_text(encoding="utf-8")

    def execute(self, database: str, *statements: str) -> list[tuple[object, ...]]:
        """Run statements as the server's owner; the rows of the last one."""
        with psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user="postgres",
            password=PASSWORD,
            dbname=database,
            autocommit=True,
        ) as connection:
            for statement in statements:
                cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def make_database(self) -> str:
        """Make a user and a database of theirs; its name is the user's too."""
        name = f"gpulse{next(_COUNT)}x{os.getpid()}"
        self.execute(
            "postgres",
            f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'",
            f"CREATE DATABASE {name} OWNER {name}",
        )
        return name

    def url(self, database: str) -> str:
        """The URL of a database, without a password."""
        return f"postgresql://{database}@127.0.0.1:{self.port}/{database}"

    def rows(self, database: str, statement: str) -> list[tuple[object, ...]]:
        """What a statement finds in our tables."""
        return self.execute(database, "SET search_path TO gpulse", statement)

    def signal(self, number: int) -> None:
        """Send a signal to the server and all its processes."""
        assert self._popen is not None
        for pid in [self._popen.pid, *self._children()]:
            with suppress(ProcessLookupError):  # a child may have ended
                os.kill(pid, number)

    def _children(self) -> Sequence[int]:
        assert self._popen is not None
        text = Path(f"/proc/{self._popen.pid}/task/{self._popen.pid}/children").read_text(encoding="ascii")
        return [int(word) for word in text.split()]

    def kill(self) -> None:
        """End it without warning: every process of it."""
        if self._popen is not None:
            if self.is_running:
                self.signal(signal.SIGKILL)
            self._popen.wait()
            self._popen = None
            (self.directory / "data" / "postmaster.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """End it in order, whoever is connected."""
        if self._popen is not None:
            self._popen.send_signal(signal.SIGINT)
            self._popen.wait(60)
            self._popen = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def _user() -> str:
    """Return the user that runs servers in place of root."""
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"
