"""What is to be done on nodes, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from gpulse.cluster.agent.identity import state_name
from gpulse.cluster.client.address import agent_addresses
from gpulse.deploy.nodes import NodeSpec
from gpulse.deploy.script import Answer
from gpulse.errors import UsageError
from gpulse.model.device import SSH_LABEL
from gpulse.model.session import LONGEST_LABEL, MOST_LABELS

Verb = Literal["up", "restart", "down", "status", "purge"]

OWN_OPTIONS = frozenset({"--background", "--log-file", "--state-dir", "--token-file", "--node-name"})
"""Options of agents that a deploy chooses itself."""


class Order(NamedTuple):
    """What is to be done on each node."""

    verb: Verb
    head: str | None = None
    """For nodes that do not name one themselves."""
    words: tuple[str, ...] = ()
    """Options for the agents."""
    pieces: Mapping[str, bytes] = {}
    """Files for the agents: `token`, `ca.pem`, `cert.pem`, `key.pem`."""
    python: str | None = None
    """For nodes that do not name one themselves."""
    push: bool = False
    keep: bool = False
    """With `restart`: agents keep their head, options, token and certificates."""
    bare: bool = False
    """Agents that have a token lose it when none is sent along."""
    spool: bool = False
    """With `purge`: also frames that no head may have."""


class Outcome(NamedTuple):
    """What came of it on one node."""

    node: NodeSpec
    seconds: float
    did: str | None = None
    error: str | None = None
    """Why it failed, None when it did not."""
    hint: str | None = None
    state: str | None = None
    """`running`, `stopped`, `ended` (by itself), `absent`."""
    hostname: str | None = None
    """What the node calls itself."""
    pid: int | None = None
    since: int | None = None
    """When it was started, by the node's clock."""
    how: str | None = None
    """`session` (a process session of its own) or `systemd`."""
    version: str | None = None
    head: str | None = None
    link: str | None = None
    """How the agent stands with its head, by its log."""
    notes: tuple[str, ...] = ()
    pushed: bool = False
    heard: str | None = None
    """The state of the node at its head, where that was asked."""

    def document(self) -> dict[str, Any]:
        """For programs."""
        told = self._asdict()
        node = told.pop("node")
        return {
            "node": node.title,
            "host": node.host,
            "ok": self.error is None,
            **told,
            "notes": list(self.notes),
        }


def outcome_of(node: NodeSpec, answer: Answer, seconds: float, *, pushed: bool = False) -> Outcome:
    """What a node's answer says."""
    return Outcome(
        node,
        seconds,
        did=answer.first("did"),
        state=answer.first("state"),
        hostname=answer.first("node"),
        pid=answer.number("pid"),
        since=answer.number("since"),
        how=answer.first("how"),
        version=answer.first("version"),
        head=answer.first("head"),
        link=answer.first("link"),
        notes=tuple(answer.said.get("note", ())),
        pushed=pushed,
    )


def head_of(node: NodeSpec, order: Order) -> str:
    """Which head a node's agent is for.

    Raises:
        UsageError: None was named, or it is no address that an agent can use.
    """
    head = node.head or order.head
    if head is None:
        raise UsageError(
            f"it is not said which head {node.title} is for",
            hint="--head HOST:8090, the head as nodes see it",
        )
    agent_addresses(head)
    return head


def slug_of(head: str) -> str:
    """The part of a path that keeps the state for one head apart from that for others."""
    return state_name([address.target for address in agent_addresses(head)])


def words_for(node: NodeSpec, order: Order) -> list[str]:
    """The options of one node's agent.

    Raises:
        UsageError: They hold too many labels.
    """
    words = list(order.words)
    if node.name is not None:
        words += ["--node-name", node.name]
    labels = {SSH_LABEL: node.reached[:LONGEST_LABEL], **node.labels}
    for key, value in sorted(labels.items()):
        words += ["--label", f"{key}={value}"]
    count = sum(word == "--label" or word.startswith("--label=") for word in words)
    if count > MOST_LABELS:
        raise UsageError(
            f"{count} labels are too many", hint=f"{MOST_LABELS - 1} are the most: deploy adds one itself"
        )
    return words
