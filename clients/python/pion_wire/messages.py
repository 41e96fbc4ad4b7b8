"""Layouts and parts as protobuf messages, both ways; shared by the server's rpc layer and the client.

A message is checked while it is turned into a value, so what comes out can be trusted.
"""

import functools

from pion_wire import limits
from pion_wire.layout import DType, Layout, LayoutError, PartInfo, Side, TensorLayout, tensor_layout
from pion_wire.v1 import types_pb2

_DTYPES: dict[int, DType] = {
    types_pb2.DATA_TYPE_F32: DType.F32,
    types_pb2.DATA_TYPE_F16: DType.F16,
    types_pb2.DATA_TYPE_BF16: DType.BF16,
}
_DTYPE_VALUES = {
    DType.F32: types_pb2.DATA_TYPE_F32,
    DType.F16: types_pb2.DATA_TYPE_F16,
    DType.BF16: types_pb2.DATA_TYPE_BF16,
}
_SIDES: dict[int, Side] = {types_pb2.SIDE_K: Side.K, types_pb2.SIDE_V: Side.V}
SIDE_VALUES = {Side.K: types_pb2.SIDE_K, Side.V: types_pb2.SIDE_V}


def layout_from_message(message: types_pb2.Layout) -> Layout:
    """Returns the checked layout.

    Raises:
        LayoutError: with the field at fault.
    """
    if len(message.tensors) > limits.TENSORS_MAX:
        raise LayoutError("tensors", f"more than {limits.TENSORS_MAX} tensors")
    return Layout(tuple(_tensor(index, tensor) for index, tensor in enumerate(message.tensors)))


def layout_to_message(layout: Layout) -> types_pb2.Layout:
    """Returns the message of a layout."""
    return types_pb2.Layout.FromString(_serialized(layout))


@functools.lru_cache(maxsize=128)
def _serialized(layout: Layout) -> bytes:
    """Every answer about a prefix has its layout, and the same few come again and again."""
    tensors = [tensor_to_message(tensor) for tensor in layout.tensors]
    return types_pb2.Layout(tensors=tensors).SerializeToString()


def tensor_to_message(tensor: TensorLayout) -> types_pb2.TensorLayout:
    """Returns the message of one tensor's layout."""
    return types_pb2.TensorLayout(
        slot=tensor.slot,
        side=SIDE_VALUES[tensor.side],
        heads=tensor.heads,
        head_dim=tensor.head_dim,
        data_type=_DTYPE_VALUES[tensor.dtype],
        codec=tensor.codec,
    )


def side_from_value(value: int) -> Side:
    """Returns the side.

    Raises:
        LayoutError: not given, or unknown.
    """
    if value not in _SIDES:
        raise LayoutError("side", f"{value} is neither K nor V")
    return _SIDES[value]


def part_to_message(part: PartInfo) -> types_pb2.PartInfo:
    """Returns the message of a part's description."""
    return types_pb2.PartInfo(**part._asdict())


def part_from_message(message: types_pb2.PartInfo) -> PartInfo:
    """Returns the description of a part; its limits are the server's to check."""
    return PartInfo(
        message.kind,
        message.slot,
        message.boundary_tokens,
        message.size_bytes,
        message.description,
    )


def _tensor(index: int, message: types_pb2.TensorLayout) -> TensorLayout:
    try:
        if message.data_type not in _DTYPES:
            raise LayoutError("data_type", f"{message.data_type} is not a data type")
        return tensor_layout(
            message.slot,
            side_from_value(message.side),
            message.heads,
            message.head_dim,
            _DTYPES[message.data_type],
            message.codec or "raw",
        )
    except LayoutError as error:
        raise LayoutError(f"tensors[{index}].{error.field}", error.message) from error
