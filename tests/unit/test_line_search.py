"""Whose stacks are read, when, and what is added to findings."""

from __future__ import annotations

from typing import Any

import pytest

from gpulse.diagnosis.line_search import (
    MAX_DUMPS,
    MAX_WORKERS,
    LineSearch,
    describe_first_line,
    describe_where,
    find_workers,
)
from gpulse.diagnosis.rule_registry import RULES
from gpulse.diagnosis.windowed_diagnosis import WindowedDiagnosis
from gpulse.model.finding import CodeLocation, Diagnosis, Finding, Severity
from gpulse.model.frame import Frame
from gpulse.model.python_stack import (
    ProcessStacks,
    StackFrame,
    StackProblem,
    StackProblemCode,
    StackTarget,
    ThreadStack,
)
from tests.unit.diagnosis_machine import BUSY, Doing, play
from tests.unit.frames import NOON, frame, gpu, process

IN_CODE = {
    "host_many_threads",
    "input_main_process",
    "host_single_thread",
    "launch_bound",
    "host_wait_unattributed",
    "input_cpu_bound",
    "input_too_few_workers",
    "input_io_bound",
    "checkpoint_stall",
    "periodic_stall",
    "collective_hang",
    "cpu_oversubscribed",
    "host_memory_leak",
    "gpu_underused",
}


def finding(
    name: str = "host_single_thread", *, severity: Severity = "high", pids: tuple[int, ...] = (100,)
) -> Finding:
    """A finding about GPU 0."""
    return Finding(name, "host", severity, 0.9, "GPU 0 waits", gpu=0, label="0", pids=pids)


def machine(time: float = NOON, duty: float = 0.0) -> Frame:
    """A job with two workers on a GPU that is busy to this degree."""
    return frame(
        gpu(0, {"graphics_active_ratio": duty}),
        time=time,
        processes=(
            process(100),
            process(101, parent=100, on_gpu=False, values={"cpu_seconds_total": 5.0}),
            process(102, parent=101, on_gpu=False, values={"cpu_seconds_total": 9.0}),
            process(900, parent=1, on_gpu=False),
        ),
    )


def dump(pid: int, line: int, time: float = NOON - 0.1) -> ProcessStacks:
    """A dump with one thread at a line of the user's code."""
    return ProcessStacks(
        pid, time, (ThreadStack("MainThread", pid, True, (StackFrame("/u/a.py", line, "f"),)),)
    )


def suspected(search: LineSearch, *findings: Finding) -> tuple[StackTarget, ...]:
    """The processes to read after a finding was seen twice."""
    search.suspect(findings, machine())
    return search.suspect(findings, machine())


def test_the_rules_whose_cause_is_in_code_say_so() -> None:
    """The others are about hardware, limits or neighbours."""
    assert IN_CODE == {rule.id for rule in RULES if rule.stacks is not None}


def test_a_job_is_read_when_a_cause_was_seen_twice() -> None:
    """Once may be chance; the trainer and its workers are read."""
    search = LineSearch()
    first = search.suspect([finding()], machine())
    second = search.suspect([finding()], machine())

    assert () == first
    assert {StackTarget(100, "main"), StackTarget(101, "worker"), StackTarget(102, "worker")} == set(second)


@pytest.mark.parametrize(
    "found",
    [[], [finding("power_capped")], [finding(severity="info")], [finding("compute_bound", severity="info")]],
)
def test_a_healthy_job_is_never_touched(found: list[Finding]) -> None:
    """Nor one whose cause is not in its code."""
    assert () == suspected(LineSearch(), *found)


def test_a_hang_is_read_although_it_is_informational() -> None:
    """Its stacks are what helps most."""
    assert suspected(LineSearch(), finding("collective_hang", severity="info"))


def test_reading_stops_when_the_cause_is_gone() -> None:
    """At once, if it was seen only twice."""
    search = LineSearch()
    suspected(search, finding())

    assert () == search.suspect([], machine())
    assert search.suspect([finding()], machine())


def test_a_cause_that_was_seen_often_may_be_missed_twice() -> None:
    """Evaluations a second apart differ a little."""
    search = LineSearch()
    for _ in range(9):
        search.suspect([finding()], machine())
    read = [bool(search.suspect([], machine())) for _ in range(4)]

    assert [True, True, False, False] == read


def test_reading_stops_after_enough_dumps() -> None:
    """Another finding starts it again."""
    search = LineSearch()
    suspected(search, finding())
    search.add([dump(100, 5)] * MAX_DUMPS)

    assert () == suspected(search, finding())
    assert suspected(search, finding(), finding("checkpoint_stall"))


def test_the_workers_with_the_most_cpu_time_are_read() -> None:
    """At most eight, also grandchildren, never strangers."""
    workers = [
        process(pid, parent=100, on_gpu=False, values={"cpu_seconds_total": float(pid)})
        for pid in range(200, 220)
    ]
    found = find_workers(frame(processes=(process(100), *workers)), [100])

    assert [102, 101] == find_workers(machine(), [100])
    assert (MAX_WORKERS, 219) == (len(found), found[0])


