"""The commented configuration that somebody begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpulse.harvest.settings import (
    DEFAULT_BACKOFF_SECONDS,
    DEFAULT_COOLDOWN_SECONDS,
    DEFAULT_GRACE_SECONDS,
    DEFAULT_IDLE_SECONDS,
    DEFAULT_INTERVAL_SECONDS,
    DEFAULT_LONGEST_BACKOFF_SECONDS,
    DEFAULT_PEOPLE_IDLE_SECONDS,
    DEFAULT_QUIET_SECONDS,
    Gpu,
)

Kind = Literal["toml", "ini"]

COMMAND = "my-program"
"""What stands for the program; everything else can be left as it is."""

_TOML = f"""\
# gpulse harvest: programs that run while GPUs are idle, and are gone when somebody needs them.
# Every key is in docs/harvest-config.md. A key that begins with # is shown with its default, or as an example.
{{gpus}}
[harvest]
# How often to look, beside what is seen at once.
#interval_seconds = {DEFAULT_INTERVAL_SECONDS:g}
# The most GPUs to take at a time, and when. Without them: all, always.
#max_gpus = {{count}}
#hours = ["mon-fri 20:00-07:00", "sat,sun"]

[idle]
# How long a GPU must have been free before a program starts, and how long it is left alone after somebody came.
#idle_seconds = {DEFAULT_IDLE_SECONDS:g}
#cooldown_seconds = {DEFAULT_COOLDOWN_SECONDS:g}
# How long somebody counts who has a GPU open, but no work on it.
#quiet_holder_seconds = {DEFAULT_QUIET_SECONDS:g}
# A GPU that is busier or fuller than this is not free, even if nobody can be seen on it.
#max_utilization_percent = 5
#max_memory = "1GiB"
# Programs that may use any GPU without counting.
ignore_programs = ["gpulse", "nvidia-smi", "nvitop", "nvtop", "gpustat"]
# People whose use never counts, and people whose use always does, whatever the program.
#ignore_users = []
#always_users = []

[people]
# Stop everything while somebody types at this machine, unless they are in the list.
enabled = true
whitelist = [{{user}}]
#idle_seconds = {DEFAULT_PEOPLE_IDLE_SECONDS:g}

# Which GPUs to watch, and programs that may use these without counting. Without any [[gpu]]: all GPUs.
#[[gpu]]
#gpus = "all"
#ignore_programs = []

[[program]]
name = "work"
# Split as a shell would, run without one; or a list: ["{COMMAND}", "--gpu", "{{{{gpu}}}}"].
command = "{COMMAND}"
# "all": one program when all GPUs are idle. "each": one for each GPU, and {{{{gpu}}}} in command, log and env is its index.
# 0, [0, 1], ["GPU-1f2e"]: one program when these are idle.
gpus = "each"
# Relative paths begin at the directory of this file.
#dir = "."
# Appended to. Without it: where harvest itself writes.
#log = "work-{{{{gpu}}}}.log"
#env = {{{{ OMP_NUM_THREADS = "4" }}}}
# As whom; only when harvest runs as root.
#user = "nobody"
# How much of the machine it may have: cpus is how many, or which ("0-7").
#nice = 19
#ionice = "idle"
#cpus = 1
# How it is asked to end, and how long it may take before everything it started is killed.
#stop_signal = "TERM"
#grace_seconds = {DEFAULT_GRACE_SECONDS:g}
# Start it again when it ends: always, on-failure, never; after a failure wait, longer each time.
#restart = "always"
#backoff_seconds = {DEFAULT_BACKOFF_SECONDS:g}
#max_backoff_seconds = {DEFAULT_LONGEST_BACKOFF_SECONDS:g}
#hours = "22:00-07:00"
"""

_INI = f"""\
; gpulse harvest, in gpu_mon's form. Every key is in docs/harvest-config.md.
{{gpus}}
[defaults]
; how often to look, beside what is seen at once
interval_seconds={DEFAULT_INTERVAL_SECONDS:g}
; how long to leave a GPU alone after somebody used it; 0 starts the program again as soon as it is idle
;cooldown_seconds=60

; GPUs to watch; there may be several sections whose names begin with gpu-
[gpu-all]
; indices with commas between them, or ALL
gpus=ALL
; programs that may use these GPUs without counting
ignore_programs=nvidia-smi

; a program that runs while its GPUs are idle; there may be several sections whose names begin with process-
[process-work]
; where it runs
dir=/
; split as a shell would, run without one
cmd={COMMAND}
; indices, all of which must be idle, or ALL
gpus=ALL
; appended to; without it the output goes where harvest itself writes
;log=/dev/null

; stop everything while somebody types at this machine, unless they are in the list
[tty]
enabled=True
whitelist={{user}}
; how long somebody must have been inactive to be ignored
idle_seconds={DEFAULT_PEOPLE_IDLE_SECONDS:g}
"""


def template(kind: Kind, gpus: Sequence[Gpu], user: str = "") -> str:
    """A configuration for this machine that works once its command is somebody's own.

    Args:
        kind: Its form.
        gpus: Those of this machine.
        user: Who writes it, and does not stop their own programs by typing; nobody when empty.
    """
    mark = "#" if kind == "toml" else ";"
    here = f"{mark} GPUs of this machine: {_listed(gpus)}.\n"
    if kind == "toml":
        return _TOML.format(gpus=here, count=max(1, len(gpus)), user=f'"{user}"' if user else "")
    return _INI.format(gpus=here, count=max(1, len(gpus)), user=user)


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.index} {_plain(gpu.name)}" for gpu in gpus) or "none was found"


def _plain(name: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in name)
