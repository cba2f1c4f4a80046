"""What a diagnosis costs: of twenty seconds, of a stream that never ends, and of a day that was recorded."""

from __future__ import annotations

import cProfile
import gzip
import json
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import measure
from benchmarks.measure import Report, Spread, Table, Target
from gpulse.diagnosis.engine import diagnose
from gpulse.diagnosis.live_diagnosis import LiveDiagnosis
from gpulse.diagnosis.windowed_diagnosis import WindowedDiagnosis
from gpulse.model.frame import Frame, GpuReading, HostReading
from gpulse.model.metric_catalog import Values
from gpulse.model.process import ProcessReading, Thread
from gpulse.model.recording_codec import RecordingEncoder
from gpulse.sampling.recorder import Recorder
from gpulse.sources.recording_reader import Recording

NAME = "diagnosis_speed"
_CROWDED = measure.ROOT / "tests" / "data" / "traces" / "loader_all_cores.jsonl.gz"
_FEW = measure.ROOT / "src" / "gpulse" / "sources" / "demo" / "loader_too_few_workers.jsonl.gz"
_STEADY_FROM = 14.0
"""Seconds into these recordings after which all their workers run."""
_PROCESSES = 20
_GPUS = 8
_HERTZ = 10
_MOST_WINDOW_SECONDS = 0.050
_MOST_STREAM_PERCENT = 2.0
_MOST_DAY_SECONDS = 10.0
_DAY = 86_400
_STREAM_WARM_SECONDS = 40


