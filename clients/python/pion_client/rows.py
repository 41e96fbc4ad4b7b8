"""Rows on their way out: what a caller gives, token by token, as its codec stores them.

Knows arrays and codecs; neither messages nor calls. The one decision: values are encoded while they are
sent, one tensor at a time, so that no more of a prefix is in memory twice than that. What the caller
has encoded already is sent as it is, and raw rows are not copied but for the chunk in flight.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pion_client.arrays import as_numpy, dtype_of, invalid, is_array
from pion_client.values import Array, Codecs, Encoded
from pion_wire import codecs
from pion_wire.layout import LayoutError, Side, TensorLayout
from pion_wire.limits import CHUNK_BYTES_MAX


class Piece(NamedTuple):
    """Consecutive rows of one array of a tensor: at most 1 MiB of token-major bytes."""

    array_index: int
    first_row: int
    row_count: int
    data: memoryview


class Rows(Protocol):
    """The rows of one tensor that will be sent."""

    @property
    def tensor(self) -> TensorLayout:
        """What they are."""

    @property
    def token_count(self) -> int:
        """Number of rows."""

    def chunks(self) -> Iterator[Piece]:
        """Yields them by array and row."""


class StoredRows(NamedTuple):
    """Rows as they are stored."""

    tensor: TensorLayout
    arrays: Sequence[np.ndarray]
    """For each array of the codec its items as [tokens, *row_shape], any strides."""

    @property
    def token_count(self) -> int:
        """Number of rows."""
        return len(self.arrays[0])

    def chunks(self) -> Iterator[Piece]:
        """Yields them by array and row."""
        for index, (array, layout) in enumerate(zip(self.arrays, self.tensor.arrays, strict=True)):
            if not layout.row_bytes:
                continue
            step = CHUNK_BYTES_MAX // layout.row_bytes
            for first in range(0, self.token_count, step):
                # One chunk is transposed at a time, in the processor's cache; never the whole tensor.
                rows = np.ascontiguousarray(array[first : first + step])
                yield Piece(index, first, len(rows), rows.reshape(-1).view(np.uint8).data)


class ValueRows(NamedTuple):
    """Rows that have yet to be encoded."""

    tensor: TensorLayout
    values: np.ndarray
    """(kv_heads, tokens, head_dim)."""

    @property
    def token_count(self) -> int:
        """Number of rows."""
        return int(self.values.shape[1])

    def chunks(self) -> Iterator[Piece]:
        """Yields them by array and row.

        Raises:
            InvalidRequest: the codec cannot take a value.
        """
        yield from StoredRows(self.tensor, self._encoded()).chunks()

    def _encoded(self) -> list[np.ndarray]:
        count, width = self.token_count, self.tensor.heads * self.tensor.head_dim
        codec = codecs.parse(self.tensor.codec)
        stored = [
            np.empty((count, layout.row_items), layout.numpy) for layout in self.tensor.arrays
        ]
        step = max(1, CHUNK_BYTES_MAX // max(1, width * self.values.itemsize))
        for first in range(0, count, step):
            few = np.ascontiguousarray(self.values[:, first : first + step].transpose(1, 0, 2))
            try:
                encoded = codec.encode(few.reshape(-1, width))
            except ValueError as error:
                where = f"from row {first} on: " if first else ""
                raise invalid(f"layers.{self.tensor.name}", f"{where}{error}") from error
            for array, part in zip(stored, encoded, strict=True):
                array[first : first + step] = part
        return stored


def rows_of(
    layers: Sequence[tuple[Array | Encoded, Array | Encoded]],
    slots: Sequence[int] | None,
    codecs: Codecs,
) -> list[Rows]:
    """Returns the tensors of `layers`, by slot, K before V; evaluates MLX arrays.

    Raises:
        InvalidRequest: shapes, types, slots or codecs do not fit.
    """
    numbers = range(len(layers)) if slots is None else slots
    if len(numbers) != len(layers):
        raise invalid("slots", f"{len(numbers)} slots for {len(layers)} layers")
    unused = set() if isinstance(codecs, str) else set(codecs)
    tensors = []
    for index, (slot, pair) in enumerate(zip(numbers, layers, strict=True)):
        if len(pair) != 2:
            raise invalid(f"layers[{index}]", "a layer is a pair of K and V")
        for side, rows in zip(Side, pair, strict=True):
            unused.discard((slot, side))
            codec = codecs if isinstance(codecs, str) else codecs.get((slot, side), "raw")
            tensors.append(tensor_rows(f"layers[{index}].{side}", int(slot), side, rows, codec))
    if unused:
        raise invalid("codecs", f"there is no {', '.join(map(str, unused))} in layers")
    return sorted(tensors, key=lambda rows: (rows.tensor.slot, rows.tensor.side))


def tensor_rows(
    field: str, slot: int, side: Side, rows: Array | Encoded, codec: str = "raw"
) -> Rows:
    """Returns the rows of one side, an array of (kv_heads, tokens, head_dim) or an `Encoded`.

    Raises as `rows_of` does.
    """
    try:
        if isinstance(rows, Encoded):
            return _as_stored(field, rows.tensor(slot, side), rows.arrays)
        if not is_array(rows):
            raise invalid(field, f"a {type(rows).__name__} is neither a NumPy nor an MLX array")
        if len(rows.shape) != 3:
            raise invalid(field, f"shape {tuple(rows.shape)} is not (kv_heads, tokens, head_dim)")
        heads, _, head_dim = map(int, rows.shape)
        tensor = TensorLayout(slot, side, heads, head_dim, dtype_of(rows), codec)
    except LayoutError as error:
        raise invalid(f"{field}.{error.field}", error.message) from error
    # An MLX array is evaluated here, on the caller's thread: the stream is written by another one.
    values = as_numpy(rows, tensor.dtype.numpy)
    if tensor.codec == "raw":
        return StoredRows(tensor, [values.transpose(1, 0, 2)])
    return ValueRows(tensor, values)


def _as_stored(field: str, tensor: TensorLayout, arrays: Sequence[Any]) -> StoredRows:
    found = [(str(array.dtype).rpartition(".")[2], tuple(array.shape)) for array in arrays]
    tokens = found[0][1][-2] if found and len(found[0][1]) > 1 else 0
    expected = [
        (layout.numpy.name, (*layout.row_shape[:-1], tokens, layout.row_shape[-1]))
        for layout in tensor.arrays
    ]
    if found != expected:
        raise invalid(field, f"{found} are not the arrays of {tensor.codec}, {expected}")
    stored = [
        as_numpy(array, layout.numpy) for array, layout in zip(arrays, tensor.arrays, strict=True)
    ]
    return StoredRows(tensor, [np.moveaxis(array, -2, 0) for array in stored])
