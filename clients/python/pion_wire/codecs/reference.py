"""The right answer, one value at a time: what the fast codecs are compared with, and ports can read.

Shares nothing with them: no array arithmetic, no bit tricks, no conversions by ml_dtypes. The one
decision: every step is written out in the precision in which the format defines it (float32 unless
it says otherwise), in the order of the package's byte tables. Rows must be finite, and dimensions
must fit; nothing is checked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pion_wire.codecs.affine import MlxAffine
from pion_wire.codecs.base import Codec
from pion_wire.codecs.blocks import Bf16RopeFp8Body

F32 = np.float32
Row = Sequence[np.float32]


def encode_row(codec: Codec, row: Row) -> tuple[bytes, ...]:
    """The bytes of one row of float32 in each array of `codec`."""
    if isinstance(codec, MlxAffine):
        return _encode_affine(codec, row)
    if isinstance(codec, Bf16RopeFp8Body):
        rope = b"".join(_bf16_bytes(x) for x in row[: codec.rope])
        return (rope + b"".join(_fp8_block(x)[0] for x in _groups(row[codec.rope :], 32)),)
    match codec.name:
        case "raw":
            return (struct.pack(f"<{len(row)}f", *row),)
        case "fp16":
            return (struct.pack(f"<{len(row)}e", *row),)
        case "int8":
            return _encode_int8(row)
    block = {"fp8": _fp8_block, "turbo4": _turbo4_block, "turbo3": _turbo3_block}
    blocks = [block.get(codec.name, _turbo2_block)(x) for x in _groups(row, 32)]
    norm2 = F32(0)
    for _, values in blocks:
        for value in values:
            norm2 = norm2 + value * value
    return (struct.pack("<f", norm2) + b"".join(stored for stored, _ in blocks),)


def decode_row(codec: Codec, arrays: Sequence[bytes]) -> list[np.float32]:
    """The values of one row, as float32."""
    first = arrays[0]
    if isinstance(codec, MlxAffine):
        return _decode_affine(codec, arrays)
    if isinstance(codec, Bf16RopeFp8Body):
        rope = [_bf16_value(word) for (word,) in struct.iter_unpack("<H", first[: 2 * codec.rope])]
        return rope + _decode_blocks(first[2 * codec.rope :], _fp8_levels, 32)
    match codec.name:
        case "raw":
            return [F32(x) for (x,) in struct.iter_unpack("<f", first)]
        case "fp16":
            return [F32(x) for (x,) in struct.iter_unpack("<e", first)]
        case "int8":
            (scale,), (bias,) = (struct.unpack("<f", array) for array in arrays[1:])
            codes = struct.unpack(f"<{len(first)}b", first)
            return [F32(code + 127) / F32(scale) + F32(bias) for code in codes]
        case "fp8":
            return _decode_blocks(first[4:], _fp8_levels, 32)
        case "turbo4":
            return _decode_blocks(first[4:], _turbo4_levels, 16)
        case "turbo3":
            return _decode_blocks(first[4:], lambda codes: [u - 4 for u in _take(codes, 3)], 12)
        case _:
            return _decode_blocks(first[4:], lambda codes: [2 * u - 3 for u in _take(codes, 2)], 8)


def _encode_int8(row: Row) -> tuple[bytes, ...]:
    low = min(row) + F32(0)  # never a negative zero
    extent = max(row) - low
    scale = F32(254) / (F32(1) if extent < F32(1e-8) else extent)
    codes = [int(min(max((x - low) * scale, F32(0)), F32(254))) - 127 for x in row]
    return struct.pack(f"<{len(row)}b", *codes), struct.pack("<f", scale), struct.pack("<f", low)


def _encode_affine(codec: MlxAffine, row: Row) -> tuple[bytes, ...]:
    top = (1 << codec.bits) - 1
    codes: list[int] = []
    scales = biases = b""
    for group in _groups(row, codec.group):
        scale = (max(group) - min(group)) / F32(top)
        scales += _rounded(codec, scale if scale > 0 else F32(1e-8))
        biases += _rounded(codec, min(group) + F32(0))  # never a negative zero
        (scale,) = _read(codec, scales[-_scale_bytes(codec) :])
        (bias,) = _read(codec, biases[-_scale_bytes(codec) :])
        for x in group:
            step = int((x - bias) / scale + F32(0.5)) if scale else 0
            codes.append(min(max(step, 0), top))
    return _stream(codes, codec.bits), scales, biases


def _decode_affine(codec: MlxAffine, arrays: Sequence[bytes]) -> list[np.float32]:
    scales, biases = _read(codec, arrays[1]), _read(codec, arrays[2])
    return [
        F32(q) * scales[i // codec.group] + biases[i // codec.group]
        for i, q in enumerate(_take(arrays[0], codec.bits))
    ]


def _scale_bytes(codec: MlxAffine) -> int:
    """Bytes of one scale."""
    return 4 if codec.scale_type == "f32" else 2


def _rounded(codec: MlxAffine, x: np.float32) -> bytes:
    if codec.scale_type == "bf16":
        return _bf16_bytes(x)
    return struct.pack("<f" if codec.scale_type == "f32" else "<e", x)


def _read(codec: MlxAffine, data: bytes) -> list[np.float32]:
    if codec.scale_type == "bf16":
        return [_bf16_value(word) for (word,) in struct.iter_unpack("<H", data)]
    form = "<f" if codec.scale_type == "f32" else "<e"
    return [F32(x) for (x,) in struct.iter_unpack(form, data)]


# Blocks: each encoder returns the block's bytes, and its levels times the scale before rounding.


def _scale(block: Row, peak: float) -> np.float32:
    scale = max(abs(x) for x in block) / F32(peak)
    return F32(1) if _counts_as_zeros(scale) else scale


def _counts_as_zeros(scale: np.float32) -> bool:
    return bool(scale < np.finfo(F32).smallest_normal)


def _round(x: np.float32) -> int:
    """Half away from zero."""
    return int(x + F32(0.5) if x > 0 else x - F32(0.5))


def _turbo4_block(block: Row) -> tuple[bytes, Row]:
    scale = _scale(block, 7)
    q = [min(max(_round(x * (F32(1) / scale)), -8), 7) for x in block]
    codes = bytes((q[i + 16] + 8) << 4 | (q[i] + 8) for i in range(16))
    return struct.pack("<e", scale) + codes, [F32(k) * scale for k in q]


def _turbo4_levels(codes: bytes) -> list[int]:
    return [(byte & 15) - 8 for byte in codes] + [(byte >> 4) - 8 for byte in codes]


def _turbo3_block(block: Row) -> tuple[bytes, Row]:
    scale = _scale(block, 3)
    q = [min(max(_round(x * (F32(1) / scale)), -4), 3) for x in block]
    codes = _stream([k + 4 for k in q], 3)
    return struct.pack("<e", scale) + codes, [F32(k) * scale for k in q]


def _turbo2_block(block: Row) -> tuple[bytes, Row]:
    scale = _scale(block, 1.5)
    u = [min(max(_round(x * (F32(1) / scale) + F32(1.5)), 0), 3) for x in block]
    zeros = _counts_as_zeros(max(abs(x) for x in block) / F32(1.5))
    stored = F32(0) if zeros else scale / F32(2)  # there is no level at 0
    return struct.pack("<e", stored) + _stream(u, 2), [F32(2 * k - 3) * stored for k in u]


def _fp8_block(block: Row) -> tuple[bytes, Row]:
    scale = _scale(block, 240)
    codes = bytes(_e4m3_code(x * (F32(1) / scale)) for x in block)
    return struct.pack("<e", scale) + codes, [F32(k) * scale for k in _fp8_levels(codes)]


def _fp8_levels(codes: bytes) -> list[float]:
    return [_e4m3_value(code) for code in codes]


def _decode_blocks(
    data: bytes, levels: Callable[[bytes], Sequence[float]], code_bytes: int
) -> list[np.float32]:
    row: list[np.float32] = []
    for start in range(0, len(data), 2 + code_bytes):
        (scale,) = struct.unpack_from("<e", data, start)
        codes = data[start + 2 : start + 2 + code_bytes]
        row += [F32(level) * F32(scale) for level in levels(codes)]
    return row


def _e4m3_value(code: int) -> float:
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; exponent 0 is subnormal."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


def _e4m3_code(x: np.float32) -> int:
    """The nearest of all finite codes of the sign of x, of two equally near the even one."""
    magnitude = abs(float(x))
    nearest = min(range(0x7F), key=lambda code: (abs(_e4m3_value(code) - magnitude), code & 1))
    return nearest | (0x80 if math.copysign(1, x) < 0 else 0)


def _bf16_bytes(x: np.float32) -> bytes:
    """The upper half of a float32, rounded to nearest even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    upper, lower = bits >> 16, bits & 0xFFFF
    if lower > 0x8000 or (lower == 0x8000 and upper & 1):
        upper += 1
    return struct.pack("<H", upper)


def _bf16_value(word: int) -> np.float32:
    (value,) = struct.unpack("<f", struct.pack("<I", word << 16))
    return F32(value)


def _stream(codes: Sequence[int], bits: int) -> bytes:
    """Codes one after another, least significant bit first."""
    whole = sum(code << bits * i for i, code in enumerate(codes))
    return whole.to_bytes(len(codes) * bits // 8, "little")


def _take(data: bytes, bits: int) -> list[int]:
    whole = int.from_bytes(data, "little")
    return [whole >> bits * i & (1 << bits) - 1 for i in range(len(data) * 8 // bits)]


def _groups(row: Row, size: int) -> Iterator[Row]:
    return (row[start : start + size] for start in range(0, len(row), size))
