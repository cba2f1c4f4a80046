"""Tables of processes that heads share: copied by one, read by another under its own numbers for nodes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulse.errors import DiskError, GpulseError
from gpulse.model.frame import Frame
from gpulse.store.base import Holding, Share, Steps, StoredNode
from gpulse.store.history import compaction
from gpulse.store.history.sealer import Workshop
from gpulse.store.history.segments import list_names
from gpulse.store.left_out import noticing
from gpulse.store.shared import copying, life, listing
from gpulse.store.shared.copying import Copier, drop_tables
from gpulse.store.shared.division import Part, Span, contested, divided
from gpulse.store.shared.errands import Errands
from gpulse.store.shared.life import Life, write_life
from gpulse.store.shared.tables import SharedTables
from tests.unit.past_lab import BEGIN, Held, Lab

HEADS = ("aaaaaaaa-1", "bbbbbbbb-2")
HELD = (Held(100, ("0",), sm=0.75), Held(101, ("0", "1"), user="bob", sm=0.25))
HERE = {
    7: StoredNode(7, "first", "n1", "m1", 0.0, {}, {}),
    3: StoredNode(3, "second", "n2", "m2", 0.0, {}, {}),
}
THERE = {1: 7, 2: 3}
"""The numbers that nodes have here, by those in the lab."""


class Heads:
    """Heads that had a part of the frames each, and one that had all of them."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.shared = directory / "shared"
        self.shared.mkdir()
        self.truth = self.lab("truth")

    def lab(self, name: str) -> Lab:
        """A head's store."""
        return self._stack.enter_context(Lab(self._directory / name, ("0", "1"), ("0",)))

    def had(self, head: str, lab: Lab, *, merged: bool = False) -> Copier:
        """Seal what a head had, and share it."""
        data_dir = lab.archive.directory
        with closing(Workshop(data_dir)) as workshop:
            workshop.seal(lab.archive.book.applied)
            if merged:
                assert workshop.compact()["compacted"]
        copier = Copier(data_dir, str(self.shared / head), lab.archive.nodes)
        while copier.copy():
            pass
        return copier

    def tables(self, **options: Any) -> SharedTables:
        """What the reading head makes of it."""
        return self._stack.enter_context(closing(SharedTables(str(self.shared), lambda: HERE, **options)))


@pytest.fixture
def heads(tmp_path: Path) -> Iterator[Heads]:
    """No head yet."""
    with ExitStack() as stack:
        yield Heads(tmp_path, stack)


def frames(lab: Lab, seconds: range, node: int = 1) -> list[Frame]:
    """What a node is at some seconds."""
    return [
        lab.frame(
            second,
            *(HELD if second % 900 < 600 else HELD[:1]),
            node=node,
            values={
                label: {"gpu_utilization_ratio": 0.0 if second % 600 < 120 else 0.5, "power_watts": 300.0}
                for label in "01"
            },
        )
        for second in seconds
    ]


def renumbered(found: list[Any]) -> list[Any]:
    """With the numbers that nodes have here."""
    made = [one._replace(node=THERE[one.node]) for one in found]
    return sorted(made, key=lambda one: (one.node, one.pid or 0, one.uuid))


def check_alike(wanted: list[Share] | list[Holding], found: list[Share] | list[Holding]) -> None:
    """Both say the same of every process and GPU."""
    told = sorted(found, key=lambda one: (one.node, one.pid or 0, one.uuid))
    assert [one[:4] for one in wanted] == [one[:4] for one in told]
    for one, other in zip(wanted, told, strict=True):
        for value, twin in zip(one[4:], other[4:], strict=True):
            assert value == (None if twin is None else pytest.approx(twin, rel=1e-5, abs=1e-6)), (one, other)


