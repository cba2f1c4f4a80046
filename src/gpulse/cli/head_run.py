"""Run a head until a signal stops it, or check its data."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from gpulse.cli import common, daemon
from gpulse.cli.head_options import HeadOptions, HeadStorage
from gpulse.cli.progress import WaitNotice
from gpulse.cluster.access_control import AccessPolicy, is_loopback, load_or_create_token
from gpulse.cluster.credentials import token_copy_command
from gpulse.cluster.head.backends import BackendConfig
from gpulse.cluster.head.head import Frontend, FrontendFactory, Head, HeadConfig, ListenAddresses
from gpulse.cluster.head.maintenance import RetentionRules
from gpulse.cluster.notify.config import NotifyConfig
from gpulse.cluster.protocol.head_interface import HeadInterface
from gpulse.cluster.tls_files import TlsFiles
from gpulse.deploy.node_list import NodeListFile
from gpulse.errors import EXIT_INTERRUPTED, GpulseError, UsageError
from gpulse.model import formatting
from gpulse.model.safe_text import plain
from gpulse.store.scrub import repair_data, scrub_data
from gpulse.web.server import open_frontend

log = logging.getLogger(__name__)

_SEAL_SECONDS = 600.0
_AGENT_RESTART_SECONDS = 5.0
_PUBLIC_READ_WARNING = (
    "everybody who can reach this head can read everything without a token: "
    "names of nodes, users, jobs and processes, and all measurements"
)
_AGENT_BOOTSTRAP = "import ctypes; ctypes.CDLL(None).prctl(1, 15); from gpulse.cli.entry import main; main()"
"""Starts an agent that gets SIGTERM when the head that started it ends, even by kill -9."""


def run_head(
    given: HeadOptions,
    storage: HeadStorage,
    notify: NotifyConfig | None,
    ready: daemon.StartupNotifier,
    signals: daemon.StopSignals,
) -> None:
    """Run a head until a signal stops it.

    Raises:
        GpulseError: It cannot listen, or cannot use its data directory.
    """
    expected = NodeListFile(given.node_list) if given.node_list else tuple
    if given.insecure:
        log.warning("--insecure: everybody who can reach this head can read and control it")
    if given.public_read:
        log.warning("--public-read: %s", _PUBLIC_READ_WARNING)
    token = None if given.insecure else _load_token(given.token_file, is_open=not _is_local(given.host))
    access = AccessPolicy(
        token.text if token else None,
        given.origins,
        names=_trusted_host_names(given.host, given.origins),
        insecure=given.insecure,
        private=given.private,
        public_read=given.public_read,
    )
    config = HeadConfig(
        data_dir=str(given.directory.absolute()),
        output_dir=str(given.output_dir.absolute()),
        host=given.host,
        port=given.port,
        interval_ms=given.freq,
        bandwidth=given.enable_bandwidth,
        nvlink=given.enable_nvlink,
        rules=RetentionRules(
            storage.local_seconds,
            given.disk_limit,
            _SEAL_SECONDS if given.seal_after is None else max(1.0, given.seal_after),
            given.retention,
        ),
        backends=BackendConfig(storage.time_series, given.time_series.limit, storage.database),
        auto_resume=given.auto_resume,
        local_port=given.with_agent,
        address_files=(str(common.state_dir("head", "head.json").absolute()),),
        tls=_tls_files(given),
        expected=expected,
        token_file=token.path if token else None,
        notify=notify,
    )
    frontend = _make_frontend(given, config, access)
    notes = _token_notes(token, given)
    asyncio.run(_run(config, access, frontend, ready, signals, notes=notes, with_agent=given.with_agent))


_GC_THRESHOLDS = (50_000, 20, 50)
"""A frame's objects live until its commit, a second later. With Python's defaults they are counted as long-lived by then, and
all objects of the head are scanned every few seconds: a fifth of its CPU time with 25,000 GPUs."""


_SWITCH_SECONDS = 0.001
"""How long a thread that computes a report may keep the interpreter while agents wait for it."""


async def _run(
    config: HeadConfig,
    access: AccessPolicy,
    frontend: FrontendFactory | None,
    ready: daemon.StartupNotifier,
    signals: daemon.StopSignals,
    *,
    notes: Sequence[str],
    with_agent: bool,
) -> None:
    head = Head(config, access)
    signals.bind(lambda: _stop_head(head))
    agents: list[asyncio.Task[None]] = []

    def up(listening: ListenAddresses) -> None:
        http = f", http://{listening.http}" if listening.http else ""
        for note in notes:
            if note is not _PUBLIC_READ_WARNING:  # logged as a warning already
                log.info("%s", note)
        ready.say(f"the head is listening on {listening.grpc}{http} (process {os.getpid()})", *notes)
        gc.collect()
        gc.freeze()  # loaded modules stay; scanning them in every collection would delay all requests
        gc.set_threshold(*_GC_THRESHOLDS)
        sys.setswitchinterval(_SWITCH_SECONDS)
        if with_agent:
            agents.append(asyncio.create_task(_supervise_agent(listening, config)))

    try:
        await head.run(frontend=frontend, ready=up)
    finally:
        gc.unfreeze()  # so that everything is freed at exit
        for agent in agents:
            agent.cancel()
        await asyncio.gather(*agents, return_exceptions=True)


def _stop_head(head: Head) -> None:
    """Stop the head gracefully on the first signal, at once on the second."""
    if head.is_stopping:
        os._exit(EXIT_INTERRUPTED)
    head.stop()


async def _supervise_agent(listening: ListenAddresses, config: HeadConfig) -> None:
    """Keep an agent for this machine running, until cancelled."""
    arguments = ["agent", listening.local or listening.grpc, "--state-dir", f"{config.data_dir}/agent"]
    if config.token_file is not None:
        arguments += ["--token-file", config.token_file]
    while True:
        try:
            code = await _run_agent(arguments)
            log.warning("the agent of this machine exited with code %s; restarting it", code)
        except OSError as error:
            log.error("cannot start the agent of this machine: %s", error)
        await asyncio.sleep(_AGENT_RESTART_SECONDS)


async def _run_agent(arguments: list[str]) -> int:
    """Run an agent until it exits; when cancelled, stop it first."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _AGENT_BOOTSTRAP, *arguments, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        return await process.wait()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        raise


