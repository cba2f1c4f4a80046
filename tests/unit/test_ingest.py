from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import grpc
import pytest

from gpulse.cluster import wire
from gpulse.cluster.head.connected_agents import STREAM_SHARE, AgentStream
from gpulse.cluster.head.fleet import MAX_NODE_LAYOUT_BYTES, RECONNECT_SECONDS, AgentRun, Fleet
from gpulse.cluster.head.frame_receiver import MAX_REFUSALS_REPORTED
from gpulse.cluster.head.group_commit import Committer
from gpulse.cluster.head.ingest import Ingest
from gpulse.cluster.head.message_decoder import decode_layout
from gpulse.cluster.protocol.load_limits import LoopShare
from gpulse.cluster.wire_pb2 import AgentMessage, Batch, HeadMessage, Hello, Layout, Run, Settings
from gpulse.errors import DiskError
from gpulse.model.message_limits import MAX_FRAME_EVENTS, encode_events
from gpulse.model.metric_catalog import Scope
from gpulse.model.packed_columns import BlockPacker, ColumnBlock, PackedFrame, layout_id, split_packed_frames
from gpulse.store.event_decoder import decode_events
from gpulse.store.log.record_payloads import LogEntry

RUN = b"r" * 16
NOW = 1_800_000_000.0


class AbortedError(Exception):
    """The head ended the call."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class Call:
    """A stream without a network: what one side writes the other reads."""

    def __init__(self, ingest: Ingest, peer: str = "ipv4:127.0.0.1:1") -> None:
        self._peer = peer
        self._to_head: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.answers: asyncio.Queue[HeadMessage] = asyncio.Queue()
        self.task = asyncio.create_task(ingest.stream(self._requests(), self))

    async def _requests(self) -> AsyncIterator[bytes]:
        while (data := await self._to_head.get()) is not None:
            yield data

    def say(self, **message: Any) -> None:
        """Send what an agent sends."""
        self._to_head.put_nowait(AgentMessage(**message).SerializeToString())

    def raw(self, data: bytes) -> None:
        """Send anything."""
        self._to_head.put_nowait(data)

    async def heard(self) -> HeadMessage:
        """What the head says next."""
        answer = asyncio.create_task(self.answers.get())
        await asyncio.wait([answer, self.task], return_when=asyncio.FIRST_COMPLETED, timeout=60.0)
        if not answer.done():
            answer.cancel()
            self.task.result()
            raise AssertionError("the head said nothing")
        return answer.result()

    async def refused(self) -> AbortedError:
        """Why the head ended the call."""
        with pytest.raises(AbortedError) as error:
            await asyncio.wait_for(self.task, 60.0)
        return error.value

    async def hang_up(self) -> None:
        """End the call from the agent's side."""
        self._to_head.put_nowait(None)
        await asyncio.wait_for(self.task, 60.0)

    # what gRPC gives a handler

    def peer(self) -> str:
        """Who calls."""
        return self._peer

    def invocation_metadata(self) -> list[tuple[str, str]]:
        """What was sent along."""
        return []

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call."""
        raise AbortedError(code, details)

    async def write(self, message: bytes) -> None:
        """Take what the head says."""
        self.answers.put_nowait(HeadMessage.FromString(message))


_COMMITTERS: list[Committer] = []


@pytest.fixture(autouse=True)
def committers_end() -> Iterator[None]:
    """End the threads of the committers that a test made; else they would end when garbage is collected."""
    yield
    while _COMMITTERS:
        _COMMITTERS.pop().close()


class Scene:
    """A head's ingest over a log in memory."""

    def __init__(self) -> None:
        self.now = NOW
        self.log: list[LogEntry] = []
        self.full = False
        self.fleet = Fleet({}, {}, {})
        self.ingest = Ingest(
            self.fleet,
            lambda: self.committer,
            head_id="head",
            now=lambda: self.now,
            settings=lambda: Settings(interval_ms=500),
            allowed=self.allowed,
        )
        self.committer = Committer(
            self, now=lambda: self.now, done=self.ingest.committed, failed=self.ingest.failed
        )
        _COMMITTERS.append(self.committer)

    async def allowed(
        self, peer: str, metadata: Iterable[tuple[str, str | bytes]], *, changes: bool
    ) -> str | None:
        """Only this machine."""
        del metadata
        return None if "127.0.0.1" in peer or not changes else "no token"

    def commit(self, entries: Sequence[LogEntry]) -> None:
        """Write, or fail."""
        if self.full:
            raise DiskError("no space")
        self.log += entries

    def repair(self, _probe_bytes: int) -> list[LogEntry]:
        """Nothing turns up."""
        return []

    def sequences(self) -> list[int]:
        """The frames in the log, in its order."""
        batches = [entry.batch for entry in self.log if entry.batch is not None]
        return [number for batch in batches for number in range(batch.first, batch.last + 1)]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What happened, of one kind."""
        facts = [entry.fact for entry in self.log if entry.fact is not None]
        return [fact["detail"] for fact in facts if fact["fact"] == "event" and fact["kind"] == kind]

    async def connected(self, **given: Any) -> Call:
        """An agent that was welcomed."""
        call = Call(self.ingest)
        call.say(hello=hello(**given))
        assert (await call.heard()).WhichOneof("kind") == "welcome"
        call.say(layout=Layout(text=PACKER.text))
        return call


def hello(**given: Any) -> Hello:
    """What an agent says first."""
    fields = {
        "protocol": wire.PROTOCOL,
        "version": "1",
        "host": "gpu01",
        "machine": "m1",
        "boot": "b1",
        "instance": "i1",
        "monotonic_us": 0,
        "runs": [Run(id=RUN, boot="b1")],
    }
    return Hello(**{**fields, **given})


PACKER = BlockPacker("host")
BLOCK = PACKER.pack([{}], [({"load1": 1.0}, {})])[0]


def batch(first: int, count: int = 1, *, time: float = NOW, sent: float = 0.0, **given: Any) -> Batch:
    """Frames as an agent sends them; its monotonic clock is `sent`."""
    frame = PackedFrame(round(time * 1e6), round(sent * 1e6), (BLOCK,))
    fields = {"run": RUN, "first": first, "count": count, "sent_monotonic_us": round(sent * 1e6)}
    return Batch(**{**fields, "frames": frame.to_bytes() * count, **given})


async def settled(scene: Scene, call: Call) -> None:
    """Let the head read what was sent, then commit."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert not call.task.done() or call.task.exception() is None
    await scene.committer.commit()


