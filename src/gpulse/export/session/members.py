"""Which GPUs a session is about."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from gpulse.errors import UsageError
from gpulse.model.natural import natural_key
from gpulse.model.session import Session
from gpulse.store.store import StoredGpu

_MOST_NAMED = 8


def members(session: Session, gpus: Iterable[StoredGpu], *, strict: bool = True) -> list[StoredGpu]:
    """The GPUs that a session's choice of nodes and GPUs means, in the order they came.

    A GPU is chosen by `node:index` (`node:3:1` for a MIG instance), by its index on every node, or by its UUID or the
    beginning of it.

    Args:
        session: Says which nodes and GPUs are wanted.
        gpus: All that are known.
        strict: Refuse names that nothing has; otherwise they are passed over.

    Raises:
        UsageError: A name matches nothing.
    """
    known = list(gpus)
    if strict:
        _check_nodes(session.nodes, known)
    here = [gpu for gpu in known if not session.nodes or gpu.node_name in session.nodes]
    if not session.gpus:
        return here
    if strict:
        _check_gpus(session.gpus, here)
    return [gpu for gpu in here if any(_is_meant(wanted, gpu) for wanted in session.gpus)]


def unique_ids(gpus: Iterable[StoredGpu]) -> list[str]:
    """The name of each GPU in session files; `#2` tells two boards apart that sat in one place."""
    taken: dict[str, int] = {}
    names = []
    for gpu in gpus:
        count = taken[gpu.key] = taken.get(gpu.key, 0) + 1
        names.append(gpu.key if count == 1 else f"{gpu.key}#{count}")
    return names


def present(
    chosen: Iterable[StoredGpu], session: Session, heard: Collection[tuple[int, str]]
) -> list[StoredGpu]:
    """Those that delivered, and those that should have: the other GPUs of nodes that took part.

    A board that was replaced before the session, and so said nothing in it, has left its place to another one.
    """
    chosen = list(chosen)
    nodes = {node for node, _ in heard}
    places = {(gpu.node, gpu.label) for gpu in chosen if (gpu.node, gpu.uuid) in heard}
    found = []
    for gpu in chosen:
        takes_part = gpu.node in nodes or gpu.node_name in session.nodes
        if (gpu.node, gpu.uuid) in heard or (takes_part and (gpu.node, gpu.label) not in places):
            places.add((gpu.node, gpu.label))
            found.append(gpu)
    return found


def _is_meant(wanted: str, gpu: StoredGpu) -> bool:
    for place in (gpu.label, f"{gpu.node_name}:{gpu.label}"):
        if wanted == place or (place.startswith(f"{wanted}:") and wanted != gpu.node_name):
            return True
    prefix = wanted.lower()
    return wanted == gpu.key or (
        prefix.startswith(("gpu-", "mig-")) and len(prefix) > 4 and gpu.uuid.lower().startswith(prefix)
    )


def _check_nodes(wanted: Iterable[str], gpus: list[StoredGpu]) -> None:
    there = {gpu.node_name for gpu in gpus}
    missing = [name for name in wanted if name not in there]
    if missing:
        raise UsageError(
            f"no node with a GPU is called {_told(missing)}",
            hint=f"there are {_told(sorted(there, key=natural_key))}" if there else "no node has joined yet",
        )


def _check_gpus(wanted: Iterable[str], gpus: list[StoredGpu]) -> None:
    missing = [name for name in wanted if not any(_is_meant(name, gpu) for gpu in gpus)]
    if missing:
        there = _told([f"{gpu.node_name}:{gpu.label}" for gpu in gpus])
        raise UsageError(
            f"no GPU is meant by {_told(missing)}",
            hint=f"node:index, an index, or a UUID; there are {there}" if gpus else "no GPU is known yet",
        )


def _told(names: list[str]) -> str:
    return ", ".join(_shortened(names))


def _shortened(names: list[str]) -> Iterator[str]:
    for name in names[:_MOST_NAMED]:
        yield repr(name if len(name) <= 60 else f"{name[:60]}…")
    if len(names) > _MOST_NAMED:
        yield f"and {len(names) - _MOST_NAMED} more"
