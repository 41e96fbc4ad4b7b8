"""Which entries a prefix has in the match index, from its publication to its end.

Knows tokens and chains; not how entries are found again (`matching`). The one decision: a child has no
entries of its own for the blocks that it shares with its parent, as long as the parent has them. So
whoever takes a parent out of the index leaves the shared ones to its children.
"""

from pion_grpc.core.reading import parts_of
from pion_grpc.storage.match_index import MatchIndex
from pion_grpc.storage.transaction import PrefixRow, Transaction
from pion_wire.blocks import BLOCK_BYTES, BLOCK_TOKENS, block_hashes, root_hash


def nodes(tenant: str, model_id: str, fidelity: str, token_ids: bytes) -> list[tuple[bytes, bytes]]:
    """Returns the index entries of a prefix, one per block from its start; the last may be short."""
    root = root_hash(tenant, model_id, fidelity)
    parents = [root, *block_hashes(root, token_ids)[:-1]]
    return [
        (parent, token_ids[start : start + BLOCK_BYTES])
        for parent, start in zip(parents, range(0, len(token_ids), BLOCK_BYTES), strict=True)
    ]


def enter_index(transaction: Transaction, prefix: PrefixRow, token_ids: bytes) -> None:
    """Lets a prefix be found by its tokens, from the block on that its parent does not answer for."""
    index = MatchIndex(transaction)
    index.set_token_ids(prefix.id, token_ids)
    if not token_ids:
        return
    # The blocks before the base are in the index through the parent, as long as it is there too.
    parent = transaction.by_id(prefix.parent) if prefix.parent is not None else None
    found = index.token_ids(parent.id) if parent is not None and parent.visible else b""
    own = _first_own_block(prefix, token_ids) if len(found) >= 4 * prefix.base else 0
    index.add(prefix.id, _nodes_of(prefix, token_ids)[own:])


def leave_index(transaction: Transaction, prefix: PrefixRow) -> None:
    """Takes a prefix out of the index; its children answer for the tokens they share with it."""
    index = MatchIndex(transaction)
    token_ids = index.token_ids(prefix.id)
    if not token_ids:
        return
    index.remove(prefix.id, _nodes_of(prefix, token_ids))
    for child in transaction.children(prefix.id):
        if child.visible:
            shared = min(4 * child.base, len(token_ids))
            whole_blocks = token_ids[: shared // BLOCK_BYTES * BLOCK_BYTES]
            if whole_blocks:
                index.add(child.id, _nodes_of(child, whole_blocks))


def keep_tokens(transaction: Transaction, prefix: PrefixRow, count: int, fidelity: str) -> None:
    """Shortens the tokens by which a prefix is found to those that its rows still are of.

    Args:
        transaction: where.
        prefix: as it was before its rows changed.
        count: leading rows that have not changed.
        fidelity: what its rows are stored in now.
    """
    index = MatchIndex(transaction)
    token_ids = index.token_ids(prefix.id)
    kept = token_ids[: 4 * count]
    if kept == token_ids and fidelity == prefix.fidelity:
        return
    leave_index(transaction, prefix)
    index.set_token_ids(prefix.id, kept)
    if kept:
        index.add(prefix.id, _nodes_of(prefix._replace(fidelity=fidelity), kept))


def _nodes_of(prefix: PrefixRow, token_ids: bytes) -> list[tuple[bytes, bytes]]:
    return nodes(prefix.tenant, prefix.model_id, prefix.fidelity, token_ids)


def _first_own_block(prefix: PrefixRow, token_ids: bytes) -> int:
    """Returns the block from which on a child is found by itself: that of its first row.

    Without rows of its own, its last block; and where it has parts of its own, at the latest the block
    before that of its first part: whoever shares the tokens up to a part shares that block as a whole.
    """
    first = min(prefix.base, len(token_ids) // 4 - 1) // BLOCK_TOKENS
    boundaries = [part.boundary_tokens for part in parts_of(prefix)]
    before = (min(boundaries) - 1) // BLOCK_TOKENS - 1 if boundaries else first
    return max(0, min(first, before))
