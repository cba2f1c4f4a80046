"""Fills control blocks with what an eight-GPU H200 machine reports (driver 580.159.04, read on one)."""

import pynvml

from tests.fakes.nvml.layout import MAX_GPM, Control, Gpu, Mig

_FIRST_BUS = 0x18
_MIB = 1 << 20


def fill_system(control: Control) -> None:
    """Sets the versions."""
    control.driver_version = b"580.159.04"
    control.nvml_version = b"13.580.159.04"
    control.cuda_version = 13000


def fill_gpu(gpu: Gpu, index: int) -> None:
    """Sets an idle H200 SXM; the caller decides whether it is present."""
    bus = _FIRST_BUS + 3 * index
    gpu.name = b"NVIDIA H200"
    gpu.uuid = f"GPU-4d0c6b2e-8f1a-4c55-9e21-{0x5A0000000000 + index:012x}".encode()
    gpu.bus_id = f"00000000:{bus:02X}:00.0".encode()
    gpu.serial = f"165292400{index:04d}".encode()
    gpu.vbios = b"96.00.A5.00.1A"
    gpu.part_number = b"692-2G520-0282-000"
    gpu.minor = index
    gpu.numa_node = index // 4
    gpu.pci_device_id, gpu.pci_subsystem_id = 0x233510DE, 0x18BE10DE
    gpu.brand = pynvml.NVML_BRAND_NVIDIA
    gpu.architecture = pynvml.NVML_DEVICE_ARCH_HOPPER
    gpu.capability_major, gpu.capability_minor = 9, 0
    gpu.cores, gpu.memory_bus_width = 16896, 6016
    gpu.memory_total, gpu.memory_reserved, gpu.memory_used = 143771 * _MIB, 615 * _MIB, 0
    gpu.bar1_total, gpu.bar1_used = 262144 * _MIB, 1 * _MIB
    gpu.util_period_us = 167_000
    gpu.power_mw = gpu.power_average_mw = 76_000 + 500 * index
    gpu.power_limit_mw = gpu.power_enforced_mw = gpu.power_default_mw = gpu.power_max_mw = 700_000
    gpu.power_min_mw = 200_000
    gpu.energy_mj = 3_600_000_000
    gpu.temperature, gpu.temperature_memory, gpu.margin = 28 + index, 33 + index, 59 - index
    gpu.thresholds[:] = [95, 89, 95, 87]
    gpu.tlimits[:] = [-8, -2, 0, 0]
    gpu.clocks[:] = [345, 345, 3201, 345]
    gpu.clocks_max[:] = [1980, 1980, 3201, 1545]
    gpu.clocks_app[:] = gpu.clocks_app_default[:] = [1980, 1980, 3201, 1545]
    gpu.reasons = pynvml.nvmlClocksEventReasonGpuIdle
    gpu.reasons_supported = 0x1FF
    gpu.pcie_gen = gpu.pcie_gen_max = gpu.pcie_gen_gpu_max = 5
    gpu.pcie_width = gpu.pcie_width_max = 16
    gpu.ecc = gpu.ecc_pending = gpu.ecc_supported = 1
    gpu.persistence = 1
    gpu.link_count, gpu.link_mbps = 18, 26562
    for link in gpu.links[:18]:
        link.active, link.version = 1, 6
    gpu.mig_supported, gpu.mig_max = 1, 7
    gpu.gpm_supported = gpu.gpm_streaming = 1
    for metric in range(MAX_GPM):
        gpu.gpm_codes[metric] = pynvml.NVML_SUCCESS if metric < 98 else pynvml.NVML_ERROR_INVALID_ARGUMENT
    gpu.event_types = 0xFF9F
    gpu.utilization_slots = 72


def fill_mig(mig: Mig, gpu: Gpu, index: int) -> None:
    """Sets an idle 1g.18gb device."""
    mig.name = gpu.name + b" MIG 1g.18gb"
    mig.uuid = f"MIG-7b1f3c5a-2d44-5e0b-a{gpu.minor:03x}-{0x6B0000000000 + index:012x}".encode()
    mig.gpu_slices = mig.compute_slices = 1
    mig.multiprocessors = 16
    mig.memory_total, mig.memory_reserved, mig.memory_used = 18432 * _MIB, 76 * _MIB, 0
