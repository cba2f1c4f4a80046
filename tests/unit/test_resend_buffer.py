"""What an agent sends again to another head, since the first may have died with it."""

from __future__ import annotations

import random

import pytest

from gpulse.cluster.agent.frame_buffer import BufferedFrame, FrameBuffer, ResendBuffer
from gpulse.cluster.agent.run_index import AgentRunState, RunIndex, SpoolRange
from gpulse.model.packed_columns import ColumnBlock, PackedFrame, layout_id

RUN, OLD = b"r" * 16, b"o" * 16
TEXT = b"a layout"
ID = layout_id(TEXT)


def buffer_of(count: int, *, resend_seconds: float = 120.0, max_frames: int = 1000) -> FrameBuffer:
    """A buffer with so many frames, one a second."""
    buffer = FrameBuffer(RUN, "boot", 1000, max_frames=max_frames, resend_seconds=resend_seconds)
    for number in range(1, count + 1):
        add(buffer, number)
    return buffer


def add(buffer: FrameBuffer, second: int) -> None:
    """One more frame."""
    texts = [TEXT] if second == 1 else []
    buffer.add(PackedFrame(second, second, (ColumnBlock(ID, bytes(10)),)), texts, float(second))


def sent(buffer: FrameBuffer, begin: int, run: bytes = RUN) -> list[int]:
    """The numbers of all frames that a stream would send from memory."""
    numbers: list[int] = []
    while frames := buffer.ready(run, begin, 7, 10**6):
        assert not isinstance(frames, SpoolRange)
        numbers += [frame.sequence for frame in frames]
        begin = numbers[-1]
    return numbers


def kept(*numbers: int, size: int = 10) -> list[BufferedFrame]:
    """Frames as they come from a spool."""
    return [BufferedFrame(number, bytes(size), (ID,), 0) for number in numbers]


def test_another_head_gets_the_last_two_minutes_again() -> None:
    """Of what one has acknowledged; older frames are its own."""

    buffer = buffer_of(300)
    for second in range(1, 301):
        buffer.acknowledge(RUN, second, float(second))
    add(buffer, 301)
    begin = buffer.resume({}, 301.0)

    assert {RUN: 180} == begin
    assert [*range(181, 302)] == sent(buffer, begin[RUN])
    assert TEXT == buffer.texts([ID])[ID]
    assert 0 == buffer.dropped


def test_a_head_that_has_a_part_gets_the_rest() -> None:
    """And one that has everything gets what is new."""

    buffer = buffer_of(100)
    buffer.acknowledge(RUN, 90, 90.0)
    assert [*range(51, 101)] == sent(buffer, buffer.resume({RUN: 50}, 91.0)[RUN])
    assert [*range(91, 101)] == sent(buffer, buffer.resume({RUN: 90}, 91.0)[RUN])


def test_one_head_alone_gets_nothing_again() -> None:
    """There is no other one that could lack it, and memory is not free."""

    buffer = buffer_of(100, resend_seconds=0.0)
    buffer.acknowledge(RUN, 90, 90.0)
    assert {RUN: 90} == buffer.resume({}, 91.0)
    assert not buffer.has_several_heads


def test_what_a_third_head_is_to_get_is_not_too_old_by_then() -> None:
    """The second may die with it as well: it is counted from when that one got it."""

    buffer = buffer_of(100)
    buffer.acknowledge(RUN, 100, 100.0)
    buffer.resume({}, 210.0)
    assert {RUN: 0} == buffer.resume({}, 320.0)
    assert {RUN: 100} == buffer.resume({}, 500.0)


def test_frames_that_were_read_back_from_the_spool() -> None:
    """They are kept as well, of this run and of earlier ones, with what is needed to read them."""

    found = RunIndex()
    found.begin(AgentRunState(OLD, "before", 1000))
    found.spooled(10, OLD, 5, 3)
    buffer = buffer_of(3)
    buffer.adopt(found)
    other = b"another layout"
    frames = [BufferedFrame(number, bytes(10), (layout_id(other),), 0) for number in (5, 6, 7)]
    buffer.remember(OLD, frames, {layout_id(other): other}, 1.0)
    buffer.acknowledge(OLD, 7, 1.0)

    assert 0 == buffer.forget_finished_runs([OLD])
    begin = buffer.resume({}, 2.0)
    assert 4 == begin[OLD]
    assert [5, 6, 7] == sent(buffer, begin[OLD], OLD)
    assert other == buffer.texts([layout_id(other)])[layout_id(other)]
    assert 7 == buffer.resume({}, 200.0)[OLD]
    assert 1 == buffer.forget_finished_runs([OLD])


def test_a_hole_is_left_out() -> None:
    """Frames that were never here do not keep those around them from being sent."""

    overlap = ResendBuffer(120.0)
    overlap.add(RUN, kept(1, 2, 5, 6), 0.0)
    assert [1, 2] == [frame.sequence for frame in overlap.after(RUN, 0, 10, 10**6)]
    assert [5, 6] == [frame.sequence for frame in overlap.after(RUN, 2, 10, 10**6)]
    assert [6] == [frame.sequence for frame in overlap.after(RUN, 5, 10, 10**6)]
    assert (5, None) == (overlap.first_after(RUN, 3), overlap.first_after(RUN, 6))


def test_memory_is_bounded() -> None:
    """By bytes, whatever the time; and what is said twice is kept once."""

    overlap = ResendBuffer(120.0, max_bytes=1000)
    for number in range(1, 101):
        overlap.add(RUN, kept(number, size=100), 0.0)
        overlap.add(RUN, kept(number, size=100), 0.0)
    assert 91 == overlap.first_after(RUN, 0)
    overlap.forget(1000.0)
    assert not overlap.has(RUN)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_heads_die_an_engine_gets_every_frame(seed: int) -> None:
    """As long as each head that dies for good had sent what it acknowledged more than a minute ago."""

    chance = random.Random(seed)
    buffer = FrameBuffer(RUN, "boot", 1000, resend_seconds=120.0)
    engine: set[int] = set()
    heads: dict[int, dict[int, int]] = {0: {}}
    """By head when it got which frame."""
    present = position = 0
    for second in range(1, 1500):
        add(buffer, second)
        if chance.random() < 0.01:  # the head dies for good, and with it what it had not sent
            del heads[present]
            present = max(heads, default=present) + 1
            heads[present] = {}
            position = buffer.resume({}, float(second))[RUN]
        elif chance.random() < 0.01 and len(heads) > 1:  # back to one that has been away
            present = chance.choice(list(heads))
            durable = max(heads[present], default=0)
            buffer.acknowledge(RUN, durable, float(second))
            position = buffer.resume({RUN: durable}, float(second))[RUN]
        for number in sent(buffer, position):
            heads[present][number] = second
            position = number
        buffer.acknowledge(RUN, position, float(second))
        for got in heads.values():
            engine |= {number for number, at in got.items() if at <= second - 60}
    everything = {number for got in heads.values() for number in got} | engine

    assert set(range(1, 1500)) == everything
    assert 0 == buffer.dropped
