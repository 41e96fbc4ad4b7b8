"""The file of a sealed prefix: a safetensors file, header first, that says everything about itself.

::

    u64     length of the header, little-endian
    header  JSON, padded with spaces so that the data begins at a multiple of 8
    data    k.<slot>, v.<slot>     [rows, heads, head_dim]   in order of slots, K before V
            (codecs other than raw: their arrays, k.<slot>.codes, k.<slot>.scales, …)
            part.<i>               U8 [bytes]                in the order of `parts`
            token_ids              U32 [tokens]              all tokens, those of parents included
            crc32c                 U32 [pages]               of each 256 KiB of the data before it

Metadata (`__metadata__`, texts): `header_crc32c` (8 hex digits: the CRC-32C of the JSON, padding
included, with zeros in their place), `format` "pion-segment/1", `model_id`, `layout` (JSON), `base`
(rows that belong to the parent; the tensors hold the rows after them), `parent` (its namespace),
`parts` (JSON), `namespace` (the name it was stored under; empty if it had none). There is no unused
byte between or after tensors, because safetensors refuses those.

The one decision: a header has one form. Its text follows from what it says, so a reader writes it
again and compares: offsets that lie, numbers in another spelling and, thanks to the checksum, a changed
bit in a model id or in the description of a part are all the same refusal.

Knows bytes only; the server writes and reads them through its storage layer, the client exports and
imports the same format.
"""

import functools
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from pion_wire import limits
from pion_wire.layout import Layout, PartInfo, shape_bytes

FORMAT = "pion-segment/1"
HEADER_BYTES_MAX = 8 << 20
_NO_CHECKSUM = "00000000"
_CHECKSUM_BEGIN = len('{"__metadata__":{"header_crc32c":"')
_CHECKSUM_END = _CHECKSUM_BEGIN + len(_NO_CHECKSUM)


class SegmentError(ValueError):
    """The bytes are not a segment, or not one of a version that can be read."""


