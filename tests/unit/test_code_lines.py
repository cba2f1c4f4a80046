"""The line of code that held a GPU up, from stacks and what the GPU did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.diagnosis.code_lines import (
    KEEP_SECONDS,
    DutyTrack,
    LineVerdict,
    StackView,
    ThreadSample,
    WaitsFor,
    find_lines,
    shorten_path,
)
from gpulse.model.device import Device
from gpulse.model.finding import CodeRole
from gpulse.model.frame import GpuReading
from gpulse.model.python_stack import StackFrame

MAIN = StackFrame("/home/u/train.py", 200, "<module>")
ENCODER = StackFrame("/usr/lib/python3.11/json/encoder.py", 258, "iterencode", "json/encoder.py")


def frame(line: int, function: str = "train", file: str = "train.py") -> StackFrame:
    """A frame of the user's code."""
    return StackFrame(f"/home/u/{file}", line, function)


def seen(
    *lines: StackFrame,
    at: float = 0.0,
    role: CodeRole = "main",
    inner: StackFrame | None = None,
    waits: WaitsFor | None = None,
    pid: int = 7,
    duty: float | None = 0.0,
) -> ThreadSample:
    """A stack with these own frames, innermost first, taken while the GPU was busy to this degree."""
    return ThreadSample(at, pid, role, StackView((*lines, MAIN), inner or lines[0], waits), duty=duty)


def found(*samples: ThreadSample) -> LineVerdict:
    """The verdict of the stacks that were taken while the GPU was idle."""
    return find_lines(samples, "idle")


def test_a_line_on_most_stacks_is_the_answer() -> None:
    """With its share, the number of stacks, and what it does."""
    verdict = found(*[seen(frame(84, "tokenise"), inner=ENCODER)] * 5, seen(frame(90)))
    first = verdict.where[0]

    assert ("/home/u/train.py", 84, "tokenise", 0.833, 6) == first[2:7]
    assert "json/encoder.py:258 iterencode" == first.doing
    assert verdict.note is None


def test_other_frequent_lines_follow() -> None:
    """The most frequent first."""
    verdict = found(*[seen(frame(84))] * 6, *[seen(frame(90, "log"))] * 3, seen(frame(91, "step")))

    assert [84, 90, 91] == [each.line for each in verdict.where]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_fewer_than_five_stacks_are_no_line(count: int) -> None:
    """Even if they agree."""
    verdict = found(*[seen(frame(84))] * count)

    assert () == verdict.where
    assert verdict.note is not None
    assert verdict.note.startswith("no single line stands out: ")


def test_without_a_majority_the_top_three_are_named() -> None:
    """They are not claimed."""
    lines = [seen(frame(10 * n, name)) for n, name in enumerate("aabbbccddd", 1)]
    verdict = found(*lines, *lines[2:4])

    assert () == verdict.where
    assert verdict.note is not None
    assert 3 == verdict.note.count("train.py:")
    assert verdict.note.endswith("of 12 stacks taken while the GPU was idle")


def test_stacks_without_code_of_the_program_count_against_a_line() -> None:
    """They were taken as well, and something else ran."""
    elsewhere = seen(frame(1))._replace(view=StackView((), frame(9, file="lib.py")))
    verdict = found(
        *[seen(frame(7), at=n) for n in range(5)], *[elsewhere._replace(time=9.0 + n) for n in range(10)]
    )

    assert ((), 15) == (verdict.where, verdict.stacks)
    assert "train.py:7 train 33%" in (verdict.note or "")
    assert () == found(*[elsewhere._replace(time=float(n)) for n in range(9)]).where


def test_a_function_with_most_stacks_is_named_by_its_most_frequent_line() -> None:
    """The lines of a loop's body share the time."""
    verdict = found(
        *[seen(frame(12, "decode"))] * 3,
        *[seen(frame(13, "decode"))] * 2,
        *[seen(frame(14, "decode"))] * 2,
        seen(frame(99)),
    )

    assert (12, 0.875) == (verdict.where[0].line, verdict.where[0].share)
    assert verdict.note is not None
    assert "decode" in verdict.note


