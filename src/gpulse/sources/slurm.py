"""How Slurm names its control groups, and what it writes into a job's environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpulse.model.device import Device
from gpulse.sources.procfs import number, text

_CROCKFORD = frozenset("0123456789ABCDEFGHJKMNPQRSTVWXYZ")
_SLUID_LENGTH = 14
_LONGEST_NUMBER = 20
_STEPS = frozenset({"batch", "extern", "interactive"})
_SCOPE = "slurmstepd.scope"
_TITLE = b"slurmstepd: ["
_MOST_TEXT = 256
_MOST_GPUS = 1024


class Told(NamedTuple):
    """What the environment of a process says of the job it belongs to."""

    job: str
    """Such as `slurm:4711`."""
    uid: int | None = None
    user: str | None = None
    name: str | None = None
    partition: str | None = None
    account: str | None = None
    gpus: str | None = None
    """The job's on this node, as Slurm numbers them."""
    step_gpus: str | None = None
    """Those of one step."""
    visible: str | None = None
    """Those that programs are to use, which are numbered anew where the others are hidden."""
    array: str | None = None
    """The array and the task of it that the job is, such as `4711_3`."""


def slurm_job(paths: Iterable[str]) -> str | None:
    """The Slurm job whose control group this is, such as `slurm:4711`, or `slurm:s5K1KKYAYG5D00` by its SLUID."""
    for path in paths:
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for place, part in enumerate(parts):
            job = job_of_folder(part)
            if job is not None and _is_slurms(parts[:place], parts[place + 1 : place + 2]):
                return job
    return None


def _is_slurms(above: Sequence[str], below: Sequence[str]) -> bool:
    """Whether a job's directory between these is where Slurm has its own, and where only root can make one.

    Every user with a systemd of his own may make directories of any name in his part of the tree.
    """
    if not above or (len(above) == 1 and user_of_folder(above[0]) is not None):
        return any(map(_is_step, below))  # a cgroup namespace: the path begins below Slurm's own directory
    if above[-1].endswith(_SCOPE):
        return all(map(is_slice_of_root, above[:-1]))
    return len(above) == 2 and above[0].startswith("slurm") and user_of_folder(above[1]) is not None


def is_slice_of_root(name: str) -> bool:
    """True for a directory of control groups in which systemd has no user's."""
    return name.endswith(".slice") and name != "user.slice"


def _is_step(name: str) -> bool:
    return name.startswith("step_") and (name[5:] in _STEPS or _is_number(name[5:]))


def is_sluid(job: str) -> bool:
    """True for a job that is known by its SLUID alone."""
    return not job.removeprefix("slurm:").isdecimal()


def job_of_folder(name: str) -> str | None:
    """The job of which this is the directory's name among Slurm's control groups.

    Newer versions name it by the job's SLUID, which does not hold its number.
    """
    if name.startswith("job_") and _is_number(name[4:]):
        return f"slurm:{name[4:]}"
    if len(name) == _SLUID_LENGTH and name[0] == "s" and _CROCKFORD.issuperset(name[1:]):
        return f"slurm:{name}"
    return None


def user_of_folder(name: str) -> int | None:
    """The user whose jobs are in a directory of version 1."""
    return int(name[4:]) if name.startswith("uid_") and _is_number(name[4:]) else None


def job_of_title(command: bytes) -> str | None:
    """The job of a step's daemon, which has it in its command line."""
    if not command.startswith(_TITLE):
        return None
    word = text(command[len(_TITLE) : len(_TITLE) + _LONGEST_NUMBER + 1]).partition(".")[0].partition("+")[0]
    return f"slurm:{word}" if _is_number(word) else None


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= _LONGEST_NUMBER


def slurm_job_of_environ(environ: bytes | None) -> str | None:
    """The Slurm job that a process's environment names."""
    told = parse_environ(environ) if environ else None
    return None if told is None else told.job


