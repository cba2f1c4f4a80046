"""A head and its agents at full size: ingest, questions while it goes on, exports, an agent, many sessions."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import fleet, measure, store
from benchmarks.fake_machine import fake_machine
from benchmarks.measure import Report, Spread, Table, Target
from benchmarks.processes import (
    Head,
    Process,
    allow_connections,
    cores,
    cpu_seconds,
    memory,
    private_memory,
    sync_counter,
    thread_seconds,
    thread_switches,
    workplace,
)
from gpulse.model.session import Session
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.store import Query

NAME = "cluster"
_GPUS = 8
_HOUR = 3600
_AGES = 1e11
"""Later than any time in a store."""
_SETTLE_SECONDS = 5.0
_QUICK_INTERVAL = 0.1
"""Many frames of few GPUs, so that the files of the sessions are written soon."""
_BUSY_SECONDS = 0.02
"""A sealing process that used less in a second waited."""
_SWITCHES = 40
"""A thread that goes to sleep more often in a second is the one in the fake driver's wait for events."""


class Size(NamedTuple):
    """How much of everything."""

    agents: int
    seconds: float
    """Of ingest."""
    seal_after: str
    history_nodes: int
    day_seconds: int
    takes: int
    session_gpus: int
    agent_seconds: float
    sessions_agents: int
    sessions_turns: int
    sessions_seconds: float
    before: str = ""
    """The source of an earlier version, whose agent is measured beside the others."""


_FULL = Size(1250, 130.0, "10m", 125, 24 * _HOUR, 9, 64, 75.0, 40, 5, 7.0)
_QUICK = Size(60, 30.0, "8s", 10, 2 * _HOUR, 3, 16, 30.0, 20, 2, 4.0)


@contextmanager
def _fleet(
    address: str, folder: Path, agents: int, seconds: float, core: int, interval: float = 1.0
) -> Iterator[Process]:
    """So many agents in a process of their own; in the block they are at work."""
    command = [sys.executable, "-m", "benchmarks.fleet", address, "--agents", str(agents)]
    command += ["--gpus", str(_GPUS), "--seconds", str(seconds), "--interval", str(interval)]
    command += ["--token-file", json.loads((folder / "data" / "head.json").read_text())["token_file"]]
    with Process(command, folder, core=core) as made:
        start = made.lines(1, 120.0)[0]["start"]
        time.sleep(max(0.0, start - time.time()) + _SETTLE_SECONDS)
        yield made


# --- ingest


class _Second(NamedTuple):
    """What a head and its sealing process have used by one moment."""

    time: float
    head_cpu: float
    sealer_cpu: float
    head_syncs: int
    sealer_syncs: int


