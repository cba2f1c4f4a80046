from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from gpulse.export.prometheus import self_metrics
from gpulse.export.prometheus.metrics_page import format_metrics
from gpulse.export.prometheus.node_state import HolderLimit, NodeState, stale_seconds
from gpulse.export.prometheus.text_format import accepts_gzip
from gpulse.model.device import Device, Node
from gpulse.model.finding import Finding, finding_from_document
from gpulse.model.frame import CgroupReading, FilesystemReading, Frame, GpuReading, NetworkReading
from gpulse.model.job import Job
from gpulse.model.metric_catalog import CATALOG
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading
from gpulse.model.series_labels import gpu_info_labels
from gpulse.model.source_health import Health
from gpulse.model.xid import XidCounts, XidErrors
from gpulse.sources.demo_machine import DemoMachine

NOW = 1_767_225_600.0
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)*)\})? (\S+)')


def demo() -> Frame:
    """A frame of the demo machine."""
    machine = DemoMachine(NOW - 60, gpus=2)
    try:
        return machine.sample(NOW)
    finally:
        machine.close()


def text(nodes: list[NodeState], now: float = NOW, interval: float = 1.0) -> str:
    """The whole exposition."""
    return "".join(format_metrics(nodes, now=now, interval_seconds=interval, version="1.2"))


def small(name: str, value: float = 0.5, uuid: str = "GPU-1") -> Frame:
    """A frame with one number."""
    gpu = GpuReading(Device(0, uuid, name), {"gpu_utilization_ratio": value})
    return Frame(NOW, NOW, Node("x"), (gpu,))


def test_every_line_is_the_format() -> None:
    """Every line is a comment or a sample, families are in one piece, and no sample is there twice."""

    lines = text([NodeState("alpha", demo()), NodeState("beta", demo())]).splitlines()
    kinds: dict[str, str] = {}
    order: list[str] = []
    seen: Counter[str] = Counter()
    for line in lines:
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            float(match[3])
            seen[line.rpartition(" ")[0]] += 1
            if not order or order[-1] != match[1]:
                order.append(match[1])
    assert 1 == max(seen.values())
    assert len(order) == len(set(order))
    assert set(order) == set(kinds)


def test_a_node_is_as_fresh_as_its_own_interval_says() -> None:
    """Nodes that sample rarely are shown for longer; the others are not."""

    nodes = [NodeState("slow", small("a"), interval_seconds=60.0), NodeState("usual", small("a"))]
    page = text(nodes, now=NOW + 59)

    assert 'gpulse_up{node="slow"} 1\ngpulse_up{node="usual"} 0\n' in page
    assert 1 == page.count("\ngpulse_gpu_gpu_utilization_ratio{")
    assert "\ngpulse_gpu_gpu_utilization_ratio{" not in text(nodes, now=NOW + 301)


def test_a_node_has_so_many_subjects_and_no_more() -> None:
    """Whatever an agent says, a page stays a page; how many are not shown is."""

    mounts = [
        FilesystemReading(f"{place}{number}", "nfs", "nfs4", None, None, {"used_bytes": 1})
        for number in range(600)
        for place in ("/run/", "/home/")
    ]
    gpus = [GpuReading(Device(n, f"GPU-{n}", "X"), {"power_watts": 1.0}) for n in range(520)]
    health = [Health(f"source_{number}", "failed", "x", NOW) for number in range(100)]
    frame = Frame(NOW, NOW, Node("x"), tuple(gpus), filesystems=tuple(mounts), health=tuple(health))
    page = text([NodeState("a", frame), NodeState("b", demo())])
    dcgm = "".join(
        format_metrics([NodeState("a", frame)], now=NOW, interval_seconds=1.0, version="1", dcgm_names=True)
    )

    assert 512 == page.count('\ngpulse_filesystem_used_bytes{node="a",mount_point="/home/')
    assert 512 == page.count('\ngpulse_gpu_info{node="a"') == dcgm.count("\nDCGM_FI_DEV_POWER_USAGE{")
    assert 64 == page.count("\ngpulse_health_problems{")
    assert 'gpulse_subjects_left_out{node="a",scope="gpu"} 8\n' in page
    assert 'gpulse_subjects_left_out{node="a",scope="filesystem"} 88\n' in page
    assert 2 == page.count("\ngpulse_subjects_left_out{")