async def test_frames_are_acknowledged_when_they_are_on_disk_and_not_before() -> None:
    """The whole reliability argument."""

    scene = Scene()
    call = await scene.connected()
    call.say(batch=batch(1, 3))
    for _ in range(20):
        await asyncio.sleep(0)
    assert call.answers.empty()

    await scene.committer.commit()

    answer = await call.heard()
    assert (answer.durable.run, answer.durable.sequence) == (RUN, 3)
    assert scene.sequences() == [1, 2, 3]
    await call.hang_up()


async def test_an_agent_with_an_interval_of_its_own_is_late_by_that() -> None:
    """One that samples once a minute is not lost in between; one that does as the head says is."""

    scene = Scene()
    slow = await scene.connected(host="slow", machine="slow", interval_ms=60_000)
    usual = await scene.connected(host="usual", machine="usual", runs=[Run(id=b"u" * 16)])
    scene.now += 59

    changed = scene.fleet.check(scene.now, 0.5)

    assert [("usual", "lost")] == [(member.name, member.state) for member, _ in changed]
    assert {"slow": 60.0, "usual": None} == {
        node.name: node.interval_seconds for node in scene.fleet.iter_live_nodes()
    }
    for call in (slow, usual):
        await call.hang_up()


async def test_agents_have_time_to_come_back_to_a_head_that_was_away() -> None:
    """Who was not heard since the head listens again is not called silent yet; who was heard since and fell silent is."""

    scene = Scene()
    away = await scene.connected(host="away", machine="away")
    await away.hang_up()
    scene.now += 40
    scene.fleet.listening_since = scene.now
    there = await scene.connected(host="there", machine="there", runs=[Run(id=b"u" * 16)])
    scene.now += 7

    def changed() -> list[tuple[str, str]]:
        return [(member.name, member.state) for member, _ in scene.fleet.check(scene.now, 0.5)]

    assert [("there", "late")] == changed()
    scene.now += RECONNECT_SECONDS - 7
    assert [("away", "lost")] == changed()
    await there.hang_up()


