"""Exceptions of gpulse, with a hint on what to try and the exit code of the command.

GpulseError                 exit 1
├── UsageError              exit 2   the command line or a configuration is wrong
│   └── MissingExtraError   exit 2   a feature needs an optional dependency
├── CollectionError         exit 1   nothing could be collected
├── RecordingError          exit 1   a recording cannot be read or written
├── ExportCancelledError    exit 1   writing a session's file was cancelled
├── LogError                exit 1   a log on disk is damaged, or another process writes it
├── DiskError               exit 1   the disk is full, read-only, over quota or broken
└── ClosedError             exit 1   a source, sampler or log was used after close()
"""

from __future__ import annotations

import errno
import os
import shlex
import sys
from importlib.util import find_spec

EXIT_INTERRUPTED = 130
"""Exit code of a command that was ended with Ctrl-C, as in a shell."""


class GpulseError(Exception):
    """An error that is shown as a message instead of a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(GpulseError):
    """The command line or a configuration is invalid."""

    exit_code = 2


class MissingExtraError(UsageError):
    """A feature needs an optional dependency that is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs packages that are not installed",
            hint=install_command(extra),
        )
        self.add_note(f"try: {self.hint}")  # Python users see a traceback, which does not show the hint


class CollectionError(GpulseError):
    """Nothing could be collected."""


class RecordingError(GpulseError):
    """A recording cannot be read or written."""


class ExportCancelledError(GpulseError):
    """Writing a session's file was cancelled."""


class LogError(GpulseError):
    """A log on disk is damaged, or another process writes it."""


class DiskError(GpulseError):
    """The disk under a log is full, read-only, over quota or broken."""


class ClosedError(GpulseError):
    """A source, sampler or log was used after it was closed."""


class RefusedError(GpulseError):
    """The head rejected a request."""

    def __init__(self, status: int, message: str, *, hint: str | None = None) -> None:
        """Create the error.

        Args:
            status: HTTP status: 400 invalid request, 401 not authenticated, 403 not allowed, 404 not found, 409 conflict
                with the current state, 429 too many requests at once, 503 temporarily unavailable.
            message: What is wrong.
            hint: What to try.
        """
        super().__init__(message, hint=hint)
        self.status = status


def install_command(extra: str | None = None, *, upgrade: bool = False) -> str:
    """Return the command that installs gpulse into this Python environment, from the same origin as now.

    Args:
        extra: Optional dependencies to install, such as `head`.
        upgrade: Replace the installed version.
    """
    import shutil  # noqa: PLC0415  every command loads this module, but few need this import

    if find_spec("pip") is None:
        installer = f"uv pip install --python {shlex.quote(sys.executable)}"
    elif os.path.dirname(shutil.which("pip") or "") == os.path.dirname(sys.executable):
        installer = "pip install"
    else:  # PATH has no pip, or that of another environment first
        installer = f"{shlex.quote(sys.executable)} -m pip install"
    return " ".join((installer, *(("--upgrade",) if upgrade else ()), pip_requirement(extra)))


def pip_requirement(extra: str | None = None) -> str:
    """Return the requirement for pip that gives this gpulse: a checkout, an archive, a repository, or the package."""
    import json  # noqa: PLC0415  as above
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
    errno.ENOENT: "check the path; to write a file, create its directory first (mkdir -p)",
    errno.ENOTDIR: "check the path: it uses a file as a directory",
    errno.EISDIR: "give the name of a file in that directory",
    errno.EACCES: "choose another file, or get permission for this one",
    errno.EPERM: "choose another file, or get permission for this one",
    errno.ELOOP: "choose a file in a directory that only you can write to, such as your home directory",
    errno.EROFS: "choose a file on another file system; this one is read-only",
    errno.ENOSPC: "free space on the disk, or choose another file",
    errno.EDQUOT: "free space in your quota, or choose another file",
    errno.EFBIG: "raise the file size limit (ulimit -f), or choose another file",
}


def file_hint(error: OSError) -> str | None:
    """Return a hint for a file that cannot be read or written; None when the error speaks for itself."""
    return None if error.errno is None else _FILE_HINTS.get(error.errno)
