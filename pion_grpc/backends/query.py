"""Bytes to arrays, and whether a query fits the prefix it is asked over.

Pure functions for what came from outside: every way to be wrong is an `QueryError` that names the
field. Refuses to know any transport and any backend. The decision to understand: backends assert
nothing about a request, they compute; so whoever builds a query calls `check` before `attend`, and
nothing is allocated in proportion to a number that was not compared with the bytes that came.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pion_grpc.backends.base import (
    F32,
    Array,
    Query,
    Resident,
    Sparse,
    SparseAuto,
    Suffix,
)

Buffer = bytes | bytearray | memoryview

_F32, _I32, _U32 = (np.dtype(name) for name in ("<f4", "<i4", "<u4"))

ROW_BYTES_MAX = (1 << 62) - 1
"""Of one row of all heads: of no rows NumPy makes an array of that shape, and of no larger one."""
F32_MAX = float(np.finfo(np.float32).max)


class QueryError(ValueError):
    """A request that cannot be answered as asked: ``field`` says where, ``reason`` why."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def tensor(data: Buffer, heads: int, dim: int, field: str, rows: int | None = None) -> F32:
    """View little-endian float32 bytes as [heads][rows][dim].

    Without ``rows`` the length decides, and no bytes at all are no rows. Copies only bytes that are
    not aligned to 4.
    """
    _require(heads > 0 and dim > 0, field, "heads and dim must be positive")
    size = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
    row_bytes = heads * dim * 4
    _require(row_bytes <= ROW_BYTES_MAX, field, "heads and dim are larger than any memory")
    _require(size % row_bytes == 0, field, f"{size} bytes are not a multiple of {row_bytes}")
    got = size // row_bytes
    if rows is not None:
        _require(got == rows, field, f"{size} bytes given, {rows * row_bytes} expected")
    return _view(data, _F32).reshape(heads, got, dim)


def indices(data: Buffer, heads: int, width: int) -> Array:
    """View little-endian int32 bytes as the [heads][width] of `Sparse`."""
    return _table(data, _I32, (heads, width), "indices")


def counts(data: Buffer, heads: int) -> Array:
    """View little-endian uint32 bytes as the [heads] of `Sparse`."""
    return _table(data, _U32, (heads,), "counts")


def check(query: Query, resident: Resident) -> None:
    """Raise `QueryError` unless ``query`` can be answered over ``resident``."""
    _require(query.q.ndim == 3 and query.q.dtype == np.float32, "q", "must be float32 [H][M][D]")
    heads, rows, dim = query.q.shape
    _require(rows > 0, "q", "has no rows")
    _require(dim == resident.dim, "q", f"dim is {dim}, stored is {resident.dim}")
    _require(
        heads > 0 and heads % resident.heads == 0,
        "q",
        f"{heads} heads are not a multiple of the stored {resident.heads}",
    )
    _require(len(query.head_map) in (0, heads), "head_map", f"must have 0 or {heads} entries")
    _require(
        max(query.head_map, default=0) < resident.heads,
        "head_map",
        f"names a head beyond the stored {resident.heads}",
    )
    _require(query.window >= 0, "window", "must not be negative")
    _require(
        query.scale is None or 0 < query.scale <= F32_MAX, "scale", "must be positive and finite"
    )
    if suffix := query.suffix:
        _check_suffix(suffix, resident)
    if isinstance(query, Sparse):
        _check_indices(query)
    if isinstance(query, SparseAuto):
        _require(query.block_tokens > 0, "block_tokens", "must be positive")
        _require(query.blocks > 0, "blocks", "must be positive")
        _require(query.selector in ("mean", "quest"), "selector", "must be mean or quest")
    if isinstance(query, (Sparse, SparseAuto)):
        _require(rows == 1, "q", f"has {rows} rows, a sparse query has one")


def _check_suffix(suffix: Suffix, resident: Resident) -> None:
    for field, a in (("k_suffix", suffix.k), ("v_suffix", suffix.v)):
        _require(a.ndim == 3 and a.dtype == np.float32, field, "must be float32 [H_kv][S][D]")
        shape = (resident.heads, suffix.k.shape[1], resident.dim)
        _require(a.shape == shape, field, f"is {a.shape}, expected {shape}")


def _check_indices(query: Sparse) -> None:
    heads = query.q.shape[0]
    table, used = query.indices, query.counts
    _require(table.dtype == np.int32, "indices", "must be int32")
    _require(used.dtype == np.uint32, "counts", "must be uint32")
    _require(table.ndim == 2 and len(table) == heads, "indices", f"must be [{heads}][width]")
    _require(used.shape == (heads,), "counts", f"must be [{heads}]")
    _require(bool((used <= table.shape[1]).all()), "counts", f"above the width {table.shape[1]}")


def _table(data: Buffer, dtype: np.dtype[Any], shape: tuple[int, ...], field: str) -> Array:
    _require(all(n >= 0 for n in shape), field, "sizes must not be negative")
    size, expected = memoryview(data).nbytes, int(np.prod(shape, dtype=object)) * 4
    _require(size == expected, field, f"{size} bytes given, {expected} expected")
    return _view(data, dtype).reshape(shape)


def _view(data: Buffer, dtype: np.dtype[Any]) -> Array:
    """Items of ``dtype``; aligned, because BLAS copies whole operands that are not."""
    items: Array = np.frombuffer(data, dtype)
    return items if items.flags.aligned else items.copy()


def _require(holds: bool, field: str, reason: str) -> None:
    if not holds:
        raise QueryError(field, reason)
