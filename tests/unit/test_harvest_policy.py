"""What harvest starts and stops, told as stories."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from gpulse.harvest.events import (
    GpuHolder,
    MachineObservation,
    ObservedUse,
    ProcessId,
    ProgramExited,
    ProgramGone,
    ProgramStarted,
    ProgramStartFailed,
    UserPresence,
)
from gpulse.harvest.policy import next_event_time, step, wants_look
from gpulse.harvest.policy_state import (
    Event,
    Instruction,
    Kill,
    Observed,
    Reconfigured,
    RunReported,
    ShutdownRequested,
    Signal,
    Start,
    StartsClosed,
    State,
    TimePassed,
    initial_state,
)
from gpulse.harvest.settings import DayWindow, HarvestSettings, OpenHours, PeopleSettings, Program

ME = ProcessId(1, 1)
FREE = ObservedUse()
BOTH_FREE = MachineObservation({0: FREE, 1: FREE})
NVIDIA_SMI = GpuHolder(70, 7, ("nvidia-smi",), "bob", working=False, files=frozenset({3}))
TRAINING = GpuHolder(71, 8, ("python3", "train.py"), "alice", working=True, files=frozenset({4}))
EXPORTER = GpuHolder(72, 9, ("exporter",), "root", working=False, files=frozenset({5}))


def program(name: str = "fold", *gpus: int, whole: bool = False, **changes: Any) -> Program:
    """A program for some GPUs, the first one when none is named."""
    return Program(name, (name,), gpus or (0,), whole=whole)._replace(**changes)


def settings(*programs: Program, gpus: int = 2, **changes: Any) -> HarvestSettings:
    """A configuration that starts at once and leaves a GPU alone for a minute."""
    watched = dict.fromkeys(range(gpus), frozenset({"nvidia-smi"}))
    return HarvestSettings("harvest.toml", watched, programs or (program(),), idle_seconds=0)._replace(
        **changes
    )


class Story:
    """The policy, driven by hand."""

    def __init__(self, wanted: HarvestSettings) -> None:
        self.state: State = initial_state(wanted)
        self.now = 1000.0
        self.seen = MachineObservation({})

    def tell(self, event: Event) -> list[Instruction]:
        """Any event, and another look at the same when something could be started then."""
        self.now = event.now
        if isinstance(event, Observed):
            self.seen = event.observation
        self.state, instructions = step(self.state, event)
        if wants_look(self.state, self.now):
            self.state, more = step(self.state, Observed(self.now, self.seen))
            assert not wants_look(self.state, self.now)
            return [*instructions, *more]
        return instructions

    def see(
        self, *uses: ObservedUse, after: float = 1.0, people: tuple[UserPresence, ...] | None = None
    ) -> list[Instruction]:
        """A look at the GPUs, in their order; those that are not named are free."""
        known = dict(enumerate(uses))
        everything = {index: known.get(index, FREE) for index in self.state.settings.gpus}
        return self.tell(Observed(self.now + after, MachineObservation(everything, people)))

    def hear(
        self, told: ProgramStarted | ProgramExited | ProgramStartFailed | ProgramGone, after: float = 0.0
    ) -> list[Instruction]:
        """A word of the runner."""
        return self.tell(RunReported(self.now + after, told))

    def wait(self, seconds: float) -> list[Instruction]:
        """Time goes by."""
        return self.tell(TimePassed(self.now + seconds, self.state.wall_offset))

    def run(self) -> str:
        """The only run there is."""
        (run,) = self.state.runs
        return run


def started(instructions: list[Instruction]) -> list[str]:
    """The programs that are to be started."""
    return [instruction.program.name for instruction in instructions if isinstance(instruction, Start)]


def test_a_free_gpu_gets_its_program() -> None:
    """It is started at the first look that finds the GPU free, and once only."""

    story = Story(settings())

    assert [] == story.wait(1)
    assert ["fold"] == started(story.see())
    assert [] == story.see()


def test_somebody_who_comes_is_given_way_to() -> None:
    """The stop signal at once, the end after the grace period, and each of them once."""

    story = Story(settings(program(grace_seconds=5)))
    story.see()
    run = story.run()

    (first,) = story.see(ObservedUse((TRAINING,)))
    assert isinstance(first, Signal)
    assert (run, 15) == first[:2]
    assert ("gpu", "alice") == first.reason[:2]
    assert "alice's python3 (pid 71) is using GPU 0" == first.reason.what
    assert [] == story.see(ObservedUse((TRAINING,)))
    assert [] == story.wait(3.5)
    (second,) = story.wait(0.5)
    assert isinstance(second, Kill)
    assert [] == story.wait(10)
    assert [] == story.hear(ProgramGone(run))


def test_no_grace_is_the_end_at_once() -> None:
    """Where no time is given, nobody is asked."""

    story = Story(settings(program(grace_seconds=0)))
    story.see()

    assert [Kill] == [type(order) for order in story.see(ObservedUse((TRAINING,)))]


def test_nothing_is_started_while_something_of_ours_is_left() -> None:
    """A GPU belongs to a run until nothing of it is there."""

    story = Story(settings(cooldown_seconds=0))
    story.see()
    run = story.run()
    story.see(ObservedUse((TRAINING,)))

    assert [] == story.see(after=60)[1:]
    story.hear(ProgramExited(run, -15))
    assert [] == started(story.see())
    assert ["fold"] == started(story.hear(ProgramGone(run)))


def test_a_gpu_is_left_alone_for_a_while_after_somebody_came() -> None:
    """Counted from the last time somebody was there, so that one who comes and goes is not met each time."""

    story = Story(settings(cooldown_seconds=60))
    story.see()
    run = story.run()
    story.see(ObservedUse((TRAINING,)))
    story.hear(ProgramGone(run))

    assert [] == started(story.see(after=59))
    assert [] == started(story.see(ObservedUse((TRAINING,)), after=0.5))
    assert [] == started(story.see(after=59))
    assert ["fold"] == started(story.wait(2))


def test_only_the_gpu_that_somebody_came_to_is_left_alone() -> None:
    """The others of a program that had to go are put to work at once."""

    story = Story(settings(program("all", 0, 1, whole=True), program("single", 0)))
    assert ["all"] == started(story.see())
    story.see(FREE, ObservedUse((TRAINING,)))

    assert ["single"] == started(story.hear(ProgramGone("all.1")))


def test_a_gpu_must_have_been_free_for_some_time() -> None:
    """One look at a free GPU is not enough when idle_seconds says so."""

    story = Story(settings(idle_seconds=30))
    story.see()

    assert [] == story.see(after=29)
    assert story.state.gpus[0].free_since is not None
    assert story.now + 1 == next_event_time(story.state, story.now)
    assert ["fold"] == started(story.wait(1))


def test_not_knowing_is_as_somebody_being_there() -> None:
    """Neither is a program started, nor left running."""

    story = Story(settings())
    story.see()
    story.see(ObservedUse(unknown="the driver does not answer"))

    assert story.state.runs[story.run()].reason is not None
    assert "unknown" == story.state.runs[story.run()].reason.kind  # type: ignore[union-attr]
    fresh = Story(settings())
    assert [] == fresh.see(ObservedUse(unknown="no permission"))


def test_looks_that_do_not_come_are_not_knowing() -> None:
    """A GPU that nobody looked at for several intervals is given back."""

    story = Story(settings(interval_seconds=10))
    story.see()

    assert [] == story.wait(34)
    assert ["unknown"] == [order.reason.kind for order in story.wait(2) if isinstance(order, Signal)]


def test_ignored_programs_do_not_count() -> None:
    """A look by nvidia-smi neither stops a program nor keeps one from being started."""

    story = Story(settings())

    assert ["fold"] == started(story.see(ObservedUse((NVIDIA_SMI,))))
    assert [] == story.see(ObservedUse((NVIDIA_SMI,)))


@pytest.mark.parametrize(
    ("ignored", "always", "stopped"),
    [((), (), False), ((), ("bob",), True), (("alice",), (), False), (("bob",), ("bob",), True)],
)
def test_some_users_never_count_and_some_always_do(
    ignored: tuple[str, ...], always: tuple[str, ...], stopped: bool
) -> None:
    """Those who always count do so whatever program they run, and also when they are among the others."""

    story = Story(settings(ignore_users=frozenset(ignored), always_users=frozenset(always)))
    story.see()
    holders = (NVIDIA_SMI,) if "alice" not in ignored else (TRAINING,)

    assert stopped == bool(story.see(ObservedUse(holders)))


def test_one_who_only_holds_a_gpu_stops_counting() -> None:
    """An exporter preempts when it opens the GPU, is a user for a minute, and again when it opens it once more."""

    story = Story(settings(quiet_seconds=60, cooldown_seconds=0))
    story.see()
    run = story.run()
    assert [Signal] == [type(order) for order in story.see(ObservedUse((EXPORTER,)))]
    story.hear(ProgramGone(run))

    assert [] == story.see(ObservedUse((EXPORTER,)), after=59)
    assert ["fold"] == started(story.see(ObservedUse((EXPORTER,)), after=1))
    again = EXPORTER._replace(files=frozenset({5, 6}))
    assert [Signal] == [type(order) for order in story.see(ObservedUse((again,)))]


def test_one_who_begins_to_work_counts() -> None:
    """However long it had been quiet before."""

    story = Story(settings(quiet_seconds=10))
    story.see(ObservedUse((EXPORTER,)))
    assert ["fold"] == started(story.see(ObservedUse((EXPORTER,)), after=10))

    assert [Signal] == [type(order) for order in story.see(ObservedUse((EXPORTER._replace(working=True),)))]


def test_an_open_by_somebody_who_cannot_be_seen_counts_for_a_while() -> None:
    """As any holder without work: it preempts, and is forgotten when nothing comes of it."""

    story = Story(settings(quiet_seconds=60, cooldown_seconds=0))
    story.see()
    run = story.run()
    (order,) = story.see(ObservedUse(opened_unseen=True))
    assert isinstance(order, Signal)
    story.hear(ProgramGone(run))

    assert [] == story.see(after=59)
    assert ["fold"] == started(story.see(after=1))


def test_an_ignored_program_that_was_just_started_explains_an_open() -> None:
    """Other users' nvidia-smi does not preempt where their processes cannot be looked into; their training does."""

    story = Story(settings())
    story.see()

    assert [] == story.see(ObservedUse(opened_unseen=True, suspects=(("bash",), ("nvidia-smi",))))
    assert [Signal] == [
        type(order) for order in story.see(ObservedUse(opened_unseen=True, suspects=(("bash",),)))
    ]


