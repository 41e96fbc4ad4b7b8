"""`int8`: one byte per value, with the range of its row beside it.

The one decision: scale and minimum belong to a row. One pair per layer, taken anew from each batch,
would change the meaning of every earlier row when a batch is appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pion_wire.codecs.base import Array, ArrayLayout, Codec, Flags, Floats

_STEPS = np.float32(254)  # codes are -127..127
_FLAT = np.float32(1e-8)  # a range below it counts as 1


@dataclass(frozen=True, slots=True)
class Int8(Codec):
    """Affine, 255 levels over each row's range; see the package's byte table."""

    @property
    def name(self) -> str:
        """`int8`."""
        return "int8"

    def _objection(self, heads: int, head_dim: int) -> str | None:
        return None if head_dim else "head_dim 0: there is no range to scale"

    def _arrays(self, heads: int, head_dim: int, dtype: str) -> tuple[ArrayLayout, ...]:
        return (
            ArrayLayout(".codes", "I8", (heads, head_dim)),
            ArrayLayout(".scales", "F32", (1,)),
            ArrayLayout(".biases", "F32", (1,)),
        )

    def _width(self, items: int) -> int:
        return items

    def _encode(self, values: Floats, stored: tuple[Array, ...]) -> None:
        codes, scales, biases = stored
        np.min(values, axis=1, keepdims=True, out=biases)
        biases += 0  # no negative zero: which of two zeros is the minimum is NumPy's secret
        extent = np.max(values, axis=1, keepdims=True) - biases
        extent[extent < _FLAT] = 1
        np.divide(_STEPS, extent, out=scales)
        steps = values - biases
        steps *= scales
        np.clip(steps, 0, _STEPS, out=steps)
        np.subtract(np.trunc(steps, out=steps), 127, out=codes, casting="unsafe")

    def _decode(self, stored: Sequence[Array], out: Floats) -> None:
        codes, scales, biases = stored
        np.add(codes, 127, out=out, dtype=np.float32)
        out /= scales
        out += biases

    def _refused(self, stored: tuple[Array, ...]) -> Flags:
        # An infinite range has the scale 0, and a NaN or a row of one infinity the scale NaN.
        refused: Flags = ~(stored[1][:, 0] > 0)
        return refused
