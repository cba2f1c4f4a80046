"""Whatever happens in whatever order: every frame reaches the head once and in order, or is accounted for."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from gpulse.cluster.agent.frame_buffer import FrameBuffer
from gpulse.cluster.agent.run_index import SpoolRange
from gpulse.cluster.agent.spool import SpoolReader
from gpulse.cluster.agent.spool_writer import SpoolWriter
from gpulse.model.packed_columns import ColumnBlock, PackedFrame, layout_id

_LIMIT_BYTES = 64 << 10
_FRAME_BYTES = 1500
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where syncing costs nothing."""


class Outages(RuleBasedStateMachine):
    """An agent and its head among crashes, lost connections and a small spool; no threads and no time."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=_MEMORY))
        self.started = 0
        self.now = 0.0
        self.taken: dict[bytes, int] = {}
        self.spooled_at_crash: dict[bytes, int] = {}
        self.dropped: dict[bytes, int] = {}
        self.got: dict[bytes, list[int]] = defaultdict(list)
        """What the head has, in the order in which it came."""
        self.durable: dict[bytes, int] = {}
        self.sent: dict[bytes, int] = {}
        self.earlier: list[bytes] = []
        self.layout = b"0"
        self.begin()

    def begin(self) -> None:
        """Start the agent."""
        self.started += 1
        self.run = b"%016d" % self.started
        self.taken[self.run] = 0
        self.buffer = FrameBuffer(self.run, "boot", 100, max_frames=10)
        self.writer = SpoolWriter(self.buffer, self.directory / "spool", limit_bytes=_LIMIT_BYTES)
        self.writer._open(self.now)
        self.reader = SpoolReader(lambda: self.writer.log)
        self.used: set[bytes] = set()
        self.connected = False
        self.safe = 0
        """Up to this frame of the run nothing may get lost in a kill."""

    def let_go(self) -> None:
        """What the kernel does for a process that was killed: the files are closed as they are."""
        self.reader.close()
        assert self.writer._spool is not None
        self.writer._spool.close()

    @rule(count=st.integers(1, 30), layout=st.binary(min_size=1, max_size=1))
    def take(self, count: int, layout: bytes) -> None:
        """Frames are taken, a second apart from the frames before."""
        self.now += 1.0
        texts = [] if layout in self.used else [layout * 100]
        self.used.add(layout)
        for _ in range(count):
            frame = PackedFrame(0, 0, (ColumnBlock(layout_id(layout * 100), bytes(_FRAME_BYTES)),))
            self.taken[self.run] = self.buffer.add(frame, texts, self.now)
            texts = []

    @rule()
    def spool(self) -> None:
        """The spool writer has its turn."""
        self.now += 1.0
        self.writer._tick(self.now)
        assert self.writer._trouble is None
        self.safe = self.taken[self.run]

    @rule(keeps=st.booleans())
    def connect(self, keeps: bool) -> None:
        """A new connection; the head may have died, and with it what was not durable."""
        for run, numbers in self.got.items():
            if keeps:
                self.durable[run] = numbers[-1] if numbers else 0
            else:
                self.got[run] = [number for number in numbers if number <= self.durable.get(run, 0)]
        self.announced = self.buffer.runs()
        self.earlier = [item.note.id for item in self.announced[:-1]]
        for item in self.announced:
            self.buffer.acknowledge(item.note.id, self.durable.get(item.note.id, 0))
        self.sent = {item.note.id: item.note.acked for item in self.buffer.runs()}
        self.connected = True

    @precondition(lambda self: self.connected)
    @rule(batches=st.integers(1, 6))
    def send(self, batches: int) -> None:
        """Batches arrive."""
        for run in self.sent:
            while batches and (frames := self.next_frames(run)):
                batches -= 1
                numbers = [number for number in frames if number > (self.got[run] or [0])[-1]]
                self.got[run] += numbers

    def next_frames(self, run: bytes) -> list[int]:
        """As a stream does it."""
        ready = self.buffer.ready(run, self.sent[run], 7, 10**6)
        if ready is None:
            return []
        frames = self.reader.read(ready, 7, 10**6) if isinstance(ready, SpoolRange) else ready
        assert frames
        known = self.reader.texts if isinstance(ready, SpoolRange) else self.buffer.texts(frames[0].layouts)
        assert all(layout in known for layout in frames[0].layouts)
        first = frames[0].sequence
        if first > self.sent[run] + 1:
            self.buffer.record_gap(run, self.sent[run], first)
            self.writer.note()
        self.sent[run] = frames[-1].sequence
        return [frame.sequence for frame in frames]

    @precondition(lambda self: self.connected)
    @rule(heard=st.booleans())
    def commit(self, heard: bool) -> None:
        """The head syncs; its acknowledgements may get lost."""
        for run, numbers in self.got.items():
            if numbers:
                self.durable[run] = max(self.durable.get(run, 0), numbers[-1])
        if heard:
            for run in self.sent:
                self.buffer.acknowledge(run, self.durable.get(run, 0))
            self.note_dropped()
            if self.durable.get(self.run, 0):
                self.buffer.forget_finished_runs(self.earlier)

    def note_dropped(self) -> None:
        """What the agent says about losses, which it may forget together with the run."""
        for item in self.buffer.runs():
            self.dropped[item.note.id] = item.dropped

    @rule()
    def crash(self) -> None:
        """A kill -9, and a new start with the same directory: all that was due is accounted for."""
        self.let_go()
        old, safe = self.run, self.safe
        self.begin()
        (note,) = [item.note for item in self.buffer.runs() if item.note.id == old]
        assert max(note.last, self.durable.get(old, 0)) >= safe
        assert not note.ended
        self.spooled_at_crash[old] = note.last

    @rule()
    def restart(self) -> None:
        """A clean end, and a new start."""
        self.writer._end()
        self.note_dropped()
        self.let_go()
        old = self.run
        self.begin()
        assert not any(item.ended_badly for item in self.buffer.runs() if item.note.id == old)

    def teardown(self) -> None:
        """In the end the head is there for as long as it takes."""
        try:
            self.spool()
            self.take(1, b"z")
            self.connect(keeps=True)
            self.send(10**6)
            self.note_dropped()
            self.commit(heard=True)
            assert [self.run] == [item.note.id for item in self.buffer.runs()]
            assert self.buffer.needed_from() is None
            for run, last in self.taken.items():
                numbers = self.got[run]
                assert numbers == sorted(set(numbers))
                kept_to = self.spooled_at_crash.get(run, last)
                missing = [number for number in range(1, kept_to + 1) if number not in set(numbers)]
                assert len(missing) == self.dropped.get(run, 0), (run, missing)
        finally:
            self.let_go()
            shutil.rmtree(self.directory)


TestOutages = pytest.mark.slow(Outages.TestCase)
TestOutages.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
