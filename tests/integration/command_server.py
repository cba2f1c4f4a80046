"""Processes that have imported gpulse, and fork for each command that a test runs or starts.

Imports take most of the time of a short command, and of the start of a head or an agent; tests start hundreds. A
dispatcher, which is the only child of the tests, keeps one such process for each set of variables that a program reads
only when it starts, such as the path on which the linker finds libraries.
"""

from __future__ import annotations

import ast
import atexit
import gc
import io
import json
import os
import pkgutil
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import IO, Any, NamedTuple, Self

_MAX_REQUEST_BYTES = 1 << 20
_DAEMON_MODULES = frozenset({"agent", "head_run"})
"""They import gRPC and DuckDB, which short commands do not need."""
_RARE_MODULES = frozenset({"compat", "demo_head", "deploy", "notify"})


class Command(NamedTuple):
    """A command line, and what it is to find."""

    argv: list[str]
    """As `sys.argv`."""
    program: list[str]
    """What a new process would be started with, which a command does that starts itself again in the background."""
    env: dict[str, str]
    cwd: str
    start_env: dict[str, str]
    """The variables that only a new program reads."""
    function: str = "gpulse.cli.entry:main"
    """What is called."""
    imports: str = "commands"
    """What is to be imported before: `commands`, `daemons` or `dask`."""
    tuned: Mapping[str, Any] = {}
    """Other values of constants, such as `gpulse.cluster.agent.head_selection:STABLE_SECONDS`."""