def test_the_line_that_calls_what_runs_is_named_when_its_callees_share_the_time() -> None:
    """But not the program's frame, which is on all stacks."""
    call, loop = frame(50, "epoch"), frame(51, "epoch")
    samples = [seen(frame(10 + n, f"helper{n}", "data.py"), call, frame(150, "main")) for n in range(6)] + [
        seen(loop, frame(150, "main"), duty=1.0)
    ] * 4
    verdict = found(*samples)

    assert (50, "epoch", 1.0) == (verdict.where[0].line, verdict.where[0].function, verdict.where[0].share)
    assert verdict.note is None


def test_functions_that_call_each_other_count_once_per_stack() -> None:
    """A recursion five levels deep on two of ten stacks is on a fifth of them."""
    walk, visit = frame(20, "walk", "tree.py"), frame(30, "visit", "tree.py")
    deep = [seen(frame(40 + n, f"leaf{n}", "tree.py"), *[visit, walk] * 5) for n in range(2)]
    verdict = found(*deep, *(seen(frame(10 * n, f"other{n}")) for n in range(1, 9)))

    assert () == verdict.where


def test_only_stacks_taken_while_the_gpu_was_idle_count() -> None:
    """The line that runs while the GPU computes is innocent, however frequent."""
    verdict = found(*[seen(frame(1), duty=0.97)] * 40, *[seen(frame(84), duty=0.03)] * 8)

    assert (84, 1.0, 8) == (verdict.where[0].line, verdict.where[0].share, verdict.where[0].stacks)


def test_a_thread_that_waits_for_the_gpu_is_innocent_while_the_gpu_is_busy() -> None:
    """Steps shorter than a sample: the GPU's busy part belongs to the stacks that wait for it."""
    host, waiting = [seen(frame(84), duty=0.6)] * 12, [seen(frame(90), waits="gpu", duty=0.6)] * 18
    verdict = found(*host, *waiting)

    assert (84, 1.0, 12) == (verdict.where[0].line, verdict.where[0].share, verdict.where[0].stacks)


def test_a_few_more_stacks_that_wait_for_the_gpu_are_chance() -> None:
    """A thread waits for half of each step, and most of fifteen stacks happened to be taken then."""
    verdict = found(*[seen(frame(84), duty=0.4)] * 4, *[seen(frame(90), waits="gpu", duty=0.4)] * 11)

    assert 84 == verdict.where[0].line


def test_a_thread_that_waits_for_an_idle_gpu_is_the_answer() -> None:
    """Many small calls that each wait: the GPU is empty in between."""
    verdict = found(*[seen(frame(90), waits="gpu", duty=0.1)] * 18, *[seen(frame(84), duty=0.1)] * 2)

    assert 90 == verdict.where[0].line


def test_stacks_before_the_first_sample_do_not_count() -> None:
    """What the GPU did is not known."""
    verdict = found(*(seen(frame(84), at=float(n), duty=None) for n in range(200)))

    assert () == verdict.where
    assert (
        "no single line stands out: none of the 200 stacks was captured while the GPU was idle"
        == verdict.note
    )


def test_stacks_of_a_hang_count_whatever_the_gpu_does() -> None:
    """It spins."""
    verdict = find_lines([seen(frame(84), duty=1.0)] * 10, "all")

    assert 84 == verdict.where[0].line


def test_of_pauses_only_their_stacks_count() -> None:
    """Half-idle steps between them do not."""
    samples = [*[seen(frame(1), duty=0.5)] * 40, *[seen(frame(84))] * 8]
    verdict = find_lines(samples, "pauses")

    assert (84, 8) == (verdict.where[0].line, verdict.where[0].stacks)


def test_a_main_thread_that_waits_points_to_its_workers() -> None:
    """Their line is the cause."""
    main = [seen(frame(20), waits="others")] * 10
    workers = [seen(frame(33, "__getitem__", "data.py"), role="worker", pid=8)] * 10
    verdict = found(*main, *workers)

    assert ("worker", 33, 8) == (verdict.where[0].role, verdict.where[0].line, verdict.where[0].pid)


