"""What the driver's Xid codes ask for, after NVIDIA's catalogue of them."""

from __future__ import annotations

from typing import NamedTuple

from gpulse.model.finding import Advice, Severity

_RESTART = frozenset(
    {8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 75, 76, 77, 80, 88, 89, 94, 139}
    | set(range(68, 73))
    | set(range(82, 87))
    | set(range(96, 106))
    | set(range(126, 136))
)
_ECHO = frozenset({37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 157, 160, 161})
_RESET = frozenset({46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
_REBOOT = frozenset({79})
_MECHANICAL = frozenset({54})

_NAMES = {
    13: "a kernel did something illegal",
    31: "a kernel touched memory that is not its own",
    43: "a program was stopped",
    45: "a program was ended",
    48: "memory error that cannot be corrected",
    54: "a power cable is missing",
    62: "the power controller halted",
    63: "a memory row was remapped",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected memory errors",
    94: "memory error, contained to one program",
    95: "memory error, not contained",
    119: "the GPU's firmware does not answer",
    120: "the GPU's firmware failed",
    140: "memory errors",
    154: "the driver asks for a recovery",
}


class Class(NamedTuple):
    """What a code means for whoever sees it."""

    severity: Severity
    words: str
    advice: Advice


def classify(code: int) -> Class:
    """The class of an Xid code."""
    name = _NAMES.get(code)
    if code in _REBOOT:
        return _class("critical", name, "reboot the node", "the driver has lost the GPU")
    if code in _MECHANICAL:
        return _class(
            "critical", name, "check the GPU's power cables and seating", "it has no power of its own"
        )
    if code in _RESET:
        return _class(
            "critical",
            name,
            "stop its jobs and reset the GPU (`nvidia-smi -r`)",
            "it does not recover by itself",
        )
    if code in _RESTART:
        return _class(
            "high",
            name,
            "restart the program, and see its own errors first",
            "most of these are the program's doing",
        )
    if code in _ECHO:
        return _class(
            "low", name, "look for another Xid just before it", "this one only follows from something else"
        )
    return _class(
        "high", name, "follow NVIDIA's steps for this code", "what to do depends on what came with it"
    )


def _class(severity: Severity, name: str | None, do: str, why: str) -> Class:
    confirm = (
        "`dmesg | grep -i xid`; the same program on another GPU tells whether program or board is at fault"
    )
    return Class(severity, f" ({name})" if name else "", Advice(do, why, confirm))
