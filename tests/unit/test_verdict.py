from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from gpulse.diagnosis.engine import diagnose
from gpulse.model.finding import Advice, Diagnosis, Evidence, Finding, JudgedGpu
from gpulse.terminal.diagnosis_verdict import confidence_word, verdict_lines
from gpulse.terminal.table import make_painter
from tests.unit.diagnosed import RECORDINGS, diagnosed
from tests.unit.frames import NOON

PLAIN = make_painter(color=False)
ADVICE = Advice("raise num_workers", "CPUs are idle", "double it")


def finding(
    gpu: int | None = 0, number: str = "98%", name: str = "input_too_few_workers", **more: object
) -> Finding:
    """A finding about a GPU."""
    made = Finding(
        id=name,
        family="input",
        severity="high",
        confidence=0.9,
        summary=f"GPU {gpu} waits {number} of the time" if gpu is not None else f"waits {number} of the time",
        gpu=gpu,
        label=None if gpu is None else str(gpu),
        pids=() if gpu is None else (100 + gpu,),
        lost_ratio=float(number.rstrip("%")) / 100,
        evidence=(Evidence("lost_ratio", "mean", float(number.rstrip("%")) / 100, ">=", 0.1),),
        advice=(ADVICE,),
    )
    return made._replace(**more)  # type: ignore[arg-type]  # fields by name


def diagnosis(*findings: Finding, **more: object) -> Diagnosis:
    """A diagnosis of half a minute."""
    judged = tuple(JudgedGpu(index, str(index), NOON + 5, NOON + 30, 250, "busy 2%") for index in range(4))
    made = Diagnosis("Verdict.", findings, judged=judged, start=NOON, end=NOON + 30, frames=300)
    return made._replace(**more)  # type: ignore[arg-type]


def text(about: Diagnosis, width: int = 80, *, verbose: bool = False, hints: Sequence[str] = ()) -> str:
    """What is printed without colours."""
    return "\n".join(verdict_lines(about, width, PLAIN, verbose=verbose, hints=hints))


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("name", RECORDINGS)
def test_nothing_is_wider_than_the_terminal(name: str, width: int, verbose: bool) -> None:
    """Every recorded run, with colours and without."""

    plain = list(verdict_lines(diagnosed(name), width, PLAIN, verbose=verbose))
    colored = list(verdict_lines(diagnosed(name), width, make_painter(color=True), verbose=verbose))

    assert [] == [line for line in plain if len(line) > width]
    assert plain == [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in colored]
    assert [] == [line for line in plain if line != line.rstrip()]


def test_the_verdict_comes_first() -> None:
    """The answer in the first sentence, with the number in it."""

    first = text(diagnosis(finding()), 120).splitlines()[0]

    assert "Verdict  Too few data-loading workers: GPU 0 waits 98% of the time." == first


def test_why_and_next_follow() -> None:
    """Evidence against its threshold, then what to do, why, and how to see whether it was right."""

    lines = text(diagnosis(finding())).splitlines()

    assert "         high, sure, input_too_few_workers, GPU 0, pid 100" in lines
    assert "Why      lost GPU time  98%  at least 10%" in lines
    assert "Next     -> raise num_workers" in lines
    assert "            why: CPUs are idle" in lines
    assert "            check: double it" in lines
    assert "         More about this finding: gpulse explain input_too_few_workers" in lines


def test_the_same_on_several_gpus_is_told_once() -> None:
    """One sentence about four GPUs with the same numbers."""

    said = text(diagnosis(*(finding(gpu) for gpu in range(4))), 120)

    assert ": each of GPUs 0-3 waits 98% of the time." in said
    assert "pid 100 101 102 103" in said
    assert 1 == said.count("raise num_workers")


def test_the_same_with_other_numbers_is_told_in_one_line() -> None:
    """Eight ranks of a job differ by a percent; that is no reason to say it eight times."""

    about = diagnosis(finding(0, "98%"), finding(1, "97%"), finding(2, "95%"), finding(3, "96%"))

    assert "same finding on GPUs 1-3: 95% to 97% of the time lost (details: -v)" in text(about, 120)
    assert "GPU 3 waits 96% of the time" in text(about, 120, verbose=True)


@pytest.mark.parametrize("width", range(30, 90))
def test_many_findings_fit_too(width: int) -> None:
    """The first of a kind, the others of its kind, and notes, in windows of every width."""

    several = [
        finding(gpu, f"{90 + gpu}%", name) for name in ("launch_bound", "thin_kernels") for gpu in range(4)
    ]
    about = diagnosis(*several, info=tuple(several), data_gaps=("GPU 0: PCIe traffic could not be read",))

    assert [] == [line for line in text(about, width).splitlines() if len(line) > width]


def test_a_mig_instance_keeps_its_name() -> None:
    """The instance is named, not only its GPU."""

    said = text(diagnosis(finding(0)._replace(summary="GPU 0:3 waits 98% of the time", label="0:3")), 120)

    assert "GPU 0:3, pid 100" in said


