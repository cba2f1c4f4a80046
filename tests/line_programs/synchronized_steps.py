"""Half of each step is the GPU's, and the thread waits for it; the other half is the guilty line's."""

import pretend_gpu


def featurize(step):
    return [hash((step, n)) for n in range(650_000)]  # guilty


def train():
    step = 0
    running = 0.0
    while True:
        featurize(step)
        loss = pretend_gpu.launch(0.1)
        running += loss.item()
        step += 1


train()
