"""`gpulse harvest`: run programs on idle GPUs, and stop them when somebody needs the GPUs.

`gpu_mon` is the same under the name and with the configuration file of the tool that gpulse replaces.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import click

from gpulse._version import __version__
from gpulse.atomic_files import create_file, replace_file, resolve_output
from gpulse.cli import common, daemon
from gpulse.cli import doctor as checks
from gpulse.cli.common import CommandGroup
from gpulse.cli.status import NOT_RUNNING
from gpulse.errors import CollectionError, GpulseError, UsageError, file_hint
from gpulse.harvest.config.config_file import build_template, load_settings, read_text
from gpulse.harvest.events import RunEvent
from gpulse.harvest.harvester import DryRunner, Harvester, HarvestOptions
from gpulse.harvest.settings import HarvestableGpu, HarvestSettings
from gpulse.harvest.state_directory import SavedState, StateDirectory, read_saved_status
from gpulse.harvest.status import HarvestAccounting, HarvestIdentity
from gpulse.harvest.supervise import own_processes
from gpulse.harvest.supervise.process_tree import MachineProcessTree
from gpulse.harvest.supervise.runner import Runner
from gpulse.harvest.watch.doctor_checks import run_harvest_checks
from gpulse.harvest.watch.gpu_contexts import find_gpus
from gpulse.harvest.watch.watcher import Watcher
from gpulse.model.device import gpu_label
from gpulse.model.harvest_status import HarvestStatus, status_to_document
from gpulse.sources.harvest_status import HarvestReader
from gpulse.sources.process_owners import user_name
from gpulse.sources.procfs import Roots
from gpulse.terminal.harvest_tables import status_lines

_FILE = click.Path(path_type=Path)
log = logging.getLogger(__name__)


_FAULT_GRACE_SECONDS = 3.0
"""Time that programs get to end when an error stops the harvest itself."""
_GPU_MON_CONFIG = Path("~/.config/gpu_mon.conf")


def _device_option(command: common.Command) -> common.Command:
    return click.option(
        "--dev-dir",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        metavar="DIR",
        default="/dev",
        show_default=True,
        help="Directory with device files; in a container, the host's /dev may be mounted elsewhere.",
    )(command)


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.option(
    "-c",
    "--config",
    type=_FILE,
    envvar="GPULSE_HARVEST_CONFIG",
    metavar="FILE",
    show_default="~/.config/gpulse/harvest.toml, else ~/.config/gpu_mon.conf",
    help="Configuration file (GPULSE_HARVEST_CONFIG).",
)
@click.option("--dry-run", is_flag=True, help="Print what would be done, but start nothing.")
@click.option(
    "--once",
    is_flag=True,
    help="Start programs on the GPUs that are idle now, and exit once all programs have ended or been stopped.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    show_default="in the user's state directory",
    help="Directory for the state of the harvest.",
)
@_device_option
@daemon.background_options
@click.pass_context
def command(ctx: click.Context, /, **options: object) -> int:
    """Run programs on GPUs that nobody uses, and stop them when somebody needs the GPUs.

    A GPU is needed when somebody opens it, computes on it, or sits down at the machine. A configuration file
    defines what counts as use, which programs run, and when: `gpulse harvest init` writes one to start from.

    \b
    gpulse harvest init                    write a commented configuration
    gpulse harvest doctor                  check whether harvest can see who uses the GPUs
    gpulse harvest --dry-run               print what would be done
    gpulse harvest                         run until Ctrl-C
    gpulse harvest status                  show what runs, who needed GPUs, and the GPU-hours harvested

    On SIGHUP the configuration is read again; if the new one is invalid, the old one stays in effect.
    """  # noqa: D301  click needs the backspace itself
    if ctx.invoked_subcommand is not None:
        group: click.Group = ctx.command  # type: ignore[assignment]
        common.reject_misplaced_options(ctx, group.commands[ctx.invoked_subcommand], "gpulse harvest")
        return 0
    return run(**options)  # type: ignore[arg-type]


def run(
    *,
    config: Path | None,
    dry_run: bool = False,
    once: bool = False,
    state_dir: Path | None = None,
    dev_dir: Path = Path("/dev"),
    background: bool = False,
    log_file: Path | None = None,
) -> int:
    """Harvest until a signal stops it."""
    path = (config or _default_config()).expanduser().absolute()
    directory = (state_dir or common.state_dir("harvest")).absolute()
    with daemon.run_daemon("harvest", directory, log_file, background=background) as ready:
        signals = daemon.StopSignals()
        daemon.start_logging(aside=True)
        paths = HarvestPaths(path, str(directory), _roots(dev_dir))
        asyncio.run(harvest(paths, ready, signals, dry_run=dry_run, once=once))
    return 0


def _default_config() -> Path:
    ours = common.config_dir() / "harvest.toml"
    theirs = Path.home() / ".config" / "gpu_mon.conf"
    return theirs if theirs.exists() and not ours.exists() else ours


def _roots(dev_dir: Path) -> Roots:
    return Roots(dev=str(dev_dir.absolute()))


@command.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    show_default="in the user's state directory",
    help="State directory of a harvest that has ended.",
)
@_device_option
def status(*, as_json: bool, no_color: bool, state_dir: Path | None, dev_dir: Path) -> int:
    """Show what runs where, who needed GPUs, and the GPU-hours harvested.

    All harvests of this machine are shown, regardless of who runs them. The exit code is 3 when none is running.
    """
    now = time.time()
    living = HarvestReader(_roots(dev_dir)).read(now).statuses
    last = None if living else read_saved_status(str(state_dir or common.state_dir("harvest")))
    shown = living or (() if last is None else (last,))
    if as_json:
        documents = [{"alive": bool(living), **status_to_document(each)} for each in shown]
        common.write(json.dumps({"harvests": documents}, indent=2))
    elif not shown:
        common.print_error(
            "gpulse",
            "no harvest is running on this machine, and none has run before",
            "gpulse harvest --help",
        )
    else:
        _print_statuses(shown, now, alive=bool(living), no_color=no_color)
    return 0 if living else NOT_RUNNING


def _print_statuses(statuses: tuple[HarvestStatus, ...], now: float, *, alive: bool, no_color: bool) -> None:
    for number, each in enumerate(statuses):
        if number:
            common.write("")
        lines = status_lines(
            each, now, alive=alive, width=common.terminal_width(), paint=common.paint(no_color=no_color)
        )
        for line in lines:
            common.write(line)


@command.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
@_device_option
def doctor(*, as_json: bool, no_color: bool, dev_dir: Path) -> int:
    """Check whether harvest can see who uses the GPUs and the machine.

    The exit code is 1 when something is broken.
    """
    return checks.print_checks(
        run_harvest_checks(time.time(), _roots(dev_dir)), as_json=as_json, no_color=no_color
    )


@command.command("init")
@click.argument("file", type=_FILE, required=False)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["toml", "ini"]),
    show_default="from FILE's extension, else toml",
    help="File format; ini is the format of gpu_mon.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init(*, file: Path | None, kind: Literal["toml", "ini"] | None, force: bool) -> None:
    """Write a commented configuration to start from.

    \b
    gpulse harvest init                    write ~/.config/gpulse/harvest.toml
    gpulse harvest init gpu_mon.conf       write it in the format of gpu_mon
    gpulse harvest init -                  write it to standard output
    """  # noqa: D301  click needs the backspace itself
    if kind is None:
        kind = "ini" if file is not None and file.suffix in (".conf", ".ini", ".cfg") else "toml"
    if file is not None and str(file) == "-":
        common.write(_template(kind).rstrip("\n"))
        return
    path = write_template(file or common.config_dir() / "harvest.toml", kind, force=force)
    common.write(f"wrote {path}; add your command to it, then try: gpulse harvest -c {path} --dry-run")


def write_template(file: Path, kind: Literal["toml", "ini"], *, force: bool) -> Path:
    """Write a commented configuration to start from; return its path.

    Raises:
        GpulseError: The file exists already, or cannot be written.
    """
    path = file.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = _template(kind).encode()
        if force:
            replace_file(resolve_output(path), text, 0o644)  # a link stays a link
        else:
            create_file(path, text, 0o644)
    except FileExistsError as error:
        raise GpulseError(f"{path} already exists", hint="use --force to replace the file") from error
    except OSError as error:
        raise GpulseError(f"cannot write {path}: {error.strerror}", hint=file_hint(error)) from error
    return path


def _template(kind: Literal["toml", "ini"]) -> str:
    return build_template(kind, _find_gpus(), user_name(os.getuid()) or "")


def _find_gpus() -> tuple[HarvestableGpu, ...]:
    """Return the GPUs of this machine; none without a driver, so that a file can be written anywhere."""
    try:
        return find_gpus()
    except CollectionError:
        return ()


class HarvestPaths(NamedTuple):
    """Paths of a harvest: its configuration, its state, and the system's directories."""

    config: Path
    state: str
    roots: Roots


