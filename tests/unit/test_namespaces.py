"""Whose numbers the driver's are, in containers."""

from __future__ import annotations

from pathlib import Path

from gpulse.sources.processes import PidTranslator, ProcessReader
from gpulse.sources.procfs import Roots
from tests.unit.trees import grow, pid_stat

NOW = 1_000_000.0
INSIDE = {"proc/self/ns/pid": "pid:[4026532000]"}


def container(root: Path, holding: tuple[int, ...] = (), idle: tuple[int, ...] = ()) -> Roots:
    """A container's /proc with processes, of which some hold a GPU."""
    files = {f"proc/{pid}/stat": pid_stat(pid) for pid in (*holding, *idle)}
    links = {f"proc/{pid}/fd/3": f"{root}/dev/nvidia0" for pid in holding}
    links |= {f"proc/{pid}/fd/3": "/dev/null" for pid in idle}
    return grow(root, dict(files), {**INSIDE, **links})


def test_numbers_that_all_fit_are_the_containers_own(tmp_path: Path) -> None:
    """Newer drivers translate them."""

    assert {7: 7, 8: 8} == PidTranslator(container(tmp_path, holding=(7, 8))).believed(NOW, {7, 8})


def test_one_number_that_fits_nobody_makes_all_of_them_the_hosts(tmp_path: Path) -> None:
    """The other fits by chance, though its process holds a GPU, too; that does not change when the first one ends."""

    numbering = PidTranslator(container(tmp_path, holding=(7,), idle=(8,)))

    assert {} == numbering.believed(NOW, {7, 9999})
    assert {} == numbering.believed(NOW + 3, {7, 9999})
    assert {} == numbering.believed(NOW + 300, {7})
    assert {} == PidTranslator(container(tmp_path, holding=(7,), idle=(8,))).believed(NOW, {7, 8})


def test_a_process_that_just_ended_proves_nothing(tmp_path: Path) -> None:
    """The driver lists it for a moment longer than the kernel."""

    numbering = PidTranslator(container(tmp_path, holding=(7,)))
    numbering.believed(NOW, {7})

    assert {7: 7} == numbering.believed(NOW + 1, {7, 50})
    assert {7: 7} == numbering.believed(NOW + 3, {7, 51})
    assert {7: 7, 52: 52} == numbering.believed(NOW + 30, {7, 52}, gone={52})


def test_a_process_that_is_ending_proves_nothing(tmp_path: Path) -> None:
    """It has given back its files and may take long to be gone: it is known still when it was, and nobody else is doubted."""

    numbering = PidTranslator(container(tmp_path, holding=(7, 8)))
    numbering.believed(NOW, {7, 8})
    (tmp_path / "proc/8/fd/3").unlink()

    assert [{7: 7, 8: 8}] * 3 == [numbering.believed(NOW + later, {7, 8}) for later in (1, 31, 90)]
    assert [{7: 7}] * 2 == [numbering.believed(NOW + later, {7}) for later in (91, 3600)]
    found = PidTranslator(container(tmp_path / "later", holding=(7,)))
    (tmp_path / "later/proc/9/fd").mkdir(parents=True)
    assert [{7: 7}] * 2 == [found.believed(NOW + later, {7, 9}) for later in (0, 10)]


def test_numbers_of_an_inner_namespace_are_found_in_an_outer_ones_proc(tmp_path: Path) -> None:
    """Whoever looks there from within is given the inner numbers; each process has both in its status."""

    roots = container(tmp_path, holding=(70, 80), idle=(90,))
    inner = {"self": 1, "70": 7, "80": 8, "90": 9}
    statuses = {
        f"proc/{name}/status": f"NSpid:\t{name.replace('self', '60')}\t{pid}\n" for name, pid in inner.items()
    }
    links = {f"proc/{pid}/ns/pid": INSIDE["proc/self/ns/pid"] for pid in (70, 90)}
    grow(tmp_path, statuses, {**links, "proc/80/ns/pid": "pid:[4026532111]"})

    assert {7: 70} == PidTranslator(roots).believed(NOW, {7})
    assert {70: 70, 80: 80} == PidTranslator(roots).believed(NOW, {70, 80})
    assert {} == PidTranslator(roots).believed(NOW, {7, 8})
    assert {} == PidTranslator(roots).believed(NOW, {9})


def test_an_unknown_process_is_shown_by_the_hosts_number_alone(tmp_path: Path) -> None:
    """Neither name nor command nor numbers of the local process that happens to have it."""

    reader = ProcessReader(container(tmp_path, holding=(7,)))
    readings, groups, health = reader.read(NOW, [7, 9999])

    assert [(7, None, None, {}), (9999, None, None, {})] == [
        (reading.pid, reading.state, reading.identity.name, reading.values) for reading in readings
    ]
    assert () == groups
    assert ["pid 7", "pid 9999"] == [entry.subject for entry in health]
    assert all("--pid=host" in (entry.hint or "") for entry in health)
