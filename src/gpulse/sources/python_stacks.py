"""Read the stacks of running Python processes with py-spy, in the mode that does not stop them, one process or many at once."""

from __future__ import annotations

import ctypes
import json
import os
import re
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import islice
from time import monotonic, sleep
from typing import Any, NamedTuple

from gpulse.errors import install_command
from gpulse.model.python_stack import ProcessStacks, StackFrame, StackProblem, ThreadStack
from gpulse.model.safe_text import printable
from gpulse.sources.procfs import Roots, try_read

DEADLINE_SECONDS = 3.0
"""Time for one dump, after which py-spy is killed."""
MAX_OUTPUT_BYTES = 4 * 2**20
MAX_THREADS = 512
MAX_FRAMES = 256
_MAX_TEXT_CHARACTERS = 512
_MAX_ERROR_BYTES = 8192
_MAX_NUMBER = 2**31
_MAX_SOURCE_BYTES = 2**20
_MAX_SOURCE_LINES = 256
_MAX_CODE_CHARACTERS = 200
_REAP_SECONDS = 0.002
_MAX_READS = 3
_MAX_ROOTLESS = 1000
_PROGRAM_STARTS = frozenset({"<module>", "_run_module_as_main", "_bootstrap", "_start"})
"""Functions at the bottom of a main thread's stack."""
_NO_PERMISSION = re.compile(r"permission denied|operation not permitted|os error (1|13)\b", re.IGNORECASE)
_NOT_PYTHON = re.compile(
    r"failed to find python version|find a python interpreter|failed to find .*interpreter", re.IGNORECASE
)
_GONE = re.compile(r"check that the process is running|no such process|os error [23]\b", re.IGNORECASE)
YAMA_ROOT_ONLY, YAMA_NOBODY = 2, 3
_PR_SET_PTRACER = 0x59616D61


class PySpyResult(NamedTuple):
    """Output of one run of py-spy."""

    code: int
    """Exit code; negative for a signal."""
    output: bytes
    errors: str
    cpu_seconds: float
    is_late: bool = False
    """Whether it was killed at the deadline."""


def find_py_spy() -> str | None:
    """Return the py-spy of this Python environment, else the one on PATH; None when there is none."""
    own = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return own if os.path.isfile(own) and os.access(own, os.X_OK) else shutil.which("py-spy")


