"""What callers give as protobuf requests, the twin of `answers`.

Whatever cannot be sent raises InvalidRequest here, with its field, before anything is.
"""

from collections.abc import Sequence

from pion_client.arrays import count, invalid, text
from pion_client.rows import Rows
from pion_client.values import BlockTable, Part, TokenIds
from pion_wire import limits
from pion_wire.blocks import pack_token_ids
from pion_wire.codecs import FAMILIES
from pion_wire.codecs import parse as parse_codec
from pion_wire.layout import Layout, LayoutError, Side
from pion_wire.v1 import types_pb2


def token_bytes(token_ids: TokenIds) -> bytes:
    """Returns u32 LE each."""
    try:
        packed = pack_token_ids(token_ids)
    except (ValueError, OverflowError) as error:
        raise invalid("token_ids", str(error)) from error
    if len(packed) > 4 * limits.TOKENS_MAX:
        raise invalid("token_ids", f"{len(packed) // 4} ids exceed {limits.TOKENS_MAX}")
    return packed


def some_token_bytes(token_ids: TokenIds) -> bytes:
    """Returns the same of at least one token."""
    packed = token_bytes(token_ids)
    if not packed:
        raise invalid("token_ids", "there are none")
    return packed


def names(namespaces: Sequence[str]) -> Sequence[str]:
    """Returns names that can be sent."""
    return [text("namespaces", namespace) for namespace in namespaces]


def texts(field: str, values: Sequence[str]) -> list[str]:
    """Returns texts that can be sent; one text is no sequence of its characters."""
    if isinstance(values, str):
        raise invalid(field, f"{values!r} is one text, not several")
    return [text(field, value) for value in values]


def part_info(where: str, part: Part) -> types_pb2.PartInfo:
    """Returns the declaration of a part; `where` names it in errors."""
    try:
        size_bytes = part.info.size_bytes
    except (TypeError, ValueError) as error:
        raise invalid(f"{where}.data", f"no contiguous bytes: {error}") from error
    return types_pb2.PartInfo(
        kind=text(f"{where}.kind", part.kind),
        slot=count(f"{where}.slot", part.slot),
        boundary_tokens=count(f"{where}.boundary_tokens", part.boundary_tokens),
        size_bytes=size_bytes,
        description=text(f"{where}.description", part.description),
    )


def row_range(rows: tuple[int, int]) -> types_pb2.RowRange:
    """Returns a half-open range."""
    try:
        begin, end = rows
        return types_pb2.RowRange(begin=begin, end=end)
    except (ValueError, TypeError) as error:
        raise invalid("rows", f"{rows!r} is no pair of row numbers: {error}") from error


def layout_of(tensors: Sequence[Rows], row_count: int) -> Layout:
    """Returns the layout of tensors that have so many rows each."""
    for rows in tensors:
        if rows.token_count != row_count:
            raise invalid(
                f"layers.{rows.tensor.name}",
                f"{rows.token_count} rows where token_ids and base make {row_count}",
            )
    try:
        return Layout(tuple(rows.tensor for rows in tensors))
    except LayoutError as error:
        raise invalid("slots", error.message) from error


def codec_names(codecs: Sequence[str]) -> frozenset[str]:
    """Returns codecs as they are written in layouts; a family's name stands for itself."""
    try:
        return frozenset(name if name in FAMILIES else str(parse_codec(name)) for name in codecs)
    except ValueError as error:
        raise invalid("codecs", str(error)) from error


def side_of(name: Side | str) -> Side:
    """Returns the side that "k" or "v" names."""
    try:
        return Side(name)
    except ValueError as error:
        raise invalid("side", f"{name!r} is neither 'k' nor 'v'") from error


def block_table(table: BlockTable | None) -> types_pb2.BlockTable | None:
    """Returns a router's own hashes."""
    if table is None:
        return None
    try:
        return types_pb2.BlockTable(block_tokens=table.block_tokens, hashes=table.packed())
    except ValueError as error:
        raise invalid("table", str(error)) from error
