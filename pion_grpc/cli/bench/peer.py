"""The bare socket: a process that sends one file's bytes, from memory, whenever it is asked to.

    python -m pion_grpc.cli.bench.peer FILE

It prints its port, serves one connection on loopback and ends with it. Each byte it gets asks for the
whole file once. No framing, no checksum, no copy: what one process can move to another at best.
"""

import socket
import sys
from pathlib import Path


def main(path: str) -> None:
    """Serves one connection."""
    data = memoryview(Path(path).read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1):
            connection.sendall(data)


if __name__ == "__main__":
    main(sys.argv[1])
