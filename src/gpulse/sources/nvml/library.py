"""NVML as a whole: starting it, ending it, and what its error codes mean to us."""

from __future__ import annotations

from contextlib import suppress

import pynvml

from gpulse.model.health import Code, Health

NVMLError = pynvml.NVMLError

_CODES: dict[int, Code] = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: "not_supported",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "not_supported",
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "not_supported",
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "not_supported",
    pynvml.NVML_ERROR_DEPRECATED: "not_supported",
    pynvml.NVML_ERROR_NO_PERMISSION: "no_permission",
    pynvml.NVML_ERROR_GPU_IS_LOST: "gpu_lost",
    pynvml.NVML_ERROR_RESET_REQUIRED: "gpu_lost",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "gpu_lost",
    pynvml.NVML_ERROR_TIMEOUT: "timeout",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "driver_missing",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "driver_unloaded",
    pynvml.NVML_ERROR_UNINITIALIZED: "driver_unloaded",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "driver_mismatch",
}

NO_DATA = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NO_DATA, pynvml.NVML_ERROR_NOT_READY})
"""Answers that mean `nothing to report`: a gap, but nobody's fault."""

LASTING: frozenset[Code] = frozenset({"not_supported", "no_permission"})
"""Codes that will be the same at the next tick, so that asking again is a waste."""

DRIVER_GONE: frozenset[Code] = frozenset({"driver_missing", "driver_unloaded", "driver_mismatch"})
"""Codes after which NVML must be started anew."""

_HINTS: dict[Code, str] = {
    "driver_missing": "install the NVIDIA driver, or in a container start it with GPUs (--gpus all); `gpulse --demo` needs neither",
    "driver_unloaded": "load the kernel module (`modprobe nvidia`, `nvidia-smi`), or see `dmesg | grep -i nvrm`",
    "driver_mismatch": "the driver was updated while its old kernel module stayed loaded: reload it or reboot",
    "no_permission": "see the permissions of /dev/nvidia* and /dev/nvidiactl (groups video, render)",
    "gpu_lost": "see `dmesg | grep -i xid`; a reset (`nvidia-smi -r`) or a reboot brings the GPU back",
    "not_answering": "see `dmesg | grep -i nvrm`; a hung GPU often needs a reboot",
}


def code_of(error: int) -> Code:
    """What an NVML return code means to us."""
    return _CODES.get(error, "failed")


def text_of(error: int) -> str:
    """NVML's own words for a return code."""
    return str(NVMLError(error))


def hint_for(code: Code) -> str | None:
    """The next thing to try."""
    return _HINTS.get(code)


def start() -> None:
    """Start NVML; it counts how often, and ends with as many calls of `stop`."""
    pynvml.nvmlInit()


def stop() -> None:
    """End NVML; one that cannot be ended, or that the driver already ended, is left as it is."""
    with suppress(NVMLError):
        pynvml.nvmlShutdown()


def unavailable(error: int, now: float) -> Health:
    """The health entry of NVML as a whole, after it could not be started."""
    code = code_of(error)
    words = {
        "driver_missing": "no NVIDIA driver here: libnvidia-ml.so.1 was not found",
        "driver_unloaded": "the NVIDIA kernel driver is not loaded",
        "driver_mismatch": "the NVIDIA library and the kernel driver are of different versions",
        "no_permission": "this user may not talk to the NVIDIA driver",
    }
    detail = words.get(code, f"NVML could not be started: {text_of(error)}")
    return Health("nvml", code, detail, now, hint=hint_for(code))


def versions() -> tuple[str | None, str | None]:
    """The driver's version, and the newest CUDA version it supports."""
    driver: str | None = None
    cuda: str | None = None
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        number = pynvml.nvmlSystemGetCudaDriverVersion()
        cuda = f"{number // 1000}.{number % 1000 // 10}"
    except NVMLError:
        pass
    return driver, cuda
