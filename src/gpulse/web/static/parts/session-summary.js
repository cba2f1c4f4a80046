// The summary of a session: mean and peak of each quantity, and between which GPUs the means lie.

import * as format from "../core/format.js";
import { html, nothing } from "../vendor/lit-html.js";

/** @type {Array<[metric: string, title: string]>} */
const QUANTITIES = [
  ["gpu_utilization_ratio", "Utilization"],
  ["sm_active_ratio", "SM active"],
  ["tensor_active_ratio", "Tensor active"],
  ["dram_active_ratio", "DRAM active"],
  ["memory_used_bytes", "Memory used"],
  ["power_watts", "Power"],
  ["pcie_rx_bytes_per_second", "PCIe to the GPU"],
  ["pcie_tx_bytes_per_second", "PCIe from the GPU"],
  ["nvlink_rx_bytes_per_second", "NVLink received"],
  ["nvlink_tx_bytes_per_second", "NVLink sent"],
];

/**
 * The summary as a table; each quantity with the GPUs whose mean is lowest and highest.
 * @param {Api.JobReport} report
 */
export function summaryTable(report) {
  const known = QUANTITIES.filter(([metric]) => report.metrics[metric]);
  return html`<section class="card table-card session-summary"><table class="table stack">
    <caption><h2>Summary</h2></caption>
    <thead><tr><th scope="col">Quantity</th><th scope="col" class="num">Mean</th><th scope="col" class="num">Peak</th>
      <th scope="col" class="num">Lowest GPU mean</th><th scope="col" class="num">Highest GPU mean</th></tr></thead>
    <tbody>${known.map(([metric, title]) => row(report, metric, title))}</tbody></table>
    ${known.length ? nothing : html`<p class="muted">No samples yet.</p>`}
    ${report.data_gaps.map((text) => html`<p class="muted">${format.text(text)}.</p>`)}
  </section>`;
}

/**
 * @param {Api.JobReport} report
 * @param {string} metric
 * @param {string} title
 */
function row(report, metric, title) {
  const { mean, max } = report.metrics[metric];
  const gpus = report.gpu_rows.filter((gpu) => gpu.metrics[metric]).sort((a, b) => a.metrics[metric].mean - b.metrics[metric].mean);
  /** @param {Api.JobGpu | undefined} gpu */
  const place = (gpu) =>
    gpu
      ? html`${format.metricValue(metric, gpu.metrics[metric].mean)} <span class="muted"><bdi>${format.text(gpu.node)}</bdi> · ${format.text(gpu.gpu)}</span>`
      : format.UNKNOWN;
  return html`<tr><th scope="row" data-label="Quantity">${title}</th><td data-label="Mean" class="num">${format.metricValue(metric, mean)}</td>
    <td data-label="Peak" class="num">${format.metricValue(metric, max)}</td>
    <td data-label="Lowest GPU mean" class="num">${place(gpus[0])}</td><td data-label="Highest GPU mean" class="num">${place(gpus.at(-1))}</td></tr>`;
}
