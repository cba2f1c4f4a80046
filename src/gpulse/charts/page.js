// Draws the charts of a page with uPlot: drag to zoom, double-click to reset, one cursor for all panels.
(() => {
  const NARROW_PIXELS = 600;
  const REACH_PIXELS = 12;
  const MAX_LINES_READ = 8;
  const NULL_EXPAND = 2; // uPlot's mode: a break of one line stays a break where other lines have values
  const TIME_STEPS = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600,
    43200, 86400, 172800, 604800, 2592000, 31536000,
  ];
  /** @type {ChartPage.Panel} */
  const NO_PANEL = {
    kind: "static",
    unit: "",
    low: 0,
    high: 1,
    top: 1,
    ticks: [],
    tickTexts: [],
    height: 0,
    labels: [],
    isApart: false,
    gaps: [],
    rows: [],
    notes: [],
    start: 0,
    end: 1,
    columns: 0,
    cells: "",
    edges: [],
    rowTicks: [],
  };
  /** @type {ChartPage.Reading} */
  const NO_READING = { value: null, range: "" };
  /** @type {ChartPage.Document} */
  const data = JSON.parse(document.getElementById("charts")?.textContent ?? "");
  /** @type {ChartPage.Plot[]} */
  const plots = [];
  /** @type {number[] | null} The zoomed time interval; null for all of the chart. */
  let shown = null;

  const two = (/** @type {number} */ number) => String(number).padStart(2, "0");
  const color = (/** @type {string} */ name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  /** Seconds that local time is ahead of UTC; daylight saving may change it within a chart. @param {ChartPage.Chart} chart @param {number} moment */
  function offsetAt(chart, moment) {
    let offset = chart.offsets[0][1];
    for (const [from, seconds] of chart.offsets) if (from <= moment) offset = seconds;
    return offset;
  }

  /** Format a time with enough digits to distinguish it from times one step away. @param {ChartPage.Chart} chart @param {number} moment @param {number} step */
  function timeText(chart, moment, step) {
    const digits = step < 1 ? Math.min(3, Math.ceil(-Math.log10(step) - 1e-9)) : 0;
    const parts = Math.round(moment * 10 ** digits);
    const whole = Math.floor(parts / 10 ** digits);
    const fraction = digits ? `.${String(parts - whole * 10 ** digits).padStart(digits, "0")}` : "";
    if (chart.clock === "elapsed") {
      if (chart.end < 120) return whole + fraction;
      if (chart.end < 3600) return `${Math.floor(whole / 60)}:${two(whole % 60)}${fraction}`;
      return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}${step < 60 ? `:${two(whole % 60)}${fraction}` : ""}`;
    }
    const at = new Date((whole + offsetAt(chart, moment)) * 1000);
    if (Number.isNaN(at.getTime())) return String(moment);
    const clock = `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}`;
    const seconds = step < 60 ? `:${two(at.getUTCSeconds())}${fraction}` : "";
    const day = chart.end - chart.start >= 86400 ? `${two(at.getUTCMonth() + 1)}-${two(at.getUTCDate())} ` : "";
    return day + clock + seconds;
  }

  /** Format the time under the cursor, with the precision of the values. @param {ChartPage.Plot} plot @param {number} moment */
  function cursorTime(plot, moment) {
    const tenth = timeStep(...rangeOf(plot.u), plot.u.over.clientWidth) / 10;
    const isDense = plot.spacings.some((seconds) => 0 < seconds && seconds < 1);
    const unit = plot.chart.clock === "elapsed" && plot.chart.end < 120 ? " s" : "";
    return timeText(plot.chart, moment, Math.min(tenth, isDense ? 0.1 : 59)) + unit;
  }

  /** @param {number} from @param {number} to @param {number} pixels */
  function timeStep(from, to, pixels) {
    const most = Math.max(2, Math.min(12, Math.floor(pixels / 90)));
    return TIME_STEPS.find((step) => (to - from) / step <= most) ?? (to - from) / most;
  }

  /** @param {ChartPage.Chart} chart @param {number} from @param {number} to @param {number} pixels */
  function timeSplits(chart, from, to, pixels) {
    const step = timeStep(from, to, pixels);
    const shift = (/** @type {number} */ moment) => (chart.clock === "elapsed" ? 0 : offsetAt(chart, moment));
    const first = shift(from);
    const found = [];
    for (let place = Math.ceil((from + first) / step - 1e-9); place * step - first <= to; place += 1) {
      const moment = place * step - shift(place * step - first);
      if (from <= moment && moment <= to) found.push(moment);
    }
    return found;
  }

  /** @param {number[]} times @param {number} moment */
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

  const numberText = (/** @type {ChartPage.Value} */ value) => (value === null ? "–" : String(Number(value.toPrecision(4))));
  const valueText = (/** @type {ChartPage.Value} */ value, /** @type {string} */ unit) =>
    value === null ? "–" : `${numberText(value)} ${unit}`.trim();

  /** Red, green and blue of the colors of heat maps, from the least to the most. */
  function heatRamp() {
    return ["heat0", "heat1", "heat2"].map((name) => [1, 3, 5].map((at) => parseInt(color(name).slice(at, at + 2), 16)));
  }

  /** @param {number[][]} ramp @param {number} share */
  function heatColor(ramp, share) {
    const place = Math.min(1, Math.max(0, share)) * (ramp.length - 1);
    const under = Math.min(ramp.length - 2, Math.floor(place));
    return ramp[under].map((channel, at) => Math.round(channel + (ramp[under + 1][at] - channel) * (place - under)));
  }

  /**
   * Levels of a heat map's cells: 0 for unknown values, otherwise 1 to 65535 from the lower end of its scale to the upper.
   * @param {string} cells
   */
  function levelsOf(cells) {
    const bytes = Uint8Array.from(atob(cells), (letter) => letter.charCodeAt(0));
    return new Uint16Array(bytes.buffer);
  }

  /** @param {ChartPage.Panel} panel @param {Uint16Array} levels */
  function heatImage(panel, levels) {
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, panel.columns);
    canvas.height = Math.max(1, panel.labels.length);
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    const image = context.createImageData(canvas.width, canvas.height);
    const ramp = heatRamp();
    levels.forEach((level, place) => {
      if (level > 0) image.data.set([...heatColor(ramp, (level - 1) / 65534), 255], place * 4);
    });
    context.putImageData(image, 0, 0);
    return canvas;
  }

  // --- Values at one time ------------------------------------------------------------------------------------------

  /** @param {ChartPage.Plot} plot @param {number} row @param {number} moment @returns {ChartPage.Reading} */
  function reading(plot, row, moment) {
    const { times, values, low, high } = plot.panel.rows[row];
    const place = nearest(times, moment);
    const reach = Math.max(0.75 * plot.spacings[row], REACH_PIXELS * secondsPerPixel(plot.u));
    if (!times.length || Math.abs(times[place] - moment) > reach) return NO_READING;
    const isRange = low && high && low[place] !== high[place] && values[place] !== null;
    return { value: values[place], range: isRange ? ` (${numberText(low[place])} to ${numberText(high[place])})` : "" };
  }

  /** @param {ChartPage.Plot} plot @param {number} row @param {number} moment @returns {ChartPage.Reading} */
  function boxReading({ panel }, row, moment) {
    const box = panel.rows[row].boxes.find(([start, end]) => start <= moment && moment < end);
    if (!box) return NO_READING;
    const [, , low, q1, median, q3, high, count] = box;
    return {
      value: median,
      range: ` (interquartile range ${numberText(q1)} to ${numberText(q3)}, range ${numberText(low)} to ${numberText(high)}, ${count} values)`,
    };
  }

  /** @param {ChartPage.Plot} plot @param {number} row @param {number} moment @returns {ChartPage.Reading} */
  function cellReading({ panel, levels }, row, moment) {
    const column = Math.floor(((moment - panel.start) / (panel.end - panel.start)) * panel.columns);
    const level = column >= 0 && column < panel.columns ? levels[row * panel.columns + column] : 0;
    return { value: level ? panel.low + ((level - 1) / 65534) * (panel.high - panel.low) : null, range: "" };
  }

  /**
   * Return the rows of text for the readout.
   * @param {ChartPage.Plot} plot
   * @param {number} moment
   * @param {number | null} hoveredRow
   * @returns {ChartPage.Line[]}
   */
  function readout(plot, moment, hoveredRow) {
    const { panel, chart } = plot;
    if (panel.kind === "spans") {
      return chart.spans.filter((span) => span.start <= moment && moment <= span.end).map((span) => [span.color, span.text]);
    }
    const read = panel.kind === "lines" ? reading : panel.kind === "boxes" ? boxReading : cellReading;
    const isAbout = (/** @type {ChartPage.Gap} */ gap, /** @type {number} */ row) => !gap.rows.length || gap.rows.includes(row);
    const gaps = panel.gaps.filter((gap) => gap.start < moment && moment < gap.end);
    /** @type {ChartPage.Line[]} */
    const found = gaps
      .filter((gap) => hoveredRow === null || isAbout(gap, hoveredRow))
      .slice(0, 2)
      .map((gap) => [gap.color, gap.reason || "no data"]);
    const labels = panel.labels;
    // A box covers a time interval that may contain a gap; a value next to a gap is not a value in it.
    const readAt = (/** @type {number} */ row) =>
      panel.kind !== "boxes" && gaps.some((gap) => isAbout(gap, row)) ? NO_READING : read(plot, row, moment);
    const text = (/** @type {number} */ row) => {
      const { value, range } = readAt(row);
      return `${labels[row]}  ${valueText(value, panel.unit)}${range}`;
    };
    if (hoveredRow !== null) return [...found, [null, text(hoveredRow)]];
    if (labels.length <= MAX_LINES_READ) {
      labels.forEach((_, row) => found.push([panel.isApart ? null : panel.rows[row].color, text(row)]));
      return found;
    }
    const values = labels.map((_, row) => readAt(row).value).filter((value) => value !== null);
    if (!values.length) return found;
    const low = values.reduce((one, other) => Math.min(one, other));
    const high = values.reduce((one, other) => Math.max(one, other));
    return [...found, [null, `${values.length} of ${labels.length} with data, ${numberText(low)} to ${valueText(high, panel.unit)}`]];
  }

  /** @param {ChartPage.Plot} plot @param {HTMLElement} box */
  function showReadout(plot, box) {
    const { u } = plot;
    const { left = -1, top = 0 } = u.cursor;
    if (left < 0) {
      box.style.display = "none";
      return;
    }
    const moment = u.posToVal(left, "x");
    const isHovered = u.over.matches(":hover");
    const count = plot.panel.labels.length;
    const row =
      isHovered && plot.panel.isApart && count ? Math.min(count - 1, Math.max(0, Math.floor((top / u.over.clientHeight) * count))) : null;
    const rows = readout(plot, moment, row);
    if (isHovered) rows.unshift([null, cursorTime(plot, moment)]);
    box.replaceChildren(
      ...rows.map(([name, text]) => {
        const line = document.createElement("div");
        if (name) {
          const swatch = document.createElement("i");
          swatch.style.background = color(name);
          line.append(swatch);
        }
        line.append(text);
        return line;
      }),
    );
    box.style.display = rows.length ? "block" : "none";
    const isRight = left + 14 + box.offsetWidth > u.over.clientWidth;
    box.style.left = `${isRight ? Math.max(0, left - 10 - box.offsetWidth) : left + 10}px`;
  }

  // --- Painting ----------------------------------------------------------------------------------------------------

  /**
   * Paint something, and restore the canvas state, because uPlot does not set the text style of its axes again.
   * @param {(plot: ChartPage.Plot) => void} what
   * @param {ChartPage.Plot} plot
   */
  function paint(what, plot) {
    plot.u.ctx.save();
    what(plot);
    plot.u.ctx.restore();
  }

  /** @param {ChartPage.Plot} plot */
  function paintAreas(plot) {
    const { u, chart, panel } = plot;
    const { ctx, bbox } = u;
    const x = (/** @type {number} */ moment) => Math.min(bbox.left + bbox.width, Math.max(bbox.left, u.valToPos(moment, "x", true)));
    /** @type {(from: number, to: number, name: string, alpha: number, top?: number, height?: number) => void} */
    const area = (from, to, name, alpha, top = bbox.top, height = bbox.height) => {
      const start = x(from);
      ctx.globalAlpha = alpha;
      ctx.fillStyle = color(name);
      ctx.fillRect(start, top, Math.max(1, x(to) - start), height);
      ctx.globalAlpha = 1;
    };
    if (panel.kind !== "map") for (const span of chart.spans) if (span.tint) area(span.start, span.end, span.color, span.tint);
    if (panel.isApart && panel.kind !== "map") {
      panel.labels.forEach((_, row) => {
        ctx.fillStyle = color("grid");
        ctx.fillRect(bbox.left, Math.round(bbox.top + (bbox.height * (row + 0.95)) / panel.labels.length), bbox.width, 1);
      });
    }
    for (const gap of panel.gaps) {
      if (!gap.rows.length) area(gap.start, gap.end, gap.color, 0.55);
      for (const row of gap.rows) {
        const lane = bbox.height / panel.labels.length;
        if (panel.isApart) area(gap.start, gap.end, gap.color, 0.55, bbox.top + lane * (row + 0.1), lane * 0.85);
        else area(gap.start, gap.end, panel.rows[row].color, 0.55, bbox.top + bbox.height - 4, 4);
      }
    }
  }

  /** @param {ChartPage.Plot} plot */
  function paintMarks({ u, chart }) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = color("quiet");
    ctx.setLineDash([3, 3]);
    for (const mark of chart.marks) {
      const x = u.valToPos(mark.time, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  /** @param {ChartPage.Plot} plot */
  function paintMap(plot) {
    const { u, panel } = plot;
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = color("gap");
    ctx.fillRect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.imageSmoothingEnabled = false;
    const left = u.valToPos(panel.start, "x", true);
    if (plot.image) ctx.drawImage(plot.image, left, bbox.top, u.valToPos(panel.end, "x", true) - left, bbox.height);
    ctx.strokeStyle = color("paper");
    for (const edge of panel.edges) {
      const y = bbox.top + (bbox.height * edge) / panel.labels.length;
      ctx.strokeRect(bbox.left - 2, y, bbox.width + 4, 0);
    }
    ctx.restore();
    const ratio = devicePixelRatio;
    const right = bbox.left + bbox.width;
    const ramp = heatRamp();
    for (let step = 0; step < 64; step += 1) {
      ctx.fillStyle = `rgb(${heatColor(ramp, 1 - step / 63).join()})`;
      ctx.fillRect(right + 10 * ratio, bbox.top + (bbox.height * step) / 64, 10 * ratio, bbox.height / 64 + 1);
    }
    write(ctx, color("quiet"), ratio);
    panel.ticks.forEach((value, place) => {
      const y = bbox.top + bbox.height * (1 - (value - panel.low) / (panel.high - panel.low));
      ctx.fillText(panel.tickTexts[place], right + 25 * ratio, y);
    });
  }

  /** Draw the notes to the right of the lanes. @param {ChartPage.Plot} plot */
  function paintNotes({ u, panel }) {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    const lane = bbox.height / panel.labels.length;
    write(ctx, color("quiet"), ratio);
    panel.notes.forEach((note, row) => ctx.fillText(note, bbox.left + bbox.width + 6 * ratio, bbox.top + lane * (row + 0.525)));
  }

  /** @param {CanvasRenderingContext2D} ctx @param {string} ink @param {number} ratio @param {CanvasTextAlign} [align] */
  function write(ctx, ink, ratio, align = "left") {
    ctx.fillStyle = ink;
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = align;
    ctx.textBaseline = "middle";
  }

  /** @param {ChartPage.Plot} plot */
  function paintBoxes({ u, panel }) {
    const { ctx, bbox } = u;
    const boxesPerSlot = panel.isApart ? 1 : panel.rows.length;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    panel.rows.forEach((row, number) => {
      const y = (/** @type {number} */ value) => u.valToPos(laneValue(panel, number, value), "y", true);
      ctx.strokeStyle = ctx.fillStyle = color(row.color);
      for (const [start, end, low, q1, median, q3, high] of row.boxes) {
        const [from, to] = [u.valToPos(start, "x", true), u.valToPos(end, "x", true)];
        const width = (0.86 * (to - from)) / boxesPerSlot;
        const left = from + 0.07 * (to - from) + (number % boxesPerSlot) * width;
        /** @type {(x1: number, y1: number, x2: number, y2: number, thick: number) => void} */
        const stroke = (x1, y1, x2, y2, thick) => {
          ctx.lineWidth = thick;
          ctx.beginPath();
          ctx.moveTo(x1, y1);
          ctx.lineTo(x2, y2);
          ctx.stroke();
        };
        stroke(left + width / 2, y(low), left + width / 2, y(high), 1);
        ctx.globalAlpha = 0.3;
        ctx.fillRect(left + 0.08 * width, y(q3), 0.84 * width, y(q1) - y(q3));
        ctx.globalAlpha = 1;
        ctx.lineWidth = 1;
        ctx.strokeRect(left + 0.08 * width, y(q3), 0.84 * width, y(q1) - y(q3));
        stroke(left + 0.08 * width, y(median), left + 0.92 * width, y(median), 2.2);
      }
    });
    ctx.restore();
  }

  /**
   * Spans whose labels are written: those with room, and of narrow ones those with round numbers.
   * @param {ChartPage.Span[]} spans
   * @param {number} room
   * @param {(moment: number) => number} x
   */
  function labelled(spans, room, x) {
    const width = (/** @type {ChartPage.Span} */ span) => x(span.end) - x(span.start);
    const middle = (/** @type {ChartPage.Span} */ span) => (x(span.start) + x(span.end)) / 2;
    const wide = spans.filter((span) => width(span) >= room);
    const narrow = spans.filter((span) => width(span) < room);
    for (const step of [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]) {
      const some = narrow.filter((span) => span.number % step === 0).sort((one, other) => one.start - other.start);
      if (some.every((span, place) => place === 0 || middle(span) - middle(some[place - 1]) >= room)) {
        return [...wide, ...some.filter((span) => wide.every((other) => Math.abs(middle(other) - middle(span)) >= room))];
      }
    }
    return wide;
  }

  /** @param {ChartPage.Plot} plot */
  function paintSpans({ u, chart }) {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    const lane = bbox.height / chart.lanes;
    const right = bbox.left + bbox.width;
    const x = (/** @type {number} */ moment) => Math.min(right, Math.max(bbox.left, u.valToPos(moment, "x", true)));
    const seen = chart.spans.filter((span) => u.valToPos(span.end, "x", true) >= bbox.left && u.valToPos(span.start, "x", true) <= right);
    for (const span of seen) {
      ctx.fillStyle = color(span.color);
      ctx.fillRect(x(span.start), bbox.top + span.lane * lane + 1, Math.max(2, x(span.end) - x(span.start)), lane - 3);
    }
    write(ctx, color("ink"), ratio);
    const y = (/** @type {ChartPage.Span} */ span) => bbox.top + (span.lane + 0.5) * lane;
    if (!chart.spansTitle) {
      for (const span of seen) {
        const isLate = x(span.start) - bbox.left > 0.7 * bbox.width;
        ctx.textAlign = isLate ? "right" : "left";
        ctx.fillText(span.label, x(span.start) + (isLate ? -5 : 5) * ratio, y(span));
      }
      return;
    }
    ctx.textAlign = "center";
    const room = Math.max(0, ...seen.map((span) => ctx.measureText(span.label).width)) + 6 * ratio;
    for (let place = 0; place < chart.lanes; place += 1) {
      const inLane = seen.filter((span) => span.lane === place && span.label);
      for (const span of labelled(inLane, room, x)) {
        ctx.fillText(span.label, (x(span.start) + x(span.end)) / 2, y(span));
      }
    }
    write(ctx, color("quiet"), ratio, "right");
    ctx.fillText(chart.spansTitle, bbox.left - 8 * ratio, bbox.top + bbox.height / 2);
  }

  // --- Plots -------------------------------------------------------------------------------------------------------

  /**
   * A value on the panel's own scale, or in the lane of its row.
   * @param {ChartPage.Panel} panel
   * @param {number} row
   * @param {number} value
   */
  function laneValue(panel, row, value) {
    if (!panel.isApart) return value;
    const share = Math.min(1, Math.max(0, (value - panel.low) / (panel.high - panel.low)));
    return panel.labels.length - row - 0.95 + 0.85 * share;
  }

  /**
   * Places of the values that no line reaches, because neither neighbour is known; undefined are moments of other lines.
   * @param {uPlot} u
   * @param {number} number
   */
  function loneValues(u, number) {
    /** @type {number[]} */
    const known = [];
    u.data[number].forEach((value, place) => value !== undefined && known.push(place));
    const isKnown = (/** @type {number} */ at) => (u.data[number][known[at]] ?? null) !== null;
    return known.filter((_, at) => isKnown(at) && !isKnown(at - 1) && !isKnown(at + 1));
  }

  /**
   * @param {ChartPage.Panel} panel
   * @param {Array<Array<Array<number | null>>>} tables
   * @param {uPlot.Series[]} series
   * @param {uPlot.Band[]} bands
   */
  function lineSeries(panel, tables, series, bands) {
    panel.rows.forEach((row, place) => {
      const stroke = color(panel.isApart ? "line0" : row.color);
      const lane = (/** @type {ChartPage.Value[]} */ values) =>
        values.map((value) => (value === null ? null : laneValue(panel, place, value)));
      const base = { scale: "y", points: { show: false }, spanGaps: false };
      if (row.low && row.high) {
        const first = series.length;
        tables.push([row.times, lane(row.high), lane(row.low)]);
        series.push({ ...base, stroke: "transparent" }, { ...base, stroke: "transparent" });
        bands.push({ series: [first, first + 1], fill: `${stroke}38` });
      }
      tables.push([row.times, lane(row.values)]);
      const fill = panel.isApart ? `${stroke}30` : undefined;
      series.push({
        ...base,
        stroke,
        points: { show: false, filter: loneValues, size: 5, fill: stroke },
        width: 1.5,
        fill,
        fillTo: panel.labels.length - place - 0.95,
        dash: place >= 8 && !panel.isApart ? [5, 3] : undefined,
      });
    });
  }

  /** @param {ChartPage.Plot} plot @returns {uPlot.Axis[]} */
  function axes(plot) {
    const { chart, panel, isLast } = plot;
    const quiet = color("quiet");
    const font = "12px system-ui, sans-serif";
    const isNarrow = plot.host.clientWidth < NARROW_PIXELS;
    const count = panel.labels.length;
    return [
      {
        show: isLast,
        stroke: quiet,
        font,
        size: 26,
        grid: { show: false },
        ticks: { show: false },
        splits: (_, __, from, to) => timeSplits(chart, from, to, plot.host.clientWidth - 100),
        values: (u, splits) => splits.map((moment) => timeText(chart, moment, timeStep(...rangeOf(u), plot.host.clientWidth - 100))),
      },
      {
        stroke: quiet,
        font,
        gap: 6,
        size: isNarrow ? 76 : data.left,
        ticks: { show: false },
        grid: { show: !panel.isApart && panel.kind !== "spans", stroke: color("grid"), width: 1 },
        splits: () => (panel.isApart ? panel.rowTicks.map(([middle]) => count - middle).reverse() : panel.ticks),
        values: () => (panel.isApart ? panel.rowTicks.map(([, wide, narrow]) => (isNarrow ? narrow : wide)).reverse() : panel.tickTexts),
      },
    ];
  }

  /** Draws a plot, again if there is one already. @param {ChartPage.Plot} plot */
  function draw(plot) {
    const { chart, panel, host } = plot;
    /** @type {Array<Array<Array<number | null>>>} */
    const tables = [
      [
        [chart.start, chart.end],
        [null, null],
      ],
    ];
    /** @type {uPlot.Series[]} */
    const series = [{}, { scale: "y", show: false }];
    /** @type {uPlot.Band[]} */
    const bands = [];
    if (panel.kind === "lines") lineSeries(panel, tables, series, bands);
    /** @type {[number, number]} */
    const range = panel.isApart ? [0, Math.max(1, panel.labels.length)] : [panel.low, panel.top];
    plot.u?.destroy();
    plot.box = null;
    plot.u = new uPlot(
      {
        width: host.clientWidth,
        height: panel.height + (plot.isLast ? 26 : 0) + (panel.kind === "spans" ? 0 : 10),
        padding: panel.kind === "spans" ? [0, chart.right, 0, 0] : [6, chart.right, 4, 0],
        legend: { show: false },
        cursor: {
          y: false,
          drag: { x: true, y: false, setScale: true },
          points: { show: panel.kind === "lines" && !panel.isApart, size: 6 },
          sync: {
            key: "page",
            scales: ["x", null],
            filters: { pub: (type) => type !== "mousedown" && type !== "mouseup" && type !== "dblclick" },
          },
          bind: {
            dblclick: () => () => {
              zoom(null);
              return null;
            },
          },
        },
        scales: { x: { time: false, range: (_, low, high) => (low === null ? [chart.start, chart.end] : [low, high]) }, y: { range } },
        axes: axes(plot),
        series,
        bands,
        hooks: {
          drawClear: [() => panel.kind !== "spans" && paint(paintAreas, plot)],
          drawAxes: [() => panel.kind === "map" && paint(paintMap, plot)],
          draw: [
            () => {
              if (panel.kind === "spans") paint(paintSpans, plot);
              if (panel.kind === "boxes") paint(paintBoxes, plot);
              if (panel.notes.length) paint(paintNotes, plot);
              paint(paintMarks, plot);
            },
          ],
          setCursor: [() => plot.box && showReadout(plot, plot.box)],
          setScale: [(u, key) => key === "x" && plot.box && follow(plot, rangeOf(u))],
        },
      },
      uPlot.join(
        /** @type {uPlot.AlignedData[]} */ (tables),
        tables.map((table) => table.map(() => NULL_EXPAND)),
      ),
      host,
    );
    const [min, max] = shown ?? [chart.start, chart.end];
    plot.u.setScale("x", { min, max });
    plot.box = document.createElement("div");
    plot.box.className = "readout";
    plot.u.over.append(plot.box);
  }

  /** Zooms all plots to what one of them was dragged to. @param {ChartPage.Plot} plot @param {number[]} range */
  function follow(plot, range) {
    const expected = shown ?? [plot.chart.start, plot.chart.end];
    if (range.some((moment, place) => moment !== expected[place])) zoom(range);
  }

  /** Shows a time range in all plots; the whole time for null. @param {number[] | null} range */
  function zoom(range) {
    shown = range;
    for (const { u, chart } of plots) {
      const [min, max] = range ?? [chart.start, chart.end];
      u.setScale("x", { min, max });
    }
    document.documentElement.dataset.zoom = range ? range.map((moment) => moment.toFixed(3)).join(" ") : "";
  }

  /** The time range that a plot shows. @param {uPlot} u @returns {[number, number]} */
  function rangeOf(u) {
    return [u.scales.x.min ?? 0, u.scales.x.max ?? 1];
  }

  const secondsPerPixel = (/** @type {uPlot} */ u) => (rangeOf(u)[1] - rangeOf(u)[0]) / Math.max(1, u.over.clientWidth);

  /** The usual distance of two moments. @param {number[]} times */
  function spacing(times) {
    const distances = times
      .slice(1)
      .map((time, place) => time - times[place])
      .sort((one, other) => one - other);
    return distances.length ? distances[distances.length >> 1] : 0;
  }

  /** Draws the panel of a figure. @param {HTMLElement} figure */
  function start(figure) {
    const { chart: number = "0", panel: place = "0", last } = figure.dataset;
    const chart = data.charts[Number(number)];
    /** @type {ChartPage.Panel} */
    const panel = { ...NO_PANEL, ...(place === "spans" ? { kind: place, height: chart.spansHeight } : chart.panels[Number(place)]) };
    for (const row of panel.rows) row.times = (row.times ?? []).map((time) => chart.start + time);
    const levels = levelsOf(panel.cells);
    /** @type {ChartPage.Plot} */
    const plot = {
      chart,
      panel,
      host: /** @type {HTMLElement} */ (figure.querySelector(".plot")),
      isLast: last === "true",
      u: /** @type {uPlot} */ (/** @type {unknown} */ (null)),
      box: null,
      spacings: panel.rows.map((row) => spacing(row.times)),
      levels,
      image: panel.columns ? heatImage(panel, levels) : null,
    };
    figure.classList.add("live");
    draw(plot);
    plots.push(plot);
  }

  for (const figure of document.querySelectorAll("figure[data-panel]")) start(/** @type {HTMLElement} */ (figure));
  document.documentElement.dataset.zoom = "";

  const redraw = () => plots.forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const plot of plots) plot.image &&= heatImage(plot.panel, plot.levels);
    redraw();
  });
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    redraw();
  });
})();
