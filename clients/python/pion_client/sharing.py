"""Which rows of a prefix a server has already, bit by bit: those are not stored again.

Knows rows as they are stored, and the client; neither models nor what becomes of the answer.

The one decision: tokens do not decide here, bits do. Equal tokens give equal K/V only where the prefill
was split in the same places, else they differ in the last bits. Whoever has prefilled rows continues
from them; another process that fetched the same prefix, but rows that differ by so little, would go on
in another way. So rows are compared before they are left to another prefix: brought back slot by slot,
the deepest first, where differences add up. That takes no more than sending those rows would.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pion_client.adapters import Rows
from pion_client.bundles import Facts
from pion_client.client import Client
from pion_client.errors import PionError
from pion_client.quantised import codecs_of
from pion_client.rows import Rows as SentRows
from pion_client.rows import rows_of


class Shared(NamedTuple):
    """Rows that need not be stored again."""

    end: int
    """Up to which row."""
    generation: int
    """Of the prefix that has them; 0: it is not there, or does not answer."""


def rows_shared(
    client: Client,
    namespace: str,
    rows: tuple[int, int],
    *,
    generation: int,
    token_ids: bytes,
    layers: Sequence[Rows],
    facts: Facts,
    check: Callable[[], None],
    timeout_s: float,
) -> Shared:
    """Returns up to which row a stored prefix has the same bits; the first one if it has none of them.

    Args:
        client: who asks.
        namespace: the stored prefix.
        rows: which of its rows are compared, half-open.
        generation: of which they must be; 0: whatever there is.
        token_ids: packed, of all rows.
        layers: one's own rows, all of them, one pair per slot.
        facts: what they are.
        check: called before each slot; if it raises, that is all.
        timeout_s: how long each slot may take. A server that gives no answer has no rows.
    """
    begin, end = rows
    for slot, pair in reversed(list(zip(facts.held.slots, layers, strict=True))):
        check()
        try:
            prefix = client.fetch(
                namespace,
                rows=(begin, end),
                slots=(slot,),
                generation=generation,
                codecs=[tensor.codec for tensor in facts.layout.tensors if tensor.codec != "raw"],
                counted=False,
                timeout_s=timeout_s,
                tries=1,
            )
        except PionError:
            return Shared(begin, 0)
        wanted = facts.model_id, token_ids[: 4 * end]
        if prefix is None or (prefix.model, prefix.packed_token_ids) != wanted:
            return Shared(begin, 0)
        generation = prefix.generation
        codecs = {key: codec for key, codec in codecs_of(facts.layout).items() if key[0] == slot}
        mine = rows_of([pair.up_to(end).after(begin)], (slot,), codecs)
        end = begin + _alike(mine, rows_of(prefix.layers, prefix.slots, "raw"))
        if end == begin:
            break
    return Shared(end, generation)


def _alike(mine: Sequence[SentRows], theirs: Sequence[SentRows]) -> int:
    """Returns how many leading rows are the same bits in all tensors."""
    if [rows.tensor for rows in mine] != [rows.tensor for rows in theirs]:
        return 0
    alike = mine[0].token_count
    for own, other in zip(mine, theirs, strict=True):
        for piece, stored in itertools.zip_longest(own.chunks(), other.chunks()):
            same = np.frombuffer(piece.data, np.uint8) == np.frombuffer(stored.data, np.uint8)
            if not same.all():
                first = int(np.argmin(same.reshape(piece.row_count, -1).all(axis=1)))
                alike = min(alike, piece.first_row + first)
    return alike