def test_thresholds_are_for_what_nobody_in_sight_does() -> None:
    """A GPU that is busy or full is not taken; on one that we use they say nothing."""

    story = Story(settings(utilization_ratio=0.05, memory_bytes=1 << 30))

    assert [] == story.see(ObservedUse(utilization_ratio=0.5, memory_bytes=0))
    assert [] == story.see(ObservedUse(utilization_ratio=0.0, memory_bytes=2 << 30))
    assert [] == story.see(ObservedUse(utilization_ratio=None, memory_bytes=0))
    assert [] == story.see(ObservedUse(utilization_ratio=0.0, memory_bytes=None))
    assert ["fold"] == started(story.see(ObservedUse(utilization_ratio=0.05, memory_bytes=1 << 30)))
    assert [] == story.see(ObservedUse(utilization_ratio=1.0, memory_bytes=9 << 30))


def test_a_program_for_two_gpus_needs_both() -> None:
    """And goes when somebody comes to either."""

    story = Story(settings(program("pair", 0, 1)))

    assert [] == story.see(FREE, ObservedUse((TRAINING,)))
    assert ["pair"] == started(story.see())
    assert [Signal] == [type(order) for order in story.see(FREE, ObservedUse((TRAINING,)))]


def test_a_program_for_all_is_preferred() -> None:
    """It comes first when all GPUs are free, whatever the order in the file."""

    story = Story(settings(program("single", 0), program("all", 0, 1, whole=True)))

    assert ["all"] == started(story.see())


