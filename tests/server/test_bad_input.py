"""What a broken or hostile client sends: refused with a reason and a field, nothing kept of it.

After every attempt the directory holds the files that it held before, no name has appeared, and the
server still answers; its memory is looked at after the attempts that aim for it.
"""

import itertools
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from pion_wire.framing import frame_header, frame_part, frame_rows
from pion_wire.layout import DType, Layout, PartInfo, Side, TensorLayout
from pion_wire.messages import layout_to_message, part_to_message
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import types_pb2
from tests.conftest import ServerProcess
from tests.memory import clear_peak, peak_bytes
from tests.server.wire import MODEL, Sample, Wire, eventually, layout_of, refused

_serial = itertools.count()


@pytest.fixture(scope="module")
def wire(server: ServerProcess) -> Iterator[Wire]:
    with Wire(server.address) as wire:
        wire.store(Sample("bad/victim", 50))
        wire.call("Register", namespace="bad/registered", layout=layout_to_message(layout_of()))
        yield wire


@pytest.fixture(autouse=True)
def unharmed(server: ServerProcess, wire: Wire) -> Iterator[None]:
    """Nothing is left behind, and nobody else noticed."""
    process = psutil.Process(server.process.pid)
    files, names, descriptors = left(server), wire.names(), process.num_fds()
    yield
    eventually(lambda: left(server) == files)
    assert wire.names() == names
    assert wire.fetch("bad/victim").tensors == Sample("bad/victim", 50).tensors
    assert wire.call("Describe").disk_used_bytes < 64 << 20, "no reservation is left"
    eventually(lambda: process.num_fds() <= descriptors + 4)  # connections of the catalogue
    assert not [entry for entry in server.log if entry["level"] == "error"], server.log[-1]


def left(server: ServerProcess) -> set[str]:
    return {
        name
        for directory in ("segments", "rows", "export")
        for name in os.listdir(Path(server.directory, directory))
    }


def fresh(**fields: Any) -> Sample:
    return Sample(f"bad/{next(_serial)}", **{"token_count": 50, **fields})


def header(sample: Sample, **fields: Any) -> bytes:
    return frame_header(sample.header(**fields).SerializeToString())


def field_of(number: int, wire_type: int, value: bytes) -> bytes:
    """One protobuf field by hand; `value` is framed already."""
    return bytes([number << 3 | wire_type]) + value


def delimited(number: int, value: bytes) -> bytes:
    return field_of(number, 2, varint(len(value)) + value)


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def refused_as(ask: Callable[[], object], field: str, reason: str = "INVALID") -> None:
    told = refused(ask)
    assert (told.reason, told.metadata.get("field")) == (reason, field), told


# -- names and texts

BAD_NAMES = {
    "empty": "",
    "oversized": "n" * 201,
    "oversized in bytes only": "é" * 101,
    "newline": "a\nb",
    "null": "a\0b",
    "delete": "a\x7fb",
    "escape": "\x1b[31m",
    "next line": "a\x85b",
}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_no_method_takes_a_bad_name(wire: Wire, name: str) -> None:
    layout = layout_to_message(layout_of())
    lookup = pb.PrefixStoreLookupRequest.Query(namespace=name)
    rows = pb.PrefixStoreReadRowsRequest(namespace=name, side=types_pb2.SIDE_K, rows=bytes(4))
    write = pb.PrefixStoreWriteRowsHeader(namespace=name, side=types_pb2.SIDE_K, row_count=1)
    refused_as(lambda: wire.call("Register", namespace=name, layout=layout), "namespace")
    refused_as(lambda: wire.call("Lookup", queries=[lookup]), "namespace")
    refused_as(lambda: wire.fetch(name), "namespace")
    refused_as(lambda: wire.call("Export", namespace=name), "namespace")
    refused_as(lambda: wire.call("Drop", namespaces=["bad/victim", name]), "namespaces")
    refused_as(lambda: wire.call("Blocks", namespace=name), "namespace")
    refused_as(lambda: wire.call("Membership", namespaces=[name], hashes=bytes(8)), "namespace")
    refused_as(lambda: wire.call("Save", namespaces=[name]), "namespaces")
    refused_as(lambda: list(wire.prefixes.ReadRows(rows)), "namespace")
    refused_as(
        lambda: wire.send([frame_header(write.SerializeToString())], "WriteRows"), "namespace"
    )
    for method in ("Snapshot", "Restore", "Release"):
        refused_as(lambda: wire.call(method, namespace=name), "namespace")  # noqa: B023
    if name:  # without one a Store derives it
        refused_as(lambda: wire.send([header(fresh(), namespace=name)]), "namespace")
        child = {"parent_namespace": name, "base": 1}
        refused_as(lambda: wire.send([header(fresh(), **child)]), "parent_namespace")


