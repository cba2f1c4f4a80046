"""Small parts of an agent: addresses, identities, batches, the end of sampling."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpulse.cluster.agent.agent import AgentConfig, _Agent
from gpulse.cluster.agent.connection import ConnectionConfig
from gpulse.cluster.agent.event_detector import EventDetector
from gpulse.cluster.agent.frame_buffer import BufferedFrame
from gpulse.cluster.agent.frame_stream import _until_clock_step
from gpulse.cluster.agent.identity import read_identity, safe_path_part
from gpulse.cluster.agent.sampling_thread import SamplingThread
from gpulse.cluster.client.transport import parse_agent_address
from gpulse.cluster.wire_pb2 import Settings
from gpulse.errors import UsageError
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.sources.demo_machine import DemoMachine


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

    assert target == parse_agent_address(address).target


@pytest.mark.parametrize(
    "address", ["", ":8090", "head:", "head:0", "head:99999", "http://head:1", "a b", "[::1"]
)
def test_what_is_no_address(address: str) -> None:
    """It is refused before anything starts."""

    with pytest.raises(UsageError, match="address"):
        parse_agent_address(address)


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
    with pytest.raises(UsageError, match="cannot read a machine ID"):
        read_identity(tmp_path, machine_file=path)


def test_state_directories_stay_where_they_belong() -> None:
    """Whatever a host or head is called."""

    assert "head_8090" == safe_path_part("head:8090")
    assert "_.._etc" == safe_path_part("../../etc")[-7:]
    assert all(
        "/" not in safe_path_part(name) and safe_path_part(name) not in ("", ".", "..")
        for name in ("..", "", "/", ".")
    )


def test_a_batch_ends_at_a_step_of_the_clock() -> None:
    """It has one relation between wall clock and monotonic clock."""

    frames = [
        BufferedFrame(number, b"", (), offset)
        for number, offset in enumerate([0, 10, 900_000, 3_600_000_000])
    ]
    assert frames[:3] == _until_clock_step(frames)
    assert frames[3:] == _until_clock_step(frames[3:])


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
    sampling = SamplingThread(
        source,
        60.0,
        changes=EventDetector(version="1", pid=1, full_commands=False),
        taken=lambda *_: first.set(),
        ended=lambda: None,
        diagnosis=False,
    )
    sampling.start()
    assert first.wait(60)
    source.is_broken = True
    sampling.stop()

    assert sampling.join(60)
    assert sampling.error is None
    assert "cannot take the last sample: [Errno 24] Too many open files" in caplog.text


def test_lines_that_cannot_be_found_end_the_lines_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The diagnosis goes on."""
    machine, diagnosed, lines = DemoMachine(1_800_000_000.0), [], BrokenLines()
    sampling = SamplingThread(
        machine,
        60.0,
        changes=EventDetector(version="0", pid=1),
        taken=lambda *_: None,
        ended=lambda: None,
        lines=lines,  # type: ignore[arg-type]
        seen=lambda frame, findings, _: diagnosed.append((frame.time, findings)),
    )
    for second in range(3):
        sampling._take(machine.sample(1_800_000_000.0 + second))

    assert 1 == lines.calls
    assert 3 == len(diagnosed)
    assert sampling._monitor is not None
    assert ["cannot find lines of code because of a bug in gpulse; continuing without them"] == [
        each.message for each in caplog.records
    ]


class BrokenLines:
    """Lines of code with a bug."""

    calls = 0

    def __call__(self, _frame: Frame, _findings: object) -> list[Finding]:
        """Fail."""
        self.calls += 1
        raise RuntimeError("out of threads")


async def test_pcie_traffic_is_measured_when_the_head_wants_it(tmp_path: Path) -> None:
    """Whoever reads the GPUs is told so with every change of the settings."""

    wanted: list[bool] = []
    machine = DemoMachine(time.time())
    config = AgentConfig(ConnectionConfig("127.0.0.1:1"), tmp_path, interval_seconds=1.0)
    agent = _Agent(config, machine, asyncio.Event(), wanted.append)
    for bandwidth in (False, True):
        agent._on_settings(Settings(interval_ms=1000, bandwidth=bandwidth))
    machine.close()

    assert [False, True] == wanted


def test_an_agent_loads_only_what_it_needs() -> None:
    """OpenSSL, msgspec and web servers would take a sixth of its memory; hashes and TLS still work without OpenSSL at first."""

    code = (
        "import sys; from gpulse.cli.main import VERBS; VERBS['agent'].load()\n"
        "print(sorted({'ssl', '_hashlib', 'msgspec', 'http.client', 'numpy', 'shutil'} & set(sys.modules)))\n"
        "import hashlib, ssl; print(hashlib.sha256(b'a').hexdigest()[:8], hasattr(ssl, 'SSLContext'))"
    )

    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert ["[]", "ca978112 True"] == said.splitlines()
