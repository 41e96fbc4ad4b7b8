"""Every method of PrefixStore over the wire, asked as a stranger would who has only the protos."""

import os
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pion_wire.blocks import derived_namespace, root_hash
from pion_wire.framing import frame_header, frame_rows
from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.messages import layout_to_message
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import types_pb2
from tests.conftest import ServerProcess
from tests.server.wire import MODEL, Sample, Wire, layout_of, refused


@pytest.fixture(scope="module")
def wire(server: ServerProcess) -> Iterator[Wire]:
    with Wire(server.address) as wire:
        yield wire


def write_rows(wire: Wire, namespace: str, first_row: int, data: bytes, **fields: object) -> object:
    """Writes rows of 64 bytes into k.0."""
    header = pb.PrefixStoreWriteRowsHeader(
        **{  # type: ignore[arg-type]
            "namespace": namespace,
            "side": types_pb2.SIDE_K,
            "first_row": first_row,
            "row_count": len(data) // 64,
        }
        | fields
    )
    rows = frame_rows(0, 0, first_row, len(data) // 64, data)
    return wire.send([frame_header(header.SerializeToString()), rows], "WriteRows")


ONE = Layout((TensorLayout(0, Side.K, 2, 16, DType.F16),))
"""One tensor, rows of 64 bytes: what row by row tests need."""


def test_what_was_stored_does_not_come_back_changed(wire: Wire) -> None:
    sample = Sample("store/whole", 1_000, layout_of(3, 2, 64), part_sizes=(3_000_000, 0, 7))
    stored = wire.store(sample, prefill_ms=250.0)
    assert (stored.namespace, stored.already_stored) == ("store/whole", False)
    assert (stored.token_count, stored.base) == (1_000, 0)
    assert stored.stored_bytes > sample.row_bytes + 3_000_007
    assert stored.durability == types_pb2.DURABILITY_PROCESS
    got = wire.fetch("store/whole", part_kinds=["state"])
    assert got.tensors == sample.tensors
    assert got.parts == [sample.part(index) for index in range(3)]
    header = got.header
    assert (header.found, header.reason) == (True, types_pb2.MISS_REASON_UNSPECIFIED)
    assert header.layout == layout_to_message(sample.layout) == header.prefix.layout
    assert (header.rows.begin, header.rows.end) == (0, 1_000)
    assert header.token_ids == sample.token_ids
    assert header.total_bytes == sample.row_bytes + 3_000_007
    assert header.prefix.row_bytes == sample.row_bytes
    assert header.prefix.stored_bytes == stored.stored_bytes
    assert header.prefix.prefill_ms == 250.0
    assert header.prefix.fidelity == "raw"
    assert header.prefix.state == types_pb2.PREFIX_STATE_SEALED
    assert header.prefix.created_unix_ms > 1_700_000_000_000


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(DType.F16, np.dtype("<f2")), (DType.BF16, np.dtype(ml_dtypes.bfloat16))],
)
def test_no_16_bit_pattern_is_changed(wire: Wire, dtype: DType, values: "np.dtype[object]") -> None:
    patterns = np.arange(65_536, dtype="<u2").view(values).tobytes()
    layout = Layout((TensorLayout(0, Side.K, 1, 1024, dtype),))
    header = Sample(f"patterns/{dtype.value}", 64, layout).header()
    rows = frame_rows(0, 0, 0, 64, patterns)
    wire.send([frame_header(header.SerializeToString()), rows])
    assert wire.fetch(f"patterns/{dtype.value}").tensors == [patterns]


def test_a_tensor_without_values_needs_no_rows(wire: Wire) -> None:
    layout = Layout(
        (TensorLayout(0, Side.K, 1, 16, DType.F32), TensorLayout(0, Side.V, 1, 0, DType.F32))
    )
    sample = Sample("store/one-sided", 10, layout)
    header = frame_header(sample.header().SerializeToString())
    wire.send([header, frame_rows(0, 0, 0, 10, sample.rows(0))])
    assert wire.fetch("store/one-sided").tensors == [sample.rows(0), b""]


