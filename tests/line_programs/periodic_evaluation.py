"""Every second of training is followed by an evaluation on the host."""

import time

import pretend_gpu


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))  # guilty
    return row[-1]


def evaluate(until):
    while time.time() < until:
        edit_distance("abcdefghij" * 14, "acegikmoqs" * 14)


while True:
    until = time.time() + 1.0
    while time.time() < until:
        pretend_gpu.run(0.02)
    evaluate(time.time() + 0.8)