async def test_frames_that_come_twice_are_stored_once() -> None:
    """An agent that saw no acknowledgement sends again, in other batches."""

    scene = Scene()
    call = await scene.connected()
    call.say(batch=batch(1, 3))
    await settled(scene, call)
    await call.hang_up()
    again = await scene.connected()
    for first, count in ((1, 2), (2, 3), (5, 1), (1, 5)):
        again.say(batch=batch(first, count))
    await settled(scene, again)

    assert scene.sequences() == [1, 2, 3, 4, 5]
    acknowledged: list[int] = []
    while not acknowledged or acknowledged[-1] != 5:
        acknowledged.append((await again.heard()).durable.sequence)
    assert acknowledged == sorted(acknowledged)
    await again.hang_up()


async def test_a_hole_in_the_numbers_is_an_event() -> None:
    """What an agent had to give up is not hidden."""

    scene = Scene()
    call = await scene.connected()
    call.say(batch=batch(1, 2))
    call.say(batch=batch(10))
    await settled(scene, call)

    assert scene.sequences() == [1, 2, 10]
    assert [gap["frames"] for gap in scene.events("gap")] == [7]
    await call.hang_up()


async def test_a_welcome_says_how_far_the_frames_came() -> None:
    """After a restart of either side the agent goes on from there."""

    scene = Scene()
    call = await scene.connected()
    call.say(batch=batch(1, 4))
    await settled(scene, call)
    await call.hang_up()

    again = Call(scene.ingest)
    again.say(hello=hello(runs=[Run(id=b"n" * 16), Run(id=RUN)]))
    welcome = (await again.heard()).welcome

    assert [(item.run, item.sequence) for item in welcome.durable] == [(b"n" * 16, 0), (RUN, 4)]
    assert (welcome.node, welcome.settings.interval_ms) == ("gpu01", 500)
    await again.hang_up()


async def test_a_full_disk_sends_agents_away_and_forgets_nothing_that_was_acknowledged() -> None:
    """They keep their frames, and send them when they are let in again."""

    scene = Scene()
    call = await scene.connected()
    call.say(batch=batch(1, 2))
    await settled(scene, call)
    scene.full = True
    call.say(batch=batch(3, 2))
    for _ in range(20):
        await asyncio.sleep(0)
    await scene.committer.commit()
    gone = await call.refused()
    assert gone.code is grpc.StatusCode.UNAVAILABLE
    refused = Call(scene.ingest)
    refused.say(hello=hello())
    assert "no space" in (await refused.refused()).details

    scene.full = False
    await scene.committer._repair()
    again = await scene.connected()
    again.say(batch=batch(3, 2))
    await settled(scene, again)

    assert scene.sequences() == [1, 2, 3, 4]
    await again.hang_up()


async def test_zipped_frames_are_the_same_frames() -> None:
    """What was kept for long is sent smaller."""

    scene = Scene()
    call = await scene.connected()
    plain = batch(1, 50)
    call.say(batch=batch(1, 50, frames=zlib.compress(plain.frames), zipped=True))
    await settled(scene, call)

    assert scene.sequences() == list(range(1, 51))
    assert scene.log[-1].batch is not None
    assert scene.log[-1].batch.frames == plain.frames
    await call.hang_up()


@pytest.mark.parametrize(
    ("skew", "expected"), [(0.0, 0.0), (1.5, 0.0), (3600.0, -3600.0), (-3600.0, 3600.0), (-5.0, 5.0)]
)
async def test_frames_of_a_wrong_clock_are_put_on_the_heads(skew: float, expected: float) -> None:
    """Sessions are intervals on the head's clock; a difference of a message's delay changes nothing."""

    scene = Scene()
    call = await scene.connected()
    call.say(batch=batch(1, time=NOW + skew))
    await settled(scene, call)

    (found,) = [entry.batch.shift_us / 1e6 for entry in scene.log if entry.batch is not None]
    assert found == pytest.approx(expected, abs=0.01)
    assert len(scene.events("clock_skew")) == (0 if expected == 0.0 else 1)
    await call.hang_up()


async def test_a_step_of_an_agents_clock_does_not_move_its_frames() -> None:
    """Its other clock, which nobody sets, tells when they were taken; so do delays in the network not matter."""

    scene = Scene()
    call = await scene.connected()
    call.say(batch=batch(1, time=NOW, sent=0.0))
    await settled(scene, call)
    scene.now += 10.0
    call.say(batch=batch(2, time=NOW + 3605.0, sent=5.0))  # five seconds on its way, an hour ahead
    await settled(scene, call)

    times = [
        entry.events or (NOW + second + entry.batch.shift_us / 1e6)
        for second, entry in zip((0.0, 3605.0), [e for e in scene.log if e.batch], strict=True)
        if entry.batch is not None
    ]
    assert times == [pytest.approx(NOW), pytest.approx(NOW + 5.0)]
    await call.hang_up()