def test_the_line_is_added_to_the_finding() -> None:
    """From stacks that were taken while its GPU was idle."""
    search = LineSearch()
    suspected(search, finding())
    search.feed(machine(NOON))
    search.feed(machine(NOON + 0.2, duty=1.0))
    search.add([*[dump(100, 5)] * 6, *[dump(100, 99, NOON + 0.1)] * 20])
    diagnosis = search.attach(
        Diagnosis("", (finding(), finding("power_capped")), (finding(severity="info"),))
    )

    assert diagnosis.findings[0].where == (CodeLocation(100, "main", "/u/a.py", 5, "f", 1.0, 6),)
    assert diagnosis.findings[0].where_note is None
    assert (None, None) == diagnosis.findings[1][-2:]
    assert diagnosis.info[0].where


def test_a_line_stays_while_the_training_runs_on() -> None:
    """What the GPU did when the stacks were taken is looked up once, not hours later."""
    search = LineSearch()
    suspected(search, finding())
    search.feed(machine(NOON))
    search.add([dump(100, 5)] * 6)
    for n in range(1, 500):
        search.feed(machine(NOON + 60.0 * n))
        search.add([])

    assert [5] == [place.line for place in search.attach_to(finding()).where or ()]


def test_what_a_gpu_did_later_does_not_count() -> None:
    """The duty of a stack stays as it was, while the GPU's samples around it are forgotten."""
    search = LineSearch()
    suspected(search, finding())
    search.feed(machine(NOON))
    search.add([dump(100, 5)] * 6)
    for n in range(1, 100):
        search.feed(machine(NOON + n / 5, duty=1.0))
        if n % 7 == 0:
            search.add([])

    assert search.attach_to(finding()).where


def test_what_a_gpu_did_may_be_known_after_the_stacks() -> None:
    """The sample that covers them comes later."""
    search = LineSearch()
    suspected(search, finding())
    search.feed(machine(NOON - 1.0))
    search.add([dump(100, 5)] * 6)
    before = search.attach_to(finding()).where
    search.feed(machine(NOON))

    assert () == before
    assert search.attach_to(finding()).where


def test_a_finding_waits_for_its_stacks() -> None:
    """Until five of them count."""
    search = LineSearch()
    unseen = search.is_collecting(finding())
    suspected(search, finding())
    search.feed(machine(NOON))
    waiting = []
    for _ in range(6):
        waiting.append(search.is_collecting(finding()))
        search.add([dump(100, 5)])

    assert not unseen
    assert [True] * 5 + [False] == waiting


@pytest.mark.parametrize(
    ("code", "count", "waits"),
    [("not_permitted", 1, False), ("failed", 1, True), ("failed", 4, True), ("failed", 5, False)],
)
def test_nobody_waits_for_a_process_that_is_given_up(code: StackProblemCode, count: int, waits: bool) -> None:
    """Which a single failure does not mean."""
    search = LineSearch()
    suspected(search, finding())
    search.add([ProcessStacks(100, NOON, problem=StackProblem(code, "no"))] * count)

    assert waits == search.is_collecting(finding())


def test_nobody_waits_once_enough_stacks_were_read() -> None:
    """The GPU was busy whenever one was taken."""
    search = LineSearch()
    suspected(search, finding())
    search.feed(machine(NOON, duty=1.0))
    search.add([dump(100, 5)] * MAX_DUMPS)

    assert not search.is_collecting(finding())


def test_findings_in_code_are_about_one_gpu() -> None:
    """One without could not be joined with what its GPU did; it stays as it is."""
    about_none = finding()._replace(label=None, gpu=None)
    search = LineSearch()

    assert [] == [rule.id for rule in RULES if rule.stacks is not None and rule.check_node is not None]
    assert () == suspected(search, about_none)
    assert about_none == search.attach_to(about_none)


def test_another_jobs_stacks_are_not_used() -> None:
    """Each finding has its own processes."""
    search = LineSearch()
    suspected(search, finding(), finding(pids=(500,))._replace(label="1"))
    search.feed(machine())
    search.add([dump(100, 5)] * 6)

    assert search.attach_to(finding(pids=(500,))._replace(label="1")).where is None


def test_a_problem_is_the_note() -> None:
    """The verdict stays; one sentence says why there is no line."""
    search = LineSearch()
    suspected(search, finding())
    search.add([ProcessStacks(100, NOON, problem=StackProblem("not_permitted", "not yours", "run: sudo x"))])
    attached = search.attach_to(finding())

    assert finding() == attached._replace(where_note=None)
    assert "line of code unknown: not yours; run: sudo x" == attached.where_note