def test_a_program_for_all_displaces_those_for_some() -> None:
    """Once the last GPU is free the others make room, and nothing else is started meanwhile."""

    single, other = program("single", 0), program("other", 0)
    story = Story(settings(single, other, program("all", 0, 1, whole=True)))
    assert ["single"] == started(story.see(FREE, ObservedUse((TRAINING,))))
    run = story.run()

    (order,) = story.see()
    assert isinstance(order, Signal)
    assert "displaced" == order.reason.kind
    assert ["all"] == started(story.hear(ProgramGone(run)))


def test_a_program_for_all_that_fails_lets_the_others_work() -> None:
    """It does not drive them away each time that it may be tried again."""

    whole = program("all", 0, 1, whole=True, backoff_seconds=5, max_backoff_seconds=100)
    story = Story(settings(program("single", 0), whole, gpus=2, interval_seconds=100))
    assert ["all"] == started(story.see())
    story.hear(ProgramExited(story.run(), 1))
    assert ["single"] == started(story.hear(ProgramGone(story.run())))

    assert [] == story.see(after=20)
    assert ["displaced"] == [order.reason.kind for order in story.see(after=90) if isinstance(order, Signal)]


def test_as_many_gpus_as_are_allowed() -> None:
    """The rest waits, and takes the place of one that ends."""

    one, two = program("one", 0, restart="never"), program("two", 1)
    story = Story(settings(one, two, max_gpus=1))

    assert ["one"] == started(story.see())
    story.hear(ProgramExited(story.run(), 0))
    assert ["two"] == started(story.hear(ProgramGone(story.run())))


