"""`V.*`: sessions, which are one side of a prefix, row by row and layer by layer."""

from collections.abc import Iterator
from typing import NamedTuple

from pion_grpc.core.copying import CopyRequest
from pion_grpc.core.declaration import Declaration, LayerSpec
from pion_grpc.core.row_snapshots import NoFreeSnapshot
from pion_grpc.core.session_reading import SessionReading
from pion_grpc.core.session_values import LayerInfo, SessionInfo, WrongSize
from pion_grpc.errors import InvalidRequest, LayoutDiffers, NotStored, RowsOutOfRange
from pion_grpc.resp.command import Answer, Call, Streamed, Where, for_all, is_text
from pion_grpc.resp.commands.formats import WIDTH_MAX, label, parse_specs, rope_of, stored_as
from pion_grpc.resp.commands.prefixes import lines
from pion_grpc.resp.reply import (
    CRLF,
    OK,
    Buffer,
    Reply,
    ReplyError,
    array_header,
    bulk_header,
    encode,
)
from pion_wire.layout import DType

LAYERS_MAX = 80
ROWS_MAX = 200_000
IDS_MAX = 1_024
STREAMED_BYTES_MIN = 256 << 10
"""A reply from here on is produced while the client takes it; a smaller one is read at once."""
SID_BYTES_MAX = 203
"""A namespace and the ending that says which side."""

SESSION_NOT_FOUND = "ERR session not found"


class _Rows(NamedTuple):
    """Rows of some layers that are to be sent: one bulk string, or an array of them."""

    layers: tuple[int, ...]
    begin: int
    end: int
    as_array: bool


def create(call: Call) -> Answer:
    """`V.CREATE sid dim [VQUANT fmt]`, or `V.CREATE sid [dim] SCHEMA N specs…`."""
    sid = _sid(call)
    for schema_at in (1, 2):
        if call.word(schema_at) == "SCHEMA":
            return _create_schema(call, sid, schema_at)
    width = call.integer(1, 1, WIDTH_MAX, f"ERR invalid value_dim (must be 1-{WIDTH_MAX})")
    name = b"int8"
    if call.word(2) == "VQUANT":
        if call.count < 4:
            raise ReplyError("ERR V.CREATE VQUANT requires: format")
        name = call.raw(3)
    codec = stored_as(name, width, "V.CREATE: unknown VQUANT format")
    side = Declaration(LayerSpec(width, codec))
    try:
        return call.services.sessions.create(call.tenant, sid, side, exactly=False)
    except LayoutDiffers as error:
        raise ReplyError(f"ERR V.CREATE: {error}") from error


def store_batch(call: Call) -> Answer:
    """`V.STOREBATCH sid layer start count rows [FMT F16]`."""
    refusal = "ERR invalid layer_id/start_id/count"
    layer = call.integer(1, 0, refusal=refusal)
    first_row = call.integer(2, 0, refusal=refusal)
    row_count = call.integer(3, 1, refusal=refusal)
    if layer >= LAYERS_MAX:
        raise ReplyError("ERR V.STOREBATCH: layer_id exceeds MAX_VS_LAYERS")
    dtype = DType.F32
    if call.count > 5:
        if call.count != 7 or (call.word(5), call.word(6)) != ("FMT", "F16"):
            raise ReplyError("ERR V.STOREBATCH: unknown option (expected FMT F16)")
        dtype = DType.F16
    if first_row + row_count > ROWS_MAX:
        raise ReplyError("ERR V.STOREBATCH failed")
    rows = memoryview(call.arguments[4])
    try:
        call.services.sessions.write(
            call.tenant, _sid(call), layer, first_row, row_count, rows, dtype
        )
    except WrongSize as error:
        raise ReplyError(
            f"ERR V.STOREBATCH: blob size {error.size} != expected {error.expected} "
            f"(count * dim * {dtype.itemsize})"
        ) from error
    except NotStored as error:
        raise ReplyError(SESSION_NOT_FOUND) from error
    except (LayoutDiffers, InvalidRequest) as error:
        raise ReplyError(f"ERR V.STOREBATCH failed ({error})") from error
    return OK


