"""What must hold for the policy in every history, checked by an observer that keeps its own books."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.harvest.events import (
    GpuHolder,
    MachineObservation,
    ObservedUse,
    ProcessId,
    ProgramExited,
    ProgramGone,
    ProgramStarted,
    ProgramStartFailed,
    RunEvent,
    UserPresence,
)
from gpulse.harvest.policy import step
from gpulse.harvest.policy_state import (
    Event,
    Kill,
    Observed,
    Reconfigured,
    RunReported,
    ShutdownRequested,
    Signal,
    Start,
    TimePassed,
    initial_state,
)
from gpulse.harvest.settings import HarvestSettings, PeopleSettings, Program

GPUS = 3
NAMES = (("nvidia-smi",), ("python3", "train"), ("exporter",))
SUBSETS = ((0,), (1,), (2,), (0, 1), (1, 2))

holders = st.builds(
    GpuHolder,
    pid=st.integers(1, 4),
    start_ticks=st.integers(1, 2),
    names=st.sampled_from(NAMES),
    user=st.sampled_from(("alice", "bob", "root", None)),
    working=st.booleans(),
    files=st.frozensets(st.integers(3, 5), max_size=2),
)
uses = st.builds(
    ObservedUse,
    holders=st.one_of(st.just(()), st.tuples(holders), st.tuples(holders, holders)),
    unknown=st.sampled_from((None, None, None, "no permission")),
    opened_unseen=st.sampled_from((False, False, False, True)),
    suspects=st.sampled_from(((), (), (("bash",),), (("bash",), ("nvidia-smi",)))),
    utilization_ratio=st.none(),
    memory_bytes=st.none(),
)
free_or_used = st.one_of(st.just(ObservedUse()), uses)
people = st.one_of(
    st.none(),
    st.just(()),
    st.tuples(
        st.builds(
            UserPresence,
            st.sampled_from(("carol", "dave")),
            st.just("pts/1"),
            st.sampled_from((None, 5.0, 400.0)),
        )
    ),
)
programs = st.builds(
    lambda gpus, grace, restart: (gpus, grace, restart),
    st.one_of(st.none(), st.sampled_from(SUBSETS)),
    st.sampled_from((0.0, 2.0, 5.0)),
    st.sampled_from(("always", "on-failure", "never")),
)
configurations = st.builds(
    lambda wanted, idle, cool, quiet, most, watch: HarvestSettings(
        "x.toml",
        dict.fromkeys(range(GPUS), frozenset({"nvidia-smi"})),
        tuple(
            Program(
                f"p{number}",
                ("true",),
                gpus or tuple(range(GPUS)),
                whole=gpus is None,
                grace_seconds=grace,
                restart=restart,
            )
            for number, (gpus, grace, restart) in enumerate(wanted)
        ),
        interval_seconds=1.0,
        idle_seconds=idle,
        cooldown_seconds=cool,
        quiet_seconds=quiet,
        max_gpus=most,
        people=PeopleSettings(enabled=watch, whitelist=frozenset({"dave"})),
    ),
    st.lists(programs, min_size=1, max_size=4),
    st.sampled_from((0.0, 3.0)),
    st.sampled_from((0.0, 4.0)),
    st.sampled_from((0.0, 6.0)),
    st.sampled_from((None, None, 1, 2)),
    st.booleans(),
)
moves = st.one_of(
    st.tuples(st.just("look"), st.lists(free_or_used, min_size=GPUS, max_size=GPUS), people),
    st.tuples(st.just("look"), st.just([ObservedUse()] * GPUS), st.just(())),
    st.tuples(st.just("glance"), st.integers(0, GPUS - 1), uses),
    st.tuples(
        st.just("tell"),
        st.integers(0, 9),
        st.sampled_from(("started", "exited", "crashed", "gone", "gone", "failed")),
    ),
    st.tuples(st.just("wait"), st.just(None), st.just(None)),
    st.tuples(st.just("change"), configurations, st.lists(free_or_used, min_size=GPUS, max_size=GPUS)),
)
histories = st.lists(st.tuples(st.sampled_from((0.0, 0.1, 1.0, 3.0)), moves), max_size=40)


class Observer:
    """Remembers what was seen and ordered, and complains."""

    def __init__(self, wanted: HarvestSettings) -> None:
        self.wanted = wanted
        self.runs: dict[str, Program] = {}
        self.signalled: dict[str, float] = {}
        self.killed: set[str] = set()
        self.uses: dict[int, ObservedUse] = {}
        self.looked_at: dict[int, float] = {}
        self.first: dict[tuple[int, int, int | None], tuple[float, frozenset[int]]] = {}
        self.unseen: dict[int, float] = {}
        self.people: tuple[UserPresence, ...] | None = None

    def watch(self, event: Event) -> None:
        """Take in what the policy is about to be told."""
        match event:
            case Observed(now, sighting):
                for gpu, use in sighting.uses.items():
                    self._see(gpu, use, now)
                if sighting.people is not None:
                    self.people = sighting.people
            case RunReported(_, ProgramGone(run) | ProgramStartFailed(run)):
                self.runs.pop(run, None)
            case Reconfigured(now, wanted, sighting):
                if wanted.people != self.wanted.people:
                    self.people = None
                self.wanted = wanted
                self.watch(Observed(now, sighting))

    def _see(self, gpu: int, use: ObservedUse, now: float) -> None:
        self.uses[gpu] = use
        self.looked_at[gpu] = now
        if use.opened_unseen and ("nvidia-smi",) not in use.suspects:
            self.unseen[gpu] = now
        kept = {}
        for holder in use.holders:
            key = (gpu, holder.pid, holder.start_ticks)
            since, files = self.first.get(key, (now, frozenset(range(99))))
            kept[key] = (now if holder.files - files else since, holder.files)
        self.first = {key: value for key, value in self.first.items() if key[0] != gpu} | kept

    def users(self, gpu: int, now: float) -> bool:
        """Somebody else has this GPU, or nobody knows."""
        use = self.uses.get(gpu)
        if use is None or use.unknown is not None:
            return True
        if gpu in self.unseen and now - self.unseen[gpu] < self.wanted.quiet_seconds:
            return True
        return any(
            "nvidia-smi" not in holder.names
            and (
                holder.working
                or now - self.first[gpu, holder.pid, holder.start_ticks][0] < self.wanted.quiet_seconds
            )
            for holder in use.holders
        )

    def people_reason(self) -> bool:
        """Somebody is at the machine, or nobody knows."""
        if not self.wanted.people.enabled:
            return False
        return self.people is None or any(
            person.user != "dave" and (person.idle_seconds is None or person.idle_seconds < 300)
            for person in self.people
        )

    def check(self, event: Event, orders: list[object]) -> None:
        """What the policy ordered must be allowed, and what had to be ordered must have been."""
        now = event.now
        for order in orders:
            if isinstance(order, Start):
                assert {now} == {self.looked_at.get(gpu) for gpu in order.program.gpus}, "an old look"
                taken = {gpu for program in self.runs.values() for gpu in program.gpus}
                assert taken.isdisjoint(order.program.gpus), "two programs on a GPU"
                assert not any(self.users(gpu, now) for gpu in order.program.gpus), "started beside somebody"
                assert not self.people_reason(), "started beside somebody at the machine"
                assert (
                    self.wanted.max_gpus is None
                    or len(taken) + len(order.program.gpus) <= self.wanted.max_gpus
                )
                assert order.run not in self.runs
                self.runs[order.run] = order.program
            elif isinstance(order, Signal):
                assert order.run in self.runs, "signalled what is not there"
                assert order.run not in self.signalled, "signalled twice"
                self.signalled[order.run] = now
            elif isinstance(order, Kill):
                assert order.run in self.runs, "killed what is not there"
                assert order.run not in self.killed, "killed twice"
                self.killed.add(order.run)
        for run, program in self.runs.items():
            if isinstance(event, Observed | Reconfigured) and any(
                gpu in event.observation.uses and self.users(gpu, now) for gpu in program.gpus
            ):
                assert run in self.signalled or run in self.killed, "somebody was not given way to"
            if self.people_reason():
                assert run in self.signalled or run in self.killed, "somebody sits there"
            if run in self.signalled and now >= self.signalled[run] + program.grace_seconds:
                assert run in self.killed, "the grace period is over"


def played(move: tuple[str, object, object], now: float, runs: list[str]) -> Event | None:
    """One move as the event it stands for."""
    match move:
        case ("look", list() as seen, who):
            return Observed(now, MachineObservation(dict(enumerate(seen)), who))  # type: ignore[arg-type]
        case ("glance", int() as gpu, ObservedUse() as use):
            return Observed(now, MachineObservation({gpu: use}))
        case ("tell", int() as which, str() as word) if runs:
            run = runs[which % len(runs)]
            words: dict[str, RunEvent] = {
                "started": ProgramStarted(run, ProcessId(1, 1), ProcessId(2, 2)),
                "exited": ProgramExited(run, 0),
                "crashed": ProgramExited(run, 1),
                "gone": ProgramGone(run),
                "failed": ProgramStartFailed(run, "no such file"),
            }
            return RunReported(now, words[word])
        case ("change", HarvestSettings() as wanted, list() as seen):
            return Reconfigured(now, wanted, MachineObservation(dict(enumerate(seen)), ()))
        case ("wait", _, _):
            return TimePassed(now, 0.0)
    return None


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(configurations, histories)
def test_every_history_is_safe(
    wanted: HarvestSettings, history: list[tuple[float, tuple[str, object, object]]]
) -> None:
    """Never two of ours on a GPU, never beside others, always gone in time, nothing asked or ended twice."""

    state, observer, now = initial_state(wanted), Observer(wanted), 100.0
    for seconds, move in history:
        now += seconds
        event = played(move, now, list(observer.runs))
        if event is not None:
            observer.watch(event)
            state, orders = step(state, event)
            observer.check(event, list(orders))
            assert set(observer.runs) == set(state.runs)
    state, orders = step(state, ShutdownRequested(now))
    observer.check(ShutdownRequested(now), list(orders))
    state, orders = step(state, TimePassed(now + 5, 0.0))
    observer.check(TimePassed(now + 5, 0.0), list(orders))
    assert observer.killed >= observer.runs.keys()


@settings(max_examples=200, deadline=None)
@given(configurations)
def test_a_program_for_all_comes_first(wanted: HarvestSettings) -> None:
    """On a free machine nothing else runs once a program for all GPUs may."""

    state = initial_state(wanted._replace(idle_seconds=0.0))
    state, orders = step(
        state, Observed(1.0, MachineObservation(dict.fromkeys(range(GPUS), ObservedUse()), ()))
    )
    whole = [program for program in wanted.programs if program.whole]
    fits = wanted.max_gpus is None

    started = [order.program for order in orders if isinstance(order, Start)]
    assert not (whole and fits) or whole[:1] == started


@settings(max_examples=200, deadline=None)
@given(configurations, st.integers(0, GPUS - 1), holders)
def test_all_that_can_run_does(wanted: HarvestSettings, gpu: int, holder: GpuHolder) -> None:
    """A free machine is put to work: what is left has no GPU, no room or is for all of them."""

    wanted = wanted._replace(idle_seconds=0.0, max_gpus=None)
    seen = dict.fromkeys(range(GPUS), ObservedUse()) | {
        gpu: ObservedUse((holder._replace(names=("python3",), working=True),))
    }
    _, orders = step(initial_state(wanted), Observed(1.0, MachineObservation(seen, ())))

    taken = {gpu, *(index for order in orders if isinstance(order, Start) for index in order.program.gpus)}
    running = {order.program.name for order in orders if isinstance(order, Start)}
    for program in wanted.programs:
        assert program.name in running or not taken.isdisjoint(program.gpus)
