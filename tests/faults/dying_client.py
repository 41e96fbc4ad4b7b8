"""A client to be killed: sends half of what it declared, says so, and waits for its end."""

import sys
import threading
from collections.abc import Iterator

from pion_wire.framing import frame_header
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import types_pb2
from tests.server.wire import Sample, Wire, layout_of

SAMPLE = Sample("dying/one", 2_000, layout_of(4, 8, 64))
"""16 MB."""
SIDE = types_pb2.SIDE_K


def halfway(messages: list[bytes]) -> Iterator[bytes]:
    """The first half of a stream, and no end."""
    yield from messages[: len(messages) // 2]
    say_and_wait()


def say_and_wait() -> None:
    print("halfway", flush=True)
    threading.Event().wait()


def main(address: str, what: str) -> None:
    wire = Wire(address)
    if what == "fetch":
        call = wire.streaming(namespace=SAMPLE.namespace, timeout_s=None)
        next(call)
        say_and_wait()
    if what == "store":
        wire.send(halfway(list(SAMPLE.messages(replace=True))))
    header = pb.PrefixStoreWriteRowsHeader(
        namespace="dying/rows", side=SIDE, first_row=0, row_count=SAMPLE.token_count
    )
    first, second, *_ = SAMPLE.chunks()
    messages = [frame_header(header.SerializeToString()), first, second, b""]
    wire.send(halfway(messages), "WriteRows")


if __name__ == "__main__":
    main(*sys.argv[1:])
