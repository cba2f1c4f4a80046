from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from gpulse.errors import ExportCancelledError, RefusedError, UsageError
from gpulse.export.session_file.file_writer import FORMATS, SessionExport, write_session
from gpulse.export.session_file.frame_grid import MAX_STEPS, count_steps
from gpulse.export.session_file.output_file import SessionFile
from gpulse.model.session import Interruption, Session, SessionFormat
from gpulse.store.gpu_selection import select_gpus
from gpulse.store.store import StoredEvent, StoredGpu
from tests.unit.session_store import GIB, START, MemoryStore, gpu, session

ROOT = Path(__file__).parents[2]
TIMES = [START + second + 0.4 for second in range(10)]


def steady(
    *gpus: StoredGpu, times: list[float] | None = None, events: list[StoredEvent] | None = None
) -> MemoryStore:
    """A store in which every GPU is half busy, with a quarter of its memory in use."""
    store = MemoryStore(gpus, events or [])
    for one in gpus:
        store.add(
            one,
            TIMES if times is None else times,
            gpu_utilization_ratio=0.5,
            memory_used_bytes=20 * GIB,
            memory_total_bytes=80 * GIB,
            power_watts=300.0,
            pcie_rx_bytes_per_second=2e9,
            pcie_tx_bytes_per_second=1e9,
            nvlink_rx_bytes_per_second=10e9,
            nvlink_tx_bytes_per_second=20e9,
        )
    return store


def written(store: MemoryStore, about: Session, output_format: Any = "json") -> bytes:
    """The file of a session."""
    file = io.BytesIO()
    summary = write_session(store, about, file, output_format)
    assert summary.bytes == len(file.getvalue())
    return file.getvalue()


def document(store: MemoryStore, about: Session) -> dict[str, Any]:
    """The file of a session, read back."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    found: dict[str, Any] = json.loads(written(store, about), parse_constant=refuse)
    return found


def test_the_layout_of_the_seed() -> None:
    """What readers of gswarm-profiler's files look for is there, as numbers and UTC times."""
    found = document(steady(gpu(1, 0), gpu(2, 3)), session(bandwidth=True, nvlink=True))

    assert ("run", "2027-01-15T08:00:00.000Z", "2027-01-15T08:00:10.000Z") == (
        found["session_name"],
        found["start_time"],
        found["end_time"],
    )
    assert list(range(1, 11)) == [frame["frame_id"] for frame in found["frames"]]
    assert {
        "frame_id": 3,
        "time": "2027-01-15T08:00:02.000Z",
        "gpu_id": ["n1:0:NVIDIA H200", "n2:3:NVIDIA H200"],
        "gpu_util": [50.0, 50.0],
        "gpu_memory": [25.0, 25.0],
        "dram_bandwidth": [3.0, 3.0],
        "dram_bandwidth_rx": [2.0, 2.0],
        "dram_bandwidth_tx": [1.0, 1.0],
        "gpu_bandwidth": [30.0, 30.0],
        "available_clients": ["n1", "n2"],
        "missing_clients": [],
    } == found["frames"][2]
    summary = found["summary_by_device"]["n1:0:NVIDIA H200"]
    assert (50.0, 25.0, 3.0, 30.0) == tuple(
        summary[f"avg_{name}"] for name in ("gpu_util", "gpu_memory", "dram_bandwidth", "gpu_bandwidth")
    )
    assert (10, 1.0, 2700.0) == (summary["samples"], summary["availability_ratio"], summary["energy_joules"])


def test_without_bandwidth_there_is_none() -> None:
    """Neither in frames nor in the summary."""
    assert "bandwidth" not in written(steady(gpu(1, 0)), session()).decode()


