from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.cluster.agent.event_detector import EventDetector
from gpulse.cluster.head.connected_agents import AgentStream
from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.group_commit import Committer
from gpulse.cluster.head.ingest import Ingest
from gpulse.cluster.head.message_decoder import CallRefusedError, FrameShapes, decode_frames, decode_layout
from gpulse.cluster.protocol.head_interface import HeadInterface
from gpulse.cluster.wire_pb2 import AgentMessage, Layout, Run, Settings
from gpulse.export.prometheus.metrics_page import format_metrics
from gpulse.model.device import MAX_PATHS, DevicePath, Node
from gpulse.model.frame import CgroupReading, DiskReading, FilesystemReading, Frame
from gpulse.model.frame_packing import FramePacker
from gpulse.model.message_limits import MAX_EVENTS_BYTES, MAX_TEXT_CHARS, encode_events
from gpulse.model.packed_columns import MAX_LAYOUT_BYTES, BlockPacker, layout_id, split_packed_frames
from gpulse.model.process import Owner, ProcessIdentity, ProcessReading
from gpulse.sources.demo_machine import DemoMachine
from gpulse.store.event_decoder import decode_events
from gpulse.store.local import LocalStore
from gpulse.store.log.reader import LogReader
from gpulse.store.log.record_payloads import FrameBatch, LogEntry, clip_time_us
from gpulse.store.metadata.reader import MetadataLookup
from gpulse.store.seal_process import open_writer
from gpulse.store.tsdb.request_builder import LayoutCache, RequestBuilder
from gpulse.store.tsdb.send_process import LogFollower
from gpulse.store.tsdb.write_request import MAX_TIME_MS
from gpulse.web.app import _node_state
from gpulse.web.live_stream import Subscription, UpdateWriter
from tests.integration.hostile_messages import EVENTS, ODD, SUBJECTS, batch, frame, hello, layout, run_of
from tests.queries import query

NOW = 1_800_000_000.0
NAME = "hostile"


class Gathered:
    """What ingest writes down, committed when it is asked for."""

    trouble = None

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []

    def add(self, entry: LogEntry) -> None:
        """Take one entry."""
        self.entries.append(entry)


async def _everybody(peer: str, metadata: object, *, changes: bool) -> None:
    """Let every call in."""


def _is_beyond_series(entries: Sequence[FrameBatch | bytes]) -> bool:
    """Whether a frame is of a time after 2109, which remote write leaves out."""
    return any(
        clip_time_us(frame.time_us + entry.shift_us) // 1000 > MAX_TIME_MS
        for entry in entries
        if isinstance(entry, FrameBatch)
        for frame in split_packed_frames(entry.frames)
    )


