"""The longest stored prefix of a token sequence.

The match index has one entry per block of every visible prefix: (hash of all blocks before it, tokens
of the block). The ancestors of a stored block are always stored, so the deepest block that a query
shares with anything is found by binary search; where the query leaves the stored blocks, the entry with
the longest common beginning is one of its two neighbours in key order. Both cost the same with ten
prefixes and with a hundred thousand.

Where parts are needed, the longest match need not be the best one: another prefix may share fewer tokens
and have the parts at a later boundary. They are looked for from where the query leaves the stored blocks
backwards, among so many at most that a match stays a matter of milliseconds.

Knows token ids and hashes; which entries exist is the catalogue's to say.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pion_grpc.core.reading import chain_parts
from pion_grpc.storage.match_index import MatchIndex
from pion_grpc.storage.transaction import PrefixRow, Transaction
from pion_wire.blocks import BLOCK_BYTES, BLOCK_TOKENS, block_hashes, common_tokens
from pion_wire.layout import PartInfo

LEVELS_MAX = 2_048
"""Blocks that are gone back in search of parts."""
SHORT_LEVELS_MAX = 32
"""Of these, so many are searched for prefixes that end inside the block as well."""
EXAMINED_MAX = 64
"""Prefixes whose parts are looked at."""


class Found(NamedTuple):
    """A prefix and how many leading tokens it has in common with the query."""

    prefix: PrefixRow
    tokens: int


class Served(NamedTuple):
    """What of a prefix can be served with all parts that are needed."""

    prefix: PrefixRow
    matched: int
    """Leading tokens in common with the query."""
    tokens: int
    """The longest boundary up to `matched` that all kinds of parts have; 0 if there is none."""
    shortened_by: str
    """The kind of part that cut the answer; empty if none did."""


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
        if MatchIndex(transaction).has(parents[middle - 1], blocks[middle - 1]):
            stored = middle
        else:
            beyond = middle

    rest = token_ids[stored * BLOCK_BYTES : (stored + 1) * BLOCK_BYTES]
    neighbours = MatchIndex(transaction).neighbours(parents[stored], rest) if rest else []
    nearest = max(neighbours, key=lambda tokens: common_tokens(tokens, rest), default=b"")
    inside = common_tokens(nearest, rest)
    if inside:
        entry = parents[stored], nearest[: 4 * inside]
    elif stored:
        entry = parents[stored - 1], blocks[stored - 1]
    else:
        return None
    prefix = MatchIndex(transaction).most_recent(*entry)
    return Found(prefix, stored * BLOCK_TOKENS + inside) if prefix else None


def served_with_parts(
    transaction: Transaction, root: bytes, token_ids: bytes, longest: Found, kinds: tuple[str, ...]
) -> Served:
    """Returns the prefix that has all kinds of parts at the latest boundary within a query.

    That is `longest` itself unless another one has them later; of equals it is `longest`. Others that
    share not even the first block of a query are not looked at.

    Args:
        transaction, root, token_ids: as for `longest_match`.
        longest: what that returned.
        kinds: the kinds of parts that are needed.
    """
    best = _served(transaction, longest.prefix, longest.tokens, kinds)
    if best.tokens == best.matched:
        return best
    examined = {longest.prefix.id}
    for end, parent, ends in _levels(root, token_ids[: 4 * longest.tokens]):
        # Who shares a block may share nearly all of the next one, and have a boundary there.
        if end + BLOCK_TOKENS <= best.tokens or len(examined) > EXAMINED_MAX:
            break
        for number in MatchIndex(transaction).having(parent, ends, limit=EXAMINED_MAX):
            prefix = transaction.by_id(number) if number not in examined else None
            if prefix is not None:
                examined.add(number)
                tokens = common_tokens(MatchIndex(transaction).token_ids(number), token_ids)
                there = _served(transaction, prefix, tokens, kinds)
                if there.tokens > best.tokens:
                    # What cut the answer is what the longest match does not have.
                    best = there._replace(shortened_by=best.shortened_by)
    return best


def cut_to_parts(parts: Sequence[PartInfo], kinds: tuple[str, ...], tokens: int) -> tuple[int, str]:
    """Returns the latest boundary within `tokens` that has all kinds, and the first kind that cut it.

    The boundary is 0 if there is none; the kind is empty if nothing was cut. A boundary has a kind if it
    has it of every slot of which there is one at all: state of half the layers continues nothing.

    Args:
        parts: of one prefix; none twice by kind, slot and boundary.
        kinds: those needed, at least one.
        tokens: where the boundary would be without them.
    """
    boundaries = {kind: _whole_boundaries([p for p in parts if p.kind == kind]) for kind in kinds}
    common = set.intersection(*boundaries.values())
    boundary = max((boundary for boundary in common if boundary <= tokens), default=0)
    missing = (kind for kind in kinds if tokens not in boundaries[kind])
    return boundary, next(missing, "")


def _whole_boundaries(parts: Sequence[PartInfo]) -> set[int]:
    """Returns the boundaries at which parts of one kind are there of all slots."""
    slots = {part.slot for part in parts}
    there = Counter(part.boundary_tokens for part in parts)
    return {boundary for boundary, count in there.items() if count == len(slots)}


def _served(
    transaction: Transaction, prefix: PrefixRow, matched: int, kinds: tuple[str, ...]
) -> Served:
    matched = min(matched, prefix.token_count)
    if not kinds:
        return Served(prefix, matched, matched, "")
    known = MatchIndex(transaction).token_count(prefix.id)
    parts = chain_parts(transaction.chain(prefix), known)
    return Served(prefix, matched, *cut_to_parts(parts, kinds, matched))


def _levels(root: bytes, token_ids: bytes) -> Iterator[tuple[int, bytes, list[bytes]]]:
    """Yields the blocks of a query from the last one back.

    For each: how many tokens there are up to its end, the parent of its entries, and the entries that
    prefixes have which share it; of the last blocks those as well that end inside it.
    """
    parents = [root, *block_hashes(root, token_ids)]
    last = len(parents) - 2
    for number, level in enumerate(range(last, max(-1, last - LEVELS_MAX), -1)):
        block = token_ids[level * BLOCK_BYTES : (level + 1) * BLOCK_BYTES]
        short = range(4, len(block), 4) if number < SHORT_LEVELS_MAX else ()
        end = level * BLOCK_TOKENS + len(block) // 4
        yield end, parents[level], [block, *(block[:size] for size in short)]
