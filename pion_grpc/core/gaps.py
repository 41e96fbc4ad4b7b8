"""Gaps: rows below the end of a tensor that nobody has written, or that were cut off.

They read as zeros and take no room until a segment holds them. Knows extents; reads no bytes.
"""

from collections.abc import Iterable

from pion_grpc.core.reading import segment_layout
from pion_grpc.storage.catalog import ExtentRow, PrefixRow
from pion_wire.layout import TensorLayout


def written_rows(
    prefix: PrefixRow, tensor: TensorLayout, extents: Iterable[ExtentRow], begin: int, end: int
) -> int:
    """Returns how many rows from `begin` to `end` of one tensor are no gap.

    Args:
        prefix: its own rows alone count, not those of its parents.
        tensor: which.
        extents: in the order of writing; those of other tensors, and outside the range, may be among
            them.
        begin: the first row.
        end: the row after the last one.
    """
    is_written = bytearray(end - begin)

    def mark(first: int, count: int, value: bytes) -> None:
        low, high = max(first, begin), min(first + count, end)
        if low < high:
            is_written[low - begin : high - begin] = value * (high - low)

    if prefix.file is not None:
        segment = segment_layout(prefix, "")
        in_file = dict(zip(segment.layout.tensors, segment.row_counts, strict=True))
        mark(prefix.base, in_file.get(tensor, 0), b"\1")
    for extent in extents:
        if extent.tensor == tensor.key:
            mark(extent.first_row, extent.row_count, b"\1" if extent.file else b"\0")
    return is_written.count(1)
