"""`gpulse agent`: sample this machine for a head or for Prometheus."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from gpulse.atomic_files import replace_file
from gpulse.cli import common, daemon, option_types
from gpulse.cli.daemon import StartupNotifier, StopSignals
from gpulse.cli.token import find_token
from gpulse.cluster.access_control import AccessPolicy, is_loopback, load_or_create_token
from gpulse.cluster.agent.agent import AgentConfig, run_agent
from gpulse.cluster.agent.connection import ClientTls, ConnectionConfig
from gpulse.cluster.agent.identity import AgentIdentity, read_identity, state_directory_name
from gpulse.cluster.agent.sampling_thread import FrameCallback, RetimedSource, sample_standalone
from gpulse.cluster.agent.spool import MIN_LIMIT_BYTES
from gpulse.cluster.client.transport import parse_agent_addresses
from gpulse.errors import UsageError
from gpulse.model.safe_text import quoted
from gpulse.sources.frame_source import Source
from gpulse.sources.local_machine import LocalMachine

log = logging.getLogger(__name__)


class MetricsOptions(NamedTuple):
    """Options of the /metrics endpoint."""

    port: int | None = None
    host: str = "127.0.0.1"
    insecure: bool = False
    dcgm_names: bool = False

    def checked(self) -> MetricsOptions:
        """Return these options if they are consistent.

        Raises:
            UsageError: There is no port, but another option.
        """
        if self.port is None and self != MetricsOptions():
            raise UsageError(
                "--metrics-host, --insecure and --dcgm-names require --metrics-port",
                hint="add --metrics-port 9400",
            )
        return self


class MetricsEndpoint(NamedTuple):
    """The open /metrics endpoint, or a substitute that serves nothing."""

    seen: FrameCallback
    """Called with each frame."""
    message: str = ""
    """Where it listens, for the start message."""


def metrics_options(command: common.Command) -> common.Command:
    """Add the options of the /metrics endpoint; `pop_metrics_options` reads them."""
    for option in reversed(
        (
            click.option(
                "--metrics-port",
                type=click.IntRange(0, 65535),
                metavar="PORT",
                help="Serve /metrics for Prometheus on this port; HEAD is then optional.",
            ),
            click.option(
                "--metrics-host",
                default=MetricsOptions().host,
                show_default=True,
                metavar="ADDRESS",
                help="Address to serve /metrics on; requests from other machines need the head's token.",
            ),
            click.option("--insecure", is_flag=True, help="Serve /metrics without requiring a token."),
            click.option(
                "--dcgm-names",
                is_flag=True,
                help="Serve /metrics under the names and labels of NVIDIA's DCGM exporter.",
            ),
        )
    ):
        command = option(command)
    return command


def pop_metrics_options(given: dict[str, Any]) -> MetricsOptions:
    """Remove these options from a command's parameters and return them."""
    return MetricsOptions(
        given.pop("metrics_port"),
        given.pop("metrics_host"),
        given.pop("insecure"),
        given.pop("dcgm_names"),
    )


@asynccontextmanager
async def serve_metrics(
    wanted: MetricsOptions, me: Callable[[], AgentIdentity], *, token: str | None, token_file: Path | None
) -> AsyncIterator[MetricsEndpoint]:
    """Serve /metrics while the block runs, if a port was given.

    Args:
        wanted: The options.
        me: Returns the identity of this node.
        token: The agent's token for its head, which clients of /metrics must present too.
        token_file: File of that token, which is created when other machines need one.

    Raises:
        GpulseError: The port cannot be listened on.
    """
    if wanted.port is None:
        yield MetricsEndpoint(lambda _frame, _findings, _interval: None)
        return
    from gpulse.cluster.agent.metrics_server import MetricsPage, MetricsServer  # noqa: PLC0415  for --metrics-port alone

    board = MetricsPage(me(), dcgm_names=wanted.dcgm_names)
    exporter = MetricsServer(board, _metrics_access(wanted, token, token_file))
    await exporter.start(wanted.host, wanted.port)
    message = f"serving metrics on http://{exporter.address}/metrics"
    log.info("%s", message)
    try:
        yield MetricsEndpoint(board.show, message)
    finally:
        await exporter.close()