def test_workers_that_may_not_be_read_are_mentioned() -> None:
    """The line of the trainer may be that at which it waits for them."""
    search = LineSearch()
    suspected(search, finding())
    search.feed(machine())
    refused = StackProblem("not_permitted", "not yours", "run: sudo x")
    search.add([*[dump(100, 5)] * 6, *(ProcessStacks(pid, NOON, problem=refused) for pid in (101, 102))])
    attached = search.attach_to(finding())

    assert attached.where
    assert "stacks of the workers are missing: not yours; run: sudo x" == attached.where_note


def test_a_finding_that_came_too_late_says_so() -> None:
    """No stack was taken."""
    note = LineSearch().attach_to(finding()).where_note

    assert note is not None
    assert "gpulse why --window" in note


def test_the_lines_over_time_are_spans() -> None:
    """Neighbours at the same line are one span."""
    search = LineSearch()
    suspected(search, finding())
    search.feed(machine(NOON + 9))
    search.add(
        [dump(100, 5, NOON + n / 2) for n in range(6)] + [dump(100, 8, NOON + 3), dump(100, 8, NOON + 9)]
    )
    spans = search.line_spans([search.attach_to(finding())])["0"]

    assert [(0.0, 3.0, "a.py:5 f"), (3.0, 3.25, "a.py:8 f"), (9.0, 9.25, "a.py:8 f")] == [
        (start - NOON, end - NOON, text) for start, end, text in spans
    ]


def test_the_lines_over_time_are_those_of_one_process() -> None:
    """The one whose line the finding names first."""
    found = finding(pids=(100, 200))
    search = LineSearch()
    suspected(search, found)
    for n in range(12):
        search.add([dump(100, 5, NOON + n / 2)] * (n % 4 != 0) + [dump(200, 8, NOON + n / 2 + 0.1)])
        search.feed(machine(NOON + n / 2 + 0.2))
    attached = search.attach_to(found)
    place = (attached.where or ())[0]
    spans = search.line_spans([attached])["0"]

    assert (200, 8) == (place.pid, place.line)
    assert {"a.py:8 f"} == {span.text for span in spans}


def test_a_line_is_described_in_one_sentence() -> None:
    """With its share, the number of stacks, and what it does."""
    place = CodeLocation(1, "main", "/u/train.py", 84, "tokenise", 0.83, 40, "json/encoder.py:258 iterencode")
    worker = place._replace(role="worker", doing=None)

    assert (
        "train.py:84 tokenise, 83% of 40 stacks taken while the GPU was idle; in json/encoder.py:258 iterencode",
    ) == describe_where(finding()._replace(where=(place,)))
    assert (
        "train.py:84 tokenise (in a worker), 83% of 40 stacks taken while the GPU was idle",
    ) == describe_where(finding()._replace(where=(worker,)))
    assert ("train.py:84 tokenise, 83% of 40 stacks; in json/encoder.py:258 iterencode",) == describe_where(
        finding("collective_hang")._replace(where=(place,))
    )
    assert ("no line: x",) == describe_where(finding()._replace(where_note="no line: x"))


def test_a_cause_is_suspected_before_it_is_certain() -> None:
    """Six seconds of a job that waits for its own program are enough to start reading."""
    waiting = Doing({**BUSY, "graphics_active_ratio": 0.3, "gpu_utilization_ratio": 0.3}, cores=1.0)
    timeline = WindowedDiagnosis()
    for each in play(7, waiting):
        timeline.feed(each)
    early = timeline.preliminary(5.0)

    assert early is not None
    assert ["host_single_thread"] == [found.id for found in early.findings]
    assert [] == [found.id for found in timeline.finish().findings]


def document(*lines: int, note: str | None = None) -> dict[str, Any]:
    """A finding that names these lines."""
    places = tuple(CodeLocation(7, "main", "/home/ada/train.py", line, "step", 0.8, 40) for line in lines)
    named = Finding("host_single_thread", "host", "high", 0.9, "s", where=places or None, where_note=note)
    return named.to_dict()


def test_the_first_line_that_is_known_is_named() -> None:
    """The worst finding may be of a node whose agent reads no stacks."""
    text = "train.py:84 step, 80% of 40 stacks taken while the GPU was idle"

    assert text == describe_first_line([document(), document(84, 99), document(84)])
    assert f"{text} (and 1 other line)" == describe_first_line([document(84), document(99), document(99)])
    assert f"{text} (and 2 other lines)" == describe_first_line([document(84), document(99), document(5)])


def test_why_there_is_no_line() -> None:
    """It is said where no finding names one, and nothing where no stacks were taken."""

    assert "no single line" == describe_first_line([document(), document(note="no single line")])
    assert None is describe_first_line([document()])
    assert None is describe_first_line([])


@pytest.mark.parametrize(
    "change",
    [
        {"share": 10**400},
        {"share": float("nan")},
        {"share": -1},
        {"role": ["main"]},
        {"line": None},
        {"file": 5},
    ],
)
def test_odd_lines_of_a_file_are_left_out(change: dict[str, Any]) -> None:
    """Whoever wrote the file that is reported on."""

    odd = document(84)
    odd["where"][0] |= change

    assert None is describe_first_line([odd])
