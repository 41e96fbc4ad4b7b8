"""What is stored of a model's cache, and put back: rows and parts, as one prefix.

Knows what was stored and what a model's cache holds; neither calls nor when to make them.

The one decision: rows can be cut anywhere, parts cannot. A prefix is served up to a boundary at which it
has every part that the model needs, and not a token further; its rows are kept once, however many
boundaries (*checkpoints*) it has parts at. The exception are parts that still have every row, such as
a ring before it wraps: they serve every boundary before their own.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import NamedTuple

from pion_client import caches
from pion_client.caches import (
    Cache,
    CacheMismatch,
    Expected,
    PartMismatch,
    Rows,
    UnsupportedCache,
)
from pion_client.parts import Taken
from pion_client.quantised import as_held
from pion_client.values import Part, Prefix, PrefixInfo
from pion_wire import limits
from pion_wire.layout import Layout

CHECKPOINT_BYTES_MAX = 1 << 30
"""Parts that a prefill keeps in memory until they are stored; beyond, every other is let go."""
_DESCRIBED_BYTES = 512
"""More than any part takes to be described."""


PART_DIFFERS = "part_differs"
"""Why nothing is served where a part is there but cannot be used: it is broken, or of another format."""


class Facts(NamedTuple):
    """What a stored prefix must agree with."""

    model_id: str
    layout: Layout
    """The rows as they are stored."""
    held: Expected
    """What the model's cache holds."""

    def lacks(self, prefix: PrefixInfo, boundary_tokens: int) -> str:
        """Returns the kind of part that a prefix does not have at a boundary; empty if it has all."""
        missing = self.held.missing(prefix.parts, boundary_tokens)
        return missing.kind if missing else ""

    def unkept(self, prefix: PrefixInfo, boundaries: Iterable[int]) -> int:
        """Returns at how many of these boundaries a stored prefix cannot be served."""
        return sum(
            bool(self.lacks(prefix, boundary)) and not self.held.later(prefix.parts, boundary)
            for boundary in set(boundaries)
        )


class Bundle(NamedTuple):
    """Rows of a prefix from row 0 on, and parts at some of its boundaries."""

    rows: list[Rows]
    taken: list[Taken]

    @property
    def size_bytes(self) -> int:
        """What it keeps in memory."""
        rows = sum(pair.nbytes for pair in self.rows)
        return rows + sum(taken.size_bytes for taken in self.taken)

    def layers(self, base: int = 0) -> list[Rows]:
        """Returns the rows from `base` on."""
        return [pair.after(base) for pair in self.rows] if base else self.rows

    @property
    def boundaries(self) -> set[int]:
        """Where it has parts."""
        return {taken.boundary_tokens for taken in self.taken}

    def parts(self) -> list[Part]:
        """Returns the parts as they are sent."""
        return [taken.part() for taken in self.taken]


class Checkpoints:
    """Parts taken at boundaries of one prefill, as many as there is room for.

    Args:
        parts_max: how many parts there may be.
        bytes_max: how large they may be together.
    """

    def __init__(self, parts_max: int, bytes_max: int = CHECKPOINT_BYTES_MAX) -> None:
        self._parts_max, self._bytes_max = parts_max, bytes_max
        self._taken: list[list[Taken]] = []
        self.dropped = 0
        """Boundaries whose parts were let go."""

    def take(self, cache: Cache, boundary_tokens: int) -> None:
        """Takes everything in the cache beside rows; nothing if that cannot be kept."""
        taken: list[Taken] = []
        with contextlib.suppress(UnsupportedCache):  # whoever stores it asks again, and says why
            taken = caches.take_parts(cache, boundary_tokens)
        if not taken:
            return
        self._taken.append(taken)
        while len(self._taken) > 1 and self._too_much():
            # The last boundary stays: it is where the prefix ends, or may yet.
            kept = self._taken[-1::-2][::-1]
            self.dropped += len(self._taken) - len(kept)
            self._taken = kept

    @property
    def taken(self) -> list[Taken]:
        """The parts, by boundary and slot."""
        return [taken for boundary in self._taken for taken in boundary]

    def _too_much(self) -> bool:
        size = sum(taken.size_bytes for taken in self.taken)
        return len(self.taken) > self._parts_max or size > self._bytes_max


def parts_max(token_count: int) -> int:
    """Returns how many parts a prefix may have: one message describes them all, with the tokens."""
    room = (limits.MESSAGE_BYTES_MAX - 4 * token_count) // 2
    return min(limits.PARTS_MAX, room // _DESCRIBED_BYTES)


def boundaries(begin: int, end: int, checkpoints: Iterable[int], every: int) -> list[int]:
    """Returns where a prefill of tokens `begin` to `end` is interrupted, its end included.

    Args:
        begin: tokens that are there already.
        end: tokens that shall be there.
        checkpoints: boundaries that were asked for; those outside are left out.
        every: one more at each multiple of this; 0: none.
    """
    own = range((begin // every + 1) * every, end, every) if every else ()
    return sorted({end, *own, *(int(point) for point in checkpoints if begin < point < end)})


def put_back(cache: Cache, prefix: Prefix, token_ids: bytes, facts: Facts) -> str:
    """Fills the cache with the beginning of a fetched prefix, all of what is in `token_ids`.

    Returns nothing, or one word that says what is wrong with it; the cache is still empty then.
    """
    if prefix.model != facts.model_id:
        return "model_differs"
    if prefix.packed_token_ids[: len(token_ids)] != token_ids:
        return "tokens_differ"
    if prefix.slots != facts.held.slots:
        return "layout_differs"
    tokens = len(token_ids) // 4
    if facts.held.missing((part.info for part in prefix.parts), prefix.rows[1]):
        return "part_missing"
    try:
        layers = as_held(prefix, stored=facts.layout, held=facts.held.layout)
        if tokens < prefix.token_count:
            layers = [Rows(*pair).up_to(tokens) for pair in layers]
        caches.install(
            cache, layers, facts.held.layout, tokens, parts=prefix.parts, needs=facts.held.needs
        )
    except PartMismatch:
        return PART_DIFFERS
    except CacheMismatch:
        return "layout_differs"
    return ""


def cache_suffix(cache: Cache) -> str:
    """Returns what tells caches of other classes, or of other sizes, from this empty one.

    A prefix in a quantised cache is another than that of the same tokens in plain rows.
    """
    return _digest([_options(slot) for slot in cache])


def _options(cache: object) -> list[object]:
    inner: Sequence[object] = getattr(cache, "caches", ())
    numbers = {}
    for name, value in vars(cache).items():
        if isinstance(value, Integral):
            numbers[name] = int(value)
        elif isinstance(value, list):  # of as many arrays
            numbers[name] = len(value)
    return [type(cache).__name__, sorted(numbers.items()), [_options(slot) for slot in inner]]


def _digest(options: list[list[object]]) -> str:
    return hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]
