"""What an agent keeps, and what becomes of it: numbers and frames without threads, networks or time."""

from __future__ import annotations

import pytest

from gpulse.cluster.agent.frame_buffer import BufferedFrame, FrameBuffer, parse_run_states
from gpulse.cluster.agent.run_index import AgentRunState, RunIndex, SpoolRange
from gpulse.model.packed_columns import ColumnBlock, PackedFrame, layout_id

RUN, OLD = b"r" * 16, b"o" * 16
TEXT = b"a layout"
ID = layout_id(TEXT)


def packed(number: int = 0, size: int = 10, layout: int = ID) -> PackedFrame:
    """A frame."""
    return PackedFrame(number, number, (ColumnBlock(layout, bytes(size)),))


def filled(count: int, *, max_frames: int = 100, size: int = 10) -> FrameBuffer:
    """A buffer with so many frames, one a second."""
    buffer = FrameBuffer(RUN, "boot", 1000, max_frames=max_frames)
    for number in range(1, count + 1):
        assert number == buffer.add(packed(number, size), [TEXT] if number == 1 else [], float(number))
    return buffer


def numbers(frames: object) -> list[int]:
    """The numbers of frames from memory."""
    assert isinstance(frames, list)
    return [frame.sequence for frame in frames if isinstance(frame, BufferedFrame)]


def test_frames_are_kept_until_they_are_acknowledged() -> None:
    """No longer and no shorter."""

    buffer = filled(5)
    assert [1, 2, 3, 4, 5] == numbers(buffer.ready(RUN, 0, 100, 10**6))
    buffer.acknowledge(RUN, 3)
    assert [4, 5] == numbers(buffer.ready(RUN, 0, 100, 10**6))
    assert [5] == numbers(buffer.ready(RUN, 4, 100, 10**6))
    assert buffer.ready(RUN, 5, 100, 10**6) is None
    buffer.acknowledge(RUN, 2)
    assert 3 == buffer.acked


def test_an_acknowledgement_of_what_was_never_taken_is_not_believed() -> None:
    """A head that is wrong must not make an agent forget."""

    buffer = filled(5)
    buffer.acknowledge(RUN, 6)
    buffer.acknowledge(b"x" * 16, 1)
    assert 0 == buffer.acked


def test_frames_are_due_for_the_spool_by_age() -> None:
    """Oldest first, and each once."""

    buffer = filled(5)
    frames, acked = buffer.due(3.0, 10)
    assert ([1, 2, 3], 0) == (numbers(frames), acked)
    buffer.spooled(7, 1, 3)
    assert [4, 5] == numbers(buffer.due(9.0, 10)[0])
    assert [4] == numbers(buffer.due(9.0, 1)[0])
    buffer.acknowledge(RUN, 4)
    assert [5] == numbers(buffer.due(9.0, 10)[0])


def test_a_full_memory_gives_its_oldest_to_the_spool() -> None:
    """They are read back from there before what memory holds."""

    buffer = filled(6, max_frames=6)
    buffer.spooled(1, 1, 6)
    for number in range(7, 11):
        buffer.add(packed(number), [], float(number))
    assert SpoolRange(1, RUN, 1, 4) == buffer.ready(RUN, 0, 100, 10**6)
    assert SpoolRange(3, RUN, 3, 2) == buffer.ready(RUN, 2, 100, 10**6)
    assert [5, 6, 7, 8, 9, 10] == numbers(buffer.ready(RUN, 4, 100, 10**6))
    assert 0 == buffer.dropped


def test_without_a_spool_the_oldest_are_given_up_and_counted() -> None:
    """Exactly, before and after the head has passed over them."""

    buffer = filled(10, max_frames=4)
    assert 6 == buffer.dropped
    (own,) = buffer.runs()
    assert (7, 6) == (own.first_kept, own.dropped)
    assert [7, 8, 9, 10] == numbers(buffer.ready(RUN, 0, 100, 10**6))
    buffer.record_gap(RUN, 0, 7)
    assert 6 == buffer.dropped
    buffer.acknowledge(RUN, 10)
    assert 6 == buffer.dropped


def test_what_the_head_had_all_along_is_not_lost() -> None:
    """It was given up here, but its acknowledgement had only been on its way."""

    buffer = filled(10, max_frames=4)
    buffer.acknowledge(RUN, 5)
    assert 1 == buffer.dropped


def test_spooled_frames_do_not_fill_the_memory() -> None:
    """A long outage costs disk, not memory; frames that are nowhere else stay."""

    buffer = filled(20, size=1 << 20)
    assert 20 == len(numbers(buffer.ready(RUN, 0, 100, 1 << 30)))
    buffer.spooled(1, 1, 20)
    buffer.add(packed(21), [], 21.0)
    assert SpoolRange(1, RUN, 1, 13) == buffer.ready(RUN, 0, 100, 1 << 30)
    assert 0 == buffer.dropped


def test_batches_are_bounded() -> None:
    """By frames and by bytes, though never less than one."""

    buffer = filled(5, size=1000)
    assert [1, 2] == numbers(buffer.ready(RUN, 0, 2, 10**6))
    assert [1, 2] == numbers(buffer.ready(RUN, 0, 100, 2500))
    assert [1] == numbers(buffer.ready(RUN, 0, 100, 10))


