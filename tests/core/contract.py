"""What any store promises, as a class to inherit: give it a `machine` fixture.

Held by a store on real files, and by one on the file layer whose power can be cut.
"""

import numpy as np
import pytest

from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.reading import PartBytes, Rows
from pion_grpc.core.storing import PrefixUpload
from pion_grpc.core.values import (
    BlockTable,
    Durability,
    FetchQuery,
    LookupResult,
    MissReason,
    Position,
    RowRange,
    State,
    Stored,
)
from pion_grpc.errors import (
    Conflict,
    Evicted,
    GenerationDiffers,
    InvalidRequest,
    LayoutDiffers,
    NotStored,
    OtherContent,
    OverBudget,
    RowsOutOfRange,
)
from pion_wire.blocks import derived_namespace, root_hash
from pion_wire.layout import DType, Layout, PartInfo, Side, TensorLayout
from tests.core.support import (
    MODEL,
    SMALL,
    TENANT,
    Machine,
    assert_truth,
    begin,
    drain,
    fill,
    layout,
    look,
    matched,
    opened,
    part,
    publish,
    put,
    rows_of,
    tokens,
    true_rows,
    truth,
    usage,
    write,
)

PROMPT = tokens(200)
LONGER = PROMPT + tokens(70, salt=1)


def assert_part_missing(store: PrefixStore, query: FetchQuery, kind: str) -> None:
    result = store.fetch(TENANT, query)
    assert isinstance(result, LookupResult)
    assert (result.hit, result.reason) == (False, MissReason.PART_MISSING)
    assert result.shortened_by == kind
    assert result.prefix is not None