def test_a_node_that_was_away_is_null_and_named() -> None:
    """Its GPUs keep their places in every frame."""
    there, away = gpu(1, 0), gpu(2, 0)
    store = steady(there, away)
    store = MemoryStore([there, away])
    store.add(there, TIMES, gpu_utilization_ratio=0.0)
    store.add(away, TIMES[:4] + TIMES[7:], gpu_utilization_ratio=1.0)

    found = document(store, session())

    assert [100.0] * 4 + [None] * 3 + [100.0] * 3 == [frame["gpu_util"][1] for frame in found["frames"]]
    assert [0.0] * 10 == [frame["gpu_util"][0] for frame in found["frames"]]
    assert ([], ["n2"]) == (found["frames"][3]["missing_clients"], found["frames"][4]["missing_clients"])
    assert ["n1"] == found["frames"][4]["available_clients"]
    assert [1.0, 0.7] == [node["availability_ratio"] for node in found["nodes"]]


def test_unknown_memory_is_null() -> None:
    """Used without total says nothing; the total may also be known from the device alone."""
    bare, told = gpu(1, 0), gpu(1, 1, device={"facts": {"memory_total_bytes": 40 * GIB}})
    store = MemoryStore([bare, told])
    for one in (bare, told):
        store.add(one, TIMES, gpu_utilization_ratio=0.1, memory_used_bytes=10 * GIB)

    found = document(store, session())

    assert [None, 25.0] == found["frames"][0]["gpu_memory"]
    assert found["summary_by_device"]["n1:0:NVIDIA H200"]["avg_gpu_memory"] is None


def test_what_a_session_says_about_itself() -> None:
    """Under keys that the seed did not have."""
    about = session(labels={"model": "llama"}, interruptions=(Interruption(START + 2, START + 4),))

    found = document(steady(gpu(1, 0)), about)

    assert {"name": "gpulse-session", "version": 1} == found["format"]
    assert ("s1", {"model": "llama"}, 1000) == (found["session_id"], found["labels"], found["interval_ms"])
    assert [{"start_time": "2027-01-15T08:00:02.000Z", "end_time": "2027-01-15T08:00:04.000Z"}] == found[
        "interruptions"
    ]
    assert ("n1", "580.1", ["n1:0:NVIDIA H200"]) == tuple(
        found["nodes"][0][key] for key in ("host", "driver", "gpus")
    )


def finding(label: str | None, **more: Any) -> dict[str, Any]:
    """A finding as agents send it."""
    return {"id": "launch_bound", "severity": "high", "summary": "waits", "gpu": 0, "label": label, **more}


def heard(second: float, kind: str, node: int | None = 1, **detail: Any) -> StoredEvent:
    """An event so many seconds after the start."""
    return StoredEvent(START + second, kind, node, detail)


_PLACE = {
    "pid": 5,
    "role": "main",
    "file": "/u/train.py",
    "line": 84,
    "function": "step",
    "share": 0.8,
    "stacks": 20,
    "doing": None,
}


@pytest.mark.parametrize(
    ("output_format", "node", "label", "code", "is_private"),
    [
        ("json", 1, "0", {"where": [_PLACE]}, True),
        ("jsonl", 1, None, {"where_note": "no line of train.py stands out"}, True),
        ("parquet", 1, "0", {"where": [_PLACE]}, True),
        ("csv", 1, "0", {"where": [_PLACE]}, False),
        ("json", 1, "0", {}, False),
        ("json", 1, "1", {"where": [_PLACE]}, False),
        ("json", 2, "0", {"where": [_PLACE]}, False),
    ],
)
def test_only_files_with_code_are_private(
    output_format: SessionFormat, node: int, label: str | None, code: dict[str, Any], *, is_private: bool
) -> None:
    """What other GPUs and nodes do does not matter, and CSV has no findings."""
    gpus = [gpu(1, 0), gpu(1, 1), gpu(2, 0)]
    events = [heard(3, "findings", node=node, findings=[finding(label, **code)])]
    store, file, sizes = steady(*gpus, events=events), io.BytesIO(), list[int]()

    write_session(
        store,
        session(gpus=("n1:0",)),
        file,
        output_format,
        make_private=lambda: sizes.append(len(file.getvalue())),
    )

    assert ([0] if is_private else []) == sizes
    assert is_private == (b"train.py" in file.getvalue())