def test_layouts_are_known_while_they_are_needed() -> None:
    """Those in use, and those that kept frames refer to; thousands of others are forgotten."""

    buffer = filled(1, max_frames=10_000)
    texts = [b"%d" % number for number in range(1000)]
    for number, text in enumerate(texts):
        frame = PackedFrame(0, 0, (ColumnBlock(ID, b""), ColumnBlock(layout_id(text), b"")))
        buffer.add(frame, [text], float(number))
        if number == 500:
            buffer.acknowledge(RUN, buffer.last)
    known = buffer.texts([ID, *map(layout_id, texts)])
    assert TEXT == known[ID]
    assert all(layout_id(text) in known for text in texts[501:])
    assert layout_id(texts[0]) not in known


@pytest.mark.parametrize(
    ("boot", "taken", "alive_us", "lost"),
    [
        ("boot", {OLD: 40}, 0, 33),  # exactly the frames that are not in the spool
        ("boot", {OLD: 7}, 0, 0),
        ("boot", {}, 25_000_000, 51),  # 5 seconds since it last wrote anything
        ("boot", {}, 0, 11),
        ("before", {}, 25_000_000, 111),  # a power cut, which also loses what was not synced
        ("", {}, 0, 111),
    ],
)
def test_the_losses_of_a_killed_run_are_bounded(
    boot: str, taken: dict[bytes, int], alive_us: int, lost: int
) -> None:
    """By what it counted, otherwise by the time since it last wrote; the bound stays when another agent takes over."""

    found = RunIndex()
    found.begin(AgentRunState(OLD, boot, 100, alive_us=alive_us))
    found.spooled(10, OLD, 5, 3)
    buffer = filled(2)
    buffer.adopt(found, taken, 30_000_000)
    assert lost == buffer.runs()[0].lost_at_most
    runs, _ = parse_run_states(buffer.notes(31_000_000))
    again = RunIndex()
    again.runs.update(runs)
    again.bound_losses("boot", {}, 90_000_000)
    assert lost == again.runs[OLD].lost_at_most


def test_a_run_that_the_spool_lost_is_announced() -> None:
    """All that is known is how many frames it took."""

    buffer = filled(2)
    buffer.adopt(RunIndex(), {OLD: 40, RUN: 2}, 0)
    old, own = buffer.runs()
    assert (OLD, True, 40, RUN, False) == (
        old.note.id,
        old.ended_badly,
        old.lost_at_most,
        own.note.id,
        own.ended_badly,
    )


def test_frames_of_another_head_are_told_apart() -> None:
    """A head that has lost data must not be blamed for what another one acknowledged."""

    buffer = filled(9)
    buffer.head = "one"
    buffer.acknowledge(RUN, 4)
    buffer.head = "two"
    buffer.acknowledge(RUN, 6)
    buffer.head = "two"
    assert (4, 6) == (buffer.runs()[0].note.other_head_last, buffer.runs()[0].note.acked)


def test_runs_of_the_past_come_first() -> None:
    """With what they lost, and how badly they ended."""

    found = RunIndex()
    found.begin(AgentRunState(OLD, "before", 100))
    found.spooled(10, OLD, 5, 3)
    found.acknowledge(OLD, 4)
    buffer = filled(2)
    buffer.adopt(found)
    old, own = buffer.runs()
    assert (OLD, 5, 0, True, 111) == (
        old.note.id,
        old.first_kept,
        old.dropped,
        old.ended_badly,
        old.lost_at_most,
    )
    assert (RUN, 1, 0, False) == (own.note.id, own.first_kept, own.dropped, own.ended_badly)
    assert SpoolRange(10, OLD, 5, 3) == buffer.ready(OLD, 4, 100, 10**6)
    assert 10 == buffer.needed_from()
    buffer.forget_finished_runs([OLD])
    assert 2 == len(buffer.runs())
    buffer.acknowledge(OLD, 7)
    assert buffer.needed_from() is None
    buffer.forget_finished_runs([OLD, RUN])
    assert [RUN] == [run.note.id for run in buffer.runs()]


def test_notes_say_what_outlives_a_kill() -> None:
    """Frames in memory alone are not among it."""

    buffer = filled(5)
    buffer.spooled(1, 1, 3)
    buffer.set_interval(250)
    buffer.head = "store"
    notes, head = parse_run_states(buffer.notes())
    assert ("store", AgentRunState(RUN, "boot", 250, last=3)) == (head, notes[RUN])
    buffer.end()
    assert parse_run_states(buffer.notes())[0][RUN].ended


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b'{"runs":[1]}', b'{"runs":[{"id":"zz"}]}', b'"x"'])
def test_notes_that_are_none(text: bytes) -> None:
    """They are refused, not believed by half."""

    with pytest.raises(ValueError, match=r".+"):
        parse_run_states(text)


@pytest.mark.slow
def test_many_pieces_cost_an_acknowledgement_nothing() -> None:
    """However scattered the spool is: only what is acknowledged is touched, since sampling waits meanwhile.

    If each acknowledgement went through all pieces, this would take far longer than a test may.
    """

    run_index = RunIndex()
    run_index.begin(AgentRunState(OLD, "boot", 1000))
    run_index.begin(AgentRunState(RUN, "boot", 1000))
    count = 100_000
    for number in range(1, count + 1):
        run_index.spooled(3 * number, OLD, number)
        run_index.spooled(3 * number + 3 * count, RUN, number)
    for number in range(1, 20_001):
        run_index.acknowledge(RUN, number)
        run_index.find(RUN, number + 500)
        run_index.first_kept(RUN)
        run_index.dropped(RUN, None, number + 100)

    assert [count, count - 20_000] == [sum(p.run == run for p in run_index.pieces) for run in (OLD, RUN)]
    assert 3 * 20_001 + 3 * count == run_index.pieces[count].position
    assert (0, 0) == (run_index.dropped(OLD), run_index.dropped(RUN))