def _metrics_access(wanted: MetricsOptions, token: str | None, token_file: Path | None) -> AccessPolicy:
    is_here = wanted.host == "localhost" or is_loopback(wanted.host)
    names = {wanted.host} if is_here else {socket.gethostname(), socket.getfqdn(), wanted.host}
    if wanted.insecure:
        log.warning("--insecure: everybody who can reach the metrics port can read the metrics")
        token = None
    elif token is None and not is_here:
        chosen = token_file or common.default_token_file()
        token = load_or_create_token(str(chosen))
        log.info("to read /metrics, other machines need the token in %s", chosen)
    return AccessPolicy(token, names={name for name in names if name}, insecure=wanted.insecure, who="agent")


_FILE = click.Path(path_type=Path, dir_okay=False)
_MAX_NAME_LENGTH = 253
"""As in DNS; heads enforce it too."""
_STATE_WITHOUT_HEAD = "alone-{}"
_DEFAULT_INTERVAL_SECONDS = 1.0

OpenSource = Callable[[], tuple[Source, Callable[[bool], None]]]
"""Opens the source of frames; also returns the function that switches the sampling of PCIe traffic."""
Work = Callable[[FrameCallback, asyncio.Event, Callable[[str], None]], Awaitable[None]]
"""Samples until the event is set; calls the first function with each frame and the last one when it is up."""


@click.command()
@click.argument("head", metavar="[HEAD[:8090][,HEAD...]]", required=False)
@click.option(
    "--token-file",
    type=_FILE,
    metavar="FILE",
    help="File with the head's token, copied from the head's machine.",
)
@click.option("--tls", is_flag=True, help="Use TLS; implied by any --tls-... option.")
@click.option(
    "--tls-ca",
    type=_FILE,
    metavar="PEM",
    show_default="the system's CA certificates",
    help="CA certificates to verify the head with.",
)
@click.option("--tls-cert", type=_FILE, metavar="PEM", help="Certificate of this agent.")
@click.option("--tls-key", type=_FILE, metavar="PEM", help="Private key of the agent's certificate.")
@click.option("--node-name", metavar="NAME", show_default="the host name", help="Name of this node.")
@click.option(
    "--label", "labels", multiple=True, metavar="KEY=VALUE", help="Label to attach to this node; repeatable."
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    show_default="in the user's state directory",
    help="Directory for frames that have not reached the head yet.",
)
@click.option(
    "--spool-limit",
    type=option_types.size,
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="Keep at most this much unsent data on disk; beyond that, drop the oldest.",
)
@click.option(
    "--memory-frames",
    type=click.IntRange(1, 10_000_000),
    default=10_000,
    show_default=True,
    metavar="N",
    help="Keep at most this many unsent frames in memory.",
)
@click.option(
    "-i",
    "--interval",
    type=common.parse_seconds,
    metavar="SECONDS",
    show_default="set by the head, or 1 without a head",
    help="Seconds between frames.",
)
@click.option("--no-diagnosis", is_flag=True, help="Do not diagnose why jobs are slow.")
@click.option(
    "--full-commands",
    is_flag=True,
    help="Send full command lines, which may contain secrets, instead of only the program and script names.",
)
@click.option(
    "--lines",
    is_flag=True,
    help="Show the lines of code that cause findings, by reading the stacks of the affected Python programs with py-spy.",
)
@click.option(
    "--machine-id-file",
    type=_FILE,
    metavar="FILE",
    show_default="the system's machine ID",
    help="File with an ID that distinguishes machines with the same name.",
)
@click.option(
    "--job-map",
    "job_maps",
    multiple=True,
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Directory in which the scheduler's prolog records which job has which GPU; repeatable.",
)
@metrics_options
@daemon.background_options
@common.source_options
def command(**options: object) -> int:
    """Sample this machine for the head at HEAD, or for Prometheus, until Ctrl-C.

    The head sets the interval. While the head cannot be reached, frames are kept in memory and on disk, and are sent
    once it is back. List several heads in order of preference: the agent sends to the first one that answers, and returns to a
    preferred one as soon as that one answers again.

    \b
    gpulse agent gpu-head:8090
    gpulse agent gpu-head:8090 --background
    gpulse agent head-a:8090,head-b:8090
    gpulse agent --metrics-port 9400          serve metrics to Prometheus, without a head
    """  # noqa: D301  click needs the backspace itself
    return start(metrics=pop_metrics_options(options), **options)  # type: ignore[arg-type]