@pytest.mark.parametrize("method", ["Register", "Drop", "Blocks", "Membership", "Save", "Snapshot"])
def test_no_text_is_taken_that_is_not_utf8(wire: Wire, method: str) -> None:
    surrogate = "bad/\ud800".encode(errors="surrogatepass")
    for text in (b"bad/\xff\xfe", b"\xc3", surrogate):
        refused_as(lambda: wire.raw(method, delimited(1, text)), "request")  # noqa: B023


def test_no_stream_is_begun_by_a_name_that_is_not_utf8(wire: Wire) -> None:
    good = fresh().header(namespace="")
    bad = good.SerializeToString() + delimited(1, b"bad/\xff")
    refused_as(lambda: wire.send([frame_header(bad)]), "header")
    refused_as(lambda: wire.send([frame_header(delimited(1, b"\xc3"))], "WriteRows"), "header")
    call = wire.channel.unary_stream("/pion.v1.PrefixStore/Fetch")
    refused_as(lambda: list(call(delimited(1, b"\x80"))), "request")


# -- numbers and shapes


def tensor(**fields: Any) -> types_pb2.TensorLayout:
    given = {"slot": 0, "side": 1, "heads": 2, "head_dim": 16, "data_type": 2}
    return types_pb2.TensorLayout(**given | fields)


BAD_LAYOUTS: dict[str, tuple[list[types_pb2.TensorLayout], str]] = {
    "no side": ([tensor(side=0)], "tensors[0].side"),
    "unknown side": ([tensor(side=9)], "tensors[0].side"),
    "no data type": ([tensor(data_type=0)], "tensors[0].data_type"),
    "unknown data type": ([tensor(data_type=77)], "tensors[0].data_type"),
    "no heads": ([tensor(heads=0)], "tensors[0].heads"),
    "absurd heads": ([tensor(heads=2**32 - 1)], "tensors[0].heads"),
    "many wide heads": ([tensor(heads=2**16)], "tensors[0].head_dim"),
    "absurd head_dim": ([tensor(head_dim=2**32 - 1)], "tensors[0].head_dim"),
    "absurd slot": ([tensor(slot=1_024)], "tensors[0].slot"),
    "absurd slot in 32 bits": ([tensor(slot=2**32 - 1)], "tensors[0].slot"),
    "row too wide": ([tensor(heads=2, head_dim=16_385)], "tensors[0].head_dim"),
    "unknown codec": ([tensor(codec="zip")], "tensors[0].codec"),
    "codec that does not fit": ([tensor(head_dim=3, codec="mlx4g32")], "tensors[0].codec"),
    "codec with absurd parameters": ([tensor(codec="mlx_affine(9,1,f99)")], "tensors[0].codec"),
    "codec that never ends": ([tensor(codec="mlx_affine(" * 10_000)], "tensors[0].codec"),
    "V before K": ([tensor(side=2), tensor(side=1)], "tensors"),
    "twice": ([tensor(), tensor()], "tensors"),
    "slots backwards": ([tensor(slot=1), tensor(slot=0)], "tensors"),
    "second is wrong": ([tensor(), tensor(slot=1, heads=0)], "tensors[1].heads"),
    "too many": ([tensor(slot=slot % 1_000) for slot in range(2_049)], "tensors"),
}


@pytest.mark.parametrize(("tensors", "field"), BAD_LAYOUTS.values(), ids=BAD_LAYOUTS)
def test_no_layout_is_taken_that_cannot_be(
    wire: Wire, tensors: list[types_pb2.TensorLayout], field: str
) -> None:
    layout = types_pb2.Layout(tensors=tensors)
    name = fresh().namespace
    refused_as(lambda: wire.send([header(fresh(), layout=layout)]), f"layout.{field}")
    refused_as(lambda: wire.call("Register", namespace=name, layout=layout), f"layout.{field}")
    refused_as(lambda: wire.lookup("bad/victim", layout=layout), f"layout.{field}")


