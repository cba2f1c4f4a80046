"""The network as the limit."""

from __future__ import annotations

from gpulse.diagnosis.case import Case
from gpulse.diagnosis.rule import Match, Rule
from gpulse.model.finding import Advice, Evidence


def network_saturated(case: Case) -> Match | None:
    """An interface is full, or loses packets."""
    t, seconds = case.t, case.stretch.steady
    known = [second.network for second in seconds if second.network[0]]
    if not known or 2 * len(known) < len(seconds):
        return None
    name = known[-1][0]
    busy = [values["busy_ratio"] for link, values in known if link == name]
    wrong = [values.get("error_ratio", 0.0) for link, values in known if link == name]
    used, errors = sum(busy) / len(busy), sum(wrong) / len(wrong)
    if used < t.network_busy and errors < t.network_errors:
        return None
    return Match(
        summary=f"uses a network that is full: {name} carries {used:.0%} of what it can, {errors:.1%} of the packets are lost",
        severity="medium",
        confidence=0.6,
        evidence=(
            Evidence(
                "network_busy_ratio", "mean", used, ">=", t.network_busy if used >= t.network_busy else 0.0
            ),
            Evidence(
                "network_error_ratio",
                "mean",
                errors,
                ">=",
                t.network_errors if errors >= t.network_errors else 0.0,
            ),
        ),
        lost_ratio=case.lost,
        start=case.stretch.start,
    )


RULES = (
    Rule(
        id="network_saturated",
        family="network",
        title="The network is full",
        means="An interface of the machine carries nearly all it can, or loses packets; what the job sends or fetches waits for it.",
        recognised="85 % of the interface's speed in one direction over the window, or 1 % of the packets in error.",
        severity="Medium.",
        advice=(
            Advice(
                "fewer bytes (gradient compression, larger local cache), overlap, or RDMA",
                "whatever waits for the network waits for its slowest link",
                "`gpulse -n` shows the interface below its limit again",
            ),
        ),
        check=network_saturated,
        needs=(),
        sources=("node exporter mixin: network errors",),
        shown=False,
    ),
)
