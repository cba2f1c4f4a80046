from __future__ import annotations

import os
import pwd
import select
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulse.harvest.events import GpuHolder
from gpulse.harvest.watch.device_opens import (
    HIDDEN_RECHECK_SECONDS,
    VISIBLE_RECHECK_SECONDS,
    DeviceEvents,
    DeviceWatch,
    UnexplainedOpens,
)
from gpulse.harvest.watch.gpu_contexts import GpuLoad
from gpulse.harvest.watch.gpu_holders import DescriptorScanner, HolderIdentities, ScanDepth, UseAnalyzer
from gpulse.harvest.watch.inotify import Wakeup
from gpulse.model.process import GpuProcess
from gpulse.sources import process_owners
from gpulse.sources.procfs import Roots
from tests.unit.trees import grow, pid_stat

T = 1000.0
GIB = 1 << 30


# --- opens ---


@contextmanager
def watching(root: Path, count: int = 2) -> Iterator[tuple[DeviceWatch, list[Path]]]:
    """Device files that are watched."""
    files = [root / f"nvidia{minor}" for minor in range(count)]
    for file in files:
        file.touch()
    device_watch = DeviceWatch(dict(enumerate(map(str, files))))
    device_watch.refresh()
    with closing(device_watch):
        yield device_watch, files


def test_opens_are_reported_by_file_and_by_what_came_last(tmp_path: Path) -> None:
    """An open that is followed by a close is told apart from one that is not."""

    with watching(tmp_path, 3) as (device_watch, files):
        with files[0].open():
            pass
        with files[1].open():
            pass
        with files[1].open(), files[2].open():
            during = device_watch.read()
        after = device_watch.read()

    assert DeviceEvents({0: False, 1: True, 2: True}, frozenset({0}), shut=frozenset({0, 1})) == during
    assert DeviceEvents({}, frozenset({1, 2}), shut=frozenset({1, 2})) == after


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """The others are watched."""

    with watching(tmp_path) as (device_watch, files):
        files[0].unlink()
        device_watch.refresh()
        trouble = device_watch.trouble
        with files[1].open():
            seen = device_watch.read()

    assert trouble is not None
    assert str(files[0]) in trouble
    assert {1: True} == seen.minors


def test_the_bell_rings_for_files_and_for_the_time() -> None:
    """Each wakes the one descriptor, and a muted one does not."""
    reader, writer = os.pipe()
    os.write(writer, b"x")

    with closing(Wakeup()) as wakeup:
        wakeup.add(reader)
        loud = (select.select([wakeup.descriptor], [], [], 0)[0], wakeup.woken())
        wakeup.mute(reader)
        muted = select.select([wakeup.descriptor], [], [], 0)[0]
        wakeup.wake_in(0.001)
        timed = (select.select([wakeup.descriptor], [], [], 5)[0], wakeup.woken())
        quiet = select.select([wakeup.descriptor], [], [], 0)[0]
        wakeup.unmute(reader)
        again = wakeup.woken()
    os.close(reader)
    os.close(writer)

    assert ([bell_descriptor := loud[0][0]], {reader}) == loud
    assert [] == muted
    assert ([bell_descriptor], set()) == timed
    assert ([], {reader}) == (quiet, again)


# --- descriptors ---


class Tree:
    """A small /proc whose processes have descriptors."""

    def __init__(self, root: Path) -> None:
        self.roots = grow(root, {"proc/1/stat": pid_stat(1), "dev/nvidia0": "", "dev/nvidia1": ""})
        self._root = root
        (root / "proc" / "self" / "fd").mkdir(parents=True)
        (root / "proc" / "1" / "fd").mkdir(parents=True)

    def point(self, pid: int, descriptor: int, target: str) -> None:
        """Have a process's descriptor lead somewhere."""
        grow(self._root, {f"proc/{pid}/stat": pid_stat(pid)}, {f"proc/{pid}/fd/{descriptor}": target})

    def gpu(self, pid: int, descriptor: int, minor: int = 0, suffix: str = "") -> None:
        """Have it lead to a GPU."""
        self.point(pid, descriptor, f"{self.roots.dev}/nvidia{minor}{suffix}")

    def scanner(self, *minors: int) -> DescriptorScanner:
        """Who reads them."""
        return DescriptorScanner(self.roots, minors or (0, 1))