def part(**fields: Any) -> types_pb2.PartInfo:
    given = {"kind": "state", "slot": 0, "boundary_tokens": 50, "size_bytes": 4}
    return types_pb2.PartInfo(**given | fields)


PREFIX_STORE_HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model_id": ""}, "model_id"),
    "oversized model": ({"model_id": "m" * 129}, "model_id"),
    "no tokens": ({"token_ids": b""}, "token_ids"),
    "three bytes of tokens": ({"token_ids": bytes(3)}, "token_ids"),
    "tokens and two bytes": ({"token_ids": bytes(42)}, "token_ids"),
    "too many tokens": ({"token_ids": bytes(4_000_004)}, "token_ids"),
    "neither rows nor parts": ({"layout": types_pb2.Layout()}, "layout"),
    "base without parent": ({"base": 10}, "base"),
    "parent without base": ({"parent_namespace": "bad/victim"}, "base"),
    "base beyond the tokens": ({"parent_namespace": "bad/victim", "base": 51}, "base"),
    "absurd base": ({"parent_namespace": "bad/victim", "base": 2**64 - 1}, "base"),
    "other tokens than the parent": ({"parent_namespace": "bad/victim", "base": 50}, "token_ids"),
    "unknown durability": ({"durability": 99}, "durability"),
    "negative durability": ({"durability": -1}, "durability"),
    "negative prefill": ({"prefill_ms": -1.0}, "prefill_ms"),
    "absurd prefill": ({"prefill_ms": 1e300}, "prefill_ms"),
    "infinite prefill": ({"prefill_ms": float("inf")}, "prefill_ms"),
    "prefill that is no number": ({"prefill_ms": float("nan")}, "prefill_ms"),
    "blocks of nothing": ({"table": {"hashes": bytes(8)}}, "table.block_tokens"),
    "absurd blocks": ({"table": {"block_tokens": 8_193}}, "table.block_tokens"),
    "half a hash": ({"table": {"block_tokens": 16, "hashes": bytes(12)}}, "table.hashes"),
    "too many hashes": ({"table": {"block_tokens": 16, "hashes": bytes(3_200_008)}}, "table.hashes"),
    "part without kind": ({"parts": [part(kind="")]}, "parts[0].kind"),
    "oversized kind": ({"parts": [part(), part(kind="k" * 65)]}, "parts[1].kind"),
    "part of an absurd slot": ({"parts": [part(slot=1_024)]}, "parts[0].slot"),
    "part beyond the end": ({"parts": [part(boundary_tokens=51)]}, "parts[0].boundary_tokens"),
    "absurd part": ({"parts": [part(size_bytes=2**63)]}, "parts[0].size_bytes"),
    "part of 2^60 bytes": ({"parts": [part(size_bytes=2**60)]}, "parts[0].size_bytes"),
    "talkative part": ({"parts": [part(description="d" * 4_097)]}, "parts[0].description"),
    "the same part twice": ({"parts": [part(), part()]}, "parts"),
    "too many parts": ({"parts": [part(slot=slot % 1_024, boundary_tokens=slot // 1_024)
                                  for slot in range(4_097)]}, "parts"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "field"), PREFIX_STORE_HEADERS.values(), ids=PREFIX_STORE_HEADERS
)
def test_no_store_begins_with_a_bad_header(wire: Wire, fields: dict[str, Any], field: str) -> None:
    refused_as(lambda: wire.send([header(fresh(), **fields)]), field)