async def harvest(
    paths: HarvestPaths,
    ready: daemon.StartupNotifier,
    signals: daemon.StopSignals,
    *,
    dry_run: bool,
    once: bool,
) -> None:
    """Harvest until a signal stops it, or with `once` until all programs have ended.

    Raises:
        ConfigError: The configuration is invalid.
        CollectionError: There is no GPU.
        GpulseError: Another harvest runs here, or nothing can be written.
    """
    hangup = _HangupHandler()
    read_text(str(paths.config), root=os.geteuid() == 0)  # a missing file is an error even without a GPU
    gpus = find_gpus()
    settings = _load_settings(paths.config, gpus)
    state_directory = None if dry_run else StateDirectory(paths.state, paths.roots, uid=os.getuid())
    listeners: list[Harvester] = []

    def report(event: RunEvent) -> None:
        for harvester in listeners:
            harvester.handle_run_event(event)

    runner = Runner(
        mark="dry" if state_directory is None else state_directory.mark, report=report, roots=paths.roots
    )

    try:
        before = await _take_over(state_directory, settings, paths.roots, signals)
        account = HarvestAccounting(
            _read_identity(paths.roots, dry_run=dry_run), gpus, before, wall=time.time()
        )
        options = HarvestOptions(
            dict(os.environ), once, dry_run, decided=lambda lines: common.write("\n".join(lines))
        )
        watcher = Watcher(gpus, is_ours=runner.is_ours, roots=paths.roots)
        harvester = Harvester(settings, watcher, account, state_directory, options)
        listeners.append(harvester)
        signals.bind(harvester.end)
        hangup.bind(lambda: _reload_settings(harvester, paths.config, gpus), harvester.end)
        _log_start(settings, gpus, dry_run=dry_run)
        ready.say(f"the harvest is running (process {os.getpid()})")
        await harvester.run(DryRunner(report) if dry_run else runner)
    finally:
        await runner.close(_FAULT_GRACE_SECONDS)
        if state_directory is not None:
            state_directory.close()


