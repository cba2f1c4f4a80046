"""The error tree: what went wrong, the next thing to try, and the exit code a command ends with.

GpulseError                 exit 1
├── UsageError              exit 2   the command line or a configuration is wrong
│   └── MissingExtraError   exit 2   a feature needs an optional dependency
├── CollectionError         exit 1   nothing could be collected
├── RecordingError          exit 1   a recording cannot be read or written
├── ExportCancelledError    exit 1   a session's file was given up while it was written
├── LogError                exit 1   a log on disk is damaged, or another process writes it
├── DiskError               exit 1   the disk is full, read-only, over quota or broken
└── ClosedError             exit 1   a source, sampler or log was used after close()
"""

from __future__ import annotations

import errno
import os
import sys

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as in a shell."""


class GpulseError(Exception):
    """Anything gpulse reports to a person instead of a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(GpulseError):
    """The command line or a configuration asks for something that does not make sense."""

    exit_code = 2


class MissingExtraError(UsageError):
    """A feature needs an optional dependency that is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs packages that are not installed",
            hint=install_command(extra),
        )
        self.add_note(f"try: {self.hint}")  # Python's users see a traceback, which shows no hint


class CollectionError(GpulseError):
    """Nothing could be collected."""


class RecordingError(GpulseError):
    """A recording cannot be read or written."""


class ExportCancelledError(GpulseError):
    """A session's file was given up while it was written."""


class LogError(GpulseError):
    """A log on disk is damaged, or another process writes it."""


class DiskError(GpulseError):
    """The disk under a log is full, read-only, over quota or broken."""


class ClosedError(GpulseError):
    """A source, sampler or log was used after it was closed."""


class RefusedError(GpulseError):
    """The head will not do what it was asked."""

    def __init__(self, status: int, message: str, *, hint: str | None = None) -> None:
        """Say no.

        Args:
            status: As in HTTP: 400 it makes no sense, 401 who are you, 403 you may not, 404 no such thing, 409 it
                cannot be now, 503 not at the moment.
            message: What is wrong.
            hint: What to try.
        """
        super().__init__(message, hint=hint)
        self.status = status


def install_command(extra: str | None = None, *, upgrade: bool = False) -> str:
    """Return the command line that installs gpulse into this Python environment, from where it was installed before.

    Args:
        extra: The optional dependencies to install with it, such as `head`.
        upgrade: Replace the version that is installed.
    """
    import shlex  # noqa: PLC0415  every command loads this module, and few need an installation
    import shutil  # noqa: PLC0415
    from importlib.util import find_spec  # noqa: PLC0415

    if find_spec("pip") is None:
        installer = f"uv pip install --python {shlex.quote(sys.executable)}"
    elif os.path.dirname(shutil.which("pip") or "") == os.path.dirname(sys.executable):
        installer = "pip install"
    else:  # another environment's pip comes first in PATH, or none
        installer = f"{shlex.quote(sys.executable)} -m pip install"
    return " ".join((installer, *(("--upgrade",) if upgrade else ()), requirement(extra)))


def requirement(extra: str | None = None) -> str:
    """Return what to name to pip to get this gpulse: a checkout, an archive, a repository, or the published package."""
    import json  # noqa: PLC0415  as above
    import shlex  # noqa: PLC0415
    from importlib import metadata  # noqa: PLC0415
    from urllib.parse import unquote, urlsplit  # noqa: PLC0415

    wanted = f"[{extra}]" if extra else ""
    published = shlex.quote(f"gpulse{wanted}")
    try:
        origin = json.loads(metadata.distribution("gpulse").read_text("direct_url.json") or "{}")
        url, vcs = str(origin.get("url", "")), origin.get("vcs_info")
        is_editable = bool(origin.get("dir_info", {}).get("editable"))
        if vcs:
            return shlex.quote(f"gpulse{wanted} @ {vcs['vcs']}+{url}@{vcs['commit_id']}")
    except (metadata.PackageNotFoundError, ValueError, AttributeError, KeyError, TypeError):
        return published
    parts = urlsplit(url)
    if parts.scheme != "file":
        return shlex.quote(f"gpulse{wanted} @ {url}") if parts.scheme else published
    path = unquote(parts.path)
    if not os.path.exists(path):
        return published
    return f"{'-e ' if is_editable else ''}{shlex.quote(path + wanted)}"


_FILE_HINTS = {
    errno.ENOENT: "check the path, and create its directory first if it is to be written (mkdir -p)",
    errno.ENOTDIR: "check the path: a part of it is a file",
    errno.EISDIR: "name a file in that directory",
    errno.EACCES: "choose another file, or ask for permission to this one",
    errno.EPERM: "choose another file, or ask for permission to this one",
    errno.EROFS: "choose a file on another file system: this one is read-only",
    errno.ENOSPC: "make room on that disk, or choose another file",
    errno.EDQUOT: "make room within your quota, or choose another file",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or choose another file",
}


def file_hint(error: OSError) -> str | None:
    """What to do about a file that cannot be read or written; None when only the reason itself says it."""
    return None if error.errno is None else _FILE_HINTS.get(error.errno)
