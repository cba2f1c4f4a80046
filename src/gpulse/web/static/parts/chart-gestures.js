// Pointer, wheel and fingers on anything that has a time axis: cursor, zoom, pan.

const DRAG_PIXELS = 6;
const SETTLE_MS = 180;

/**
 * Makes an element answer to gestures; gives back what ends that. `board` takes what was meant:
 * setCursor(time), zoom(from, to), zoomOut(around), preview(from, to), settle().
 */
export function gestures(element, board) {
  const stop = new AbortController();
  const listen = (type, handler, options = {}) =>
    element.addEventListener(type, handler, { signal: stop.signal, ...options });
  const selection = document.createElement("div");
  selection.className = "time-selection";
  selection.hidden = true;
  element.append(selection);
  const fingers = new Map();
  let drag = null;
  let settling = null;

  const place = (event) => event.clientX - element.getBoundingClientRect().left;
  const timeAt = (x) => board.view.from + (x / element.clientWidth) * (board.view.to - board.view.from);

  listen("pointerdown", (event) => {
    if (event.pointerType === "touch") return touchDown(event);
    if (event.button !== 0 || event.target.closest("a, button")) return;
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
    board.zoom(from, to);
  });

  listen("pointercancel", (event) => {
    fingers.delete(event.pointerId);
    drag = null;
    selection.hidden = true;
  });
  listen("pointerleave", (event) => {
    if (event.pointerType !== "touch" && !drag) board.setCursor(null);
  });
  listen("dblclick", (event) => {
    if (!event.target.closest("a, button")) board.zoomOut();
  });
  listen("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
    if (!sideways && !event.ctrlKey && !event.altKey) return;
    event.preventDefault();
    if (sideways) panTo(board.view, sideways);
    else zoomAt(timeAt(place(event)), Math.exp(clampTo(event.deltaY, 200) / 400));
    clearTimeout(settling);
    settling = setTimeout(() => board.settle(), SETTLE_MS);
  }, { passive: false });

  const clamp = (x) => Math.min(Math.max(x, 0), element.clientWidth);
  const clampTo = (number, most) => Math.min(Math.max(number, -most), most);

  function showSelection(from, to) {
    const [left, right] = [from, to].sort((a, b) => a - b).map(clamp);
    selection.hidden = false;
    selection.style.left = `${left}px`;
    selection.style.width = `${right - left}px`;
  }

  function panTo(view, pixels) {
    const by = (pixels / element.clientWidth) * (view.to - view.from);
    board.preview(view.from + by, view.to + by);
  }

  function zoomAt(time, factor) {
    board.preview(time - (time - board.view.from) * factor, time + (board.view.to - time) * factor);
  }

  function touchDown(event) {
    fingers.set(event.pointerId, place(event));
    if (fingers.size === 2) drag = { view: { ...board.view }, at: [...fingers.values()] };
    else board.setCursor(timeAt(place(event)));
  }

  function touchMove(event) {
    if (!fingers.has(event.pointerId)) return;
    fingers.set(event.pointerId, place(event));
    if (fingers.size === 1) return board.setCursor(timeAt(place(event)));
    if (fingers.size === 2 && drag) pinch([...fingers.values()]);
  }

  function pinch([a, b]) {
    const { view, at } = drag;
    const before = at.map((x) => view.from + (x / element.clientWidth) * (view.to - view.from));
    const width = Math.abs(a - b) > 20 && Math.abs(at[0] - at[1]) > 20 ? (before[1] - before[0]) / (b - a) : null;
    const perPixel = width ?? (view.to - view.from) / element.clientWidth;
    const from = (before[0] + before[1]) / 2 - ((a + b) / 2) * perPixel;
    board.preview(from, from + perPixel * element.clientWidth);
  }

  function touchUp(event) {
    fingers.delete(event.pointerId);
    if (drag && fingers.size < 2) {
      drag = null;
      board.settle();
    }
  }

  return () => {
    clearTimeout(settling);
    stop.abort();
    selection.remove();
  };
}
