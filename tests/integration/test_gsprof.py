"""`gsprof`: every command line of its document as printed, against real heads and agents."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.head_processes import Place, place, wait_for
from tests.integration.stored import logged

pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    """Where somebody has opened a terminal."""
    with place(tmp_path) as made:
        yield made


def test_controlling_profiling(here: Place) -> None:
    """Sessions begin and end over gRPC and over HTTP, and leave files where the head was started."""
    here.head("gsprof start --port 8090 --http-port 8091 --enable-bandwidth --freq 100")
    here.agent("gsprof connect <head-node-ip>:8090")

    assert "session my_experiment started" in here.type(
        "gsprof profile <head-node-ip>:8090 --name my_experiment"
    )
    assert "my_experiment" in here.type("gsprof status <head-node-ip>:8090")
    assert f"{here.directory}/my_experiment.json" in here.type(
        "gsprof stop <head-node-ip>:8090 --name my_experiment"
    )
    here.type("gsprof profile <head-node-ip>:8090")
    assert "gswarm_profiler_" in here.type("gsprof stop <head-node-ip>:8090")

    here.type("gsprof http-profile <head-node-ip>:8091 --name my_experiment")
    assert "my_experiment" in here.type("gsprof http-status <head-node-ip>:8091")
    assert "my_experiment-2.json" in here.type("gsprof http-stop <head-node-ip>:8091 --name my_experiment")
    here.type("gsprof http-stop <head-node-ip>:8091", code=1)  # nothing is left to stop

    session = here.json("my_experiment.json")
    assert "my_experiment" == session["session_name"]
    frame = session["frames"][0]
    assert 8 == len(frame["gpu_id"]) == len(frame["gpu_util"]) == len(frame["dram_bandwidth_rx"])
    assert set(frame["gpu_id"]) == set(session["summary_by_device"])


@pytest.mark.requires("curl")
def test_direct_http_requests(here: Place) -> None:
    """The document's curl lines answer JSON with its fields."""
    here.head("gsprof start --port 8090 --http-port 8091 --freq 100")
    here.agent()
    post = '-H "Content-Type: application/json" -d'

    def curl(rest: str) -> dict[str, object]:
        document: dict[str, object] = json.loads(here.type(f"curl -sS {rest}"))
        return document

    assert curl("http://localhost:8091/status")["freq"] == 100
    for name in ("my_experiment", "other"):
        started = curl(f"""-X POST http://localhost:8091/profiling/start {post} '{{"name": "{name}"}}'""")
        assert started["success"]
    stopped = curl(f"""-X POST http://localhost:8091/profiling/stop {post} '{{"name": "my_experiment"}}'""")
    assert stopped["success"]
    assert f"{here.directory}/my_experiment.json" == stopped["output_file"]
    assert curl(f"-X POST http://localhost:8091/profiling/stop {post} '{{}}'")["success"]
    assert 1 == curl("http://localhost:8091/clients")["total_clients"]
    assert "client_data" in curl("http://localhost:8091/metrics/latest")
    assert 2 == curl("http://localhost:8091/profiling/sessions")["total_sessions"]


def test_a_name_that_comes_again(here: Place) -> None:
    """The file is told at once, each command that is printed names it, and a name means its newest file."""
    here.head("gsprof start --port 8090 --http-port 8091 --freq 100")
    here.agent()
    for count in ("", "-2"):
        path = here.directory / f"run{count}.json"
        why = ", because run.json exists" if count else ""

        begun = here.type("gsprof profile localhost:8090 --name run").splitlines()
        assert f"its file will be {path}{why}" == begun[1]
        assert f"{path}, once the session has stopped" in here.type(
            "gpulse session show run --head localhost:8090"
        )
        _more_frames(here)
        stopped = here.type(begun[0].partition("stop it with: ")[2]).splitlines()
        assert [f"run stopped: {path}", f"view it with: gsprof stat --data run{count}.json"] == stopped
        seen = here.run(stopped[1].removeprefix("view it with: "))
        assert (0, "") == (seen.code, seen.err)

    newest = here.run("gsprof stat --name run")
    assert (seen.out, "reading run-2.json\n") == (newest.out, newest.err)
    assert newest == here.run("gpulse report run")
    older = here.run("gsprof stat --data run.json")
    assert "run-2.json is from a newer session with the same name\n" == older.err
    assert older.out != newest.out


