"""Block hashes: how a prefix is found by its token ids, by servers, clients and proxies alike.

A block is 64 consecutive tokens. Its hash covers every token up to its end and what the rows depend
on, so equal hashes mean equal prefixes of equal models::

    root = SHA-256("pion-prefix/1" || field(tenant) || field(model id) || field(fidelity))
    h[k] = SHA-256(h[k-1] || token ids of block k, u32 little-endian each),  h[-1] = root
    field(x) = length of x in bytes as u32 little-endian || x in UTF-8

The last block may be shorter than 64 tokens. `tests/vectors/blocks.json` has values that every client
reproduces. A hash finds, token ids decide: nothing is served on the word of a hash.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

BLOCK_TOKENS = 64
BLOCK_BYTES = 4 * BLOCK_TOKENS
RAW_FIDELITY = "raw"


def root_hash(tenant: str, model_id: str, fidelity: str = RAW_FIDELITY) -> bytes:
    """Returns the 32 bytes that the chains of one tenant, model and fidelity start from."""
    fields = (part.encode() for part in (tenant, model_id, fidelity))
    return hashlib.sha256(
        b"pion-prefix/1" + b"".join(struct.pack("<I", len(f)) + f for f in fields)
    ).digest()


def block_hashes(root: bytes, token_ids: bytes | memoryview) -> list[bytes]:
    """Returns the hash of every block of `token_ids` (u32 LE), a short last one included."""
    hashes = []
    previous = root
    view = memoryview(token_ids)
    for start in range(0, len(view), BLOCK_BYTES):
        state = hashlib.sha256(previous)
        state.update(view[start : start + BLOCK_BYTES])
        previous = state.digest()
        hashes.append(previous)
    return hashes


def derived_namespace(root: bytes, token_ids: bytes | memoryview) -> str:
    """Returns the name of a prefix stored without one: 32 hex digits of its last block's hash."""
    return block_hashes(root, token_ids)[-1].hex()[:32]


def route_key(tenant: str, model_id: str, token_ids: bytes | memoryview) -> str:
    """Returns the value of the `pion-route` metadata: the hex of the first block's hash.

    Of a prompt shorter than a block, of its only block. The fidelity is always `raw` here, so that a
    Match and the lossy prefix that it may be answered with meet on one node.
    """
    first = memoryview(token_ids)[:BLOCK_BYTES]
    return block_hashes(root_hash(tenant, model_id), first)[0].hex()


def make_namespace(*parts: object) -> str:
    """Returns a namespace for `parts`: 32 hex digits of SHA-256 of their texts joined with `|`."""
    return hashlib.sha256("|".join(str(part) for part in parts).encode()).hexdigest()[:32]


def pack_token_ids(token_ids: bytes | Sequence[int] | np.ndarray) -> bytes:
    """Returns token ids as they travel: u32, little-endian.

    Args:
        token_ids: integers of 0 to 2**32 - 1, one-dimensional; `bytes` are taken as packed already.

    Raises:
        ValueError: an id does not fit, or the ids are not a sequence of integers.
    """
    if isinstance(token_ids, bytes):
        if len(token_ids) % 4:
            raise ValueError(f"packed token ids have {len(token_ids)} bytes, not a multiple of 4")
        return token_ids
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token ids must be a sequence of integers, not {ids.dtype} {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() > 0xFFFFFFFF):
        raise ValueError("a token id does not fit into 32 unsigned bits")
    return ids.astype("<u4").tobytes()


def unpack_token_ids(packed: bytes | memoryview) -> list[int]:
    """Returns the integers that `pack_token_ids` packed."""
    ids: list[int] = np.frombuffer(packed, dtype="<u4").tolist()
    return ids


def common_tokens(a: bytes | memoryview, b: bytes | memoryview) -> int:
    """Returns how many leading token ids two packed sequences have in common."""
    count = min(len(a), len(b)) // 4
    left = np.frombuffer(a, dtype="<u4", count=count)
    right = np.frombuffer(b, dtype="<u4", count=count)
    differing = np.flatnonzero(left != right)
    return int(differing[0]) if differing.size else count
