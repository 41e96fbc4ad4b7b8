"""What is exact at one token only, as a part: bytes with a description, and back.

The bytes of a part are its arrays one after another, each row-major and little-endian, with nothing
between them. Its description is JSON:

    {"v": 1, "class": "RotatingKVCache", "numbers": {"offset": 40, ...},
     "arrays": [["F32", [1, 2, 40, 16]], null]}

`v` is this format, `class` the cache class, `numbers` what the adapter keeps beside arrays, `arrays`
type and shape of each, or null where the model has put none. Types are named as in safetensors.

Knows MLX arrays and this format; not what they mean. The one decision: everything that was received is
checked before an array is made: the description by itself (`described`), then by who knows what the
model holds, then the bytes by the description (`contents_of`). Nothing is guessed: another version, a
type without a name here or a byte too many is refused, and nothing that a description says raises
anything but `PartMismatch`.
"""

import json
import math
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from pion_client.adapters import Contents, PartMismatch, UnsupportedCache
from pion_client.values import Part

VERSION = 1
NDIM_MAX = 8
NUMBER_MAX = (1 << 31) - 1
"""MLX counts in signed 32 bits, and so do its caches."""

_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.int64: "I64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_BITS = {1: (mx.uint8, np.uint8), 2: (mx.uint16, np.uint16), 4: (mx.uint32, np.uint32)}


class Taken(NamedTuple):
    """A part whose arrays are still where the cache had them: read-only NumPy, row-major."""

    kind: str
    slot: int
    boundary_tokens: int
    description: str
    arrays: list[np.ndarray]

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def part(self) -> Part:
        """Returns it as it is sent, over the same memory."""
        flat = [array.reshape(-1).view(np.uint8).data for array in self.arrays]
        data, *more = flat or [memoryview(b"")]
        return Part(self.kind, self.slot, self.boundary_tokens, data, self.description, tuple(more))


class Described(NamedTuple):
    """What a description says, sound in itself."""

    class_name: str
    numbers: dict[str, int]
    """Each from 0 to NUMBER_MAX."""
    arrays: tuple[tuple[mx.Dtype, tuple[int, ...]] | None, ...]
    """Type and shape of each."""


def describe(class_name: str, contents: Contents) -> str:
    """Returns the description of contents. Raises UnsupportedCache for a type that has no name here."""
    arrays: list[Any] = []
    for array in contents.arrays:
        if array is not None and array.dtype not in _NAMES:
            raise UnsupportedCache(f"{class_name}: arrays of {array.dtype} are not stored")
        arrays.append(None if array is None else [_NAMES[array.dtype], list(array.shape)])
    description = {
        "v": VERSION,
        "class": class_name,
        "numbers": dict(contents.numbers),
        "arrays": arrays,
    }
    return json.dumps(description, separators=(",", ":"))


def bits_of(array: mx.array) -> mx.array:
    """Returns an array of the same bits that NumPy can see: it has no bfloat16."""
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


def read_only(bits: mx.array) -> np.ndarray:
    """Returns an evaluated array as NumPy, over the same memory."""
    array = np.asarray(bits)
    array.flags.writeable = False
    return array


def described(text: str) -> Described:
    """Returns what a received description says; a part need not have been fetched for it.

    Raises:
        PartMismatch: it does not describe a part.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PartMismatch("a part is not described") from error
    if not isinstance(found, dict) or not _is_number(found.get("v")) or found["v"] != VERSION:
        raise PartMismatch(f"a part is described in another version than {VERSION}")
    name, numbers, arrays = found.get("class"), found.get("numbers"), found.get("arrays")
    if (
        isinstance(name, str)
        and isinstance(arrays, list)
        and isinstance(numbers, dict)
        and all(_is_number(number) for number in numbers.values())
    ):
        return Described(name, numbers, tuple(_shape(entry) for entry in arrays))
    raise PartMismatch("a part is not described as parts are")


def contents_of(data: Any, description: Described) -> Contents:
    """Returns the contents of a received part.

    Args:
        data: its bytes.
        description: of it, whose shapes are those that are wanted.

    Raises:
        PartMismatch: there are more or less bytes than described.
    """
    data = memoryview(data).cast("B")
    sizes = [0 if s is None else math.prod(s[1]) * s[0].size for s in description.arrays]
    if sum(sizes) != len(data):
        raise PartMismatch(f"a part of {len(data)} bytes is described as one of {sum(sizes)}")
    whole = _whole(data)
    arrays: list[mx.array | None] = []
    begin = 0
    for shape, size in zip(description.arrays, sizes, strict=True):
        if shape is None:
            arrays.append(None)
        elif whole is not None and size and not begin % shape[0].size:
            arrays.append(whole[begin : begin + size].view(shape[0]).reshape(shape[1]))
        else:
            arrays.append(_array(*shape, data[begin : begin + size]))
        begin += size
    return Contents(description.numbers, tuple(arrays))


def _whole(data: memoryview) -> mx.array | None:
    """The MLX array that bytes belong to, if they are all of it: then they are not copied."""
    array = data.obj
    if isinstance(array, mx.array) and array.dtype == mx.uint8 and array.nbytes == data.nbytes:
        return array.reshape(-1)
    return None


def _is_number(value: Any) -> bool:
    """Whether JSON has a count here: neither `true` nor `1.0`."""
    return type(value) is int and 0 <= value <= NUMBER_MAX


def _shape(entry: Any) -> tuple[mx.Dtype, tuple[int, ...]] | None:
    if entry is None:
        return None
    if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list):
        name, shape = entry
        sound = len(shape) <= NDIM_MAX and all(_is_number(n) for n in shape)
        if sound and isinstance(name, str) and name in _DTYPES:
            return _DTYPES[name], tuple(shape)
    raise PartMismatch("an array is not described as arrays are")


def _array(dtype: mx.Dtype, shape: tuple[int, ...], data: memoryview) -> mx.array:
    if not data.nbytes:
        return mx.zeros(shape, dtype=dtype)
    if dtype.size not in _BITS:
        return mx.array(np.frombuffer(data, np.int64).reshape(shape))
    mlx_bits, numpy_bits = _BITS[dtype.size]
    bits = mx.array(np.frombuffer(data, numpy_bits).reshape(shape))
    return bits if dtype == mlx_bits else bits.view(dtype)