def test_prometheus_own_parser() -> None:
    """Prometheus' own reader finds what the frame has, with the catalogue's types and helps."""

    parser = pytest.importorskip("prometheus_client.parser")
    frame = demo()
    families = {
        family.name: family
        for family in parser.text_string_to_metric_families(text([NodeState("alpha", frame)]))
    }

    power = families["gpulse_gpu_power_watts"]
    assert "gauge" == power.type
    assert CATALOG["gpu"]["power_watts"].help == power.documentation
    assert {gpu.device.uuid: gpu.values["power_watts"] for gpu in frame.gpus} == {
        sample.labels["uuid"]: sample.value for sample in power.samples
    }
    assert {"node", "gpu", "uuid", "name"} == set(power.samples[0].labels)
    assert "counter" == families["gpulse_host_cpu_user_seconds"].type
    assert {"version": "1.2"} == families["gpulse_build_info"].samples[0].labels


def test_counters_are_named_as_counters() -> None:
    """What the catalogue calls a counter ends as counters do, and nothing else does."""

    for metrics in CATALOG.values():
        for metric in metrics.values():
            assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name


def test_old_values_are_left_out() -> None:
    """A frame that is too old says nothing but its age."""

    nodes = [NodeState("alpha", small("A"))]

    assert "gpulse_gpu_" in text(nodes, NOW + 10)
    late = text(nodes, NOW + 10.1)
    assert "gpulse_gpu_" not in late
    assert 'gpulse_up{node="alpha"} 0' in late
    assert 'gpulse_frame_age_seconds{node="alpha"} 10.1\n' in late
    assert "gpulse_gpu_" in text(nodes, NOW + 49, interval=10.0)
    assert 10.0 == stale_seconds(0.1)


def test_nodes_without_a_frame() -> None:
    """A node that sent nothing yet is down; no nodes at all is fine."""

    assert 'gpulse_up{node="alpha"} 0\n' in text([NodeState("alpha", None)])
    assert "gpulse_frame_age" not in text([NodeState("alpha", None)])
    assert "gpulse_up" not in text([])


