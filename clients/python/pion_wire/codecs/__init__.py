"""How rows of K and V are stored: a codec turns rows into arrays, and arrays back into float32 rows.

Knows nothing of slots, prefixes, files or the wire; it imports NumPy and ml_dtypes only. The one
decision to understand: **every codec treats each row by itself**. Rows may be encoded in any split,
appended and overwritten, and every row keeps its bytes; a fetch may decode any range of them.

    codec = parse("turbo4")                      # or Turbo(4); str() gives the canonical name back
    codec.check(heads, head_dim)                 # ValueError naming codec and dimension
    codec.arrays(heads, head_dim, "BF16")        # what a tensor consists of, per row
    codec.encode(rows)                           # [rows, heads * head_dim] -> one array per entry
    codec.decode(arrays)                         # -> float32 [rows, heads * head_dim]

Names
-----

    name                                arrays of a tensor        bytes of a row, D = heads * head_dim
    raw                                 "" of the rows' type      2 D or 4 D; the only lossless one
    fp16                                "" F16                    2 D
    int8                                .codes .scales .biases    D + 8
    fp8                                 .codes U8                 4 + D/32 * 34
    turbo4, turbo3, turbo2              .codes U8                 4 + D/32 * (18, 14, 10)
    mlx_affine(bits,group,scale type)   .codes .scales .biases    D * bits/8 + D/group * 2 scales
    mlx4g32                             the same: short for mlx_affine(4,32,f16)
    bf16_rope_fp8_body(rope)            .codes U8                 2 rope + (D - rope)/32 * 34

The block formats need D to be a positive multiple of 32 (what follows `rope`, in the last one),
mlx_affine head_dim to be one of its group, int8 any value at all; raw and fp16 take every D.

Byte tables
-----------

All little-endian. A block is 32 consecutive values of a row; sizes are of one row.

    raw     D x the layout's type, the bits as they came

    fp16    D x binary16, rounded to nearest even; f16 input keeps its bits, NaNs included

    int8    codes   D x i8     trunc(clamp((x - bias) * scale, 0, 254)) - 127
            scales  f32        254 / (max - min) of the row; 254 if max - min < 1e-8
            biases  f32        min of the row, never -0; a value is (code + 127) / scale + bias

    turbo4  0       f32        norm2
            4       D/32 x     f16 scale | 16 bytes: byte i = u[i + 16] << 4 | u[i]
                               s = absmax/7, u = clamp(round(x/s), -8, 7) + 8
                               a value is (u - 8) * scale

    turbo3  0       f32        norm2
            4       D/32 x     f16 scale | 12 bytes: 3 bits a value, least significant first
                               s = absmax/3, u = clamp(round(x/s), -4, 3) + 4
                               a value is (u - 4) * scale

    turbo2  0       f32        norm2
            4       D/32 x     f16 scale | 8 bytes: 2 bits a value, least significant first
                               s = absmax/1.5, u = clamp(round(x/s + 1.5), 0, 3), scale = s/2
                               a value is (2 u - 3) * scale

    fp8     0       f32        norm2
            4       D/32 x     f16 scale | 32 x E4M3FN, rounded to nearest even
                               s = absmax/240; a value is code * scale

    bf16_rope_fp8_body
            0       rope x     bf16, the row's first values (the rotated part of a latent K)
            2 rope  (D-rope)/32 x     blocks as in fp8; no norm2

    mlx_affine
            codes   D*bits/32 x u32   one stream of bits, least significant first
            scales  D/group           in the scale type: (max - min) / (2^bits - 1); 1e-8 if 0
            biases  D/group           in the scale type: min of the group, never -0
                                      q = clamp(trunc((x - bias) / scale + 0.5), 0, 2^bits - 1)
                                      a value is q * scale + bias

In the block formats 1/s is taken in float32 of the scale *before* it is rounded to f16, and x is
multiplied by it; decoding uses the rounded one. `round` is half away from zero. norm2 is the sum
over the row of (level * unrounded scale)^2, where level is what decoding multiplies by the scale:
in float32, one value after the other; no decoder here reads it. In mlx_affine scale and bias are
rounded first, and codes are taken against the rounded ones: what `mx.dequantize` reads.

A block of zeros is divided by s = 1 and has the scale 1; in turbo2, which has no level at 0, the
scale 0. A block whose s has no finite reciprocal in float32 counts as zeros. An mlx_affine scale
that rounds to 0 takes code 0 for the whole group, which decodes to its bias: a constant group
decodes to itself, rounded to the scale type.

What is not finite
------------------

`raw`, `fp16` and the rope of `bf16_rope_fp8_body` treat each value alone: infinities and NaNs pass,
and a value too large for 16 bits becomes an infinity, as IEEE 754 rounds it. Where values share a
scale one NaN would spoil its neighbours: there `encode` raises ValueError, naming the first such
row, for NaNs, infinities, and values too large for the stored scale.
"""

from pion_wire.codecs.affine import MlxAffine
from pion_wire.codecs.base import ArrayLayout, Codec, row_type
from pion_wire.codecs.blocks import Bf16RopeFp8Body, Fp8, Turbo
from pion_wire.codecs.int8 import Int8
from pion_wire.codecs.names import CHOICES, FAMILIES, parse
from pion_wire.codecs.plain import Fp16, Raw

__all__ = [
    "CHOICES",
    "FAMILIES",
    "ArrayLayout",
    "Bf16RopeFp8Body",
    "Codec",
    "Fp8",
    "Fp16",
    "Int8",
    "MlxAffine",
    "Raw",
    "Turbo",
    "parse",
    "row_type",
]
