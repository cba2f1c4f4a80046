"""Pictures of every page of the dashboard, in its themes and on a phone, from a running demo.

python docs/screenshots.py [DIRECTORY]
"""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

HERE = Path(__file__).parent / "images"
LOOKS = {
    "yellow": ("yellow", 1600, 1000, 1),
    "blue": ("blue", 1600, 1000, 1),
    "phone": ("yellow", 390, 844, 2),
}
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
_PATIENCE_SECONDS = 120.0
_SETTLE_MS = 2500


@contextmanager
def demo() -> Iterator[str]:
    """A demo whose agents have found what is wrong; where its page is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gpulse", "demo", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        address = next(
            found[0] for line in process.stdout or () if (found := re.search(r"http://[\d.]+:\d+/", line))
        )
        wait_for_findings(address)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def ask(address: str, path: str) -> Any:
    """A document of the head."""
    with urllib.request.urlopen(f"{address}{path}") as answer:  # noqa: S310  our own head
        return json.load(answer)


def wait_for_findings(address: str) -> None:
    """Wait until all agents have judged what they see, and the lost node is lost."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        states = {node["state"] for node in ask(address, "clients")["clients"]}
        if "lost" in states and len(ask(address, "api/v1/findings")["findings"]) > 10:
            return
        time.sleep(1.0)
    raise SystemExit("the demo found nothing")


def pages(address: str) -> dict[str, str]:
    """Every page by a name for its picture."""
    sessions = ask(address, "api/v1/sessions")["sessions"]
    finished = next(session for session in sessions if session["state"] == "finished")
    return {
        "overview": "#/",
        "map": "#/map",
        "gpu": "#/gpu/gpu-01/1?from=-15m",
        "node": "#/node/gpu-04?from=-1h",
        "job": "#/job/slurm%3A4711?from=-6h",
        "user": "#/user/ada?from=-6h",
        "findings": "#/findings",
        "sessions": "#/sessions",
        "session": f"#/sessions/{finished['session_id']}",
        "who": "#/who?from=-24h",
    }


def take(browser: Browser, address: str, directory: Path) -> None:
    """All pictures."""
    for look, (theme, width, height, scale) in LOOKS.items():
        context = browser.new_context(
            viewport={"width": width, "height": height}, device_scale_factor=scale, reduced_motion="reduce"
        )
        context.add_init_script(f"localStorage.setItem('gpulse.theme', JSON.stringify('{theme}'))")
        for name, where in pages(address).items():
            page = context.new_page()
            page.goto(address + where)
            page.wait_for_timeout(_SETTLE_MS)
            drawn = Image.open(io.BytesIO(page.screenshot()))
            few = drawn.convert("RGB").quantize(
                128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
            )
            few.save(directory / f"dashboard-{name}-{look}.png", optimize=True)
            page.close()
        context.close()


def main() -> None:
    """Start a demo, look at it, end it."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    directory.mkdir(parents=True, exist_ok=True)
    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("the pictures need Chromium: apt-get install chromium")
    with demo() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_FLAGS)
        take(browser, address, directory)
        browser.close()


if __name__ == "__main__":
    main()
