from __future__ import annotations

import re

import pytest

from gpulse.diagnosis.rules.faults import find_faults
from gpulse.model.frame import Frame, HostReading
from gpulse.model.process import GpuProcess
from gpulse.model.snapshot import Snapshot
from gpulse.model.source_health import Health
from gpulse.sources.demo_machine import DemoMachine
from gpulse.terminal.snapshot_tables import SnapshotSections, snapshot_lines
from gpulse.terminal.table import display_width, make_painter
from tests.unit.frames import GIB, NOON, frame, gpu, process, snapshot

EVERYTHING = SnapshotSections(cpu=True, disk=True, network=True, findings=True, verbose=True)
PLAIN = make_painter(color=False)


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")


@pytest.fixture(scope="module")
def demo() -> Snapshot:
    """Eight busy GPUs."""
    machine = DemoMachine(NOON)
    return Snapshot.of(machine.sample(NOON + 5), machine.sample(NOON + 5.5))


def lines(look: Snapshot, parts: SnapshotSections | None = None, width: int = 120) -> list[str]:
    """The look as text."""
    return list(snapshot_lines(look, parts or SnapshotSections(), width, PLAIN))


def judged(whole: Frame) -> Snapshot:
    """The look with the faults that the frame shows."""
    return Snapshot.of(None, whole, tuple(find_faults(whole)))


def test_a_look_is_a_compact_table() -> None:
    """One row a GPU with what matters, under the node's name and versions."""
    holder = GpuProcess(17, "compute", 7 * GIB)
    look = snapshot(
        gpu(0, {"sm_active_ratio": 0.4}, (holder,)), gpu(1, {"power_watts": 75}), processes=(process(17),)
    )

    assert [
        "node1  2023-11-15 12:00:00  driver 580.1  CUDA 13.0",
        "GPU  Name  Temp     Power  Util   SM     Memory  Processes",
        "  0  H200   40C  300/700W   50%  40%  8.0/80.0G  ada:python3/17 7.0G",
        "  1  H200   40C   75/700W   50%    -  8.0/80.0G",
    ] == lines(look)


def test_a_card_without_gpm_has_no_columns_for_it() -> None:
    """What no GPU here can say takes no room."""

    assert "GPU  Name  Temp     Power  Util     Memory" == lines(snapshot(gpu()))[1]


def test_mig_instances_stand_below_their_gpu() -> None:
    """An instance shows its profile, not once more the name of its GPU."""
    look = snapshot(gpu(0), gpu(0, name="NVIDIA H200 MIG 1g.18gb", mig=1))

    assert ["  0  H200", "0:1   MIG 1g.18gb"] == [line[:18].rstrip() for line in lines(look)[2:]]


@pytest.mark.parametrize(
    ("expected", "mask", "hertz"),
    [
        ("", 0x1, 345e6),
        ("", 0x4, 1980e6),
        ("power cap, 1700/1980MHz", 0x4, 1700e6),
        ("hardware thermal slowdown, 600/1980MHz", 0x8 | 0x40, 600e6),
        ("thermal slowdown, 600/1980MHz", 0x4 | 0x20, 600e6),
    ],
)
def test_clocks_are_shown_when_something_holds_them_down(expected: str, mask: int, hertz: float) -> None:
    """The most specific reason is given, with where the clock is; idleness is no reason."""
    values = {"clocks_event_reasons": mask, "sm_clock_hertz": hertz, "sm_clock_max_hertz": 1980e6}

    assert expected == lines(snapshot(gpu(0, values)))[2][44:]


def test_shared_gpus_name_everybody_in_little_room() -> None:
    """Many processes become their users with counts, rather than a cut list."""
    holders = tuple(GpuProcess(pid, "compute", GIB) for pid in (11, 12, 13, 14))
    known = (process(11), process(12), process(13, user="bob"))
    look = snapshot(gpu(0, None, holders), processes=known)

    assert lines(look, width=62)[2].endswith("ada (2), bob, ?")


def test_a_lost_gpu_is_said_once_and_does_not_hide_the_others() -> None:
    """Its row has dashes and the reason, and below stands one line about it."""
    health = Health("nvml", "gpu_lost", "GPU is lost", NOON, "gpu 1", hint="reboot")
    lost = gpu(1)._replace(values={})
    told = lines(judged(frame(gpu(0), lost, health=(health,))))

    assert [
        "  1  H200     -         -     -          -  GPU is lost",
        "",
        "[critical] GPU 1: GPU is lost",
    ] == told[3:6]
    assert not any(line.startswith("!") for line in told)