def test_a_prefix_of_parts_only_has_no_tensors(wire: Wire) -> None:
    sample = Sample("store/parts", 64, Layout(()), part_sizes=(100,))
    wire.store(sample)
    got = wire.fetch("store/parts", part_kinds=["state"])
    assert (got.tensors, got.parts) == ([], [sample.part(0)])


def test_parts_do_not_come_where_they_are_not_exact(wire: Wire) -> None:
    wire.store(Sample("store/boundary", 100, part_sizes=(50,)))
    assert wire.fetch("store/boundary").parts == []
    for kind, end in (("state", 99), ("ring", 0), ("ring", 100)):
        ask = {"part_kinds": [kind], "rows": {"end": end}}
        got = wire.fetch("store/boundary", **ask)
        assert (got.header.found, got.header.reason) == (False, types_pb2.MISS_REASON_PART_MISSING)
        assert got.header.shortened_by == kind
        assert got.header.prefix.namespace == "store/boundary"
        answer = refused(lambda: wire.call("Export", namespace="store/boundary", **ask))  # noqa: B023
        assert answer.reason == "NOT_STORED"


def test_rows_do_not_go_on_behind_the_parts_that_are_asked_for(wire: Wire) -> None:
    sample = Sample("store/cut", 100, part_sizes=(50,))
    header = sample.header()
    header.parts[0].boundary_tokens = 64
    _, *chunks = sample.messages()
    wire.send([frame_header(header.SerializeToString()), *chunks])
    got = wire.fetch("store/cut", part_kinds=["state"])
    assert (got.header.rows.end, got.parts) == (64, [sample.part(0)])
    assert got.header.token_ids == sample.token_ids[: 4 * 64]
    exported = wire.call("Export", namespace="store/cut", part_kinds=["state"])
    assert (exported.rows.end, exported.extents[0].row_count) == (64, 64)
    for answer in (got.header, exported):
        assert answer.reason == types_pb2.MISS_REASON_PART_MISSING
        assert answer.shortened_by == "state"


def test_a_store_without_a_name_is_named_by_its_tokens(wire: Wire) -> None:
    sample = Sample("", 130)
    name = derived_namespace(root_hash("", MODEL), sample.token_ids)
    assert wire.store(sample).namespace == name
    again = wire.store(sample)
    assert (again.namespace, again.already_stored) == (name, True)


def test_what_is_stored_already_is_acknowledged_before_its_rows_come(wire: Wire) -> None:
    sample = Sample("store/early", 50)
    first = wire.store(sample)

    def header_and_then_nothing() -> Iterator[bytes]:
        yield frame_header(sample.header().SerializeToString())
        while not answered:  # the answer ends this call, not the end of the stream
            yield frame_rows(0, 0, 0, 50, sample.rows(0))

    answered: list[object] = []
    answered.append(wire.send(header_and_then_nothing()))
    (again,) = answered
    assert again.already_stored
    assert again.generation == first.generation
    assert again.stored_bytes == 0
    assert wire.fetch("store/early").tensors == sample.tensors


def test_other_content_does_not_overwrite_unless_told(wire: Wire) -> None:
    old = Sample("store/replace", 50)
    first = wire.store(old)
    new = old.at(1)
    refusal = refused(lambda: wire.store(new))
    assert (refusal.reason, refusal.metadata["first_difference"]) == ("OTHER_CONTENT", "0")
    assert wire.fetch("store/replace").tensors == old.tensors
    replaced = wire.store(new, replace=True)
    assert replaced.generation > first.generation
    assert wire.fetch("store/replace").tensors == new.tensors
    assert not wire.call("Match", model_id=MODEL, token_ids=old.token_ids, lease_ms=0).hit


def test_durability_is_said_and_repeated(wire: Wire) -> None:
    stored = wire.store(Sample("store/disk", 50), durability=types_pb2.DURABILITY_DISK)
    assert stored.durability == types_pb2.DURABILITY_DISK
    assert wire.lookup("store/disk").prefix.durability == types_pb2.DURABILITY_DISK


def test_the_barrier_makes_what_came_before_durable(wire: Wire) -> None:
    wire.store(Sample("sync/one", 50))
    assert wire.lookup("sync/one").prefix.durability == types_pb2.DURABILITY_PROCESS
    wire.call("Sync")
    assert wire.lookup("sync/one").prefix.durability == types_pb2.DURABILITY_DISK