class _HangupHandler:
    """Handles SIGHUP: reload the configuration, or stop if it came from a closed terminal and not under nohup."""

    def __init__(self) -> None:
        self._had_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a configuration to reload

    def bind(self, reload: Callable[[], None], end: Callable[[], None]) -> None:
        """Call one of these in the running loop on each SIGHUP from now on."""

        def handle() -> None:
            if self._had_terminal and not _has_terminal():
                end()
            else:
                reload()

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, handle)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def _take_over(
    state_directory: StateDirectory | None,
    settings: HarvestSettings,
    roots: Roots,
    signals: daemon.StopSignals,
) -> SavedState:
    """Stop processes that an earlier harvest left running; return its saved state."""
    if state_directory is None:
        return SavedState()
    saved = state_directory.load()
    left = own_processes.find_orphans(state_directory.mark, saved.processes, roots)
    if left:
        count = f"{len(left)} {'process' if len(left) == 1 else 'processes'}"
        log.warning("stopping %s that an earlier harvest left running", count)
        grace = max(program.grace_seconds for program in settings.programs)
        ending = asyncio.ensure_future(own_processes.end_orphans(left, grace, roots))

        def stop_waiting() -> None:
            ending.cancel()

        signals.bind(stop_waiting)
        try:
            stayed = await ending
        except asyncio.CancelledError:
            await own_processes.end_orphans(left, 0.0, roots)
            raise KeyboardInterrupt from None
        if stayed:
            pids = ", ".join(str(orphan.process.pid) for orphan in stayed)
            raise GpulseError(
                f"cannot stop processes of an earlier harvest: {pids}",
                hint="if the processes hang in the driver, reset the GPU or reboot the machine",
            )
    return saved