class ArrayEntry(NamedTuple):
    """One array of a segment: where it lies, counted from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class SegmentLayout:
    """Where everything in a segment lies; derived once from what is declared before the first row."""

    layout: Layout
    row_counts: tuple[int, ...]
    """Rows of each tensor of the layout in this file."""
    token_count: int
    """Token ids in this file: those of all rows of the chain; 0 if there are none."""
    model_id: str
    base: int = 0
    parent: str = ""
    parts: tuple[PartInfo, ...] = ()
    namespace: str = ""
    """The name it was stored under; empty if the file does not say."""

    @functools.cached_property
    def arrays(self) -> dict[str, ArrayEntry]:
        """The arrays by name, in file order; the checksums come last."""
        return {entry.name: entry for entry in self._entries()}

    @property
    def data_offset(self) -> int:
        """Where the data begins in the file."""
        return len(self.header)

    @property
    def paged_bytes(self) -> int:
        """Bytes of data that the page checksums cover."""
        return self.arrays["crc32c"].begin

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_offset + self.arrays["crc32c"].end

    def _entries(self) -> Iterator[ArrayEntry]:
        position = 0

        def entry(name: str, dtype: str, shape: tuple[int, ...]) -> ArrayEntry:
            nonlocal position
            begin, position = position, position + shape_bytes(dtype, shape)
            return ArrayEntry(name, dtype, shape, begin, position)

        for tensor, rows in zip(self.layout.tensors, self.row_counts, strict=True):
            for array in tensor.arrays:
                yield entry(tensor.name + array.suffix, array.dtype, (rows, *array.row_shape))
        for index, part in enumerate(self.parts):
            yield entry(f"part.{index}", "U8", (part.size_bytes,))
        yield entry("token_ids", "U32", (self.token_count,))
        yield entry("crc32c", "U32", (page_count(position),))

    @functools.cached_property
    def header(self) -> bytes:
        """Everything before the data."""
        metadata = {
            "header_crc32c": _NO_CHECKSUM,  # first, so that it has a fixed place
            "format": FORMAT,
            "model_id": self.model_id,
            "layout": self.layout.to_json(),
            "base": str(self.base),
            "parent": self.parent,
            "parts": json.dumps([list(part) for part in self.parts]),
            "namespace": self.namespace,
        }
        table: dict[str, object] = {"__metadata__": metadata}
        for entry in self.arrays.values():
            table[entry.name] = {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "data_offsets": [entry.begin, entry.end],
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        checksum = f"{crc32c(text):08x}".encode()
        text = text[:_CHECKSUM_BEGIN] + checksum + text[_CHECKSUM_END:]
        return struct.pack("<Q", len(text)) + text


def page_count(data_bytes: int) -> int:
    """Returns the number of checksums that `data_bytes` of data have."""
    return -(-data_bytes // limits.PAGE_BYTES)


def header_length(first_bytes: bytes) -> int:
    """Returns the length of the JSON from the first 8 bytes of a file.

    Raises:
        SegmentError: too short, or an absurd length.
    """
    if len(first_bytes) < 8:
        raise SegmentError("shorter than a safetensors header")
    (length,) = struct.unpack("<Q", first_bytes[:8])
    if not 2 <= length <= HEADER_BYTES_MAX:
        raise SegmentError(f"a header of {length} bytes is absurd")
    return int(length)


def check_header(text: bytes) -> None:
    """Looks whether the JSON of a header has changed, whatever it says.

    Raises:
        SegmentError: it has.
    """
    told = text[_CHECKSUM_BEGIN:_CHECKSUM_END]
    blank = text[:_CHECKSUM_BEGIN] + _NO_CHECKSUM.encode() + text[_CHECKSUM_END:]
    if told != f"{crc32c(blank):08x}".encode():
        raise SegmentError("the header is not what was written: it has changed")


def parse_header(text: bytes) -> SegmentLayout:
    """Takes the JSON of a header apart, and checks it against what it describes.

    Raises:
        SegmentError: not a segment, another version, offsets that contradict its layout, or bytes
            that have changed since it was written.
    """
    try:
        table = json.loads(text)
        metadata = table.pop("__metadata__")
        form = metadata["format"]
        if form != FORMAT:
            raise SegmentError(f"format {form!r} is not {FORMAT!r}: another release wrote it")
        arrays = {
            name: ArrayEntry(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in table.items()
        }
        segment = _segment(metadata, arrays)
        expected = segment.arrays
        canonical = segment.header[8:]
    except SegmentError:
        raise
    except KeyError as error:
        raise SegmentError(f"not a segment: it has no {error}") from error
    except (ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise SegmentError(f"not a segment: {error}") from error
    if arrays != expected:
        raise SegmentError("the offsets of the arrays contradict the layout")
    if canonical != text:
        raise SegmentError("the header is not what was written: it has changed")
    return segment


def _segment(metadata: dict[str, Any], arrays: dict[str, ArrayEntry]) -> SegmentLayout:
    layout = Layout.from_json(metadata["layout"])
    for tensor in layout.tensors:
        for number in (tensor.slot, tensor.heads, tensor.head_dim):
            _number(number, limits.ROW_BYTES_MAX)
    first_arrays = [arrays[tensor.name + tensor.arrays[0].suffix] for tensor in layout.tensors]
    return SegmentLayout(
        layout=layout,
        row_counts=tuple(_number(array.shape[0], limits.TOKENS_MAX) for array in first_arrays),
        token_count=_number(arrays["token_ids"].shape[0], limits.TOKENS_MAX),
        model_id=_text(metadata["model_id"]),
        base=_number(int(metadata["base"]), limits.TOKENS_MAX),
        parent=_text(metadata["parent"]),
        parts=tuple(_part(*part) for part in json.loads(metadata["parts"])),
        namespace=_text(metadata["namespace"]),
    )


def _part(kind: Any, slot: Any, boundary: Any, size: Any, description: Any) -> PartInfo:
    return PartInfo(
        _text(kind),
        _number(slot, limits.SLOTS_MAX),
        _number(boundary, limits.TOKENS_MAX),
        _number(size, limits.PART_BYTES_MAX),
        _text(description),
    )


def _number(value: Any, most: int) -> int:
    """Refuses what would make offsets run backwards, or sizes absurd."""
    if type(value) is not int or not 0 <= value <= most:
        raise SegmentError(f"{value!r} is not a number from 0 to {most}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise SegmentError(f"{value!r} is not a text")
    return value


class PageChecksums:
    """Computes the checksum of every page as bytes arrive."""

    __slots__ = ("_checksum", "_filled", "_finished")

    def __init__(self) -> None:
        self._finished: list[int] = []
        self._checksum = 0
        self._filled = 0

    def update(self, data: bytes | memoryview) -> None:
        """Takes the next bytes of the data."""
        view = memoryview(data)
        while len(view):
            piece = view[: limits.PAGE_BYTES - self._filled]
            self._checksum = crc32c(piece, self._checksum)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == limits.PAGE_BYTES:
                self._close_page()

    def finish(self) -> bytes:
        """Returns the checksums of all pages, u32 LE; a short last page has one too."""
        if self._filled:
            self._close_page()
        return np.array(self._finished, dtype="<u4").tobytes()

    def _close_page(self) -> None:
        self._finished.append(self._checksum)
        self._checksum = self._filled = 0
