"""Protobuf answers as values, and the few enums in both directions. The only use of their fields."""

from typing import TypeVar

import numpy as np

from pion_client.arrays import invalid
from pion_client.errors import BadAnswer
from pion_client.values import (
    BlockTable,
    Description,
    DurabilityName,
    Lookup,
    Match,
    MissReason,
    PrefixInfo,
    PrefixState,
    Receipt,
    Stored,
)
from pion_wire.layout import Layout, LayoutError
from pion_wire.messages import layout_from_message, part_from_message
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import stats_pb2, types_pb2

DURABILITIES: dict[DurabilityName, types_pb2.Durability.ValueType] = {
    "process": types_pb2.DURABILITY_PROCESS,
    "disk": types_pb2.DURABILITY_DISK,
}
_DURABILITY_NAMES: dict[int, DurabilityName] = {value: name for name, value in DURABILITIES.items()}
_STATES: dict[int, PrefixState] = {
    types_pb2.PREFIX_STATE_REGISTERED: PrefixState.REGISTERED,
    types_pb2.PREFIX_STATE_LIVE: PrefixState.LIVE,
    types_pb2.PREFIX_STATE_SEALED: PrefixState.SEALED,
}
_REASONS: dict[int, MissReason] = {
    types_pb2.MISS_REASON_UNSPECIFIED: MissReason.NONE,
    types_pb2.MISS_REASON_NOT_STORED: MissReason.NOT_STORED,
    types_pb2.MISS_REASON_NO_ROWS: MissReason.NO_ROWS,
    types_pb2.MISS_REASON_TOKENS_DIFFER: MissReason.TOKENS_DIFFER,
    types_pb2.MISS_REASON_MODEL_DIFFERS: MissReason.MODEL_DIFFERS,
    types_pb2.MISS_REASON_LAYOUT_DIFFERS: MissReason.LAYOUT_DIFFERS,
    types_pb2.MISS_REASON_TOO_SHORT: MissReason.TOO_SHORT,
    types_pb2.MISS_REASON_PART_MISSING: MissReason.PART_MISSING,
    types_pb2.MISS_REASON_PARTIAL: MissReason.PARTIAL,
}


def durability_value(name: DurabilityName) -> types_pb2.Durability.ValueType:
    """Returns what a request says; raises InvalidRequest for what is neither."""
    if name not in DURABILITIES:
        raise invalid("durability", f"{name!r} is neither 'process' nor 'disk'")
    return DURABILITIES[name]


def miss_reason(value: int) -> MissReason:
    """Returns the reason.

    Raises:
        BadAnswer: a newer server's.
    """
    return _known(_REASONS, value, "miss reason")


def state(value: int) -> PrefixState:
    """Returns the state; raises as `miss_reason` does."""
    return _known(_STATES, value, "prefix state")


def durability(value: int) -> DurabilityName:
    """Returns the promise; raises as `miss_reason` does."""
    return _known(_DURABILITY_NAMES, value, "durability")


def layout(message: types_pb2.Layout) -> Layout:
    """Returns the layout.

    Raises:
        BadAnswer: it is not a layout that this client knows.
    """
    try:
        return layout_from_message(message)
    except LayoutError as error:
        raise BadAnswer(f"the server answered with a layout that is not valid: {error}") from error


def prefix_info(message: pb.PrefixInfo) -> PrefixInfo:
    """Returns what is known of a prefix."""
    return PrefixInfo(
        namespace=message.namespace,
        state=state(message.state),
        model=message.model_id,
        layout=layout(message.layout),
        token_count=message.token_count,
        base=message.base,
        parent=message.parent_namespace,
        generation=message.generation,
        stored_bytes=message.stored_bytes,
        row_bytes=message.row_bytes,
        fidelity=message.fidelity,
        created_unix_ms=message.created_unix_ms,
        durability=durability(message.durability),
        parts=tuple(part_from_message(part) for part in message.parts),
        prefill_ms=message.prefill_ms,
        depth=message.depth,
    )


