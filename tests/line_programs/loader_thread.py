"""A thread prepares the batches; the main thread waits for its queue."""

import queue
import threading

import pretend_gpu


def decode(index):
    return sum((index + n) % 11 for n in range(800_000))  # guilty


def load(batches):
    index = 0
    while True:
        batches.put(decode(index))
        index += 1


def main():
    batches = queue.Queue(2)
    threading.Thread(target=load, args=(batches,), daemon=True).start()
    while True:
        batches.get()
        pretend_gpu.run(0.003)


main()
