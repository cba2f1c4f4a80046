"""Builds the fake library and changes its hardware, faults and latencies while programs run."""

import ctypes
import mmap
import os
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pynvml

from tests.fakes.nvml import h200
from tests.fakes.nvml import layout as lay

NO_INSTANCE = 0xFFFFFFFF
MEMORY_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
FOREVER = 0xFFFFFFFFFFFFFFFF

_FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1")

H200_LATENCIES_US: dict[str, float] = {
    "nvmlDeviceGetUtilizationRates": 2,
    "nvmlDeviceGetPowerUsage": 2,
    "nvmlDeviceGetTemperature": 2,
    "nvmlDeviceGetTemperatureV": 2,
    "nvmlDeviceGetClockInfo": 2,
    "nvmlDeviceGetCurrentClocksEventReasons": 2,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 2,
    "nvmlDeviceGetMemoryInfo": 8,
    "nvmlDeviceGetMemoryInfo_v2": 8,
    "nvmlDeviceGetComputeRunningProcesses_v3": 25,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": 25,
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": 25,
    "nvmlDeviceGetPcieThroughput": 21_000,
    "nvmlDeviceGetTotalEnergyConsumption": 3_200,
    "nvmlDeviceGetMaxClockInfo": 1_600,
    "nvmlDeviceGetProcessUtilization": 2_000,
    "nvmlDeviceGetProcessesUtilizationInfo": 2_000,
    "nvmlDeviceGetPcieReplayCounter": 175,
    "nvmlGpmSampleGet": 263,
    "nvmlGpmMigSampleGet": 263,
    "nvmlGpmMetricsGet": 15,
}
H200_GRAPHICS_LATENCY_US = 1_748
"""What GPM's metric of the graphics engine takes in addition."""
H200_FIELD_LATENCIES_US: dict[int, float] = {
    pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: 3_200,
    pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER: 175,
    pynvml.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT: 250,
    pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES: 240,
    pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES: 240,
    pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN: 1_150,
    pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN: 1_150,
}


def build(directory: Path) -> Path:
    """Compiles the library into the directory; concurrent builders each rename a finished file."""
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / "libnvidia-ml.so.1"
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        Path(scratch, "fake_nvml_layout.h").write_text(lay.c_header())
        output = Path(scratch, library.name)
        subprocess.run(["cc", *_FLAGS, "-I", scratch, "-o", output, lay.SOURCE], check=True)
        output.rename(library)
    return library


def function_id(name: str) -> int:
    """The number of a function; a name without its version stands for the newest version here."""
    if name == "*":
        return lay.ANY
    if name == "nvmlInit":
        name = "nvmlInitWithFlags"
    for candidate in (name, f"{name}_v3", f"{name}_v2"):
        if candidate in lay.FUNCTIONS:
            return lay.FUNCTIONS.index(candidate)
    raise KeyError(f"the fake library has no function {name}")


