"""Compare two runs: recordings for `gpulse why --compare`, sessions or their files for `gpulse session compare`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from gpulse.cli import common, gpu_selection, head_client
from gpulse.cli.progress import WaitNotice, WatchProgress
from gpulse.cli.why_sources import RecordingRange, check_file
from gpulse.errors import UsageError
from gpulse.export.session_report.file_reader import read_report
from gpulse.export.session_report.session_figures import session_file_figures
from gpulse.reports.recorded_run import RecordedRun
from gpulse.reports.run_comparison import (
    ComparedFinding,
    ComparedQuantity,
    ComparedRun,
    Outcome,
    RunComparison,
    compare_runs,
)
from gpulse.reports.run_figures import RunFigures
from gpulse.sources.recording_reader import Recording
from gpulse.terminal import value_format as f
from gpulse.terminal.table import Paint, TableCell, TableColumn, render_table, wrap

EXIT_CODES: dict[Outcome, int] = {
    "better": 0,
    "no_clear_change": 0,
    "worse": 1,
    "mixed": 1,
    "unknown": 3,
}
_SUFFIXES = (".json", ".jsonl")
_OUTCOME_STYLES = {
    "better": "good",
    "worse": "warn",
    "mixed": "notice",
    "no_clear_change": "title",
    "unknown": "notice",
}
_EFFECT_STYLES = {"better": "good", "worse": "warn", "none": ""}
_FINDING_STYLES = {"gone": "good", "new": "warn", "stayed": "notice"}
_MAX_FINDINGS = 12


def compare_recordings(
    paths: tuple[Path, Path],
    choose: gpu_selection.FrameFilter,
    progress: WatchProgress,
    *,
    start: str | None,
    end: str | None,
    window: float | None,
) -> RunComparison:
    """Compare two recordings.

    Args:
        paths: The recordings before and after a change.
        choose: Selects GPUs.
        progress: Shows how far reading is.
        start: Where to start in each of them, as in `--from`.
        end: Where to end in each of them, as in `--to`.
        window: Length of each diagnosed window; None diagnoses a short recording as a whole.

    Raises:
        UsageError: One of them is not a file.
        RecordingError: One of them cannot be read.
    """
    for path in paths:
        check_file(path)
    before, after = (_read_run(path, RecordingRange(start, end), choose, window, progress) for path in paths)
    return compare_runs(before, after)


def _read_run(
    path: Path,
    part: RecordingRange,
    choose: gpu_selection.FrameFilter,
    window: float | None,
    progress: WatchProgress,
) -> RunFigures:
    run = RecordedRun(path.name, window_seconds=window)
    for count, frame in enumerate(part.of(iter(Recording(path)))):
        run.feed(choose(frame))
        progress.reading(path, count)
    figures = run.finish()
    return figures if part.missing is None else figures._replace(missing=part.missing)


def print_comparison(comparison: RunComparison, *, as_json: bool, no_color: bool) -> int:
    """Print a comparison, and return the exit code."""
    if as_json:
        document = msgspec.json.format(msgspec.json.encode(comparison), indent=2)
        common.write(document.decode())
    else:
        paint = common.paint(no_color=no_color)
        for line in comparison_lines(comparison, common.terminal_width(), paint):
            common.write(line)
    return EXIT_CODES[comparison.outcome]


def compare_sessions(chosen: head_client.HeadTarget, before: str, after: str) -> RunComparison:
    """Compare two sessions, each a name or ID at the head, or a file.

    A head compares its own sessions, because it has more than their files. With a file, both are compared as files.

    Raises:
        UsageError: A file is missing.
        RecordingError: A file cannot be read.
        GpulseError: The head does not answer, or has no such session.
    """
    files = find_file(before), find_file(after)
    if files == (None, None):
        with head_client.connect_to_head(chosen) as head, WaitNotice("comparing"):
            return head.call("compare", RunComparison, {"before": before, "after": after})
    first, second = (
        _download_figures(chosen, name) if file is None else session_file_figures(read_report(file))
        for name, file in zip((before, after), files, strict=True)
    )
    return compare_runs(first, second)


def find_file(given: str) -> Path | None:
    """Return the file that an argument names; None if it is the name or the ID of a session.

    Raises:
        UsageError: It can only be a file, and there is none.
    """
    path = Path(given)
    try:
        is_file = path.is_file()
    except OSError:  # such as a name that is too long for a file
        is_file = False
    if is_file:
        return path
    if "/" in given or path.suffix in _SUFFIXES:
        raise UsageError(
            f"there is no file {given}", hint="export a session to a file with: gpulse session export NAME"
        )
    return None


def _download_figures(chosen: head_client.HeadTarget, name: str) -> RunFigures:
    with (
        tempfile.TemporaryDirectory(prefix="gpulse-") as directory,
        head_client.connect_to_head(chosen) as head,
        WaitNotice(f"downloading {name}"),
    ):
        path = Path(directory) / "session.jsonl"
        with path.open("wb") as file:
            head.client.download(name, "jsonl", file)
        return session_file_figures(read_report(path))


def comparison_lines(comparison: RunComparison, width: int, paint: Paint) -> Iterator[str]:
    """Yield the whole comparison as lines no wider than `width`."""
    style = _OUTCOME_STYLES[comparison.outcome]
    yield paint(style, comparison.title)
    yield from wrap(f.plain(comparison.verdict), width)
    sections = (
        _runs(comparison, width, paint),
        _quantities("", comparison.quantities, width, paint) if comparison.outcome != "unknown" else (),
        _quantities("Lost time", comparison.lost_time, width, paint),
        _findings(comparison.findings, width, paint),
        _notes(comparison.notes, width, paint),
    )
    for section in sections:
        lines = list(section)
        if lines:
            yield ""
            yield from lines


def _runs(comparison: RunComparison, width: int, paint: Paint) -> Iterator[str]:
    columns = (
        TableColumn("", right=False),
        TableColumn("Name", right=False, least=10),
        TableColumn("Start", right=False, drop=3, optional=True),
        TableColumn("Compared"),
        TableColumn("GPUs"),
        TableColumn("Model", right=False, drop=2, least=8, optional=True),
        TableColumn("Program", right=False, drop=1, least=8, optional=True),
    )
    rows = [_run("before", comparison.before), _run("after", comparison.after)]
    yield from render_table(columns, rows, width, paint)


def _run(which: str, run: ComparedRun) -> list[str]:
    return [
        which,
        f.plain(run.name),
        "" if run.start is None else f.local_time(run.start),
        f.duration(run.compared_seconds),
        str(run.gpus),
        f.plain(", ".join(run.models)),
        "" if run.programs is None else f.plain(", ".join(run.programs)),
    ]


def _quantities(title: str, rows: Sequence[ComparedQuantity], width: int, paint: Paint) -> Iterator[str]:
    if not rows:
        return
    columns = (
        TableColumn(title, right=False, least=16),
        TableColumn("before"),
        TableColumn("after"),
        TableColumn("change", right=False, drop=1),
    )
    cells: list[list[TableCell | str]] = [
        [
            f.plain(row.title),
            row.before_text,
            TableCell(row.after_text, _EFFECT_STYLES[row.effect]),
            TableCell(row.change_text, _EFFECT_STYLES[row.effect] or "dim"),
        ]
        for row in rows
    ]
    yield from render_table(columns, cells, width, paint)


def _findings(findings: Sequence[ComparedFinding], width: int, paint: Paint) -> Iterator[str]:
    if not findings:
        return
    yield paint("title", "Findings")
    for finding in findings[:_MAX_FINDINGS]:
        style = _FINDING_STYLES[finding.change]
        loss = f"; {finding.loss_text}" if finding.loss_text else ""
        text = f"  {finding.id}: {finding.change_text}{loss}"
        yield from (paint(style, line) for line in wrap(f.plain(text), width, "    "))
    if len(findings) > _MAX_FINDINGS:
        yield paint("dim", f"  and {len(findings) - _MAX_FINDINGS} more")


def _notes(notes: Sequence[str], width: int, paint: Paint) -> Iterator[str]:
    if not notes:
        return
    yield paint("title", "Notes")
    for note in notes:
        yield from (paint("dim", line) for line in wrap(f.plain(f"  {note}"), width, "    "))
