"""Read recordings, complete or truncated: gpulse's own format, and the older trace format (a header, then one line per tick)."""

from __future__ import annotations

import json
import math
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeGuard

from gpulse.errors import ClosedError, RecordingError, file_hint, install_command
from gpulse.model.device import Device, Node
from gpulse.model.frame import DiskReading, Frame, GpuReading, HostReading, NetworkReading
from gpulse.model.metric_catalog import Values
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading, Thread
from gpulse.model.recording_codec import RECORDING_FORMAT, RECORDING_VERSION, RecordingDecoder
from gpulse.model.source_health import Health
from gpulse.sources.frame_source import EndOfRecordingError
from gpulse.sources.host import MEMORY_METRICS

_MIB = 1024 * 1024
_MAX_TIME_SECONDS = 1e11
"""Larger times are in another unit."""
_MIN_PERCENT, _MAX_PERCENT = -1.0, 110.0
"""GPM values are sometimes slightly out of range; values further off are invalid."""
_CPU_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_FACT_FIELDS: dict[str, tuple[str, float]] = {
    "mem_total": ("memory_total_bytes", 1),
    "max_sm_mhz": ("sm_clock_max_hertz", 1_000_000),
    "max_mem_mhz": ("memory_clock_max_hertz", 1_000_000),
    "pcie_max_gen": ("pcie_link_generation_max", 1),
    "pcie_max_width": ("pcie_link_width_max", 1),
    "power_limit_mw": ("power_limit_watts", 0.001),
    "slowdown_c": ("temperature_slowdown_celsius", 1),
}
_GPU_FIELDS: dict[str, tuple[str, float]] = {
    "util_gpu": ("gpu_utilization_ratio", 0.01),
    "util_mem": ("memory_utilization_ratio", 0.01),
    "mem_used": ("memory_used_bytes", 1),
    "power_mw": ("power_watts", 0.001),
    "energy_mj": ("energy_joules_total", 0.001),
    "temp_c": ("temperature_celsius", 1),
    "mem_temp_c": ("memory_temperature_celsius", 1),
    "sm_mhz": ("sm_clock_hertz", 1_000_000),
    "mem_mhz": ("memory_clock_hertz", 1_000_000),
    "clocks_event_reasons": ("clocks_event_reasons", 1),
    "pstate": ("performance_state", 1),
    "pcie_gen": ("pcie_link_generation", 1),
    "pcie_width": ("pcie_link_width", 1),
    "pcie_replays": ("pcie_replays_total", 1),
}
_GPM_RATIOS = {
    "graphics_util": "graphics_active_ratio",
    "sm_util": "sm_active_ratio",
    "sm_occupancy": "sm_occupancy_ratio",
    "integer_util": "integer_active_ratio",
    "any_tensor_util": "tensor_active_ratio",
    "dfma_tensor_util": "tensor_fp64_active_ratio",
    "hmma_tensor_util": "tensor_half_active_ratio",
    "imma_tensor_util": "tensor_integer_active_ratio",
    "dram_bw_util": "dram_active_ratio",
    "fp64_util": "fp64_active_ratio",
    "fp32_util": "fp32_active_ratio",
    "fp16_util": "fp16_active_ratio",
}
_GPM_RATES = ("pcie_tx", "pcie_rx", "nvlink_rx", "nvlink_tx")
_VMSTAT_FIELDS = {
    "pswpin": "swap_in_pages_total",
    "pswpout": "swap_out_pages_total",
    "pgmajfault": "major_faults_total",
    "pgscan_direct": "direct_reclaim_pages_total",
}


