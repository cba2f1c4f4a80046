"""Messages that no agent sends: every field of every message with values that it must not have."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gpulse.cluster import wire
from gpulse.cluster.wire_pb2 import AgentMessage, Batch, Goodbye, Hello, Layout, Run, StackAnswer
from gpulse.model.packed_columns import ColumnBlock, PackedFrame, layout_id

GPU = {"index": 0, "uuid": "GPU-hostile", "name": "NVIDIA Hostile"}
COLUMNS = [["gpu_utilization_ratio", 1000, 1]]
_DEEP = "[" * 970 + "]" * 970
ODD = {
    "null": "null",
    "true": "true",
    "minus one": "-1",
    "half": "0.5",
    "64 bits": str(1 << 63),
    "huge": "1" + "0" * 400,
    "huge float": "1e308",
    "beyond floats": "1e400",
    "not a number": "NaN",
    "infinite": "-Infinity",
    "empty": '""',
    "long": '"' + "x" * 100_000 + '"',
    "half a pair": '"\\ud800"',
    "NUL": '"a\\u0000b"',
    "controls": '"a\\nb\\u001b[2J"',
    "list": "[]",
    "object": "{}",
    "odd list": '[null, NaN, "\\ud800", {"a": [[]]}]',
    "deep": _DEEP,
    "markup": '"<script>alert(1)</script>"',
}
"""JSON values, as they are spelled."""
SUBJECTS: dict[str, dict[str, Any]] = {
    "gpu": {
        **GPU,
        "bus_id": "0",
        "minor_number": 0,
        "serial": "1",
        "vbios": "1",
        "architecture": "hopper",
        "compute_capability": "9.0",
        "numa_node": 0,
        "has_gpm": True,
        "parent_uuid": None,
        "mig_index": None,
        "gpu_instance": None,
        "compute_instance": None,
        "facts": {"memory_total_bytes": 1 << 30, "power_limit_default_watts": 700.0},
        "board_part_number": "1",
        "cpu_affinity": "0-31",
        "switch_links": 18,
        "paths": [["GPU-other", "SYS", 18]],
        "adapter_paths": [["mlx5_0", "PIX", None]],
    },
    "host": {},
    "disk": {"name": "sda", "kind": "ssd", "model": "m"},
    "filesystem": {"mount_point": "/", "device": "/dev/sda", "type": "ext4", "disk": "sda", "kind": "local"},
    "network": {"name": "eth0", "kind": "ethernet", "up": True},
    "cgroup": {"path": "/a"},
    "process": {"pid": 5, "start_time": 1.0, "gpu": "GPU-hostile", "kind": "compute"},
}
_OWNER = {"user": "u", "uid": 1, "job": "slurm:1", "container": "c", "pod": "p"}
_EVIDENCE = {"signal": "s", "statistic": "mean", "value": 1.0, "comparison": ">", "threshold": 0.5}
_LOCATION = {
    "pid": 5,
    "role": "main",
    "file": "/home/u/train.py",
    "line": 84,
    "function": "f",
    "share": 0.5,
    "stacks": 40,
    "doing": "json/encoder.py:258 encode",
}
_FINDING = {
    "id": "x",
    "family": "gpu_use",
    "severity": "high",
    "confidence": 0.5,
    "summary": "s",
    "gpu": 0,
    "label": "0",
    "pids": [5],
    "lost_ratio": 0.5,
    "start": 1.0,
    "end": 2.0,
    "evidence": [_EVIDENCE],
    "counter_evidence": [_EVIDENCE],
    "ruled_out": ["y"],
    "advice": [{"do": "d", "why": "w", "confirm": "c"}],
    "url": None,
    "where": [_LOCATION],
    "where_note": "n",
}
_HEALTH = {
    "source": "nvml",
    "code": "failed",
    "detail": "d",
    "since": 1.0,
    "subject": "gpu 0",
    "metrics": ["power_watts"],
    "hint": "h",
}
EVENTS: dict[str, dict[str, Any]] = {
    "process": {
        "pid": 5,
        "start_time": 1.0,
        "parent_pid": 1,
        "name": "n",
        "command": ["a", "b"],
        "owner": _OWNER,
        "on_gpu": True,
        "cgroup": "/a",
    },
    "process_end": {"pid": 5, "start_time": 1.0},
    "job": {
        "id": "slurm:1",
        "user": "u",
        "uid": 1,
        "name": "n",
        "partition": "p",
        "account": "a",
        "gpus": ["GPU-hostile"],
        "source": "map",
        "array": "1_2",
    },
    "job_end": {"job": "slurm:1"},
    "xid": {
        "uuid": "GPU-hostile",
        "gpu": "0",
        "code": 79,
        "errors": 1,
        "time": 1.0,
        "holders": [{"pid": 5, "user": "u", "name": "n"}],
    },
    "health": {"entries": [_HEALTH]},
    "findings": {"findings": [_FINDING], "verdict": "v"},
    "agent_started": {"version": "1", "pid": 5},
    "agent_stopping": {},
    "clock_step": {"seconds": 1.0},
    "events_left_out": {"events": 1},
    # What heads alone tell of:
    "frames_dropped": {"run": "no run", "frames": "many"},
    "run_killed": {"run": 7, "lost_at_most": 1},
    "gap": {"run": "00", "frames": 1},
    "node_joined": {"name": "n"},
    "session": {"id": "x"},
}


class Attack(NamedTuple):
    """What one hostile agent sends, from its hello on."""

    name: str
    messages: Sequence[bytes]


def run_of(name: str) -> bytes:
    """Sixteen bytes that belong to a name."""
    return hashlib.md5(name.encode(), usedforsecurity=False).digest()


def hello(name: str, **fields: Any) -> AgentMessage:
    """The first message of an agent."""
    known = {"protocol": wire.PROTOCOL, "version": "1", "host": name, "machine": f"{name}-id", "boot": "b"}
    known |= {"instance": name, "pid": 1, "monotonic_us": 10**9, "time_us": time.time_ns() // 1000}
    return AgentMessage(hello=Hello(**{**known, "runs": [Run(id=run_of(name))], **fields}))


def layout(scope: str, subject: str, columns: Any = COLUMNS) -> bytes:
    """A layout of one subject, which is given as it is spelled."""
    wide = json.dumps(columns)
    return f'{{"narrow":[],"scope":"{scope}","subjects":[{subject}],"wide":{wide}}}'.encode()


def frame(blocks: Sequence[tuple[bytes, int]], events: bytes = b"", **given: Any) -> bytes:
    """A frame of blocks of these layouts and lengths."""
    made = tuple(ColumnBlock(layout_id(text), b"\1" * size) for text, size in blocks)
    known = {"time_us": time.time_ns() // 1000, "monotonic_us": 10**9, **given}
    return PackedFrame(known["time_us"], known["monotonic_us"], made, events).to_bytes()


def batch(name: str, number: int, frames: Sequence[bytes], **given: Any) -> AgentMessage:
    """Frames of an agent."""
    known = {"run": run_of(name), "first": number, "count": len(frames), "sent_monotonic_us": 10**9}
    return AgentMessage(batch=Batch(**{**known, "frames": b"".join(frames), **given}))


def attacks() -> Iterator[Attack]:
    """Everything, each as an agent of its own."""
    for name, messages in (*_hellos(), *_layouts(), *_events(), *_frames(), *_stacks()):
        yield Attack(name, [message.SerializeToString() for message in messages])


_Messages = Iterator[tuple[str, list[AgentMessage]]]
_GOOD = layout("gpu", json.dumps(GPU))


def _hellos() -> _Messages:
    huge = "\1" * (15 << 20)
    fields: dict[str, dict[str, Any]] = {
        "a run's boot of 15 MB": {"runs": [Run(id=run_of("boot"), boot=huge)]},
        "a boot of 15 MB": {"boot": huge},
        "a version of 15 MB": {"version": huge},
        "control characters": {"boot": "\0\n\x1b"},
        "huge counts": {
            "runs": [
                Run(
                    id=run_of("counts"),
                    first_kept=(1 << 64) - 1,
                    dropped=(1 << 64) - 1,
                    lost_at_most=(1 << 32) - 1,
                    elsewhere=(1 << 64) - 1,
                    dropped_elsewhere=(1 << 64) - 1,
                    ended_badly=True,
                )
            ]
        },
        "dropped of 64 bits": {"runs": [Run(id=run_of("dropped"), dropped=(1 << 64) - 1)]},
        "killed": {"runs": [Run(id=run_of("killed"), ended_badly=True, lost_at_most=(1 << 32) - 1)]},
        "clocks": {"time_us": -(1 << 63), "monotonic_us": (1 << 63) - 1, "shift_us": (1 << 63) - 1},
        "a shift": {"shift_us": -(1 << 62)},
        "an interval": {"interval_ms": (1 << 32) - 1, "pid": (1 << 32) - 1},
        "labels": {"labels": {"": "", "a\0": "\n"}},
        "UTF-16": {"node": json.dumps({"driver": "1"}).encode("utf-16")},
    }
    for fact in ("driver", "cuda", "kernel", "cpu_model", "ticks_per_second", "numa_cpus", "other"):
        fields |= {f"{fact} {kind}": {"node": f'{{"{fact}":{text}}}'.encode()} for kind, text in ODD.items()}
    for what, given in fields.items():
        name = f"hello {what}"
        known = {"runs": [Run(id=run_of(name))], **given}
        runs = [Run.FromString(run.SerializeToString()) for run in known.pop("runs")]
        for run in runs:
            run.id = run_of(name)
        sent = [hello(name, runs=runs, **known), AgentMessage(layout=Layout(text=_GOOD))]
        yield name, [*sent, batch(name, 1, [frame([(_GOOD, 8)])])]


def _with(document: dict[str, Any], field: str, text: str) -> str:
    """A document whose field is spelled otherwise; `a.b` is a field of the first object in `a`."""
    outer, _, inner = field.partition(".")
    if inner:
        held = document[outer]
        first = held[0] if isinstance(held, list) else held
        text = _with(first, inner, text)
        text = f"[{text}]" if isinstance(held, list) else text
    rest = {name: value for name, value in document.items() if name != outer}
    return f"{json.dumps(rest)[:-1]}{',' if rest else ''}{json.dumps(outer)}:{text}}}"


def _layouts() -> _Messages:
    for scope, subject in SUBJECTS.items():
        for field in (*subject, "other"):
            inner = [f"{field}.{name}" for name in subject[field]] if field == "facts" else []
            for path in (field, *inner):
                name = f"layout of a {scope} with an odd {path}"
                texts = [layout(scope, _with(subject, path, text)) for text in ODD.values()]
                yield name, _told(name, texts)
    good = json.dumps(GPU)
    whole = {
        "in UTF-16": _GOOD.decode().encode("utf-16"),
        "in UTF-8 with a mark": b"\xef\xbb\xbf" + _GOOD,
        "without columns": layout("gpu", good, []),
        "without subjects": layout("gpu", ""),
        "of the same GPU twice": layout("gpu", f"{good},{good}"),
        "of two GPUs of one index": layout("gpu", f"{good},{json.dumps({**GPU, 'uuid': 'other'})}"),
        "of two hosts": layout("host", "{},{}"),
        "with keys twice": _GOOD.replace(b'"index"', b'"index": NaN, "index"'),
        "with odd steps": layout("gpu", good, [["power_watts", 10**12, 10**12]]),
        "with huge steps": layout("gpu", good, [["power_watts", 10**400, 1]]),
        "with a column of a huge size": layout("gpu", good, [["power_watts", 1, 10**12]]),
        "with an odd column": layout("gpu", good, [['"; DROP TABLE nodes; --', 1, 1]]),
        "with columns named like others": layout(
            "gpu", good, [["node", 1, 1], ["time", 1, 1], ["subject", 1, 1]]
        ),
        "of nothing": b"",
        "that is deep": b"[" * 100_000,
        "that is deep somewhere": layout("gpu", good[:-1] + f',"x":{_DEEP}}}'),
        "of 5 MiB": _GOOD + b" " * (5 << 20),
    }
    for number in range(10):
        columns = [[f"invented_{number}_{column}_ratio", 1, 1] for column in range(500)]
        whole[f"with invented metrics, {number}"] = layout("gpu", good, columns)
    for what, text in whole.items():
        name = f"layout {what}"
        yield name, _told(name, [text])


def _told(name: str, texts: Sequence[bytes]) -> list[AgentMessage]:
    """Layouts, and a frame of each."""
    messages = [hello(name)]
    for number, text in enumerate(texts, 1):
        size = 8
        try:
            document = json.loads(text)
            size = 8 * len(document["subjects"]) * len(document["wide"])
        except (ValueError, RecursionError, LookupError, TypeError):
            pass
        messages += [AgentMessage(layout=Layout(text=text)), batch(name, number, [frame([(text, size)])])]
    return messages


def _paths(document: dict[str, Any]) -> Iterator[str]:
    """The fields of a document and of the objects in it, as `_with` takes them."""
    for field, value in document.items():
        yield field
        held = value[0] if isinstance(value, list) and value else value
        if isinstance(held, dict):
            yield from (f"{field}.{inner}" for inner in _paths(held))


def _events() -> _Messages:
    for kind, event in EVENTS.items():
        document = {"event": kind, **event}
        paths = [*_paths(event), "other"]
        texts = ["", json.dumps(document)]
        texts += [_with(document, path, text) for path in paths for text in ODD.values()]
        name = f"events of the kind {kind}"
        frames = [frame([(_GOOD, 8)], f"[{text}]".encode()) for text in texts]
        messages = [hello(name), AgentMessage(layout=Layout(text=_GOOD))]
        yield name, [*messages, *(batch(name, number, [one]) for number, one in enumerate(frames, 1))]
    kinds = [f'[{{"event":{text}}}]' for text in ODD.values()]
    odd = [*kinds, *ODD.values(), "[" + "{}," * 100_000 + "{}]", '[{"event":"health","event":"process"}]']
    name = "events of odd kinds"
    frames = [frame([(_GOOD, 8)], text.encode()) for text in odd]
    messages = [hello(name), AgentMessage(layout=Layout(text=_GOOD))]
    yield name, [*messages, *(batch(name, number, [one]) for number, one in enumerate(frames, 1))]


def _stacks() -> _Messages:
    """Answers to requests that nobody made."""
    texts = [*(text.encode("utf-8", "replace") for text in ODD.values()), b"[" * 100_000, b"\xff" * (5 << 20)]
    name = "stacks"
    answers = [StackAnswer(id=number, processes=text) for number, text in enumerate(texts)]
    answers += [StackAnswer(id=(1 << 64) - 1, refusal="\x1b" * 1_000_000)]
    messages = [hello(name, stacks=True), *(AgentMessage(stacks=answer) for answer in answers)]
    yield name, [*messages, AgentMessage(layout=Layout(text=_GOOD)), batch(name, 1, [frame([(_GOOD, 8)])])]


def _frames() -> _Messages:
    good = frame([(_GOOD, 8)])
    disk = layout("disk", json.dumps(SUBJECTS["disk"]))
    other = layout("disk", json.dumps({"name": "sdb"}))
    told = [AgentMessage(layout=Layout(text=text)) for text in (_GOOD, disk, other)]
    cases: dict[str, list[bytes]] = {
        "a block twice": [frame([(_GOOD, 8), (_GOOD, 8)])],
        "two blocks of disks": [frame([(disk, 8), (other, 8)])],
        "short": [frame([(_GOOD, 3)])],
        "of no layout": [frame([(b"never told", 8)])],
        "a time after all calendars": [frame([(_GOOD, 8)], time_us=1 << 62)],
        "a time before": [frame([(_GOOD, 8)], time_us=-1)],
        "a time of 1970": [frame([(_GOOD, 8)], time_us=0)],
        "a time of 9999": [frame([(_GOOD, 8)], time_us=253_402_300_799_000_000)],
        "an odd monotonic time": [frame([(_GOOD, 8)], monotonic_us=(1 << 63) - 1)],
        "without blocks": [frame([])],
        "cut": [good[:-1]],
    }
    for what, frames in cases.items():
        name = f"frames {what}"
        yield name, [hello(name), *told, batch(name, 1, frames), batch(name, 2, [good])]
    numbers: dict[str, dict[str, Any]] = {
        "of the last number": {"first": (1 << 62) - 2},
        "beyond all numbers": {"first": (1 << 64) - 1},
        "of number zero": {"first": 0},
        "sent at an odd time": {"sent_monotonic_us": -(1 << 63)},
        "many": {"count": (1 << 32) - 1},
        "of nobody": {"run": b"x" * 16},
    }
    for what, given in numbers.items():
        name = f"frames {what}"
        yield name, [hello(name), *told, batch(name, 1, [good], **given)]
    name = "losses"
    huge = Run(id=run_of(name), dropped=(1 << 64) - 1, boot="b" * (1 << 20))
    yield name, [hello(name), AgentMessage(dropped=huge)]
    yield "goodbye", [hello("goodbye"), AgentMessage(goodbye=Goodbye(moved=True))]
