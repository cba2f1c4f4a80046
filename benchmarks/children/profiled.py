"""A program that profiles itself: says what its first block cost, and then what it is asked for.

`blocks N` times N empty blocks one by one, `loop N` and `bare N` time so many small steps with and without a block around each,
`rest S` and `sleep S` tell the CPU time of so many seconds in which the program does nothing, with and without an open block.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import gpulse

_STEP = 2000
"""Additions in a step: some tens of microseconds."""


def main() -> None:
    """Answer line by line."""
    profile = gpulse.profile
    began = time.perf_counter()
    with profile("first"):
        pass
    print(json.dumps({"first": time.perf_counter() - began}), flush=True)
    verbs: dict[str, Callable[[float], Any]] = {
        "blocks": _blocks,
        "loop": _loop,
        "bare": _bare,
        "rest": _rest,
        "sleep": _sleep,
    }
    for line in sys.stdin:
        verb, number = line.split()
        if verb == "sleep":
            profile.stop()
        else:
            profile.start()
        print(json.dumps(verbs[verb](float(number))), flush=True)
    profile.stop()


def _blocks(count: float) -> list[float]:
    takes = []
    for _ in range(int(count)):
        began = time.perf_counter()
        with gpulse.profile("empty"):
            pass
        takes.append(time.perf_counter() - began)
    return takes


def _step() -> int:
    return sum(range(_STEP))


def _loop(count: float) -> float:
    began = time.perf_counter()
    for _ in range(int(count)):
        with gpulse.profile("step"):
            _step()
    return time.perf_counter() - began


def _bare(count: float) -> float:
    began = time.perf_counter()
    for _ in range(int(count)):
        _step()
    return time.perf_counter() - began


def _rest(seconds: float) -> float:
    with gpulse.profile("rest"):
        return _sleep(seconds)


def _sleep(seconds: float) -> float:
    began = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - began) / seconds


if __name__ == "__main__":
    main()
