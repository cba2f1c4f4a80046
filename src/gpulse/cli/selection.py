"""`--gpus 0,2-3,GPU-1f2e…`: which GPUs are meant."""

from __future__ import annotations

import os
from collections.abc import Callable

import click

from gpulse.errors import CollectionError, UsageError
from gpulse.model.device import Device, ranges, visible
from gpulse.model.frame import Frame
from gpulse.model.health import Health
from gpulse.model.snapshot import select
from gpulse.terminal import format as f

Select = Callable[[Frame], Frame]


def parse(text: str | None) -> Select:
    """The function that keeps the wanted GPUs of a frame, and what is said about them.

    Takes indices, ranges, UUIDs or the beginning of one, `3:1` for a MIG instance, and `visible` for
    what CUDA_VISIBLE_DEVICES lets programs see. The first frame with GPUs decides which ones are meant;
    from then on it is these, whatever index they get and whether they are there or not.

    Raises:
        click.UsageError: The text names no GPU.
        UsageError: Later, when the first frame has no such GPU.
    """
    if text is None:
        return lambda frame: frame
    if text.strip().lower() == "visible":
        return _visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise click.UsageError("--gpus needs at least one GPU, such as --gpus 0,2 or --gpus GPU-1f2e")
    wanted = [item for word in words for item in _expanded(word)]

    def named(frame: Frame) -> list[str]:
        for item in wanted:
            if not _is_here(item, frame):
                known = ranges(gpu.device.label for gpu in frame.gpus)
                raise UsageError(
                    f"there is no GPU {item} here; there are: {known}", hint="gpulse, which shows all of them"
                )
        return wanted

    return _Choice(named)


def _visible(variable: str | None) -> Select:
    """As CUDA reads it: everything from the first entry on that is no GPU here is ignored."""
    if variable is None:
        return lambda frame: frame

    def named(frame: Frame) -> list[str]:
        wanted = visible((gpu.device for gpu in frame.gpus), variable)
        if not wanted:
            raise CollectionError(
                f"CUDA_VISIBLE_DEVICES={f.plain(variable)} hides every GPU from programs",
                hint="unset it, or name GPUs: --gpus 0,2",
            )
        return wanted

    return _Choice(named)


class _Choice:
    """The GPUs that were meant when the first frame came, for every frame after it."""

    def __init__(self, named: Callable[[Frame], list[str]]) -> None:
        self._named = named
        """What was asked for, checked against a frame."""
        self._uuids: set[str] | None = None
        self._nameless: set[int] = set()
        """Indices of wanted GPUs that have not yet said who they are."""

    def __call__(self, frame: Frame) -> Frame:
        if self._uuids is None:
            if not frame.gpus:
                return frame
            items = self._named(frame)
            meant = [gpu.device for gpu in frame.gpus if any(gpu.device.is_meant_by(item) for item in items)]
            self._uuids = {device.uuid for device in meant}
            self._nameless = {device.index for device in meant if _is_nameless(device)}
        self._meet(frame, self._uuids)
        wanted = self._uuids
        kept = select(frame, lambda gpu: gpu.device.uuid in wanted)
        if kept is frame:
            return frame
        others = _subjects(frame) - _subjects(kept)
        health = tuple(entry for entry in kept.health if entry.subject not in others)
        if not kept.gpus:
            nothing = Health("nvml", "gpu_lost", "none of the chosen GPUs is here any more", frame.time)
            health = (nothing, *health)
        return kept._replace(health=health)

    def _meet(self, frame: Frame, uuids: set[str]) -> None:
        """Take a wanted GPU that was silent at first under the name it has by now."""
        for device in (gpu.device for gpu in frame.gpus):
            if device.index in self._nameless and not _is_nameless(device):
                self._nameless.discard(device.index)
                uuids.add(device.uuid)


def _is_nameless(device: Device) -> bool:
    """A GPU that does not answer has a row, but no UUID of its own yet."""
    return not device.uuid.upper().startswith(("GPU-", "MIG-"))


def _is_here(item: str, frame: Frame) -> bool:
    return any(gpu.device.is_meant_by(item) for gpu in frame.gpus)


def _subjects(frame: Frame) -> set[str | None]:
    """How health entries name the GPUs of a frame."""
    return {name for gpu in frame.gpus for name in (f"gpu {gpu.device.label}", gpu.device.uuid)}


def _expanded(word: str) -> list[str]:
    first, dash, last = word.partition("-")
    if dash and first.isdecimal() and last.isdecimal():
        if int(last) < int(first) or int(last) - int(first) > 1024:
            raise click.UsageError(f"--gpus {word} is not a range")
        return [str(index) for index in range(int(first), int(last) + 1)]
    if word.replace(":", "", 1).isdecimal() or word.upper().startswith(("GPU-", "MIG-")):
        return [word]
    raise click.UsageError(f"--gpus takes indices and UUIDs; {word!r} is neither")
