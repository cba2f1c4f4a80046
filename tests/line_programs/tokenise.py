"""Tokenising in the loop; the time is spent inside the standard library."""

import json
import re

import pretend_gpu

TEXT = {"text": ["the quick brown fox jumps over the lazy dog"] * 4000}
WORD = re.compile(r"(\w+)\s*")


def tokenise(record):
    text = json.dumps(record, indent=1)  # guilty
    return text[:1000]


def step():
    return WORD.findall(tokenise(TEXT))


while True:
    for _ in range(10):
        step()
    pretend_gpu.run(0.005)
