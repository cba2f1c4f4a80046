"""Query the series of known nodes in pieces that a time-series database can answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpulse.model.metric import CATALOGUE, Scope
from gpulse.model.series import EXPOSED, subject_label
from gpulse.store.store import Query, SeriesKey, StoredNode
from gpulse.store.tsdb.promql import PromqlClient, Track
from gpulse.store.tsdb.selectors import groups, selector
from gpulse.store.tsdb.split_query import DAY, Piece, raw_pieces, step_pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SUBJECTS_A_NODE = 8
"""About how many GPUs, disks or interfaces a node has."""
_COUNT_OF_DAYS = f"count(count_over_time({{}}[{DAY}ms]))"
_FEW_DAYS = 2 * DAY

Signature = frozenset[tuple[str, str]]
"""What tells one series of a time-series database from the others."""


class Line(NamedTuple):
    """The values of one series at whole milliseconds."""

    key: SeriesKey
    times: NDArray[np.int64]
    values: NDArray[np.float64]


class Target(NamedTuple):
    """Series that can be asked for at once."""

    scope: Scope
    names: Sequence[str] | None
    """Of these nodes; None for any."""
    subjects: Sequence[str] | None
    numbers: Mapping[str, int]
    """The nodes that are wanted, by name."""
    deadline: float | None = None
    """When to give up, in monotonic seconds."""

    @property
    def series(self) -> int:
        """About how many there are of one metric."""
        if self.subjects is not None:
            return len(self.subjects)
        each = 1 if self.scope == "host" else _SUBJECTS_A_NODE
        return each * len(self.numbers if self.names is None else self.names)

    def key(self, labels: Mapping[str, str]) -> SeriesKey | None:
        """Whose a series is; None when it is nobody's who is wanted."""
        number, label = self.numbers.get(labels.get("node", "")), subject_label(self.scope)
        return None if number is None else SeriesKey(number, labels.get(label, "") if label else "")


class SeriesClient:
    """Reads the series of the nodes that are known here."""

    def __init__(
        self,
        client: PromqlClient,
        nodes: Callable[[], Mapping[int, StoredNode]],
        labels: Mapping[str, str],
    ) -> None:
        """Prepare to ask.

        Args:
            client: The time-series database.
            nodes: The nodes that are known, by number.
            labels: What every series of ours has.
        """
        self._client = client
        self._nodes = nodes
        self._labels = labels

    def targets(self, query: Query) -> Iterator[Target]:
        """Yield what is asked for, in groups that the database takes at once; nothing for what is no series."""
        scope, nodes, subjects = query.scope, query.nodes, query.subjects
        if scope not in EXPOSED:
            return
        known = self._nodes().items()
        numbers = {node.name: number for number, node in known if nodes is None or number in nodes}
        of_nodes: list[Sequence[str] | None] = list(groups(numbers))
        if nodes is None and len(of_nodes) == 1:
            of_nodes = [None]
        of_subjects: list[Sequence[str] | None] = [None]
        if subjects is not None and subject_label(scope) is not None:
            of_subjects = list(groups(subjects))
        elif subjects is not None and "" not in subjects:
            of_subjects = []
        for names in of_nodes:
            for some in of_subjects:
                yield Target(scope, names, some, numbers, query.deadline)

    def days(
        self, targets: Sequence[Target], metrics: Sequence[str], start: int, end: int
    ) -> Iterator[tuple[int, int]]:
        """A long time without the days of which there is nothing, in order."""
        if end - start <= _FEW_DAYS:
            if start < end:
                yield start, end
            return
        found: set[int] = set()
        selectors = {
            self._selector(target, metric): target.deadline for target in targets for metric in metrics
        }
        for select, deadline in selectors.items():
            for piece in step_pieces(start // DAY * DAY, -(-end // DAY) * DAY, 1000 * DAY, 1):
                count = _COUNT_OF_DAYS.format(select)
                for track in self._client.range(count, **_moments(piece), deadline=deadline):
                    found.update((_whole(track.times) // DAY).tolist())
        for day in sorted(found):
            yield max(start, day * DAY), min(end, (day + 1) * DAY)

    def raw(self, target: Target, metric: str, start: int, end: int) -> Iterator[Line]:
        """Every sample in `[start, end)`, each once however often it was written; a series may come in several pieces."""
        select, factor = self._selector(target, metric), CATALOGUE[target.scope][metric].prometheus_factor
        for first, until in raw_pieces(start, end, target.series):
            tracks = self._client.matrix(
                f"{select}[{until - first}ms]", (until - 1) / 1000, deadline=target.deadline
            )
            for key, found in _by_key(target, tracks).items():
                times, places = np.unique(
                    np.concatenate([_whole(track.times) for track in found]), return_index=True
                )
                values = np.concatenate([track.values for track in found])[places]
                kept = (times >= first) & (times < until) & ~np.isnan(values)
                if kept.any():
                    yield Line(key, times[kept], values[kept] / factor)

    def evaluated(
        self, target: Target, metric: str, expression: str, pieces: Iterable[Piece]
    ) -> dict[Signature, Line]:
        """What an expression comes to, by series; times are the moments at which it was looked at.

        Args:
            target: Whose series.
            metric: Of the catalogue.
            expression: With `{0}` where the selector goes, and `{1}` for the length of the window in milliseconds.
            pieces: When to look.
        """
        select = self._selector(target, metric)
        found: dict[Signature, list[Track]] = {}
        for piece in pieces:
            query = expression.format(select, piece.window)
            for track in self._client.range(query, **_moments(piece), deadline=target.deadline):
                found.setdefault(_signature(track), []).append(track)
        lines = {}
        for signature, tracks in found.items():
            key = target.key(tracks[0].labels)
            if key is not None:
                times = _whole(np.concatenate([track.times for track in tracks]))
                lines[signature] = Line(key, times, np.concatenate([track.values for track in tracks]))
        return lines

    def _selector(self, target: Target, metric: str) -> str:
        return selector(
            target.scope, metric, nodes=target.names, subjects=target.subjects, labels=self._labels
        )


def _moments(piece: Piece) -> dict[str, float]:
    return {"start": piece.first / 1000, "end": piece.last / 1000, "step": piece.step / 1000}


def _by_key(target: Target, tracks: Iterable[Track]) -> dict[SeriesKey, list[Track]]:
    found: dict[SeriesKey, list[Track]] = {}
    for track in tracks:
        key = target.key(track.labels)
        if key is not None:
            found.setdefault(key, []).append(track)
    return found


def _signature(track: Track) -> Signature:
    """Without the name, which some time-series databases leave out of what they compute."""
    return frozenset(item for item in track.labels.items() if item[0] != "__name__")


def _whole(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(seconds * 1000).astype(np.int64)
