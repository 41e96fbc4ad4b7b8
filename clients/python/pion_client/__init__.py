"""The Python client of pion-grpc: stores, finds and fetches the K/V of prompt prefixes.

    from pion_client import Client

    with Client("127.0.0.1:50051") as pion:
        pion.store("greeting|v1", layers=[(k, v), ...], token_ids=ids, model="...")
        prefix = pion.fetch("greeting|v1")            # .layers, .token_ids, .token_count
        match = pion.match(model="...", token_ids=ids)  # the longest stored prefix

`pion_client.mlx` has the integration with mlx-lm; it is the only module that needs MLX.
"""

from pion_client import errors
from pion_client.attend import AttendEntry, AttendState, Warmed
from pion_client.client import Client
from pion_client.errors import PionError
from pion_client.values import (
    BlockTable,
    Description,
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

__all__ = [
    "AttendEntry",
    "AttendState",
    "BlockTable",
    "Client",
    "DType",
    "Description",
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
    "Warmed",
    "errors",
    "make_namespace",
]