def test_lookup_does_not_call_a_hit_what_is_not_expected(wire: Wire) -> None:
    sample = Sample("lookup/one", 100)
    wire.store(sample)
    assert wire.lookup("lookup/one").hit
    assert wire.lookup("lookup/one", token_ids=sample.token_ids, model_id=MODEL).hit
    nothing = wire.lookup("lookup/none")
    assert (nothing.hit, nothing.reason) == (False, types_pb2.MISS_REASON_NOT_STORED)
    assert not nothing.HasField("prefix")
    model = wire.lookup("lookup/one", model_id="another")
    assert (model.hit, model.reason) == (False, types_pb2.MISS_REASON_MODEL_DIFFERS)
    ids = bytearray(sample.token_ids)
    ids[4 * 70] ^= 1
    tokens = wire.lookup("lookup/one", token_ids=bytes(ids))
    assert (tokens.reason, tokens.first_difference) == (types_pb2.MISS_REASON_TOKENS_DIFFER, 70)
    shorter = wire.lookup("lookup/one", token_ids=sample.token_ids[: 4 * 60])
    assert (shorter.hit, shorter.first_difference) == (False, 60)
    layout = wire.lookup("lookup/one", layout=layout_to_message(layout_of(3)))
    assert layout.reason == types_pb2.MISS_REASON_LAYOUT_DIFFERS


def test_lookup_answers_in_the_order_of_the_queries(wire: Wire) -> None:
    wire.store(Sample("lookup/order", 10))
    names = ["lookup/nothing", "lookup/order", "lookup/nothing", "lookup/order"]
    queries = [pb.PrefixStoreLookupRequest.Query(namespace=name) for name in names]
    results = wire.call("Lookup", queries=queries).results
    assert [result.hit for result in results] == [False, True, False, True]


def test_match_ends_inside_a_block_where_it_must(wire: Wire) -> None:
    sample = Sample("match/one", 200, model_id="match-model")
    wire.store(sample)
    for common in (1, 63, 64, 65, 127, 128, 129, 199, 200):
        ids = bytearray(sample.token_ids + b"more")
        ids[4 * common] ^= 1
        match = wire.call("Match", model_id="match-model", token_ids=bytes(ids))
        assert match.hit
        assert (match.matched_tokens, match.served_tokens) == (common, common)
        assert match.requested_tokens == 201
        assert match.reason == types_pb2.MISS_REASON_PARTIAL
        assert match.prefix.namespace == "match/one"
    whole = wire.call("Match", model_id="match-model", token_ids=sample.token_ids)
    assert (whole.reason, whole.served_tokens) == (types_pb2.MISS_REASON_UNSPECIFIED, 200)


def test_match_does_not_serve_what_is_too_short_or_another_models(wire: Wire) -> None:
    sample = Sample("match/short", 30)
    wire.store(sample)
    short = wire.call("Match", model_id=MODEL, token_ids=sample.token_ids, min_tokens=31)
    assert (short.hit, short.reason) == (False, types_pb2.MISS_REASON_TOO_SHORT)
    assert (short.matched_tokens, short.served_tokens) == (30, 0)
    assert short.prefix.namespace == "match/short"
    other = wire.call("Match", model_id="another", token_ids=sample.token_ids)
    assert (other.hit, other.reason) == (False, types_pb2.MISS_REASON_NOT_STORED)


def test_match_is_cut_to_the_boundary_that_its_parts_have(wire: Wire) -> None:
    sample = Sample("match/parts", 128, part_sizes=(10,), model_id="parts-model")
    wire.store(sample)
    ask = {"model_id": "parts-model", "part_kinds": ["state"]}
    assert wire.call("Match", token_ids=sample.token_ids, **ask).served_tokens == 128
    cut = wire.call("Match", token_ids=sample.token_ids[: 4 * 100], **ask)
    assert (cut.hit, cut.reason) == (False, types_pb2.MISS_REASON_PART_MISSING)
    assert (cut.matched_tokens, cut.shortened_by) == (100, "state")
    assert (cut.longest_namespace, cut.longest_tokens) == ("match/parts", 100)


