"""Shows through the real nvidia-ml-py that the fake library behaves as the driver does."""

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pynvml as nv
import pytest

from tests.fakes.nvml import GRAPHICS, FakeNvml, build


@pytest.fixture
def fake(fake_nvml: FakeNvml) -> Iterator[FakeNvml]:
    """A machine with three GPUs and NVML initialised."""
    fake_nvml.add(1)
    fake_nvml.add(2)
    nv.nvmlInit()
    yield fake_nvml
    fake_nvml.clear_faults()
    with suppress(nv.NVMLError):
        nv.nvmlShutdown()


@contextmanager
def nvml_error(code: int) -> Iterator[None]:
    """Expects exactly this NVML error."""
    with pytest.raises(nv.NVMLError) as caught:
        yield
    assert caught.value.value == code


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs a call beside the test and collects what it returns."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def handle(index: int = 0) -> Any:
    """The handle of one GPU."""
    return nv.nvmlDeviceGetHandleByIndex(index)


def field(gpu: Any, field_id: int, scope: int = 0) -> Any:
    """Reads one field value."""
    return nv.nvmlDeviceGetFieldValues(gpu, [(field_id, scope)])[0]


def test_reports_an_h200(fake: FakeNvml) -> None:
    """The defaults read like an H200."""
    gpu = handle(2)
    assert nv.nvmlDeviceGetName(gpu) == "NVIDIA H200"
    assert nv.nvmlDeviceGetPciInfo(gpu).busId == "00000000:1E:00.0"
    assert nv.nvmlDeviceGetCudaComputeCapability(gpu) == (9, 0)
    assert nv.nvmlDeviceGetPowerManagementLimitConstraints(gpu) == [200_000, 700_000]
    assert nv.nvmlSystemGetDriverVersion() == "580.159.04"
    by_uuid = nv.nvmlDeviceGetHandleByUUID(fake.gpu(2).uuid.decode())
    assert nv.nvmlDeviceGetIndex(by_uuid) == 2
    assert nv.nvmlDeviceGetIndex(nv.nvmlDeviceGetHandleByPciBusId("0000:1e:00.0")) == 2
    with nvml_error(nv.NVML_ERROR_NOT_SUPPORTED):
        nv.nvmlDeviceGetFanSpeed(gpu)
    with nvml_error(nv.NVML_ERROR_INVALID_ARGUMENT):
        handle(3)


