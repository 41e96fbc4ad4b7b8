"""`KV.PREFIX.*`: what is stored under a namespace, both sides of it together."""

from typing import NamedTuple

from pion_grpc.core.attend_values import Source, Telemetry
from pion_grpc.core.declaration import Declaration, LayerSpec
from pion_grpc.core.saving import save_all, snapshot_to
from pion_grpc.core.session_values import Unsettled
from pion_grpc.core.values import (
    BLOCK_TOKENS_MAX,
    RESTORED_TOKENS_MAX,
    TABLE_HASHES_MAX,
    BlockTable,
)
from pion_grpc.errors import InvalidRequest, NotStored, PionError
from pion_grpc.resp.command import (
    Answer,
    Call,
    Command,
    Elsewhere,
    Where,
    for_all,
    is_text,
    syntax_error,
)
from pion_grpc.resp.commands.formats import WIDTH_MAX, parse_specs, stored_as
from pion_grpc.resp.reply import OK, ReplyError, Simple
from pion_wire.layout import Side
from pion_wire.limits import NAMESPACE_BYTES_MAX, PREFILL_MS_MAX

HEADS_MAX = 256
HEAD_DIM_MAX = 512
UNLIMITED_SESSIONS = (1 << 31) - 1
"""What `vstore_max_sessions` says where there is no limit."""

UNKNOWN = Simple("UNKNOWN")
HIT, MISS = Simple("HIT"), Simple("MISS")


class Table(NamedTuple):
    """A BLOCKS clause: the table, and the index of what follows it."""

    table: BlockTable | None
    following: int


def register(call: Call) -> Answer:
    """`KV.PREFIX.REGISTER ns kv_dim vquant [BLOCKS size count hashes] [PREFILL_MS ms]`."""
    namespace = namespace_of(call, 0)
    width = call.integer(1, 1, WIDTH_MAX, "ERR kv_dim out of range")
    codec = stored_as(call.raw(2), width, "KV.PREFIX.REGISTER: unknown vquant")
    blocks = _blocks(call, 3)
    prefill_ms = _prefill_ms(call, blocks.following)
    side = Declaration(LayerSpec(width, codec))
    call.services.sessions.register(
        call.tenant, namespace, {Side.K: side, Side.V: side}, blocks.table, prefill_ms
    )
    return OK


def register_schema(call: Call) -> Answer:
    """`KV.PREFIX.REGISTER.SCHEMA ns N K specs… V specs… [PREFILL_MS ms]`: each layer by itself."""
    namespace = namespace_of(call, 0)
    what = "KV.PREFIX.REGISTER.SCHEMA"
    k_specs, after_k = parse_specs(call, 1, 2, 0, what)
    v_specs, after_v = parse_specs(call, 1, after_k, 0, what)
    prefill_ms = _prefill_ms(call, after_v)
    call.services.sessions.register(
        call.tenant,
        namespace,
        {Side.K: Declaration(None, k_specs), Side.V: Declaration(None, v_specs)},
        None,
        prefill_ms,
    )
    return OK


def lookup(call: Call) -> Answer:
    """`KV.PREFIX.LOOKUP ns [TOKENS n] [PREFILL_MS ms]`."""
    tokens: int | None = None
    prefill_ms: int | None = None
    for at in range(1, call.count, 2):
        option = call.word(at)
        if option not in ("TOKENS", "PREFILL_MS"):
            raise ReplyError("ERR KV.PREFIX.LOOKUP unknown option (TOKENS, PREFILL_MS)")
        if at + 1 >= call.count:
            raise ReplyError("ERR KV.PREFIX.LOOKUP option needs a value")
        if option == "TOKENS":
            refusal = f"ERR TOKENS out of range (0..{RESTORED_TOKENS_MAX})"
            tokens = call.integer(at + 1, 0, RESTORED_TOKENS_MAX, refusal)
        else:
            prefill_ms = _milliseconds(call, at + 1)
    namespace = _any_name(call, 0)
    try:
        hit = call.services.sessions.lookup(
            call.tenant, namespace, tokens, prefill_ms, settle=not call.on_loop
        )
    except Unsettled as unsettled:
        raise Elsewhere from unsettled
    return HIT if hit else MISS


def drop(call: Call) -> Answer:
    """`KV.PREFIX.DROP ns [ns …]`: how many of them existed."""
    namespaces = [_any_name(call, index) for index in range(call.count)]
    return call.services.sessions.drop(call.tenant, namespaces)


