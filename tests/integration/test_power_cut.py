"""Machines that lose their power: everything that was not synced is gone, of heads, sealing, metadata and spools."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from gpulse.errors import DiskError, LogError
from tests.fakes.disk.power_cut import Disk
from tests.integration.cluster import (
    EAGER,
    SEALING,
    AgentProcess,
    HeadProcess,
    cluster_in,
    free_port,
    is_gone,
    until,
)
from tests.integration.stored import Stored, check_times, read_stored, read_taken
from tests.integration.test_cluster_crash import sealers
from tests.prerequisites import require

CUTS = int(os.environ.get("GPULSE_POWER_CUTS", "3"))
_NOTED = "tests.fakes.disk.noted_frames:UNSYNCED"
_SMALL = {"gpulse.store.local:_SEGMENT_BYTES": 64 << 10}
"""Segments of the log that are full soon, so that sealing has something to drop."""
_SPOOL = {"gpulse.cluster.agent.spool_writer:SPOOL_AFTER_SECONDS": 0.0}
_NAMES = ("node0", "node1")
_PATH = {"PYTHONPATH": str(Path(__file__).parents[2])}


class Machines:
    """A head on one machine and agents on another, which lose their power together or alone."""

    def __init__(self, directory: Path, stack: ExitStack, chance: random.Random, *unsynced: str) -> None:
        """Start everything.

        Args:
            directory: Directory of both disks.
            stack: Ends everything.
            chance: Decides what power cuts leave.
            unsynced: Functions of `os` that do nothing.
        """
        self._clusters = []
        self.disks = []
        for name in ("head", "agents"):
            place = directory / name
            place.mkdir()
            self._clusters.append(stack.enter_context(cluster_in(place)))
            self.disks.append(Disk(place, chance))
        self._unsynced = unsynced
        self._ports = free_port(), free_port()
        self._boots = 0
        self.sessions: list[str] = []
        """Sessions that the head has confirmed."""
        self.start_head()
        self.start_agents()

    @property
    def data_dir(self) -> Path:
        """The head's data directory."""
        return self.head.data_dir

    def start_head(self) -> None:
        """Start the head."""
        port, http_port = self._ports
        self.head: HeadProcess = self._clusters[0].head(
            *("--freq", "50", "--auto-resume", *SEALING),
            port=port,
            http_port=http_port,
            env={**self.disks[0].env, **_PATH},
            tuned={_NOTED: self._unsynced, **_SMALL},
        )

    def start_agents(self) -> None:
        """Start the agents, as after a boot."""
        self._boots += 1
        root = self.disks[1].root
        shutil.rmtree(root.with_name(f"{root.name}-memory"), ignore_errors=True)
        boot = self.disks[1].root.with_name(f"boot-{self._boots}")
        boot.write_text(f"boot-{self._boots}\n", encoding="ascii")
        tuned = {**EAGER, **_SPOOL, _NOTED: (), "gpulse.cluster.agent.identity:_BOOT_FILE": str(boot)}
        self.agents: list[AgentProcess] = [
            self._clusters[1].agent(name, self._ports[0], env={**self.disks[1].env, **_PATH}, tuned=tuned)
            for name in _NAMES
        ]

    def work(self, seconds: float) -> None:
        """Wait until all agents have sent frames, start a session, and go on for a while."""
        for agent in self.agents:
            agent.said("onnected to")
        name = f"session{len(self.sessions)}"
        self.head.post("/profiling/start", {"name": name})
        self.sessions.append(name)
        time.sleep(seconds)  # the moment is what is tried here

    def cut_head(self) -> None:
        """Cut the power of the head."""
        self.disks[0].cut(self._kill_head)

    def cut_agents(self) -> None:
        """Cut the power of the agents."""
        self.disks[1].cut(self._kill_agents)

    def cut_all(self) -> None:
        """Cut the power of both machines at once."""

        def kill() -> None:
            self._kill_head()
            self._kill_agents()

        self.disks[0].cut(lambda: self.disks[1].cut(kill))

    def _kill_head(self) -> None:
        children = sealers(self.head.popen.pid)
        self.head.popen.send_signal(signal.SIGKILL)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.head.kill()
        until(lambda: all(map(is_gone, children)), "the sealing process to end")

    def _kill_agents(self) -> None:
        for agent in self.agents:
            agent.popen.send_signal(signal.SIGKILL)
        for agent in self.agents:
            agent.kill()

    def end(self) -> None:
        """End everything gently."""
        for agent in self.agents:
            agent.tell()
        for agent in self.agents:
            assert agent.end() == 0, agent.text
        assert self.head.end() == 0, self.head.text
        for disk in self.disks:
            disk.collect()


