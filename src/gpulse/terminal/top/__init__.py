"""The live view: what the GPUs do now, who uses them, and what is wrong, in a full terminal."""

from gpulse.sources.base import Source
from gpulse.terminal.top.app import TopApp
from gpulse.terminal.top.options import Options

__all__ = ["Options", "TopApp", "run_top"]


def run_top(source: Source, options: Options) -> None:
    """Show the live view until somebody quits; whoever made the source closes it afterwards.

    Raises:
        GpulseError: The choice of GPUs does not fit this machine.
    """
    refused = TopApp(source, options).run()
    if refused is not None:
        raise refused