def test_a_chain_is_served_as_one_prefix(wire: Wire) -> None:
    root = Sample("chain/root", 150)
    child = root.child("chain/child", 75)
    wire.store(root)
    assert wire.store(child).base == 150
    info = wire.lookup("chain/child").prefix
    assert (info.parent_namespace, info.base, info.depth) == ("chain/root", 150, 1)
    assert info.token_count == 225
    assert wire.fetch("chain/child").tensors == child.tensors
    across = wire.fetch("chain/child", rows={"begin": 140, "end": 160})
    row = child.layout.tensors[0].row_bytes
    assert across.tensors[0] == child.rows(0)[140 * row : 160 * row]
    wire.call("Drop", namespaces=["chain/root"])
    assert wire.fetch("chain/child").tensors == child.tensors, "rows outlive the parent's name"
    assert wire.lookup("chain/child").prefix.parent_namespace == ""
    match = wire.call("Match", model_id=MODEL, token_ids=root.token_ids)
    assert (match.prefix.namespace, match.served_tokens) == ("chain/child", 150)


def test_a_chain_ends_at_its_limit(wire: Wire) -> None:
    link = Sample("deep/0", 10)
    wire.store(link)
    for depth in range(1, 32):
        link = link.child(f"deep/{depth}", 1)
        wire.store(link)
    assert wire.lookup("deep/31").prefix.depth == 31
    assert wire.fetch("deep/31").tensors == link.tensors
    refusal = refused(lambda: wire.store(link.child("deep/32", 1)))
    assert (refusal.reason, refusal.fields) == ("INVALID", ["parent_namespace"])


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (0, 100), (99, 100), (37, 64), (50, 50)])
def test_a_range_brings_its_rows_only(wire: Wire, begin: int, end: int) -> None:
    sample = Sample("range/one", 100)
    wire.store(sample)
    got = wire.fetch("range/one", rows={"begin": begin, "end": end})
    row = sample.layout.tensors[0].row_bytes
    assert got.tensors == [rows[begin * row : end * row] for rows in sample.tensors]
    assert (got.header.rows.begin, got.header.rows.end) == (begin, end)
    assert got.header.token_ids == sample.token_ids[: 4 * end]


def test_a_fetch_of_slots_brings_those_only(wire: Wire) -> None:
    sample = Sample("range/slots", 40, layout_of(4))
    wire.store(sample)
    got = wire.fetch("range/slots", slots=[3, 1])
    assert got.tensors == [sample.rows(index) for index in (2, 3, 6, 7)]
    assert [tensor.slot for tensor in got.header.layout.tensors] == [1, 1, 3, 3]


def test_a_broken_stream_goes_on_where_it_ended(wire: Wire) -> None:
    sample = Sample("resume/one", 700, layout_of(2, 8, 64), part_sizes=(2_500_000,))
    wire.store(sample)
    whole = wire.fetch("resume/one", part_kinds=["state"])
    generation = whole.header.prefix.generation
    for tensor, row in ((0, 1), (1, 0), (1, 699), (3, 350)):
        got = wire.fetch(
            "resume/one", generation=generation, resume_tensor_index=tensor, resume_row=row
        )
        skipped = row * sample.layout.tensors[0].row_bytes
        assert got.tensors[:tensor] == [b""] * tensor
        assert got.tensors[tensor:] == [
            whole.tensors[tensor][skipped:],
            *whole.tensors[tensor + 1 :],
        ]
    rest = wire.fetch(
        "resume/one", part_kinds=["state"], resume_part=1, resume_part_offset_bytes=2_000_000
    )
    assert rest.tensors == [b""] * 4
    assert rest.parts == [sample.part(0)[2_000_000:]]


def test_a_resumed_fetch_is_refused_rather_than_mixed(wire: Wire) -> None:
    sample = Sample("resume/changed", 50)
    old = wire.store(sample).generation
    new = wire.store(sample.at(1), replace=True).generation
    refusal = refused(lambda: wire.fetch("resume/changed", generation=old))
    assert (refusal.reason, refusal.metadata["generation"]) == ("GENERATION", str(new))
    assert wire.fetch("resume/changed", generation=new).tensors == sample.at(1).tensors


