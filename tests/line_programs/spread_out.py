"""Many small things in random order; none of them is the cause. No line may be claimed."""

import random

import pretend_gpu


def one(n):
    return sum(i * n for i in range(200_000))


def two(n):
    return sum(i + n for i in range(200_000))


def three(n):
    return sum(i ^ n for i in range(200_000))


def four(n):
    return sum(i | n for i in range(200_000))


def five(n):
    return sum(i & n for i in range(200_000))


def six(n):
    return sum(i - n for i in range(200_000))


def seven(n):
    return sum(n - i for i in range(200_000))


def eight(n):
    return sum(i + 2 * n for i in range(200_000))


def nine(n):
    return sum(i + 3 * n for i in range(200_000))


def ten(n):
    return sum(i ^ (n + 1) for i in range(200_000))


def eleven(n):
    return sum(i | (n + 1) for i in range(200_000))


def twelve(n):
    return sum(i & (n + 1) for i in range(200_000))


step = 0
while True:
    if random.random() < 0.4:
        one(step)
    if random.random() < 0.4:
        two(step)
    if random.random() < 0.4:
        three(step)
    if random.random() < 0.4:
        four(step)
    if random.random() < 0.4:
        five(step)
    if random.random() < 0.4:
        six(step)
    if random.random() < 0.4:
        seven(step)
    if random.random() < 0.4:
        eight(step)
    if random.random() < 0.4:
        nine(step)
    if random.random() < 0.4:
        ten(step)
    if random.random() < 0.4:
        eleven(step)
    if random.random() < 0.4:
        twelve(step)
    pretend_gpu.run(0.003)
    step += 1
