from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import gpulse
from gpulse.errors import RecordingError, UsageError
from gpulse.sources.demo_machine import DemoMachine
from tests.unit.frames import NOON

NAMES = [
    "Diagnosis",
    "Frame",
    "GpulseError",
    "Recording",
    "Sampler",
    "Snapshot",
    "__version__",
    "diagnose",
    "profile",
    "record",
    "snapshot",
]
NOT_FOR_A_LOOK = (
    "grpc",
    "starlette",
    "duckdb",
    "textual",
    "matplotlib",
    "numpy",
    "pandas",
    "rich",
    "asyncio",
)


def printed(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_package_exports_exactly_its_public_names() -> None:
    """A name is added on purpose or not at all."""

    assert NAMES == gpulse.__all__ == dir(gpulse)


def test_every_public_name_can_be_had() -> None:
    """Lazily, but it is there."""

    assert [] == [name for name in NAMES if getattr(gpulse, name, None) is None]


def test_another_name_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="no attribute 'nvml'"):
        _ = gpulse.nvml


def test_importing_does_nothing() -> None:
    """No driver, no thread, no library but our version."""
    code = """
import sys, gpulse
names = ("pynvml", "click", "rich", "ctypes", "threading", "subprocess")
print([name for name in sys.modules if name.startswith("gpulse") or name in names])
"""

    assert "['gpulse._version', 'gpulse']" == printed(code)


def test_having_a_block_loads_no_driver() -> None:
    """The first block does, on a thread of its own; until then a decorator costs an import of a few small files."""
    code = """
import sys, threading, gpulse
step = gpulse.profile(lambda: None)
names = ("pynvml", "gpulse.sources", "gpulse.diagnosis", "gpulse.model.metric_catalog", "asyncio")
print([name for name in names if name in sys.modules], threading.active_count())
"""

    assert "[] 1" == printed(code)


@pytest.mark.parametrize("options", ["-a --demo", "--json --demo", "", "--csv --demo"])
def test_a_look_loads_no_heavy_library(options: str) -> None:
    """A snapshot starts in a tenth of a second because it imports little."""
    code = f"""
import sys
from gpulse.cli import entry
sys.argv = ["gpulse", *{options.split()!r}]
out, sys.stdout = sys.stdout, open("/dev/null", "w")
try:
    entry.main()
except SystemExit as ended:
    print(ended.code, [name for name in {NOT_FOR_A_LOOK!r} if name in sys.modules], file=out)
"""

    assert "0 []" == printed(code)


def test_the_package_is_typed() -> None:
    """Type checkers of our users believe our annotations."""

    assert resources.files("gpulse").joinpath("py.typed").is_file()


def test_a_snapshot_is_one_look_at_this_machine() -> None:
    """Without a driver it still has the host, and says what is missing."""
    look = gpulse.snapshot(rates_seconds=None)

    assert look.frame.host is not None
    assert look.frame.gpus or any(entry.source == "nvml" for entry in look.frame.health)


def test_record_writes_what_recording_reads(tmp_path: Path) -> None:
    """Frames come back as they were."""
    path = tmp_path / "run.jsonl.gz"
    machine = DemoMachine(NOON)
    machine.sample(
        NOON
    )  # loads the recordings that it replays, which takes longer than the run on a busy machine
    count = gpulse.record(path, seconds=0.5, interval_seconds=0.05, source=machine)
    frames = list(gpulse.Recording(path))

    assert count == len(frames) >= 2
    assert ["demo"] * count == [frame.node.name for frame in frames]


def test_an_unknown_kind_of_file_is_a_usage_error(tmp_path: Path) -> None:
    """The error names the kinds there are."""
    with pytest.raises(UsageError) as caught:
        gpulse.record(tmp_path / "run.parquet", seconds=1)

    assert "use .jsonl.gz, .jsonl, .csv or .sqlite" == caught.value.hint


def test_an_existing_recording_is_not_touched(tmp_path: Path) -> None:
    """A second run does not overwrite the first."""
    path = tmp_path / "run.jsonl"
    path.write_text("precious")
    with pytest.raises(RecordingError, match="already exists"):
        gpulse.record(path, seconds=1, source=DemoMachine(NOON))

    assert "precious" == path.read_text()