class StackReader:
    """Reads the stacks of processes with py-spy, one process at a time."""

    def __init__(
        self,
        py_spy: str | None,
        roots: Roots | None = None,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        """Use this py-spy; with None, every process has the problem that there is none."""
        self._py_spy = py_spy
        self._roots = roots or Roots()
        self._deadline_seconds = deadline_seconds
        self._sources = SourceLines(self._roots)
        self._rootless: set[int] = set()
        """Processes whose stacks do not begin where those of programs do."""

    def read(self, pid: int, clock: Callable[[], float]) -> ProcessStacks:
        """Return the stacks of a process, or why they cannot be read.

        The process runs on meanwhile, so a stack can be read while it changes. One of which only the inner part was
        read is read again.

        Args:
            pid: The process.
            clock: Returns the time in epoch seconds.
        """
        cpu_seconds = 0.0
        for _ in range(_MAX_READS):
            stacks = self._read_once(pid, clock)
            cpu_seconds += stacks.cpu_seconds
            if stacks.problem is not None or pid in self._rootless or _is_whole(stacks):
                break
        else:  # it is embedded in another program, or its main thread began elsewhere
            if len(self._rootless) >= _MAX_ROOTLESS:
                self._rootless.clear()
            self._rootless.add(pid)
        return stacks._replace(cpu_seconds=cpu_seconds)

    def _read_once(self, pid: int, clock: Callable[[], float]) -> ProcessStacks:
        begin = clock()
        if self._py_spy is None:
            return ProcessStacks(pid, begin, problem=describe_missing_py_spy())
        try:
            result = _run(
                [self._py_spy, "dump", "--nonblocking", "--json", "--pid", str(pid)], self._deadline_seconds
            )
        except OSError as error:
            reason = f"py-spy cannot be started: {error.strerror or error}"
            return ProcessStacks(pid, clock(), problem=StackProblem("failed", reason))
        time = (begin + clock()) / 2
        threads = decode_dump(result.output) if result.code == 0 else ()
        if not threads:
            problem = explain_failure(pid, result, self._roots)
            return ProcessStacks(pid, time, problem=problem, cpu_seconds=result.cpu_seconds)
        return ProcessStacks(
            pid,
            time,
            tuple(self._with_code(pid, thread) for thread in threads),
            cpu_seconds=result.cpu_seconds,
        )

    def _with_code(self, pid: int, thread: ThreadStack) -> ThreadStack:
        if not thread.frames:
            return thread
        return thread._replace(code=self._sources.get(pid, thread.frames[0].file, thread.frames[0].line))


def _is_whole(stacks: ProcessStacks) -> bool:
    """Whether the stack of the main thread begins where programs begin."""
    main = [thread for thread in stacks.threads if thread.name == "MainThread" and thread.frames]
    return not main or main[0].frames[-1].function in _PROGRAM_STARTS


def describe_missing_py_spy() -> StackProblem:
    """Return the problem of an environment without py-spy."""
    return StackProblem(
        "no_py_spy", "py-spy is not installed", f"install it with: {install_command('lines')}"
    )


def decode_dump(output: bytes) -> tuple[ThreadStack, ...]:
    """Return the threads of py-spy's JSON that have frames; what is not as expected is left out."""
    try:
        listed = json.loads(output)
    except (ValueError, RecursionError):
        return ()
    threads = [_thread(item) for item in listed[:MAX_THREADS]] if isinstance(listed, list) else []
    return tuple(thread for thread in threads if thread is not None)


def _thread(item: Any) -> ThreadStack | None:
    if not isinstance(item, dict) or not isinstance(listed := item.get("frames"), list):
        return None
    frames = tuple(frame for each in listed[:MAX_FRAMES] if (frame := _frame(each)) is not None)
    if not frames:
        return None
    return ThreadStack(
        name=_text(item.get("thread_name")) or "",
        thread_id=_number(item.get("os_thread_id")),
        is_active=item.get("active") is True,
        frames=frames,
    )


def _frame(item: Any) -> StackFrame | None:
    if not isinstance(item, dict):
        return None
    file, function, line = _text(item.get("filename")), _text(item.get("name")), _number(item.get("line"))
    if file is None or function is None or not line:
        return None
    return StackFrame(file, line, function, _text(item.get("short_filename")) or "")


def _text(value: Any) -> str | None:
    if not isinstance(value, str) or not value:
        return None
    return printable(value, _MAX_TEXT_CHARACTERS)


def _number(value: Any) -> int | None:
    return (
        value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_NUMBER else None
    )


def explain_failure(pid: int, result: PySpyResult, roots: Roots) -> StackProblem:
    """Return why py-spy has no stacks of a process, and what would give them."""
    owner = _owner(pid, roots)
    if owner is None or (_GONE.search(result.errors) and not _NO_PERMISSION.search(result.errors)):
        return StackProblem("gone", f"process {pid} has ended, or is not visible from here")
    if _NO_PERMISSION.search(result.errors):
        return explain_refusal(pid, owner, roots)
    if _NOT_PYTHON.search(result.errors):
        return StackProblem("not_python", f"process {pid} is not a Python program")
    if result.is_late:
        return StackProblem("failed", f"py-spy did not return the stacks of process {pid} in time")
    first = next((line for line in result.errors.splitlines() if line.strip()), "py-spy printed no stacks")
    reason = printable(first.removeprefix("Error: "), _MAX_CODE_CHARACTERS)
    return StackProblem("failed", f"py-spy could not read process {pid}: {reason}")


def explain_refusal(pid: int, owner: int, roots: Roots) -> StackProblem:
    """Return why the kernel does not let us read a process, and the command that may."""
    scope = yama_scope(roots)
    as_root = f"run gpulse, or its agent, as root: sudo gpulse why --pid {pid}"
    if os.geteuid() == 0:
        reason = f"reading the memory of process {pid} is not permitted here, not even as root"
        if scope == YAMA_NOBODY:
            return StackProblem("not_permitted", f"{reason}: kernel.yama.ptrace_scope is 3")
        return StackProblem(
            "not_permitted",
            reason,
            "if gpulse runs in a container, start the container with: docker run --cap-add SYS_PTRACE",
        )
    if owner != os.geteuid():
        return StackProblem("not_permitted", f"process {pid} belongs to another user", as_root)
    if scope == YAMA_NOBODY:
        return StackProblem(
            "not_permitted",
            f"no program may read the stacks of process {pid}: kernel.yama.ptrace_scope is 3",
            "the administrator can set a lower value and reboot",
        )
    if scope == YAMA_ROOT_ONLY:
        return StackProblem(
            "not_permitted",
            f"only root may read the stacks of process {pid}: kernel.yama.ptrace_scope is 2",
            as_root,
        )
    if scope:
        return StackProblem(
            "not_permitted",
            f"a program may read only the stacks of its own children: kernel.yama.ptrace_scope is {scope}",
            f"{as_root}, or start the program with: gpulse why -- COMMAND",
        )
    return StackProblem(
        "not_permitted",
        f"reading the memory of process {pid} is not permitted here",
        f"{as_root}; if gpulse runs in a container, start the container with: docker run --cap-add SYS_PTRACE",
    )


def yama_scope(roots: Roots) -> int | None:
    """Return kernel.yama.ptrace_scope; None when the kernel does not have Yama."""
    raw = try_read(f"{roots.proc}/sys/kernel/yama/ptrace_scope")
    return int(raw) if raw is not None and raw.strip().isdigit() else None


def allow_reading_by(pid: int) -> Callable[[], None]:
    """Return a function with which the calling process lets another one, and its children, read its memory.

    Under Yama's scope 1 only ancestors of a process may read it, and py-spy is not one. The permission stays with the
    process through exec; its children do not inherit it.

    It is safe between fork and exec in a process with threads: the library is loaded and the arguments are made here, so
    that it only makes one system call, without an import or a lock.
    """
    prctl = ctypes.CDLL(None).prctl
    nothing = ctypes.c_ulong(0)
    option, reader = ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(pid)
    return lambda: prctl(option, reader, nothing, nothing, nothing)


def _owner(pid: int, roots: Roots) -> int | None:
    """Return the user ID of a process; None when there is no such process."""
    try:
        return os.stat(f"{roots.proc}/{pid}").st_uid
    except OSError:
        return None


def _run(arguments: list[str], deadline_seconds: float) -> PySpyResult:
    """Run py-spy; kill it at the deadline or when it writes too much, and reap it in any case.

    Raises:
        OSError: It cannot be started.
    """
    end = monotonic() + deadline_seconds
    child = subprocess.Popen(  # noqa: S603  the program is py-spy, the argument a number
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"RUST_BACKTRACE": "0", "LC_ALL": "C"},
        start_new_session=True,  # Ctrl-C at the terminal is not meant for it
    )
    is_complete = False
    try:
        texts, is_complete = _read_pipes(child, end)
    finally:
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        cpu_seconds = _reap(child, end if is_complete else 0.0)
    return PySpyResult(
        child.returncode if is_complete else -1,
        texts[0],
        texts[1].decode("utf-8", "replace"),
        cpu_seconds,
        is_late=not is_complete and len(texts[0]) <= MAX_OUTPUT_BYTES,
    )