BAD_REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "match without model": ("Match", {"token_ids": bytes(4)}, "model_id"),
    "match without tokens": ("Match", {"model_id": MODEL}, "token_ids"),
    "match of half a token": ("Match", {"model_id": MODEL, "token_ids": bytes(5)}, "token_ids"),
    "match of too many tokens": (
        "Match", {"model_id": MODEL, "token_ids": bytes(4_000_004)}, "token_ids"),
    "match with a long lease": (
        "Match", {"model_id": MODEL, "token_ids": bytes(4), "lease_ms": 60_001}, "lease_ms"),
    "match in too many trees": (
        "Match", {"model_id": MODEL, "token_ids": bytes(4), "fidelities": ["raw"] * 17}, "fidelities"),
    "lookup with a long lease": (
        "Lookup", {"queries": [{"namespace": "bad/victim"}], "lease_ms": 2**32 - 1}, "lease_ms"),
    "lookup of too many": ("Lookup", {"queries": [{"namespace": "bad/n"}] * 1_001}, "queries"),
    "lookup of half a token": (
        "Lookup", {"queries": [{"namespace": "bad/victim", "token_ids": bytes(3)}]}, "token_ids"),
    "lookup with absurd credit": (
        "Lookup", {"queries": [{"namespace": "bad/victim", "restored_tokens": 2**64 - 1}]},
        "restored_tokens"),
    "lookup with credit that is no number": (
        "Lookup", {"queries": [{"namespace": "bad/victim", "restored_prefill_ms": float("nan")}]},
        "prefill_ms"),
    "export of nothing": ("Export", {}, "namespace"),
    "export of both": ("Export", {"namespace": "bad/victim", "lease_id": b"x"}, "namespace"),
    "export with a long lease": (
        "Export", {"namespace": "bad/victim", "lease_ms": 60_001}, "lease_ms"),
    "export under a lease that is not one": ("Export", {"lease_id": bytes(17)}, "lease_id"),
    "drop of too many": ("Drop", {"namespaces": ["bad/n"] * 1_001}, "namespaces"),
    "save of too many": ("Save", {"namespaces": ["bad/n"] * 1_001}, "namespaces"),
    "page of too many": ("List", {"page_size": 1_001}, "page_size"),
    "page of absurdly many": ("List", {"page_size": 2**32 - 1}, "page_size"),
    "half a probe": ("Membership", {"namespaces": ["bad/victim"], "hashes": bytes(4)}, "hashes"),
    "too many probes": (
        "Membership", {"namespaces": ["bad/victim"], "hashes": bytes(3_200_008)}, "hashes"),
    "probes of too many": ("Membership", {"namespaces": ["bad/n"] * 1_001}, "namespaces"),
    "an answer of 50 MB": (
        "Membership", {"namespaces": ["bad/victim"] * 1_000, "hashes": bytes(3_200_000)}, "hashes"),
    "registered without layout": ("Register", {"namespace": "bad/none"}, "layout"),
    "registered with a negative prefill": (
        "Register",
        {"namespace": "bad/none", "layout": {"tensors": [tensor()]}, "prefill_ms": -1.0},
        "prefill_ms"),
    "registered with an oversized model": (
        "Register",
        {"namespace": "bad/none", "layout": {"tensors": [tensor()]}, "model_id": "m" * 129},
        "model_id"),
    "registered with half a hash": (
        "Register",
        {"namespace": "bad/none", "layout": {"tensors": [tensor()]},
         "table": {"block_tokens": 1, "hashes": b"x"}},
        "table.hashes"),
}  # fmt: skip


@pytest.mark.parametrize(("method", "fields", "field"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_no_request_is_taken_that_means_nothing(
    wire: Wire, method: str, fields: dict[str, Any], field: str
) -> None:
    refused_as(lambda: wire.call(method, **fields), field)


BAD_FETCHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "neither name nor lease": ({}, "INVALID", "namespace"),
    "both": ({"namespace": "bad/victim", "lease_id": b"x"}, "INVALID", "namespace"),
    "oversized lease": ({"lease_id": bytes(1_000_000)}, "INVALID", "lease_id"),
    "unknown lease": ({"lease_id": b"x"}, "EVICTED", ""),
    "rows beyond the end": ({"namespace": "bad/victim", "rows": {"end": 51}}, "ROWS", ""),
    "rows that end before they begin": (
        {"namespace": "bad/victim", "rows": {"begin": 5, "end": 3}}, "INVALID", "rows"),
    "absurd rows": ({"namespace": "bad/victim", "rows": {"begin": 2**60, "end": 2**61}}, "ROWS", ""),
    "rows from an absurd one": ({"namespace": "bad/victim", "rows": {"begin": 2**64 - 1}}, "ROWS", ""),
    "an absurd generation": ({"namespace": "bad/victim", "generation": 2**64 - 1}, "GENERATION", ""),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "reason", "field"), BAD_FETCHES.values(), ids=BAD_FETCHES)
def test_no_fetch_is_served_that_means_nothing(
    wire: Wire, fields: dict[str, Any], reason: str, field: str
) -> None:
    told = refused(lambda: list(wire.streaming(**fields)))
    assert (told.reason, told.metadata.get("field", "")) == (reason, field)


