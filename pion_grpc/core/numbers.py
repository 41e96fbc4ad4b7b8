"""Numbers as texts: what counts as one, their sums, and how a sum is stored.

Knows no keys. The one decision: sums of fractions are sums of the decimals that people wrote, not of
what is nearest to them in binary.
"""

import math
import re
from decimal import Decimal

from pion_grpc.core.key_values import NotANumber

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
"""As strictly as Redis reads one: no plus, space or leading zero, and no `-0`."""


def parse_float(text: bytes, what: str = "value") -> float:
    """Returns a number, infinities included.

    Raises:
        NotANumber: the text is not a number, or NaN.
    """
    if not _FLOAT.fullmatch(text) and not _INFINITY.fullmatch(text):
        raise NotANumber(f"{what} is not a valid float")
    return float(text)


def float_text(value: float) -> bytes:
    """Returns a number as it is stored: the shortest decimal, never with an exponent."""
    if value.is_integer():
        return b"%d" % int(value)
    return format(Decimal(repr(value)), "f").encode()


def checked_sum(text: bytes, by: int, what: str) -> int:
    """Returns an integer and another added.

    Raises:
        NotANumber: the text is no integer, or one of them or the sum has more than 64 bits.
    """
    if not INTEGER.fullmatch(text) or not INT64_MIN <= int(text) <= INT64_MAX:
        if what == "value":
            raise NotANumber("value is not an integer or out of range")
        raise NotANumber(f"{what} is not an integer")
    total = int(text) + by
    if not INT64_MIN <= total <= INT64_MAX:
        raise NotANumber("increment or decrement would overflow")
    return total


def float_sum(text: bytes, by: float, what: str) -> bytes:
    """Returns a number and another added, as it is stored.

    Raises:
        NotANumber: the text is no number, or the sum is not finite.
    """
    known = parse_float(text, what)
    if math.isfinite(known) and math.isfinite(by):
        # Of the decimals that they stand for: 0.1 and 0.2 are 0.3.
        total = float(Decimal(repr(known)) + Decimal(repr(by)))
        if math.isfinite(total):
            return float_text(total)
    raise NotANumber("increment would produce NaN or Infinity")


_FLOAT = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_INFINITY = re.compile(rb"[+-]?inf(?:inity)?", re.IGNORECASE)
