"""A small training loop for the tests on real hardware: a few seconds of bf16 matrix work."""

from __future__ import annotations

import sys
import time

import torch  # type: ignore[import-not-found,unused-ignore]


def main(seconds: float) -> None:
    """Train a small network until the time is over, and print how many steps that were."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))).cuda().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()

    for _ in range(50):  # the first steps load kernels and raise the clocks
        step()
    print("ready", flush=True)
    steps = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        step()
        steps += 1
    print(steps, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