def test_resuming_behind_the_end_brings_nothing(wire: Wire) -> None:
    for where in (
        {"resume_tensor_index": 2**32 - 1},
        {"resume_row": 2**64 - 1, "resume_tensor_index": 3},
        {"resume_array_index": 2**32 - 1, "resume_tensor_index": 3},
        {"resume_part": 2**32 - 1, "resume_part_offset_bytes": 2**64 - 1},
    ):
        got = wire.fetch("bad/victim", **where)
        assert not any(got.tensors)


@pytest.mark.parametrize("slots", [[999], [0, 2**32 - 1]])
def test_slots_that_do_not_exist_are_no_empty_answer(wire: Wire, slots: list[int]) -> None:
    refused_as(lambda: wire.fetch("bad/victim", slots=slots), "slots")


# -- streams


def chunk(**fields: Any) -> bytes:
    """A chunk of 50 rows of 64 bytes of tensor 0, unless told otherwise."""
    given = {"tensor": 0, "array": 0, "first_row": 0, "row_count": 50, "data": bytes(3_200)}
    given |= fields
    return frame_rows(*given.values())


BAD_STREAMS: dict[str, tuple[Callable[[Sample], list[bytes]], str, str]] = {
    "nothing at all": (lambda s: [], "INVALID", "header"),
    "an empty message": (lambda s: [b""], "INVALID", "header"),
    "rows before the header": (lambda s: list(s.chunks()), "INVALID", "header"),
    "header twice": (lambda s: [header(s), header(s)], "INVALID", "header"),
    "header in the middle": (
        lambda s: [header(s), *list(s.chunks())[:2], header(s)], "INVALID", "header"),
    "header at the end": (lambda s: [*s.messages(), header(s)], "INVALID", "header"),
    "no rows": (lambda s: [header(s)], "INVALID", "rows"),
    "one tensor missing": (lambda s: list(s.messages())[:-1], "INVALID", "rows"),
    "a tensor twice": (lambda s: [header(s), chunk(), chunk()], "INVALID", "rows"),
    "tensors out of order": (lambda s: [header(s), chunk(tensor=1)], "INVALID", "rows"),
    "rows out of order": (
        lambda s: [header(s), chunk(first_row=10, row_count=40, data=bytes(2_560))], "INVALID", "rows"),
    "a gap between rows": (
        lambda s: [header(s), chunk(row_count=10, data=bytes(640)),
                   chunk(first_row=11, row_count=39, data=bytes(2_496))], "INVALID", "rows"),
    "rows that overlap": (
        lambda s: [header(s), chunk(row_count=10, data=bytes(640)),
                   chunk(first_row=9, row_count=41, data=bytes(2_624))], "INVALID", "rows"),
    "an absurd tensor": (lambda s: [header(s), chunk(tensor=2**32 - 1)], "INVALID", "rows"),
    "an array that its codec has not": (lambda s: [header(s), chunk(array=1)], "INVALID", "rows"),
    "an absurd first row": (lambda s: [header(s), chunk(first_row=2**64 - 1)], "INVALID", "rows"),
    "no row": (lambda s: [header(s), chunk(row_count=0, data=b"")], "INVALID", "rows.row_count"),
    "2^60 rows": (lambda s: [header(s), chunk(row_count=2**60)], "INVALID", "rows.row_count"),
    "one row too many": (
        lambda s: [header(s), chunk(row_count=51, data=bytes(3_264))], "INVALID", "rows.row_count"),
    "less data than rows": (
        lambda s: [header(s), chunk(data=bytes(3_199))], "INVALID", "rows.data"),
    "more data than rows": (
        lambda s: [header(s), chunk(data=bytes(3_201))], "INVALID", "rows.data"),
    "no data": (lambda s: [header(s), chunk(data=b"")], "INVALID", "rows.data"),
    "rows after the last": (lambda s: [*s.messages(), chunk()], "INVALID", "rows"),
    "a part that nobody declared": (
        lambda s: [*s.messages(), frame_part(0, 0, b"x")], "INVALID", "part"),
    "a part before the rows": (
        lambda s: [header(s, parts=[part()]), frame_part(0, 0, b"four")], "INVALID", "part"),
    "part missing": (lambda s: list(s.messages(parts=[part()])), "INVALID", "rows"),
    "half a part": (
        lambda s: [*s.messages(parts=[part()]), frame_part(0, 0, b"x")], "INVALID", "rows"),
    "part from the middle": (
        lambda s: [*s.messages(parts=[part()]), frame_part(0, 1, b"x")], "INVALID", "part"),
    "another part": (
        lambda s: [*s.messages(parts=[part()]), frame_part(1, 0, b"four")], "INVALID", "part"),
    "an empty piece of a part": (
        lambda s: [*s.messages(parts=[part()]), frame_part(0, 0, b"")], "INVALID", "part.data"),
    "too much of a part": (
        lambda s: [*s.messages(parts=[part()]), frame_part(0, 0, b"five!")], "INVALID", "part.data"),
    "garbage": (lambda s: [b"\xff" * 1_000], "INVALID", "header"),
    "garbage after the header": (lambda s: [header(s), b"\xff" * 1_000], "INVALID", "message"),
    "an empty message after the header": (lambda s: [header(s), b""], "INVALID", "message"),
    "a message cut off": (
        lambda s: [header(s), next(s.chunks())[:-1]], "INVALID", "message"),
    "a group, which nobody sends": (lambda s: [header(s), b"\x13\x14"], "INVALID", "message"),
    "a number without end": (lambda s: [header(s), b"\x12" + b"\x80" * 30], "INVALID", "message"),
    "a length beyond the message": (
        lambda s: [header(s), b"\x12" + varint(2**62)], "INVALID", "message"),
    "rows that are a number": (lambda s: [header(s), b"\x10\x05"], "INVALID", "message"),
    "unknown fields only": (lambda s: [header(s), b"\x78\x05"], "INVALID", "message"),
    "a header that is a number": (lambda s: [b"\x08\x05"], "INVALID", "header"),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "reason", "field"), BAD_STREAMS.values(), ids=BAD_STREAMS)
