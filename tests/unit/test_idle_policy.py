"""When holders of unused GPUs are warned and when the hook runs, in chosen and in random histories."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.cluster.notify.idle_holdings import HeldPlace, Holder, Holding, Use
from gpulse.cluster.notify.idle_policy import (
    MAX_GAP_SECONDS,
    MAX_USED_SHARE,
    EpisodeFile,
    Exemptions,
    IdlePolicy,
    Step,
    Track,
    lose,
    observe,
    postpone_hook,
    release,
    resume,
)
from gpulse.model.finding_acknowledgement import Silence
from tests.unit.frames import NOON

POLICY = IdlePolicy(1800.0, 900.0, 1800.0, dry_run=False, hook=("/bin/free-gpu",))
JOB = Holder("slurm:4711")
PLACE = HeldPlace("node1", (("0", "GPU-0"),), ((4242, 100.0),))


def holding(use: Use = "unused", place: HeldPlace = PLACE) -> Holding:
    """What ada's job holds."""
    return Holding(JOB, frozenset({"ada"}), (place,), use)


def play(
    uses: Iterable[tuple[Use, float]], policy: IdlePolicy = POLICY, every: float = 5.0
) -> list[tuple[str, float]]:
    """The steps that follow from uses of some length, and how long after the start."""
    steps: list[tuple[str, float]] = []
    track, now = observe(None, holding(), NOON, policy)[0], NOON
    for use, seconds in uses:
        for _ in range(round(seconds / every)):
            now += every
            track, step = observe(track, holding(use), now, policy)
            track = track._replace(is_pending=False)
            if step is not None:
                steps.append((step.kind, now - NOON))
    return steps


def test_warn_warn_hook() -> None:
    """An idle holder is warned twice, and then the hook runs once."""

    expected = [("warn", 1800.0), ("warn_again", 2700.0), ("hook", 4500.0)]

    assert expected == play([("unused", 20_000.0)])


def test_stray_kernel() -> None:
    """One stray kernel does not end an episode."""

    uses: list[tuple[Use, float]] = [("unused", 1795.0), ("used", 5.0)] * 3

    assert [kind for kind, _ in play(uses)] == ["warn", "warn_again", "hook"]


def test_pauses() -> None:
    """A job that pauses between epochs is never touched."""

    uses: list[tuple[Use, float]] = [("unused", 1500.0), ("used", 60.0)] * 20

    assert play(uses) == []


def test_sliding_window() -> None:
    """The window slides: what a job did before does not count."""

    uses: list[tuple[Use, float]] = [("used", 100_000.0), ("unused", 1805.0)]

    assert [kind for kind, _ in play(uses)] == ["warn"]


def test_use_resolves() -> None:
    """Use after a warning resolves it, and everything starts again."""

    uses: list[tuple[Use, float]] = [("unused", 2000.0), ("used", 30.0), ("unused", 1850.0)]

    assert [kind for kind, _ in play(uses)] == ["warn", "resolved", "warn"]


def test_missing_data() -> None:
    """Missing data restarts the clock without repeating the warning."""

    uses: list[tuple[Use, float]] = [("unused", 2000.0), ("unknown", 600.0), ("unused", 4600.0)]

    expected = [("warn", 1800.0), ("warn_again", 2605.0 + 2700.0), ("hook", 2605.0 + 4500.0)]
    assert expected == play(uses)


def test_new_parts() -> None:
    """A new process or a new GPU is use."""

    for place in (
        PLACE._replace(processes=(*PLACE.processes, (5000, 200.0))),
        PLACE._replace(gpus=(*PLACE.gpus, ("1", "GPU-1"))),
        PLACE._replace(processes=((4242, 900.0),)),
    ):
        track = Track(JOB, "ada", (PLACE,), NOON, "unused", NOON, NOON, unused_seconds=4499.0, level=2)
        after, step = observe(track, holding(place=place), NOON + 5, POLICY)

        assert (after.unused_seconds, after.level) == (0.0, 0)
        assert step is not None
        assert step.kind == "resolved"


def test_new_process_in_doubt() -> None:
    """A process that started while the use was unknown is new afterwards."""

    place = PLACE._replace(processes=(*PLACE.processes, (5000, 200.0)))
    track = Track(JOB, "ada", (PLACE,), NOON, "unused", NOON, NOON, unused_seconds=4000.0, level=2)
    track, _ = observe(track, holding("unknown", place), NOON + 5, POLICY)
    track, step = observe(track, holding(place=place), NOON + 10, POLICY)

    assert (track.level, step and step.kind) == (0, "resolved")


