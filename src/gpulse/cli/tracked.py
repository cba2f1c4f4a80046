"""What `gpulse dask` tracks and shows: names of metrics, as shells complete them, and metrics of people's own files."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulse.errors import GpulseError, UsageError

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem

_OWN_UNITS = {"total-mem": "bytes", "mem-util": "percent", "compute-util": "percent"}
_CUSTOM_HINT = "--custom metrics.py:power, where power is a function under @custom_metric(...)"


def split(given: tuple[str, ...]) -> list[str]:
    """The names in lists with commas, of which there can be several."""
    return [name.strip() for text in given for name in text.split(",") if name.strip()]


def unit_of(metric: str) -> str:
    """The unit of what was tracked under a name, `ratio` for shares of 1; of people's own metrics nothing is known."""
    from gpulse.integrations.dask.tracking import ArgumentError, columns  # noqa: PLC0415  --help needs none of it
    from gpulse.model.metric import CATALOGUE  # noqa: PLC0415

    try:
        (column,) = columns([metric])
    except ArgumentError:
        return ""
    if column.scope is None:
        return _OWN_UNITS.get(metric, "")
    found = CATALOGUE[column.scope][column.metric]
    return "ratio" if found.kind == "ratio" else found.unit


def complete_names(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What can be tracked, or was, for a shell that completes the last name of a list."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415

    before, comma, last = incomplete.rpartition(",")
    named = set(before.split(","))
    return [
        CompletionItem(f"{before}{comma}{name}")
        for name in _recorded(ctx) or _known()
        if name.startswith(last) and name not in named
    ]


def _recorded(ctx: click.Context) -> list[str]:
    """The metrics of the export that was named, none when none was."""
    from gpulse.integrations.dask.files import read_table, worker_files  # noqa: PLC0415  --help needs none of it

    # After an option that still lacks its value, arguments are not told apart yet.
    place = ctx.params.get("place") or ctx.params.get("scheduler") or next(iter(ctx.args), None)
    try:
        if place is None or not Path(place).exists():
            return []
        path = next(iter(worker_files(place).values())) if Path(place).is_dir() else Path(place)
        return list(read_table(path).tracked)
    except GpulseError:
        return []


def _known() -> list[str]:
    from gpulse.integrations.dask.tracking import names  # noqa: PLC0415  as above

    return names()


def custom_metrics(given: tuple[str, ...]) -> list[Any]:
    """The objects that `FILE.py:NAME` and `MODULE:NAME` mean.

    Raises:
        UsageError: There is none.
        GpulseError: The code itself fails.
    """
    return [_custom(text) for text in given]


def _custom(text: str) -> Any:
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{text[:100]!r} names no custom metric", hint=_CUSTOM_HINT)
    is_file = place.endswith(".py") or "/" in place
    module = _loaded(place, lambda: _of_file(Path(place)) if is_file else importlib.import_module(place))
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise UsageError(f"there is no {name!r} in {place}", hint=_CUSTOM_HINT) from error


def _loaded(place: str, load: Any) -> Any:
    try:
        return load()
    except GpulseError:
        raise
    except ModuleNotFoundError as error:
        hint = "--custom FILE.py:NAME for code that is not installed" if error.name == place else None
        raise UsageError(f"cannot load {place}: {error}", hint=hint or _CUSTOM_HINT) from error
    except (Exception, SystemExit) as error:
        raise GpulseError(
            f"{place} fails: {type(error).__name__}: {error}", hint=f"python3 {place}, which shows where"
        ) from error


def _of_file(path: Path) -> Any:
    """The module that a file makes; workers, who do not have the file, get its functions as they are.

    That is so because it is not in `sys.modules`: what can be imported is sent by its name alone.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint=_CUSTOM_HINT)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file", hint=_CUSTOM_HINT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