class TraceDecoder:
    """Turns the lines of a trace into frames."""

    def __init__(self) -> None:
        self._header: dict[str, Any] = {}
        self._node = Node(name="trace")
        self._devices: dict[int, Device] = {}
        self._boot_time: float | None = None

    def feed(self, line: str) -> Frame | None:
        """Decode one line; return its frame, or None for the header.

        Raises:
            ValueError: The line is not one of a trace.
        """
        try:
            document = json.loads(line)
            if "trace" in document:
                self._begin(document)
                return None
            return self._frame(document)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError("this is not a line of a trace") from error

    def _begin(self, header: dict[str, Any]) -> None:
        self._header = header
        self._node = Node(name="trace", driver=header.get("driver"), ticks_per_second=header["clk_tck"])
        for gpu in header["gpus"]:
            self._devices[gpu["index"]] = _decode_device(gpu)

    def _frame(self, tick: dict[str, Any]) -> Frame:
        time = float(tick["t"])
        if not 0 <= time < _MAX_TIME_SECONDS:
            raise ValueError(f"{time} is not a valid time")
        if self._boot_time is None:
            self._boot_time = time - self._uptime(tick["host"])
        on_gpu = {process["pid"] for gpu in tick["gpus"] for process in gpu["processes"]}
        return Frame(
            time=time,
            monotonic=time,
            node=self._node,
            gpus=tuple(
                GpuReading(
                    self._devices[gpu["index"]],
                    _decode_gpu(gpu),
                    _decode_gpu_processes(gpu),
                    {"gpm": time, "second": time},
                )
                for gpu in tick["gpus"]
            ),
            host=self._host(tick["host"]),
            disks=tuple(self._disk(name, numbers) for name, numbers in tick["host"]["disks"].items()),
            network=tuple(_decode_link(name, numbers) for name, numbers in tick["host"]["net"].items()),
            processes=tuple(self._process(process, process["pid"] in on_gpu) for process in tick["procs"]),
        )

    def _uptime(self, host: dict[str, Any]) -> float:
        """Return the time since boot: the total CPU time divided by the number of CPUs."""
        return float(sum(host["cpu_ticks"]["cpu"]) / self._header["cpus"] / self._node.ticks_per_second)

    def _host(self, raw: dict[str, Any]) -> HostReading:
        hertz = self._node.ticks_per_second
        ticks = dict(raw["cpu_ticks"])
        values: Values = {
            f"cpu_{state}_seconds_total": count / hertz
            for state, count in zip(_CPU_STATES, ticks.pop("cpu"), strict=False)
        }
        values["cpus"] = self._header["cpus"]
        values.update(zip(("load1", "load5", "load15"), raw["loadavg"], strict=False))
        values["processes_running"] = raw["procs_running"]
        values["processes_blocked"] = raw["procs_blocked"]
        values["context_switches_total"] = raw["ctxt"]
        values.update(
            {
                ours: raw["meminfo_kb"][theirs] * 1024
                for theirs, ours in MEMORY_METRICS.items()
                if theirs in raw["meminfo_kb"]
            }
        )
        values.update(
            {
                ours: raw["vmstat"][theirs]
                for theirs, ours in _VMSTAT_FIELDS.items()
                if theirs in raw["vmstat"]
            }
        )
        for resource, shares in raw["psi_us"].items():
            for share, microseconds in shares.items():
                values[f"pressure_{resource}_{share}_seconds_total"] = microseconds / 1e6
        return HostReading(_keep_numbers(values), tuple(tuple(core) for core in ticks.values()))

    def _disk(self, name: str, numbers: list[int]) -> DiskReading:
        rotational = self._header.get("disk_rotational", {}).get(name)
        kind = (
            "memory"
            if name.startswith("zram")
            else "virtual"
            if name.startswith(("vd", "xvd"))
            else _disk_kind(rotational)
        )
        (
            reads,
            _,
            sectors_read,
            read_ms,
            writes,
            _,
            sectors_written,
            write_ms,
            in_flight,
            busy_ms,
            queue_ms,
        ) = numbers[:11]
        return DiskReading(
            name,
            kind,
            {
                "read_bytes_total": sectors_read * 512,
                "written_bytes_total": sectors_written * 512,
                "reads_total": reads,
                "writes_total": writes,
                "read_seconds_total": read_ms / 1000,
                "write_seconds_total": write_ms / 1000,
                "busy_seconds_total": busy_ms / 1000,
                "queue_seconds_total": queue_ms / 1000,
                "requests_in_flight": in_flight,
            },
        )

    def _process(self, raw: dict[str, Any], on_gpu: bool) -> ProcessReading:
        hertz = self._node.ticks_per_second
        values: Values = {
            "cpu_user_seconds_total": raw["utime"] / hertz,
            "cpu_system_seconds_total": raw["stime"] / hertz,
            "block_wait_seconds_total": raw["blkio_ticks"] / hertz,
            "host_memory_bytes": raw["rss"],
            "threads": raw["threads"],
            "last_cpu": raw["cpu"],
            "major_faults_total": raw["majflt"],
        }
        counters = raw.get("io") or {}
        for theirs, ours in (
            ("rchar", "read_chars_total"),
            ("wchar", "written_chars_total"),
            ("read_bytes", "read_bytes_total"),
            ("write_bytes", "written_bytes_total"),
        ):
            if counters.get(theirs) is not None:
                values[ours] = counters[theirs]
        start = raw.get("start")
        identity = ProcessIdentity(
            pid=raw["pid"],
            parent_pid=raw["ppid"],
            start_time=None
            if start is None or self._boot_time is None
            else round(self._boot_time + start / hertz, 2),
            name=raw["comm"],
            command=tuple((raw.get("cmdline") or "").split()),
        )
        threads = tuple(
            Thread(tid, name, state, ticks / hertz) for tid, name, state, ticks in raw.get("top_threads", ())
        )
        return ProcessReading(identity, raw["state"], _keep_numbers(values), threads, on_gpu)


