from __future__ import annotations

import gc
import json
import os
import pty
import select
import subprocess
import sys
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml as nv
import pytest

from gpulse.errors import CollectionError
from gpulse.harvest.events import MachineObservation, ObservedUse
from gpulse.harvest.watch.doctor_checks import run_harvest_checks
from gpulse.harvest.watch.gpu_contexts import find_gpus
from gpulse.harvest.watch.watcher import Watcher
from gpulse.sources.nvml.gpu_processes import GpuProcessReader
from gpulse.sources.nvml.read_timing import DriverTimeouts
from gpulse.sources.procfs import Roots
from tests.fakes.nvml import FakeNvml
from tests.integration.cluster import until
from tests.integration.hands import IS_ROOT, NOBODY, hand, start_ticks
from tests.integration.opened import open_to_all

IMPATIENT = DriverTimeouts(start=2.0, call=1.0, survey=0.05, retry=0.0)
GIB = 1 << 30
needs_root = pytest.mark.skipif(not IS_ROOT, reason="needs root, to look into everything")


class Scene:
    """Two GPUs with device files of their own, and somebody who looks at them."""

    def __init__(self, fake: FakeNvml, root: Path) -> None:
        fake.add(1)
        self.files = [root / "dev" / "nvidia0", root / "dev" / "nvidia1"]
        self.files[0].parent.mkdir()
        for file in self.files:
            file.touch()
        self.roots = Roots(dev=str(root / "dev"), run=str(root / "run"))
        self.gpus = find_gpus()
        self.ours: set[int] = set()

    @contextmanager
    def watcher(self, *, people: bool = False, inotify: bool = True) -> Iterator[Watcher]:
        """The eyes, closed afterwards."""
        watcher = Watcher(
            self.gpus,
            is_ours=self.ours.__contains__,
            roots=self.roots,
            people=people,
            inotify=inotify,
            timeouts=IMPATIENT,
        )
        try:
            yield watcher
        finally:
            watcher.close()


@pytest.fixture
def scene(fake_nvml: FakeNvml, tmp_path: Path) -> Scene:
    """Two GPUs."""
    return Scene(fake_nvml, tmp_path)


def look(watcher: Watcher) -> dict[int, ObservedUse]:
    """A whole look."""
    return dict(watcher.look(time.time()).uses)


def glances(watcher: Watcher, seconds: float) -> Iterator[MachineObservation]:
    """What is seen by glances, for so long."""
    assert watcher.descriptor is not None
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([watcher.descriptor], [], [], left)[0] and (seen := watcher.glance(time.time())):
            yield seen


def glance_until(
    watcher: Watcher, condition: Callable[[MachineObservation], bool], seconds: float = 60.0
) -> MachineObservation:
    """The first glance that is as it should be."""
    for seen in glances(watcher, seconds):
        if condition(seen):
            return seen
    raise AssertionError("it was not seen")


def held_by(seen: MachineObservation, index: int, pid: int) -> bool:
    """True when this process has this GPU open."""
    return index in seen.uses and pid in {holder.pid for holder in seen.uses[index].holders}


def pids(use: ObservedUse) -> list[int]:
    """Who holds a GPU."""
    return [holder.pid for holder in use.holders]


def test_a_holder_is_seen_with_who_it_is(scene: Scene) -> None:
    """By its program, its user and its descriptors, on the GPU that it has open and on no other."""

    with hand() as other, scene.watcher() as watcher:
        descriptors = {other.open(scene.files[1]), other.open(scene.files[1])}
        uses = look(watcher)
        (holder,) = uses[1].holders

    program = os.path.basename(os.path.realpath(sys.executable))
    assert () == uses[0].holders
    assert (other.pid, False, frozenset(descriptors)) == (holder.pid, holder.working, holder.files)
    assert program in holder.names
    assert os.path.basename(sys.executable) in holder.names
    assert ("root" if IS_ROOT else holder.user) == holder.user


