"""An environment in which only the packages of a plain `pip install gpulse` can be imported."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def base_install(directory: Path) -> dict[str, str]:
    """Return environment variables that hide every installed package which a base install does not bring.

    Args:
        directory: An empty one, which must exist for as long as the variables are used.
    """
    there = _closure(tomllib.loads(_PYPROJECT.read_text())["project"]["dependencies"])
    hidden = sorted(
        module
        for module, owners in metadata.packages_distributions().items()
        if module.isidentifier() and not {_key(owner) for owner in owners} & {*there, "gpulse", "pip"}
    )
    lines = f"import sys\nsys.modules.update(dict.fromkeys({hidden!r}))\n"
    (directory / "sitecustomize.py").write_text(lines)
    return {"PYTHONPATH": str(directory)}


def _closure(requirements: list[str]) -> set[str]:
    """The packages that these need, all the way down; what extras would add is left out."""
    found: set[str] = set()
    waiting = list(requirements)
    while waiting:
        text, _, marker = waiting.pop().partition(";")
        name = _key(re.match(r"[\w.-]+", text.strip())[0])  # type: ignore[index]
        if name in found or "extra" in marker:
            continue
        try:
            waiting += metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # needed by another Python than this one
            continue
        found.add(name)
    return found


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
