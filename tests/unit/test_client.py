"""Asking a head: addresses, refusals in words that help, and files that arrive whole."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulse.cluster.client.head_client import HeadClient
from gpulse.cluster.client.transport import HeadAddress, HeadNotAnsweringError, Reply, parse_address
from gpulse.cluster.protocol.answers import Status
from gpulse.errors import GpulseError, RefusedError, UsageError

HERE = HeadAddress("grpc", "localhost", 8090)


class FakeLink:
    """Answers with what it was given, one after the other."""

    def __init__(self, *answers: Reply) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.closed = False

    def ask(self, operation: str, body: Mapping[str, Any]) -> Reply:
        """The next answer."""
        self.asked.append((operation, body))
        return self._answers.pop(0)

    def fetch(self, body: Mapping[str, Any]) -> Iterator[Reply]:
        """All answers."""
        self.asked.append(("download", body))
        yield from self._answers

    def close(self) -> None:
        """Note it."""
        self.closed = True


def said(status: int, **document: Any) -> Reply:
    """What a head would say."""
    return Reply(status, json.dumps(document).encode())


def test_an_address_may_be_written_in_many_ways() -> None:
    """Ports default to the transport's, IPv6 addresses need brackets only before a port."""
    assert HeadAddress("grpc", "gpu-head", 8090) == parse_address("gpu-head")
    assert HeadAddress("http", "gpu-head", 8091) == parse_address("gpu-head", "http")
    assert HeadAddress("grpc", "10.0.0.7", 9000) == parse_address("10.0.0.7:9000")
    assert HeadAddress("grpc", "::1", 8090) == parse_address("::1")
    assert HeadAddress("grpc", "::1", 9000) == parse_address("[::1]:9000")
    assert HeadAddress("http", "fe80::1%eth0", 8091) == parse_address("[fe80::1%eth0]", "http")
    assert HeadAddress("http", "gpu-head", 80) == parse_address("http://gpu-head:80/")
    assert HeadAddress("http", "gpu-head", 8091, tls=True) == parse_address("https://gpu-head")


@pytest.mark.parametrize(
    "text", ["", " ", "a b", "host:", "host:0", "host:65536", "host:http", "[::1", "ftp://host", "a/b", "-x"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """The error shows what an address looks like."""
    with pytest.raises(UsageError) as caught:
        parse_address(text)

    assert "HOST" in (caught.value.hint or "")


@given(st.text(max_size=40))
@example("::")
@example("[]:1")
def test_any_text_is_an_address_or_refused(text: str) -> None:
    """Nothing else can happen, and what is an address reads the same again."""
    try:
        address = parse_address(text)
    except UsageError:
        return

    assert address._replace(tls=False) == parse_address(address.target, address.transport)._replace(tls=False)


def test_a_head_that_listens_everywhere_is_found_here() -> None:
    """Nobody can connect to 0.0.0.0."""
    assert "localhost:8090" == parse_address("0.0.0.0:8090").reachable().target
    assert "localhost:8090" == parse_address("[::]:8090").reachable().target
    assert "10.0.0.7:8090" == parse_address("10.0.0.7").reachable().target


def test_an_answer_is_a_document() -> None:
    """The operation and its fields go out as they are."""
    link = FakeLink(said(200, success=True))

    with HeadClient(link, HERE) as client:
        assert {"success": True} == client.call("start", dict, {"name": "a"})

    assert [("start", {"name": "a"})] == link.asked
    assert link.closed


def test_a_refusal_keeps_its_words_and_its_hint() -> None:
    """What the head says is what people read."""
    client = HeadClient(FakeLink(said(409, error="it is active already", hint="stop it first")), HERE)

    with pytest.raises(RefusedError) as caught:
        client.call("start", dict, {"name": "a"})

    assert (409, "it is active already", "stop it first") == (
        caught.value.status,
        caught.value.message,
        caught.value.hint,
    )


def test_a_missing_token_says_how_to_get_it() -> None:
    """From another machine with the command that copies it; on the head's own machine it is another user's."""
    for address, helps in (
        (
            HeadAddress("grpc", "gpu-head", 8090),
            "mkdir -p ~/.config/gpulse && scp gpu-head:.config/gpulse/token ~/.config/gpulse/token",
        ),
        (HERE, "have that user run `gpulse token --show`"),
    ):
        refusal = said(401, error="this head needs a token", hint="something else")
        with pytest.raises(RefusedError) as caught:
            HeadClient(FakeLink(refusal), address).call("status", dict)
        assert helps in (caught.value.hint or "")


def test_an_older_head_is_named_with_both_versions() -> None:
    """An operation that a head does not know means that it is of another version."""
    link = FakeLink(said(404, error="there is no operation 'future'", hint=None), said(200, version="0.0.1"))

    with pytest.raises(
        GpulseError, match=r"does not support 'future': it runs gpulse 0\.0\.1, but this is gpulse"
    ):
        HeadClient(link, HERE).call("future", dict)


@pytest.mark.parametrize("body", [b"<html>", b"", b"[1]", b"\xff", b"{}"])
def test_something_else_than_a_head_is_told(body: bytes) -> None:
    """An answer that no head gives says to check the address."""
    with pytest.raises(GpulseError, match="not a gpulse head"):
        HeadClient(FakeLink(Reply(502, body)), HERE).call("status", dict)


@pytest.mark.parametrize("body", [b"<html>", b"", b"\xff"])
def test_a_page_is_no_answer(body: bytes) -> None:
    """Also where its status is one of a good answer."""
    with pytest.raises(GpulseError, match="not a gpulse head"):
        HeadClient(FakeLink(Reply(200, body)), HERE).call("status", Status)


@pytest.mark.parametrize("body", [b"[1]", b"{}", b'{"freq": "often"}'])
def test_an_answer_of_another_version_is_told(body: bytes) -> None:
    """It says which answer cannot be read, and what to do."""
    with pytest.raises(
        HeadNotAnsweringError, match=r"cannot decode the answer of the head at .* to 'status': "
    ) as caught:
        HeadClient(FakeLink(Reply(200, body)), HERE).call("status", Status)

    assert "install the same version of gpulse here and on the head" == caught.value.hint


def test_a_file_arrives_piece_by_piece() -> None:
    """Whoever waits is told how far it is."""
    file, sizes = io.BytesIO(), list[int]()
    link = FakeLink(Reply(200, b"abc"), Reply(200, b"de"))

    assert 5 == HeadClient(link, HERE).download("a", "csv", file, sizes.append)
    assert b"abcde" == file.getvalue()
    assert [3, 5] == sizes
    assert [("download", {"name": "a", "format": "csv"})] == link.asked


def test_a_file_that_fails_half_way_is_no_file() -> None:
    """What the head says in the middle is an error, not data."""
    link = FakeLink(Reply(200, b"abc"), said(500, error="the disk is broken", hint=None))

    with pytest.raises(RefusedError, match="the disk is broken"):
        HeadClient(link, HERE).download("a", "json", io.BytesIO())