def test_no_store_is_taken_that_is_not_in_order(
    wire: Wire, messages: Callable[[Sample], list[bytes]], reason: str, field: str
) -> None:
    sample = fresh()
    refused_as(lambda: wire.send(messages(sample)), field, reason)
    assert not wire.lookup(sample.namespace).HasField("prefix")


def test_no_chunk_is_larger_than_a_chunk(wire: Wire) -> None:
    wide = Layout((TensorLayout(0, Side.K, 8, 4_096, DType.F16),))
    sample = fresh(token_count=40, layout=wide)
    refused_as(
        lambda: wire.send([header(sample), frame_rows(0, 0, 0, 17, bytes(17 * 65_536))]), "message"
    )
    exactly = [frame_rows(0, 0, row, 16, bytes(16 * 65_536)) for row in (0, 16)]
    refused_as(lambda: wire.send([header(sample), *exactly]), "rows")


def write_header(**fields: Any) -> bytes:
    given = {"namespace": "bad/registered", "slot": 0, "side": 1, "first_row": 0, "row_count": 10}
    return frame_header(pb.PrefixStoreWriteRowsHeader(**given | fields).SerializeToString())


BAD_WRITES: dict[str, tuple[list[bytes], str, str]] = {
    "nothing": ([], "INVALID", "header"),
    "rows first": ([chunk()], "INVALID", "header"),
    "no side": ([write_header(side=0)], "INVALID", "side"),
    "unknown side": ([write_header(side=3)], "INVALID", "side"),
    "no rows": ([write_header(row_count=0)], "INVALID", "row_count"),
    "2^60 rows": ([write_header(row_count=2**60)], "INVALID", "first_row"),
    "from row 2^60 on": ([write_header(first_row=2**60)], "INVALID", "first_row"),
    "numbers that overflow": (
        [write_header(first_row=2**64 - 1, row_count=2**64 - 1)], "INVALID", "first_row"),
    "a million and one": ([write_header(first_row=999_991)], "INVALID", "first_row"),
    "unknown durability": ([write_header(durability=5)], "INVALID", "durability"),
    "unknown prefix": ([write_header(namespace="bad/unknown")], "NOT_STORED", ""),
    "absurd slot": ([write_header(slot=2**32 - 1)], "LAYOUT", ""),
    "fewer than declared": (
        [write_header(), chunk(row_count=9, data=bytes(576))], "INVALID", "rows"),
    "more than declared": ([write_header(), chunk()], "INVALID", "rows.row_count"),
    "another row first": (
        [write_header(), chunk(first_row=1, row_count=9, data=bytes(576))], "INVALID", "rows"),
    "header twice": ([write_header(), write_header()], "INVALID", "header"),
    "a part": ([write_header(), frame_part(0, 0, b"x")], "INVALID", "message"),
    "garbage": ([write_header(), b"\xff\xff"], "INVALID", "message"),
}  # fmt: skip


