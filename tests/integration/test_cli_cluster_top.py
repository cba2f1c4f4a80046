"""`gpulse top --head`, `gpulse status` and `gpulse wait --head` with a real head and a real agent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml
from tests.integration.cluster import Cluster, HeadProcess, cluster_in, until
from tests.integration.commands import run, terminal

GIB = 1 << 30


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster for one test."""
    with cluster_in(tmp_path) as made:
        yield made


def occupied(head: HeadProcess) -> dict[str, int]:
    """The number of GPUs in each state that has some."""
    return {state: count for state, count in head.get("/api/v1/gpus")["counts"].items() if count}


def test_the_view_survives_a_restart_of_the_head(cluster: Cluster) -> None:
    """It shows the last values meanwhile, and those of the new head afterwards; Ctrl-C ends it."""
    head = cluster.head()
    cluster.agent("gpu-01", head.port)
    until(lambda: occupied(head), "the GPUs")
    with terminal("top", "--head", f"127.0.0.1:{head.port}", "-i", "0.2", columns=120, rows=40) as shown:
        shown.until(b"gpu-01")
        shown.until("●".encode())
        head.kill()
        shown.until(b"DISCONNECTED since ")
        shown.seen = b""
        again = cluster.head(port=head.port, http_port=head.http_port)
        shown.until(b"1 node, 8 GPUs")
        again.end()
        shown.until(b"DISCONNECTED since ")
        shown.press_ctrl_c()
        seen = shown.to_the_end()

    assert 0 == shown.child.returncode
    assert b"Traceback" not in seen


def test_a_head_that_is_not_there_is_an_error() -> None:
    """Before the screen is cleared."""
    with terminal("top", "--head", "127.0.0.1:1") as shown:
        seen = shown.to_the_end()

    assert 1 == shown.child.returncode
    assert b"gpulse: nothing is listening at 127.0.0.1:1" in seen


def test_local_options_do_not_go_with_a_head() -> None:
    """They would have no effect."""
    with terminal("top", "--head", "127.0.0.1:1", "--demo") as shown:
        seen = shown.to_the_end()

    assert 2 == shown.child.returncode
    assert b"--demo and --head cannot be used together" in seen
    assert "gpulse status --head 127.0.0.1:1" in run("top", "--head", "127.0.0.1:1").err


def test_free_gpus_of_a_cluster(
    cluster: Cluster, fake_nvml: FakeNvml, nvml_library: Path, tmp_path: Path
) -> None:
    """The status names them, a wait prints them, and a command runs only on their node."""
    for index in range(4):
        fake_nvml.add(index)
        fake_nvml.gpu(index).util_gpu = 0
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    fake_nvml.add_process(0, os.getpid(), 3 * GIB)
    head = cluster.head()
    cluster.agent("gpu-01", head.port, source=(), env=fake_nvml.env(nvml_library))
    until(lambda: occupied(head) == {"idle": 1, "free": 3}, "one held GPU and three free ones")
    at = ("--head", f"127.0.0.1:{head.port}")
    script = ("--", "sh", "-c", "echo gpus=$CUDA_VISIBLE_DEVICES")
    local = ("wait", *at, "--for", "0", "--dev-dir", str(tmp_path / "dev"))

    assert "3 free: gpu-01 1-3" in run("status", *at).out.splitlines()
    assert {"gpu-01": ["1", "2", "3"]} == json.loads(run("status", *at, "--json").out)["free_gpus"]
    assert "gpu-01:1\ngpu-01:2\n" == run("wait", *at, "--for", "0", "--gpus", "2").out
    refused = run("wait", *at, "--for", "0", "--gpus", "4", "--timeout", "1")
    assert (124, True) == (refused.code, "GPU 0: " in refused.err)
    assert 2 == run("wait", *at, "--node", "other").code
    assert "gpus=1\n" == run(*local, *script, env=fake_nvml.env(nvml_library)).out
    other = FakeNvml.create(tmp_path / "other-machine")
    try:
        other.gpu(0).uuid = b"GPU-00000000-0000-0000-0000-00000000abcd"
        refused = run(*local, *script, env=other.env(nvml_library))
    finally:
        other.close()
    assert (2, "", True) == (
        refused.code,
        refused.out,
        "which is not a node of that head" in refused.err,
    )
