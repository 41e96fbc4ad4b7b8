"""A match is the true longest common prefix, whatever is stored, dropped, shared or rewritten."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.storing import PrefixUpload
from pion_grpc.core.values import MissReason
from pion_grpc.errors import InvalidRequest, NotStored
from pion_wire.blocks import common_tokens, pack_token_ids
from pion_wire.framing import RowChunk
from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.rows import encode_rows
from tests.core.support import (
    Machine,
    begin,
    layout,
    look,
    matched,
    publish,
    put,
    tokens,
    write,
)

NO_BYTES = Layout((TensorLayout(0, Side.K, 1, 0, DType.F16),))
"""Rows without values: the match knows tokens only."""
EDGES = sorted({max(0, 64 * n + d) for n in range(4) for d in (-1, 0, 1)} | {2, 40, 100})
ORDERS = [0, 1, 255, 256, 65_535, 65_536, 0x01000000, 0xFFFFFFFF]
"""Ids whose order as numbers is not that of their little-endian bytes."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("match") / "data")
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def store(machine: Machine) -> PrefixStore:
    return machine.start()


class Step(NamedTuple):
    """One change: of a sequence made from an earlier one, or of a prefix that is stored."""

    what: str
    earlier: int
    cut: int
    tail: int
    token: int


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["store", "store", "store", "child", "child", "drop", "rewrite", "cut"]),
        st.integers(0, 9),
        st.sampled_from(EDGES),
        st.sampled_from(EDGES),
        st.sampled_from(ORDERS),
    ),
    min_size=2,
    max_size=14,
)