def owner(call: Call) -> Answer:
    """`KV.PREFIX.OWNER ns`: this worker, if it is stored: every worker answers for every prefix."""
    namespace = _any_name(call, 0)
    known = call.services.sessions.exists(call.tenant, namespace)
    return Simple(str(call.services.facts.worker if known else -1))


def blocks(call: Call) -> Answer:
    """`KV.PREFIX.BLOCKS ns`: `u32 size | u32 count | count × u64`."""
    table = call.services.store.block_table(call.tenant, namespace_of(call, 0))
    if table is None or not table.hashes:
        return UNKNOWN
    count = len(table.hashes) // 8
    header = table.block_tokens.to_bytes(4, "little") + count.to_bytes(4, "little")
    return header + table.hashes


def membership(call: Call) -> Answer:
    """`KV.PREFIX.MEMBERSHIP ns count hashes`: a bit for each."""
    namespace = namespace_of(call, 0)
    count = call.integer(
        1, 0, TABLE_HASHES_MAX, f"ERR hash_count out of range (0..{TABLE_HASHES_MAX})"
    )
    if len(call.arguments[2]) != 8 * count:
        raise ReplyError("ERR hash_blob length mismatch")
    bitmap = call.services.store.membership(call.tenant, namespace, call.raw(2))
    return UNKNOWN if bitmap is None else bitmap


def info(call: Call) -> Answer:
    """`KV.PREFIX.INFO`: what all sessions hold."""
    totals = call.services.sessions.totals()
    return lines(
        {
            "registered_prefixes": totals.prefixes,
            "total_prefix_tokens": totals.prefix_rows,
            "vstore_sessions": totals.sides,
            "vstore_total_fetches": totals.fetched_rows,
            "vstore_evictions": totals.since_start.gone,
            "vstore_max_sessions": call.services.sessions.sides_max or UNLIMITED_SESSIONS,
            "vstore_bytes": totals.bytes,
            "wal_enabled": int(call.services.settings.logged),
            "wal_bytes": totals.unsaved_bytes,
            "wal_appended": totals.since_start.records,
            "wal_replayed": totals.since_start.recovered,
            "directory_enabled": 1,
            "my_worker_id": call.services.facts.worker,
            "directory_entries": totals.sides,
            **attention(call),
        }
    )


def save(call: Call) -> Answer:
    """`KV.PREFIX.SAVE [path]`: seals what is live, on stable storage; with a path copies it, too."""
    if call.count > 1:
        raise syntax_error()
    path = call.text(0) if call.count else ""
    try:
        anything = save_all(call.services.store)
        if call.count:
            snapshot_to(call.services.store, path)
    except InvalidRequest as error:
        raise ReplyError(
            "ERR KV.PREFIX.SAVE: path must be relative to the data directory, and none of its own files"
        ) from error
    except PionError as error:
        raise ReplyError(f"ERR KV.PREFIX.SAVE failed ({error})") from error
    if not (anything or call.count):
        raise ReplyError("ERR KV.PREFIX.SAVE failed (no active sessions or io error)")
    return OK


def commit(call: Call) -> Answer:
    """`KV.PREFIX.COMMIT`: what was acknowledged before is on stable storage."""
    if not call.services.settings.logged:
        raise ReplyError("ERR KV.PREFIX.COMMIT: --no-wal, writes are not logged")
    try:
        call.services.store.sync()
    except PionError as error:
        raise ReplyError(f"ERR KV.PREFIX.COMMIT: {error}") from error
    return OK


def warm(call: Call) -> Answer:
    """`KV.PREFIX.WARM ns H D [attend_sid]`: makes stored rows resident; how many layers of them.

    H may count query heads: of rows that are kv_dim wide, kv_dim / D heads are K/V heads.
    """
    attend = call.services.attend
    if attend is None:
        raise ReplyError("ERR Metal attention not available (start with --metal-attention)")
    namespace = namespace_of(call, 0)
    refusal = f"ERR invalid H/D (1..{HEADS_MAX} / 1..{HEAD_DIM_MAX})"
    heads = call.integer(1, 1, HEADS_MAX, refusal)
    head_dim = call.integer(2, 1, HEAD_DIM_MAX, refusal)
    session = call.text(3) if call.count > 3 else namespace
    if not is_text(session):
        raise ReplyError("ERR attend_sid must be UTF-8")
    try:
        warmed = attend.store_prefix(call.tenant, session, Source(namespace, heads, head_dim))
    except NotStored as error:
        if call.services.sessions.exists(call.tenant, namespace):
            return Simple("0")  # it is registered, and has no rows yet
        raise ReplyError("ERR KV.PREFIX.WARM namespace not registered") from error
    skipped = f" skipped_dim={warmed.skipped}" if warmed.skipped else ""
    return Simple(f"{warmed.layers}{skipped}")


