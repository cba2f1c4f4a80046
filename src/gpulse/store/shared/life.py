"""Which heads share a directory, and what each of them says of itself."""

from __future__ import annotations

import json
import os
import re
import tempfile
from typing import NamedTuple

from gpulse.store.book.values import UNREADABLE, number, text, whole

_HEAD = re.compile(r"[0-9a-f][0-9a-f-]{7,63}")
_LIFE = "head.json"
_LONGEST = 64 << 10


class Life(NamedTuple):
    """What a head says of itself."""

    id: str
    host: str
    started: float
    alive: float
    """When it said so, on its clock."""
    newest: float | None = None
    """When it got frames last."""
    shared_to: int = 0
    """Up to which position of its log everything is told."""
    ended: bool = False
    """True when it went on purpose."""
    written: float = 0.0
    """When that was, on the file server's clock."""


def head_ids(directory: str) -> list[str]:
    """The heads that have a folder.

    Raises:
        OSError: They cannot be listed.
    """
    with os.scandir(directory) as found:
        return sorted(entry.name for entry in found if _HEAD.fullmatch(entry.name) and entry.is_dir())


def read_life(directory: str, head: str) -> Life | None:
    """What a head said of itself last; None when that cannot be understood.

    Raises:
        OSError: It cannot be read.
    """
    try:
        with open(f"{directory}/{head}/{_LIFE}", encoding="utf-8") as file:
            document = json.loads(file.read(_LONGEST))
            document["written"] = os.fstat(file.fileno()).st_mtime
        return _checked(Life(**{name: document[name] for name in Life._fields if name in document}))
    except (FileNotFoundError, *UNREADABLE):
        return None


def _checked(life: Life) -> Life:
    """What a head says of itself, if everything in it is of its kind.

    Raises:
        ValueError: Something is not.
    """
    for moment in (life.started, life.alive, life.newest or 0.0):
        number(moment)
    whole(life.shared_to)
    return life._replace(id=text(life.id), host=text(life.host), ended=bool(life.ended))


def write_life(directory: str, life: Life) -> float:
    """Say how this head is; when that was, on the file server's clock.

    Raises:
        OSError: It cannot be written.
    """
    path = f"{directory}/{life.id}/{_LIFE}"
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(life._asdict(), file)
        file.flush()
        os.fsync(file.fileno())
        written = os.fstat(file.fileno()).st_mtime
    os.replace(f"{path}.new", path)
    return written


def server_time(directory: str) -> float:
    """What time it is on the file server.

    Raises:
        OSError: That cannot be seen.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.fstat(file.fileno()).st_mtime