class Loop:
    """A stretch of frames that goes on and on: time moves and counters grow from lap to lap."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._frames = frames
        first, last = frames[0], frames[-1]
        self._laps = len(frames) / (len(frames) - 1)
        """The step from the last frame of a lap to the first of the next belongs to the lap too."""
        self._seconds = (last.time - first.time) * self._laps
        self._gpus = {
            new.device.uuid: self._gains(old.values, new.values)
            for old, new in zip(first.gpus, last.gpus, strict=True)
        }
        self._host = self._gains(_host(first).values, _host(last).values)
        self._ticks = [
            [round((after - before) * self._laps) for before, after in zip(old, new, strict=True)]
            for old, new in zip(_host(first).cores, _host(last).cores, strict=True)
        ]
        self._disks = [self._gains(a.values, b.values) for a, b in zip(first.disks, last.disks, strict=True)]
        self._links = [
            self._gains(a.values, b.values) for a, b in zip(first.network, last.network, strict=True)
        ]
        old_processes = {process.pid: process for process in first.processes}
        self._processes = {
            new.pid: self._gains(old_processes[new.pid].values, new.values)
            for new in last.processes
            if new.pid in old_processes
        }
        old_threads = {thread.tid: thread for process in first.processes for thread in process.threads}
        self._threads = {
            new.tid: (new.cpu_seconds_total - old_threads[new.tid].cpu_seconds_total) * self._laps
            for process in last.processes
            for new in process.threads
            if new.tid in old_threads
        }

    def take(self, count: int) -> Iterator[Frame]:
        """So many frames."""
        for number in range(count):
            lap, place = divmod(number, len(self._frames))
            yield self._later(self._frames[place], lap)

    def _gains(self, old: Values, new: Values) -> Values:
        grown = {name: new[name] - old[name] for name in new if name.endswith("_total") and name in old}
        return {
            name: round(gain * self._laps) if isinstance(gain, int) else gain * self._laps
            for name, gain in grown.items()
            if gain
        }

    def _later(self, frame: Frame, lap: int) -> Frame:
        def gpu(reading: GpuReading) -> GpuReading:
            return reading._replace(
                values=_grown(reading.values, self._gpus[reading.device.uuid], lap),
                read_at={group: round(at + lap * self._seconds, 4) for group, at in reading.read_at.items()},
            )

        def process(reading: ProcessReading) -> ProcessReading:
            return reading._replace(
                values=_grown(reading.values, self._processes.get(reading.pid, {}), lap),
                threads=tuple(thread(entry) for entry in reading.threads),
            )

        def thread(entry: Thread) -> Thread:
            return entry._replace(
                cpu_seconds_total=entry.cpu_seconds_total + lap * self._threads.get(entry.tid, 0.0)
            )

        host = _host(frame)
        return frame._replace(
            time=round(frame.time + lap * self._seconds, 4),
            monotonic=round(frame.monotonic + lap * self._seconds, 4),
            gpus=tuple(map(gpu, frame.gpus)),
            host=HostReading(
                _grown(host.values, self._host, lap),
                tuple(
                    tuple(tick + lap * gain for tick, gain in zip(core, gains, strict=True))
                    for core, gains in zip(host.cores, self._ticks, strict=True)
                ),
            ),
            disks=tuple(
                disk._replace(values=_grown(disk.values, gains, lap))
                for disk, gains in zip(frame.disks, self._disks, strict=True)
            ),
            network=tuple(
                link._replace(values=_grown(link.values, gains, lap))
                for link, gains in zip(frame.network, self._links, strict=True)
            ),
            processes=tuple(map(process, frame.processes)),
        )


class _Streamed(NamedTuple):
    """What a stream cost."""

    percent: float
    """Of a core."""
    largest: float
    """Seconds of CPU of the longest single call."""
    findings: int


def run(*, quick: bool, takes: int = 41, rounds: int = 3) -> Report:
    """Measure all three."""
    report = Report(NAME, "What a diagnosis costs")
    table = Table(
        "CPU of this process, median and middle half:",
        ("what", "CPU", "of decoding the same JSON", "comes to"),
    )
    _window(report, table, 5 if quick else takes)
    _stream(report, table, 1 if quick else rounds, quick=quick)
    _day(report, table, 1 if quick else rounds, _DAY // 24 if quick else _DAY)
    report.tables.append(table)
    report.notes.append(
        "The frames are those of real recordings of data loaders: `loader_all_cores` with its workers replicated to "
        f"{_PROCESSES} processes a GPU, and for {_GPUS} GPUs all of that {_GPUS} times; for the day "
        "`loader_too_few_workers` with three processes. They go on with their counters growing. Making them is not "
        "counted. JSON is decoded from the lines of gpulse's own recording format, without building frames; for the day "
        "the file is unpacked as well. The live diagnosis is told every frame and judges the last 30 s every 5 s."
    )
    return report


def _window(report: Report, table: Table, takes: int) -> None:
    frames = crowded()[: 20 * _HERTZ + 1]
    lines = _lines(frames)
    diagnose(frames)
    spent = measure.in_turn(
        takes,
        {"diagnose": lambda: _cpu(lambda: diagnose(frames)), "json": lambda: _cpu(lambda: _decode(lines))},
    )
    own = Spread.of(spent["diagnose"])
    ratio = own.median / Spread.of(spent["json"]).median
    found = diagnose(frames).findings
    what = f"20 s at {_HERTZ} Hz, 1 GPU, {len(frames[-1].processes)} processes"
    table.rows.append((what, own.text(1000, 1, " ms"), f"{ratio:.2f} x", found[0].id if found else "nothing"))
    report.targets.append(
        Target(
            f"{what}: CPU",
            f"{own.median * 1000:.1f} ms",
            f"under {_MOST_WINDOW_SECONDS * 1000:.0f} ms",
            own.median < _MOST_WINDOW_SECONDS,
        )
    )


def _stream(report: Report, table: Table, rounds: int, *, quick: bool) -> None:
    paces = {1: 60 if quick else 300, _HERTZ: 20 if quick else 90}
    spent = measure.in_turn(
        rounds, {str(hertz): partial(streamed, hertz, seconds) for hertz, seconds in paces.items()}
    )
    for hertz in paces:
        own = Spread.of([take.percent for take in spent[str(hertz)]])
        largest = max(take.largest for take in spent[str(hertz)])
        what = f"live, {_GPUS} GPUs x {_PROCESSES} processes, {hertz} Hz"
        frames = list(_machine(hertz).take(5))
        lines = _lines(frames)[-len(frames) :]
        decoding = min(_cpu(partial(_decode, lines)) for _ in range(5)) / len(frames)
        ratio = own.median / 100 / hertz / decoding
        table.rows.append(
            (
                what,
                own.text(1, 2, " % of a core"),
                f"{ratio:.2f} x",
                f"{spent[str(hertz)][-1].findings} findings; longest call {largest * 1000:.0f} ms",
            )
        )
        report.targets.append(
            Target(
                f"{what}: CPU",
                f"{own.median:.2f} % of a core",
                f"at most {_MOST_STREAM_PERCENT:g} %",
                own.median <= _MOST_STREAM_PERCENT,
            )
        )


def _day(report: Report, table: Table, rounds: int, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), count)
        words = f"{count / 3600:.0f} h at 1 Hz, 1 GPU, 3 processes ({path.stat().st_size / 2**20:.0f} MiB)"

        found: list[str] = []

        def decode() -> None:
            for _ in Recording(path):
                pass

        def unpacked_json() -> None:
            with gzip.open(path, "rb") as stream:
                for line in stream:
                    json.loads(line)

        spent = measure.in_turn(
            rounds,
            {
                "json": lambda: _cpu(unpacked_json),
                "decode": lambda: _cpu(decode),
                "both": lambda: _cpu(lambda: found.append(told(path))),
            },
        )
    both, decoding, reading = (Spread.of(spent[name]) for name in ("both", "decode", "json"))
    rest = Spread.of([a - b for a, b in zip(spent["both"], spent["decode"], strict=True)])
    table.rows += [
        (
            f"{words}: decode and diagnose",
            both.text(1, 2, " s"),
            f"{both.median / reading.median:.2f} x",
            found[-1],
        ),
        ("  decoding alone", decoding.text(1, 2, " s"), f"{decoding.median / reading.median:.2f} x", ""),
        ("  the diagnosis, what is left", rest.text(1, 2, " s"), f"{rest.median / reading.median:.2f} x", ""),
    ]
    report.targets.append(
        Target(
            f"{words}: CPU",
            f"{both.median:.1f} s, of which decoding {decoding.median:.1f} s",
            f"under {_MOST_DAY_SECONDS:.0f} s",
            both.median < _MOST_DAY_SECONDS if count == _DAY else None,
        )
    )


def crowded() -> list[Frame]:
    """One GPU with twenty processes: the loader that pegs all cores, some of its workers replicated."""
    frames = _steady(_CROWDED)
    missing = _PROCESSES - len(frames[0].processes)
    return [
        frame._replace(
            processes=(
                *frame.processes,
                *(_renumbered(frame.processes[-1 - n], 50_000) for n in range(missing)),
            )
        )
        for frame in frames
    ]


def streamed(hertz: int, seconds: int) -> _Streamed:
    """Feed a monitor with eight GPUs' frames as they come, and count from when its window is full."""
    monitor = LiveDiagnosis()
    warm = _STREAM_WARM_SECONDS * hertz
    spent: list[float] = []
    findings = 0
    for number, frame in enumerate(_machine(hertz).take(warm + seconds * hertz)):
        begun = time.process_time()
        findings = len(monitor(frame))
        if number >= warm:
            spent.append(time.process_time() - begun)
    return _Streamed(100 * sum(spent) / seconds, max(spent), findings)


