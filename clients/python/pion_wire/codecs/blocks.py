"""The codecs of scaled blocks: `turbo4`, `turbo3`, `turbo2`, `fp8` and `bf16_rope_fp8_body`.

A row is a structure of bytes, and the NumPy structure type that describes it is the format: a head,
then per 32 values a scale and codes. There is no rotation and no code book in any of them: a block
is scaled so that its largest magnitude meets the end of an even grid, or of an 8-bit float. The one
decision: codes come from the scale before it is rounded to f16, values from the rounded one. That
costs some accuracy, and is what other writers and readers of these formats do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pion_wire.codecs.base import Array, ArrayLayout, Codec, Flags, Floats
from pion_wire.codecs.bits import Bytes, pack, unpack

BLOCK = 32
# The smallest scale with a finite reciprocal. A block below it is stored as zeros: what it decodes
# to in any case, as f16 has no scale so small.
_SCALE_MIN = np.finfo(np.float32).smallest_normal
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


class Grid(ABC):
    """What codes of one block can say. A value is its level times the block's stored scale."""

    code_bytes: int
    """Of one block."""
    peak: np.float32
    """What the block's largest magnitude is scaled to."""
    stored_ratio: np.float32 = np.float32(1)
    """Stored scale over the scale that values are divided by."""
    zeros_scale: np.float32 = np.float32(1)
    """Stored scale of a block of zeros; values are divided by 1 there."""

    @abstractmethod
    def quantise(self, scaled: Floats) -> Bytes:
        """Codes, one per value, of values divided by their scale. May overwrite its argument."""

    @abstractmethod
    def write_levels(self, codes: Bytes, out: Floats) -> None:
        """What each code stands for, before scaling."""

    def pack(self, codes: Bytes) -> Bytes:
        """Codes [..., 32] as bytes [..., code_bytes]."""
        return codes

    def unpack(self, packed: Bytes) -> Bytes:
        """The way back."""
        return packed


class E4M3(Grid):
    """8-bit floats with 3 bits of mantissa. The peak is 240, though the type reaches 448."""

    code_bytes = BLOCK
    peak = np.float32(240)

    def quantise(self, scaled: Floats) -> Bytes:
        """To nearest even."""
        return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    def write_levels(self, codes: Bytes, out: Floats) -> None:
        """By table: many times as fast as converting."""
        np.take(_E4M3_VALUES, codes, out=out, mode="clip")


class Even(Grid):
    """2^bits levels at even distances: `step * code - origin`."""

    def __init__(
        self, bits: int, peak: float, shift: float, zero: int, step: int, origin: int
    ) -> None:
        self.bits = bits
        self.code_bytes = BLOCK * bits // 8
        self.peak = np.float32(peak)
        self.shift = np.float32(shift)  # added before rounding,
        self.zero = np.float32(zero)  # and after
        self.step = np.float32(step)
        self.origin = np.float32(origin)
        self.stored_ratio = np.float32(1 / step)
        # Levels at odd places only (turbo2) never meet 0: there the scale says it.
        self.zeros_scale = np.float32(origin % step == 0)

    def quantise(self, scaled: Floats) -> Bytes:
        """Rounded half away from zero, then cut to the grid."""
        scaled += self.shift
        scaled += (scaled > 0) - np.float32(0.5)
        np.trunc(scaled, out=scaled)
        scaled += self.zero
        np.clip(scaled, 0, (1 << self.bits) - 1, out=scaled)
        return scaled.astype(np.uint8)

    def write_levels(self, codes: Bytes, out: Floats) -> None:
        """Small integers, exact."""
        np.copyto(out, codes)
        if self.step != 1:
            out *= self.step
        out -= self.origin

    def pack(self, codes: Bytes) -> Bytes:
        """A stream of bits."""
        return pack(codes, self.bits)

    def unpack(self, packed: Bytes) -> Bytes:
        """The way back."""
        return unpack(packed, self.bits)


class Halves(Even):
    """Even levels of 4 bits, the second half of the block in the upper half of the bytes."""

    def pack(self, codes: Bytes) -> Bytes:
        """Byte i holds values i and i + 16."""
        half = BLOCK // 2
        return codes[..., :half] | (codes[..., half:] << np.uint8(4))

    def unpack(self, packed: Bytes) -> Bytes:
        """The way back."""
        return np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1)


_E4M3 = E4M3()
_TURBO: dict[int, Grid] = {
    4: Halves(4, peak=7, shift=0, zero=8, step=1, origin=8),
    3: Even(3, peak=3, shift=0, zero=4, step=1, origin=4),
    2: Even(2, peak=1.5, shift=1.5, zero=0, step=2, origin=3),
}


