"""Each sample comes from a server that takes its time."""

import socket
import threading
import time

import pretend_gpu


def serve(server):
    while True:
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            time.sleep(0.3)
            connection.sendall(b"sample")


def fetch(address):
    with socket.create_connection(address) as connection:
        connection.sendall(b"next")
        return connection.recv(100)  # guilty


listening = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=(listening,), daemon=True).start()
while True:
    fetch(listening.getsockname())
    pretend_gpu.run(0.02)
