"""Rows as bytes: from what a caller has to what a tensor keeps, and back to float32.

The codecs work on arrays; files and wires have bytes. This module joins the two by a tensor's layout,
and refuses to know where the bytes come from. The one decision: rows that are *absent* (a gap that a
later write left open, or the end of a shorter tensor) are rows of zeros, in every codec. Zeros are not
zero bytes in most of them, so what stands for absent rows is encoded here, too.
"""

import functools
from collections.abc import Sequence

import numpy as np

from pion_wire import codecs
from pion_wire.layout import DType, TensorLayout


class NotExactError(ValueError):
    """A lossless tensor cannot keep these values: its type would round them."""


def encode_rows(tensor: TensorLayout, rows: memoryview | bytes, dtype: DType) -> list[memoryview]:
    """Returns the bytes of each array of `tensor` for `rows`, whose values are of type `dtype`.

    Where nothing has to change the bytes are those of `rows`, not a copy. A `raw` tensor of another
    type takes only values that it can hold exactly.

    Raises:
        NotExactError: a raw tensor would have to round.
        ValueError: the codec cannot take a value (not finite, or too large for its scale).
    """
    width = tensor.heads * tensor.head_dim
    values = np.frombuffer(rows, dtype.numpy).reshape(-1, width)
    if tensor.codec == "raw" and dtype is not tensor.dtype:
        values = _exactly(values, tensor)
    return [_bytes(array) for array in codecs.parse(tensor.codec).encode(values)]


def decode_rows(tensor: TensorLayout, arrays: Sequence[memoryview | bytes]) -> memoryview:
    """Returns the rows that the bytes of a tensor's arrays hold, as float32, token-major."""
    stored = [
        np.frombuffer(data, layout.numpy).reshape(-1, layout.row_items)
        for data, layout in zip(arrays, tensor.arrays, strict=True)
    ]
    return _bytes(codecs.parse(tensor.codec).decode(stored))


@functools.lru_cache(maxsize=1024)
def zero_row(tensor: TensorLayout, array_index: int) -> bytes:
    """Returns the bytes of one array of `tensor` for a row of zeros."""
    zeros = np.zeros((1, tensor.heads * tensor.head_dim), tensor.dtype.numpy)
    return bytes(_bytes(codecs.parse(tensor.codec).encode(zeros)[array_index]))


def _exactly(values: np.ndarray, tensor: TensorLayout) -> np.ndarray:
    with np.errstate(all="ignore"):
        kept = values.astype(tensor.dtype.numpy)
        same = np.array_equal(kept.astype(values.dtype), values, equal_nan=True)
    if not same:
        raise NotExactError(
            f"{tensor.name} keeps {tensor.dtype.value} exactly, and these values would be rounded"
        )
    return kept


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
