"""Findings that a head makes about its nodes, by whether they report: no frame of theirs can show them."""

from __future__ import annotations

from gpulse.diagnosis.rule import Match, Rule, found
from gpulse.model.finding import Advice, Evidence, Finding

_AGENT = Advice(
    "see whether the machine is up and reachable, then start its agent: `gpulse agent HEAD` there, or `gpulse deploy up --nodes FILE --head HEAD` for all nodes of a list",
    "nothing is known of its GPUs and jobs while it does not report",
    "`gpulse status` shows the node as healthy",
)
_NAME = Advice(
    "start an agent there with `gpulse deploy up --nodes FILE --head HEAD`, or correct the name in the list of nodes",
    "a node that never reported is not monitored at all, and its faults are not seen",
    "`gpulse status` does not list the node as missing any more",
)

NODE_LOST = Rule(
    id="node_lost",
    family="fault",
    title="A node has stopped reporting",
    means="The head receives nothing from the agent of this node any more: the machine is down, the network between them is broken, or the agent has ended. What happens on its GPUs is unknown.",
    recognised="No report for 30 s, or for ten sampling intervals where those are longer. It ends when the node reports again.",
    severity="Critical when the reports just stopped, medium when somebody stopped the agent in the regular way.",
    advice=(_AGENT,),
    sources=("gpulse: when the head last heard the node",),
)
NODE_MISSING = Rule(
    id="node_missing",
    family="fault",
    title="An expected node has never reported",
    means="The node is in the list of nodes that the head was given, and no agent of that name has ever connected.",
    recognised="The name is in `--nodes`, and no node goes by it. It ends when the node reports, or is taken off the list.",
    severity="High.",
    advice=(_NAME,),
    sources=("gpulse: the list of nodes that the head was given",),
)
RULES = (NODE_LOST, NODE_MISSING)


def node_lost(name: str, last_heard: float, now: float, *, was_stopped: bool) -> Finding:
    """Return the finding about a node that has stopped reporting.

    Args:
        name: The node's.
        last_heard: When something came from it last, in epoch seconds.
        now: Epoch seconds.
        was_stopped: Whether its agent was stopped in the regular way.
    """
    summary = f"{name} does not report any more"
    if was_stopped:
        summary = f"the agent of {name} was stopped and has not started again"
    match = Match(
        summary=summary,
        severity="medium" if was_stopped else "critical",
        confidence=1.0,
        evidence=(Evidence("last_heard_timestamp_seconds", "now", round(last_heard, 3), ">", 0),),
        start=last_heard,
        end=now,
    )
    return found(NODE_LOST, match)


def node_missing(name: str, since: float, now: float) -> Finding:
    """Return the finding about a node that was expected since then and never reported.

    Args:
        name: The node's, as the list of nodes has it.
        since: Epoch seconds.
        now: Epoch seconds.
    """
    match = Match(
        summary=f"{name} is in the list of nodes and has never reported",
        severity="high",
        confidence=1.0,
        evidence=(Evidence("expected_since_timestamp_seconds", "now", round(since, 3), ">", 0),),
        start=since,
        end=now,
        cause=name,
    )
    return found(NODE_MISSING, match)
