"""Each step logs much more than anybody reads."""

import logging
import os

import pretend_gpu

logging.basicConfig(filename=os.devnull, format="%(asctime)s %(levelname)s %(message)s")
log = logging.getLogger("train")


def train():
    weights = [0.5] * 2000
    step = 0
    while True:
        loss = pretend_gpu.launch(0.01)
        for layer in range(200):
            log.warning("step %d layer %d weights %s", step, layer, weights)  # guilty
        loss.item()
        step += 1


train()
