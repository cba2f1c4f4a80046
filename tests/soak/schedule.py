"""Schedule of disturbances: pure, and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

HEAD_RESTART = "restart head"
HEAD_KILL = "kill head"
HEAD_KILL_TWICE = "kill head twice"
AGENT_RESTART = "restart agent"
AGENT_KILL = "kill agent"
AGENT_OUTAGE = "agent outage"
DATABASE_KILL = "kill database"
PAGE_RELOAD = "reload page"
SHORT_SESSION = "short session"

HEAD_ACTIONS = (HEAD_RESTART, HEAD_KILL, HEAD_KILL_TWICE)
OTHER_ACTIONS = (AGENT_RESTART, AGENT_KILL, AGENT_OUTAGE, DATABASE_KILL, PAGE_RELOAD, SHORT_SESSION)

_QUIET_START_SECONDS = 8.0
_DISTURBED_RATIO = 0.7
"""Nothing is disturbed in the last part of a run, so that leaks and lost connections have time to show."""
_ROUND_SECONDS = 150.0


class Action(NamedTuple):
    """One disturbance."""

    at_seconds: float
    """After everything was up."""
    kind: str
    node: str = ""


def plan(seed: int, seconds: float, *, faulty: str, others: Sequence[str]) -> list[Action]:
    """Return the disturbances of a run, in their order.

    Args:
        seed: The same seed gives the same schedule.
        seconds: Length of the run.
        faulty: The node with the constant fault; its agent is restarted first, then killed, in turn.
        others: The other nodes whose agents may be restarted or killed.
    """
    chance = random.Random(seed)
    end = max(_QUIET_START_SECONDS, seconds * _DISTURBED_RATIO)
    rounds = max(1, int((end - _QUIET_START_SECONDS) / _ROUND_SECONDS))
    kinds = [kind for number in range(rounds) for kind in _round(chance, is_only=rounds == 1, number=number)]
    slot = (end - _QUIET_START_SECONDS) / len(kinds)
    actions = []
    turns = {AGENT_RESTART: 0, AGENT_KILL: 1, AGENT_OUTAGE: 1}
    for place, kind in enumerate(kinds):
        node = ""
        if kind in turns:
            is_faulty = kind != AGENT_OUTAGE and turns[kind] % 2 == 0
            node = faulty if is_faulty else chance.choice(list(others))
            turns[kind] += 1
        moment = _QUIET_START_SECONDS + slot * (place + chance.uniform(0.0, 0.5))
        actions.append(Action(round(moment, 1), kind, node))
    return actions


def _round(chance: random.Random, *, is_only: bool, number: int) -> list[str]:
    """Return every kind once; a single round restarts the head first, so that pages stay connected afterwards."""
    heads, others = list(HEAD_ACTIONS), list(OTHER_ACTIONS)
    chance.shuffle(heads)
    chance.shuffle(others)
    if is_only or number == 0:
        return heads + others
    mixed = heads + others
    chance.shuffle(mixed)
    return mixed


def describe(seed: int, actions: Sequence[Action]) -> str:
    """Return the schedule as text."""
    lines = [f"schedule of seed {seed}:"]
    lines += [f"  {action.at_seconds:7.1f} s  {action.kind} {action.node}".rstrip() for action in actions]
    return "\n".join(lines)