def test_what_ended_or_was_closed_holds_nothing(scene: Scene) -> None:
    """A look tells what is, not what was."""

    with scene.watcher() as watcher:
        with hand() as first, hand() as second:
            first.open(scene.files[0])
            descriptor = second.open(scene.files[0])
            both = look(watcher)
            second.close(descriptor)
            one = look(watcher)
            alive = start_ticks(first.pid)
        none = look(watcher)

    assert {first.pid, second.pid} == set(pids(both[0]))
    assert [(first.pid, alive)] == [(holder.pid, holder.start_ticks) for holder in one[0].holders]
    assert [] == pids(none[0])


def test_what_is_ours_is_no_holder(scene: Scene, fake_nvml: FakeNvml) -> None:
    """Neither our programs nor this process, whether by descriptor or by context."""

    with hand() as own, scene.watcher() as watcher, scene.files[0].open() as _:
        scene.ours.add(own.pid)
        own.open(scene.files[0])
        fake_nvml.add_process(0, own.pid, 2 * GIB)
        uses = look(watcher)

    assert () == uses[0].holders


def test_a_context_makes_a_holder_a_worker(scene: Scene, fake_nvml: FakeNvml) -> None:
    """Also where no descriptor is seen; memory that none of the listed has is told apart."""
    fake_nvml.gpu(0).memory_used = 7 * GIB
    fake_nvml.gpu(0).util_gpu = 25

    with hand() as opener, hand() as worker, scene.watcher() as watcher:
        opener.open(scene.files[0])
        fake_nvml.add_process(0, opener.pid, 2 * GIB)
        fake_nvml.add_process(0, worker.pid, 4 * GIB)
        use = look(watcher)[0]

    assert {(opener.pid, True, 1), (worker.pid, True, 0)} == {
        (holder.pid, holder.working, len(holder.files)) for holder in use.holders
    }
    assert (0.25, GIB, None) == (use.utilization_ratio, use.memory_bytes, use.unknown)


def test_memory_that_the_driver_does_not_tell_is_unknown(scene: Scene, fake_nvml: FakeNvml) -> None:
    """It is not nobody's, and not zero."""

    with hand() as worker, scene.watcher() as watcher:
        fake_nvml.add_process(0, worker.pid, None)
        use = look(watcher)[0]

    assert ([worker.pid], None) == (pids(use), use.memory_bytes)


def test_a_pid_that_the_driver_still_lists_is_gone(scene: Scene, fake_nvml: FakeNvml) -> None:
    """A process that ended a moment ago holds nothing."""
    with hand() as ended:
        fake_nvml.add_process(0, ended.pid, GIB)

    with scene.watcher() as watcher:
        assert [] == pids(look(watcher)[0])


def test_somebody_on_a_mig_instance_holds_the_gpu(scene: Scene, fake_nvml: FakeNvml) -> None:
    """The instance's list counts as the GPU's."""
    fake_nvml.add_mig(0, gpu_instance=3)

    with hand() as worker, scene.watcher() as watcher:
        fake_nvml.add_process(0, worker.pid, GIB, gpu_instance=3, compute_instance=0)
        uses = look(watcher)

    assert [(worker.pid, True)] == [(holder.pid, holder.working) for holder in uses[0].holders]
    assert [] == pids(uses[1])


@pytest.mark.parametrize(
    ("function", "code", "unknown"),
    [
        ("nvmlDeviceGetMigMode", nv.NVML_ERROR_UNKNOWN, True),
        ("nvmlDeviceGetMigMode", nv.NVML_ERROR_NOT_SUPPORTED, False),
        ("nvmlDeviceGetMaxMigDeviceCount", nv.NVML_ERROR_UNKNOWN, True),
        ("nvmlDeviceGetMigDeviceHandleByIndex", nv.NVML_ERROR_NO_PERMISSION, True),
        ("nvmlDeviceGetMigDeviceHandleByIndex", nv.NVML_ERROR_NOT_FOUND, False),
        ("nvmlDeviceGetComputeRunningProcesses", nv.NVML_ERROR_NOT_SUPPORTED, True),
        ("nvmlDeviceGetComputeRunningProcesses", nv.NVML_ERROR_INVALID_ARGUMENT, False),
    ],
)
def test_a_mig_instance_that_does_not_tell_makes_the_gpu_unknown(
    scene: Scene, fake_nvml: FakeNvml, function: str, code: int, unknown: bool
) -> None:
    """One that is not there, or was just destroyed, has nobody on it."""
    fake_nvml.add_mig(0, gpu_instance=3)
    fake_nvml.fail(function, 0, code, times=1)

    with scene.watcher() as watcher:
        first, second = look(watcher), look(watcher)

    assert [unknown, False] == [uses[0].unknown is not None for uses in (first, second)]
    assert first[1].unknown is None


