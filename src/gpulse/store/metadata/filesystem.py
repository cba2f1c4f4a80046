"""Which file system a path lies on: SQLite's fast journal needs one whose memory maps all processes share."""

from __future__ import annotations

import os

from gpulse.sources.mounts import NETWORK_TYPES
from gpulse.sources.procfs import unescape

_MOUNTINFO = "/proc/self/mountinfo"
_SHARED_TYPES = NETWORK_TYPES | {"fuse", "gfs2", "gofer", "ncpfs", "ocfs2", "orangefs", "panfs", "pvfs2"}


def filesystem_type(path: str, mountinfo: bytes) -> str | None:
    """The type of the file system that holds an absolute path without links; None when no mount does."""
    wanted = os.fsencode(path).rstrip(b"/") + b"/"
    found, longest = None, -1
    for line in mountinfo.split(b"\n"):
        before, _, after = line.partition(b" - ")
        fields = before.split(b" ")
        if not after or len(fields) < 5:
            continue
        mount_point = unescape(fields[4]).rstrip(b"/") + b"/"
        # The later of two mounts at one place hides the earlier.
        if wanted.startswith(mount_point) and len(mount_point) >= longest:
            found, longest = after.split(b" ")[0].decode("ascii", "replace"), len(mount_point)
    return found


def is_local_type(kind: str | None) -> bool:
    """Whether a type of file system is known not to be shared between machines."""
    return kind is not None and kind not in _SHARED_TYPES and not kind.startswith("fuse.")


def is_local(path: str) -> bool:
    """Whether a path lies on a file system of this machine alone; False when that cannot be told."""
    try:
        with open(_MOUNTINFO, "rb") as file:
            mountinfo = file.read()
    except OSError:
        return False
    return is_local_type(filesystem_type(os.path.realpath(path), mountinfo))