def test_labels_are_escaped() -> None:
    """Names from nodes cannot break a line or add a label."""

    written = text([NodeState('a"\n\\', small('x",y="1\nz \ud800'))])

    assert (
        r'gpulse_gpu_gpu_utilization_ratio{node="a\"\n\\",gpu="0",uuid="GPU-1",name="x\",y=\"1\nz ?"} 0.5'
        in written.splitlines()
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_unknown_is_absent(value: float) -> None:
    """A number that is none has no line, and a family without lines no title."""

    assert "gpulse_gpu_gpu" not in text([NodeState("a", small("x", value))])


def test_ten_thousand_gpus_come_in_small_pieces() -> None:
    """No piece of a large exposition keeps others waiting for long."""

    frame = demo()
    gpus = tuple(
        frame.gpus[0]._replace(device=frame.gpus[0].device._replace(uuid=f"GPU-{n}")) for n in range(8)
    )
    nodes = [NodeState(f"node{n}", frame._replace(gpus=gpus)) for n in range(1250)]
    longest, lines = 0, 0
    for piece in format_metrics(nodes, now=NOW, interval_seconds=1.0, version="1"):
        longest = max(longest, len(piece))
        lines += piece.count("gpulse_gpu_power_watts{")
    assert 10_000 == lines
    assert longest < 1 << 18


def samples(written: str, family: str) -> dict[tuple[tuple[str, str], ...], float]:
    """The samples of a family, by their labels in order."""
    found = {}
    for line in written.splitlines():
        match = SAMPLE.fullmatch(line)
        if match is not None and match[1] == family:
            found[tuple(re.findall(r'([a-z_]+)="([^"]*)"', match[2] or ""))] = float(match[3])
    return found


def test_who_and_what_a_node_is() -> None:
    """Nodes and GPUs are described by labels, the same that an engine gets."""

    frame = demo()
    written = text([NodeState("alpha", frame, host="alpha.example", machine="m1", version="9")])

    [(labels, value)] = samples(written, "gpulse_node_info").items()
    known = dict(labels)
    assert 1 == value
    assert ("alpha", "alpha.example", "m1", "9", frame.node.driver) == tuple(
        known[name] for name in ("node", "host", "machine", "version", "driver")
    )
    infos = [dict(labels) for labels in samples(written, "gpulse_gpu_info")]
    assert [gpu_info_labels("alpha", gpu.device) for gpu in frame.gpus] == infos


@pytest.mark.parametrize("dcgm_names", [False, True])
def test_gpus_that_are_described_oddly(dcgm_names: bool) -> None:
    """What an agent of another version says about a GPU becomes text, and spoils nobody's page."""

    odd: Any = {"serial": ["1", {}], "bus_id": 5, "architecture": {"x": 1}}
    frame = small("x")
    gpu = frame.gpus[0]._replace(device=frame.gpus[0].device._replace(**odd))
    pieces = format_metrics(
        [NodeState("a", frame._replace(gpus=(gpu,))), NodeState("b", frame)],
        now=NOW,
        interval_seconds=1.0,
        version="1",
        dcgm_names=dcgm_names,
    )
    written = "".join(pieces)

    name = "DCGM_FI_DEV_GPU_UTIL{" if dcgm_names else "gpulse_gpu_gpu_utilization_ratio{"
    assert 2 == written.count(name)
    assert dcgm_names or """serial="['1', {}]",""" in written


def test_scopes_without_end_are_no_series() -> None:
    """Control groups, loopback and interfaces of containers are left out; a mount that is listed twice is told once."""

    kinds = ("ethernet", "infiniband", "virtual", "loopback")
    disk = FilesystemReading("/data", "/dev/sda1", "ext4", None, None, {"size_bytes": 5})
    frame = Frame(
        NOW,
        NOW,
        Node("x"),
        filesystems=(disk, disk),
        network=tuple(
            NetworkReading(f"{kind}0", kind, True, {"rx_bytes_total": 1, "link_bits_per_second": 8000})
            for kind in kinds
        ),
        cgroups=(CgroupReading("/a", {"memory_used_bytes": 1}),),
    )
    written = text([NodeState("a", frame)])

    links = [dict(labels)["interface"] for labels in samples(written, "gpulse_network_rx_bytes_total")]
    assert ["ethernet0", "infiniband0"] == links
    assert {1000.0} == set(samples(written, "gpulse_network_link_bytes_per_second").values())
    assert "cgroup" not in written
    assert 1 == written.count("gpulse_filesystem_size_bytes{")


@pytest.mark.parametrize("dcgm_names", [False, True])
def test_ten_thousand_short_processes_add_no_series(dcgm_names: bool) -> None:
    """However many programs come and go, the series are those of their jobs and users."""

    frame = demo()
    owner = Owner(user="ada", job="slurm:4711")

    def series(pids: range) -> set[str]:
        processes = tuple(
            ProcessReading(
                ProcessIdentity(pid, name=f"p{pid}", owner=owner._replace(container=f"{pid:012x}")), "R", {}
            )
            for pid in pids
        )
        gpus = tuple(
            gpu._replace(processes=tuple(GpuProcess(pid, "compute", pid) for pid in pids))
            for gpu in frame.gpus
        )
        pieces = format_metrics(
            [NodeState("a", frame._replace(gpus=gpus, processes=processes))],
            now=NOW,
            interval_seconds=1.0,
            version="1",
            dcgm_names=dcgm_names,
        )
        return {line.rpartition(" ")[0] for line in "".join(pieces).splitlines()}

    assert series(range(1, 2)) == series(range(1000, 11_000))


def test_who_holds_a_gpu() -> None:
    """Jobs with their users, people without a job, and jobs that were given a GPU and run nothing on it."""

    device = Device(0, "GPU-0", "X")
    owners = [Owner(user="ada", job="slurm:1"), Owner(user="ada", job="slurm:1"), Owner(user="bob"), Owner()]
    processes = tuple(
        ProcessReading(ProcessIdentity(pid, owner=owner), "R", {}) for pid, owner in enumerate(owners, 1)
    )
    held = tuple(GpuProcess(process.pid, "compute") for process in processes)
    frame = Frame(
        NOW,
        NOW,
        Node("x"),
        (
            GpuReading(device, {}, held),
            GpuReading(device._replace(index=1, uuid="GPU-1"), {}, ()),
            GpuReading(device._replace(index=2, uuid="GPU-2"), {}),
        ),
        processes=processes,
        jobs=(Job("slurm:1", "ada", gpus=("GPU-0",)), Job("slurm:2", "eve", gpus=("GPU-1",))),
    )
    written = text([NodeState("a", frame)])

    jobs = [dict(labels) for labels in samples(written, "gpulse_gpu_job_info")]
    assert [("0", "slurm:1", "ada"), ("0", "", "bob"), ("1", "slurm:2", "eve")] == [
        (job["gpu"], job["job"], job["user"]) for job in jobs
    ]
    counts = samples(written, "gpulse_gpu_processes")
    assert [("0", 4), ("1", 0)] == [(dict(labels)["gpu"], count) for labels, count in counts.items()]


def test_faults_of_one_gpu_are_series_of_their_own() -> None:
    """Each with its cause; what is there twice is one series, or the whole page could not be read."""

    fault = Finding("gpu_fault", "fault", "critical", 1.0, "…", label="0")
    causes = ("ecc", "gpu_lost gpu 0-3", "ecc", None)

    shown = samples(
        text([NodeState("a", small("x"), findings=[fault._replace(cause=cause) for cause in causes])]),
        "gpulse_finding",
    )
    assert ["ecc", "gpu_lost_gpu_0-3", None] == [dict(labels).get("cause") for labels in shown]


def test_findings_are_series_only_as_ours_are() -> None:
    """What an agent calls a finding is believed when it looks like one, and there are never many of them."""

    good = Finding("gpu_fault", "fault", "critical", 0.9, "…", label="3")
    told = good.to_dict()
    wrong = [
        finding_from_document(document)
        for document in (
            {**told, "id": "Anything\nat all"},
            {**told, "family": "made_up"},
            {**told, "confidence": "high"},
            {},
        )
    ]
    many = [good._replace(id=f"f{number}") for number in range(1000)]
    mine = Finding("thin_kernels", "gpu_use", "medium", 0.7, "…")
    frame = small("x")

    found = samples(text([NodeState("a", frame, findings=[*wrong, good, mine])]), "gpulse_finding")
    assert {
        (
            ("node", "a"),
            ("gpu", "3"),
            ("finding", "gpu_fault"),
            ("family", "fault"),
            ("severity", "critical"),
        ): 0.9,
        (
            ("node", "a"),
            ("gpu", ""),
            ("finding", "thin_kernels"),
            ("family", "gpu_use"),
            ("severity", "medium"),
        ): 0.7,
    } == found
    assert 64 == len(samples(text([NodeState("a", frame, findings=many)]), "gpulse_finding"))


def test_problems_are_counted_by_reason() -> None:
    """Several GPUs that are lost are one series; what a machine simply cannot say is no problem."""

    lost = Health("nvml", "gpu_lost", "gone", NOW, "gpu 1")
    frame = small("x")._replace(
        health=(
            lost,
            lost._replace(subject="gpu 2"),
            Health("gpm", "not_supported", "", NOW),
            lost._replace(code="nonsense"),  # type: ignore[arg-type]
            lost._replace(source='x"y'),
        )
    )

    assert {(("node", "a"), ("source", "nvml"), ("code", "gpu_lost")): 2.0} == samples(
        text([NodeState("a", frame)]), "gpulse_health_problems"
    )


def test_slower_readings_have_their_age() -> None:
    """Readings with a period of their own say how old they are."""

    gpu = GpuReading(Device(0, "GPU-1", "X"), {"power_watts": 1.0}, read_at={"slow": NOW - 20, "gpm": NOW})
    ages = samples(
        text([NodeState("a", Frame(NOW, NOW, Node("x"), (gpu,)))], NOW + 1), "gpulse_gpu_reading_age_seconds"
    )

    assert {"slow": 21.0, "gpm": 1.0} == {dict(labels)["group"]: age for labels, age in ages.items()}


def test_xids_are_counted_by_code() -> None:
    """Each code of a GPU is a counter with the time it was last seen."""

    counts = XidCounts()
    counts.add(XidErrors("GPU-1", "0", 79, 1, NOW - 5))
    counts.add(XidErrors("GPU-1", "0", 31, 4, NOW - 9))
    counts.add(XidErrors("GPU-1", "0", 31, 2, NOW - 7))
    written = text([NodeState("a", small("x"), xids=counts)])

    totals = {
        dict(labels)["xid"]: value for labels, value in samples(written, "gpulse_gpu_xid_total").items()
    }
    assert {"31": 6.0, "79": 1.0} == totals
    seen = samples(written, "gpulse_gpu_xid_last_seen_timestamp_seconds")
    assert {"31": NOW - 7, "79": NOW - 5} == {dict(labels)["xid"]: value for labels, value in seen.items()}


def test_xids_of_a_gpu_that_fell_off_the_bus_stay() -> None:
    """It is in no frame any more, and its error may have been its last word; its labels are those it had."""

    counts = XidCounts()
    counts.add(XidErrors("GPU-1", "0", 79, 1, NOW - 5))
    counts.add(XidErrors("GPU-2", "1:3", 79, 1, NOW - 5))
    listed = samples(text([NodeState("a", small("NVIDIA H200"), xids=counts)]), "gpulse_gpu_xid_total")
    gone = NodeState("a", Frame(NOW, NOW, Node("x")), xids=counts)

    assert listed == samples(text([gone]), "gpulse_gpu_xid_total")
    assert [("0", "GPU-1", "NVIDIA H200"), ("1:3", "GPU-2", "")] == [
        tuple(dict(labels)[name] for name in ("gpu", "uuid", "name")) for labels in listed
    ]


def test_who_holds_gpus_is_told_of_so_many_a_day() -> None:
    """What processes call their job is their own word, and each is a series."""

    holder_limit = HolderLimit()
    told = {}
    for number in range(600):
        owner = Owner("ada", 1000, f"slurm:{number}")
        process = ProcessReading(ProcessIdentity(7, owner=owner), "R", {})
        gpu = GpuReading(Device(0, "GPU-1", "X"), {"power_watts": 1.0}, (GpuProcess(7, "compute"),))
        nodes = [NodeState("a", Frame(NOW, NOW, Node("x"), (gpu,), processes=(process,)))]
        for dcgm_names in (False, True):
            page = format_metrics(
                nodes,
                now=NOW,
                interval_seconds=1.0,
                version="1",
                dcgm_names=dcgm_names,
                holder_limit=holder_limit,
            )
            told.update(dict.fromkeys(re.findall(r'.*(?:job|hpc_job)="(?:slurm:)?\d+".*', "".join(page))))
    later = format_metrics(
        [nodes[0]._replace(frame=Frame(NOW + 86_400, NOW, Node("x"), (gpu,), processes=(process,)))],
        now=NOW + 86_400,
        interval_seconds=1.0,
        version="1",
        holder_limit=holder_limit,
    )

    assert 2 * 500 == len(told)
    assert 'job="slurm:599"' in "".join(later)


def test_a_heads_own_numbers() -> None:
    """From its status document; what that does not say is not there."""

    status = {
        "frames_received": 12,
        "connected_clients": ["a", "b"],
        "nodes": [{"state": "healthy"}, {"state": "lost"}, {"state": "healthy"}],
        "missing_nodes": ["c"],
        "active_sessions": [],
        "storage": {"state": "failing", "log_bytes": 5, "free_bytes": 7, "waiting_bytes": 3},
        "remote": {"state": "failing", "samples_total": 100, "lost_total": 0, "waiting_seconds": None},
        "remote_query": {"state": "ok"},
        "database": {"state": "failing"},
        "notifications": [
            {"name": "admins", "state": "failing", "waiting": 2, "sent_total": 9, "failed_total": 4}
        ],
    }
    written = "".join(
        format_metrics(
            [], now=NOW, interval_seconds=1.0, version="1", more=self_metrics.head_families(status)
        )
    )

    numbers = dict(re.findall(r"^gpulse_head_(\S+) (\S+)$", written, re.MULTILINE))
    assert {
        "frames_received_total": "12",
        "streams": "2",
        'nodes{state="healthy"}': "2",
        'nodes{state="late"}': "0",
        'nodes{state="lost"}': "1",
        "nodes_missing": "1",
        "sessions_active": "0",
        "storage_up": "0",
        'storage_bytes{part="log"}': "5",
        "storage_free_bytes": "7",
        "commit_waiting_bytes": "3",
        "remote_up": "0",
        "remote_query_up": "1",
        "database_up": "0",
        "remote_samples_total": "100",
        "remote_lost_total": "0",
        'notifications_up{target="admins"}': "0",
        'notifications_waiting{target="admins"}': "2",
        'notifications_sent_total{target="admins"}': "9",
        'notifications_failed_total{target="admins"}': "4",
    } == numbers


def test_gzip_is_taken_from_who_offers_it() -> None:
    """As the header says, and not otherwise."""

    yes = ("gzip", "deflate, gzip;q=0.5", "*", "GZIP")
    no = (None, "", "deflate", "gzip;q=0", "gzip; q=0.0", "identity")
    assert [True] * 4 + [False] * 6 == [accepts_gzip(header) for header in (*yes, *no)]
