"""The words of this wire for how rows are stored, and what they become here.

Names are not case-sensitive. One is silently something else, because clients rely on it: a format that
works in blocks of 32 values is `int8` where the width is not a multiple of 32. Everything else that
cannot be stored as asked is refused.
"""

from pion_grpc.core.declaration import LayerSpec
from pion_grpc.resp.command import Call
from pion_grpc.resp.protocol import parse_int
from pion_grpc.resp.reply import ReplyError
from pion_wire import codecs
from pion_wire.codecs import MlxAffine

NAMES = ("int8", "turbo4", "turbo3", "turbo2", "fp16", "fp8", "mlx4g32")
HYBRID = "bf16_rope_fp8_body"
"""Rotated values as bf16, the others as fp8: only layer by layer, because it needs to know how many."""
BLOCK = 32
BLOCK_FORMATS = frozenset(NAMES) - {"int8", "fp16"}
SCHEMA_LAYERS_MAX = 59
WIDTH_MAX = 8_192
_CHOICES = "|".join(NAMES)


def stored_as(name: bytes, width: int, unknown: str) -> str:
    """Returns the codec of a format for rows of a width; `unknown` begins the refusal."""
    shown = name[:64].decode("utf-8", "surrogateescape")
    known = shown.lower()
    if known == HYBRID:
        raise ReplyError(f"ERR {unknown} '{shown}': {HYBRID} needs rope=N, so it needs SCHEMA")
    if known not in NAMES:
        raise ReplyError(f"ERR {unknown} '{shown}' (want {_CHOICES})")
    if known in BLOCK_FORMATS and width % BLOCK:
        known = "int8"
    return str(codecs.parse(known))


def label(codec: str) -> str:
    """Returns the name of a codec on this wire."""
    parsed = codecs.parse(codec)
    if parsed.name == HYBRID:
        return HYBRID
    return parsed.label if isinstance(parsed, MlxAffine) else codec


def rope_of(codec: str) -> int | None:
    """Returns how many values of a row are rotated, where a codec keeps them apart."""
    parsed = codecs.parse(codec)
    return int(parsed.parameters[0]) if parsed.name == HYBRID else None


def parse_specs(
    call: Call, count_at: int, first: int, default_width: int, what: str
) -> tuple[tuple[LayerSpec, ...], int]:
    """Returns the specs of N layers from an argument on, and the index of what follows them."""
    count = call.integer(count_at, refusal=f"ERR {what}: N must be positive")
    if count > SCHEMA_LAYERS_MAX:
        raise ReplyError(f"ERR {what}: N exceeds {SCHEMA_LAYERS_MAX} layers")
    if count < 1:
        raise ReplyError(f"ERR {what}: N must be positive")
    if first + count > call.count:
        raise ReplyError(f"ERR {what}: not enough layer specs (need {count})")
    specs = [
        _spec(call.raw(first + layer), default_width, f"{what}: layer {layer}")
        for layer in range(count)
    ]
    return tuple(specs), first + count


def _spec(text: bytes, default_width: int, where: str) -> LayerSpec:
    """Returns what `fmt=…,dim=…,rope=…` says."""
    name, width, rope = "int8", default_width, 0
    for item in text.decode("latin-1").split(","):
        key, _, value = item.partition("=")
        key = key.strip().lower()
        if key == "fmt":
            name = value.strip().lower()
            if name not in (*NAMES, HYBRID):
                raise ReplyError(f"ERR {where} unknown fmt '{value}'")
        elif key == "dim":
            width = _number(value, f"ERR {where} dim must be 1-{WIDTH_MAX}")
        elif key == "rope":
            rope = _number(value, f"ERR {where} rope must be 1-{WIDTH_MAX}")
        elif key == "s":
            raise ReplyError(f"ERR {where} S-tensor reserved")
        else:
            raise ReplyError(f"ERR {where} unknown key '{key}'")
    if width == 0:
        raise ReplyError(f"ERR {where} missing dim and no default supplied")
    if name == HYBRID:
        if not 0 < rope < width:
            raise ReplyError(f"ERR {where} {HYBRID} needs rope=N (0 < N < dim)")
        if (width - rope) % BLOCK:
            raise ReplyError(f"ERR {where} {HYBRID} body (dim - rope) must be multiple of {BLOCK}")
        return LayerSpec(width, f"{HYBRID}({rope})")
    if name in BLOCK_FORMATS and width % BLOCK:
        kind = "mlx4g32" if name == "mlx4g32" else "turbo/fp8"
        raise ReplyError(f"ERR {where} {kind} dim must be multiple of {BLOCK}")
    return LayerSpec(width, str(codecs.parse(name)))


def _number(text: str, refusal: str) -> int:
    return parse_int(text.encode("latin-1"), 1, WIDTH_MAX, refusal)
