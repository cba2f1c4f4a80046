"""Each step starts a program and waits for it."""

import subprocess

import pretend_gpu


def convert(seconds):
    return subprocess.run(["sleep", str(seconds)], check=True, capture_output=True).stdout  # guilty


while True:
    convert(0.3)
    pretend_gpu.run(0.02)
