"""Two worker processes prepare the batches, too slowly."""

import multiprocessing

import pretend_gpu


def augment(index):
    return sum((index ^ n) & 15 for n in range(600_000))  # guilty


def work(tasks, batches):
    while True:
        index = tasks.get()
        batches.put(augment(index))


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    tasks, batches = context.Queue(4), context.Queue(4)
    for _ in range(2):
        context.Process(target=work, args=(tasks, batches), daemon=True).start()
    index = 0
    for _ in range(4):
        tasks.put(index)
    while True:
        batches.get()
        tasks.put(index)
        index += 1
        pretend_gpu.run(0.003)
