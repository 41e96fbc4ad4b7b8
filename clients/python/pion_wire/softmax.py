"""Joining two attention answers over disjoint keys into the answer over their union.

Pure arithmetic on arrays; refuses to know where either half was computed. The decision to understand:
weights are taken relative to the larger log-sum-exp and divided by their own sum, so nothing
overflows and a half that saw no key (log-sum-exp -inf) counts for nothing, without NaN.
Formula: the online softmax of Milakov and Gimelshein, 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def merge(out1: Array, lse1: Array, out2: Array, lse2: Array) -> tuple[Array, Array]:
    """The output [...][dim] and log-sum-exp [...] of attention over both halves' keys.

    Each half is an output [...][dim] with the natural log of its sum of exponentials of scaled
    scores [...]. Where neither half saw a key the result is zeros and -inf.
    """
    top = np.maximum(lse1, lse2)
    top = np.where(np.isneginf(top), 0.0, top).astype(top.dtype)
    weight1, weight2 = np.exp(lse1 - top), np.exp(lse2 - top)
    total = weight1 + weight2
    nothing = total == 0
    total = np.where(nothing, 1, total).astype(top.dtype)
    out = out1 * (weight1 / total)[..., None] + out2 * (weight2 / total)[..., None]
    return out, np.where(nothing, -np.inf, top + np.log(total)).astype(top.dtype)
