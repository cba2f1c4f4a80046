"""`gpulse head`: takes what agents send, keeps it, and answers for it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import click

from gpulse.cli import database, engine, service
from gpulse.cli.database import DatabaseOptions
from gpulse.cli.engine import EngineOptions
from gpulse.cli.expectation import NodeList
from gpulse.errors import INTERRUPTED, GpulseError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from gpulse.cli.service import EndSignals, Ready
    from gpulse.cluster.head.head import Frontend, Head, HeadConfig, Listening, MakeFrontend
    from gpulse.cluster.protocol.interface import HeadInterface
    from gpulse.cluster.security import Access, TlsFiles
    from gpulse.store.tsdb.config import TsdbConfig

log = logging.getLogger(__name__)

_SHORTEST_RETENTION_SECONDS = 3600.0
_LEAST_DISK_LIMIT = 64 << 20
_SEAL_SECONDS = 600.0
_AGENT_PAUSE_SECONDS = 5.0
_PUBLIC_READ = (
    "everybody who can reach this head can read everything without a token: "
    "names of nodes, users, jobs and processes, and all their figures"
)
_WITH_PARENT = "import ctypes; ctypes.CDLL(None).prctl(1, 15); from gpulse.cli.entry import main; main()"
"""An agent that is ended (SIGTERM) together with the head that started it, even by kill -9."""


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8090, show_default=True, help="gRPC port for agents."
)
@click.option(
    "--http-port",
    type=click.IntRange(0, 65535),
    default=8091,
    show_default=True,
    help="HTTP port for people and programs; 0 for none.",
)
@click.option(
    "--freq",
    type=click.IntRange(50, 3_600_000),
    metavar="MS",
    help="Milliseconds between two samples of every agent; 500 at first, then as before.",
)
@click.option(
    "--enable-bandwidth/--disable-bandwidth",
    default=None,
    help="PCIe traffic in sessions; off at first, then as before.",
)
@click.option(
    "--enable-nvlink/--disable-nvlink",
    default=None,
    help="NVLink traffic in sessions; off at first, then as before.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where everything is kept; in the state directory of this user when left out.",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path(),
    metavar="DIR",
    help="Where files of stopped sessions go; here when left out.",
)
@click.option(
    "--retention",
    type=service.duration,
    metavar="TIME",
    default="30d",
    show_default=True,
    help="How long history is kept.",
)
@click.option(
    "--disk-limit",
    type=service.size,
    metavar="SIZE",
    default="50GiB",
    show_default=True,
    help="How large it may get.",
)
@click.option(
    "--local-retention",
    type=service.duration,
    metavar="TIME",
    help="Keep samples on local disk for this long when a time-series database also has them; default: as --retention.",
)
@click.option(
    "--seal-after",
    type=service.duration,
    metavar="TIME",
    show_default="10m",
    help="How long frames stay in the log alone before they become history.",
)
@engine.options
@database.options
@click.option(
    "--dcgm-names", is_flag=True, help="Serve /metrics under the names and labels of NVIDIA's DCGM exporter."
)
@click.option(
    "--auto-resume", is_flag=True, help="Go on with the sessions that the last head left, without asking."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File with the token that others must present; created if missing. gpulse token prints how to copy it.",
)
@click.option("--insecure", is_flag=True, help="Let everybody read and change everything without a token.")
@click.option(
    "--private", is_flag=True, help="Require the token from other users of this machine to read, too."
)
@click.option(
    "--public-read",
    is_flag=True,
    help="Let other machines read without the token; everybody sees user, job and process names.",
)
@click.option(
    "--cors-origin", "origins", multiple=True, metavar="ORIGIN", help="Pages of this origin may ask."
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PEM",
    help="Certificate of this head.",
)
@click.option("--tls-key", type=click.Path(path_type=Path, dir_okay=False), metavar="PEM", help="Its key.")
@click.option(
    "--tls-client-ca",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PEM",
    help="Take only clients with a certificate of this authority.",
)
@click.option(
    "--nodes",
    "node_list",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="List of expected nodes, as for gpulse deploy; those that have never reported are shown. Read again when it changes.",
)
@click.option(
    "--theme-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Your own look of the web page: theme.css, title.txt, pictures.",
)
@click.option("--with-agent", is_flag=True, help="Watch this machine too.")
@service.background_options
def command(**options: object) -> int:
    """Collect what agents send: keep it, show it, cut sessions out of it.

    \b
    gpulse head                          on this machine alone
    gpulse head --host 0.0.0.0           for agents on other machines
    gpulse token                         how to copy the token to those
    gpulse agent HEAD:8090               on each of those
    gpulse session start training_run    then, wherever you are
    """  # noqa: D301  click needs the backspace itself
    return start(
        engine_options=engine.taken(options),
        database_options=database.taken(options),
        **options,  # type: ignore[arg-type]
    )


def start(
    *,
    host: str,
    port: int,
    http_port: int,
    freq: int | None,
    enable_bandwidth: bool | None,
    enable_nvlink: bool | None,
    data_dir: Path | None,
    output_dir: Path,
    retention: float,
    disk_limit: int,
    seal_after: float | None,
    auto_resume: bool,
    token_file: Path | None,
    insecure: bool,
    origins: tuple[str, ...],
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    node_list: Path | None,
    theme_dir: Path | None,
    with_agent: bool,
    background: bool,
    log_file: Path | None,
    local_retention: float | None = None,
    dcgm_names: bool = False,
    engine_options: EngineOptions = EngineOptions(),  # noqa: B008  it cannot be changed
    database_options: DatabaseOptions = DatabaseOptions(),  # noqa: B008  likewise
    private: bool = False,
    public_read: bool = False,
) -> int:
    """Run a head until it is told to end."""
    if port != 0 and port == http_port:
        raise UsageError("gRPC and HTTP cannot share a port", hint="choose another --http-port")
    if insecure and token_file is not None:
        raise UsageError("--insecure needs no token, and --token-file is one", hint="leave out one of them")
    if insecure + private + public_read > 1:
        raise UsageError(
            "--insecure, --private and --public-read exclude each other", hint="choose one of them"
        )
    if retention < _SHORTEST_RETENTION_SECONDS:
        raise UsageError("--retention is too short to keep anything", hint="an hour (1h) at least")
    if disk_limit < _LEAST_DISK_LIMIT:
        raise UsageError("--disk-limit is too small to keep anything", hint="64MiB at least")
    remote = engine_options.engine()
    shared = database_options.config()
    local_seconds = _local_seconds(local_retention, retention, remote)
    _check_extra()
    if remote is not None:
        _check_snappy()
    directory = data_dir or service.state_dir("head")
    place = output_dir.absolute()
    theme = str(theme_dir.absolute()) if theme_dir else None
    expected = NodeList(node_list) if node_list else tuple
    ready = service.into_background("head", directory, log_file) if background else service.Ready()
    signals = service.EndSignals()
    service.start_logging()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it would tell of every stranger that hangs up
    try:
        from gpulse.cluster.head.backends import BackendConfig  # noqa: PLC0415  loads gRPC, which must not be forked
        from gpulse.cluster.head.head import HeadConfig  # noqa: PLC0415
        from gpulse.cluster.head.maintenance import Rules  # noqa: PLC0415
        from gpulse.cluster.security import Access  # noqa: PLC0415

        if insecure:
            log.warning("--insecure: whoever reaches this head can read and control it")
        if public_read:
            log.warning("--public-read: %s", _PUBLIC_READ)
        kept = None if insecure else _token(token_file, is_open=not _is_local(host))
        access = Access(
            kept.text if kept else None,
            origins,
            names=_own_names(host, origins),
            insecure=insecure,
            private=private,
            public_read=public_read,
        )
        needs = _needs(
            kept,
            is_open=not _is_local(host),
            is_encrypted=tls_cert is not None,
            private=private,
            public_read=public_read,
        )
        config = HeadConfig(
            data_dir=str(directory.absolute()),
            output_dir=str(place),
            host=host,
            port=port,
            interval_ms=freq,
            bandwidth=enable_bandwidth,
            nvlink=enable_nvlink,
            rules=Rules(
                local_seconds,
                disk_limit,
                _SEAL_SECONDS if seal_after is None else max(1.0, seal_after),
                retention,
            ),
            backends=BackendConfig(remote, engine_options.limit, shared),
            auto_resume=auto_resume,
            local_port=with_agent,
            address_files=(str(service.state_dir("head", "head.json").absolute()),),
            tls=_tls(tls_cert, tls_key, tls_client_ca),
            expected=expected,
            token_file=kept.path if kept else None,
        )
        frontend = _frontend(access, config, http_port, theme, dcgm_names=dcgm_names) if http_port else None
        asyncio.run(_run(config, access, frontend, ready, signals, needs=needs, with_agent=with_agent))
    except GpulseError as error:
        ready.fail(error)
        raise
    return 0


async def _run(
    config: HeadConfig,
    access: Access,
    frontend: MakeFrontend | None,
    ready: Ready,
    signals: EndSignals,
    *,
    needs: Sequence[str],
    with_agent: bool,
) -> None:
    from gpulse.cluster.head.head import Head  # noqa: PLC0415

    head = Head(config, access)
    signals.bind(lambda: _end(head))
    agents: list[asyncio.Task[None]] = []

    def up(listening: Listening) -> None:
        http = f", http://{listening.http}" if listening.http else ""
        for need in needs:
            if need is not _PUBLIC_READ:  # a warning said so
                log.info("%s", need)
        ready.say(f"the head listens on {listening.grpc}{http} (process {os.getpid()})", *needs)
        gc.collect()
        gc.freeze()  # what it has loaded stays: looking through it again and again would hold everybody up
        if with_agent:
            agents.append(asyncio.create_task(_own_agent(listening, config)))

    try:
        await head.run(frontend=frontend, ready=up)
    finally:
        gc.unfreeze()  # so that everything is taken apart in the end
        for agent in agents:
            agent.cancel()
        await asyncio.gather(*agents, return_exceptions=True)


def _end(head: Head) -> None:
    """The first signal ends the head gently, a second one at once."""
    if head.is_stopping:
        os._exit(INTERRUPTED)
    head.stop()


async def _own_agent(listening: Listening, config: HeadConfig) -> None:
    """Keep an agent for this machine running, until cancelled."""
    arguments = ["agent", listening.local or listening.grpc, "--state-dir", f"{config.data_dir}/agent"]
    if config.token_file is not None:
        arguments += ["--token-file", config.token_file]
    while True:
        try:
            code = await _ran(arguments)
            log.warning("the agent of this machine ended (%s); it is started anew", code)
        except OSError as error:
            log.error("the agent of this machine cannot be started: %s", error)
        await asyncio.sleep(_AGENT_PAUSE_SECONDS)


async def _ran(arguments: list[str]) -> int:
    """Run an agent to its end; cancelled, it is told to end first."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _WITH_PARENT, *arguments, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        return await process.wait()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        raise


