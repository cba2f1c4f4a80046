"""Disks under the head that are full, read-only, slow or broken, and logs that are damaged."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.cluster import EAGER, SEALING, AgentProcess, Cluster, HeadProcess, cluster_in, until
from tests.integration.stored import check_complete, check_order, logged, read_stored, read_taken
from tests.prerequisites import require

_SHIM = r"""
/* Delays fdatasync, or lets calls fail, as a file says: "sleep 2", "sync 5" (an error's number), "write 28". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int ordered(const char *what)
{
    const char *path = getenv("SHIM_FILE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char word[16];
    int number, found = 0;
    if (!file)
        return 0;
    while (fscanf(file, "%15s %d", word, &number) == 2)
        if (!strcmp(word, what))
            found = number;
    fclose(file);
    return found;
}

static int of_log(int fd)
{
    char link[64], path[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0)
        return 0;
    path[size] = 0;
    return strstr(path, "/data/log/") != NULL;
}

int fdatasync(int fd)
{
    int (*real)(int) = dlsym(RTLD_NEXT, "fdatasync");
    if (of_log(fd)) {
        int error = ordered("sync");
        sleep(ordered("sleep"));
        if (error) {
            errno = error;
            return -1;
        }
    }
    return real(fd);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset)
{
    ssize_t (*real)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
    if (of_log(fd)) {
        int error = ordered("write");
        if (error) {
            errno = error;
            return -1;
        }
    }
    return real(fd, data, size, offset);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset)
{
    return pwrite64(fd, data, size, offset);
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes a disk slow or broken."""
    require("C compiler")
    place = tmp_path_factory.mktemp("shim")
    (place / "shim.c").write_text(_SHIM, encoding="ascii")
    made = place / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(made), str(place / "shim.c"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Heads and agents for one test."""
    with cluster_in(tmp_path) as made:
        yield made


@contextmanager
def small_disk(place: Path, kilobytes: int) -> Iterator[None]:
    """A disk of its own at a place."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for a disk of its own")
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k,mode=700", "gpulse-test", str(place)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def is_fresh(head: HeadProcess, name: str = "node") -> bool:
    """Whether the newest frame of a node is one of now."""
    data = head.get("/metrics/latest")["client_data"].get(name)
    return data is not None and data["age_seconds"] < 1.0


def storage(head: HeadProcess) -> dict[str, object]:
    """What the head says of its disk."""
    found: dict[str, object] = head.get("/status")["storage"]
    return found


def check_failing(head: HeadProcess, words: str) -> None:
    """The head stores nothing and says so wherever one looks."""
    until(lambda: storage(head)["state"] == "failing", "the head to say that it cannot store anything")
    assert words in str(storage(head)["error"])
    head.said("storage failed: ")
    before = logged(head.data_dir)
    status, document = head.ask("/profiling/start", {"name": "no_room"})
    assert status == 503, document
    assert words in document["error"]
    assert logged(head.data_dir) == before


def check_well_again(head: HeadProcess, agent: AgentProcess) -> None:
    """The head goes on by itself, and in the end every frame is there once."""
    until(lambda: storage(head)["state"] == "ok", "the head to store again")
    head.said("storage works again after")
    until(lambda: is_fresh(head), "the agent to catch up")
    assert head.post("/profiling/start", {"name": "room"})["success"]
    assert agent.end() == 0, agent.text
    assert head.end() == 0, head.text
    found, taken = read_stored(head.data_dir), read_taken(agent.state_dir)
    check_complete(found, taken, "node")
    ((run, frames),) = found.of("node").items()
    check_order(frames)
    assert len(frames) >= taken.runs[run].last - 20


@pytest.mark.slow
def test_full_and_read_only(cluster: Cluster, tmp_path: Path) -> None:
    """On a disk that is full, then read-only, the head acknowledges nothing, says so, and goes on when it can."""

    with small_disk(tmp_path / "data", 16 << 10):
        head = cluster.head("--freq", "50", *SEALING)
        agent = cluster.agent("node", head.port, tuned=EAGER)
        until(lambda: is_fresh(head), "the agent")
        filler = tmp_path / "data" / "filler"
        with filler.open("wb", buffering=0) as file:  # whatever sealing sets free is taken as well
            while True:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    if storage(head)["state"] == "failing":
                        break
        check_failing(head, "No space left on device")
        agent.said("the head's storage is failing")
        filler.unlink()
        until(lambda: storage(head)["state"] == "ok", "the head to store again")
        until(lambda: is_fresh(head), "the agent to catch up")

        remount = ["mount", "-o", "remount,ro", str(tmp_path / "data")]
        done = subprocess.run(remount, check=False, capture_output=True, text=True)
        if done.returncode == 0:  # refused while a file is open for writing, on most systems
            check_failing(head, "Read-only file system")
            subprocess.run(["mount", "-o", "remount,rw", str(tmp_path / "data")], check=True)
        check_well_again(head, agent)
        until(lambda: "of the log has an unknown kind" not in head.text, "sealing to go on")
        check_sealing(cluster, head)


def check_sealing(cluster: Cluster, head: HeadProcess) -> None:
    """Everything that a head has left in its log can be sealed."""
    again = cluster.head(*SEALING, port=head.port, http_port=head.http_port)
    before = again.get("/status")["storage"]["history_bytes"]
    until(lambda: again.get("/status")["storage"]["history_bytes"] > before, "sealing")
    assert " E " not in again.text, again.text
    assert again.end() == 0


@pytest.mark.slow
def test_broken(cluster: Cluster, tmp_path: Path, shim: Path) -> None:
    """A disk that is read-only, fails to sync, and then is full, neither loses nor doubles a frame."""

    orders = tmp_path / "orders"
    orders.touch()
    env = {"LD_PRELOAD": str(shim), "SHIM_FILE": str(orders)}
    head = cluster.head("--freq", "50", env=env)
    agent = cluster.agent("node", head.port, tuned=EAGER)
    until(lambda: is_fresh(head), "the agent")
    ordered(orders, "write 30")
    check_failing(head, "Read-only file system")
    ordered(orders, "")
    until(lambda: storage(head)["state"] == "ok", "the head to store again")
    ordered(orders, "sync 5")
    until(lambda: storage(head)["state"] == "failing", "the head to notice")
    assert "Input/output error" in str(storage(head)["error"])
    # What could not be synced may be on disk all the same; then not even a probe can be written.
    ordered(orders, "write 28")
    until(lambda: "No space left on device" in str(storage(head)["error"]), "another trouble")
    check_failing(head, "No space left on device")
    ordered(orders, "")
    check_well_again(head, agent)


def ordered(file: Path, orders: str) -> None:
    """Tell the disk how to be, at once."""
    new = file.with_suffix(".new")
    new.write_text(orders, encoding="ascii")
    new.rename(file)


@pytest.mark.slow
def test_slow(cluster: Cluster, tmp_path: Path, shim: Path) -> None:
    """On a disk that takes two seconds to sync the head answers, acknowledges late, and loses nothing."""

    orders = tmp_path / "orders"
    orders.touch()
    env = {"LD_PRELOAD": str(shim), "SHIM_FILE": str(orders)}
    head = cluster.head("--freq", "50", env=env)
    agent = cluster.agent("node", head.port, tuned=EAGER)
    until(lambda: is_fresh(head), "the agent")
    ordered(orders, "sleep 2")
    before = head.get("/status")["frames_received"]
    until(lambda: head.get("/status")["frames_received"] >= before + 60, "frames while the disk is slow")
    assert head.nodes()["node"] == "healthy"
    assert storage(head)["state"] == "ok"
    head.kill()
    ordered(orders, "")
    head = cluster.head(port=head.port, http_port=head.http_port, env=env)
    until(lambda: is_fresh(head), "the agent to catch up")
    assert agent.end() == 0
    assert head.end() == 0
    found = read_stored(head.data_dir)
    check_complete(found, read_taken(agent.state_dir), "node")


@pytest.mark.slow
def test_damaged_log(cluster: Cluster) -> None:
    """A torn last record is dropped, and the agent sends it again; any other damage costs only what is damaged."""

    head = cluster.head("--freq", "50")
    agent = cluster.agent("node", head.port, tuned=EAGER)
    until(lambda: sum(logged(head.data_dir).values()) >= 40, "frames in the log")
    head.kill()
    (segment,) = (head.data_dir / "log").glob("*.log")
    with segment.open("ab") as file:
        file.write(segment.read_bytes()[-200:-10])
    head = cluster.head(port=head.port, http_port=head.http_port)
    until(lambda: is_fresh(head), "the agent to catch up")
    agent.tell()
    assert agent.end() == 0
    assert head.end() == 0
    check_complete(read_stored(head.data_dir), read_taken(agent.state_dir), "node")

    whole = segment.read_bytes()
    for place in (len(whole) // 3, len(whole) // 2):
        broken = bytearray(whole)
        broken[place] ^= 0x10
        segment.write_bytes(broken)
        damaged = cluster.head(port=head.port, http_port=head.http_port)
        assert damaged.end() == 0
        assert f"{segment} is damaged" in damaged.text
        assert "Traceback" not in damaged.text
        (copy,) = (head.data_dir / "damaged").glob("log-*")
        assert broken == copy.read_bytes()
        copy.unlink()
        events = read_stored(head.data_dir).said("data_damaged")
        assert str(segment) in [event.detail["path"] for event in events]
        segment.write_bytes(whole)
