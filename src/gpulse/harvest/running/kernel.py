"""The few calls to the kernel that Python has no words for."""

from __future__ import annotations

import ctypes
import os

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SYS_IOPRIO_SET = {
    "x86_64": 251,
    "aarch64": 30,
    "riscv64": 30,
    "loongarch64": 30,
    "ppc64le": 273,
    "s390x": 282,
}
_IOPRIO_WHO_PROCESS = 1


def set_subreaper(yes: bool) -> None:
    """Whether descendants whose parents end become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(yes))


def is_subreaper() -> bool:
    """True when descendants whose parents end become children of this process."""
    answer = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer))
    return bool(answer.value)


def set_name(name: str) -> None:
    """What this process is called in lists of processes; the kernel keeps fifteen bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def set_io_priority(value: int) -> None:
    """How this process and its children stand in the queues of disks.

    Raises:
        OSError: The kernel refuses, or it is not known how to ask it on this kind of machine.
    """
    machine = os.uname().machine
    call = _SYS_IOPRIO_SET.get(machine)
    if call is None:
        raise OSError(f"not known how to on {machine}")
    library = ctypes.CDLL(None, use_errno=True)
    _check(library.syscall(ctypes.c_long(call), _IOPRIO_WHO_PROCESS, 0, value))


def _prctl(option: int, argument: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    nothing = ctypes.c_ulong(0)
    _check(library.prctl(option, argument, nothing, nothing, nothing))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