class _HeadToken(NamedTuple):
    """The token of this head, and its file."""

    text: str
    path: str


def _load_token(path: Path | None, *, is_open: bool) -> _HeadToken | None:
    """Read or create the token; None where that fails and only other users of this machine would need it."""
    chosen = str((path or common.default_token_file()).absolute())
    try:
        return _HeadToken(load_or_create_token(chosen), chosen)
    except GpulseError as error:
        if path is not None or is_open:
            raise
        log.warning(
            "there is no token, so other users of this machine cannot change anything: %s", error.message
        )
        return None


def _token_notes(token: _HeadToken | None, given: HeadOptions) -> list[str]:
    """Return notes on who needs the token for what, and how to copy it to another machine."""
    if token is None:
        return []
    read = "read or change" if given.private else "change"
    lines = [
        f"other users of this machine need the token to {read} anything; show how to copy it with: gpulse token"
    ]
    if given.public_read:
        lines.append(_PUBLIC_READ_WARNING)
    if not _is_local(given.host):
        read = "change" if given.public_read else "read or change"
        lines.append(
            f"other machines need the token to {read} anything; on each of them, run: {token_copy_command(token.path)}"
        )
        if given.tls_cert is None:
            lines.append("the token is sent unencrypted; use --tls-cert and --tls-key to encrypt it")
    return lines


def _is_local(host: str) -> bool:
    return host == "localhost" or is_loopback(host)


def _tls_files(given: HeadOptions) -> TlsFiles | None:
    cert, key, client_ca = given.tls_cert, given.tls_key, given.tls_client_ca
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise UsageError("TLS requires both --tls-cert and --tls-key", hint="give both options")
    return TlsFiles(str(cert), str(key), str(client_ca) if client_ca else None).checked()


def _trusted_host_names(host: str, origins: Iterable[str]) -> set[str]:
    """Return the host names under which requests of this machine need no token."""
    names = (
        {socket.gethostname(), socket.getfqdn()} if host not in ("127.0.0.1", "::1", "localhost") else set()
    )
    names |= {name for name in map(_host_of, origins) if name}  # their pages may use the whole API anyway
    return {name for name in names | {host} if name and name not in ("0.0.0.0", "::")}  # noqa: S104  compared, not bound


def _host_of(origin: str) -> str | None:
    with suppress(ValueError):
        return urlsplit(origin).hostname
    return None


def _make_frontend(given: HeadOptions, config: HeadConfig, access: AccessPolicy) -> FrontendFactory | None:
    """Return the function that opens the HTTP frontend of the head; None without an HTTP port."""
    if not given.http_port:
        return None
    theme_dir = str(given.theme_dir.absolute()) if given.theme_dir else None

    async def make(head: HeadInterface, clock: Callable[[], float]) -> Frontend:
        return await open_frontend(
            head,
            access,
            host=config.host,
            port=given.http_port,
            tls=config.tls,
            clock=clock,
            theme_dir=theme_dir,
            dcgm_names=given.dcgm_names,
        )

    return make


def check_data(directory: str, *, is_repair: bool) -> int:
    """Check or repair a data directory, and print what is damaged; return the exit code.

    Raises:
        GpulseError: The directory has no data or another format, or cannot be read.
    """
    if not os.path.isdir(f"{directory}/log"):
        raise GpulseError(
            f"{directory} is not a head's data directory",
            hint="give the head's data directory with --data-dir DIR",
        )
    with WaitNotice("checking the data directory", patience_seconds=0.5) as notice:

        def show(done: int, total: int, path: str) -> None:
            notice.text = (
                f"{done / max(1, total):4.0%} checked  {os.path.relpath(path or directory, directory)}"
            )

        report = repair_data(directory, time.time(), show) if is_repair else scrub_data(directory, show)
    for damage in report.damage:
        common.write(plain(damage.sentence))
    count = f"{report.files} {'file' if report.files == 1 else 'files'}, {formatting.size(report.size_bytes)}"
    if report.unprotected:
        common.write(
            f"files without a checksum: {len(report.unprotected)}; an earlier version of gpulse wrote them, "
            "or a checkpoint was interrupted"
        )
    if not report.damage:
        common.write(f"checked {count}: nothing is damaged")
        return 0
    done = (
        "repaired"
        if is_repair
        else "damaged; the head moves damaged files aside when it next reads them; to do that now, run: gpulse head --repair"
    )
    common.write(f"checked {count}: {len(report.damage)} {done}")
    return 1
