"""A fleet of agents in one process: real connections to a real head, frames made of real recordings."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from gpulse._version import __version__
from gpulse.cluster import wire
from gpulse.cluster.agent.changes import Changes
from gpulse.cluster.wire_pb2 import AgentMessage, Batch, HeadMessage, Hello, Layout, Run
from gpulse.model.columns import Block, PackedFrame, layout_id
from gpulse.model.device import Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.packing import FramePacker
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading
from gpulse.sources.recording import Recording

RECORDINGS = Path(__file__).parents[1] / "tests/data/recordings"
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
    seconds: list[tuple[Block, ...]]
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
        tuple(Block(names[block.layout], block.numbers) for block in blocks) for blocks in played.seconds
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
    events = json.dumps(Changes(version=__version__, pid=1)(frames[0])).encode() if jobs else b""
    return Script(layouts, played, events)


class FleetAgent:
    """One connection."""

    def __init__(self, number: int, played: Script, address: str, interval: float, token: str | None) -> None:
        self.number = number
        self.sent = 0
        self.durable = 0
        self.delays: list[float] = []
        self._played = played
        self._address = address
        self._metadata = () if token is None else ((wire.TOKEN_KEY, f"Bearer {token}"),)
        self._interval = interval
        self._run = os.urandom(wire.RUN_BYTES)
        self._taken: deque[tuple[int, float]] = deque()

    async def work(self, start: float, stop: float) -> None:
        """Connect, then send a frame an interval until the end, and wait for the last acknowledgement."""
        async with grpc.aio.insecure_channel(self._address, options=wire.channel_options()) as channel:
            call: Any = channel.stream_stream(wire.STREAM)(metadata=self._metadata)
            await call.write(AgentMessage(hello=self._hello()).SerializeToString())
            HeadMessage.FromString(await call.read())
            for text in self._played.layouts:
                await call.write(AgentMessage(layout=Layout(text=text)).SerializeToString())
            reader = asyncio.create_task(self._read(call))
            due = start + self._interval * (self.number % 97) / 97
            while due < stop:
                await asyncio.sleep(max(0.0, due - time.time()))
                await self._send(call)
                due += self._interval
            deadline = time.time() + 10.0
            while self.durable < self.sent and time.time() < deadline:  # noqa: ASYNC110  the reader tells
                await asyncio.sleep(0.05)
            reader.cancel()
            await call.done_writing()

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

    async def _send(self, call: Any) -> None:
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
        await call.write(AgentMessage(batch=batch).SerializeToString())

    async def _read(self, call: Any) -> None:
        while (data := await call.read()) is not grpc.aio.EOF:
            message = HeadMessage.FromString(data)
            if message.WhichOneof("kind") == "durable":
                self.durable = message.durable.sequence
                now = time.time()
                while self._taken and self._taken[0][0] <= self.durable:
                    self.delays.append(now - self._taken.popleft()[1])


async def run(
    address: str,
    agents: int,
    gpus: int,
    seconds: float,
    interval: float,
    *,
    jobs: bool = False,
    token: str | None = None,
) -> dict[str, Any]:
    """A whole fleet for a while; what came of it."""
    played = scripts(agents, gpus, 30, jobs=jobs)
    fleet = [FleetAgent(number, of_node, address, interval, token) for number, of_node in enumerate(played)]
    start = time.time() + 5.0 + agents / 250
    print(json.dumps({"start": start, "stop": start + seconds}), flush=True)
    await asyncio.gather(*(agent.work(start, start + seconds) for agent in fleet))
    delays = sorted(delay for agent in fleet for delay in agent.delays)
    return {
        "sent": sum(agent.sent for agent in fleet),
        "durable": sum(agent.durable for agent in fleet),
        "p50": delays[len(delays) // 2],
        "p99": delays[int(len(delays) * 0.99)],
        "max": delays[-1],
        "frame_bytes": sum(len(block.numbers) + 12 for blocks in played[0].seconds for block in blocks)
        / len(played[0].seconds),
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
    given = parser.parse_args()
    token = None if given.token_file is None else given.token_file.read_text().strip()
    work = run(
        given.address, given.agents, given.gpus, given.seconds, given.interval, jobs=given.jobs, token=token
    )
    print(json.dumps(asyncio.run(work)))


if __name__ == "__main__":
    main()
