"""Prefixes that grow layer by layer, and lose a side, beside those that never change."""

from pathlib import Path

import numpy as np
import pytest

from pion_grpc.core.declaration import Declaration, LayerSpec
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.sessions import SIDES_MIN, Sessions
from pion_grpc.core.values import RowRange
from pion_grpc.errors import InvalidRequest, NotStored
from pion_wire.layout import DType, Layout, Side
from tests.core.support import (
    SMALL,
    TENANT,
    Machine,
    assert_truth,
    look,
    matched,
    power_cut_machine,
    put,
    rows_of,
    stray_files,
    tokens,
    truth,
    write,
)

FULL = tokens(200)
KEYS = Layout(SMALL.tensors[:1])
"""A prefix of one side: clients of the other wire may declare the other."""
HALVES = Declaration(LayerSpec(8, "fp16"))
LOSSY = Declaration(LayerSpec(32, "int8"))


def nodes(store: PrefixStore) -> int:
    with store.workshop.catalog.read() as transaction:
        return int(transaction.all("SELECT count(*) FROM node", ())[0][0])


def add_layer(store: PrefixStore, name: str, layer: int, spec: Declaration) -> None:
    """Stores three rows of a layer of V, as a client of the other wire does."""
    sessions = Sessions(store)
    sessions.register(TENANT, name, {Side.V: spec})
    assert spec.default is not None
    values = np.ones((3, spec.default.width), np.float32)
    sessions.write(TENANT, f"{name}_pv", layer, 0, 3, memoryview(values).cast("B"), DType.F32)


def test_a_prefix_that_grows_is_not_matched_beyond_its_rows(store: PrefixStore) -> None:
    put(store, "p", FULL, layout=KEYS)
    put(store, "q", FULL[:400])
    add_layer(store, "p", 5, HALVES)
    result = matched(store, FULL)
    assert result.prefix is not None
    assert (result.prefix.namespace, result.matched_tokens) == ("q", 100)
    assert_truth(store, "q", FULL[:400])


@pytest.mark.parametrize("spec", [HALVES, LOSSY])
def test_a_prefix_that_grows_leaves_no_entry_when_it_goes(
    store: PrefixStore, spec: Declaration
) -> None:
    put(store, "p", FULL, layout=KEYS)
    put(store, "c", FULL + tokens(40, salt=2), parent="p", base=150, layout=KEYS)
    add_layer(store, "p", 5, spec)
    assert matched(store, FULL + tokens(40, salt=2)).matched_tokens == 240
    assert_truth(store, "c", FULL + tokens(40, salt=2), KEYS)
    store.drop(TENANT, ["p"])
    assert matched(store, FULL + tokens(40, salt=2)).matched_tokens == 240
    assert_truth(store, "c", FULL + tokens(40, salt=2), KEYS)
    store.drop(TENANT, ["c"])
    assert nodes(store) == 0
    assert stray_files(store) == []


def test_saving_a_prefix_that_grew_takes_nothing_from_its_children(store: PrefixStore) -> None:
    child = FULL + tokens(40, salt=2)
    put(store, "p", FULL, layout=KEYS)
    put(store, "c", child, parent="p", base=150, layout=KEYS)
    add_layer(store, "p", 5, LOSSY)
    for _ in range(2):
        assert_truth(store, "c", child, KEYS)
        store.save(TENANT, ["p"])
    assert_truth(store, "c", child, KEYS)


def forget_sides(store: PrefixStore) -> None:
    """Declares so many sides elsewhere that those declared before go."""
    sessions = Sessions(store, sides_max=SIDES_MIN)
    for number in range(SIDES_MIN):
        sessions.create(TENANT, f"other {number}_pk", HALVES, exactly=False)


def test_a_side_that_goes_takes_no_rows_from_children(store: PrefixStore) -> None:
    child = FULL + tokens(40, salt=2)
    put(store, "p", FULL, layout=KEYS)
    put(store, "c", child, parent="p", base=150, layout=KEYS)
    add_layer(store, "p", 0, HALVES)
    forget_sides(store)
    store.save(None, [])
    assert_truth(store, "c", child, KEYS)
    assert matched(store, child).matched_tokens == 240


def test_a_side_that_went_keeps_no_power_cut_from_being_recovered_from(tmp_path: Path) -> None:
    machine = power_cut_machine(tmp_path / "data")
    store = machine.start()
    put(store, "p", FULL, layout=KEYS)
    add_layer(store, "p", 0, HALVES)
    store.save(TENANT, ["p"])
    forget_sides(store)
    write(store, "p", 200, b"x" * 48)
    with store.workshop.catalog.write(on_disk=True):
        pass  # the names of those rows are on the disk, and they are not
    again = machine.cut_power(tmp_path / "after")
    assert rows_of(again.start(), "p") == truth(KEYS, FULL)
    again.close()
    machine.close()


