"""A checkpoint is written in the loop every few seconds."""

import os
import pickle
import tempfile
import time

import pretend_gpu


def save(state, path):
    with open(path, "wb") as file:
        pickle._Pickler(file).dump(state)  # guilty


def train():
    state = {f"layer{n}": [0.1 * n] * 50 for n in range(6000)}
    with tempfile.TemporaryDirectory() as directory:
        seconds = 1.0
        while True:
            until = time.time() + seconds
            while time.time() < until:
                pretend_gpu.run(0.05)
            begin = time.time()
            save(state, os.path.join(directory, "checkpoint"))
            seconds = max(1.0, time.time() - begin)


train()