class _Blocks(Codec):
    """Rows of one byte table: a head, then blocks."""

    __slots__ = ()

    @property
    @abstractmethod
    def _grid(self) -> Grid: ...

    @property
    def _head(self) -> tuple[Any, ...]:
        """The structure's field before the blocks."""
        return ("norm2", "<f4")

    @property
    def _bare(self) -> int:
        """How many of a row's first values are in no block."""
        return 0

    def _write_head(self, head: Array, values: Floats, scales: Floats, levels: Floats) -> None:
        # One value after the other in float32: `sum` would add pairs, in an order of its own.
        levels *= scales[..., np.newaxis]
        np.square(levels, out=levels)
        head[:] = np.add.accumulate(levels.reshape(len(values), -1), axis=1)[:, -1]

    def _read_head(self, head: Array, out: Floats) -> None:
        pass

    def _objection(self, heads: int, head_dim: int) -> str | None:
        body = heads * head_dim - self._bare
        if body > 0 and body % BLOCK == 0:
            return None
        needed = f"{self._bare} + a positive multiple" if self._bare else "a positive multiple"
        return f"kv_dim {heads * head_dim}: it must be {needed} of {BLOCK}"

    def _row(self, width: int) -> np.dtype[Any]:
        block = np.dtype([("scale", "<f2"), ("codes", "u1", self._grid.code_bytes)])
        return np.dtype([self._head, ("blocks", block, (width - self._bare) // BLOCK)])

    def _arrays(self, heads: int, head_dim: int, dtype: str) -> tuple[ArrayLayout, ...]:
        return (ArrayLayout(".codes", "U8", (self._row(heads * head_dim).itemsize,)),)

    def _width(self, items: int) -> int:
        head_bytes = np.dtype([self._head]).itemsize
        return self._bare + (items - head_bytes) // (2 + self._grid.code_bytes) * BLOCK

    def _encode(self, values: Floats, stored: tuple[Array, ...]) -> None:
        grid = self._grid
        rows = self._structures(stored[0])
        blocks = values[:, self._bare :].reshape(len(values), -1, BLOCK)
        scales = _absmax(blocks) / grid.peak
        zeros = scales < _SCALE_MIN
        scales[zeros] = 1
        codes = grid.quantise(blocks * np.reciprocal(scales)[..., np.newaxis])
        levels = np.empty_like(blocks)
        grid.write_levels(codes, levels)
        scales *= grid.stored_ratio
        scales[zeros] = grid.zeros_scale
        rows["blocks"]["scale"] = scales
        rows["blocks"]["codes"] = grid.pack(codes)
        self._write_head(rows[self._head[0]], values, scales, levels)

    def _decode(self, stored: Sequence[Array], out: Floats) -> None:
        grid = self._grid
        rows = self._structures(stored[0])
        self._read_head(rows[self._head[0]], out)
        blocks = out[:, self._bare :].reshape(len(out), -1, BLOCK)  # a view: it only splits an axis
        grid.write_levels(grid.unpack(rows["blocks"]["codes"]), blocks)
        blocks *= rows["blocks"]["scale"].astype(np.float32)[..., np.newaxis]

    def _structures(self, stored: Array) -> Array:
        return stored.view(self._row(self._width(stored.shape[1])))[:, 0]

    def _refused(self, stored: tuple[Array, ...]) -> Flags:
        scales = self._structures(stored[0])["blocks"]["scale"]
        refused: Flags = ~np.isfinite(scales).all(axis=1)
        return refused


@dataclass(frozen=True, slots=True)
class Turbo(_Blocks):
    """`turbo4`, `turbo3`, `turbo2`: blocks on an even grid of 16, 8 or 4 levels."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in _TURBO:
            raise ValueError(f"turbo has 4, 3 or 2 bits, not {self.bits}")

    @property
    def name(self) -> str:
        """`turbo` and the bits."""
        return f"turbo{self.bits}"

    @property
    def _grid(self) -> Grid:
        return _TURBO[self.bits]


@dataclass(frozen=True, slots=True)
class Fp8(_Blocks):
    """Blocks of E4M3 floats."""

    @property
    def name(self) -> str:
        """`fp8`."""
        return "fp8"

    @property
    def _grid(self) -> Grid:
        return _E4M3


@dataclass(frozen=True, slots=True)
class Bf16RopeFp8Body(_Blocks):
    """The first `rope` values of a row in bf16, blocks of E4M3 after them.

    For latent keys: the part that carries positions suffers most from coarse steps. `rope` counts
    values of the row, not of a head.
    """

    rope: int

    def __post_init__(self) -> None:
        if self.rope < 1:
            raise ValueError(f"bf16_rope_fp8_body needs a positive rope, not {self.rope}")

    @property
    def name(self) -> str:
        """`bf16_rope_fp8_body`."""
        return "bf16_rope_fp8_body"

    @property
    def parameters(self) -> tuple[int | str, ...]:
        """The number of values in bf16."""
        return (self.rope,)

    @property
    def _grid(self) -> Grid:
        return _E4M3

    @property
    def _head(self) -> tuple[Any, ...]:
        return ("rope", "<u2", self.rope)

    @property
    def _bare(self) -> int:
        return self.rope

    def _write_head(self, head: Array, values: Floats, scales: Floats, levels: Floats) -> None:
        head[:] = values[:, : self.rope].astype(ml_dtypes.bfloat16).view(np.uint16)

    def _read_head(self, head: Array, out: Floats) -> None:
        out[:, : self.rope] = np.ascontiguousarray(head).view(ml_dtypes.bfloat16)


def _absmax(blocks: Floats) -> Floats:
    """The largest magnitude of each block, by halving: several times as fast as `max(axis=-1)`."""
    largest = np.abs(blocks)
    while largest.shape[-1] > 1:
        largest = np.maximum(largest[..., ::2], largest[..., 1::2])
    return largest[..., 0]
