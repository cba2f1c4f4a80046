"""A real Prometheus that scrapes our programs, for tests."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.cluster import free_port, until
from tests.prerequisites import require

_SCRAPE = """
  - job_name: {name}
    scrape_interval: 500ms
    scrape_timeout: 500ms
    static_configs:
      - targets: ["127.0.0.1:{port}"]
"""


class Prometheus:
    """One that is asked over HTTP."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def get(self, path: str, **fields: str) -> Any:
        """What it answers."""
        url = f"{self._base}{path}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self._base}/-/ready", timeout=60):
                return True
        except OSError:
            return False

    def query(self, text: str) -> list[tuple[dict[str, str], float]]:
        """The samples that a query gives now: labels and value."""
        found = self.get("/api/v1/query", query=text)["data"]
        if found["resultType"] == "scalar":
            return [({}, float(found["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in found["result"]]


@contextmanager
def scraping(directory: Path, targets: Mapping[str, int]) -> Iterator[Prometheus]:
    """A Prometheus that scrapes ports of this machine, by the names of its jobs."""
    require("Prometheus")
    jobs = "".join(_SCRAPE.format(name=name, port=port) for name, port in targets.items())
    config = directory / "prometheus.yml"
    config.write_text(f"scrape_configs:\n{jobs}", encoding="utf-8")
    port = free_port()
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        prometheus = Prometheus(port)
        until(prometheus.is_ready, "Prometheus to be ready")
        yield prometheus
    finally:
        process.kill()
        process.wait()


def checked(page: bytes) -> list[str]:
    """What `promtool check metrics` has to say about a page."""
    ended = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    lines = (ended.stdout + ended.stderr).decode().splitlines()
    assert ended.returncode in {0, 3}, lines[:5]
    assert (ended.returncode == 0) == (not lines), lines[:5]
    return lines