async def test_a_step_of_the_heads_clock_keeps_the_order_of_frames_although_messages_are_late() -> None:
    """The first message after the step may be late; its delay is not taken for a difference of the clocks."""

    scene = Scene()
    call = await scene.connected()
    call.say(batch=batch(1, time=NOW, sent=0.0))
    await settled(scene, call)
    scene.now += 3600.0
    scene.ingest.clock_was_set(3600.0)
    taken = [0.0]
    for second, delay in ((1.0, 9.0), (11.0, 0.0)):
        scene.now = NOW + 3600.0 + second + delay
        call.say(batch=batch(len(taken) + 1, time=NOW + second, sent=second))
        await settled(scene, call)
        taken.append(second)

    shifts = [entry.batch.shift_us / 1e6 for entry in scene.log if entry.batch is not None]
    assert shifts == [0.0, pytest.approx(3600.0), pytest.approx(3600.0)]
    assert len(scene.events("clock_skew")) == 1
    await call.hang_up()


async def test_an_older_protocol_is_refused_with_both_versions() -> None:
    """So that people know which side to update."""

    call = Call(Scene().ingest)
    call.say(hello=hello(protocol=0, version="0.0.1"))

    refused = await call.refused()

    assert refused.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "protocol 1" in refused.details
    assert "protocol 0 (gpulse 0.0.1)" in refused.details


async def test_a_second_agent_of_a_machine_is_refused_while_the_first_lives() -> None:
    """It would send the same GPUs twice; an agent that was started anew takes its own place."""

    scene = Scene()
    first = await scene.connected()
    other = Call(scene.ingest)
    other.say(hello=hello(instance="i2"))
    assert (await other.refused()).code is grpc.StatusCode.ALREADY_EXISTS

    anew = await scene.connected()

    assert (await first.refused()).code is grpc.StatusCode.ABORTED
    await anew.hang_up()
    assert scene.ingest.streams == {}


async def test_namesakes_are_told_apart_and_both_warned() -> None:
    """By their machine ids."""

    scene = Scene()
    first = await scene.connected()
    second = Call(scene.ingest)
    second.say(hello=hello(machine="m2", instance="i2", runs=[Run(id=b"2" * 16)]))

    welcome = (await second.heard()).welcome

    assert welcome.node == "gpu01#2"
    assert "gpu01#2" in (await second.heard()).warning
    assert "gpu01#2" in (await first.heard()).warning
    await first.hang_up()
    await second.hang_up()


async def test_a_run_that_is_known_only_by_its_frames_is_accepted() -> None:
    """The fact that it began may be lost with the metadata; it is recorded again."""

    scene = Scene()
    scene.fleet.add_run(RUN, AgentRun(0, 7))
    call = await scene.connected()
    await settled(scene, call)

    facts = [entry.fact for entry in scene.log if entry.fact is not None]
    assert [RUN.hex()] == [fact["run"] for fact in facts if fact["fact"] == "run"]
    assert 0 < scene.fleet.runs[RUN].node
    assert 7 == scene.fleet.runs[RUN].durable
    await call.hang_up()


async def test_frames_of_another_node_are_refused() -> None:
    """A state directory that was copied would double them."""

    scene = Scene()
    first = await scene.connected()
    call = Call(scene.ingest)
    call.say(hello=hello(host="gpu02", machine="m2"))

    assert "another node" in (await call.refused()).details
    await first.hang_up()