def test_urgent_findings_need_no_option_and_their_advice_does() -> None:
    """A fault is shown in any look; what to do about it with -b."""
    look = judged(frame(gpu(0, {"ecc_uncorrected_errors_total": 3})))
    brief, full = lines(look), lines(look, SnapshotSections(findings=True))

    assert "Run `gpulse -b` to see how to fix this." == brief[-1]
    assert brief[-2] == full[-2]
    assert full[-1].startswith("  -> stop using this GPU")


def test_no_fault_is_said_when_asked() -> None:
    """-b always answers."""

    look = snapshot(gpu())
    judged = look._replace(verdict="No bottleneck found: GPU 0 busy 99%.")

    assert lines(look, SnapshotSections(findings=True))[-1].startswith("The driver reports no faults.")
    assert judged.verdict == lines(judged, SnapshotSections(findings=True))[-1]


def test_helpers_are_counted_with_their_own_children() -> None:
    """A trainer's whole family is one line, with what it uses together."""
    family = (
        process(17),
        process(18, "loader", parent=17, on_gpu=False, values={"host_memory_bytes": GIB}),
        process(19, "decoder", parent=18, on_gpu=False, values={"host_memory_bytes": GIB}),
    )
    look = snapshot(gpu(0, None, (GpuProcess(17, "compute"),)), processes=family, host=HostReading({}))

    assert (
        "2.0G          + 2 children: decoder, loader"
        == lines(look, SnapshotSections(cpu=True))[-1].strip().split("-")[-1].strip()
    )


def test_verbose_shows_the_family_as_a_tree() -> None:
    """Each generation is indented below its parent."""
    family = (
        process(17),
        process(18, "loader", parent=17, on_gpu=False),
        process(19, "decoder", parent=18, on_gpu=False),
    )
    look = snapshot(gpu(0, None, (GpuProcess(17, "compute"),)), processes=family)

    assert ["python3 train.py", "  loader", "    decoder"] == [
        line[41:] for line in lines(look, SnapshotSections(cpu=True, verbose=True))[-3:]
    ]


def test_parents_in_a_circle_end() -> None:
    """A damaged recording cannot hang the view."""
    circle = (process(17), process(18, parent=19, on_gpu=False), process(19, parent=18, on_gpu=False))
    look = snapshot(gpu(0, None, (GpuProcess(17, "compute"),)), processes=circle)

    assert lines(look, EVERYTHING)


def test_a_process_of_another_namespace_is_shown_as_such() -> None:
    """What it holds is known, the rest is said to be hidden."""
    look = snapshot(gpu(0, None, (GpuProcess(17, "compute", 2 * GIB),)))

    assert " 17    0     2.0G    -    -     -  (not visible)" == lines(look, SnapshotSections(cpu=True))[-1]


def test_no_driver_is_explained_with_the_next_thing_to_try() -> None:
    """A machine without GPUs still shows its host."""
    health = Health("nvml", "driver_missing", "no NVIDIA driver here", NOON, hint="install it")
    host = HostReading({"cpus": 2, "load1": 0.5, "load5": 0.4, "load15": 0.3})
    look = Snapshot.of(None, frame(health=(health,), host=host))

    assert [
        "No GPU to show: no NVIDIA driver here.",
        "  -> install it",
        "",
        "2 CPUs   load 0.5 0.4 0.3   RAM - used",
    ] == lines(look)[1:]


def test_an_impossible_time_is_no_reason_to_fail() -> None:
    """A damaged recording is shown with what is left of it."""

    assert lines(snapshot(gpu(), time=1e300))[0].startswith("node1  unknown time")


def test_nothing_foreign_reaches_the_terminal_raw() -> None:
    """Names of nodes, drivers, GPUs, users, programs, jobs and mounts are all made harmless."""
    evil = "\x1b]0;x\x07\x1b[2J\r\n\u202e[bold]"
    base = frame(gpu(0, None, (GpuProcess(17, "compute"),), name=evil))
    machine = DemoMachine(NOON).sample(NOON)
    whole = base._replace(
        node=base.node._replace(name=evil, driver=evil, cuda=evil),
        processes=(process(17, evil, user=evil, name=evil),),
        disks=tuple(disk._replace(name=evil, kind=evil) for disk in machine.disks),
        filesystems=tuple(
            item._replace(mount_point=evil, device=evil, type=evil, kind=evil) for item in machine.filesystems
        ),
        network=tuple(link._replace(name=evil, kind=evil) for link in machine.network),
        health=(Health("nvml", "failed", evil, NOON, "gpu 0", hint=evil),),
    )
    text = "".join(lines(judged(whole), EVERYTHING))

    assert not set(text) & {"\x1b", "\x07", "\r", "\n", "\u202e"}


