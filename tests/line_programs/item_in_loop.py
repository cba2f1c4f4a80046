"""Each of many small results is fetched at once, so the GPU is empty in between."""

import pretend_gpu


def metrics(batches):
    total = 0.0
    for _ in range(batches):
        total += sum(i * i for i in range(20_000)) + pretend_gpu.launch(0.0002).item()  # guilty
    return total


while True:
    metrics(200)
    pretend_gpu.run(0.02)
