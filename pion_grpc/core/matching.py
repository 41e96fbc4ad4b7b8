"""The longest stored prefix of a token sequence.

The match index has one entry per block of every visible prefix: (hash of all blocks before it, tokens
of the block). The ancestors of a stored block are always stored, so the deepest block that a query
shares with anything is found by binary search; where the query leaves the stored blocks, the entry with
the longest common beginning is one of its two neighbours in key order. Both cost the same with ten
prefixes and with a hundred thousand.

Knows token ids and hashes; which entries exist is the catalogue's to say.
"""

from typing import NamedTuple

from pion_grpc.storage.catalog import PrefixRow, Transaction
from pion_wire.blocks import BLOCK_BYTES, BLOCK_TOKENS, block_hashes, common_tokens, root_hash


class Found(NamedTuple):
    """A prefix and how many leading tokens it has in common with the query."""

    prefix: PrefixRow
    tokens: int


def nodes(tenant: str, model_id: str, fidelity: str, token_ids: bytes) -> list[tuple[bytes, bytes]]:
    """Returns the index entries of a prefix, one per block from its start; the last may be short."""
    root = root_hash(tenant, model_id, fidelity)
    parents = [root, *block_hashes(root, token_ids)[:-1]]
    return [
        (parent, token_ids[start : start + BLOCK_BYTES])
        for parent, start in zip(parents, range(0, len(token_ids), BLOCK_BYTES), strict=True)
    ]


def longest_match(transaction: Transaction, root: bytes, token_ids: bytes) -> Found | None:
    """Returns the stored prefix that has the most leading tokens in common; the last used of equals.

    Args:
        transaction: what is stored.
        root: the hash that the chains of this tenant, model and fidelity start from.
        token_ids: the query, u32 LE, at least one.
    """
    whole = len(token_ids) // BLOCK_BYTES * BLOCK_BYTES
    blocks = [token_ids[start : start + BLOCK_BYTES] for start in range(0, whole, BLOCK_BYTES)]
    parents = [root, *block_hashes(root, token_ids[:whole])]

    stored, beyond = 0, len(blocks) + 1  # blocks 0..stored are stored, block `beyond` is not
    while beyond - stored > 1:
        middle = (stored + beyond) // 2
        if transaction.has_node(parents[middle - 1], blocks[middle - 1]):
            stored = middle
        else:
            beyond = middle

    rest = token_ids[stored * BLOCK_BYTES : (stored + 1) * BLOCK_BYTES]
    neighbours = transaction.neighbours(parents[stored], rest) if rest else []
    nearest = max(neighbours, key=lambda tokens: common_tokens(tokens, rest), default=b"")
    inside = common_tokens(nearest, rest)
    if inside:
        entry = parents[stored], nearest[: 4 * inside]
    elif stored:
        entry = parents[stored - 1], blocks[stored - 1]
    else:
        return None
    prefix = transaction.most_recent(*entry)
    return Found(prefix, stored * BLOCK_TOKENS + inside) if prefix else None
