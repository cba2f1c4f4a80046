"""Call the functions of libnvidia-ml, start and stop it, and translate its error codes.

This replaces nvidia-ml-py, which describes all of NVML: loading that takes 25 ms and 5 MB, and a call through it
takes twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from ctypes import CDLL, byref, c_char_p, c_uint, c_void_p, create_string_buffer
from typing import Any

from gpulse.model.source_health import Health, HealthCode

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 18
NO_DATA = 21
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
NOT_READY = 27
GPU_NOT_FOUND = 28
MAX_LINKS = 36
"""NVLinks of a GPU."""
_MAX_TEXT_BYTES = 96

_TEXTS = {
    UNINITIALIZED: "Uninitialized",
    INVALID_ARGUMENT: "Invalid Argument",
    NOT_SUPPORTED: "Not Supported",
    NO_PERMISSION: "Insufficient Permissions",
    NOT_FOUND: "Not Found",
    INSUFFICIENT_SIZE: "Insufficient Size",
    8: "Insufficient External Power",
    DRIVER_NOT_LOADED: "Driver Not Loaded",
    TIMEOUT: "Timeout",
    11: "Interrupt Request Issue",
    LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    FUNCTION_NOT_FOUND: "Function Not Found",
    14: "Corrupted infoROM",
    GPU_IS_LOST: "GPU is lost",
    RESET_REQUIRED: "GPU requires restart",
    17: "The operating system has blocked the request.",
    VERSION_MISMATCH: "RM has detected an NVML/RM version mismatch.",
    20: "Insufficient Memory",
    999: "Unknown Error",
}
"""Texts of the codes that old drivers have, too; the driver has those of the others."""

_CODES: dict[int, HealthCode] = {
    NOT_SUPPORTED: "not_supported",
    FUNCTION_NOT_FOUND: "not_supported",
    INVALID_ARGUMENT: "not_supported",
    ARGUMENT_VERSION_MISMATCH: "not_supported",
    DEPRECATED: "not_supported",
    NO_PERMISSION: "no_permission",
    GPU_IS_LOST: "gpu_lost",
    RESET_REQUIRED: "gpu_lost",
    GPU_NOT_FOUND: "gpu_lost",
    TIMEOUT: "timeout",
    LIBRARY_NOT_FOUND: "driver_missing",
    DRIVER_NOT_LOADED: "driver_unloaded",
    UNINITIALIZED: "driver_unloaded",
    VERSION_MISMATCH: "driver_mismatch",
}

NO_DATA_ERRORS = frozenset({NOT_FOUND, NO_DATA, NOT_READY})
"""Errors that mean there is no value to report: a gap, but not a problem."""

PERMANENT_CODES: frozenset[HealthCode] = frozenset({"not_supported", "no_permission"})
"""Codes that will be the same at the next tick, so that reading again is useless."""

DRIVER_GONE_CODES: frozenset[HealthCode] = frozenset({"driver_missing", "driver_unloaded", "driver_mismatch"})
"""Codes after which NVML must be restarted."""

_HINTS: dict[HealthCode, str] = {
    "driver_missing": "install the NVIDIA driver, or start the container with --gpus all; `gpulse --demo` needs no GPU",
    "driver_unloaded": "load the kernel module (`modprobe nvidia` or `nvidia-smi`), or see `dmesg | grep -i nvrm`",
    "driver_mismatch": "reload the kernel module or reboot: the driver was updated, but its old kernel module is still loaded",
    "no_permission": "check the permissions of /dev/nvidia* and /dev/nvidiactl (groups video, render)",
    "gpu_lost": "see `dmesg | grep -i xid`; a reset (`nvidia-smi -r`) or a reboot brings the GPU back",
    "not_answering": "see `dmesg | grep -i nvrm`; a hung GPU often needs a reboot",
}


class NVMLError(Exception):
    """A function of NVML failed."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value
        """NVML's return code."""

    def __str__(self) -> str:
        return text_of(self.value)


_library: CDLL | None = None
"""libnvidia-ml once it was loaded; it stays loaded when NVML is shut down."""


