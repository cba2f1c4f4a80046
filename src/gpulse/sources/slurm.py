"""Parse the names of Slurm's control groups and the variables in a job's environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpulse.model.device import Device
from gpulse.sources.procfs import number, text

_CROCKFORD = frozenset("0123456789ABCDEFGHJKMNPQRSTVWXYZ")
_SLUID_LENGTH = 14
_MAX_NUMBER_LENGTH = 20
_STEP_NAMES = frozenset({"batch", "extern", "interactive"})
_SCOPE_NAME = "slurmstepd.scope"
_DAEMON_TITLE = b"slurmstepd: ["
_MAX_TEXT_LENGTH = 256
_MAX_GPUS = 1024


class JobEnvironment(NamedTuple):
    """Slurm's variables in the environment of a process."""

    job: str
    """For example `slurm:4711`."""
    uid: int | None = None
    user: str | None = None
    name: str | None = None
    partition: str | None = None
    account: str | None = None
    gpus: str | None = None
    """The job's GPUs on this node, in Slurm's numbering."""
    step_gpus: str | None = None
    """The GPUs of one step."""
    visible: str | None = None
    """The GPUs that programs should use; numbered from 0 in each job if Slurm hides the other GPUs."""
    array: str | None = None
    """The job array and the task in it, for example `4711_3`."""


def find_slurm_job(paths: Iterable[str]) -> str | None:
    """Return the Slurm job of a control group, such as `slurm:4711`, or `slurm:s5K1KKYAYG5D00` by its SLUID."""
    for path in paths:
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for place, part in enumerate(parts):
            job = parse_job_folder(part)
            if job is not None and _is_slurm_folder(parts[:place], parts[place + 1 : place + 2]):
                return job
    return None


def _is_slurm_folder(above: Sequence[str], below: Sequence[str]) -> bool:
    """Return whether a job's directory between these is in Slurm's part of the tree, where only root can create one.

    A user with a systemd instance can create directories of any name in their own part of the tree.
    """
    if not above or (len(above) == 1 and parse_user_folder(above[0]) is not None):
        return any(map(_is_step, below))  # a cgroup namespace: the path starts below Slurm's own directory
    if above[-1].endswith(_SCOPE_NAME):
        return all(map(is_slice_of_root, above[:-1]))
    return len(above) == 2 and above[0].startswith("slurm") and parse_user_folder(above[1]) is not None


def is_slice_of_root(name: str) -> bool:
    """True for a systemd slice that belongs to no user."""
    return name.endswith(".slice") and name != "user.slice"


def _is_step(name: str) -> bool:
    return name.startswith("step_") and (name[5:] in _STEP_NAMES or _is_number(name[5:]))


def is_sluid(job: str) -> bool:
    """True for a job of which only the SLUID is known."""
    return not job.removeprefix("slurm:").isdecimal()


def parse_job_folder(name: str) -> str | None:
    """Return the job whose directory in Slurm's control groups has this name.

    Newer versions use the job's SLUID, which does not contain its ID.
    """
    if name.startswith("job_") and _is_number(name[4:]):
        return f"slurm:{name[4:]}"
    if len(name) == _SLUID_LENGTH and name[0] == "s" and _CROCKFORD.issuperset(name[1:]):
        return f"slurm:{name}"
    return None


def parse_user_folder(name: str) -> int | None:
    """Return the user whose jobs are in a directory of version 1."""
    return int(name[4:]) if name.startswith("uid_") and _is_number(name[4:]) else None


def parse_daemon_title(command: bytes) -> str | None:
    """Return the job of a step's daemon from its command line."""
    if not command.startswith(_DAEMON_TITLE):
        return None
    word = (
        text(command[len(_DAEMON_TITLE) : len(_DAEMON_TITLE) + _MAX_NUMBER_LENGTH + 1])
        .partition(".")[0]
        .partition("+")[0]
    )
    return f"slurm:{word}" if _is_number(word) else None


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= _MAX_NUMBER_LENGTH


def find_environ_job(environ: bytes | None) -> str | None:
    """Return the Slurm job that a process's environment names."""
    found = parse_environ(environ) if environ else None
    return None if found is None else found.job


