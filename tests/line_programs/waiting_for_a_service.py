"""The loop polls a service."""

import time

import pretend_gpu


class Environment:
    def ready(self):
        return time.monotonic() % 0.5 < 0.05

    def step(self):
        while not self.ready():
            time.sleep(0.02)  # guilty


environment = Environment()
while True:
    environment.step()
    pretend_gpu.run(0.06)