def test_of_instances_that_come_and_go_nothing_is_kept(scene: Scene, fake_nvml: FakeNvml) -> None:
    """However many there were."""
    instance = fake_nvml.add_mig(0, gpu_instance=3)

    with scene.watcher() as watcher:
        for number in range(5):
            instance.uuid = f"MIG-{number}".encode()
            look(watcher)
        until(lambda: readers() == 2, "one reader of each GPU")


def readers() -> int:
    """Return how many there are that somebody still holds; a thread that has just ended may hold one for a moment."""
    gc.collect()
    return sum(isinstance(kept, GpuProcessReader) for kept in gc.get_objects())


@needs_root
@pytest.mark.requires("util-linux")
def test_root_sees_the_processes_of_other_users(scene: Scene, tmp_path: Path) -> None:
    """With their names."""
    _open_to_all(tmp_path, *scene.files)

    with hand(*NOBODY) as other, scene.watcher() as watcher:
        other.open(scene.files[0])
        (holder,) = look(watcher)[0].holders
        hidden = watcher.hidden

    assert (other.pid, "nobody") == (holder.pid, holder.user)
    assert hidden is None


def test_an_open_is_seen_at_once(scene: Scene) -> None:
    """By a glance, which tells of that GPU alone."""

    with hand() as other, scene.watcher() as watcher:
        look(watcher)
        list(glances(watcher, 0.05))
        descriptor = other.open(scene.files[1])
        seen = glance_until(watcher, lambda seen: 1 in seen.uses)

    assert {1} == seen.uses.keys()
    assert seen.people is None
    assert [(other.pid, frozenset({descriptor}))] == [
        (holder.pid, holder.files) for holder in seen.uses[1].holders
    ]


def test_opening_again_is_reported_again(scene: Scene) -> None:
    """A holder that is known opens the GPU once more: its descriptors are others."""

    with hand() as other, scene.watcher() as watcher:
        first = other.open(scene.files[0])
        look(watcher)
        second = other.open(scene.files[0])
        seen = glance_until(watcher, lambda seen: held_by(seen, 0, other.pid))

    assert {first, second} == seen.uses[0].holders[0].files


def test_our_own_opens_are_nothing_of_interest(scene: Scene) -> None:
    """However many there are."""

    with hand() as own, scene.watcher() as watcher:
        scene.ours.add(own.pid)
        look(watcher)
        for _ in range(3):
            own.open(scene.files[0])
        seen = list(glances(watcher, 0.3))

    assert [] == seen


@needs_root
def test_opened_and_closed_before_anybody_looked_is_nothing(scene: Scene) -> None:
    """Where nothing is hidden, an open without a holder was somebody's who is gone."""

    with hand() as other, scene.watcher() as watcher:
        look(watcher)
        other.close(other.open(scene.files[0]))
        seen = list(glances(watcher, 0.3))

    assert [] == seen


def test_a_descriptor_that_becomes_a_gpu_is_seen(scene: Scene, tmp_path: Path) -> None:
    """Neither the number of descriptors nor their names tell of it, only the event does."""
    plain = tmp_path / "plain"
    plain.touch()

    with hand() as other, scene.watcher() as watcher:
        descriptor = other.open(plain)
        spare = other.open(plain)
        look(watcher)
        other.close(spare)
        other.close(descriptor)
        assert descriptor == other.open(scene.files[0])
        assert spare == other.open(plain)
        seen = glance_until(watcher, lambda seen: held_by(seen, 0, other.pid))

    assert descriptor in seen.uses[0].holders[0].files


