// Pointer, wheel, fingers and keys on anything that has a time axis: cursor, zoom, pan.

const DRAG_PIXELS = 6;
const SETTLE_MS = 180;

/** @param {Event} event */
function isControl(event) {
  return event.target instanceof Element && event.target.closest("a, button") !== null;
}

/**
 * Makes an element answer to gestures; gives back what ends that. `board` takes what was meant:
 * setCursor(time), zoom(from, to), zoomOut(around), preview(from, to), settle().
 * @param {HTMLElement} element
 * @param {Dashboard.Board} board
 */
export function gestures(element, board) {
  const stop = new AbortController();
  /**
   * @template {keyof HTMLElementEventMap} K
   * @param {K} type
   * @param {(event: HTMLElementEventMap[K]) => void} handler
   * @param {AddEventListenerOptions} [options]
   */
  const listen = (type, handler, options = {}) => element.addEventListener(type, handler, { signal: stop.signal, ...options });
  const selection = document.createElement("div");
  selection.className = "time-selection";
  selection.hidden = true;
  element.append(selection);
  /** @type {Map<number, number>} */
  const fingers = new Map();
  /** @type {{ x: number, isPan: boolean, isMoving: boolean, view: Dashboard.View } | null} */
  let drag = null;
  /** @type {{ view: Dashboard.View, at: number[] } | null} */
  let pinched = null;
  let settling = 0;

  /** @param {MouseEvent} event */
  const place = (event) => event.clientX - element.getBoundingClientRect().left;
  /** @param {number} x */
  const timeAt = (x) => board.view.from + (x / element.clientWidth) * (board.view.to - board.view.from);

  listen("pointerdown", (event) => {
    if (event.pointerType === "touch") return touchDown(event);
    if (event.button !== 0 || isControl(event)) return;
    drag = { x: place(event), isPan: event.shiftKey, isMoving: false, view: { ...board.view } };
    element.setPointerCapture(event.pointerId);
  });

  listen("pointermove", (event) => {
    if (event.pointerType === "touch") return touchMove(event);
    const x = place(event);
    if (!drag) return board.setCursor(timeAt(x));
    drag.isMoving ||= Math.abs(x - drag.x) > DRAG_PIXELS;
    if (!drag.isMoving) return;
    if (drag.isPan) {
      panTo(drag.view, drag.x - x);
    } else {
      board.setCursor(timeAt(x));
      showSelection(drag.x, x);
    }
  });

  listen("pointerup", (event) => {
    if (event.pointerType === "touch") return touchUp(event);
    const done = drag;
    drag = null;
    selection.hidden = true;
    if (!done?.isMoving) return;
    if (done.isPan) return board.settle();
    const [from, to] = [done.x, place(event)].sort((a, b) => a - b).map((x) => timeAt(clamp(x)));
    board.setCursor(null); // the pointer is at another time afterwards; until it moves, the last values are shown
    board.zoom(from, to);
  });

  listen("pointercancel", (event) => {
    fingers.delete(event.pointerId);
    drag = null;
    pinched = null;
    selection.hidden = true;
  });
  listen("pointerleave", (event) => {
    if (event.pointerType !== "touch" && !drag) board.setCursor(null);
  });
  listen("dblclick", (event) => {
    if (!isControl(event)) board.zoomOut();
  });
  listen(
    "wheel",
    (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
      if (!sideways && !event.ctrlKey && !event.altKey) return;
      event.preventDefault();
      if (sideways) panTo(board.view, sideways);
      else zoomAt(timeAt(place(event)), Math.exp(clampTo(event.deltaY, 200) / 400));
      clearTimeout(settling);
      settling = setTimeout(() => board.settle(), SETTLE_MS);
    },
    { passive: false },
  );

  /** @param {number} x */
  const clamp = (x) => Math.min(Math.max(x, 0), element.clientWidth);
  /**
   * @param {number} number
   * @param {number} most
   */
  const clampTo = (number, most) => Math.min(Math.max(number, -most), most);

  /**
   * @param {number} from
   * @param {number} to
   */
  function showSelection(from, to) {
    const [left, right] = [from, to].sort((a, b) => a - b).map(clamp);
    selection.hidden = false;
    selection.style.left = `${left}px`;
    selection.style.width = `${right - left}px`;
  }

  /**
   * @param {Dashboard.View} view
   * @param {number} pixels
   */
  function panTo(view, pixels) {
    const by = (pixels / element.clientWidth) * (view.to - view.from);
    board.preview(view.from + by, view.to + by);
  }

  /**
   * @param {number} time
   * @param {number} factor
   */
  function zoomAt(time, factor) {
    board.preview(time - (time - board.view.from) * factor, time + (board.view.to - time) * factor);
  }

  /** @param {PointerEvent} event */
  function touchDown(event) {
    fingers.set(event.pointerId, place(event));
    if (fingers.size === 2) pinched = { view: { ...board.view }, at: [...fingers.values()] };
    else board.setCursor(timeAt(place(event)));
  }

  /** @param {PointerEvent} event */
  function touchMove(event) {
    if (!fingers.has(event.pointerId)) return;
    fingers.set(event.pointerId, place(event));
    if (fingers.size === 1) return board.setCursor(timeAt(place(event)));
    if (fingers.size === 2) pinch([...fingers.values()]);
  }

  /** @param {number[]} values */
  function pinch([a, b]) {
    if (!pinched) return;
    const { view, at } = pinched;
    const before = at.map((x) => view.from + (x / element.clientWidth) * (view.to - view.from));
    const width = Math.abs(a - b) > 20 && Math.abs(at[0] - at[1]) > 20 ? (before[1] - before[0]) / (b - a) : null;
    const perPixel = width ?? (view.to - view.from) / element.clientWidth;
    const from = (before[0] + before[1]) / 2 - ((a + b) / 2) * perPixel;
    board.preview(from, from + perPixel * element.clientWidth);
  }

  /** @param {PointerEvent} event */
  function touchUp(event) {
    fingers.delete(event.pointerId);
    if (pinched && fingers.size < 2) {
      pinched = null;
      board.settle();
    }
  }

  return () => {
    clearTimeout(settling);
    stop.abort();
    selection.remove();
  };
}

