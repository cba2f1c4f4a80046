"""Directories in which a scheduler's prolog writes down which job has which GPU, as other exporters read them.

One file a GPU, by index (`0`, or `0.3` for GPU instance 3 of it), device file (`nvidia0`) or UUID; in it a line a job: its id,
and perhaps the number of its user after a blank.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from typing import NamedTuple

from gpulse.model.device import Device
from gpulse.model.health import Health
from gpulse.sources.procfs import unreadable
from gpulse.sources.slurm import by_file

_GPU = re.compile(r"\d{1,4}(?:\.\d{1,4})?|nvidia\d{1,4}|(?:GPU|MIG)-[0-9A-Za-z-]{1,100}")
_LINE = re.compile(rb"([0-9A-Za-z][\w.:+@\[\]-]{0,63})(?:[ \t]+(\d{1,10}))?")
_MOST_FILES = 1024
_MOST_BYTES = 1 << 16
_MOST_JOBS = 256


class Mapped(NamedTuple):
    """A job that a directory names."""

    uid: int | None
    gpus: tuple[str, ...]
    """The UUIDs of the GPUs that name it."""


def read_map(folder: str, devices: Sequence[Device], now: float) -> tuple[dict[str, Mapped], list[Health]]:
    """The jobs in a directory by id, with the GPUs that are here."""
    try:
        names = sorted(filter(_GPU.fullmatch, os.listdir(folder)))[:_MOST_FILES]
    except OSError as error:
        hint = "it is the directory that the scheduler's prolog writes: see contrib/slurm"
        return {}, [unreadable("jobs", folder, error, now)._replace(hint=hint)]
    found: dict[str, Mapped] = {}
    health: list[Health] = []
    for name in names:
        gpu = _device(name, devices)
        if gpu is None:
            continue
        try:
            data = _content(f"{folder}/{name}")
        except FileNotFoundError:
            continue
        except OSError as error:
            health.append(unreadable("jobs", f"{folder}/{name}", error, now))
            continue
        for job, uid in parse_jobs(data):
            known = found.get(job, Mapped(uid, ()))
            gpus = known.gpus if gpu in known.gpus else (*known.gpus, gpu)
            found[job] = Mapped(uid if known.uid is None else known.uid, gpus)
    return found, health


def parse_jobs(data: bytes) -> list[tuple[str, int | None]]:
    """The jobs in one file, each with its user's number when that is there; a line that is none is passed over."""
    jobs: list[tuple[str, int | None]] = []
    for line in data.split(b"\n")[:_MOST_JOBS]:
        if match := _LINE.fullmatch(line.strip()):
            word = match[1].decode()
            jobs.append(
                (f"slurm:{word}" if word.isdecimal() else word, None if match[2] is None else int(match[2]))
            )
    return jobs


def _device(name: str, devices: Sequence[Device]) -> str | None:
    if name.startswith("nvidia"):
        return by_file(int(name.removeprefix("nvidia")), devices)
    index, _, instance = name.partition(".")
    for device in devices:
        if not index.isdecimal():
            is_meant = device.uuid.lower() == name.lower()
        elif instance:
            is_meant = device.index == int(index) and device.gpu_instance == int(instance)
        else:
            is_meant = device.index == int(index) and device.parent_uuid is None
        if is_meant:
            return device.uuid
    return None


def _content(path: str) -> bytes:
    """What is in a plain file; neither a link nor a pipe leads or holds the reader somewhere."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)
