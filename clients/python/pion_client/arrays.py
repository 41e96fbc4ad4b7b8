"""Arrays in and out: NumPy's and MLX's, and the token-major rows between them.

MLX is imported only where its arrays come in or are asked for. The one decision: the bits are moved as
unsigned integers of their width. No value is ever converted, so no NaN loses its payload and bf16 never
meets binary16.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pion_client.errors import Forked, InvalidRequest
from pion_client.values import Array
from pion_wire.layout import DType, Layout, LayoutError, Side, TensorLayout
from pion_wire.limits import CHUNK_BYTES_MAX

_BITS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def invalid(field: str, message: str) -> InvalidRequest:
    """Returns the error of a field that is refused before anything is sent."""
    return InvalidRequest(f"{field}: {message}", metadata={"field": field})


def text(field: str, value: str) -> str:
    """Returns a text that can be sent.

    Raises:
        InvalidRequest: it has no UTF-8, because of a surrogate that stands alone.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(field, f"{value!r} has no UTF-8") from error
    return value


def mlx_core() -> Any:
    """Returns MLX, where it can be used.

    Raises:
        Forked: this process was forked from one that had imported MLX. Its threads do not exist here,
            and what is given to them to evaluate would be waited for for ever. Whether they ran
            already cannot be seen, so the import decides.
    """
    if _mlx_of_parent:
        raise Forked(
            "MLX cannot be used in a process forked from one that has imported it: "
            "start processes with 'spawn'"
        )
    import mlx.core as mx

    return mx


_mlx_of_parent: list[bool] = []


def _forked() -> None:
    if "mlx.core" in sys.modules:
        _mlx_of_parent.append(True)


os.register_at_fork(after_in_child=_forked)


class Rows(NamedTuple):
    """The rows of one tensor that will be sent: bits of shape (heads, tokens, dim), any strides."""

    tensor: TensorLayout
    bits: np.ndarray

    @property
    def token_count(self) -> int:
        """Number of rows."""
        return int(self.bits.shape[1])

    def chunks(self) -> Iterator[tuple[int, int, memoryview]]:
        """Yields (first row, rows, bytes) with at most 1 MiB of token-major bytes each."""
        row_bytes = self.tensor.row_bytes
        if not row_bytes:
            return
        step = CHUNK_BYTES_MAX // row_bytes
        for first in range(0, self.token_count, step):
            # One chunk is transposed at a time, in the processor's cache; never the whole tensor.
            rows = np.ascontiguousarray(self.bits[:, first : first + step].transpose(1, 0, 2))
            yield first, len(rows), rows.data.cast("B")


def rows_of(layers: Sequence[tuple[Array, Array]], slots: Sequence[int] | None) -> list[Rows]:
    """Returns the tensors of `layers`, by slot, K before V; evaluates MLX arrays.

    Raises:
        InvalidRequest: shapes, types or slots do not fit.
    """
    numbers = range(len(layers)) if slots is None else slots
    if len(numbers) != len(layers):
        raise invalid("slots", f"{len(numbers)} slots for {len(layers)} layers")
    tensors = []
    for index, (slot, pair) in enumerate(zip(numbers, layers, strict=True)):
        if len(pair) != 2:
            raise invalid(f"layers[{index}]", "a layer is a pair of K and V")
        for side, array in zip(Side, pair, strict=True):
            tensors.append(tensor_rows(f"layers[{index}].{side}", int(slot), side, array))
    return sorted(tensors, key=lambda rows: (rows.tensor.slot, rows.tensor.side))


def tensor_rows(field: str, slot: int, side: Side, array: Array) -> Rows:
    """Returns the rows of one array of shape (kv_heads, tokens, head_dim); raises as `rows_of` does."""
    if not isinstance(array, np.ndarray) and not _is_mlx(array):
        raise invalid(field, f"a {type(array).__name__} is neither a NumPy nor an MLX array")
    if len(array.shape) != 3:
        raise invalid(field, f"shape {tuple(array.shape)} is not (kv_heads, tokens, head_dim)")
    try:
        dtype = (
            DType.of(array.dtype) if isinstance(array, np.ndarray) else _dtype_of_mlx(array.dtype)
        )
        tensor = TensorLayout(slot, side, int(array.shape[0]), int(array.shape[2]), dtype)
    except LayoutError as error:
        raise invalid(f"{field}.{error.field}", error.message) from error
    bits = _BITS[dtype.itemsize]
    if isinstance(array, np.ndarray):
        return Rows(tensor, array.view(bits))
    mx = mlx_core()
    # Evaluates here, on the caller's thread: the stream is written by another one. Not a copy.
    return Rows(tensor, np.asarray(array.view(mx.uint16 if dtype.itemsize == 2 else mx.uint32)))