@pytest.mark.parametrize(
    "given",
    [
        {"host": ""},
        {"host": "a" * 300},
        {"host": "a\nb"},
        {"machine": ""},
        {"runs": []},
        {"runs": [Run(id=b"short")]},
        {"node": b"nonsense"},
        {"node": b"[]"},
        {"node": json.dumps({"numa_cpus": "x"}).encode()},
        {"node": json.dumps({"driver": ["x"]}).encode()},
        {"labels": {"a": "b" * 300}},
        {"runs": [Run(id=RUN, boot="b" * (15 << 20))]},
        {"runs": [Run(id=RUN, boot="b\0")]},
        {"runs": [Run(id=RUN), Run(id=RUN)]},
        {"runs": [Run(id=RUN, dropped=1 << 63)]},
        {"runs": [Run(id=RUN, elsewhere=1 << 63)]},
        {"shift_us": 1 << 62},
        {"time_us": -(1 << 62)},
        {"monotonic_us": 1 << 62},
        {"node": json.dumps({"kernel": "\ud800"}).encode()},
        {"node": json.dumps({"kernel": "a\0b"}).encode()},
        {"node": json.dumps({"kernel": "k" * 5000}).encode()},
        {"node": json.dumps({"ticks_per_second": 10**400}).encode()},
        {"node": json.dumps({"ticks_per_second": True}).encode()},
        {"node": json.dumps({"kernel": "x"}).encode("utf-16")},
        {"node": b'{"x":' + b"[" * 5000 + b"]" * 5000 + b"}"},
    ],
)
async def test_a_hello_that_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    """And nothing is written."""

    scene = Scene()
    call = Call(scene.ingest)
    call.say(hello=hello(**given))

    assert (await call.refused()).code is grpc.StatusCode.INVALID_ARGUMENT
    await scene.committer.commit()
    assert scene.log == []


@pytest.mark.parametrize(
    "message",
    [
        {"batch": batch(1, run=b"x" * 16)},
        {"batch": batch(1, count=2, frames=b"")},
        {"batch": Batch(run=RUN, first=1, count=2, frames=batch(1).frames)},
        {"batch": batch(1, frames=batch(1).frames[:-1])},
        {"batch": batch(1, frames=PackedFrame(0, 0, (ColumnBlock(7, b""),)).to_bytes())},
        {"batch": batch(1, frames=PackedFrame(0, 0, (ColumnBlock(BLOCK.layout, b"1"),)).to_bytes())},
        {"batch": batch(1, frames=PackedFrame(1 << 62, 0, (BLOCK,)).to_bytes())},
        {"batch": batch(1, frames=PackedFrame(0, -(1 << 62), (BLOCK,)).to_bytes())},
        {"batch": batch(1, frames=PackedFrame(0, 0, (BLOCK, BLOCK)).to_bytes())},
        {"batch": batch(1, sent_monotonic_us=1 << 62)},
        {"batch": batch(1 << 63)},
        {"dropped": Run(id=RUN, dropped=(1 << 64) - 1)},
        {"dropped": Run(id=RUN, boot="b" * 101)},
        {"batch": batch(1, frames=b"nonsense", zipped=True)},
        {"batch": batch(1, frames=zlib.compress(b"\0" * (wire.MAX_BATCH_BYTES + 1)), zipped=True)},
    ],
)
async def test_a_message_that_makes_no_sense_ends_the_connection(message: dict[str, Any]) -> None:
    """Nothing of it is written, and the head goes on."""

    scene = Scene()
    call = await scene.connected()
    call.say(**message)

    assert (await call.refused()).code is grpc.StatusCode.INVALID_ARGUMENT
    await scene.committer.commit()
    assert scene.sequences() == []
    again = await scene.connected()
    await again.hang_up()


@pytest.mark.parametrize(
    "text",
    [
        b"nonsense",
        b"{}",
        b'{"scope":"process","subjects":[{"pid":"one"}],"wide":[],"narrow":[]}',
        PACKER.text.decode().encode("utf-16"),
    ],
)
async def test_a_layout_that_makes_no_sense_costs_its_readings_alone(text: bytes) -> None:
    """The agent is told, the other readings of its frames are kept, and it goes on."""

    scene = Scene()
    call = await scene.connected()
    call.say(layout=Layout(text=text))
    frames = PackedFrame(round(NOW * 1e6), 0, (BLOCK, ColumnBlock(layout_id(text), b"12345678")))
    call.say(batch=batch(1, frames=frames.to_bytes()))

    assert "not stored" in (await call.heard()).warning
    await settled(scene, call)
    assert [1] == scene.sequences()
    assert [1] == [len(scene.events("layout_refused"))]
    [stored] = [entry.batch for entry in scene.log if entry.batch is not None]
    assert [PackedFrame(frames.time_us, 0, (BLOCK,))] == list(split_packed_frames(stored.frames))
    await call.hang_up()


