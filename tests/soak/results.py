"""Results: what the head stored, the database holds and session files say, read at the end of a run."""

from __future__ import annotations

import json
import urllib.parse
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from gpulse.model.metric_catalog import Scope
from gpulse.store.history.frame_blocks import run_number
from gpulse.store.local import LocalStore
from tests.queries import query
from tests.soak.observations import Run, SessionFile, Stored
from tests.soak.parts import Parts

_METRICS: tuple[tuple[Scope, str], ...] = (("gpu", "gpu_utilization_ratio"), ("host", "load1"))
"""A frame is there when either is: a busy machine may miss a reading of a GPU."""
_SERIES = "gpulse_gpu_gpu_utilization_ratio"
_FAR = 1e11


def seconds_of(text: str) -> float:
    """Return epoch seconds of an ISO 8601 time."""
    return datetime.fromisoformat(text).timestamp()


def read_stored(data_dir: Path) -> Stored:
    """Read the data directory of a head that has ended."""
    counts: Counter[tuple[int, int, str, str]] = Counter()
    frames: dict[int, dict[int, float]] = {}
    samples: dict[tuple[str, str], list[float]] = {}
    with LocalStore(str(data_dir)) as archive:
        nodes = {number: node.name for number, node in archive.nodes().items()}
        for scope, metric in _METRICS:
            for found in archive.scan(query(scope, [metric], start=0.0, end=_FAR)):
                columns = (found.runs, found.sequences, found.series, found.times)
                for run, sequence, series, time in zip(*(column.tolist() for column in columns), strict=True):
                    key = found.keys[series]
                    counts[run, sequence, scope, f"{key.node} {key.subject}"] += 1
                    frames.setdefault(run, {})[sequence] = time
                    if scope == "gpu":
                        samples.setdefault((nodes[key.node], key.subject), []).append(time)
        runs = [
            Run(id_, nodes[known.node], known.pid or 0, dict(sorted(frames.get(run_number(id_), {}).items())))
            for id_, known in archive.runs().items()
            if known.node is not None
        ]
    return Stored(runs, sum(counts.values()) - len(counts), samples)


def read_database(parts: Parts) -> dict[tuple[str, str], list[float]]:
    """Return the times of the utilization samples in the time-series database, by node and GPU."""
    query = urllib.parse.urlencode({"match[]": _SERIES})
    times: dict[tuple[str, str], list[float]] = {}
    for line in parts.database.get(f"/api/v1/export?{query}").decode().splitlines():
        series = json.loads(line)
        key = (series["metric"]["node"], series["metric"]["uuid"])
        times.setdefault(key, []).extend(stamp / 1000 for stamp in series["timestamps"])
    return times


def read_history(parts: Parts, nodes: tuple[str, ...], start: float) -> dict[tuple[str, str], list[float]]:
    """Return the times of the utilization samples that the head answers over HTTP, by node and GPU."""
    times: dict[tuple[str, str], list[float]] = {}
    for node in nodes:
        query = urllib.parse.urlencode({"metric": "gpu_utilization_ratio", "nodes": node, "from": start})
        answer = parts.get(f"/api/v1/query?{query}", timeout=60.0)
        for series in (answer or {"series": ()})["series"]:
            times.setdefault((series["node"], series["subject"]), []).extend(series["times"])
    return times


def read_session(path: Path) -> SessionFile:
    """Read the file of a session."""
    return session_from(json.loads(path.read_bytes()))


def session_from(document: dict[str, Any]) -> SessionFile:
    """Return what the document of a session says."""
    frames = document["frames"]
    names = [node["name"] for node in document["nodes"]]
    clients = [set(frame["available_clients"]) for frame in frames]
    return SessionFile(
        document["session_name"],
        seconds_of(document["start_time"]),
        seconds_of(document["end_time"]),
        document["interval_ms"] / 1000,
        [frame["frame_id"] for frame in frames],
        [seconds_of(frame["time"]) for frame in frames],
        {name: [name in there for there in clients] for name in names},
        {node["name"]: node["frames"] for node in document["nodes"]},
        [
            (one["node"], one["id"], one["label"], seconds_of(one["first_time"]), one["times"])
            for one in document["findings"]
        ],
        {(one["node"], one["label"], one["id"]): one["start"] for one in document["findings"]},
    )
