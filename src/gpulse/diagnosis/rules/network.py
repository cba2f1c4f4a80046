"""Rules on the network."""

from __future__ import annotations

from gpulse.diagnosis.evidence import GpuEvidence
from gpulse.diagnosis.rule import Rule, RuleMatch, SignalText
from gpulse.model.finding import Advice, Evidence


def network_saturated(gpu: GpuEvidence) -> RuleMatch | None:
    """A network interface is saturated, or loses packets."""
    t, seconds = gpu.t, gpu.window.steady
    known = [second.network for second in seconds if second.network[0]]
    if not known or 2 * len(known) < len(seconds):
        return None
    name = known[-1][0]
    busy = [values["busy_ratio"] for link, values in known if link == name]
    wrong = [values.get("error_ratio", 0.0) for link, values in known if link == name]
    used, errors = sum(busy) / len(busy), sum(wrong) / len(wrong)
    if used < t.network_busy and errors < t.network_errors:
        return None
    return RuleMatch(
        summary=f"depends on a saturated network: {name} is at {used:.0%} of its capacity, and {errors:.1%} of its packets have errors",
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
        lost_ratio=gpu.lost,
        start=gpu.window.start,
    )


RULES = (
    Rule(
        id="network_saturated",
        family="network",
        title="The network is saturated",
        means="A network interface of this machine is nearly saturated, or drops packets, which delays everything that the job sends or receives.",
        recognised="The interface runs at 85% or more of its speed in one direction over the window, or at least 1% of its packets have errors.",
        severity="Medium.",
        advice=(
            Advice(
                "send less data (gradient compression, a larger local cache), overlap transfers with computation, or use RDMA",
                "every transfer is limited by its slowest network link",
                "`gpulse -n` should show the interface below its limit again",
            ),
        ),
        check=network_saturated,
        needs=(),
        limits=("network_busy", "network_errors"),
        quantities={
            "network_busy_ratio": SignalText("use of the network link", "share"),
            "network_error_ratio": SignalText("network packets with errors", "share"),
        },
        sources=("node exporter mixin: network errors",),
        shown=False,
    ),
)
