"""What people do about findings: acknowledgements, silences with a reason and an end, and the keys by which they name findings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from gpulse.model.finding import MULTI_CAUSE_FINDING, NODE_FINDINGS, FindingKey

_UNQUOTED_CHARACTERS = "-._~#:@+"
"""Characters that stand unchanged in a part of a key, besides letters and digits."""


def active_key(node: str, key: FindingKey) -> str:
    """Return the key of a finding as one text: `gpu_fault/gpu-07/1/xid_94`, `node_lost/gpu-09`.

    Args:
        node: Name of its node.
        key: The key within the node.
    """
    rule_id, label, cause = key
    if rule_id in NODE_FINDINGS:
        label, cause = None, ""
    parts = [rule_id, node, label or "", cause]
    while not parts[-1]:
        parts.pop()
    return "/".join(quote(part, safe=_UNQUOTED_CHARACTERS) for part in parts)


def parse_active_key(text: str) -> tuple[str, FindingKey]:
    """Return the node and the finding key of a text that `active_key` made.

    Raises:
        ValueError: The text has not two to four parts.
    """
    parts = [unquote(part) for part in text.split("/")]
    if not 2 <= len(parts) <= 4 or not parts[0] or not parts[1]:
        raise ValueError(f"not a valid finding key: {text[:100]!r}")
    rule_id, node, label, cause = (*parts, "", "")[:4]
    return node, (rule_id, label or None, cause)


def group_key(key: FindingKey) -> str:
    """Return the key of all findings with the same cause: `ID`, or `ID/cause` for faults of several causes."""
    rule_id, _, cause = key
    parts = [rule_id, cause] if rule_id == MULTI_CAUSE_FINDING and cause else [rule_id]
    return "/".join(quote(part, safe=_UNQUOTED_CHARACTERS) for part in parts)


ACKNOWLEDGED_EVENT, SILENCED_EVENT, SILENCE_ENDED_EVENT = (
    "findings_acknowledged",
    "silence_started",
    "silence_ended",
)
RESPONSE_EVENTS = frozenset({ACKNOWLEDGED_EVENT, SILENCED_EVENT, SILENCE_ENDED_EVENT})
"""Kinds of the events that record who did what, when and why. A head restores its state from them."""
MAX_SILENCE_SECONDS = 30 * 86_400.0
MAX_KEY_CHARACTERS = 1000
MAX_KEYS = 1000
"""Maximum number of findings that are acknowledged at once."""
MAX_CHOICES = 100
"""Maximum number of names in each field of a silence."""
_MAX_CHARACTERS = 200


class FindingAcknowledgement(NamedTuple):
    """Somebody knows of a finding and takes care of it; it holds as long as the condition lasts."""

    time: float
    by: str
    note: str | None = None


class Silence(NamedTuple):
    """Findings that nobody wants to be told about until a time.

    A finding must match every field that is not empty. It matches users and jobs if all of its own are listed, so that
    a silence for one user does not hide what affects another.
    """

    id: str
    time: float
    """When it was made, in epoch seconds."""
    until: float
    reason: str
    by: str
    findings: tuple[str, ...] = ()
    """IDs of rules, or of groups such as `gpu_fault/xid_94`."""
    nodes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    """GPUs as `node:label`."""
    users: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()

    def matches(
        self,
        *,
        names: tuple[str, ...],
        node: str,
        label: str | None,
        users: tuple[str, ...],
        jobs: tuple[str, ...],
    ) -> bool:
        """Whether it is about a finding.

        Args:
            names: The ID of the finding and that of its group.
            node: Its node.
            label: Its GPU; None for a finding about the node.
            users: Its users.
            jobs: Its jobs.
        """
        chosen = (
            (self.findings, any(name in self.findings for name in names)),
            (self.nodes, node in self.nodes),
            (self.gpus, label is not None and f"{node}:{label}" in self.gpus),
            (self.users, bool(users) and set(users) <= set(self.users)),
            (self.jobs, bool(jobs) and set(jobs) <= set(self.jobs)),
        )
        return any(wanted for wanted, _ in chosen) and all(is_met for wanted, is_met in chosen if wanted)

    def to_dict(self) -> dict[str, Any]:
        """Return the silence as JSON types."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in self._asdict().items()
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Silence:
        """Return the silence of a `to_dict` document.

        Raises:
            ValueError: A field is missing or invalid.
        """
        texts = [document.get(name) for name in ("id", "reason", "by")]
        times = [document.get(name) for name in ("time", "until")]
        lists = {name: _names(document.get(name)) for name in _LISTS}
        if not all(isinstance(text, str) and 0 < len(text) <= _MAX_CHARACTERS for text in texts):
            raise ValueError("a silence must have an ID, a reason and an author")
        if not all(is_time(moment) for moment in times) or times[1] > times[0] + MAX_SILENCE_SECONDS:  # type: ignore[operator]
            raise ValueError("a silence must have a start and an end")
        if not any(lists.values()):
            raise ValueError("a silence must name findings, nodes, GPUs, users or jobs")
        return cls(
            str(texts[0]), float(str(times[0])), float(str(times[1])), str(texts[1]), str(texts[2]), **lists
        )


_LISTS = ("findings", "nodes", "gpus", "users", "jobs")


def _names(listed: Any) -> tuple[str, ...]:
    if listed is None:
        return ()
    if not isinstance(listed, list | tuple) or len(listed) > MAX_CHOICES:
        raise ValueError(
            f"findings, nodes, GPUs, users and jobs of a silence must be lists of at most {MAX_CHOICES} names"
        )
    if not all(isinstance(name, str) and 0 < len(name) <= MAX_KEY_CHARACTERS for name in listed):
        raise ValueError(f"each name in a silence must be a string of 1 to {MAX_KEY_CHARACTERS} characters")
    return tuple(listed)


def is_time(value: Any) -> bool:
    """Whether a value of a document is a time in epoch seconds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
