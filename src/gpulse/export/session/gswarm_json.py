"""Session files as JSON, one document in the layout of gswarm-profiler, and as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulse.export.session.grid import Rows
from gpulse.export.session.outline import Document, Plan
from gpulse.model.iso_time import iso

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def encoded(value: object) -> bytes:
    """A value as JSON on one line."""
    return _ENCODER.encode(value).encode("ascii")


class Frames:
    """Writes complete steps as frames, one JSON object each."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ids = encoded(plan.ids).decode()
        self._names = plan.node_names
        self._clients: dict[bytes, str] = {}

    def of(self, rows: Rows) -> Iterator[bytes]:
        """One frame after the other."""
        names = [quantity.name for quantity in self._plan.quantities]
        arrays = [_with_nulls(rows.values[name]) for name in names]
        keys = [f',"{name}":' for name in names]
        for place in range(rows.length):
            step = rows.first + place
            pieces = [f'{{"frame_id":{step + 1},"time":"{iso(self._plan.time(step))}","gpu_id":{self._ids}']
            for key, array in zip(keys, arrays, strict=True):
                pieces += (key, _ENCODER.encode(array[place]))
            pieces.append(self._who(rows.delivered[place]))
            yield "".join(pieces).encode("ascii")

    def _who(self, delivered: NDArray[np.bool_]) -> str:
        """Who delivered and who did not; hardly ever different from the frame before."""
        pattern = delivered.tobytes()
        if pattern not in self._clients:
            if len(self._clients) > 1024:
                self._clients.clear()
            there = [name for name, is_there in zip(self._names, delivered, strict=True) if is_there]
            missing = [name for name, is_there in zip(self._names, delivered, strict=True) if not is_there]
            self._clients[pattern] = (
                f',"available_clients":{_ENCODER.encode(there)},"missing_clients":{_ENCODER.encode(missing)}}}'
            )
        return self._clients[pattern]


def _with_nulls(matrix: NDArray[np.float64]) -> list[list[float | None]]:
    found: NDArray[np.object_] = matrix.astype(object)
    found[np.isnan(matrix)] = None
    listed: list[list[Any]] = found.tolist()
    return listed


def json_pieces(plan: Plan, steps: Iterable[Rows], tail: Iterable[Document]) -> Iterator[bytes]:
    """The document, piece by piece; `tail` is asked for when the frames are through."""
    yield encoded(plan.head())[:-1] + b',\n"frames":['
    frames = Frames(plan)
    before = b"\n"
    for rows in steps:
        if rows.length:
            yield before + b",\n".join(frames.of(rows))
            before = b",\n"
    for document in tail:
        yield b"\n],\n" + encoded(document)[1:] + b"\n"


def jsonl_pieces(plan: Plan, steps: Iterable[Rows], tail: Iterable[Document]) -> Iterator[bytes]:
    """A line for the head, a line a frame, and a line for what comes after them."""
    yield encoded(plan.head() | {"gpu_id": plan.ids}) + b"\n"
    frames = Frames(plan)
    for rows in steps:
        if rows.length:
            yield b"\n".join(frames.of(rows)) + b"\n"
    for document in tail:
        yield encoded(document) + b"\n"