def _reap(child: subprocess.Popen[bytes], end: float) -> float:
    """Wait until the child has ended, kill it at the deadline, and return the CPU time that it used."""
    try:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        while pid == 0 and monotonic() < end:
            sleep(_REAP_SECONDS)
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid == 0:
            os.killpg(child.pid, signal.SIGKILL)  # it leads a session of its own; a wrapper may have children
            _, status, usage = os.wait4(child.pid, 0)
    except ChildProcessError:  # whoever started us ignores the end of children, so the kernel has reaped it
        child.returncode = 0
        return 0.0
    child.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def _read_pipes(child: subprocess.Popen[bytes], end: float) -> tuple[tuple[bytes, bytes], bool]:
    """Return what the child writes to both pipes, and whether it closed them in time and within the limits."""
    pipes = [pipe for pipe in (child.stdout, child.stderr) if pipe is not None]
    found: dict[int, bytearray] = {pipe.fileno(): bytearray() for pipe in pipes}
    out, err = (pipe.fileno() for pipe in pipes)
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe.fileno(), selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, end - monotonic()))
            if not ready or len(found[out]) > MAX_OUTPUT_BYTES:
                break
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fd)
                elif key.fd == out or len(found[err]) < _MAX_ERROR_BYTES:
                    found[key.fd] += chunk
        is_complete = not selector.get_map()
    return (bytes(found[out]), bytes(found[err])), is_complete


