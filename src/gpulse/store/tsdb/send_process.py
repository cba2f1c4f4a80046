"""The process that sends the log to a time-series database: `python -m gpulse.store.tsdb.send_process DATA_DIR`.

The first line of its standard input says where the time-series database is, every other up to which position the log is on disk. It tells
how it stands with one JSON object a line. When its input ends it sends what is there, unless the time-series database is away, and ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from gpulse.errors import GpulseError
from gpulse.store.log.reader import LogReader
from gpulse.store.metadata.lookup import MetadataLookup
from gpulse.store.metadata.metadata import METADATA_FILE
from gpulse.store.tsdb.config import TsdbConfig
from gpulse.store.tsdb.connections import Lanes
from gpulse.store.tsdb.cursor import log_number, read_place, write_place
from gpulse.store.tsdb.delivery import Shut, Unavailable
from gpulse.store.tsdb.durable_mark import Wakes
from gpulse.store.tsdb.layout_cache import LayoutCache
from gpulse.store.tsdb.log_follower import LogFollower, Round
from gpulse.store.tsdb.requests import Part, Requests
from gpulse.store.tsdb.resend_window import Overlap
from gpulse.store.tsdb.state import RemoteState, Sending
from gpulse.store.tsdb.write_client import shown_url

_PR_SET_PDEATHSIG = 1
_NICE = 5
_TELL_SECONDS = 1.0
_START_SECONDS = 15.0
"""How often the time-series database is asked whether it is still the same."""
_UNTOLD_SECONDS = 60.0
"""So much rarer it is asked when it does not say."""
_FIRST_WAIT_SECONDS, _MAX_WAIT_SECONDS = 0.25, 10.0
_SHUT_SECONDS = 10.0
_PATIENCE = 30
"""So often a request is tried that the time-series database refuses as a whole, if it has taken others."""
_BEHIND_SECONDS = 10.0
_TOLD_SECONDS = 60.0
_REFUSED_HINT = "everything else is taken; its limits and its own log say more"
_LATE_HINT = (
    "nodes that were away send what is older than what the time-series database has: "
    "Prometheus takes it with storage.tsdb.out_of_order_time_window"
)
_UNREADABLE_HINT = "this head has them; a newer gpulse may have written them"
_END_SECONDS = 2.5
"""So long it goes on at most when it is told to end."""


class Sender:
    """Sends what comes, from where it was before."""

    def __init__(
        self, data_dir: str, config: TsdbConfig, wakes: Wakes, say: Callable[[dict[str, Any]], None]
    ) -> None:
        """Begin where it was left.

        Args:
            data_dir: Where the log is.
            config: Where to send it.
            wakes: What the head says.
            say: Tells the head how it stands.

        Raises:
            GpulseError: The log cannot be read.
        """
        self._data_dir = data_dir
        self._say = say
        self._wakes = wakes
        self._url = shown_url(config.write_url)
        self._log_id = log_number(f"{data_dir}/log")
        place = read_place(data_dir, self._url, self._log_id)
        log = LogReader(f"{data_dir}/log")
        begin = place.position or log.first - 1
        self._begun = place.begun if place.position else begin
        self._overlap = Overlap(begin, place.ends)
        self._tail = LogFollower(log, begin)
        self._requests = Requests(
            LayoutCache(log, MetadataLookup(f"{data_dir}/{METADATA_FILE}")), dict(config.labels)
        )
        self._lanes = Lanes(config)
        self._state: Sending = "ok"
        self._error: GpulseError | None = None
        self._since = time.time()
        self._refused: tuple[float, str, str] | None = None
        self._received: float | None = None
        self._failures = 0
        self._shut = 0
        self._lost = self._resent = self._passed = self._unreadable = 0
        self._started: float | None = None
        self._asked = self._told = -_START_SECONDS
        self._told_reached = -1
        self._kept: tuple[int, list[int], int] | None = None

    def run(self) -> None:
        """Send until the input ends, and let go of everything."""
        try:
            self._run()
        finally:
            self._lanes.close()
            self._tail.close()

    def _run(self) -> None:
        while not self._is_over():
            bound = self._wakes.bound
            try:
                if not self._step(bound):
                    self._tell(at_once=self._overlap.reached != self._told_reached)
                    if self._wakes.ended is not None:
                        break
                    self._wakes.wait(_TELL_SECONDS, after=bound)
            except Unavailable as error:
                self._unavailable(error)
            except Shut as error:
                self._refuse(error)
            except GpulseError as error:  # the disk, or the log
                self._turn("failing", error)
                self._rest(_SHUT_SECONDS)
                self._go_back()
        self._keep()

    def _is_over(self) -> bool:
        ended = self._wakes.ended
        return ended is not None and (
            self._state in {"failing", "refused"} or time.monotonic() - ended > _END_SECONDS
        )

    def _step(self, bound: int) -> bool:
        """Send one round of what is on disk up to a position; False when there is none."""
        now = time.monotonic()
        if self._overlap.due(now):
            self._overlap.rewind(now)
            self._go_back()
        self._check_engine(now)
        found = self._tail.take(bound, self._overlap.next_end())
        if found is None:
            return False
        if self._received is None:
            self._received = found.began
        was_asked = self._send(found)
        if found.missing:
            self._begun = max(self._begun, found.last)
        if found.last > self._passed:  # else it was counted before it was sent again
            self._lost += found.missing
            self._passed = found.last
        self._received = found.received or self._received
        self._overlap.confirmed(found.last, time.monotonic())
        if was_asked:  # else the time-series database had no chance to complain
            self._failures = self._shut = 0
            self._turn("behind" if self._waiting_seconds() > _BEHIND_SECONDS else "ok", None)
        self._tell()
        return True

    def _send(self, found: Round) -> bool:
        """Send a round; whether there was anything in it."""
        was_asked = False
        is_again = found.last <= self._overlap.furthest
        must_move = self._shut >= _PATIENCE and self._lanes.samples_total > 0
        before = self._lanes.samples_total
        for parts in self._pieces(found):
            self._lanes.send(parts, is_repeated=found.is_repeated, must_move=must_move)
            was_asked = True
        if is_again:
            self._resent += self._lanes.samples_total - before
        return was_asked

    def _pieces(self, found: Round) -> Iterator[list[Part]]:
        piece: list[Part] = []
        size = 0
        for part in self._requests.parts(found.entries):
            if piece and size + len(part.series) > self._lanes.most_bytes:
                yield piece
                piece, size = [], 0
            piece.append(part)
            size += len(part.series)
        if piece:
            yield piece

    def _check_engine(self, now: float) -> None:
        """See whether it was restarted without our noticing."""
        if now - self._asked < _START_SECONDS or self._failures:
            return
        self._asked = now
        started = self._lanes.started()
        if started is None:
            self._asked = now + _UNTOLD_SECONDS
            return
        before, self._started = self._started, started
        if before is not None and before != started:
            self._overlap.failed(now, hard=True)
            self._go_back()

    def _unavailable(self, error: Unavailable) -> None:
        self._started = None  # what is sent again from here on needs no second reason
        self._overlap.failed(time.monotonic(), hard=error.hard)
        self._go_back()
        self._turn("failing", error)
        wait = min(_MAX_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2 ** min(self._failures, 10))
        self._failures += 1
        self._rest(max(wait * random.uniform(0.7, 1.0), error.wait_seconds or 0.0))

    def _refuse(self, error: Shut) -> None:
        self._shut += 1
        self._overlap.failed(time.monotonic(), hard=False)
        self._go_back()
        self._turn("refused", error)
        self._rest(_SHUT_SECONDS)

    def _go_back(self) -> None:
        """Go on where it has to be sent again from."""
        self._tail.seek(self._overlap.reached)
        self._requests.begin_again()

    def _rest(self, seconds: float) -> None:
        """Wait before it is tried again, and go on telling how it stands."""
        until = time.monotonic() + seconds
        while self._wakes.ended is None and (left := until - time.monotonic()) > 0:
            self._tell()
            self._wakes.wait(min(left, _TELL_SECONDS))

    def _turn(self, state: Sending, error: GpulseError | None) -> None:
        if state != self._state:
            self._since = time.time()
            self._told = -_TELL_SECONDS
        self._state, self._error = state, error

    def _waiting_seconds(self) -> float:
        if self._received is None or self._wakes.bound <= self._overlap.furthest:
            return 0.0
        return max(0.0, time.time() - self._received)

    def _tell(self, *, at_once: bool = False) -> None:
        """Say how it stands, and keep where it is, once a second or when everything was sent."""
        now = time.monotonic()
        is_time = now - self._told >= _TELL_SECONDS
        if is_time:
            self._told = now
            self._keep()
        elif not at_once:
            return
        self._told_reached = self._overlap.reached
        error, hint = self._trouble(now)
        state = RemoteState(
            self._state,
            self._url,
            error,
            hint,
            self._since,
            self._tail.waiting_bytes,
            self._waiting_seconds(),
            self._lanes.samples_total,
            self._lanes.refused_total,
            self._lost,
            self._resent,
        )
        places = {"confirmed": self._overlap.safe, "reached": self._overlap.reached, "begun": self._begun}
        self._say({**state._asdict(), **places})

    def _trouble(self, now: float) -> tuple[str | None, str | None]:
        if self._error is not None:
            return self._error.message, self._error.hint
        refusals = self._lanes.take_refusals()
        if refusals:
            total = sum(refusal.samples for refusal in refusals)
            text = f"the time-series database does not take {total} samples, such as {refusals[0].series}: {refusals[0].reason}"
            self._refused = now, text, _LATE_HINT if refusals[0].is_late else _REFUSED_HINT
        elif self._requests.unreadable > self._unreadable:
            lost, self._unreadable = self._requests.unreadable - self._unreadable, self._requests.unreadable
            text = f"{lost} parts of frames cannot be sent: the log does not say any more what they are"
            self._refused = now, text, _UNREADABLE_HINT
        if self._refused is not None and now - self._refused[0] < _TOLD_SECONDS:
            return self._refused[1:]
        return self._requests.crowded, None

    def _keep(self) -> None:
        kept = self._overlap.safe, self._overlap.ends, self._begun
        if kept != self._kept:
            with suppress(GpulseError):  # the disk is full: what is sent again then is harmless
                write_place(self._data_dir, self._url, self._log_id, *kept)
                self._kept = kept


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def _listen(wakes: Wakes) -> None:
    for line in sys.stdin:
        with suppress(ValueError):
            wakes.hear(int(line))
    wakes.end()


def main(data_dir: str) -> int:
    """Send until there is nothing more to come."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the head, which then closes the input
    with suppress(OSError):
        os.nice(_NICE)
    first = sys.stdin.readline()
    if not first:
        return 0
    config = TsdbConfig(**json.loads(first))
    wakes = Wakes()
    threading.Thread(target=_listen, args=(wakes,), daemon=True).start()
    try:
        Sender(data_dir, config, wakes, _say).run()
    except BrokenPipeError:
        return 0  # nobody listens any more
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
