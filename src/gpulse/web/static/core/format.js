// Format numbers and times for people. Unknown values are a dash, never 0.

export const UNKNOWN = "–";

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const DECIMAL = ["", "k", "M", "G", "T", "P"];
const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;

const TIME = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const DATE_TIME = new Intl.DateTimeFormat("en-CA", {
  year: "numeric",
  month: "2-digit",
  day: "2-digit",
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});

const DAY_TIME = new Intl.DateTimeFormat("en-GB", {
  day: "numeric",
  month: "short",
  hour: "2-digit",
  minute: "2-digit",
  hourCycle: "h23",
});

/** @type {Record<string, string>} */
const TITLES = {
  gpu_utilization_ratio: "GPU utilization",
  memory_utilization_ratio: "Memory utilization",
  memory_used_bytes: "Memory used",
  memory_total_bytes: "Memory",
  power_watts: "Power",
  power_limit_watts: "Power limit",
  temperature_celsius: "Temperature",
  memory_temperature_celsius: "Memory temperature",
  sm_active_ratio: "SM active",
  sm_occupancy_ratio: "SM occupancy",
  sm_clock_hertz: "SM clock",
  memory_clock_hertz: "Memory clock",
  tensor_active_ratio: "Tensor active",
  dram_active_ratio: "DRAM active",
  fp64_active_ratio: "FP64 active",
  fp32_active_ratio: "FP32 active",
  fp16_active_ratio: "FP16 active",
  pcie_rx_bytes_per_second: "PCIe received",
  pcie_tx_bytes_per_second: "PCIe sent",
  nvlink_rx_bytes_per_second: "NVLink received",
  nvlink_tx_bytes_per_second: "NVLink sent",
  cpu_utilization_ratio: "CPU",
  cpu_iowait_ratio: "CPU I/O wait",
  memory_available_bytes: "Memory available",
  read_bytes_per_second: "Read",
  written_bytes_per_second: "Written",
  rx_bytes_per_second: "Received",
  tx_bytes_per_second: "Sent",
  busy_ratio: "Busy",
  load1: "Load",
  cpus: "CPUs",
  sm_ratio: "SM share",
  gpu_memory_bytes: "GPU memory",
  host_memory_bytes: "Host memory",
};

/** @type {Record<string, string>} */
const WORDS = {
  gpu: "GPU",
  sm: "SM",
  cpu: "CPU",
  pcie: "PCIe",
  nvlink: "NVLink",
  ecc: "ECC",
  nfs: "NFS",
  rx: "received",
  tx: "sent",
  oom: "OOM",
  xid: "Xid",
  fp64: "FP64",
  fp32: "FP32",
  fp16: "FP16",
  mig: "MIG",
  io: "I/O",
  dram: "DRAM",
};

/**
 * `12.3 GiB`.
 * @param {Dashboard.MaybeNumber} n
 */
export function bytes(n) {
  return known(n) ? scaled(n, 1024, BINARY, " ") : UNKNOWN;
}

/**
 * `12.3 / 80 GiB`: a part of a whole in the unit of the whole.
 * @param {Dashboard.MaybeNumber} used
 * @param {Dashboard.MaybeNumber} total
 */
export function bytesOf(used, total) {
  if (!known(total)) {
    return bytes(used);
  }
  let power = 0;
  while (total / 1024 ** power >= 9999.5 && power < BINARY.length - 1) {
    power += 1;
  }
  const unit = 1024 ** power;
  return `${known(used) ? digits(used / unit) : UNKNOWN} / ${digits(total / unit)} ${BINARY[power]}`;
}

/**
 * Bytes a second, `1.2 GB/s`.
 * @param {Dashboard.MaybeNumber} n
 */
export function rate(n) {
  return known(n) ? `${scaled(n, 1000, DECIMAL, " ", true)}B/s` : UNKNOWN;
}

/**
 * Bits a second, `100 Gb/s`.
 * @param {Dashboard.MaybeNumber} n
 */
export function bits(n) {
  return known(n) ? `${scaled(n, 1000, DECIMAL, " ", true)}b/s` : UNKNOWN;
}

/**
 * A ratio, `87%`.
 * @param {Dashboard.MaybeNumber} ratio
 */