class SourceLines:
    """Lines of source files as processes see them, for the innermost frames of stacks."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._texts: OrderedDict[tuple[int, int, int, int], str | None] = OrderedDict()
        """By device, inode and time of change of the file, and the number of the line; the latest used is last."""

    def get(self, pid: int, file: str, line: int) -> str | None:
        """Return the text of a line; None when the file cannot be read.

        The file is that of the process, which may have another root directory. Where we may not look into that, it is
        the file of this name here.
        """
        if not file.endswith(".py") or not os.path.isabs(file) or line < 1:
            return None
        try:
            try:
                descriptor = _open_source(f"{self._roots.proc}/{pid}/root{file}")
            except PermissionError:
                descriptor = _open_source(file)
        except (OSError, ValueError):
            return None
        try:
            return self._text(descriptor, line)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def _text(self, descriptor: int, line: int) -> str | None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        key = status.st_dev, status.st_ino, status.st_mtime_ns, line
        if key in self._texts:
            self._texts.move_to_end(key)
            return self._texts[key]
        self._texts[key] = text = _read_line(descriptor, line)
        if len(self._texts) > _MAX_SOURCE_LINES:
            self._texts.popitem(last=False)
        return text


def _open_source(path: str) -> int:
    """Open a file without waiting for whoever writes to it, if it is a pipe."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _read_line(descriptor: int, line: int) -> str | None:
    """Return a line of the first part of a file; None when that has fewer lines."""
    lines = BytesIO(os.read(descriptor, _MAX_SOURCE_BYTES))
    found = next(islice(lines, line - 1, None), None)
    return None if found is None else found.decode("utf-8", "replace").strip()[:_MAX_CODE_CHARACTERS]


_READERS = 4


class ParallelRead(NamedTuple):
    """The stacks of several processes, in their order, and the threads that still read after the deadline."""

    stacks: tuple[ProcessStacks, ...]
    stuck: tuple[threading.Thread, ...] = ()


def read_all(pids: Sequence[int], reader: StackReader, deadline_seconds: float) -> ParallelRead:
    """Return the stacks of processes; of those that were not read in time, that they were not.

    The threads are daemons: a read may hang in a file server, and a program that ends must not wait for it.
    """
    began, deadline = time.time(), time.monotonic() + deadline_seconds
    left, found = deque(pids), dict[int, ProcessStacks]()
    threads = [
        threading.Thread(
            target=_read_next, args=(left, found, reader), name=f"gpulse-stacks-{number}", daemon=True
        )
        for number in range(min(_READERS, len(pids)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    left.clear()
    late = StackProblem("failed", "the stacks could not be read in time")
    return ParallelRead(
        tuple(found.get(pid) or ProcessStacks(pid, began, problem=late) for pid in pids),
        tuple(thread for thread in threads if thread.is_alive()),
    )


def _read_next(left: deque[int], found: dict[int, ProcessStacks], reader: StackReader) -> None:
    """Read one process after the other until none is left."""
    while True:
        try:
            pid = left.popleft()
        except IndexError:
            return
        try:
            found[pid] = reader.read(pid, time.time)
        except Exception as error:  # noqa: BLE001  the other processes are still wanted
            problem = StackProblem("failed", f"a bug in gpulse: {error!r}")
            found[pid] = ProcessStacks(pid, time.time(), problem=problem)
