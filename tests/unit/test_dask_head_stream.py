"""What an agent in a worker is fed with: the newest frame once, with the jobs of Dask; and where it is told to go."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpulse.cluster.client.transport import parse_agent_address
from gpulse.errors import ClosedError, GpulseError, UsageError
from gpulse.integrations.dask.head_stream import (
    AckTimer,
    FrameRelay,
    HeadSettings,
    HeadStream,
    ProcessJobLabels,
    _build_agent_config,
    head_settings,
)
from gpulse.model.frame import Frame
from gpulse.model.process import Owner, ProcessReading
from gpulse.sources.procfs import Roots
from tests.unit.frames import NOON, frame, gpu, process

TOKEN = "head-token-of-sixteen-or-more"
PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
ONE, TWO = "dask:10.0.0.5:8786/1", "dask:10.0.0.5:8786/2"


def at(second: float, *processes: ProcessReading) -> Frame:
    """A frame so many seconds after noon."""
    return frame(gpu(), time=NOON + second, monotonic=1000.0 + second, processes=processes)


def identities(shown: Frame) -> dict[int, tuple[str | None, float | None]]:
    """By pid the job and the start of each process, in seconds after noon."""
    return {
        reading.pid: (
            reading.identity.owner.job,
            None if reading.identity.start_time is None else reading.identity.start_time - NOON,
        )
        for reading in shown.processes
    }


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """A head's token that nobody else can read."""
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n", encoding="ascii")
    path.chmod(0o600)
    return path


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc in which 12 descends from 10 by way of 11, and 20 from nobody of these."""
    for pid, parent in {10: 1, 11: 10, 12: 11, 20: 1}.items():
        (tmp_path / str(pid)).mkdir()
        stat = f"{pid} (python3) S {parent} " + " ".join("0" for _ in range(48))
        (tmp_path / str(pid) / "stat").write_text(stat, encoding="ascii")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("gpu-head", "gpu-head:8090"),
        ("gpu-head:9000", "gpu-head:9000"),
        ("[::1]:9000", "[::1]:9000"),
        ("grpcs://gpu-head", "grpcs://gpu-head:8090"),
    ],
)
def test_a_head_is_written_as_for_an_agent(given: str, expected: str) -> None:
    """Without a port it is the usual one, and TLS is part of the address."""

    assert HeadSettings(expected) == head_settings(given)


@pytest.mark.parametrize("given", ["", "a head", "http://gpu-head:8091", "head:0", b"gpu-head", 8090])
def test_what_is_no_address_is_refused(given: object) -> None:
    """And it is said what one looks like."""

    with pytest.raises(UsageError) as caught:
        head_settings(given)  # type: ignore[arg-type]

    assert "8090" in (caught.value.hint or "")


def test_settings_travel_without_their_files(tmp_path: Path, token_file: Path) -> None:
    """A worker's machine has neither the token's file nor the certificate's."""

    ca = tmp_path / "ca.pem"
    ca.write_text(PEM, encoding="ascii")
    made = head_settings("gpu-head", token_file, ca)

    assert HeadSettings("grpcs://gpu-head:8090", TOKEN, PEM) == pickle.loads(pickle.dumps(made))


def test_a_token_is_not_shown(token_file: Path) -> None:
    """Settings are printed in logs and tracebacks."""

    shown = repr(head_settings("gpu-head", token_file))

    assert "HeadSettings('gpu-head:8090', token given)" == shown


def test_unusable_files_are_reported_in_words_of_attach(tmp_path: Path, token_file: Path) -> None:
    """There are no command-line options in Python."""

    token_file.chmod(0o644)
    refusals = []
    for given in (
        {"token_file": tmp_path / "none"},
        {"token_file": token_file},
        {"ca": tmp_path / "none"},
        {"ca": token_file},
    ):
        with pytest.raises(GpulseError) as caught:
            head_settings("gpu-head", **given)
        refusals.append(f"{caught.value.message}: {caught.value.hint}")

    assert [] == [text for text in refusals if "--t" in text]
    assert ["head_token_file"] * 2 + ["head_ca"] * 2 == [
        next(name for name in ("head_token_file", "head_ca") if name in text) for text in refusals
    ]