def test_what_is_not_there_is_an_answer(wire: Wire) -> None:
    got = wire.fetch("fetch/nothing")
    assert (got.header.found, got.header.reason) == (False, types_pb2.MISS_REASON_NOT_STORED)
    wire.call("Register", namespace="fetch/registered", layout=layout_to_message(ONE))
    got = wire.fetch("fetch/registered")
    assert (got.header.found, got.header.reason) == (False, types_pb2.MISS_REASON_NO_ROWS)


def test_a_leased_prefix_stays_readable_after_its_name_is_gone(wire: Wire) -> None:
    sample = Sample("lease/one", 100)
    wire.store(sample)
    lease = wire.lookup("lease/one", lease_ms=60_000).lease_id
    match = wire.call("Match", model_id=MODEL, token_ids=sample.token_ids)
    assert len(lease) == len(match.lease_id) == 16
    assert wire.call("Drop", namespaces=["lease/one"]).results[0].dropped
    assert not wire.fetch("lease/one").header.found
    for leased in (lease, match.lease_id):
        assert wire.fetch(lease_id=leased).tensors == sample.tensors
    assert wire.call("Export", lease_id=lease).prefix.namespace == "lease/one"


def test_peeking_gives_no_lease(wire: Wire) -> None:
    wire.store(Sample("lease/none", 10))
    assert wire.lookup("lease/none").lease_id == b""
    ask = {"model_id": MODEL, "token_ids": Sample("lease/none", 10).token_ids}
    assert wire.call("Match", lease_ms=0, **ask).lease_id == b""


def test_export_names_files_that_hold_the_rows(wire: Wire, server: ServerProcess) -> None:
    root = Sample("export/root", 150)
    child = root.child("export/child", 70)
    wire.store(root)
    wire.store(child)
    export = wire.call("Export", namespace="export/child", rows={"begin": 100})
    assert export.host_token == (Path(export.directory) / "host-token").read_bytes()
    assert Path(export.directory) == server.directory.resolve()
    assert (export.rows.begin, export.rows.end) == (100, 220)
    assert export.token_ids == child.token_ids
    assert len(export.lease_id) == 16
    row = child.layout.tensors[0].row_bytes
    rows, position = b"", 100
    for extent in export.extents:
        path = Path(export.directory, extent.file_name)
        status = path.stat()
        assert (extent.device, extent.inode) == (status.st_dev, status.st_ino)
        assert extent.size_bytes == status.st_size
        assert extent.first_row == position
        position += extent.row_count
        begin = extent.data_offset_bytes + extent.file_row * row
        rows += path.read_bytes()[begin : begin + extent.row_count * row]
    assert position == 220
    assert rows == child.rows(0)[100 * row :]