def attention(call: Call) -> "dict[str, int | str]":
    """Returns how many entries are resident and cold, and how many have become so."""
    attend = call.services.attend
    counts = attend.telemetry() if attend is not None else Telemetry()
    return {
        "sdpa_warm": counts.warm,
        "sdpa_cold": counts.cold,
        "sdpa_demotions": counts.demotions,
        "sdpa_rehydrates": counts.rehydrates,
    }


def namespace_of(call: Call, index: int) -> str:
    """Returns an argument that names a prefix, of a length that one may have."""
    if not 1 <= len(call.arguments[index]) <= NAMESPACE_BYTES_MAX:
        raise ReplyError(f"ERR ns_key length must be 1..{NAMESPACE_BYTES_MAX}")
    namespace = call.text(index)
    if not is_text(namespace):
        raise ReplyError("ERR ns_key must be UTF-8")
    _check_prefix(call, namespace)
    return namespace


def _any_name(call: Call, index: int) -> str:
    """Returns an argument that names a prefix, or a name that none can have."""
    name = call.text(index)
    _check_prefix(call, name)
    return name if is_text(name) else "\0"


def lines(values: "dict[str, int | str]") -> bytes:
    """Returns `name:value` lines."""
    return "".join(f"{name}:{value}\r\n" for name, value in values.items()).encode()


def _check_prefix(call: Call, namespace: str) -> None:
    required = call.services.settings.namespace_prefix
    if not namespace.startswith(required):
        raise ReplyError(
            f"ERR namespace must start with required prefix '{required}' (multi-tenant isolation)"
        )


def _blocks(call: Call, at: int) -> Table:
    if call.word(at) != "BLOCKS":
        return Table(None, at)
    if at + 3 >= call.count:
        raise ReplyError("ERR BLOCKS requires: block_size hash_count hash_blob")
    refusal = f"ERR BLOCKS block_size out of range (1..{BLOCK_TOKENS_MAX})"
    size = call.integer(at + 1, 1, BLOCK_TOKENS_MAX, refusal)
    refusal = f"ERR BLOCKS hash_count out of range (0..{TABLE_HASHES_MAX})"
    count = call.integer(at + 2, 0, TABLE_HASHES_MAX, refusal)
    if len(call.arguments[at + 3]) != 8 * count:
        raise ReplyError("ERR BLOCKS hash_blob length mismatch")
    return Table(BlockTable(size, call.raw(at + 3)), at + 4)


def _prefill_ms(call: Call, at: int) -> int:
    if call.word(at) != "PREFILL_MS":
        return 0
    if at + 1 >= call.count:
        raise ReplyError("ERR PREFILL_MS requires: milliseconds")
    return _milliseconds(call, at + 1)


def _milliseconds(call: Call, at: int) -> int:
    refusal = f"ERR PREFILL_MS out of range (0..{PREFILL_MS_MAX})"
    return call.integer(at, 0, PREFILL_MS_MAX, refusal)


COMMANDS = (
    for_all(
        "KV.PREFIX.REGISTER",
        -4,
        register,
        usage="ns_key kv_dim vquant [BLOCKS block_size hash_count hash_blob] [PREFILL_MS ms]",
    ),
    for_all(
        "KV.PREFIX.REGISTER.SCHEMA",
        -5,
        register_schema,
        usage="ns_key N k_spec … v_spec … [PREFILL_MS ms]",
    ),
    for_all("KV.PREFIX.LOOKUP", -2, lookup, Where.QUICK, usage="ns_key"),
    for_all("KV.PREFIX.DROP", -2, drop, usage="ns_key [ns_key …]"),
    for_all("KV.PREFIX.OWNER", -2, owner, Where.QUICK, usage="ns_key"),
    for_all("KV.PREFIX.BLOCKS", -2, blocks, Where.QUICK, usage="ns_key"),
    for_all(
        "KV.PREFIX.MEMBERSHIP", -4, membership, Where.QUICK, usage="ns_key hash_count hash_blob"
    ),
    Command("KV.PREFIX.INFO", -1, info),
    Command("KV.PREFIX.SAVE", -1, save),
    for_all("KV.PREFIX.COMMIT", -1, commit),
    for_all("KV.PREFIX.WARM", -4, warm, usage="ns_key H D [attend_sid]"),
)
