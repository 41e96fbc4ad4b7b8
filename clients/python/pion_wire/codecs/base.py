"""What every codec is: a value with a name and parameters, and a way there and back.

Refuses to know any bit layout. The one decision: the loop over rows lives here. A codec sees a few
rows at a time, as float32, with NumPy's floating-point warnings off, so that its temporaries stay
in the processor's cache and their size does not grow with the number of rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

ROW_TYPES = ("F32", "F16", "BF16")
"""What rows come as, in the words of safetensors, which this package uses throughout."""

Array = NDArray[Any]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

# 128 KiB of float32: a handful of temporaries of this size fit a core's L2 cache.
_VALUES_AT_A_TIME = 1 << 15

_NUMPY: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype("<u4"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
}


class ArrayLayout(NamedTuple):
    """One array that a codec keeps for a tensor."""

    suffix: str
    """Tells it from the others: `k.0` + suffix is its name. Empty, or begins with a dot."""
    dtype: str
    """F32, F16, BF16, U32, U8 or I8."""
    row_shape: tuple[int, ...]
    """Shape of one row; the stored array is [rows, *row_shape]."""

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type; bf16 is `ml_dtypes.bfloat16`."""
        return _NUMPY[self.dtype]

    @property
    def row_items(self) -> int:
        """Items in one row."""
        return math.prod(self.row_shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.row_items * self.numpy.itemsize


def row_type(dtype: np.dtype[Any]) -> str:
    """The word for the NumPy type of rows. ValueError for all but float32, float16 and bfloat16."""
    for word in ROW_TYPES:
        if dtype == _NUMPY[word]:
            return word
    raise ValueError(f"rows are {', '.join(ROW_TYPES)}, not {dtype}")


class Codec(ABC):
    """How the rows of one tensor are stored. A frozen value: equal parameters, equal codecs."""

    __slots__ = ()

    lossless: ClassVar[bool] = False
    """Whether decoding gives back every bit of any row."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name without parameters."""

    @property
    def parameters(self) -> tuple[int | str, ...]:
        """In the order of the canonical form."""
        return ()

    @property
    def label(self) -> str:
        """The shortest name that `parse` takes: for people, and for wires that know no other."""
        return str(self)

    def __str__(self) -> str:
        """The canonical form, which `parse` reads back."""
        inside = ",".join(map(str, self.parameters))
        return f"{self.name}({inside})" if inside else self.name

    def check(self, heads: int, head_dim: int) -> None:
        """Raise ValueError, naming codec and dimension, if rows of this shape cannot be stored."""
        if heads < 1 or head_dim < 0:
            raise ValueError(f"{self.label} cannot take {heads} heads of {head_dim}")
        why = self._objection(heads, head_dim)
        if why:
            raise ValueError(f"{self.label} cannot take {why}")

    def arrays(self, heads: int, head_dim: int, dtype: str) -> tuple[ArrayLayout, ...]:
        """The arrays of a tensor whose rows are `heads` x `head_dim` values and came as `dtype`.

        Raises ValueError as `check` does.
        """
        if dtype not in ROW_TYPES:
            raise ValueError(f"rows are {', '.join(ROW_TYPES)}, not {dtype}")
        self.check(heads, head_dim)
        return self._arrays(heads, head_dim, dtype)

    def row_bytes(self, heads: int, head_dim: int, dtype: str) -> int:
        """Bytes of one stored row, over all arrays."""
        return sum(layout.row_bytes for layout in self.arrays(heads, head_dim, dtype))

    def encode(self, rows: Array) -> tuple[Array, ...]:
        """Store `rows`, [rows, D] of F32, F16 or BF16.

        Returns the arrays of `arrays(1, D)`, each [rows, items]. Their bytes are those of any other
        (heads, head_dim) with the same D that the codec takes. Where nothing has to change, the
        input itself comes back, not a copy. Raises ValueError for rows that cannot be stored: their
        type, their dimension, or a value (see the package on what is not finite).
        """
        if rows.ndim != 2:
            raise ValueError(f"rows have two dimensions, not {rows.ndim}")
        count, width = rows.shape
        layouts = self.arrays(1, width, row_type(rows.dtype))
        stored = tuple(np.empty((count, layout.row_items), layout.numpy) for layout in layouts)
        with np.errstate(all="ignore"):
            for few in _batches(count, width):
                values = rows[few].astype(np.float32, order="C", copy=False)
                self._encode(values, tuple(array[few] for array in stored))
            refused = np.flatnonzero(self._refused(stored))
        if refused.size:
            raise ValueError(
                f"{self.label} cannot take row {refused[0]}: "
                "a value is not finite, or too large for the scale it would share"
            )
        return stored

    def decode(self, arrays: Sequence[Array], out: Floats | None = None) -> Floats:
        """The rows that `arrays` hold, as float32 [rows, D].

        `arrays` are as `encode` made them or with each row in the shape of its `ArrayLayout`. `out`
        is written to if given: a buffer used again saves the page faults of a new one, which cost
        as much as decoding. Raises ValueError if the arrays do not fit together. Any bytes decode.
        """
        flat = [array.reshape(len(array), math.prod(array.shape[1:])) for array in arrays]
        count, width = self._measure(flat)
        if out is None:
            out = np.empty((count, width), np.float32)
        elif out.shape != (count, width) or out.dtype != np.float32:
            raise ValueError(f"out is {out.dtype} {out.shape}, not float32 {(count, width)}")
        with np.errstate(all="ignore"):
            for few in _batches(count, width):
                self._decode([array[few] for array in flat], out[few])
        return out

    def _measure(self, arrays: Sequence[Array]) -> tuple[int, int]:
        """Rows and D of flattened arrays, or ValueError if no rows of this codec look like that."""
        if arrays:
            width = self._width(arrays[0].shape[1])
            if self._objection(1, width) is None:
                layouts = self._arrays(1, width, self._decoded_type(arrays[0]))
                expected = [(len(arrays[0]), layout.row_items, layout.numpy) for layout in layouts]
                if [(*array.shape, array.dtype) for array in arrays] == expected:
                    return len(arrays[0]), width
        found = ", ".join(f"{array.dtype} {array.shape}" for array in arrays) or "no arrays"
        raise ValueError(f"not rows of {self.label}: {found}")

    def _decoded_type(self, first: Array) -> str:
        """The data type of the layout; only `raw` stores it."""
        return "F32"

    @abstractmethod
    def _objection(self, heads: int, head_dim: int) -> str | None:
        """The dimension that cannot be taken, and why; None if all is well."""

    @abstractmethod
    def _arrays(self, heads: int, head_dim: int, dtype: str) -> tuple[ArrayLayout, ...]:
        """`arrays`, for dimensions that were checked."""

    @abstractmethod
    def _width(self, items: int) -> int:
        """D, from the number of items in one row of the first array (rounded down if none fits)."""

    @abstractmethod
    def _encode(self, values: Floats, stored: tuple[Array, ...]) -> None:
        """Write a few rows. Values that cannot be stored may leave anything but must not raise."""

    @abstractmethod
    def _decode(self, stored: Sequence[Array], out: Floats) -> None:
        """Write a few rows of float32."""

    def _refused(self, stored: tuple[Array, ...]) -> Flags:
        """Per row, whether a stored scale shows that a value could not be taken."""
        return np.zeros(len(stored[0]), np.bool_)


def _batches(count: int, width: int) -> Iterator[slice]:
    step = max(1, _VALUES_AT_A_TIME // max(1, width))
    return (slice(start, start + step) for start in range(0, count, step))