class _Token(NamedTuple):
    """The token of this head, and where it is."""

    text: str
    path: str


def _token(path: Path | None, *, is_open: bool) -> _Token | None:
    """Read the token, or make it; None where that fails and only users of this machine would need it."""
    from gpulse.cluster.security import load_or_make_token  # noqa: PLC0415

    chosen = str((path or service.default_token_file()).absolute())
    try:
        return _Token(load_or_make_token(chosen), chosen)
    except GpulseError as error:
        if path is not None or is_open:
            raise
        log.warning("other users of this machine can change nothing at this head: %s", error.message)
        return None


def _needs(
    token: _Token | None, *, is_open: bool, is_encrypted: bool, private: bool, public_read: bool
) -> list[str]:
    """Say who needs the token for what, and how to copy it to another machine."""
    if token is None:
        return []
    from gpulse.cluster.tokens import copy_command  # noqa: PLC0415

    read = "read or change" if private else "change"
    lines = [f"other users of this machine need the token to {read} anything: gpulse token"]
    if public_read:
        lines.append(_PUBLIC_READ)
    if is_open:
        read = "change" if public_read else "read or change"
        lines.append(
            f"other machines need the token to {read} anything; run there: {copy_command(token.path)}"
        )
        if not is_encrypted:
            lines.append("the token travels unencrypted; --tls-cert and --tls-key change that")
    return lines


