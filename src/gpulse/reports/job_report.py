"""A report about a job, from what was found of it: figures of the whole, of each GPU, and what is not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gpulse.model import iso_time
from gpulse.model.natural import natural_key
from gpulse.model.units import duration
from gpulse.reports import efficiency, job_series, usage
from gpulse.reports.document import Document
from gpulse.reports.efficiency import GpuKey, GpuUse
from gpulse.reports.gaps import Missing, seconds_of
from gpulse.reports.gpu_use import LACKING_RATIO, Found
from gpulse.reports.occupancy import Work
from gpulse.reports.owners import owner_of, text
from gpulse.reports.subject import Subject
from gpulse.reports.usage import STEP_SECONDS, Tally

_MOST_GPUS = 4096
_MOST_GAPS = 100
_MOST_NAMED = 6


def document(
    found: Found, uses: Sequence[GpuUse], gaps: Sequence[Missing], findings: list[Document], points: int
) -> Document:
    """The report as the API tells it.

    Args:
        found: What the store says.
        uses: What the subject had of each GPU.
        gaps: When nothing is known.
        findings: What was wrong.
        points: The most steps of what is told over time; 0 for none of it.
    """
    subject, told, whole = found.subject, found.subject.told, _whole(uses)
    worked = _worked(uses)
    everybody = [share for some in found.shares.values() for share in some]
    return {
        "job": subject.name,
        "kind": subject.kind,
        "state": subject.state,
        "name": told.get("name"),
        "array": told.get("array"),
        "user": told.get("user") or _user(found),
        "partition": told.get("partition"),
        "account": told.get("account"),
        "program": None if subject.kind == "session" else whole.program,
        "from": subject.start,
        "to": subject.end,
        "to_now": subject.is_now,
        "step": found.moments.step,
        "nodes": sorted(
            (found.names[node] for node in subject.nodes if node in found.names), key=natural_key
        ),
        "gpus": len(uses),
        "processes": len(whole.processes),
        "allocated_seconds": _sum(use.granted_seconds for use in uses),
        "unused_seconds": _sum(use.unused_seconds for use in uses),
        "untouched_gpus": _untouched(subject, uses),
        **efficiency.had(whole, (use.held for use in uses)),
        "metrics": {
            metric: figure.document(metric)
            for metric, figure in efficiency.together(use.figures for use in worked).items()
        },
        "cluster": efficiency.everybody(
            everybody, found.harvested, usage.capacity(everybody, found.gpus.values())
        ),
        "findings": findings,
        "truncated": len(uses) > _MOST_GPUS,
        "gpu_rows": [use.document(found.names[use.key[0]]) for use in uses[:_MOST_GPUS]],
        "missing_seconds": seconds_of(gaps),
        "missing": [
            {"node": found.names[gap.node], "from": gap.start, "to": gap.end} for gap in gaps[:_MOST_GAPS]
        ],
        "data_gaps": list(_untold(found, uses, gaps)),
        "series": job_series.drawn(
            found.steps, {use.key for use in worked}, found.moments, points, _labels(found)
        ),
    }


def _whole(uses: Sequence[GpuUse]) -> Tally:
    """What the subject's processes had of all GPUs together."""
    whole = Tally()
    for use in uses:
        whole.include(use.tally)
    return whole


def _worked(uses: Sequence[GpuUse]) -> Sequence[GpuUse]:
    """The GPUs that means are of: those that were never touched are told by themselves."""
    return [use for use in uses if use.use != "untouched"] or uses


def _user(found: Found) -> str | None:
    """Whose most of its processes are; a session is nobody's."""
    users = Counter(
        user for process in found.subject.processes if (user := text(owner_of(process).get("user")))
    )
    return users.most_common(1)[0][0] if users else None


def _sum(values: Iterable[float | None]) -> float | None:
    """What is known, added up; None when nothing is."""
    known = [value for value in values if value is not None]
    return round(sum(known), 3) if known else None


def _untouched(subject: Subject, uses: Sequence[GpuUse]) -> int | None:
    if subject.kind != "session" and not any(use.granted_seconds is not None for use in uses):
        return None
    return sum(use.use == "untouched" for use in uses)


def _labels(found: Found) -> dict[GpuKey, Document]:
    return {
        key: {
            "node": found.names[key[0]],
            "gpu": found.gpus[key].label if key in found.gpus else None,
            "uuid": key[1],
        }
        for key in found.steps
    }


def _untold(found: Found, uses: Sequence[GpuUse], gaps: Sequence[Missing]) -> Iterator[str]:
    """What the report does not know, in words."""
    subject = found.subject
    yield from subject.untold
    if not uses:
        yield "no GPU of it was ever seen"
    if subject.kind == "job" and uses and not any(use.granted_seconds is not None for use in uses):
        yield "which GPUs the scheduler allocated is not known, only those that processes held"
    for use in uses:
        if use.use == "unattributed":
            yield f"{_name(found, use)} was busy, but no process of the job was seen on it"
    untabled = [use for use in uses if use.untabled_seconds]
    if untabled:
        most = duration(max(use.untabled_seconds for use in untabled))
        yield (
            f"which processes were on GPUs is not known for {most}, and what they had then is in no figure of: "
            f"{_named(found, untabled)}"
        )
    unknown = [use for use in uses if use.tally.processes and not use.held.known]
    if unknown:
        yield f"how busy they were is not known of: {_named(found, unknown)}"
    partly = [use for use in uses if use.held.known and _lacks(use.held)]
    if partly:
        known, held = sum(use.held.known for use in partly), sum(use.held.seconds for use in partly)
        yield f"how busy they were is known for {100 * known / held:.0f}% of the time only of: {_named(found, partly)}"
    shared = [use for use in uses if use.is_shared and use.tally.processes]
    if shared and subject.kind != "session":
        yield f"others held some at the same time, and their work is in the means of: {_named(found, shared)}"
    yield from found.incomplete
    slow = [use for use in shared if found.occupied[use.key].pace.usual > STEP_SECONDS]
    if slow:
        yield f"samples are more than a minute apart, and GPU time of what was shared is too short of: {_named(found, slow)}"
    for node in sorted({gap.node for gap in gaps}, key=lambda node: natural_key(found.names[node])):
        own = [gap for gap in gaps if gap.node == node]
        yield (
            f"nothing is known of {found.names[node]} for {duration(sum(gap.seconds for gap in own))}"
            f" between {iso_time.iso(own[0].start)} and {iso_time.iso(own[-1].end)}"
        )


def _lacks(work: Work) -> bool:
    """Whether it is not known for some of its time how busy a GPU was."""
    return work.seconds - work.known > max(STEP_SECONDS, LACKING_RATIO * work.seconds)


def _name(found: Found, use: GpuUse) -> str:
    return f"{found.names[use.key[0]]}:{use.key[1] if use.gpu is None else use.gpu.label}"


def _named(found: Found, some: Sequence[GpuUse]) -> str:
    more = len(some) - _MOST_NAMED
    return ", ".join(_name(found, use) for use in some[:_MOST_NAMED]) + (
        f" and {more} more" if more > 0 else ""
    )
