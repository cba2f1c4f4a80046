"""Measure a training loop: which phase uses the energy, how full the memory gets, what slows it down.

    python examples/profile_block.py [--steps N]

It trains on the GPU with torch if there is one, and otherwise only waits; times are measured in both cases.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import gpulse

_BATCH, _WIDTH = 4096, 8192


def make_step() -> Callable[[Any], None]:
    """A step of training: on the GPU, or as long as one would take."""
    if importlib.util.find_spec("torch") is None:
        return lambda _: time.sleep(0.02)
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return lambda _: time.sleep(0.02)
    model = torch.nn.Sequential(
        torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU(), torch.nn.Linear(_WIDTH, 1)
    ).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch.to("cuda", torch.bfloat16)).mean().backward()
        optimizer.step()
        torch.cuda.synchronize()  # a block ends when the GPU has done its part

    return step


@gpulse.profile
def load() -> Any:
    """The next batch."""
    if importlib.util.find_spec("torch") is None:
        time.sleep(0.005)
        return None
    import torch  # noqa: PLC0415

    return torch.randn(_BATCH, _WIDTH)


def main() -> None:
    """Train, and say what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    step = make_step()
    with gpulse.profile("train") as train:
        for _ in range(steps):
            batch = load()
            with gpulse.profile("step"):
                step(batch)
    print(train)
    print()
    print(gpulse.profile.summary())


if __name__ == "__main__":
    main()
