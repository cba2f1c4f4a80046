"""What the driver says of the GPUs: who has a context on them, how busy and how full they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from time import monotonic
from typing import Any, NamedTuple

import pynvml

from gpulse.errors import CollectionError
from gpulse.harvest.settings import Gpu
from gpulse.model.metric import Values
from gpulse.model.process import GpuProcess
from gpulse.sources.lanes import Lanes, Run
from gpulse.sources.nvml import inventory, library, probes
from gpulse.sources.nvml.cadence import Patience
from gpulse.sources.nvml.driver import Driver
from gpulse.sources.nvml.library import DRIVER_GONE, LASTING, NVMLError, code_of, text_of
from gpulse.sources.nvml.processes import GpuProcessReader

_FIND_SECONDS = 60.0
"""Without a persistence daemon each GPU takes seconds to wake up."""
_SILENT = "the driver does not answer"
_DESTROYED = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT})
"""What is said of a MIG instance that is not there, or not any more."""


class Load(NamedTuple):
    """One GPU as the driver sees it."""

    processes: tuple[GpuProcess, ...] | None = None
    """Who has a context on it, or on an instance of it; None when this driver does not tell."""
    utilization_ratio: float | None = None
    memory_bytes: int | None = None
    trouble: str | None = None
    """Why nothing is known."""


class _Asked:
    """One GPU that is open, and how to ask it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._reader = _reader(handle)
        utilization, memory, *_ = probes.tick()
        self._probes = (utilization, memory)

    def read(self) -> Load:
        """What the driver says now.

        Raises:
            NVMLError: It does not say who is on the GPU, for a reason that may pass, or on an instance of it.
        """
        values: Values = {}
        for probe in self._probes:
            probe.read(self._handle, values, {})
        ratio, used = values.get("gpu_utilization_ratio"), values.get("memory_used_bytes")
        return Load(
            self._processes(),
            None if ratio is None else float(ratio),
            None if used is None else int(used),
        )

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        lists = [_listed_on(instance) for instance in _instances(self._handle)]
        try:
            lists.append(self._reader.read(0.0, {}))
        except NVMLError as error:
            if code_of(error.value) not in LASTING:
                raise
        found: dict[int, GpuProcess] = {}
        for process in (process for listed in lists if listed is not None for process in listed):
            known = found.get(process.pid)
            # A GPU that is split may list what its instances list.
            found[process.pid] = process if known is None else max(known, process, key=_memory)
        return None if all(listed is None for listed in lists) else tuple(found.values())


def _reader(handle: Any) -> GpuProcessReader:
    reader = GpuProcessReader(handle, inf)
    reader.has_shares = False
    return reader


def _instances(handle: Any) -> Iterator[Any]:
    """The MIG instances of a GPU, none when it cannot be split.

    Raises:
        NVMLError: It does not say which there are.
    """
    try:
        is_split = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except NVMLError as error:
        if code_of(error.value) != "not_supported":
            raise
        return
    for slot in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) if is_split else 0):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except NVMLError as error:  # an empty slot
            if error.value not in _DESTROYED:
                raise


def _listed_on(instance: Any) -> tuple[GpuProcess, ...] | None:
    """Who is on a MIG instance, None when it was just destroyed.

    Raises:
        NVMLError: It does not say.
    """
    try:
        return _reader(instance).read(0.0, {})
    except NVMLError as error:
        if error.value not in _DESTROYED:
            raise
        return None


def _memory(process: GpuProcess) -> int:
    return process.gpu_memory_bytes or 0


