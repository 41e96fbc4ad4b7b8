"""Parts that come later than the rows they belong to: kept with those rows, and found where they are.

What is stored of a child may be parts alone, and at any boundary. Whatever was stored, shared or
dropped, a match with parts ends at the latest boundary that any stored prefix has within the query.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_grpc.core.checkup import check_directory
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.rebuild import rebuild
from pion_grpc.core.values import Durability, FetchQuery, LookupResult, MissReason, RowRange
from pion_grpc.errors import InvalidRequest
from pion_wire.blocks import BLOCK_TOKENS, common_tokens, pack_token_ids
from pion_wire.layout import Side
from tests.core.support import (
    SMALL,
    TENANT,
    Machine,
    assert_truth,
    begin,
    directory_bytes,
    drain,
    layout,
    look,
    matched,
    opened,
    part,
    put,
    rows_of,
    tokens,
    true_rows,
    truth,
    write,
)
from tests.core.test_match import EDGES, unhurried

WIDE = layout(heads=8, head_dim=128)
"""Rows of 4 KiB: what is kept twice shows."""
FULL = tokens(300)


def put_state(
    store: PrefixStore, name: str, ids: bytes, boundaries: tuple[int, ...], **fields: object
) -> None:
    """Stores a prefix with a part at each of these boundaries, that says whose it is."""
    data = tuple(state(name, boundary) for boundary in boundaries)
    parts = tuple(part("state", b, d) for b, d in zip(boundaries, data, strict=True))
    stored = put(store, name, ids, parts=parts, part_bytes=data, **fields)
    assert not stored.already_stored


def state(name: str, boundary: int) -> bytes:
    return f"{name} at {boundary}".encode()


def assert_state(store: PrefixStore, name: str, ids: bytes, boundary: int, of: str) -> None:
    """Asserts that rows and part at a boundary are there, and whose part it is."""
    query = FetchQuery(name, rows=RowRange(0, boundary), part_kinds=("state",))
    fetch = opened(store, query)
    assert fetch is not None
    shape = fetch.prefix.layout
    rows, parts = drain(store, fetch)
    assert rows == truth(shape, ids[: 4 * boundary])
    assert parts == {0: state(of, boundary)}


def assert_exported(store: PrefixStore, name: str, boundary: int, *files: str) -> None:
    """Asserts whose files are named for a boundary, in order of rows without gaps."""
    query = FetchQuery(name, rows=RowRange(0, boundary), part_kinds=("state",))
    export = store.export(TENANT, query, 0)
    with store.workshop.catalog.read() as transaction:
        rows = {prefix: transaction.by_name(TENANT, prefix) for prefix in files}
    assert [extent.file.file_name for extent in export.extents] == [
        row.file if row else "" for row in rows.values()
    ]
    at = 0
    for extent in export.extents:
        assert extent.first_row == at
        at += extent.row_count
    assert at == boundary


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 150, 199])
def test_a_checkpoint_on_rows_that_are_there_does_not_bring_them_again(
    store: PrefixStore, count: int
) -> None:
    put_state(store, "p", FULL[:800], (200,), layout=WIDE)
    ids = FULL[: 4 * count]
    before = directory_bytes(store.directory.segments)
    boundaries = (count,) if count < 3 else (count // 2, count)
    put_state(store, "c", ids, boundaries, layout=WIDE, parent="p", base=count)
    assert directory_bytes(store.directory.segments) - before < 4096 + 4 * count
    assert_truth(store, "c", ids, WIDE)
    for boundary in boundaries:
        assert_state(store, "c", ids, boundary, "c")
        assert_exported(store, "c", boundary, "p", "c")
    result = matched(store, ids + tokens(5, salt=9), part_kinds=("state",))
    assert result.prefix is not None
    assert (result.prefix.namespace, result.served_tokens) == ("c", count)
    store.drop(TENANT, ["p"])
    assert_truth(store, "c", ids, WIDE)
    result = matched(store, ids, part_kinds=("state",))
    assert result.served_tokens == count
    store.drop(TENANT, ["c"])
    while list(store.directory.segments.iterdir()):  # until the leases of the exports are over
        store.tick()


def test_parts_below_the_base_are_not_out_of_reach(store: PrefixStore) -> None:
    put_state(store, "p", FULL[:800], (200,))
    fork = FULL[: 4 * 170] + tokens(80, salt=2)
    put_state(store, "c", fork, (50, 100, 165, 250), parent="p", base=170)
    for boundary in (50, 100, 165):
        assert_state(store, "c", fork, boundary, "c")
        assert_exported(store, "c", boundary, "p", "c")
    assert_state(store, "c", fork, 250, "c")
    assert_exported(store, "c", 250, "p", "c")
    # Found by whoever shares so much, also where the longest match is the parent.
    for shared, served in ((64, 50), (99, 50), (130, 100), (168, 165), (170, 165), (190, 165)):
        query = FULL[: 4 * shared] + tokens(30, salt=7)
        result = matched(store, query, part_kinds=("state",))
        assert result.prefix is not None
        assert (result.prefix.namespace, result.served_tokens) == ("c", served)
        assert result.longest_tokens == shared
    assert matched(store, FULL[:800], part_kinds=("state",)).served_tokens == 200


@pytest.mark.parametrize("boundary", [128, 129, 149, 150])
def test_a_part_in_a_block_that_is_shared_in_part_is_not_out_of_reach(
    store: PrefixStore, boundary: int
) -> None:
    put_state(store, "p", FULL[:800], (200,))
    for number in range(3):
        fork = FULL[: 4 * 150] + tokens(80, salt=number)
        put_state(store, f"c{number}", fork, (boundary, 230), parent="p", base=150)
    query = FULL[: 4 * 160] + tokens(30, salt=7)
    result = matched(store, query, part_kinds=("state",))
    assert (result.longest, result.longest_tokens) == ("p", 160)
    assert (result.matched_tokens, result.served_tokens) == (150, boundary)


def test_no_part_is_stored_beside_that_of_a_parent(store: PrefixStore) -> None:
    put_state(store, "p", FULL[:800], (100, 200))
    for boundary, base in ((100, 150), (100, 100), (200, 200)):
        with pytest.raises(InvalidRequest, match="already") as refused:
            begin(
                store, "c", FULL[: 4 * max(base, boundary)], parent="p", base=base,
                parts=(part("state", boundary, b"other"),),
            )  # fmt: skip
        assert refused.value.field == "parts"
    fork = FULL[: 4 * 150] + tokens(80, salt=2)
    put_state(store, "c", fork, (200,), parent="p", base=150)  # of other tokens
    assert_state(store, "c", fork, 200, "c")


def test_a_child_of_a_checkpoint_does_not_lose_its_part(store: PrefixStore) -> None:
    put_state(store, "p", FULL[:800], (200,))
    put_state(store, "mark", FULL[: 4 * 128], (90, 128), parent="p", base=128)
    talk = FULL[: 4 * 128] + tokens(60, salt=4)
    put_state(store, "talk", talk, (188,), parent="mark", base=128)
    info = matched(store, talk).prefix
    assert info is not None
    assert (info.namespace, info.parent, info.base, info.depth) == ("talk", "mark", 128, 2)
    assert sorted(p.boundary_tokens for p in info.parts) == [90, 128, 188]
    store.drop(TENANT, ["mark", "p"])
    for boundary, of in ((90, "mark"), (128, "mark"), (188, "talk")):
        assert_state(store, "talk", talk, boundary, of)
    query = FetchQuery("talk", rows=RowRange(0, 128), part_kinds=("state",))
    extents = store.export(TENANT, query, 0).extents
    assert [(extent.first_row, extent.row_count) for extent in extents] == [(0, 128), (128, 0)]
    query = talk[: 4 * 140] + tokens(9, salt=6)
    assert matched(store, query, part_kinds=("state",)).served_tokens == 128
    store.drop(TENANT, ["talk"])
    while list(store.directory.segments.iterdir()):  # until the leases of the exports are over
        store.tick()


def test_a_parent_that_contributes_nothing_is_not_in_the_chain(store: PrefixStore) -> None:
    put_state(store, "p", FULL[:800], (200,))
    put_state(store, "bare", FULL[: 4 * 128] + tokens(9, salt=3), (130,), parent="p", base=128)
    put_state(store, "late", FULL[: 4 * 128], (128,), parent="p", base=128)
    for parent, base in (("bare", 128), ("bare", 100), ("late", 127)):
        fork = FULL[: 4 * base] + tokens(40, salt=base)
        name = f"{parent} {base}"
        put_state(store, name, fork, (base + 40,), parent=parent, base=base)
        info = matched(store, fork).prefix
        assert info is not None
        assert (info.namespace, info.parent, info.depth) == (name, "p", 1)


def test_a_checkpoint_keeps_the_rows_that_it_needs_and_goes_before_them(machine: Machine) -> None:
    store = machine.start(budget_bytes=(8 << 20))
    put_state(store, "p", FULL[:800], (200,), layout=WIDE)
    put_state(store, "c", FULL[:600], (150,), layout=WIDE, parent="p", base=150)
    lease = store.export(TENANT, FetchQuery("c", part_kinds=("state",)), 60_000).lease_id
    for number in range(8):
        put(store, f"big {number}", tokens(200, salt=10 + number), layout=WIDE)
    assert rows_of(store, lease=lease) == truth(WIDE, FULL[:600])
    names = [info.namespace for info in store.list_page(TENANT)]
    assert {"c", "p"} < set(names), "leased, and needed by what is leased"
    assert store.totals().evicted > 0


def test_checkpoints_outlive_their_catalogue(machine: Machine) -> None:
    store = machine.start()
    talk = FULL[: 4 * 128] + tokens(60, salt=4)
    put_state(store, "p", FULL[:800], (200,))
    put_state(store, "mark", FULL[: 4 * 128], (90, 128), parent="p", base=128)
    put_state(store, "talk", talk, (20, 188), parent="mark", base=128, durability=Durability.DISK)
    store.close()
    assert check_directory(machine.path).damaged == []
    for path in machine.path.glob("catalog.db*"):
        path.unlink()
    rebuilt = rebuild(machine.path, TENANT)
    assert (len(rebuilt.adopted), rebuilt.not_adopted) == (3, [])
    store = machine.start()
    for boundary, of in ((20, "talk"), (90, "mark"), (128, "mark"), (188, "talk")):
        assert_state(store, "talk", talk, boundary, of)
    query = talk[: 4 * 140] + tokens(9, salt=6)
    assert matched(store, query, part_kinds=("state",)).served_tokens == 128


def test_a_damaged_checkpoint_does_not_take_its_rows_with_it(store: PrefixStore) -> None:
    put_state(store, "p", FULL[:800], (200,))
    put_state(store, "c", FULL[:400], (100,), parent="p", base=100)
    with store.workshop.catalog.read() as transaction:
        row = transaction.by_name(TENANT, "c")
    assert row is not None
    assert row.file is not None
    path = store.directory.resolve(row.file)
    data = bytearray(path.read_bytes())
    data[data.index(state("c", 100))] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match="checksum"):
        assert_state(store, "c", FULL, 100, "c")
    assert_state(store, "p", FULL, 200, "p")
    assert matched(store, FULL[:400], part_kinds=("state",)).served_tokens == 0
    put_state(store, "c", FULL[:400], (100,), parent="p", base=100)
    assert_state(store, "c", FULL, 100, "c")


def test_rows_written_behind_a_checkpoint_are_its_own(store: PrefixStore) -> None:
    put_state(store, "p", FULL[:800], (200,))
    put_state(store, "c", FULL[:400], (60, 100), parent="p", base=100)
    for index, tensor in enumerate(SMALL.tensors):
        rows = true_rows(SMALL, FULL[:480], index)[1600:]
        write(store, "c", 100, rows, side=tensor.side)
    for _ in range(2):
        assert rows_of(store, "c") == truth(SMALL, FULL[:480])
        assert_state(store, "c", FULL, 60, "c")
        assert_truth(store, "p", FULL[:800])
        store.save(TENANT, ["c"])


def test_a_part_behind_rows_that_have_changed_is_gone(store: PrefixStore) -> None:
    put_state(store, "p", FULL[:800], (100, 200))
    for side in Side:
        write(store, "p", 150, b"x" * 16 * 50, side=side)
    for _ in range(2):
        info = look(store, "p").prefix
        assert info is not None
        assert [p.boundary_tokens for p in info.parts] == [100]
        named = FetchQuery("p", rows=RowRange(0, 200), part_kinds=("state",))
        missed = store.fetch(TENANT, named)
        assert isinstance(missed, LookupResult)
        assert missed.reason is MissReason.PART_MISSING
        fetch = opened(store, FetchQuery("p", part_kinds=("state",)))
        assert fetch is not None
        assert (fetch.reading.rows.end, fetch.shortened_by) == (100, "state")
        drain(store, fetch)
        assert_state(store, "p", FULL, 100, "p")
        store.save(TENANT, ["p"])
    (segment,) = store.directory.segments.iterdir()
    assert state("p", 100) in segment.read_bytes()
    assert state("p", 200) not in segment.read_bytes()


# Anything in any order


class Step(NamedTuple):
    """A sequence made from an earlier one, stored with parts; or a prefix that is dropped."""

    what: str
    earlier: int
    cut: int
    tail: int
    token: int
    boundaries: tuple[int, ...]
    share: int


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["store", "child", "child", "child", "drop"]),
        st.integers(0, 9),
        st.sampled_from(EDGES),
        st.sampled_from(EDGES),
        st.sampled_from([1, 2, 256]),
        st.lists(st.sampled_from(EDGES), max_size=3, unique=True).map(tuple),
        st.sampled_from([1, 1, 2, 3]),
    ),
    min_size=3,
    max_size=12,
)


class Shelved(NamedTuple):
    """What is stored under a name."""

    ids: bytes
    base: int
    parent: "Shelved | None"
    own: frozenset[int]

    @property
    def boundaries(self) -> frozenset[int]:
        """Where it has parts, its parents' included."""
        inherited = self.parent.boundaries if self.parent else frozenset()
        return self.own | {boundary for boundary in inherited if boundary <= self.base}

    def contributes(self, base: int) -> bool:
        """Whether a child with so many of its rows has a row or a part of it."""
        return self.base < base or (self.base == base and min(self.own, default=base + 1) <= base)


