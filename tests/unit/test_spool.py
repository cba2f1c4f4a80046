"""Frames on disk: what can be read back after restarts, kills, full spools and damage."""

from __future__ import annotations

import os
from pathlib import Path

from gpulse.cluster.agent.frame_buffer import BufferedFrame
from gpulse.cluster.agent.run_index import AgentRunState, SpoolRange
from gpulse.cluster.agent.spool import MIN_LIMIT_BYTES, Spool, SpoolReader
from gpulse.model.packed_columns import ColumnBlock, PackedFrame, layout_id

RUN = b"r" * 16
NOTES = b'{"runs":[{"id":"%s","boot":"b","interval_ms":100}],"head":"h"}' % RUN.hex().encode()
TEXTS = {layout_id(text): text for text in (b"one", b"two")}
ONE, TWO = TEXTS


def kept(sequence: int, size: int = 100, layout: int = ONE) -> BufferedFrame:
    """A frame."""
    data = PackedFrame(sequence + 5, sequence, (ColumnBlock(layout, bytes(size)),)).to_bytes()
    return BufferedFrame(sequence, data, (layout,), 5)


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    """In order, with the layouts, by the same process or the next."""

    spool = Spool(tmp_path)
    first = spool.append(RUN, [kept(1), kept(2)], 0, TEXTS, NOTES)
    spool.append(RUN, [kept(3, layout=TWO)], 0, TEXTS, NOTES)
    for _ in range(2):
        found = spool.scan()
        assert "h" == found.head
        assert AgentRunState(RUN, "b", 100, last=3, alive_us=3) == found.run_index.runs[RUN]
        assert SpoolRange(first, RUN, 1, 2) == found.run_index.find(RUN, 0)
        reader = SpoolReader(lambda log=spool.log: log)  # type: ignore[misc]
        piece = found.run_index.find(RUN, 0)
        assert piece is not None
        assert [kept(1), kept(2)] == reader.read(piece, 10, 10**6)
        piece = found.run_index.find(RUN, 2)
        assert piece is not None
        assert [kept(3, layout=TWO)] == reader.read(piece, 10, 10**6)
        assert TEXTS == reader.texts
        reader.close()
        spool.close()
        spool = Spool(tmp_path)
    spool.close()


def test_acknowledged_frames_are_not_brought_home_again(tmp_path: Path) -> None:
    """Each frame says how far the run was acknowledged when it was written, so that gaps are no losses."""

    spool = Spool(tmp_path)
    spool.append(RUN, [kept(1), kept(2)], 0, TEXTS, NOTES)
    spool.append(RUN, [kept(7), kept(8)], 6, TEXTS, NOTES)
    run_index = spool.scan().run_index
    assert [7] == [piece.first for piece in run_index.pieces]
    assert 0 == run_index.dropped(RUN)
    spool.close()


def test_every_segment_can_be_read_without_those_before_it(tmp_path: Path) -> None:
    """When the oldest went, the others still have their layouts and the notes."""

    spool = Spool(tmp_path, limit_bytes=MIN_LIMIT_BYTES)
    for number in range(1, 2001):
        spool.append(RUN, [kept(number, 1000, (ONE, TWO)[number % 2])], 0, TEXTS, NOTES)
    assert 1 < len(list(tmp_path.glob("*.log"))) <= 9
    assert spool.log.size_bytes <= MIN_LIMIT_BYTES
    run_index = spool.scan().run_index
    first = run_index.first_kept(RUN)
    assert first is not None
    assert first - 1 == run_index.dropped(RUN) > 0
    reader = SpoolReader(lambda: spool.log)
    sent = first - 1
    while piece := run_index.find(RUN, sent):
        for frame in reader.read(piece, 100, 10**6):
            assert sent + 1 == frame.sequence
            assert frame.layouts[0] in reader.texts
            sent = frame.sequence
    assert 2000 == sent
    reader.close()
    spool.close()


def test_a_layout_that_is_not_where_it_belongs_is_looked_for(tmp_path: Path) -> None:
    """A spool in which a segment began unforeseen is read all the same."""

    spool = Spool(tmp_path)
    spool.append(RUN, [kept(1)], 0, TEXTS, NOTES)
    position = spool.append(RUN, [kept(2)], 0, TEXTS, NOTES)
    reader = SpoolReader(lambda: spool.log)
    reader.read(SpoolRange(position, RUN, 2, 1), 1, 10**6)
    reader.texts.clear()
    position = spool.append(RUN, [kept(3)], 0, TEXTS, NOTES)
    assert [kept(3)] == reader.read(SpoolRange(position, RUN, 3, 1), 1, 10**6)
    assert b"one" == reader.texts[ONE]
    reader.close()
    spool.close()


def test_a_torn_end_is_cut_off(tmp_path: Path) -> None:
    """A kill in the middle of a write costs that write alone."""

    spool = Spool(tmp_path)
    spool.append(RUN, [kept(1)], 0, TEXTS, NOTES)
    spool.append(RUN, [kept(2)], 0, TEXTS, NOTES)
    spool.close()
    path = tmp_path / "0000000000000001.log"
    os.truncate(path, path.stat().st_size - 3)
    spool = Spool(tmp_path)
    assert 1 == spool.scan().run_index.runs[RUN].last
    spool.close()
