"""Read the processes with a context on each GPU, its utilization and its memory use from the driver."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from math import inf
from time import monotonic
from typing import Any, NamedTuple

from gpulse.background_call import start_background_call
from gpulse.errors import CollectionError
from gpulse.harvest.settings import HarvestableGpu
from gpulse.model.metric_catalog import Values
from gpulse.model.process import GpuProcess
from gpulse.sources.nvml import gpu_inventory, library, metric_probes
from gpulse.sources.nvml.gpu_processes import GpuProcessReader
from gpulse.sources.nvml.library import DRIVER_GONE_CODES, PERMANENT_CODES, NVMLError, code_of, text_of
from gpulse.sources.nvml.nvml_lifecycle import NvmlDriver
from gpulse.sources.nvml.read_timing import DriverTimeouts
from gpulse.sources.timeout_pool import PoolBatch, TimeoutPool

_FIND_SECONDS = 60.0
"""Without a persistence daemon each GPU takes seconds to wake up."""
_NOT_ANSWERING = "the driver does not answer"
_DESTROYED = frozenset({library.NOT_FOUND, library.INVALID_ARGUMENT})
"""Errors for a MIG instance that does not exist, or not any more."""


class GpuLoad(NamedTuple):
    """One GPU as the driver sees it."""

    processes: tuple[GpuProcess, ...] | None = None
    """Who has a context on it, or on an instance of it; None when this driver does not report it."""
    utilization_ratio: float | None = None
    memory_bytes: int | None = None
    trouble: str | None = None
    """Why nothing is known."""


class _OpenGpu:
    """One GPU that is open in the driver, and how to query it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._reader = _build_reader(handle)
        utilization, memory, *_ = metric_probes.tick_probes()
        self._probes = (utilization, memory)

    def read(self) -> GpuLoad:
        """Query the driver now.

        Raises:
            NVMLError: The processes on the GPU or on one of its instances cannot be read at the moment.
        """
        values: Values = {}
        for probe in self._probes:
            probe.read(self._handle, values, {})
        ratio, used = values.get("gpu_utilization_ratio"), values.get("memory_used_bytes")
        return GpuLoad(
            self._processes(),
            None if ratio is None else float(ratio),
            None if used is None else int(used),
        )

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        lists = [_list_processes(instance) for instance in _find_instances(self._handle)]
        try:
            lists.append(self._reader.read(0.0, {}))
        except NVMLError as error:
            if code_of(error.value) not in PERMANENT_CODES:
                raise
        found: dict[int, GpuProcess] = {}
        for process in (process for listed in lists if listed is not None for process in listed):
            known = found.get(process.pid)
            # A GPU that is split may list what its instances list.
            found[process.pid] = process if known is None else max(known, process, key=_memory_bytes)
        return None if all(listed is None for listed in lists) else tuple(found.values())


def _build_reader(handle: Any) -> GpuProcessReader:
    reader = GpuProcessReader(handle, inf)
    reader.has_shares = False
    return reader