def fetch(call: Call) -> Answer:
    """`V.FETCH sid layer id…`, `… layer RANGE begin end`, `… BATCH begin end [layers]`."""
    if call.word(1) == "BATCH":
        return _fetch_batch(call)
    if call.word(2) == "RANGE":
        return _fetch_range(call)
    return _fetch_rows(call)


def info(call: Call) -> Answer:
    """`V.INFO [sid]`; nil for one that does not exist, which is what `serve` takes for gone."""
    if call.count == 0:
        sessions = call.services.sessions
        totals = sessions.own_totals(call.tenant) if call.tenant else sessions.totals()
        return lines(
            {
                "enabled": 1,
                "sessions": totals.sides,
                "total_tokens": totals.rows,
                "total_fetches": totals.fetched_rows,
            }
        )
    session = call.services.sessions.info(call.tenant, _sid(call))
    return None if session is None else lines(_described(session))


def snapshot(call: Call) -> Answer:
    """`V.SNAPSHOT sid`: an id for how many rows every layer has now."""
    try:
        return call.services.sessions.snapshot(call.tenant, _sid(call))
    except NotStored as error:
        raise ReplyError(SESSION_NOT_FOUND) from error
    except NoFreeSnapshot as error:
        raise ReplyError("ERR V.SNAPSHOT: no free snapshot slot (max 16 per session)") from error


def restore(call: Call) -> Answer:
    """`V.RESTORE sid id`: layers that have grown since are cut back."""
    sid, identity = _sid(call), _snapshot_id(call, "V.RESTORE")
    if call.services.sessions.info(call.tenant, sid) is None:
        raise ReplyError(SESSION_NOT_FOUND)
    try:
        call.services.sessions.restore(call.tenant, sid, identity)
    except NotStored as error:
        raise ReplyError("ERR V.RESTORE: unknown snap_id for this session") from error
    return OK


def commit(call: Call) -> Answer:
    """`V.COMMIT sid id`: forgets a snapshot, and keeps the rows."""
    identity = _snapshot_id(call, "V.COMMIT")
    try:
        return int(call.services.sessions.release(call.tenant, _sid(call), identity))
    except NotStored as error:
        raise ReplyError(SESSION_NOT_FOUND) from error


def export(call: Call) -> Answer:
    """`V.EXPORT k_sid v_sid begin end layers heads head_dim`: a file with these rows, head by head."""
    services = call.services
    if not call.client.is_local:
        raise ReplyError("ERR V.EXPORT: only for clients on this host")
    if not services.settings.export or services.access.tenants:
        raise ReplyError("ERR V.EXPORT is switched off here")
    k_sid, v_sid = _sid(call), _sid(call, 1)
    refusal = "ERR V.EXPORT: invalid range, num_layers, n_kv_heads or head_dim"
    begin, end = _range(call, 2, refusal)
    layers, heads, head_dim = (call.integer(at, 1, WIDTH_MAX, refusal) for at in (4, 5, 6))
    if layers > LAYERS_MAX:
        raise ReplyError(refusal)
    request = CopyRequest(k_sid, v_sid, begin, end, layers, heads, head_dim)
    try:
        return str(services.copier.copy(call.tenant, request))
    except NotStored as error:
        raise ReplyError(SESSION_NOT_FOUND) from error
    except (InvalidRequest, LayoutDiffers, RowsOutOfRange) as error:
        raise ReplyError(f"ERR V.EXPORT: {error}") from error


def _create_schema(call: Call, sid: str, schema_at: int) -> Answer:
    what = "V.CREATE SCHEMA"
    default = 0
    if schema_at == 2:
        default = call.integer(1, 0, WIDTH_MAX, f"ERR {what}: default_dim must be 0-{WIDTH_MAX}")
    if schema_at + 1 >= call.count:
        raise ReplyError(f"ERR {what}: N must be positive")
    specs, _ = parse_specs(call, schema_at + 1, schema_at + 2, default, what)
    side = Declaration(LayerSpec(default, "int8") if default else None, specs)
    try:
        return call.services.sessions.create(call.tenant, sid, side, exactly=True)
    except LayoutDiffers as error:
        raise ReplyError(f"ERR {what}: the session exists with another schema") from error


