"""Full-screen live views of a machine and of a cluster: what the GPUs do now, who uses them, and what is wrong."""

from gpulse.sources.frame_source import Source
from gpulse.terminal.top.app import TopApp
from gpulse.terminal.top.view_state import TopOptions

__all__ = ["TopApp", "TopOptions", "run_top"]


def run_top(source: Source, options: TopOptions) -> None:
    """Show the live view until the user quits; the caller closes the source afterwards.

    Raises:
        GpulseError: The selected GPUs are not on this machine.
    """
    TopApp(source, options).run_until_quit()