def test_the_newest_frame_is_given_once() -> None:
    """Whoever asks more rarely than frames come gets the last one, and whoever asks again waits for another."""

    relay = FrameRelay(0.01)
    for second in range(3):
        relay.offer(at(second))

    assert at(2) == relay.sample(NOON + 3)
    assert () == relay.sample(NOON + 4).gpus


def test_a_frame_that_comes_is_waited_for() -> None:
    """It is given when it comes, long before the wait is over."""

    relay = FrameRelay(600.0)
    offering = threading.Timer(0.05, relay.offer, (at(7),))
    offering.start()
    given = relay.sample(NOON)
    offering.join()

    assert at(7) == given


def test_silence_is_reported_for_what_it_is() -> None:
    """A frame without readings says since when there are none, and of which node."""

    relay = FrameRelay(0.01)
    relay.offer(at(0))
    relay.sample(NOON)
    silent = [relay.sample(NOON + second) for second in (5, 6)]
    relay.offer(at(7))
    relay.sample(NOON + 7)
    later = relay.sample(NOON + 8)

    assert [NOON + 5, NOON + 6] == [one.time for one in silent]
    assert [("not_answering", NOON + 5)] * 2 == [(one.health[0].code, one.health[0].since) for one in silent]
    assert {"node1"} == {one.node.name for one in silent}
    assert NOON + 8 == later.health[0].since


def test_in_the_end_the_last_frame_is_given_again() -> None:
    """An agent says goodbye with a frame: nobody waits for another, and none is made up."""

    relay = FrameRelay(60.0)
    relay.offer(at(0))
    relay.sample(NOON)
    relay.offer(at(1))
    relay.end()
    relay.offer(at(2))

    assert [at(1), at(1)] == [relay.sample(NOON + 3), relay.sample(NOON + 4)]


def test_who_waits_is_woken_in_the_end() -> None:
    """When there never was a frame, there is nothing to say goodbye with."""

    relay = FrameRelay(600.0)
    ending = threading.Timer(0.05, relay.end)
    ending.start()
    with pytest.raises(ClosedError):
        relay.sample(NOON)
    ending.join()


def test_a_frame_has_the_jobs_of_its_own_time() -> None:
    """What is told after it was taken is about later ones."""

    relay = FrameRelay(0.01)
    relay.label({7: ONE})
    relay.offer(at(0, process(7)))
    relay.label({7: TWO})
    first = relay.sample(NOON)
    relay.offer(at(1, process(7)))
    second = relay.sample(NOON + 1)

    assert [{7: (ONE, 0.0)}, {7: (TWO, 1.0)}] == [identities(first), identities(second)]


def test_all_that_descends_from_a_worker_works_for_its_job(proc: Path) -> None:
    """Also by way of a process that is on no GPU; others are left alone."""

    labels = ProcessJobLabels(Roots(proc=str(proc)))
    shown = labels.on(at(0, process(10, parent=1), process(12, parent=11), process(20)), {10: ONE})

    assert {10: (ONE, 0.0), 12: (ONE, 0.0), 20: (None, -90.0)} == identities(shown)


def test_a_worker_that_descends_from_another_has_its_own_job(proc: Path) -> None:
    """A task may start a cluster of its own."""

    labels = ProcessJobLabels(Roots(proc=str(proc)))
    shown = labels.on(at(0, process(10), process(12)), {12: TWO, 10: ONE})

    assert {10: (ONE, 0.0), 12: (TWO, 0.0)} == identities(shown)


def test_the_jobs_of_others_stay(proc: Path) -> None:
    """A worker that runs under Slurm, or for a harvest, is theirs."""

    slurm = process(7)
    owner = slurm.identity.owner._replace(job="slurm:4711")
    slurm = slurm._replace(identity=slurm.identity._replace(owner=owner))
    shown = ProcessJobLabels(Roots(proc=str(proc))).on(at(0, slurm), {7: ONE})

    assert {7: ("slurm:4711", -90.0)} == identities(shown)


