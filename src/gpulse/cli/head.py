"""`gpulse head`: collect, store and serve the data of many nodes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from gpulse.cli import daemon, option_types
from gpulse.cli.head_options import HeadOptions, database_options, tsdb_options
from gpulse.cli.notify import load_notify_settings
from gpulse.errors import MissingExtraError


@click.command()
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on; 0.0.0.0 for all interfaces.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8090,
    show_default=True,
    metavar="PORT",
    help="gRPC port for agents and commands.",
)
@click.option(
    "--http-port",
    type=click.IntRange(0, 65535),
    default=8091,
    show_default=True,
    metavar="PORT",
    help="HTTP port for the web page and the API; 0 disables both.",
)
@click.option(
    "--freq",
    type=click.IntRange(50, 3_600_000),
    metavar="MS",
    show_default="the last value used; 500 at the first start",
    help="Milliseconds between samples of every agent.",
)
@click.option(
    "--enable-bandwidth/--disable-bandwidth",
    default=None,
    show_default="the last value used; off at the first start",
    help="Record PCIe traffic in sessions.",
)
@click.option(
    "--enable-nvlink/--disable-nvlink",
    default=None,
    show_default="the last value used; off at the first start",
    help="Record NVLink traffic in sessions.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    show_default="in the user's state directory",
    help="Directory for all data of the head.",
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=Path(),
    metavar="DIR",
    show_default="the current directory",
    help="Directory for the files of stopped sessions.",
)
@click.option(
    "--retention",
    type=option_types.duration,
    metavar="TIME",
    default="30d",
    show_default=True,
    help="Keep history for this long, such as 30d.",
)
@click.option(
    "--disk-limit",
    type=option_types.size,
    metavar="SIZE",
    default="50GiB",
    show_default=True,
    help="Keep at most this much data on disk, such as 50GiB; beyond that, drop the oldest.",
)
@click.option(
    "--local-retention",
    type=option_types.duration,
    metavar="TIME",
    show_default="as --retention",
    help="Keep samples on local disk for this long when a time-series database also has them.",
)
@click.option(
    "--seal-after",
    type=option_types.duration,
    metavar="TIME",
    show_default="10m",
    help="Move frames from the log to the history after this time, such as 10m.",
)
@tsdb_options
@database_options
@click.option(
    "--dcgm-names", is_flag=True, help="Serve /metrics under the names and labels of NVIDIA's DCGM exporter."
)
@click.option(
    "--auto-resume", is_flag=True, help="Resume sessions that were active when the head last stopped."
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    show_default="in the user's configuration directory",
    help="File with the token that agents and clients must present; created if missing. `gpulse token` shows how to copy it.",
)
@click.option("--insecure", is_flag=True, help="Let everybody read and change everything without a token.")
@click.option(
    "--private", is_flag=True, help="Also require the token when other users of this machine read data."
)
@click.option(
    "--public-read",
    is_flag=True,
    help="Let other machines read without the token; user, job and process names become visible to everybody.",
)
@click.option(
    "--cors-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let web pages from this origin use the API; repeatable.",
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PEM",
    help="TLS certificate of this head.",
)
@click.option(
    "--tls-key",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PEM",
    help="Private key of the head's certificate.",
)
@click.option(
    "--tls-client-ca",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PEM",
    help="Accept only clients with a certificate signed by this CA.",
)
@click.option(
    "--nodes",
    "node_list",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File with the list of expected nodes, as for `gpulse deploy`; nodes that have never reported are shown as missing.",
)
@click.option(
    "--notify",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="TOML file that defines which findings are sent by mail, to chats or to webhooks. Test it with `gpulse notify test FILE`.",
)
@click.option(
    "--theme-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Directory with a custom theme for the web page: theme.css, title.txt and images.",
)
@click.option("--with-agent", is_flag=True, help="Also run an agent for this machine.")
@click.option(
    "--scrub",
    is_flag=True,
    help="Check all files of the data directory against their checksums, and exit. This changes nothing; the head may be running.",
)
@click.option(
    "--repair",
    is_flag=True,
    help="Move damaged files of a stopped head's data directory aside, restore what can be restored, and exit.",
)
@daemon.background_options
def command(*, scrub: bool, repair: bool, **options: Any) -> int | None:
    """Run the head: collect the samples of agents, store them, and serve them to commands and the web page.

    \b
    gpulse head                          serve this machine only
    gpulse head --host 0.0.0.0           also serve agents on other machines
    gpulse token                         show how to copy the token to those machines
    gpulse agent HEAD:8090               run this on each of those machines
    gpulse session start training_run    start profiling, from any of these machines

    The exit code of --scrub and --repair is 1 if something was damaged.
    """  # noqa: D301  click needs the backspace itself
    given = HeadOptions.pop_from(options)
    given.check()
    _require_head_libraries()
    if scrub or repair:
        exit_code: int = _load_head_run().check_data(str(given.directory.absolute()), is_repair=repair)
        return exit_code
    with daemon.run_daemon("head", given.directory, given.log_file, background=given.background) as ready:
        storage = given.storage()
        notify = None if given.notify is None else load_notify_settings(given.notify)
        signals = daemon.StopSignals()
        daemon.start_logging()
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would log every client that disconnects
        _load_head_run().run_head(given, storage, notify, ready, signals)
    return None


def _require_head_libraries() -> None:
    """Check that the libraries of a head are installed.

    Raises:
        MissingExtraError: One of them is not installed.
    """
    if any(importlib.util.find_spec(name) is None for name in ("duckdb", "starlette", "uvicorn")):
        raise MissingExtraError("a head", "head")


def _load_head_run() -> ModuleType:
    """Load the code of a head: gRPC and DuckDB, which --help does not need."""
    from gpulse.cli import head_run  # noqa: PLC0415  as above

    return head_run
