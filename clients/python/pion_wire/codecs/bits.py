"""Streams of small codes: eight codes of `bits` bits in `bits` bytes, least significant first.

For the widths 1, 2, 4 and 8 this is the usual order inside a byte; for 3, 5 and 6 codes cross byte
borders, and a stream of them is what mlx keeps in its words. The one decision: eight codes are
gathered in one integer that holds them all, so every width takes the same few shifts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def _word(bits: int) -> np.dtype[Any]:
    """The smallest little-endian integer with room for eight codes."""
    return np.dtype(next(word for word in ("<u1", "<u2", "<u4", "<u8") if int(word[2]) >= bits))


def pack(codes: Bytes, bits: int) -> Bytes:
    """Codes [..., 8 n] below 2^bits as bytes [..., bits n]."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8)
    word = _word(bits)
    words = eights[..., 0].astype(word)
    for i in range(1, 8):
        words |= np.left_shift(eights[..., i], bits * i, dtype=word)
    whole = words.view(np.uint8).reshape(*words.shape, word.itemsize)
    return whole[..., :bits].reshape(*codes.shape[:-1], -1)


def unpack(packed: Bytes, bits: int) -> Bytes:
    """Bytes [..., bits n] as codes [..., 8 n]."""
    parts = packed.reshape(*packed.shape[:-1], -1, bits)
    word = _word(bits)
    whole = np.zeros((*parts.shape[:-1], word.itemsize), np.uint8)
    whole[..., :bits] = parts
    words = whole.view(word)[..., 0]
    mask = word.type((1 << bits) - 1)
    codes = np.empty((*words.shape, 8), np.uint8)
    for i in range(8):
        np.bitwise_and(words >> word.type(bits * i), mask, out=codes[..., i], casting="unsafe")
    return codes.reshape(*packed.shape[:-1], -1)
