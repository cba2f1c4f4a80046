"""Select GPUs by node name and by GPU names such as `node:3`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpulse.errors import RefusedError
from gpulse.model.safe_text import natural_key
from gpulse.store.store import StoredGpu

_MAX_NAMES_SHOWN = 8


def select_gpus(
    gpus: Sequence[StoredGpu], nodes: Sequence[str], names: Sequence[str], *, strict: bool = True
) -> list[StoredGpu]:
    """Return the GPUs that match both the nodes and the names, in their given order.

    Args:
        gpus: All known GPUs.
        nodes: Node names; empty for all.
        names: `node:index` (`node:3:1` for a MIG instance), an index on every node, or a UUID or its beginning; empty for
            all.
        strict: Raise an error for names that match nothing; otherwise ignore them.

    Raises:
        RefusedError: A name matches nothing.
    """
    if strict:
        _check_nodes(nodes, gpus)
    here = [gpu for gpu in gpus if not nodes or gpu.node_name in nodes]
    if not names:
        return here
    if strict:
        _check_gpus(names, here)
    return [gpu for gpu in here if any(_matches(wanted, gpu) for wanted in names)]


def _matches(wanted: str, gpu: StoredGpu) -> bool:
    for place in (gpu.label, f"{gpu.node_name}:{gpu.label}"):
        if wanted == place or (place.startswith(f"{wanted}:") and wanted != gpu.node_name):
            return True
    prefix = wanted.lower()
    return wanted == gpu.key or (
        prefix.startswith(("gpu-", "mig-")) and len(prefix) > 4 and gpu.uuid.lower().startswith(prefix)
    )


def _check_nodes(wanted: Iterable[str], gpus: Sequence[StoredGpu]) -> None:
    there = {gpu.node_name for gpu in gpus}
    missing = [name for name in wanted if name not in there]
    if missing:
        raise RefusedError(
            404,
            f"no node with GPUs matches {_format_names(missing)}",
            hint=f"use one of the known nodes: {_format_names(sorted(there, key=natural_key))}"
            if there
            else "start an agent on a node first: no node has joined yet",
        )


def _check_gpus(wanted: Iterable[str], gpus: Sequence[StoredGpu]) -> None:
    missing = [name for name in wanted if not any(_matches(name, gpu) for gpu in gpus)]
    if missing:
        there = _format_names([f"{gpu.node_name}:{gpu.label}" for gpu in gpus])
        raise RefusedError(
            404,
            f"no GPU matches {_format_names(missing)}",
            hint=f"use NODE:INDEX, an index, or a UUID; known GPUs: {there}"
            if gpus
            else "start an agent on a node with GPUs first: no GPU has been reported yet",
        )


def _format_names(names: list[str]) -> str:
    return ", ".join(_shorten_names(names))


def _shorten_names(names: list[str]) -> Iterator[str]:
    for name in names[:_MAX_NAMES_SHOWN]:
        yield repr(name if len(name) <= 60 else f"{name[:60]}…")
    if len(names) > _MAX_NAMES_SHOWN:
        yield f"and {len(names) - _MAX_NAMES_SHOWN} more"
