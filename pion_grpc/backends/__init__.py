"""Attention: a NumPy reference that defines the right answer, and faster ones compared with it.

`base` has the queries and the protocol, `query` turns bytes into them and checks them, `reference`
defines the answers, `fast` and `mlx_backend` are quick. `create` gives a backend by name and imports
nothing that was not asked for: MLX takes a thread and tens of megabytes.
"""

from __future__ import annotations

import platform
import sys
from typing import Literal

from pion_grpc.backends.base import (
    Answer,
    Backend,
    Dense,
    Dtype,
    Fused,
    Query,
    Resident,
    Selector,
    Sparse,
    SparseAuto,
    SparseAutoFused,
    Unwanted,
    always,
)
from pion_grpc.backends.plan import check_range
from pion_grpc.backends.query import QueryError, check

Name = Literal["auto", "numpy", "mlx", "reference"]

__all__ = [
    "Answer",
    "Backend",
    "Dense",
    "Dtype",
    "Fused",
    "Name",
    "Query",
    "QueryError",
    "Resident",
    "Selector",
    "Sparse",
    "SparseAuto",
    "SparseAutoFused",
    "Unwanted",
    "always",
    "check",
    "check_range",
    "create",
]


def create(name: Name = "auto", dtype: Dtype = "f32") -> Backend:
    """A backend that holds K and V as ``dtype``.

    "auto" is MLX on a Mac with Apple silicon and NumPy elsewhere. Raises ImportError where MLX is
    asked for and not installed.
    """
    if name == "auto":
        on_apple_silicon = sys.platform == "darwin" and platform.machine() == "arm64"
        name = "mlx" if on_apple_silicon else "numpy"
    if name == "mlx":
        from pion_grpc.backends.mlx_backend import MlxBackend

        return MlxBackend(dtype)
    if name == "reference":
        from pion_grpc.backends.reference import ReferenceBackend

        return ReferenceBackend(dtype)
    assert name == "numpy"
    from pion_grpc.backends.fast import FastBackend

    return FastBackend(dtype)