def test_at_most_three_others_in_brief() -> None:
    """One in full, three in brief, and how many were left out."""

    names = ("launch_bound", "thin_kernels", "gpu_contention", "periodic_stall", "gpu_underused")
    about = diagnosis(finding(), *(finding(name=name) for name in names))

    said = text(about, 120)

    assert ["launch_bound", "thin_kernels", "gpu_contention"] == [name for name in names if name in said]
    assert "2 more findings; show all in full with: -v" in said
    assert list(names) == [name for name in names if name in text(about, 120, verbose=True)]


def test_what_was_ruled_out_is_told_in_words() -> None:
    """The measure in the words of the evidence; not more than six unless somebody asks."""

    ruled_out = (
        "input_io_bound: processes waiting for disks 0, below 0.35",
        "slow_start: its processes use 0.03 CPUs",
        *(f"other: reason {place}" for place in range(6)),
    )
    about = diagnosis(finding(ruled_out=ruled_out))

    assert "Excluded input_io_bound: processes waiting for disks 0, below 0.35" in text(about)
    assert "slow_start: its processes use 0.03 CPUs" in text(about)
    assert "and 2 more (show all with -v)" in text(about)
    assert "reason 5" in text(about, verbose=True)


def test_counter_evidence_is_shown() -> None:
    """What speaks against a finding stands beside what speaks for it."""

    against = (Evidence("workers", "mean", 4, ">=", 1),)

    assert "Against  data-loading workers  4  at least 1" in text(
        diagnosis(finding(counter_evidence=against))
    )


def test_when_it_began_is_said_if_that_was_later() -> None:
    """The judged part begins five seconds in; a finding that begins ten seconds after that says so."""

    assert "since" not in text(diagnosis(finding(start=NOON + 6)))
    assert re.search(r"since \d\d:\d\d:15", text(diagnosis(finding(start=NOON + 15)))) is not None


@pytest.mark.parametrize(
    ("confidence", "word"),
    [(1.0, "sure"), (0.85, "sure"), (0.7, "likely"), (0.6, "likely"), (0.5, "possible")],
)
def test_confidence_is_a_word(confidence: float, word: str) -> None:
    """The number is for those who ask."""

    about = diagnosis(finding(confidence=confidence))

    assert word == confidence_word(confidence)
    assert f"high, {word}, input" in text(about, 120)
    assert f"high, {word} ({confidence:.2f}), input" in text(about, 120, verbose=True)


def test_too_little_data_says_what_to_do() -> None:
    """No verdict is no reason to leave somebody alone."""

    said = text(diagnose([]), hints=["watch longer", "look here"])

    assert said.startswith("Verdict  Not enough data")
    assert "Next     -> watch longer\n         -> look here\n" in said
    assert said.endswith("0 frames, no GPUs were diagnosed")


def test_hints_are_for_those_who_have_no_advice() -> None:
    """A finding has its own."""

    assert "look here" not in text(diagnosis(finding()), hints=["look here"])


@pytest.mark.parametrize(("style", "is_clear"), [("good", True), ("notice", False)])
def test_what_is_not_clear_is_not_painted_as_good(style: str, is_clear: bool) -> None:
    """One GPU of which nobody knows why it waits is enough."""
    sure, *_ = diagnosis().judged
    about = diagnosis(judged=(sure, sure._replace(is_clear=is_clear)))
    color = make_painter(color=True)

    first = next(verdict_lines(about, 80, color, verbose=False))

    assert color(style, "Verdict.") in first


def test_what_could_not_be_seen_is_told_once() -> None:
    """The same gap on several GPUs is one line."""

    gaps = (*(f"GPU {gpu}: PCIe traffic could not be read" for gpu in range(3)), "no host")

    lines = text(diagnosis(data_gaps=gaps)).splitlines()

    assert "No data  GPUs 0-2: PCIe traffic could not be read" in lines
    assert "         no host" in lines


def test_the_last_line_says_over_what_it_was_said() -> None:
    """Window, frames, the GPUs that were judged, and what could be told about them."""

    last = text(diagnosis(finding()), 120).splitlines()[-1]

    said = r"[\d-]{10} [\d:]{8} - [\d:]{8}, 30 s, 300 frames, diagnosed: GPUs 0-3, level: full"
    assert re.fullmatch(said, last) is not None


def test_what_cannot_be_told_without_gpm_is_said() -> None:
    """For the GPUs that lack it, and not for the others."""
    full, *others = diagnosis().judged
    judged = (full, *(other._replace(level="nvml_only") for other in others))

    lines = text(diagnosis(finding(inferred=True), judged=judged), 300).splitlines()

    assert any(line.startswith("Level    GPUs 1-3, NVML only: ") for line in lines)
    assert any("cannot be diagnosed: tensor_cores_unused" in line for line in lines)
    assert lines[-1].endswith("level: NVML only")
    assert any(", inferred, " in line for line in lines)
    assert "Level" not in text(diagnosis(finding()))


def test_foreign_text_is_harmless() -> None:
    """A program's name cannot move the cursor, whoever prints it."""

    evil = "\x1b[2J\u202e"
    about = diagnosis(
        finding(summary=f"GPU 0 runs {evil}", ruled_out=(f"x: {evil}",), advice=(Advice(evil, evil, evil),)),
        info=(finding(None, summary=evil),),
        data_gaps=(evil,),
    )

    assert not set(text(about)) & {"\x1b", "\u202e"}