def test_people_at_the_machine() -> None:
    """Everything goes when somebody sits down, and nothing is known before the first look."""

    there = UserPresence("carol", "pts/3", 4.0)
    people = PeopleSettings(enabled=True, whitelist=frozenset({"dave"}), idle_seconds=300)
    story = Story(settings(people=people))

    assert [] == story.see()
    assert [] == story.see(people=(there,))
    assert [] == story.see(people=(there._replace(idle_seconds=None),))
    away = (there._replace(idle_seconds=300.0), there._replace(user="dave"))
    assert ["fold"] == started(story.see(people=away))
    assert [] == story.see()
    (order,) = story.see(people=(there,))
    assert isinstance(order, Signal)
    assert ("people", "carol", "carol is logged in and active at pts/3") == order.reason


def test_hours_of_the_day() -> None:
    """A program is started within its hours, over midnight too, and stopped at their end."""

    night = OpenHours((DayWindow(frozenset({0}), 22 * 60, 7 * 60),))
    story = Story(settings(program(hours=night), interval_seconds=1e9))

    def at(day: int, hour: int) -> list[Instruction]:
        moment = datetime(2026, 6, day, hour, 30, tzinfo=UTC).replace(tzinfo=None).timestamp()
        return [*story.tell(TimePassed(story.now, moment - story.now)), *story.see()]

    assert [] == at(1, 21)
    assert ["fold"] == started(at(1, 22))
    assert [] == at(2, 6)
    stop = story.tell(TimePassed(story.now, story.state.wall_offset + 3600))
    assert ["hours"] == [order.reason.kind for order in stop if isinstance(order, Signal)]
    story.hear(ProgramGone(story.run()))
    assert [] == at(2, 22)


def test_a_program_that_crashes_is_started_less_and_less_often() -> None:
    """The waits double up to the longest, and a good long run forgets them."""

    failing = program(backoff_seconds=5, max_backoff_seconds=18)
    story = Story(settings(failing, interval_seconds=1e6))
    story.see()
    waits = []
    for _ in range(4):
        story.hear(ProgramExited(story.run(), 1))
        story.hear(ProgramGone(story.run()))
        soonest = next_event_time(story.state, story.now)
        assert soonest is not None
        waits.append(soonest - story.now)
        assert ["fold"] == started(story.wait(soonest - story.now))

    assert [5, 10, 18, 18] == waits
    story.wait(100)
    story.hear(ProgramExited(story.run(), -11))
    story.hear(ProgramGone(story.run()))
    assert story.now + 5 == next_event_time(story.state, story.now)


@pytest.mark.parametrize(
    ("restart", "status", "again"),
    [
        ("always", 0, True),
        ("always", 1, True),
        ("on-failure", 0, False),
        ("on-failure", 1, True),
        ("never", 1, False),
    ],
)
def test_restart_policies(restart: str, status: int, again: bool) -> None:
    """Whether one that ended by itself is started again."""

    story = Story(settings(program(restart=restart), interval_seconds=1e6))
    story.see()
    story.hear(ProgramStarted(story.run(), ME, ME))
    story.hear(ProgramExited(story.run(), status), after=200)
    orders = [*story.hear(ProgramGone(story.run())), *story.wait(1000)]

    assert again == bool(started(orders))


def test_a_preempted_program_did_not_fail() -> None:
    """Whatever its exit code was after the signal, and also when it should never be restarted."""

    story = Story(settings(program(restart="never"), cooldown_seconds=0))
    story.see()
    run = story.run()
    story.see(ObservedUse((TRAINING,)))
    story.hear(ProgramExited(run, 143))
    story.hear(ProgramGone(run))

    assert ["fold"] == started(story.see())


