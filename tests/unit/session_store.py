"""A store in memory, made of arrays, for tests of what is written from stores."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulse.model.session import Session
from gpulse.store.metadata.local_metadata import Metadata, MetadataUpdate
from gpulse.store.store import (
    Query,
    Samples,
    Series,
    SeriesKey,
    Store,
    StoredEvent,
    StoredFinding,
    StoredGpu,
    StoredNode,
)
from tests.unit.metadata_records import fact

if TYPE_CHECKING:
    from numpy.typing import NDArray

START = 1_800_000_000.0
GIB = 1024**3
STRETCH_SECONDS = 100.0


def session(**changes: Any) -> Session:
    """A finished session of ten seconds, one step a second."""
    fields: dict[str, Any] = {
        "id": "s1",
        "name": "run",
        "start": START,
        "created": START,
        "interval_ms": 1000,
        "state": "finished",
        "end": START + 10,
    }
    return Session(**{**fields, **changes})


def gpu(node: int, index: int, **changes: Any) -> StoredGpu:
    """GPU `index` of node `node`; node 1 is called `n1`."""
    return StoredGpu(
        node, f"n{node}", f"GPU-{node:04}{index:04}", index, str(index), "NVIDIA H200", {"facts": {}}
    )._replace(**changes)


class MemoryStore(Store):
    """Samples as rows: whose, when, and a column a metric."""

    def __init__(self, gpus: Sequence[StoredGpu], events: Sequence[StoredEvent] = ()) -> None:
        self._gpus = list(gpus)
        self._events = sorted(events)
        self._series: list[NDArray[np.int32]] = []
        self._times: list[NDArray[np.float64]] = []
        self._values: list[Mapping[str, NDArray[np.float64]]] = []

    def add(self, gpu: StoredGpu, times: Sequence[float] | NDArray[np.float64], **values: Any) -> None:
        """Samples of one GPU; a value is one number, or one for each moment."""
        moments = np.asarray(times, np.float64)
        self._times.append(moments)
        self._series.append(np.full(len(moments), self._gpus.index(gpu), np.int32))
        self._values.append(
            {
                name: np.broadcast_to(np.asarray(value, np.float64), moments.shape)
                for name, value in values.items()
            }
        )

    def nodes(self) -> dict[int, StoredNode]:
        """One for each node number."""
        return {
            gpu.node: StoredNode(
                gpu.node,
                gpu.node_name,
                gpu.node_name,
                f"m{gpu.node}",
                START,
                {"driver": "580.1"},
                {"rack": "a"},
            )
            for gpu in self._gpus
        }

    def gpus(self) -> list[StoredGpu]:
        """Those it was made with."""
        return list(self._gpus)

    def sessions(self) -> list[Session]:
        """None."""
        return []

    def events(self, query: Query) -> list[StoredEvent]:
        """Those it was made with."""
        found = [
            event
            for event in self._events
            if query.start <= event.time < query.end
            and (query.kinds is None or event.kind in query.kinds)
            and (query.nodes is None or event.node in query.nodes)
        ]
        return found if query.limit is None else found[max(0, len(found) - query.limit) :]

    def findings(self, query: Query) -> list[StoredFinding]:
        """Those that its events report."""
        facts = [fact("event", **event._asdict()) for event in self._events]
        with tempfile.TemporaryDirectory() as directory, Metadata(f"{directory}/metadata.sqlite") as metadata:
            metadata.apply(MetadataUpdate(1, facts))
            return metadata.findings(query)

    def series(self, query: Query) -> list[Series]:
        """Every sample, whatever the step."""
        found = []
        for samples in self.scan(query):
            for place, key in enumerate(samples.keys):
                which = samples.series == place
                for metric in query.metrics if which.any() else ():
                    times, values = samples.times[which], samples.values[metric][which]
                    found.append(Series(key, metric, times, values, values, values, times))
        return found

    def scan(self, query: Query) -> Iterator[Samples]:
        """Cut into stretches at whole multiples of their length since the start."""
        assert query.scope == "gpu"
        nodes, subjects, start, end = query.nodes, query.subjects, query.start, query.end
        if not self._times:
            return
        keys = [SeriesKey(gpu.node, gpu.uuid) for gpu in self._gpus]
        wanted = np.array(
            [
                (nodes is None or key.node in nodes) and (subjects is None or key.subject in subjects)
                for key in keys
            ]
        )
        times, series = np.concatenate(self._times), np.concatenate(self._series)
        order = np.argsort(times, kind="stable")
        order = order[wanted[series[order]] & (times[order] >= start) & (times[order] < end)]
        columns = {name: self._column(name) for name in query.metrics}
        stretches = ((times[order] - start) // STRETCH_SECONDS).astype(np.int64)
        for stretch in np.unique(stretches):
            which = order[stretches == stretch]
            yield Samples(
                keys,
                series[which],
                times[which],
                np.zeros(len(which), np.uint64),
                np.arange(len(which)),
                {name: column[which] for name, column in columns.items()},
            )

    def _column(self, name: str) -> NDArray[np.float64]:
        return np.concatenate(
            [
                values.get(name, np.full(len(times), np.nan))
                for values, times in zip(self._values, self._times, strict=True)
            ]
        )