class FakeNvml:
    """One fake machine: a control file, mapped here and by every library that opens it."""

    def __init__(self, path: Path) -> None:
        """Maps an existing control file."""
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(lay.Control))
        self.control = lay.Control.from_buffer(self._map)
        self._serial = 0

    @classmethod
    def create(
        cls,
        path: Path,
        gpus: int = 1,
        *,
        configure: Callable[[int, lay.Gpu], None] | None = None,
    ) -> "FakeNvml":
        """Makes a machine with H200 defaults; `configure` may change each GPU first."""
        with path.open("wb") as file:
            file.truncate(ctypes.sizeof(lay.Control))
        fake = cls(path)
        control = fake.control
        control.size = ctypes.sizeof(lay.Control)
        control.owner_pid = os.getpid()
        h200.fill_system(control)
        for index in range(lay.MAX_GPUS):
            h200.fill_gpu(control.gpus[index], index)
            control.gpus[index].present = int(index < gpus)
            if configure is not None:
                configure(index, control.gpus[index])
        control.magic = lay.MAGIC
        return fake

    def close(self) -> None:
        """Ends every fault and drops the mapping; GPU objects handed out keep it alive."""
        self.clear_faults()
        del self.control
        with suppress(BufferError):
            self._map.close()

    def env(self, library: Path) -> dict[str, str]:
        """The environment variables with which a child process finds this machine."""
        return {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_CONTROL": str(self.path)}

    # --- hardware ---

    def gpu(self, index: int) -> lay.Gpu:
        """One GPU slot, whose members may be read and set."""
        return self.control.gpus[index]

    def lose(self, gpu: int) -> None:
        """Makes every call for the GPU return GPU_IS_LOST; it is still counted."""
        self.gpu(gpu).lost = 1

    def restore(self, gpu: int) -> None:
        """Ends `lose`."""
        self.gpu(gpu).lost = 0

    def remove(self, gpu: int) -> None:
        """Takes the GPU out of the machine; later ones move up by one NVML index."""
        self.gpu(gpu).present = 0

    def add(self, gpu: int) -> None:
        """Puts a GPU into the machine."""
        self.gpu(gpu).present = 1

    def add_process(
        self,
        gpu: int,
        pid: int,
        used_memory: int | None = None,
        *,
        kind: int = lay.COMPUTE,
        sm: int = 0,
        mem: int = 0,
        enc: int = 0,
        dec: int = 0,
        sampled_us: int = 0,
        gpu_instance: int = NO_INSTANCE,
        compute_instance: int = NO_INSTANCE,
    ) -> lay.Process:
        """Starts a process on a GPU; memory None is NVML's 'not available'."""
        slot = next(p for p in self.gpu(gpu).processes if not p.kind)
        slot.pid = pid
        slot.used_memory = MEMORY_NOT_AVAILABLE if used_memory is None else used_memory
        slot.gpu_instance, slot.compute_instance = gpu_instance, compute_instance
        slot.sm, slot.mem, slot.enc, slot.dec = sm, mem, enc, dec
        slot.sampled_us = sampled_us
        slot.kind = kind
        return slot

    def remove_process(self, gpu: int, pid: int) -> None:
        """Ends a process on a GPU."""
        for process in self.gpu(gpu).processes:
            if process.pid == pid:
                process.kind = 0

    def add_mig(self, gpu: int, *, gpu_instance: int, compute_instance: int = 0) -> lay.Mig:
        """Turns MIG on and adds a 1g.18gb device."""
        device = self.gpu(gpu)
        index = next(i for i, m in enumerate(device.mig) if not m.present)
        mig = device.mig[index]
        h200.fill_mig(mig, device, index)
        mig.gpu_instance, mig.compute_instance = gpu_instance, compute_instance
        mig.present = 1
        device.mig_mode = device.mig_pending = 1
        return mig

    def set_field(
        self,
        gpu: int,
        field: int,
        value: float = 0,
        *,
        scope: int = lay.ANY,
        value_type: int = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG,
        code: int = pynvml.NVML_SUCCESS,
    ) -> None:
        """Overrides the value or the return code of one field of nvmlDeviceGetFieldValues."""
        overrides = self.gpu(gpu).overrides
        same = (o for o in overrides if o.active and (o.field, o.scope) == (field, scope))
        entry = next(same, None) or next(o for o in overrides if not o.active)
        double = value_type == pynvml.NVML_VALUE_TYPE_DOUBLE
        packed = struct.pack("<d", value) if double else struct.pack("<q", int(value))
        entry.field, entry.scope = field, scope
        entry.value_type, entry.code = value_type, code
        (entry.value,) = struct.unpack("<Q", packed)
        entry.active = 1

    def set_gpm(self, gpu: int, metric: int, value: float, code: int = 0) -> None:
        """Sets the value and the return code of one GPM metric."""
        self.gpu(gpu).gpm[metric] = value
        self.gpu(gpu).gpm_codes[metric] = code

    def push_event(self, gpu: int, event_type: int, data: int) -> None:
        """Raises an event on a GPU."""
        control = self.control
        event = control.events[control.event_head % lay.MAX_EVENTS]
        event.gpu, event.type, event.data = gpu, event_type, data
        event.gpu_instance = event.compute_instance = NO_INSTANCE
        control.event_head += 1

    def push_xid(self, gpu: int, code: int) -> None:
        """Raises an Xid on a GPU."""
        self.push_event(gpu, pynvml.nvmlEventTypeXidCriticalError, code)

    # --- driver ---

    def fail_init(self, code: int) -> None:
        """Makes nvmlInit return the code; 0 lets it succeed again."""
        self.control.init_error = code

    def unload_driver(
        self,
        code: int = pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        init_code: int = pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
    ) -> None:
        """Makes every call return the code until `load_driver` and a fresh nvmlInit."""
        self.control.reload_error = code
        self.control.init_error = init_code
        self.control.driver_epoch += 1
        self.control.driver_error = code

    def load_driver(self, version: str | None = None) -> None:
        """Loads the driver again; programs must shut down and initialise to see it."""
        if version is not None:
            self.control.driver_version = version.encode()
        self.control.init_error = self.control.driver_error = 0

    # --- faults and latencies ---

    def fail(
        self,
        function: str = "*",
        gpu: int | None = None,
        code: int = pynvml.NVML_ERROR_UNKNOWN,
        *,
        after: int = 0,
        times: int | None = None,
    ) -> int:
        """Makes matching calls return the code; '*' is every call but init and shutdown."""
        return self._rule(lay.FAIL, function, gpu, code=code, after=after, times=times)

    def delay(
        self,
        function: str,
        gpu: int | None = None,
        seconds: float = 0.0,
        *,
        spin: bool = False,
        after: int = 0,
        times: int | None = None,
    ) -> int:
        """Makes matching calls slow, asleep or burning CPU."""
        return self._rule(lay.DELAY, function, gpu, seconds=seconds, spin=spin, after=after, times=times)

    def hang(
        self,
        function: str,
        gpu: int | None = None,
        *,
        after: int = 0,
        times: int | None = None,
    ) -> int:
        """Makes matching calls block until the fault ends."""
        return self._rule(lay.HANG, function, gpu, after=after, times=times)

    def _rule(
        self,
        kind: int,
        function: str,
        gpu: int | None,
        *,
        code: int = 0,
        seconds: float = 0.0,
        spin: bool = False,
        after: int = 0,
        times: int | None = None,
    ) -> int:
        index = next(i for i, rule in enumerate(self.control.rules) if not rule.serial)
        rule = self.control.rules[index]
        rule.kind, rule.code = kind, code
        rule.function = function_id(function)
        rule.gpu = lay.ANY if gpu is None else gpu
        rule.duration_ns, rule.spin = int(seconds * 1e9), int(spin)
        rule.after, rule.times = after, FOREVER if times is None else times
        rule.seen = 0
        self._serial += 1
        rule.serial = self._serial
        self.control.rule_count = max(self.control.rule_count, index + 1)
        return self._serial

    def clear(self, fault: int) -> None:
        """Ends the one fault that `fail`, `delay` or `hang` returned."""
        for rule in self.control.rules:
            if rule.serial == fault:
                rule.serial = 0

    def release_hangs(self) -> None:
        """Ends every hang."""
        for rule in self.control.rules:
            if rule.kind == lay.HANG:
                rule.serial = 0

    def clear_faults(self) -> None:
        """Ends every fault."""
        for rule in self.control.rules:
            rule.serial = 0

    def latency(self, function: str, seconds: float) -> None:
        """Sets the ordinary time that one function takes."""
        self.control.latency_ns[function_id(function)] = int(seconds * 1e9)

    def field_latency(self, field: int, seconds: float) -> None:
        """Sets the ordinary time that one field of nvmlDeviceGetFieldValues takes."""
        self.control.field_latency_ns[field] = int(seconds * 1e9)

    def h200_latencies(self) -> None:
        """Makes the functions as slow as they were measured to be on an H200."""
        for name, microseconds in H200_LATENCIES_US.items():
            self.latency(name, microseconds / 1e6)
        for field, microseconds in H200_FIELD_LATENCIES_US.items():
            self.field_latency(field, microseconds / 1e6)
        self.control.graphics_latency_ns = H200_GRAPHICS_LATENCY_US * 1000

    # --- observation ---

    def calls(self, function: str, gpu: int | None = None) -> int:
        """How often a function was called, for one GPU or in all."""
        counts = self.control.calls[function_id(function)]
        return int(sum(counts) if gpu is None else counts[gpu])

    def calls_by_function(self) -> dict[str, int]:
        """The calls of every function that was called at all."""
        totals = {n: sum(self.control.calls[i]) for i, n in enumerate(lay.FUNCTIONS)}
        return {name: total for name, total in totals.items() if total}

    def reset_calls(self) -> None:
        """Starts counting calls anew."""
        ctypes.memset(self.control.calls, 0, ctypes.sizeof(self.control.calls))

    @property
    def inits(self) -> int:
        """Successful nvmlInit calls."""
        return self.control.inits

    @property
    def shutdowns(self) -> int:
        """Successful nvmlShutdown calls."""
        return self.control.shutdowns

    @property
    def open_gpm_samples(self) -> int:
        """GPM samples allocated and not freed."""
        return self.control.gpm_samples

    @property
    def open_event_sets(self) -> int:
        """Event sets created and not freed."""
        return self.control.event_sets

    @property
    def waiting(self) -> int:
        """Calls that sit in a `delay` or a `hang` now."""
        return self.control.hanging

    def wait_until_waiting(self, calls: int = 1, timeout: float = 60.0) -> None:
        """Returns when that many calls sit in a `delay` or a `hang`."""
        deadline = time.monotonic() + timeout
        while self.waiting < calls:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.waiting} calls wait, not {calls}")
            time.sleep(0.001)