def test_a_file_that_was_changed_behind_its_time_is_not_exported_again(start_server) -> None:
    server = start_server()
    with Wire(server.address) as wire:
        wire.store(Sample("export/changed", 150))
        export = wire.call("Export", namespace="export/changed")
        path = server.directory / export.extents[0].file_name
        before = path.stat()
        with path.open("r+b") as file:
            (byte,) = file.read()[-1000:-999]
            file.seek(-1000, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        told = refused(lambda: wire.call("Export", namespace="export/changed"))
        assert told.reason == "CORRUPT"


def test_an_exported_file_stays_while_its_lease_does(wire: Wire, server: ServerProcess) -> None:
    wire.store(Sample("export/leased", 50))
    export = wire.call("Export", namespace="export/leased", lease_ms=60_000)
    wire.call("Drop", namespaces=["export/leased"])
    assert (server.directory / export.extents[0].file_name).exists()


def test_export_of_live_rows_is_refused(wire: Wire) -> None:
    wire.call("Register", namespace="export/live", layout=layout_to_message(ONE))
    write_rows(wire, "export/live", 0, bytes(64))
    assert refused(lambda: wire.call("Export", namespace="export/live")).reason == "NOT_STORED"


def test_drop_answers_per_name_and_takes_matches_away(wire: Wire) -> None:
    sample = Sample("drop/one", 100, model_id="drop-model")
    wire.store(sample)
    results = wire.call("Drop", namespaces=["drop/none", "drop/one", "drop/one"]).results
    assert [(result.namespace, result.dropped) for result in results] == [
        ("drop/none", False),
        ("drop/one", True),
        ("drop/one", False),
    ]
    assert not wire.call("Match", model_id="drop-model", token_ids=sample.token_ids).hit
    assert not wire.lookup("drop/one").hit


def test_dropped_files_are_gone(wire: Wire, server: ServerProcess) -> None:
    before = set(os.listdir(server.directory / "segments"))
    wire.store(Sample("drop/file", 10))
    assert set(os.listdir(server.directory / "segments")) > before
    wire.call("Drop", namespaces=["drop/file"])
    assert set(os.listdir(server.directory / "segments")) == before


def test_no_page_of_a_list_leaves_a_name_out(wire: Wire) -> None:
    names = [f"list/{index:03}" for index in range(25)]
    for name in names:
        wire.call("Register", namespace=name, layout=layout_to_message(ONE))
    seen, token = [], ""
    while True:
        page = wire.call("List", page_size=7, page_token=token, namespace_prefix="list/")
        seen += [info.namespace for info in page.prefixes]
        token = page.next_page_token
        if not token:
            break
    assert seen == names
    assert set(names) <= set(wire.names())
    assert wire.call("List", namespace_prefix="list/01").prefixes[0].namespace == "list/010"


def test_a_list_of_wide_layouts_stays_below_a_default_clients_limit(wire: Wire) -> None:
    wide = Layout(
        tuple(
            TensorLayout(slot, side, 1, 1, DType.F16)
            for slot in range(1_000)
            for side in (Side.K, Side.V)
        )
    )
    names = [f"wide/{index:03}" for index in range(160)]
    layout = layout_to_message(wide)
    for name in names:
        wire.call("Register", namespace=name, layout=layout)
    seen, token = [], ""
    while True:
        page = wire.call("List", page_size=1_000, page_token=token, namespace_prefix="wide/")
        assert page.ByteSize() <= 4 << 20
        seen += [info.namespace for info in page.prefixes]
        token = page.next_page_token
        if not token:
            break
    assert seen == names


def test_register_declares_without_rows(wire: Wire) -> None:
    table = types_pb2.BlockTable(block_tokens=16, hashes=np.arange(10, dtype="<u8").tobytes())
    answer = wire.call(
        "Register", namespace="register/one", layout=layout_to_message(layout_of()), table=table
    )
    assert answer.state == types_pb2.PREFIX_STATE_REGISTERED
    found = wire.lookup("register/one")
    assert (found.hit, found.reason) == (False, types_pb2.MISS_REASON_NO_ROWS)
    assert found.prefix.state == types_pb2.PREFIX_STATE_REGISTERED
    assert found.prefix.token_count == 0
    assert wire.call("Blocks", namespace="register/one").table == table


def test_a_registered_name_takes_a_store_of_the_same_layout_only(wire: Wire) -> None:
    table = types_pb2.BlockTable(block_tokens=16, hashes=bytes(80))
    layout = layout_to_message(layout_of())
    wire.call("Register", namespace="register/two", layout=layout, table=table, model_id=MODEL)
    other = Sample("register/two", 20, layout_of(3))
    assert refused(lambda: wire.store(other)).reason == "LAYOUT"
    sample = Sample("register/two", 20)
    wire.store(sample)
    assert wire.call("Blocks", namespace="register/two").table == table, "the table stays"
    again = wire.call("Register", namespace="register/two", layout=layout, prefill_ms=12.0)
    assert again.state == types_pb2.PREFIX_STATE_SEALED
    info = wire.lookup("register/two").prefix
    assert (info.prefill_ms, info.token_count) == (12.0, 20)
    assert wire.call("Blocks", namespace="register/two").table == table, "none leaves it"
    assert wire.fetch("register/two").tensors == sample.tensors


def test_membership_says_which_probes_are_in_a_table(wire: Wire) -> None:
    hashes = np.array([5, 2**64 - 1, 7, 5], dtype="<u8").tobytes()
    table = types_pb2.BlockTable(block_tokens=256, hashes=hashes)
    wire.store(Sample("blocks/one", 10), table=table)
    wire.store(Sample("blocks/none", 10))
    probes = np.array([7, 8, 5, 0, 2**64 - 1, 1, 1, 1, 5], dtype="<u8").tobytes()
    names = ["blocks/one", "blocks/nothing", "blocks/none"]
    one, nothing, none = wire.call("Membership", namespaces=names, hashes=probes).results
    assert (one.known, one.bitmap) == (True, bytes([0b10101, 0b1]))
    assert not nothing.known
    assert not none.known
    assert wire.call("Blocks", namespace="blocks/one").table == table
    assert not wire.call("Blocks", namespace="blocks/none").known
    assert not wire.call("Blocks", namespace="blocks/nothing").known


def test_rows_are_appended_overwritten_and_read_back(wire: Wire) -> None:
    rng = np.random.default_rng(1)
    wire.call("Register", namespace="rows/one", layout=layout_to_message(ONE), model_id=MODEL)
    first, second = rng.bytes(64 * 10), rng.bytes(64 * 5)
    written = write_rows(wire, "rows/one", 0, first)
    assert (written.row_count, written.durability) == (10, types_pb2.DURABILITY_PROCESS)
    grown = write_rows(wire, "rows/one", 10, second)
    assert (grown.row_count, grown.generation) == (15, written.generation), "appending keeps it"
    over = write_rows(wire, "rows/one", 3, second)
    assert (over.row_count, over.generation > grown.generation) == (15, True)
    rows = first[: 64 * 3] + second + first[64 * 8 :] + second
    assert wire.lookup("rows/one").prefix.state == types_pb2.PREFIX_STATE_LIVE
    assert wire.fetch("rows/one").tensors == [rows]
    wanted = np.array([14, 0, 3, 3, 99], dtype="<u4")
    assert read_rows(wire, "rows/one", wanted) == b"".join(
        rows[64 * row : 64 * row + 64] if row < 15 else bytes(64) for row in wanted.tolist()
    )


def read_rows(wire: Wire, namespace: str, rows: "np.ndarray") -> bytes:
    request = pb.PrefixStoreReadRowsRequest(
        namespace=namespace, side=types_pb2.SIDE_K, rows=rows.tobytes()
    )
    head, *messages = wire.prefixes.ReadRows(request, timeout=30)
    assert head.tensor.heads * head.tensor.head_dim == 32
    return b"".join(message.data for message in messages)


def test_a_gap_reads_as_zeros(wire: Wire) -> None:
    wire.call("Register", namespace="rows/gap", layout=layout_to_message(ONE))
    write_rows(wire, "rows/gap", 5, b"x" * 64)
    assert wire.fetch("rows/gap").tensors == [bytes(5 * 64) + b"x" * 64]


def test_reading_rows_that_do_not_exist_says_so(wire: Wire) -> None:
    wire.call("Register", namespace="rows/none", layout=layout_to_message(ONE))
    request = pb.PrefixStoreReadRowsRequest(
        namespace="rows/none", side=types_pb2.SIDE_K, rows=bytes(4)
    )
    (only,) = wire.prefixes.ReadRows(request, timeout=30)
    assert only.reason == types_pb2.MISS_REASON_NO_ROWS
    write_rows(wire, "rows/none", 0, bytes(64))
    request.rows = np.array([1], dtype="<u4").tobytes()
    (only,) = wire.prefixes.ReadRows(request, timeout=30)
    assert only.reason == types_pb2.MISS_REASON_NO_ROWS


def test_saving_seals_live_rows_into_one_segment(wire: Wire, server: ServerProcess) -> None:
    wire.call("Register", namespace="save/one", layout=layout_to_message(ONE), model_id=MODEL)
    write_rows(wire, "save/one", 0, b"a" * 640)
    write_rows(wire, "save/one", 5, b"b" * 64)
    rows = b"a" * 320 + b"b" * 64 + b"a" * 256
    generation = wire.lookup("save/one").prefix.generation
    row_files = set(os.listdir(server.directory / "rows"))
    assert wire.call("Save", namespaces=["save/one"]).sealed_count == 1
    info = wire.lookup("save/one").prefix
    assert (info.state, info.generation) == (types_pb2.PREFIX_STATE_SEALED, generation)
    assert info.durability == types_pb2.DURABILITY_DISK
    assert wire.fetch("save/one").tensors == [rows]
    assert set(os.listdir(server.directory / "rows")) < row_files
    assert len(wire.call("Export", namespace="save/one").extents) == 1
    assert wire.call("Save", namespaces=["save/one"]).sealed_count == 0
    wire.call("Save")  # what other tests left
    write_rows(wire, "save/one", 10, b"c" * 64)
    assert wire.lookup("save/one").prefix.state == types_pb2.PREFIX_STATE_LIVE
    assert wire.call("Save").sealed_count == 1, "without names all that is live"
    assert wire.fetch("save/one").tensors == [rows + b"c" * 64]


def test_a_snapshot_is_gone_back_to(wire: Wire) -> None:
    wire.call("Register", namespace="snapshot/one", layout=layout_to_message(ONE))
    written = write_rows(wire, "snapshot/one", 0, b"a" * 640)
    snapshot = wire.call("Snapshot", namespace="snapshot/one").snapshot_id
    assert snapshot > 0
    ask = {"namespace": "snapshot/one", "snapshot_id": snapshot}
    assert wire.call("Restore", **ask).generation == written.generation, "nothing was cut off"
    write_rows(wire, "snapshot/one", 10, b"b" * 128)
    assert wire.call("Restore", **ask).generation > written.generation
    assert wire.fetch("snapshot/one").tensors == [b"a" * 640]
    write_rows(wire, "snapshot/one", 11, b"c" * 64)
    assert wire.fetch("snapshot/one").tensors == [b"a" * 640 + bytes(64) + b"c" * 64]
    assert wire.call("Release", **ask).released
    assert not wire.call("Release", **ask).released
    assert refused(lambda: wire.call("Restore", **ask)).reason == "NOT_STORED"
    assert wire.fetch("snapshot/one").header.rows.end == 12, "releasing keeps the rows"


def test_describe_names_limits_budgets_and_totals(wire: Wire) -> None:
    before = wire.call("Describe")
    sample = Sample("describe/one", 100)
    stored = wire.store(sample)
    after = wire.call("Describe")
    limits = {limit.name: limit.value for limit in after.limits}
    assert limits["tokens_max"] == 1_000_000
    assert limits["streams_max"] == 64
    assert limits["chunk_bytes_max"] == 1 << 20
    assert after.prefix_count == before.prefix_count + 1
    assert after.row_count == before.row_count + 100
    assert after.disk_used_bytes >= before.disk_used_bytes + stored.stored_bytes
    assert after.disk_budget_bytes == 20 << 30
    assert after.export_enabled
    assert "raw" in after.codecs
    assert after.version
    assert after.started_unix_ms > 1_700_000_000_000


def test_the_largest_prefix_is_served_to_a_client_with_default_limits(wire: Wire) -> None:
    layout = Layout(
        (TensorLayout(0, Side.K, 1, 1, DType.F16), TensorLayout(0, Side.V, 1, 1, DType.F16))
    )
    sample = Sample("large/tokens", 1_000_000, layout)
    table = types_pb2.BlockTable(block_tokens=16, hashes=bytes(8 * 62_500))
    wire.store(sample, table=table)
    assert wire.fetch("large/tokens").tensors == sample.tensors
    assert wire.call("Export", namespace="large/tokens").token_ids == sample.token_ids
    match = wire.call("Match", model_id=MODEL, token_ids=sample.token_ids)
    assert match.served_tokens == 1_000_000
    wire.call("Drop", namespaces=["large/tokens"])


def test_a_prefix_of_many_parts_is_served_to_a_client_with_default_limits(wire: Wire) -> None:
    sample = Sample("large/parts", 64, Layout(()), part_sizes=(1,) * 1_024)
    parts = sample.header().parts
    for part in parts:
        part.description = "d" * 1_000
    wire.store(sample, parts=parts)
    got = wire.fetch("large/parts", part_kinds=["state"])
    assert len(got.parts) == 1_024
    assert got.header.parts[5].description == "d" * 1_000
    for part in parts:
        part.description = "d" * 4_000
    too_wide = Sample("large/wide-parts", 64, Layout(()), part_sizes=(1,) * 1_024)
    refusal = refused(lambda: wire.store(too_wide, parts=parts))
    assert (refusal.reason, refusal.fields) == ("INVALID", ["parts"])
