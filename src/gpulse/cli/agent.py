"""`gpulse agent`: samples this machine for a head."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpulse.cli import exporting, service, shell, target
from gpulse.cli.exporting import MetricsOptions, Serving
from gpulse.errors import GpulseError, UsageError

if TYPE_CHECKING:
    from gpulse.cli.service import EndSignals, Ready
    from gpulse.cluster.agent.agent import AgentConfig
    from gpulse.cluster.agent.link import Tls
    from gpulse.cluster.agent.taker import Seen
    from gpulse.sources.base import Source

_FILE = click.Path(path_type=Path, dir_okay=False)
_LONGEST_NAME = 253
"""As in DNS, and at heads."""
_WITHOUT_HEAD = "alone-{}"
_USUAL_INTERVAL_SECONDS = 1.0

OpenSource = Callable[[], "tuple[Source, Callable[[bool], None]]"]
"""Where frames come from, and who is told whether PCIe traffic is wanted."""
Work = Callable[["Seen", asyncio.Event, Callable[[str], None]], Awaitable[None]]
"""What an agent does: with whoever is to see each frame, until an event is set; it says when it is up."""


@click.command()
@click.argument("head", metavar="[HEAD[:8090][,HEAD...]]", required=False)
@click.option("--token-file", type=_FILE, metavar="FILE", help="The head's token, copied from its machine.")
@click.option("--tls", is_flag=True, help="Speak TLS; any --tls-... option means the same.")
@click.option(
    "--tls-ca", type=_FILE, metavar="PEM", help="Who vouches for the head; the system's authorities else."
)
@click.option("--tls-cert", type=_FILE, metavar="PEM", help="Certificate of this agent.")
@click.option("--tls-key", type=_FILE, metavar="PEM", help="Its key.")
@click.option("--node-name", metavar="NAME", help="What this node is called; its host name else.")
@click.option(
    "--label", "labels", multiple=True, metavar="KEY=VALUE", help="Something to tell about this node."
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where frames wait for the head; in the state directory of this user when left out.",
)
@click.option(
    "--spool-limit",
    type=service.size,
    default="1GiB",
    show_default=True,
    metavar="SIZE",
    help="How much may wait on disk; then the oldest goes.",
)
@click.option(
    "--memory-frames",
    type=click.IntRange(1, 10_000_000),
    default=10_000,
    show_default=True,
    metavar="N",
    help="How many frames may wait in memory.",
)
@click.option(
    "-i",
    "--interval",
    type=shell.seconds,
    metavar="SECONDS",
    help="Time between two frames; the head's else.",
)
@click.option("--no-diagnosis", is_flag=True, help="Do not look for what holds the jobs up.")
@click.option(
    "--full-commands",
    is_flag=True,
    help="Send whole command lines, which may hold secrets, not just program and script.",
)
@click.option("--machine-id-file", type=_FILE, metavar="FILE", help="Tells machines of one name apart.")
@click.option(
    "--job-map",
    "job_maps",
    multiple=True,
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Where the scheduler's prolog writes which job has which GPU.",
)
@exporting.options
@service.background_options
@shell.source_options
def command(**options: object) -> int:
    """Sample this machine for the head at HEAD, or for Prometheus, until Ctrl-C.

    The head says how often. While it cannot be reached, frames wait here, in memory and on disk, and are sent
    once it is back. Of several heads, the best first, the first that answers gets them; once a better one answers
    again the agent goes back to it.

    \b
    gpulse agent gpu-head:8090
    gpulse agent gpu-head:8090 --background
    gpulse agent head-a:8090,head-b:8090
    gpulse agent --metrics-port 9400          for Prometheus, without a head
    """  # noqa: D301  click needs the backspace itself
    return start(metrics=exporting.taken(options), **options)  # type: ignore[arg-type]


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
    machine_id_file: Path | None = None,
    job_maps: tuple[str, ...] = (),
    background: bool = False,
    log_file: Path | None = None,
    demo: bool = False,
    replay: Path | None = None,
    metrics: MetricsOptions = MetricsOptions(),  # noqa: B008  it cannot be changed
) -> int:
    """Run an agent until it is told to end."""
    from gpulse.cluster.agent.identity import read_identity, state_name  # noqa: PLC0415  --help needs none of it
    from gpulse.cluster.agent.spool import LEAST_LIMIT_BYTES  # noqa: PLC0415
    from gpulse.cluster.client.address import agent_addresses  # noqa: PLC0415

    metrics = metrics.checked()
    if head is None and metrics.port is None:
        raise UsageError(
            "an agent samples for a head, for Prometheus, or for both",
            hint="gpulse agent HEAD:8090, or gpulse agent --metrics-port 9400",
        )
    addresses = agent_addresses(head) if head is not None else ()
    if spool_limit < LEAST_LIMIT_BYTES:
        raise UsageError("a spool of less than 1 MiB holds next to nothing", hint="--spool-limit 1GiB")
    if demo and replay is not None:
        raise click.UsageError("--demo and --replay exclude each other")
    if node_name is not None:
        _check_name(node_name)
    token = target.token(token_file, is_local=all(address.is_local for address in addresses))
    told = service.labels(labels)
    targets = tuple(address.target for address in addresses)
    name = state_name(targets) if targets else _WITHOUT_HEAD.format(metrics.port)
    directory = (state_dir or service.state_dir("agent", name)).absolute()
    ready = service.into_background("agent", directory, log_file) if background else service.Ready()
    signals = service.EndSignals()
    service.start_logging()
    try:
        source = partial(_source, demo=demo, replay=replay, interval=interval, job_maps=job_maps)
        if not targets:
            work = _alone(source, interval or _USUAL_INTERVAL_SECONDS, diagnosis=not no_diagnosis)
        else:
            from gpulse.cluster.agent.agent import AgentConfig  # noqa: PLC0415  loads gRPC, which must not be forked
            from gpulse.cluster.agent.link import LinkConfig  # noqa: PLC0415

            config = AgentConfig(
                link=LinkConfig(
                    targets[0],
                    token,
                    _tls(tls_ca, tls_cert, tls_key, wanted=tls or any(address.tls for address in addresses)),
                    targets[1:],
                ),
                state=directory,
                node_name=node_name,
                machine_file=machine_id_file,
                labels=told,
                interval_seconds=interval,
                spool_limit_bytes=spool_limit,
                memory_frames=memory_frames,
                diagnosis=not no_diagnosis,
                full_commands=full_commands,
            )
            work = _for_heads(config, source)
        me = partial(read_identity, directory, name=node_name, machine_file=machine_id_file)
        served = exporting.serving(metrics, me, token=token, token_file=token_file)
        asyncio.run(_run(work, served, directory / "agent.pid", ready, signals))
    except GpulseError as error:
        ready.fail(error)
        raise
    return 0


def _for_heads(config: AgentConfig, open_source: OpenSource) -> Work:
    """Sampling for heads, and for whoever scrapes."""
    from gpulse.cluster.agent.agent import run_agent  # noqa: PLC0415  loads gRPC

    async def work(seen: Seen, stop: asyncio.Event, up: Callable[[str], None]) -> None:
        source, bandwidth = open_source()
        await run_agent(config, source, stop=stop, ready=up, bandwidth=bandwidth, seen=seen)

    return work


def _alone(open_source: OpenSource, interval_seconds: float, *, diagnosis: bool) -> Work:
    """Sampling for whoever scrapes, and nobody else."""
    from gpulse.cluster.agent.alone import run_alone  # noqa: PLC0415  --help needs none of it

    async def work(seen: Seen, stop: asyncio.Event, up: Callable[[str], None]) -> None:
        source, _ = open_source()
        await run_alone(
            source,
            interval_seconds=interval_seconds,
            seen=seen,
            stop=stop,
            diagnosis=diagnosis,
            ready=lambda: up("the agent samples this machine"),
        )

    return work


async def _run(
    work: Work,
    served: AbstractAsyncContextManager[Serving],
    pid_file: Path,
    ready: Ready,
    signals: EndSignals,
) -> None:
    stop = asyncio.Event()
    signals.bind(stop.set)
    async with served as serving:

        def up(text: str) -> None:
            _note_pid(pid_file)
            told = f"{text}, {serving.told}" if serving.told else text
            ready.say(f"{told} (process {os.getpid()})")

        await work(serving.seen, stop, up)
    _remove(pid_file)


def _note_pid(pid_file: Path) -> None:
    with suppress(OSError):
        pid_file.write_text(f"{os.getpid()}\n", encoding="ascii")


def _remove(pid_file: Path) -> None:
    """Take the note of this process back; another's stays."""
    with suppress(OSError):
        if pid_file.read_text(encoding="ascii") == f"{os.getpid()}\n":
            pid_file.unlink(missing_ok=True)