class Shelf:
    """What is stored in one tenant of its own, held against the store."""

    serial = 0

    def __init__(self, store: PrefixStore) -> None:
        Shelf.serial += 1
        self.tenant = f"parts {Shelf.serial}"
        self.store = store
        self.sequences: list[bytes] = [b""]
        self.there: dict[str, Shelved] = {}
        self.names = 0

    def apply(self, step: Step) -> None:
        if step.what == "drop":
            if self.there:
                name = sorted(self.there)[step.earlier % len(self.there)]
                assert self.store.drop(self.tenant, [name]) == [True]
                del self.there[name]
            return
        earlier = self.sequences[step.earlier % len(self.sequences)]
        ids = earlier[: 4 * step.cut] + pack_token_ids([step.token] * step.tail)
        if ids:
            self.sequences.append(ids)
            self.put(ids, step)

    def put(self, ids: bytes, step: Step) -> None:
        common = {name: common_tokens(one.ids, ids) for name, one in self.there.items()}
        name = max(common, key=common.__getitem__, default="")
        parent, base = None, 0
        if step.what == "child" and name and common[name]:
            base = max(1, common[name] // step.share)
            parent = self.there[name]
            while not parent.contributes(base):
                assert parent.parent is not None
                parent = parent.parent
        inherited = {b for b in parent.boundaries if b <= base} if parent else set()
        own = {b for b in step.boundaries if 1 <= b <= len(ids) // 4} - inherited
        self.names += 1
        fields: dict[str, object] = {"parent": name, "base": base} if parent else {}
        new = f"n{self.names}"
        parts = tuple(part("state", boundary, b"s") for boundary in sorted(own))
        put(
            self.store, new, ids, tenant=self.tenant, parts=parts, part_bytes=(b"s",) * len(parts),
            **fields,
        )  # fmt: skip
        self.there[new] = Shelved(ids, base, parent, frozenset(own))

    def check(self, query: bytes) -> None:
        if not query:
            return
        result = matched(self.store, query, tenant=self.tenant, part_kinds=("state",))
        common = {name: common_tokens(one.ids, query) for name, one in self.there.items()}
        longest = max(common.values(), default=0)
        assert result.longest_tokens == longest
        assert longest == 0 or common[result.longest] == longest
        best = {
            name: max((b for b in one.boundaries if b <= common[name]), default=0)
            for name, one in self.there.items()
        }
        served = {best[result.prefix.namespace]} if result.hit and result.prefix else {0}
        assert served == {result.served_tokens}
        # Who shares not even a block is not looked for.
        at_least = [b for name, b in best.items() if common[name] >= BLOCK_TOKENS]
        assert result.served_tokens >= max(at_least, default=0)


def check_steps(store: PrefixStore, changes: list[Step], cut: int) -> None:
    shelf = Shelf(store)
    for step in changes:
        shelf.apply(step)
    for sequence in shelf.sequences:
        shelf.check(sequence)
        shelf.check(sequence[: 4 * cut] + pack_token_ids([7]))
    for name in list(shelf.there):
        store.drop(shelf.tenant, [name])
        del shelf.there[name]
        for sequence in shelf.sequences:
            shelf.check(sequence)


@pytest.fixture(scope="module")
def shelves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefixStore]:
    machine = Machine(tmp_path_factory.mktemp("shelves") / "data")
    yield machine.start()
    machine.close()


@settings(unhurried, max_examples=60)
@given(steps, st.sampled_from(EDGES))
def test_no_later_boundary_is_overlooked(
    shelves: PrefixStore, changes: list[Step], cut: int
) -> None:
    check_steps(shelves, changes, cut)


@pytest.mark.soak
@settings(unhurried, max_examples=1_000)
@given(steps, st.sampled_from(EDGES))
def test_no_later_boundary_is_overlooked_at_length(
    shelves: PrefixStore, changes: list[Step], cut: int
) -> None:
    check_steps(shelves, changes, cut)