def test_only_device_files_of_the_gpus_count(tmp_path: Path) -> None:
    """By the whole name, also of one that was deleted since; no other file of the driver, none of that name elsewhere."""
    tree = Tree(tmp_path)
    tree.gpu(10, 3)
    tree.gpu(10, 4, 1, " (deleted)")
    tree.point(11, 3, f"{tree.roots.dev}/nvidiactl")
    tree.point(11, 4, f"{tree.roots.dev}/nvidia-uvm")
    tree.point(11, 5, f"{tmp_path}/home/nvidia0")
    tree.gpu(12, 3, 7)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "nvidia0").touch()

    assert {0: {10: frozenset({3})}, 1: {10: frozenset({4})}} == tree.scanner().scan("quick")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make device files")
def test_a_device_file_below_another_root_counts(tmp_path: Path) -> None:
    """A chroot's or a container's /dev may be anywhere; the numbers of the file say what it is."""
    tree = Tree(tmp_path)
    elsewhere = tmp_path / "nvidia9"
    try:
        os.mknod(elsewhere, 0o600 | 0o020000, os.makedev(195, 1))
    except OSError:
        pytest.skip("device files may not be made here")
    tree.point(10, 3, str(elsewhere))

    assert {0: {}, 1: {10: frozenset({3})}} == tree.scanner().scan("quick")


@pytest.mark.parametrize(("depth", "expected"), [("listed", False), ("whole", True)])
def test_a_descriptor_that_leads_to_another_file_is_found_by_reading_all(
    tmp_path: Path, depth: ScanDepth, expected: bool
) -> None:
    """A list that is the same is not read again at once."""
    tree = Tree(tmp_path)
    tree.point(10, 3, "/dev/null")
    scanner = tree.scanner()
    scanner.scan("whole")
    tree.gpu(10, 3)

    assert expected == (10 in scanner.scan(depth)[0])


def test_a_holder_is_read_again_each_time(tmp_path: Path) -> None:
    """Its number may have become somebody else's, with as many descriptors."""
    tree = Tree(tmp_path)
    tree.gpu(10, 3)
    scanner = tree.scanner()
    before = scanner.scan("whole")
    tree.point(10, 3, "/dev/null")

    assert (True, False) == (10 in before[0], 10 in scanner.scan("listed", turn=False)[0])


def test_every_process_has_its_turn(tmp_path: Path) -> None:
    """What no count and no list tells is found after a while all the same."""
    tree = Tree(tmp_path)
    tree.point(10, 3, "/dev/null")
    scanner = tree.scanner()
    scanner.scan("whole")
    tree.gpu(10, 3)

    assert any(10 in scanner.scan("listed")[0] for _ in range(30))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give processes to others")
@pytest.mark.parametrize(("uid", "driven", "looks"), [(1000, False, 1), (0, True, 1), (0, False, 3)])
def test_where_nothing_tells_of_opens_those_who_may_come_to_a_gpu_are_read_each_time(
    tmp_path: Path, uid: int, driven: bool, looks: int
) -> None:
    """Users' processes, and whoever has the driver open; the others soon."""
    tree = Tree(tmp_path)
    for descriptor in range(3, 6):
        tree.point(10, descriptor, "/dev/null")
    if driven:
        tree.point(10, 6, f"{tree.roots.dev}/nvidiactl")
    os.chown(tmp_path / "proc" / "10" / "fd", uid, -1)
    needed: list[int] = []
    for _ in range(3):
        tree.point(10, 3, "/dev/null")
        scanner = tree.scanner()
        scanner.scan("whole")
        for _ in needed:
            scanner.scan("polled")
        tree.gpu(10, 3)
        needed.append(next(look for look in range(1, 31) if 10 in scanner.scan("polled")[0]))

    assert looks == max(needed)