const FAR = 10;

/**
 * Makes a plot answer to keys; gives back what ends that.
 * @param {HTMLElement} element
 * @param {Dashboard.Board} board
 * @param {Dashboard.Chart} chart
 */
export function chartKeys(element, board, chart) {
  const stop = new AbortController();
  element.addEventListener(
    "keydown",
    (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const hasRows = chart.isMap || chart.kind === "many";
      const action = ACTIONS[event.key] ?? (hasRows ? ROW_ACTIONS[event.key] : undefined);
      if (!action || !chart.hasData) return;
      event.preventDefault();
      action(board, chart, event.shiftKey ? FAR : 1);
    },
    { signal: stop.signal },
  );
  element.addEventListener("blur", () => board.setCursor(null), { signal: stop.signal });
  return () => stop.abort();
}

/**
 * @param {Dashboard.Board} board
 * @param {Dashboard.Chart} chart
 * @param {number} by
 */
function move(board, chart, by) {
  const { times, step } = chart.data;
  if (!times.length) return;
  const from = board.cursor ?? Math.min(times[times.length - 1], board.view.to) + (by < 0 ? step : -step);
  const at = times[chart.indexAt(from + by * step)];
  board.setCursor(Math.min(Math.max(at, board.view.from), board.view.to));
}

/**
 * @param {Dashboard.Board} board
 * @param {Dashboard.Chart} chart
 * @param {number} which
 */
function edge(board, chart, which) {
  const { times } = chart.data;
  const inside = times.filter((time) => time >= board.view.from && time <= board.view.to);
  if (inside.length) board.setCursor(which < 0 ? inside[0] : inside[inside.length - 1]);
}

/**
 * @param {Dashboard.Board} board
 * @param {Dashboard.Chart} chart
 * @param {number} by
 */
function moveRow(board, chart, by) {
  const titles = chart.data.lines.map((line) => line.title);
  const from = titles.indexOf(board.row ?? "");
  const row = from < 0 ? (by < 0 ? titles.length - 1 : 0) : Math.min(Math.max(from + by, 0), titles.length - 1);
  if (board.cursor === null) edge(board, chart, 1);
  else board.setCursor(board.cursor);
  board.row = titles[row];
}

/** @typedef {(board: Dashboard.Board, chart: Dashboard.Chart, times: number) => void} Action */
/** @type {Record<string, Action>} */
const ROW_ACTIONS = {
  ArrowUp: (board, chart, times) => moveRow(board, chart, -times),
  ArrowDown: (board, chart, times) => moveRow(board, chart, times),
};
/** @type {Record<string, Action>} */
const ACTIONS = {
  ArrowLeft: (board, chart, times) => move(board, chart, -times),
  ArrowRight: (board, chart, times) => move(board, chart, times),
  Home: (board, chart) => edge(board, chart, -1),
  End: (board, chart) => edge(board, chart, 1),
  "+": (board) => board.zoomIn(),
  "=": (board) => board.zoomIn(),
  "-": (board) => board.zoomOut(),
  0: (board) => board.range.reset(),
  PageUp: (board) => board.range.shift(-0.5),
  PageDown: (board) => board.range.shift(0.5),
  Escape: (board) => board.setCursor(null),
};
