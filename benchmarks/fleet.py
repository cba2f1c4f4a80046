"""A fleet of agents in one process: real connections to a real head, frames made of real recordings."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.http2_stream import Http2Stream
from gpulse._version import __version__
from gpulse.cluster import wire
from gpulse.cluster.agent.event_detector import EventDetector
from gpulse.cluster.wire_pb2 import AgentMessage, Batch, HeadMessage, Hello, Layout, Run
from gpulse.model.device import Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.frame_packing import FramePacker
from gpulse.model.packed_columns import ColumnBlock, PackedFrame, layout_id
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading
from gpulse.sources.recording_reader import Recording

RECORDINGS = Path(__file__).parents[1] / "tests/data/recordings"
_CONNECTING = 50
"""Agents that connect at the same time."""
_WELCOME_SECONDS = 60.0
_LAST_SECONDS = 10.0
"""How long to wait for the last acknowledgements."""
_BEGAN = 1_767_225_600.0
"""When the jobs of a fleet began."""


def host_name(number: int) -> str:
    """What a node of the fleet calls itself."""
    return f"node{number:04d}"


def machine_name(number: int) -> str:
    """What tells its machine from others."""
    return f"machine-{number}"


def gpu_uuid(number: int, place: int) -> str:
    """The name of one of its GPUs."""
    return f"GPU-{number:08x}-0000-0000-0000-{place:012x}"


class Script(NamedTuple):
    """What the agents of a fleet play: the layouts and the blocks of one node, second after second."""

    layouts: list[bytes]
    seconds: list[tuple[ColumnBlock, ...]]
    events: bytes = b""
    """What the first frame tells."""


def recorded(most: int, seconds: int) -> list[list[Frame]]:
    """Recordings of real runs, thinned to a frame a second."""
    runs = []
    for path in sorted(RECORDINGS.glob("*.jsonl.gz"))[:most]:
        thinned: list[Frame] = []
        for frame in Recording(path):
            if not thinned or frame.time - thinned[-1].time >= 0.95:
                thinned.append(frame)
        while len(thinned) < seconds:
            thinned += thinned
        runs.append(thinned[:seconds])
    return runs


def node_frames(
    number: int, runs: Sequence[Sequence[Frame]], gpus: int, seconds: int, *, jobs: bool = False
) -> list[Frame]:
    """The frames of one node, each of whose GPUs plays another recording; with a job on each when asked for."""
    frames = []
    for second in range(seconds):
        readings = []
        for place in range(gpus):
            run = runs[(number * gpus + place) % len(runs)]
            reading = run[(second + 7 * place) % len(run)].gpus[0]
            device = reading.device._replace(index=place, uuid=gpu_uuid(number, place))
            readings.append(GpuReading(device, reading.values, _jobs(place, second) if jobs else ()))
        base = runs[number % len(runs)][second % len(runs[number % len(runs)])]
        frames.append(
            base._replace(
                time=float(second),
                monotonic=float(second),
                node=Node(host_name(number)),
                gpus=tuple(readings),
                processes=_processes(number, gpus) if jobs else (),
            )
        )
    return frames


def _jobs(place: int, second: int) -> tuple[GpuProcess, ...]:
    return (GpuProcess(4000 + place, "compute", (20 + (second // 5) % 4) << 30, 0.5),)


def _processes(number: int, gpus: int) -> tuple[ProcessReading, ...]:
    owner = Owner(user=f"user{number % 12}", job=f"slurm:{700 + number}")
    return tuple(
        ProcessReading(
            ProcessIdentity(4000 + place, 1, _BEGAN, "python3", ("python3", "train.py"), owner),
            "R",
            {"cpu_percent": 98.0, "host_memory_bytes": 5 << 30},
            on_gpu=True,
        )
        for place in range(gpus)
    )


def scripts(agents: int, gpus: int, seconds: int, *, jobs: bool = False) -> list[Script]:
    """What every node plays: as many different ones as there are recordings, under names of their own."""
    runs = recorded(24, 60)
    patterns = [script(number, runs, gpus, seconds, jobs=jobs) for number in range(min(agents, len(runs)))]
    return [_renamed(patterns[number % len(runs)], number % len(runs), number) for number in range(agents)]


def _renamed(played: Script, before: int, number: int) -> Script:
    """The same for another node, whose GPUs are others."""
    layouts, names = [], {}
    for text in played.layouts:
        layouts.append(text.replace(f"GPU-{before:08x}-".encode(), f"GPU-{number:08x}-".encode()))
        names[layout_id(text)] = layout_id(layouts[-1])
    seconds = [
        tuple(ColumnBlock(names[block.layout], block.numbers) for block in blocks)
        for blocks in played.seconds
    ]
    return Script(layouts, seconds, played.events)


def script(
    number: int, runs: Sequence[Sequence[Frame]], gpus: int, seconds: int, *, jobs: bool = False
) -> Script:
    """What one node plays."""
    packer = FramePacker()
    layouts: list[bytes] = []
    played = []
    frames = node_frames(number, runs, gpus, seconds, jobs=jobs)
    for frame in frames:
        packed, new = packer.pack(frame)
        layouts += new
        played.append(packed.blocks)
    events = json.dumps(EventDetector(version=__version__, pid=1)(frames[0])).encode() if jobs else b""
    return Script(layouts, played, events)


class FleetAgent:
    """One connection."""

    def __init__(self, number: int, played: Script, token: str | None) -> None:
        self.number = number
        self.sent = 0
        self.durable = 0
        self.delays: list[tuple[float, float]] = []
        """When each frame was taken, and how long until it was acknowledged."""
        self._played = played
        self._metadata = () if token is None else ((wire.TOKEN_KEY, f"Bearer {token}"),)
        self._run = os.urandom(wire.RUN_BYTES)
        self._taken: deque[tuple[int, float]] = deque()
        self._stream: Http2Stream
        self._is_welcome = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether the head has ended the stream."""
        return self._stream.has_ended

    async def connect(self, address: str) -> None:
        """Connect, and send everything that comes before the first frame."""
        self._stream = await Http2Stream.connect(address, wire.STREAM, self._metadata, self._receive)
        self._stream.send(AgentMessage(hello=self._hello()).SerializeToString())
        async with asyncio.timeout(_WELCOME_SECONDS):
            await self._is_welcome.wait()
        for text in self._played.layouts:
            self._stream.send(AgentMessage(layout=Layout(text=text)).SerializeToString())

    def _hello(self) -> Hello:
        return Hello(
            protocol=wire.PROTOCOL,
            version=__version__,
            host=host_name(self.number),
            machine=machine_name(self.number),
            boot="boot",
            instance="one",
            pid=1,
            node=json.dumps({}).encode(),
            time_us=round(time.time() * 1e6),
            monotonic_us=round(time.monotonic() * 1e6),
            runs=[Run(id=self._run, first_kept=1)],
        )

    def send(self) -> None:
        """Send the next frame."""
        now = time.time()
        monotonic_us = round(time.monotonic() * 1e6)
        blocks = self._played.seconds[self.sent % len(self._played.seconds)]
        events = b"" if self.sent else self._played.events
        frame = PackedFrame(round(now * 1e6), monotonic_us, blocks, events)
        self.sent += 1
        self._taken.append((self.sent, now))
        batch = Batch(
            run=self._run, first=self.sent, count=1, sent_monotonic_us=monotonic_us, frames=frame.to_bytes()
        )
        self._stream.send(AgentMessage(batch=batch).SerializeToString())

    def close(self) -> None:
        """Disconnect."""
        self._stream.close()

    def _receive(self, data: bytes) -> None:
        message = HeadMessage.FromString(data)
        match message.WhichOneof("kind"):
            case "welcome":
                self._is_welcome.set()
            case "durable":
                self.durable = message.durable.sequence
                now = time.time()
                while self._taken and self._taken[0][0] <= self.durable:
                    taken = self._taken.popleft()[1]
                    self.delays.append((taken, now - taken))