def ingest(report: Report, size: Size) -> None:
    """A fleet into the store of a head on a core of its own."""
    agents = allow_connections(size.agents)
    mine, others = cores()
    with workplace() as folder:
        counter = sync_counter(folder)
        with Head(
            folder, "--freq", "1000", "--seal-after", size.seal_after, core=mine, counted=counter
        ) as head:
            with _fleet(head.address, folder, agents, size.seconds, others) as made:
                taken, sealer_peak = _watched(head, size.seconds - 2 * _SETTLE_SECONDS)
                came = made.lines(2, 120.0)[1]
            peak = memory(head.pid, "VmHWM")
        stored, rows = _stored(head.data)
    stretch, sealings = _steady(taken)
    first, last = stretch[0], stretch[-1]
    length = last.time - first.time
    share = (last.head_cpu - first.head_cpu) / length
    sealing = (last.sealer_cpu - first.sealer_cpu) / length
    syncs = (last.head_syncs - first.head_syncs) / length
    what = f"{agents} agents x {_GPUS} GPUs at 1 Hz"
    every = [(b.head_cpu - a.head_cpu) / (b.time - a.time) for a, b in pairwise(stretch)]
    complete = came["sent"] == came["durable"] == stored and rows == stored * _GPUS
    report.targets += [
        Target(
            f"{what}: CPU of the head", f"{100 * share:.0f} % of a core", "60 % with the next", share <= 0.6
        ),
        Target(
            "CPU of head and sealing process",
            f"{100 * (share + sealing):.0f} % of a core",
            "60 %",
            share + sealing <= 0.6,
        ),
        Target("peak RSS of the head", f"{peak:.0f} MB", "600 MB", peak <= 600),
        Target(
            "peak RSS of head and sealing process",
            f"{peak + sealer_peak:.0f} MB",
            "600 MB",
            peak + sealer_peak <= 600,
        ),
        Target("waits for the disk a second, head", f"{syncs:.2f}", "1", syncs <= 1.1),
        Target("from sample to durable, p99", f"{came['p99']:.2f} s", "1.5 s", came["p99"] <= 1.5),
        Target(
            "frames sent = durable = stored once",
            f"{came['sent']:,} = {came['durable']:,} = {stored:,}",
            "all",
            complete,
        ),
    ]
    table = Table(f"Ingest, {what}:", ("what", "figure"))
    table.rows += [
        ("stretch that is counted, and sealings in it", f"{length:.0f} s, {sealings}"),
        ("head, each second", Spread.of(every).text(100, 0, " %")),
        ("sealing process (nice 19), on the same core", f"{100 * sealing:.1f} %"),
        ("peak RSS of the sealing process", f"{sealer_peak:.0f} MB"),
        ("waits for the disk, sealing process, in all", f"{last.sealer_syncs - first.sealer_syncs}"),
        (
            "from sample to durable: p50, p99, worst",
            f"{came['p50']:.2f} s, {came['p99']:.2f} s, {came['max']:.2f} s",
        ),
        ("bytes of a frame", f"{came['frame_bytes']:.0f}"),
        ("GPU-samples a second", f"{agents * _GPUS:,}"),
    ]
    report.tables.append(table)
    if agents < size.agents:
        report.notes.append(f"Only {agents} agents: the limit of open files allows no more.")


def _watched(head: Head, seconds: float) -> tuple[list[_Second], float]:
    """Look once a second; what was seen, and the most that a sealing process took."""
    taken = []
    peak = 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        head.check()
        sealer = head.sealer
        taken.append(
            _Second(
                time.monotonic(),
                cpu_seconds(head.pid),
                cpu_seconds(sealer),
                head.syncs(head.pid),
                head.syncs(sealer),
            )
        )
        peak = max(peak, memory(sealer, "VmHWM"))
        time.sleep(1.0)
    return taken, peak


def _steady(taken: Sequence[_Second]) -> tuple[Sequence[_Second], int]:
    """From the end of a sealing to the end of another one, and how many there are between; all when there is one."""
    used = [after.sealer_cpu - before.sealer_cpu for before, after in pairwise(taken)]
    ends = [
        place + 1
        for place, (before, after) in enumerate(pairwise(used))
        if before > _BUSY_SECONDS >= after and taken[place].sealer_cpu > 0
    ]
    if len(ends) > 1:
        return taken[ends[0] : ends[-1] + 1], len(ends) - 1
    return taken, len(ends)


def _stored(directory: Path) -> tuple[int, int]:
    """How many different frames a store holds, and how many samples of GPUs."""
    frames, rows = 0, 0
    with LocalStore(str(directory)) as archive:
        seen: list[Any] = []
        for found in archive.scan(Query(0.0, _AGES, "gpu", ("power_watts",))):
            rows += len(found.times)
            pairs = np.empty(len(found.times), [("run", np.uint64), ("sequence", np.int64)])
            pairs["run"], pairs["sequence"] = found.runs, found.sequences
            seen.append(np.unique(pairs))
        frames = len(np.unique(np.concatenate(seen))) if seen else 0
    return frames, rows


# --- store