def test_one_that_cannot_be_started_waits() -> None:
    """Why it could not be is kept."""

    story = Story(settings(interval_seconds=1e6))
    story.see()
    story.hear(ProgramStartFailed(story.run(), "no such file"))

    assert "no such file" == story.state.programs["fold"].last_error
    assert ["fold"] == started(story.wait(5))


def test_a_change_of_the_configuration() -> None:
    """What is unchanged goes on; what changed or left is stopped, then started as it is now."""

    kept, before = program("kept", 0), program("changed", 1)
    story = Story(settings(kept, before))
    assert ["kept", "changed"] == started(story.see())
    after = before._replace(command=("changed", "--faster"))

    orders = story.tell(Reconfigured(story.now, settings(kept, after), BOTH_FREE))

    (order,) = orders
    assert isinstance(order, Signal)
    assert ("changed.2", "changed") == (order.run, order.reason.kind)
    (again,) = story.hear(ProgramGone("changed.2"))
    assert isinstance(again, Start)
    assert after == again.program


def test_a_gpu_that_is_no_longer_watched_is_given_back() -> None:
    """With the programs on it."""

    story = Story(settings(program("one", 1)))
    story.see()

    orders = story.tell(Reconfigured(story.now, settings(program("zero", 0), gpus=1), BOTH_FREE))
    assert ["one.1"] == [order.run for order in orders if isinstance(order, Signal)]
    assert ["zero"] == started(orders)


def test_a_change_that_looks_more_often_stops_nothing() -> None:
    """Nor does one that begins to watch people, when nobody is there: it comes with a look."""

    story = Story(settings(interval_seconds=60))
    story.see()
    story.wait(50)
    watched = settings(interval_seconds=1, people=PeopleSettings(enabled=True))

    assert [] == story.tell(Reconfigured(story.now, watched, BOTH_FREE._replace(people=())))


def test_nothing_is_started_on_what_was_seen_before() -> None:
    """When time alone is up, somebody looks first."""

    story = Story(settings(idle_seconds=30, interval_seconds=600))
    story.see()
    story.state, orders = step(story.state, TimePassed(story.now + 30, 0.0))

    assert [] == orders
    assert wants_look(story.state, story.now + 30)
    assert (
        []
        == step(story.state, Observed(story.now + 30, MachineObservation({0: ObservedUse((TRAINING,))})))[1]
    )
    assert ["fold"] == started(step(story.state, Observed(story.now + 30, BOTH_FREE))[1])


def test_a_program_for_all_that_has_nothing_to_do_lets_the_others_work() -> None:
    """One that ends well, but at once, does not drive the others away again and again."""

    whole = program("all", 0, 1, whole=True, max_backoff_seconds=100)
    story = Story(settings(program("single", 0), whole, interval_seconds=100))
    assert ["all"] == started(story.see())
    story.hear(ProgramExited(story.run(), 0))
    assert ["single"] == started(story.hear(ProgramGone(story.run())))

    assert [] == story.see(after=50)
    assert ["displaced"] == [order.reason.kind for order in story.see(after=51) if isinstance(order, Signal)]


def test_the_end() -> None:
    """Everything is asked to end, ended when it does not, and nothing is started."""

    story = Story(settings(program("a", 0), program("b", 1), interval_seconds=1e6))
    story.see()

    assert [Signal, Signal] == [type(order) for order in story.tell(ShutdownRequested(story.now))]
    assert [Kill, Kill] == [type(order) for order in story.wait(3)]
    assert [] == [*story.hear(ProgramGone("a.1")), *story.hear(ProgramGone("b.2")), *story.see()]
    assert not story.state.runs


def test_when_nothing_new_is_wanted_what_runs_goes_on() -> None:
    """Until it ends, and it is not started again."""

    story = Story(settings())
    story.see()

    assert [] == story.tell(StartsClosed(story.now))
    story.hear(ProgramExited(story.run(), 0), after=100)
    assert [] == [*story.hear(ProgramGone(story.run())), *story.see()]


def test_what_is_reported_of_unknown_runs_is_nothing() -> None:
    """The runner may speak of one that was given up."""

    story = Story(settings())

    assert [] == story.hear(ProgramGone("other.1"))