class ForkedProcess:
    """A command that was forked; as much of `subprocess.Popen` as tests use."""

    def __init__(
        self, command: Command, answers: socket.socket, pipes: Sequence[IO[Any] | None], seconds: float
    ) -> None:
        self.args = command.program
        self.stdin, self.stdout, self.stderr = pipes
        self.returncode: int | None = None
        self._answers = answers
        self._lock = threading.Lock()
        self._answers.settimeout(seconds)
        self.pid = int(self._answers.recv(64))

    def poll(self) -> int | None:
        """Return the exit code; None as long as it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit code."""
        descriptor = self._answers.fileno()  # -1 once another thread has the exit code
        if descriptor >= 0 and not select.select([descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                self.returncode = int(self._answers.recv(64))
                self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class CommandServer:
    """The dispatcher, for as long as tests run."""

    def __init__(self) -> None:
        self._child = _Child("dispatch")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()

    def start(
        self, command: Command, streams: Sequence[int | IO[Any]], seconds: float, *, text: bool
    ) -> ForkedProcess:
        """Start a command with three streams, each of which is what `subprocess.Popen` takes."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipes: list[IO[Any] | None] = []
        descriptors: list[int] = []
        with theirs, ExitStack() as stack:
            for number, stream in enumerate(streams):
                pipe: IO[Any] | None = None
                if stream == subprocess.PIPE:
                    ends = os.pipe()
                    kept, given = reversed(ends) if number == 0 else ends
                    stack.callback(os.close, given)
                    pipe = _open_pipe(kept, "w" if number == 0 else "r", text=text)
                elif stream == subprocess.STDOUT:
                    given = descriptors[1]
                elif isinstance(stream, int):
                    given = os.open(os.devnull, os.O_RDWR)
                    stack.callback(os.close, given)
                else:
                    given = stream.fileno()
                pipes.append(pipe)
                descriptors.append(given)
            self._child.send(_encode(command), [theirs.fileno(), *descriptors])
        return ForkedProcess(command, ours, pipes, seconds)

    def run(self, command: Command, seconds: float) -> tuple[int, bytes, bytes]:
        """Run a command; return its exit code, and what it wrote to standard output and standard error."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipes = [os.pipe(), os.pipe()]
        with ours, selectors.DefaultSelector() as open_pipes:
            with theirs, open(os.devnull, "rb") as nothing:
                streams = [nothing.fileno(), *(write for _, write in pipes)]
                self._child.send(_encode(command), [theirs.fileno(), *streams])
            written: dict[int, bytes] = {}
            for read, write in pipes:
                os.close(write)
                written[read] = b""
                open_pipes.register(read, selectors.EVENT_READ)
            deadline = time.monotonic() + seconds
            pid: int | None = None
            try:
                ours.settimeout(seconds)
                pid = int(ours.recv(64))
                while open_pipes.get_map():
                    ready = open_pipes.select(max(0.0, deadline - time.monotonic()))
                    if not ready:
                        raise TimeoutError
                    for key, _ in ready:
                        part = os.read(key.fd, 1 << 16)
                        written[key.fd] += part
                        if not part:
                            open_pipes.unregister(key.fd)
                ours.settimeout(max(0.01, deadline - time.monotonic()))
                code = int(ours.recv(64))
            except TimeoutError:
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(command.program, seconds) from None
            finally:
                for read, _ in pipes:
                    os.close(read)
        out, err = written.values()
        return code, out, err


def _open_pipe(descriptor: int, mode: str, *, text: bool) -> IO[Any]:
    return os.fdopen(descriptor, mode, encoding="utf-8") if text else os.fdopen(descriptor, f"{mode}b")


class _Child:
    """A process that takes commands over a socket until that is closed."""

    def __init__(self, function: str, *arguments: object, env: Mapping[str, str] | None = None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = ", ".join(map(repr, (theirs.fileno(), *arguments)))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import {function}; {function}({words})"],
                env={
                    **(os.environ if env is None else env),
                    "OPENBLAS_NUM_THREADS": "1",  # threads would not be there after a fork
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def send(self, request: bytes, descriptors: Sequence[int]) -> None:
        """Send a command, and where it is to write."""
        socket.send_fds(self._socket, [request], list(descriptors))

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.wait()


def _encode(command: Command) -> bytes:
    return json.dumps({**command._asdict(), "tuned": repr(dict(command.tuned))}).encode()


def _decode(request: bytes) -> Command:
    fields = json.loads(request)
    return Command(**{**fields, "tuned": ast.literal_eval(fields["tuned"])})


def dispatch(descriptor: int) -> None:
    """Hand each command to a process that has imported what it needs, until the tests end."""
    servers: dict[tuple[object, ...], _Child] = {}
    with ExitStack() as stack, socket.socket(fileno=descriptor) as requests:
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 4)
            if not request:
                return
            command = _decode(request)
            key = (command.imports, *sorted(command.start_env.items()))
            if key not in servers:
                names = ("PATH", "HOME", "TZ")
                env = {name: command.env[name] for name in names if name in command.env} | command.start_env
                servers[key] = _Child("serve", command.imports, env=env)
                stack.callback(servers[key].close)
            servers[key].send(request, descriptors)
            for each in descriptors:
                os.close(each)


def serve(descriptor: int, imports: str) -> None:
    """Fork for each command, until the dispatcher ends."""
    if imports == "dask":
        _import_dask()
    else:
        _import_gpulse(with_daemons=imports == "daemons")
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as requests:
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 4)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not request:
                return
            if os.fork() == 0:
                break
            for each in descriptors:
                os.close(each)
    answers, *streams = descriptors
    pid = os.fork()
    if pid != 0:
        for each in streams:
            os.close(each)
        with socket.socket(fileno=answers) as connection:
            connection.send(str(pid).encode())
            _, status = os.waitpid(pid, 0)
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    os.close(answers)
    for number, each in enumerate(streams):
        os.dup2(each, number)
    for each in streams:
        os.close(each)
    command = _decode(request)
    os.environ.clear()
    os.environ.update(command.env)
    if os.environ.get("PYTHONUNBUFFERED"):
        raw = io.FileIO(1, "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(raw, sys.stdout.encoding, sys.stdout.errors, write_through=True)
    time.tzset()
    os.chdir(command.cwd)
    sys.argv = command.argv
    sys.orig_argv[:] = command.program
    for path, value in command.tuned.items():
        _tune(path, value)
    if imports == "dask":
        config = import_module("dask.config")
        config.paths[:] = config._get_paths()  # from the environment, as when it is imported
        config.refresh()
    module, _, name = command.function.partition(":")
    try:
        getattr(import_module(module), name)()
    except SystemExit as ended:
        if isinstance(ended.code, int):
            _exit(ended.code)
        raise


def _exit(code: int) -> None:
    """End as `multiprocessing` ends its processes: with everything but the deletion of all modules, which is slow."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # then the interpreter fails to end as well, and says so
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def _import_dask() -> None:
    for name in ("dask.__main__", "distributed.cli.dask_scheduler", "distributed.cli.dask_worker"):
        import_module(name)


def _import_gpulse(*, with_daemons: bool) -> None:
    left_out = _RARE_MODULES if with_daemons else _RARE_MODULES | _DAEMON_MODULES
    package = import_module("gpulse.cli")
    for module in pkgutil.iter_modules(package.__path__, "gpulse.cli."):
        if module.name.rpartition(".")[2] not in left_out:
            import_module(module.name)
    import_module("gpulse.sources.demo_machine").DemoMachine(0.0).sample(1.0)  # which reads its recordings
    if with_daemons:
        import_module("tests.integration.fake_head")
        import_module("numpy.ma")  # as DuckDB does when it is first used


def _tune(path: str, value: Any) -> None:
    """Set a constant, also where other modules have imported it: a new process would import the value that was set."""
    module_name, _, name = path.partition(":")
    module = import_module(module_name)
    before = getattr(module, name, None)
    exec(f"module.{name}; module.{name} = value", {"module": module, "value": value})
    for other in [each for key, each in sys.modules.items() if key.startswith("gpulse.")]:
        if before is not None and getattr(other, name, None) is before:
            setattr(other, name, value)
