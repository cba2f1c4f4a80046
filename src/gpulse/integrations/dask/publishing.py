"""Files of an export under their names: all of them or none, and none of an earlier export beside them."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gpulse.errors import RecordingError
from gpulse.integrations.dask.tracking import ArgumentError

Writer = Callable[[BinaryIO], None]


class Kind(NamedTuple):
    """How files of an export are known again."""

    name: re.Pattern[str]
    is_ours: Callable[[Path], bool]


def publish(folder: Path, writers: Mapping[str, Writer], kind: Kind) -> list[Path]:
    """Write files beside their places, put them there together, and remove those of an earlier export.

    Args:
        folder: Where to; it is made when it is not there.
        writers: What writes each file, by its name.
        kind: Which files are of an earlier export.

    Returns:
        The files, in the order of the writers.

    Raises:
        ArgumentError: No files can be made there, or one there is not ours to replace.
        RecordingError: The disk is full or broken.
    """
    _make(folder)
    before = _earlier(folder, kind)
    for name in writers:
        if name not in before and (folder / name).exists():
            raise ArgumentError(f"{folder / name} is no file of an export", hint="another folder")
    drafts: dict[str, Path] = {}
    mark = secrets.token_hex(4)
    try:
        for name, write in writers.items():
            drafts[name] = draft = folder / f".{name}.{mark}.part"
            with draft.open("xb") as file:
                write(file)
        for name, draft in drafts.items():
            draft.replace(folder / name)
    except OSError as error:
        raise RecordingError(
            f"cannot write to {folder}: {error.strerror or error}", hint="see whether the disk is full"
        ) from error
    finally:
        for draft in drafts.values():
            with suppress(OSError):
                draft.unlink(missing_ok=True)
    for name in before - writers.keys():
        with suppress(OSError):
            (folder / name).unlink()
    return [folder / name for name in writers]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ArgumentError(f"{folder} is no folder", hint="another folder") from error
    except OSError as error:
        raise ArgumentError(f"cannot make {folder}: {error.strerror}", hint="another folder") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ArgumentError(f"no file can be made in {folder}", hint="another folder")


def _earlier(folder: Path, kind: Kind) -> set[str]:
    return {
        name for name in os.listdir(folder) if kind.name.fullmatch(name) and _is_ours(folder / name, kind)
    }


def _is_ours(path: Path, kind: Kind) -> bool:
    try:
        return path.is_file() and (path.stat().st_size == 0 or kind.is_ours(path))
    except OSError:
        return False
