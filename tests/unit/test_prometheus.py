from __future__ import annotations

import gc
import re
import time
from collections import Counter

import pytest

from gpulse.export.prometheus import Exposed, exposition, stale_after
from gpulse.model.device import Device, Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric import CATALOGUE
from gpulse.sources.simulated import DemoMachine

NOW = 1_767_225_600.0
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\n"])*",?)*)\})? (\S+)')


def demo() -> Frame:
    """A frame of the demo machine."""
    machine = DemoMachine(NOW - 60, gpus=2)
    try:
        return machine.sample(NOW)
    finally:
        machine.close()


def text(nodes: list[Exposed], now: float = NOW, interval: float = 1.0) -> str:
    """The whole exposition."""
    return "".join(exposition(nodes, now=now, interval_seconds=interval, version="1.2"))


def small(name: str, value: float = 0.5, uuid: str = "GPU-1") -> Frame:
    """A frame with one number."""
    gpu = GpuReading(Device(0, uuid, name), {"gpu_utilization_ratio": value})
    return Frame(NOW, NOW, Node("x"), (gpu,))


def test_every_line_is_the_format() -> None:
    """Every line is a comment or a sample, families are in one piece, and no sample is there twice."""

    lines = text([Exposed("alpha", demo()), Exposed("beta", demo())]).splitlines()
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


def test_prometheus_own_parser() -> None:
    """Prometheus' own reader finds what the frame has, with the catalogue's types and helps."""

    parser = pytest.importorskip("prometheus_client.parser")
    frame = demo()
    families = {
        family.name: family
        for family in parser.text_string_to_metric_families(text([Exposed("alpha", frame)]))
    }

    power = families["gpulse_gpu_power_watts"]
    assert "gauge" == power.type
    assert CATALOGUE["gpu"]["power_watts"].help == power.documentation
    assert {gpu.device.uuid: gpu.values["power_watts"] for gpu in frame.gpus} == {
        sample.labels["uuid"]: sample.value for sample in power.samples
    }
    assert {"node", "gpu", "uuid", "name"} == set(power.samples[0].labels)
    assert "counter" == families["gpulse_host_cpu_user_seconds"].type
    assert {"version": "1.2"} == families["gpulse_build_info"].samples[0].labels


def test_counters_are_named_as_counters() -> None:
    """What the catalogue calls a counter ends as counters do, and nothing else does."""

    for metrics in CATALOGUE.values():
        for metric in metrics.values():
            assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name


def test_old_values_are_left_out() -> None:
    """A frame that is too old says nothing but its age."""

    nodes = [Exposed("alpha", small("A"))]

    assert "gpulse_gpu_" in text(nodes, NOW + 10)
    late = text(nodes, NOW + 10.1)
    assert "gpulse_gpu_" not in late
    assert 'gpulse_up{node="alpha"} 0' in late
    assert 'gpulse_frame_age_seconds{node="alpha"} 10.100' in late
    assert "gpulse_gpu_" in text(nodes, NOW + 49, interval=10.0)
    assert 10.0 == stale_after(0.1)


def test_nodes_without_a_frame() -> None:
    """A node that sent nothing yet is down; no nodes at all is fine."""

    assert 'gpulse_up{node="alpha"} 0\n' in text([Exposed("alpha", None)])
    assert "gpulse_frame_age" not in text([Exposed("alpha", None)])
    assert "gpulse_up" not in text([])


def test_labels_are_escaped() -> None:
    """Names from nodes cannot break a line or add a label."""

    written = text([Exposed('a"\n\\', small('x",y="1\nz \ud800'))])

    assert (
        r'gpulse_gpu_gpu_utilization_ratio{node="a\"\n\\",gpu="0",uuid="GPU-1",name="x\",y=\"1\nz ?"} 0.5'
        in written.splitlines()
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_unknown_is_absent(value: float) -> None:
    """A number that is none has no line, and a family without lines no title."""

    assert "gpulse_gpu" not in text([Exposed("a", small("x", value))])


def test_ten_thousand_gpus_come_in_small_pieces() -> None:
    """No piece of a large exposition keeps others waiting for long."""

    frame = demo()
    gpus = tuple(
        frame.gpus[0]._replace(device=frame.gpus[0].device._replace(uuid=f"GPU-{n}")) for n in range(8)
    )
    nodes = [Exposed(f"node{n}", frame._replace(gpus=gpus)) for n in range(1250)]
    longest, lines = 0.0, 0
    gc.disable()  # what other tests left behind is not ours to count
    try:
        started = time.thread_time()
        for piece in exposition(nodes, now=NOW, interval_seconds=1.0, version="1"):
            longest = max(longest, time.thread_time() - started)
            lines += piece.count("gpulse_gpu_power_watts{")
            started = time.thread_time()
    finally:
        gc.enable()
    assert 10_000 == lines
    assert longest < 0.05
