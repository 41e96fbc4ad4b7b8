"""`mlx_affine(bits,group,scale type)`: the layout of mlx's affine quantisation.

Arrays are those of `mx.quantize`, so rows move between a store and a `QuantizedKVCache` without
being decoded, whoever encoded them. The one decision: groups lie along one head, so group must
divide head_dim, as mlx demands; where it does, the bytes are those of one head of kv_dim too.

`encode` is not `mx.quantize`: its scale is never negative and its bias is the group's minimum.
`mx.dequantize` reads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pion_wire.codecs.base import Array, ArrayLayout, Codec, Flags, Floats
from pion_wire.codecs.bits import pack, unpack

_BITS = (1, 2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_SCALE_TYPES = ("f16", "bf16", "f32")
_FLAT_SCALE = np.float32(1e-8)


@dataclass(frozen=True, slots=True)
class MlxAffine(Codec):
    """2^bits even levels from each group's minimum to its maximum. (4, 32, "f16") is `mlx4g32`."""

    bits: int
    group: int
    scale_type: str

    def __post_init__(self) -> None:
        for what, value, choices in (
            ("bits", self.bits, _BITS),
            ("group", self.group, _GROUPS),
            ("scale type", self.scale_type, _SCALE_TYPES),
        ):
            if value not in choices:
                listed = ", ".join(map(str, choices))
                raise ValueError(f"mlx_affine: {what} is one of {listed}, not {value}")

    @property
    def name(self) -> str:
        """`mlx_affine`."""
        return "mlx_affine"

    @property
    def parameters(self) -> tuple[int | str, ...]:
        """Bits, group, scale type."""
        return (self.bits, self.group, self.scale_type)

    @property
    def label(self) -> str:
        """`mlx4g32` where that is meant."""
        return "mlx4g32" if self.parameters == (4, 32, "f16") else str(self)

    def _objection(self, heads: int, head_dim: int) -> str | None:
        if head_dim > 0 and head_dim % self.group == 0:
            return None
        needed = f"it must be a positive multiple of {self.group}"
        return f"head_dim {head_dim} (kv_dim {heads * head_dim}): {needed}"

    def _arrays(self, heads: int, head_dim: int, dtype: str) -> tuple[ArrayLayout, ...]:
        groups = (heads, head_dim // self.group)
        return (
            ArrayLayout(".codes", "U32", (heads, head_dim * self.bits // 32)),
            ArrayLayout(".scales", self.scale_type.upper(), groups),
            ArrayLayout(".biases", self.scale_type.upper(), groups),
        )

    def _width(self, items: int) -> int:
        return items * 32 // self.bits

    def _encode(self, values: Floats, stored: tuple[Array, ...]) -> None:
        words, scales, biases = stored
        levels = np.float32((1 << self.bits) - 1)
        groups = values.reshape(len(values), -1, self.group)
        low, extent = _range(groups)
        steps = extent / levels
        steps[steps <= 0] = _FLAT_SCALE
        scales[:] = steps  # rounded here, and codes are taken against what was rounded
        biases[:] = low
        bias, scale = (part.astype(np.float32)[..., np.newaxis] for part in (biases, scales))
        codes = (groups - bias) / np.where(scale == 0, np.float32(np.inf), scale)
        codes += np.float32(0.5)
        np.clip(np.trunc(codes, out=codes), 0, levels, out=codes)
        packed = pack(codes.astype(np.uint8).reshape(len(values), -1), self.bits)
        words[:] = packed.view("<u4")

    def _decode(self, stored: Sequence[Array], out: Floats) -> None:
        words, scales, biases = stored
        packed = np.ascontiguousarray(words).view(np.uint8)
        groups = out.reshape(len(out), -1, self.group)
        np.copyto(groups, unpack(packed, self.bits).reshape(groups.shape))
        groups *= scales.astype(np.float32)[..., np.newaxis]
        groups += biases.astype(np.float32)[..., np.newaxis]

    def _refused(self, stored: tuple[Array, ...]) -> Flags:
        _, scales, biases = stored
        refused: Flags = np.any(~np.isfinite(scales) | ~np.isfinite(biases), axis=1)
        return refused


def _range(groups: Floats) -> tuple[Floats, Floats]:
    """Minimum and extent of each group, by halving: faster than reducing a short axis.

    Adding 0 leaves no negative zero: which of two zeros is the minimum would depend on the batch.
    """
    low = high = groups
    while low.shape[-1] > 1:
        low = np.minimum(low[..., ::2], low[..., 1::2])
        high = np.maximum(high[..., ::2], high[..., 1::2])
    return low[..., 0] + np.float32(0), high[..., 0] - low[..., 0]
