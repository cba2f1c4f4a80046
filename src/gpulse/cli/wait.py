"""`gpulse wait`: wait until GPUs are free, then return or start a command on them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from gpulse.cli import child_process, common, head_client, option_types
from gpulse.cli.wait_candidates import CandidateSource, ClusterGpus, LocalGpus, check_own_node
from gpulse.errors import GpulseError, RefusedError, UsageError
from gpulse.model.gpu_state import (
    FreeGpuTracker,
    GpuCandidate,
    GpuRequest,
    candidate_to_document,
    choose_gpus,
    count_possible,
    describe_wait,
)
from gpulse.model.safe_text import natural_key
from gpulse.sources.procfs import Roots
from gpulse.terminal import value_format as f
from gpulse.terminal.table import truncate

TIMED_OUT = 124
"""Exit code after --timeout, as that of timeout(1)."""
_LOCAL_SECONDS = 0.5
_CLUSTER_SECONDS = 2.0
"""Time between two looks."""
_MIN_NOTE_SECONDS, _MAX_NOTE_SECONDS = 30.0, 600.0
"""Without a terminal: shortest time between two lines, and longest time without one."""
_DEFAULT_FREE_SECONDS = 3.0


@click.command(context_settings={"ignore_unknown_options": False})
@click.option(
    "-n",
    "--gpus",
    type=click.IntRange(1, 4096),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of GPUs to wait for.",
)
@click.option(
    "--memory",
    type=option_types.size,
    metavar="SIZE",
    help="Free memory that each of the GPUs must have, such as 40G.",
)
@click.option(
    "--for",
    "free_for",
    type=option_types.duration,
    default=f"{_DEFAULT_FREE_SECONDS:g}s",
    show_default=True,
    metavar="TIME",
    help="How long the GPUs must have been free, so that pauses between programs are ignored.",
)
@click.option(
    "--timeout",
    type=option_types.duration,
    metavar="TIME",
    help="Give up after this time (90, 10m, 2h) with exit code 124.",
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME",
    help="With --head or GPULSE_HEAD: wait only for GPUs of this node; repeatable.",
)
@click.option("--spread", is_flag=True, help="With --head or GPULSE_HEAD: allow GPUs on several nodes.")
@click.option("--json", "as_json", is_flag=True, help="Print the GPUs as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Do not print who holds the GPUs while waiting.")
@click.option(
    "--dev-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    default="/dev",
    show_default=True,
    help="Directory with device files; in a container, the host's /dev may be mounted elsewhere.",
)
@click.option(
    "--head",
    metavar="HOST[:8090]",
    help="Wait for GPUs of this head's nodes (HOST:8090 or http://HOST:8091) instead of GPUs of this machine.",
)
@head_client.access_options
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(
    *,
    gpus: int,
    memory: int | None,
    free_for: float,
    timeout: float | None,
    nodes: tuple[str, ...],
    spread: bool,
    as_json: bool,
    quiet: bool,
    dev_dir: Path,
    argv: tuple[str, ...],
    **given: Any,
) -> int:
    """Wait until GPUs are free, then print them, or start COMMAND on them.

    While waiting, gpulse prints who holds the GPUs. All GPUs are on one node, unless --spread is given. A GPU that only a harvest uses counts as free:
    the harvest is asked to stop, and the GPU is taken once the harvest has released it.

    COMMAND sees only its GPUs (CUDA_VISIBLE_DEVICES), and no other `gpulse wait` takes them while it runs. The exit
    code of COMMAND is passed on. Without a COMMAND, the GPUs are not reserved: start your program immediately.

    \b
    gpulse wait && python train.py                   wait for one GPU of this machine
    gpulse wait --gpus 2 -- python train.py          start a program on two GPUs
    gpulse wait --gpus 8 --head gpu-head             wait for a node with eight free GPUs
    """  # noqa: D301  click needs the backspace itself
    target = _find_head(head_client.pop_target(given), nodes, spread=spread)
    _check_usage(target, nodes, spread=spread, as_json=as_json, argv=argv)
    request = GpuRequest(gpus, memory, free_for, spread)
    wait = _Wait(request, timeout, _WaitNote(quiet=quiet))
    with _end_on_sigterm():
        if target.head is not None and not argv:
            cluster = ClusterGpus(target, nodes)
            try:
                found = wait.run(cluster, _CLUSTER_SECONDS)
            finally:
                cluster.close()
            return _report(found, wait, as_json=as_json, is_local=False)
        local = LocalGpus(Roots(dev=str(dev_dir.absolute())), interval_seconds=_LOCAL_SECONDS)
        try:
            try:
                if target.head is not None:
                    check_own_node(target, nodes, [one.uuid for one in local.look(time.time())])
                found = wait.run(local, _LOCAL_SECONDS)
            finally:
                local.close()
            if argv and found:
                return _run(list(argv), found)
        finally:
            local.release()
    return _report(found, wait, as_json=as_json, is_local=True)


def _find_head(
    target: head_client.HeadTarget, nodes: Sequence[str], *, spread: bool
) -> head_client.HeadTarget:
    """Return the head that is asked: that of GPULSE_HEAD if only an option for clusters says that one is."""
    if target.head is None and (nodes or spread):
        return target._replace(head=os.environ.get("GPULSE_HEAD") or None)
    return target


def _check_usage(
    target: head_client.HeadTarget, nodes: Sequence[str], *, spread: bool, as_json: bool, argv: Sequence[str]
) -> None:
    if target.head is None:
        if nodes or spread:
            raise UsageError(
                "--node and --spread need --head or GPULSE_HEAD", hint="gpulse wait --head HOST --node NAME"
            )
        if target != head_client.HeadTarget():
            raise UsageError(
                "--token-file and the --tls options require --head", hint="gpulse wait --head HOST"
            )
    if argv and as_json:
        raise UsageError(
            "--json cannot be used with a COMMAND, because both would write to standard output",
            hint="leave out --json or the COMMAND",
        )
    if argv and spread:
        raise UsageError(
            "--spread cannot be used with a COMMAND, which runs on one node only", hint="leave out --spread"
        )


class _Wait:
    """Waits for GPUs."""

    def __init__(self, request: GpuRequest, timeout: float | None, note: _WaitNote) -> None:
        self._request = request
        self._tracker = FreeGpuTracker(request)
        self._began = time.monotonic()
        self._deadline = None if timeout is None else self._began + timeout
        self._note = note
        self._claimed: dict[str, float] = {}
        """When GPUs were claimed, in epoch seconds, by UUID."""
        self.candidates: Sequence[GpuCandidate] = ()
        """All GPUs at the last look."""

    @property
    def seconds(self) -> float:
        """How long it has been waiting."""
        return time.monotonic() - self._began

    def run(self, source: CandidateSource, interval_seconds: float) -> list[GpuCandidate]:
        """Return the GPUs once they are free; empty after the timeout.

        Raises:
            GpulseError: The first look failed, or the request can never be fulfilled.
        """
        try:
            while True:
                found = self._look(source)
                if found:
                    return found
                left = interval_seconds if self._deadline is None else self._deadline - time.monotonic()
                if left <= 0:
                    return []
                time.sleep(min(interval_seconds, left))
        finally:
            self._note.clear()

    def _look(self, source: CandidateSource) -> list[GpuCandidate]:
        is_first = not self.candidates
        try:
            self.candidates = source.look(time.time())
        except GpulseError as error:
            if is_first or isinstance(error, RefusedError | UsageError):
                raise
            self._note.show(f"{error.message}; trying again", self.seconds)
            return []
        if is_first:
            _check_possible(self.candidates, self._request)
        chosen = choose_gpus(self._tracker.update(self.candidates, time.monotonic()), self._request)
        if not source.claim(chosen):
            chosen = []
        if not chosen:
            self._claimed = {}
        elif self._is_confirmed(chosen, can_change=source.has_claims):
            return chosen
        self._show(chosen)
        return []

    def _is_confirmed(self, chosen: Sequence[GpuCandidate], *, can_change: bool) -> bool:
        """Return whether GPUs were read after they were claimed, are free, and have no program of a harvest left."""
        if not can_change:
            return True
        now = time.time()
        self._claimed = {one.uuid: self._claimed.get(one.uuid, now) for one in chosen}
        return all(
            one.state == "free" and one.read_at is not None and one.read_at >= self._claimed[one.uuid]
            for one in chosen
        )

    def _show(self, chosen: Sequence[GpuCandidate]) -> None:
        """Say what is still waited for."""
        lent = sum(one.state == "harvested" for one in chosen)
        if lent:
            self._note.show(
                f"waiting until the harvest has given back {f.count_noun(lent, 'GPU')}", self.seconds
            )
        elif choose_gpus([one for one in self.candidates if self._tracker.fits(one)], self._request):
            text = f"enough GPUs are free; checking that they stay free for {self._request.free_seconds:g} s"
            self._note.show(text, self.seconds, is_brief=True)
        else:
            text = describe_wait(self.candidates, self._tracker, self._request, time.time())
            self._note.show(text, self.seconds)


def _check_possible(candidates: Sequence[GpuCandidate], request: GpuRequest) -> None:
    """Check that a request can be fulfilled once all GPUs are free.

    Raises:
        UsageError: There are too few GPUs.
    """
    most = count_possible(candidates, request)
    if most >= request.count:
        return
    is_cluster = len({one.node for one in candidates}) > 1
    if is_cluster and not request.spread:
        where = f"the largest node has only {most}"
    else:
        where = f"only {most} {'exists' if most == 1 else 'exist'}"
    which = "" if request.memory_bytes is None else " with this much memory"
    excluded = sum(one.is_excluded for one in candidates)
    left_out = (
        f"; GPUs that cannot be used, because they are MIG instances or hidden by CUDA_VISIBLE_DEVICES: {excluded}"
        if excluded
        else ""
    )
    hint = "request fewer GPUs"
    largest = max((one.memory_total_bytes or 0.0 for one in candidates if not one.is_excluded), default=0.0)
    if request.memory_bytes is not None and largest:
        less = "request fewer GPUs or less memory" if most else "request less memory"
        hint = f"{less}: the largest GPU has {largest / 1e9:.1f} GB in total"
    elif is_cluster and not request.spread:
        hint += ", or allow several nodes with --spread"
    raise UsageError(
        f"cannot wait for {f.count_noun(request.count, 'GPU')}{which}: {where if most else 'there is none'}{left_out}",
        hint=hint,
    )


class _WaitNote:
    """A line on standard error about who holds the GPUs: updated on a terminal, printed now and then otherwise."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._is_terminal = sys.stderr.isatty()
        self._is_drawn = False
        self._printed: tuple[str, float] | None = None

    def show(self, text: str, seconds: float, *, is_brief: bool = False) -> None:
        """Show a line, `seconds` after the wait began; one that is soon outdated only on a terminal."""
        if self._quiet:
            return
        if self._is_terminal:
            self._is_drawn = True
            line = truncate(f"{text} ({f.duration(seconds)})", common.terminal_width() - 1)
            self._write(f"\r\x1b[K{line}")
            return
        if is_brief:
            return
        if self._printed is not None:
            before, at = self._printed
            if seconds - at < (_MIN_NOTE_SECONDS if text != before else _MAX_NOTE_SECONDS):
                return
        self._printed = text, seconds
        common.print_note(f"gpulse: {text}")

    def clear(self) -> None:
        """Erase the line."""
        if self._is_drawn:
            self._write("\r\x1b[K")
            self._is_drawn = False

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):  # a terminal that is gone is no reason to stop waiting
            sys.stderr.write(text)
            sys.stderr.flush()


