"""Several connections to a time-series database; the samples of one node always take the same one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from gpulse.store.tsdb.config import TsdbConfig, TsdbError
from gpulse.store.tsdb.delivery import Delivery, Refusal, Unavailable
from gpulse.store.tsdb.requests import Part
from gpulse.store.tsdb.write_client import Poster

_LANES = 4


class Lanes:
    """Sends requests in parts by node, and returns when all of them are settled."""

    def __init__(self, config: TsdbConfig) -> None:
        self._posters = [Poster(config) for _ in range(_LANES)]
        self._deliveries = [Delivery(poster) for poster in self._posters]
        self._threads = ThreadPoolExecutor(_LANES, "lane")

    @property
    def most_bytes(self) -> int:
        """How long a request of all lanes may be, about."""
        return min(delivery.most_bytes for delivery in self._deliveries)

    @property
    def samples_total(self) -> int:
        """How many samples were taken."""
        return sum(delivery.samples_total for delivery in self._deliveries)

    @property
    def refused_total(self) -> int:
        """How many samples were not."""
        return sum(delivery.refused_total for delivery in self._deliveries)

    def take_refusals(self) -> list[Refusal]:
        """What was refused since this was last asked."""
        found: list[Refusal] = []
        for delivery in self._deliveries:
            found += delivery.refusals
            delivery.refusals = []
        return found

    def send(self, parts: Sequence[Part], *, is_repeated: bool, must_move: bool) -> None:
        """Send parts, those of a node in their order.

        Raises:
            Unavailable: Not now: some of them may have been taken.
            Shut: Not at all.
        """
        lots: list[list[Part]] = [[] for _ in self._deliveries]
        for part in parts:
            lots[part.node % _LANES].append(part)
        waiting = [
            self._threads.submit(delivery.send, lot, is_repeated=is_repeated, must_move=must_move)
            for delivery, lot in zip(self._deliveries, lots, strict=True)
            if lot
        ]
        errors: list[TsdbError] = []
        for sent in waiting:
            try:
                sent.result()
            except TsdbError as error:
                errors.append(error)
        if errors:
            raise next((error for error in errors if isinstance(error, Unavailable)), errors[0])

    def started(self) -> float | None:
        """When the time-series database was started, None when it does not say."""
        return self._posters[0].started()

    def close(self) -> None:
        """Let go of the connections."""
        self._threads.shutdown()
        for poster in self._posters:
            poster.close()
