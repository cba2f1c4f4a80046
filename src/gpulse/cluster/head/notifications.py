"""Notifications of a head: the findings that hold now, and the notifier that they are given to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from gpulse.cluster.head.active_findings import ActiveFinding, ResponseLookup, collect_active_findings
from gpulse.cluster.head.finding_operations import FindingResponses
from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.idle_watch import IdleWatch
from gpulse.cluster.head.maintenance import FactWriter
from gpulse.cluster.notify.config import NotifyConfig
from gpulse.cluster.notify.idle_hook import IdleConfig, check_idle_policy
from gpulse.cluster.notify.notifier import Notifier
from gpulse.cluster.protocol.answers import NodeState, NotificationTarget
from gpulse.model.finding import Finding

_NODES_PER_PAUSE = 10
"""After this many nodes, other tasks of the head get their turn."""


class _NodeFindings(NamedTuple):
    """The active findings of one node, and what they were collected from."""

    reported: Sequence[Finding]
    state: NodeState
    active: list[ActiveFinding]


class ActiveFindingCache:
    """Active findings by node; agents report theirs at least every half minute, which updates users and jobs too."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._nodes: dict[int, _NodeFindings] = {}

    async def collect(
        self, missing: Iterable[Finding], now: float, responses: ResponseLookup | None
    ) -> list[ActiveFinding]:
        """Return all active findings of the nodes of this head.

        Args:
            missing: Findings about expected nodes that have never reported.
            now: Epoch seconds.
            responses: What people have acknowledged and silenced.
        """
        nodes: dict[int, _NodeFindings] = {}
        collected = 0
        for member in list(self._fleet.members.values()):
            if member.is_at_other_head or not (member.findings or member.state == "lost"):
                continue
            known = self._nodes.get(member.stored.id)
            if known is None or known.reported is not member.findings or known.state != member.state:
                active = collect_active_findings([self._fleet.live_node(member)], (), now)
                known = _NodeFindings(member.findings, member.state, active)
                collected += 1
                if collected % _NODES_PER_PAUSE == 0:
                    await asyncio.sleep(0)
            nodes[member.stored.id] = known
        self._nodes = nodes
        found = [active for node in nodes.values() for active in node.active]
        found += collect_active_findings((), missing, now)
        return found if responses is None else [_with_responses(one, responses, now) for one in found]


def _with_responses(finding: ActiveFinding, responses: ResponseLookup, now: float) -> ActiveFinding:
    is_acknowledged, is_silenced = responses.is_acknowledged(finding), responses.is_silenced(finding, now)
    if not is_acknowledged and not is_silenced:
        return finding
    return finding._replace(acknowledged=is_acknowledged, silenced=is_silenced)


_UPDATE_SECONDS = 1.0


class HeadNotifications:
    """The notifications of one head; without a configuration, it does nothing."""

    def __init__(self, config: NotifyConfig | None, data_dir: str, *, now: Callable[[], float]) -> None:
        """Prepare to notify.

        Args:
            config: The configuration; None for no notifications.
            data_dir: The head's data directory.
            now: The head's clock.

        Raises:
            UsageError: The hook for idle GPUs cannot be run.
        """
        self.notifier = None if config is None else Notifier(config, data_dir, now=now)
        """Accepts further messages; None for a head without notifications."""
        self._now = now
        self._directory = data_dir
        self._idle = None if config is None or config.idle is None else check_idle_policy(config.idle)
        self._responses: FindingResponses | None = None

    def use_responses(self, responses: FindingResponses) -> None:
        """Set what people have acknowledged and silenced: nothing new is sent or done about it."""
        self._responses = responses

    async def open(self, stack: AsyncExitStack) -> None:
        """Start to deliver; it ends with the stack.

        Raises:
            DiskError: The stored state cannot be read.
        """
        if self.notifier is not None:
            await asyncio.to_thread(self.notifier.start)
            stack.push_async_callback(asyncio.to_thread, self.notifier.close)

    def work(
        self,
        fleet: Fleet,
        missing: Callable[[], Sequence[Finding]],
        notes: FactWriter,
        interval_seconds: Callable[[], float],
    ) -> list[tuple[str, Coroutine[None, None, None]]]:
        """Return the tasks that run while the head runs, by name.

        Args:
            fleet: The nodes.
            missing: Returns the findings about expected nodes that have never reported.
            notes: Writes events.
            interval_seconds: Returns the sampling interval of agents without their own.
        """
        if self.notifier is None:
            return []
        tasks = [("notifications", self._run(self.notifier, fleet, missing))]
        if self._idle is not None:
            watch = IdleWatch(
                self._with_silences(self._idle),
                fleet,
                notes,
                self.notifier,
                self._directory,
                now=self._now,
                interval_seconds=interval_seconds,
            )
            tasks.append(("idle GPUs", watch.run()))
        return tasks

    def _with_silences(self, idle: IdleConfig) -> IdleConfig:
        """Return a policy that leaves alone what people have silenced."""
        if self._responses is None:
            return idle
        responses, now = self._responses, self._now
        exempt = idle.policy.exempt._replace(silences=lambda: responses.silences(now()))
        return idle._replace(policy=idle.policy._replace(exempt=exempt))

    def status(self) -> Sequence[NotificationTarget] | UnsetType:
        """Return how the deliveries to each target go."""
        if self.notifier is None:
            return UNSET
        return self.notifier.status()

    async def _run(self, notifier: Notifier, fleet: Fleet, missing: Callable[[], Sequence[Finding]]) -> None:
        cache = ActiveFindingCache(fleet)
        while True:
            await asyncio.sleep(_UPDATE_SECONDS)
            findings = await cache.collect(missing(), self._now(), self._responses)
            moved = {member.name for member in fleet.members.values() if member.is_at_other_head}
            notifier.update(findings, self._now(), moved_nodes=moved)
