"""Configuration files: read one and check it against this machine, and write a template with comments."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Collection, Sequence
from typing import Literal

from gpulse.harvest.config import gpu_mon_ini, toml
from gpulse.harvest.config.machine_lookup import Machine
from gpulse.harvest.config.validation import ConfigFaults
from gpulse.harvest.settings import (
    DEFAULT_BACKOFF_SECONDS,
    DEFAULT_COOLDOWN_SECONDS,
    DEFAULT_GRACE_SECONDS,
    DEFAULT_IDLE_SECONDS,
    DEFAULT_INTERVAL_SECONDS,
    DEFAULT_MAX_BACKOFF_SECONDS,
    DEFAULT_PEOPLE_IDLE_SECONDS,
    DEFAULT_QUIET_SECONDS,
    ConfigError,
    HarvestableGpu,
    HarvestSettings,
)
from gpulse.harvest.state_directory import check_trust
from gpulse.model.safe_text import printable

_MAX_CONFIG_BYTES = 1 << 20


def load_settings(
    path: str,
    gpus: Sequence[HarvestableGpu],
    *,
    root: bool,
    cpus: Collection[int],
    search: str = os.defpath,
    home: str | None = None,
) -> HarvestSettings:
    """Return the settings of a configuration, checked completely.

    Args:
        path: A name that ends in `.toml` means TOML, any other gpu_mon's INI.
        gpus: GPUs of this machine.
        root: Programs run as root, or as the user that the configuration names.
        cpus: CPUs that we may use.
        search: Search path for programs, in the format of PATH.
        home: The directory of `~`; None: the user's home directory.

    Raises:
        ConfigError: The configuration is invalid; the message has the file, the line and the reason.
    """
    text = read_text(path, root=root)
    faults = ConfigFaults(path)
    if not gpus:
        raise ConfigError(
            f"{path}: this machine has no GPU to harvest", hint="run `gpulse harvest doctor` to find out why"
        )
    is_toml = path.lower().endswith(".toml")
    try:
        whole = os.path.abspath(path)
        base = os.path.dirname(whole) if is_toml else os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"{path}: the current directory no longer exists", hint="cd to another directory"
        ) from error
    machine = Machine(gpus, cpus, root, search, home, base)
    read = toml.read_settings if is_toml else gpu_mon_ini.read_settings
    made = read(text, whole, machine, faults)
    faults.refuse()
    return made


def read_text(path: str, *, root: bool) -> str:
    """Return the text of a configuration file.

    Args:
        path: Its file; symbolic links are followed.
        root: Its programs run as root, so only root or the caller may be able to change it.

    Raises:
        ConfigError: It cannot be read, is not text, or other users can change it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file", hint=_template_hint(path)) from error
    except (OSError, ValueError) as error:
        raise _unreadable_error(path, error) from error
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{path}: is a directory", hint="specify a file in this directory")
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: not a regular file", hint="copy the configuration to a regular file")
        if root:
            check_trust(path, status)
        data = _read_bytes(descriptor)
    except OSError as error:
        raise _unreadable_error(path, error) from error
    finally:
        os.close(descriptor)
    return _decode(data, path)


def _template_hint(path: str) -> str:
    """Return the command that creates this file, in the format of its extension."""
    form = "" if path.lower().endswith(".toml") else "--format ini "
    return f"create one from a template with: gpulse harvest init {form}{shlex.quote(path)}"


def _unreadable_error(path: str, error: OSError | ValueError) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(f"{path}: cannot be read: {why}", hint="check the permissions of the file")


def _read_bytes(descriptor: int) -> bytes:
    data = b""
    while len(data) <= _MAX_CONFIG_BYTES and (part := os.read(descriptor, _MAX_CONFIG_BYTES)):
        data += part
    return data


def _decode(data: bytes, path: str) -> str:
    if len(data) > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: larger than 1 MiB", hint="check that the file is a harvest configuration")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text", hint="save the file as UTF-8") from error


TemplateFormat = Literal["toml", "ini"]

PLACEHOLDER_COMMAND = "my-program"
"""What stands for the program; everything else can be left as it is."""

