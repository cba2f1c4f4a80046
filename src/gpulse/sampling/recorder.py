"""Write recordings: frames go to the file as they come, so that it is readable up to the last second even after kill -9."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path
from typing import IO, Protocol

from gpulse.atomic_files import open_output
from gpulse.errors import RecordingError, file_hint
from gpulse.model.frame import Frame
from gpulse.model.recording_codec import RecordingEncoder

_FLUSH_SECONDS = 0.5
"""Less than a second, so that with one frame per second each is flushed before the next."""
_GZIP = 31
"""zlib's `wbits` for the gzip format with the largest window."""


class FrameSink(Protocol):
    """Receiver of frames."""

    def write(self, frame: Frame) -> None:
        """Write one frame."""

    def close(self) -> None:
        """Finish, and release all resources."""


class Recorder:
    """Writes a lossless recording, compressed when the name ends in .gz; never overwrites a file."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            RecordingError: The file exists already, or cannot be created.
        """
        self.path = path
        self.frames = 0
        self._encoder = RecordingEncoder()
        self._flushed_at = time.monotonic()
        try:
            descriptor = open_output(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise RecordingError(
                f"{path} already exists", hint="choose another name, or remove the file first"
            ) from None
        except OSError as error:
            raise RecordingError(f"cannot create {path}: {error.strerror}", hint=file_hint(error)) from error
        self._file: IO[bytes] = os.fdopen(descriptor, "wb")
        self._packer = zlib.compressobj(wbits=_GZIP) if path.suffix == ".gz" else None

    def write(self, frame: Frame) -> None:
        """Add one frame; at most one second of frames is buffered in memory.

        Raises:
            RecordingError: The file cannot be written.
        """
        text = "".join(f"{line}\n" for line in self._encoder.lines(frame)).encode()
        try:
            self._file.write(text if self._packer is None else self._packer.compress(text))
            now = time.monotonic()
            if now - self._flushed_at >= _FLUSH_SECONDS:
                self._flushed_at = now
                if self._packer is not None:
                    self._file.write(self._packer.flush(zlib.Z_SYNC_FLUSH))
                self._file.flush()
        except OSError as error:
            raise RecordingError(
                f"cannot write {self.path}: {error.strerror}", hint=file_hint(error)
            ) from error
        self.frames += 1

    def close(self) -> None:
        """Finish the file.

        Raises:
            RecordingError: The file cannot be written.
        """
        try:
            try:
                packer, self._packer = self._packer, None
                if packer is not None:
                    self._file.write(packer.flush())
            finally:
                self._file.close()
        except OSError as error:
            raise RecordingError(
                f"cannot write {self.path}: {error.strerror}", hint=file_hint(error)
            ) from error