@pytest.mark.parametrize(("messages", "reason", "field"), BAD_WRITES.values(), ids=BAD_WRITES)
def test_no_rows_are_written_that_are_not_in_order(
    wire: Wire, messages: list[bytes], reason: str, field: str
) -> None:
    told = refused(lambda: wire.send(messages, "WriteRows"))
    assert (told.reason, told.metadata.get("field", "")) == (reason, field), told
    assert wire.lookup("bad/registered").prefix.token_count == 0


def test_wrong_checksums_of_rows_are_not_written(wire: Wire) -> None:
    rows = bytearray(chunk(row_count=10, data=bytes(640)))
    rows[-1] ^= 1
    told = refused(lambda: wire.send([write_header(), bytes(rows)], "WriteRows"))
    assert (told.reason, told.metadata) == ("CHECKSUM", {"field": "rows"})


BAD_READS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no rows": ({"rows": b""}, "INVALID", "rows"),
    "half a row number": ({"rows": bytes(6)}, "INVALID", "rows"),
    "too many": ({"rows": bytes(4 * 65_537)}, "INVALID", "rows"),
    "no side": ({"side": 0}, "INVALID", "side"),
    "unknown slot": ({"slot": 9}, "LAYOUT", ""),
    "absurd slot": ({"slot": 2**32 - 1}, "LAYOUT", ""),
}


@pytest.mark.parametrize(("fields", "reason", "field"), BAD_READS.values(), ids=BAD_READS)
def test_no_rows_are_read_that_mean_nothing(
    wire: Wire, fields: dict[str, Any], reason: str, field: str
) -> None:
    given = {"namespace": "bad/victim", "side": 1, "rows": bytes(4)}
    request = pb.PrefixStoreReadRowsRequest(**given | fields)
    told = refused(lambda: list(wire.prefixes.ReadRows(request)))
    assert (told.reason, told.metadata.get("field", "")) == (reason, field), told


def test_reading_of_scattered_rows_that_is_cut_off_leaves_no_file_open(wire: Wire) -> None:
    wide = Sample("bad/wide", 4, Layout((TensorLayout(0, Side.K, 8, 4_096, DType.F16),)))
    wire.store(wide)
    rows = np.zeros(200, dtype="<u4").tobytes()  # 13 messages
    request = pb.PrefixStoreReadRowsRequest(namespace="bad/wide", side=1, rows=rows)
    for _ in range(20):
        call = wire.prefixes.ReadRows(request)
        next(call)
        call.cancel()
    wire.call("Drop", namespaces=["bad/wide"])


@pytest.mark.parametrize("method", ["Store", "WriteRows"])
def test_a_stream_cut_in_the_middle_leaves_nothing(wire: Wire, method: str) -> None:
    big = fresh(token_count=10_000, layout=layout_of(2, 8, 64))

    def cut_after(count: int) -> Iterator[bytes]:
        first = [write_header(row_count=100_000)] if method == "WriteRows" else [header(big)]
        rows = (
            [chunk(first_row=50 * index) for index in range(10)]
            if method == "WriteRows"
            else big.chunks()
        )
        yield from itertools.islice(itertools.chain(first, rows), count)
        raise RuntimeError("the client fell over")

    for count in (0, 1, 2, 5):
        told = refused(lambda: wire.send(cut_after(count), method))  # noqa: B023
        assert told.code == grpc.StatusCode.UNKNOWN, "the client's own word"


@pytest.mark.parametrize("method", ["Lookup", "Match", "Register", "Drop", "Describe", "Save"])
def test_garbage_is_no_message(wire: Wire, method: str) -> None:
    refused_as(lambda: wire.raw(method, b"\xff" * 100), "request")
    refused_as(lambda: wire.raw(method, delimited(1, b"x")[:-1]), "request")


def test_nesting_without_end_does_not_break_the_parser(wire: Wire) -> None:
    nested = b""
    for _ in range(10_000):
        nested = delimited(1, nested)
    refused(lambda: wire.raw("Lookup", nested))
    groups = b"\xa3\x06" * 100_000
    refused_as(lambda: wire.raw("Lookup", groups), "request")


# -- sizes