async def test_metrics_that_the_head_does_not_know_are_few() -> None:
    """A newer agent may have some; one that invents them without end does not widen the history of everybody."""

    def layout(numbers: range) -> Layout:
        columns = [[f"invented_{number}_ratio", 1, 1] for number in numbers]
        document = {"scope": "host", "subjects": [{}], "wide": columns, "narrow": []}
        return Layout(text=json.dumps(document).encode())

    scene = Scene()
    call = await scene.connected()
    for first in range(0, 500, 50):
        call.say(layout=layout(range(first, first + 50)))
    call.say(layout=layout(range(10)))
    call.say(batch=batch(1))
    await settled(scene, call)

    assert 9 == len(scene.events("layout_refused"))
    assert 2 == sum(
        column.name == "invented_5_ratio" for one in scene.fleet.layouts.values() for column in one.wide
    )
    await call.hang_up()


async def test_refusals_are_not_reported_without_end() -> None:
    """Thousands of them fill neither the log nor the events; the last one that is reported says so."""

    scene = Scene()
    call = await scene.connected()
    for number in range(MAX_REFUSALS_REPORTED + 30):
        call.say(layout=Layout(text=b"nonsense %d" % number))
    call.say(batch=batch(1))
    await settled(scene, call)

    assert MAX_REFUSALS_REPORTED == len(scene.events("layout_refused"))
    await call.hang_up()


def processes(first: int, count: int, **fields: Any) -> bytes:
    """The text of a layout of processes."""
    subjects = [{"pid": pid, **fields} for pid in range(first, first + count)]
    document = {"scope": "process", "subjects": subjects, "wide": [["gpu_memory_bytes", 1, 1]], "narrow": []}
    return json.dumps(document, separators=(",", ":")).encode()


async def test_the_layouts_of_a_node_have_a_limit() -> None:
    """One that sends them without end is refused those beyond it, and other nodes are not."""

    scene = Scene()
    attacker = await scene.connected()
    other = await scene.connected(host="gpu02", machine="m2", runs=[Run(id=b"o" * 16, boot="b1")])
    for number in range(40):
        attacker.say(layout=Layout(text=processes(10_000 * number, 8192)))
    attacker.say(batch=batch(1))
    other.say(layout=Layout(text=processes(5, 8)))
    other.say(batch=batch(1, run=b"o" * 16))
    await settled(scene, attacker)

    kept = [one for one in scene.fleet.layouts.values() if len(one.subjects) == 8192]
    assert 10 < len(kept) < MAX_NODE_LAYOUT_BYTES / (8192 * 200)
    assert ["64 MiB" in told["reason"] for told in scene.events("layout_refused")] == [True]
    assert 1 == sum(len(one.subjects) == 8 for one in scene.fleet.layouts.values())
    assert [1, 1] == scene.sequences()
    scene.fleet.forget_layouts(scene.now + 3600, scene.now)
    attacker.say(layout=Layout(text=processes(7, 8192)))
    await settled(scene, attacker)
    assert 1 == sum(len(one.subjects) == 8192 for one in scene.fleet.layouts.values())
    await attacker.hang_up()
    await other.hang_up()


def test_honest_agents_stay_below_the_limits() -> None:
    """A node that replaces 128 processes every five seconds has room for their layouts, and is never read more slowly."""

    fleet, name = Fleet({}, {}, {}), 0
    gpu = {"start_time": 1767225600.25, "gpu": "GPU-01234567-0123-0123-0123-0123456789ab", "kind": "compute"}
    for second in range(0, round(wire.LAYOUT_EXPIRY_SECONDS), 5):
        for fields in (gpu, {"start_time": 1767225600.25}):
            text = processes(100_000 * second, 128, **fields)
            name += 1
            assert fleet.has_layout_room(1, len(text), 128)
            fleet.add_layout(name, decode_layout(text), 1, len(text))

    clock = [0.0]
    stream = AgentStream.__new__(AgentStream)
    stream.share = LoopShare(STREAM_SHARE, monotonic=lambda: clock[0])
    for number in range(20 * 600):  # ten minutes at 20 Hz
        clock[0] = number / 20
        stream.charge(20_000, events=2)
        assert not stream.share.wait_seconds()


