"""A training loop with fixed work a step: runs for as long as each line of input says and tells its pace.

Argument: `light` (many small kernels, bound by the CPU that launches them) or `heavy` (large matrices).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

torch: Any = import_module("torch")
nn: Any = torch.nn

_SHAPES = {
    # width, layers, heads, sequence, batch, seconds that a step should take
    "light": (512, 8, 8, 256, 8, 1 / 75),
    "heavy": (2048, 12, 16, 1024, 8, 1 / 5),
}
_VOCABULARY = 8192


def _step(kind: str) -> Callable[[], None]:
    """One step of a small GPT (forward, backward, update) over a batch that stays on the GPU."""
    width, layers, heads, sequence, batch, _ = _SHAPES[kind]
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    model = nn.ModuleDict(
        {
            "tokens": nn.Embedding(_VOCABULARY, width),
            "blocks": nn.TransformerEncoder(block, layers, enable_nested_tensor=False),
            "head": nn.Linear(width, _VOCABULARY),
        }
    ).to("cuda", torch.bfloat16)
    mask = nn.Transformer.generate_square_subsequent_mask(sequence, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = torch.randint(0, _VOCABULARY, (batch, sequence + 1), device="cuda")

    def once() -> None:
        hidden = model["blocks"](model["tokens"](data[:, :-1]), mask=mask, is_causal=True)
        loss = nn.functional.cross_entropy(model["head"](hidden).flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return once


def _timed(step: Callable[[], None], count: int, passes: int) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        for _ in range(passes):
            step()
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    """Settle on the work of a step, then train on command."""
    kind = sys.argv[1]
    step = _step(kind)
    _timed(step, 10, 1)
    one_pass = _timed(step, 20, 1) / 20
    passes = max(1, round(_SHAPES[kind][5] / one_pass))
    seconds = _timed(step, max(2, round(1 / (one_pass * passes))), passes)
    name = torch.cuda.get_device_name().replace('"', "")
    pace = max(2, round(1 / (one_pass * passes))) / seconds
    print(f'{{"ready": {pace:.3f}, "passes": {passes}, "device": "{name}"}}', flush=True)
    for line in sys.stdin:
        count = max(2, round(float(line) * pace))
        cpu = time.process_time()
        seconds = _timed(step, count, passes)
        cpu = time.process_time() - cpu
        print(f'{{"pace": {count / seconds:.6f}, "seconds": {seconds:.3f}, "cpu": {cpu:.3f}}}', flush=True)


if __name__ == "__main__":
    main()
