"""Recordings read back: gpulse's own and the older trace format, whole or cut off."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gpulse.errors import ClosedError, RecordingError, file_hint, install_command
from gpulse.model.codec import FORMAT, VERSION, Decoder
from gpulse.model.frame import Frame
from gpulse.model.health import Health
from gpulse.sources.trace import TraceDecoder

_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31
"""zlib's word for a gzip header and trailer around the largest window."""
_PIECE_BYTES = 2**16
_LONGEST_LINE = 2**26
"""A frame of thousands of processes takes a few megabytes; more without an end is no recording."""
_DAMAGED = "copy it again from where it was recorded, or record again"


class EndOfRecordingError(RecordingError):
    """A recording has no frame left."""


class Recording:
    """Frames in a file, in the order of their time.

    A file that ends in the middle of a line (its writer was killed) gives every frame before that and
    says `truncated` in the health of the last one.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the file and look at its first line.

        Raises:
            RecordingError: The file cannot be read, or is not a recording.
        """
        self.path = Path(path)
        try:
            with self._opened() as stream:
                _, first = next(_numbered(stream), (0, None))
        except _CutOffError as error:
            raise RecordingError(f"{self.path} is damaged: {error}", hint=_DAMAGED) from error
        if first is None:
            raise RecordingError(
                f"{self.path} is empty", hint="record one with `gpulse record -o run.jsonl.gz`"
            )
        self._decoder = _decoder_for(first, self.path)

    def __iter__(self) -> Iterator[Frame]:
        """Every frame, decoded as it is asked for."""
        decoder = self._decoder()
        held: Frame | None = None
        cut: str | None = None
        with self._opened() as stream:
            lines = _numbered(stream)
            while True:
                try:
                    number, line = next(lines, (0, None))
                except _CutOffError as error:
                    cut = str(error)
                    break
                if line is None:
                    break
                try:
                    frame = decoder.feed(line)
                except ValueError as error:
                    if _goes_on(lines):
                        raise RecordingError(
                            f"{self.path}: line {number} is damaged: {error}", hint=_DAMAGED
                        ) from error
                    cut = f"line {number} is incomplete"
                    break
                if frame is not None:
                    if held is not None:
                        yield held
                    held = frame
        if held is None:
            return
        if cut is not None:
            entry = Health(
                "recording", "truncated", f"the recording ends early: {cut}", held.time, str(self.path)
            )
            held = held._replace(health=(*held.health, entry))
        yield held

    def _opened(self) -> IO[bytes]:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise RecordingError(
                f"cannot read {self.path}: {error.strerror or error}", hint=file_hint(error)
            ) from error


class ReplaySource:
    """A recording as a source.

    Every `sample` gives the recording's next frame; or, when it was told at what time it `started`, the
    frame that is due by then, so that a recording plays at the pace at which it was made.
    """

    def __init__(self, recording: Recording, *, started: float | None = None) -> None:
        self._frames: Iterator[Frame] | None = iter(recording)
        self._started = started
        self._first_time: float | None = None
        self._upcoming: Frame | None = None

    def sample(self, now: float) -> Frame:
        """A frame, with the time at which it was recorded.

        Raises:
            EndOfRecordingError: There is none left.
            ClosedError: The source was closed.
        """
        if self._frames is None:
            raise ClosedError("this recording was closed")
        frame = self._upcoming or next(self._frames, None)
        self._upcoming = None
        if frame is None:
            raise EndOfRecordingError("the recording has ended")
        if self._started is None:
            return frame
        if self._first_time is None:
            self._first_time = frame.time
        while (later := next(self._frames, None)) is not None:
            if later.time - self._first_time > now - self._started:
                self._upcoming = later
                break
            frame = later
        return frame

    def close(self) -> None:
        """Let the file go."""
        self._frames = None


class _CutOffError(Exception):
    """The file ends in the middle, or cannot be read on."""


def _numbered(stream: IO[bytes]) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    number = 0
    rest = b""
    for chunk in _unpacked(stream):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise _CutOffError(f"line {number + len(lines) + 1} has no end")
        for line in lines:
            number += 1
            if line.strip():
                yield number, line.decode("utf-8", "replace")
    if rest.strip():
        yield number + 1, rest.decode("utf-8", "replace")


def _unpacked(stream: IO[bytes]) -> Iterator[bytes]:
    """What a file holds, piece by piece, unpacked when it is gzipped, in one piece or in several joined ones."""
    piece = _read(stream)
    if not piece.startswith(_GZIP):
        while piece:
            yield piece
            piece = _read(stream)
        return
    unpacker = zlib.decompressobj(_GZIP_WINDOW)
    while piece:
        try:
            yield unpacker.decompress(piece)
        except zlib.error as error:
            raise _CutOffError("its compressed data is broken") from error
        piece = unpacker.unused_data or _read(stream)
        if unpacker.eof and piece:
            unpacker = zlib.decompressobj(_GZIP_WINDOW)
    if not unpacker.eof:
        raise _CutOffError("its compressed data stops in the middle")


def _read(stream: IO[bytes]) -> bytes:
    try:
        return stream.read(_PIECE_BYTES)
    except OSError as error:
        raise _CutOffError(error.strerror or "it cannot be read on") from error


def _goes_on(lines: Iterator[tuple[int, str]]) -> bool:
    try:
        return next(lines, None) is not None
    except _CutOffError:
        return False


def _decoder_for(first: str, path: Path) -> type[Decoder | TraceDecoder]:
    try:
        header = json.loads(first)
    except (ValueError, RecursionError):
        header = None
    if isinstance(header, dict):
        if "trace" in header:
            if header["trace"] == 1:
                return TraceDecoder
            raise RecordingError(f"{path} is a trace of format {header['trace']}; this gpulse reads format 1")
        if header.get("format") == FORMAT:
            version = header.get("version")
            if version == VERSION:
                return Decoder
            raise RecordingError(
                f"{path} is a recording of version {version}; this gpulse reads version {VERSION}",
                hint=f"install a newer gpulse: {install_command(upgrade=True)}",
            )
    raise RecordingError(f"{path} is not a recording", hint="record one with `gpulse record -o run.jsonl.gz`")