def test_of_many_descriptors_the_new_ones_are_read(tmp_path: Path) -> None:
    """A server with thousands of connections costs no thousands of reads; what it has open stays known."""
    tree = Tree(tmp_path)
    tree.gpu(10, 3)
    for descriptor in range(4, 300):
        tree.point(10, descriptor, "/dev/null")
    tree.point(11, 1, "/dev/null")
    for descriptor in range(2, 300):
        tree.point(11, descriptor, "/dev/null")
    scanner = tree.scanner()
    scanner.scan("whole")
    tree.gpu(11, 300)

    assert {10: frozenset({3}), 11: frozenset({300})} == scanner.scan("listed")[0]


def test_a_process_is_known_by_its_program_and_its_user(tmp_path: Path) -> None:
    """A number that is used again is somebody else; a name that changes is read anew."""
    roots = grow(
        tmp_path,
        {
            "proc/10/stat": pid_stat(10, comm=b"python3", start=5),
            "proc/10/cmdline": b"/usr/bin/python\0train.py\0",
            "proc/10/status": b"Uid:\t0\t0\t0\t0\n",
        },
        {"proc/10/exe": "/opt/bin/python3.11 (deleted)"},
    )
    identities = HolderIdentities(roots)

    first = identities.of(10)
    grow(tmp_path, {"proc/10/stat": pid_stat(10, comm=b"bash", start=5), "proc/10/cmdline": b"-bash\0"})
    renamed = identities.of(10)
    grow(tmp_path, {"proc/10/stat": pid_stat(10, comm=b"bash", start=6)})
    another = identities.of(10)

    assert first is not None
    assert (5, ("python3", "python3.11", "python"), "root") == first
    assert renamed is not None
    assert "bash" in renamed.names
    assert another is not None
    assert 6 == another.start_ticks
    assert identities.of(11) is None


