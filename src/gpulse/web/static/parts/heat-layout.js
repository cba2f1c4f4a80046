// Where every GPU of a map lies: nodes side by side as large as they fit. Nothing here touches the document.

const LARGEST = 112;
const LARGEST_SHARE = 0.16;
const SMALLEST = 5;
const MOST_COLUMNS = 8;
const LABEL_HEIGHT = 14;
const LABEL_FROM = 10;
const LABEL_WIDTH = 68;

/**
 * Places for groups of so many cells each, with their names where cells stay large enough beside them, letters so much larger than usual:
 * `{size, height, hasLabels, groups: [{x, y, width}], cells: [{x, y, group}]}`.
 */
export function layout(counts, width, height, letters = 1) {
  const bare = largest(counts, width, height, 0);
  const named = largest(counts, width, height, letters);
  return named.height <= height && named.size >= Math.max(LABEL_FROM, bare.size / 2) ? named : bare;
}

function largest(counts, width, height, letters) {
  let low = SMALLEST;
  let high = Math.max(LARGEST, Math.floor(height * LARGEST_SHARE));
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (place(counts, width, middle, letters).height <= height) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return place(counts, width, low, letters);
}

/** The place of every cell when a cell is so large, and names have letters so large; 0 for none. */
export function place(counts, width, size, letters) {
  const gap = size >= 24 ? 12 : size >= 10 ? 8 : 4;
  const top = Math.round(LABEL_HEIGHT * letters);
  const most = Math.max(1, Math.min(MOST_COLUMNS, Math.floor((width - gap) / size)));
  const groups = [];
  const cells = [];
  let x = gap;
  let y = gap;
  let lineHeight = 0;
  counts.forEach((count, group) => {
    const columns = Math.max(1, Math.min(count, most));
    const groupWidth = Math.max(columns * size, Math.round(LABEL_WIDTH * letters));
    const groupHeight = top + Math.ceil(Math.max(1, count) / columns) * size;
    if (x > gap && x + groupWidth + gap > width) {
      x = gap;
      y += lineHeight + gap;
      lineHeight = 0;
    }
    groups.push({ x, y, width: groupWidth });
    for (let at = 0; at < count; at += 1) {
      cells.push({ x: x + (at % columns) * size, y: y + top + Math.floor(at / columns) * size, group });
    }
    x += groupWidth + gap;
    lineHeight = Math.max(lineHeight, groupHeight);
  });
  return { size, height: y + lineHeight + gap, hasLabels: letters > 0, groups, cells };
}

/** The cell at a point, or -1. */
export function cellAt({ cells, size }, x, y) {
  return cells.findIndex((cell) => x >= cell.x && x < cell.x + size && y >= cell.y && y < cell.y + size);
}

/** The cell that an arrow key leads to from another. */
export function neighbour({ cells, size }, from, key) {
  if (key === "ArrowLeft" || key === "ArrowRight") {
    return Math.min(cells.length - 1, Math.max(0, from + (key === "ArrowLeft" ? -1 : 1)));
  }
  const here = cells[from];
  const sign = key === "ArrowUp" ? -1 : 1;
  let best = from;
  let least = Infinity;
  cells.forEach((cell, at) => {
    const down = (cell.y - here.y) * sign;
    if (down >= size / 2) {
      const distance = down * 1000 + Math.abs(cell.x - here.x);
      if (distance < least) {
        least = distance;
        best = at;
      }
    }
  });
  return best;
}