def _fetch_rows(call: Call) -> Answer:
    layer = call.integer(1, 0)
    if any(call.word(at) == "FMT" for at in range(2, call.count)):
        raise ReplyError("ERR FMT NATIVE requires the RANGE or BATCH form")
    ids: list[int] = []
    for at in range(2, min(call.count, 2 + IDS_MAX)):
        if not call.arguments[at]:
            break
        ids.append(call.integer(at))
    if not ids:
        raise ReplyError("ERR no token IDs provided")
    reading = _open(call, (layer,), halves=False)
    if reading is None:
        return None
    with reading.guarded():
        count = reading.row_count(layer)
        if not any(0 <= row < count for row in ids):
            return None
        zeros = bytes(reading.row_bytes(layer))
        rows = [
            b"".join(reading.rows(layer, row, row + 1)) if 0 <= row < count else zeros
            for row in ids
        ]
    payload = b"".join(rows)
    call.services.sessions.fetched(call.tenant, len(ids), len(payload))
    return payload


def _fetch_range(call: Call) -> Answer:
    layer = call.integer(1, 0)
    if call.count < 5:
        raise ReplyError("ERR V.FETCH RANGE requires: sid layer RANGE start end")
    refusal = "ERR invalid RANGE: end must exceed start (>=0)"
    begin, end = _range(call, 3, refusal)
    halves = _wants_native(call, 5)
    reading = _open(call, (layer,), halves=halves)
    if reading is None:
        return None
    rows = _Rows((layer,), begin, end, as_array=False)
    if begin >= reading.row_count(layer):
        reading.close()
        return None
    return _send(call, reading, rows)


def _fetch_batch(call: Call) -> Answer:
    if call.count < 4:
        raise ReplyError("ERR V.FETCH BATCH requires: sid BATCH start end [num_layers]")
    refusal = "ERR V.FETCH BATCH invalid range: end must exceed start (>=0)"
    begin, end = _range(call, 2, refusal)
    following = 4
    wanted = 0
    if call.count > 4 and call.word(4) != "FMT":
        wanted = call.integer(4)
        following = 5
    halves = _wants_native(call, following)
    reading = _open(call, (), halves=halves)
    if reading is None:
        raise ReplyError("ERR V.FETCH BATCH: session has no stored layers")
    count = wanted if 1 <= wanted <= reading.layer_count else reading.layer_count
    return _send(call, reading, _Rows(tuple(range(count)), begin, end, as_array=True))


def _open(call: Call, layers: tuple[int, ...], *, halves: bool) -> SessionReading | None:
    try:
        return call.services.sessions.open(call.tenant, _sid(call), layers, halves=halves)
    except NotStored as error:
        raise ReplyError(SESSION_NOT_FOUND) from error


def _send(call: Call, reading: SessionReading, rows: _Rows) -> Answer:
    present = [layer for layer in rows.layers if reading.row_count(layer) > rows.begin]
    count = rows.end - rows.begin
    size = sum(reading.row_bytes(layer) * count for layer in present)
    call.services.sessions.fetched(call.tenant, count * len(rows.layers), 0)
    if size >= STREAMED_BYTES_MIN:
        return Streamed(_pieces(call, reading, rows), reading.close)
    call.services.sessions.fetched(call.tenant, 0, size)
    with reading.guarded():
        replies: list[Reply] = [
            b"".join(reading.rows(layer, rows.begin, rows.end)) if layer in present else None
            for layer in rows.layers
        ]
    return replies if rows.as_array else replies[0]


def _pieces(call: Call, reading: SessionReading, rows: _Rows) -> Iterator[Buffer]:
    with reading.guarded():
        if rows.as_array:
            yield array_header(len(rows.layers))
        for layer in rows.layers:
            if reading.row_count(layer) <= rows.begin:
                yield from encode(None, call.client.version)
                continue
            yield bulk_header(reading.row_bytes(layer) * (rows.end - rows.begin))
            for piece in reading.rows(layer, rows.begin, rows.end):
                # As it goes: of what a client asks for it may take but the beginning.
                call.services.sessions.fetched(call.tenant, 0, len(piece))
                yield piece
            yield CRLF