def parse_environ(environ: bytes) -> Told | None:
    """What an environment says of a Slurm job, None when it names none."""
    if b"SLURM_JOB" not in environ:
        return None
    words: dict[bytes, bytes] = {}
    for entry in environ.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if equals and (name.startswith(b"SLURM_") or name in _DEVICES):
            words.setdefault(name, value)
    job = next(
        (words[name] for name in (b"SLURM_JOB_ID", b"SLURM_JOBID") if words.get(name, b"").isdigit()), None
    )
    if job is None or len(job) > _LONGEST_NUMBER:
        return None
    return Told(
        job=f"slurm:{job.decode()}",
        uid=number(words.get(b"SLURM_JOB_UID")),
        user=_word(words, b"SLURM_JOB_USER"),
        name=_word(words, b"SLURM_JOB_NAME"),
        partition=_word(words, b"SLURM_JOB_PARTITION"),
        account=_word(words, b"SLURM_JOB_ACCOUNT"),
        gpus=_word(words, b"SLURM_JOB_GPUS", _MOST_GPUS * 8),
        step_gpus=_word(words, b"SLURM_STEP_GPUS", _MOST_GPUS * 8),
        array=_array(words),
        visible=next((found for name in _DEVICES if (found := _word(words, name, _MOST_GPUS * 48))), None),
    )


_DEVICES = (b"CUDA_VISIBLE_DEVICES", b"GPU_DEVICE_ORDINAL")


def _array(words: Mapping[bytes, bytes]) -> str | None:
    array, task = words.get(b"SLURM_ARRAY_JOB_ID", b""), words.get(b"SLURM_ARRAY_TASK_ID", b"")
    is_one = array.isdigit() and task.isdigit() and max(len(array), len(task)) <= _LONGEST_NUMBER
    return f"{array.decode()}_{task.decode()}" if is_one else None


def _word(words: Mapping[bytes, bytes], name: bytes, most: int = _MOST_TEXT) -> str | None:
    return text(words[name][:most]) if words.get(name) else None


def allocated(told: Iterable[Told], devices: Sequence[Device]) -> tuple[str, ...]:
    """The UUIDs of the GPUs that environments of one job name together, none when they do not say.

    Slurm's own numbers are those of the device files, but for MIG instances, which have none of their own. Numbers in
    CUDA_VISIBLE_DEVICES begin anew in each job where Slurm hides the other GPUs, and are not believed; UUIDs are.
    """
    words = list(told)
    by_job = dict.fromkeys(uuid for one in words for uuid in named(one.gpus, devices))
    by_step = dict.fromkeys(uuid for one in words for uuid in named(one.step_gpus, devices))
    by_uuid = dict.fromkeys(uuid for one in words for uuid in named(one.visible, devices, numbers=False))
    parts = {device.uuid for device in devices if device.parent_uuid is not None}
    return tuple(by_uuid if parts.intersection(by_uuid) else by_job or by_step or by_uuid)


def named(words: str | None, devices: Sequence[Device], *, numbers: bool = True) -> list[str]:
    """The UUIDs of the GPUs in a list such as `0-3,6` or `GPU-…,MIG-…`; what is none of these devices is left out."""
    found: list[str] = []
    for word in map(str.strip, (words or "").split(",")[:_MOST_GPUS]):
        if word[:4].upper() in ("GPU-", "MIG-"):
            found += [device.uuid for device in devices if device.uuid.lower() == word.lower()]
        elif numbers:
            found += [uuid for count in _range(word) if (uuid := by_file(count, devices)) is not None]
    return found


def by_file(count: int, devices: Iterable[Device]) -> str | None:
    """The UUID of the GPU whose device file has this number; its index where files are not known."""
    for device in devices:
        own = device.index if device.minor_number is None else device.minor_number
        if device.parent_uuid is None and own == count:
            return device.uuid
    return None


def _range(word: str) -> range:
    first, dash, last = word.partition("-")
    if not first.isdecimal() or len(first) > 6 or (dash and (not last.isdecimal() or len(last) > 6)):
        return range(0)
    return (
        range(int(first), min(int(last), int(first) + _MOST_GPUS) + 1)
        if dash
        else range(int(first), int(first) + 1)
    )


def allowed(device_list: bytes, devices: Sequence[Device]) -> tuple[str, ...] | None:
    """The UUIDs of the GPUs that a control group's `devices.list` lets in, None where it lets in everything.

    The kernel lists what is allowed only where everything else is forbidden.
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
    return tuple(uuid for minor in minors if (uuid := by_file(minor, devices)) is not None)


_GPU_MAJOR = b"195"