@pytest.fixture
def flat(server: ServerProcess) -> Iterator[Callable[[int], None]]:
    """Fails if the server's memory has grown by more than that many bytes at its worst."""
    process = psutil.Process(server.process.pid)
    clear_peak(process.pid)
    before = process.memory_info().rss

    def check(limit: int) -> None:
        assert peak_bytes(process.pid) - before < limit

    return check


def test_a_gigabyte_of_token_ids_is_not_taken_in(wire: Wire, flat: Callable[[int], None]) -> None:
    told = refused(lambda: wire.raw("Match", delimited(2, bytes(1 << 30))))
    assert told.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    flat(80 << 20)


def test_sizes_that_are_declared_are_not_allocated(wire: Wire, flat: Callable[[int], None]) -> None:
    for count in (2**20, 2**40, 2**60, 2**64 - 1):
        for _ in range(20):
            refused(lambda: wire.send([header(fresh(), base=count)]))  # noqa: B023
            refused(lambda: wire.send([write_header(row_count=count)], "WriteRows"))  # noqa: B023
            refused(lambda: wire.send([header(fresh(), parts=[part(size_bytes=count)])]))  # noqa: B023
    parts = [part_to_message(PartInfo("state", slot, 50, 4 << 30)) for slot in range(1_024)]
    told = refused(lambda: wire.send([header(fresh(), parts=parts)]))
    assert told.reason == "BUDGET", "4 TiB"
    flat(16 << 20)


HOLLOW = {
    "queries": ("Lookup", delimited(1, b"")),
    "queries with a name": ("Lookup", delimited(1, delimited(1, b"a"))),
    "unknown fields": ("Lookup", b"\x78\x00"),
    "names": ("Drop", delimited(1, b"a")),
    "names to save": ("Save", delimited(1, b"a")),
    "names to probe": ("Membership", delimited(1, b"a")),
    "tensors": ("Register", delimited(2, delimited(1, b"") * 1_000)),
}
"""Methods, and a few bytes that become objects of many."""


@pytest.mark.parametrize("size", [4 << 20, 60 << 20], ids=["4 MiB", "60 MiB"])
@pytest.mark.parametrize(("method", "unit"), HOLLOW.values(), ids=HOLLOW)
def test_many_hollow_messages_do_not_fill_memory(
    wire: Wire, flat: Callable[[int], None], method: str, unit: bytes, size: int
) -> None:
    message = unit * (size // len(unit))
    if method == "Lookup" and unit == b"\x78\x00" and size == 4 << 20:
        assert len(wire.raw(method, message)) == 0, "what is unknown is ignored"
    else:
        told = refused(lambda: wire.raw(method, message))
        assert told.reason == "INVALID"
    flat(256 << 20)


def test_long_lists_of_a_fetch_are_refused_before_they_are_taken_in(
    wire: Wire, flat: Callable[[int], None]
) -> None:
    lists = {
        "slots": {"slots": range(1_000_000)},
        "part_kinds": {"part_kinds": ["a"] * 1_000_000},
        "codecs": {"codecs": ["raw"] * 700_000},
    }
    for field, fields in lists.items():
        call = wire.streaming(namespace="bad/victim", **fields)
        refused_as(lambda: list(call), field)  # noqa: B023
    flat(128 << 20)


def test_hollow_chunks_do_not_fill_memory(wire: Wire, flat: Callable[[int], None]) -> None:
    hollow = {
        "fields of a chunk": delimited(2, b"\x08\x00" * (500 << 10)),
        "chunks in a message": delimited(2, b"") * (500 << 10),
        "more than a chunk": delimited(2, b"\x08\x00" * (20 << 20)),
    }
    for message in hollow.values():
        refused(lambda: wire.send([header(fresh()), message]))  # noqa: B023
    refused(lambda: wire.send([b"\x78\x00" * (4 << 20)]))
    flat(200 << 20)


def test_packed_token_ids_keep_their_order_of_bytes(wire: Wire) -> None:
    sample = fresh(token_count=2)
    ids = struct.pack("<II", 1, 0xFFFFFFFF)
    wire.send([header(sample, token_ids=ids), *sample.chunks()])
    big_endian = struct.pack(">II", 1, 0xFFFFFFFF)
    assert wire.lookup(sample.namespace, token_ids=ids).hit
    assert not wire.lookup(sample.namespace, token_ids=big_endian).hit
    wire.call("Drop", namespaces=[sample.namespace])
