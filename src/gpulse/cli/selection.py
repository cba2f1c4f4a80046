"""`--gpus 0,2-3,GPU-1f2e…`: which GPUs are meant."""

from __future__ import annotations

import os
from collections.abc import Callable

import click

from gpulse.errors import CollectionError
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.snapshot import select
from gpulse.terminal import format as f

Select = Callable[[Frame], Frame]


def parse(text: str | None) -> Select:
    """The function that keeps the wanted GPUs of a frame.

    Takes indices, ranges, UUIDs or the beginning of one, `3:1` for a MIG instance, and `visible` for
    what CUDA_VISIBLE_DEVICES lets programs see.

    Raises:
        click.UsageError: The text, or later the frame, has no such GPU.
    """
    if text is None:
        return lambda frame: frame
    if text.strip().lower() == "visible":
        return _visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise click.UsageError("--gpus needs at least one GPU, such as --gpus 0,2 or --gpus GPU-1f2e")
    wanted = [item for word in words for item in _expanded(word)]

    def keep(frame: Frame) -> Frame:
        for item in wanted:
            if frame.gpus and not _is_here(item, frame):
                known = f.ranges(gpu.device.label for gpu in frame.gpus)
                raise click.UsageError(f"there is no GPU {item} here; there are: {known}")
        return _kept(frame, wanted)

    return keep


def _visible(variable: str | None) -> Select:
    """As CUDA reads it: everything from the first entry on that is no GPU here is ignored."""
    if variable is None:
        return lambda frame: frame

    def keep(frame: Frame) -> Frame:
        wanted: list[str] = []
        for word in variable.split(","):
            if not _is_here(word.strip(), frame):
                break
            wanted.append(word.strip())
        if not wanted and frame.gpus:
            raise CollectionError(
                f"CUDA_VISIBLE_DEVICES={f.plain(variable)} hides every GPU from programs",
                hint="unset it, or name GPUs: --gpus 0,2",
            )
        return _kept(frame, wanted)

    return keep


def _is_here(item: str, frame: Frame) -> bool:
    return any(_matches(gpu, item) for gpu in frame.gpus)


def _kept(frame: Frame, wanted: list[str]) -> Frame:
    return select(frame, lambda gpu: any(_matches(gpu, item) for item in wanted))


def _expanded(word: str) -> list[str]:
    first, dash, last = word.partition("-")
    if dash and first.isdecimal() and last.isdecimal():
        if int(last) < int(first) or int(last) - int(first) > 1024:
            raise click.UsageError(f"--gpus {word} is not a range")
        return [str(index) for index in range(int(first), int(last) + 1)]
    if word.replace(":", "", 1).isdecimal() or word.upper().startswith(("GPU-", "MIG-")):
        return [word]
    raise click.UsageError(f"--gpus takes indices and UUIDs; {word!r} is neither")


def _matches(gpu: GpuReading, item: str) -> bool:
    device = gpu.device
    if item.isdecimal():
        return device.index == int(item)
    if item.upper().startswith(("GPU-", "MIG-")):
        return device.uuid.lower().startswith(item.lower())
    return device.label == item
