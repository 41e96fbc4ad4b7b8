"""Recurrent state as one blob, for clients that agree on a format in `SSM.PREFIX.STORE` and SSMState.

Knows arrays and bytes; neither caches nor servers, which never look into a blob. The format, with all
numbers little-endian::

    u32   version, 1
    u32   number of entries
    then for each entry:
      u32   number of dimensions, n
      u32   n times: the dimensions
      u32   type code: 0 float32, 1 float16, 2 bfloat16
      bytes the values, row-major; those of bfloat16 as float32

An entry that is absent (`None`) is four zeros: no dimensions and twelve bytes more. So an array without
dimensions cannot be written.

The one decision: everything that a blob claims is compared with the bytes that are there before an
array is made, because a blob may come from anybody and no length in it can be trusted. bfloat16 goes
into float32 and back by its bits, not by its value, so that a NaN keeps its payload; float32 bits that
no bfloat16 has are refused rather than rounded.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

VERSION = 1
DIMENSIONS_MAX = 16
DIMENSION_MAX = (1 << 31) - 1
"""MLX counts in signed 32 bits."""
SPAN_BYTES_MAX = (1 << 63) - 1
"""Of an array's values if every 0 in its shape were 1: NumPy limits even arrays without values so."""

_ABSENT = bytes(16)
_ENTRY_BYTES_MIN = 12
"""One dimension of size 0."""


class _Form(NamedTuple):
    """How values of one type are written."""

    code: int
    dtype: mx.Dtype
    bits: "np.dtype[np.unsignedinteger]"
    """As they are in memory."""
    written: "np.dtype[np.unsignedinteger]"


_FORMS = (
    _Form(0, mx.float32, np.dtype("<u4"), np.dtype("<u4")),
    _Form(1, mx.float16, np.dtype("<u2"), np.dtype("<u2")),
    _Form(2, mx.bfloat16, np.dtype("<u2"), np.dtype("<u4")),
)


class BadBlob(ValueError):
    """The bytes are not recurrent state in this module's format; the text says where they differ."""


class _Claim(NamedTuple):
    """An entry that a blob says it has, checked against its length."""

    form: _Form
    shape: tuple[int, ...]
    begin: int
    """Of its values."""

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape) * self.form.written.itemsize


def _is_written(form: _Form, shape: Sequence[int]) -> bool:
    """Whether arrays of this shape have a form: both ways the same."""
    span = math.prod(length or 1 for length in shape) * form.written.itemsize
    return 1 <= len(shape) <= DIMENSIONS_MAX and span <= SPAN_BYTES_MAX


def serialize_arrays_cache(entries: Sequence[mx.array | None]) -> bytes:
    """Returns the blob of the arrays of a recurrent cache, such as `ArraysCache.cache`.

    Args:
        entries: float32, float16 or bfloat16, of at least one dimension; None for one that is absent.
            Lazy arrays are evaluated here.

    Raises:
        TypeError: no array, or one of another type, without dimensions or with too many, or of a shape
            that is too large even without values: the form has no word for it.
    """
    pieces = [struct.pack("<2I", VERSION, len(entries))]
    for index, entry in enumerate(entries):
        pieces += [_ABSENT] if entry is None else _written(index, entry)
    return b"".join(pieces)


def deserialize_arrays_cache(blob: bytes | bytearray | memoryview) -> list[mx.array | None]:
    """Returns the arrays of a blob, with the types and the bits that they had.

    Raises:
        BadBlob: another version, an unknown type code, less or more bytes than it announces, or
            anything else that `serialize_arrays_cache` does not write. No array was made.
    """
    view = memoryview(blob).cast("B")
    claims = _claims(view)
    bits = [None if claim is None else _bits(view, claim) for claim in claims]
    return [
        None if claim is None or array is None else mx.array(array).view(claim.form.dtype)
        for claim, array in zip(claims, bits, strict=True)
    ]


def _written(index: int, array: mx.array) -> list[bytes]:
    if not isinstance(array, mx.array):
        raise TypeError(f"entry {index}: a {type(array).__name__} has no form")
    form = next((form for form in _FORMS if form.dtype == array.dtype), None)
    if form is None or not _is_written(form, array.shape):
        raise TypeError(f"entry {index}: {array.dtype} of shape {array.shape} has no form")
    unsigned = mx.uint16 if form.bits.itemsize == 2 else mx.uint32
    bits = np.asarray(array.view(unsigned))
    if form.written != form.bits:
        bits = bits.astype(form.written) << 16
    head = struct.pack(f"<{array.ndim + 2}I", array.ndim, *array.shape, form.code)
    return [head, bits.astype(form.written, copy=False).tobytes()]


def _claims(view: memoryview) -> list[_Claim | None]:
    version, count = _numbers(view, 0, 2)
    if version != VERSION:
        raise BadBlob(f"version {version}; {VERSION} is known")
    if count * _ENTRY_BYTES_MIN > len(view) - 8:
        raise BadBlob(f"{count} entries in {len(view)} bytes")
    claims: list[_Claim | None] = []
    at = 8
    for index in range(count):
        if view[at : at + 16] == _ABSENT:
            claims.append(None)
            at += 16
        else:
            claim = _claim(view, index, at)
            claims.append(claim)
            at = claim.end
    if at != len(view):
        raise BadBlob(f"{len(view) - at} bytes follow the last entry")
    return claims


def _claim(view: memoryview, index: int, at: int) -> _Claim:
    (dimensions,) = _numbers(view, at, 1)
    if not 1 <= dimensions <= DIMENSIONS_MAX:
        raise BadBlob(f"entry {index}: {dimensions} dimensions")
    *shape, code = _numbers(view, at + 4, dimensions + 1)
    if code >= len(_FORMS):
        raise BadBlob(f"entry {index}: type code {code}; 0, 1 and 2 are known")
    if max(shape) > DIMENSION_MAX:
        raise BadBlob(f"entry {index}: a dimension of {max(shape)}")
    if not _is_written(_FORMS[code], shape):
        raise BadBlob(f"entry {index}: a shape of {shape}")
    claim = _Claim(_FORMS[code], tuple(shape), at + 4 * (dimensions + 2))
    if claim.end > len(view):
        raise BadBlob(f"entry {index}: its values end at {claim.end} of {len(view)} bytes")
    return claim


def _numbers(view: memoryview, at: int, count: int) -> tuple[int, ...]:
    if at + 4 * count > len(view):
        raise BadBlob(f"it ends after {len(view)} bytes, within the numbers at {at}")
    return struct.unpack_from(f"<{count}I", view, at)


def _bits(view: memoryview, claim: _Claim) -> np.ndarray:
    form = claim.form
    written = np.frombuffer(view[claim.begin : claim.end], form.written).reshape(claim.shape)
    if form.written == form.bits:
        return written
    if (written & 0xFFFF).any():
        raise BadBlob("float32 values of a bfloat16 array that no bfloat16 has")
    return (written >> 16).astype(form.bits)
