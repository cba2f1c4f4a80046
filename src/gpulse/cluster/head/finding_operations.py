"""The head's operations on findings: list and group them, acknowledge and silence them.

Acknowledgements and silences are restored from the head's events.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.cluster.head.active_findings import ActiveFinding, collect_active_findings
from gpulse.cluster.protocol import answers as a
from gpulse.cluster.protocol import requests as r
from gpulse.cluster.protocol.head_interface import LiveNode
from gpulse.errors import RefusedError
from gpulse.model.finding import Finding
from gpulse.model.finding_acknowledgement import (
    ACKNOWLEDGED_EVENT,
    MAX_KEY_CHARACTERS,
    MAX_KEYS,
    MAX_SILENCE_SECONDS,
    SILENCE_ENDED_EVENT,
    SILENCED_EVENT,
    FindingAcknowledgement,
    Silence,
)
from gpulse.reports.finding_report import (
    FindingCounts,
    FindingGroups,
    GroupItem,
    build_past_items,
    group_findings,
    group_past_findings,
)
from gpulse.reports.time_grid import ReportContext
from gpulse.store.store import Query, StoredEvent

MAX_SILENCES = 500
"""Maximum number of silences at a time."""
_INDEXED_FIELDS = ("gpus", "nodes", "jobs", "users", "findings")
"""Fields of a silence, the one that matches fewest findings first."""
_MAX_ACKNOWLEDGEMENTS = 20_000
"""Maximum number in memory; the oldest ones are dropped."""


class _SilenceIndex(NamedTuple):
    """Silences in an order and under names in which they are found quickly."""

    by_end: tuple[Silence, ...]
    """Those that end first first."""
    by_name: dict[tuple[str, str], list[Silence]]
    """By field and name of one of their fields, so that a finding is compared with few of them."""


class FindingResponses:
    """What people have acknowledged and silenced; bounded in size."""

    def __init__(self) -> None:
        self._acknowledged: dict[str, FindingAcknowledgement] = {}
        """By the key of the finding, in the order of their times."""
        self._silences: dict[str, Silence] = {}
        self._index: _SilenceIndex | None = None
        """None after a change, until it is needed."""
        self._ended: dict[str, float] = {}
        """When silences were ended, by ID: the end may become known before the start."""

    def restore(self, events: Iterable[StoredEvent]) -> None:
        """Apply stored events, oldest first."""
        for event in events:
            self.apply(event.kind, event.time, event.detail)

    def apply(self, kind: str, time: float, detail: Mapping[str, Any]) -> None:
        """Apply an event, in any order and any number of times; one that is not about responses changes nothing."""
        if kind == ACKNOWLEDGED_EVENT:
            self._acknowledge(time, detail)
        elif kind == SILENCED_EVENT:
            try:
                silence = Silence.from_dict(detail)
            except ValueError:  # of a newer version
                return
            self._silences[silence.id] = silence
        elif kind == SILENCE_ENDED_EVENT and isinstance(detail.get("id"), str):
            self._ended[detail["id"]] = time
        self._forget(time)

    def _acknowledge(self, time: float, detail: Mapping[str, Any]) -> None:
        keys, by, note = detail.get("keys"), detail.get("by"), detail.get("note")
        if not isinstance(keys, list) or not isinstance(by, str):
            return
        made = FindingAcknowledgement(time, by, note if isinstance(note, str) else None)
        for key in keys[:MAX_KEYS]:
            before = self._acknowledged.get(key) if isinstance(key, str) else made
            if before is None or (before.time < time and len(key) <= MAX_KEY_CHARACTERS):
                self._acknowledged.pop(key, None)
                self._acknowledged[key] = made
        while len(self._acknowledged) > _MAX_ACKNOWLEDGEMENTS:
            del self._acknowledged[next(iter(self._acknowledged))]

    def _forget(self, now: float) -> None:
        """Drop silences that are over."""
        over = [one.id for one in self._silences.values() if one.until <= now or one.id in self._ended]
        for number in over:
            del self._silences[number]
        self._index = None
        while len(self._ended) > MAX_SILENCES:
            del self._ended[next(iter(self._ended))]

    def acknowledgement(self, key: str, since: float) -> FindingAcknowledgement | None:
        """Return the acknowledgement of a finding whose condition began at `since`; None if there is none.

        One that was made before belongs to an earlier occurrence.
        """
        found = self._acknowledged.get(key)
        return found if found is not None and found.time >= since else None

    def silences(self, now: float) -> list[Silence]:
        """Return the silences that are in force, those that end first first."""
        return [one for one in self._indexed().by_end if now < one.until]

    def count_matches(self, findings: Iterable[ActiveFinding], now: float) -> Counter[str]:
        """Return how many findings each silence matches, by its ID."""
        return Counter(silence.id for finding in findings for silence in self._matching(finding, now))

    def silence_of(self, finding: ActiveFinding, now: float) -> Silence | None:
        """Return the last ending silence that matches a finding; None if there is none."""
        found = self._matching(finding, now)
        return max(found, key=lambda silence: (silence.until, silence.id), default=None)

    def _matching(self, finding: ActiveFinding, now: float) -> list[Silence]:
        """Return the silences in force that match a finding."""
        names = [
            ("gpus", f"{finding.node}:{finding.label}"),
            ("nodes", finding.node),
            *(("jobs", job) for job in finding.jobs),
            *(("users", user) for user in finding.users),
            ("findings", finding.finding),
            ("findings", finding.group),
        ]
        by_name = self._indexed().by_name
        found = {silence.id: silence for name in names for silence in by_name.get(name, ())}
        return [one for one in found.values() if now < one.until and is_about(one, finding)]

    def _indexed(self) -> _SilenceIndex:
        if self._index is None:
            by_end = tuple(sorted(self._silences.values(), key=lambda one: (one.until, one.id)))
            by_name: dict[tuple[str, str], list[Silence]] = {}
            for silence in by_end:
                field = next(name for name in _INDEXED_FIELDS if getattr(silence, name))
                for name in getattr(silence, field):
                    by_name.setdefault((field, name), []).append(silence)
            self._index = _SilenceIndex(by_end, by_name)
        return self._index

    def is_acknowledged(self, finding: ActiveFinding) -> bool:
        """Whether somebody has acknowledged a finding since its condition began."""
        return self.acknowledgement(finding.key, finding.since) is not None

    def is_silenced(self, finding: ActiveFinding, now: float) -> bool:
        """Whether a silence matches a finding now."""
        return self.silence_of(finding, now) is not None

    def find(self, silence_id: str, now: float) -> Silence:
        """Return a silence that is in force.

        Raises:
            RefusedError: There is none with this ID.
        """
        found = self._silences.get(silence_id)
        if found is None or found.until <= now:
            raise RefusedError(
                404,
                f"there is no active silence {silence_id[:100]!r}",
                hint="list the active silences with GET /api/v1/silences",
            )
        return found


def is_about(silence: Silence, finding: ActiveFinding) -> bool:
    """Whether a silence matches a finding."""
    return silence.matches(
        names=(finding.finding, finding.group),
        node=finding.node,
        label=finding.label,
        users=finding.users,
        jobs=finding.jobs,
    )


EventWriter = Callable[[str, float, dict[str, Any]], Awaitable[None]]
"""Writes an event of the head to the log, and returns when it is on disk and applied."""
_MIN_SILENCE_SECONDS = 1.0


class FindingService:
    """Operations on findings (`FindingOperations`)."""

    def __init__(
        self,
        *,
        nodes: Callable[[], Iterable[LiveNode]],
        missing: Callable[[], Sequence[Finding]],
        responses: FindingResponses,
        read: Callable[[r.GetFindingGroups, float], tuple[ReportContext, Query]],
        write_event: EventWriter,
        now: Callable[[], float],
    ) -> None:
        """Prepare to answer.

        Args:
            nodes: Returns the nodes with their current findings.
            missing: Returns the findings about expected nodes that have never reported.
            responses: What people have acknowledged and silenced.
            read: Returns the store and the query for a request about past findings.
            write_event: Writes an event of the head.
            now: The head's clock.
        """
        self._nodes = nodes
        self._missing = missing
        self._responses = responses
        self._read = read
        self._write_event = write_event
        self._now = now

    def active(self) -> list[ActiveFinding]:
        """Return all findings that hold now, faults first."""
        return collect_active_findings(self._nodes(), self._missing(), self._now(), self._responses)

    async def groups(self, request: r.GetFindingGroups) -> FindingGroups:
        """Return findings grouped by cause, current or past."""
        now = self._now()
        context, query = self._read(request, now)
        current = [
            item
            for item in self.active()
            if (not request.findings or item.finding in request.findings)
            and (not request.nodes or item.node in request.nodes)
        ]
        by_state = {
            "now": [item for item in current if not item.silenced],
            "acknowledged": [item for item in current if item.acknowledged],
            "silenced": [item for item in current if item.silenced],
        }
        past, is_cut, incomplete = await asyncio.to_thread(build_past_items, context, query, request.findings)
        groups = {
            state: group_findings((self._item(item, now) for item in items), now)
            for state, items in by_state.items()
        }
        groups["past"] = group_past_findings(past, now)
        return FindingGroups(
            time=now,
            state=request.state,
            start=query.start,
            end=query.end,
            counts=FindingCounts(**{state: len(found) for state, found in groups.items()}),
            groups=groups[request.state],
            truncated=is_cut,
            incomplete=incomplete,
        )

    def _item(self, active: ActiveFinding, now: float) -> GroupItem:
        silence = self._responses.silence_of(active, now)
        return GroupItem(
            active.node,
            active.reported,
            active.since,
            None,
            active.users,
            active.jobs,
            acknowledged=self._responses.acknowledgement(active.key, active.since),
            silence=None if silence is None else silence.id,
        )

    async def acknowledge(self, request: r.AcknowledgeFindings) -> a.AcknowledgedFindings:
        """Acknowledge findings that hold now.

        Raises:
            RefusedError: One of them does not hold now, or they are too many.
        """
        active = self.active()
        known = {item.key for item in active}
        for key in request.keys:
            if key not in known:
                raise RefusedError(
                    404,
                    f"there is no current finding {key[:100]!r}",
                    hint="list the current findings and their keys with GET /api/v1/findings",
                )
        keys = list(dict.fromkeys([*request.keys, *(x.key for x in active if x.group == request.group)]))
        if not keys:
            raise RefusedError(
                404,
                f"there is no current finding in group {str(request.group)[:100]!r}",
                hint="list the groups with GET /api/v1/findings/groups",
            )
        if len(keys) > MAX_KEYS:
            raise RefusedError(
                400,
                f"at most {MAX_KEYS} findings can be acknowledged at once",
                hint="send several requests, or silence the cause",
            )
        detail = {"keys": keys, "by": request.by, "note": request.note}
        await self._write_event(ACKNOWLEDGED_EVENT, self._now(), detail)
        noun = "finding" if len(keys) == 1 else "findings"
        return a.AcknowledgedFindings(
            success=True, message=f"{request.by} acknowledged {len(keys)} {noun}", keys=keys
        )

    def silences(self) -> a.Silences:
        """Return the silences that are in force."""
        now = self._now()
        matches = self._responses.count_matches(self.active(), now)
        return a.Silences(
            time=now, silences=[_describe(one, matches[one.id]) for one in self._responses.silences(now)]
        )

    async def silence(self, request: r.SilenceFindings) -> a.SilenceAnswer:
        """Silence findings until a time.

        Raises:
            RefusedError: There is no valid end, or there are too many silences.
        """
        now = self._now()
        made = Silence(
            secrets.token_hex(4),
            now,
            _find_end(request, now),
            request.reason,
            request.by,
            request.findings,
            request.nodes,
            request.gpus,
            request.users,
            request.jobs,
        )
        if len(self._responses.silences(now)) >= MAX_SILENCES:
            raise RefusedError(
                409, f"there are already {MAX_SILENCES} silences", hint="end some of the silences first"
            )
        await self._write_event(SILENCED_EVENT, now, made.to_dict())
        return _describe(made, self._count(made))

    async def end_silence(self, request: r.EndSilence) -> a.SilenceAnswer:
        """End a silence before its time.

        Raises:
            RefusedError: There is none with this ID.
        """
        now = self._now()
        found = self._responses.find(request.silence, now)
        await self._write_event(SILENCE_ENDED_EVENT, now, {"id": found.id, "by": request.by})
        return _describe(found._replace(until=now), self._count(found))

    def _count(self, silence: Silence) -> int:
        return sum(is_about(silence, finding) for finding in self.active())


def _find_end(request: r.SilenceFindings, now: float) -> float:
    """Return the end of a new silence.

    Raises:
        RefusedError: It has none, two, or one out of range.
    """
    if (request.until is None) == (request.seconds is None):
        raise RefusedError(
            409,
            "a silence requires either `until` or `seconds`, but not both",
            hint='for example: "seconds": "2h"',
        )
    until = float(request.until) if request.until is not None else now + float(request.seconds or 0.0)
    if not _MIN_SILENCE_SECONDS <= until - now <= MAX_SILENCE_SECONDS:
        raise RefusedError(
            409,
            f"a silence must end in the future, within {MAX_SILENCE_SECONDS / 86_400:.0f} days",
            hint="choose another end; the findings can be silenced again after it",
        )
    return until


def _describe(silence: Silence, matches: int) -> a.SilenceAnswer:
    fields = silence.to_dict()
    start = fields.pop("time")
    return a.SilenceAnswer(**fields, start=start, matches=matches)