def check_steps(wanted: list[Steps], found: list[Steps]) -> None:
    """Both have the same steps."""
    keys = [(one.key._replace(node=THERE[one.key.node]), one.metric) for one in wanted]
    assert sorted(keys) == [(one.key, one.metric) for one in found]
    ordered = sorted(wanted, key=lambda one: (THERE[one.key.node], one.key.subject, one.metric))
    for one, other in zip(ordered, found, strict=True):
        for column, twin in zip(one[2:], other[2:], strict=True):
            assert np.allclose(np.asarray(column), np.asarray(twin), rtol=1e-5)


@pytest.mark.parametrize("merged", [False, True])
def test_what_two_heads_had_adds_up_to_what_one_would_have(
    heads: Heads, monkeypatch: pytest.MonkeyPatch, merged: bool
) -> None:
    """An agent went from one head to another and sent its last minutes again; another node came back to the first."""

    monkeypatch.setattr(compaction, "HOUR_US", 600_000_000)
    parts: tuple[tuple[range, ...], ...] = (
        (range(0, 700, 5), range(700, 1330, 5)),
        (range(1200, 1900, 5), range(1900, 2700, 5)),
    )
    for head, stretches in zip(HEADS, parts, strict=True):
        lab = heads.lab(head)
        for seconds in stretches:
            lab.add(frames(lab, seconds))
            with closing(Workshop(lab.archive.directory)) as workshop:
                workshop.seal(lab.archive.book.applied)
        if head == HEADS[0]:
            lab.add(frames(lab, range(0, 600, 5), 2), 2)
        heads.had(head, lab, merged=merged)
    heads.truth.add(frames(heads.truth, range(0, 2700, 5)))
    heads.truth.add(frames(heads.truth, range(0, 600, 5), 2), 2)
    store = heads.tables()

    for start, end in ((0, 2700), (600, 1800), (1260, 1320), (-4000, 9000)):
        asked: dict[str, Any] = {"start": float(BEGIN + start), "end": float(BEGIN + end)}
        truth = heads.truth.archive
        check_alike(renumbered(truth.shares(**asked)), store.shares(**asked))
        check_alike(renumbered(truth.holdings(**asked)), store.holdings(**asked))
        metrics = ["gpu_memory_bytes", "sm_ratio"]
        check_steps(
            truth.steps("process", metrics, step=60.0, **asked),
            store.steps("process", metrics, step=60.0, **asked),
        )
        wanted = truth.query("process", "sm_ratio", **asked)
        found = store.query("process", "sm_ratio", **asked)
        assert sorted((THERE[one.key.node], one.key.subject, one.times.tolist()) for one in wanted) == [
            (*one.key, one.times.tolist()) for one in found
        ]
        assert sum(len(part.times) for part in truth.scan("process", ["sm_ratio"], **asked)) == sum(
            len(part.times) for part in store.scan("process", ["sm_ratio"], **asked)
        )


def test_shares_of_a_part_of_a_minute_are_those_of_one_store(heads: Heads) -> None:
    """Sessions do not begin and end with minutes."""

    lab = heads.lab("a")
    lab.add(frames(lab, range(0, 600, 5)))
    heads.had(HEADS[0], lab)
    store = heads.tables()
    for start, end in ((10, 130), (70, 110), (50, 200), (130, 135), (55, 65)):
        asked: dict[str, Any] = {"start": float(BEGIN + start), "end": float(BEGIN + end)}
        check_alike(renumbered(lab.archive.shares(**asked)), store.shares(**asked))


def test_shares_are_those_of_all_heads_and_this_one(heads: Heads) -> None:
    """Each minute once, from whoever has most of it: an agent that changes heads sends its last minutes again."""

    first, second = heads.lab("a"), heads.lab("b")
    first.add(frames(first, range(0, 1330, 5)))
    second.add(frames(second, range(1215, 2400, 5)))
    for head, lab in zip(HEADS, (first, second), strict=True):
        heads.had(head, lab)
    heads.truth.add(frames(heads.truth, range(0, 2400, 5)))
    tables = SharedTables(str(heads.shared), second.archive.nodes, own=second.archive)
    asked: dict[str, Any] = {"start": float(BEGIN), "end": float(BEGIN + 2400)}
    with closing(tables):
        both = tables.shares(**asked)

    wanted = heads.truth.archive.shares(**asked)
    assert [one[:4] for one in wanted] == [one[:4] for one in both]
    assert [one.seconds for one in wanted] == pytest.approx([one.seconds for one in both])
    assert [one.seen_seconds for one in wanted] == pytest.approx([one.seen_seconds for one in both])


