from __future__ import annotations

import json
import math

from gpulse.export.snapshot_documents import build_document, build_rows
from gpulse.model.frame import FilesystemReading, HostReading
from gpulse.model.metric_catalog import CATALOG, Values
from gpulse.model.process import GpuProcess
from gpulse.model.snapshot import Snapshot
from gpulse.sources.demo_machine import DemoMachine
from tests.unit.frames import GIB, NOON, frame, gpu, process, snapshot

TOP = {"time", "node", "driver", "cuda", "gpus", "host", "disks", "network", "findings", "health"}
PROCESS = {
    "pid",
    "user",
    "name",
    "command",
    "gpu_memory_bytes",
    "sm_ratio",
    "cpu_percent",
    "host_memory_bytes",
    "job",
}


def test_the_promised_keys_are_there() -> None:
    """Programs that read the document find every key that the interface promises."""
    made = build_document(snapshot(gpu(0, None, (GpuProcess(17, "compute"),)), processes=(process(17),)))

    assert [] == sorted(TOP - made.keys())
    assert [] == sorted({"index", "uuid", "name", "processes"} - made["gpus"][0].keys())
    assert [] == sorted(PROCESS - made["gpus"][0]["processes"][0].keys())


def test_every_catalogue_name_is_there_and_null_when_unknown() -> None:
    """A reading that could not be had is null, never missing and never 0."""
    made = build_document(Snapshot.of(None, frame(gpu()._replace(values={}), host=HostReading({}))))

    assert dict.fromkeys(CATALOG["gpu"]) == {name: made["gpus"][0][name] for name in CATALOG["gpu"]}
    assert dict.fromkeys(CATALOG["host"]) == {name: made["host"][name] for name in CATALOG["host"]}


def test_the_demo_machine_is_valid_json_without_nan() -> None:
    """The whole document of a busy machine survives a strict parser."""
    machine = DemoMachine(NOON)
    made = build_document(Snapshot.of(machine.sample(NOON + 5), machine.sample(NOON + 5.5)))

    assert made == json.loads(json.dumps(made, allow_nan=False))


def test_what_json_has_no_number_for_is_null() -> None:
    """NaN and infinity, which a damaged recording can hold, become null."""
    made = build_document(snapshot(gpu(0, {"power_watts": math.nan, "temperature_celsius": math.inf})))

    assert [None, None] == [made["gpus"][0][name] for name in ("power_watts", "temperature_celsius")]


def test_a_process_that_cannot_be_seen_keeps_what_the_driver_says() -> None:
    """Its memory is known even where its name is not."""
    made = build_document(snapshot(gpu(0, None, (GpuProcess(17, "compute", GIB, 0.5),))))
    only = made["gpus"][0]["processes"][0]

    assert (17, None, None, GIB, 0.5) == tuple(
        only[key] for key in ("pid", "user", "command", "gpu_memory_bytes", "sm_ratio")
    )


def test_an_unknown_process_list_is_not_an_empty_one() -> None:
    """Null when the driver did not say, a list when nobody is there."""
    made = build_document(snapshot(gpu(0, None, None), gpu(1)))

    assert [None, []] == [item["processes"] for item in made["gpus"]]


def test_rates_come_with_the_time_they_were_measured_over() -> None:
    """Nobody has to guess what a rate is the average of."""
    machine = DemoMachine(NOON)
    made = build_document(Snapshot.of(machine.sample(NOON + 5), machine.sample(NOON + 5.5)))

    assert 0.5 == made["rates_interval_seconds"]
    assert made["disks"][0]["read_bytes_per_second"] > 0


def test_a_file_server_has_its_rates_in_every_shape() -> None:
    """In the document and in the rows of a table; a file system on a disk has none."""
    looks = []
    for seconds in (0, 2):
        counters: Values = {"nfs_reads_total": 100 * seconds, "nfs_read_seconds_total": 0.5 * seconds}
        mounts = (
            FilesystemReading("/", "/dev/sda1", "ext4", "sda", "ssd", {"size_bytes": 7}),
            FilesystemReading("/data", "srv:/data", "nfs4", None, "network", counters),
        )
        looks.append(frame(filesystems=mounts, monotonic=1000.0 + seconds))
    look = Snapshot.of(looks[0], looks[1])
    wanted = ("nfs_reads_total", "nfs_reads_per_second", "nfs_read_await_seconds", "nfs_reads_in_flight")
    shapes = (build_document(look)["filesystems"], build_rows("filesystem", look))

    assert [[(None, None, None, None), (200, 100.0, 0.005, 0.5)]] * 2 == [
        [tuple(item.get(name) for name in wanted) for item in shape] for shape in shapes
    ]


def test_without_a_second_reading_there_are_no_rates() -> None:
    """One reading gives no since-boot averages."""
    made = build_document(Snapshot.of(None, DemoMachine(NOON).sample(NOON + 5)))

    assert (None, None) == (made["rates_interval_seconds"], made["disks"][0]["read_bytes_per_second"])
