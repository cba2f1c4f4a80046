"""The file itself: read once, and when we are root only if nobody else could have written it."""

from __future__ import annotations

import os
import shlex
import stat

from gpulse.harvest.settings import ConfigError
from gpulse.harvest.trust import check_trust

_MOST_BYTES = 1 << 20


def read(path: str, *, root: bool) -> str:
    """The text of a configuration.

    Args:
        path: Its file; symbolic links are followed.
        root: Its programs run as root, so it must be root's or the caller's alone.

    Raises:
        ConfigError: It cannot be read, is no text, or others may change it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file", hint=_template_hint(path)) from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{path}: this is a directory", hint="name the file in it")
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: this is not a regular file", hint="save it as one")
        if root:
            check_trust(path, status)
        data = _bytes(descriptor)
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)
    return _decoded(data, path)


def _template_hint(path: str) -> str:
    """The command that writes a file of this name, in the form that its name stands for."""
    form = "" if path.lower().endswith(".toml") else "--format ini "
    return f"gpulse harvest init {form}{shlex.quote(path)}, which writes one to begin with"


def _unreadable(path: str, error: OSError | ValueError) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"{path}: it cannot be read: {why}", hint="is it yours to read?")


def _bytes(descriptor: int) -> bytes:
    data = b""
    while len(data) <= _MOST_BYTES and (part := os.read(descriptor, _MOST_BYTES)):
        data += part
    return data


def _decoded(data: bytes, path: str) -> str:
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path}: it is larger than 1 MiB", hint="is it a configuration?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: this is not UTF-8 text", hint="save it as UTF-8") from error
