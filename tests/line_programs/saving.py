"""Every second of training is followed by the files of a checkpoint, which take as long on every machine."""

import os
import pickle
import tempfile
import time

import pretend_gpu


def save(state, path):
    with open(path, "wb") as file:
        pickle._Pickler(file).dump(state)  # guilty


def train():
    state = {f"layer{n}": [0.1 * n] * 50 for n in range(2000)}
    with tempfile.TemporaryDirectory() as directory:
        while True:
            until = time.time() + 1.0
            while time.time() < until:
                pretend_gpu.run(0.05)
            until = time.time() + 0.8
            while time.time() < until:
                save(state, os.path.join(directory, "checkpoint"))


train()
