"""Bad input: an error that names the field, nothing allocated for it, nothing stored."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from crc32c import crc32c

from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.storing import PrefixUpload
from pion_grpc.core.values import (
    BlockTable,
    FetchQuery,
    LookupQuery,
    RowRange,
    WriteRowsHeader,
)
from pion_grpc.errors import (
    ChecksumMismatch,
    InvalidRequest,
    LayoutDiffers,
    NotStored,
    OverBudget,
    PionError,
)
from pion_grpc.storage.accounts import Accounts
from pion_wire import limits
from pion_wire.framing import PartChunk, RowChunk
from pion_wire.layout import DType, Layout, PartInfo, Side, TensorLayout
from tests.core.support import (
    SMALL,
    TENANT,
    Machine,
    assert_truth,
    begin,
    chunks,
    header,
    layout,
    look,
    part,
    publish,
    put,
    tokens,
    write,
)

IDS = tokens(100)


@pytest.fixture
def store(machine: Machine) -> Iterator[PrefixStore]:
    store = machine.start()
    put(store, "sound", tokens(80, salt=1))
    yield store
    assert_truth(store, "sound", tokens(80, salt=1))
    assert [info.namespace for info in store.list_page(TENANT)] == ["sound"]
    assert len(list(store.directory.segments.iterdir())) == 1
    assert list(store.directory.rows.iterdir()) == []
    with store.workshop.catalog.read() as transaction:
        assert Accounts(transaction).usage() == transaction.totals().bytes


PART = part("state", 100, b"0123456789")


def upload(store: PrefixStore) -> PrefixUpload:
    """An upload that waits for rows 20 to 100 of two tensors, and for two parts."""
    put(store, "parent", IDS[:80])
    empty = part("ring", 100, b"")
    begun = begin(store, "p", IDS, parent="parent", base=20, parts=(empty, PART))
    store.drop(TENANT, ["parent"])
    assert isinstance(begun, PrefixUpload)
    return begun


def row_chunks() -> list[RowChunk]:
    return list(chunks(SMALL, IDS, 20, rows_max=40))


def part_chunk(data: bytes = b"0123456789", index: int = 1, offset: int = 0) -> PartChunk:
    return PartChunk(index, offset, crc32c(data), data)


def changed(chunk: RowChunk, **fields: Any) -> RowChunk:
    return chunk._replace(**fields)


def longer(chunk: RowChunk) -> RowChunk:
    data = bytes(chunk.data) + bytes(16)
    return chunk._replace(row_count=chunk.row_count + 1, data=data, crc32c=crc32c(data))


BAD_STREAMS: dict[str, Callable[[list[RowChunk]], list[RowChunk | PartChunk]]] = {
    "the second chunk first": lambda c: [c[1]],
    "a chunk twice": lambda c: [c[0], c[0]],
    "a chunk left out": lambda c: [c[0], c[2]],
    "rows of the parent": lambda c: [changed(c[0], first_row=0)],
    "another tensor first": lambda c: [changed(c[0], tensor_index=1)],
    "a tensor that does not exist": lambda c: [changed(c[0], tensor_index=2)],
    "another array": lambda c: [changed(c[0], array_index=1)],
    "fewer bytes than rows": lambda c: [changed(c[0], row_count=41)],
    "more bytes than rows": lambda c: [changed(c[0], row_count=39)],
    "no rows": lambda c: [changed(c[0], row_count=0, data=b"", crc32c=0)],
    "more rows than the tensor has": lambda c: [c[0], longer(c[1])],
    "2^60 rows": lambda c: [changed(c[0], row_count=1 << 60)],
    "a wrong checksum": lambda c: [changed(c[0], crc32c=c[0].crc32c ^ 1)],
    "no checksum": lambda c: [changed(c[0], crc32c=0)],
    "a part before the rows": lambda c: [c[0], part_chunk()],
    "rows after the parts": lambda c: [*c, part_chunk(), c[3]],
    "rows beyond the last tensor": lambda c: [*c, changed(c[3], tensor_index=2)],
    "an empty part's bytes": lambda c: [*c, part_chunk(index=0)],
    "a part that does not exist": lambda c: [*c, part_chunk(index=2)],
    "the end of a part first": lambda c: [*c, part_chunk(b"6789", offset=6)],
    "more bytes than the part has": lambda c: [*c, part_chunk(b"0123456789!")],
    "no bytes of a part": lambda c: [*c, part_chunk(b"")],
    "part bytes with a wrong checksum": lambda c: [*c, part_chunk()._replace(crc32c=1)],
    "a part twice": lambda c: [*c, part_chunk(), part_chunk()],
}


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_a_stream_that_is_not_what_was_declared_stores_nothing(
    store: PrefixStore, name: str
) -> None:
    receiving = upload(store)
    *good, bad = BAD_STREAMS[name](row_chunks())
    for chunk in good:
        receiving.write(chunk)
    with pytest.raises((InvalidRequest, ChecksumMismatch)) as caught:
        receiving.write(bad)
    assert "checksum" in name or isinstance(caught.value, InvalidRequest)
    assert caught.value.metadata["field"].split(".")[0] in ("rows", "part")
    receiving.abandon()
    assert not look(store, "p").hit


@pytest.mark.parametrize("kept", [0, 1, 3, 4])
def test_a_stream_that_ends_early_stores_nothing(store: PrefixStore, kept: int) -> None:
    receiving = upload(store)
    for chunk in row_chunks()[:kept]:
        receiving.write(chunk)
    with pytest.raises(InvalidRequest, match="before all declared"):
        publish(receiving)


def test_a_chunk_above_a_mebibyte_is_refused(store: PrefixStore) -> None:
    wide = layout(1, heads=64, head_dim=512)
    receiving = begin(store, "p", IDS, layout=wide)
    assert isinstance(receiving, PrefixUpload)
    data = bytes(17 * 65_536)
    with pytest.raises(InvalidRequest) as caught:
        receiving.write(RowChunk(0, 0, 0, 17, crc32c(data), data))
    assert caught.value.metadata["limit"] == str(limits.CHUNK_BYTES_MAX)
    receiving.abandon()


@pytest.mark.parametrize(
    ("name", "fields", "field"),
    [
        ("", {}, "namespace"),
        ("x" * 201, {}, "namespace"),
        ("ä" * 101, {}, "namespace"),
        ("a\nb", {}, "namespace"),
        ("a\x00", {}, "namespace"),
        ("a\x7f", {}, "namespace"),
        ("a\u0085", {}, "namespace"),
        ("a\ud800", {}, "namespace"),
        ("p", {"model_id": ""}, "model_id"),
        ("p", {"model_id": "m" * 129}, "model_id"),
        ("p", {"model_id": "ä" * 65}, "model_id"),
        ("p", {"model_id": "\udcff"}, "model_id"),
        ("p", {"token_ids": b""}, "token_ids"),
        ("p", {"token_ids": b"abc"}, "token_ids"),
        ("p", {"token_ids": bytes(4 * limits.TOKENS_MAX + 4)}, "token_ids"),
        ("p", {"layout": Layout(())}, "layout"),
        ("p", {"parent": "q"}, "base"),
        ("p", {"base": 3}, "base"),
        ("p", {"parent_generation": 3}, "parent_generation"),
        ("p", {"base": -3, "parent": "q"}, "base"),
        ("p", {"base": 101, "parent": "q"}, "base"),
        ("p", {"base": 3, "parent": "q\n"}, "parent_namespace"),
        ("p", {"prefill_ms": -1.0}, "prefill_ms"),
        ("p", {"prefill_ms": float("nan")}, "prefill_ms"),
        ("p", {"prefill_ms": float("inf")}, "prefill_ms"),
        ("p", {"prefill_ms": limits.PREFILL_MS_MAX * 1.01}, "prefill_ms"),
        ("p", {"parts": (PART, PART)}, "parts"),
        ("p", {"parts": (PartInfo("", 0, 1, 1),)}, "parts[0].kind"),
        ("p", {"parts": (PartInfo("x" * 65, 0, 1, 1),)}, "parts[0].kind"),
        ("p", {"parts": (PartInfo("\udcff", 0, 1, 1),)}, "parts[0].kind"),
        ("p", {"parts": (PartInfo("s", 1_024, 1, 1),)}, "parts[0].slot"),
        ("p", {"parts": (PartInfo("s", -1, 1, 1),)}, "parts[0].slot"),
        ("p", {"parts": (PartInfo("s", 0, 101, 1),)}, "parts[0].boundary_tokens"),
        ("p", {"parts": (PartInfo("s", 0, 0, 1),)}, "parts[0].boundary_tokens"),
        ("p", {"parts": (PartInfo("s", 0, -1, 1),)}, "parts[0].boundary_tokens"),
        ("p", {"parts": (PartInfo("s", 0, 1, (4 << 30) + 1),)}, "parts[0].size_bytes"),
        ("p", {"parts": (PartInfo("s", 0, 1, -1),)}, "parts[0].size_bytes"),
        ("p", {"parts": (PART, PartInfo("s", 0, 1, 1, "ä" * 2_049))}, "parts[1].description"),
        ("p", {"parts": (PartInfo("s", 0, 1, 1, "\udcff"),)}, "parts[0].description"),
        (
            "p",
            {"parts": tuple(PartInfo("s", 0, n % 100, 0, str(n)) for n in range(4_097))},
            "parts",
        ),
    ],
)
def test_a_header_beyond_a_limit_names_the_field(
    store: PrefixStore, name: str, fields: dict[str, Any], field: str
) -> None:
    values = {"token_ids": IDS, **fields}
    with pytest.raises(InvalidRequest) as caught:
        store.store(TENANT, header(name, **values)) if name else LookupQuery(name)
    assert caught.value.field == field


def test_what_is_just_within_the_limits_is_taken(store: PrefixStore) -> None:
    name = "ä" * 100
    parts = tuple(PartInfo("s", n % 1_024, 1 + n // 1_024, 0) for n in range(4_096))
    put(store, name, IDS, model_id="m" * 128, parts=parts, part_bytes=(b"",) * 4_096)
    assert look(store, name).hit
    assert store.drop(TENANT, [name]) == [True]


def test_descriptions_that_would_make_a_header_unreadable_are_refused(store: PrefixStore) -> None:
    parts = tuple(
        PartInfo("s", n, 1, 0, "\x01" * 4_096) for n in range(400)
    )  # 6 bytes each in JSON
    with pytest.raises(InvalidRequest) as caught:
        begin(store, "p", IDS, parts=parts)
    assert caught.value.field == "parts"


@pytest.mark.parametrize(
    ("heads", "head_dim", "codec"),
    [(0, 8, "raw"), (1, -1, "raw"), (1, 32_769, "raw"), (1, 8, "no such codec")],
)
def test_a_layout_that_cannot_be_is_refused(heads: int, head_dim: int, codec: str) -> None:
    with pytest.raises(ValueError, match=r"heads|head_dim|codec"):
        TensorLayout(0, Side.K, heads, head_dim, DType.F16, codec)


def test_absurd_sizes_are_refused_before_anything_is_made(store: PrefixStore) -> None:
    widest = Layout(
        tuple(
            TensorLayout(slot, side, 64, 512, DType.F16) for slot in range(1_024) for side in Side
        )
    )
    with pytest.raises(OverBudget):
        begin(store, "p", tokens(1_000), layout=widest)
    parts = tuple(PartInfo("s", n, 1, 4 << 30) for n in range(1_024))
    with pytest.raises(OverBudget):
        begin(store, "p", IDS, parts=parts)


BAD_CALLS: dict[str, tuple[Callable[[PrefixStore], object], str]] = {
    "register without a layout": (lambda s: s.register(TENANT, "p", Layout(())), "layout"),
    "register a bad name": (lambda s: s.register(TENANT, "", SMALL), "namespace"),
    "register a bad model": (lambda s: s.register(TENANT, "p", SMALL, "m" * 129), "model_id"),
    "register a bad time": (
        lambda s: s.register(TENANT, "p", SMALL, prefill_ms=-1.0), "prefill_ms"),
    "a table of no blocks": (lambda s: BlockTable(0, b""), "table.block_tokens"),
    "a table of huge blocks": (lambda s: BlockTable(8_193, b""), "table.block_tokens"),
    "a table of part of a hash": (lambda s: BlockTable(64, b"1234567"), "table.hashes"),
    "too many names": (lambda s: s.drop(TENANT, ["p"] * 1_001), "namespaces"),
    "a bad name to drop": (lambda s: s.drop(TENANT, ["p", "\n"]), "namespaces"),
    "too many queries": (lambda s: s.lookup(TENANT, [LookupQuery("p")] * 1_001), "queries"),
    "too long a lease": (lambda s: look(s, "sound", lease_ms=60_001), "lease_ms"),
    "a lease into the past": (lambda s: look(s, "sound", lease_ms=-1), "lease_ms"),
    "too many restored tokens": (
        lambda s: LookupQuery("p", restored_tokens=100_000_001), "restored_tokens"),
    "a page of nothing": (lambda s: s.list_page(TENANT, count=0), "page_size"),
    "a page of everything": (lambda s: s.list_page(TENANT, count=1_001), "page_size"),
    "probes of part of a hash": (lambda s: s.membership(TENANT, "p", b"1234"), "hashes"),
    "a fetch of nothing": (lambda s: FetchQuery(), "namespace"),
    "a fetch of two things": (lambda s: FetchQuery("p", b"l" * 16), "namespace"),
    "a lease that is not one": (lambda s: FetchQuery(lease_id=b"l" * 17), "lease_id"),
    "rows that end before they begin": (lambda s: FetchQuery("p", rows=RowRange(5, 4)), "rows"),
    "no scattered rows": (
        lambda s: s.read_rows(TENANT, "sound", 0, Side.K, []), "rows"),
    "too many scattered rows": (
        lambda s: s.read_rows(TENANT, "sound", 0, Side.K, [0] * 65_537), "rows"),
    "no written rows": (lambda s: WriteRowsHeader("p", 0, Side.K, 0, 0), "row_count"),
    "rows before the first": (lambda s: WriteRowsHeader("p", 0, Side.K, -1, 1), "first_row"),
    "rows beyond any prefix": (
        lambda s: WriteRowsHeader("p", 0, Side.K, 999_999, 2), "first_row"),
    "rows far beyond": (lambda s: WriteRowsHeader("p", 0, Side.K, 1 << 60, 1 << 60), "first_row"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_call_beyond_a_limit_names_the_field(store: PrefixStore, name: str) -> None:
    call, field = BAD_CALLS[name]
    with pytest.raises(InvalidRequest) as caught:
        call(store)
    assert caught.value.field == field
    assert caught.value.metadata["field"] == field


def test_rows_that_do_not_fit_are_refused(store: PrefixStore) -> None:
    with pytest.raises(NotStored):
        write(store, "absent", 0, bytes(16))
    with pytest.raises(LayoutDiffers):
        write(store, "sound", 80, bytes(16), slot=7)
    rows = store.write_rows(TENANT, WriteRowsHeader("sound", 0, Side.K, 80, 2))
    good = RowChunk(0, 0, 80, 1, crc32c(bytes(16)), bytes(16))
    for bad in (
        good._replace(first_row=81),
        good._replace(first_row=0),
        good._replace(tensor_index=1),
        good._replace(row_count=2),
        good._replace(row_count=3, data=bytes(48), crc32c=crc32c(bytes(48))),
    ):
        with pytest.raises(InvalidRequest):
            rows.write(bad)
    with pytest.raises(ChecksumMismatch):
        rows.write(good._replace(crc32c=7))
    with pytest.raises(InvalidRequest, match="before all declared"):
        rows.publish()
    rows.abandon()


def test_an_error_never_holds_more_than_its_reason_needs(store: PrefixStore) -> None:
    name = "n" * 200
    with pytest.raises(PionError) as caught:
        begin(store, name, IDS, parent=name, base=1)
    assert len(str(caught.value)) < 500
    assert set(caught.value.metadata) == {"namespace"}
    assert dataclasses.is_dataclass(header("p", IDS))