def test_each_job_of_a_process_is_a_process_of_its_own(proc: Path) -> None:
    """To a head a process has one job, so its start tells its stints apart; one that goes on is the same as before."""

    labels = ProcessJobLabels(Roots(proc=str(proc)))
    jobs = [ONE, ONE, TWO, None, ONE]
    shown = [
        labels.on(at(second, process(20)), {} if job is None else {20: job})
        for second, job in enumerate(jobs)
    ]

    assert [(ONE, 0.0), (ONE, 0.0), (TWO, 2.0), (None, -90.0), (ONE, 0.0)] == [
        identities(one)[20] for one in shown
    ]


def test_only_owner_and_start_of_a_process_are_changed(proc: Path) -> None:
    """The rest of the frame is as it was measured."""

    before = at(0, process(7), process(8))
    shown = ProcessJobLabels(Roots(proc=str(proc))).on(before, {7: ONE})
    first = before.processes[0]
    identity = first.identity._replace(owner=Owner("ada", job=ONE), start_time=NOON)

    assert before._replace(processes=(first._replace(identity=identity), before.processes[1])) == shown


def test_job_starts_of_processes_that_ended_are_forgotten(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may start processes all day long; one that goes on keeps its stint."""

    monkeypatch.setattr("gpulse.integrations.dask.head_stream._MAX_JOB_STARTS", 10)
    labels = ProcessJobLabels(Roots(proc=str(proc)))
    for pid in range(100, 150):
        shown = labels.on(at(pid, process(7), process(pid)), {7: ONE, pid: ONE})

    assert (ONE, 100.0) == identities(shown)[7]
    assert 12 > len(labels._stints)


def test_a_head_that_goes_silent_is_reported_until_it_answers() -> None:
    """In the same words all the while; frames of which none waits for long are no trouble, however rare."""

    answers = AckTimer("gpu-head:8090")
    silent = "the head at gpu-head:8090 has not answered for 5 s or longer; frames are kept on this machine"
    told: list[str | None] = [answers.trouble(50.0)]
    for second in (100.0, 101.0, 104.0):
        answers.asked(second)
        told.append(answers.trouble(second))
    told += [answers.trouble(second) for second in (104.9, 105.0, 900.0)]
    answers.answered()
    told.append(answers.trouble(901.0))
    answers.asked(1000.0)
    told.append(answers.trouble(1001.0))

    assert [None] * 5 + [silent] * 2 + [None] * 2 == told


def test_each_frame_asks_for_an_answer() -> None:
    """Also one that only says that there is none."""

    asked: list[int] = []
    relay = FrameRelay(0.01, given=lambda: asked.append(1))
    relay.offer(at(0))
    relay.sample(NOON)
    relay.sample(NOON + 1)

    assert 2 == len(asked)


def test_a_stream_that_was_never_started_can_be_stopped(tmp_path: Path) -> None:
    """And one that was stopped does nothing when it is started."""

    stream = HeadStream(HeadSettings("localhost:9"), tmp_path / "state")
    stream.stop()
    stream.start()
    stream.offer(at(0))
    stream.stop()

    assert (None, False) == (stream.trouble, (tmp_path / "state").exists())


@pytest.mark.parametrize(
    ("files", "expected"), [((), Path("/proc/sys/kernel/random/boot_id")), (("/proc/self/stat",), None)]
)
def test_a_machine_without_an_id_is_known_again(
    files: tuple[str, ...], expected: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be another node to a head for every worker, as what is kept of an agent goes with its worker."""

    monkeypatch.setattr("gpulse.integrations.dask.head_stream._MACHINE_FILES", files)
    config = _build_agent_config(HeadSettings("gpu-head:8090"), parse_agent_address("gpu-head"), tmp_path)

    assert expected == config.machine_file


def test_nothing_of_grpc_is_loaded_before_it_is_needed() -> None:
    """Most people have no head."""

    code = (
        "import sys\n"
        "from gpulse.integrations.dask.head_stream import head_settings\n"
        "head_settings('gpu-head')\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('grpc', 'google')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "[]\n" == done.stdout
