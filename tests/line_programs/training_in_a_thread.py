"""The main thread only waits for the thread that trains."""

import concurrent.futures
import threading
import time

import pretend_gpu


def shuffle(rows):
    return sorted(rows, key=lambda row: hash((row, 7)))  # guilty


def train():
    rows = list(range(300_000))
    while True:
        shuffle(rows)
        pretend_gpu.run(0.005)


def heartbeat():
    while True:
        time.sleep(0.5)


threading.Thread(target=heartbeat, daemon=True).start()
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    pool.submit(train).result()
