// A chart by keyboard: arrows move the cursor, + and - zoom, Page Up and Page Down move in time.

const FAR = 10;

/** Makes a plot answer to keys; gives back what ends that. */
export function chartKeys(element, board, chart) {
  const stop = new AbortController();
  element.addEventListener(
    "keydown",
    (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const action = ACTIONS[event.key];
      if (!action || !chart.data) return;
      event.preventDefault();
      action(board, chart, event.shiftKey ? FAR : 1);
    },
    { signal: stop.signal },
  );
  element.addEventListener("blur", () => board.setCursor(null), { signal: stop.signal });
  return () => stop.abort();
}

function move(board, chart, by) {
  const { times, step } = chart.data;
  if (!times.length) return;
  const from = board.cursor ?? Math.min(times.at(-1), board.view.to) + (by < 0 ? step : -step);
  const at = times[chart.indexAt(from + by * step)];
  board.setCursor(Math.min(Math.max(at, board.view.from), board.view.to));
}

function edge(board, chart, which) {
  const { times } = chart.data;
  const inside = times.filter((time) => time >= board.view.from && time <= board.view.to);
  if (inside.length) board.setCursor(which < 0 ? inside[0] : inside.at(-1));
}

const ACTIONS = {
  ArrowLeft: (board, chart, times) => move(board, chart, -times),
  ArrowRight: (board, chart, times) => move(board, chart, times),
  Home: (board, chart) => edge(board, chart, -1),
  End: (board, chart) => edge(board, chart, 1),
  "+": (board) => board.range.zoom(0.5, board.cursor),
  "=": (board) => board.range.zoom(0.5, board.cursor),
  "-": (board) => board.zoomOut(),
  PageUp: (board) => board.range.shift(-0.5),
  PageDown: (board) => board.range.shift(0.5),
  Escape: (board) => board.setCursor(null),
};