def _is_local(host: str) -> bool:
    from gpulse.cluster.security import is_loopback  # noqa: PLC0415

    return host == "localhost" or is_loopback(host)


def _tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    from gpulse.cluster.security import TlsFiles  # noqa: PLC0415

    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise UsageError("TLS needs --tls-cert and --tls-key", hint="give both")
    return TlsFiles(str(cert), str(key), str(client_ca) if client_ca else None).checked()


def _check_extra() -> None:
    try:
        import duckdb  # noqa: F401, PLC0415
        import starlette  # noqa: F401, PLC0415
        import uvicorn  # noqa: F401, PLC0415
    except ImportError as error:
        raise MissingExtraError("a head", "head") from error


def _check_snappy() -> None:
    try:
        import cramjam  # noqa: F401, PLC0415
    except ImportError as error:
        raise MissingExtraError("--remote-write", "head") from error


def _local_seconds(local: float | None, retention: float, remote: TsdbConfig | None) -> float:
    """How long samples stay on this disk.

    Raises:
        UsageError: They could not be read back from anywhere afterwards.
    """
    if local is None:
        return retention
    if remote is None or remote.query_url is None:
        raise UsageError(
            "--local-retention needs a time-series database to read the rest from",
            hint="--remote-write URL, and --remote-query URL where it does not follow from that",
        )
    if local < _SHORTEST_RETENTION_SECONDS or local > retention:
        raise UsageError("--local-retention is out of range", hint="from an hour (1h) to --retention")
    return local


def _own_names(host: str, origins: Iterable[str]) -> set[str]:
    """The names by which this machine may be asked without a token."""
    names = (
        {socket.gethostname(), socket.getfqdn()} if host not in ("127.0.0.1", "::1", "localhost") else set()
    )
    names |= {name for name in map(_host_of, origins) if name}  # their pages may ask everything anyway
    return {name for name in names | {host} if name and name not in ("0.0.0.0", "::")}  # noqa: S104  compared, not bound


def _host_of(origin: str) -> str | None:
    with suppress(ValueError):
        return urlsplit(origin).hostname
    return None


def _frontend(
    access: Access, config: HeadConfig, port: int, theme_dir: str | None, *, dcgm_names: bool
) -> MakeFrontend:
    from gpulse.web.frontend import open_frontend  # noqa: PLC0415

    async def make(head: HeadInterface, clock: Callable[[], float]) -> Frontend:
        return await open_frontend(
            head,
            access,
            host=config.host,
            port=port,
            tls=config.tls,
            clock=clock,
            theme_dir=theme_dir,
            dcgm_names=dcgm_names,
        )

    return make
