"""The wheel that people install: its commands, its data, its types, its man pages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.integration.commands import environment

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_works_where_it_is_installed(tmp_path: Path) -> None:
    """Built, installed into a fresh environment and run from there, with the demo's recordings inside."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", REPOSITORY, "--no-deps", "--no-build-isolation", "-w", tmp_path], check=True
    )
    (wheel,) = tmp_path.glob("gpulse-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    fresh = tmp_path / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", fresh, "install", "--no-deps", "--no-index", wheel], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])

    def printed(*command: str | Path) -> str:
        return subprocess.run(
            command, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    assert "katherine" in printed(fresh.parent / "gpulse", "--demo")
    assert printed(fresh.parent / "bmon", "-h").startswith("Usage: bmon")
    assert str(site) in printed(fresh, "-c", "import gpulse; print(gpulse.__file__)")
    assert (site / "gpulse" / "py.typed").exists()
    assert (tmp_path / "venv" / "share" / "man" / "man1" / "gpulse-why.1").exists()