def test_time_of_a_restart() -> None:
    """The time in which no head ran does not count, however short it was."""

    track = Track(
        JOB, "ada", (PLACE,), NOON, "unused", NOON, NOON, unused_seconds=4499.0, level=2, is_dry_run=False
    )
    restarted = resume(track, NOON + 3, POLICY)

    assert observe(track, holding(), NOON + 5, POLICY)[1] is not None
    after, step = observe(restarted, holding(), NOON + 5, POLICY)
    assert (after.unused_seconds, step) == (4499.0, None)


def test_after_dry_run() -> None:
    """After a dry run, the first warning comes at once, and the grace periods are whole."""

    track = Track(JOB, "ada", (PLACE,), NOON, "unused", NOON, NOON, unused_seconds=50_000.0, is_dry_run=True)
    track = resume(track._replace(level=2), NOON, POLICY)._replace(use="unused")
    steps = []
    for tick in range(1, 600):
        track, step = observe(track, holding(), NOON + 5 * tick, POLICY)
        track = track._replace(is_pending=False)
        if step is not None:
            steps.append((step.kind, 5 * tick))

    assert steps == [("warn", 5), ("warn_again", 905), ("hook", 2705)]


def test_no_hook() -> None:
    """Without a hook there are only warnings."""

    steps = play([("unused", 20_000.0)], POLICY._replace(hook=()))

    assert [kind for kind, _ in steps] == ["warn", "warn_again"]


def test_postponed_hook() -> None:
    """A postponed hook waits for another grace period."""

    track = Track(JOB, "ada", (PLACE,), NOON, "unused", NOON, NOON, unused_seconds=4500.0, level=3)
    track = postpone_hook(track)

    assert observe(track, holding(), NOON + 5, POLICY)[1] is None
    ready = track._replace(unused_seconds=4500.0 + 1800.0)
    step = observe(ready, holding(), NOON + 5, POLICY)[1]
    assert step is not None
    assert step.kind == "hook"


def test_exemptions() -> None:
    """Exemptions are patterns of users, jobs and nodes."""

    held = holding()

    assert Exemptions(users=("a*",)).match(held)
    assert Exemptions(jobs=("slurm:47??",)).match(held)
    assert Exemptions(nodes=("login*", "node1")).match(held)
    assert not Exemptions(("bob",), ("slurm:1",), ("node2",)).match(held)
    assert not Exemptions(users=("*",)).match(held._replace(users=frozenset()))


def test_second_user() -> None:
    """An exemption holds for a job that a process of another user claims as well."""

    held = holding()._replace(users=frozenset({"ada", "mallory"}))

    assert held.user is None
    assert Exemptions(users=("ada",)).match(held)


def test_silences() -> None:
    """A silence is like an exemption, unless it is about certain findings or about something else as well."""

    def is_exempt(**fields: tuple[str, ...]) -> bool:
        silence = Silence("s1", NOON, NOON + 60.0, "maintenance", "ops", **fields)
        return Exemptions(silences=lambda: [silence]).match(holding())

    assert is_exempt(nodes=("node1",))
    assert is_exempt(gpus=("node1:0",))
    assert is_exempt(users=("bob", "ada"), jobs=("slurm:4711",))
    assert not is_exempt(nodes=("node2",))
    assert not is_exempt(nodes=("node1",), users=("bob",))
    assert not is_exempt(findings=("gpu_idle",), nodes=("node1",))


def test_start_time_becomes_known() -> None:
    """A process whose start time was unknown for a while is the same one; another start time is another process."""

    def look(track: Track, start: float, seconds: float) -> tuple[Track, Step | None]:
        return observe(
            track, holding(place=PLACE._replace(processes=((4242, start),))), NOON + seconds, POLICY
        )

    first = holding(place=PLACE._replace(processes=((4242, 0.0),)))
    track = observe(None, first, NOON, POLICY)[0]._replace(level=1)
    track, found = look(track, 100.0, 5.0)
    assert found is None
    track, lost = look(track, 0.0, 10.0)
    assert lost is None
    track, other = look(track, 200.0, 15.0)

    assert other is not None
    assert (other.kind, other.reason) == ("resolved", "changed")
    assert track.level == 0


# --- random histories


class Look(NamedTuple):
    """One observation, or a restart of the head before it."""

    use: Use
    seconds: float
    restart: str | None = None
    is_released: bool = False


SMALL = IdlePolicy(200.0, 40.0, 60.0, dry_run=False, hook=("/bin/free-gpu",))
interruptions = st.builds(
    Look,
    use=st.sampled_from(("used", "used", "unknown", "unused")),
    seconds=st.sampled_from((0.5, 1.0, 1.5, 5.0, 11.0, 300.0)),
    restart=st.sampled_from((None, None, "before the step is saved", "after it is saved", "later")),
    is_released=st.sampled_from((False,) * 9 + (True,)),
)
idle_times = st.builds(
    lambda count, seconds, restart: [*[Look("unused", seconds)] * count, Look("unused", seconds, restart)],
    st.integers(1, 60),
    st.sampled_from((2.0, 5.0, 9.9)),
    st.sampled_from((None, None, "before the step is saved", "after it is saved", "later")),
)
looks = st.lists(st.tuples(idle_times, interruptions), min_size=1, max_size=12).map(
    lambda parts: [look for times, interruption in parts for look in (*times, interruption)]
)