def _disk_kind(rotational: str | None) -> str | None:
    return None if rotational is None else "hdd" if rotational == "1" else "ssd"


def _decode_device(raw: dict[str, Any]) -> Device:
    capability = raw.get("compute_capability")
    facts = _scale_values(raw, _FACT_FIELDS)
    if "power_limit_watts" in facts:
        facts["power_default_limit_watts"] = facts["power_limit_watts"]
    return Device(
        index=raw["index"],
        uuid=raw["uuid"],
        name=raw["name"],
        compute_capability=None if capability is None else ".".join(str(part) for part in capability),
        has_gpm=True,
        facts=facts,
    )


def _decode_gpu(raw: dict[str, Any]) -> Values:
    values = _scale_values(raw, _GPU_FIELDS)
    for name in ("gpu_utilization_ratio", "memory_utilization_ratio"):
        if not 0 <= values.get(name, 0.0) <= 1:
            del values[name]
    gpm = raw.get("gpm") or {}
    for theirs, ours in _GPM_RATIOS.items():
        value = gpm.get(theirs)
        if _is_number(value) and _MIN_PERCENT <= value <= _MAX_PERCENT:
            values[ours] = min(1.0, max(0.0, round(value / 100, 5)))
    for link in _GPM_RATES:
        value = gpm.get(f"{link}_mib_s")
        if _is_number(value):
            values[f"{link}_bytes_per_second"] = round(value * _MIB)
    return values


def _scale_values(raw: dict[str, Any], table: dict[str, tuple[str, float]]) -> Values:
    """Convert the fields of a table to our units; integers that are only multiplied stay integers."""
    return {
        ours: value * scale if scale >= 1 else round(value * scale, 3)
        for theirs, (ours, scale) in table.items()
        if _is_number(value := raw.get(theirs))
    }