def test_findings_become_stretches_of_time() -> None:
    """From when they began, be it before the session, with their newest words; those of other GPUs are not in."""
    events = [
        heard(-50, "findings", findings=[finding("0"), finding("7")]),
        heard(3, "findings", findings=[finding("0")]),
        heard(5, "findings", findings=[finding("0", summary="waits more"), finding(None, id="swapping")]),
        heard(8, "agent_stopping"),
        heard(9, "findings", node=3, findings=[finding("0")]),
    ]

    found = document(steady(gpu(1, 0), events=events), session())["findings"]

    assert [
        ("launch_bound", "n1", "0", "07:59:10", "08:00:08", 8.0, 1, "waits more"),
        ("swapping", "n1", None, "08:00:05", "08:00:08", 3.0, 1, "waits"),
    ] == [
        (
            item["id"],
            item["node"],
            item["label"],
            item["first_time"][11:19],
            item["last_time"][11:19],
            item["active_seconds"],
            item["times"],
            item["summary"],
        )
        for item in found
    ]


@pytest.mark.parametrize(
    ("began", "first"),
    [
        (-20, "07:59:40"),
        (2, "08:00:02"),
        (6, "08:00:06"),
        (7, "08:00:06"),
        (-1e10, "08:00:06"),
        (None, "08:00:06"),
    ],
)
def test_a_finding_that_was_told_late(began: float | None, first: str) -> None:
    """Begins when it began itself, whatever the clock of its node, unless that cannot be."""
    ahead = 500.0
    start = None if began is None else START + ahead + began
    late = finding("0", start=start, end=START + ahead + 6)
    events = [heard(6, "findings", findings=[late]), heard(8, "findings", findings=[])]

    (found,) = document(steady(gpu(1, 0), events=events), session())["findings"]

    assert (first, "08:00:08") == (found["first_time"][11:19], found["last_time"][11:19])


def test_a_session_keeps_every_fault_of_a_gpu() -> None:
    """The worst first, each with its own words; one that went on after the session says so."""
    faults = [
        finding("0", id="gpu_fault", cause=cause, severity=severity, summary=cause)
        for cause, severity in (("remap", "medium"), ("xid_94", "high"), ("ecc", "critical"))
    ]
    events = [heard(1, "findings", findings=faults), heard(7, "findings", findings=faults[1:])]

    found = document(steady(gpu(1, 0), events=events), session())["findings"]

    assert [
        ("ecc", "critical", True, 9.0),
        ("xid_94", "high", True, 9.0),
        ("remap", "medium", False, 6.0),
    ] == [(item["summary"], item["severity"], item["is_ongoing"], item["active_seconds"]) for item in found]


def test_events_of_the_session() -> None:
    """Those of its time and nodes, and the head's own; processes and findings have other places."""
    events = [
        heard(-1, "xid"),
        heard(1, "xid", xid=79),
        heard(2, "clock_step", seconds=3600.0),
        heard(3, "node_lost", node=9),
        heard(4, "head_started", node=None),
        heard(5, "process", pid=1),
        heard(10, "xid"),
    ]

    found = document(steady(gpu(1, 0), events=events), session())

    assert [("xid", "n1"), ("clock_step", "n1"), ("head_started", None)] == [
        (event["kind"], event["node"]) for event in found["events"]
    ]
    assert [{"time": "2027-01-15T08:00:02.000Z", "seconds": 3600.0}] == found["nodes"][0]["clock_steps"]


