// GPUs while somebody held them: what job and user pages draw.
import { heldUntil } from "./timeline-data.js";

/** The GPUs that processes held: [{node, gpu, word ("node:3"), spans: [[from, to]]}], by node and label. */
export function heldGpus(processes, now) {
  const found = new Map();
  for (const process of processes) {
    for (const held of process.gpus) {
      const word = `${process.node}:${held.gpu}`;
      if (!found.has(word)) found.set(word, { node: process.node, gpu: held.gpu, word, spans: [] });
      found.get(word).spans.push([held.from, heldUntil(process, held, now)]);
    }
  }
  return [...found.values()].sort((a, b) => a.word.localeCompare(b.word, "en", { numeric: true }));
}

const isIn = (spans, from, to) => spans.some(([first, last]) => first < to && last >= from);

/** An answer without what the GPUs did while they were not held. */
export function whileHeld(answer, gpus) {
  const spans = new Map(gpus.map((gpu) => [gpu.word, gpu.spans]));
  const { times, step } = answer;
  const series = answer.series.map((one) => {
    const own = spans.get(`${one.node}:${one.gpu}`) ?? [];
    return { ...one, values: one.values.map((value, at) => (isIn(own, times[at], times[at] + step) ? value : null)) };
  });
  return { ...answer, series };
}

/** How many GPUs were held over time, as an answer of the head would have it. */
export function heldCount(gpus, { from, to }, points) {
  const step = Math.max(1, Math.ceil((to - from) / points));
  const first = Math.floor(from / step) * step;
  const times = [];
  for (let at = first; at < to; at += step) times.push(at);
  const values = times.map((at) => gpus.filter((gpu) => isIn(gpu.spans, at, at + step)).length);
  return { from, to, step, times, series: [{ node: "", subject: "", metric: "gpus_held", unit: "1", values }] };
}

/** Charts of several GPUs, one line each. */
export function heldSpecs(isOneNode) {
  const name = (series) => (isOneNode() ? `GPU ${series.gpu}` : `${series.node} · ${series.gpu}`);
  const each = (metric) => ({ metric, name, words: "GPUs" });
  return [
    { id: "utilization", title: "GPU utilization", unit: "ratio", top: 1, height: 190, each: each("gpu_utilization_ratio") },
    { id: "memory", title: "GPU memory", unit: "bytes", each: each("memory_used_bytes") },
    { id: "sm-active", title: "SM active", unit: "ratio", top: 1, why: "it needs Hopper GPUs or later", each: each("sm_active_ratio") },
    { id: "power", title: "Power", unit: "watts", each: each("power_watts") },
  ];
}