def test_an_inherited_descriptor_is_seen_at_the_next_look(scene: Scene) -> None:
    """A fork opens nothing, so that no event tells of it."""

    with hand() as other, scene.watcher() as watcher:
        other.open(scene.files[0])
        look(watcher)
        child = int(other.tell("fork"))
        use = look(watcher)[0]

    assert {other.pid, child} == set(pids(use))


def test_a_device_file_that_comes_back_is_watched_again(scene: Scene) -> None:
    """As after a reload of the driver; who holds the old one still holds the GPU."""

    with hand() as old, hand() as new, scene.watcher() as watcher:
        old.open(scene.files[0])
        look(watcher)
        scene.files[0].unlink()
        uses = look(watcher)
        missing = watcher.inotify_problem
        scene.files[0].touch()
        look(watcher)
        new.open(scene.files[0])
        seen = glance_until(watcher, lambda seen: held_by(seen, 0, new.pid))

    assert [old.pid] == pids(uses[0])
    assert missing is not None
    assert str(scene.files[0]) in missing
    assert {old.pid, new.pid} == set(pids(seen.uses[0]))


def test_an_overflow_makes_it_look_at_every_gpu(scene: Scene) -> None:
    """The kernel forgot what was opened: it can be anything."""
    with open("/proc/sys/fs/inotify/max_queued_events", encoding="ascii") as file:
        room = int(file.read())
    if room > 1 << 16:
        pytest.skip("the queue is too long to be filled quickly")

    with hand() as busy, hand() as other, scene.watcher() as watcher:
        look(watcher)
        busy.tell("often", scene.files[0], room)
        other.open(scene.files[1])
        glance_until(watcher, lambda seen: held_by(seen, 1, other.pid))


def test_a_storm_of_opens_is_looked_into_now_and_then(scene: Scene, fake_nvml: FakeNvml) -> None:
    """The descriptor is not readable all the time, and somebody who opens the GPU meanwhile is seen."""
    rounds = 0

    with hand() as own, hand() as other, scene.watcher() as watcher:
        scene.ours.add(own.pid)
        look(watcher)
        fake_nvml.reset_calls()
        began = time.monotonic()
        while time.monotonic() - began < 0.4:
            own.close(own.open(scene.files[0]))
            rounds += watcher.glance(time.time()) is not None
        took = time.monotonic() - began
        asked = fake_nvml.calls("nvmlDeviceGetComputeRunningProcesses", 0)
        other.open(scene.files[0])
        glance_until(watcher, lambda seen: held_by(seen, 0, other.pid))

    assert (0, True) == (rounds, 1 <= asked <= took / 0.02 + 1)


def test_without_inotify_everything_waits_for_the_next_look(scene: Scene) -> None:
    """It says so, and the look sees all."""

    with hand() as other, scene.watcher(inotify=False) as watcher:
        look(watcher)
        other.open(scene.files[0])
        seen = watcher.glance(time.time())
        uses = look(watcher)

    assert (None, None) == (watcher.descriptor, seen)
    assert watcher.inotify_problem is not None
    assert [other.pid] == pids(uses[0])


def test_without_inotify_a_descriptor_that_becomes_a_gpu_is_seen_soon(scene: Scene, tmp_path: Path) -> None:
    """Neither the number of descriptors nor their names tell of it."""
    plain = tmp_path / "plain"
    plain.touch()

    with hand() as other, scene.watcher(inotify=False) as watcher:
        descriptor = other.open(plain)
        look(watcher)
        other.close(descriptor)
        assert descriptor == other.open(scene.files[0])
        looks = [pids(look(watcher)[0]) for _ in range(3)]

    assert [other.pid] in looks


