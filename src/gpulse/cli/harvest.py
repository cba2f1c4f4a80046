"""`gpulse harvest`: put idle GPUs to work, and give them back at once."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from gpulse.cli import service, shell
from gpulse.cli.status import NOT_RUNNING
from gpulse.errors import GpulseError, file_hint

if TYPE_CHECKING:
    from gpulse.harvest.settings import Gpu
    from gpulse.model.harvest import HarvestStatus
    from gpulse.sources.procfs import Roots

_FILE = click.Path(path_type=Path)


def _device_option(command: service.Command) -> service.Command:
    return click.option(
        "--dev-dir",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        metavar="DIR",
        default="/dev",
        show_default=True,
        help="Where the device files are; in a container the host's may be elsewhere.",
    )(command)


@click.group(invoke_without_command=True)
@click.option(
    "-c",
    "--config",
    type=_FILE,
    envvar="GPULSE_HARVEST_CONFIG",
    metavar="FILE",
    help="What to run when; ~/.config/gpulse/harvest.toml or ~/.config/gpu_mon.conf when left out.",
)
@click.option("--dry-run", is_flag=True, help="Say what it would do, and start nothing.")
@click.option(
    "--once",
    is_flag=True,
    help="Decide once: start what can be started, stay until that has ended or must give way, and end.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where its state is kept.",
)
@_device_option
@service.background_options
@click.pass_context
def command(ctx: click.Context, /, **options: object) -> int:
    """Run programs on GPUs that nobody uses, and end them when somebody comes.

    Somebody comes by opening a GPU, by working on one, or by sitting down at the machine. What counts, which
    programs, and when, is in a file: `gpulse harvest init` writes one to begin with.

    \b
    gpulse harvest init                    write a commented configuration
    gpulse harvest doctor                  can it see who uses the GPUs?
    gpulse harvest --dry-run               what would it do?
    gpulse harvest                         do it, until Ctrl-C
    gpulse harvest status                  what runs, who came, GPU-hours won

    SIGHUP makes it read its configuration again; one that is wrong leaves the old in force.
    """  # noqa: D301  click needs the backspace itself
    if ctx.invoked_subcommand is not None:
        group: click.Group = ctx.command  # type: ignore[assignment]
        shell.refuse_stray_options(ctx, group.commands[ctx.invoked_subcommand], "gpulse harvest")
        return 0
    return start(**options)  # type: ignore[arg-type]


def start(
    *,
    config: Path | None,
    dry_run: bool = False,
    once: bool = False,
    state_dir: Path | None = None,
    dev_dir: Path = Path("/dev"),
    background: bool = False,
    log_file: Path | None = None,
) -> int:
    """Harvest until it is told to end."""
    path = (config or _default_config()).expanduser().absolute()
    directory = (state_dir or service.state_dir("harvest")).absolute()
    ready = service.into_background("harvest", directory, log_file) if background else service.Ready()
    signals = service.EndSignals()
    service.start_logging(aside=True)
    try:
        from gpulse.cli.harvesting import Place, harvest  # noqa: PLC0415  after the fork

        place = Place(path, str(directory), _roots(dev_dir))
        asyncio.run(harvest(place, ready, signals, dry_run=dry_run, once=once))
        return 0
    except GpulseError as error:
        ready.fail(error)
        raise


def _default_config() -> Path:
    ours = service.config_dir() / "harvest.toml"
    theirs = Path.home() / ".config" / "gpu_mon.conf"
    return theirs if theirs.exists() and not ours.exists() else ours


def _roots(dev_dir: Path) -> Roots:
    from gpulse.sources.procfs import Roots  # noqa: PLC0415  --help needs none of it

    return Roots(dev=str(dev_dir.absolute()))


@command.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1).")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where the state of a harvest that ended is kept.",
)
@_device_option
def status(*, as_json: bool, no_color: bool, state_dir: Path | None, dev_dir: Path) -> int:
    """Show what runs where and since when, who was given way to, and GPU-hours won.

    All harvests of this machine are shown, whoever runs them. The exit code is 3 when none does.
    """
    from gpulse.harvest.ledger import read_kept  # noqa: PLC0415  --help needs none of it
    from gpulse.model.harvest import to_document  # noqa: PLC0415
    from gpulse.sources.harvest import HarvestReader  # noqa: PLC0415

    now = time.time()
    living = HarvestReader(_roots(dev_dir)).read(now).statuses
    last = None if living else read_kept(str(state_dir or service.state_dir("harvest")))
    told = living or (() if last is None else (last,))
    if as_json:
        documents = [{"alive": bool(living), **to_document(each)} for each in told]
        shell.write(json.dumps({"harvests": documents}, indent=2))
    elif not told:
        shell.complain("gpulse", "no harvest runs here, and none did", "gpulse harvest --help")
    else:
        _show(told, now, alive=bool(living), no_color=no_color)
    return 0 if living else NOT_RUNNING


def _show(told: tuple[HarvestStatus, ...], now: float, *, alive: bool, no_color: bool) -> None:
    from gpulse.terminal.harvest import status_lines  # noqa: PLC0415

    for number, each in enumerate(told):
        if number:
            shell.write("")
        lines = status_lines(
            each, now, alive=alive, width=shell.width(), paint=shell.paint(no_color=no_color)
        )
        for line in lines:
            shell.write(line)


@command.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1).")
@_device_option
def doctor(*, as_json: bool, no_color: bool, dev_dir: Path) -> int:
    """Say whether it can see who uses the GPUs and who is at the machine, and what it would miss.

    The exit code is 1 when something is broken.
    """
    from gpulse.cli.doctor import show  # noqa: PLC0415  --help needs none of it
    from gpulse.harvest.sight.checkup import checkup  # noqa: PLC0415

    return show(checkup(time.time(), _roots(dev_dir)), as_json=as_json, no_color=no_color)


@command.command("init")
@click.argument("file", type=_FILE, required=False)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["toml", "ini"]),
    help="ini is gpu_mon's; what the name says when left out, else toml.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def init(*, file: Path | None, kind: Literal["toml", "ini"] | None, force: bool) -> None:
    """Write a commented configuration to begin with.

    \b
    gpulse harvest init                    ~/.config/gpulse/harvest.toml
    gpulse harvest init gpu_mon.conf       in gpu_mon's form
    gpulse harvest init -                  to standard output
    """  # noqa: D301  click needs the backspace itself
    if kind is None:
        kind = "ini" if file is not None and file.suffix in (".conf", ".ini", ".cfg") else "toml"
    if file is not None and str(file) == "-":
        shell.write(_template(kind).rstrip("\n"))
        return
    path = write_template(file or service.config_dir() / "harvest.toml", kind, force=force)
    shell.write(f"{path} is written: put your command into it, then try: gpulse harvest -c {path} --dry-run")


def write_template(file: Path, kind: Literal["toml", "ini"], *, force: bool) -> Path:
    """Write a commented configuration to begin with; gives its path.

    Raises:
        GpulseError: There is a file already, or none can be made there.
    """
    path = file.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _publish(path, _template(kind), force=force)
    except FileExistsError as error:
        raise GpulseError(f"{path} exists already", hint="--force replaces it") from error
    except OSError as error:
        raise GpulseError(f"cannot write {path}: {error.strerror}", hint=file_hint(error)) from error
    return path


def _publish(path: Path, text: str, *, force: bool) -> None:
    """Write a file whole or not at all: a full disk must not cost the one that is there.

    Raises:
        OSError: It cannot be written, or is there already and is not to be replaced.
    """
    if not force and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as out:
            out.write(text)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _template(kind: Literal["toml", "ini"]) -> str:
    from gpulse.harvest.config import template  # noqa: PLC0415  --help needs none of it
    from gpulse.sources.owners import user_name  # noqa: PLC0415

    return template(kind, _gpus(), user_name(os.getuid()) or "")


def _gpus() -> tuple[Gpu, ...]:
    """Those of this machine, none where there is no driver: a file can be written anywhere."""
    from gpulse.errors import CollectionError  # noqa: PLC0415
    from gpulse.harvest.sight.contexts import find_gpus  # noqa: PLC0415

    try:
        return find_gpus()
    except CollectionError:
        return ()
