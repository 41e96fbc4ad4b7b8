"""Layouts: what the rows of a prefix look like, per (slot, side).

A row is the K or V vector of one token in one slot, token-major: `heads * head_dim` values, so the
rows of a tensor follow one another as [token][head][dim]. Values here are frozen and know neither
protobuf nor files; both directions of both are derived from them.
"""

import enum
import functools
import itertools
import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from pion_wire import codecs, limits
from pion_wire.blocks import RAW_FIDELITY
from pion_wire.codecs import ArrayLayout


class LayoutError(ValueError):
    """A layout that cannot be stored; `field` says which part of it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class DType(enum.Enum):
    """Type of the values of a tensor, by its name in safetensors."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"

    @property
    def numpy(self) -> "np.dtype[Any]":
        """The NumPy type; bf16 is `ml_dtypes.bfloat16`, never binary16."""
        return _NUMPY[self]

    @property
    def itemsize(self) -> int:
        """Bytes per value."""
        return self.numpy.itemsize

    @classmethod
    def of(cls, dtype: "np.dtype[Any]") -> "DType":
        """Returns the type of a NumPy array's values.

        Raises:
            LayoutError: values of this type are not stored.
        """
        for known, numpy_type in _NUMPY.items():
            if dtype == numpy_type:
                return known
        raise LayoutError("data_type", f"{dtype} is not stored; f32, f16 and bf16 are")


_NUMPY: "dict[DType, np.dtype[Any]]" = {
    DType.F32: np.dtype("<f4"),
    DType.F16: np.dtype("<f2"),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
}


class Side(enum.StrEnum):
    """Which half of an attention cache."""

    K = "k"
    V = "v"


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The rows of one (slot, side)."""

    slot: int
    side: Side
    heads: int
    head_dim: int
    dtype: DType
    codec: str = "raw"

    def __post_init__(self) -> None:
        if not 0 <= self.slot < limits.SLOTS_MAX:
            raise LayoutError("slot", f"{self.slot} is outside 0..{limits.SLOTS_MAX - 1}")
        if not 1 <= self.heads <= limits.ROW_BYTES_MAX:
            raise LayoutError("heads", f"{self.heads} is outside 1..{limits.ROW_BYTES_MAX}")
        if self.head_dim < 0:
            raise LayoutError("head_dim", f"{self.head_dim} is below 0")
        if self.heads * self.head_dim * self.dtype.itemsize > limits.ROW_BYTES_MAX:
            raise LayoutError(
                "head_dim",
                f"a row of {self.heads} heads of {self.head_dim} {self.dtype.value} values exceeds "
                f"{limits.ROW_BYTES_MAX} bytes",
            )
        try:
            codec = codecs.parse(self.codec)
            codec.check(self.heads, self.head_dim)
        except ValueError as error:
            raise LayoutError("codec", str(error)) from error
        # Equal codecs have equal names: the canonical one is what is kept and compared.
        object.__setattr__(self, "codec", str(codec))

    def __hash__(self) -> int:
        # Without the members of enumerations, whose own hashes are computed in Python.
        return hash((self.slot, self.side is Side.V, self.heads, self.head_dim, self.codec))

    @property
    def name(self) -> str:
        """Its name in a segment, such as `k.0`."""
        return f"{self.side.value}.{self.slot}"

    @property
    def key(self) -> int:
        """A number that is its own in any layout, in the order of layouts: 2 slot, + 1 for V."""
        return 2 * self.slot + (self.side is Side.V)

    @property
    def arrays(self) -> tuple[ArrayLayout, ...]:
        """The arrays that its codec keeps, in the order in which they are stored and sent."""
        return _stored_as(self.codec, self.heads, self.head_dim, self.dtype).arrays

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row, over all arrays."""
        return _stored_as(self.codec, self.heads, self.head_dim, self.dtype).row_bytes


tensor_layout = functools.lru_cache(maxsize=4096)(TensorLayout)
"""The same few come again and again, with every answer: one is found sooner than it is checked."""


class _StoredAs(NamedTuple):
    arrays: tuple[ArrayLayout, ...]
    row_bytes: int


@functools.lru_cache(maxsize=1024)
def _stored_as(codec: str, heads: int, head_dim: int, dtype: DType) -> _StoredAs:
    arrays = codecs.parse(codec).arrays(heads, head_dim, dtype.value)
    return _StoredAs(arrays, sum(array.row_bytes for array in arrays))


@dataclass(frozen=True)
class Layout:
    """All tensors of a prefix: ordered by slot, K before V, none twice.

    What follows from them is derived once: every answer about a prefix asks for it.
    """

    tensors: tuple[TensorLayout, ...]

    def __post_init__(self) -> None:
        if len(self.tensors) > limits.TENSORS_MAX:
            raise LayoutError("tensors", f"more than {limits.TENSORS_MAX} tensors")
        order = [(tensor.slot, tensor.side) for tensor in self.tensors]
        if any(earlier >= later for earlier, later in itertools.pairwise(order)):
            raise LayoutError("tensors", "tensors must be ordered by slot, K before V, none twice")

    def __hash__(self) -> int:
        return hash(self._json)  # which is made once

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one token over all tensors."""
        return sum(tensor.row_bytes for tensor in self.tensors)

    @functools.cached_property
    def fidelity(self) -> str:
        """`raw`, or the codecs of a lossy prefix: tensors of one codec together, in order."""
        codecs = [tensor.codec for tensor in self.tensors]
        if all(codec == "raw" for codec in codecs):
            return RAW_FIDELITY
        return ";".join(f"{tensor.name}={tensor.codec}" for tensor in self.tensors)

    def to_json(self) -> str:
        """Returns the canonical text: equal layouts have equal texts."""
        return self._json

    @functools.cached_property
    def _json(self) -> str:
        rows = [
            [t.slot, t.side.value, t.heads, t.head_dim, t.dtype.value, t.codec]
            for t in self.tensors
        ]
        return json.dumps(rows, separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def from_json(text: str) -> "Layout":
        """Returns the layout that `to_json` wrote.

        Raises:
            LayoutError: the text is not a layout.
        """
        try:
            rows = json.loads(text)
            tensors = tuple(
                tensor_layout(slot, Side(side), heads, head_dim, DType(dtype), codec)
                for slot, side, heads, head_dim, dtype, codec in rows
            )
        except (ValueError, TypeError) as error:
            raise LayoutError("layout", f"not a layout: {error}") from error
        return Layout(tensors)


class PartInfo(NamedTuple):
    """An opaque piece of a prefix: what it is and at which token boundary it is exact."""

    kind: str
    slot: int
    boundary_tokens: int
    size_bytes: int
    description: str = ""


def shape_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a safetensors array."""
    return _SAFETENSORS_ITEMSIZE[dtype] * math.prod(shape)


_SAFETENSORS_ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1, "I8": 1}
