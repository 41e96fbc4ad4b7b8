"""From the text of a codec to the codec.

The one decision: text that people write may use the short name, or blanks after commas; what `str`
gives back is the single canonical form, fit for comparing and hashing.
"""

from __future__ import annotations

import re

from pion_wire.codecs.affine import MlxAffine
from pion_wire.codecs.base import Codec
from pion_wire.codecs.blocks import Bf16RopeFp8Body, Fp8, Turbo
from pion_wire.codecs.int8 import Int8
from pion_wire.codecs.plain import Fp16, Raw

_PLAIN: dict[str, Codec] = {
    "raw": Raw(),
    "fp16": Fp16(),
    "int8": Int8(),
    "fp8": Fp8(),
    "turbo4": Turbo(4),
    "turbo3": Turbo(3),
    "turbo2": Turbo(2),
    "mlx4g32": MlxAffine(4, 32, "f16"),
}

CHOICES = (*_PLAIN, "mlx_affine(bits,group,scale type)", "bf16_rope_fp8_body(rope)")
"""What `parse` takes, for messages."""

FAMILIES = (*dict.fromkeys(codec.name for codec in _PLAIN.values()), "bf16_rope_fp8_body")
"""The names of codecs without their parameters: each stands for every codec of that name."""

_SHOWN_MAX = 64  # characters of an unknown name in a message


def parse(text: str) -> Codec:
    """The codec called `text`: a name of the package's table, case and parameters as there.

    Raises ValueError naming the choices, or the parameter that is out of range.
    """
    if text in _PLAIN:
        return _PLAIN[text]
    if match := re.fullmatch(r"mlx_affine\((\d{1,3}), ?(\d{1,3}), ?(\w{1,8})\)", text, re.ASCII):
        return MlxAffine(int(match[1]), int(match[2]), match[3])
    if match := re.fullmatch(r"bf16_rope_fp8_body\((\d{1,6})\)", text, re.ASCII):
        return Bf16RopeFp8Body(int(match[1]))
    raise ValueError(f"unknown codec {text[:_SHOWN_MAX]!r}: choose from {', '.join(CHOICES)}")
