"""A fake NVML library and the control block through which tests drive its hardware."""

from tests.fakes.nvml.control import FakeNvml, build
from tests.fakes.nvml.layout import ANY, COMPUTE, GRAPHICS, MPS, Gpu, Mig, Process

__all__ = ["ANY", "COMPUTE", "GRAPHICS", "MPS", "FakeNvml", "Gpu", "Mig", "Process", "build"]
