"""Which GPUs a session is about."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gpulse.model.session import Session
from gpulse.store.store import StoredGpu


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