class StoreContract:
    """Inherit it, with a fixture `machine` of your own where it shall hold on another one."""

    # -- one prefix

    def test_no_stored_prefix_comes_back_changed(self, store: PrefixStore) -> None:
        for dtype in DType:
            shape = layout(3, heads=3, head_dim=5, dtype=dtype)
            put(store, dtype.value, PROMPT, layout=shape)
            assert_truth(store, dtype.value, PROMPT, shape)

    def test_no_range_of_rows_differs_from_the_whole(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        for begin_row, end in ((0, 1), (63, 65), (0, 200), (199, 200), (200, 200), (5, 0)):
            rows = rows_of(store, "p", rows=RowRange(begin_row, end))
            last = end or 200
            assert rows == {
                t: d[16 * begin_row : 16 * last] for t, d in truth(SMALL, PROMPT).items()
            }

    @pytest.mark.parametrize(("begin_row", "end"), [(0, 201), (201, 0), (1 << 60, 1 << 61)])
    def test_rows_beyond_the_end_are_never_made_up(
        self, store: PrefixStore, begin_row: int, end: int
    ) -> None:
        put(store, "p", PROMPT)
        with pytest.raises(RowsOutOfRange) as caught:
            store.fetch(TENANT, FetchQuery("p", rows=RowRange(begin_row, end)))
        assert caught.value.metadata["rows"] == "200"

    def test_no_slot_is_served_that_was_not_asked_for(self, store: PrefixStore) -> None:
        shape = layout(4)
        put(store, "p", PROMPT, layout=shape)
        with pytest.raises(InvalidRequest, match="no slot 77"):
            opened(store, FetchQuery("p", slots=frozenset({1, 3, 77})))
        fetch = opened(store, FetchQuery("p", slots=frozenset({1, 3})))
        assert fetch is not None
        assert [t.slot for t in fetch.reading.served_layout.tensors] == [1, 1, 3, 3]
        served, _ = drain(store, fetch)
        assert list(served.values()) == [true_rows(shape, PROMPT, t) for t in (2, 3, 6, 7)]

    def test_a_tensor_without_values_takes_and_gives_none(self, store: PrefixStore) -> None:
        tensors = list(layout(2).tensors)
        tensors[1] = type(tensors[1])(0, Side.V, 2, 0, DType.F16)
        shape = Layout(tuple(tensors))
        put(store, "p", PROMPT, layout=shape)
        assert_truth(store, "p", PROMPT, shape)

    def test_no_row_comes_twice_or_never_when_a_stream_resumes_anywhere(
        self, store: PrefixStore
    ) -> None:
        put(store, "p", LONGER[: 4 * 130])
        put(store, "c", LONGER, parent="p", base=130, parts=(part("state", 270, b"x" * 40),),
            part_bytes=(b"x" * 40,))  # fmt: skip
        query = FetchQuery("c", rows=RowRange(3, 0), part_kinds=("state",))
        for resume in (
            *(Position(tensor, 0, row) for tensor in (0, 1) for row in (0, 3, 4, 129, 130, 269, 270)),
            Position(2), Position(part=1), Position(part=1, part_offset=39), Position(part=2),
        ):  # fmt: skip
            fetch = opened(store, query)
            assert fetch is not None
            got, tail = [], b""
            with store.guarded(fetch.reading):
                for piece in fetch.reading.stream(resume):
                    if isinstance(piece, Rows):
                        first = range(piece.first_row, piece.first_row + piece.row_count)
                        got += [(piece.tensor_index, row) for row in first]
                    else:
                        assert isinstance(piece, PartBytes)
                        tail += piece.data
            wanted = [
                (tensor, row)
                for tensor in (0, 1)
                for row in range(3, 270)
                if not resume.part and (tensor, row) >= (resume.tensor_index, resume.row)
            ]
            assert got == wanted
            assert len(tail) == (40 - resume.part_offset if resume.part < 2 else 0)

    def test_a_prefix_is_never_seen_before_it_is_whole(self, store: PrefixStore) -> None:
        upload = begin(store, "p", PROMPT)
        assert isinstance(upload, PrefixUpload)
        assert not look(store, "p").hit
        fill(upload)
        assert not look(store, "p").hit
        assert not matched(store, PROMPT).hit
        assert store.list_page(TENANT) == []
        publish(upload)
        assert look(store, "p").hit
        assert_truth(store, "p", PROMPT)

    def test_an_abandoned_store_leaves_nothing(self, store: PrefixStore) -> None:
        before = store.totals()
        upload = begin(store, "p", PROMPT)
        assert isinstance(upload, PrefixUpload)
        fill(upload).abandon()
        upload.abandon()
        assert not look(store, "p").hit
        assert list(store.directory.segments.iterdir()) == []
        assert store.totals().prefixes == before.prefixes
        assert usage(store) == 0

    # -- names

    def test_the_same_content_is_not_written_twice(self, store: PrefixStore) -> None:
        first = put(store, "p", PROMPT)
        again = begin(store, "p", PROMPT)
        assert isinstance(again, Stored)
        assert again.already_stored
        assert (again.generation, again.stored_bytes) == (first.generation, 0)

    def test_a_name_never_silently_changes_its_content(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        with pytest.raises(OtherContent) as caught:
            begin(store, "p", PROMPT[:400] + tokens(100, salt=5))
        assert caught.value.metadata["first_difference"] == "100"
        with pytest.raises(OtherContent):
            begin(store, "p", PROMPT, model_id="another")
        with pytest.raises(LayoutDiffers):
            begin(store, "p", PROMPT, layout=layout(2))
        assert_truth(store, "p", PROMPT)

    def test_a_replaced_prefix_is_old_or_new_and_never_a_mixture(self, store: PrefixStore) -> None:
        old = put(store, "p", PROMPT)
        reading = opened(store, FetchQuery("p"))
        assert reading is not None
        new = put(store, "p", tokens(90, salt=4), replace=True)
        assert new.generation != old.generation
        assert_truth(store, "p", tokens(90, salt=4))
        assert drain(store, reading)[0] == truth(SMALL, PROMPT)
        assert matched(store, PROMPT).matched_tokens == 0

    def test_a_broken_stream_never_goes_on_with_another_generation(
        self, store: PrefixStore
    ) -> None:
        old = put(store, "p", PROMPT)
        assert rows_of(store, "p") is not None
        put(store, "p", tokens(200, salt=4), replace=True)
        with pytest.raises(GenerationDiffers):
            store.fetch(TENANT, FetchQuery("p", generation=old.generation))

    def test_of_two_stores_of_one_name_the_first_to_publish_wins(self, store: PrefixStore) -> None:
        uploads = [begin(store, "p", ids) for ids in (PROMPT, PROMPT, LONGER)]
        first, same, other = (fill(s) for s in uploads if isinstance(s, PrefixUpload))
        won = publish(first)
        late = publish(same)
        assert late.already_stored
        assert late.generation == won.generation
        with pytest.raises(Conflict):
            publish(other)
        assert_truth(store, "p", PROMPT)
        assert len(list(store.directory.segments.iterdir())) == 1

    def test_a_prefix_without_a_name_gets_one_from_its_content(self, store: PrefixStore) -> None:
        stored = put(store, "", PROMPT)
        root = root_hash(TENANT, MODEL)
        assert stored.namespace == derived_namespace(root, PROMPT)
        assert_truth(store, stored.namespace, PROMPT)
        assert put(store, "", PROMPT).already_stored

    def test_tenants_never_meet(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT, tenant="a")
        put(store, "p", PROMPT[:80], tenant="b")
        result = look(store, "p", tenant="a", lease_ms=1_000)
        assert rows_of(store, "p", tenant="b") == truth(SMALL, PROMPT[:80])
        assert matched(store, PROMPT, tenant="b").matched_tokens == 20
        assert not matched(store, PROMPT, tenant="c").hit
        assert [p.namespace for p in store.list_page("c")] == []
        with pytest.raises(Evicted):
            store.fetch("b", FetchQuery(lease_id=result.lease_id))
        assert store.drop("b", ["p"]) == [True]
        assert rows_of(store, "p", tenant="a") == truth(SMALL, PROMPT)

    def test_lookup_says_why_a_name_is_not_what_was_expected(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        store.register(TENANT, "r", SMALL)
        for fields, reason in (
            ({}, MissReason.NONE),
            ({"model_id": MODEL, "token_ids": PROMPT, "layout": SMALL}, MissReason.NONE),
            ({"model_id": "other"}, MissReason.MODEL_DIFFERS),
            ({"token_ids": LONGER}, MissReason.TOKENS_DIFFER),
            ({"layout": layout(2)}, MissReason.LAYOUT_DIFFERS),
        ):
            result = look(store, "p", **fields)
            assert (result.reason, result.hit) == (reason, reason is MissReason.NONE)
            assert result.prefix is not None
        assert look(store, "p", token_ids=LONGER).first_difference == 200
        assert look(store, "absent").reason is MissReason.NOT_STORED
        assert look(store, "r").reason is MissReason.NO_ROWS

    def test_lists_neither_skip_nor_repeat_a_name(self, store: PrefixStore) -> None:
        names = sorted(["a", "ab", "ab|1", "b", "ä", "日本", "%", "_"])
        for name in names:
            store.register(TENANT, name, SMALL)
        for size in (1, 3, 100):
            seen: list[str] = []
            while page := store.list_page(TENANT, after=seen[-1] if seen else "", count=size):
                seen += [info.namespace for info in page]
            assert seen == names
        assert [p.namespace for p in store.list_page(TENANT, prefix="ab")] == ["ab", "ab|1"]
        assert [p.namespace for p in store.list_page(TENANT, prefix="%")] == ["%"]

    # -- register

    def test_a_registered_name_has_no_rows_and_takes_the_first_store(
        self, store: PrefixStore
    ) -> None:
        table = BlockTable(64, np.arange(3, dtype="<u8").tobytes())
        info = store.register(TENANT, "p", SMALL, table=table)
        assert info.state is State.REGISTERED
        assert rows_of(store, "p") is None
        with pytest.raises(LayoutDiffers):
            store.register(TENANT, "p", layout(2))
        with pytest.raises(LayoutDiffers):
            begin(store, "p", PROMPT, layout=layout(2))
        put(store, "p", PROMPT)
        assert_truth(store, "p", PROMPT)
        assert store.block_table(TENANT, "p") == table

    def test_membership_names_exactly_the_hashes_that_are_there(self, store: PrefixStore) -> None:
        known = np.array([1, 5, 2**64 - 1], dtype="<u8")
        store.register(TENANT, "p", SMALL, table=BlockTable(16, known.tobytes()))
        store.register(TENANT, "bare", SMALL)
        probes = np.array([5, 6, 2**64 - 1, 0, 1, 7, 8, 9, 5], dtype="<u8").tobytes()
        assert store.membership(TENANT, "p", probes) == bytes([0b00010101, 0b1])
        assert store.membership(TENANT, "p", b"") == b""
        assert store.membership(TENANT, "bare", probes) is None
        assert store.membership(TENANT, "absent", probes) is None
        assert store.block_table(TENANT, "bare") is None

    # -- chains

    def test_no_row_of_a_chain_differs_from_the_same_prefix_stored_whole(
        self, store: PrefixStore
    ) -> None:
        full = tokens(300)
        put(store, "0", full[: 4 * 100])
        put(store, "1", full[: 4 * 164], parent="0", base=90)
        put(store, "2", full, parent="1", base=164)
        assert_truth(store, "2", full)
        for begin_row, end in ((0, 90), (89, 91), (90, 164), (100, 300), (163, 165), (299, 300)):
            rows = rows_of(store, "2", rows=RowRange(begin_row, end))
            assert rows == {t: d[16 * begin_row : 16 * end] for t, d in truth(SMALL, full).items()}

    def test_a_parent_with_other_content_is_never_extended(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        with pytest.raises(InvalidRequest) as caught:
            begin(store, "c", PROMPT[:400] + tokens(100, salt=2), parent="p", base=101)
        assert caught.value.field == "token_ids"
        with pytest.raises(InvalidRequest):
            begin(store, "c", LONGER, parent="p", base=201)
        with pytest.raises(NotStored):
            begin(store, "c", LONGER, parent="absent", base=10)
        with pytest.raises(OtherContent):
            begin(store, "c", LONGER, parent="p", base=10, model_id="another")
        with pytest.raises(LayoutDiffers):
            begin(store, "c", LONGER, parent="p", base=10, layout=layout(2))

    def test_a_chain_never_gets_deeper_than_32(self, store: PrefixStore) -> None:
        full = tokens(40 * 3)
        put(store, "0", full[: 4 * 3])
        for depth in range(1, 32):
            ids = full[: 4 * 3 * (depth + 1)]
            put(store, str(depth), ids, parent=str(depth - 1), base=3 * depth)
        assert_truth(store, "31", full[: 4 * 96])
        with pytest.raises(InvalidRequest) as caught:
            begin(store, "32", full[: 4 * 99], parent="31", base=96)
        assert caught.value.field == "parent_namespace"

    def test_a_base_inside_a_grandparent_extends_that_one(self, store: PrefixStore) -> None:
        put(store, "g", PROMPT)
        put(store, "p", LONGER, parent="g", base=150)
        other = PROMPT[: 4 * 120] + tokens(90, salt=8)
        stored = put(store, "c", other, parent="p", base=120)
        assert stored.base == 120
        info = look(store, "c").prefix
        assert info is not None
        assert (info.parent, info.depth) == ("g", 1)
        store.drop(TENANT, ["p", "g"])
        assert_truth(store, "c", other)
        assert matched(store, other).matched_tokens == 210

    def test_a_dropped_parent_keeps_its_rows_for_its_children_and_nobody_else(
        self, store: PrefixStore
    ) -> None:
        put(store, "p", PROMPT)
        put(store, "c", LONGER, parent="p", base=200)
        assert store.drop(TENANT, ["p", "absent"]) == [True, False]
        assert not look(store, "p").hit
        assert_truth(store, "c", LONGER)
        info = look(store, "c").prefix
        assert info is not None
        assert info.parent == ""
        assert matched(store, LONGER).matched_tokens == 270
        put(store, "p", tokens(100, salt=6))
        assert_truth(store, "c", LONGER)
        store.drop(TENANT, ["c", "p"])
        assert list(store.directory.segments.iterdir()) == []

    def test_no_child_extends_another_parent_than_it_was_computed_behind(
        self, store: PrefixStore
    ) -> None:
        old = put(store, "p", PROMPT)
        put(store, "c", LONGER, parent="p", base=200, parent_generation=old.generation)
        put(store, "p", PROMPT, replace=True, parts=(part("state", 200, b"s"),), part_bytes=(b"s",))
        with pytest.raises(NotStored, match="another now"):
            begin(store, "d", LONGER, parent="p", base=200, parent_generation=old.generation)
        put(store, "d", LONGER, parent="p", base=200)

    def test_a_name_can_be_replaced_by_its_own_child(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        put(store, "p", LONGER, parent="p", base=200, replace=True)
        assert_truth(store, "p", LONGER)

    # -- parts

    def test_a_part_is_served_at_its_own_boundary_only(self, store: PrefixStore) -> None:
        parts = (
            part("state", 200, b"s" * 1000),
            part("ring", 150, b"r" * 7),
            part("state", 150, b""),
        )
        put(store, "p", PROMPT, parts=parts, part_bytes=(b"s" * 1000, b"r" * 7, b""))
        cases: tuple[tuple[int, tuple[str, ...], list[bytes]], ...] = (
            (200, ("state",), [b"s" * 1000]),
            (150, ("ring",), [b"r" * 7]),
            (150, ("ring", "state"), [b"r" * 7, b""]),
            (200, (), []),
        )
        for end, kinds, expected in cases:
            query = FetchQuery("p", rows=RowRange(0, end), part_kinds=kinds)
            fetch = opened(store, query)
            assert fetch is not None
            assert [info.size_bytes for info in fetch.reading.parts] == [len(d) for d in expected]
            _, got = drain(store, fetch)
            assert got == {index: data for index, data in enumerate(expected) if data}

    def test_no_rows_come_without_the_parts_that_are_asked_for(self, store: PrefixStore) -> None:
        parts = (part("state", 64, b"a"), part("state", 128, b"b"), part("drafter", 64, b"c"))
        put(store, "p", PROMPT, parts=parts, part_bytes=(b"a", b"b", b"c"))
        cases: tuple[tuple[int, tuple[str, ...], int, list[bytes], str], ...] = (
            (0, ("state",), 128, [b"b"], "state"),
            (0, ("state", "drafter"), 64, [b"a", b"c"], "state"),
            (0, ("drafter", "state"), 64, [b"a", b"c"], "drafter"),
            (64, ("state",), 128, [b"b"], "state"),
            (128, ("state",), 128, [b"b"], "state"),
        )
        for first, kinds, end, expected, cut in cases:
            fetch = opened(store, FetchQuery("p", rows=RowRange(first), part_kinds=kinds))
            assert fetch is not None
            assert fetch.reading.rows == RowRange(first, end)
            assert fetch.token_ids == PROMPT[: 4 * end]
            assert fetch.shortened_by == cut
            assert list(drain(store, fetch)[1].values()) == expected
        for first, end, kinds, missing in (
            (0, 200, ("state",), "state"),
            (0, 128, ("state", "drafter"), "drafter"),
            (0, 127, ("state",), "state"),
            (0, 0, ("state", "ring"), "state"),
            (0, 0, ("ring",), "ring"),
            (129, 0, ("state",), "state"),
        ):
            query = FetchQuery("p", rows=RowRange(first, end), part_kinds=kinds)
            assert_part_missing(store, query, missing)
        fetch = opened(store, FetchQuery("p", rows=RowRange(0, 128), part_kinds=("state",)))
        assert fetch is not None
        assert (fetch.shortened_by, list(drain(store, fetch)[1].values())) == ("", [b"b"])

    def test_no_export_names_rows_without_the_parts_that_are_asked_for(
        self, store: PrefixStore
    ) -> None:
        parts = (part("state", 64, b"a"), part("state", 128, b"b"))
        put(store, "p", PROMPT, parts=parts, part_bytes=(b"a", b"b"))
        export = store.export(TENANT, FetchQuery("p", part_kinds=("state",)), 0)
        assert (export.rows, export.shortened_by) == (RowRange(0, 128), "state")
        assert [extent.row_count for extent in export.extents] == [128]
        with pytest.raises(NotStored, match="with the 'state'"):
            store.export(TENANT, FetchQuery("p", rows=RowRange(0, 200), part_kinds=("state",)), 0)

    def test_no_boundary_is_served_that_has_not_every_slot(self, store: PrefixStore) -> None:
        parts = tuple(
            PartInfo("state", slot, boundary, 1)
            for slot, boundary in ((0, 64), (0, 100), (1, 64), (1, 110))
        )
        put(store, "p", PROMPT, parts=parts, part_bytes=(b"a", b"b", b"c", b"d"))
        result = matched(store, PROMPT, part_kinds=("state",))
        assert (result.hit, result.served_tokens, result.shortened_by) == (True, 64, "state")
        assert not matched(store, PROMPT[: 4 * 63], part_kinds=("state",)).hit
        fetch = opened(store, FetchQuery("p", part_kinds=("state",)))
        assert fetch is not None
        assert fetch.reading.rows.end == 64
        assert drain(store, fetch)[1] == {0: b"a", 1: b"c"}
        named = opened(store, FetchQuery("p", rows=RowRange(0, 100), part_kinds=("state",)))
        assert named is not None  # whoever names a boundary knows what is there
        assert drain(store, named)[1] == {0: b"b"}

    def test_no_kind_is_asked_for_that_no_part_can_be_of(self, store: PrefixStore) -> None:
        for kinds in (("",), ("state", "x" * 65), ("\ud800",)):
            with pytest.raises(InvalidRequest) as refused:
                FetchQuery("p", part_kinds=kinds)
            assert refused.value.field == "part_kinds"
            with pytest.raises(InvalidRequest) as refused:
                matched(store, PROMPT, part_kinds=kinds)
            assert refused.value.field == "part_kinds"

    def test_no_part_is_stored_where_it_is_never_served(self, store: PrefixStore) -> None:
        for boundary in (0, 201):
            with pytest.raises(InvalidRequest) as refused:
                begin(store, "p", PROMPT, parts=(PartInfo("state", 0, boundary, 0),))
            assert refused.value.field == "parts[0].boundary_tokens"

    def test_no_part_described_otherwise_counts_as_stored(self, store: PrefixStore) -> None:
        state = PartInfo("state", 0, 200, 5, "of a run")
        put(store, "p", PROMPT, parts=(state,), part_bytes=(b"first",))
        same = begin(store, "p", PROMPT, parts=(state,))
        assert isinstance(same, Stored)
        assert same.already_stored  # by its description: the bytes of neither have come
        for other in (
            state._replace(description="of another"),
            state._replace(size_bytes=6),
            state._replace(boundary_tokens=199),
            state._replace(slot=1),
            state._replace(kind="ring"),
        ):
            with pytest.raises(OtherContent, match=other.kind):
                begin(store, "p", PROMPT, parts=(other,))

    def test_a_part_of_a_parent_is_never_served_for_tokens_it_has_not_seen(
        self, store: PrefixStore
    ) -> None:
        parts = (part("state", 100, b"early"), part("state", 200, b"late!"))
        put(store, "p", PROMPT, parts=parts, part_bytes=(b"early", b"late!"))
        fork = PROMPT[: 4 * 150] + tokens(150, salt=3)
        put(store, "c", fork, parent="p", base=150)
        query = FetchQuery("c", rows=RowRange(0, 200), part_kinds=("state",))
        assert_part_missing(store, query, "state")
        result = matched(store, fork, part_kinds=("state",))
        assert (result.matched_tokens, result.served_tokens) == (300, 100)
        assert result.prefix is not None
        assert [info.boundary_tokens for info in result.prefix.parts] == [100]

    def test_no_chain_has_more_parts_than_one_message_describes(self, store: PrefixStore) -> None:
        many = tuple(PartInfo("state", slot, 200, 0, "x" * 1_000) for slot in range(1_000))
        put(store, "p", PROMPT, parts=many)
        fields = {"parent": "p", "base": 200, "parts": many}
        with pytest.raises(InvalidRequest) as refused:
            put(store, "c", LONGER, **fields)
        assert refused.value.field == "parts"
        more = tuple(PartInfo("ring", slot, 270, 0, "x" * 1_000) for slot in range(800))
        put(store, "c", LONGER, **{**fields, "parts": more})
        put(store, "d", LONGER[: 4 * 250], parent="p", base=199, parts=many)

    def test_a_match_is_shortened_to_where_its_parts_are(self, store: PrefixStore) -> None:
        parts = (part("state", 128, b"s"), part("state", 64, b"t"))
        put(store, "p", PROMPT, parts=parts, part_bytes=(b"s", b"t"))
        result = matched(store, PROMPT, part_kinds=("state",))
        assert (result.hit, result.matched_tokens, result.served_tokens) == (True, 200, 128)
        assert (result.reason, result.shortened_by) == (MissReason.PART_MISSING, "state")
        result = matched(store, PROMPT[: 4 * 100], part_kinds=("state",))
        assert result.served_tokens == 64
        result = matched(store, PROMPT, part_kinds=("state", "ring"))
        assert (result.hit, result.served_tokens) == (False, 0)
        assert result.reason is MissReason.PART_MISSING

    def test_a_longer_match_without_the_parts_does_not_hide_a_shorter_one_that_has_them(
        self, store: PrefixStore
    ) -> None:
        put(
            store,
            "system",
            PROMPT[: 4 * 150],
            parts=(part("state", 150, b"s"),),
            part_bytes=(b"s",),
        )
        for number in range(3):  # more recent, and the same tokens or more in common
            put(store, f"talk {number}", PROMPT[: 4 * 160] + tokens(30, salt=number))
        query = PROMPT[: 4 * 170]
        result = matched(store, query, part_kinds=("state",))
        assert result.prefix is not None
        assert (result.prefix.namespace, result.served_tokens) == ("system", 150)
        assert (result.matched_tokens, result.requested_tokens) == (150, 170)
        assert (result.reason, result.shortened_by) == (MissReason.PART_MISSING, "state")
        assert matched(store, query).served_tokens == 160
        assert not matched(store, query, part_kinds=("state", "ring")).hit

    def test_a_checkpoint_in_another_conversation_is_found(self, store: PrefixStore) -> None:
        talk = PROMPT[: 4 * 140] + tokens(100, salt=5)
        put(store, "talk", talk, parts=(part("state", 130, b"s"),), part_bytes=(b"s",))
        put(store, "other", PROMPT)
        result = matched(store, PROMPT, part_kinds=("state",))
        assert result.prefix is not None
        assert (result.prefix.namespace, result.served_tokens) == ("talk", 130)
        put(
            store,
            "late",
            PROMPT,
            replace=True,
            parts=(part("state", 131, b"t"),),
            part_bytes=(b"t",),
        )
        result = matched(store, PROMPT, part_kinds=("state",))
        assert result.prefix is not None
        assert (result.prefix.namespace, result.served_tokens) == ("late", 131)

    # -- leases

    def test_what_is_leased_stays_readable_when_its_name_is_gone(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        put(store, "c", LONGER, parent="p", base=200)
        lease = look(store, "c", lease_ms=60_000).lease_id
        store.drop(TENANT, ["c", "p"])
        store.tick()
        assert not look(store, "c").hit
        assert rows_of(store, lease=lease) == truth(SMALL, LONGER)
        put(store, "c", PROMPT[:400])
        assert rows_of(store, lease=lease) == truth(SMALL, LONGER)

    def test_a_lease_that_has_ended_keeps_nothing(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        lease = look(store, "p", lease_ms=1).lease_id
        store.drop(TENANT, ["p"])
        while True:  # until its millisecond is over
            store.tick()
            try:
                rows_of(store, lease=lease)
            except Evicted:
                break
        store.tick()
        assert list(store.directory.segments.iterdir()) == []

    def test_nobody_gets_a_lease_without_asking(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        assert look(store, "p").lease_id == b""
        assert matched(store, PROMPT).lease_id == b""
        assert len(matched(store, PROMPT, lease_ms=1_000).lease_id) == 16
        assert matched(store, tokens(9, salt=9), lease_ms=1_000).lease_id == b""

    # -- live prefixes

    def test_no_batch_of_rows_is_seen_before_it_is_whole(self, store: PrefixStore) -> None:
        store.register(TENANT, "p", SMALL)
        rows = true_rows(SMALL, PROMPT, 0)
        for side in Side:
            write(store, "p", 0, rows[:1600], side=side)
        assert rows_of(store, "p") == {0: rows[:1600], 1: rows[:1600]}
        info = look(store, "p").prefix
        assert info is not None
        assert (info.state, info.token_count) == (State.LIVE, 100)

    def test_appending_keeps_the_generation_and_overwriting_changes_it(
        self, store: PrefixStore
    ) -> None:
        store.register(TENANT, "p", SMALL)
        first = [write(store, "p", 0, b"a" * 160, side=side) for side in Side][-1]
        appended = [write(store, "p", 10, b"b" * 160, side=side) for side in Side][-1]
        assert appended.generation == first.generation
        assert appended.row_count == 20
        assert rows_of(store, "p") == dict.fromkeys((0, 1), b"a" * 160 + b"b" * 160)
        changed = write(store, "p", 5, b"c" * 160)
        assert changed.generation != first.generation
        assert changed.row_count == 20
        rows = rows_of(store, "p")
        assert rows is not None
        assert rows[0] == b"a" * 80 + b"c" * 160 + b"b" * 80

    def test_no_stream_goes_on_among_other_tensors(self, store: PrefixStore) -> None:
        store.register(TENANT, "p", SMALL)
        before = [write(store, "p", 0, b"a" * 160, side=side) for side in Side][-1]
        came = write(store, "p", 0, b"b" * 160, slot=1)
        assert came.generation != before.generation
        with pytest.raises(GenerationDiffers):
            store.fetch(TENANT, FetchQuery("p", generation=before.generation))

    def test_a_gap_reads_as_zeros(self, store: PrefixStore) -> None:
        store.register(TENANT, "p", SMALL)
        for side in Side:
            write(store, "p", 7, b"a" * 16, side=side)
            write(store, "p", 12, b"b" * 16, side=side)
        expected = bytes(7 * 16) + b"a" * 16 + bytes(4 * 16) + b"b" * 16
        assert rows_of(store, "p") == {0: expected, 1: expected}

    def test_a_sealed_prefix_can_grow_and_be_sealed_again(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        longer = truth(SMALL, LONGER)
        for index, side in enumerate(Side):
            write(store, "p", 200, longer[index][3200:4000], side=side)
        assert rows_of(store, "p") == {i: d[:4000] for i, d in longer.items()}
        assert matched(store, LONGER).matched_tokens == 200
        assert store.save(TENANT, ["p"]) == 1
        assert rows_of(store, "p") == {i: d[:4000] for i, d in longer.items()}
        for index, side in enumerate(Side):
            write(store, "p", 250, longer[index][4000:], side=side)
        assert rows_of(store, "p") == longer
        assert store.save(TENANT, []) == 1
        assert store.save(TENANT, []) == 0
        assert rows_of(store, "p") == longer
        assert list(store.directory.rows.iterdir()) == []
        assert len(list(store.directory.segments.iterdir())) == 1

    def test_parts_survive_growing_and_sealing(self, store: PrefixStore) -> None:
        parts = (part("state", 200, b"s" * 300), part("ring", 64, b"r"))
        put(store, "p", PROMPT, parts=parts, part_bytes=(b"s" * 300, b"r"))
        for side in Side:
            write(store, "p", 200, bytes(160), side=side)
        for _ in range(2):
            query = FetchQuery("p", rows=RowRange(0, 200), part_kinds=("state",))
            fetch = opened(store, query)
            assert fetch is not None
            assert drain(store, fetch) == (truth(SMALL, PROMPT), {0: b"s" * 300})
            store.save(TENANT, ["p"])

    def test_overwritten_rows_are_not_found_by_their_old_tokens(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        write(store, "p", 130, b"x" * 16)
        assert matched(store, PROMPT).matched_tokens <= 130
        assert look(store, "p", token_ids=PROMPT).reason is MissReason.TOKENS_DIFFER
        with pytest.raises(OtherContent):
            begin(store, "p", PROMPT)

    def test_a_parent_that_is_overwritten_behind_its_children_does_not_hide_them(
        self, store: PrefixStore
    ) -> None:
        put(store, "p", PROMPT)
        put(store, "c", LONGER[: 4 * 130] + LONGER[4 * 200 :], parent="p", base=130)
        child = LONGER[: 4 * 130] + LONGER[4 * 200 :]
        write(store, "p", 150, b"x" * 16)
        assert matched(store, child).matched_tokens == 200
        assert_truth(store, "c", child)
        store.drop(TENANT, ["p"])
        assert matched(store, child).matched_tokens == 200

    def test_rows_that_children_share_are_never_overwritten(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        put(store, "c", LONGER, parent="p", base=150)
        with pytest.raises(InvalidRequest) as caught:
            write(store, "p", 149, b"x" * 16)
        assert caught.value.field == "first_row"
        write(store, "p", 150, b"x" * 16)
        assert_truth(store, "c", LONGER)
        with pytest.raises(InvalidRequest):
            write(store, "c", 149, b"x" * 16)

    def test_rows_of_a_parent_never_show_in_a_gap_of_its_child(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        put(store, "c", PROMPT[: 4 * 60], parent="p", base=50)
        for side in Side:
            write(store, "c", 70, b"x" * 16, side=side)
        own = {i: d[: 60 * 16] + bytes(160) + b"x" * 16 for i, d in truth(SMALL, PROMPT).items()}
        assert rows_of(store, "c") == own
        store.save(TENANT, ["c"])
        assert rows_of(store, "c") == own

    def test_uneven_tensors_are_served_as_far_as_all_of_them_go(self, store: PrefixStore) -> None:
        store.register(TENANT, "p", SMALL)
        write(store, "p", 0, b"k" * 160, side=Side.K)
        info = look(store, "p").prefix
        assert info is not None
        assert info.token_count == 0
        write(store, "p", 0, b"v" * 64, side=Side.V)
        for _ in range(2):
            assert rows_of(store, "p") == {0: b"k" * 64, 1: b"v" * 64}
            store.save(TENANT, ["p"])
        write(store, "p", 4, b"w" * 96, side=Side.V)
        assert rows_of(store, "p") == {0: b"k" * 160, 1: b"v" * 64 + b"w" * 96}

    def test_scattered_rows_come_in_the_order_asked(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        put(store, "c", LONGER, parent="p", base=200)
        asked = [269, 0, 200, 199, 0, 270, 4_000_000_000]
        found = store.read_rows(TENANT, "c", 0, Side.V, asked)
        assert found is not None
        shape, pieces = found
        assert shape.tensors == (SMALL.tensors[1],)
        data = true_rows(SMALL, LONGER, 1)
        rows = [data[16 * r : 16 * r + 16] or bytes(16) for r in asked]
        assert b"".join(pieces) == b"".join(rows)
        assert store.read_rows(TENANT, "c", 0, Side.V, [270]) is None

    def test_scattered_rows_go_as_far_as_their_own_tensor(self, store: PrefixStore) -> None:
        store.register(TENANT, "p", SMALL)
        write(store, "p", 0, b"k" * 160, side=Side.K)
        found = store.read_rows(TENANT, "p", 0, Side.K, [9, 10])
        assert found is not None
        assert b"".join(found[1]) == b"k" * 16 + bytes(16)
        assert store.read_rows(TENANT, "p", 0, Side.V, [0]) is None
        with pytest.raises(LayoutDiffers):
            store.read_rows(TENANT, "p", 1, Side.K, [0])
        with pytest.raises(NotStored):
            store.read_rows(TENANT, "absent", 0, Side.K, [0])

    def test_a_slot_is_only_added_where_nothing_says_how_many_there_are(
        self, store: PrefixStore
    ) -> None:
        store.register(TENANT, "p", SMALL)
        write(store, "p", 0, b"v" * 160, slot=3)
        info = look(store, "p").prefix
        assert info is not None
        assert [(t.slot, t.side) for t in info.layout.tensors][-1] == (3, Side.K)
        found = store.read_rows(TENANT, "p", 3, Side.K, [9])
        assert found is not None
        assert b"".join(found[1]) == b"v" * 16
        put(store, "whole", PROMPT)
        with pytest.raises(LayoutDiffers):
            write(store, "whole", 200, b"v" * 16, slot=3)
        unlike = Layout((SMALL.tensors[0], TensorLayout(1, Side.K, 1, 4, DType.F32)))
        store.register(TENANT, "unlike", unlike)
        for side in Side:
            with pytest.raises(LayoutDiffers):
                write(store, "unlike", 0, b"v" * 16, slot=3, side=side)

    # -- snapshots

    def test_a_restored_snapshot_has_no_row_of_the_branch_left(self, store: PrefixStore) -> None:
        store.register(TENANT, "p", SMALL)
        for side in Side:
            write(store, "p", 0, b"a" * 160, side=side)
        snapshot = store.row_snapshots.take(TENANT, "p")
        for _ in range(2):
            for side in Side:
                write(store, "p", 10, b"b" * 80, side=side)
            before = look(store, "p").prefix
            generation = store.row_snapshots.restore(TENANT, "p", snapshot)
            assert before is not None
            assert generation != before.generation
            assert rows_of(store, "p") == dict.fromkeys((0, 1), b"a" * 160)
        for side in Side:
            write(store, "p", 12, b"c" * 16, side=side)
        grown = b"a" * 160 + bytes(32) + b"c" * 16
        assert rows_of(store, "p") == {0: grown, 1: grown}
        store.save(TENANT, ["p"])
        assert rows_of(store, "p") == {0: grown, 1: grown}

    def test_a_restored_snapshot_leaves_shorter_tensors_alone(self, store: PrefixStore) -> None:
        store.register(TENANT, "p", SMALL)
        write(store, "p", 0, b"k" * 160, side=Side.K)
        snapshot = store.row_snapshots.take(TENANT, "p")
        generation = store.row_snapshots.restore(TENANT, "p", snapshot)
        info = look(store, "p").prefix
        assert info is not None
        assert info.generation == generation
        write(store, "p", 0, b"v" * 320, side=Side.V)
        store.row_snapshots.restore(TENANT, "p", snapshot)
        found = store.read_rows(TENANT, "p", 0, Side.K, [9])
        assert found is not None
        assert b"".join(found[1]) == b"k" * 16
        assert store.read_rows(TENANT, "p", 0, Side.V, [0]) is None

    def test_going_back_never_takes_rows_that_a_child_shares(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        snapshot = store.row_snapshots.take(TENANT, "p")
        for index, side in enumerate(Side):
            write(store, "p", 200, true_rows(SMALL, LONGER, index)[3200:], side=side)
        store.save(TENANT, ["p"])
        put(store, "c", LONGER, parent="p", base=100)
        store.row_snapshots.restore(TENANT, "p", snapshot)
        assert_truth(store, "c", LONGER)
        assert_truth(store, "p", PROMPT)

    def test_a_snapshot_that_is_unknown_or_released_is_no_way_back(
        self, store: PrefixStore
    ) -> None:
        store.register(TENANT, "p", SMALL, MODEL)
        snapshot = store.row_snapshots.take(TENANT, "p")
        with pytest.raises(NotStored):
            store.row_snapshots.restore(TENANT, "absent", snapshot)
        with pytest.raises(NotStored):
            store.row_snapshots.restore(TENANT, "p", snapshot + 1)
        with pytest.raises(NotStored):
            store.row_snapshots.restore(TENANT, "p", (1 << 64) - 1)
        assert not store.row_snapshots.release(TENANT, "p", (1 << 64) - 1)
        assert store.row_snapshots.release(TENANT, "p", snapshot)
        assert not store.row_snapshots.release(TENANT, "p", snapshot)
        with pytest.raises(NotStored):
            store.row_snapshots.restore(TENANT, "p", snapshot)

    def test_snapshots_end_with_their_prefix_and_are_few(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT)
        held = [store.row_snapshots.take(TENANT, "p") for _ in range(16)]
        with pytest.raises(OverBudget):
            store.row_snapshots.take(TENANT, "p")
        put(store, "p", LONGER, replace=True)
        with pytest.raises(NotStored):
            store.row_snapshots.restore(TENANT, "p", held[0])
        assert not store.row_snapshots.release(TENANT, "p", held[0])
        assert store.row_snapshots.take(TENANT, "p") not in held

    # -- durability

    def test_an_acknowledgement_never_promises_less_than_was_asked(
        self, machine: Machine, store: PrefixStore
    ) -> None:
        assert put(store, "p", PROMPT).durability is Durability.PROCESS
        again = put(store, "p", PROMPT, durability=Durability.DISK)
        assert (again.already_stored, again.durability) == (True, Durability.DISK)
        assert put(store, "p", PROMPT).durability is Durability.DISK

    def test_what_was_acknowledged_survives_a_crash_and_a_clean_stop(
        self, machine: Machine, store: PrefixStore
    ) -> None:
        put(store, "p", PROMPT)
        put(store, "c", LONGER, parent="p", base=200)
        store.register(TENANT, "r", SMALL)
        for side in Side:
            write(store, "r", 0, b"a" * 160, side=side)
        fill(begin(store, "open", tokens(300, salt=2)))  # type: ignore[arg-type]
        machine.crash(store)
        for _ in range(2):
            store = machine.start()
            assert_truth(store, "p", PROMPT)
            assert_truth(store, "c", LONGER)
            assert rows_of(store, "r") == dict.fromkeys((0, 1), b"a" * 160)
            assert not look(store, "open").hit
            assert sorted(p.namespace for p in store.list_page(TENANT)) == ["c", "p", "r"]
            assert len(list(store.directory.segments.iterdir())) == 2
            store.close()

    # -- the receipt

    def test_a_hit_is_counted_once_and_rows_when_they_have_come(self, store: PrefixStore) -> None:
        put(store, "p", PROMPT, prefill_ms=1_000.0)
        put(store, "c", LONGER, parent="p", base=200)
        store.ledger.reset()
        assert look(store, "p").hit
        assert not look(store, "absent").hit
        assert matched(store, LONGER).hit
        receipt = store.ledger.get()
        assert (receipt.hits, receipt.misses, receipt.tokens_served) == (2, 1, 0)
        rows_of(store, "p", rows=RowRange(100, 200))
        receipt = store.ledger.get()
        assert (receipt.tokens_served, receipt.bytes_streamed) == (100, 3200)
        assert receipt.seconds_measured == pytest.approx(0.5)
        assert (receipt.seconds_estimated, receipt.measured_hits) == (0, 1)
        rows_of(store, "c")
        receipt = store.ledger.reset()
        assert receipt.seconds_measured == pytest.approx(1.5)
        assert receipt.seconds_estimated == pytest.approx(70 * 555e-6)
        assert receipt.measured_hits == 1
        assert store.ledger.get().hits == 0