def find_function(name: str) -> Callable[..., int]:
    """Return a function of NVML, or one that fails when this driver lacks it or NVML was never started."""
    if _library is None:
        return lambda *_: UNINITIALIZED
    try:
        function: Callable[..., int] = getattr(_library, name)
    except AttributeError:
        return lambda *_: FUNCTION_NOT_FOUND
    return function


def call(name: str, *arguments: Any) -> None:
    """Call a function of NVML.

    Raises:
        NVMLError: It failed.
    """
    code = find_function(name)(*arguments)
    if code:
        raise NVMLError(code)


def read_number(name: str, *arguments: Any, kind: Any = c_uint) -> int:
    """Return the one number that a function of NVML stores at its last argument.

    Args:
        name: Of the function.
        arguments: The arguments before it.
        kind: Its C type.

    Raises:
        NVMLError: The function failed.
    """
    number = kind()
    call(name, *arguments, byref(number))
    return int(number.value)


def read_numbers(name: str, count: int, *arguments: Any) -> tuple[int, ...]:
    """Return the numbers that a function of NVML stores at its last `count` arguments.

    Raises:
        NVMLError: The function failed.
    """
    numbers = [c_uint() for _ in range(count)]
    call(name, *arguments, *map(byref, numbers))
    return tuple(number.value for number in numbers)


def read_handle(name: str, *arguments: Any) -> c_void_p:
    """Return the handle that a function of NVML stores at its last argument.

    Raises:
        NVMLError: The function failed.
    """
    handle = c_void_p()
    call(name, *arguments, byref(handle))
    return handle


def read_text(name: str, *arguments: Any) -> str:
    """Return the text that a function of NVML writes.

    Raises:
        NVMLError: The function failed.
        ValueError: The text is not UTF-8.
    """
    buffer = create_string_buffer(_MAX_TEXT_BYTES)
    call(name, *arguments, buffer, c_uint(_MAX_TEXT_BYTES))
    return buffer.value.decode()


def code_of(error: int) -> HealthCode:
    """Return the health code of an NVML return code."""
    return _CODES.get(error, "failed")


def text_of(error: int) -> str:
    """Return NVML's own message for a return code."""
    if error not in _TEXTS and _library is not None:
        with suppress(AttributeError, UnicodeDecodeError):  # AttributeError: a library without the function
            describe = _library.nvmlErrorString
            describe.restype = c_char_p
            _TEXTS[error] = describe(error).decode()
    return _TEXTS.get(error, f"NVML Error with code {error}")


def hint_for(code: HealthCode) -> str | None:
    """Return what to do about a health code."""
    return _HINTS.get(code)


def start() -> None:
    """Load NVML and start it; it counts the starts and shuts down after as many calls of `stop`.

    Raises:
        NVMLError: There is no driver, or it cannot be started.
    """
    global _library  # noqa: PLW0603  a library is loaded once in a process
    if _library is None:
        try:
            _library = CDLL("libnvidia-ml.so.1")
        except OSError:
            raise NVMLError(LIBRARY_NOT_FOUND) from None
    call("nvmlInitWithFlags", 0)


def stop() -> None:
    """Shut NVML down; do nothing if that fails or the driver is already gone."""
    with suppress(NVMLError):
        call("nvmlShutdown")


def unavailable_health(error: int, now: float) -> Health:
    """Return the health entry for NVML after it could not be started."""
    code = code_of(error)
    words = {
        "driver_missing": "no NVIDIA driver: libnvidia-ml.so.1 was not found",
        "driver_unloaded": "the NVIDIA kernel driver is not loaded",
        "driver_mismatch": "the versions of the NVIDIA library and the kernel driver differ",
        "no_permission": "no permission to access the NVIDIA driver",
    }
    detail = words.get(code, f"cannot start NVML: {text_of(error)}")
    return Health("nvml", code, detail, now, hint=hint_for(code))


def read_versions() -> tuple[str | None, str | None]:
    """Return the driver's version and the newest CUDA version it supports."""
    driver: str | None = None
    cuda: str | None = None
    try:
        driver = read_text("nvmlSystemGetDriverVersion")
        number = read_number("nvmlSystemGetCudaDriverVersion")
        cuda = f"{number // 1000}.{number % 1000 // 10}"
    except NVMLError:
        pass
    return driver, cuda