def test_workers_are_innocent_while_the_main_thread_computes() -> None:
    """They wait for it, or run ahead."""
    main = [seen(frame(20))] * 10
    workers = [seen(frame(33, "__getitem__", "data.py"), role="worker", pid=8)] * 10
    verdict = found(*main, *workers)

    assert ("main", 20) == (verdict.where[0].role, verdict.where[0].line)


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.floats(0, 1), st.sampled_from(["gpu", "others", None])), max_size=40
    )
)
def test_shares_are_shares(stacks: list[tuple[int, float, WaitsFor | None]]) -> None:
    """Of what counts; a line is claimed only with five stacks and half of them."""
    samples = [seen(frame(line), duty=duty, waits=waits) for line, duty, waits in stacks]
    verdict = found(*samples)

    assert all(0 < each.share <= 1 and each.stacks >= 5 for each in verdict.where)
    assert not verdict.where or verdict.where[0].share >= 0.5
    assert verdict.where or verdict.note


def reading(duty: float, *, at: float | None = None, gpm: bool = True) -> GpuReading:
    """A reading of the GPU's activity."""
    name = "graphics_active_ratio" if gpm else "gpu_utilization_ratio"
    times = {} if at is None else {"graphics": at, "gpm": at}
    return GpuReading(Device(uuid="GPU-0", index=0, name="H200"), {name: duty}, None, times)


def test_the_sample_after_a_moment_covers_it() -> None:
    """A sample is the mean of the time before it."""
    track = DutyTrack()
    for time, duty in ((10.0, 0.1), (10.2, 0.9), (10.4, 0.2)):
        track.add(time, reading(duty))

    assert [0.1, 0.9, 0.9, 0.2, None] == [track.duty_at(time) for time in (9.9, 10.1, 10.2, 10.3, 10.5)]


def test_a_held_sample_counts_once() -> None:
    """Frames repeat the value until it is read again."""
    track = DutyTrack()
    track.add(10.0, reading(0.1, at=9.9))
    track.add(10.2, reading(0.1, at=9.9))
    track.add(10.4, reading(0.8, at=10.35))

    assert 0.8 == track.duty_at(10.1)


def test_nvml_is_late_so_two_samples_count() -> None:
    """Its utilization covers a period that ended some time ago."""
    track = DutyTrack()
    for time, duty in ((10.0, 0.0), (10.2, 1.0), (10.4, 0.0)):
        track.add(time, reading(duty, gpm=False))

    assert 0.5 == track.duty_at(10.1)


def test_after_the_clock_was_set_back_the_gpu_is_known_again() -> None:
    """What was sampled before is forgotten."""
    track = DutyTrack()
    track.add(5000.0, reading(0.9))
    track.add(1000.0, reading(0.1))
    track.add(1000.2, reading(0.2))

    assert [0.1, 0.2, None] == [track.duty_at(time) for time in (999.9, 1000.1, 4999.9)]


def test_a_track_is_short() -> None:
    """It runs for as long as the training does."""
    track = DutyTrack()
    for n in range(1000):
        track.add(100.0 + n / 5, reading(0.5))

    assert track.duty_at(100.0 + 999 / 5 - 2 * KEEP_SECONDS) is None


def test_a_moment_long_before_a_sample_is_not_known() -> None:
    """After a gap, nobody knows what the GPU did in it."""
    track = DutyTrack()
    track.add(100.0, reading(0.5))

    assert track.duty_at(90.0) is None


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("/home/u/train.py", "train.py"),
        ("/home/u/model/__init__.py", "model/__init__.py"),
        ("json/encoder.py", "json/encoder.py"),
        ("a/b/c/d/e.py", "c/d/e.py"),
    ],
)
def test_paths_are_shown_short(path: str, short: str) -> None:
    """By the part that people recognize."""
    assert short == shorten_path(path)