def test_a_name_that_looks_like_a_second_file(here: Place) -> None:
    """Sessions that go on at the same time get the files that they were told, in whichever order they end."""
    here.head("gsprof start --port 8090 --http-port 8091 --freq 100")
    here.agent()
    (here.directory / "run.json").write_text("{}")
    told = {}
    for name in ("run", "run-2"):
        begun = here.type(f"gsprof profile localhost:8090 --name {name}")
        told[name] = begun.splitlines()[1].removeprefix("its file will be ").partition(",")[0]
    _more_frames(here)

    for name in ("run-2", "run"):
        assert f"{name} stopped: {told[name]}\n" in here.type(f"gsprof stop localhost:8090 --name {name}")
    assert ["run-2.json", "run-2-2.json"] == [Path(told[name]).name for name in ("run", "run-2")]
    assert "reading run-2-2.json\n" == here.run("gsprof stat --name run-2").err
    assert "reading run-2.json\n" == here.run("gsprof stat --name run").err


def test_a_restart_uses_the_defaults_of_the_document(here: Place) -> None:
    """What an earlier head was started with is not kept: 500 ms, and no traffic."""
    head = here.head(
        "gsprof start --port 8090 --http-port 8091 --freq 100 --enable-bandwidth --enable-nvlink"
    )
    here.end(head)
    here.head("gsprof start --port 8090 --http-port 8091")

    status = here.status()
    assert (500, False, False) == (
        status["freq"],
        status["enable_bandwidth_profiling"],
        status["enable_nvlink_profiling"],
    )


def test_multiple_concurrent_sessions(here: Place) -> None:
    """Sessions overlap, each with a file of its own."""
    here.head("gsprof start --port 8090 --http-port 8091 --freq 100")
    here.agent()

    here.type("gsprof http-profile localhost:8091 --name training_epoch_1")
    here.type("gsprof http-profile localhost:8091 --name memory_analysis")
    here.type("gsprof http-profile localhost:8091 --name gpu_utilization_test")
    here.type("gsprof http-stop localhost:8091 --name training_epoch_1")
    here.type("gsprof http-stop localhost:8091")

    for name in ("training_epoch_1", "memory_analysis", "gpu_utilization_test"):
        assert name == here.json(f"{name}.json")["session_name"]


def test_grpc_alone(here: Place) -> None:
    """`--http-port 0` means no HTTP, which is said to whoever asks there."""
    here.head("gsprof start --port 8090 --http-port 0 --enable-bandwidth --freq 1000")

    here.type("gsprof status <head-node-ip>:8090")
    refused = here.run("gsprof http-status <head-node-ip>:8091")
    assert 3 == refused.code
    assert "nothing is listening" in refused.err
    wrong = here.run("gsprof http-status localhost:8090")
    assert "is a gRPC port, but this command uses HTTP" in wrong.err


def test_fault_tolerant_long_running_profiling(here: Place) -> None:
    """A head is killed, started again, and goes on with the session; the gap is in the data."""
    head = here.head("gsprof start --port 8090 --http-port 8091 --freq 100")
    here.agent("gsprof connect master-node:8090 --resilient")
    here.type("gsprof http-profile master-node:8091 --name week_long_training")
    _more_frames(here)
    assert "there is no interrupted session" in here.type("gsprof recover --list")

    here.end(head, signal.SIGKILL)
    here.head("gsprof start --port 8090 --http-port 8091")

    assert (
        "to resume it: gsprof recover --name week_long_training" in (here.directory / "log-2.txt").read_text()
    )
    assert "week_long_training" in here.type("gsprof recover --list")
    assert "week_long_training resumed after an interruption of" in here.type(
        "gsprof recover --name week_long_training"
    )
    wait_for(lambda: here.status()["connected_clients"] != [], "the agent to come back")
    wait_for(
        lambda: (
            "no frames are missing"
            in here.type("gpulse session show week_long_training --head localhost:8090")
        ),
        "the frames that the agent kept",
    )
    _more_frames(here)
    here.type("gsprof http-stop master-node:8091 --name week_long_training")

    document = here.json("week_long_training.json")
    assert 1 == len(document["interruptions"])
    here.type("gsprof stat --data week_long_training.json --plot week_long_training.pdf")
    assert (here.directory / "week_long_training.pdf").read_bytes().startswith(b"%PDF")


