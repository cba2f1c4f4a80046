"""What each NFS mount has asked of its server, from /proc/self/mountstats."""

from __future__ import annotations

import re

from gpulse.model.metric import Values
from gpulse.sources.procfs import text, unescape

NFS_TYPES = frozenset({"nfs", "nfs4"})
NFS_COUNTERS = (
    "nfs_reads_total",
    "nfs_read_bytes_total",
    "nfs_read_round_trip_seconds_total",
    "nfs_read_seconds_total",
    "nfs_writes_total",
    "nfs_written_bytes_total",
    "nfs_retransmissions_total",
)

MountKey = tuple[str, bytes]
"""The device and the mount point, byte for byte."""

_READS = (b"READ", b"READ_PLUS")
"""NFS 4.2 may read with an operation of its own that leaves out holes."""
_WRITES = (b"WRITE",)
_LINE = re.compile(rb"\n[\t ]+(bytes|READ|READ_PLUS|WRITE):([^\n]*)")
"""What is wanted of a mount, found without looking at each of its some eighty lines in Python."""
_OPERATIONS, _TRANSMISSIONS, _ROUND_TRIP_MS, _EXECUTE_MS = 0, 1, 6, 7
_FIELDS = 8
"""Numbers of an operation that every version writes; later ones add a count of errors."""
_SERVER_READ, _SERVER_WRITTEN = 4, 5
_MOST = 1 << 64
_NEGATIVE = 1 << 63
"""From here on a time is one that some kernels let run below zero and print without its sign."""


def parse_mountstats(data: bytes) -> dict[MountKey, Values]:
    """/proc/self/mountstats: the counters of each NFS mount under the catalogue's names; never raises."""
    mounts: dict[MountKey, Values] = {}
    for section in (b"\n" + data).split(b"\ndevice "):
        key = _nfs_mount(section.partition(b"\n")[0])
        if key is not None:
            mounts[key] = _values({name: _counters(rest) for name, rest in _LINE.findall(section)})
    return mounts


def _nfs_mount(heading: bytes) -> MountKey | None:
    """Device and mount point of `srv:/data mounted on /data with fstype nfs4 statvers=1.1`."""
    words = heading.split(b" ", 7)
    if len(words) < 7 or text(words[6]) not in NFS_TYPES:
        return None
    return text(unescape(words[0])), unescape(words[3])


def _counters(data: bytes) -> tuple[int, ...]:
    try:
        counters = tuple(map(int, data.split()))
    except ValueError:
        return ()
    return counters if all(0 <= counter < _MOST for counter in counters) else ()


def _values(lines: dict[bytes, tuple[int, ...]]) -> Values:
    values: Values = {}
    moved = lines.get(b"bytes", ())
    if len(moved) > _SERVER_WRITTEN:
        values["nfs_read_bytes_total"] = moved[_SERVER_READ]
        values["nfs_written_bytes_total"] = moved[_SERVER_WRITTEN]
    reads, writes = _added_up(lines, _READS), _added_up(lines, _WRITES)
    if reads:
        values["nfs_reads_total"] = reads[_OPERATIONS]
        if reads[_ROUND_TRIP_MS] < _NEGATIVE:
            values["nfs_read_round_trip_seconds_total"] = reads[_ROUND_TRIP_MS] / 1000
        if reads[_EXECUTE_MS] < _NEGATIVE:
            values["nfs_read_seconds_total"] = reads[_EXECUTE_MS] / 1000
    if writes:
        values["nfs_writes_total"] = writes[_OPERATIONS]
    if reads and writes:
        values["nfs_retransmissions_total"] = _again(reads) + _again(writes)
    return values


def _added_up(lines: dict[bytes, tuple[int, ...]], names: tuple[bytes, ...]) -> tuple[int, ...]:
    known = [lines[name][:_FIELDS] for name in names if len(lines.get(name, ())) >= _FIELDS]
    return tuple(map(sum, zip(*known, strict=True)))


def _again(operation: tuple[int, ...]) -> int:
    # Older kernels count an operation that was killed before it was ever sent.
    return max(0, operation[_TRANSMISSIONS] - operation[_OPERATIONS])
