"""What a side of a prefix is declared to be, before and beside the tensors that it has.

A client of the RESP wire names a row's width and a codec once, for all layers or layer by layer, and
then stores layers as it comes to them. So a declaration answers one question: what is the tensor of
this slot, if rows of it arrive? Rows declared so have one head as wide as the row. Values of a side
stored as binary16 are of that type; of every other codec they are float32.
"""

import functools
import json
from dataclasses import dataclass
from typing import NamedTuple

from pion_wire.layout import DType, Side, TensorLayout


class LayerSpec(NamedTuple):
    """One layer: values in a row, and how rows are stored."""

    width: int
    codec: str


@dataclass(frozen=True, slots=True)
class Declaration:
    """A side: what every layer is, and the layers that are something else."""

    default: LayerSpec | None
    """Of the layers that have no spec of their own; None: they cannot be stored."""
    layers: tuple[LayerSpec, ...] = ()
    bare: bool = False
    """Whether a session of the namespace's own name, and no prefix, was declared."""

    def same_tensors(self, other: "Declaration") -> bool:
        """Whether both say the same of every layer."""
        return (self.default, self.layers) == (other.default, other.layers)

    def spec(self, slot: int) -> LayerSpec | None:
        """Returns what a layer is; None if nothing says so."""
        return self.layers[slot] if slot < len(self.layers) else self.default

    def tensor(self, slot: int, side: Side) -> TensorLayout | None:
        """Returns the tensor of a slot; None if nothing says what it is.

        Raises:
            LayoutError: there is no such slot.
        """
        spec = self.spec(slot)
        if spec is None:
            return None
        dtype = DType.F16 if spec.codec == "fp16" else DType.F32
        return TensorLayout(slot, side, 1, spec.width, dtype, spec.codec)

    def to_json(self) -> str:
        """Returns the text that the catalogue keeps."""
        return json.dumps([self.default, self.layers, self.bare], separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def from_json(text: str) -> "Declaration":
        """Returns the declaration that `to_json` wrote."""
        default, layers, bare = json.loads(text)
        return Declaration(
            LayerSpec(*default) if default else None,
            tuple(LayerSpec(*layer) for layer in layers),
            bare,
        )
