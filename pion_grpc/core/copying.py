"""Copies of stored rows for clients on this host, head by head and as binary16.

::

    u64 length of the header | JSON header, padded with spaces to a multiple of 8 | data
    tensors k.0, v.0, k.1, v.1, … of type F16 and shape [1, heads, rows, head_dim]

That is a safetensors file in the layout of a model's cache: what the wire carries row by row, and a
client would have to turn around itself. Rows in a lossy codec are decoded and rounded, since what they
are is an approximation already; lossless rows that binary16 cannot hold are refused.

The same question finds the same file as long as nothing has changed, and another one afterwards. Copies
count as bytes on disk and are the first to go.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.session_reading import SessionReading
from pion_grpc.core.sessions import Sessions
from pion_grpc.errors import InvalidRequest, LayoutDiffers, NotStored, RowsOutOfRange
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.copies import Copies
from pion_grpc.storage.files import Files
from pion_grpc.storage.pages import disk_errors
from pion_grpc.storage.transaction import Transaction

_HALF = np.dtype("<f2")


class CopyRequest(NamedTuple):
    """Rows of two sessions, and the shape they shall have."""

    k_sid: str
    v_sid: str
    begin: int
    end: int
    layers: int
    heads: int
    head_dim: int

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor."""
        return (self.end - self.begin) * self.heads * self.head_dim * _HALF.itemsize

    def header(self) -> bytes:
        """Returns everything before the data."""
        shape = [1, self.heads, self.end - self.begin, self.head_dim]
        table = {}
        for index in range(2 * self.layers):
            begin = index * self.tensor_bytes
            table[f"{'kv'[index % 2]}.{index // 2}"] = {
                "dtype": "F16",
                "shape": shape,
                "data_offsets": [begin, begin + self.tensor_bytes],
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


class Copier:
    """Makes copies, and finds those that are there; safe to use from many threads."""

    def __init__(self, store: PrefixStore, sessions: Sessions) -> None:
        self._sessions = sessions
        self._workshop = store.workshop

    def copy(self, tenant: str, request: CopyRequest) -> Path:
        """Returns the path of a copy.

        Raises:
            NotStored: there is no such session.
            LayoutDiffers: its rows have another width.
            RowsOutOfRange: not all of the rows are there.
            InvalidRequest: a value would have to be rounded.
            OverBudget, OverQuota, DiskFull: there is no room.
        """
        path = None
        while path is None:
            path = self._copy(tenant, request)
        return path

    def _copy(self, tenant: str, request: CopyRequest) -> Path | None:
        """Returns the path of a copy; None if one side was replaced before the other was open."""
        sids = request.k_sid, request.v_sid
        fingerprints = [self._fingerprint(tenant, sid) for sid in sids]
        question, made_of = _digest([tenant, *request]), _digest(fingerprints)
        with self._workshop.catalog.read() as transaction:
            known = Copies(transaction).find(tenant, question, made_of)
        if known is not None:
            with self._workshop.catalog.write() as transaction:
                path = self._used(transaction, tenant, (question, made_of))
            if path is not None:
                return path
        k = self._open(tenant, request.k_sid, request)
        try:
            readings = [k, self._open(tenant, request.v_sid, request)]
        except BaseException:
            k.close()
            raise
        with readings[0].guarded(), readings[1].guarded():
            versions = [fingerprint[:2] for fingerprint in fingerprints]
            if [reading.version for reading in readings] != versions:
                return None
            return self._make(tenant, request, (question, made_of), readings)

    def _used(self, transaction: Transaction, tenant: str, digests: tuple[str, str]) -> Path | None:
        """Returns the copy that is there, and notes that it is used now."""
        known = Copies(transaction).find(tenant, *digests)
        if known is None or not self._workshop.directory.resolve(known).exists():
            return None
        Copies(transaction).use(known)
        return self._workshop.directory.resolve(known)

    def _fingerprint(self, tenant: str, sid: str) -> tuple[int, ...]:
        found = self._sessions.fingerprint(tenant, sid)
        if found is None:
            raise NotStored(f"{sid!r} is not stored", namespace=sid)
        return found

    def _open(self, tenant: str, sid: str, request: CopyRequest) -> SessionReading:
        reading = self._sessions.open(tenant, sid, range(request.layers), halves=True)
        if reading is None or reading.layer_count < request.layers:
            if reading is not None:
                reading.close()
            raise RowsOutOfRange(f"{sid!r} does not have {request.layers} layers")
        try:
            for layer in range(request.layers):
                _check_layer(reading, sid, layer, request)
        except BaseException:
            reading.close()
            raise
        return reading

    def _make(
        self,
        tenant: str,
        request: CopyRequest,
        digests: tuple[str, str],
        readings: list[SessionReading],
    ) -> Path:
        workshop = self._workshop
        header = request.header()
        size = len(header) + 2 * request.layers * request.tensor_bytes
        with workshop.catalog.write() as transaction:
            reservation = workshop.space.reserve(transaction, tenant, size)
        workshop.space.sweep()
        name = f"export/{digests[0]}-{digests[1]}-{reservation}.safetensors"
        path = workshop.directory.resolve(name)
        # The name of the process comes first: what it leaves behind when it dies is found by it.
        scratch = path.with_name(f"{workshop.directory.instance}-{reservation}.tmp")
        try:
            with disk_errors(path):
                _write(workshop.files, scratch, header, request, readings)
                workshop.files.rename(scratch, path)
            with workshop.catalog.write() as transaction:
                Accounts(transaction).release(reservation)
                known = self._used(transaction, tenant, digests)
                if known is None:
                    Copies(transaction).add(name, tenant, *digests, size)
            if known is not None:  # somebody was quicker, and has been told of it
                workshop.files.unlink(path)
                return known
        except BaseException:
            workshop.files.unlink(scratch)
            workshop.files.unlink(path)
            workshop.space.end_reservation(reservation)
            raise
        workshop.space.sweep()
        return path


def _write(
    files: Files,
    scratch: Path,
    header: bytes,
    request: CopyRequest,
    readings: list[SessionReading],
) -> None:
    descriptor = files.create(scratch)
    try:
        files.write_at(descriptor, header, 0)
        offset = len(header)
        for layer in range(request.layers):
            for reading in readings:
                for data, place in _placed(request, reading, layer):
                    files.write_at(descriptor, data, offset + place)
                offset += request.tensor_bytes
    finally:
        os.close(descriptor)


def _placed(
    request: CopyRequest, reading: SessionReading, layer: int
) -> Iterator[tuple[memoryview, int]]:
    """Yields the bytes of one tensor, and where in it they go: each piece of rows in every head."""
    row_bytes = request.head_dim * _HALF.itemsize
    head_bytes = (request.end - request.begin) * row_bytes
    lossless = reading.stored_tensor(layer).codec == "raw"
    # Not the type of the values: what the codec `fp16` keeps of any is handed out as it is.
    (array,) = reading.tensor(layer).arrays
    row = 0
    for data in reading.rows(layer, request.begin, request.end):
        halves = _halves(data, array.numpy, must_be_exact=lossless)
        by_head = halves.reshape(-1, request.heads, request.head_dim).transpose(1, 0, 2)
        for head, rows in enumerate(by_head):
            piece = np.ascontiguousarray(rows).view(np.uint8).reshape(-1).data
            yield piece, head * head_bytes + row * row_bytes
        row += by_head.shape[1]


def _halves(data: memoryview, dtype: np.dtype[Any], *, must_be_exact: bool) -> NDArray[np.float16]:
    values = np.frombuffer(data, dtype)
    if dtype == _HALF:
        return values
    with np.errstate(all="ignore"):
        halves = values.astype(_HALF)
        if must_be_exact and not np.array_equal(halves.astype(np.float32), values, equal_nan=True):
            raise InvalidRequest("rows", "binary16 cannot hold them: fetch them instead")
    return halves


def _check_layer(reading: SessionReading, sid: str, layer: int, request: CopyRequest) -> None:
    if reading.row_count(layer) < request.end:
        raise RowsOutOfRange(
            f"layer {layer} of {sid!r} has {reading.row_count(layer)} rows",
            rows=reading.row_count(layer),
        )
    tensor = reading.stored_tensor(layer)
    width = tensor.heads * tensor.head_dim
    if width != request.heads * request.head_dim:
        raise LayoutDiffers(f"rows of layer {layer} of {sid!r} have {width} values", namespace=sid)


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
