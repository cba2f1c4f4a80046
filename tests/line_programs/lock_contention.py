"""The loop needs a lock that another thread holds most of the time."""

import threading
import time

import pretend_gpu

lock = threading.Lock()


def upload_forever():
    while True:
        with lock:
            time.sleep(0.4)
        time.sleep(0.001)


def train():
    threading.Thread(target=upload_forever, daemon=True).start()
    while True:
        with lock:  # guilty
            pass
        pretend_gpu.run(0.02)


train()
