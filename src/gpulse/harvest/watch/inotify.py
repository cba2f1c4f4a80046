"""Wait for events on files: inotify, and one descriptor that combines several with a timer."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
from contextlib import suppress
from typing import NamedTuple

ACCESS = 0x1
CLOSE = 0x18
"""Of a file that could be written, and of one that could not."""
OPEN = 0x20
MOVED_TO = 0x80
CREATE = 0x100
OVERFLOW = 0x4000
IGNORED = 0x8000
DIRECTORY = 0x40000000
"""It happened to the directory that is watched, not to something in it."""

_EVENT = struct.Struct("iIII")
_BUFFER_BYTES = 1 << 16
_MONOTONIC = 1
_TIMER = struct.Struct("qqqq")


class FileEvent(NamedTuple):
    """An event on a file."""

    watch: int
    mask: int


class Inotify:
    """An inotify instance: one queue of events."""

    def __init__(self) -> None:
        """Open it.

        Raises:
            OSError: The kernel has none for us: a limit is reached, or it is not built in.
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = _check_result(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def watch(self, path: str, mask: int) -> int:
        """Watch a file or directory; one that is watched already keeps its number.

        Raises:
            OSError: It is not there, may not be read, or a limit is reached.
        """
        return _check_result(self._libc.inotify_add_watch(self.descriptor, os.fsencode(path), mask))

    def forget(self, watch: int) -> None:
        """Stop watching; nothing happens when it is gone already."""
        self._libc.inotify_rm_watch(self.descriptor, watch)

    def read(self) -> list[FileEvent]:
        """Return the queued events, at most one buffer full."""
        try:
            data = os.read(self.descriptor, _BUFFER_BYTES)
        except BlockingIOError:
            return []
        events: list[FileEvent] = []
        place = 0
        while place < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, place)
            events.append(FileEvent(watch, mask))
            place += _EVENT.size + length
        return events

    def close(self) -> None:
        """Close it."""
        os.close(self.descriptor)


class Wakeup:
    """A descriptor that becomes readable when one of several others does, or at a given time."""

    def __init__(self) -> None:
        """Open it.

        Raises:
            OSError: Too many files are open.
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer: int = _check_result(self._libc.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            self._poll = select.epoll()
        except OSError:
            os.close(self._timer)
            raise
        self._poll.register(self._timer, select.EPOLLIN)
        self._known: set[int] = set()
        self._muted: set[int] = set()

    @property
    def descriptor(self) -> int:
        """The one to wait on."""
        return self._poll.fileno()

    def add(self, descriptor: int) -> None:
        """Wake up for this descriptor from now on."""
        if descriptor not in self._known:
            self._known.add(descriptor)
            self._poll.register(descriptor, select.EPOLLIN)

    def drop(self, descriptor: int) -> None:
        """Do not wake up for this descriptor any more; it must still be open."""
        if descriptor in self._known:
            self._known.discard(descriptor)
            self._muted.discard(descriptor)
            self._poll.unregister(descriptor)

    def mute(self, descriptor: int) -> None:
        """Do not wake up for this descriptor until `unmute`."""
        if descriptor in self._known and descriptor not in self._muted:
            self._muted.add(descriptor)
            self._poll.modify(descriptor, 0)

    def unmute(self, descriptor: int) -> None:
        """Wake up for it again."""
        if descriptor in self._muted:
            self._muted.discard(descriptor)
            self._poll.modify(descriptor, select.EPOLLIN)

    def wake_in(self, seconds: float | None) -> None:
        """Wake up after this many seconds; None: only for descriptors."""
        nanoseconds = 0 if seconds is None else max(1, int(seconds * 1e9))
        setting = _TIMER.pack(0, 0, *divmod(nanoseconds, 1_000_000_000))
        _check_result(self._libc.timerfd_settime(self._timer, 0, setting, None))

    def woken(self) -> set[int]:
        """Return the descriptors that it woke up for; the timer wakes up once."""
        ready = {descriptor for descriptor, _ in self._poll.poll(0)}
        if self._timer in ready:
            with suppress(BlockingIOError):
                os.read(self._timer, 8)
        return ready & self._known

    def close(self) -> None:
        """Close it."""
        self._poll.close()
        os.close(self._timer)


def explain_inotify_error(error: OSError) -> str:
    """Explain why inotify failed, and which limit to raise."""
    limits = {
        errno.EMFILE: "the limit on inotify instances has been reached (fs.inotify.max_user_instances, or open files)",
        errno.ENOSPC: "the limit on inotify watches has been reached (fs.inotify.max_user_watches)",
        errno.ENOSYS: "the kernel does not support inotify",
    }
    return limits.get(error.errno or 0) or (error.strerror or str(error))


def _check_result(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
