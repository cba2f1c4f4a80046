// Short titles of findings, where there is no room for a sentence.

/** @type {Record<string, string>} */
const TITLES = {
  gpu_fault: "GPU or driver fault",
  process_died: "Killed for lack of memory",
  process_blocked: "Process hangs in the kernel",
  node_lost: "Node stopped reporting",
  node_missing: "Node has never reported",
  thermal_throttle: "Heat lowers the clocks",
  power_brake: "Power supply slows the GPU",
  hw_slowdown: "Hardware halves the clocks",
  fan_failure: "A fan is not turning",
  memory_overtemperature: "GPU memory is too hot",
  power_capped: "Power limit below default",
  clocks_locked: "Clocks below maximum",
  pcie_link_degraded: "PCIe link is slow",
  pcie_replays: "PCIe packets are resent",
  numa_mismatch: "Job on another NUMA node",
  gpu_oom_imminent: "GPU memory is running out",
  gpu_memory_leak: "GPU memory keeps growing",
  host_memory_leak: "Host memory keeps growing",
  swap_thrash: "The machine is swapping",
  gpu_memory_orphaned: "Memory in use by no process",
  collective_hang: "Busy without progress",
  checkpoint_stall: "Idle during checkpoints",
  periodic_stall: "The GPU pauses repeatedly",
  throughput_regression: "Utilization has dropped",
  gpu_contention: "Programs share a GPU",
  straggler: "One GPU slows the job",
  pcie_copy_bound: "Waits for PCIe copies",
  input_io_bound: "Input waits for storage",
  input_too_few_workers: "Too few data workers",
  input_cpu_bound: "Input uses all CPUs",
  cpu_oversubscribed: "Too many threads for the CPUs",
  cgroup_cpu_throttled: "CPU limit throttles the job",
  launch_bound: "Kernels are too small",
  input_main_process: "Main process loads the input",
  host_many_threads: "Waits for CPU threads",
  host_single_thread: "Waits for one CPU thread",
  host_wait_unattributed: "Waits for unknown reasons",
  gpu_underused: "Little work for the GPU",
  gpu_idle_allocated: "Held but not used",
  thin_kernels: "Kernels leave SMs unused",
  tensor_cores_unused: "Tensor cores are not used",
  slow_start: "GPU not used yet",
  compute_bound: "Fully used: compute-bound",
  memory_bandwidth_bound: "Memory bandwidth is the limit",
  network_saturated: "The network is saturated",
};

/**
 * What a GPU's fault is, in the words of the driver: `Xid 94 (memory error contained to one program)`; null for other findings.
 * @param {{ id: string, label?: string | null, summary?: string }} finding
 */
export function faultTitle({ id, label, summary }) {
  if (id !== "gpu_fault" || !summary) return null;
  const place = `GPU ${label}: `;
  const at = summary.indexOf(place);
  const words = (at < 0 ? summary : summary.slice(at + place.length)).replace(/^the driver reported /, "");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/**
 * A finding in a few words, a fault with its cause.
 * @param {{ id: string, label?: string | null, summary?: string }} finding
 */
export function shortFindingTitle(finding) {
  return faultTitle(finding) ?? shortTitle(finding.id);
}

/**
 * A kind of findings in a few words.
 * @param {string} id
 */
export function shortTitle(id) {
  const words = String(id ?? "unknown").replaceAll("_", " ");
  return TITLES[id] ?? words.charAt(0).toUpperCase() + words.slice(1);
}