class Ledger:
    """What an observer knows: since when nothing but known idleness and at most a blink was seen."""

    def __init__(self) -> None:
        self.events: list[tuple[float, float, Use]] = []

    def add(self, now: float, seconds: float, use: Use) -> None:
        """Add one observation."""
        known: Use = use if seconds <= MAX_GAP_SECONDS else "unknown"
        self.events.append((now, seconds, known))

    def unused_before(self, now: float) -> float:
        """The known idle time before now in the longest stretch of which no window had more than a blink besides."""
        total, stretch = 0.0, list[tuple[float, float]]()
        for time, seconds, use in reversed([event for event in self.events if event[0] <= now]):
            if use == "unused":
                total += seconds
                continue
            stretch.insert(0, (time, seconds))
            window = [length for when, length in stretch if when < time + SMALL.after_seconds]
            if sum(window) > MAX_USED_SHARE * SMALL.after_seconds:
                break
        return total


class Memory:
    """What a head has saved: it survives a restart, as text."""

    def __init__(self) -> None:
        self._text = b"null"

    def save(self, track: Track | None) -> None:
        """Save a track."""
        self._text = msgspec.json.encode(track)

    def load(self) -> Track | None:
        """The saved track."""
        return msgspec.json.decode(self._text, type=Track | None)


def run(history: Iterable[Look], policy: IdlePolicy) -> tuple[list[tuple[Step, float]], Ledger]:
    """Play a history as a head does, with restarts at every point; the steps that were carried out."""
    memory, ledger = Memory(), Ledger()
    track: Track | None = None
    now, done = NOON, list[tuple[Step, float]]()
    for look in history:
        now += look.seconds
        ledger.add(now, look.seconds, look.use)
        step: Step | None
        if look.is_released and track is not None:
            step, track = release(track), None
        elif look.use == "unknown" and track is not None:
            track, step = lose(track, now, policy), None
        else:
            track, step = observe(track, holding(look.use), now, policy)
        if step is not None and look.restart != "before the step is saved":
            memory.save(track)
            if look.restart != "after it is saved":
                done.append((step, now))
                track = None if track is None else track._replace(is_pending=False)
        if look.restart is not None:
            if look.restart == "later":
                memory.save(track)
            saved = memory.load()
            track = None if saved is None else resume(saved, now, policy)._replace(is_pending=False)
    return done, ledger


@settings(max_examples=100, deadline=None)
@given(history=looks)
def test_random_hooks(
    history: list[Look],
) -> None:
    """A hook needs all three times of known idleness, and runs once per episode, wherever the head restarts."""

    done, ledger = run(history, SMALL)

    hooks = [(step.track.episode, now) for step, now in done if step.kind == "hook"]
    assert len(hooks) == len({episode for episode, _ in hooks})
    for _, now in hooks:
        assert ledger.unused_before(now) >= 300.0 - 1e-6
    for (_, before), (_, after) in pairwise(hooks):
        assert after - before >= 300.0


@settings(max_examples=60, deadline=None)
@given(history=looks)
def test_random_order(history: list[Look]) -> None:
    """Steps come in their order, and not too soon after each other."""

    steps, track, now = list[tuple[Step, float]](), None, NOON
    for look in history:
        now += look.seconds
        track, step = observe(track, holding(look.use), now, SMALL)
        track = track._replace(is_pending=False)
        if step is not None:
            steps.append((step, now))

    for (first, then), (second, later) in pairwise(steps):
        assert (first.kind, second.kind) in {
            ("warn", "warn_again"),
            ("warn_again", "hook"),
            ("resolved", "warn"),
            ("warn", "resolved"),
            ("warn_again", "resolved"),
            ("hook", "resolved"),
        }
        if second.kind in ("warn_again", "hook"):
            assert later - then >= (40.0 if second.kind == "warn_again" else 60.0)


def test_damaged_file(tmp_path: Path) -> None:
    """A damaged file is put aside, and everything is observed anew."""

    file = EpisodeFile(str(tmp_path))
    file.save([Track(JOB, "ada", (PLACE,), NOON, "unused", NOON, NOON, level=3)], [NOON])
    assert len(file.load()[0]) == 1
    path = tmp_path / "idle-episodes.json"
    path.write_bytes(path.read_bytes()[:-20])

    assert file.load() == ([], [])
    assert (tmp_path / "idle-episodes.json.damaged").exists()