def test_a_driver_that_goes_leaves_everything_unknown(scene: Scene, fake_nvml: FakeNvml) -> None:
    """And is asked again when it is back."""

    with hand() as other, scene.watcher() as watcher:
        other.open(scene.files[0])
        before = look(watcher)
        fake_nvml.unload_driver()
        gone = look(watcher)
        fake_nvml.load_driver()
        fake_nvml.reset_calls()
        back = look(watcher)
        opened = fake_nvml.calls("nvmlDeviceGetHandleByUUID")

    assert [None, None] == [before[index].unknown for index in range(2)]
    assert [True, True] == [gone[index].unknown is not None for index in range(2)]
    assert [None, None] == [back[index].unknown for index in range(2)]
    assert [other.pid] == pids(gone[0]) == pids(back[0])
    assert 2 == opened, "what was opened before is of no use to the new driver"


def test_a_gpu_that_hangs_is_unknown_and_holds_up_nobody(scene: Scene, fake_nvml: FakeNvml) -> None:
    """The other one is told of at once, and the sick one when it is given up."""

    with scene.watcher() as watcher:
        look(watcher)
        fake_nvml.hang("nvmlDeviceGetComputeRunningProcesses", 0)
        first = look(watcher)
        if first[0].unknown is None:
            glance_until(watcher, lambda seen: 0 in seen.uses and seen.uses[0].unknown is not None)
        later = look(watcher)
        fake_nvml.release_hangs()
        deadline = time.monotonic() + 60
        while look(watcher)[0].unknown is not None:
            assert time.monotonic() < deadline

    assert first[1].unknown is None
    assert [True, False] == [later[index].unknown is not None for index in range(2)]


def test_a_lost_gpu_is_unknown_and_the_other_is_not(scene: Scene, fake_nvml: FakeNvml) -> None:
    """It may come back."""

    with scene.watcher() as watcher:
        fake_nvml.lose(1)
        lost = look(watcher)
        fake_nvml.restore(1)
        back = look(watcher)

    assert [False, True] == [lost[index].unknown is not None for index in range(2)]
    assert [None, None] == [back[index].unknown for index in range(2)]


@needs_root
def test_where_the_driver_tells_no_processes_whoever_has_the_gpu_open_counts_for_good(
    scene: Scene, fake_nvml: FakeNvml
) -> None:
    """Where nothing is hidden, descriptors are enough; that somebody does not work there cannot be told."""
    fake_nvml.fail("nvmlDeviceGetComputeRunningProcesses", 0, nv.NVML_ERROR_NOT_SUPPORTED)

    with hand() as other, scene.watcher() as watcher:
        other.open(scene.files[0])
        use = look(watcher)[0]

    assert (None, [(other.pid, True)]) == (use.unknown, [(h.pid, h.working) for h in use.holders])


def test_gpus_are_found_with_their_minor_numbers(fake_nvml: FakeNvml) -> None:
    """The device file need not have the number of the index."""
    fake_nvml.add(1)
    fake_nvml.gpu(1).minor = 5

    found = find_gpus()

    assert [(0, 0), (1, 5)] == [(gpu.index, gpu.minor) for gpu in found]
    assert all(gpu.uuid.startswith("GPU-") and gpu.name for gpu in found)
    assert fake_nvml.inits == fake_nvml.shutdowns


def test_no_driver_is_an_error_with_a_hint(fake_nvml: FakeNvml) -> None:
    """Nothing can be harvested without one."""
    fake_nvml.fail_init(nv.NVML_ERROR_DRIVER_NOT_LOADED)

    with pytest.raises(CollectionError, match="not loaded") as caught:
        find_gpus()

    assert caught.value.hint


@contextmanager
def terminal() -> Iterator[tuple[int, int, str]]:
    """A pseudo terminal: master, slave and its name."""
    master, slave = pty.openpty()
    tty.setraw(slave)
    try:
        yield master, slave, os.ttyname(slave).removeprefix("/dev/")
    finally:
        os.close(master)
        os.close(slave)


