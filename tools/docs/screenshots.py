"""Take screenshots of the dashboard from a running demo: `python -m tools.docs.screenshots [DIRECTORY]`, or `make screenshots`.

Without a DIRECTORY, those that the documentation shows are replaced. With one, every page is written there, in all themes and
as on a phone.
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

DOCS = Path(__file__).parents[2] / "docs"
LOOKS = {
    "light": ("light", 1440, 900, 1),
    "dark": ("dark", 1440, 900, 1),
    "yellow": ("yellow", 1440, 900, 1),
    "blue": ("blue", 1440, 900, 1),
    "phone-light": ("light", 390, 844, 2),
    "phone-dark": ("dark", 390, 844, 2),
    "phone-yellow": ("yellow", 390, 844, 2),
}
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
_PATIENCE_SECONDS = 120.0
_SETTLE_MS = 2500
_MIN_FINDINGS = 10


@contextmanager
def demo() -> Iterator[str]:
    """Start a demo, wait until its agents report findings, and yield the address of its dashboard."""
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
    """Return a document of the head's HTTP API."""
    with urllib.request.urlopen(f"{address}{path}") as answer:  # noqa: S310  our own head
        return json.load(answer)


def wait_for_findings(address: str) -> None:
    """Wait until the agents have reported their findings and the lost node is shown as lost."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        found = [finding["id"] for finding in ask(address, "api/v1/findings")["findings"]]
        if "node_lost" in found and len(found) > _MIN_FINDINGS:
            return
        time.sleep(1.0)
    raise SystemExit("the demo reported no findings in time")


def pages(address: str) -> dict[str, str]:
    """Return the address of every page by the name of its picture."""
    sessions = ask(address, "api/v1/sessions")["sessions"]
    finished = next(session for session in sessions if session["state"] == "finished")
    return {
        "overview": "#/",
        "strips": "#/?density=strips",
        "gpu": "#/gpu/gpu-01/1?from=-15m",
        "node": "#/node/gpu-04?from=-1h",
        "job": "#/job/slurm%3A4711?from=-6h",
        "jobs": "#/jobs",
        "user": "#/user/ada?from=-6h",
        "findings": "#/findings",
        "sessions": "#/sessions",
        "session": f"#/sessions/{finished['session_id']}",
        "who": "#/who?from=-24h",
    }


def find_shown() -> set[str]:
    """Return the names of the pictures of the dashboard that README and docs show."""
    documents = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    text = "".join(path.read_text(encoding="utf-8") for path in documents)
    return set(re.findall(r"dashboard-[\w-]+\.png", text))


def take(browser: Browser, address: str, directory: Path, only: set[str] | None) -> None:
    """Take all screenshots, or only those of these names."""
    for look, (theme, width, height, scale) in LOOKS.items():
        context = browser.new_context(
            viewport={"width": width, "height": height}, device_scale_factor=scale, reduced_motion="reduce"
        )
        context.add_init_script(f"localStorage.setItem('gpulse.theme', JSON.stringify('{theme}'))")
        for name, where in pages(address).items():
            file = f"dashboard-{name}-{look}.png"
            if only is not None and file not in only:
                continue
            page = context.new_page()
            page.goto(address + where)
            page.wait_for_timeout(_SETTLE_MS)
            drawn = Image.open(io.BytesIO(page.screenshot()))
            # With fewer colors, thin lines would change theirs.
            few = drawn.convert("RGB").quantize(
                256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
            )
            few.save(directory / file, optimize=True)
            page.close()
        context.close()


def main() -> None:
    """Start a demo, take its screenshots, and stop it."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "images"
    only = None if len(sys.argv) > 1 else find_shown()
    directory.mkdir(parents=True, exist_ok=True)
    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("cannot take screenshots: Chromium is missing; apt-get install chromium")
    with demo() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_FLAGS)
        take(browser, address, directory, only)
        browser.close()


if __name__ == "__main__":
    main()