def _find_instances(handle: Any) -> Iterator[Any]:
    """Return the MIG instances of a GPU, none when it cannot be split.

    Raises:
        NVMLError: They cannot be listed.
    """
    try:
        is_split = gpu_inventory.is_split(handle)
    except NVMLError as error:
        if code_of(error.value) != "not_supported":
            raise
        return
    for slot in range(library.read_number("nvmlDeviceGetMaxMigDeviceCount", handle) if is_split else 0):
        try:
            yield library.read_handle("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
        except NVMLError as error:  # an empty slot
            if error.value not in _DESTROYED:
                raise


def _list_processes(instance: Any) -> tuple[GpuProcess, ...] | None:
    """Return the processes on a MIG instance; None when it was just destroyed.

    Raises:
        NVMLError: They cannot be read.
    """
    try:
        return _build_reader(instance).read(0.0, {})
    except NVMLError as error:
        if error.value not in _DESTROYED:
            raise
        return None


def _memory_bytes(process: GpuProcess) -> int:
    return process.gpu_memory_bytes or 0


class ContextReader:
    """Queries the driver on its own threads, so that a call that hangs delays nothing else."""

    def __init__(self, gpus: Sequence[HarvestableGpu], timeouts: DriverTimeouts | None = None) -> None:
        self._gpus = {gpu.index: gpu for gpu in gpus}
        self._timeouts = timeouts or DriverTimeouts()
        self._driver = NvmlDriver(watch_xids=False)
        self._control: TimeoutPool[str] = TimeoutPool("harvest-driver", 1)
        self._pool: TimeoutPool[int] = TimeoutPool("harvest-gpus", 1)
        self._starting: PoolBatch[str, int] | None = None
        self._started = False
        self._tried_at = -inf
        self._trouble: str | None = "the driver has not been queried yet"
        self._generation = 0
        """Counts the starts of NVML: handles from before a start are invalid after it."""
        self._open: dict[int, tuple[int, _OpenGpu]] = {}
        self._out: dict[int, PoolBatch[int, GpuLoad | int]] = {}
        """By GPU, the batch whose result is pending."""
        self._loads: dict[int, GpuLoad] = {}
        self._is_first = True

    def ask(self, indices: Iterable[int]) -> None:
        """Begin to ask about these GPUs; a driver that is gone is started again from time to time."""
        if not self._started:
            self._start(monotonic())
        self._collect()
        wanted = [index for index in indices if index not in self._out]
        if not wanted or not self._started:
            return
        run = self._pool.start(wanted, self._read)
        self._out.update(dict.fromkeys(run.items, run))
        for index in set(wanted) - set(run.items):
            self._loads[index] = GpuLoad(trouble=_NOT_ANSWERING)

    def wait(self, seconds: float) -> None:
        """Wait for pending results, longer for the very first one."""
        if self._is_first:
            seconds = self._timeouts.start
            self._is_first = False
        deadline = monotonic() + seconds
        if self._starting is not None:
            self._starting.wait(seconds)
            self._collect()
            if self._started:
                self.ask(self._gpus)
        for run in set(self._out.values()):
            run.wait(deadline - monotonic())
        self._collect()

    @property
    def awaited(self) -> Collection[int]:
        """GPUs whose result is pending."""
        return self._out.keys()

    def load(self, index: int) -> GpuLoad:
        """Return the last answer about a GPU."""
        if self._trouble is not None:
            return GpuLoad(trouble=self._trouble)
        return self._loads.get(index) or GpuLoad(trouble=_NOT_ANSWERING)

    def close(self) -> None:
        """End the threads and the driver; a call that hangs is left to die with the process."""
        calm = self._pool.close()
        run = self._control.start(["stop"], lambda _: self._driver.stop(calm=calm))
        self._control.finish(run, 1.0)
        self._control.close()

    def _start(self, clock: float) -> None:
        if self._starting is None and clock - self._tried_at >= self._timeouts.retry:
            self._tried_at = clock
            calm = not self._pool.busy
            self._starting = self._control.start(["start"], lambda _: self._driver.start(calm=calm))

    def _collect(self) -> None:
        if self._starting is not None:
            self._take_start(self._starting)
        for run in set(self._out.values()):
            self._pool.sweep(run, self._timeouts.call)
        for index, run in list(self._out.items()):
            if self._out.get(index) is not run or not (run.has(index) or run.finished):
                continue
            del self._out[index]
            if index in run.errors:
                self._loads[index] = GpuLoad(trouble=f"querying the driver failed: {run.errors[index]!r}")
            else:
                self._take(index, run.results.get(index))

    def _take_start(self, run: PoolBatch[str, int]) -> None:
        self._control.sweep(run, self._timeouts.call)
        if "start" in run.results:
            error = run.results["start"]
            self._starting = None
            self._started = not error
            self._trouble = library.unavailable_health(error, 0.0).detail if error else None
            self._generation += 1
        elif "start" in run.errors:
            self._starting = None
            self._trouble = f"starting NVML failed: {run.errors['start']!r}"
        elif run.finished:
            self._trouble = _NOT_ANSWERING

    def _take(self, index: int, answer: GpuLoad | int | None) -> None:
        if isinstance(answer, GpuLoad):
            self._loads[index] = answer
        elif answer is None:
            self._loads[index] = GpuLoad(trouble=_NOT_ANSWERING)
        elif code_of(answer) in DRIVER_GONE_CODES:
            self._lose(answer)
        else:
            self._loads[index] = GpuLoad(trouble=text_of(answer))

    def _lose(self, error: int) -> None:
        self._started = False
        self._trouble = text_of(error)
        self._tried_at = monotonic()
        self._out, self._loads = {}, {}

    def _read(self, index: int) -> GpuLoad | int:
        """Return one GPU's answer, or the driver's error; runs on a lane."""
        generation, asked = self._open.get(index, (0, None))
        try:
            if asked is None or generation != self._generation:
                generation = self._generation
                asked = _OpenGpu(
                    library.read_handle("nvmlDeviceGetHandleByUUID", self._gpus[index].uuid.encode())
                )
                self._open[index] = (generation, asked)
            return asked.read()
        except NVMLError as error:
            if code_of(error.value) not in DRIVER_GONE_CODES:
                self._open.pop(index, None)
            return int(error.value)


def find_gpus(timeout_seconds: float = _FIND_SECONDS) -> tuple[HarvestableGpu, ...]:
    """Return the GPUs of this machine.

    Raises:
        CollectionError: There is no driver, it does not answer, or it lists none.
    """
    try:
        answer = start_background_call(_list_gpus, name="gpulse-find").result(timeout_seconds)
    except TimeoutError:
        raise CollectionError(_NOT_ANSWERING, hint=library.hint_for("not_answering")) from None
    if isinstance(answer, int):
        health = library.unavailable_health(answer, 0.0)
        raise CollectionError(health.detail, hint=health.hint)
    if not answer:
        raise CollectionError(
            "none of the GPUs that the driver lists responds",
            hint="run `gpulse doctor`, and see `dmesg | grep -i nvrm`",
        )
    return answer


def count_mig_instances(timeout_seconds: float = _FIND_SECONDS) -> Mapping[str, int]:
    """Return the number of MIG instances of each split GPU, by UUID; empty when the driver does not respond."""
    call = start_background_call(_survey_gpus, name="gpulse-split")
    wait([call], timeout_seconds)
    return call.result() if call.done() and call.exception() is None else {}


def _survey_gpus() -> Mapping[str, int]:
    if isinstance(gpu_inventory.start_driver(), int):
        return {}
    try:
        listed = gpu_inventory.list_gpus()
    finally:
        library.stop()
    gpus = () if isinstance(listed, int) else listed
    return {gpu.uuid: len(gpu.instances) for gpu in gpus if gpu.uuid is not None and gpu.instances}


def _list_gpus() -> tuple[HarvestableGpu, ...] | int:
    started = gpu_inventory.start_driver()
    if isinstance(started, int):
        return started
    try:
        found = (_read_gpu(index) for index in range(started[0]))
        return tuple(gpu for gpu in found if gpu is not None)
    finally:
        library.stop()


def _read_gpu(index: int) -> HarvestableGpu | None:
    """Return one GPU; None when it does not identify itself."""
    try:
        handle = library.read_handle("nvmlDeviceGetHandleByIndex_v2", index)
        uuid = library.read_text("nvmlDeviceGetUUID", handle)
        name = library.read_text("nvmlDeviceGetName", handle)
    except (NVMLError, ValueError):  # ValueError: text that is not UTF-8
        return None
    try:
        minor = library.read_number("nvmlDeviceGetMinorNumber", handle)
    except NVMLError:
        minor = index
    return HarvestableGpu(index, minor, uuid, name)
