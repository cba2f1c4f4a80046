from __future__ import annotations

from collections.abc import Callable

import cramjam
import pytest

from gpulse.store.tsdb.request_builder import BlockSeries
from gpulse.store.tsdb.write_client import ConnectionFailed, WriteResponse
from gpulse.store.tsdb.write_delivery import MUTED_SECONDS, Delivery, Unavailable, WriteRejected
from gpulse.store.tsdb.write_request import (
    encode_labels,
    encode_series,
    format_labels,
    series_labels,
    split_series,
)

_OK = WriteResponse(204, "")


class FakePoster:
    """A time-series database that takes requests whose series are all fine."""

    def __init__(self, judge: Callable[[list[str]], WriteResponse]) -> None:
        self._judge = judge
        self.posts = 0
        self.taken: list[str] = []

    def post(self, body: bytes) -> WriteResponse:
        """Take a request, or not."""
        self.posts += 1
        series = split_series(bytes(cramjam.snappy.decompress_raw(body)))
        names = [format_labels(series_labels(one)) for one in series]
        answer = self._judge(names)
        if answer.status == 204:
            self.taken += names
        return answer


class Bench:
    """A delivery to a time-series database that judges."""

    def __init__(self, judge: Callable[[list[str]], WriteResponse]) -> None:
        self.poster = FakePoster(judge)
        self.now = 0.0
        self.delivery = Delivery(self.poster, now=lambda: self.now)  # type: ignore[arg-type]


def part(node: int, *names: str) -> BlockSeries:
    """A block of some series."""
    series = [encode_series(encode_labels({"__name__": name, "node": str(node)})) for name in names]
    return BlockSeries(node, 1, b"".join(series), len(series))


def unless(bad: str, answer: WriteResponse) -> Callable[[list[str]], WriteResponse]:
    """Refuses requests that have a series with these words in it."""
    return lambda names: answer if any(bad in name for name in names) else _OK


def test_what_is_taken_is_counted() -> None:
    """One request for all parts."""

    bench = Bench(lambda _: _OK)

    bench.delivery.send([part(1, "a", "b"), part(2, "a")])

    assert (1, 3, 0) == (bench.poster.posts, bench.delivery.samples_total, bench.delivery.refused_total)


def test_a_series_that_is_refused_costs_no_other() -> None:
    """The request is divided until the refused one stands alone, and it is told which one that is."""

    bench = Bench(unless("bad", WriteResponse(400, "label value too long")))

    bench.delivery.send([part(node, "a", "b", "bad" if node == 5 else "c") for node in range(20)])

    assert (59, 1) == (len(bench.poster.taken), bench.delivery.refused_total)
    assert [("bad{node='5'}", "label value too long", 1, False)] == bench.delivery.refusals


def test_a_refused_series_is_left_out_for_a_minute() -> None:
    """It would cost a dozen requests each time."""

    bench = Bench(unless("bad", WriteResponse(400, "too many series")))
    parts = [part(node, "a", "bad" if node == 5 else "c") for node in range(20)]
    bench.delivery.send(parts)

    before = bench.poster.posts
    bench.delivery.send(parts)
    assert (1, 2) == (bench.poster.posts - before, bench.delivery.refused_total)

    bench.now = MUTED_SECONDS + 1
    bench.delivery.send(parts)
    assert bench.poster.posts - before > 3
    assert 3 == bench.delivery.refused_total


def test_what_is_too_late_is_given_up_by_the_block() -> None:
    """All series of a frame have the same time: none of them is asked about alone, or left out later."""

    bench = Bench(unless("node='5'", WriteResponse(400, "out of order sample")))
    parts = [part(node, "a", "b", "c") for node in range(8)]

    bench.delivery.send(parts)

    assert (21, 3) == (len(bench.poster.taken), bench.delivery.refused_total)
    assert [True] == [refusal.is_late for refusal in bench.delivery.refusals]
    assert bench.poster.posts <= 7


def test_a_request_that_a_database_has_already_is_not_divided() -> None:
    """What is sent again is refused by databases that mind, as a whole."""

    bench = Bench(lambda _: WriteResponse(400, "out of order sample"))

    bench.delivery.send([part(node, "a") for node in range(8)], is_repeated=True)

    assert (1, 0) == (bench.poster.posts, bench.delivery.refused_total)


def test_a_database_that_refuses_everything_has_another_reason() -> None:
    """Nothing is given up then, and it is found out with few requests."""

    bench = Bench(lambda _: WriteResponse(400, "unsupported path requested"))

    with pytest.raises(WriteRejected, match="unsupported path") as raised:
        bench.delivery.send([part(node, "a", "b", "c") for node in range(5000)])

    assert "check that --remote-write" in (raised.value.hint or "")
    assert bench.poster.posts < 40
    assert (0, []) == (bench.delivery.refused_total, bench.delivery.refusals)


def test_a_request_that_nobody_ever_takes_is_given_up_in_the_end() -> None:
    """Whoever decides that it has been tried often enough may go on."""

    bench = Bench(lambda _: WriteResponse(400, "no"))
    with pytest.raises(WriteRejected):
        bench.delivery.send([part(1, "a", "b")])

    bench.delivery.send([part(1, "a", "b")], skips_refused=True)

    assert 2 == bench.delivery.refused_total


@pytest.mark.parametrize("status", [401, 403, 404, 302, 405])
def test_a_closed_door_is_no_reason_to_divide(status: int) -> None:
    """The address or the credentials are wrong, not the samples."""

    bench = Bench(lambda _: WriteResponse(status, "no", location="https://other/write"))

    with pytest.raises(WriteRejected, match=f"HTTP {status}") as raised:
        bench.delivery.send([part(1, "a"), part(2, "a")])

    words = {401: "--remote-headers", 403: "--remote-headers", 302: "https://other/write"}
    assert words.get(status, "--remote-write") in (raised.value.hint or "")
    assert 1 == bench.poster.posts


def test_a_database_that_wants_time_gets_it() -> None:
    """What it asks for is honoured, within bounds."""

    for status, asked, wait in ((429, 7.0, 7.0), (503, 86_400.0, 300.0), (500, None, None)):
        bench = Bench(lambda _, a=asked, s=status: WriteResponse(s, "busy", retry_after=a))  # type: ignore[misc]
        with pytest.raises(Unavailable, match=f"HTTP {status}") as raised:
            bench.delivery.send([part(1, "a")])
        assert (wait, False) == (raised.value.wait_seconds, raised.value.hard)


def test_a_proxy_that_takes_less_gets_less() -> None:
    """A request that is too long is divided, and the next ones are shorter."""

    bench = Bench(lambda names: WriteResponse(413, "too large") if len(names) > 10 else _OK)
    before = bench.delivery.max_request_bytes

    bench.delivery.send([part(node, "a", "b") for node in range(20)])

    assert 40 == len(bench.poster.taken)
    assert bench.delivery.max_request_bytes < before


def test_a_database_that_dies_meanwhile_is_sent_all_of_it_again() -> None:
    """A broken connection in the middle of dividing is a failure like any other."""

    posts: list[int] = []

    def judge(names: list[str]) -> WriteResponse:
        posts.append(len(names))
        if len(posts) == 3:
            raise ConnectionFailed("gone", hint=None, hard=True)
        return WriteResponse(400, "label value too long")

    with pytest.raises(Unavailable) as raised:
        Bench(judge).delivery.send([part(node, "a") for node in range(64)])
    assert raised.value.hard