def test_a_minute_that_lies_in_several_segments_is_counted_whole(heads: Heads) -> None:
    """A head that seals often has no less of it."""

    first, second = heads.lab("a"), heads.lab("b")
    for begin in range(0, 60, 20):
        first.add(frames(first, range(begin, begin + 20, 5)))
        heads.had(HEADS[0], first)
    second.add(frames(second, range(25, 60, 5)))
    asked: dict[str, Any] = {"start": float(BEGIN), "end": float(BEGIN + 60)}
    with closing(SharedTables(str(heads.shared), second.archive.nodes, own=second.archive)) as store:
        found = store.shares(**asked)

    wanted = first.archive.shares(**asked)
    assert [one.seconds for one in wanted] == pytest.approx([one.seconds for one in found])
    assert [one.seconds for one in second.archive.shares(**asked)] != pytest.approx(
        [one.seconds for one in found]
    )


def test_a_head_whose_tables_cannot_be_read_keeps_nobody_from_being_asked(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out, and told of until it can be."""

    monkeypatch.setattr(listing, "_REFRESH_SECONDS", 0.0)
    lab = heads.lab("a")
    lab.add(frames(lab, range(0, 300, 5)))
    heads.had(HEADS[0], lab)
    stranger = heads.shared / "cafebabe0"
    stranger.mkdir()
    (stranger / "nodes.json").write_text("[")
    store = heads.tables()
    asked: dict[str, Any] = {"start": float(BEGIN), "end": float(BEGIN + 300)}

    with noticing() as incomplete:
        assert 3 == len(store.shares(**asked))
    assert [True] == ["cafebabe0/nodes.json" in text for text in incomplete]
    assert store.trouble is not None
    assert "cafebabe0/nodes.json" in store.trouble.message

    (stranger / "nodes.json").write_text("{}")
    assert 3 == len(store.shares(**asked))
    assert store.trouble is None


def test_only_the_nodes_that_are_asked_for_are_told(heads: Heads) -> None:
    """By the numbers that they have here."""

    lab = heads.lab("a")
    lab.add(frames(lab, range(0, 300, 5)))
    lab.add(frames(lab, range(0, 300, 5), 2), 2)
    heads.had(HEADS[0], lab)
    store = heads.tables()
    asked: dict[str, Any] = {"start": float(BEGIN), "end": float(BEGIN + 300)}

    assert {3} == {share.node for share in store.shares(nodes=[3, 99], **asked)}
    assert {7, 3} == {share.node for share in store.shares(**asked)}
    assert [] == store.shares(nodes=[99], **asked)
    assert [] == store.steps("gpu", ["power_watts"], step=60.0, **asked)
    assert [] == list(store.scan("gpu", ["power_watts"], **asked))
    assert [] == store.query("gpu", "power_watts", **asked)


@pytest.mark.parametrize("statistic", ["mean", "min", "max", "last"])
def test_points_of_steps_are_those_of_one_store(heads: Heads, statistic: Any) -> None:
    """Every statistic."""

    lab = heads.lab("a")
    lab.add(frames(lab, range(0, 900, 5)))
    heads.had(HEADS[0], lab)
    asked: dict[str, Any] = {
        "start": float(BEGIN),
        "end": float(BEGIN + 900),
        "step": 300.0,
        "statistic": statistic,
    }
    wanted = lab.archive.query("process", "gpu_memory_bytes", **asked)
    found = heads.tables().query("process", "gpu_memory_bytes", **asked)

    assert [(one.times.tolist(), one.values.tolist()) for one in wanted] == [
        (one.times.tolist(), one.values.tolist()) for one in found
    ]


def test_what_was_merged_takes_the_place_of_its_parts(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stays when the head drops its own."""

    monkeypatch.setattr(compaction, "HOUR_US", 300_000_000)
    lab = heads.lab("a")
    place = heads.shared / HEADS[0] / "history"
    lab.add(frames(lab, range(0, 300, 5)))
    heads.had(HEADS[0], lab)
    lab.add(frames(lab, range(300, 700, 5)))
    copier = heads.had(HEADS[0], lab)
    assert 2 == len(list_names(str(place)))
    heads.had(HEADS[0], lab, merged=True)
    assert 1 == len(list_names(str(place))) == len(os.listdir(place))
    lab.add(frames(lab, range(700, 800, 5)))
    heads.had(HEADS[0], lab)
    with closing(Workshop(lab.archive.directory)) as workshop:
        assert workshop.retain(BEGIN + 800.0, 50.0, None)["removed"]

    assert not copier.copy()
    assert 2 == len(list_names(str(place)))
    assert 2 == len([name for name in os.listdir(place) if name != "lock"])


def test_tables_that_are_too_old_go(heads: Heads) -> None:
    """By when they end."""

    lab = heads.lab("a")
    for begin in (0, 300):
        lab.add(frames(lab, range(begin, begin + 300, 5)))
        copier = heads.had(HEADS[0], lab)
    place = str(heads.shared / HEADS[0])

    assert [] == drop_tables(place, BEGIN + 200.0)
    assert 1 == len(copier.drop_before(BEGIN + 400.0))
    assert 1 == len(list_names(f"{place}/history"))


def test_a_copy_that_was_cut_off_is_made_anew(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody ever sees half of it."""

    lab = heads.lab("a")
    lab.add(frames(lab, range(0, 300, 5)))

    def full(*_: object) -> None:
        raise DiskError("no space")

    monkeypatch.setattr(copying, "write_meta", full)
    with pytest.raises(DiskError):
        heads.had(HEADS[0], lab)
    place = heads.shared / HEADS[0] / "history"
    (place / ".unfinished-00000000000000000001-00000000000000000009").mkdir()
    store = heads.tables()
    asked: dict[str, Any] = {"start": float(BEGIN), "end": float(BEGIN + 300)}
    assert [] == store.shares(**asked)

    monkeypatch.undo()
    monkeypatch.setattr(listing, "_REFRESH_SECONDS", 0.0)
    heads.had(HEADS[0], lab)
    assert 3 == len(store.shares(**asked))
    assert 1 == len(os.listdir(place))


def test_a_file_server_that_hangs_is_waited_for_once(heads: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody else is told at once, until it answers."""

    lab = heads.lab("a")
    lab.add(frames(lab, range(0, 300, 5)))
    heads.had(HEADS[0], lab)
    answers = threading.Event()
    asked: list[str] = []
    listed = life.head_ids

    def hanging(directory: str) -> list[str]:
        asked.append(directory)
        answers.wait(600.0)
        return listed(directory)

    monkeypatch.setattr(listing, "head_ids", hanging)
    store = heads.tables(patience_seconds=0.05)
    window: dict[str, Any] = {"start": float(BEGIN), "end": float(BEGIN + 300)}
    for _ in range(3):
        with pytest.raises(GpulseError, match="does not answer") as refused:
            store.shares(**window)
        assert refused.value.hint is not None
    assert 1 == len(asked)
    assert 1 == sum(thread.name == "shared-question" for thread in threading.enumerate())

    answers.set()
    found = _until(lambda: store.shares(**window))
    assert 3 == len(found)


def _until(question: Callable[[], list[Share]]) -> list[Share]:
    while True:
        try:
            return question()
        except GpulseError:
            threading.Event().wait(0.01)


def test_an_errand_gives_and_raises_what_its_question_does() -> None:
    """It runs in another thread."""

    asked = Errands("it", patience_seconds=60.0)

    assert 5 == asked.ask(lambda: 5)
    with pytest.raises(LookupError):
        asked.ask(lambda: dict[str, int]()["nothing"])


MINUTE = 60_000_000


def test_each_disputed_minute_is_asked_of_the_head_that_has_most_of_it() -> None:
    """What nobody disputes is asked at once."""

    spans = {
        "a": [Span(0, 10 * MINUTE, frozenset({1, 2}))],
        "b": [Span(4 * MINUTE + 5, 20 * MINUTE, frozenset({2, 3}))],
    }
    disputes = contested(spans)
    minutes = {
        "a": {(2, place * MINUTE): 12 for place in (4, 5, 9, 10)},
        "b": {(2, place * MINUTE): 5 if place == 4 else 20 for place in (4, 5, 6)},
    }
    nodes = {"a": frozenset({1, 2}), "b": frozenset({2, 3})}

    assert [Span(4 * MINUTE, 11 * MINUTE, frozenset({2}))] == disputes
    assert [
        Part("a", 0, 5 * MINUTE, frozenset({2})),
        Part("a", 0, 30 * MINUTE, frozenset({1})),
        Part("a", 7 * MINUTE, 30 * MINUTE, frozenset({2})),
        Part("b", 0, 4 * MINUTE, frozenset({2})),
        Part("b", 0, 30 * MINUTE, frozenset({3})),
        Part("b", 5 * MINUTE, 9 * MINUTE, frozenset({2})),
        Part("b", 11 * MINUTE, 30 * MINUTE, frozenset({2})),
    ] == divided(0, 30 * MINUTE, nodes, disputes, minutes)


def test_damaged_tables_of_one_head_take_nothing_from_the_others(heads: Heads) -> None:
    """Whatever of them cannot be read; answers say that something is missing, and so does the status."""

    for head, seconds in zip(HEADS, (range(0, 600, 5), range(570, 1200, 5)), strict=True):
        lab = heads.lab(head)
        lab.add(frames(lab, seconds))
        heads.had(head, lab)
    heads.truth.add(frames(heads.truth, range(570, 1200, 5)))
    asked: dict[str, Any] = {"start": float(BEGIN), "end": float(BEGIN + 1200)}
    wanted = renumbered(heads.truth.archive.shares(**asked))
    for damaged in (heads.shared / HEADS[0] / "history").glob("*/*.parquet"):
        damaged.write_bytes(bytes(damaged.stat().st_size))

    store = heads.tables()
    with noticing() as incomplete:
        check_alike(wanted, store.shares(**asked))
    assert 1 == len(incomplete)
    assert "what a head shares is missing" in incomplete[0]
    assert store.trouble is not None
    assert HEADS[0] in store.trouble.message

    with noticing() as incomplete:
        assert store.holdings(start=BEGIN + 900.0, end=BEGIN + 1200.0)
    assert [] == incomplete


@pytest.mark.parametrize(
    ("newest", "end", "is_told"), [(400.0, 500.0, True), (400.0, 290.0, False), (299.0, 500.0, False)]
)
def test_what_another_head_has_not_shared_yet_is_told(
    heads: Heads, newest: float, end: float, is_told: bool
) -> None:
    """Where the question is about it, and there is something; this head's own is not missing from its answers."""

    lab = heads.lab("a")
    lab.add(frames(lab, range(0, 300, 5)))
    heads.had(HEADS[0], lab)
    write_life(str(heads.shared), Life(HEADS[0], "n9", BEGIN - 50.0, BEGIN + newest, BEGIN + newest))
    asked: dict[str, Any] = {"start": float(BEGIN), "end": BEGIN + end}

    with noticing() as incomplete:
        assert 3 == len(heads.tables().shares(**asked))
    moment = datetime.fromtimestamp(BEGIN + 295, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert is_told == (incomplete == [f"what processes did since {moment} is not shared by all heads yet"])
    assert is_told == bool(incomplete)
    with noticing() as incomplete:
        heads.tables(own_id=HEADS[0]).shares(**asked)
    assert [] == incomplete
