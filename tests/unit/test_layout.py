"""Layouts: what can be stored, and that equal ones have equal texts."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion_wire import limits
from pion_wire.layout import DType, Layout, LayoutError, Side, TensorLayout
from pion_wire.messages import layout_from_message, layout_to_message
from pion_wire.v1 import types_pb2

tensors = st.builds(
    TensorLayout,
    st.integers(0, limits.SLOTS_MAX - 1),
    st.sampled_from(Side),
    st.integers(1, 64),
    st.integers(0, 256).map(lambda n: n),
    st.sampled_from(DType),
)
layouts = st.lists(tensors, max_size=12, unique_by=lambda t: (t.slot, t.side)).map(
    lambda found: Layout(tuple(sorted(found, key=lambda t: (t.slot, t.side))))
)


@given(layouts)
def test_a_layout_comes_back_from_its_text_and_from_its_message(layout: Layout) -> None:
    assert Layout.from_json(layout.to_json()) == layout
    assert layout_from_message(layout_to_message(layout)) == layout
    assert Layout.from_json(layout.to_json()).to_json() == layout.to_json()


@given(layouts, layouts)
def test_equal_layouts_and_only_those_have_equal_texts(one: Layout, two: Layout) -> None:
    assert (one == two) == (one.to_json() == two.to_json())


@given(layouts)
def test_a_row_has_the_bytes_of_its_values(layout: Layout) -> None:
    for tensor in layout.tensors:
        assert tensor.row_bytes == tensor.heads * tensor.head_dim * tensor.dtype.itemsize
    assert layout.row_bytes == sum(tensor.row_bytes for tensor in layout.tensors)
    assert layout.fidelity == "raw"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"slot": -1}, "slot"),
        ({"slot": 1_024}, "slot"),
        ({"heads": 0}, "heads"),
        ({"head_dim": -1}, "head_dim"),
        ({"heads": 256, "head_dim": 129}, "head_dim"),
        ({"heads": 2**40, "head_dim": 2**40}, "heads"),
        ({"heads": 2**16, "head_dim": 2**40}, "head_dim"),
        ({"heads": 2**17, "head_dim": 0}, "heads"),
        ({"codec": "zip"}, "codec"),
        ({"codec": ""}, "codec"),
        ({"codec": "mlx_affine(9,32,f16)"}, "codec"),
    ],
)
def test_a_tensor_that_cannot_be_stored_says_why(fields: dict[str, object], field: str) -> None:
    values = {"slot": 0, "side": Side.K, "heads": 2, "head_dim": 64, "dtype": DType.F16} | fields
    with pytest.raises(LayoutError) as caught:
        TensorLayout(**values)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_the_largest_row_is_just_allowed() -> None:
    assert TensorLayout(0, Side.K, 256, 128, DType.F16).row_bytes == limits.ROW_BYTES_MAX


@pytest.mark.parametrize(
    "order",
    [[(1, Side.K), (0, Side.K)], [(0, Side.V), (0, Side.K)], [(0, Side.K), (0, Side.K)]],
)
def test_tensors_out_of_order_or_twice_are_refused(order: list[tuple[int, Side]]) -> None:
    with pytest.raises(LayoutError, match="ordered"):
        Layout(tuple(TensorLayout(slot, side, 1, 8, DType.F16) for slot, side in order))


def test_too_many_tensors_are_refused_before_they_are_looked_at() -> None:
    message = types_pb2.Layout(tensors=[types_pb2.TensorLayout()] * (limits.TENSORS_MAX + 1))
    with pytest.raises(LayoutError) as caught:
        layout_from_message(message)
    assert caught.value.field == "tensors"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"side": 0}, "tensors[0].side"),
        ({"side": 9}, "tensors[0].side"),
        ({"data_type": 0}, "tensors[0].data_type"),
        ({"data_type": 77}, "tensors[0].data_type"),
        ({"heads": 0}, "tensors[0].heads"),
        ({"slot": 4_000_000_000}, "tensors[0].slot"),
        ({"codec": "zip"}, "tensors[0].codec"),
    ],
)
def test_a_message_that_is_no_layout_names_the_field(change: dict[str, int], field: str) -> None:
    tensor = types_pb2.TensorLayout(side=1, heads=1, head_dim=8, data_type=2)
    for name, value in change.items():
        setattr(tensor, name, value)
    with pytest.raises(LayoutError) as caught:
        layout_from_message(types_pb2.Layout(tensors=[tensor]))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "text",
    ["", "{", "7", "null", "[7]", "[[0]]", '[[0,"x",1,8,"F16","raw"]]', '[[0,"k",1,8,"F8","raw"]]',
     '[[0,"k",0,8,"F16","raw"]]', '[["0","k",1,8,"F16","raw"]]', '[[0,"k",1,8,"F16",7]]',
     '[[0,"k",1,8,"F16","raw",1]]', '{"a":1}'],
)  # fmt: skip
def test_a_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(text)


def test_codecs_have_one_name() -> None:
    one = TensorLayout(0, Side.K, 1, 32, DType.F16, "mlx4g32")
    two = TensorLayout(0, Side.K, 1, 32, DType.F16, "mlx_affine(4,32,f16)")
    assert one == two
    assert Layout((one,)).fidelity == Layout((two,)).fidelity != "raw"
    assert json.loads(Layout((one,)).to_json())[0][5] == one.codec


def test_types_are_told_apart_by_their_bits() -> None:
    assert DType.of(np.dtype(np.float16)) is DType.F16
    assert DType.of(np.dtype(ml_dtypes.bfloat16)) is DType.BF16
    assert DType.of(np.dtype(np.float32)) is DType.F32
    for dtype in (np.float64, np.int16, np.uint16, ">f2", ">f4", ml_dtypes.float8_e4m3fn):
        with pytest.raises(LayoutError):
            DType.of(np.dtype(dtype))
    assert [dtype.itemsize for dtype in (DType.F32, DType.F16, DType.BF16)] == [4, 2, 2]


@given(layouts)
def test_keys_follow_the_order_of_layouts(layout: Layout) -> None:
    keys = [tensor.key for tensor in layout.tensors]
    assert keys == sorted(set(keys))
