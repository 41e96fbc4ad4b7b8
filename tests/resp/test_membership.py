"""Membership: neither a hash that is not there, nor one that is missed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion_grpc.core.membership import membership

HASHES = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 8), max_size=40)


def packed(hashes: list[int]) -> bytes:
    return np.array(hashes, dtype="<u8").tobytes()


def expected(table: list[int], probes: list[int]) -> bytes:
    bits = [probe in table for probe in probes]
    return bytes(
        sum(bit << place for place, bit in enumerate(bits[start : start + 8]))
        for start in range(0, len(bits), 8)
    )


@given(table=HASHES.filter(bool), probes=HASHES)
def test_no_probe_is_answered_wrongly(table: list[int], probes: list[int]) -> None:
    probes += table[:5]
    assert membership(packed(table), packed(probes)) == expected(table, probes)


@pytest.mark.parametrize("step", [1, 2**32, 2**50], ids=["run", "high bits", "crowded bucket"])
def test_chosen_hashes_neither_crash_nor_lie(step: int) -> None:
    inverse = pow(0x9E3779B97F4A7C15, -1, 2**64)  # hashes whose products are small share a bucket
    table = [i * step % 2**64 for i in range(100)] + [i * inverse % 2**64 for i in range(1, 300)]
    probes = [*table, 3, 5, 2**64 - 1]
    assert membership(packed(table), packed(probes)) == expected(table, probes)


def test_zero_is_not_taken_for_an_empty_place() -> None:
    assert membership(packed([1, 2, 3]), packed([0, 1])) == b"\x02"
    assert membership(packed([0, 2, 3]), packed([0, 1])) == b"\x01"