def written(folder: Path, count: int) -> Path:
    """So many frames at 1 Hz as a recording."""
    path = folder / "day.jsonl.gz"
    recorder = Recorder(path)
    for frame in Loop(_steady(_FEW)[::_HERTZ]).take(count):
        recorder.write(frame)
    recorder.close()
    return path


def told(path: Path) -> str:
    """Diagnose a recording as `gpulse why FILE` does; what it finds."""
    timeline = WindowedDiagnosis()
    for frame in Recording(path):
        timeline.feed(frame)
    return ", ".join(finding.id for finding in timeline.finish().findings) or "nothing"


def profile(words: str, work: Callable[[], object]) -> None:
    """Print where the time goes."""
    print(f"\n{words}", flush=True)
    watch = cProfile.Profile()
    watch.runcall(work)
    pstats.Stats(watch).sort_stats("tottime").print_stats(16)


def _profiles() -> None:
    frames = crowded()[: 20 * _HERTZ + 1]
    profile("20 s at 10 Hz, 20 times", lambda: [diagnose(frames) for _ in range(20)])
    for hertz, seconds in ((1, 120), (_HERTZ, 30)):
        stream = list(_machine(hertz).take(seconds * hertz))
        monitor = LiveDiagnosis()
        profile(f"live, {seconds} s at {hertz} Hz", partial(_fed, monitor, stream))
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), 7200)
        profile("two hours at 1 Hz", lambda: told(path))


def _fed(monitor: LiveDiagnosis, frames: Sequence[Frame]) -> None:
    for frame in frames:
        monitor(frame)


def _machine(hertz: int) -> Loop:
    frames = crowded()[:: _HERTZ // hertz]
    return Loop([_multiplied(frame) for frame in frames])


def _multiplied(frame: Frame) -> Frame:
    gpu = frame.gpus[0]
    shifts = [100_000 * number for number in range(_GPUS)]
    return frame._replace(
        gpus=tuple(
            gpu._replace(
                device=gpu.device._replace(index=number, uuid=f"GPU-{number}"),
                processes=tuple(process._replace(pid=process.pid + shift) for process in gpu.processes or ()),
            )
            for number, shift in enumerate(shifts)
        ),
        processes=tuple(
            _renumbered(process, shift, family=True) for shift in shifts for process in frame.processes
        ),
    )


def _renumbered(process: ProcessReading, shift: int, *, family: bool = False) -> ProcessReading:
    identity = process.identity
    parent = identity.parent_pid
    return process._replace(
        identity=identity._replace(
            pid=identity.pid + shift, parent_pid=parent + shift if family and parent is not None else parent
        ),
        threads=tuple(thread._replace(tid=thread.tid + shift) for thread in process.threads),
    )


def _steady(path: Path) -> list[Frame]:
    """The frames after the start-up in which the same processes run."""
    frames = list(Recording(path))
    frames = [frame for frame in frames if frame.time >= frames[0].time + _STEADY_FROM]
    processes = {process.pid for process in frames[0].processes}
    return [frame for frame in frames if {process.pid for process in frame.processes} == processes]


def _host(frame: Frame) -> HostReading:
    return frame.host or HostReading({})


def _grown(values: Values, gains: Values, lap: int) -> Values:
    if not lap or not gains:
        return values
    # Rounded, since real readings are no longer than their resolution, and their length costs time to decode.
    return {
        **values,
        **{name: round(values[name] + lap * gain, 6) for name, gain in gains.items() if name in values},
    }


def _lines(frames: Sequence[Frame]) -> list[str]:
    encoder = RecordingEncoder()
    return [line for frame in frames for line in encoder.lines(frame)]


def _decode(lines: Sequence[str]) -> None:
    for line in lines:
        json.loads(line)


def _cpu(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


if __name__ == "__main__":
    parser = measure.parser(NAME, __doc__, {"takes": 41, "rounds": 3})
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    given = parser.parse_args()
    if given.profile:
        _profiles()
    else:
        measure.publish(run(quick=given.quick, takes=given.takes, rounds=given.rounds), write=given.write)
