"""Gaps: rows below the end of a tensor that nobody has written, or that were cut off.

They read as zeros and take no room until a segment holds them. Knows extents; reads no bytes.
"""

from collections.abc import Iterable

from pion_grpc.core.reading import segment_layout
from pion_grpc.storage.extents import ExtentRow
from pion_grpc.storage.transaction import PrefixRow
from pion_wire.layout import TensorLayout


def written_rows(
    prefix: PrefixRow, tensor: TensorLayout, extents: Iterable[ExtentRow], begin: int, end: int
) -> int:
    """Returns how many rows from `begin` to `end` of one tensor are no gap.

    Args:
        prefix: its own rows alone count, not those of its parents.
        tensor: which.
        extents: the latest first, as many of them as it takes; those of other tensors, and outside the
            range, may be among them.
        begin: the first row.
        end: the row after the last one.
    """
    rows = bytearray([_UNKNOWN]) * (end - begin)
    for extent in extents:
        if _UNKNOWN not in rows:
            break
        if extent.tensor == tensor.key:
            first = extent.first_row - begin
            _decide(rows, first, first + extent.row_count, _WRITTEN if extent.file else _GAP)
    if prefix.file is not None:
        segment = segment_layout(prefix, "")
        in_file = dict(zip(segment.layout.tensors, segment.row_counts, strict=True))
        first = prefix.base - begin
        _decide(rows, first, first + in_file.get(tensor, 0), _WRITTEN)
    return rows.count(_WRITTEN)


_UNKNOWN, _WRITTEN, _GAP = range(3)


def _decide(rows: bytearray, begin: int, end: int, value: int) -> None:
    """Says of those rows of a range of which nothing is known what they are."""
    begin, end = max(begin, 0), min(end, len(rows))
    if begin < end:
        rows[begin:end] = rows[begin:end].translate(bytes([value, _WRITTEN, _GAP]).ljust(256))