async def _send_all(fleet: Sequence[FleetAgent], start: float, seconds: float, interval: float) -> None:
    """Let every agent send a frame an interval, one after the other."""
    due = [(start + interval * (agent.number % 97) / 97, agent) for agent in fleet]
    due.sort(key=lambda item: item[0])
    for turn in range(math.ceil(seconds / interval)):
        for first, agent in due:
            moment = first + turn * interval
            if moment >= start + seconds:
                break
            wait = moment - time.time()
            if wait > 0:
                await asyncio.sleep(wait)
            agent.send()
        await asyncio.sleep(0)


async def run(
    address: str,
    agents: int,
    gpus: int,
    seconds: float,
    interval: float,
    *,
    jobs: bool = False,
    token: str | None = None,
    split: float = 0.0,
) -> dict[str, Any]:
    """A whole fleet for a while; what came of it, also of the frames before and after `split` seconds."""
    played = scripts(agents, gpus, 30, jobs=jobs)
    fleet = [FleetAgent(number, of_node, token) for number, of_node in enumerate(played)]
    for place in range(0, agents, _CONNECTING):
        await asyncio.gather(*(agent.connect(address) for agent in fleet[place : place + _CONNECTING]))
    start = time.time() + 1.0
    print(json.dumps({"start": start, "stop": start + seconds}), flush=True)
    await _send_all(fleet, start, seconds, interval)
    deadline = time.time() + _LAST_SECONDS
    while time.time() < deadline and any(agent.durable < agent.sent for agent in fleet):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    ended = sum(agent.has_ended for agent in fleet)
    if ended:
        raise ConnectionError(f"the head ended {ended} of {agents} streams")
    for agent in fleet:
        agent.close()
    delays = [delay for agent in fleet for delay in agent.delays]
    return {
        "sent": sum(agent.sent for agent in fleet),
        "durable": sum(agent.durable for agent in fleet),
        **_spread([delay for _, delay in delays]),
        "before": _spread([delay for taken, delay in delays if taken < start + split]),
        "after": _spread([delay for taken, delay in delays if taken >= start + split]),
        "frame_bytes": sum(len(block.numbers) + 12 for blocks in played[0].seconds for block in blocks)
        / len(played[0].seconds),
    }


def _spread(delays: list[float]) -> dict[str, float]:
    """Quantiles; empty without frames."""
    ordered = sorted(delays)
    if not ordered:
        return {}
    return {
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[int(len(ordered) * 0.99)],
        "max": ordered[-1],
    }


def main() -> None:
    """`python -m benchmarks.fleet HOST:PORT --agents N`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--agents", type=int, default=1250)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--jobs", action="store_true", help="with a process on each GPU")
    parser.add_argument(
        "--split", type=float, default=0.0, help="tell frames before and after so many seconds apart"
    )
    given = parser.parse_args()
    token = None if given.token_file is None else given.token_file.read_text().strip()
    work = run(
        given.address,
        given.agents,
        given.gpus,
        given.seconds,
        given.interval,
        jobs=given.jobs,
        token=token,
        split=given.split,
    )
    print(json.dumps(asyncio.run(work)))


if __name__ == "__main__":
    main()
