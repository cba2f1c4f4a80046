"""Whatever agents send to a head, and whatever an earlier version took in: the head goes on, and so does everybody else."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect

from gpulse.model.packed_columns import layout_id
from gpulse.store.format_version import prepare_format
from gpulse.store.local import LocalStore
from gpulse.store.log.log import Log
from gpulse.store.log.record_payloads import BATCH, FACT, FrameBatch, encode_fact
from tests.integration.cluster import SEALING, Cluster, HeadProcess, cluster_in, talk, until
from tests.integration.hostile_messages import GPU, ODD, Attack, attacks, frame, layout, run_of
from tests.integration.remote_lab import FakeTsdb, fake_tsdb
from tests.integration.test_cluster_hostile import no_number, raw
from tests.queries import query

_NEIGHBOUR = "neighbour"
_METRIC = "gpu_utilization_ratio"
_PATHS = (
    "/",
    "/status",
    "/clients",
    "/metrics/latest",
    "/profiling/sessions",
    "/api/v1/sessions",
    f"/api/v1/query?metric={_METRIC}&from=-10m",
    f"/api/v1/query?metric={_METRIC}&from=-10m&step=10",
    "/api/v1/query?metric=gpu_memory_bytes&scope=process&from=-10m",
    f"/api/v1/history?metrics={_METRIC}&from=-10m&points=10",
    "/api/v1/processes?from=-10m",
    "/api/v1/usage?from=-10m",
    "/api/v1/events?from=-10m",
    "/api/v1/events?from=0",
    "/api/v1/findings",
    "/api/v1/findings/history?from=-10m",
    "/openapi.json",
)


def said(head: HeadProcess, attack: Attack) -> None:
    """Send what a hostile agent sends; a refusal that ends the stream makes it come again with the rest of it."""
    messages = list(attack.messages)
    for _ in range(3):
        code, words, _ = talk(f"127.0.0.1:{head.port}", messages)
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), (attack.name, code, words)
        assert words.isprintable(), (attack.name, words)
        assert head.popen.poll() is None, f"{attack.name}: {head.lines[-5:]}"
        if code is grpc.StatusCode.OK:
            return


def check_answers(head: HeadProcess) -> None:
    """Every path is answered, with JSON that every parser takes."""
    for path in _PATHS:
        top = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        status, text = raw(head, top.encode())
        assert status == 200, (path, status, text[:500])
        json.loads(text, parse_constant=no_number)
    status, text = raw(
        head, b"GET /api/v1/usage.csv HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    assert status == 200, text[:500]
    job = quote("slurm:1", safe="")
    status, text = raw(
        head, f"GET /api/v1/jobs/{job} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )
    assert status in (200, 404), text[:500]


def check_scrape(head: HeadProcess) -> None:
    """The page for Prometheus is whole, and has the neighbour's GPUs."""
    status, text = raw(head, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert status == 200, text[:500]
    families = list(text_string_to_metric_families(text.decode()))
    samples = [sample for family in families for sample in family.samples]
    assert _NEIGHBOUR in {sample.labels.get("node") for sample in samples}
    assert len({(one.name, *sorted(one.labels.items())) for one in samples}) == len(samples)


def check_live(head: HeadProcess) -> None:
    """A live client sees new frames of the neighbour again and again."""

    async def watch() -> list[Any]:
        url = f"ws://127.0.0.1:{head.http_port}/api/v1/live"
        async with asyncio.timeout(30), connect(url, max_size=None) as stream:
            await stream.send(json.dumps({"interval": 0.1, "details": True}))
            found: list[Any] = []
            while len(found) < 4:
                text = await stream.recv()
                json.loads(text, parse_constant=no_number)
                if _NEIGHBOUR in str(text):
                    found.append(text)
            return found

    assert 4 == len(asyncio.run(watch()))


def check_sealing(head: HeadProcess) -> None:
    """What came is sealed again and again."""
    for _ in range(2):
        before = _history_bytes(head)
        until(partial(_has_grown, head, before), "sealing")
    storage = head.get("/status")["storage"]
    assert "ok" == storage["state"], storage


def _history_bytes(head: HeadProcess) -> int:
    size: int = head.get("/status")["storage"]["history_bytes"]
    return size


def _has_grown(head: HeadProcess, before: int) -> bool:
    return _history_bytes(head) > before


def check_sent(tsdb: FakeTsdb) -> None:
    """New samples of the neighbour are sent."""
    tsdb.taken.clear()
    words = f"node='{_NEIGHBOUR}'"
    until(lambda: any(words in series for series in tsdb.samples()), "remote write")


def check_round(head: HeadProcess, tsdb: FakeTsdb) -> None:
    """Everything that a head does."""
    try:
        check_answers(head)
        check_scrape(head)
        check_live(head)
        check_sealing(head)
        check_sent(tsdb)
    except (OSError, TimeoutError) as error:
        raise AssertionError(f"{error!r}: {head.text[-5000:]}") from error
    assert not [line for line in head.lines if "Traceback" in line], head.text[-5000:]


def check_neighbour(data: Path) -> None:
    """All frames of the neighbour are there, from the first on."""
    with LocalStore(str(data)) as archive:
        [number] = [node.id for node in archive.nodes().values() if node.name == _NEIGHBOUR]
        sequences: set[int] = set()
        for part in archive.scan(query("gpu", [_METRIC], start=0.0, end=1e11, nodes={number})):
            sequences |= set(part.sequences.tolist())
    assert sequences == set(range(1, max(sequences) + 1))


def busy_head(cluster: Cluster, tsdb: FakeTsdb, **given: Any) -> HeadProcess:
    """A head that does everything a head can do."""
    write = ("--remote-write", f"{tsdb.tsdb.query_url}/receive")
    return cluster.head(*SEALING, "--freq", "100", *write, **given)


def endured(directory: Path, chosen: Sequence[Attack]) -> None:
    """A head hears all of it, works, starts again, and works."""
    directory.mkdir()
    with cluster_in(directory) as cluster, fake_tsdb() as tsdb:
        head = busy_head(cluster, tsdb)
        agent = cluster.agent(_NEIGHBOUR, head.port)
        agent.said("connected to")
        for attack in chosen:
            said(head, attack)
        check_round(head, tsdb)
        assert 0 == head.end(), head.text[-3000:]
        head = busy_head(cluster, tsdb, port=head.port)
        until(lambda: "healthy" == head.nodes().get(_NEIGHBOUR), "the neighbour comes back")
        check_round(head, tsdb)
        told = head.get("/api/v1/events?from=0&kinds=gap,frames_dropped,records_unreadable,unreadable_record")
        assert [] == [event for event in told["events"] if event.get("node") in (_NEIGHBOUR, None)]
        agent.end(signal.SIGTERM)
        assert 0 == head.end()
        check_neighbour(head.data_dir)


def culprit(directory: Path, chosen: Sequence[Attack]) -> str:
    """The name of an attack that does it, found by halves."""
    while len(chosen) > 1:
        half = chosen[: len(chosen) // 2]
        try:
            endured(directory / f"half-{len(chosen)}", half)
        except (AssertionError, OSError, TimeoutError):
            chosen = half
        else:
            chosen = chosen[len(half) :]
    return chosen[0].name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_message_harms_a_head(tmp_path: Path) -> None:
    """Every field of every message with values that it must not have; the neighbour's data is all there."""

    everything = list(attacks())
    try:
        endured(tmp_path / "all", everything)
    except (AssertionError, OSError, TimeoutError) as error:
        (tmp_path / "one").mkdir()
        pytest.fail(f"{error}\nwhat does it: {culprit(tmp_path / 'one', everything)}")


def test_a_log_of_an_earlier_version_costs_its_bad_records_alone(tmp_path: Path) -> None:
    """What was taken in before it was refused: the head starts, tells of it, and everything works."""

    deep = "[" * 960 + "]" * 960
    huge = layout("gpu", json.dumps({**GPU, "uuid": "GPU-huge", "facts": {"memory_total_bytes": 10**400}}))
    nan = layout("gpu", json.dumps({**GPU, "uuid": "GPU-nan", "facts": {"memory_total_bytes": math.nan}}))
    good, missing = layout("gpu", json.dumps(GPU)), layout("gpu", json.dumps(GPU)).decode().encode("utf-16")
    now = time.time()
    kinds = ("health", "findings", "job", "xid", "process")
    events = [f'[{{"event":"{kind}","pid":5,"id":"slurm:1","other":{deep}}}]'.encode() for kind in kinds]
    events += [
        f'[{{"event":"frames_dropped","run":"?","frames":{value}}}]'.encode() for value in ODD.values()
    ]
    with cluster_in(tmp_path) as cluster, fake_tsdb() as tsdb:
        prepare_format(str(tmp_path / "data"))
        with Log(tmp_path / "data" / "log") as log:
            for number in (1, 2, 3):
                known = {
                    "id": number,
                    "name": f"old-{number}",
                    "host": f"old-{number}",
                    "machine": f"m{number}",
                }
                log.append(FACT, encode_fact("node", time=now, facts={"driver": "1"}, labels={}, **known))
                log.append(FACT, encode_fact("run", run=run_of(f"old-{number}").hex(), node=number, time=now))
            for text in (good, huge, nan):
                log.append(FACT, encode_fact("layout", id=str(layout_id(text)), text=text.decode()))
            for number, text in ((1, good), (2, huge), (3, nan)):
                log.append(FACT, encode_fact("devices", node=number, layout=str(layout_id(text)), time=now))
            log.append(FACT, f'{{"fact":"node","id":4,"facts":{deep}}}'.encode())
            log.append(FACT, encode_fact("node", id=10**400, name="\ud800", host="h", machine="m", time=now))
            log.append(FACT, encode_fact("run", run="no run", node="x", time=now, boot="b" * (15 << 20)))
            log.append(FACT, b'{"fact":"layout"')
            log.append(BATCH, b"too short")
            log.append(BATCH, FrameBatch(run_of("cut"), 1, 1, 1, round(now * 1e6), 0, b"cut off").to_bytes())
            for number, text in ((1, good), (1, missing), (2, huge), (3, nan)):
                frames = frame([(text, 8)])
                run, first = run_of(f"old-{number}"), 1 + (text is missing)
                log.append(BATCH, FrameBatch(run, number, first, 1, round(now * 1e6), 0, frames).to_bytes())
            for place, happened in enumerate(events, 10):
                frames = frame([(good, 8)], happened)
                log.append(
                    BATCH, FrameBatch(run_of("old-1"), 1, place, 1, round(now * 1e6), 0, frames).to_bytes()
                )
            log.sync()
        head = busy_head(cluster, tsdb)
        agent = cluster.agent(_NEIGHBOUR, head.port)
        agent.said("connected to")
        check_round(head, tsdb)
        told = head.get("/api/v1/events?from=-10m")["events"]
        found = {event["kind"] for event in told}
        assert {"unreadable_record", "unreadable_event", "unreadable_fact", "records_unreadable"} <= found
        assert {"old-1", "old-2", "old-3", _NEIGHBOUR} <= set(head.nodes())
        assert 0 == head.end()
        head = busy_head(cluster, tsdb, port=head.port)
        until(lambda: "healthy" == head.nodes().get(_NEIGHBOUR), "the neighbour comes back")
        check_round(head, tsdb)
        agent.end(signal.SIGTERM)
        assert 0 == head.end()
        check_neighbour(head.data_dir)