def test_who_appears() -> None:
    """GPUs that delivered, and silent ones of nodes that took part; neither absent nodes nor boards replaced before."""

    old, new = gpu(1, 0, uuid="GPU-old"), gpu(1, 0, uuid="GPU-new")
    silent, gone = gpu(1, 1), gpu(2, 0)
    store = MemoryStore([old, new, silent, gone])
    store.add(old, [START - 100], gpu_utilization_ratio=0.5)
    store.add(new, TIMES, gpu_utilization_ratio=0.5)

    found = document(store, session())

    assert ["n1:0:NVIDIA H200", "n1:1:NVIDIA H200"] == found["frames"][0]["gpu_id"]
    assert "GPU-new" == found["summary_by_device"]["n1:0:NVIDIA H200"]["uuid"]
    assert 0.0 == found["summary_by_device"]["n1:1:NVIDIA H200"]["availability_ratio"]


def test_a_board_replaced_during_the_session() -> None:
    """Both are there, told apart."""
    old, new = gpu(1, 0, uuid="GPU-old"), gpu(1, 0, uuid="GPU-new")
    store = MemoryStore([old, new])
    store.add(old, TIMES[:5], gpu_utilization_ratio=0.5)
    store.add(new, TIMES[5:], gpu_utilization_ratio=0.25)

    found = document(store, session())

    assert ["n1:0:NVIDIA H200", "n1:0:NVIDIA H200#2"] == found["frames"][0]["gpu_id"]
    assert [[50.0, None], [None, 25.0]] == [found["frames"][place]["gpu_util"] for place in (0, 9)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ((), ["n1:0", "n1:3:0", "n1:3:1", "n2:0", "n2:3"]),
        (("0",), ["n1:0", "n2:0"]),
        (("3",), ["n1:3:0", "n1:3:1", "n2:3"]),
        (("n1:3:1",), ["n1:3:1"]),
        (("n1:3",), ["n1:3:0", "n1:3:1"]),
        (("GPU-0002",), ["n2:0", "n2:3"]),
        (("gpu-00020003", "n1:0"), ["n1:0", "n2:3"]),
    ],
)
def test_choosing_gpus(wanted: tuple[str, ...], expected: list[str]) -> None:
    """By index, by node and index, by UUID or its beginning."""
    known = [
        gpu(1, 0),
        gpu(1, 3, label="3:0", uuid="MIG-1"),
        gpu(1, 3, label="3:1", uuid="MIG-2"),
        gpu(2, 0),
        gpu(2, 3),
    ]

    found = select_gpus(known, (), wanted)

    assert expected == [f"{one.node_name}:{one.label}" for one in found]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": ("n1", "n9")}, "no node with GPUs matches 'n9'"),
        ({"gpus": ("n1:7",)}, "no GPU matches 'n1:7'"),
        ({"nodes": ("n2",), "gpus": ("n1:0",)}, "no GPU matches 'n1:0'"),
        ({"gpus": ("GPU-",)}, "no GPU matches 'GPU-'"),
        ({"gpus": ("n1",)}, "no GPU matches 'n1'"),
    ],
)
def test_names_that_match_nothing(changes: dict[str, Any], message: str) -> None:
    """Are refused, with what there is."""
    with pytest.raises(RefusedError, match=message) as refused:
        select_gpus([gpu(1, 0), gpu(2, 0)], changes.get("nodes", ()), changes.get("gpus", ()))

    assert "known " in (refused.value.hint or "")


def test_a_session_of_some_nodes_and_gpus() -> None:
    """Only they are in it, and a name that has gone missing since does not stop the export."""
    store = steady(gpu(1, 0), gpu(1, 1), gpu(2, 0))

    found = document(store, session(nodes=("n1", "left"), gpus=("1",)))

    assert ["n1:1:NVIDIA H200"] == found["frames"][0]["gpu_id"]
    assert ["n1"] == [node["name"] for node in found["nodes"]]


def test_lines() -> None:
    """A head, a line a frame, and what comes after them."""
    lines = [json.loads(line) for line in written(steady(gpu(1, 0)), session(), "jsonl").splitlines()]

    assert ["n1:0:NVIDIA H200"] == lines[0]["gpu_id"]
    assert list(range(1, 11)) == [line["frame_id"] for line in lines[1:-1]]
    assert "summary_by_device" in lines[-1]


