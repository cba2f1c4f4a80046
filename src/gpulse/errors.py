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
            hint=f"pip install 'gpulse[{extra}]'",
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