_TOML_TEMPLATE = f"""\
# gpulse harvest: run programs while GPUs are idle, and stop them when somebody needs a GPU.
# All keys are described in docs/reference/harvest-configuration.md. Keys that are commented out show their default or an example.
{{gpus}}
[harvest]
# Seconds between checks; most use by others is noticed at once.
#interval_seconds = {DEFAULT_INTERVAL_SECONDS:g}
# Maximum number of GPUs to harvest at a time, and the hours in which harvesting is allowed. Default: all GPUs, at any time.
#max_gpus = {{count}}
#hours = ["mon-fri 20:00-07:00", "sat,sun"]

[idle]
# Seconds that a GPU must be idle before a program starts, and seconds to wait after somebody used it.
#idle_seconds = {DEFAULT_IDLE_SECONDS:g}
#cooldown_seconds = {DEFAULT_COOLDOWN_SECONDS:g}
# A process that has a GPU open but does no work on it counts as a user for this many seconds.
#quiet_holder_seconds = {DEFAULT_QUIET_SECONDS:g}
# A GPU above these limits is not idle, even if no process can be seen on it.
#max_utilization_percent = 5
#max_memory = "1GiB"
# Programs that do not count as users of a GPU.
ignore_programs = ["gpulse", "nvidia-smi", "nvitop", "nvtop", "gpustat"]
# Users whose processes never count, and users whose processes always count, whatever the program.
#ignore_users = []
#always_users = []

[people]
# Stop all programs while anybody who is not in the whitelist works at this machine.
enabled = true
whitelist = [{{user}}]
#idle_seconds = {DEFAULT_PEOPLE_IDLE_SECONDS:g}

# GPUs to watch, and programs that do not count as users of them. Default: all GPUs.
#[[gpu]]
#gpus = "all"
#ignore_programs = []

[[program]]
name = "work"
# Split like a shell command line but run without a shell; or a list: ["{PLACEHOLDER_COMMAND}", "--gpu", "{{{{gpu}}}}"].
command = "{PLACEHOLDER_COMMAND}"
# "all": one program when all GPUs are idle. "each": one per GPU; {{{{gpu}}}} in command, log and env is its index.
# 0, [0, 1], ["GPU-1f2e"]: one program when these GPUs are idle.
gpus = "each"
# Working directory. Relative paths start at the directory of this file.
#dir = "."
# File to append the output to. Default: harvest's own output.
#log = "work-{{{{gpu}}}}.log"
#env = {{{{ OMP_NUM_THREADS = "4" }}}}
# User to run as; only when harvest runs as root.
#user = "nobody"
# CPU and disk priority, and the CPUs to use: a number of CPUs, or a list ("0-7").
#nice = 19
#ionice = "idle"
#cpus = 1
# Signal that asks the program to stop, and seconds until the program and everything that it started are killed.
#stop_signal = "TERM"
#grace_seconds = {DEFAULT_GRACE_SECONDS:g}
# Whether to restart the program when it exits: always, on-failure or never. After a failure, the wait doubles up to the maximum.
#restart = "always"
#backoff_seconds = {DEFAULT_BACKOFF_SECONDS:g}
#max_backoff_seconds = {DEFAULT_MAX_BACKOFF_SECONDS:g}
#hours = "22:00-07:00"
"""

_INI_TEMPLATE = f"""\
; gpulse harvest, in gpu_mon's format. All keys are described in docs/reference/harvest-configuration.md.
{{gpus}}
[defaults]
; seconds between checks; most use by others is noticed at once
interval_seconds={DEFAULT_INTERVAL_SECONDS:g}
; seconds to wait after somebody used a GPU; 0 restarts the program as soon as the GPU is idle
;cooldown_seconds=60

; GPUs to watch; any number of sections whose names start with gpu-
[gpu-all]
; comma-separated indices, or ALL
gpus=ALL
; programs that do not count as users of these GPUs
ignore_programs=nvidia-smi

; a program that runs while its GPUs are idle; any number of sections whose names start with process-
[process-work]
; working directory
dir=/
; split like a shell command line but run without a shell
cmd={PLACEHOLDER_COMMAND}
; indices of the GPUs that must be idle, or ALL
gpus=ALL
; file to append the output to; default: harvest's own output
;log=/dev/null

; stop all programs while anybody who is not in the whitelist works at this machine
[tty]
enabled=True
whitelist={{user}}
; seconds of inactivity after which a user no longer counts as present
idle_seconds={DEFAULT_PEOPLE_IDLE_SECONDS:g}
"""


def build_template(kind: TemplateFormat, gpus: Sequence[HarvestableGpu], user: str = "") -> str:
    """Return a configuration for this machine; only its command has to be replaced.

    Args:
        kind: Its form.
        gpus: GPUs of this machine.
        user: User for the whitelist, so that their own typing does not stop their programs; empty: none.
    """
    mark = "#" if kind == "toml" else ";"
    here = f"{mark} GPUs of this machine: {_list_gpus(gpus)}.\n"
    if kind == "toml":
        return _TOML_TEMPLATE.format(gpus=here, count=max(1, len(gpus)), user=f'"{user}"' if user else "")
    return _INI_TEMPLATE.format(gpus=here, count=max(1, len(gpus)), user=user)


def _list_gpus(gpus: Sequence[HarvestableGpu]) -> str:
    return ", ".join(f"{gpu.index} {printable(gpu.name)}" for gpu in gpus) or "none found"