def test_recovery_by_id_and_export(here: Place) -> None:
    """A session can be named by its id, and exported while it waits to be recovered."""
    head = here.head("gsprof start --port 8090 --http-port 8091 --freq 100")
    here.agent()
    here.type("gsprof profile localhost:8090 --name my_experiment")
    _more_frames(here)
    here.type("gsprof exit localhost:8090")
    assert 0 == head.wait(30)
    here.head("gsprof start --port 8090 --http-port 8091")

    listed = json.loads(here.type("gsprof recover --list --json"))["sessions"]
    assert ["my_experiment"] == [session["name"] for session in listed]
    here.type("gsprof recover --export --name my_experiment")
    assert here.json("my_experiment.json")["frames"]
    assert "Util" in here.type("gsprof stat --data my_experiment.json --plot my_experiment.pdf")
    here.type(f"gsprof recover --session-id {listed[0]['session_id']}")
    assert "my_experiment" in here.type("gsprof stop localhost:8090")


def test_recovery_without_a_head(here: Place) -> None:
    """With no head running the data directory itself is read, and left as it is by everything but a resume."""
    head = here.head("gsprof start --port 8090 --http-port 8091 --freq 100")
    here.agent()
    here.type("gsprof profile localhost:8090 --name my_experiment")
    _more_frames(here)
    here.end(head, signal.SIGKILL)
    before = _content(here.directory / ".gswarm_profiler_data")

    assert "my_experiment" in here.type("gsprof recover --list")
    assert "view it with: gsprof stat --data my_experiment.json" in here.type("gsprof recover --export")
    here.type("gsprof recover --export --name my_experiment --format csv")
    assert before == _content(here.directory / ".gswarm_profiler_data")
    frames = here.json("my_experiment.json")["frames"]  # the first one may have no utilization yet
    assert any(value is not None for frame in frames for value in frame["gpu_util"])
    assert (here.directory / "my_experiment.csv").read_text().startswith("frame_id,")
    unknown = here.run("gsprof recover --name nothing")
    assert 1 == unknown.code
    assert "there is no session 'nothing'" in unknown.err

    assert "will be resumed when a head is started" in here.type("gsprof recover --name my_experiment")
    here.head("gsprof start --port 8090 --http-port 8091")
    assert ["my_experiment"] == [session["name"] for session in here.status()["active_sessions"]]
    assert 1 == len(here.status()["active_sessions"][0]["interruptions"])


def test_nowhere_to_recover_from(here: Place) -> None:
    """With neither a directory nor a head it says both, and what to do."""
    lost = here.run("gsprof recover --list")

    assert 1 == lost.code
    assert "there is no directory .gswarm_profiler_data/ here" in lost.err
    assert "try: change to the directory where the head was started" in lost.err


def test_an_empty_name_is_not_all_sessions(here: Place) -> None:
    """A variable that was not set in a script must not stop everybody's sessions."""
    here.head()
    here.type("gsprof profile localhost:8090 --name precious")

    assert "the name is empty" in here.run("gsprof stop localhost:8090 --name ''").err
    assert ["precious"] == [session["name"] for session in here.status()["active_sessions"]]


def _more_frames(here: Place) -> None:
    """Wait until the head has some more frames, on disk."""
    data = here.directory / ".gswarm_profiler_data"
    enough = sum(logged(data).values()) + 10
    wait_for(lambda: sum(logged(data).values()) >= enough, "frames in the log")


def _content(directory: Path) -> dict[str, bytes]:
    """Every file; SQLite's shared memory is not content."""
    return {
        str(path): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.endswith("-shm")
    }