def _range(call: Call, at: int, refusal: str) -> tuple[int, int]:
    begin = call.integer(at, 0, ROWS_MAX, refusal)
    end = call.integer(at + 1, begin + 1, refusal=refusal)
    if end > ROWS_MAX:
        raise ReplyError(f"ERR end must not exceed {ROWS_MAX}")
    return begin, end


def _wants_native(call: Call, at: int) -> bool:
    """Whether rows kept as binary16 shall come as they are."""
    if at >= call.count:
        return False
    if (call.word(at), call.word(at + 1), call.count) != ("FMT", "NATIVE", at + 2):
        raise ReplyError("ERR V.FETCH: unknown option (expected FMT NATIVE)")
    return True


def _sid(call: Call, index: int = 0) -> str:
    sid = call.text(index)
    if not 1 <= len(call.arguments[index]) <= SID_BYTES_MAX or not is_text(sid):
        raise ReplyError(f"ERR session id must be 1..{SID_BYTES_MAX} bytes of UTF-8")
    return sid


def _snapshot_id(call: Call, what: str) -> int:
    return call.integer(1, 1, refusal=f"ERR {what}: snap_id must be positive")


def _described(session: SessionInfo) -> dict[str, int | str]:
    declaration = session.declaration
    default = declaration.default if declaration else None
    widths = {layer.tensor.heads * layer.tensor.head_dim for layer in session.layers}
    if declaration is None:
        width = widths.pop() if len(widths) == 1 else 0
        first = _format(session.layers[0])
        uniform = width > 0 and len({_format(layer) for layer in session.layers}) == 1
    else:
        width = default.width if default else 0
        spec = declaration.spec(0)
        first = label(spec.codec) if spec else "int8"
        specs = {declaration.spec(layer) for layer in range(session.layer_count)}
        uniform = specs <= {default}
    described: dict[str, int | str] = {
        "session_idx": session.number,
        "value_dim": width,
        "v_format": first,
        "num_layers": session.layer_count,
        "schema": "uniform" if uniform else "heterogeneous",
    }
    for layer in session.layers:
        if layer.rows:
            described[f"layer_{layer.layer}_tokens"] = layer.rows
        if not uniform:
            described |= _layer_lines(layer)
    if not uniform and declaration is not None:
        known = {layer.layer for layer in session.layers}
        for number in range(session.layer_count):
            spec = declaration.spec(number)
            if number not in known and spec is not None:
                described |= _spec_lines(number, spec)
    described["total_tokens"] = session.rows
    return described


def _layer_lines(layer: LayerInfo) -> dict[str, int | str]:
    width = layer.tensor.heads * layer.tensor.head_dim
    described = _spec_lines(layer.layer, LayerSpec(width, layer.tensor.codec))
    described[f"layer_{layer.layer}_fmt"] = _format(layer)
    return described


def _spec_lines(number: int, spec: LayerSpec) -> dict[str, int | str]:
    described: dict[str, int | str] = {
        f"layer_{number}_dim": spec.width,
        f"layer_{number}_fmt": label(spec.codec),
    }
    rope = rope_of(spec.codec)
    if rope is not None:
        described[f"layer_{number}_rope"] = rope
    return described


def _format(layer: LayerInfo) -> str:
    """Returns a layer's format; rows that came over gRPC as they are have the name of their type."""
    if layer.tensor.codec == "raw":
        return {DType.F16: "fp16", DType.BF16: "bf16", DType.F32: "fp32"}[layer.tensor.dtype]
    return label(layer.tensor.codec)


COMMANDS = (
    for_all("V.CREATE", -3, create, usage="sid value_dim [VQUANT format]"),
    for_all("V.STOREBATCH", -6, store_batch, usage="sid layer_id start_id count blob [FMT F16]"),
    for_all("V.FETCH", -3, fetch, usage="sid layer_id token_id [token_id …]"),
    for_all("V.EXPORT", -8, export, usage="k_sid v_sid start end num_layers n_kv_heads head_dim"),
    for_all("V.INFO", -1, info, Where.QUICK),
    for_all("V.SNAPSHOT", -2, snapshot, usage="sid"),
    for_all("V.RESTORE", -3, restore, usage="sid snap_id"),
    for_all("V.COMMIT", -3, commit, usage="sid snap_id"),
)