def match(message: pb.PrefixStoreMatchResponse) -> Match:
    """Returns the longest match."""
    return Match(
        hit=message.hit,
        reason=miss_reason(message.reason),
        token_count=message.served_tokens,
        matched_tokens=message.matched_tokens,
        requested_tokens=message.requested_tokens,
        prefix=prefix_info(message.prefix) if message.HasField("prefix") else None,
        lease_id=message.lease_id,
        shortened_by=message.shortened_by,
        longest_namespace=message.longest_namespace,
        longest_tokens=message.longest_tokens,
    )


def lookup(message: pb.PrefixStoreLookupResponse) -> Lookup:
    """Returns the answer about the one name that was asked."""
    if len(message.results) != 1:
        raise BadAnswer(f"{len(message.results)} answers to one question")
    (result,) = message.results
    return Lookup(
        hit=result.hit,
        reason=miss_reason(result.reason),
        prefix=prefix_info(result.prefix) if result.HasField("prefix") else None,
        first_difference=result.first_difference,
        lease_id=result.lease_id,
    )


def stored(message: pb.PrefixStoreStoreResponse) -> Stored:
    """Returns the acknowledgement."""
    return Stored(
        namespace=message.namespace,
        already_stored=message.already_stored,
        generation=message.generation,
        token_count=message.token_count,
        stored_bytes=message.stored_bytes,
        durability=durability(message.durability),
        base=message.base,
    )


def block_table(message: types_pb2.BlockTable) -> BlockTable:
    """Returns a table; its hashes are an array of u64."""
    return BlockTable(message.block_tokens, np.frombuffer(message.hashes, dtype="<u8"))


def bitmap(message: bytes, count: int) -> np.ndarray:
    """Returns the answers to `count` probes as booleans."""
    if len(message) != -(-count // 8):
        raise BadAnswer(f"a bitmap of {len(message)} bytes for {count} probes")
    bits = np.unpackbits(np.frombuffer(message, np.uint8), count=count, bitorder="little")
    return bits.astype(bool)


def description(message: pb.PrefixStoreDescribeResponse) -> Description:
    """Returns the description of the server."""
    return Description(
        version=message.version,
        limits={limit.name: limit.value for limit in message.limits},
        codecs=tuple(message.codecs),
        attend_backend=message.attend_backend,
        disk_budget_bytes=message.disk_budget_bytes,
        disk_used_bytes=message.disk_used_bytes,
        resident_budget_bytes=message.resident_budget_bytes,
        resident_used_bytes=message.resident_used_bytes,
        tenant_budget_bytes=message.tenant_budget_bytes,
        prefix_count=message.prefix_count,
        row_count=message.row_count,
        evicted_count=message.evicted_count,
        corrupt_count=message.corrupt_count,
        live_bytes=message.live_bytes,
        attend_warm=message.attend_warm,
        attend_cold=message.attend_cold,
        attend_demotions=message.attend_demotions,
        attend_rehydrates=message.attend_rehydrates,
        started_unix_ms=message.started_unix_ms,
        export_enabled=message.export_enabled,
    )


def receipt(message: stats_pb2.Receipt) -> Receipt:
    """Returns the receipt."""
    return Receipt(
        hits=message.hits,
        misses=message.misses,
        measured_hits=message.measured_hits,
        tokens_served=message.tokens_served,
        bytes_streamed=message.bytes_streamed,
        bytes_exported=message.bytes_exported,
        prefill_seconds_avoided=message.prefill_seconds_avoided,
        prefill_seconds_avoided_measured=message.prefill_seconds_avoided_measured,
        prefill_seconds_avoided_estimated=message.prefill_seconds_avoided_estimated,
        since_unix_ms=message.since_unix_ms,
    )


_Value = TypeVar("_Value")


def _known(table: dict[int, _Value], value: int, what: str) -> _Value:
    if value not in table:
        raise BadAnswer(f"the server answered with {what} {value}, which this client does not know")
    return table[value]
