"""gpulse: what your GPUs are doing, why they are slow, and who is using them.

from gpulse import snapshot
for gpu in snapshot().frame.gpus:
print(gpu.device.name, gpu.get("power_watts"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpulse._version import __version__

if TYPE_CHECKING:
    from gpulse.api import record, snapshot
    from gpulse.diagnosis.engine import diagnose
    from gpulse.errors import GpulseError
    from gpulse.model.finding import Diagnosis
    from gpulse.model.frame import Frame
    from gpulse.model.snapshot import Snapshot
    from gpulse.profiling.profiler import profile
    from gpulse.sampling.sampler import Sampler
    from gpulse.sources.recording_reader import Recording

__all__ = [
    "Diagnosis",
    "Frame",
    "GpulseError",
    "Recording",
    "Sampler",
    "Snapshot",
    "__version__",
    "diagnose",
    "profile",
    "record",
    "snapshot",
]

_PUBLIC_MODULES = {
    "Diagnosis": "gpulse.model.finding",
    "Frame": "gpulse.model.frame",
    "GpulseError": "gpulse.errors",
    "Recording": "gpulse.sources.recording_reader",
    "Sampler": "gpulse.sampling.sampler",
    "Snapshot": "gpulse.model.snapshot",
    "diagnose": "gpulse.diagnosis.engine",
    "profile": "gpulse.profiling.profiler",
    "record": "gpulse.api",
    "snapshot": "gpulse.api",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that importing gpulse is fast."""
    if name not in _PUBLIC_MODULES:
        raise AttributeError(f"module 'gpulse' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
