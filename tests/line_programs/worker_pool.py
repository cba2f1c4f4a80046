"""A pool of processes decodes the samples of each batch."""

import multiprocessing
import zlib

import pretend_gpu

PACKED = zlib.compress(bytes(range(256)) * 200)


def decode(index):
    total = 0
    for value in zlib.decompress(PACKED):
        total = (total * 31 + value + index) % 65_521  # guilty
    return total


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        while True:
            pool.map(decode, range(48))
            pretend_gpu.run(0.005)