def _load_settings(path: Path, gpus: tuple[HarvestableGpu, ...]) -> HarvestSettings:
    return load_settings(
        str(path),
        gpus,
        root=os.geteuid() == 0,
        cpus=os.sched_getaffinity(0),
        search=os.environ.get("PATH", os.defpath),
        home=str(Path.home()),
    )


def _read_identity(roots: Roots, *, dry_run: bool) -> HarvestIdentity:
    uid = os.getuid()
    return HarvestIdentity(MachineProcessTree(roots.proc).myself(), uid, user_name(uid) or str(uid), dry_run)


def _reload_settings(harvester: Harvester, path: Path, gpus: tuple[HarvestableGpu, ...]) -> None:
    try:
        settings = _load_settings(path, gpus)
    except GpulseError as error:
        log.error("the new configuration cannot be used, so the old one stays in effect: %s", error.message)
        return
    log.info("reloaded %s", path)
    harvester.change(settings)


def _log_start(settings: HarvestSettings, gpus: tuple[HarvestableGpu, ...], *, dry_run: bool) -> None:
    watched = gpu_label(str(index) for index in settings.gpus)
    count = len(settings.programs)
    log.info(
        "%s: %d program%s for %s of %d; the GPUs are checked every %g s%s",
        settings.path,
        count,
        "" if count == 1 else "s",
        watched,
        len(gpus),
        settings.interval_seconds,
        "; dry run: nothing is started" if dry_run else "",
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    default=_GPU_MON_CONFIG,
    show_default=True,
    help="Configuration file.",
)
@click.option("--init", is_flag=True, help="Write a commented configuration to FILE and exit.")
@click.option("--force", is_flag=True, help="With --init: replace an existing file.")
@click.option("--debug", is_flag=True, hidden=True)
@click.version_option(__version__, prog_name="gpu_mon (gpulse)")
def gpu_mon(*, config: Path, init: bool, force: bool, debug: bool) -> int:  # noqa: ARG001  run() reads --debug
    """Run programs on idle GPUs, and stop them when somebody needs the GPUs.

    \b
    gpu_mon --init         write ~/.config/gpu_mon.conf, to which you add your command
    gpu_mon                run until Ctrl-C

    This is the same program as `gpulse harvest`, which also has a dry run, a status command, a self-check, and a
    configuration format with more settings.
    """  # noqa: D301  click needs the backspace itself
    if force and not init:
        raise click.UsageError("--force can only be used with --init")
    path = config.expanduser()
    is_toml = path.name.lower().endswith(".toml")
    program = "gpu_mon" if path == _GPU_MON_CONFIG.expanduser() else f"gpu_mon -c {shlex.quote(str(path))}"
    if init:
        write_template(path, "toml" if is_toml else "ini", force=force)
        common.write(f"wrote {path}; add your command to it, then run: {program}")
        return 0
    if not path.exists():
        raise UsageError(
            f"there is no file {path}", hint=f"write a configuration to start from with: {program} --init"
        )
    return run(config=path)


def run_gpu_mon() -> None:
    """Run `gpu_mon`."""
    sys.exit(common.run(gpu_mon, name="gpu_mon"))
