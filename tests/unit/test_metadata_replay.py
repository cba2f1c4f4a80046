"""Metadata built from the log: the same however the log is split into updates, and whatever happens in between."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.errors import LogError
from gpulse.model.session import Session
from gpulse.store.log.log import Log
from gpulse.store.log.record_payloads import FACT
from gpulse.store.log.segment import LogRecord
from gpulse.store.metadata.local_metadata import Metadata, StoredRun
from tests.queries import query
from tests.unit.metadata_records import (
    RUN,
    batch,
    content,
    fact,
    gpu_layout,
    layout_facts,
    node_fact,
    records,
)

_RUNS = [bytes([number]) * 16 for number in range(4)]
_TIMES = st.integers(1, 12).map(float)
_NODES = st.integers(1, 2)
_LAYOUTS = [
    layout_facts(layout) for layout in (gpu_layout((0, None), (1, 2)), gpu_layout((0, None), name="B200"))
]
_KEYS = st.fixed_dictionaries({"pid": st.integers(1, 3), "start_time": st.sampled_from([None, 1.0])})
_EVENTS = st.one_of(
    st.builds(
        lambda key, name: {"event": "process", **key, "name": name}, _KEYS, st.sampled_from(["a", "b"])
    ),
    st.builds(lambda key: {"event": "process_end", **key}, _KEYS),
    st.just({"event": "agent_started"}),
    st.builds(
        lambda kind, n: {"event": kind, "entries": [n]},
        st.sampled_from(["health", "findings"]),
        st.integers(),
    ),
    st.just({"event": "gap"}),
    st.just(7),
)
_FACTS = st.one_of(
    st.builds(
        lambda node, time, name: node_fact(node, name, time=time), _NODES, _TIMES, st.sampled_from("ab")
    ),
    st.builds(
        lambda run, node, time: fact("run", run=run.hex(), node=node, time=time),
        st.sampled_from(_RUNS),
        _NODES,
        _TIMES,
    ),
    st.sampled_from([pair[0] for pair in _LAYOUTS]),
    st.builds(
        lambda pair, node, time: {**pair[1], "node": node, "time": time},
        st.sampled_from(_LAYOUTS),
        _NODES,
        _TIMES,
    ),
    st.builds(
        lambda key, start: fact("session", **Session(key, "n", start, start, 500).to_dict()),
        st.sampled_from("xy"),
        _TIMES,
    ),
    st.builds(
        lambda time, node: fact("event", time=time, kind="gap", node=node, detail={}),
        _TIMES,
        _NODES | st.none(),
    ),
    st.builds(lambda ms: fact("settings", interval_ms=ms, time=1.0), st.integers(1, 9)),
    st.builds(lambda time: fact("newer", time=time), _TIMES),
)
_BATCHES = st.builds(
    lambda frames, node, run, first: batch(
        *((time, json.dumps(events).encode() if events else b"") for time, events in frames),
        node=node,
        run=run,
        first=first,
    ),
    st.lists(st.tuples(_TIMES, st.lists(_EVENTS, max_size=3)), min_size=1, max_size=3),
    _NODES,
    st.sampled_from(_RUNS),
    st.integers(1, 50),
)
_LOGS: st.SearchStrategy[list[LogRecord]] = st.lists(_FACTS | _BATCHES, max_size=25).map(records)


class _Visit(NamedTuple):
    """One process that uses the metadata for a while."""

    end: int
    """How far in the log it gets, in tenths."""
    back: int
    """How many records that are applied already it is given once more."""
    at_once: int
    is_killed: bool
    """In the middle of a step."""


_VISITS = st.lists(
    st.builds(_Visit, st.integers(0, 10), st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=4
)


@pytest.mark.slow
@given(_LOGS, _VISITS)
@settings(max_examples=150, deadline=None)
def test_every_way_of_splitting_the_log_gives_the_same_metadata(
    log: list[LogRecord], visits: list[_Visit]
) -> None:
    """In one step or in many, from the beginning or from anywhere before the end, with crashes in between."""
    with tempfile.TemporaryDirectory() as directory:
        with Metadata(f"{directory}/whole.sqlite") as whole:
            assert len(log) == whole.replay(log)
            expected = content(whole)
            assert 0 == whole.replay(log)
        path = f"{directory}/cut.sqlite"
        for end, back, at_once, is_killed in visits:
            with Metadata(path) as cut:
                first = max(0, cut.applied - back)
                cut.replay(log[first : len(log) * end // 10], at_once=at_once)
                if is_killed:
                    _leave_unfinished(cut)
        with Metadata(path) as cut:
            cut.replay(log, at_once=2)
            assert expected == content(cut)


def _leave_unfinished(metadata: Metadata) -> None:
    """What kill -9 leaves of a step: a transaction that was never committed."""
    database = metadata._file._writing_connection()
    database.execute("BEGIN IMMEDIATE")
    database.execute("UPDATE meta SET value = 10000 WHERE key = 'applied'")
    database.execute("DELETE FROM events")


def test_metadata_is_built_from_a_log(tmp_path: Path) -> None:
    """Facts, the last frame of each run, and events at their time on the head's clock."""
    run = fact("run", run=RUN.hex(), node=1, time=100.0, version="1.0", pid=4, boot="b")
    frames = [(100.0, b""), (101.0, b'[{"event":"gap","frames":3,"reason":"spool full"}]')]
    with Log(tmp_path / "log") as log, Metadata(str(tmp_path / "metadata.sqlite")) as metadata:
        log.append_many(
            (record.kind, record.payload)
            for record in records([node_fact(), run, batch(*frames, first=5, shift_us=2_000_000)])
        )
        log.append(99, b"of a newer version")
        log.append(FACT, b"no fact")
        assert 5 == metadata.replay(log.read(metadata.applied + 1))

        assert 5 == metadata.applied
        assert {RUN: StoredRun(1, 6, 100.0, "1.0", 4, "b")} == metadata.runs()
        (event,) = metadata.events(query(start=0, end=1e9))
        assert (103.0, "gap", 1, 3) == (event.time, event.kind, event.node, event.detail["frames"])


def test_a_batch_that_cannot_be_read_is_an_event(tmp_path: Path) -> None:
    """What stands before the damage is kept, and its frames count as received."""
    good = batch((100.0, b'[{"event":"gap"}]'), (101.0, b""))
    with Metadata(str(tmp_path / "metadata.sqlite")) as metadata:
        assert 2 == metadata.replay(records([good[:-3], b"short"]))

        assert [("gap", 100.0), ("unreadable_event", 200.0)] == [
            (event.kind, event.time) for event in metadata.events(query(start=0, end=1e9))
        ]
        assert 2 == metadata.runs()[RUN].last


def test_missing_records_are_never_passed_over(tmp_path: Path) -> None:
    """What came before them is kept, and the place is named."""
    log = records([node_fact(number, f"n{number}") for number in range(1, 9)])
    with Metadata(str(tmp_path / "metadata.sqlite")) as metadata:
        with pytest.raises(
            LogError, match=r"continues at position 4, but .*metadata.sqlite ends at position 0"
        ):
            metadata.replay(log[3:])
        with pytest.raises(
            LogError, match=r"continues at position 6, but .*metadata.sqlite ends at position 4"
        ):
            metadata.replay([*log[:4], *log[5:]], at_once=1)
        assert (4, [1, 2, 3, 4]) == (metadata.applied, list(metadata.nodes()))
        assert 4 == metadata.replay(log)