class Contexts:
    """Asks the driver about GPUs on threads of its own, so that a call that hangs holds up nobody."""

    def __init__(self, gpus: Sequence[Gpu], patience: Patience | None = None) -> None:
        self._gpus = {gpu.index: gpu for gpu in gpus}
        self._patience = patience or Patience()
        self._driver = Driver(watch_xids=False)
        self._control: Lanes[str] = Lanes("sight-control", 1)
        self._lanes: Lanes[int] = Lanes("sight", 1)
        self._starting: Run[str, int] | None = None
        self._started = False
        self._tried_at = -inf
        self._trouble: str | None = "the driver was not asked yet"
        self._generation = 0
        """Counts the starts of the driver: what was opened before one is of no use after it."""
        self._open: dict[int, tuple[int, _Asked]] = {}
        self._out: dict[int, Run[int, Load | int]] = {}
        """The rounds from which a GPU's answer is awaited."""
        self._loads: dict[int, Load] = {}
        self._is_first = True

    def ask(self, indices: Iterable[int]) -> None:
        """Begin to ask about these GPUs; a driver that is gone is started again from time to time."""
        if not self._started:
            self._start(monotonic())
        self._collect()
        wanted = [index for index in indices if index not in self._out]
        if not wanted or not self._started:
            return
        run = self._lanes.start(wanted, self._read)
        self._out.update(dict.fromkeys(run.items, run))
        for index in set(wanted) - set(run.items):
            self._loads[index] = Load(trouble=_SILENT)

    def wait(self, seconds: float) -> None:
        """Wait for what was asked; the very first answer is waited for longer."""
        if self._is_first:
            seconds = self._patience.start
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
        """The GPUs whose answer is still out."""
        return self._out.keys()

    def load(self, index: int) -> Load:
        """What was last heard of a GPU."""
        if self._trouble is not None:
            return Load(trouble=self._trouble)
        return self._loads.get(index) or Load(trouble=_SILENT)

    def close(self) -> None:
        """End the threads and the driver; a call that hangs is left to die with the process."""
        calm = self._lanes.close()
        run = self._control.start(["stop"], lambda _: self._driver.stop(calm=calm))
        self._control.finish(run, 1.0)
        self._control.close()

    def _start(self, clock: float) -> None:
        if self._starting is None and clock - self._tried_at >= self._patience.retry:
            self._tried_at = clock
            calm = not self._lanes.busy
            self._starting = self._control.start(["start"], lambda _: self._driver.start(calm=calm))

    def _collect(self) -> None:
        if self._starting is not None:
            self._take_start(self._starting)
        for run in set(self._out.values()):
            self._lanes.sweep(run, self._patience.call)
        for index, run in list(self._out.items()):
            if self._out.get(index) is not run or not (run.has(index) or run.finished):
                continue
            del self._out[index]
            if index in run.errors:
                self._loads[index] = Load(trouble=f"asking the driver broke: {run.errors[index]!r}")
            else:
                self._take(index, run.results.get(index))

    def _take_start(self, run: Run[str, int]) -> None:
        self._control.sweep(run, self._patience.call)
        if "start" in run.results:
            error = run.results["start"]
            self._starting = None
            self._started = not error
            self._trouble = library.unavailable(error, 0.0).detail if error else None
            self._generation += 1
        elif "start" in run.errors:
            self._starting = None
            self._trouble = f"starting the driver broke: {run.errors['start']!r}"
        elif run.finished:
            self._trouble = _SILENT

    def _take(self, index: int, answer: Load | int | None) -> None:
        if isinstance(answer, Load):
            self._loads[index] = answer
        elif answer is None:
            self._loads[index] = Load(trouble=_SILENT)
        elif code_of(answer) in DRIVER_GONE:
            self._lose(answer)
        else:
            self._loads[index] = Load(trouble=text_of(answer))

    def _lose(self, error: int) -> None:
        self._started = False
        self._trouble = text_of(error)
        self._tried_at = monotonic()
        self._out, self._loads = {}, {}

    def _read(self, index: int) -> Load | int:
        """On a lane: one GPU's answer, or the driver's error."""
        generation, asked = self._open.get(index, (0, None))
        try:
            if asked is None or generation != self._generation:
                generation = self._generation
                asked = _Asked(pynvml.nvmlDeviceGetHandleByUUID(self._gpus[index].uuid))
                self._open[index] = (generation, asked)
            return asked.read()
        except NVMLError as error:
            if code_of(error.value) not in DRIVER_GONE:
                self._open.pop(index, None)
            return int(error.value)


def find_gpus(patience_seconds: float = _FIND_SECONDS) -> tuple[Gpu, ...]:
    """The GPUs of this machine.

    Raises:
        CollectionError: There is no driver, it does not answer, or it lists none.
    """
    lanes: Lanes[str] = Lanes("find", 1)
    run = lanes.start(["find"], lambda _: _listed())
    came = run.wait(patience_seconds)
    if not came:
        lanes.sweep(run, 0.0)
    lanes.close()
    if "find" in run.errors:
        raise run.errors["find"]
    answer = run.results.get("find")
    if answer is None:
        raise CollectionError(_SILENT, hint=library.hint_for("not_answering"))
    if isinstance(answer, int):
        health = library.unavailable(answer, 0.0)
        raise CollectionError(health.detail, hint=health.hint)
    if not answer:
        raise CollectionError(
            "the driver lists no GPU that answers", hint="see `gpulse doctor` and `dmesg | grep -i nvrm`"
        )
    return answer


def split_gpus(patience_seconds: float = _FIND_SECONDS) -> Mapping[str, int]:
    """How many MIG instances the GPUs that are split have, by UUID; none when the driver does not say."""
    lanes: Lanes[str] = Lanes("split", 1)
    run = lanes.start(["split"], lambda _: _surveyed())
    run.wait(patience_seconds)
    lanes.close()
    return run.results.get("split") or {}


def _surveyed() -> Mapping[str, int]:
    if isinstance(inventory.start(), int):
        return {}
    try:
        listed = inventory.survey()
    finally:
        library.stop()
    gpus = () if isinstance(listed, int) else listed
    return {gpu.uuid: len(gpu.instances) for gpu in gpus if gpu.uuid is not None and gpu.instances}


def _listed() -> tuple[Gpu, ...] | int:
    started = inventory.start()
    if isinstance(started, int):
        return started
    try:
        found = (_gpu(index) for index in range(started[0]))
        return tuple(gpu for gpu in found if gpu is not None)
    finally:
        library.stop()


def _gpu(index: int) -> Gpu | None:
    """One GPU, None when it does not say who it is."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    except (NVMLError, ValueError):  # ValueError: text that is not UTF-8
        return None
    try:
        minor = int(pynvml.nvmlDeviceGetMinorNumber(handle))
    except NVMLError:
        minor = index
    return Gpu(index, minor, str(uuid), str(name))
