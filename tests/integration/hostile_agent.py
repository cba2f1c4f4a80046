"""An agent of a simulated machine, two GPUs in all, whose every name is markup: `python -m tests.integration.hostile_agent`."""

from __future__ import annotations

from typing import Any

from gpulse.model.device import DevicePath
from gpulse.model.frame import Frame
from gpulse.model.process import ProcessReading
from gpulse.model.source_health import Health
from gpulse.sources import demo_machine


def markup(what: str) -> str:
    """A text that runs, and marks the window, wherever it is taken for HTML."""
    return f"<img src=x onerror=\"window.hacked='{what}'\">"


def hostile(frame: Frame) -> Frame:
    """The same machine with other names."""
    return frame._replace(
        node=frame.node._replace(
            driver=markup("driver"), cuda=markup("cuda"), kernel=markup("kernel"), cpu_model=markup("cpu")
        ),
        gpus=tuple(
            gpu._replace(
                device=gpu.device._replace(
                    name=markup("gpu"),
                    serial=markup("serial"),
                    adapter_paths=(DevicePath(markup("adapter"), "PIX"),),
                )
            )
            for gpu in frame.gpus
        ),
        disks=tuple(disk._replace(name=markup("disk"), model=markup("model")) for disk in frame.disks[:1]),
        filesystems=tuple(
            entry._replace(mount_point=markup("mount"), device=markup("device"))
            for entry in frame.filesystems[:1]
        ),
        network=tuple(link._replace(name=markup("link")) for link in frame.network[:1]),
        processes=tuple(_hostile(process) for process in frame.processes),
        health=(Health("disks", "unreadable", markup("health"), frame.time, hint=markup("hint")),),
    )


def _hostile(process: ProcessReading) -> ProcessReading:
    owner = process.identity.owner._replace(
        user=markup("user"), job=markup("job"), container=markup("container"), pod=markup("pod")
    )
    identity = process.identity._replace(
        name=markup("process"), command=(markup("command"), "--x=<b>"), owner=owner
    )
    return process._replace(identity=identity)


class HostileMachine(demo_machine.DemoMachine):
    """The demo machine under other names."""

    def __init__(self, started: float, **given: Any) -> None:
        super().__init__(started, **{**given, "gpus": 2})

    def sample(self, now: float) -> Frame:
        """The machine at one instant."""
        return hostile(super().sample(now))


if __name__ == "__main__":
    from gpulse.cli.entry import main

    demo_machine.DemoMachine = HostileMachine  # type: ignore[misc]
    main()
