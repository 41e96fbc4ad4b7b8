"""Glob patterns over the names of keys, by Redis's rules for malformed ones, too.

Knows no keys. The one decision: a pattern becomes a regular expression without backtracking over stars,
since patterns come from clients and would otherwise decide how long everybody waits.
"""

import functools
import re


def matches(pattern: bytes, name: bytes) -> bool:
    """Says whether a name matches a pattern with `*`, `?`, `[…]` and `\\`."""
    return pattern == b"*" or _compiled(pattern).fullmatch(name) is not None


@functools.lru_cache(256)
def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(_expression(pattern), re.DOTALL)


def _expression(pattern: bytes) -> bytes:
    """Returns the regular expression of a pattern.

    What is between two stars is taken where it first occurs and never looked for again, so a pattern
    of many stars costs no more than one.
    """
    pieces: list[list[bytes]] = [[]]
    at = 0
    while at < len(pattern):
        byte = pattern[at : at + 1]
        at += 1
        if byte == b"*":
            pieces.append([])
        elif byte == b"?":
            pieces[-1].append(b".")
        elif byte == b"[":
            expression, at = _class(pattern, at)
            pieces[-1].append(expression)
        else:
            if byte == b"\\" and at < len(pattern):
                byte = pattern[at : at + 1]
                at += 1
            pieces[-1].append(re.escape(byte))
    first, *between = [b"".join(piece) for piece in pieces]
    if not between:
        return first
    *between, last = between
    return first + b"".join(b"(?>.*?" + piece + b")" for piece in between if piece) + b".*" + last


def _class(pattern: bytes, at: int) -> tuple[bytes, int]:
    negated = pattern[at : at + 1] == b"^"
    at += negated
    allowed: set[int] = set()
    while at < len(pattern) and pattern[at : at + 1] != b"]":
        if pattern[at : at + 1] == b"\\" and at + 1 < len(pattern):
            at += 1
            allowed.add(pattern[at])
            at += 1
        elif pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern):
            low, high = sorted((pattern[at], pattern[at + 2]))
            allowed.update(range(low, high + 1))
            at += 3
        else:
            allowed.add(pattern[at])
            at += 1
    listed = b"".join(b"\\x%02x" % byte for byte in sorted(allowed))
    if not listed:
        return (b"." if negated else b"(?!)"), at + 1
    return b"[" + (b"^" if negated else b"") + listed + b"]", at + 1