@pytest.mark.parametrize("width", [20, 30, 40, 50, 60, 70, 80, 100, 120, 200])
@pytest.mark.parametrize("parts", [SnapshotSections(), EVERYTHING])
def test_no_line_is_wider_than_the_terminal(demo: Snapshot, parts: SnapshotSections, width: int) -> None:
    """Nothing wraps, however narrow the window."""
    broken = demo.frame._replace(
        health=(Health("nvml", "failed", "a call failed " * 20, NOON, "gpu 3", hint="see the manual " * 20),)
    )

    assert all(display_width(line) <= width for line in lines(demo._replace(frame=broken), parts, width))


def test_who_uses_a_gpu_is_shown_even_in_sixty_columns(demo: Snapshot) -> None:
    """Users matter more than tensor activity and bandwidth."""

    assert ["ada", "katherine"] == [
        lines(demo, width=60)[row].split()[-1].partition("/")[0] for row in (2, 8)
    ]


def test_colours_mark_what_is_wrong() -> None:
    """A GPU that is too hot stands out."""
    hot = gpu(0, {"temperature_celsius": 95, "temperature_slowdown_celsius": 89})
    text = "\n".join(snapshot_lines(snapshot(hot), SnapshotSections(), 80, make_painter(color=True)))

    assert "\x1b[31;1m95C\x1b[0m" in text


def test_gpus_with_the_same_trouble_share_a_line() -> None:
    """Sixty-four lines about one driver would hide everything else."""
    gone = tuple(Health("nvml", "driver_unloaded", "not loaded", NOON, f"gpu {n}") for n in range(4))
    late = tuple(Health("nvml", "timeout", f"{n} ms", NOON, f"gpu {n}") for n in range(4))
    told = lines(judged(frame(*(gpu(n)._replace(values={}) for n in range(4)), health=(*gone, *late))))

    assert ["[critical] GPUs 0-3: not loaded"] == [line for line in told if line.startswith("[")]
    assert ["! GPUs 0-3: 0 ms"] == [line for line in told if line.startswith("!")]


@pytest.mark.parametrize(
    ("expected", "health"),
    [
        (
            "Cannot check for faults: there is no NVIDIA driver.",
            (Health("nvml", "driver_missing", "no driver", NOON),),
        ),
        ("Cannot check for faults: there is no GPU.", ()),
    ],
)
def test_without_gpus_there_is_a_reason_for_no_faults(expected: str, health: tuple[Health, ...]) -> None:
    """Nobody is told that a driver which is not there reports no fault."""

    assert expected in lines(judged(frame(health=health)), SnapshotSections(findings=True))


def test_a_driver_that_does_not_work_is_the_answer_to_b() -> None:
    """And without -b it is said once, in place of the table."""
    look = judged(frame(health=(Health("nvml", "not_answering", "the driver hangs", NOON, hint="reboot"),)))

    assert [1, 2] == [
        sum("the driver hangs" in line for line in lines(look, SnapshotSections(findings=asked)))
        for asked in (False, True)
    ]
    assert "[critical] the driver hangs" in lines(look, SnapshotSections(findings=True))


def test_gpus_that_did_not_say_who_is_on_them_are_named() -> None:
    """The others did say it."""
    some = snapshot(gpu(0), gpu(1, None, None), gpu(2, None, None))
    none = snapshot(gpu(0, None, None))

    assert [
        "The driver did not report which processes use GPUs 1,2; no process uses the other GPUs.",
        "The driver did not report which processes use the GPUs.",
    ] == [
        line
        for look in (some, none)
        for line in lines(look, SnapshotSections(cpu=True))
        if "did not report" in line
    ]


def test_what_lasts_says_since_when() -> None:
    """What has only begun does not."""
    look = judged(frame(gpu(0, {"ecc_uncorrected_errors_total": 3})))
    (fault,) = look.findings
    now = look.frame.time

    lasting = lines(look._replace(findings=(fault._replace(start=now - 185),)))[-2]
    new = lines(look._replace(findings=(fault._replace(start=now - 2),)))[-2]

    assert re.search(r", since \d\d:\d\d:\d\d \(3:05\)$", lasting) is not None
    assert ", since" not in new
