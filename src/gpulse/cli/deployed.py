"""What `gpulse deploy` shows: how far it is, a table of nodes at the end, and who failed and why."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

from gpulse.cli import shell
from gpulse.terminal import format as f
from gpulse.terminal.table import Cell, Column, Paint, render

if TYPE_CHECKING:
    from rich.progress import Progress

    from gpulse.deploy.nodes import NodeSpec
    from gpulse.deploy.order import Outcome

_NAMED = 3
_STYLES = {"running": "good", "ended": "warn", "failed": "warn", "stopped": "notice", "connected": "good"}
_WORK_COLUMNS = (
    Column("node", right=False),
    Column("state", right=False),
    Column("what was done", right=False, least=12),
    Column("head", right=False, drop=2, least=9, optional=True),
    Column("seconds", drop=1),
)
_STATUS_COLUMNS = (
    Column("node", right=False),
    Column("state", right=False),
    Column("calls itself", right=False, drop=5, optional=True),
    Column("since", right=False, drop=2, optional=True),
    Column("pid", drop=4, optional=True),
    Column("version", right=False, drop=3, optional=True),
    Column("head", right=False, drop=6, least=10, optional=True),
    Column("connection", right=False, least=9),
    Column("head says", right=False, drop=1, optional=True),
)


class View:
    """Shows how far the work is: a bar on a terminal, a line a node elsewhere, nothing at all when it is quiet."""

    def __init__(self, title: str, count: int, *, quiet: bool) -> None:
        self.outcomes: list[Outcome] = []
        self._title = title
        self._count = count
        self._quiet = quiet
        self._busy: dict[str, float] = {}
        self._failed = 0
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar()
            self._bar.add_task(self._title, total=self._count, busy="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def unfinished(self) -> list[str]:
        """The nodes on which work has begun and not ended."""
        return list(self._busy)

    def begun(self, node: NodeSpec) -> None:
        """Work on a node begins."""
        self._busy[node.title] = time.monotonic()
        self._draw()

    def done(self, outcome: Outcome) -> None:
        """It ended, well or not."""
        self.outcomes.append(outcome)
        self._busy.pop(outcome.node.title, None)
        self._failed += outcome.error is not None
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])
            self._draw()
        elif not self._quiet:
            shell.remark(f"{f.plain(outcome.node.title)}: {summary(outcome)} ({outcome.seconds:.1f} s)")

    def _draw(self) -> None:
        if self._bar is None:
            return
        longest = sorted(self._busy, key=lambda title: self._busy[title])
        busy = ", ".join(map(f.plain, longest[:_NAMED]))
        busy += f" and {len(longest) - _NAMED} more" if len(longest) > _NAMED else ""
        failed = f"  {self._failed} failed" if self._failed else ""
        self._bar.update(self._bar.task_ids[0], busy=f"{busy}{failed}")


def _bar() -> Progress:
    from rich.console import Console  # noqa: PLC0415  a terminal alone needs it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[busy]}", markup=False),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def summary(outcome: Outcome) -> str:
    """One node in a few words."""
    if outcome.error is not None:
        return f"failed: {f.plain(outcome.error)}"
    words = outcome.did or outcome.state or "done"
    return f"{'gpulse copied, ' if outcome.pushed else ''}{f.plain(words)}"


def work_table(outcomes: Sequence[Outcome], *, width: int, paint: Paint) -> list[str]:
    """The nodes with what was done there."""
    return render(_WORK_COLUMNS, map(_work_row, outcomes), width, paint)


def _work_row(outcome: Outcome) -> list[Cell | str]:
    state = "failed" if outcome.error is not None else outcome.state or "-"
    return [
        f.plain(outcome.node.title),
        Cell(f.plain(state), _STYLES.get(state, "")),
        summary(outcome).removeprefix("failed: "),
        _link(outcome) if outcome.state == "running" else "-",
        f"{outcome.seconds:.1f}",
    ]


def status_table(outcomes: Sequence[Outcome], *, now: float, width: int, paint: Paint) -> list[str]:
    """The nodes with what runs there."""
    return render(_STATUS_COLUMNS, (_status_row(outcome, now) for outcome in outcomes), width, paint)


def _status_row(outcome: Outcome, now: float) -> list[Cell | str]:
    state = "failed" if outcome.error is not None else outcome.state or "-"
    named = None if outcome.hostname in (outcome.node.host, outcome.node.title) else outcome.hostname
    since = "-" if outcome.since is None else f.since(outcome.since, now).removeprefix("since ")
    return [
        f.plain(outcome.node.title),
        Cell(f.plain(state), _STYLES.get(state, "")),
        f.plain(named),
        since,
        "-" if outcome.pid is None else str(outcome.pid),
        f.plain(outcome.version),
        f.plain(outcome.head),
        Cell(f.plain(outcome.error)) if outcome.error is not None else _link(outcome),
        Cell(f.plain(outcome.heard), "good" if outcome.heard == "healthy" else "notice"),
    ]


def _link(outcome: Outcome) -> Cell:
    text = f.plain(outcome.link)
    return Cell(text, _STYLES.get(text, "notice" if outcome.link else ""))


def failures(outcomes: Iterable[Outcome]) -> Iterator[tuple[list[str], str, str | None]]:
    """Who failed, why, and what to try; those that failed for one reason together."""
    reasons: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            reasons.setdefault(outcome.error, []).append(outcome)
    for reason, failed in reasons.items():
        hint = failed[0].hint
        if hint and any(outcome.hint != hint for outcome in failed):
            hint = f"{hint} (that is for {f.plain(failed[0].node.title)})"
        yield [f.plain(outcome.node.title) for outcome in failed], f.plain(reason), hint