def parse_environ(environ: bytes) -> JobEnvironment | None:
    """Parse Slurm's variables in an environment; None when it names no job."""
    if b"SLURM_JOB" not in environ:
        return None
    words: dict[bytes, bytes] = {}
    for entry in environ.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and (name.startswith(b"SLURM_") or name in _VISIBLE_GPU_VARIABLES):
            words.setdefault(name, value)
    job = next(
        (words[name] for name in (b"SLURM_JOB_ID", b"SLURM_JOBID") if words.get(name, b"").isdigit()), None
    )
    if job is None or len(job) > _MAX_NUMBER_LENGTH:
        return None
    return JobEnvironment(
        job=f"slurm:{job.decode()}",
        uid=number(words.get(b"SLURM_JOB_UID")),
        user=_find_word(words, b"SLURM_JOB_USER"),
        name=_find_word(words, b"SLURM_JOB_NAME"),
        partition=_find_word(words, b"SLURM_JOB_PARTITION"),
        account=_find_word(words, b"SLURM_JOB_ACCOUNT"),
        gpus=_find_word(words, b"SLURM_JOB_GPUS", _MAX_GPUS * 8),
        step_gpus=_find_word(words, b"SLURM_STEP_GPUS", _MAX_GPUS * 8),
        array=_parse_array(words),
        visible=next(
            (found for name in _VISIBLE_GPU_VARIABLES if (found := _find_word(words, name, _MAX_GPUS * 48))),
            None,
        ),
    )


_VISIBLE_GPU_VARIABLES = (b"CUDA_VISIBLE_DEVICES", b"GPU_DEVICE_ORDINAL")


def _parse_array(words: Mapping[bytes, bytes]) -> str | None:
    array, task = words.get(b"SLURM_ARRAY_JOB_ID", b""), words.get(b"SLURM_ARRAY_TASK_ID", b"")
    is_one = array.isdigit() and task.isdigit() and max(len(array), len(task)) <= _MAX_NUMBER_LENGTH
    return f"{array.decode()}_{task.decode()}" if is_one else None


def _find_word(words: Mapping[bytes, bytes], name: bytes, most: int = _MAX_TEXT_LENGTH) -> str | None:
    return text(words[name][:most]) if words.get(name) else None


def find_allocated_gpus(environments: Iterable[JobEnvironment], devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that the environments of one job name; empty when they name none.

    Slurm's numbers are those of the device files, except for MIG instances, which have no device file. Numbers in
    CUDA_VISIBLE_DEVICES start at 0 in each job if Slurm hides the other GPUs, and are ignored; UUIDs are used.
    """
    found = list(environments)
    by_job = dict.fromkeys(uuid for one in found for uuid in find_named_gpus(one.gpus, devices))
    by_step = dict.fromkeys(uuid for one in found for uuid in find_named_gpus(one.step_gpus, devices))
    by_uuid = dict.fromkeys(
        uuid for one in found for uuid in find_named_gpus(one.visible, devices, numbers=False)
    )
    parts = {device.uuid for device in devices if device.parent_uuid is not None}
    return tuple(by_uuid if parts.intersection(by_uuid) else by_job or by_step or by_uuid)


def find_named_gpus(words: str | None, devices: Sequence[Device], *, numbers: bool = True) -> list[str]:
    """Return the UUIDs of the GPUs in a list such as `0-3,6` or `GPU-…,MIG-…`; unknown ones are left out."""
    found: list[str] = []
    for word in map(str.strip, (words or "").split(",")[:_MAX_GPUS]):
        if word[:4].upper() in ("GPU-", "MIG-"):
            found += [device.uuid for device in devices if device.uuid.lower() == word.lower()]
        elif numbers:
            found += [
                uuid
                for count in _parse_range(word)
                if (uuid := find_gpu_by_minor(count, devices)) is not None
            ]
    return found


def find_gpu_by_minor(count: int, devices: Iterable[Device]) -> str | None:
    """Return the UUID of the GPU with this minor number, or with this index where minor numbers are unknown."""
    for device in devices:
        own = device.index if device.minor_number is None else device.minor_number
        if device.parent_uuid is None and own == count:
            return device.uuid
    return None


def _parse_range(word: str) -> range:
    first, dash, last = word.partition("-")
    if not first.isdecimal() or len(first) > 6 or (dash and (not last.isdecimal() or len(last) > 6)):
        return range(0)
    return (
        range(int(first), min(int(last), int(first) + _MAX_GPUS) + 1)
        if dash
        else range(int(first), int(first) + 1)
    )


def find_allowed_gpus(device_list: bytes, devices: Sequence[Device]) -> tuple[str, ...] | None:
    """Return the UUIDs of the GPUs that a control group's `devices.list` allows; None when it allows all devices.

    The kernel lists single devices only if all others are denied.
    """
    minors: dict[int, None] = {}
    for line in device_list.split(b"\n"):
        kind, _, rest = line.partition(b" ")
        place, _, rights = rest.partition(b" ")
        major, _, minor = place.partition(b":")
        if kind == b"a" or (kind == b"c" and major in (b"*", _GPU_MAJOR) and minor == b"*"):
            return None
        if kind == b"c" and major == _GPU_MAJOR and b"r" in rights and (found := number(minor)) is not None:
            minors[found] = None
    return tuple(uuid for minor in minors if (uuid := find_gpu_by_minor(minor, devices)) is not None)


_GPU_MAJOR = b"195"
