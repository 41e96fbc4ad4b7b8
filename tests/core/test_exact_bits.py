"""Bit patterns are sacred: NaNs with their payloads, zeros with their signs, subnormals."""

import ml_dtypes
import numpy as np
import pytest
from crc32c import crc32c

from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.storing import PrefixUpload
from pion_grpc.core.values import RowRange
from pion_wire.framing import RowChunk
from pion_wire.layout import DType, Layout, Side
from tests.core.support import (
    TENANT,
    begin,
    layout,
    publish,
    put,
    rows_of,
    tokens,
    write,
)

PATTERNS = np.arange(1 << 16, dtype="<u2")
WIDTH = 256
ROWS = len(PATTERNS) // WIDTH
IDS = tokens(ROWS)


def both(data: bytes) -> dict[int, bytes]:
    return {0: data, 1: data}


def store_bytes(
    store: PrefixStore, name: str, shape: Layout, ids: bytes, data: bytes, **fields: object
) -> None:
    """Stores the same bytes as K and V; `data` has the rows from the base on."""
    upload = begin(store, name, ids, layout=shape, **fields)
    assert isinstance(upload, PrefixUpload)
    base = upload._segment.base
    row_bytes = shape.tensors[0].row_bytes
    for index in range(len(shape.tensors)):
        upload.write(RowChunk(index, 0, base, len(data) // row_bytes, crc32c(data), data))
    publish(upload)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_no_pattern_of_16_bits_is_changed_by_any_road(store: PrefixStore, dtype: DType) -> None:
    shape = layout(heads=2, head_dim=WIDTH // 2, dtype=dtype)
    data = PATTERNS.tobytes()
    row_bytes = shape.tensors[0].row_bytes
    store_bytes(store, "whole", shape, IDS, data)
    assert rows_of(store, "whole") == both(data)

    half = ROWS // 2
    store_bytes(store, "p", shape, IDS[: 4 * half], data[: half * row_bytes])
    store_bytes(store, "c", shape, IDS, data[half * row_bytes :], parent="p", base=half)
    assert rows_of(store, "c") == both(data)

    for begin_row, end in ((1, ROWS), (half - 1, half + 1), (0, 7), (ROWS - 1, ROWS)):
        for name in ("whole", "c"):
            rows = rows_of(store, name, rows=RowRange(begin_row, end))
            assert rows == both(data[begin_row * row_bytes : end * row_bytes])

    order = np.random.default_rng(7).permutation(ROWS).astype("<u4")
    found = store.read_rows(TENANT, "c", 0, Side.V, order.tolist())
    assert found is not None
    read, pieces = found
    assert read.tensors[0].dtype is dtype
    wanted = PATTERNS.reshape(ROWS, WIDTH)[order]
    assert b"".join(pieces) == wanted.tobytes()

    store.register(TENANT, "live", shape)
    for side in Side:
        write(store, "live", half, data[half * row_bytes :], side=side, row_bytes=row_bytes)
        write(store, "live", 0, data[: half * row_bytes], side=side, row_bytes=row_bytes)
    for _ in range(2):
        assert rows_of(store, "live") == both(data)
        store.save(TENANT, ["live"])


def test_no_pattern_of_32_bits_is_changed(store: PrefixStore) -> None:
    shape = layout(heads=1, head_dim=WIDTH, dtype=DType.F32)
    special = np.array(
        [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 1, 0x807FFFFF],
        dtype="<u4",
    )
    random = np.random.default_rng(3).integers(0, 1 << 32, ROWS * WIDTH - len(special), "<u4")
    data = np.concatenate([special, random]).astype("<u4").tobytes()
    store_bytes(store, "p", shape, IDS, data)
    assert rows_of(store, "p") == both(data)


def test_bf16_is_never_taken_for_binary16(store: PrefixStore) -> None:
    values = np.linspace(-3, 3, WIDTH, dtype=np.float32).astype(ml_dtypes.bfloat16)
    shape = layout(heads=1, head_dim=WIDTH, dtype=DType.BF16)
    store_bytes(store, "p", shape, IDS[:4], values.tobytes())
    rows = rows_of(store, "p")
    assert rows is not None
    served = np.frombuffer(rows[0], dtype=DType.BF16.numpy)
    assert np.array_equal(served.astype(np.float32), values.astype(np.float32))
    put(store, "other", IDS, layout=layout(dtype=DType.F16))