def test_a_user_without_a_name_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory was away for a while: its answer is taken when it is back, and kept from then on."""
    uid, clock, asked = 4_000_000, [T], []
    names: dict[int, str] = {}

    def look_up(wanted: int) -> SimpleNamespace:
        asked.append(clock[0] - T)
        return SimpleNamespace(pw_name=names[wanted])

    monkeypatch.setattr(pwd, "getpwuid", look_up)
    monkeypatch.setattr(process_owners, "monotonic", lambda: clock[0])
    status = f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n".encode()
    identities = HolderIdentities(grow(tmp_path, {"proc/10/stat": pid_stat(10), "proc/10/status": status}))
    told = []
    for clock[0] in (T, T + 29, T + 31, T + 62):
        identity = identities.of(10)
        told.append(None if identity is None else identity.user)
        names[uid] = "ada"

    assert [str(uid), str(uid), "ada", "ada"] == told
    assert [0, 31] == asked


# --- opens without an opener ---


def test_an_open_that_is_explained_is_no_doubt() -> None:
    """Somebody in sight has a new descriptor, seen a moment before or after the event."""
    unexplained = UnexplainedOpens()
    unexplained.note_visible(0, T, ours=False)
    unexplained.note_events({0: True}, (), T + 0.1, hidden=True)
    unexplained.note_events({1: True}, (), T, hidden=True)
    unexplained.note_visible(1, T + 0.01, ours=False)

    assert unexplained.next(hidden=True) is None


def test_where_processes_are_hidden_an_unexplained_open_is_reported_once() -> None:
    """After a second look, and then looked into until the driver may know more."""
    unexplained = UnexplainedOpens()
    unexplained.note_events({0: True}, (), T, hidden=True)
    told = []
    for _ in HIDDEN_RECHECK_SECONDS:
        at = unexplained.next(hidden=True)
        assert at is not None
        told.append(unexplained.advance(unexplained.due(at, hidden=True), at, hidden=True))

    assert [{0}, *([set()] * (len(HIDDEN_RECHECK_SECONDS) - 1))] == told
    assert unexplained.next(hidden=True) is None


def test_where_nothing_is_hidden_an_unexplained_open_is_never_reported() -> None:
    """It is only looked into, once with every descriptor read."""
    unexplained = UnexplainedOpens()
    unexplained.note_events({0: True}, (), T, hidden=False)
    deep = []
    for _ in VISIBLE_RECHECK_SECONDS:
        at = unexplained.next(hidden=False)
        assert at is not None
        deep.append(unexplained.is_deep([0], hidden=False))
        assert set() == unexplained.advance([0], at, hidden=False)

    assert 1 == sum(deep)
    assert unexplained.next(hidden=False) is None


@pytest.mark.parametrize("hidden", [True, False])
def test_an_open_that_was_closed_is_not_reported(hidden: bool) -> None:
    """Whether the close came with it or after it."""
    unexplained = UnexplainedOpens()
    unexplained.note_events({0: False, 1: True}, {0}, T, hidden=hidden)
    unexplained.note_events({}, {1}, T + 0.005, hidden=hidden)

    assert set() == unexplained.advance([0, 1], T + 0.01, hidden=hidden)


def told_at(unexplained: UnexplainedOpens) -> list[float]:
    """When somebody out of sight is told of, until nothing is in doubt."""
    times: list[float] = []
    while (at := unexplained.next(hidden=True)) is not None:
        times.extend(at for _ in unexplained.advance(unexplained.due(at, hidden=True), at, hidden=True))
    return times


def test_while_a_program_of_ours_starts_nobody_is_suspected() -> None:
    """It opens and closes a lot; some seconds later an open is somebody's again."""
    unexplained = UnexplainedOpens()
    unexplained.note_visible(0, T, ours=True)
    unexplained.note_events({0: True}, (), T + 0.5, hidden=True)
    unexplained.note_events({}, (), T + 2.0, hidden=True, shut={1})
    unexplained.note_visible(1, T + 1.5, ours=True)
    unexplained.note_events({1: True}, (), T + 2.6, hidden=True, shut={1})
    early = told_at(unexplained)
    unexplained.note_events({0: True}, (), T + 6.0, hidden=True)

    assert ([], [T + 6.0 + HIDDEN_RECHECK_SECONDS[0]]) == (early, told_at(unexplained))


def test_who_comes_while_a_program_of_ours_starts_is_reported_when_it_has() -> None:
    """An open apart from those of the start is kept in mind; one that was closed again meanwhile is not."""
    unexplained = UnexplainedOpens()
    unexplained.note_visible(0, T, ours=True)
    unexplained.note_visible(1, T, ours=True)
    unexplained.note_events({0: True, 1: True}, (), T + 1.5, hidden=True)
    for _ in HIDDEN_RECHECK_SECONDS:
        unexplained.advance([0, 1], T + 3.5, hidden=True)
    unexplained.note_events({}, {1}, T + 4.0, hidden=True, shut={1})

    assert [T + 5.0] == told_at(unexplained)


def test_whoever_opens_and_closes_all_the_time_is_looked_into_now_and_then() -> None:
    """A monitor out of sight does not keep us busy."""
    unexplained = UnexplainedOpens()
    begun = 0
    for second in range(30):
        unexplained.note_events({0: False}, {0}, T + second, hidden=True)
        begun += unexplained.next(hidden=True) is not None
        for _ in HIDDEN_RECHECK_SECONDS:
            unexplained.advance([0], T + second, hidden=True)

    assert 3 == begun


# --- who uses a GPU ---


class Crowd:
    """Processes with names, some of them ours."""

    def __init__(self, root: Path, *, native: bool = True) -> None:
        pids = range(10, 20)
        roots = grow(root, {f"proc/{pid}/stat": pid_stat(pid, start=pid) for pid in pids})
        self.judge = UseAnalyzer(HolderIdentities(roots), lambda pid: pid < 15, native=native)

    def holders(self, files: set[int], listed: set[int]) -> dict[int, bool]:
        """Who holds the GPU, and whether they work on it."""
        load = GpuLoad(tuple(GpuProcess(pid, "compute", GIB) for pid in sorted(listed)))
        use = self.judge.use(dict.fromkeys(files, frozenset({3})), load, hidden=False)
        return {holder.pid: holder.working for holder in use.holders}


