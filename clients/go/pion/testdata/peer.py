"""The Python client, for tests of other clients: stores a sample, or says what it fetches.

A sample's bytes follow from its name: SHA-256 of "name|what|counter", counter after counter. Usage::

    peer.py store ADDRESS NAME,F32|F16|BF16,TOKENS[,PARENT,BASE] ...
    peer.py digest ADDRESS NAME ...              prints one line per name, tensor and part
"""

import hashlib
import sys

import numpy as np

from pion_client import Client, DType, Part

HEADS, HEAD_DIM, SLOTS = 2, 16, 2
MODEL = "mlx1:00000000000000000000000000000000"


def noise(name: str, what: str, size: int) -> bytes:
    """Returns the bytes of something of a sample."""
    blocks = range(-(-size // 32))
    data = b"".join(hashlib.sha256(f"{name}|{what}|{n}".encode()).digest() for n in blocks)
    return data[:size]


def store(client: Client, sample: str) -> None:
    """Stores a sample; with a parent, its rows from `base` on."""
    name, dtype, tokens, parent, base = (*sample.split(","), "", "0")[:5]
    kind, count, begin = DType(dtype), int(tokens), int(base)
    row_bytes = HEADS * HEAD_DIM * kind.itemsize

    def rows(tensor: str) -> np.ndarray:
        data = noise(name, tensor, count * row_bytes)[begin * row_bytes :]
        shape = (count - begin, HEADS, HEAD_DIM)
        return np.frombuffer(data, kind.numpy).reshape(shape).transpose(1, 0, 2)

    client.store(
        name,
        layers=[(rows(f"k.{slot}"), rows(f"v.{slot}")) for slot in range(SLOTS)],
        token_ids=list(range(count)),
        model=MODEL,
        parent=parent or None,
        base=begin,
        parts=[Part("state", 1, count, noise(name, "part", 1_500_000), "a state")],
    )


def digest(client: Client, name: str) -> None:
    """Prints the SHA-256 of every tensor and part, token-major."""
    prefix = client.fetch(name, part_kinds=["state"])
    assert prefix is not None
    print(name)
    for slot, pair in zip(prefix.slots, prefix.layers, strict=True):
        for side, array in zip("kv", pair, strict=True):
            data = np.ascontiguousarray(np.asarray(array).transpose(1, 0, 2)).tobytes()
            print(f"{side}.{slot} {array.dtype} {hashlib.sha256(data).hexdigest()}")
    for part in prefix.parts:
        print(f"part.{part.slot} {part.kind} {hashlib.sha256(part.data).hexdigest()}")


if __name__ == "__main__":
    with Client(sys.argv[2], export=False) as connected:
        for argument in sys.argv[3:]:
            {"store": store, "digest": digest}[sys.argv[1]](connected, argument)
