"""`--gpus 0,2-3,GPU-1f2e…`: which GPUs are meant."""

from __future__ import annotations

import os
from collections.abc import Callable

import click

from gpulse.model.frame import Frame, GpuReading
from gpulse.model.snapshot import select

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
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return lambda frame: frame
        words = _until_invalid(visible)
    else:
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words:
            raise click.UsageError("--gpus needs at least one GPU, such as --gpus 0,2 or --gpus GPU-1f2e")
    wanted = [item for word in words for item in _expanded(word)]

    def keep(frame: Frame) -> Frame:
        for item in wanted:
            if frame.gpus and not any(_matches(gpu, item) for gpu in frame.gpus):
                known = ", ".join(gpu.device.label for gpu in frame.gpus)
                raise click.UsageError(f"there is no GPU {item} here; there are: {known}")
        return select(frame, lambda gpu: any(_matches(gpu, item) for item in wanted))

    return keep


def _until_invalid(visible: str) -> list[str]:
    """As CUDA reads it: everything from the first entry that is no GPU on is ignored."""
    words = []
    for word in visible.split(","):
        if not word.strip() or word.strip().startswith("-"):
            break
        words.append(word.strip())
    return words


def _expanded(word: str) -> list[str]:
    first, dash, last = word.partition("-")
    if dash and first.isdigit() and last.isdigit():
        if int(last) < int(first) or int(last) - int(first) > 1024:
            raise click.UsageError(f"--gpus {word} is not a range")
        return [str(index) for index in range(int(first), int(last) + 1)]
    if word.replace(":", "").isdigit() or word.upper().startswith(("GPU-", "MIG-")):
        return [word]
    raise click.UsageError(f"--gpus takes indices and UUIDs; {word!r} is neither")


def _matches(gpu: GpuReading, item: str) -> bool:
    device = gpu.device
    if item.isdigit():
        return device.index == int(item)
    return device.label == item or device.uuid.lower().startswith(item.lower())
