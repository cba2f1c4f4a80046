// Types of the data in a page with charts (`gpulse/charts/html.py` writes it), and of what `page.js` draws from it.
declare namespace ChartPage {
  type Moment = number;
  type Value = number | null;
  /** Start, end, lowest value, first quartile, median, third quartile, highest value, number of values. */
  type Box = [Moment, Moment, number, number, number, number, number, number];

  interface Span {
    start: Moment;
    end: Moment;
    label: string;
    text: string;
    color: string;
    lane: number;
    tint: number;
    number: number;
  }

  interface Gap {
    start: Moment;
    end: Moment;
    reason: string;
    rows: number[];
    color: string;
  }

  interface Row {
    color: string;
    times: Moment[];
    values: Value[];
    low: Value[] | null;
    high: Value[] | null;
    boxes: Box[];
  }

  interface Panel {
    kind: "spans" | "lines" | "boxes" | "map" | "static";
    unit: string;
    low: number;
    high: number;
    /** Upper end of the panel, a little above the axis. */
    top: number;
    ticks: number[];
    tickTexts: string[];
    height: number;
    labels: string[];
    isApart: boolean;
    gaps: Gap[];
    rows: Row[];
    notes: string[];
    start: Moment;
    end: Moment;
    columns: number;
    cells: string;
    edges: number[];
    /** Middles of rows with their labels, and those for narrow screens. */
    rowTicks: Array<[number, string, string]>;
  }

  interface Chart {
    start: Moment;
    end: Moment;
    clock: "local" | "elapsed";
    offsets: [number, number][];
    right: number;
    lanes: number;
    spansTitle: string;
    spansHeight: number;
    spans: Span[];
    marks: Array<{ time: Moment; label: string }>;
    panels: Array<Partial<Panel>>;
  }

  interface Document {
    left: number;
    charts: Chart[];
  }

  interface Reading {
    value: Value;
    range: string;
  }

  /** A color's name, or null, and a text. */
  type Line = [string | null, string];

  interface Plot {
    chart: Chart;
    panel: Panel;
    host: HTMLElement;
    isLast: boolean;
    u: uPlot;
    box: HTMLElement | null;
    /** The usual distance of two values of each row, in seconds. */
    spacings: number[];
    levels: Uint16Array;
    image: HTMLCanvasElement | null;
  }
}
