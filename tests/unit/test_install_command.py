"""The command that installs an optional dependency: from where this gpulse came, into the Python that runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpulse.errors import MissingExtraError, install_command, pip_requirement

Origin = dict[str, Any]


def test_a_published_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a note of its origin a package came from an index."""
    _installed_from(None, monkeypatch, tmp_path)

    assert ["'gpulse[head]'", "gpulse"] == [pip_requirement("head"), pip_requirement()]


@pytest.mark.parametrize(
    ("name", "info", "expected"),
    [
        ("checkout", {}, "'{place}[head]'"),
        ("checkout", {"editable": True}, "-e '{place}[head]'"),
        ("my check out", {}, "'{place}[head]'"),
    ],
)
def test_a_checkout_is_named_by_its_directory(
    name: str, info: Origin, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package may not be published, and a checkout differs from what is."""
    place = tmp_path / name
    place.mkdir()
    _installed_from({"url": place.as_uri(), "dir_info": info}, monkeypatch, tmp_path)

    assert expected.format(place=place) == pip_requirement("head")


def test_a_checkout_that_is_gone_is_not_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing can be installed from it."""
    _installed_from({"url": (tmp_path / "gone").as_uri(), "dir_info": {}}, monkeypatch, tmp_path)

    assert "'gpulse[head]'" == pip_requirement("head")


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (
            {"url": "https://git.example/g.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "'gpulse[plot] @ git+https://git.example/g.git@abc'",
        ),
        (
            {"url": "https://example.org/g.whl", "archive_info": {}},
            "'gpulse[plot] @ https://example.org/g.whl'",
        ),
        ({"url": 5}, "'gpulse[plot]'"),
        ([], "'gpulse[plot]'"),
        ({"url": "x", "vcs_info": {}, "dir_info": None}, "'gpulse[plot]'"),
        ({"vcs_info": {"vcs": "git"}}, "'gpulse[plot]'"),
    ],
)
def test_other_origins(origin: Any, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A repository or an archive is named as pip reads it; a note that makes no sense says nothing."""
    _installed_from(origin, monkeypatch, tmp_path)

    assert expected == pip_requirement("plot")


def test_the_pip_of_this_python_is_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`pip` alone stands for another environment when that comes first in PATH."""
    _installed_from(None, monkeypatch, tmp_path)
    monkeypatch.setattr(shutil, "which", lambda _: str(Path(sys.executable).with_name("pip")))
    active = install_command("head")
    monkeypatch.setattr(shutil, "which", lambda _: "/elsewhere/bin/pip")

    assert "pip install 'gpulse[head]'" == active
    assert f"{sys.executable} -m pip install 'gpulse[head]'" == install_command("head")
    assert install_command("head") == MissingExtraError("a head", "head").hint
    assert f"{sys.executable} -m pip install --upgrade gpulse" == install_command(upgrade=True)


def test_an_environment_without_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such environments are uv's."""
    _installed_from(None, monkeypatch, tmp_path)
    monkeypatch.setitem(sys.modules, "pip", None)

    assert f"uv pip install --python {sys.executable} 'gpulse[head]'" == install_command("head")


def test_it_costs_a_start_nothing() -> None:
    """Every command loads the errors, and few need what this needs."""
    code = "import sys; before = set(sys.modules); import gpulse.errors; print(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert not {"json", "importlib.metadata", "urllib.parse", "shutil"} & set(loaded.split())


def _installed_from(origin: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let gpulse be installed with this note of its origin."""
    info = tmp_path / "site" / "gpulse-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gpulse\nVersion: 9\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(info.parent)