def test_everybody_may_work_on_a_gpu_whose_contexts_are_not_listed(tmp_path: Path) -> None:
    """Somebody who has it open does not stop counting there."""
    use = Crowd(tmp_path).judge.use({10: frozenset({3}), 15: frozenset({3})}, GpuLoad(None), hidden=False)

    assert [(15, True)] == [(holder.pid, holder.working) for holder in use.holders]


def test_holders_are_those_who_have_it_open_or_work_on_it(tmp_path: Path) -> None:
    """Without ours."""
    crowd = Crowd(tmp_path)

    assert {15: False, 16: True, 17: True} == crowd.holders({10, 15, 16}, {11, 16, 17})


@pytest.mark.parametrize(
    ("files", "listed", "expected"),
    [
        (set(), {900}, {900: True}),
        ({10}, {900}, {}),
        ({10, 11}, {900, 901}, {}),
        ({10}, {900, 901}, {900: True, 901: True}),
        ({10, 15}, {900}, {15: False}),
        ({10, 15}, {900, 901}, {15: True}),
        ({10, 15}, {900, 901, 902}, {15: True, 900: True, 901: True, 902: True}),
        ({10}, {12, 900}, {12: True, 900: True}),
        ({10, 16}, {10, 16}, {16: True}),
        ({os.getpid()}, {900}, {900: True}),
    ],
)
def test_in_a_container_contexts_are_distinguished_by_their_number(
    tmp_path: Path, files: set[int], listed: set[int], expected: dict[int, bool]
) -> None:
    """The host's pids mean nothing here: as many as ours are ours, a pid counts as itself when it has the GPU open."""
    assert expected == Crowd(tmp_path, native=False).holders(files, listed)


def test_memory_of_nobody_is_what_the_listed_do_not_have(tmp_path: Path) -> None:
    """And unknown when theirs is."""
    judge = Crowd(tmp_path).judge
    known = [GpuProcess(10, "compute", GIB), GpuProcess(15, "compute", 2 * GIB)]

    def unexplained(used: int | None, *more: GpuProcess) -> int | None:
        return judge.use({}, GpuLoad((*known, *more), memory_bytes=used), hidden=False).memory_bytes

    assert [GIB, 0, None, None] == [
        unexplained(4 * GIB),
        unexplained(2 * GIB),
        unexplained(None),
        unexplained(4 * GIB, GpuProcess(16, "compute", None)),
    ]


def test_somebody_whom_proc_hides_is_a_holder_all_the_same(tmp_path: Path) -> None:
    """The driver lists a living process that is not in /proc; a dead one it only still lists."""
    judge = UseAnalyzer(HolderIdentities(grow(tmp_path, {})), lambda _: False, native=True)
    parent, dead = os.getppid(), 1 << 30
    use = judge.use(
        {}, GpuLoad((GpuProcess(parent, "compute", GIB), GpuProcess(dead, "compute", 0))), hidden=True
    )

    assert (GpuHolder(parent, None, (), None, working=True),) == use.holders


@pytest.mark.parametrize(
    ("load", "hidden", "expected"),
    [
        (GpuLoad((), trouble=None), True, False),
        (GpuLoad(None), False, False),
        (GpuLoad(None), True, True),
        (GpuLoad(trouble="gone"), False, True),
    ],
)
def test_not_knowing_is_said(tmp_path: Path, load: GpuLoad, hidden: bool, expected: bool) -> None:
    """When the driver is gone, or when neither it nor /proc shows everybody."""
    use = Crowd(tmp_path).judge.use({}, load, hidden=hidden)

    assert expected == (use.unknown is not None)


def test_the_real_proc_is_read_by_default() -> None:
    """This process has its own descriptors in it."""
    with open("/dev/null", encoding="ascii") as _:
        held = DescriptorScanner(Roots(), [0]).scan("quick")

    assert {0} == held.keys()
