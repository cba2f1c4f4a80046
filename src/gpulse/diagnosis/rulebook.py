"""Every rule there is, in the order in which findings of the same severity are told."""

from __future__ import annotations

from gpulse.diagnosis.rule import Rule
from gpulse.diagnosis.rules import (
    clocks,
    contention,
    copy,
    fault,
    gpu_use,
    host,
    link,
    memory,
    network,
    node,
    pipeline,
    stall,
)

RULES: tuple[Rule, ...] = (
    *fault.RULES,
    *node.RULES,
    *clocks.RULES,
    *link.RULES,
    *memory.RULES,
    *stall.RULES,
    *contention.RULES,
    *copy.RULES,
    *pipeline.RULES,
    *host.RULES,
    *gpu_use.RULES,
    *network.RULES,
)

BY_ID = {rule.id: rule for rule in RULES}
