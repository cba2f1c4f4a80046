"""The parts of a running harvest put together: from a configuration to the end of the last program."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpulse.cli import service, shell
from gpulse.errors import GpulseError
from gpulse.harvest.account import Account, Me
from gpulse.harvest.config import file, load
from gpulse.harvest.harvester import DryRunner, Harvester, Options
from gpulse.harvest.ledger import Kept, Ledger
from gpulse.harvest.running import orphans
from gpulse.harvest.running.runner import Runner
from gpulse.harvest.running.told import Told
from gpulse.harvest.running.tree import Tree
from gpulse.harvest.settings import Gpu, Settings
from gpulse.harvest.sight.contexts import find_gpus
from gpulse.harvest.sight.sight import Sight
from gpulse.model.device import ranges
from gpulse.sources.owners import user_name
from gpulse.sources.procfs import Roots

log = logging.getLogger(__name__)


_LAST_GRACE_SECONDS = 3.0
"""For what still runs when a fault ends the harvest itself."""


class Place(NamedTuple):
    """Where a harvest finds things."""

    config: Path
    state: str
    roots: Roots


async def harvest(
    place: Place, ready: service.Ready, signals: service.EndSignals, *, dry_run: bool, once: bool
) -> None:
    """Harvest until the end.

    Raises:
        ConfigError: The configuration is refused.
        CollectionError: There is no GPU.
        GpulseError: Another harvest runs here, or nothing can be written.
    """
    hangup = _Hangup()
    file.read(str(place.config), root=os.geteuid() == 0)  # a wrong name is told on any machine
    gpus = find_gpus()
    settings = _load(place.config, gpus)
    ledger = None if dry_run else Ledger(place.state, place.roots, uid=os.getuid())
    heard: list[Harvester] = []

    def report(told: Told) -> None:
        for harvester in heard:
            harvester.told(told)

    runner = Runner(mark="dry" if ledger is None else ledger.mark, report=report, roots=place.roots)

    try:
        before = await _taken_over(ledger, settings, place.roots, signals)
        account = Account(_me(place.roots, dry_run=dry_run), gpus, before, wall=time.time())
        options = Options(
            dict(os.environ), once, dry_run, decided=lambda lines: shell.write("\n".join(lines))
        )
        sight = Sight(gpus, is_ours=runner.is_ours, roots=place.roots)
        harvester = Harvester(settings, sight, account, ledger, options)
        heard.append(harvester)
        signals.bind(harvester.end)
        hangup.bind(lambda: _reload(harvester, place.config, gpus), harvester.end)
        _say_beginning(settings, gpus, dry_run=dry_run)
        ready.say(f"gpulse harvest is up (process {os.getpid()})")
        await harvester.run(DryRunner(report) if dry_run else runner)
    finally:
        await runner.close(_LAST_GRACE_SECONDS)
        if ledger is not None:
            ledger.close()


class _Hangup:
    """SIGHUP: read the configuration again, or, from a terminal that was closed, end, unless nohup said otherwise."""

    def __init__(self) -> None:
        self._had_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read again

    def bind(self, reload: Callable[[], None], end: Callable[[], None]) -> None:
        """From now on it does one of these, in the running loop."""

        def heard() -> None:
            if self._had_terminal and not _has_terminal():
                end()
            else:
                reload()

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, heard)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _taken_over(
    ledger: Ledger | None, settings: Settings, roots: Roots, signals: service.EndSignals
) -> Kept:
    """What an earlier harvest won, after whatever it left behind has been ended."""
    if ledger is None:
        return Kept()
    kept = ledger.kept()
    left = orphans.find(ledger.mark, kept.processes, roots)
    if left:
        log.warning("an earlier harvest left %d of its processes behind; ending them", len(left))
        grace = max(program.grace_seconds for program in settings.programs)
        ending = asyncio.ensure_future(orphans.end(left, grace, roots))

        def stop_waiting() -> None:
            ending.cancel()

        signals.bind(stop_waiting)
        try:
            stayed = await ending
        except asyncio.CancelledError:
            await orphans.end(left, 0.0, roots)
            raise KeyboardInterrupt from None
        if stayed:
            pids = ", ".join(str(orphan.process.pid) for orphan in stayed)
            raise GpulseError(
                f"processes of an earlier harvest cannot be ended: {pids}",
                hint="a process that hangs in the driver goes with a reset of its GPU or a reboot",
            )
    return kept


def _load(path: Path, gpus: tuple[Gpu, ...]) -> Settings:
    return load(
        str(path),
        gpus,
        root=os.geteuid() == 0,
        cpus=os.sched_getaffinity(0),
        search=os.environ.get("PATH", os.defpath),
        home=str(Path.home()),
    )


def _me(roots: Roots, *, dry_run: bool) -> Me:
    uid = os.getuid()
    return Me(Tree(roots.proc).myself(), uid, user_name(uid) or str(uid), dry_run)


def _reload(harvester: Harvester, path: Path, gpus: tuple[Gpu, ...]) -> None:
    try:
        settings = _load(path, gpus)
    except GpulseError as error:
        log.error("the configuration stays as it was: %s", error.message)
        return
    log.info("%s was read again", path)
    harvester.change(settings)


def _say_beginning(settings: Settings, gpus: tuple[Gpu, ...], *, dry_run: bool) -> None:
    watched = ranges(str(index) for index in settings.gpus)
    count = len(settings.programs)
    log.info(
        "%s: %d program%s for GPU %s of %d, a look every %g s%s",
        settings.path,
        count,
        "" if count == 1 else "s",
        watched,
        len(gpus),
        settings.interval_seconds,
        "; dry run, nothing is started" if dry_run else "",
    )