async def test_the_events_of_a_frame_have_a_limit() -> None:
    """Those of a frame with more are refused with a reason; agents leave out what does not fit."""

    scene = Scene()
    call = await scene.connected()
    many = b"[" + b",".join([b'{"event":"process","pid":5}'] * (MAX_FRAME_EVENTS + 1)) + b"]"
    call.say(batch=batch(1, frames=PackedFrame(round(NOW * 1e6), 0, (BLOCK,), many).to_bytes()))

    assert f"{MAX_FRAME_EVENTS + 1:,} events" in (await call.heard()).warning
    await settled(scene, call)
    assert [()] == [entry.events for entry in scene.log if entry.batch is not None]
    assert [1] == scene.sequences()
    honest = decode_events(encode_events([{"event": "process", "pid": 5}] * 10_000))
    assert (MAX_FRAME_EVENTS, []) == (len(honest.events), honest.problems)
    assert 10_000 - MAX_FRAME_EVENTS + 1 == honest.events[-1]["events"]
    await call.hang_up()


async def test_an_agent_that_sends_too_much_is_read_more_slowly_than_others() -> None:
    """Nothing of it is lost: it waits, and others do not."""

    scene = Scene()
    attacker = await scene.connected()
    other = await scene.connected(host="gpu02", machine="m2", runs=[Run(id=b"o" * 16, boot="b1")])
    some = b"[" + b",".join([b'{"event":"process_end","pid":5}'] * 2048) + b"]"
    frame = PackedFrame(round(NOW * 1e6), 0, (BLOCK,), some).to_bytes()
    attacker.say(batch=batch(1, 12, frames=frame * 12))
    attacker.say(batch=batch(13))
    await settled(scene, attacker)
    other.say(batch=batch(1, run=b"o" * 16))
    await settled(scene, other)

    found = [entry.batch for entry in scene.log if entry.batch is not None]
    assert [(RUN, 12), (b"o" * 16, 1)] == [(one.run, one.count) for one in found]
    attacker.task.cancel()  # it would wait for many seconds
    await asyncio.wait([attacker.task])
    await other.hang_up()