def test_somebody_who_opens_a_terminal_is_seen_at_once(scene: Scene) -> None:
    """And somebody who types at one, where that may be watched."""
    (Path(scene.roots.dev) / "pts").symlink_to("/dev/pts")

    with scene.watcher(people=True) as watcher:
        nobody = watcher.look(time.time()).people
        with terminal() as (master, slave, name):
            seen = glance_until(watcher, lambda seen: bool(seen.people))
            list(glances(watcher, 0.05))
            os.write(master, b"x")
            os.read(slave, 1)
            typed = glance_until(watcher, lambda seen: bool(seen.people)) if IS_ROOT else seen
        left = watcher.look(time.time()).people

    mine = [person for person in seen.people or () if person.where == name]
    assert [("terminal", True)] == [
        (p.kind, p.idle_seconds is not None and p.idle_seconds < 30) for p in mine
    ]
    assert name in {person.where for person in typed.people or ()}
    assert {} == seen.uses
    assert nobody is not None
    assert left is not None
    assert name not in {person.where for person in (*nobody, *left)}


def test_a_desktop_is_asked_at_every_look(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the answer: how long somebody has been idle is not known until it came."""
    (Path(scene.roots.dev) / "pts").mkdir()
    sessions = Path(scene.roots.run) / "systemd" / "sessions"
    sessions.mkdir(parents=True)
    (sessions / "c1").write_text("USER=ada\nACTIVE=1\nTYPE=x11\nCLASS=user\nSEAT=seat0\n")
    manager = tmp_path / "bin" / "loginctl"
    manager.parent.mkdir()
    manager.write_text("#!/bin/sh\necho Id=c1\necho IdleHint=no\n")
    manager.chmod(0o755)
    monkeypatch.setenv("PATH", f"{manager.parent}:{os.environ['PATH']}")

    with scene.watcher(people=True) as watcher:
        monkeypatch.setenv("PATH", "/nowhere")  # it is looked for once
        looked = [person.idle_seconds for person in watcher.look(time.time()).people or ()]
        first = glance_until(watcher, lambda seen: seen.people is not None)
        watcher.look(time.time())
        second = glance_until(watcher, lambda seen: seen.people is not None)
        quiet = list(glances(watcher, 0.1))

    assert [None] == looked
    assert [("ada", "seat0", 0.0, "desktop")] == [tuple(person) for person in first.people or ()]
    assert first == second
    assert [] == quiet


def test_people_are_watched_and_left_alone_without_touching_the_rest(
    scene: Scene, fake_nvml: FakeNvml
) -> None:
    """Nobody is looked at between; the driver is not started anew, and an open is seen throughout."""
    (Path(scene.roots.dev) / "pts").symlink_to("/dev/pts")
    people = []

    with scene.watcher() as watcher, hand() as other:
        began = watcher.descriptor
        people.append(watcher.look(time.time()).people)
        for wanted in (True, True, False, False):
            watcher.watch_people(wanted)
            people.append(watcher.look(time.time()).people)
        watcher.watch_people(True)
        with terminal() as (_, _, name):
            came = glance_until(watcher, lambda seen: bool(seen.people))
        watcher.watch_people(False)
        other.open(scene.files[0])
        opened = glance_until(watcher, lambda seen: held_by(seen, 0, other.pid))
        with terminal():
            quiet = list(glances(watcher, 0.1))
        ended = watcher.descriptor

    assert [False, True, True, False, False] == [found is not None for found in people]
    assert name in {person.where for person in came.people or ()}
    assert (None, []) == (opened.people, [seen for seen in quiet if seen.people is not None])
    assert (began, 2) == (ended, fake_nvml.inits), "once to find the GPUs, once to watch them"


_BLIND = """
import json, select, sys, time
from gpulse.harvest.settings import HarvestableGpu
from gpulse.harvest.watch.watcher import Watcher
from gpulse.sources.procfs import Roots
gpus = [HarvestableGpu(*entry) for entry in json.loads(sys.argv[1])]
watcher = Watcher(gpus, is_ours=lambda pid: False, roots=Roots(dev=sys.argv[2]))
def tell(uses):
    found = {i: [u.opened_unseen, [h.pid for h in u.holders], u.unknown] for i, u in uses.items()}
    for i, u in uses.items():
        if u.suspects:
            found[i].append(sorted(name for names in u.suspects for name in names))
    print(json.dumps([found, watcher.hidden]), flush=True)
tell(watcher.look(time.time()).uses)
for line in sys.stdin:
    if line.strip() == "look":
        tell(watcher.look(time.time()).uses)
        continue
    found, deadline = {}, time.monotonic() + float(line)
    while (left := deadline - time.monotonic()) > 0 and not found:
        if select.select([watcher.descriptor], [], [], left)[0] and (seen := watcher.glance(time.time())):
            found = seen.uses
    tell(found)
watcher.close()
"""


class Blind:
    """Somebody who looks with the rights of nobody, or from inside a container."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self.first = self._answer()

    def tell(self, line: object) -> tuple[dict[str, list[object]], str | None]:
        """Have it look, or glance for so many seconds."""
        assert self._child.stdin is not None
        self._child.stdin.write(f"{line}\n")
        self._child.stdin.flush()
        return self._answer()

    def _answer(self) -> tuple[dict[str, list[object]], str | None]:
        assert self._child.stdout is not None
        uses, hidden = json.loads(self._child.stdout.readline())
        return uses, hidden


@contextmanager
def blind(scene: Scene, fake: FakeNvml, library: Path, *prefix: str) -> Iterator[Blind]:
    """A watcher in a process of its own."""
    gpus = json.dumps([list(gpu) for gpu in scene.gpus])
    child = subprocess.Popen(
        [*prefix, sys.executable, "-c", _BLIND, gpus, scene.roots.dev],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **fake.env(library)},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield Blind(child)
    finally:
        child.stdin.close()
        child.wait(60)
        child.stdout.close()


def _open_to_all(root: Path, *files: Path) -> None:
    open_to_all(root)
    for file in files:
        file.chmod(0o666)


_CONTAINED = """
mount --bind "$1" "$2" && echo ready && read go && exec 3<"$2" && echo open && read stop
"""


@needs_root
@pytest.mark.requires("util-linux")
def test_a_container_with_a_device_file_of_its_own_is_seen_at_a_look(scene: Scene, tmp_path: Path) -> None:
    """Nothing tells of its opens; while all others are left alone, it is read again."""
    (tmp_path / "own").touch()
    command = ["unshare", "--mount", "sh", "-c", _CONTAINED, "sh", str(tmp_path / "own"), str(scene.files[1])]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child,
        scene.watcher() as watcher,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        assert "ready\n" == child.stdout.readline()
        before = [watcher.look(time.time()).uses[1].holders for _ in range(3)]
        child.stdin.write("go\n")
        child.stdin.flush()
        assert "open\n" == child.stdout.readline()
        told = [seen for seen in glances(watcher, 0.2) if 1 in seen.uses]
        seen = watcher.look(time.time())
        child.communicate("stop\n")

    assert ([(), (), ()], []) == (before, told)
    assert held_by(seen, 1, child.pid)


@needs_root
@pytest.mark.requires("util-linux")
def test_an_open_by_somebody_who_cannot_be_seen_is_reported(
    scene: Scene, fake_nvml: FakeNvml, nvml_library: Path, tmp_path: Path
) -> None:
    """Whoever may not look into others' processes learns of the open, not of the opener, until the driver lists it."""
    _open_to_all(tmp_path, *scene.files, fake_nvml.path)
    _open_to_all(nvml_library.parent)

    with hand() as other, blind(scene, fake_nvml, nvml_library, *NOBODY) as eyes:
        other.open(scene.files[1])
        opened, hidden = eyes.tell(3)
        fake_nvml.add_process(0, other.pid, GIB)
        looked, _ = eyes.tell("look")

    assert ({"0": [False, [], None], "1": [False, [], None]}, True) == (eyes.first[0], hidden is not None)
    assert [True, [], None] == opened["1"][:3]
    assert {"0": [False, [other.pid], None], "1": [False, [], None]} == looked


@needs_root
@pytest.mark.requires("util-linux")
def test_what_was_started_just_before_an_open_is_reported(
    scene: Scene, fake_nvml: FakeNvml, nvml_library: Path, tmp_path: Path
) -> None:
    """Names can be seen where descriptors cannot; of those that have been there for longer nobody is suspected."""
    _open_to_all(tmp_path, *scene.files, fake_nvml.path)
    _open_to_all(nvml_library.parent)
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\nexec 3<"$1"\nread stop\n', encoding="utf-8")
    smi.chmod(0o755)

    with (
        hand(),
        blind(scene, fake_nvml, nvml_library, *NOBODY) as eyes,
        subprocess.Popen([smi, scene.files[1]], stdin=subprocess.PIPE) as process,
    ):
        opened, _ = eyes.tell(3)
        process.communicate(b"\n")

    _, _, _, suspects = opened["1"]
    assert isinstance(suspects, list)
    assert "nvidia-smi" in suspects


@needs_root
@pytest.mark.requires("util-linux")
def test_where_neither_opens_nor_holders_are_seen_nothing_is_known(
    scene: Scene, fake_nvml: FakeNvml, nvml_library: Path, tmp_path: Path
) -> None:
    """A device file that may not be watched, of which others may have opened what cannot be looked into."""
    _open_to_all(tmp_path, *scene.files, fake_nvml.path)
    _open_to_all(nvml_library.parent)
    scene.files[1].chmod(0)

    with blind(scene, fake_nvml, nvml_library, *NOBODY) as eyes:
        pass

    assert {
        "0": [False, [], None],
        "1": [False, [], "harvest cannot see who opens the GPU or has it open"],
    } == (eyes.first[0])


@needs_root
@pytest.mark.requires("util-linux")
def test_in_a_container_the_drivers_pids_are_others(
    scene: Scene, fake_nvml: FakeNvml, nvml_library: Path
) -> None:
    """Somebody outside who works on a GPU holds it, even if a process here has the same number."""
    own_number = 1

    if subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False).returncode:
        pytest.skip("namespaces may not be made here")
    with blind(scene, fake_nvml, nvml_library, "unshare", "--pid", "--fork", "--mount-proc") as eyes:
        fake_nvml.add_process(0, own_number, GIB)
        looked, hidden = eyes.tell("look")

    assert (True, "container") == (
        hidden is not None,
        "container" if "container" in (hidden or "") else hidden,
    )
    assert {"0": [False, [own_number], None], "1": [False, [], None]} == looked


