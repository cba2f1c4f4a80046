"""Runs the installed commands as people do: as processes, with an environment of their own, on a terminal or not."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import pytest

from tests.integration.command_server import Command, CommandServer, ForkedProcess

BIN = Path(sys.executable).parent
TRACES = Path(__file__).parents[1] / "data" / "traces"
_PATIENCE_SECONDS = 120.0
STUBBORN = (
    sys.executable,
    "-c",
    """
import os, pathlib, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
time.sleep(600)
""",
)
"""A command that no polite signal ends; it writes its pid into the file that is its argument."""


class Ended(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The same on every machine, whatever the developer's shell has set."""
    base = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": "/nonexistent", "TZ": "UTC", "LANG": "C.UTF-8"}
    return {**base, **(extra or {})}


Started: TypeAlias = subprocess.Popen[Any] | ForkedProcess
_FUNCTIONS = {
    "gpulse": "gpulse.cli.entry:main",
    "gsprof": "gpulse.cli.gsprof:main",
    "bmon": "gpulse.cli.main:run_bmon",
    "gpu_mon": "gpulse.cli.harvest:run_gpu_mon",
}
"""What the programs that are installed call."""
_DAEMONS = frozenset({"agent", "connect", "head", "start"})
"""Commands that need what heads and agents import."""
_SERVERS: list[CommandServer] = []
_UNBUFFERED = "PYTHONUNBUFFERED"
_OWN_PATH = ("PYTHONPATH", str(Path(__file__).parents[2]))
"""Which such a process has as well."""
_STARTS: Counter[tuple[tuple[str, str], ...]] = Counter()
"""How often programs were started with the same variables of those that are read only at the start."""


@contextmanager
def serving_commands() -> Iterator[None]:
    """Let `run` and `start` fork a process that has imported gpulse."""
    with CommandServer() as server:
        _SERVERS.append(server)
        try:
            yield
        finally:
            _SERVERS.remove(server)


def _find_server(env: Mapping[str, str]) -> tuple[CommandServer | None, dict[str, str]]:
    """Return the server; None where only a new program will do, and where its like is started for the first time."""
    start_env = {
        name: value for name, value in env.items() if _is_read_at_start(name) and name != _UNBUFFERED
    }
    if not _SERVERS or _odd(env) not in (_odd(environment()), _odd(os.environ)):
        return None, start_env
    key = tuple(sorted(start_env.items()))
    _STARTS[key] += 1
    return (_SERVERS[-1] if _STARTS[key] > 1 else None), start_env


def _is_read_at_start(name: str) -> bool:
    """Whether only a new program reads an environment variable: the linker and the interpreter do."""
    return name.startswith(("LD_", "PYTHON", "LC_", "LANG", "MALLOC"))


def _odd(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process which serves many commands cannot have for one of them."""
    return {
        name: value
        for name, value in env.items()
        if _is_read_at_start(name)
        and name not in ("LD_LIBRARY_PATH", _UNBUFFERED)
        and (name, value) != _OWN_PATH
    }


def start(
    *arguments: str | Path,
    module: str = "gpulse",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int | IO[Any] = subprocess.DEVNULL,
    stdout: int | IO[Any] = subprocess.DEVNULL,
    stderr: int | IO[Any] = subprocess.DEVNULL,
    text: bool = False,
    tuned: Mapping[str, Any] | None = None,
) -> Started:
    """Start `python -m gpulse`, or another module, in a process of its own; `tuned`: see `fresh_program`."""
    given = dict(os.environ if env is None else env)
    words = [*(fresh_program(tuned) if tuned else (sys.executable, "-m", module)), *map(str, arguments)]
    server, start_env = _find_server(given)
    if server is None:
        return subprocess.Popen(
            words, env=given, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, text=text
        )
    is_daemon = module.startswith("tests.") or bool(arguments and str(arguments[0]) in _DAEMONS)
    command = Command(
        argv=[module, *map(str, arguments)],
        program=words,
        env=given,
        cwd=str(cwd or Path.cwd()),
        start_env=start_env,
        function={"gpulse": "gpulse.cli.entry:main", "dask": "dask.__main__:main"}.get(
            module, f"{module}:main"
        ),
        imports="dask" if module == "dask" else "daemons" if is_daemon else "commands",
        tuned=tuned or {},
    )
    return server.start(command, (stdin, stdout, stderr), _PATIENCE_SECONDS, text=text)


def fresh_program(tuned: Mapping[str, Any]) -> list[str]:
    """`python -m gpulse`, or the same with other constants, such as `gpulse.cluster.agent.head_selection:STABLE_SECONDS`."""
    if not tuned:
        return [sys.executable, "-m", "gpulse"]
    lines = ["import importlib"]
    for path, value in tuned.items():
        module, _, name = path.partition(":")
        lines.append(
            f"module = importlib.import_module({module!r}); module.{name}; module.{name} = {value!r}"
        )
    return [sys.executable, "-c", "\n".join([*lines, "from gpulse.cli.entry import main", "main()"])]


def run(
    *arguments: str | Path,
    program: str = "gpulse",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Ended:
    """Run a command to its end, without a terminal and without input."""
    given = environment(env)
    words = [str(BIN / program), *map(str, arguments)]
    server, start_env = _find_server(given)
    if server is not None and program in _FUNCTIONS:
        command = Command(
            argv=words,
            program=[sys.executable, *words],
            env=given,
            cwd=str(cwd or Path.cwd()),
            start_env=start_env,
            function=_FUNCTIONS[program],
            imports="daemons" if arguments and str(arguments[0]) in _DAEMONS else "commands",
        )
        code, out, err = server.run(command, _PATIENCE_SECONDS)
        return Ended(code, out.decode(), err.decode())
    done = subprocess.run(
        words,
        env=given,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_PATIENCE_SECONDS,
        check=False,
    )
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


def pid_of_stubborn(path: Path) -> int:
    """The pid, once it ignores signals."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            pytest.fail("the command did not start")
        time.sleep(0.05)
    return int(path.read_text())


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, child: subprocess.Popen[bytes], master: int) -> None:
        self.child = child
        self._master = master
        self.seen = b""

    def until(self, text: bytes) -> bytes:
        """Read until the command has written this; everything it wrote so far."""
        while text not in self.seen:
            if not self._read():
                pytest.fail(f"ended without {text!r}: {self.seen!r}")
        return self.seen

    def to_the_end(self) -> bytes:
        """Read until the command ends."""
        while self._read():
            pass
        self.child.wait(_PATIENCE_SECONDS)
        return self.seen

    def _read(self) -> bool:
        if not select.select([self._master], [], [], _PATIENCE_SECONDS)[0]:
            pytest.fail(f"silent for {_PATIENCE_SECONDS} s: {self.seen!r}")
        try:
            part = os.read(self._master, 65536)
        except OSError:  # how a terminal says that nobody holds its other end
            return False
        self.seen += part
        return bool(part)

    def press_ctrl_c(self) -> None:
        """Type it, so that the terminal itself sends SIGINT to the command in its foreground."""
        os.write(self._master, b"\x03")


@contextmanager
def terminal(
    *arguments: str | Path,
    columns: int = 80,
    rows: int = 24,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[Terminal]:
    """Start a command in the foreground of a terminal of this size."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    child = subprocess.Popen(
        ["setsid", "--ctty", *prefix, BIN / "gpulse", *arguments],
        env=environment({"TERM": "xterm-256color", **(env or {})}),
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    try:
        yield Terminal(child, master)
    finally:
        child.kill()
        child.wait()
        os.close(master)
