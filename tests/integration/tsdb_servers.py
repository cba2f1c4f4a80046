"""Real databases for time series as processes, for tests, and a remote write of our own to fill them."""

from __future__ import annotations

import struct
import subprocess
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import cramjam

from gpulse.store.tsdb.config import TsdbConfig
from tests.integration.cluster import free_port, until
from tests.prerequisites import require

Written = tuple[Mapping[str, str], Sequence[tuple[float, float]]]
"""The labels of a series, its name among them, and its samples: epoch seconds and value."""


class TsdbProcess:
    """A program that keeps time series, on a port of its own."""

    tool: str
    """Its name among the prerequisites."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._options = options
        self._popen: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """How it is started."""
        raise NotImplementedError

    @property
    def tsdb(self) -> TsdbConfig:
        """Where it is."""
        return TsdbConfig(f"{self.url}/api/v1/write", self.url)

    def start(self) -> Self:
        """Start it, again perhaps, and wait until it answers."""
        require(self.tool)
        self.directory.mkdir(exist_ok=True, parents=True)
        with (self.directory / "database.log").open("ab") as output:
            self._popen = subprocess.Popen(
                [*self.command(), *self._options], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        until(self._answers, f"{self.command()[0]} answers")
        return self

    def _answers(self) -> bool:
        assert self._popen is not None
        assert self._popen.poll() is None, (self.directory / "database.log").read_text(encoding="utf-8")
        try:
            self.get("/-/ready")
        except OSError:
            return False
        return True

    def get(self, path: str) -> bytes:
        """The content of a page of it."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            content: bytes = answer.read()
        return content

    def kill(self) -> None:
        """End it without warning."""
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
            self._popen = None

    def write(self, series: Iterable[Written]) -> None:
        """Put samples into it, and return when they are found."""
        body = bytes(cramjam.snappy.compress_raw(write_request(series)))
        headers = {
            "Content-Encoding": "snappy",
            "Content-Type": "application/x-protobuf",
            "X-Prometheus-Remote-Write-Version": "0.1.0",
        }
        request = urllib.request.Request(f"{self.url}/api/v1/write", body, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status in (200, 204)
        self.settle()

    def settle(self) -> None:
        """Wait until what it took is found."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


class VictoriaMetrics(TsdbProcess):
    """A single VictoriaMetrics."""

    tool = "VictoriaMetrics"

    def command(self) -> list[str]:
        """How it is started."""
        return [
            "victoria-metrics",
            f"-httpListenAddr=127.0.0.1:{self.port}",
            f"-storageDataPath={self.directory}/data",
            "-retentionPeriod=100y",
            "-dedup.minScrapeInterval=1ms",
            "-memory.allowedBytes=200MB",
            "-loggerLevel=WARN",
        ]

    def settle(self) -> None:
        """What was taken is found after a flush."""
        self.get("/internal/force_flush")


class Prometheus(TsdbProcess):
    """A single Prometheus that takes remote write."""

    tool = "Prometheus"

    def command(self) -> list[str]:
        """How it is started."""
        config = self.directory / "prometheus.yml"
        config.write_text("global: {}\n", encoding="utf-8")
        return [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={self.directory}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--web.enable-remote-write-receiver",
            "--log.level=warn",
        ]


def write_request(series: Iterable[Written]) -> bytes:
    """Remote write's message, made as its definition says."""
    return b"".join(_field(1, _series(labels, samples)) for labels, samples in series)


def _series(labels: Mapping[str, str], samples: Sequence[tuple[float, float]]) -> bytes:
    words = b"".join(
        _field(1, _field(1, name.encode()) + _field(2, value.encode()))
        for name, value in sorted(labels.items())
    )
    return words + b"".join(
        _field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + _varint(int(time * 1e6 + 0.5) // 1000))
        for time, value in samples
    )


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])
