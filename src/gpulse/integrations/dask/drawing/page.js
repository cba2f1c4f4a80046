"use strict";
// Says what is under the pointer: the moment, the graphs that ran, and the value of each series there.
const chart = JSON.parse(document.getElementById("data").textContent);
const svg = document.querySelector("svg");
const hair = document.getElementById("hair");
const told = document.getElementById("told");

function nearest(times, moment) {
  let low = 0;
  let high = times.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] < moment) low = middle + 1;
    else high = middle;
  }
  return low > 0 && moment - times[low - 1] < times[low] - moment ? low - 1 : low;
}

function clock(seconds) {
  const tenths = Math.max(0, Math.round(seconds * 10));
  const whole = Math.floor(tenths / 10);
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return `${parts.map((part) => String(part).padStart(2, "0")).join(":")}.${tenths % 10}`;
}

function withUnit(value, panel) {
  return value === null || value === undefined ? "–" : `${value} ${panel.unit}`.trim();
}

function seriesLines(panel, moment) {
  return panel.series.map((series) => {
    const place = nearest(series.t, moment);
    const isNear = series.t.length > 0 && Math.abs(series.t[place] - moment) <= panel.reach;
    const more = isNear && series.w[place] ? ` (${series.w[place]})` : "";
    return `${series.name || panel.name}  ${withUnit(isNear ? series.v[place] : null, panel)}${more}`;
  });
}

function mapLines(panel, moment, y) {
  const row = Math.min(panel.labels.length - 1, Math.floor(((y - panel.top) / (panel.bottom - panel.top)) * panel.labels.length));
  const columns = panel.rows[row].length;
  const column = Math.min(columns - 1, Math.max(0, Math.floor(((moment - chart.start) / (chart.end - chart.start)) * columns)));
  return [`${panel.labels[row]}  ${withUnit(panel.rows[row][column], panel)}`];
}

function hide() {
  told.style.display = "none";
  hair.style.visibility = "hidden";
}

svg.addEventListener("pointermove", (event) => {
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const panel = chart.panels.find((one) => point.y >= one.top - 6 && point.y <= one.bottom + 6);
  if (!panel || point.x < chart.left || point.x > chart.right) return hide();
  const moment = chart.start + ((point.x - chart.left) / (chart.right - chart.left)) * (chart.end - chart.start);
  const graphs = chart.bands.filter((band) => band[0] <= moment && moment < band[1]).map((band) => band[2]);
  const lines = panel.labels ? mapLines(panel, moment, Math.min(Math.max(point.y, panel.top), panel.bottom - 0.01)) : seriesLines(panel, moment);
  const more = graphs.length > 6 ? [`and ${graphs.length - 6} more at once`] : [];
  told.textContent = [clock(moment), ...graphs.slice(0, 6), ...more, ...lines].join("\n");
  told.style.display = "block";
  const right = event.clientX + 16 + told.offsetWidth > window.innerWidth;
  told.style.left = `${Math.max(4, right ? event.clientX - 16 - told.offsetWidth : event.clientX + 16)}px`;
  told.style.top = `${Math.max(4, Math.min(event.clientY + 12, window.innerHeight - told.offsetHeight - 4))}px`;
  hair.setAttribute("x1", point.x);
  hair.setAttribute("x2", point.x);
  hair.style.visibility = "visible";
});
svg.addEventListener("pointerleave", hide);