def _keep_numbers(values: Values) -> Values:
    """Return only the values that are numbers."""
    return {name: value for name, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _decode_gpu_processes(raw: dict[str, Any]) -> tuple[GpuProcess, ...]:
    shares = {
        share["pid"]: min(1.0, share["sm"] / 100)
        for share in raw.get("process_util") or ()
        if _is_number(share["sm"])
    }
    return tuple(
        GpuProcess(process["pid"], "compute", process["mem_used"], shares.get(process["pid"]))
        for process in raw["processes"]
    )


def _decode_link(name: str, numbers: list[int]) -> NetworkReading:
    names = ("rx_bytes_total", "rx_packets_total", "tx_bytes_total", "tx_packets_total")
    kind = "loopback" if name == "lo" else "virtual" if name.startswith("ifb") else "ethernet"
    return NetworkReading(name, kind, None, _keep_numbers(dict(zip(names, numbers, strict=False))))


_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31
"""zlib's window bits for gzip headers with the largest window."""
_CHUNK_BYTES = 2**16
_MAX_LINE_BYTES = 2**24
"""A frame with thousands of processes takes a few megabytes; a longer line is not from a recording."""
_MAX_BLANK_LINES = 1000
"""In a row; a recording has none, but a file that was edited may."""
_MAX_COMPRESSION = 500
"""Recordings are compressed 10 to 30 times, and 135 times where nothing changes but the time; zlib can reach 1000."""
_MIN_BOMB_BYTES = 2**26
"""Less content than this is read at any compression."""
_DAMAGED_HINT = "copy the file again from the original, or record again"


class Recording:
    """Frames in a file, ordered by time.

    A file that ends in the middle of a line (its writer was killed) gives every complete frame, and the last
    one has the health code `truncated`.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the file and check its first line.

        Raises:
            RecordingError: The file cannot be read, or is not a recording.
        """
        self.path = Path(path)
        try:
            with self._opened() as stream:
                _, first = next(_read_numbered_lines(stream), (0, None))
        except _CutOffError as error:
            raise RecordingError(f"{self.path} is damaged: {error}", hint=_DAMAGED_HINT) from error
        if first is None:
            raise RecordingError(
                f"{self.path} is empty", hint="record one with `gpulse record -o run.jsonl.gz`"
            )
        self._decoder = _choose_decoder(first, self.path)

    def __iter__(self) -> Iterator[Frame]:
        """Yield every frame, decoded on demand."""
        decoder = self._decoder()
        held: Frame | None = None
        cut: str | None = None
        with self._opened() as stream:
            lines = _read_numbered_lines(stream)
            while True:
                try:
                    number, line = next(lines, (0, None))
                except _CutOffError as error:
                    cut = str(error)
                    break
                if line is None:
                    break
                try:
                    frame = decoder.feed(line)
                except ValueError as error:
                    if _has_more_lines(lines):
                        raise RecordingError(
                            f"{self.path}: line {number} is damaged: {error}", hint=_DAMAGED_HINT
                        ) from error
                    cut = f"line {number} is incomplete"
                    break
                if frame is not None:
                    if held is not None:
                        yield held
                    held = frame
        if held is None:
            return
        if cut is not None:
            entry = Health(
                "recording", "truncated", f"the recording ends early: {cut}", held.time, str(self.path)
            )
            held = held._replace(health=(*held.health, entry))
        yield held

    def _opened(self) -> IO[bytes]:
        try:
            stream = open(self.path, "rb", opener=_open_nonblocking)  # noqa: SIM115  the caller closes it
        except OSError as error:
            raise RecordingError(
                f"cannot read {self.path}: {error.strerror or error}", hint=file_hint(error)
            ) from error
        if not stat.S_ISREG(
            os.fstat(stream.fileno()).st_mode
        ):  # a recording is read twice, and from its start
            stream.close()
            raise RecordingError(
                f"cannot read {self.path}: it is not a regular file",
                hint="save the recording to a file first, and pass the name of that file",
            )
        return stream


class ReplaySource:
    """Source that replays a recording.

    Every `sample` returns the recording's next frame; or, when `started` is given, the frame that is due at
    that time, so that the recording plays at its original speed.
    """

    def __init__(self, recording: Recording, *, started: float | None = None) -> None:
        self._frames: Iterator[Frame] | None = iter(recording)
        self._started = started
        self._first_time: float | None = None
        self._upcoming: Frame | None = None

    def sample(self, now: float) -> Frame:
        """Return a frame with the time at which it was recorded.

        Raises:
            EndOfRecordingError: There is none left.
            ClosedError: The source was closed.
        """
        if self._frames is None:
            raise ClosedError("this recording is closed")
        frame = self._upcoming or next(self._frames, None)
        self._upcoming = None
        if frame is None:
            raise EndOfRecordingError("the recording has ended")
        if self._started is None:
            return frame
        if self._first_time is None:
            self._first_time = frame.time
        while (later := next(self._frames, None)) is not None:
            if later.time - self._first_time > now - self._started:
                self._upcoming = later
                break
            frame = later
        return frame

    def close(self) -> None:
        """Close the file."""
        self._frames = None


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without waiting for a writer if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


class _CutOffError(Exception):
    """The file is truncated, or the rest cannot be read."""


def _read_numbered_lines(stream: IO[bytes]) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers."""
    number = blank = size = 0
    parts: list[bytes] = []
    """Pieces of a line whose end was not read yet."""
    for chunk in _decompress(stream):
        first, *others = chunk.split(b"\n")
        parts.append(first)
        size += len(first)
        if size > _MAX_LINE_BYTES:
            raise _CutOffError(f"line {number + 1} is longer than {_MAX_LINE_BYTES >> 20} MiB")
        if not others:
            continue
        for line in (b"".join(parts), *others[:-1]):
            number += 1
            blank = 0 if line.strip() else blank + 1
            if blank > _MAX_BLANK_LINES:
                raise _CutOffError(
                    f"there are more than {_MAX_BLANK_LINES} blank lines in a row before line {number}"
                )
            if not blank:
                yield number, line.decode("utf-8", "replace")
        parts = [others[-1]]
        size = len(others[-1])
    if (line := b"".join(parts)).strip():
        yield number + 1, line.decode("utf-8", "replace")


def _decompress(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a file in chunks, decompressed if it is gzipped, also as several concatenated members."""
    piece = _read_chunks(stream)
    if not piece.startswith(_GZIP):
        while piece:
            yield piece
            piece = _read_chunks(stream)
        return
    unpacker = zlib.decompressobj(_GZIP_WINDOW)
    packed_bytes, unpacked_bytes = len(piece), 0
    while piece:
        try:
            chunk = unpacker.decompress(piece, _CHUNK_BYTES)
        except zlib.error as error:
            raise _CutOffError("its compressed data is corrupt") from error
        unpacked_bytes += len(chunk)
        if unpacked_bytes > max(_MIN_BOMB_BYTES, _MAX_COMPRESSION * packed_bytes):
            raise _CutOffError(
                f"its content is more than {_MAX_COMPRESSION} times as large as the compressed file"
            )
        yield chunk
        piece = unpacker.unused_data or unpacker.unconsumed_tail
        if not piece:
            piece = _read_chunks(stream)
            packed_bytes += len(piece)
        if unpacker.eof and piece:
            unpacker = zlib.decompressobj(_GZIP_WINDOW)
    yield unpacker.flush()  # the last bytes may have been read without room for what they stand for
    if not unpacker.eof:
        raise _CutOffError("its compressed data is truncated")


def _read_chunks(stream: IO[bytes]) -> bytes:
    try:
        return stream.read(_CHUNK_BYTES)
    except OSError as error:
        raise _CutOffError(error.strerror or "the rest cannot be read") from error


def _has_more_lines(lines: Iterator[tuple[int, str]]) -> bool:
    try:
        return next(lines, None) is not None
    except _CutOffError:
        return False


def _choose_decoder(first: str, path: Path) -> type[RecordingDecoder | TraceDecoder]:
    try:
        header = json.loads(first)
    except (ValueError, RecursionError):
        header = None
    if isinstance(header, dict):
        if "trace" in header:
            if header["trace"] == 1:
                return TraceDecoder
            raise RecordingError(
                f"{path} is a trace of format {header['trace']}; this version of gpulse reads only format 1"
            )
        if header.get("format") == RECORDING_FORMAT:
            version = header.get("version")
            if version == RECORDING_VERSION:
                return RecordingDecoder
            raise RecordingError(
                f"{path} is a recording of version {version}; this version of gpulse reads version {RECORDING_VERSION}",
                hint=f"install a newer gpulse: {install_command(upgrade=True)}",
            )
    raise RecordingError(f"{path} is not a recording", hint="record one with `gpulse record -o run.jsonl.gz`")