export function percent(ratio, places = 0) {
  return known(ratio) ? `${(ratio * 100).toFixed(places)}%` : UNKNOWN;
}

/**
 * `412 W`.
 * @param {Dashboard.MaybeNumber} n
 */
export function watts(n) {
  return known(n) ? `${Math.round(n)} W` : UNKNOWN;
}

/**
 * `61 °C`.
 * @param {Dashboard.MaybeNumber} n
 */
export function celsius(n) {
  return known(n) ? `${Math.round(n)} °C` : UNKNOWN;
}

/**
 * `1.98 GHz`.
 * @param {Dashboard.MaybeNumber} n
 */
export function hertz(n) {
  if (!known(n)) {
    return UNKNOWN;
  }
  return n >= 1e9 ? `${(n / 1e9).toFixed(2)} GHz` : `${Math.round(n / 1e6)} MHz`;
}

/**
 * `34`, `1.2k`.
 * @param {Dashboard.MaybeNumber} n
 */
export function count(n) {
  if (!known(n)) {
    return UNKNOWN;
  }
  return Math.abs(n) < 10_000 ? plain(n) : scaled(n, 1000, DECIMAL, "");
}

/**
 * `3 d 4 h`, `12 min`, `8 s`.
 * @param {Dashboard.MaybeNumber} seconds
 */
export function duration(seconds) {
  if (!known(seconds)) {
    return UNKNOWN;
  }
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < MINUTE) {
    return `${whole} s`;
  }
  if (whole < HOUR) {
    return `${Math.floor(whole / MINUTE)} min`;
  }
  if (whole < DAY) {
    return pair(Math.floor(whole / HOUR), "h", Math.floor((whole % HOUR) / MINUTE), "min");
  }
  return pair(Math.floor(whole / DAY), "d", Math.floor((whole % DAY) / HOUR), "h");
}

/**
 * `12 min ago`.
 * @param {Dashboard.MaybeNumber} seconds
 */
export function ago(seconds) {
  return known(seconds) ? `${duration(seconds)} ago` : UNKNOWN;
}

/**
 * The time of day here, `14:03:22`.
 * @param {Dashboard.MaybeNumber} epoch
 */
export function clock(epoch) {
  return known(epoch) ? TIME.format(epoch * 1000) : UNKNOWN;
}

/**
 * Day and time here, `2026-03-01 14:03:22`.
 * @param {Dashboard.MaybeNumber} epoch
 */
export function dateTime(epoch) {
  return known(epoch) ? DATE_TIME.format(epoch * 1000).replace(",", "") : UNKNOWN;
}

/**
 * Day, month and time here, `12 Nov 03:12`.
 * @param {Dashboard.MaybeNumber} epoch
 */
export function dayTime(epoch) {
  return known(epoch) ? DAY_TIME.format(epoch * 1000).replace(",", "") : UNKNOWN;
}

/**
 * `12.4 h`.
 * @param {Dashboard.MaybeNumber} seconds
 */
export function hours(seconds) {
  if (!known(seconds)) {
    return UNKNOWN;
  }
  const n = seconds / HOUR;
  return `${n !== 0 && Math.abs(n) < 0.1 ? n.toFixed(2) : n.toFixed(1)} h`;
}

/**
 * `3.2 kWh`, `12 kJ`.
 * @param {Dashboard.MaybeNumber} n
 */
export function joules(n) {
  if (!known(n)) {
    return UNKNOWN;
  }
  if (n >= 3.6e5) {
    return `${digits(n / 3.6e6)} kWh`;
  }
  return `${scaled(n, 1000, DECIMAL, " ", true)}J`;
}

/**
 * A number by the catalogue's unit.
 * @param {string} unit
 * @param {Dashboard.MaybeNumber} n
 */
export function value(unit, n) {
  if (!known(n)) {
    return UNKNOWN;
  }
  const show = BY_UNIT[unit];
  return show ? show(n) : `${count(n)}${unit && unit !== "1" ? ` ${unit}` : ""}`;
}

/**
 * A metric's value, by what its name says of its unit.
 * @param {string} metric
 * @param {Dashboard.MaybeNumber} n
 */
