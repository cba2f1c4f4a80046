"""Damage to the files of a data directory: flipped bits, cut and deleted files. No wrong value is ever returned.

The short form runs with the other tests; `make chaos`, or GPULSE_MUTATIONS=1000, runs the long one. GPULSE_SEED repeats a run.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpulse.cluster.agent.frame_buffer import BufferedFrame
from gpulse.cluster.agent.spool import MIN_LIMIT_BYTES, Spool, SpoolReader
from gpulse.cluster.head.fleet_totals import TOTALS_FILE, StateCounts, TotalsHistory, read_totals
from gpulse.cluster.notify.notify_state import STATE_FILE, NotifyState, save_state
from gpulse.errors import LogError
from gpulse.model.metric_catalog import Scope
from gpulse.model.session import Session
from gpulse.store import local
from gpulse.store.damage import METADATA_SCOPE, file_checksum
from gpulse.store.history import segments
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.metadata.file_check import has_check, void_check
from gpulse.store.node_registry import NodeRegistry
from gpulse.store.scrub import scrub_data
from gpulse.store.store import ALL_TIME
from tests.integration.cluster import Cluster, cluster_in, until
from tests.integration.commands import run
from tests.queries import query
from tests.unit import report_lab
from tests.unit.report_lab import Held, Lab, check_alike
from tests.unit.test_spool import NOTES, ONE, RUN, TEXTS, TWO, kept

_BEGIN = 1_699_999_200
"""Epoch seconds; the beginning of an hour."""
_MUTATIONS = int(os.environ.get("GPULSE_MUTATIONS", "100"))
_METRICS: Mapping[Scope, tuple[str, ...]] = {
    "gpu": ("gpu_utilization_ratio", "power_watts"),
    "process": ("cpu_user_seconds_total",),
}
_ALWAYS = {"start": 0.0, "end": 1e10}
_SESSION = Session(id="5e55", name="kept", start=float(_BEGIN), created=float(_BEGIN), interval_ms=1000)


class Answers(NamedTuple):
    """Everything that a store answers."""

    samples: dict[tuple[Any, ...], float]
    """By scope, node, subject, metric and time."""
    steps: dict[tuple[Any, ...], tuple[float, int]]
    """Mean and number of samples, by scope, node, subject, metric and start of the step."""
    gpu_time: list[Any]
    rows: dict[str, list[str]]
    """Nodes, GPUs, sessions, events, findings and processes."""
    totals: str | None
    incomplete: list[str]


def ask(store: LocalStore) -> Answers:
    """Ask a store everything."""
    samples: dict[tuple[Any, ...], float] = {}
    steps: dict[tuple[Any, ...], tuple[float, int]] = {}
    with collect_missing() as incomplete:
        for scope, metrics in _METRICS.items():
            whole = query(scope, metrics, start=_BEGIN, end=_BEGIN + 86_400)
            for series in store.series(whole):
                for time, value in zip(series.times.tolist(), series.values.tolist(), strict=True):
                    if not math.isnan(value):
                        samples[scope, *series.key, series.metric, time] = value
            for series in store.series(query(scope, metrics, start=_BEGIN, end=_BEGIN + 86_400, step=300.0)):
                counts = [] if series.counts is None else series.counts.tolist()
                found = zip(series.times.tolist(), series.values.tolist(), counts, strict=True)
                for time, value, known in found:
                    steps[scope, *series.key, series.metric, time] = (round(value, 6), known)
        shares = [tuple(share) for share in store.gpu_time(query(start=_BEGIN, end=_BEGIN + 86_400))]
        always = query(start=ALL_TIME[0], end=ALL_TIME[1])
        rows = {
            "nodes": [repr(node) for node in store.nodes().values()],
            "gpus": [repr(gpu) for gpu in store.gpus()],
            "sessions": [repr(session) for session in store.sessions()],
            "events": [repr(event) for event in store.events(always) if event.kind != "data_damaged"],
            "findings": [repr(finding) for finding in store.findings(always)],
            "processes": [repr(process) for process in store.processes(always)],
        }
    totals = None
    path = Path(store.directory, TOTALS_FILE)
    if path.exists():
        totals = repr(read_totals(path.read_bytes())[0].day(_BEGIN + 900.0))
    return Answers(samples, steps, sorted(shares, key=repr), rows, totals, incomplete)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A head and an agent."""
    with cluster_in(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """A data directory with merged, sealed and unsealed frames, and its answers."""
    directory = tmp_path_factory.mktemp("pristine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_lab, "BEGIN", _BEGIN)
        patch.setattr(local, "_SEGMENT_BYTES", 8_000)
        with Lab(directory, ("0", "1"), ("0",)) as lab:
            ann = Held(100, ("0",), user="ann", job="slurm:7", start=_BEGIN - 100.0)
            bob = Held(200, ("1",), user="bob", start=_BEGIN - 50.0)

            def fill(begin: int, end: int) -> None:
                for second in range(begin, end, 50):
                    values = {label: {"gpu_utilization_ratio": second % 97 / 97, "power_watts": 100.0 + second % 89}
                              for label in ("0", "1")}  # fmt: skip
                    lab.fill(range(second, second + 50, 25), ann, bob, values=values)
                    lab.fill(range(second, second + 50, 25), ann, node=2, values=values)

            for begin in range(0, 4200, 1400):
                fill(begin, begin + 1400)
                lab.archive.seal()
            assert [] == lab.archive.tidy(_BEGIN + 4200, keep_seconds=1e9, limit_bytes=None)
            assert lab.archive.segments[0].is_compacted
            lab.archive.commit([LogEntry.of_fact("session", **_SESSION.to_dict())])
            for begin in range(4200, 5400, 600):
                fill(begin, begin + 600)
                lab.archive.seal()
            fill(5400, 5800)
            lab.archive.commit(
                [LogEntry.of_fact("event", time=_BEGIN + 5500.0, node=1, kind="note", detail={"a": 1})]
            )
            fill(5800, 6000)
            shutil.copytree(directory / "data", directory / "killed")  # as `kill -9` would leave it
    data = directory / "data"
    totals = TotalsHistory()
    totals.add(StateCounts(busy=3, free=1, power_watts=700.0), 600.0, _BEGIN + 600.0)
    (data / TOTALS_FILE).write_bytes(totals.to_bytes(()))
    save_state(str(data / STATE_FILE), NotifyState())
    with LocalStore(str(data)):
        pass  # a file is known to exist once the head has recorded it
    copy = directory / "copy"
    shutil.copytree(data, copy)
    with LocalStore(str(copy)) as store:
        answers = ask(store)
        assert [] == store.damage.take()
    assert answers.samples
    assert answers.gpu_time
    assert answers.rows["sessions"]
    assert answers.rows["processes"]
    assert [] == answers.incomplete
    return data, answers


def mutate(path: Path, dice: random.Random) -> str:
    """Damage a file; return how."""
    data = bytearray(path.read_bytes())
    if not data:
        return "nothing"
    place = dice.randrange(len(data))
    match dice.choices(("flip", "cut", "zero", "delete"), (70, 20, 7, 3))[0]:
        case "flip":
            bit = dice.randrange(8)
            data[place] ^= 1 << bit
            done = f"bit {bit} of byte {place} flipped"
        case "cut":
            del data[place:]
            done = f"cut to {place} bytes"
        case "zero":
            size = min(512, len(data) - place)
            if not any(data[place : place + size]):
                return "nothing"
            data[place : place + size] = bytes(size)
            done = f"{size} bytes from {place} are zero"
        case _:
            path.unlink()
            return "deleted"
    path.write_bytes(data)
    return done


def check(path: Path, before: Answers, store: LocalStore) -> None:
    """Every answer is the same as before, or absent with a reported gap; the damage is reported."""
    after = ask(store)
    gaps = store.damage.gaps
    for key, value in after.samples.items():
        assert before.samples.get(key) == value, f"wrong value {key}"
    for key in before.samples.keys() - after.samples.keys():
        scope, node, _, _, time = key
        assert any(gap.meets(time, time + 1, frozenset({node}), scope) for gap in gaps), f"no gap at {key}"
    for key, (value, known) in after.steps.items():
        assert key in before.steps
        if known == before.steps[key][1]:
            assert before.steps[key][0] == pytest.approx(value, rel=1e-4), f"wrong mean {key}"
        else:
            assert known < before.steps[key][1]
    sample_gaps = [gap for gap in gaps if gap.scope != METADATA_SCOPE]
    if before.steps.keys() != after.steps.keys():
        assert sample_gaps
    if not sample_gaps:
        check_alike(before.gpu_time, after.gpu_time)
    if sample_gaps:
        assert after.incomplete
    for name, rows in after.rows.items():
        missing = [row for row in before.rows[name] if row not in rows]
        if missing and name != "gpus":
            assert any(gap.scope in (METADATA_SCOPE, None) for gap in gaps), f"{name} are missing"
        if name not in ("nodes", "gpus"):
            assert [] == [row for row in rows if row not in before.rows[name]], f"wrong {name}"
    assert after.totals in (before.totals, None)
    reported = store.damage.take()
    # SQLite has checksums in its write-ahead log; what they reject is read from the head's log, and nothing is missing.
    if path.name.startswith("metadata.sqlite-"):
        assert before[:4] == after[:4]
        return
    # A format file that is cut after its first line is that of an earlier version.
    assert reported or path.name == "format", "not reported"


@pytest.mark.timeout(120 + 10 * _MUTATIONS)
def test_no_damage_gives_a_wrong_value(
    pristine: tuple[Path, Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's store opens whatever happened to one file, answers everything else, and says what is missing."""
    data, before = pristine
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    seed = int(os.environ.get("GPULSE_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
    dice = random.Random(seed)
    places = (data, data.with_name("killed"))
    files = {
        place: sorted(
            path.relative_to(place) for path in place.rglob("*") if path.is_file() and path.name != "lock"
        )
        for place in places
    }
    assert any(path.name == "metadata.sqlite-wal" for path in files[places[1]])
    for number in range(_MUTATIONS):
        copy = tmp_path / "data"
        shutil.rmtree(copy, ignore_errors=True)
        place = dice.choice(places)
        shutil.copytree(place, copy)
        path = copy / dice.choice(files[place])
        how = mutate(path, dice)
        if how == "nothing":
            continue
        try:
            with LocalStore(str(copy)) as store:
                check(path, before, store)
            if number % 10 == 0:
                with LocalStore(str(copy)) as store:
                    assert ask(store).samples.items() <= before.samples.items()
        except BaseException as error:
            error.add_note(f"mutation {number} of GPULSE_SEED={seed}: {path.relative_to(copy)}: {how}")
            raise


def test_metadata_without_a_backup_is_rebuilt(pristine: tuple[Path, Answers], tmp_path: Path) -> None:
    """Nodes come from the history, so that no number is used twice; what is lost is said."""
    data, before = pristine
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    os.truncate(copy / "metadata.sqlite", 5000)
    (copy / "metadata.sqlite.backup").unlink()
    with LocalStore(str(copy)) as store:
        after = ask(store)
        assert after.samples.items() <= before.samples.items()
        sealed = {key: value for key, value in before.samples.items() if key[-1] < _BEGIN + 5400}
        assert sealed.items() <= after.samples.items()
        lost = {key[-1] for key in before.samples.keys() - after.samples.keys()}
        assert all(
            any(gap.meets(moment, moment + 1, None, "gpu") for gap in store.damage.gaps) for moment in lost
        )
        assert ["n1", "n2"] == [node.name for node in store.nodes().values()]
        assert any(
            "earlier sessions, events, findings and processes are missing" in text
            for text in after.incomplete
        )
        registry = NodeRegistry(store.nodes().values())
        assert 1 == (registry.find("n1", "any machine") or registry.new("n1", "x", 0.0)).id
        assert 3 == registry.new("n3", "m3", 0.0).id
    assert (copy / "damaged" / "metadata.sqlite").stat().st_size == 5000


@pytest.mark.parametrize(
    "name",
    ["metadata.sqlite.check", "metadata.sqlite.backup", TOTALS_FILE, STATE_FILE, "history/oldest.json"],
)
def test_a_deleted_file_is_reported_once(
    pristine: tuple[Path, Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Checksums, backups and state files that were written once must exist."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    copy = tmp_path / "data"
    shutil.copytree(pristine[0], copy)
    assert () == scrub_data(str(copy)).damage
    (copy / name).unlink()
    expected = [(str(copy / name), "the file is missing")]
    assert expected == [(found.path, found.reason) for found in scrub_data(str(copy)).damage]
    for damage in (expected, []):
        with LocalStore(str(copy)) as store:
            assert damage == [(found.path, found.reason) for found in store.damage.take()]


def test_a_checkpoint_that_is_killed_is_not_taken_for_a_deleted_checksum(
    pristine: tuple[Path, Answers], tmp_path: Path
) -> None:
    """The checksum is void while the metadata changes, but its file exists."""
    copy = tmp_path / "data"
    shutil.copytree(pristine[0], copy)
    void_check(str(copy / "metadata.sqlite"))
    with LocalStore(str(copy)) as store:
        assert [] == store.damage.take()
        assert not has_check(str(copy / "metadata.sqlite"))
    assert has_check(str(copy / "metadata.sqlite"))


def test_lost_metadata_does_not_read_the_whole_history(
    pristine: tuple[Path, Answers],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The names of nodes are read from the newest file that has them, and the log says so."""
    copy = tmp_path / "data"
    shutil.copytree(pristine[0], copy)
    for suffix in ("", ".backup"):
        (copy / f"metadata.sqlite{suffix}").unlink()
    read: list[str] = []

    def count_checksum(path: str) -> int:
        read.append(path)
        return file_checksum(path)

    monkeypatch.setattr(segments, "file_checksum", count_checksum)
    caplog.set_level("INFO")
    with LocalStore(str(copy)) as store:
        assert ["n1", "n2"] == [node.name for node in store.nodes().values()]
        assert len(store.segments) > 1
        newest = f"{copy}/history/{store.segments[-1].name}/"
    assert [newest] == [f"{os.path.dirname(path)}/" for path in read]
    assert "node names restored from the history: 2 of 2" in caplog.text


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_history_file_that_changes_after_it_was_read(
    pristine: tuple[Path, Answers], tmp_path: Path, is_deleted: bool
) -> None:
    """Its values are missing from the next answer, which says so, and no value is wrong."""
    copy = tmp_path / "data"
    shutil.copytree(pristine[0], copy)
    with LocalStore(str(copy)) as store:
        before = ask(store)
        file = max(copy.glob("history/*/gpu-*.parquet"))
        if is_deleted:
            file.unlink()
        else:
            data = bytearray(file.read_bytes())
            data[len(data) // 3] ^= 4
            file.write_bytes(data)
        after = ask(store)
        assert [str(file)] == [found.path for found in store.damage.take()]

    assert after.samples.items() < before.samples.items()
    assert after.incomplete


@pytest.mark.parametrize("has_backup", [True, False])
def test_a_directory_without_log_and_metadata_is_not_new(
    pristine: tuple[Path, Answers], tmp_path: Path, has_backup: bool
) -> None:
    """Its history keeps the nodes that it belongs to, and the loss is reported; another node gets a number of its own."""
    copy = tmp_path / "data"
    shutil.copytree(pristine[0], copy)
    shutil.rmtree(copy / "log")
    for suffix in ("", ".check", *(() if has_backup else (".backup",))):
        (copy / f"metadata.sqlite{suffix}").unlink()
    with LocalStore(str(copy)) as store:
        assert ["n1", "n2"] == [node.name for node in store.nodes().values()]
        assert str(copy / "metadata.sqlite") in {found.path for found in store.damage.take()}
        assert NodeRegistry(store.nodes().values()).new("other", "m9", float(_BEGIN)).id not in store.nodes()


def test_a_restored_namesake_has_the_host_name_of_its_machine(tmp_path: Path) -> None:
    """The machine continues its node instead of becoming a third one."""
    with Lab(tmp_path, ("0",), ("0",)) as lab:
        for number, name in ((1, "gpu"), (2, "gpu#2")):
            fact = {"id": number, "name": name, "host": "gpu", "machine": f"m{number}"}
            lab.archive.commit([LogEntry.of_fact("node", time=float(_BEGIN), facts={}, labels={}, **fact)])
            lab.fill(range(10), node=number)
            lab.archive.seal()
    data = tmp_path / "data"
    for suffix in ("", ".backup"):
        (data / f"metadata.sqlite{suffix}").unlink()
    (data / "log").rename(tmp_path / "log")  # its records name the nodes, too
    with LocalStore(str(data)) as store:
        nodes = list(store.nodes().values())
        assert [("gpu", "gpu"), ("gpu#2", "gpu")] == [(node.name, node.host) for node in nodes]
        registry = NodeRegistry([nodes[0]._replace(machine="m1"), nodes[1]])
        assert registry.find("gpu", "m2") == nodes[1]


def test_a_log_that_is_damaged_while_the_head_runs(tmp_path: Path) -> None:
    """Sealing repairs it and goes on; only the damaged records are missing."""
    with Lab(tmp_path, ("0",)) as lab:
        for second in range(0, 100, 10):
            lab.fill(range(second, second + 10))
        (segment,) = (tmp_path / "data" / "log").glob("*.log")
        with segment.open("r+b") as file:
            file.seek(segment.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))
        assert 1 == lab.archive.seal().missing
        lab.fill(range(100, 110))
        lab.archive.seal()
        times = {
            time for one in lab.archive.series(query("gpu", "power_watts", **_ALWAYS)) for time in one.times
        }
        assert 100 == len(times)
        assert any(gap.start for gap in lab.archive.damage.gaps)


def test_no_damage_to_a_spool_gives_a_wrong_frame(tmp_path: Path) -> None:
    """Every frame that is read is the one that was written; the others are counted as lost."""
    whole = tmp_path / "whole" / "spool"
    frames = {number: kept(number, 300, (ONE, TWO)[number % 2]) for number in range(1, 401)}
    spool = Spool(whole, limit_bytes=MIN_LIMIT_BYTES)
    for frame in frames.values():
        spool.append(RUN, [frame], 0, TEXTS, NOTES)
    spool.close()
    seed = int(os.environ.get("GPULSE_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
    dice = random.Random(seed)
    for number in range(_MUTATIONS):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole.parent, copy)
        path = dice.choice(sorted((copy / "spool").glob("*.log")))
        how = mutate(path, dice)
        try:
            is_damaged = how not in ("nothing", "deleted")
            check_spool(copy / "spool", frames, is_damaged=is_damaged)
        except BaseException as error:
            error.add_note(f"mutation {number} of GPULSE_SEED={seed}: {path.relative_to(copy)}: {how}")
            raise


def check_spool(directory: Path, frames: Mapping[int, BufferedFrame], *, is_damaged: bool) -> None:
    """Read all frames of a spool as an agent does."""
    try:
        spool = Spool(directory, limit_bytes=MIN_LIMIT_BYTES)
        index = spool.scan().run_index
    except LogError:
        return  # the agent moves the whole spool aside
    reader = SpoolReader(lambda: spool.log)
    found: set[int] = set()
    sent = 0
    while (piece := index.find(RUN, sent)) is not None:
        batch = reader.read(piece, 1000, 10**7)
        assert batch
        for frame in batch:
            assert frames[frame.sequence] == frame
        found |= {frame.sequence for frame in batch}
        sent = batch[-1].sequence
    reader.close()
    spool.close()
    if is_damaged and len(found) < len(frames):
        assert spool.log.lost or spool.log.recovered


@pytest.mark.slow
def test_a_head_with_damaged_data(cluster: Cluster) -> None:
    """It starts, says what is damaged in its log, in an event and in its status, and answers everything else."""
    head = cluster.head("--freq", "100", "--seal-after", "1s")
    agent = cluster.agent("node", head.port)
    history = head.data_dir / "history"
    until(lambda: len(list(history.glob("0*/gpu-*.parquet"))) >= 2, "sealed files")
    code, output, _ = run("head", "--scrub", "--data-dir", str(head.data_dir))
    assert (0, "nothing is damaged" in output) == (code, True), output
    assert agent.end() == 0
    assert head.end() == 0
    damaged = min(history.glob("0*/gpu-*.parquet"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 16
    damaged.write_bytes(data)
    code, output, _ = run("head", "--scrub", "--data-dir", str(head.data_dir))
    assert 1 == code
    assert f"{damaged} is damaged: its checksum is wrong" in output
    assert "gpu samples of 1 node from" in output

    head = cluster.head(port=head.port, http_port=head.http_port)
    hour = f"from={time.time() - 3600}&to={time.time() + 600}"
    answer = head.get(f"/api/v1/history?metrics=power_watts&{hour}")
    assert ["gpu samples of 1 node" in text for text in answer["incomplete"]] == [True]
    assert answer["series"]
    until(lambda: head.get(f"/api/v1/events?kinds=data_damaged&{hour}")["events"], "the event")
    status = head.get("/status")["storage"]
    assert 1 == status["damaged_files"]
    assert str(damaged) in status["damage"][0]
    code, output, _ = run("status", "--head", f"127.0.0.1:{head.port}")
    assert "1 damaged file was moved to" in " ".join(output.split())
    assert head.end() == 0
    code, output, _ = run("head", "--repair", "--data-dir", str(head.data_dir))
    assert "checked" in output
