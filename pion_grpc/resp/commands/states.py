"""`SSM.PREFIX.*`: recurrent state, opaque, one value for each layer of a session."""

from pion_grpc.core.values import LAYER_MAX
from pion_grpc.resp.command import Answer, Call, StreamedValue, for_all, is_text
from pion_grpc.resp.reply import OK, ReplyError
from pion_wire.limits import NAMESPACE_BYTES_MAX

_INVALID_LAYER = "ERR invalid layer_id (must be >= 0)"


def store(call: Call) -> Answer:
    """`SSM.PREFIX.STORE sid layer value`: replaces it as a whole."""
    layer = call.integer(1, 0, LAYER_MAX, _INVALID_LAYER)
    call.services.states.store(call.tenant, _session(call), layer, call.arguments[2])
    return OK


def fetch(call: Call) -> Answer:
    """`SSM.PREFIX.FETCH sid layer`: the value, or nil."""
    layer = call.integer(1, 0, LAYER_MAX, _INVALID_LAYER)
    name = call.text(0)
    if not is_text(name):
        return None
    found = call.services.states.open(call.tenant, name, layer)
    if found is None:
        return None
    return StreamedValue(found.reading.size, found.reading.pieces, found.reading.close)


def drop(call: Call) -> Answer:
    """`SSM.PREFIX.DROP sid [layer]`: one layer, or all."""
    layer: int | None = None
    if call.count > 1:
        refusal = "ERR layer_id must be >= 0 (omit to drop all)"
        layer = call.integer(1, 0, LAYER_MAX, refusal)
    name = call.text(0)
    if is_text(name):
        call.services.states.drop(call.tenant, name, layer)
    return OK


def _session(call: Call) -> str:
    name = call.text(0)
    if not 1 <= len(call.arguments[0]) <= NAMESPACE_BYTES_MAX or not is_text(name):
        raise ReplyError(f"ERR session id must be 1..{NAMESPACE_BYTES_MAX} bytes of UTF-8")
    return name


COMMANDS = (
    for_all("SSM.PREFIX.STORE", -4, store, usage="sid layer_id blob"),
    for_all("SSM.PREFIX.FETCH", -3, fetch, usage="sid layer_id"),
    for_all("SSM.PREFIX.DROP", -2, drop, usage="sid [layer_id]"),
)
