"""Runs programs, each below a keeper of its own, and tells what becomes of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from time import monotonic

from gpulse.errors import GpulseError
from gpulse.harvest.running.ending import end
from gpulse.harvest.running.errand import to_work
from gpulse.harvest.running.kernel import is_subreaper, set_subreaper
from gpulse.harvest.running.kin import Kin
from gpulse.harvest.running.line import Line
from gpulse.harvest.running.marks import RUN, read_settled_environ, run_of
from gpulse.harvest.running.run import Run, start_keeper
from gpulse.harvest.running.told import Exited, Failed, Gone, Process, Started, Told
from gpulse.harvest.running.tree import Stat, Tree
from gpulse.harvest.settings import Program
from gpulse.sources.procfs import Roots

_KEEPER_SECONDS = 0.5
"""How long a keeper may take to kill what it keeps."""
_LAST_SECONDS = 5.0
"""How long closing waits for what was killed."""


class Runner:
    """Starts and ends programs; whatever descends from one belongs to it, and goes with it.

    `report` is called from the event loop, never from within a call to the runner. After `Failed` and `Gone`
    there is nothing more to tell about a run.
    """

    def __init__(self, *, mark: str, report: Callable[[Told], None], roots: Roots) -> None:
        self._mark = mark
        self._report = report
        self._proc = roots.proc
        self._tree = Tree(roots.proc)
        self._kin = Kin(self._tree)
        self._runs: dict[str, Run] = {}
        self._keepers: dict[int, Run] = {}
        """Those whose status was not taken yet, by number."""
        self._rescues: set[asyncio.Task[None]] = set()
        self._quiet = asyncio.Event()
        """Set while there is no run and no keeper."""
        self._quiet.set()
        self._was_subreaper: bool | None = None
        self._closed = False

    def start(self, run: str, program: Program, environment: Mapping[str, str]) -> None:
        """Start a program; what the configuration says of its environment comes on top of the given one."""
        try:
            if self._closed or run in self._runs:
                raise GpulseError(f"{run} is running already" if run in self._runs else "harvest is ending")
            self._open(run, program, environment)
        except GpulseError as error:
            self._tell(Failed(run, error.message))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._tell(Failed(run, f"cannot start {program.command[0]}: {reason}"))

    def _open(self, name: str, program: Program, environment: Mapping[str, str]) -> None:
        mark = f"{self._mark}/{name}"
        work = to_work(mark, program, environment, self._proc)
        self._become_subreaper()
        child, end_of_line = start_keeper({**environment, RUN: mark})
        try:
            keeper = self._tree.find(child.pid) or Process(child.pid, 0)
            run = Run(name, program, child, keeper)
        except BaseException:
            end_of_line.close()
            child.kill()
            child.wait()
            raise
        run.line = Line(end_of_line, lambda: self._hear(run))
        run.line.send(work.to_json())
        asyncio.get_running_loop().add_reader(run.descriptor, self._keeper_ended, run)
        self._runs[name] = self._keepers[child.pid] = run
        self._quiet.clear()

    def _become_subreaper(self) -> None:
        """What loses its keeper comes to us."""
        if self._was_subreaper is None:
            self._was_subreaper = is_subreaper()
            set_subreaper(True)

    def signal(self, run: str, number: int) -> None:
        """Send a signal to a program and to everything that it started."""
        if running := self._runs.get(run):
            if number == running.program.stop_signal and running.asked_at is None:
                running.asked_at = monotonic()
            running.order({"signal": number})

    def kill(self, run: str) -> None:
        """Kill a program and everything that it started."""
        if running := self._runs.get(run):
            running.order({"kill": True})
            if not running.killed:
                running.killed = True
                asyncio.get_running_loop().call_later(_KEEPER_SECONDS, self._take_over, running)

    def is_ours(self, pid: int) -> bool:
        """True for this process and everything that it runs."""
        return self._kin.is_ours(pid)

    async def close(self, grace: float) -> None:
        """End everything and wait until it is gone, or for seconds after it was killed.

        What cannot be killed is left to its keeper.
        """
        self._closed = True
        for name, run in list(self._runs.items()):
            if run.asked_at is None:
                self.signal(name, run.program.stop_signal)
        if not all(run.killed for run in self._runs.values()):
            await self._wait_until_quiet(grace)
        for name in list(self._runs):
            self.kill(name)
        await self._wait_until_quiet(_LAST_SECONDS)
        for run in list(self._keepers.values()):
            self._let_go(run)
        for task in self._rescues:
            task.cancel()
        await asyncio.gather(*self._rescues, return_exceptions=True)
        self._runs.clear()
        self._be_quiet()
        if self._was_subreaper is not None:
            set_subreaper(self._was_subreaper)
            self._was_subreaper = None

    async def _wait_until_quiet(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        except TimeoutError:
            pass

    def _hear(self, run: Run) -> None:
        for news in () if run.line is None else run.line.read():
            match news:
                case {"started": int(pid), "ticks": int(ticks)}:
                    run.process = Process(pid, ticks)
                    self._tell(Started(run.name, run.keeper, run.process))
                case {"exited": int(status)}:
                    run.exited = True
                    self._tell(Exited(run.name, status))
                case {"killing": True}:
                    run.obeyed = True
                case {"failed": str(why)}:
                    self._finish(run, Failed(run.name, why))
                case {"gone": True}:
                    self._finish(run, Gone(run.name))

    def _finish(self, run: Run, last: Told) -> None:
        run.gone = True
        del self._runs[run.name]
        self._tell(last)
        self._be_quiet()

    def _keeper_ended(self, run: Run) -> None:
        self._hear(run)
        status = run.child.wait()
        self._let_go(run)
        if not run.gone:
            task = asyncio.create_task(self._rescue(run, status))
            self._rescues.add(task)
            task.add_done_callback(self._rescues.discard)
        self._be_quiet()

    def _let_go(self, run: Run) -> None:
        asyncio.get_running_loop().remove_reader(run.descriptor)
        os.close(run.descriptor)
        if run.line is not None:
            run.line.close()
            run.line = None
        del self._keepers[run.child.pid]

    def _be_quiet(self) -> None:
        if not self._runs and not self._keepers:
            self._quiet.set()

    def _take_over(self, run: Run) -> None:
        """Kill a keeper that does not do what it was told, or was stopped at it: what it kept comes to us."""
        if run.gone or self._keepers.get(run.child.pid) is not run:
            return
        stat = self._tree.look(run.child.pid)
        if run.obeyed and stat is not None and stat.state not in "Tt":
            asyncio.get_running_loop().call_later(_KEEPER_SECONDS, self._take_over, run)
        else:
            run.child.kill()

    async def _rescue(self, run: Run, status: int) -> None:
        """End what a keeper left behind that was killed itself."""
        if run.asked_at is None:
            run.asked_at = monotonic()
        await end(
            lambda: self._strays(run),
            tree=self._tree,
            stop_signal=run.program.stop_signal,
            deadline=run.deadline,
        )
        if run.process is None and not run.killed:
            self._finish(
                run,
                Failed(
                    run.name,
                    f"{run.program.command[0]} was not started: its supervising process ended (status {status})",
                ),
            )
        else:
            self._finish(run, Gone(run.name))

    def _strays(self, run: Run) -> set[Process]:
        """What came to us from keepers that are no more; when the time is over it is killed at once.

        Who has just ended is among them: it may have left somebody else, who comes to us only now.
        """
        killing = monotonic() >= run.deadline()
        found: set[Process] = set()
        for process, stat in self._adopted(run):
            found.add(process)
            if killing:
                self._tree.kill_family(process.pid)
            else:
                found.update(self._tree.below(process))
            if stat.ended:
                self._reap(run, process.pid)
        return found

    def _adopted(self, run: Run) -> Iterator[tuple[Process, Stat]]:
        """Our children that we did not start: no keepers, in other sessions than ours, and of that run."""
        session = os.getsid(0)
        for pid in self._tree.children(os.getpid()):
            stat = self._tree.look(pid)
            if stat is None or pid in self._keepers or stat.session == session:
                continue
            process = Process(pid, stat.start_ticks)
            if stat.start_ticks >= run.keeper.start_ticks and self._is_of(run, process, stat):
                yield process, stat

    def _is_of(self, run: Run, process: Process, stat: Stat) -> bool:
        """False when it shows an environment without the run's mark, and nothing else says that the run started it."""
        if run.process is not None and stat.session == run.process.pid:
            return True
        variables = read_settled_environ(process, self._tree, self._proc)
        if not variables or run_of(self._mark, variables) == run.name:
            return True
        return self._kin.was_below(process, run.keeper)

    def _reap(self, run: Run, pid: int) -> None:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        if ended is not None and run.process is not None and pid == run.process.pid and not run.exited:
            run.exited = True
            exited = ended.si_code == os.CLD_EXITED
            self._tell(Exited(run.name, ended.si_status if exited else -ended.si_status))

    def _tell(self, news: Told) -> None:
        asyncio.get_running_loop().call_soon(self._report, news)
