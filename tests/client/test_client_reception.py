"""A Fetch stream is believed in nothing: what is out of place, damaged or too much is never used."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from crc32c import crc32c

from pion_client.errors import BadAnswer, InvalidRequest
from pion_client.fetching import DamagedChunk, Reception, ScatteredRows
from pion_wire import codecs, limits
from pion_wire.framing import frame_header, frame_part, frame_rows
from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.messages import layout_to_message
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import types_pb2

LAYOUT = Layout(
    (
        TensorLayout(0, Side.K, 2, 4, DType.BF16),
        TensorLayout(0, Side.V, 2, 0, DType.BF16),
        TensorLayout(3, Side.V, 1, 3, DType.F32),
    )
)
ROWS = (10, 20)
K = np.arange(160, dtype=np.uint8)
V = np.arange(120, dtype=np.uint8)[::-1].copy()
STATE = b"state of the matter"


def header(**fields: Any) -> bytes:
    message: dict[str, Any] = {
        "found": True,
        "prefix": pb.PrefixInfo(
            namespace="n",
            state=types_pb2.PREFIX_STATE_SEALED,
            model_id="m",
            layout=layout_to_message(LAYOUT),
            token_count=30,
            generation=7,
            fidelity="raw",
            durability=types_pb2.DURABILITY_PROCESS,
        ),
        "layout": layout_to_message(LAYOUT),
        "rows": types_pb2.RowRange(begin=10, end=20),
        "total_bytes": len(K) + len(V) + len(STATE),
        "token_ids": b"\0" * 80,
        "parts": [types_pb2.PartInfo(kind="state", boundary_tokens=20, size_bytes=len(STATE))],
    }
    return frame_header(pb.PrefixStoreFetchHeader(**message | fields).SerializeToString())


def k(begin: int, end: int, **other: int) -> bytes:
    """Rows of the first tensor, counted from the first that was asked for."""
    fields = {
        "tensor_index": 0,
        "array_index": 0,
        "first_row": 10 + begin,
        "row_count": end - begin,
    }
    return frame_rows(**fields | other, data=K[16 * begin : 16 * end].tobytes())


def v(begin: int = 0, end: int = 10) -> bytes:
    return frame_rows(2, 0, 10 + begin, end - begin, V[12 * begin : 12 * end].tobytes())


def part(begin: int = 0, end: int | None = None, index: int = 0) -> bytes:
    return frame_part(index, begin, STATE[begin:end])


def started(*messages: bytes, **options: Any) -> Reception:
    reception = Reception(**{"bytes_max": 1_000} | options)
    reception.begin_stream(pb.PrefixStoreFetchRequest())
    for message in messages:
        reception.take(message)
    return reception


def resumed(reception: Reception) -> dict[str, int]:
    """The fields of the request for the rest, which is of the rows that were announced."""
    request = pb.PrefixStoreFetchRequest()
    reception.begin_stream(request)
    fields = {field.name: value for field, value in request.ListFields()}
    if "generation" in fields:
        assert fields.pop("rows") == types_pb2.RowRange(begin=ROWS[0], end=ROWS[1])
    return fields


def check(reception: Reception) -> None:
    assert reception.ended()
    layers = reception.layers()
    assert layers.slots == (0, 3)
    (k_array, empty), (missing, v_array) = layers.pairs
    assert (k_array.shape, k_array.dtype) == ((2, 10, 4), ml_dtypes.bfloat16)
    assert k_array.transpose(1, 0, 2).tobytes() == K.tobytes()
    assert (empty.shape, missing.shape) == ((2, 10, 0), (1, 10, 0))
    assert (v_array.shape, v_array.dtype) == ((1, 10, 3), np.float32)
    assert v_array.transpose(1, 0, 2).tobytes() == V.tobytes()
    assert [bytes(part.data) for part in reception.parts()] == [STATE]


def test_every_chunk_goes_to_its_place() -> None:
    check(started(header(), k(0, 3), k(3, 10), v(0, 9), v(9, 10), part(0, 5), part(5)))


@pytest.mark.parametrize(
    ("before", "rest", "request_fields"),
    [
        ([], [k(0, 10), v(), part()], {"generation": 7, "resume_row": 10}),
        ([k(0, 4)], [k(4, 10), v(), part()], {"generation": 7, "resume_row": 14}),
        (
            [k(0, 10)],
            [v(), part()],
            {"generation": 7, "resume_tensor_index": 2, "resume_row": 10},
        ),
        (
            [k(0, 10), v(0, 2)],
            [v(2, 10), part()],
            {"generation": 7, "resume_tensor_index": 2, "resume_row": 12},
        ),
        ([k(0, 10), v()], [part()], {"generation": 7, "resume_part": 1}),
        (
            [k(0, 10), v(), part(0, 6)],
            [part(6)],
            {"generation": 7, "resume_part": 1, "resume_part_offset_bytes": 6},
        ),
    ],
)
def test_what_has_come_is_not_asked_for_again(
    before: list[bytes], rest: list[bytes], request_fields: dict[str, int]
) -> None:
    reception = started(header(), *before)
    assert resumed(reception) == request_fields
    for message in [header(), *rest]:
        reception.take(message)
    check(reception)


def test_a_miss_is_an_end() -> None:
    missing = frame_header(
        pb.PrefixStoreFetchHeader(reason=types_pb2.MISS_REASON_NO_ROWS).SerializeToString()
    )
    assert started(missing).ended()
    gone_between_two_streams = started(header(), k(0, 4))
    resumed(gone_between_two_streams)
    gone_between_two_streams.take(missing)
    assert gone_between_two_streams.ended()
    assert gone_between_two_streams.announced is None


@pytest.mark.parametrize(
    "messages",
    [
        [k(0, 10)],  # no header
        [header(), header()],
        [header(), k(1, 10)],  # a hole
        [header(), k(0, 4), k(0, 4)],  # twice
        [header(), k(0, 4), k(3, 10)],  # overlapping
        [header(), k(0, 4, row_count=3)],
        [header(), k(0, 4, row_count=5)],
        [header(), k(0, 4, array_index=1)],
        [header(), k(0, 4, tensor_index=1)],
        [header(), k(0, 4, tensor_index=2)],
        [header(), k(0, 4, tensor_index=2**31)],
        [header(), k(0, 4, first_row=2**62)],
        [header(), v()],  # before its turn
        [header(), part()],
        [header(), k(0, 10), part()],
        [header(), frame_rows(0, 0, 10, 11, bytes(176))],  # more than announced
        [header(), frame_rows(0, 0, 10, 0, b"")],
        [header(), frame_rows(0, 0, 10, 1, bytes(17))],  # no whole row
        [header(), k(0, 10), v(), part(1)],
        [header(), k(0, 10), v(), part(index=1)],
        [header(), k(0, 10), v(), part(), part()],
        [header(), k(0, 10), v(), frame_part(0, 0, STATE + b"!")],
        [header(found=False), k(0, 10)],
        [b""],
        [b"\xff\xff"],
        [b"\x0a\x02\xff\xff"],
    ],
)
def test_what_is_out_of_place_is_never_used(messages: list[bytes]) -> None:
    *good, bad = messages
    reception = started(*good)
    done = reception.done_bytes
    with pytest.raises(BadAnswer):
        reception.take(bad)
    assert reception.done_bytes == done


@pytest.mark.parametrize("at", [0, 50, -1])
@pytest.mark.parametrize("message", [k(0, 10), v()])
def test_a_damaged_chunk_is_never_used(message: bytes, at: int) -> None:
    reception = started(header(), *([k(0, 10)] if message == v() else []))
    before = resumed(reception)
    reception.take(header())
    damaged = bytearray(message)
    data_begin = len(message) - (160 if message == k(0, 10) else 120)
    damaged[data_begin + at if at >= 0 else -1] ^= 1
    with pytest.raises(DamagedChunk):
        reception.take(bytes(damaged))
    assert resumed(reception) == before


def huge_layout() -> types_pb2.Layout:
    tensors = (TensorLayout(slot, Side.K, 1, 32_768, DType.F16) for slot in range(1_024))
    return layout_to_message(Layout(tuple(tensors)))


@pytest.mark.parametrize(
    "fields",
    [
        {"total_bytes": 0},
        {"total_bytes": 300},
        {"total_bytes": 2**63},
        {"rows": types_pb2.RowRange(begin=20, end=10)},
        {"rows": types_pb2.RowRange(begin=0, end=2**60), "token_ids": b""},
        {"rows": types_pb2.RowRange(begin=0, end=1_000_000), "layout": huge_layout()},
        {"rows": types_pb2.RowRange(begin=10, end=21)},
        {"token_ids": b"\0" * 79},
        {"token_ids": b"\0" * 84},
        {"layout": types_pb2.Layout(tensors=[types_pb2.TensorLayout(heads=1, head_dim=1)])},
        {"layout": types_pb2.Layout(tensors=list(layout_to_message(LAYOUT).tensors)[::-1])},
        {"parts": [types_pb2.PartInfo(kind="state", size_bytes=2**62)]},
        {"parts": [types_pb2.PartInfo(kind="x")] * (limits.PARTS_MAX + 1)},
    ],
)
def test_an_absurd_header_is_refused_before_memory_is_taken(fields: dict[str, Any]) -> None:
    reception = Reception(bytes_max=1 << 62)
    reception.begin_stream(pb.PrefixStoreFetchRequest())
    with pytest.raises(BadAnswer):
        reception.take(header(**fields))
    assert reception.announced is None


def test_more_than_the_caller_wants_is_refused() -> None:
    with pytest.raises(BadAnswer, match="fetch_bytes_max"):
        started(header(), bytes_max=len(K) + len(V) + len(STATE) - 1)


INT8 = Layout((TensorLayout(0, Side.K, 2, 16, DType.BF16, "int8"),))
CODES, SCALES, BIASES = (
    array.tobytes()
    for array in codecs.parse("int8").encode(np.linspace(-3, 3, 320, dtype="f4").reshape(10, 32))
)


def int8_header(**fields: Any) -> bytes:
    message = {"layout": layout_to_message(INT8), "total_bytes": 400, "parts": []}
    return header(**message | fields)


def array_rows(index: int, data: bytes, begin: int, end: int) -> bytes:
    size = len(data) // 10
    return frame_rows(0, index, 10 + begin, end - begin, data[begin * size : end * size])


@pytest.mark.parametrize("keep", [(), ("int8",)])
def test_arrays_of_a_codec_are_not_mixed_up(keep: tuple[str, ...]) -> None:
    reception = started(
        int8_header(), array_rows(0, CODES, 0, 10), array_rows(1, SCALES, 0, 4), bytes_max=2_000,
        keep=keep,
    )  # fmt: skip
    expected = {"generation": 7, "resume_array_index": 1, "resume_row": 14}
    assert resumed(reception) == expected
    reception.take(int8_header())
    with pytest.raises(BadAnswer, match="next"):
        reception.take(array_rows(2, BIASES, 4, 10))
    for message in (array_rows(1, SCALES, 4, 10), array_rows(2, BIASES, 0, 10)):
        reception.take(message)
    assert reception.ended()
    ((rows, _),) = reception.layers().pairs
    if keep:
        assert [array.shape for array in rows.arrays] == [(2, 10, 16), (10, 1), (10, 1)]
        codes, *others = rows.arrays
        assert codes.transpose(1, 0, 2).tobytes() == CODES
        assert [array.tobytes() for array in others] == [SCALES, BIASES]
        assert (rows.codec, rows.dtype, rows.token_count) == ("int8", DType.BF16, 10)
    else:
        assert (rows.shape, rows.dtype) == ((2, 10, 16), np.float32)
        linear = np.linspace(-3, 3, 320).reshape(10, 2, 16).transpose(1, 0, 2)
        np.testing.assert_allclose(rows, linear, atol=1e-2)


def test_decoded_rows_count_as_what_they_become() -> None:
    started(int8_header(), bytes_max=400, keep=("int8",))
    with pytest.raises(BadAnswer, match="fetch_bytes_max"):
        started(int8_header(), bytes_max=1_279)
    started(int8_header(), bytes_max=1_280)


def test_rows_that_are_too_long_decoded_are_refused_not_cut() -> None:
    wide = Layout((TensorLayout(0, Side.K, 1, 32_768, DType.F16, "turbo2"),))
    message = header(layout=layout_to_message(wide), total_bytes=10 * wide.row_bytes, parts=[])
    with pytest.raises(InvalidRequest, match="ask for 'turbo2'"):
        started(message, bytes_max=1 << 30)
    started(message, bytes_max=1 << 30, keep=("turbo2",))


def with_generation(generation: int) -> bytes:
    message = pb.PrefixStoreFetchHeader.FromString(header()[3:])
    message.prefix.generation = generation
    return frame_header(message.SerializeToString())


@pytest.mark.parametrize(
    "again",
    [
        with_generation(8),
        header(rows=types_pb2.RowRange(begin=9, end=19)),
        header(token_ids=b"\1" * 80),
        header(parts=[]),
    ],
)
def test_two_prefixes_are_never_mixed(again: bytes) -> None:
    reception = started(header(), k(0, 4))
    resumed(reception)
    with pytest.raises(BadAnswer, match="something else"):
        reception.take(again)


def test_progress_counts_what_is_here_and_what_will_be() -> None:
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))

    started(header(), k(0, 3), k(3, 10), v(), part(), progress=progress)
    assert seen == [(48, 299), (160, 299), (280, 299), (299, 299)]


def scattered(*messages: pb.PrefixStoreReadRowsResponse) -> ScatteredRows:
    rows = ScatteredRows(10)
    for message in messages:
        rows.take(message)
    return rows


def rows_message(data: bytes, checksum: int | None = None) -> pb.PrefixStoreReadRowsResponse:
    value = crc32c(data) if checksum is None else checksum
    return pb.PrefixStoreReadRowsResponse(crc32c=value, data=data)


FIRST = pb.PrefixStoreReadRowsResponse(tensor=layout_to_message(LAYOUT).tensors[0])


def test_scattered_rows_are_checked_like_all_others() -> None:
    data = K.tobytes()
    whole = scattered(FIRST, rows_message(data[:64]), rows_message(data[64:])).array()
    assert whole is not None
    assert whole.transpose(1, 0, 2).tobytes() == data
    assert (
        scattered(pb.PrefixStoreReadRowsResponse(reason=types_pb2.MISS_REASON_NO_ROWS)).array()
        is None
    )
    with pytest.raises(BadAnswer, match="fewer"):
        scattered().array()
    with pytest.raises(BadAnswer, match="fewer"):
        scattered(FIRST, rows_message(data[:64])).array()
    with pytest.raises(BadAnswer, match="more"):
        scattered(FIRST, rows_message(data), rows_message(data[:16]))
    with pytest.raises(DamagedChunk):
        scattered(FIRST, rows_message(data, checksum=1))
