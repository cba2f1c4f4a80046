"""Command line of the soak: `python -m tests.soak --minutes 3`."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests.soak.parts import MARKER, leftovers
from tests.soak.report import text
from tests.soak.run import Soak, save

_END_SECONDS = 10.0


def main() -> int:
    """Run a soak and print its report; 0 without violations, 1 with some, 130 when it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="length of the run (default: 30)")
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the schedule (default: random, printed)"
    )
    parser.add_argument(
        "--keep", type=Path, default=None, help="copy logs and data of the run to this directory"
    )
    options = parser.parse_args()
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    run_id = os.environ[MARKER] = uuid.uuid4().hex
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    directory = Path(tempfile.mkdtemp(prefix="gpulse-soak-"))
    os.environ["TMPDIR"] = str(directory / "tmp")  # the browser leaves files there
    os.mkdir(os.environ["TMPDIR"])
    soak = Soak(directory, minutes=options.minutes, seed=seed)
    is_interrupted = False
    try:
        soak.run()
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if options.keep is not None:
            save(directory, options.keep, soak)
        shutil.rmtree(directory, ignore_errors=True)
    soak.violations += _end_leftovers(run_id)
    if directory.exists():
        soak.violations.append(f"{directory} could not be removed")
    if is_interrupted:
        print("\ninterrupted; everything has been stopped and removed", flush=True)
        return 130
    print(text(soak.summary()), flush=True)
    return 1 if soak.violations else 0


def _interrupt(*_: object) -> None:
    """End the run; a second signal must not end the cleaning up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_leftovers(run_id: str) -> list[str]:
    """Kill the processes of this run that are still there, and return a violation for each."""
    deadline = time.monotonic() + _END_SECONDS
    while (left := leftovers(run_id)) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = []
    for pid, command in left:
        found.append(f"process {pid} was left behind: {command}")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
