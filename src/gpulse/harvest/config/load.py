"""From a file to settings that can be carried out on this machine, or to the reason why not."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from gpulse.harvest.config import file, gpu_mon, toml
from gpulse.harvest.config.check import Machine
from gpulse.harvest.config.faults import Faults
from gpulse.harvest.settings import ConfigError, Gpu, Settings


def load(
    path: str,
    gpus: Sequence[Gpu],
    *,
    root: bool,
    cpus: Collection[int],
    search: str = os.defpath,
    home: str | None = None,
) -> Settings:
    """The settings of a configuration, all of it checked.

    Args:
        path: A name that ends in `.toml` means TOML, any other gpu_mon's INI.
        gpus: Those of this machine.
        root: Programs run as root, or as whom the configuration names.
        cpus: Those that we may use.
        search: Where programs are looked for, as PATH has it.
        home: What `~` is; None: as the list of users says.

    Raises:
        ConfigError: It is refused: the file, the line and the reason.
    """
    text = file.read(path, root=root)
    faults = Faults(path)
    if not gpus:
        raise ConfigError(f"{path}: this machine has no GPU to harvest", hint="gpulse harvest doctor")
    is_toml = path.lower().endswith(".toml")
    try:
        whole = os.path.abspath(path)
        base = os.path.dirname(whole) if is_toml else os.getcwd()
    except OSError as error:
        raise ConfigError(f"{path}: the current directory is gone", hint="cd to another one") from error
    machine = Machine(gpus, cpus, root, search, home, base)
    read = toml.settings if is_toml else gpu_mon.settings
    made = read(text, whole, machine, faults)
    faults.refuse()
    return made
