"""How people name several heads."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from gpulse.cli.head_client import HeadTarget
from gpulse.cluster.agent.identity import safe_path_part, state_directory_name
from gpulse.cluster.client.transport import parse_agent_addresses
from gpulse.deploy.deployment import head_slug
from gpulse.errors import UsageError


@pytest.fixture
def listening() -> Iterator[int]:
    """A port at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def silent() -> int:
    """A port at which nobody does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("a", ["a:8090"]),
        ("a,b:9000", ["a:8090", "b:9000"]),
        (" a:1 , [::1]:2,", ["a:1", "[::1]:2"]),
        ("b,a", ["b:8090", "a:8090"]),
    ],
)
def test_a_list(text: str, targets: list[str]) -> None:
    """Separated by commas, in the order that was written."""

    assert targets == [address.target for address in parse_agent_addresses(text)]


@pytest.mark.parametrize("text", ["a,http://b", "a,a:8090", "a;b", ",", ""])
def test_what_is_no_list(text: str) -> None:
    """Each of them must be an address for agents, and there is no use in one twice."""

    with pytest.raises(UsageError):
        parse_agent_addresses(text)


def test_state_is_kept_apart_by_the_whole_list() -> None:
    """What waits for one head is not sent to another list's; a single head has the directory it always had."""

    long = [f"head-{number}.cluster.example.org:8090" for number in range(10)]
    names = [
        state_directory_name(targets)
        for targets in (["a:1"], ["a:1", "b:2"], ["b:2", "a:1"], long, long[:-1])
    ]

    assert safe_path_part("a:1") == names[0]
    assert len(names) == len(set(names))
    assert all(len(name) <= 100 and "/" not in name for name in names)
    assert names[1] == head_slug("A:1, b:2")


def test_people_ask_the_first_that_listens(
    listening: int, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the first of all when none does, so that the error is about that one."""

    away, there = f"127.0.0.1:{silent}", f"127.0.0.1:{listening}"
    assert there == HeadTarget(f"{away},{there}").address().target
    assert away == HeadTarget(f"{away},{away}").address().target
    monkeypatch.setenv("GPULSE_HEAD", f"{away},{there}")
    assert there == HeadTarget().address().target