class Shelf:
    """What is stored in one tenant of its own, held against the store."""

    serial = 0

    def __init__(self, store: PrefixStore) -> None:
        Shelf.serial += 1
        self.tenant = f"tenant {Shelf.serial}"
        self.store = store
        self.sequences: list[bytes] = [b""]
        self.found_by: dict[str, bytes] = {}
        self.names = 0

    def apply(self, step: Step) -> None:
        earlier = self.sequences[step.earlier % len(self.sequences)]
        if step.what in ("store", "child"):
            kept = earlier[: 4 * step.cut]
            sequence = kept + pack_token_ids([step.token] * step.tail)
            if not sequence:
                return
            self.names += 1
            fields: dict[str, object] = {}
            parents = {n: common_tokens(ids, sequence) for n, ids in self.found_by.items()}
            parent = max(parents, key=parents.__getitem__, default="")
            if step.what == "child" and parent and parents[parent]:
                fields = {"parent": parent, "base": parents[parent]}
            self._store(f"n{self.names}", sequence, fields)
            self.sequences.append(sequence)
        elif self.found_by:
            names = sorted(self.found_by)
            name = names[step.earlier % len(names)]
            if step.what == "drop":
                assert self.store.drop(self.tenant, [name]) == [True]
                del self.found_by[name]
            else:
                self._rewrite(name, step)

    def _store(self, name: str, sequence: bytes, fields: dict[str, object]) -> None:
        try:
            put(self.store, name, sequence, tenant=self.tenant, layout=NO_BYTES, **fields)
        except NotStored:  # a parent whose rows have changed is live, and cannot be extended
            put(self.store, name, sequence, tenant=self.tenant, layout=NO_BYTES)
        self.found_by[name] = sequence

    def _rewrite(self, name: str, step: Step) -> None:
        ids = self.found_by[name]
        if step.what == "cut":
            snapshot = self.store.row_snapshots.take(self.tenant, name)
            count = len(ids) // 4
            write(
                self.store, name, count, b"", row_bytes=1, tenant=self.tenant, count=step.tail + 1
            )
            self.store.row_snapshots.restore(self.tenant, name, snapshot)
            return
        row = step.cut % (len(ids) // 4 + 1)
        try:
            write(self.store, name, row, b"", row_bytes=1, tenant=self.tenant, count=1)
        except InvalidRequest:  # shared with a child, or its parent's
            return
        self.found_by[name] = ids[: 4 * row]

    def check(self, query: bytes) -> None:
        if not query:
            return
        result = matched(self.store, query, tenant=self.tenant)
        wanted = {name: common_tokens(ids, query) for name, ids in self.found_by.items()}
        longest = max(wanted.values(), default=0)
        assert result.matched_tokens == longest
        assert result.hit == (longest > 0)
        if result.hit:
            assert result.prefix is not None
            assert wanted[result.prefix.namespace] == longest
            whole = longest == len(query) // 4
            assert result.reason is (MissReason.NONE if whole else MissReason.PARTIAL)
        assert matched(self.store, query, tenant=self.tenant + "'").matched_tokens == 0
        assert matched(self.store, query, tenant=self.tenant, model_id="x").matched_tokens == 0
        lossy = matched(self.store, query, tenant=self.tenant, fidelities=("k.0=int8",))
        assert lossy.matched_tokens == 0


def check_steps(store: PrefixStore, changes: list[Step], probe: tuple[int, int]) -> None:
    shelf = Shelf(store)
    for step in changes:
        shelf.apply(step)
    cut, token = probe
    for sequence in shelf.sequences:
        shelf.check(sequence)
        shelf.check(sequence[: 4 * cut] + pack_token_ids([token]))
        shelf.check(sequence + pack_token_ids([token] * 3))
    for name in list(shelf.found_by):
        store.drop(shelf.tenant, [name])
        del shelf.found_by[name]
        for sequence in shelf.sequences:
            shelf.check(sequence)


probes = st.tuples(st.sampled_from(EDGES), st.sampled_from(ORDERS))
unhurried = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(unhurried, max_examples=80)
@given(steps, probes)
def test_a_match_is_never_other_than_the_longest_common_prefix(
    store: PrefixStore, changes: list[Step], probe: tuple[int, int]
) -> None:
    check_steps(store, changes, probe)


@pytest.mark.soak
@settings(unhurried, max_examples=3_000)
@given(steps, probes)
def test_a_match_is_never_other_than_the_longest_common_prefix_at_length(
    store: PrefixStore, changes: list[Step], probe: tuple[int, int]
) -> None:
    check_steps(store, changes, probe)


def test_no_two_lengths_around_a_block_are_confused(store: PrefixStore) -> None:
    full = tokens(200, salt=77)
    for length in EDGES[1:]:
        tenant = f"length {length}"
        put(store, "p", full[: 4 * length], tenant=tenant, layout=NO_BYTES)
        for asked in EDGES[1:]:
            for wrong in {0, min(asked, length) // 2, min(asked, length) - 1, asked - 1} - {-1}:
                query = bytearray(full[: 4 * asked])
                query[4 * wrong] ^= 1
                result = matched(store, bytes(query), tenant=tenant)
                assert result.matched_tokens == min(wrong, length)


def test_lossy_prefixes_are_matched_only_by_those_who_accept_them(store: PrefixStore) -> None:
    lossy = Layout(tuple(TensorLayout(0, side, 1, 32, DType.F16, "int8") for side in Side))
    ids = tokens(100, salt=5)
    upload = begin(store, "lossy", ids, layout=lossy, tenant="lossy")
    assert isinstance(upload, PrefixUpload)
    rows = np.linspace(-1, 1, 3200, dtype=np.float32).tobytes()
    for index, tensor in enumerate(lossy.tensors):
        for array, data in enumerate(encode_rows(tensor, rows, DType.F32)):
            upload.write(RowChunk(index, array, 0, 100, crc32c(data), data))
    publish(upload)
    put(store, "raw", ids[:80], tenant="lossy", layout=NO_BYTES)
    for fidelities, found in (
        (("raw",), 20),
        ((lossy.fidelity,), 100),
        (("raw", lossy.fidelity), 100),
        (("int4",), 0),
        ((), 0),
    ):
        result = matched(store, ids, tenant="lossy", fidelities=fidelities)
        assert result.matched_tokens == found
    assert result.reason is MissReason.NOT_STORED


def test_of_equals_the_most_recently_used_is_served(store: PrefixStore) -> None:
    ids = tokens(130, salt=11)
    for name in ("a", "b", "c"):
        tail = tokens(10, salt=ord(name))
        put(store, name, ids + tail, tenant="equals", layout=NO_BYTES)
    for name in ("a", "c", "b", "a"):
        assert look(store, name, tenant="equals").hit
        store.tick()
        result = matched(store, ids, tenant="equals")
        assert result.prefix is not None
        assert (result.prefix.namespace, result.matched_tokens) == (name, 130)


def test_a_match_that_is_too_short_is_a_miss_that_names_the_nearest(store: PrefixStore) -> None:
    ids = tokens(100, salt=12)
    put(store, "p", ids, tenant="short", layout=NO_BYTES)
    query = ids[:80] + tokens(50, salt=13)
    result = matched(store, query, tenant="short", min_tokens=21)
    assert (result.hit, result.reason) == (False, MissReason.TOO_SHORT)
    assert (result.requested_tokens, result.matched_tokens, result.served_tokens) == (70, 20, 0)
    assert result.prefix is not None
    assert result.prefix.namespace == "p"
    assert matched(store, query, tenant="short", min_tokens=20).hit


def test_another_layout_of_the_same_model_does_not_hide_a_prefix(store: PrefixStore) -> None:
    ids = tokens(100, salt=14)
    put(store, "wide", ids[:400], tenant="wide", layout=layout(1, dtype=DType.F32))
    put(store, "narrow", ids + tokens(30), tenant="wide", layout=NO_BYTES)
    assert matched(store, ids + tokens(30), tenant="wide").matched_tokens == 130
    store.drop("wide", ["narrow"])
    assert matched(store, ids + tokens(30), tenant="wide").matched_tokens == 100