async def test_the_runs_of_a_node_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that announces more is refused; its known runs go on."""
    monkeypatch.setattr("gpulse.cluster.head.connected_agents.MAX_NODE_RUNS", 3)

    scene = Scene()
    call = await scene.connected()
    await call.hang_up()
    more = [Run(id=bytes([number]) * 16, boot="b1") for number in range(4)]
    greedy = Call(scene.ingest)
    greedy.say(hello=hello(runs=more))
    refusal = await greedy.refused()
    assert grpc.StatusCode.RESOURCE_EXHAUSTED is refusal.code
    assert "more than 3 runs" in refusal.details
    again = await scene.connected()
    again.say(batch=batch(1))
    await settled(scene, again)
    assert [1] == scene.sequences()
    await again.hang_up()


@pytest.mark.parametrize(
    "events",
    [
        b"nonsense",
        b"{}",
        b"[" * 100_000,
        b'[{"event":"findings","findings":' + b"[" * 970 + b"]" * 970 + b"}, ]",
        b'[{"event":"findings","findings":' + b"[" * 100 + b"]" * 100 + b"}]",
        b'[{"event":"frames_dropped","run":"not a run"}]',
        b'[{"event":"job","id":"\\ud800"} ]',
        b'[{"event":"job","id":"a\\u0000"}]',
        b'[{"event":"xid","uuid":"u","gpu":"0","code":79,"errors":1,"time":1' + b"0" * 400 + b"}]",
    ],
)
async def test_an_event_that_makes_no_sense_costs_itself_alone(events: bytes) -> None:
    """The frame is kept with the other events, and the agent goes on."""

    scene = Scene()
    call = await scene.connected()
    good = b'{"event":"process","pid":5}'
    whole = events[:-1] + b"," + good + b"]" if events.endswith(b"}]") else events
    call.say(batch=batch(1, frames=PackedFrame(round(NOW * 1e6), 0, (BLOCK,), whole).to_bytes()))

    assert "not stored" in (await call.heard()).warning
    await settled(scene, call)
    [stored] = [entry.batch for entry in scene.log if entry.batch is not None]
    [frame] = split_packed_frames(stored.frames)
    assert (BLOCK,) == frame.blocks
    assert (b"[" + good + b"]" if whole is not events else b"") == frame.events
    assert [1] == [told["events"] for told in scene.events("events_refused")]
    await call.hang_up()


async def test_an_agent_goes_on_behind_frames_that_are_refused() -> None:
    """They are refused once; when they come again, empty frames stand in their place and the agent is told."""

    scene = Scene()
    good, bad = (
        PackedFrame(round(NOW * 1e6), 0, (block,)) for block in (BLOCK, ColumnBlock(BLOCK.layout, b"1"))
    )
    frames = b"".join(frame.to_bytes() for frame in (good, bad, good))
    call = await scene.connected()
    call.say(batch=batch(1, count=3, frames=frames))
    assert "frame 2 is invalid: the size of a block" in (await call.refused()).details
    call = await scene.connected()
    call.say(batch=batch(1, count=3, frames=frames))
    assert "1 frame not stored" in (await call.heard()).warning
    call.say(batch=batch(4))
    await settled(scene, call)

    assert [1, 2, 3, 4] == scene.sequences()
    [first, _] = [entry.batch for entry in scene.log if entry.batch is not None]
    assert [(BLOCK,), (), (BLOCK,)] == [frame.blocks for frame in split_packed_frames(first.frames)]
    assert [1] == [told["frames"] for told in scene.events("frames_refused")]
    await call.hang_up()


async def test_an_agent_goes_on_behind_a_batch_that_is_refused() -> None:
    """Also when it is not even made of frames."""

    scene = Scene()
    call = await scene.connected()
    call.say(batch=batch(1, count=3, frames=b"nonsense"))
    assert "incomplete frame" in (await call.refused()).details
    call = await scene.connected()
    call.say(batch=batch(1, count=3, frames=b"nonsense"))
    call.say(batch=batch(4))
    await settled(scene, call)

    assert [1, 2, 3, 4] == scene.sequences()
    assert [3] == [told["frames"] for told in scene.events("frames_refused")]
    await call.hang_up()


@pytest.mark.parametrize(
    ("scope", "subject"), [("filesystem", {"mount_point": "/"}), ("network", {"name": "x"})]
)
async def test_what_an_agent_leaves_out_does_not_hide_the_other_nodes(
    scope: Scope, subject: dict[str, Any]
) -> None:
    """Whatever it says of its disks and links, all nodes can be looked at."""

    scene, packer = Scene(), BlockPacker(scope)
    block, _ = packer.pack([subject], [({}, {})])
    call = await scene.connected()
    call.say(layout=Layout(text=packer.text))
    call.say(batch=batch(1, frames=PackedFrame(round(NOW * 1e6), 0, (BLOCK, block)).to_bytes()))
    await settled(scene, call)

    [node] = scene.fleet.live()
    assert node.frame is not None
    assert 1 == len(node.frame.filesystems) + len(node.frame.network)
    await call.hang_up()


async def test_bytes_that_are_no_message_end_the_connection() -> None:
    """At the beginning and later."""

    scene = Scene()
    call = Call(scene.ingest)
    call.raw(b"\xff\xff\xff")
    assert (await call.refused()).code is grpc.StatusCode.INVALID_ARGUMENT
    later = await scene.connected()
    later.raw(b"\xff\xff\xff")

    assert (await later.refused()).code is grpc.StatusCode.INVALID_ARGUMENT


async def test_others_need_a_token() -> None:
    """Before anything they send is looked at."""

    call = Call(Scene().ingest, peer="ipv4:10.0.0.1:99")
    call.raw(b"")

    assert (await call.refused()).code is grpc.StatusCode.UNAUTHENTICATED


async def test_layouts_that_nobody_uses_are_forgotten_and_may_come_again() -> None:
    """Every change of a node's processes makes one; what the newest frame of a node needs stays."""

    scene = Scene()
    call = await scene.connected()
    call.say(batch=batch(1))
    await settled(scene, call)
    scene.now += 3600.0
    assert scene.fleet.forget_layouts(scene.now, scene.now) == []
    assert [node.frame is not None for node in scene.fleet.live()] == [True]

    other = BlockPacker("host")
    block, _ = other.pack([{}], [({"load5": 1.0}, {})])
    call.say(layout=Layout(text=other.text))
    call.say(batch=batch(2, frames=PackedFrame(round(NOW * 1e6), 0, (block,)).to_bytes()))
    await settled(scene, call)

    assert scene.fleet.forget_layouts(scene.now, scene.now) == [BLOCK.layout]
    assert [node.frame is not None for node in scene.fleet.live()] == [True]
    call.say(layout=Layout(text=PACKER.text))
    call.say(batch=batch(3))
    await settled(scene, call)
    assert scene.sequences() == [1, 2, 3]
    await call.hang_up()
