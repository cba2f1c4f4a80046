"""Perturbations of a recording that do not change its diagnosis: noise, gaps, and unreadable signals."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from gpulse.model.frame import Frame, GpuReading, HostReading
from gpulse.model.metric_catalog import Values
from gpulse.model.process import ProcessReading

Frames = Sequence[Frame]
Perturbation = Callable[[Frames], list[Frame]]

_NO_QUANTITIES = frozenset(
    {"clocks_event_reasons", "performance_state", "pcie_link_generation", "pcie_link_width"}
)
"""Names and steps rather than amounts."""
_DUTY = frozenset({"gpu_utilization_ratio", "graphics_active_ratio"})
_GPM_RATES = tuple(f"{link}_{way}_bytes_per_second" for link in ("pcie", "nvlink") for way in ("rx", "tx"))
_CPU_COUNTERS = frozenset({"cpu_user_seconds_total", "cpu_system_seconds_total", "cpu_nice_seconds_total"})


def _gpus(frames: Frames, change: Callable[[GpuReading], GpuReading]) -> list[Frame]:
    return [frame._replace(gpus=tuple(change(gpu) for gpu in frame.gpus)) for frame in frames]


def scale_gpu(factor: float) -> Perturbation:
    """Every reading of the GPU is off by a factor; shares stay shares.

    A GPU that never rests still does not: of a duty above one half, what is missing to one is off.
    """

    def one(name: str, value: float, facts: Values) -> float:
        if name in _NO_QUANTITIES:
            return value
        if name in _DUTY and value > 0.5:
            return 1.0 - (1.0 - value) / factor
        if name.endswith("_ratio"):
            return min(1.0, value * factor)
        if name == "memory_used_bytes":
            return min(facts.get("memory_total_bytes", value * factor), value * factor)
        return value * factor

    def scaled(gpu: GpuReading) -> GpuReading:
        values = {name: one(name, value, gpu.device.facts) for name, value in gpu.values.items()}
        processes = gpu.processes
        if processes is not None:
            processes = tuple(
                process
                if process.sm_ratio is None
                else process._replace(sm_ratio=min(1.0, process.sm_ratio * factor))
                for process in processes
            )
        return gpu._replace(values=values, processes=processes)

    return lambda frames: _gpus(frames, scaled)


def scale_cpu(factor: float) -> Perturbation:
    """All CPU time that was used is off by a factor: of processes, of their threads, and of the host."""

    def process(reading: ProcessReading) -> ProcessReading:
        return reading._replace(
            values=_counted(reading.values, factor),
            threads=tuple(
                thread._replace(cpu_seconds_total=thread.cpu_seconds_total * factor)
                for thread in reading.threads
            ),
        )

    def scaled(frame: Frame) -> Frame:
        host = frame.host
        return frame._replace(
            host=None if host is None else host._replace(values=_counted(host.values, factor)),
            processes=tuple(map(process, frame.processes)),
        )

    return lambda frames: [scaled(frame) for frame in frames]


def _counted(values: Values, factor: float) -> Values:
    return {name: value * factor if name in _CPU_COUNTERS else value for name, value in values.items()}


def drop(share: float, seed: int) -> Perturbation:
    """Some frames are missing."""

    def dropped(frames: Frames) -> list[Frame]:
        chance = random.Random(seed)
        return [frame for frame in frames if chance.random() >= share]

    return dropped


def every(step: int, first: int = 0) -> Perturbation:
    """A slower pace."""
    return lambda frames: list(frames[first::step])


def jitter(seconds: float, seed: int) -> Perturbation:
    """Each frame was taken a little early or late."""

    def moved(frames: Frames) -> list[Frame]:
        chance = random.Random(seed)
        return [_later(frame, chance.uniform(-seconds, seconds)) for frame in frames]

    return moved


def _later(frame: Frame, seconds: float) -> Frame:
    return frame._replace(time=frame.time + seconds, monotonic=frame.monotonic + seconds)


def without_gpm(frames: Frames) -> list[Frame]:
    """A GPU older than Hopper: only utilization, no GPM activity, and no PCIe rates."""

    def is_gpm(name: str) -> bool:
        return name.endswith(("_active_ratio", "_occupancy_ratio")) or name in _GPM_RATES

    return _gpus(
        frames,
        lambda gpu: gpu._replace(
            device=gpu.device._replace(has_gpm=False),
            values={name: value for name, value in gpu.values.items() if not is_gpm(name)},
        ),
    )


def without_process_table(frames: Frames) -> list[Frame]:
    """/proc hides the processes, and the driver still lists them."""
    return [frame._replace(processes=()) for frame in frames]


def without_processes(frames: Frames) -> list[Frame]:
    """Neither /proc nor the driver names a process."""
    return _gpus(without_process_table(frames), lambda gpu: gpu._replace(processes=None))


def without_host(frames: Frames) -> list[Frame]:
    """The driver alone."""
    return [
        frame._replace(host=None, disks=(), filesystems=(), network=(), processes=(), cgroups=())
        for frame in frames
    ]


def without_pressure(frames: Frames) -> list[Frame]:
    """A kernel that does not say how long tasks waited."""

    def cut(host: HostReading) -> HostReading:
        values = {name: value for name, value in host.values.items() if not name.startswith("pressure_")}
        return host._replace(values=values)

    return [frame._replace(host=None if frame.host is None else cut(frame.host)) for frame in frames]


def glue(first: Frames, second: Frames) -> list[Frame]:
    """One recording after another on the same machine, a tenth of a second apart."""
    seconds = first[-1].time + 0.1 - second[0].time

    def started(process: ProcessReading) -> ProcessReading:
        start = process.identity.start_time
        if start is None:
            return process
        return process._replace(identity=process.identity._replace(start_time=start + seconds))

    return [
        *first,
        *(
            _later(frame, seconds)._replace(
                node=first[-1].node, processes=tuple(map(started, frame.processes))
            )
            for frame in second
        ),
    ]


def chain(*perturbations: Perturbation) -> Perturbation:
    """Several things at once."""

    def all_of(frames: Frames) -> list[Frame]:
        for perturbation in perturbations:
            frames = perturbation(frames)
        return list(frames)

    return all_of


NOISE: dict[str, Perturbation] = {
    "gpu readings +15 %": scale_gpu(1.15),
    "gpu readings -15 %": scale_gpu(0.85),
    "cpu time +15 %": scale_cpu(1.15),
    "cpu time -15 %": scale_cpu(0.85),
    "5 % of frames lost": drop(0.05, 1),
    "10 % of frames lost": drop(0.10, 2),
    "20 % of frames lost": drop(0.20, 3),
    "1 Hz": every(10),
    "1 Hz, a little later": every(10, 5),
    "5 Hz": every(2),
    "times off by 30 ms": jitter(0.03, 4),
}
"""After these the same comes out."""
BLINDNESS: dict[str, Perturbation] = {
    "no GPM": without_gpm,
    "no process table": without_process_table,
    "no processes": without_processes,
    "no host": without_host,
    "no pressure": without_pressure,
    "no GPM, no host": chain(without_gpm, without_host),
    "no GPM, no processes, 1 Hz": chain(without_gpm, without_processes, every(10)),
}
"""After these less can be known."""