def history(report: Report, size: Size) -> None:
    """Bytes a GPU-sample, and the questions asked of the files alone (benchmarks.store)."""
    found = store.run(quick=size is _QUICK, takes=size.takes)
    report.targets += found.targets
    report.tables += [found.tables[0], found.tables[2]]
    report.notes += found.notes


# --- queries


def queries(report: Report, size: Size) -> None:
    """Two questions to a head over gRPC: while nobody sends, and while a fleet does."""
    agents = allow_connections(size.agents)
    nodes, day = size.history_nodes, size.day_seconds
    _, others = cores()
    gpus = nodes * _GPUS
    hours = day // _HOUR
    with workplace() as folder:
        _past(folder / "data", nodes, day)
        with Head(folder, "--freq", "1000") as head, head.asked() as ask:
            names = [fleet.host_name(number) for number in range(1, nodes + 1)]
            one = {"nodes": names[:1], "gpus": ["5"], "from": f"-{day}s", "step": day / 1000}
            many = {"nodes": names, "from": f"-{_HOUR}s", "step": 60}
            questions: dict[str, dict[str, Any]] = {
                f"one GPU's {hours} h to 1,000 points": {"metric": "power_watts", **one},
                f"{gpus:,} GPUs x 1 h in minutes": {"metric": "sm_active_ratio", **many},
            }

            def once(body: dict[str, Any]) -> tuple[float, int]:
                begun = time.perf_counter()
                answer = ask("query", **body)
                return time.perf_counter() - begun, sum(
                    len(series["times"]) for series in json.loads(answer.body)["series"]
                )

            def asked() -> dict[str, list[tuple[float, int]]]:
                return measure.in_turn(
                    size.takes, {name: partial(once, body) for name, body in questions.items()}
                )

            first = {name: once(body)[0] for name, body in questions.items()}
            idle = asked()
            length = 20.0 + 2 * size.takes
            with _fleet(head.address, folder, agents, length, others) as made:
                time.sleep(10.0)
                busy = asked()
                came = made.lines(2, 120.0)[1]
    table = Table(
        f"Questions to a head over gRPC, alone and while {agents * _GPUS:,} GPUs send, milliseconds:",
        ("question", "points", "first", "alone", "while ingesting", "worst"),
    )
    for (name, most), takes in zip(zip(questions, (0.1, 0.5), strict=True), busy.values(), strict=True):
        alone, meanwhile = (Spread.of([wall for wall, _ in found]) for found in (idle[name], takes))
        table.rows.append(
            (
                name,
                f"{takes[-1][1]:,}",
                f"{first[name] * 1e3:.0f}",
                alone.text(1e3, 0),
                meanwhile.text(1e3, 0),
                f"{meanwhile.most * 1e3:.0f}",
            )
        )
        report.targets.append(
            Target(
                f"{name}, asked over gRPC while ingesting",
                meanwhile.text(1e3, 0, " ms"),
                f"{most * 1e3:.0f} ms",
                meanwhile.median <= most,
            )
        )
    report.tables.append(table)
    report.notes.append(
        f"While it was asked, the head took frames of {agents} agents, p99 from sample to durable "
        f"{came['p99']:.2f} s; it was free to use all cores, one of which the fleet had. The GPUs that are asked about send too: the newest minutes of the answer are from memory."
    )


def _past(directory: Path, nodes: int, day: int) -> None:
    """A store of the nodes of a fleet up to now: the first with a day, the others with a little more than an hour."""
    looped = store.Looped(sorted(fleet.RECORDINGS.glob("*.jsonl.gz")), seed=4)
    begin = int(time.time()) - day
    made = {}
    for node in range(1, nodes + 1):
        length = day if node == 1 else min(day, _HOUR + 600)
        made[node] = store.make_node(
            looped,
            node,
            length,
            begin=begin,
            first=day - length,
            uuid=fleet.gpu_uuid,
            host=fleet.host_name(node),
            machine=fleet.machine_name(node),
        )
    store.make_store(directory, made, day)


