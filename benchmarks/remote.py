"""What sending every sample to a time-series database costs: 10,000 GPUs of 25 metrics, once a second, as the CPU of the sending process."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks import measure
from benchmarks.fleet import gpu_uuid, host_name
from benchmarks.measure import Report, Table, Target
from gpulse.model.metric_catalog import CATALOG
from gpulse.model.packed_columns import (
    BlockPacker,
    ColumnBlock,
    ColumnLayout,
    PackedFrame,
    SubjectValues,
    unpack_block,
)
from gpulse.model.series_labels import build_series_labels
from gpulse.store.log.log import Log
from gpulse.store.log.record_payloads import BATCH, FACT, FrameBatch, encode_fact
from gpulse.store.tsdb.config import TsdbConfig
from gpulse.store.tsdb.send_supervisor import TsdbForwarder
from gpulse.store.tsdb.write_request import encode_labels, encode_varint

NAME = "remote"
_GPUS = 8
_METRICS = 25
_VARIANTS = 16
_MOST_SHARE = 0.30
_TICKS = os.sysconf("SC_CLK_TCK")
_VICTORIA = "victoria-metrics"


class Load(NamedTuple):
    """What a fleet sends: facts, and for every node the blocks that it plays."""

    facts: list[bytes]
    layouts: list[int]
    blocks: list[bytes]
    missing: list[bytes]
    """The same with some values unknown."""
    layout: ColumnLayout

    @property
    def samples(self) -> int:
        """How many samples a second has."""
        return len(self.layouts) * _GPUS * _METRICS


def load_of(nodes: int) -> Load:
    """A fleet of nodes whose GPUs have as many metrics as the promise says."""
    names = [metric.name for metric in CATALOG["gpu"].values() if metric.resolution <= 1][:_METRICS]
    facts, layouts = [], []
    packer = BlockPacker("gpu", names)
    blocks = [packer.pack(_subjects(0), _rows(names, second))[0].numbers for second in range(_VARIANTS)]
    missing = [
        packer.pack(_subjects(0), _rows(names[: -2 if second % 2 else None], second))[0].numbers
        for second in range(_VARIANTS)
    ]
    for node in range(nodes):
        one = BlockPacker("gpu", names)
        block, _ = one.pack(_subjects(node), _rows(names, 0))
        layouts.append(block.layout)
        name = host_name(node)
        facts.append(encode_fact("node", id=node, name=name, host=name, machine=f"m{node}", time=0))
        facts.append(encode_fact("layout", id=str(block.layout), text=one.text.decode()))
    return Load(facts, layouts, blocks, missing, packer.layout)


def _subjects(node: int) -> list[dict[str, object]]:
    return [{"uuid": gpu_uuid(node, place), "index": place, "name": "NVIDIA H200"} for place in range(_GPUS)]


def _rows(names: list[str], second: int) -> list[SubjectValues]:
    return [
        ({name: 1000 + 7 * second + place + gpu for place, name in enumerate(names)}, {})
        for gpu in range(_GPUS)
    ]


class Figures(NamedTuple):
    """What sending came to."""

    share: float
    """CPU of the sending process over the wall time."""
    samples_a_second: float
    lag_seconds: float
    """How long the last second took to be confirmed."""
    memory_bytes: int
    catching_up: float
    """Samples a second while what waited is sent."""


def sent(tsdb: TsdbConfig, load: Load, seconds: int, *, with_gaps: bool) -> Figures:
    """Write a log as a head does, once a second, and measure who sends it."""
    directory = tempfile.mkdtemp(prefix="gpulse-bench-")
    blocks = load.missing if with_gaps else load.blocks
    try:
        with Log(f"{directory}/log", segment_bytes=256 << 20) as log:
            log.append_many([(FACT, fact) for fact in load.facts])
            forwarder = TsdbForwarder(directory, tsdb, limit_bytes=10 << 30)
            forwarder.start()
            try:
                _play(log, forwarder, load, blocks, range(3))  # templates are made once
                begun, used = time.monotonic(), _cpu_seconds(forwarder.pid)
                before = forwarder.state().samples_total
                lag = _play(log, forwarder, load, blocks, range(3, 3 + seconds))
                time.sleep(max(0.0, begun + seconds - time.monotonic()))
                wall, spent = time.monotonic() - begun, _cpu_seconds(forwarder.pid) - used
                count = forwarder.state().samples_total - before
                memory = _memory_bytes(forwarder.pid)
                waited = _play(log, forwarder, load, blocks, range(3 + seconds, 3 + 2 * seconds), pace=0.0)
            finally:
                forwarder.close()
    finally:
        shutil.rmtree(directory)
    return Figures(spent / wall, count / wall, lag, memory, load.samples * seconds / waited)


def _play(
    log: Log, forwarder: TsdbForwarder, load: Load, blocks: list[bytes], seconds: range, *, pace: float = 1.0
) -> float:
    """Write some seconds in time, or at once; how long after the last commit everything was confirmed."""
    begun = time.monotonic()
    for number, second in enumerate(seconds):
        time.sleep(max(0.0, begun + number * pace - time.monotonic()))
        now_us = time.time_ns() // 1000
        records = []
        for node, layout in enumerate(load.layouts):
            numbers = blocks[(second + node) % _VARIANTS]
            frame = PackedFrame(now_us, second * 1_000_000, (ColumnBlock(layout, numbers),)).to_bytes()
            records.append((BATCH, FrameBatch(bytes(16), node, second + 1, 1, now_us, 0, frame).to_bytes()))
        log.append_many(records)
        if pace:
            forwarder.wake(log.sync())
    forwarder.wake(log.sync())
    committed = time.monotonic()
    while forwarder.reached < log.last:
        if time.monotonic() - committed > 60:
            raise RuntimeError(f"the database does not follow: {forwarder.state()}")
        time.sleep(0.01)
    return max(0.0, time.monotonic() - committed)


def _cpu_seconds(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _memory_bytes(pid: int | None) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def naive_seconds(load: Load) -> float:
    """What building the message of one sample costs when it is built each time, in the same run."""
    begun = time.process_time()
    count = 0
    for node in range(20):
        for subject, values in zip(
            _subjects(node), unpack_block(load.layout, load.blocks[node % _VARIANTS]), strict=True
        ):
            for name, value in values.items():
                _message(
                    build_series_labels("gpu", host_name(node), subject), f"gpulse_gpu_{name}", float(value)
                )
                count += 1
    return (time.process_time() - begun) / count


def _message(labels: dict[str, str], name: str, value: float) -> bytes:
    import struct  # noqa: PLC0415  as one who builds it plainly would

    sample = b"\x09" + struct.pack("<d", value) + b"\x10" + encode_varint(1_767_225_600_000)
    content = encode_labels({"__name__": name, **labels}) + b"\x12" + encode_varint(len(sample)) + sample
    return b"\x0a" + encode_varint(len(content)) + content


@contextmanager
def victoria() -> Iterator[TsdbConfig]:
    """A real database."""
    directory = tempfile.mkdtemp(prefix="gpulse-bench-vm-")
    with measure.child("remote_sink", (), measure.child_environment()) as free:
        port = free.hear()["port"]
    process = subprocess.Popen(
        [
            _VICTORIA,
            f"-httpListenAddr=127.0.0.1:{port}",
            f"-storageDataPath={directory}",
            "-retentionPeriod=1",
            "-loggerLevel=ERROR",
        ]
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield TsdbConfig(f"{url}/api/v1/write", url)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)


@contextmanager
def sink() -> Iterator[TsdbConfig]:
    """A time-series database that keeps nothing."""
    with measure.child("remote_sink", (), measure.child_environment()) as listening:
        yield TsdbConfig(f"http://127.0.0.1:{listening.hear()['port']}/api/v1/write")


def run(*, quick: bool, nodes: int, seconds: int) -> Report:
    """Measure it."""
    if quick:
        nodes, seconds = min(nodes, 100), min(seconds, 5)
    load = load_of(nodes)
    report = Report(NAME, "Remote write")
    table = Table(
        f"{nodes * _GPUS:,} GPUs of {_METRICS} metrics, {load.samples:,} samples a second, for {seconds} s:",
        (
            "database",
            "samples/s",
            "CPU of the sender",
            "a second is confirmed after",
            "catching up, samples/s",
            "memory",
        ),
    )
    contenders = [("nobody (a sink)", sink, False), ("nobody, values missing now and then", sink, True)]
    if shutil.which(_VICTORIA):
        contenders.append(("VictoriaMetrics", victoria, False))
    share = wire = 0.0
    for name, opened, with_gaps in contenders:
        with opened() as tsdb:
            found = sent(tsdb, load, seconds, with_gaps=with_gaps)
            if opened is sink and not with_gaps:
                with urllib.request.urlopen(tsdb.write_url, timeout=10) as answer:
                    wire = int(answer.read()) / (load.samples * (3 + 2 * seconds))
        share = max(share, found.share * 250_000 / found.samples_a_second)
        table.rows.append(
            (
                name,
                f"{found.samples_a_second:,.0f}",
                f"{found.share:.1%}",
                f"{found.lag_seconds:.2f} s",
                f"{found.catching_up:,.0f}",
                f"{found.memory_bytes / (1 << 20):.0f} MiB",
            )
        )
    naive = naive_seconds(load)
    report.targets.append(
        Target("250,000 samples/s, of one core", f"{share:.1%}", f"{_MOST_SHARE:.0%}", share <= _MOST_SHARE)
    )
    report.tables.append(table)
    report.notes.append(
        f"Building each message anew takes {naive * 1e6:.1f} µs a sample in the same run, before it is compressed and sent: "
        f"{naive * 250_000:.0%} of a core for 250,000 samples/s; patching prepared ones takes "
        f"{share / 250_000 * 1e6:.2f} µs with everything, {naive * 250_000 / share:.0f} times less. A sample takes "
        f"{wire:.1f} bytes on the wire."
    )
    return report


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"nodes": 1250, "seconds": 20}).parse_args()
    measure.publish(run(quick=given.quick, nodes=given.nodes, seconds=given.seconds), write=given.write)
