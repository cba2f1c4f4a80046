"""The sampling loop of an agent and nothing else, for ever: interval in seconds."""

from __future__ import annotations

import sys

from gpulse.sampling.sampler import Sampler
from gpulse.sources.local_machine import LocalMachine


def main() -> None:
    """Sample until killed."""
    interval = float(sys.argv[1])
    with Sampler(LocalMachine(interval_seconds=interval, threads=True), interval_seconds=interval) as sampler:
        for _ in sampler:
            pass


if __name__ == "__main__":
    main()