class Layers(NamedTuple):
    """What was fetched, by slot."""

    pairs: list[tuple[Array, Array]]
    """(K, V), each (kv_heads, tokens, head_dim)."""
    slots: tuple[int, ...]


class Destination(Protocol):
    """Where fetched rows go, tensor by tensor."""

    arrays: dict[TensorLayout, Array]
    """What is finished: (kv_heads, tokens, head_dim)."""

    def room(self, tensor: TensorLayout) -> np.ndarray:
        """Returns memory for the rows of the next tensor: bytes, token-major, not initialised."""

    def finish(self, tensor: TensorLayout, room: np.ndarray) -> None:
        """Takes the filled memory back and makes an array of it."""


class NumpyDestination:
    """One block of fresh memory for everything; what comes out are views of it."""

    def __init__(self, layout: Layout, row_count: int) -> None:
        self.arrays: dict[TensorLayout, Array] = {}
        self._row_count = row_count
        # np.empty, not bytearray: pages that are only ever written once need not be cleared first.
        sizes = (_aligned(row_count * tensor.row_bytes) for tensor in layout.tensors)
        self._memory = np.empty(sum(sizes), np.uint8)
        self._used = 0

    def room(self, tensor: TensorLayout) -> np.ndarray:
        """Returns the next stretch of the block."""
        size = self._row_count * tensor.row_bytes
        begin = self._used
        self._used += _aligned(size)
        return self._memory[begin : begin + size]

    def finish(self, tensor: TensorLayout, room: np.ndarray) -> None:
        """Keeps a view of it."""
        values = _token_major(tensor, self._row_count, room).view(tensor.dtype.numpy)
        self.arrays[tensor] = values.transpose(1, 0, 2)


class MlxDestination:
    """Memory of one tensor, used over and over; MLX copies out of it, while it is in the cache."""

    def __init__(self, layout: Layout, row_count: int) -> None:
        self.arrays: dict[TensorLayout, Array] = {}
        self._row_count = row_count
        largest = max((tensor.row_bytes for tensor in layout.tensors), default=0)
        self._memory = np.empty(row_count * largest, np.uint8)

    def room(self, tensor: TensorLayout) -> np.ndarray:
        """Returns the memory."""
        return self._memory[: self._row_count * tensor.row_bytes]

    def finish(self, tensor: TensorLayout, room: np.ndarray) -> None:
        """Copies it into an array of MLX, which is evaluated: another thread may use it."""
        mx = mlx_core()
        bits = mx.array(_token_major(tensor, self._row_count, room))
        array = bits.view(mlx_dtype(tensor.dtype)).transpose(1, 0, 2)
        mx.eval(array)
        self.arrays[tensor] = array


def layers_of(
    layout: Layout, row_count: int, arrays: dict[TensorLayout, Array], *, as_mlx: bool
) -> Layers:
    """Returns the tensors by slot; a side that a slot does not have is empty."""
    slots: dict[int, dict[Side, Array]] = {}
    dtypes = {}
    for tensor in layout.tensors:
        slots.setdefault(tensor.slot, {})[tensor.side] = arrays[tensor]
        dtypes[tensor.slot] = tensor.dtype

    def side(slot: int, which: Side) -> Array:
        array = slots[slot].get(which)
        return _empty(row_count, dtypes[slot], as_mlx=as_mlx) if array is None else array

    return Layers([(side(slot, Side.K), side(slot, Side.V)) for slot in slots], tuple(slots))


def mlx_dtype(dtype: DType) -> Any:
    """Returns MLX's name of a type."""
    mx = mlx_core()
    return {DType.F32: mx.float32, DType.F16: mx.float16, DType.BF16: mx.bfloat16}[dtype]


def _empty(row_count: int, dtype: DType, *, as_mlx: bool) -> Array:
    shape = (1, row_count, 0)
    if not as_mlx:
        return np.empty(shape, dtype.numpy)
    mx = mlx_core()
    return mx.zeros(shape, mlx_dtype(dtype))


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def _token_major(tensor: TensorLayout, row_count: int, room: np.ndarray) -> np.ndarray:
    bits = room.view(_BITS[tensor.dtype.itemsize])
    return bits.reshape(row_count, tensor.heads, tensor.head_dim)


def _is_mlx(array: Array) -> bool:
    # Who has an MLX array has imported MLX.
    mx = sys.modules.get("mlx.core")
    return mx is not None and isinstance(array, mx.array)


def _dtype_of_mlx(dtype: Any) -> DType:
    for known in DType:
        if dtype == mlx_dtype(known):
            return known
    raise LayoutError("data_type", f"{dtype} is not stored; f32, f16 and bf16 are")