export function metricValue(metric, n) {
  return value(unitOf(metric), n);
}

/**
 * What people call a metric: `SM active`, `Power`.
 * @param {string} metric
 */
export function metricTitle(metric) {
  return TITLES[metric] ?? titleFrom(metric);
}

/**
 * The catalogue's unit, as the end of a metric's name says it.
 * @param {string} metric
 */
export function unitOf(metric) {
  for (const [end, unit] of ENDS) {
    if (metric.endsWith(end)) {
      return unit;
    }
  }
  return "1";
}

/**
 * Sanitize foreign text: replace control characters, direction overrides and invisible characters. A dash for empty text.
 * @param {unknown} words
 */
export function text(words) {
  if (words === null || words === undefined || words === "") {
    return UNKNOWN;
  }
  return String(words).replace(HARMFUL, "\ufffd");
}

/**
 * True for a number that can be shown.
 * @param {unknown} n
 * @returns {n is number}
 */
export function known(n) {
  return typeof n === "number" && Number.isFinite(n);
}

const HARMFUL = /[\p{Cc}\p{Cs}\p{Zl}\p{Zp}\u00ad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]/gu;

/** @type {Record<string, (n: number) => string>} */
const BY_UNIT = {
  ratio: (n) => percent(n, n !== 0 && Math.abs(n) < 0.0995 ? 1 : 0),
  bytes,
  "bytes/second": rate,
  "bits/second": bits,
  watts,
  celsius,
  hertz,
  joules,
  "joules/second": watts,
  seconds: (n) => (n < 10 ? `${n.toFixed(n < 1 ? 3 : 1)} s` : duration(n)),
  percent: (n) => `${Math.round(n)}%`,
  bool: (n) => (n ? "yes" : "no"),
  bitmask: (n) => `0x${n.toString(16)}`,
  "1/second": (n) => `${count(n)}/s`,
  "seconds/second": (n) => percent(n),
  1: count,
};

const ENDS = [
  ["_ratio", "ratio"],
  ["bytes_per_second", "bytes/second"],
  ["bits_per_second", "bits/second"],
  ["_per_second", "1/second"],
  ["bytes_total", "bytes"],
  ["joules_total", "joules"],
  ["seconds_total", "seconds"],
  ["_bytes", "bytes"],
  ["_watts", "watts"],
  ["_celsius", "celsius"],
  ["_hertz", "hertz"],
  ["_joules", "joules"],
  ["_seconds", "seconds"],
  ["_percent", "percent"],
];

/** @param {string} metric */
function titleFrom(metric) {
  const bare = metric
    .replace(/_(ratio|bytes|watts|celsius|hertz|joules|seconds|percent|total|per_second)\b/g, "")
    .replace(/_(bytes|total)?_?per_second$/, "")
    .replace(/_(ratio|bytes|watts|celsius|hertz|joules|seconds|total)$/, "");
  const words = bare
    .split("_")
    .filter(Boolean)
    .map((word) => WORDS[word] ?? word);
  const text = words.join(" ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/**
 * @param {number} n
 * @param {number} step
 * @param {string[]} units
 * @param {string} gap
 */
function scaled(n, step, units, gap, always = false) {
  let power = 0;
  while (Math.abs(n) >= 999.5 && power < units.length - 1) {
    n /= step;
    power += 1;
  }
  const number = power ? digits(n) : plain(n);
  return units[power] || always ? `${number}${gap}${units[power]}` : number;
}

/** @param {number} n */
function digits(n) {
  return Math.abs(n) >= 99.95 || n === 0 ? n.toFixed(0) : n.toFixed(1);
}

/** @param {number} n */
function plain(n) {
  return Number.isInteger(n) ? String(n) : n.toFixed(Math.abs(n) < 10 ? 2 : Math.abs(n) < 100 ? 1 : 0);
}

/**
 * @param {number} large
 * @param {string} largeUnit
 * @param {number} small
 * @param {string} smallUnit
 */
function pair(large, largeUnit, small, smallUnit) {
  return small ? `${large} ${largeUnit} ${small} ${smallUnit}` : `${large} ${largeUnit}`;
}