def start(
    *,
    head: str | None = None,
    token_file: Path | None = None,
    tls: bool = False,
    tls_ca: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    node_name: str | None = None,
    labels: tuple[str, ...] = (),
    state_dir: Path | None = None,
    spool_limit: int = 1 << 30,
    memory_frames: int = 10_000,
    interval: float | None = None,
    no_diagnosis: bool = False,
    full_commands: bool = False,
    lines: bool = False,
    machine_id_file: Path | None = None,
    job_maps: tuple[str, ...] = (),
    background: bool = False,
    log_file: Path | None = None,
    demo: bool = False,
    replay: Path | None = None,
    metrics: MetricsOptions = MetricsOptions(),  # noqa: B008  it cannot be changed
) -> int:
    """Run an agent until a signal stops it."""
    metrics = metrics.checked()
    if head is None and metrics.port is None:
        raise UsageError(
            "the agent needs a HEAD, a --metrics-port, or both",
            hint="gpulse agent HEAD:8090, or gpulse agent --metrics-port 9400",
        )
    addresses = parse_agent_addresses(head) if head is not None else ()
    if spool_limit < MIN_LIMIT_BYTES:
        raise UsageError("--spool-limit must be at least 1 MiB", hint="--spool-limit 1GiB")
    if demo and replay is not None:
        raise click.UsageError("--demo and --replay cannot be used together")
    if lines:
        _check_lines(has_head=bool(addresses), is_live=not demo and replay is None)
    if node_name is not None:
        _check_name(node_name)
    node_labels = option_types.labels(labels)
    targets = tuple(address.target for address in addresses)
    name = state_directory_name(targets) if targets else _STATE_WITHOUT_HEAD.format(metrics.port)
    directory = (state_dir or common.state_dir("agent", name)).absolute()
    with daemon.run_daemon("agent", directory, log_file, background=background) as ready:
        token = find_token(token_file, is_local=all(address.is_local for address in addresses))
        signals = daemon.StopSignals()
        daemon.start_logging()
        source = partial(_choose_source, demo=demo, replay=replay, interval=interval, job_maps=job_maps)
        if not targets:
            work = _sample_without_head(
                source, interval or _DEFAULT_INTERVAL_SECONDS, diagnosis=not no_diagnosis
            )
        else:
            config = AgentConfig(
                link=ConnectionConfig(
                    targets[0],
                    token,
                    _tls(tls_ca, tls_cert, tls_key, wanted=tls or any(address.tls for address in addresses)),
                    targets[1:],
                ),
                state=directory,
                node_name=node_name,
                machine_file=machine_id_file,
                labels=node_labels,
                interval_seconds=interval,
                spool_limit_bytes=spool_limit,
                memory_frames=memory_frames,
                diagnosis=not no_diagnosis,
                full_commands=full_commands,
                lines=lines,
                last_frame_file=_memory_file(directory),
            )
            work = _sample_for_heads(config, source)
        me = partial(read_identity, directory, name=node_name, machine_file=machine_id_file)
        served = serve_metrics(metrics, me, token=token, token_file=token_file)
        asyncio.run(_run(work, served, directory / "agent.pid", ready, signals))
    return 0