def test_memory_versions_differ_in_reserved_memory(fake: FakeNvml) -> None:
    """Version 1 counts reserved memory as used, version 2 does not, and others are refused."""
    fake.gpu(0).memory_used = 5 << 30
    new = nv.nvmlDeviceGetMemoryInfo(handle(), version=nv.nvmlMemory_v2)
    old = nv.nvmlDeviceGetMemoryInfo(handle())
    assert new.used == 5 << 30
    assert old.used == new.used + new.reserved
    assert new.total == new.used + new.reserved + new.free == old.used + old.free
    with nvml_error(nv.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
        nv.nvmlDeviceGetMemoryInfo(handle(), version=0x03000028)


def test_values_change_while_a_program_runs(fake: FakeNvml) -> None:
    """A member set here is what the next NVML call reads."""
    gpu, state = handle(), fake.gpu(0)
    state.power_mw, state.temperature, state.util_gpu = 612_000, 71, 98
    state.clocks[1] = 1755
    state.reasons = nv.nvmlClocksEventReasonSwPowerCap
    state.ecc_volatile[1] = 3
    assert nv.nvmlDeviceGetPowerUsage(gpu) == 612_000
    assert nv.nvmlDeviceGetTemperature(gpu, nv.NVML_TEMPERATURE_GPU) == 71
    assert nv.nvmlDeviceGetTemperatureV(gpu, nv.NVML_TEMPERATURE_GPU) == 71
    assert nv.nvmlDeviceGetUtilizationRates(gpu).gpu == 98
    assert nv.nvmlDeviceGetClockInfo(gpu, nv.NVML_CLOCK_SM) == 1755
    assert nv.nvmlDeviceGetCurrentClocksEventReasons(gpu) == nv.nvmlClocksEventReasonSwPowerCap
    assert (
        nv.nvmlDeviceGetTotalEccErrors(gpu, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nv.NVML_VOLATILE_ECC) == 3
    )


def test_field_values(fake: FakeNvml) -> None:
    """Fields carry their own type, return code and scope."""
    gpu, state = handle(), fake.gpu(0)
    state.links[3].tx_kib, state.links[4].tx_kib = 100, 11
    assert field(gpu, nv.NVML_FI_DEV_MEMORY_TEMP).value.uiVal == 33
    assert field(gpu, nv.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT).value.siVal == -8
    state.remapped_uncorrected = 2
    remapped = field(gpu, nv.NVML_FI_DEV_REMAPPED_UNC)
    assert (remapped.valueType, remapped.value.ullVal) == (nv.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 2)
    state.pcie_tx_bytes = (1 << 32) + 5
    sent = field(gpu, nv.NVML_FI_DEV_PCIE_COUNT_TX_BYTES)
    assert (sent.valueType, sent.value.ullVal) == (nv.NVML_VALUE_TYPE_UNSIGNED_INT, 5)
    assert field(gpu, nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 3).value.ullVal == 100
    assert field(gpu, nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 0xFFFFFFFF).value.ullVal == 111
    assert (
        field(gpu, nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 18).nvmlReturn == nv.NVML_ERROR_INVALID_ARGUMENT
    )
    assert field(gpu, nv.NVML_FI_DEV_C2C_LINK_COUNT).nvmlReturn == nv.NVML_ERROR_NOT_SUPPORTED
    fake.set_field(0, nv.NVML_FI_DEV_C2C_LINK_COUNT, 7, value_type=nv.NVML_VALUE_TYPE_UNSIGNED_INT)
    fake.set_field(0, nv.NVML_FI_DEV_MEMORY_TEMP, code=nv.NVML_ERROR_UNKNOWN)
    assert field(gpu, nv.NVML_FI_DEV_C2C_LINK_COUNT).value.uiVal == 7
    assert field(gpu, nv.NVML_FI_DEV_MEMORY_TEMP).nvmlReturn == nv.NVML_ERROR_UNKNOWN


def test_process_lists(fake: FakeNvml) -> None:
    """Each kind has its list, and unknown memory reads as None."""
    for pid in range(100, 164):
        fake.add_process(0, pid, pid << 20)
    fake.add_process(0, 7, kind=GRAPHICS)
    fake.remove_process(0, 100)
    compute = nv.nvmlDeviceGetComputeRunningProcesses(handle())
    assert [p.pid for p in compute] == list(range(101, 164))
    assert compute[0].usedGpuMemory == 101 << 20
    (graphics,) = nv.nvmlDeviceGetGraphicsRunningProcesses(handle())
    assert (graphics.pid, graphics.usedGpuMemory) == (7, None)
    assert nv.nvmlDeviceGetMPSComputeRunningProcesses(handle()) == []
    details = nv.nvmlDeviceGetRunningProcessDetailList(handle(), nv.nvmlProcessDetailList_v1, 0)
    assert len(details) == 63
    with nvml_error(nv.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
        nv.nvmlDeviceGetRunningProcessDetailList(handle(), 1, 0)


def test_process_utilisation_dance(fake: FakeNvml) -> None:
    """A size query fails with the size; then only samples newer than the time given come back."""
    gpu = handle()
    with nvml_error(nv.NVML_ERROR_NOT_FOUND):
        nv.nvmlDeviceGetProcessUtilization(gpu, 0)
    fake.add_process(0, 42, 1 << 30, sm=61, mem=7, sampled_us=5000)
    fake.add_process(0, 43, 1 << 30, sampled_us=4000)
    (sample,) = nv.nvmlDeviceGetProcessUtilization(gpu, 4999)
    assert (sample.pid, sample.smUtil, sample.memUtil, sample.timeStamp) == (42, 61, 7, 5000)
    with nvml_error(nv.NVML_ERROR_NOT_FOUND):
        nv.nvmlDeviceGetProcessUtilization(gpu, 5000)
    infos = nv.nvmlDeviceGetProcessesUtilizationInfo(gpu, 0)
    assert [(info.pid, info.smUtil) for info in infos] == [(42, 61), (43, 0)]
    assert fake.calls("nvmlDeviceGetProcessUtilization", gpu=0) == 6


def gpm_metrics(one: Any, two: Any, *ids: int) -> Any:
    """Asks for GPM metrics between two samples."""
    request = nv.c_nvmlGpmMetricsGet_t()
    request.version = nv.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics, request.sample1, request.sample2 = len(ids), one, two
    for i, metric in enumerate(ids):
        request.metrics[i].metricId = metric
    return nv.nvmlGpmMetricsGet(request).metrics


def test_gpm(fake: FakeNvml) -> None:
    """Two samples 100 ms apart give metrics, each with its own return code; samples are counted."""
    gpu = handle()
    fake.set_gpm(0, nv.NVML_GPM_METRIC_SM_UTIL, 73.5)
    fake.set_gpm(0, nv.NVML_GPM_METRIC_FP64_UTIL, math.nan)
    fake.set_gpm(0, nv.NVML_GPM_METRIC_NVDEC_0_UTIL, 1.0, code=nv.NVML_ERROR_NOT_SUPPORTED)
    one, two = nv.nvmlGpmSampleAlloc(), nv.nvmlGpmSampleAlloc()
    assert fake.open_gpm_samples == 2
    sm_and_dram = (nv.NVML_GPM_METRIC_SM_UTIL, nv.NVML_GPM_METRIC_DRAM_BW_UTIL)
    assert gpm_metrics(one, two, *sm_and_dram)[0].nvmlReturn == nv.NVML_ERROR_UNINITIALIZED
    nv.nvmlGpmSampleGet(gpu, one)
    nv.nvmlGpmSampleGet(gpu, two)
    sm, dram = gpm_metrics(one, two, *sm_and_dram)[:2]
    assert (sm.nvmlReturn, sm.value, dram.nvmlReturn) == (0, 0.0, 0)
    assert math.isnan(dram.value)
    time.sleep(0.11)
    nv.nvmlGpmSampleGet(gpu, two)
    ids = (nv.NVML_GPM_METRIC_SM_UTIL, nv.NVML_GPM_METRIC_FP64_UTIL, nv.NVML_GPM_METRIC_NVDEC_0_UTIL)
    sm, fp64, decoder = gpm_metrics(one, two, *ids)[:3]
    assert (sm.nvmlReturn, sm.value) == (0, 73.5)
    assert fp64.nvmlReturn == 0
    assert math.isnan(fp64.value)
    assert decoder.nvmlReturn == nv.NVML_ERROR_NOT_SUPPORTED
    nv.nvmlGpmSampleFree(one)
    nv.nvmlGpmSampleFree(two)
    assert fake.open_gpm_samples == 0


def test_gpm_refusals(fake: FakeNvml) -> None:
    """A wrong version and a GPU without GPM are refused."""
    sample = nv.nvmlGpmSampleAlloc()
    with nvml_error(nv.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
        nv.nvmlGpmMetricsGet(nv.c_nvmlGpmMetricsGet_t())
    fake.gpu(0).gpm_supported = 0
    assert nv.nvmlGpmQueryDeviceSupport(handle()).isSupportedDevice == 0
    with nvml_error(nv.NVML_ERROR_NOT_SUPPORTED):
        nv.nvmlGpmSampleGet(handle(), sample)
    nv.nvmlGpmSampleFree(sample)


def test_events(fake: FakeNvml) -> None:
    """Xids of registered GPUs arrive in order, others do not, and waiting ends in time."""
    fake.push_xid(0, 1)
    events = nv.nvmlEventSetCreate()
    nv.nvmlDeviceRegisterEvents(handle(0), nv.nvmlEventTypeXidCriticalError, events)
    started = time.monotonic()
    with nvml_error(nv.NVML_ERROR_TIMEOUT):
        nv.nvmlEventSetWait_v2(events, 40)
    assert 0.04 <= time.monotonic() - started
    thread, results = in_thread(lambda: nv.nvmlEventSetWait_v2(events, 60_000))
    fake.push_xid(1, 2)
    fake.push_xid(0, 79)
    thread.join(60)
    assert (results[0].eventType, results[0].eventData) == (nv.nvmlEventTypeXidCriticalError, 79)
    assert nv.nvmlDeviceGetIndex(results[0].device) == 0
    fake.lose(0)
    with nvml_error(nv.NVML_ERROR_GPU_IS_LOST):
        nv.nvmlEventSetWait_v2(events, 5000)
    assert fake.open_event_sets == 1
    nv.nvmlEventSetFree(events)
    assert fake.open_event_sets == 0


def test_mig(fake: FakeNvml) -> None:
    """MIG devices have identity, memory and processes, but no utilisation."""
    fake.add_mig(0, gpu_instance=7)
    fake.add_mig(0, gpu_instance=8).memory_used = 1 << 30
    fake.add_process(0, 11, 1 << 30, gpu_instance=8, compute_instance=0)
    gpu = handle()
    assert nv.nvmlDeviceGetMigMode(gpu) == [1, 1]
    mig = nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 1)
    with nvml_error(nv.NVML_ERROR_NOT_FOUND):
        nv.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 2)
    assert nv.nvmlDeviceIsMigDeviceHandle(mig).value == 1
    assert nv.nvmlDeviceGetGpuInstanceId(mig) == 8
    assert nv.nvmlDeviceGetName(mig) == "NVIDIA H200 MIG 1g.18gb"
    assert nv.nvmlDeviceGetAttributes(mig).gpuInstanceSliceCount == 1
    assert nv.nvmlDeviceGetMemoryInfo(mig, version=nv.nvmlMemory_v2).used == 1 << 30
    assert [p.pid for p in nv.nvmlDeviceGetComputeRunningProcesses(mig)] == [11]
    first = nv.nvmlDeviceGetHandleByUUID(fake.gpu(0).mig[0].uuid.decode())
    assert nv.nvmlDeviceGetComputeRunningProcesses(first) == []
    parent = nv.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
    assert nv.nvmlDeviceGetIndex(parent) == 0
    for device in (mig, parent):
        with nvml_error(nv.NVML_ERROR_NOT_SUPPORTED):
            nv.nvmlDeviceGetUtilizationRates(device)


def test_a_fault_hits_its_function_and_gpu_only(fake: FakeNvml) -> None:
    """A rule names a function, a GPU, when it starts and how often it acts."""
    fake.fail("nvmlDeviceGetPowerUsage", 1, nv.NVML_ERROR_UNKNOWN, after=1, times=1)
    assert nv.nvmlDeviceGetPowerUsage(handle(0)) > 0
    assert nv.nvmlDeviceGetPowerUsage(handle(1)) > 0
    with nvml_error(nv.NVML_ERROR_UNKNOWN):
        nv.nvmlDeviceGetPowerUsage(handle(1))
    assert nv.nvmlDeviceGetPowerUsage(handle(1)) > 0
    everything = fake.fail(code=nv.NVML_ERROR_NO_PERMISSION)
    with nvml_error(nv.NVML_ERROR_NO_PERMISSION):
        nv.nvmlDeviceGetCount()
    fake.clear(everything)
    assert nv.nvmlDeviceGetCount() == 3


def test_a_lost_gpu_is_counted_and_answers_nothing(fake: FakeNvml) -> None:
    """Every call for a lost GPU fails, the others go on."""
    gpu = handle(1)
    fake.lose(1)
    assert nv.nvmlDeviceGetCount() == 3
    with nvml_error(nv.NVML_ERROR_GPU_IS_LOST):
        nv.nvmlDeviceGetPowerUsage(gpu)
    with nvml_error(nv.NVML_ERROR_GPU_IS_LOST):
        handle(1)
    assert nv.nvmlDeviceGetPowerUsage(handle(2)) > 0
    fake.restore(1)
    assert nv.nvmlDeviceGetPowerUsage(gpu) > 0


def test_a_removed_gpu_moves_the_others_up(fake: FakeNvml) -> None:
    """After a removal the indexes are dense again, and the old handle fails."""
    gone, last = handle(1), handle(2)
    fake.remove(1)
    assert nv.nvmlDeviceGetCount() == 2
    assert nv.nvmlDeviceGetIndex(last) == 1
    assert nv.nvmlDeviceGetMinorNumber(handle(1)) == 2
    with nvml_error(nv.NVML_ERROR_GPU_IS_LOST):
        nv.nvmlDeviceGetPowerUsage(gone)
    fake.add(1)
    assert nv.nvmlDeviceGetPowerUsage(gone) > 0


def test_a_delay_sleeps_or_burns(fake: FakeNvml) -> None:
    """A delay takes wall-clock time, and hardly any CPU time unless it spins."""
    gpu = handle()
    burnt: list[float] = []
    for spin in (False, True):
        delay = fake.delay("nvmlDeviceGetPowerUsage", 0, 0.3, spin=spin)
        wall, cpu = time.monotonic(), time.thread_time()
        nv.nvmlDeviceGetPowerUsage(gpu)
        burnt.append(time.thread_time() - cpu)
        fake.clear(delay)
        assert 0.3 <= time.monotonic() - wall
    assert 5 * burnt[0] < burnt[1]


def test_a_hang_ends_when_released(fake: FakeNvml) -> None:
    """A hung call blocks its thread alone, until the hangs are released."""
    fake.hang("nvmlDeviceGetTemperature", 1)
    gpu = handle(1)
    thread, results = in_thread(lambda: nv.nvmlDeviceGetTemperature(gpu, nv.NVML_TEMPERATURE_GPU))
    fake.wait_until_waiting()
    assert nv.nvmlDeviceGetTemperature(handle(0), nv.NVML_TEMPERATURE_GPU) == 28
    assert not results
    fake.release_hangs()
    thread.join(60)
    assert results == [29]
    assert fake.waiting == 0


def test_a_driver_reload_needs_a_new_initialisation(fake: FakeNvml) -> None:
    """Calls fail from the unload until shutdown and init, and old handles stay dead."""
    old = handle()
    fake.unload_driver(nv.NVML_ERROR_UNKNOWN)
    with nvml_error(nv.NVML_ERROR_UNKNOWN):
        nv.nvmlDeviceGetPowerUsage(old)
    with nvml_error(nv.NVML_ERROR_DRIVER_NOT_LOADED):
        nv.nvmlInit()
    fake.load_driver("581.00")
    with nvml_error(nv.NVML_ERROR_UNKNOWN):
        nv.nvmlDeviceGetPowerUsage(old)
    nv.nvmlShutdown()
    with nvml_error(nv.NVML_ERROR_UNINITIALIZED):
        nv.nvmlDeviceGetCount()
    nv.nvmlInit()
    assert nv.nvmlSystemGetDriverVersion() == "581.00"
    with nvml_error(nv.NVML_ERROR_INVALID_ARGUMENT):
        nv.nvmlDeviceGetPowerUsage(old)
    assert (fake.inits, fake.shutdowns) == (2, 1)


@pytest.mark.parametrize(
    "code",
    [nv.NVML_ERROR_DRIVER_NOT_LOADED, nv.NVML_ERROR_LIB_RM_VERSION_MISMATCH, nv.NVML_ERROR_NO_PERMISSION],
)
def test_initialisation_fails(fake_nvml: FakeNvml, code: int) -> None:
    """Initialisation returns the error it was told to."""
    fake_nvml.fail_init(code)
    with nvml_error(code):
        nv.nvmlInit()
    with nvml_error(nv.NVML_ERROR_UNINITIALIZED):
        nv.nvmlDeviceGetCount()
    assert fake_nvml.inits == 0


def test_initialisation_hangs(fake_nvml: FakeNvml) -> None:
    """Initialisation itself can hang."""
    fake_nvml.hang("nvmlInit")
    thread, _ = in_thread(nv.nvmlInit)
    fake_nvml.wait_until_waiting()
    assert fake_nvml.inits == 0
    fake_nvml.release_hangs()
    thread.join(60)
    assert fake_nvml.inits == 1
    nv.nvmlShutdown()


def test_init_counts_references(fake: FakeNvml) -> None:
    """As many shutdowns as inits are needed."""
    nv.nvmlInit()
    nv.nvmlShutdown()
    assert nv.nvmlDeviceGetCount() == 3
    nv.nvmlShutdown()
    with nvml_error(nv.NVML_ERROR_UNINITIALIZED):
        nv.nvmlDeviceGetCount()
    assert fake.inits == fake.shutdowns == 2


def test_one_process_moves_between_machines(
    fake: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Initialisation follows the environment, and a thread hung in the old machine is still released."""
    fake.hang("nvmlDeviceGetPowerUsage")
    gpu = handle()
    thread, results = in_thread(lambda: nv.nvmlDeviceGetPowerUsage(gpu))
    fake.wait_until_waiting()
    other = FakeNvml.create(tmp_path / "other", gpus=8)
    monkeypatch.setenv("FAKE_NVML_CONTROL", str(other.path))
    nv.nvmlInit()
    assert nv.nvmlDeviceGetCount() == 8
    nv.nvmlShutdown()
    fake.release_hangs()
    thread.join(60)
    assert results == [76_000]
    other.close()


def test_calls_are_counted(fake: FakeNvml) -> None:
    """Calls are counted by function and by GPU, from every thread."""
    fake.reset_calls()
    gpu = handle(2)
    threads = [in_thread(lambda: [nv.nvmlDeviceGetPowerUsage(gpu) for _ in range(500)])[0] for _ in range(4)]
    for thread in threads:
        thread.join(60)
    assert fake.calls("nvmlDeviceGetPowerUsage") == fake.calls("nvmlDeviceGetPowerUsage", gpu=2) == 2000
    assert fake.calls_by_function() == {"nvmlDeviceGetHandleByIndex_v2": 1, "nvmlDeviceGetPowerUsage": 2000}


def test_h200_latencies(fake: FakeNvml) -> None:
    """Slow functions take as long as on an H200 and quick ones stay quick."""
    fake.h200_latencies()
    gpu = handle()
    started = time.monotonic()
    nv.nvmlDeviceGetPcieThroughput(gpu, nv.NVML_PCIE_UTIL_TX_BYTES)
    ends = [time.monotonic()]
    for _ in range(50):
        nv.nvmlDeviceGetPowerUsage(gpu)
        ends.append(time.monotonic())
    assert ends[0] - started >= 0.021
    assert min(end - begin for begin, end in pairwise(ends)) < 0.021


def test_another_process_sees_the_same_machine(fake: FakeNvml, nvml_library: Path) -> None:
    """A child finds the machine through its environment, and its calls are counted here."""
    fake.reset_calls()
    fake.gpu(1).power_mw = 123_456
    script = (
        "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(1); "
        "print(n.nvmlDeviceGetPowerUsage(h)); n.nvmlShutdown()"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], env=fake.env(nvml_library), capture_output=True, text=True, check=True
    )
    assert child.stdout == "123456\n"
    assert fake.calls("nvmlDeviceGetPowerUsage") == 1


def test_an_absent_function_is_not_found(fake: FakeNvml) -> None:
    """A function that the library lacks reads as on an old driver."""
    with nvml_error(nv.NVML_ERROR_FUNCTION_NOT_FOUND):
        nv.nvmlDeviceGetConfComputeMemSizeInfo(handle())
    with pytest.raises(KeyError):
        fake.fail("nvmlDeviceGetConfComputeMemSizeInfo")


@pytest.mark.slow
@pytest.mark.requires("C compiler")
def test_builders_do_not_clash(tmp_path: Path) -> None:
    """Concurrent builds into one directory leave one working library and nothing else."""
    threads = [in_thread(lambda: build(tmp_path))[0] for _ in range(2)]
    for thread in threads:
        thread.join(60)
    assert [entry.name for entry in tmp_path.iterdir()] == ["libnvidia-ml.so.1"]