def test_csv() -> None:
    """One row for each frame and GPU; names with commas and quotes come back as they were."""
    odd = gpu(1, 0, name='H200, "big"')
    store = steady(odd, gpu(2, 0), times=TIMES[1:])

    text = written(store, session(bandwidth=True), "csv").decode()

    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert 20 == len(rows)
    assert text.count("\r\n") == 21
    assert ("1", 'n1:0:H200, "big"', "") == tuple(rows[0][key] for key in ("frame_id", "gpu_id", "gpu_util"))
    assert ("n1", "0", 'H200, "big"', "50.0", "3.0") == tuple(
        rows[2][key] for key in ("node", "index", "name", "gpu_util", "dram_bandwidth")
    )


def test_csv_is_harmless_in_spreadsheets_and_terminals() -> None:
    """Names of GPUs and nodes become neither formulas nor escape sequences."""
    odd = gpu(1, 0, name="=1+1")._replace(node_name="\x1b[2J\u202e", uuid="@A1")
    row = next(csv.DictReader(io.StringIO(written(steady(odd), session(), "csv").decode(), newline="")))

    assert ("^[[2J<202E>", "'@A1", "'=1+1") == (row["node"], row["uuid"], row["name"])


def test_parquet(tmp_path: Path) -> None:
    """The same table with types, and what the other files say beside it as metadata."""
    path = tmp_path / "run.parquet"
    store = steady(gpu(1, 0, name="it's"), gpu(2, 0), times=TIMES[1:])
    path.write_bytes(written(store, session(labels={"a": "it's"}), "parquet"))

    with duckdb.connect() as connection:
        rows = connection.execute(
            f"SELECT frame_id, epoch(time), gpu_id, gpu_util FROM '{path}' ORDER BY frame_id, gpu_id"
        ).fetchall()
        about = connection.execute(f"SELECT value FROM parquet_kv_metadata('{path}')").fetchall()

    assert [
        (1, START, "n1:0:it's", None),
        (1, START, "n2:0:NVIDIA H200", None),
        (2, START + 1, "n1:0:it's", 50.0),
    ] == rows[:3]
    assert 20 == len(rows)
    found = json.loads(about[0][0])
    assert ({"a": "it's"}, 9) == (found["labels"], found["summary_by_device"]["n1:0:it's"]["samples"])


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_session_without_anything(output_format: Any) -> None:
    """No node, no sample: still a whole file."""
    found = written(MemoryStore([]), session(), output_format)

    assert found
    if output_format == "json":
        assert 10 == len(json.loads(found)["frames"])


def test_a_session_that_goes_on_is_cut_now() -> None:
    """And one that was interrupted where the head ended."""
    store = steady(gpu(1, 0))

    going = SessionExport(store, session(end=None, state="active"), now=START + 4.5)
    broken = session(end=None, state="interrupted", interruptions=(Interruption(START + 3),))

    assert 5 == going.header.steps
    assert 3 == SessionExport(store, broken, now=START + 9).header.steps
    with pytest.raises(ValueError, match="`now` is required"):
        SessionExport(store, session(end=None, state="active"))


@pytest.mark.parametrize(
    ("seconds", "interval_ms", "count"),
    [(10, 1000, 10), (10.4, 1000, 10), (10.49, 1000, 10), (10.5, 1000, 11), (10.9, 1000, 11), (9.999999, 1000, 10),
     (10.000001, 1000, 10), (0, 1000, 0), (0.4, 1000, 0), (0.6, 1000, 1), (-5, 1000, 0), (1, 50, 20), (0.3, 200, 2)],
)  # fmt: skip
def test_how_many_steps_there_are(seconds: float, interval_ms: int, count: int) -> None:
    """Whole ones, and one that was cut off after half of it."""
    assert count == count_steps(START, START + seconds, interval_ms)