class _Nothing:
    """Runs beside the command, and does nothing."""

    def stop(self) -> None:
        """Do nothing."""


def _run(argv: list[str], gpus: Sequence[GpuCandidate]) -> int:
    """Run a command that sees only these GPUs; return its exit code."""
    environment = {
        **os.environ,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(sorted((one.label for one in gpus), key=natural_key)),
    }
    return child_process.run(argv, _Nothing(), lambda: None, environment=environment).code


def _report(found: Sequence[GpuCandidate], wait: _Wait, *, as_json: bool, is_local: bool) -> int:
    """Print the GPUs, or that the time is over; return the exit code."""
    gpus = sorted(found, key=lambda one: (natural_key(one.node), natural_key(one.label)))
    if as_json:
        document = {
            "gpus": [candidate_to_document(one) for one in gpus],
            "waited_seconds": round(wait.seconds, 3),
            "timed_out": not gpus,
            "others": [candidate_to_document(one) for one in wait.candidates if one not in found],
        }
        common.write(json.dumps(document, indent=2))
    elif gpus and is_local:
        common.write(",".join(one.label for one in gpus))
    elif gpus:
        common.write("\n".join(f.plain(f"{one.node}:{one.label}") for one in gpus))
    if gpus:
        return 0
    common.print_error(
        "gpulse",
        f"timed out after {f.duration(wait.seconds)}: the GPUs are still in use",
        "a longer --timeout",
    )
    return TIMED_OUT


@contextmanager
def _end_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the wait as Ctrl-C does, so that nothing is left behind."""

    def end(number: int, stack: FrameType | None) -> NoReturn:  # noqa: ARG001  the signature of handlers
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
