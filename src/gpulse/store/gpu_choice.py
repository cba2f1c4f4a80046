"""Choose GPUs by their nodes and by names such as `node:3`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpulse.errors import RefusedError
from gpulse.model.natural import natural_key
from gpulse.store.store import StoredGpu

_MAX_NAMED = 8


def choose_gpus(
    gpus: Sequence[StoredGpu], nodes: Sequence[str], names: Sequence[str], *, strict: bool = True
) -> list[StoredGpu]:
    """Return the GPUs of these nodes that these names mean, in the order they came.

    Args:
        gpus: All that are known.
        nodes: Names of nodes; empty for all.
        names: `node:index` (`node:3:1` for a MIG instance), an index on every node, or a UUID or the beginning of it;
            empty for all.
        strict: Refuse names that nothing has; otherwise they are ignored.

    Raises:
        RefusedError: Nothing has a name.
    """
    if strict:
        _check_nodes(nodes, gpus)
    here = [gpu for gpu in gpus if not nodes or gpu.node_name in nodes]
    if not names:
        return here
    if strict:
        _check_gpus(names, here)
    return [gpu for gpu in here if any(_is_meant(wanted, gpu) for wanted in names)]


def _is_meant(wanted: str, gpu: StoredGpu) -> bool:
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
            f"no node with a GPU is called {_listed(missing)}",
            hint=f"there are {_listed(sorted(there, key=natural_key))}"
            if there
            else "no node has joined yet",
        )


def _check_gpus(wanted: Iterable[str], gpus: Sequence[StoredGpu]) -> None:
    missing = [name for name in wanted if not any(_is_meant(name, gpu) for gpu in gpus)]
    if missing:
        there = _listed([f"{gpu.node_name}:{gpu.label}" for gpu in gpus])
        raise RefusedError(
            404,
            f"no GPU is meant by {_listed(missing)}",
            hint=f"node:index, an index, or a UUID; there are {there}" if gpus else "no GPU is known yet",
        )


def _listed(names: list[str]) -> str:
    return ", ".join(_shortened(names))


def _shortened(names: list[str]) -> Iterator[str]:
    for name in names[:_MAX_NAMED]:
        yield repr(name if len(name) <= 60 else f"{name[:60]}…")
    if len(names) > _MAX_NAMED:
        yield f"and {len(names) - _MAX_NAMED} more"
