"""The parts of a running harvest put together: from a configuration to the end of the last program."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import signal
import time
from pathlib import Path
from typing import NamedTuple

from gpulse.cli import service, shell
from gpulse.errors import GpulseError
from gpulse.harvest.account import Account, Me
from gpulse.harvest.config import load
from gpulse.harvest.harvester import DryRunner, Harvester, Options, Watching
from gpulse.harvest.ledger import Ledger
from gpulse.harvest.running import orphans
from gpulse.harvest.running.runner import Runner
from gpulse.harvest.running.told import Told
from gpulse.harvest.running.tree import Tree
from gpulse.harvest.settings import Gpu, Settings
from gpulse.harvest.sight.contexts import find_gpus
from gpulse.harvest.sight.sight import Sight
from gpulse.model.device import ranges
from gpulse.model.harvest import HarvestStatus
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
    gpus = find_gpus()
    settings = _load(place.config, gpus)
    ledger = None if dry_run else Ledger(place.state, place.roots, uid=os.getuid())
    heard: list[Harvester] = []

    def report(told: Told) -> None:
        for harvester in heard:
            harvester.told(told)

    runner = Runner(mark="dry" if ledger is None else ledger.mark, report=report, roots=place.roots)

    def watch(wanted: Settings) -> Watching:
        return Sight(gpus, is_ours=runner.is_ours, roots=place.roots, people=wanted.people.enabled)

    try:
        before = await _taken_over(ledger, settings, place.roots)
        account = Account(_me(place.roots, dry_run=dry_run), gpus, before, wall=time.time())
        options = Options(
            dict(os.environ), once, dry_run, decided=lambda lines: shell.write("\n".join(lines))
        )
        harvester = Harvester(settings, watch, account, ledger, options)
        heard.append(harvester)
        signals.bind(harvester.end)
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGHUP, lambda: _reload(harvester, place.config, gpus)
        )
        _say_beginning(settings, gpus, dry_run=dry_run)
        ready.say(f"gpulse harvest is up (process {os.getpid()})")
        await harvester.run(DryRunner(report) if dry_run else runner)
    finally:
        await runner.close(_LAST_GRACE_SECONDS)
        if ledger is not None:
            ledger.close()


async def _taken_over(ledger: Ledger | None, settings: Settings, roots: Roots) -> HarvestStatus | None:
    """What an earlier harvest won, after whatever it left behind has been ended."""
    if ledger is None:
        return None
    kept = ledger.kept()
    left = orphans.find(ledger.mark, kept.processes, roots)
    if left:
        log.warning("an earlier harvest left %d of its processes behind; ending them", len(left))
        stayed = await orphans.end(left, max(program.grace_seconds for program in settings.programs), roots)
        if stayed:
            pids = ", ".join(str(orphan.process.pid) for orphan in stayed)
            raise GpulseError(
                f"processes of an earlier harvest cannot be ended: {pids}",
                hint="a process that hangs in the driver goes with a reset of its GPU or a reboot",
            )
    return kept.status


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
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return Me(Tree(roots.proc).myself(), uid, user, dry_run)


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
    log.info(
        "%s: %d programs for GPU %s of %d, a look every %g s%s",
        settings.path,
        len(settings.programs),
        watched,
        len(gpus),
        settings.interval_seconds,
        "; dry run, nothing is started" if dry_run else "",
    )