def problems(machines: Machines, found: Stored) -> list[str]:
    """What is wrong with the frames that a head has stored."""
    told: list[str] = []
    taken: dict[bytes, dict[int, float]] = defaultdict(dict)
    acknowledged: dict[bytes, int] = defaultdict(int)
    for note in machines.disks[1].notes:
        run = bytes.fromhex(note["run"])
        if note["what"] == "taken":
            taken[run][note["number"]] = note["time"]
        else:
            acknowledged[run] = max(acknowledged[run], note["number"])
    bounds: dict[str, int] = defaultdict(int)
    for event in found.said("run_killed"):
        bounds[event.detail["run"]] += event.detail["lost_at_most"]
    for event in found.said("gap"):
        bounds[event.detail["run"]] += event.detail["frames"]
    if found.doubled:
        told.append(f"{found.doubled} samples are stored twice")
    spooled: list[Mapping[bytes, set[int]]] = []
    for agent in machines.agents:
        with suppress(DiskError):  # a spool that was not there yet
            spooled.append(read_taken(agent.state_dir).kept)
    for run, times in taken.items():
        frames = found.frames.get(run, {})
        kept = set().union(*(spool.get(run, set()) for spool in spooled))  # not sent yet
        lost = [number for number in times if number not in frames and number not in kept]
        if any(number <= acknowledged[run] for number in lost):
            told.append(f"acknowledged frames of {run.hex()[:4]} are lost: {lost}")
        if any(abs(time - times[number]) > 1e-5 for number, time in frames.items()):
            told.append(f"frames of {run.hex()[:4]} have other times than were taken")
        if len(lost) > bounds[run.hex()]:
            told.append(f"frames of {run.hex()[:4]} are lost: {lost}, not at most {bounds[run.hex()]}")
        check_times(frames)
    return told


@pytest.mark.slow
def test_a_missing_sync_is_noticed(tmp_path: Path) -> None:
    """A head that acknowledges without syncing its log loses frames, or does not open its data any more."""

    require("C compiler")
    with ExitStack() as stack:
        machines = Machines(tmp_path, stack, random.Random(), "fdatasync")
        machines.disks[0].keeps_unsynced = False
        machines.work(0.0)
        until(lambda: machines.head.get("/status")["frames_received"] > 50, "frames")
        time.sleep(1.5)  # they are acknowledged
        machines.cut_all()
        assert any(note["what"] == "acknowledged" for note in machines.disks[1].notes)
        try:
            told = problems(machines, read_stored(machines.data_dir))
        except LogError as error:
            told = [error.message]
        assert told


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * CUTS)
def test_power_cuts(tmp_path: Path) -> None:
    """No acknowledged frame is lost, doubled or out of order, sessions stay, and what else is lost is named."""

    require("C compiler")
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    with ExitStack() as stack:
        machines = Machines(tmp_path, stack, chance)
        for place in range(CUTS):
            machines.work(chance.uniform(0.0, 2.5))
            what = ("all", "head", "agents")[place % 3]
            if what == "all":
                machines.cut_all()
            elif what == "head":
                machines.cut_head()
            else:
                machines.cut_agents()
            if what != "agents":
                machines.start_head()
            if what != "head":
                machines.start_agents()
            known = {session["name"] for session in machines.head.get("/api/v1/sessions")["sessions"]}
            assert set(machines.sessions) <= known
        machines.work(1.0)
        until(lambda: machines.head.get("/status")["storage"]["history_bytes"], "sealing")
        machines.end()
        assert all(disk.lost_bytes > 0 for disk in machines.disks)
        assert problems(machines, read_stored(machines.data_dir)) == []
