"""The dashboard: a thousand GPUs in a browser, its first paint, many open pages, a day's chart."""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

from benchmarks import fleet, measure, store
from benchmarks.measure import Report, Spread, Table, Target
from benchmarks.processes import Head, Process, cores, cpu_seconds, workplace

NAME = "web"
_GPUS = 8
_HOUR = 3600
_SETTLE_SECONDS = 5.0
_VIEW = {"width": 1600, "height": 1000}
_DENSITIES = ("strips", "rows", "cards")
_STATIC = measure.ROOT / "src/gpulse/web/static"
_CHROMIUM = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--enable-precise-memory-info",
)
_WORK = ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration")
_DRAWN = """([button, name]) => new Promise((resolve) => {
  const board = document.querySelector("[data-loading]");
  const chart = document.querySelector(`[data-chart="${name}"]`);
  const took = {};
  let begun = 0;
  const shown = (key, then) => requestAnimationFrame(() => setTimeout(() => {
    took[key] ??= performance.now() - begun;
    then();
  }));
  const watch = new MutationObserver((changes) => {
    if (changes.some((change) => change.target === chart)) shown("one", () => {});
    if (board.dataset.loading === "false") { watch.disconnect(); shown("all", () => resolve(took)); }
  });
  watch.observe(board, { attributes: true, attributeFilter: ["data-loading"] });
  watch.observe(chart, { attributes: true, attributeFilter: ["data-step"] });
  begun = performance.now();
  document.querySelector(button).click();
})"""
"""Click, and wait until one chart, and until everything that was asked for, is on the screen."""


class Size(NamedTuple):
    """How much of everything."""

    nodes: int
    page_seconds: float
    loads: int
    watchers: int
    watch_seconds: float
    watch_turns: int
    day_seconds: int
    clicks: int


_FULL = Size(125, 600.0, 7, 50, 15.0, 3, 24 * _HOUR, 9)
_QUICK = Size(25, 20.0, 2, 10, 5.0, 1, 2 * _HOUR, 3)


@contextmanager
def _served(size: Size, seconds: float) -> Iterator[tuple[Head, Process, str]]:
    """A head with a fleet that sends, and where its page is."""
    mine, others = cores()
    with workplace() as folder, Head(folder, "--freq", "1000", core=mine) as head:
        command = [sys.executable, "-m", "benchmarks.fleet", head.address, "--agents", str(size.nodes)]
        command += ["--gpus", str(_GPUS), "--seconds", str(seconds), "--jobs"]
        with Process(command, folder, core=others) as made:
            start = made.lines(1, 120.0)[0]["start"]
            time.sleep(max(0.0, start - time.time()) + _SETTLE_SECONDS)
            yield head, made, _address(head)


def _address(head: Head) -> str:
    return f"http://{json.loads((head.data / 'head.json').read_text())['http']}/"


