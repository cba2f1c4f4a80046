"""A runner with real programs that write to a pipe what they did, so that tests can wait for it."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from gpulse.harvest.events import ProcessId, ProgramGone, ProgramStarted, RunEvent
from gpulse.harvest.settings import Program
from gpulse.harvest.supervise.process_tree import MachineProcessTree
from gpulse.harvest.supervise.runner import Runner
from gpulse.sources.procfs import Roots

MARK = "ledger-of-a-test"
SECONDS = 60.0
"""How long a test waits for what must happen."""
PRELUDE = """
import os, signal, sys, time
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def daemon():
    # True in a process that has left its parent, session and group; the first process waits until that is done.
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(read)
            os.write(write, b".")
            os.close(write)
            return True
        os._exit(0)
    os.close(write)
    os.read(read, 1)
    os.close(read)
    os.wait()
    return False
def rest(*words):
    say(*words, os.getpid())
    while True:
        signal.pause()
def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
_News = TypeVar("_News", bound=RunEvent)
TREE = MachineProcessTree()


def python(code: str, *arguments: str) -> tuple[str, ...]:
    """The command of a program; it has the words of the prelude."""
    return (sys.executable, "-I", "-S", "-c", PRELUDE + code, *arguments)


def there(process: ProcessId) -> bool:
    """True while this very process has not ended."""
    return TREE.is_there(process)


def wait_for(*processes: ProcessId) -> None:
    """Wait until they have ended, whoever their parent is; nothing else happens in this process meanwhile."""
    for process in processes:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            if there(process):
                assert select.select([descriptor], [], [], SECONDS)[0]
        finally:
            os.close(descriptor)


class Lab:
    """A runner, what it told, and what its programs wrote."""

    def __init__(self, pipe: Path, output: asyncio.StreamReader) -> None:
        self.told: asyncio.Queue[RunEvent] = asyncio.Queue()
        self.runner = Runner(mark=MARK, report=self.told.put_nowait, roots=Roots())
        self.pipe = pipe
        self.output = output

    def start(
        self, code: str, run: str = "run", variables: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        """Start a program that is written in Python, in an environment of these variables."""
        fields = {
            "command": python(code),
            "gpus": (0,),
            "log": str(self.pipe),
            "grace_seconds": 0.3,
            **options,
        }
        program = Program("work", **fields)
        self.runner.start(run, program, os.environ if variables is None else variables)

    async def next(self, kind: type[_News]) -> _News:
        """The next thing the runner tells, which must be of this kind."""
        news = await asyncio.wait_for(self.told.get(), SECONDS)
        assert isinstance(news, kind), news
        return news

    async def started(self, code: str, **options: Any) -> ProgramStarted:
        """Start a program and wait until it runs."""
        self.start(code, **options)
        return await self.next(ProgramStarted)

    async def line(self) -> str:
        """The next line that somebody writes."""
        return (await asyncio.wait_for(self.output.readline(), SECONDS)).decode().strip()

    async def rest(self) -> list[str]:
        """All that is still to be read; nobody must be there to write more."""
        await asyncio.to_thread(self.pipe.write_text, "end\n")
        lines: list[str] = []
        while (line := await self.line()) != "end":
            lines.append(line)
        return lines

    async def processes(self, count: int) -> dict[str, ProcessId]:
        """The next processes that say a word and their number."""
        found: dict[str, ProcessId] = {}
        for _ in range(count):
            word, number = (await self.line()).split()
            process = TREE.find(int(number))
            assert process is not None
            found[word] = process
        return found

    async def gone(self, run: str = "run") -> None:
        """Wait until the runner says that nothing is left of a run."""
        while (news := await asyncio.wait_for(self.told.get(), SECONDS)) != ProgramGone(run):
            assert not isinstance(news, ProgramGone), news


@asynccontextmanager
async def a_lab(folder: Path) -> AsyncIterator[Lab]:
    """A runner that is closed at the end, and a pipe that anybody may write to."""
    pipe = folder / "output"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    output = asyncio.StreamReader()
    # Open for writing too: else it would end with the first program.
    file = open(os.open(pipe, os.O_RDWR | os.O_NONBLOCK), "r+b", buffering=0)  # noqa: SIM115, ASYNC230
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(output), file
    )
    lab = Lab(pipe, output)
    try:
        yield lab
    finally:
        await lab.runner.close(0.0)
        transport.close()
        await asyncio.sleep(0)
