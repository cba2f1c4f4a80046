"""A directory with programs, and configurations loaded in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulse.harvest.config.config_file import load_settings
from gpulse.harvest.settings import ConfigError, HarvestableGpu, HarvestSettings

GPUS = tuple(
    HarvestableGpu(index, index, uuid, "NVIDIA H200")
    for index, uuid in enumerate(("GPU-1f2e-00", "GPU-1f3e-01", "GPU-aaaa-02", "GPU-bbbb-03"))
)
INI = "[process-all]\ncmd=worker\ngpus=ALL\n"
TOML = '[[program]]\nname = "fold"\ncommand = "worker"\ngpus = "all"\n'


class Lab:
    """Configurations beside a `bin` with the programs `worker` and `my-program`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bin = directory / "bin"
        self.bin.mkdir()
        for name in ("worker", "my-program", "miner-run"):
            self.program(self.bin / name)

    def program(self, path: Path, mode: int = 0o755) -> Path:
        """Put a program somewhere."""
        path.write_text("#!/bin/sh\n")
        path.chmod(mode)
        return path

    def write(self, name: str, content: str | bytes) -> Path:
        """Put a file somewhere that nobody else may write."""
        path = self.directory / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(0o644)
        return path

    def load(self, name: str, content: str | bytes, *, root: bool = False, count: int = 2) -> HarvestSettings:
        """The settings of a configuration on a machine with so many GPUs."""
        return self.load_file(self.write(name, content), root=root, count=count)

    def load_file(self, path: Path, *, root: bool = False, count: int = 2) -> HarvestSettings:
        """The settings of a file that is there."""
        return load_settings(
            str(path),
            GPUS[:count],
            root=root,
            cpus=range(8),
            search=f"{self.bin}:/nonexistent",
            home=str(self.directory),
        )

    def ini(self, content: str, *, count: int = 2) -> HarvestSettings:
        """The settings of a file of gpu_mon's."""
        return self.load("gpu_mon.conf", content, count=count)

    def toml(self, content: str, *, root: bool = False, count: int = 2) -> HarvestSettings:
        """The settings of a TOML file."""
        return self.load("harvest.toml", content, root=root, count=count)

    def refused(self, name: str, content: str | bytes, *, root: bool = False, count: int = 2) -> str:
        """Where and why a configuration is refused, as `LINE: reason`; the file is checked and left out."""
        with pytest.raises(ConfigError) as caught:
            self.load(name, content, root=root, count=count)
        assert caught.value.hint is None or caught.value.hint
        place = str(self.directory / name)
        assert caught.value.message.startswith(f"{place}:")
        return caught.value.message.removeprefix(f"{place}:")

    def hint(self, name: str, content: str | bytes) -> str:
        """What is to be tried instead."""
        with pytest.raises(ConfigError) as caught:
            self.load(name, content)
        return caught.value.hint or ""
