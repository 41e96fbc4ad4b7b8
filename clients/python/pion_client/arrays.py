"""Arrays in and out: NumPy's and MLX's, and the token-major rows between them.

MLX is imported only where its arrays come in or are asked for. The one decision: the bits are moved as
unsigned integers of their width. No value is ever converted, so no NaN loses its payload and bf16 never
meets binary16. Only rows that were stored lossily are decoded, to float32, a tensor at a time as it has
arrived.
"""

import operator
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np

from pion_client.errors import Forked, InvalidRequest
from pion_client.values import Array, Encoded
from pion_wire import codecs
from pion_wire.codecs import ArrayLayout
from pion_wire.layout import DType, Layout, LayoutError, Side, TensorLayout

U32_MAX, U64_MAX = (1 << 32) - 1, (1 << 64) - 1
_BITS: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


def invalid(field: str, message: str) -> InvalidRequest:
    """Returns the error of a field that is refused before anything is sent."""
    return InvalidRequest(f"{field}: {message}", metadata={"field": field})


def text(field: str, value: str) -> str:
    """Returns a text that can be sent.

    Raises:
        InvalidRequest: it is not a text, or cannot be UTF-8 because of a lone surrogate.
    """
    if not isinstance(value, str):
        raise invalid(field, f"{value!r} is not a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(field, f"{value!r} cannot be written as UTF-8") from error
    return value


def count(field: str, value: int, most: int = U32_MAX) -> int:
    """Returns a number that can be sent.

    Raises:
        InvalidRequest: it is not a whole number, is below 0, or is too large for its field.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise invalid(field, f"{value!r} is not a whole number") from error
    if not 0 <= number <= most:
        raise invalid(field, f"{number} is outside 0..{most}")
    return number


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


def is_array(value: Any) -> bool:
    """Whether it is a NumPy or an MLX array."""
    return isinstance(value, np.ndarray) or _is_mlx(value)


def dtype_of(array: Array) -> DType:
    """Returns the type of an array's values.

    Raises:
        LayoutError: values of this type are not stored.
    """
    if isinstance(array, np.ndarray):
        return DType.of(array.dtype)
    for known in DType:
        if array.dtype == mlx_dtype(known):
            return known
    raise LayoutError("data_type", f"{array.dtype} is not stored; f32, f16 and bf16 are")


def as_numpy(array: Array, dtype: "np.dtype[Any]") -> np.ndarray:
    """Returns an array as NumPy's, not a copy; `dtype` is the name that NumPy has for its type."""
    if isinstance(array, np.ndarray):
        return array
    mx = mlx_core()
    bits = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[dtype.itemsize]
    return np.asarray(array.view(bits)).view(dtype)


class Taken(NamedTuple):
    """A tensor that is fetched: as it comes, and as the caller gets it."""

    stored: TensorLayout
    given: TensorLayout
    """The same, or raw float32: then it is decoded here."""

    @property
    def is_decoded(self) -> bool:
        """Whether the caller gets something else than what comes."""
        return self.stored != self.given


def taken(tensor: TensorLayout, keep: Container[str]) -> Taken:
    """Returns how a caller gets a tensor that wants these codecs, or families, as they are stored.

    Raises:
        InvalidRequest: decoded, a row would exceed what a row may have.
    """
    codec = codecs.parse(tensor.codec)
    if codec.lossless or tensor.codec in keep or codec.name in keep:
        return Taken(tensor, tensor)
    try:
        given = TensorLayout(tensor.slot, tensor.side, tensor.heads, tensor.head_dim, DType.F32)
    except LayoutError as error:
        message = f"rows of {tensor.name} are too long decoded: ask for {tensor.codec!r}"
        raise invalid("codecs", message) from error
    return Taken(tensor, given)


class Layers(NamedTuple):
    """What was fetched, by slot."""

    pairs: list[tuple[Array | Encoded, Array | Encoded]]
    """(K, V), each (kv_heads, tokens, head_dim)."""
    slots: tuple[int, ...]


class Destination(ABC):
    """Where fetched rows go, tensor by tensor, of each its arrays in order.

    What is decoded comes into memory of its own first, which is used over and over.
    """

    def __init__(self, tensors: Sequence[Taken], row_count: int) -> None:
        self.arrays: dict[TensorLayout, Array | Encoded] = {}
        """What is finished, by what the caller gets: (kv_heads, tokens, head_dim)."""
        self._row_count = row_count
        self._memory = _Memory(self._memory_bytes(tensors))
        decoded = (self._bytes_of(tensor.stored) for tensor in tensors if tensor.is_decoded)
        self._encoded = _Memory(max(decoded, default=0))
        self._rooms: list[np.ndarray] = []

    def room(self, tensor: Taken, array_index: int) -> np.ndarray:
        """Returns memory for the rows of the next array: bytes, token-major, not initialised."""
        if not array_index:
            self._begin()
        memory = self._encoded if tensor.is_decoded else self._memory
        self._rooms.append(memory.take(self._row_count, tensor.stored.arrays[array_index]))
        return self._rooms[-1]

    def finish(self, tensor: Taken) -> None:
        """Makes an array of a tensor whose memory is filled."""
        rooms, self._rooms = self._rooms, []
        layouts = tensor.given.arrays
        if tensor.is_decoded:
            decoded = self._memory.take(self._row_count, layouts[0])
            _decode(tensor, rooms, decoded)
            rooms = [decoded]
        arrays = self._made(
            [
                room.view(layout.numpy).reshape(self._row_count, *layout.row_shape)
                for room, layout in zip(rooms, layouts, strict=True)
            ],
            layouts,
        )
        self.arrays[tensor.given] = given(tensor.given, [by_head(array) for array in arrays])

    def _bytes_of(self, tensor: TensorLayout) -> int:
        return sum(_aligned(self._row_count * layout.row_bytes) for layout in tensor.arrays)

    def _begin(self) -> None:
        """A tensor begins: what is decoded of it may go where that of another was."""
        self._encoded.used = 0

    @abstractmethod
    def _memory_bytes(self, tensors: Sequence[Taken]) -> int:
        """Returns the size of the memory that the caller's arrays are made in."""

    @abstractmethod
    def _made(self, rows: list[np.ndarray], layouts: Sequence[ArrayLayout]) -> list[Array]:
        """Returns the caller's arrays of filled memory, token-major."""


class NumpyDestination(Destination):
    """One block of fresh memory for everything; what comes out are views of it."""

    def _memory_bytes(self, tensors: Sequence[Taken]) -> int:
        return sum(self._bytes_of(tensor.given) for tensor in tensors)

    def _made(self, rows: list[np.ndarray], layouts: Sequence[ArrayLayout]) -> list[Array]:
        return rows


class MlxDestination(Destination):
    """Memory of one tensor, used over and over; MLX copies out of it, while it is in the cache."""

    def _memory_bytes(self, tensors: Sequence[Taken]) -> int:
        return max((self._bytes_of(tensor.given) for tensor in tensors), default=0)

    def _begin(self) -> None:
        super()._begin()
        self._memory.used = 0

    def _made(self, rows: list[np.ndarray], layouts: Sequence[ArrayLayout]) -> list[Array]:
        mx = mlx_core()
        arrays = [
            mx.array(array.view(_BITS[array.itemsize])).view(mlx_type(layout.dtype))
            for array, layout in zip(rows, layouts, strict=True)
        ]
        mx.eval(arrays)  # another thread may use them
        return arrays


class _Memory:
    """A block of memory, given out from its beginning on.

    np.empty, not bytearray: pages that are only ever written once need not be cleared first.
    """

    def __init__(self, size: int) -> None:
        self.used = 0
        self._block = np.empty(size, np.uint8)

    def take(self, row_count: int, layout: ArrayLayout) -> np.ndarray:
        size = row_count * layout.row_bytes
        begin = self.used
        self.used += _aligned(size)
        return self._block[begin : begin + size]


def layers_of(
    layout: Layout, row_count: int, arrays: dict[TensorLayout, Array | Encoded], *, as_mlx: bool
) -> Layers:
    """Returns the tensors by slot; a side that a slot does not have is empty."""
    slots: dict[int, dict[Side, Array | Encoded]] = {}
    dtypes = {}
    for tensor in layout.tensors:
        slots.setdefault(tensor.slot, {})[tensor.side] = arrays[tensor]
        dtypes[tensor.slot] = tensor.dtype

    def side(slot: int, which: Side) -> Array | Encoded:
        array = slots[slot].get(which)
        return _empty(row_count, dtypes[slot], as_mlx=as_mlx) if array is None else array

    return Layers([(side(slot, Side.K), side(slot, Side.V)) for slot in slots], tuple(slots))


def mlx_dtype(dtype: DType) -> Any:
    """Returns MLX's name of a type of values."""
    return mlx_type(dtype.value)


def mlx_type(name: str) -> Any:
    """Returns MLX's name of a type of stored items."""
    mx = mlx_core()
    return {
        "F32": mx.float32,
        "F16": mx.float16,
        "BF16": mx.bfloat16,
        "U32": mx.uint32,
        "U8": mx.uint8,
        "I8": mx.int8,
    }[name]


def _empty(row_count: int, dtype: DType, *, as_mlx: bool) -> Array:
    shape = (1, row_count, 0)
    if not as_mlx:
        return np.empty(shape, dtype.numpy)
    mx = mlx_core()
    return mx.zeros(shape, mlx_dtype(dtype))


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def by_head(array: Array) -> Array:
    """Returns [tokens, heads, items] as (heads, tokens, items); an array without heads as it is."""
    return array.transpose(1, 0, 2) if array.ndim == 3 else array


def _decode(tensor: Taken, rooms: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Writes what the arrays of a tensor hold as float32."""
    width = tensor.given.heads * tensor.given.head_dim
    stored = [
        room.view(layout.numpy).reshape(-1, layout.row_items)
        for layout, room in zip(tensor.stored.arrays, rooms, strict=True)
    ]
    codecs.parse(tensor.stored.codec).decode(stored, out.view(np.float32).reshape(-1, width))


def given(tensor: TensorLayout, arrays: Sequence[Array]) -> Array | Encoded:
    """Returns what a caller gets of a tensor, whose arrays are (heads, tokens, items)."""
    if tensor.codec == "raw":
        return arrays[0]
    return Encoded(tensor.codec, tensor.heads, tensor.head_dim, tuple(arrays), tensor.dtype)


def _is_mlx(array: Any) -> bool:
    # Who has an MLX array has imported MLX.
    mx = sys.modules.get("mlx.core")
    return mx is not None and isinstance(array, mx.array)
