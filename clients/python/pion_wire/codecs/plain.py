"""The codecs that keep one number per value: `raw`, the bits as they came, and `fp16`.

Refuse nothing but types: each value stands alone, infinities and NaNs included. The one decision:
f16 rows pass through `fp16` untouched instead of being widened and narrowed, because clients hide
bf16 patterns in them, and a NaN would not keep its payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pion_wire.codecs.base import Array, ArrayLayout, Codec, Floats, row_type


class _Plain(Codec):
    __slots__ = ()

    def _objection(self, heads: int, head_dim: int) -> str | None:
        return None

    def _width(self, items: int) -> int:
        return items

    def _encode(self, values: Floats, stored: tuple[Array, ...]) -> None:
        np.copyto(stored[0], values, casting="same_kind")

    def _decode(self, stored: Sequence[Array], out: Floats) -> None:
        np.copyto(out, stored[0])


@dataclass(frozen=True, slots=True)
class Raw(_Plain):
    """The bits of f32, f16 or bf16 rows, unchanged. The only lossless codec."""

    lossless = True

    @property
    def name(self) -> str:
        """`raw`."""
        return "raw"

    def encode(self, rows: Array) -> tuple[Array, ...]:
        """`rows` themselves (a copy only if they are not contiguous)."""
        if rows.ndim != 2:
            raise ValueError(f"rows have two dimensions, not {rows.ndim}")
        row_type(rows.dtype)
        return (np.ascontiguousarray(rows),)

    def _arrays(self, heads: int, head_dim: int, dtype: str) -> tuple[ArrayLayout, ...]:
        return (ArrayLayout("", dtype, (heads, head_dim)),)

    def _decoded_type(self, first: Array) -> str:
        return row_type(first.dtype)


@dataclass(frozen=True, slots=True)
class Fp16(_Plain):
    """Binary16, rounded to nearest even. Lossy unless the rows were f16, which keep their bits."""

    @property
    def name(self) -> str:
        """`fp16`."""
        return "fp16"

    def encode(self, rows: Array) -> tuple[Array, ...]:
        """As `Codec.encode`; f16 rows come back themselves (a copy only if not contiguous)."""
        if rows.ndim == 2 and rows.dtype == np.float16:
            return (np.ascontiguousarray(rows),)
        return super(Fp16, self).encode(rows)  # slots make a new class: the short form breaks

    def _arrays(self, heads: int, head_dim: int, dtype: str) -> tuple[ArrayLayout, ...]:
        return (ArrayLayout("", "F16", (heads, head_dim)),)
