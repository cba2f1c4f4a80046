"""The option `--gpus 0,2-3,GPU-1f2e`: keep only the selected GPUs of each frame."""

from __future__ import annotations

import os
from collections.abc import Callable

import click

from gpulse.errors import CollectionError, UsageError
from gpulse.model.device import Device, format_ranges, visible_device_words
from gpulse.model.frame import Frame
from gpulse.model.snapshot import select_gpus
from gpulse.model.source_health import Health
from gpulse.terminal import value_format as f

FrameFilter = Callable[[Frame], Frame]


def parse_gpus(text: str | None) -> FrameFilter:
    """Return the function that keeps only the selected GPUs of a frame, and their health entries.

    The text has indices, ranges, UUIDs or the beginning of one, `3:1` for a MIG instance, or `visible` for the GPUs in
    CUDA_VISIBLE_DEVICES. The first frame with GPUs decides which ones are meant; these stay selected even if they get
    another index or disappear.

    Raises:
        click.UsageError: The text names no GPU.
        UsageError: Later, when the first frame has no such GPU.
    """
    if text is None:
        return lambda frame: frame
    if text.strip().lower() == "visible":
        return _visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise click.UsageError("--gpus needs at least one GPU, such as --gpus 0,2 or --gpus GPU-1f2e")
    wanted = [item for word in words for item in _expand_range(word)]

    def named(frame: Frame) -> list[str]:
        for item in wanted:
            if not _is_here(item, frame):
                known = format_ranges(gpu.device.label for gpu in frame.gpus)
                raise UsageError(
                    f"there is no GPU {item}; available: {known}", hint="show all GPUs with: gpulse"
                )
        return wanted

    return _GpuFilter(named)


def _visible_devices(variable: str | None) -> FrameFilter:
    """Select GPUs as CUDA does: the first entry that is not a GPU here ends the list."""
    if variable is None:
        return lambda frame: frame

    def named(frame: Frame) -> list[str]:
        wanted = visible_device_words((gpu.device for gpu in frame.gpus), variable)
        if not wanted:
            raise CollectionError(
                f"CUDA_VISIBLE_DEVICES={f.plain(variable)} hides every GPU from programs",
                hint="unset CUDA_VISIBLE_DEVICES, or name GPUs: --gpus 0,2",
            )
        return wanted

    return _GpuFilter(named)


class _GpuFilter:
    """Keeps the GPUs that were selected in the first frame."""

    def __init__(self, named: Callable[[Frame], list[str]]) -> None:
        self._named = named
        """Returns the selected names, checked against a frame."""
        self._uuids: set[str] | None = None
        self._nameless: set[int] = set()
        """Indices of selected GPUs whose UUID is not known yet."""

    def __call__(self, frame: Frame) -> Frame:
        if self._uuids is None:
            if not frame.gpus:
                return frame
            items = self._named(frame)
            meant = [gpu.device for gpu in frame.gpus if any(gpu.device.matches(item) for item in items)]
            self._uuids = {device.uuid for device in meant}
            self._nameless = {device.index for device in meant if _is_nameless(device)}
        self._add_late_uuids(frame, self._uuids)
        wanted = self._uuids
        kept = select_gpus(frame, lambda gpu: gpu.device.uuid in wanted)
        if kept is frame:
            return frame
        others = _subjects(frame) - _subjects(kept)
        health = tuple(entry for entry in kept.health if entry.subject not in others)
        if not kept.gpus:
            nothing = Health(
                "nvml", "gpu_lost", "none of the selected GPUs is available any longer", frame.time
            )
            health = (nothing, *health)
        return kept._replace(health=health)

    def _add_late_uuids(self, frame: Frame, uuids: set[str]) -> None:
        """Add the UUIDs of selected GPUs that did not answer at first."""
        for device in (gpu.device for gpu in frame.gpus):
            if device.index in self._nameless and not _is_nameless(device):
                self._nameless.discard(device.index)
                uuids.add(device.uuid)


def _is_nameless(device: Device) -> bool:
    """Return whether a GPU has no UUID of its own yet, because it does not answer."""
    return not device.uuid.upper().startswith(("GPU-", "MIG-"))


def _is_here(item: str, frame: Frame) -> bool:
    return any(gpu.device.matches(item) for gpu in frame.gpus)


def _subjects(frame: Frame) -> set[str | None]:
    """Return the names of a frame's GPUs in health entries."""
    return {name for gpu in frame.gpus for name in (f"gpu {gpu.device.label}", gpu.device.uuid)}


def _expand_range(word: str) -> list[str]:
    first, dash, last = word.partition("-")
    if dash and first.isdecimal() and last.isdecimal():
        if int(last) < int(first) or int(last) - int(first) > 1024:
            raise click.UsageError(f"--gpus {word} is not a valid range")
        return [str(index) for index in range(int(first), int(last) + 1)]
    if word.replace(":", "", 1).isdecimal() or word.upper().startswith(("GPU-", "MIG-")):
        return [word]
    raise click.UsageError(f"--gpus takes indices and UUIDs; {word!r} is neither")