def _memory_file(directory: Path) -> Path:
    """Return the path of a file in memory that belongs to a state directory and survives the process, but not a reboot."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or "/dev/shm")  # noqa: S108  the file is private and checked
    return base / f"gpulse-{os.geteuid()}-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]}"


def _sample_for_heads(config: AgentConfig, open_source: OpenSource) -> Work:
    """Return the work of an agent with heads; /metrics is served too if it is open."""

    async def work(seen: FrameCallback, stop: asyncio.Event, up: Callable[[str], None]) -> None:
        source, bandwidth = open_source()
        await run_agent(config, source, stop=stop, ready=up, bandwidth=bandwidth, seen=seen)

    return work


def _sample_without_head(open_source: OpenSource, interval_seconds: float, *, diagnosis: bool) -> Work:
    """Return the work of an agent that only serves /metrics."""

    async def work(seen: FrameCallback, stop: asyncio.Event, up: Callable[[str], None]) -> None:
        source, _ = open_source()
        await sample_standalone(
            source,
            interval_seconds=interval_seconds,
            seen=seen,
            stop=stop,
            diagnosis=diagnosis,
            ready=lambda: up("the agent is sampling this machine"),
        )

    return work


async def _run(
    work: Work,
    served: AbstractAsyncContextManager[MetricsEndpoint],
    pid_file: Path,
    ready: StartupNotifier,
    signals: StopSignals,
) -> None:
    stop = asyncio.Event()
    signals.bind(stop.set)
    async with served as endpoint:

        def up(text: str) -> None:
            _write_pid_file(pid_file)
            message = f"{text}, {endpoint.message}" if endpoint.message else text
            ready.say(f"{message} (process {os.getpid()})")
            gc.collect()
            gc.freeze()  # what was loaded stays: later collections need not look at it

        await work(endpoint.seen, stop, up)
    _remove_pid_file(pid_file)


def _write_pid_file(pid_file: Path) -> None:
    with suppress(OSError):
        replace_file(pid_file, f"{os.getpid()}\n".encode(), durable=False)


def _remove_pid_file(pid_file: Path) -> None:
    """Remove the PID file, unless another process has written it since."""
    with suppress(OSError):
        if pid_file.read_text(encoding="ascii") == f"{os.getpid()}\n":
            pid_file.unlink(missing_ok=True)


def _choose_source(
    *, demo: bool, replay: Path | None, interval: float | None, job_maps: tuple[str, ...] = ()
) -> tuple[Source, Callable[[bool], None]]:
    """Return the source of frames, and the function that switches the sampling of PCIe traffic."""
    other = common.chosen_source(demo=demo, replay=replay)
    if other is not None:
        return RetimedSource(other), lambda _: None
    machine = LocalMachine(interval_seconds=interval or 0.5, threads=True, job_maps=job_maps)
    return machine, machine.wait_for_pcie


def _check_lines(*, has_head: bool, is_live: bool) -> None:
    """Reject --lines where there is nobody to tell, or no program to read.

    Raises:
        UsageError: The agent has no head, or does not sample this machine.
    """
    if not has_head:
        raise UsageError(
            "--lines requires a HEAD, because lines of code are not part of the metrics for Prometheus",
            hint="gpulse agent HEAD:8090 --lines",
        )
    if not is_live:
        raise UsageError(
            "--lines cannot be used with --demo or --replay, whose programs do not run on this machine",
            hint="leave out --lines",
        )


def _check_name(name: str) -> None:
    """Reject a node name that a head would reject.

    Raises:
        UsageError: It is empty, too long, or not printable.
    """
    if not name.strip():
        wrong = "it is empty"
    elif len(name) > _MAX_NAME_LENGTH:
        wrong = f"it has {len(name):,} characters; the maximum is {_MAX_NAME_LENGTH}"
    elif not name.isprintable():
        wrong = "it has unprintable characters"
    else:
        return
    raise UsageError(
        f"{quoted(name)} is not a valid node name: {wrong}",
        hint="give another name with --node-name, or leave out the option to use the host name",
    )


def _tls(ca: Path | None, cert: Path | None, key: Path | None, *, wanted: bool) -> ClientTls | None:
    if not wanted and ca is None and cert is None and key is None:
        return None
    return ClientTls(*(None if path is None else str(path) for path in (ca, cert, key)))