def _source(
    *, demo: bool, replay: Path | None, interval: float | None, job_maps: tuple[str, ...] = ()
) -> tuple[Source, Callable[[bool], None]]:
    """Where frames come from, and who is told whether PCIe traffic is wanted."""
    other = shell.other_source(demo=demo, replay=replay)
    if other is not None:
        from gpulse.cluster.agent.stamped import Stamped  # noqa: PLC0415  not for a real machine

        return Stamped(other), lambda _: None
    from gpulse.sources.machine import LocalMachine  # noqa: PLC0415  loads the driver's binding

    machine = LocalMachine(interval_seconds=interval or 0.5, threads=True, job_maps=job_maps)
    return machine, machine.wait_for_pcie


def _check_name(name: str) -> None:
    """Refuse what a head would refuse as the name of a node.

    Raises:
        UsageError: It is empty, too long, or not printable.
    """
    if not name.strip():
        wrong = "it is empty"
    elif len(name) > _LONGEST_NAME:
        wrong = f"it has {len(name):,} characters, {_LONGEST_NAME} are the most"
    elif not name.isprintable():
        wrong = "it has characters that cannot be printed"
    else:
        return
    raise UsageError(
        f"a node cannot be called {name[:60]!a}: {wrong}",
        hint="--node-name gpu-7, or leave it out: then it is the host name",
    )


def _tls(ca: Path | None, cert: Path | None, key: Path | None, *, wanted: bool) -> Tls | None:
    from gpulse.cluster.agent.link import Tls  # noqa: PLC0415  loads gRPC

    if not wanted and ca is None and cert is None and key is None:
        return None
    return Tls(*(None if path is None else str(path) for path in (ca, cert, key)))
