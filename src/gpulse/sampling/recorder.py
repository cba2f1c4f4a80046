"""Recordings: frames into a file as they come, readable up to the last second even after kill -9."""

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import IO, Protocol

from gpulse.errors import RecordingError, file_hint
from gpulse.model.codec import Encoder
from gpulse.model.frame import Frame

_FLUSH_SECONDS = 0.5
"""Half of what may be lost, so that a frame every second is never held back for the next one."""
_GZIP = 31
"""zlib's word for a gzip header and trailer around the largest window."""


class Sink(Protocol):
    """Where frames go."""

    def write(self, frame: Frame) -> None:
        """Take one frame."""

    def close(self) -> None:
        """Finish and let go."""


class Recorder:
    """Writes a lossless recording, gzipped when the name ends in .gz; an existing file is not touched."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            RecordingError: It exists already, or cannot be created.
        """
        self.path = path
        self.frames = 0
        self._encoder = Encoder()
        self._flushed_at = time.monotonic()
        try:
            self._file: IO[bytes] = path.open("xb")
        except FileExistsError:
            raise RecordingError(
                f"{path} exists already", hint="choose another name, or remove it first"
            ) from None
        except OSError as error:
            raise RecordingError(f"cannot create {path}: {error.strerror}", hint=file_hint(error)) from error
        self._packer = zlib.compressobj(wbits=_GZIP) if path.suffix == ".gz" else None

    def write(self, frame: Frame) -> None:
        """Add one frame; at most a second of them is ever held back in memory.

        Raises:
            RecordingError: The disk is full or gone.
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
            RecordingError: The disk is full or gone.
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