@pytest.mark.parametrize("phase", [0.01, 0.3, 0.5, 0.7, 0.99])
def test_a_stop_at_any_moment_is_no_gap(phase: float) -> None:
    """Nodes that sampled all the time are missing in no frame, wherever in a step the session is stopped."""
    store = steady(gpu(1, 0), times=[START + second + phase for second in range(20)])

    for end in np.arange(3.0, 5.0, 0.05):
        found = document(store, session(end=START + end))
        assert count_steps(START, START + end, 1000) == len(found["frames"])
        assert [] == [frame["missing_clients"] for frame in found["frames"] if frame["missing_clients"]]


def test_sessions_that_would_fill_a_disk() -> None:
    """Are refused with what to do, before anything is looked up; a month at the fastest pace is not."""
    month = session(end=START + 30 * 86400, interval_ms=50)
    year = session(end=START + 365 * 86400, interval_ms=50)

    assert 51_840_000 == SessionExport(MemoryStore([]), month).header.steps < MAX_STEPS
    with pytest.raises(UsageError, match="630,720,000 frames of 50 ms") as caught:
        SessionExport(MemoryStore([]), year)
    assert "--freq" in str(caught.value.hint)


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize("asked", [0, 1, 3])
def test_an_export_that_nobody_wants_any_more(tmp_path: Path, output_format: Any, asked: int) -> None:
    """Ends soon, and leaves no file."""
    store = steady(gpu(1, 0), times=[START + second for second in np.arange(0, 7200.0, 1.0)])
    answers = iter([False] * asked)

    def export() -> None:
        with SessionFile(tmp_path, "run", f".{output_format}") as out:
            write_session(
                store,
                session(end=START + 7200),
                out.file,
                output_format,
                cancelled=lambda: next(answers, True),
            )

    with pytest.raises(ExportCancelledError, match="the export of session run was canceled"):
        export()

    assert [] == list(tmp_path.iterdir())


def test_a_format_that_is_none() -> None:
    """Is refused with those there are."""
    with pytest.raises(UsageError, match="'xml'"):
        written(MemoryStore([]), session(), "xml")


def test_samples_are_read_in_stretches() -> None:
    """Frames do not depend on where a store cuts them."""
    gpus = [gpu(node, index) for node in range(1, 41) for index in range(8)]
    store = steady(*gpus, times=[START + second for second in np.arange(0, 1200.0, 1.0)])

    export = SessionExport(store, session(end=START + 1200))
    frames = sum(piece.count(b'"frame_id"') for piece in export)

    assert 1200 == frames


LARGE = """
import sys
import numpy as np
from gpulse.export.session_file.file_writer import write_session
from tests.unit.session_store import *

gpus = [gpu(node, index) for node in range(1, 9) for index in range(8)]
store = MemoryStore(gpus)
noise = np.random.default_rng(1)
for one in gpus:
    times = START + np.arange(3600) + 0.02 * one.node + noise.uniform(0, 0.01, 3600)
    store.add(one, times, gpu_utilization_ratio=noise.integers(0, 101, 3600) / 100,
              memory_used_bytes=noise.uniform(0, 80, 3600) * GIB, memory_total_bytes=80 * GIB, power_watts=300.0,
              pcie_rx_bytes_per_second=noise.uniform(0, 5e10, 3600), pcie_tx_bytes_per_second=noise.uniform(0, 5e10, 3600),
              nvlink_rx_bytes_per_second=noise.uniform(0, 5e10, 3600), nvlink_tx_bytes_per_second=noise.uniform(0, 5e10, 3600))
with open(sys.argv[1], "wb") as file:
    summary = write_session(store, session(end=START + 3600, bandwidth=True, nvlink=True), file, sys.argv[2])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(summary.frames, int(peak) / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("output_format", FORMATS)
def test_an_hour_of_64_gpus(output_format: str, tmp_path: Path) -> None:
    """Is written in under 200 MiB of memory, the store's own arrays included."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE, tmp_path / "run", output_format],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )

    frames, megabytes = map(float, done.stdout.split())

    assert 3600 == frames
    assert megabytes < 200