# --- export


def export(report: Report, size: Size) -> None:
    """A session of an hour as JSON, from a store at rest and by a head."""
    gpus = size.session_gpus
    plain, rich = "plain", "bandwidth"
    begin = int(time.time()) - _HOUR - 60
    table = Table(
        f"A session of 1 h, {gpus} GPUs, 1 Hz, as JSON:",
        ("session", "file, MB", "wall, s", "CPU, s", "peak RSS, MB", "by a head: wall, s", "its RSS, MB"),
    )
    with workplace() as folder:
        looped = store.Looped(sorted(fleet.RECORDINGS.glob("*.jsonl.gz")), seed=4)
        made = {
            node: store.make_node(looped, node, _HOUR, begin=begin, uuid=fleet.gpu_uuid)
            for node in range(1, gpus // _GPUS + 1)
        }
        sessions = [
            Session(
                f"{name}0", name, begin, begin, 1000, "finished", begin + _HOUR, bandwidth=more, nvlink=more
            )
            for name, more in ((plain, False), (rich, True))
        ]
        store.make_store(
            folder / "data", made, _HOUR, [LogEntry.of_fact("session", **each.to_dict()) for each in sessions]
        )
        del made
        alone = {name: _exported(folder, name, size.takes // 3) for name in (plain, rich)}
        for name in (plain, rich):
            with Head(folder) as head, head.asked() as ask:
                before = memory(head.pid)
                begun = time.perf_counter()
                ask("export", name=name)
                head.until(partial(_says, head, f"session {name} is in"))
                wall = time.perf_counter() - begun
                peak = memory(head.pid, "VmHWM")
            took = alone[name]
            figures = {key: Spread.of([each[key] for each in took]) for key in took[0]}
            table.rows.append(
                (
                    "plain" if name == plain else "with PCIe and NVLink",
                    f"{took[0]['bytes'] / 1e6:.1f}",
                    figures["wall"].text(digits=2),
                    figures["cpu"].text(digits=2),
                    f"{figures['peak'].most:.0f}",
                    f"{wall:.2f}",
                    f"{before:.0f}, then {peak:.0f}",
                )
            )
            if name == plain:
                report.targets += [
                    Target(
                        f"export of 1 h, {gpus} GPUs, 1 Hz",
                        figures["wall"].text(digits=2, unit=" s"),
                        "5 s",
                        figures["wall"].most <= 5,
                    ),
                    Target(
                        "its peak RSS",
                        f"{figures['peak'].most:.0f} MB",
                        "200 MB",
                        figures["peak"].most <= 200,
                    ),
                    Target("by a head: its peak RSS", f"{peak:.0f} MB", "200 MB", peak <= 200),
                ]
    report.tables.append(table)


def _says(head: Head, words: str) -> bool:
    return words in head.said()


def _exported(folder: Path, name: str, takes: int) -> list[dict[str, float]]:
    found = []
    for number in range(max(1, takes)):
        command = [sys.executable, "-m", "benchmarks.children.exporter", str(folder / "data"), name]
        with Process([*command, str(folder / f"{name}{number}.json")], folder) as child:
            found.append(child.lines(1, 120.0)[0])
    return found


# --- agent


class _Use(NamedTuple):
    """What a process has used by one moment."""

    time: float
    cpu: float
    """Without the thread that the fake driver makes poll."""
    resident: float
    private: float
    shared: float
    """Private memory, and a part of what is shared with others (PSS)."""


class _Watch:
    """One process that samples the fake machine."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        before = thread_switches(pid)
        time.sleep(2.0)
        grown = {tid: (count - before.get(tid, 0)) / 2 for tid, count in thread_switches(pid).items()}
        busiest = max(grown, key=lambda tid: grown[tid])
        self._poller = busiest if grown[busiest] > _SWITCHES else None
        self.uses: list[_Use] = []

    def look(self) -> None:
        """Take down what it used so far."""
        polled = thread_seconds(self._pid, self._poller) if self._poller else 0.0
        private, shared = private_memory(self._pid)
        self.uses.append(
            _Use(time.monotonic(), cpu_seconds(self._pid) - polled, memory(self._pid), private, shared)
        )

    def share(self) -> float:
        """Of a core."""
        first, last = self.uses[0], self.uses[-1]
        return (last.cpu - first.cpu) / (last.time - first.time)

    def spread(self) -> Spread:
        """Of a core, ten seconds each."""
        tens = self.uses[::10]
        return Spread.of([(b.cpu - a.cpu) / (b.time - a.time) for a, b in pairwise(tens)])


def agent(report: Report, size: Size) -> None:
    """`gpulse agent` for a real head on eight fake GPUs, beside the same without diagnosis and the sampling alone."""
    with workplace() as folder, fake_machine(_GPUS, 1) as machine, Head(folder, "--freq", "1000") as head:
        command = [sys.executable, "-m", "gpulse", "agent", head.address, "--node-name"]
        with (
            _agent([*command, "one", "--state-dir", f"{folder}/one"], folder, machine.environment) as whole,
            _agent(
                [*command, "two", "--no-diagnosis", "--state-dir", f"{folder}/two"],
                folder,
                machine.environment,
            ) as silent,
            _agent(
                [sys.executable, "-m", "benchmarks.children.pacer", "1.0"], folder, machine.environment
            ) as alone,
            ExitStack() as earlier,
        ):
            names = {
                "gpulse agent": whole,
                "the same with --no-diagnosis": silent,
                "the sampling loop alone": alone,
            }
            if size.before:
                older = {**machine.environment, "PYTHONPATH": size.before}
                before = [*command, "three", "--state-dir", f"{folder}/three"]
                names["gpulse agent before"] = earlier.enter_context(_agent(before, folder, older))
            time.sleep(10.0)
            watches = {name: _Watch(process.pid) for name, process in names.items()}
            end = time.monotonic() + size.agent_seconds
            while time.monotonic() < end:
                for watch in watches.values():
                    watch.look()
                time.sleep(1.0)
    sampling = watches["the sampling loop alone"].share()
    table = Table(
        f"{_GPUS} GPUs at 1 Hz for {size.agent_seconds:.0f} s, all at the same time:",
        ("process", "CPU of a core", "each ten seconds", "of the loop alone", "RSS after 20 s", "RSS at end"),
    )
    for name, watch in watches.items():
        table.rows.append(
            (
                name,
                f"{100 * watch.share():.2f} %",
                watch.spread().text(100, 2, " %"),
                f"{watch.share() / sampling:.2f} x",
                f"{watch.uses[min(10, len(watch.uses) - 1)].resident:.1f} MB",
                f"{watch.uses[-1].resident:.1f} MB",
            )
        )
    uses = watches["gpulse agent"].uses
    share, growth = watches["gpulse agent"].share(), uses[-1].resident - uses[10].resident
    report.targets += [
        Target("agent, 8 GPUs at 1 Hz: CPU", f"{100 * share:.2f} % of a core", "0.5 %", share <= 0.005),
        Target("agent: RSS", f"{uses[-1].resident:.1f} MB", "45 MB", uses[-1].resident <= 45),
        Target(
            "agent: private memory (USS), and PSS beside a head",
            f"{uses[-1].private:.1f} MB, {uses[-1].shared:.1f} MB",
            "45 MB",
            uses[-1].shared <= 45,
        ),
        Target(
            f"agent: growth from 20 s to {20 + uses[-1].time - uses[10].time:.0f} s",
            f"{growth:+.2f} MB",
            "flat (less than 1 MB)",
            growth < 1,
        ),
    ]
    report.tables.append(table)
    report.notes.append(
        "CPU of the agent is that of all its threads but the one in the fake driver's wait for Xid errors, which polls "
        "where a real driver blocks. RSS contains 2.4 MB of the fake driver's own state, and the code of libraries."
    )


@contextmanager
def _agent(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Process]:
    with Process(command, folder, environment=environment) as made:
        yield made


# --- sessions


def sessions(report: Report, size: Size) -> None:
    """One session and ten, in turn, while a fleet sends: CPU of the head."""
    agents = allow_connections(size.sessions_agents)
    mine, others = cores()
    with workplace() as folder, Head(folder, "--freq", "1000", core=mine) as head, head.asked() as ask:
        each = size.sessions_seconds

        def turn(count: int) -> float:
            for number in range(count):
                ask("start", name=f"s{number}")
            time.sleep(1.0)
            begun, before = time.monotonic(), cpu_seconds(head.pid)
            time.sleep(each)
            share = (cpu_seconds(head.pid) - before) / (time.monotonic() - begun)
            ask("stop", format="parquet")
            head.until(lambda: b'"writing"' not in ask("sessions").body)
            return share

        length = 2 * (size.sessions_turns + 1) * (each + 20.0)  # more than enough: it is ended with the block
        with _fleet(head.address, folder, agents, length, others, _QUICK_INTERVAL) as made:
            turn(1)
            takes: dict[str, list[float]] = {"one": [], "ten": []}
            counts = {"one": 1, "ten": 10}
            for number in range(2 * math.ceil(size.sessions_turns / 2)):
                # What comes later costs a little more, so neither of both may always be the second.
                for name in ("one", "ten") if number % 2 == 0 else ("ten", "one"):
                    takes[name].append(turn(counts[name]))
            made.check()
    pairs = list(zip(takes["one"], takes["ten"], strict=True))
    ratios = Spread.of([(b[1] + a[1]) / (b[0] + a[0]) for a, b in zip(pairs[::2], pairs[1::2], strict=True)])
    noise = Spread.of([after / before for before, after in pairwise(takes["one"])])
    report.targets.append(
        Target(
            "ten sessions, of one: CPU of the head",
            ratios.text(digits=3, unit=" x"),
            "1.05 x",
            ratios.median < 1.05,
        )
    )
    table = Table(
        f"CPU of a head with {agents * _GPUS:,} GPUs at {1 / _QUICK_INTERVAL:g} Hz, {each:.0f} s each, in turn:",
        ("sessions", "CPU of a core", "of one"),
    )
    table.rows += [
        (
            "one",
            Spread.of(takes["one"]).text(100, 2, " %"),
            f"{noise.text(digits=3, unit=' x')} of the one before",
        ),
        ("ten", Spread.of(takes["ten"]).text(100, 2, " %"), ratios.text(digits=3, unit=" x")),
    ]
    report.tables.append(table)


_PARTS: dict[str, Callable[[Report, Size], None]] = {
    "ingest": ingest,
    "store": history,
    "queries": queries,
    "export": export,
    "agent": agent,
    "sessions": sessions,
}


def run(size: Size, only: Sequence[str] = ()) -> Report:
    """Run some parts, or all."""
    report = Report(NAME, "A head and its agents")
    for name in only or _PARTS:
        begun = time.monotonic()
        _PARTS[name](report, size)
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return report


def main() -> None:
    """`python -m benchmarks.cluster --only ingest,agent`."""
    parser = measure.parser(NAME, __doc__)
    measure.add_only(parser, _PARTS)
    for name, value in _FULL._asdict().items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(
            option, type=type(value), help=f"default: {value}, {getattr(_QUICK, name)} with --quick"
        )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    chosen = {name: value for name in Size._fields if (value := getattr(given, name)) is not None}
    size = _QUICK if given.quick else _FULL
    measure.publish(run(size._replace(**chosen), given.only), write=given.write)


def _end(*_: object) -> None:
    sys.exit(143)  # as an exception, so that children and files go too


if __name__ == "__main__":
    main()