@contextmanager
def _browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("this benchmark needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_CHROMIUM))
        try:
            yield browser
        finally:
            browser.close()


# --- a thousand GPUs


class _Watched(NamedTuple):
    """What a page did while it was watched."""

    work: list[float]
    """Seconds of script, style and layout, by update."""
    heaps: list[float]
    """Bytes in use after a collection, at the beginning and at the end."""
    nodes: list[float]
    """Elements and texts at those moments."""


def page(report: Report, size: Size) -> None:
    """The overview in each density with a fleet at 1 Hz: work by update, memory over time."""
    table = Table(
        f"The overview of {size.nodes * _GPUS:,} GPUs at 1 Hz, each with a job, {size.page_seconds:.0f} s in headless Chromium, "
        f"{_VIEW['width']}x{_VIEW['height']}:",
        (
            "density",
            "script, style, layout by update",
            "95 %",
            "heap at first",
            "at the end",
            "DOM nodes, first, end",
        ),
    )
    for name in _DENSITIES:
        with _served(size, size.page_seconds + 120.0) as (_, made, address), _browser() as browser:
            shown = browser.new_page(viewport=_VIEW)  # type: ignore[arg-type]
            shown.goto(f"{address}#/?density={name}")
            shown.wait_for_selector("main [data-node] [data-gpu]", state="attached")
            seen = _watch(shown, size.page_seconds)
            made.check()
        work, most = Spread.of(seen.work), sorted(seen.work)[math.floor(0.95 * (len(seen.work) - 1))]
        growth = seen.heaps[-1] / seen.heaps[0]
        report.targets += [
            Target(
                f"{name}: script and layout by update",
                f"{work.median * 1e3:.1f} ms",
                "12 ms",
                work.median < 0.012,
            ),
            Target(
                f"{name}: heap at the end, of that after a minute", f"{growth:.2f} x", "1.1 x", growth < 1.1
            ),
        ]
        table.rows.append(
            (
                name,
                work.text(1e3, 1, " ms"),
                f"{most * 1e3:.1f} ms",
                f"{seen.heaps[0] / 1e6:.1f} MB",
                f"{seen.heaps[-1] / 1e6:.1f} MB",
                f"{seen.nodes[0]:,.0f}, {seen.nodes[-1]:,.0f}",
            )
        )
    report.tables.append(table)


def _watch(shown: Page, seconds: float) -> _Watched:
    debugger = shown.context.new_cdp_session(shown)
    updates: list[float] = []
    debugger.send("Network.enable")
    debugger.on("Network.webSocketFrameReceived", lambda _: updates.append(time.monotonic()))
    debugger.send("Performance.enable", {"timeDomain": "threadTicks"})
    shown.wait_for_timeout(min(60_000.0, seconds * 100))
    work: list[float] = []
    heaps, nodes = [], []
    heap, count = _memory(debugger)
    heaps.append(heap)
    nodes.append(count)
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        updates.clear()
        before = _work(debugger)
        shown.wait_for_timeout(4_000.0)
        spent = _work(debugger) - before
        if updates:
            work.append(spent / len(updates))
    heap, count = _memory(debugger)
    heaps.append(heap)
    nodes.append(count)
    return _Watched(work, heaps, nodes)


def _metrics(debugger: CDPSession) -> dict[str, float]:
    found: list[dict[str, Any]] = debugger.send("Performance.getMetrics")["metrics"]
    return {metric["name"]: metric["value"] for metric in found}


def _work(debugger: CDPSession) -> float:
    known = _metrics(debugger)
    return sum(known[name] for name in _WORK)


def _memory(debugger: CDPSession) -> tuple[float, float]:
    debugger.send("HeapProfiler.collectGarbage")
    known = _metrics(debugger)
    return known["JSHeapUsedSize"], known["Nodes"]


# --- the beginning


def load(report: Report, size: Size) -> None:
    """From the address to the first paint and to all nodes, with nothing cached; and what is loaded for it."""
    paints, cards, moved = [], [], []
    with _served(size, 120.0 + 5.0 * size.loads) as (_, made, address), _browser() as browser:
        for _ in range(size.loads):
            context = browser.new_context(viewport=_VIEW)  # type: ignore[arg-type]
            shown = context.new_page()
            shown.goto(address)
            shown.wait_for_selector(f"main [data-node] >> nth={size.nodes - 1}", state="attached")
            cards.append(float(shown.evaluate("performance.now()")))
            paints.append(
                float(shown.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            )
            moved.append(
                float(
                    shown.evaluate(
                        "[...performance.getEntriesByType('resource'), ...performance.getEntriesByType('navigation')]"
                        ".filter((entry) => !entry.name.includes('/api/')).reduce((sum, entry) => sum + entry.transferSize, 0)"
                    )
                )
            )
            context.close()
        made.check()
    paint, drawn, bytes_moved = Spread.of(paints), Spread.of(cards), Spread.of(moved)
    everything = sum(
        path.stat().st_size for path in _STATIC.rglob("*") if path.suffix in {".js", ".css", ".html", ".svg"}
    )
    report.targets += [
        Target("first paint on loopback", paint.text(1, 0, " ms"), "1 s", paint.median < 1000),
        Target(
            "assets of the front page, as they travel",
            f"{bytes_moved.median / 1e3:.0f} kB",
            "250 kB",
            bytes_moved.median < 250e3,
        ),
    ]
    report.notes.append(
        f"All {size.nodes} nodes with {size.nodes * _GPUS:,} GPUs were there after {drawn.text(1, 0, ' ms')}. All files of all pages "
        f"together have {everything / 1e3:.0f} kB before they are compressed."
    )


# --- many pages


def pages(report: Report, size: Size) -> None:
    """One open page and fifty, in turn: CPU of the head."""
    takes: dict[int, list[float]] = {0: [], 1: [], size.watchers: []}
    length = (size.watch_turns + 1) * 3 * (size.watch_seconds + 10.0) + 60.0
    with _served(size, length) as (head, made, address), workplace() as folder:
        url = address.replace("http://", "ws://") + "api/v1/live"

        def turn(count: int) -> float:
            command = [sys.executable, "-m", "benchmarks.children.watchers", url, str(count)]
            with Process(command, folder, core=cores()[1]) as watching:
                watching.lines(1, 60.0)
                return _share(head, size.watch_seconds)

        for _ in range(size.watch_turns):
            takes[0].append(_share(head, size.watch_seconds))
            takes[1].append(turn(1))
            takes[size.watchers].append(turn(size.watchers))
        made.check()
    more = Spread.of([many - one for one, many in zip(takes[1], takes[size.watchers], strict=True)])
    report.targets.append(
        Target(
            f"{size.watchers} open pages, more than one: CPU of the head",
            more.text(100, 1, " % of a core"),
            "10 %",
            more.median < 0.10,
        )
    )
    table = Table(
        f"CPU of a head with {size.nodes * _GPUS:,} GPUs at 1 Hz, {size.watch_seconds:.0f} s each, in turn:",
        ("open pages", "CPU of a core"),
    )
    table.rows += [(str(count), Spread.of(found).text(100, 1, " %")) for count, found in takes.items()]
    report.tables.append(table)
    report.notes.append(
        "An open page is here the live stream that the front page takes, without a browser behind it."
    )


def _share(head: Head, seconds: float) -> float:
    time.sleep(2.0)
    begun, before = time.monotonic(), cpu_seconds(head.pid)
    time.sleep(seconds)
    return (cpu_seconds(head.pid) - before) / (time.monotonic() - begun)


# --- a chart


def chart(report: Report, size: Size) -> None:
    """From the click on a day to its charts on the screen, for one GPU."""
    takes: list[dict[str, float]] = []
    with workplace() as folder:
        _past(folder / "data", size.day_seconds)
        with Head(folder, "--freq", "1000", core=cores()[0]) as head, _browser() as browser:
            shown = browser.new_page(viewport=_VIEW)  # type: ignore[arg-type]
            for _ in range(size.clicks):
                shown.goto(f"{_address(head)}#/gpu/{fleet.host_name(1)}/0?from=-15m")
                shown.wait_for_selector('[data-loading="false"]')
                shown.wait_for_timeout(300.0)
                takes.append(shown.evaluate(_DRAWN, ['[data-range="86400"]', "utilization"]))
                shown.goto("about:blank")
    one, whole = (Spread.of([take[name] for take in takes]) for name in ("one", "all"))
    report.targets.append(
        Target("24 h of one GPU, from click to drawn", one.text(1, 0, " ms"), "150 ms", one.median < 150)
    )
    report.notes.append(
        "That is the chart of its utilization, the first of nine on the page of a GPU; all of them, its processes, findings and "
        f"events were there after {whole.text(1, 0, ' ms')}. The store held {size.day_seconds / _HOUR:.0f} h of eight GPUs at 1 Hz."
    )


def _past(directory: Path, seconds: int) -> None:
    looped = store.Looped(sorted(fleet.RECORDINGS.glob("*.jsonl.gz")), seed=4)
    made = store.make_node(
        looped,
        1,
        seconds,
        begin=int(time.time()) - seconds,
        uuid=fleet.gpu_uuid,
        host=fleet.host_name(1),
        machine=fleet.machine_name(1),
    )
    store.make_store(directory, {1: made}, seconds)


class _Part(NamedTuple):
    title: str
    work: Callable[[Report, Size], None]


_PARTS = {
    "page": _Part("A thousand GPUs in a browser", page),
    "load": _Part("The first sight of the dashboard", load),
    "pages": _Part("Many open pages", pages),
    "chart": _Part("A day of one GPU", chart),
}


def run(size: Size, only: Sequence[str] = ()) -> Iterator[Report]:
    """Run some parts, or all."""
    for name in only or _PARTS:
        begun = time.monotonic()
        report = Report(f"{NAME}_{name}", _PARTS[name].title, module=NAME)
        _PARTS[name].work(report, size)
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        yield report


def main() -> None:
    """`python -m benchmarks.web --only page,chart`."""
    parser = measure.parser(NAME, __doc__)
    measure.add_only(parser, _PARTS)
    for name, value in _FULL._asdict().items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(
            option, type=type(value), help=f"default: {value}, {getattr(_QUICK, name)} with --quick"
        )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = {name: value for name in Size._fields if (value := getattr(given, name)) is not None}
    size = _QUICK if given.quick else _FULL
    for report in run(size._replace(**chosen), given.only):
        measure.publish(report, write=given.write)


if __name__ == "__main__":
    main()
