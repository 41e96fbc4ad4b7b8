"""What the rows store: one large prefix of random bits, or very many small ones.

The one decision: many prefixes go in through the domain, in this process and before a server is there;
through gRPC a hundred thousand of them would take minutes that measure nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from pion_client.values import Array
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.storing import PrefixUpload
from pion_grpc.core.values import BlockTable, StoreHeader
from pion_grpc.storage.directory import DataDirectory
from pion_wire.framing import RowChunk
from pion_wire.layout import DType, Layout, Side, TensorLayout

MODEL = "mlx1:" + 32 * "0"
LAYERS, HEADS, HEAD_DIM = 32, 8, 128
"""The cache of an 8-billion-parameter llama: 128 KiB per token in f16."""
TOKENS = 2048
BLOCK = 64


class Large(NamedTuple):
    """A prefix of 256 MiB, or of a quarter of it."""

    data: np.ndarray
    """All its bytes, token-major, tensor after tensor."""
    layers: list[tuple[Array, Array]]
    """Views of them: (heads, tokens, head_dim)."""
    token_ids: np.ndarray

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.data.nbytes

    @property
    def size_text(self) -> str:
        """The same for people."""
        return f"{self.data.nbytes >> 20} MiB"


def large(*, quick: bool) -> Large:
    """A large prefix of f16 in every bit pattern."""
    tokens = TOKENS // 4 if quick else TOKENS
    words = LAYERS * 2 * tokens * HEADS * HEAD_DIM // 4
    data = np.random.default_rng(1).integers(0, 1 << 64, words, dtype=np.uint64).view(np.uint8)
    tensors = data.view(np.float16).reshape(LAYERS, 2, tokens, HEADS, HEAD_DIM)
    layers: list[tuple[Array, Array]] = [
        (k.transpose(1, 0, 2), v.transpose(1, 0, 2)) for k, v in tensors
    ]
    return Large(data, layers, np.arange(tokens, dtype=np.uint32))


def long_ids(number: int, tokens: int) -> np.ndarray:
    """The token ids of the long prefix with this number; no two have the same first block."""
    return np.random.default_rng(number).integers(0, 50_000, tokens, dtype=np.uint32)


def hashes(count: int) -> bytes:
    """A router's table of this many u64."""
    return np.random.default_rng(2).integers(0, 1 << 64, count, dtype=np.uint64).tobytes()


class Small(NamedTuple):
    """A directory of prefixes with rows of four bytes per token."""

    prefixes: int
    """How many in all, `p0`, `p1`, …"""
    long_ones: int = 0
    """The first of them have `long_tokens` tokens, the others 40 to 200, half of them over the same
    block."""
    long_tokens: int = 0
    table: bytes = b""
    """The hashes that `p0` has a table of."""


def fill(directory: Path, small: Small, advance: Callable[[], None]) -> None:
    """Makes a data directory of small prefixes; `advance` is called after every thousandth of them."""
    store = PrefixStore(DataDirectory(directory), budget_bytes=64 << 30)
    random = np.random.default_rng(0)
    shared = random.integers(0, 50_000, BLOCK, dtype=np.uint32)
    for number in range(small.prefixes):
        if number < small.long_ones:
            ids = long_ids(number, small.long_tokens)
        else:
            own = random.integers(0, 50_000, random.integers(40, 200), dtype=np.uint32)
            ids = np.concatenate([shared, own]) if number % 2 else own
        table = BlockTable(BLOCK, small.table) if small.table and not number else None
        _store(store, f"p{number}", ids.astype("<u4").tobytes(), table)
        if number % max(small.prefixes // 1000, 1) == 0:
            advance()
    store.close()


_LAYOUT = Layout(tuple(TensorLayout(0, side, 1, 1, DType.F16) for side in Side))


def _store(store: PrefixStore, name: str, token_ids: bytes, table: BlockTable | None) -> None:
    header = StoreHeader(name, MODEL, token_ids, _LAYOUT, table=table)
    upload = store.store("", header)
    assert isinstance(upload, PrefixUpload), "stored twice"
    data = bytes(2 * header.token_count)
    for index in range(len(_LAYOUT.tensors)):
        upload.write(RowChunk(index, 0, 0, header.token_count, crc32c(data), data))
    store.stored("", header, upload.publish())