def test_doctor_says_what_works_and_who_is_there(scene: Scene, fake_nvml: FakeNvml) -> None:
    """From the driver to the holders of each GPU."""
    (Path(scene.roots.dev) / "pts").mkdir()
    fake_nvml.add_mig(1, gpu_instance=3)

    with hand() as other:
        other.open(scene.files[0])
        checks = {check.topic: check for check in run_harvest_checks(time.time(), scene.roots, IMPATIENT)}

    assert {"driver": "ok", "MIG": "limited", "device files": "ok", "inotify": "ok", "logind": "limited"} == {
        topic: checks[topic].status for topic in ("driver", "MIG", "device files", "inotify", "logind")
    }
    assert f"pid {other.pid}" in checks["gpu 0"].detail
    assert ("ok" if IS_ROOT else "limited") == checks["processes"].status
    assert "not in use" == checks["gpu 1"].detail


def test_doctor_without_a_driver_is_broken(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """The rest is still told."""
    fake_nvml.fail_init(nv.NVML_ERROR_DRIVER_NOT_LOADED)

    checks = {check.topic: check for check in run_harvest_checks(time.time(), Roots(dev=str(tmp_path)))}

    assert ("broken", "limited") == (checks["driver"].status, checks["people"].status)
    assert checks["driver"].advice
