"""The Python client of pion-grpc: stores, finds and fetches the K/V of prompt prefixes.

    from pion_client import Client

    with Client("127.0.0.1:50051") as pion:
        pion.store("greeting|v1", layers=[(k, v), ...], token_ids=ids, model="...")
        prefix = pion.fetch("greeting|v1")            # .layers, .token_ids, .token_count
        match = pion.match(model="...", token_ids=ids)  # the longest stored prefix

`pion_client.mlx` has the integration with mlx-lm; it and what it imports are all that needs MLX.

gRPC is loaded with the first name that needs it: `pion_client.retrieval` works without a server.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pion_client import arrays as _arrays  # noqa: F401  minds forks, from the first import on
from pion_client import errors
from pion_client.errors import PionError
from pion_client.values import (
    BlockTable,
    Description,
    Encoded,
    Lookup,
    Match,
    MissReason,
    Part,
    Prefix,
    PrefixInfo,
    PrefixState,
    Receipt,
    Registered,
    RowsWritten,
    Stored,
)
from pion_wire.blocks import make_namespace
from pion_wire.layout import DType, Layout, LayoutError, PartInfo, Side, TensorLayout

if TYPE_CHECKING:
    from pion_client.attend import AttendEntry, AttendState, Warmed
    from pion_client.client import Client
    from pion_client.tls import Tls

__all__ = [
    "AttendEntry",
    "AttendState",
    "BlockTable",
    "Client",
    "DType",
    "Description",
    "Encoded",
    "Layout",
    "LayoutError",
    "Lookup",
    "Match",
    "MissReason",
    "Part",
    "PartInfo",
    "PionError",
    "Prefix",
    "PrefixInfo",
    "PrefixState",
    "Receipt",
    "Registered",
    "RowsWritten",
    "Side",
    "Stored",
    "TensorLayout",
    "Tls",
    "Warmed",
    "errors",
    "make_namespace",
]

_NEED_GRPC = {
    "AttendEntry": "pion_client.attend",
    "AttendState": "pion_client.attend",
    "Client": "pion_client.client",
    "Tls": "pion_client.tls",
    "Warmed": "pion_client.attend",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_GRPC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NEED_GRPC[name]), name)
