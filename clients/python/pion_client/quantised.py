"""Which tensors of a model are stored how: K raw, V with a codec but for the layers at both ends.

Knows layouts and codecs; neither caches nor servers. The one decision: a codec does what its name says
and is named as the fidelity, `fp16` included, which rounds float32 and bf16. Rows that are binary16
already have nothing to lose by it: theirs is the raw prefix, and not another one of the same bits.
"""

import dataclasses
from typing import NamedTuple

from pion_client.arrays import mlx_dtype
from pion_client.values import Array, Prefix
from pion_wire import codecs
from pion_wire.blocks import RAW_FIDELITY
from pion_wire.layout import DType, Layout, LayoutError, Side, TensorLayout


class Quantised(NamedTuple):
    """How the rows of a model are stored."""

    vquant: str
    """The codec of V; "raw" keeps every bit."""
    boundary_protect: int
    """Layers at both ends whose V is raw as well."""

    def check(self) -> None:
        """Raises ValueError if the codec does not exist, or the number of layers is below 0."""
        try:
            codecs.parse(self.vquant)
        except ValueError as error:
            raise ValueError(f"vquant={self.vquant!r}: {error}") from error
        if self.boundary_protect < 0:
            raise ValueError(f"boundary_protect={self.boundary_protect}: it is at least 0")

    def stored(self, held: Layout) -> Layout:
        """Returns the layout under which what a cache holds is stored.

        Raises:
            ValueError: the codec cannot take rows of this width; the text names both.
        """
        slots = sorted({tensor.slot for tensor in held.tensors})
        inner = set(slots[self.boundary_protect : max(0, len(slots) - self.boundary_protect)])
        return Layout(tuple(self._tensor(tensor, inner) for tensor in held.tensors))

    def says(self, held: Layout) -> str:
        """Returns in words how it is stored."""
        types = "+".join(sorted({tensor.dtype.value for tensor in held.tensors}))
        stored = self.stored(held)
        if stored.fidelity == RAW_FIDELITY:
            return f"raw {types}"
        lossy = [tensor.slot for tensor in stored.tensors if tensor.codec != "raw"]
        return f"raw {types}, V of {len(lossy)} layers ({lossy[0]} to {lossy[-1]}) {self.vquant}"

    def _tensor(self, tensor: TensorLayout, inner: set[int]) -> TensorLayout:
        if tensor.side is Side.K or tensor.slot not in inner or not tensor.head_dim:
            return tensor
        if tensor.codec != RAW_FIDELITY:  # the cache itself keeps codes
            return tensor
        if (self.vquant, tensor.dtype) == ("fp16", DType.F16):
            return tensor
        try:
            return dataclasses.replace(tensor, codec=self.vquant)
        except LayoutError as error:
            raise ValueError(f"vquant={self.vquant!r}: {error.message}") from error


def as_held(prefix: Prefix, *, stored: Layout, held: Layout) -> list[tuple[Array, Array]]:
    """Returns fetched MLX rows in the types of the cache: what was stored lossily comes as float32."""
    types = {
        (kept.slot, kept.side): mlx_dtype(own.dtype)
        for kept, own in zip(stored.tensors, held.tensors, strict=True)
        if kept != own
    }

    def side(slot: int, which: Side, rows: Array) -> Array:
        return rows.astype(types[slot, which]) if (slot, which) in types else rows

    return [
        (side(slot, Side.K, keys), side(slot, Side.V, rows))
        for slot, (keys, rows) in zip(prefix.slots, prefix.layers, strict=True)
    ]


def codecs_of(layout: Layout) -> dict[tuple[int, Side | str], str]:
    """Returns the codecs of a layout's tensors, as `Client.store` takes them."""
    return {(tensor.slot, tensor.side): tensor.codec for tensor in layout.tensors}
