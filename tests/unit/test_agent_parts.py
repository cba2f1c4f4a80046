"""Small parts of an agent: addresses, identities, batches, the end of sampling."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from gpulse.cluster.agent.agent import AgentConfig, _Agent
from gpulse.cluster.agent.buffer import Kept
from gpulse.cluster.agent.changes import Changes
from gpulse.cluster.agent.identity import read_identity, safe_name
from gpulse.cluster.agent.link import LinkConfig
from gpulse.cluster.agent.stream import _of_one_clock, printable
from gpulse.cluster.agent.taker import Taker
from gpulse.cluster.client.address import agent_address
from gpulse.cluster.wire_pb2 import Settings
from gpulse.errors import UsageError
from gpulse.model.frame import Frame
from gpulse.sources.simulated import DemoMachine


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("head", "head:8090"),
        ("head:1234", "head:1234"),
        ("10.0.0.1", "10.0.0.1:8090"),
        ("::1", "[::1]:8090"),
        ("[::1]", "[::1]:8090"),
        ("[fe80::1%eth0]:9000", "[fe80::1%eth0]:9000"),
        ("2001:db8::7", "[2001:db8::7]:8090"),
    ],
)
def test_addresses(address: str, target: str) -> None:
    """The port may be missing, and IPv6 may lack its brackets."""

    assert target == agent_address(address).target


@pytest.mark.parametrize(
    "address", ["", ":8090", "head:", "head:0", "head:99999", "http://head:1", "a b", "[::1"]
)
def test_what_is_no_address(address: str) -> None:
    """It is refused before anything starts."""

    with pytest.raises(UsageError, match="address"):
        agent_address(address)


def test_an_identity_stays(tmp_path: Path) -> None:
    """Two agents of one machine differ in their instance alone, and each keeps its own."""

    machine = tmp_path / "machine-id"  # minimal systems have none of their own
    machine.write_text("0123456789abcdef\n")
    one, two = (
        read_identity(tmp_path / "a", machine_file=machine),
        read_identity(tmp_path / "b", name="n", machine_file=machine),
    )
    assert one == read_identity(tmp_path / "a", machine_file=machine)
    assert one.instance != two.instance
    assert (one.machine, one.boot, "n") == (two.machine, two.boot, two.host)


def test_a_machine_id_of_ones_own(tmp_path: Path) -> None:
    """From a file, which must hold something."""

    path = tmp_path / "id"
    path.write_text("box-7\n")
    assert "box-7" == read_identity(tmp_path, machine_file=path).machine
    path.write_text("")
    with pytest.raises(UsageError, match="no machine id"):
        read_identity(tmp_path, machine_file=path)


def test_state_directories_stay_where_they_belong() -> None:
    """Whatever a host or head is called."""

    assert "head_8090" == safe_name("head:8090")
    assert "_.._etc" == safe_name("../../etc")[-7:]
    assert all(
        "/" not in safe_name(name) and safe_name(name) not in ("", ".", "..") for name in ("..", "", "/", ".")
    )


def test_a_batch_ends_at_a_step_of_the_clock() -> None:
    """It has one relation between wall clock and monotonic clock."""

    frames = [Kept(number, b"", (), offset) for number, offset in enumerate([0, 10, 900_000, 3_600_000_000])]
    assert frames[:3] == _of_one_clock(frames)
    assert frames[3:] == _of_one_clock(frames[3:])


def test_words_of_a_head_are_harmless() -> None:
    """No control character of another machine reaches a terminal."""

    assert "a?[31mb" == printable("a\x1b[31mb")


class _Failing:
    """A machine that can no longer be read once it is told so."""

    def __init__(self) -> None:
        self._machine = DemoMachine(time.time() - 5)
        self.is_broken = False

    def sample(self, now: float) -> Frame:
        """A frame, or an error of the system."""
        if self.is_broken:
            raise OSError(24, "Too many open files")
        return self._machine.sample(now)

    def close(self) -> None:
        """Let the machine go."""
        self._machine.close()


def test_a_last_frame_that_cannot_be_taken_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """The thread ends as it should, and prints no traceback."""

    source, first = _Failing(), threading.Event()
    taker = Taker(
        source,
        60.0,
        changes=Changes(version="1", pid=1, full_commands=False),
        taken=lambda *_: first.set(),
        ended=lambda: None,
        diagnosis=False,
    )
    taker.start()
    assert first.wait(60)
    source.is_broken = True
    taker.stop()

    assert taker.join(60)
    assert taker.error is None
    assert "the last frame could not be taken: [Errno 24] Too many open files" in caplog.text


async def test_pcie_traffic_is_measured_when_the_head_wants_it(tmp_path: Path) -> None:
    """Whoever reads the GPUs is told so with every change of the settings."""

    wanted: list[bool] = []
    machine = DemoMachine(time.time())
    config = AgentConfig(LinkConfig("127.0.0.1:1"), tmp_path, interval_seconds=1.0)
    agent = _Agent(config, machine, asyncio.Event(), wanted.append)
    for bandwidth in (False, True):
        agent._settings(Settings(interval_ms=1000, bandwidth=bandwidth))
    machine.close()

    assert [False, True] == wanted