class Door:
    """Ingest in front of a real store, without a network."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)
        self.archive = LocalStore(self.directory)
        self._is_closed = False
        self.gathered = Gathered()
        self.fleet = Fleet(self.archive.nodes(), {}, self.archive.layouts)
        self.ingest = Ingest(
            self.fleet,
            lambda: cast("Committer", self.gathered),
            head_id="head",
            now=lambda: NOW,
            settings=lambda: Settings(interval_ms=500),
            allowed=_everybody,
        )

    def greeted(self, message: AgentMessage) -> AgentStream | None:
        """The stream of an agent, None when its hello is refused."""
        try:
            return self.ingest._registration.greet(message, "peer")
        except CallRefusedError:
            return None

    def take(self, stream: AgentStream, message: AgentMessage) -> bool:
        """Take what an agent sends; whether that did not end the stream."""
        try:
            if message.HasField("layout"):
                self.ingest._receiver.receive_layout(stream, message.layout.text)
            else:
                self.ingest._receiver.receive_batch(stream, message.batch)
        except CallRefusedError:
            return False
        return True

    def check(self) -> None:
        """Everything behind it works on what it let through."""
        self.archive.commit(self.gathered.entries)
        self.ingest.committed(self.gathered.entries)
        live = self.fleet.live()
        assert all(node.frame is not None for node in live if node.connected and self.ingest.frames)
        self.show(self.fleet)
        requests = RequestBuilder(
            LayoutCache(
                LogReader(f"{self.directory}/log"), MetadataLookup(f"{self.directory}/metadata.sqlite")
            ),
            {},
        )
        with closing(LogFollower(LogReader(f"{self.directory}/log"), 0)) as tail:
            found = tail.take(self.archive.accepted)
        assert found is not None
        list(requests.parts(found.entries))
        assert 0 == requests.unreadable or _is_beyond_series(found.entries)
        self.archive.events(query(start=0, end=1e11))
        [process.identity.get("pid") for process in self.archive.processes(query(start=0, end=1e11))]
        position = self.archive.metadata.applied
        self.close()
        writer = open_writer(self.directory)
        try:
            sealed = writer.seal(position)
            assert (0, 0) == (sealed["missing"], sealed["unreadable"])
        finally:
            writer.close()
        with LocalStore(self.directory) as again:
            assert not again.metadata.unreadable
            fleet = Fleet(again.nodes(), {}, again.layouts)
            fleet.restore(again, NOW + 1)
            self.show(fleet)
            kinds = {"unreadable_event", "unreadable_fact"}
            assert [] == again.events(query(start=0, end=1e11, kinds=kinds))

    def close(self) -> None:
        """Let go of the store."""
        if not self._is_closed:
            self._is_closed = True
            self.archive.close()

    def show(self, fleet: Fleet) -> None:
        """Show nodes to Prometheus and to a live client."""
        nodes = fleet.live()
        text = "".join(
            format_metrics([_node_state(node) for node in nodes], now=NOW, interval_seconds=1.0, version="1")
        )
        text.encode()

        class Head:
            def iter_live_nodes(self) -> Any:
                return nodes

        for update in UpdateWriter(cast("HeadInterface", Head())).since(Subscription(details=True), {}):
            json.loads(update, parse_constant=pytest.fail)
            update.encode()


_DEEP = st.integers(1, 2000).map(lambda depth: "[" * depth + "]" * depth)
_SPELLED = (
    st.sampled_from(sorted(ODD.values()))
    | _DEEP
    | st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.integers(-(10**30), 10**30)
        | st.floats()
        | st.text(st.characters(), max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=8,
    ).map(json.dumps)
)
"""JSON values, as they are text_column, and what only looks like them."""


def _changed(documents: dict[str, dict[str, Any]]) -> st.SearchStrategy[tuple[str, str]]:
    """One of some documents by name, of which some fields have other values."""

    def text_column(given: tuple[str, dict[str, str]]) -> tuple[str, str]:
        name, changes = given
        fields = {key: json.dumps(value) for key, value in documents[name].items()} | changes
        return name, "{" + ",".join(f"{json.dumps(key)}:{text}" for key, text in fields.items()) + "}"

    def changes(name: str) -> st.SearchStrategy[tuple[str, dict[str, str]]]:
        fields = st.sampled_from([*documents[name], "other"])
        return st.tuples(st.just(name), st.dictionaries(fields, _SPELLED, max_size=2))

    return st.sampled_from(sorted(documents)).flatmap(changes).map(text_column)


_EVENTS = {kind: {"event": kind, **event} for kind, event in EVENTS.items()}


def _endures(work: Callable[[Door], object]) -> None:
    """Let a door take something, and see that everything behind it works."""

    async def run() -> None:
        with TemporaryDirectory() as folder:
            door = Door(Path(folder))
            try:
                work(door)
                door.check()
            finally:
                door.close()

    asyncio.run(run())


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.lists(_changed(SUBJECTS), min_size=1, max_size=30), st.binary(max_size=8))
def test_a_layout_is_refused_or_everything_takes_it(subjects: list[tuple[str, str]], numbers: bytes) -> None:
    """Whatever its subjects say."""

    def work(door: Door) -> None:
        stream = door.greeted(hello(NAME))
        assert stream is not None
        block = numbers.ljust(8, b"\1")
        for number, (scope, subject) in enumerate(subjects, 1):
            text = layout(scope, subject)
            assert door.take(stream, AgentMessage(layout=Layout(text=text)))
            data = frame([(text, 8)]).replace(b"\1" * 8, block)
            assert door.take(stream, batch(NAME, number, [data]))

    _endures(work)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.lists(_changed(_EVENTS), min_size=1, max_size=30), st.lists(_SPELLED, max_size=3))
def test_an_event_is_refused_or_everything_takes_it(events: list[tuple[str, str]], odd: list[str]) -> None:
    """Whatever it says, and whatever stands in its place."""

    good = layout("gpu", json.dumps(SUBJECTS["gpu"]))

    def work(door: Door) -> None:
        stream = door.greeted(hello(NAME))
        assert stream is not None
        door.take(stream, AgentMessage(layout=Layout(text=good)))
        texts = [f"[{text}]" for _, text in events] + odd
        for number, text in enumerate(texts, 1):
            assert door.take(stream, batch(NAME, number, [frame([(good, 8)], text.encode())]))

    _endures(work)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*Node._fields, "other"]), _SPELLED, max_size=3),
    st.text(st.characters(codec="utf-8"), max_size=30),
    st.dictionaries(
        st.sampled_from(
            ["first_kept", "dropped", "elsewhere", "dropped_elsewhere", "last", "other_head_last"]
        ),
        st.integers(0, (1 << 64) - 1),
    ),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(-(1 << 63), (1 << 63) - 1),
)
def test_a_hello_is_refused_or_everything_takes_it(
    facts: dict[str, str], word: str, counts: dict[str, int], shift_us: int, moment: int
) -> None:
    """Whatever it says about its node, its runs and its clocks."""

    good = layout("gpu", json.dumps(SUBJECTS["gpu"]))
    node = "{" + ",".join(f'"{name}":{text}' for name, text in facts.items()) + "}"
    run = Run(id=run_of(NAME), boot=word, ended_badly=True, **counts)  # type: ignore[arg-type]
    message = hello(NAME, node=node.encode(), runs=[run], shift_us=shift_us, monotonic_us=moment, boot=word)

    def work(door: Door) -> None:
        stream = door.greeted(message)
        if stream is None:
            stream = door.greeted(hello(NAME))
        assert stream is not None
        door.take(stream, AgentMessage(layout=Layout(text=good)))
        for number, time_us in enumerate((moment, shift_us, round(NOW * 1e6)), 1):
            data = frame([(good, 8)], time_us=time_us, monotonic_us=moment)
            if not door.take(stream, batch(NAME, number, [data])):
                assert door.take(stream, batch(NAME, number, [data]))

    _endures(work)


# --- what agents send


def _taken(taken: Frame, changes: EventDetector) -> None:
    """A frame is packed as agents do it, and a door takes all of it."""
    packer = FramePacker()
    packed, texts = packer.pack(taken, changes(taken))
    layouts = {layout_id(text): decode_layout(text) for text in texts}
    found = decode_frames(packed.to_bytes(), 1, FrameShapes(layouts), now_us=0)
    assert ([], {}) == (found.problems, found.refused)
    assert [packed] == found.frames


def test_what_agents_send_passes_unchanged() -> None:
    """Every layout, number and event of a machine with all there is."""

    machine = DemoMachine(NOW)
    changes = EventDetector(version="1", pid=5, full_commands=True)
    packer = FramePacker()
    layouts = {}
    for second in range(60):
        taken = machine.sample(NOW + second)._replace(monotonic=float(second))
        packed, texts = packer.pack(taken, changes(taken))
        for text in texts:
            layouts[layout_id(text)] = decode_layout(text)
            assert text == layouts[layout_id(text)].to_json()
        found = decode_frames(packed.to_bytes(), 1, FrameShapes(layouts), now_us=0)
        assert ([packed], [], {}) == (found.frames, found.problems, found.refused)
        assert (json.loads(packed.events) if packed.events else []) == found.frame_events.get(0, [])


@pytest.mark.parametrize("word", ["x" * 100_000, "\udcff\udcfe", "a\0b", "line\nbreak\x1b[2J", "é" * 5000])
def test_an_agent_cuts_off_what_heads_refuse(word: str) -> None:
    """Names of anything that a machine has may be of any length and hold any bytes."""

    machine = DemoMachine(NOW)
    taken = machine.sample(NOW)
    owner = Owner(word, 1, word, word, word)
    identity = ProcessIdentity(5, 1, NOW, word, (word,) * 10_000, owner, word)
    _taken(
        taken._replace(
            gpus=tuple(
                gpu._replace(
                    device=gpu.device._replace(
                        name=word, serial=word, adapter_paths=(DevicePath(word, "SYS"),)
                    )
                )
                for gpu in taken.gpus
            ),
            disks=(DiskReading(word, word, {}, word),) * 2,
            filesystems=(FilesystemReading(word, word, word, word, word, {}),) * 2,
            cgroups=(CgroupReading(word, {}),) * 2,
            processes=(ProcessReading(identity, "R", {}, on_gpu=True),),
        ),
        EventDetector(version="1", pid=5, full_commands=True),
    )


def test_an_agent_leaves_out_what_does_not_fit() -> None:
    """Events and subjects are so many that no message holds them all: those that fit are sent, and it is said."""

    events = [{"event": "process", "pid": pid, "command": ["x" * MAX_TEXT_CHARS]} for pid in range(2000)]
    data = encode_events(events)
    found = decode_events(data)
    assert len(data) <= MAX_EVENTS_BYTES
    assert [] == found.problems
    assert {"event": "events_left_out", "events": 2000 - len(found.events) + 1} == found.events[-1]
    packer = BlockPacker("cgroup")
    block, _ = packer.pack([{"path": f"{n:04000}"} for n in range(5000)], [({}, {})] * 5000)
    assert len(packer.text) <= MAX_LAYOUT_BYTES
    assert len(decode_layout(packer.text).subjects) > 500
    assert packer.layout.block_bytes == len(block.numbers)


def test_a_topology_has_at_most_64_gpus() -> None:
    """A GPU with more paths than that is refused at the door, and so is a level that does not exist."""

    def subject(paths: list[list[Any]]) -> bytes:
        gpu = {"index": 0, "uuid": "GPU-0", "name": "H200", "paths": paths}
        return json.dumps({"scope": "gpu", "subjects": [gpu], "wide": [], "narrow": []}).encode()

    most = [[f"GPU-{index}", "SYS", 18] for index in range(1, MAX_PATHS + 1)]

    assert list(map(tuple, most)) == decode_layout(subject(most)).subjects[0]["paths"]
    for wrong in (
        [*most, ["GPU-64", "SYS", 18]],
        [["GPU-1", "NEAR", 18]],
        [["GPU-1", "SYS", -1]],
        [["", "SYS", 1]],
    ):
        with pytest.raises(CallRefusedError):
            decode_layout(subject(wrong))
