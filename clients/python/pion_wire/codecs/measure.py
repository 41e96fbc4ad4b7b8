"""How fast each codec is on one core, and how far off: rows of a table for the bench command.

Prints nothing. The one decision: rates count float32 bytes on the decoded side, for every codec, so
that they compare; decoding writes into a buffer that exists, as a reader of a stream does. `raw` is
left out: it does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from pion_wire.codecs.base import Codec
from pion_wire.codecs.names import parse

NAMES = ("fp16", "int8", "fp8", "turbo4", "turbo3", "turbo2", "mlx4g32", "bf16_rope_fp8_body(64)")
"""What is measured unless the caller says otherwise."""


class CodecRate(NamedTuple):
    """One row of the table."""

    codec: str
    stored_bits: float
    """Per value."""
    encode_gb_s: float
    """10^9 bytes of float32 input per second."""
    decode_gb_s: float
    """10^9 bytes of float32 output per second."""
    mean_error: float
    """Mean of |decoded - input| on N(0, 0.6)."""


def measure(
    codecs: Iterable[Codec] | None = None, *, rows: int = 4096, heads: int = 8, head_dim: int = 128
) -> list[CodecRate]:
    """The best of several runs of each codec over `rows` rows of float32, drawn from N(0, 0.6)."""
    width = heads * head_dim
    values = np.random.default_rng(0).normal(0, 0.6, (rows, width)).astype(np.float32)
    out = np.empty_like(values)
    table = []
    for codec in map(parse, NAMES) if codecs is None else codecs:
        stored = codec.encode(values)
        codec.decode(stored, out)
        error = float(np.abs(out - values).mean(dtype=np.float64))
        bits = codec.row_bytes(heads, head_dim, "F32") * 8 / width
        encode = values.nbytes / _seconds(lambda: codec.encode(values)) / 1e9  # noqa: B023
        decode = values.nbytes / _seconds(lambda: codec.decode(stored, out)) / 1e9  # noqa: B023
        table.append(CodecRate(str(codec), bits, encode, decode, error))
    return table


def _seconds(call: Callable[[], object], runs: int = 5) -> float:
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best