def test_a_side_that_went_is_not_read_again_when_it_is_declared_anew(store: PrefixStore) -> None:
    put(store, "p", FULL, layout=KEYS)
    add_layer(store, "p", 0, HALVES)
    store.save(TENANT, ["p"])
    forget_sides(store)
    info = look(store, "p").prefix
    assert info is not None
    assert {tensor.side for tensor in info.layout.tensors} == {Side.K}
    assert rows_of(store, "p") == truth(KEYS, FULL)
    sessions = Sessions(store)
    sessions.register(TENANT, "p", {Side.V: HALVES})
    row = np.arange(8, dtype=np.float16)
    sessions.write(TENANT, "p_pv", 0, 2, 1, memoryview(row).cast("B"), DType.F16)
    for _ in range(2):
        found = store.read_rows(TENANT, "p", 0, Side.V, range(4))
        assert found is not None
        zeros = bytes(32)  # rows come as float32
        assert b"".join(found[1]) == zeros + zeros + row.astype("<f4").tobytes() + zeros
        store.save(TENANT, ["p"])


def test_a_snapshot_of_a_side_that_went_cuts_nothing_of_the_one_declared_anew(
    store: PrefixStore,
) -> None:
    put(store, "p", FULL, layout=KEYS)
    sessions = Sessions(store)
    sessions.register(TENANT, "p", {Side.V: HALVES})
    taken = sessions.snapshot(TENANT, "p_pv"), store.row_snapshots.take(TENANT, "p")
    of_k = sessions.snapshot(TENANT, "p_pk")
    forget_sides(store)
    add_layer(store, "p", 0, HALVES)
    before = sessions.info(TENANT, "p_pv")
    with pytest.raises(NotStored):
        sessions.restore(TENANT, "p_pv", taken[0])
    with pytest.raises(NotStored):
        store.row_snapshots.restore(TENANT, "p", taken[1])
    assert sessions.info(TENANT, "p_pv") == before
    sessions.restore(TENANT, "p_pk", of_k)


def test_no_side_of_a_prefix_that_was_stored_whole_is_ever_forgotten(store: PrefixStore) -> None:
    put(store, "p", FULL)
    Sessions(store).register(TENANT, "p", dict.fromkeys(Side, HALVES))
    forget_sides(store)
    assert_truth(store, "p", FULL)
    assert matched(store, FULL).matched_tokens == 200


def test_going_back_to_before_a_layer_takes_no_rows_that_children_share(
    store: PrefixStore,
) -> None:
    put(store, "p", FULL, layout=KEYS)
    snapshot = store.row_snapshots.take(TENANT, "p")
    sessions = Sessions(store)
    sessions.register(TENANT, "p", {Side.V: Declaration(LayerSpec(8, "raw"))})
    values = np.arange(1_600, dtype="<f4")
    sessions.write(TENANT, "p_pv", 0, 0, 200, memoryview(values).cast("B"), DType.F32)
    assert matched(store, FULL).matched_tokens == 200, "no row of these tokens has changed"
    store.save(TENANT, ["p"])
    info = look(store, "p").prefix
    assert info is not None
    put(store, "c", FULL + tokens(9, salt=2), parent="p", base=200, layout=info.layout)
    with pytest.raises(InvalidRequest):
        store.row_snapshots.restore(TENANT, "p", snapshot)
    rows = rows_of(store, "c", rows=RowRange(0, 200))
    assert rows == {0: truth(SMALL, FULL)[0], 1: values.tobytes()}
    store.drop(TENANT, ["c"])
    store.row_snapshots.restore(TENANT, "p", snapshot)
    assert matched(store, FULL).matched_tokens == 0, "a tensor of it has no rows"
    put(store, "q", FULL[:400])
    assert matched(store, FULL).matched_tokens == 100


@pytest.mark.parametrize("how", ["in memory", "written down", "killed"])
def test_no_use_counts_later_than_it_was_or_not_at_all(machine: Machine, how: str) -> None:
    """Those of all processes are one order, whoever has written down what of it."""
    one, other = machine.start(), machine.start()
    early, late = Sessions(one, sides_max=6), Sessions(other, sides_max=6)
    declared = dict.fromkeys(Side, HALVES)
    for name in "abc":
        early.register(TENANT, name, declared)
    assert early.lookup(TENANT, "a")
    assert late.lookup(TENANT, "c")
    if how == "written down":
        other.space.uses.flush()
        one.space.uses.flush()
    if how == "killed":
        machine.crash(one)
        other.clean()
    for name, gone in (("d", "b"), ("e", "a"), ("f", "c")):
        late.register(TENANT, name, declared)
        assert not late.exists(TENANT, gone), "not the one that was used longest ago"
        assert sum(late.exists(TENANT, known) for known in "abcdef") == 3


def test_a_side_never_goes_for_the_other_of_its_prefix(store: PrefixStore) -> None:
    sessions = Sessions(store, sides_max=3)
    for sid in ("p_pk", "q_pk", "q_pv"):
        sessions.create(TENANT, sid, HALVES, exactly=False)
    sessions.register(TENANT, "p", dict.fromkeys(Side, HALVES))
    assert sessions.lookup(TENANT, "p")
    assert sessions.info(TENANT, "q_pk") is None
    assert sessions.info(TENANT, "q_pv") is not None
