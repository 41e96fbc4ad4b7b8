"""Storing: a prefix from its header to its publication, and rows written into a live one.

Three plain steps. *Plan* checks everything and reserves the bytes in one transaction. *Write* takes the
rows in order, each chunk against its checksum, straight into the file. *Publish* names the file in one
transaction: before it nobody sees anything, after it everybody sees all. Whatever ends in between leaves
bytes that nothing names, which are removed at once, or by the next process that finds its owner gone.
"""

import bisect
import contextlib
import dataclasses
import json
import threading
from collections.abc import Sequence
from typing import NamedTuple

from crc32c import crc32c

from pion_grpc.core.declaration import Declaration
from pion_grpc.core.matching import nodes
from pion_grpc.core.reading import CorruptPrefix, own_row_counts
from pion_grpc.core.recovery import Recovery
from pion_grpc.core.space import Space, keep_tokens
from pion_grpc.core.values import (
    BlockTable,
    Durability,
    RowsWritten,
    Stored,
    StoreHeader,
    WriteRowsHeader,
)
from pion_grpc.errors import (
    ChecksumMismatch,
    Conflict,
    Evicted,
    InvalidRequest,
    LayoutDiffers,
    NotStored,
    OtherContent,
)
from pion_grpc.storage.catalog import (
    BlockTableRow,
    Catalog,
    ExtentRow,
    NewPrefix,
    PrefixRow,
    Transaction,
)
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.files import Files
from pion_grpc.storage.pages import OpenFile, RowFile, SegmentWriter
from pion_grpc.storage.sides import Sides
from pion_wire import limits
from pion_wire.blocks import BLOCK_TOKENS, common_tokens, derived_namespace, root_hash
from pion_wire.framing import PartChunk, RowChunk
from pion_wire.layout import Layout, PartInfo, Side, TensorLayout
from pion_wire.segment import HEADER_BYTES_MAX, SegmentLayout


class Workshop(NamedTuple):
    """What storing needs of the store around it."""

    directory: DataDirectory
    catalog: Catalog
    files: Files
    space: Space
    row_files: "RowFileNames"
    recovery: Recovery
    boot: str


class _Expected(NamedTuple):
    """An array of which rows will come."""

    tensor_index: int
    array_index: int
    row_bytes: int
    first_row: int
    end_row: int


class RowOrder:
    """Holds arriving chunks against what was declared: by tensor, array and row, nothing left out."""

    def __init__(self, layout: Layout, first_row: int, end_row: int) -> None:
        self._arrays = [
            _Expected(tensor_index, array_index, array.row_bytes, first_row, end_row)
            for tensor_index, tensor in enumerate(layout.tensors)
            for array_index, array in enumerate(tensor.arrays)
            if array.row_bytes and end_row > first_row
        ]
        self._current = 0
        self._row = first_row

    @property
    def complete(self) -> bool:
        """Whether every declared row has come."""
        return self._current == len(self._arrays)

    def accept(self, chunk: RowChunk) -> None:
        """Checks the next chunk.

        Raises:
            InvalidRequest: it is not the next one, or has another size than its rows.
            ChecksumMismatch: its data is not what was sent.
        """
        if self.complete:
            raise InvalidRequest("rows", "more rows than were declared")
        array = self._arrays[self._current]
        got = chunk.tensor_index, chunk.array_index, chunk.first_row
        want = array.tensor_index, array.array_index, self._row
        if got != want:
            raise InvalidRequest(
                "rows",
                f"chunk of tensor, array, row {got} came out of order: {want} was to be next",
            )
        if not 1 <= chunk.row_count <= array.end_row - self._row:
            raise InvalidRequest(
                "rows.row_count",
                f"{chunk.row_count} rows from {self._row} on end behind {array.end_row}",
            )
        _check_data("rows", chunk.data, chunk.row_count * array.row_bytes, chunk.crc32c)
        self._row += chunk.row_count
        if self._row == array.end_row:
            self._current += 1
            self._row = array.first_row


class PartOrder:
    """Holds arriving bytes of parts against what was declared."""

    def __init__(self, parts: tuple[PartInfo, ...]) -> None:
        self._parts = parts
        self._current = 0
        self._offset = 0
        self._skip_empty()

    @property
    def complete(self) -> bool:
        """Whether every declared byte has come."""
        return self._current == len(self._parts)

    def accept(self, chunk: PartChunk) -> None:
        """Checks the next chunk; raises as `RowOrder.accept` does."""
        if self.complete:
            raise InvalidRequest("part", "more bytes than were declared")
        if (chunk.part_index, chunk.offset_bytes) != (self._current, self._offset):
            raise InvalidRequest(
                "part",
                f"byte {chunk.offset_bytes} of part {chunk.part_index} came out of order: byte "
                f"{self._offset} of part {self._current} was to be next",
            )
        left = self._parts[self._current].size_bytes - self._offset
        if not 1 <= len(chunk.data) <= left:
            raise InvalidRequest("part.data", f"{len(chunk.data)} bytes where {left} are left")
        _check_data("part", chunk.data, len(chunk.data), chunk.crc32c)
        self._offset += len(chunk.data)
        if self._offset == self._parts[self._current].size_bytes:
            self._current += 1
            self._offset = 0
            self._skip_empty()

    def _skip_empty(self) -> None:
        while not self.complete and not self._parts[self._current].size_bytes:
            self._current += 1


class StoreSession:
    """One Store in progress. Publish or abandon it."""

    def __init__(
        self,
        workshop: Workshop,
        tenant: str,
        header: StoreHeader,
        prefix: int,
        name: str,
        segment: SegmentLayout,
    ) -> None:
        self._workshop = workshop
        self._tenant = tenant
        self._header = header
        self._prefix = prefix
        self._segment = segment
        self._file = name
        self._rows = RowOrder(segment.layout, segment.base, header.token_count)
        self._parts = PartOrder(segment.parts)
        self._ended = False
        try:
            self._writer = SegmentWriter(workshop.files, workshop.directory.resolve(name), segment)
        except BaseException:
            workshop.space.end_store(prefix)
            raise

    def write(self, chunk: RowChunk | PartChunk) -> None:
        """Takes the next chunk.

        Raises:
            InvalidRequest, ChecksumMismatch: it is not the next one, or damaged.
            DiskFull: it cannot be written.
        """
        if isinstance(chunk, RowChunk):
            self._rows.accept(chunk)
        elif self._rows.complete:
            self._parts.accept(chunk)
        else:
            raise InvalidRequest("part", "parts come after all rows")
        self._writer.write(chunk.data)

    def publish(self) -> Stored:
        """Makes the prefix visible, as a whole.

        Raises:
            InvalidRequest: rows or parts are missing.
            Conflict, OtherContent: another Store of the name was quicker, with other content.
            Evicted: its parent was found damaged meanwhile.
            DiskFull: it cannot be written.
        """
        if not (self._rows.complete and self._parts.complete):
            raise InvalidRequest("rows", "the stream ended before all declared rows and parts came")
        header, workshop = self._header, self._workshop
        on_disk = header.durability is Durability.DISK
        self._writer.write(header.token_ids)
        self._writer.finish(on_disk=on_disk)
        if on_disk:
            self._sync_parents()
        try:
            with workshop.catalog.write(on_disk=on_disk) as transaction:
                stored = self._publish(transaction, on_disk=on_disk)
        except BaseException:
            self.abandon()
            raise
        self._ended = True
        if stored.already_stored:
            workshop.files.unlink(workshop.directory.resolve(self._file))
            stored = durable(workshop, self._tenant, stored, header.durability)
        workshop.space.sweep()
        return stored

    def abandon(self) -> None:
        """Removes what was written; nobody ever saw it. Harmless after the end, and if called twice."""
        if self._ended:
            return
        self._ended = True
        self._writer.abandon()
        self._workshop.files.unlink(self._workshop.directory.resolve(self._file))
        self._workshop.space.end_store(self._prefix)

    def _publish(self, transaction: Transaction, *, on_disk: bool) -> Stored:
        header, space = self._header, self._workshop.space
        row = transaction.by_id(self._prefix)
        if row is None:
            raise Evicted(
                f"the parent of {header.namespace!r} was found damaged meanwhile; store it whole",
                namespace=header.namespace,
            )
        table = header.table
        existing = transaction.by_name(row.tenant, row.namespace)
        if existing is not None:
            if existing.state == "registered":
                if not header.replace:
                    _check_registered(existing, header)
                table = table or _table(transaction, existing.id)
            elif not header.replace:
                stored = compare(transaction, existing, header, concurrent=True)
                transaction.delete(row.id)
                space.collect(transaction, row.parent)
                return stored
            space.remove(transaction, existing)
        parent = transaction.by_id(row.parent) if row.parent is not None else None
        transaction.update(
            row.id,
            state="sealed",
            visible=1,
            owner=None,
            file=self._file,
            file_tokens=header.token_count,
            disk_bytes=self._writer.file_bytes,
            boot=None if on_disk else self._workshop.boot,
        )
        generation = transaction.new_generation(row.id)
        transaction.stamp([(row.id, "")])
        transaction.set_token_ids(row.id, header.token_ids)
        entries = nodes(row.tenant, row.model_id, row.fidelity, header.token_ids)
        # The blocks before the base are in the index through the parent, as long as it is there too.
        found = transaction.token_ids(parent.id) if parent is not None and parent.visible else b""
        shared = row.base // BLOCK_TOKENS if len(found) >= 4 * row.base else 0
        transaction.add_nodes(row.id, entries[shared:])
        if table is not None:
            transaction.set_block_table(row.id, BlockTableRow(table.block_tokens, table.hashes))
        return Stored(
            row.namespace,
            already_stored=False,
            generation=generation,
            token_count=header.token_count,
            stored_bytes=self._writer.file_bytes,
            durability=header.durability,
            base=row.base,
        )

    def _sync_parents(self) -> None:
        with self._workshop.catalog.read() as transaction:
            row = transaction.by_id(self._prefix)
            parents = transaction.chain(row)[:-1] if row is not None else []
        unsynced = [parent for parent in parents if parent.boot is not None]
        sync_prefixes(self._workshop, unsynced)


def begin_store(workshop: Workshop, tenant: str, header: StoreHeader) -> StoreSession | Stored:
    """Plans a Store: checks it against what is there, and reserves its bytes.

    Returns a session that takes the rows, or the acknowledgement if the same is stored already.

    Raises:
        LayoutDiffers, OtherContent: the name holds something else.
        NotStored: the parent is not stored.
        InvalidRequest: the parent's tokens, or its depth, do not fit.
        OverBudget, OverQuota, DiskFull: there is no room.
    """
    fidelity = header.layout.fidelity
    if not header.namespace:
        root = root_hash(tenant, header.model_id, fidelity)
        name = derived_namespace(root, header.token_ids)
        header = dataclasses.replace(header, namespace=name)
    for name in filter(None, (header.namespace, header.parent)):
        workshop.recovery.make_sound(tenant, name)
    with workshop.catalog.read() as transaction:
        existing = transaction.by_name(tenant, header.namespace)
        known = None
        if existing is not None and existing.state != "registered" and not header.replace:
            known = compare(transaction, existing, header, concurrent=False)
    if known is not None:
        return durable(workshop, tenant, known, header.durability)
    with workshop.catalog.write() as transaction:
        existing = transaction.by_name(tenant, header.namespace)
        if existing is not None and existing.state == "registered" and not header.replace:
            _check_registered(existing, header)
        parent, base = _parent(transaction, tenant, header)
        segment = SegmentLayout(
            layout=header.layout,
            row_counts=(header.token_count - base,) * len(header.layout.tensors),
            token_count=header.token_count,
            model_id=header.model_id,
            base=base,
            parent=parent.namespace if parent else "",
            parts=header.parts,
        )
        *_, last = segment.entries()
        head = segment.header()
        if len(head) > HEADER_BYTES_MAX:
            raise InvalidRequest("parts", f"their descriptions exceed {HEADER_BYTES_MAX} bytes")
        size = len(head) + last.end
        prefix = transaction.insert(
            NewPrefix(
                tenant=tenant,
                namespace=header.namespace,
                state="open",
                visible=False,
                owner=workshop.directory.instance,
                model_id=header.model_id,
                fidelity=fidelity,
                layout=header.layout.to_json(),
                token_count=header.token_count,
                base=base,
                parent=parent.id if parent else None,
                depth=parent.depth + 1 if parent else 0,
                parts=json.dumps([list(part) for part in header.parts]),
                disk_bytes=size,
                durability=header.durability.value,
            )
        )
        workshop.space.make_room(transaction, tenant, size)
    workshop.space.sweep()
    name = f"segments/{workshop.directory.instance}-{prefix}.safetensors"
    return StoreSession(workshop, tenant, header, prefix, name, segment)


def durable(workshop: Workshop, tenant: str, stored: Stored, wanted: Durability) -> Stored:
    """Brings what was there already to stable storage, if the request asks for that."""
    if wanted is not Durability.DISK or stored.durability is Durability.DISK:
        return stored
    with workshop.catalog.read() as transaction:
        row = transaction.by_name(tenant, stored.namespace)
        chain = transaction.chain(row) if row is not None else []
    sync_prefixes(workshop, [row for row in chain if row.boot is not None])
    return dataclasses.replace(stored, durability=Durability.DISK)


def compare(
    transaction: Transaction, existing: PrefixRow, header: StoreHeader, *, concurrent: bool
) -> Stored:
    """Returns the acknowledgement if `existing` is what `header` would store.

    Raises:
        Conflict: it is not, and was published while this Store was under way.
        OtherContent, LayoutDiffers: it is not.
    """
    name = header.namespace
    stored_ids = transaction.token_ids(existing.id)
    if existing.model_id != header.model_id:
        problem: OtherContent | LayoutDiffers = OtherContent(
            f"{name!r} was computed by another model; use another name, or replace", namespace=name
        )
    elif stored_ids != header.token_ids:
        difference = common_tokens(stored_ids, header.token_ids)
        problem = OtherContent(
            f"{name!r} holds other tokens, from index {difference} on; use another name, or replace",
            namespace=name,
            first_difference=difference,
        )
    elif existing.layout != header.layout.to_json():
        problem = LayoutDiffers(
            f"{name!r} has another layout; use another name, or replace", namespace=name
        )
    else:
        return Stored(
            existing.namespace,
            already_stored=True,
            generation=existing.generation,
            token_count=existing.token_count,
            stored_bytes=0,
            durability=Durability.DISK if existing.boot is None else Durability.PROCESS,
            base=existing.base,
        )
    if concurrent:
        raise Conflict(f"{name!r} was stored meanwhile with other content", namespace=name)
    raise problem


def _check_registered(existing: PrefixRow, header: StoreHeader) -> None:
    name = existing.namespace
    if existing.layout != header.layout.to_json():
        raise LayoutDiffers(f"{name!r} was registered with another layout", namespace=name)
    if existing.model_id not in ("", header.model_id):
        raise OtherContent(f"{name!r} was registered for another model", namespace=name)


def _parent(
    transaction: Transaction, tenant: str, header: StoreHeader
) -> tuple[PrefixRow | None, int]:
    """Returns the prefix whose first rows are this one's, and how many."""
    if not header.parent:
        return None, 0
    parent = transaction.by_name(tenant, header.parent)
    if parent is None or parent.state != "sealed":
        raise NotStored(f"the parent {header.parent!r} is not stored", namespace=header.parent)
    if parent.model_id != header.model_id:
        raise OtherContent(
            f"the parent {header.parent!r} was computed by another model", namespace=header.parent
        )
    if parent.layout != header.layout.to_json():
        raise LayoutDiffers(
            f"the parent {header.parent!r} has another layout", namespace=header.parent
        )
    if header.base > parent.token_count:
        raise InvalidRequest(
            "base", f"{header.base} exceeds the parent's {parent.token_count} rows"
        )
    agreeing = common_tokens(transaction.token_ids(parent.id), header.token_ids)
    if agreeing < header.base:
        raise InvalidRequest(
            "token_ids",
            f"token {agreeing} is another than the parent's: base can be at most {agreeing}",
        )
    # Rows below the parent's own base are its parent's: extending that keeps every base of a chain
    # above the one before it.
    ancestor: PrefixRow | None = parent
    while ancestor is not None and header.base <= ancestor.base and ancestor.parent is not None:
        ancestor = transaction.by_id(ancestor.parent)
    assert ancestor is not None, "a parent outlives its children"
    if ancestor.depth + 1 >= limits.CHAIN_DEPTH_MAX:
        raise InvalidRequest(
            "parent_namespace",
            f"the chain would be deeper than {limits.CHAIN_DEPTH_MAX}: store this prefix whole",
            limit=limits.CHAIN_DEPTH_MAX,
        )
    return ancestor, header.base


def _table(transaction: Transaction, prefix: int) -> BlockTable | None:
    row = transaction.block_table(prefix)
    return BlockTable(row.block_tokens, bytes(row.hashes)) if row else None


def sync_prefixes(workshop: Workshop, prefixes: list[PrefixRow]) -> None:
    """Brings the files of prefixes to stable storage, and records it.

    The commit at the end also syncs every earlier one, whatever it was of. A prefix that changes
    meanwhile keeps its mark: what it has got since may not be on stable storage.
    """
    for prefix in prefixes:
        if workshop.recovery.is_due(prefix):
            _recover(workshop, prefix)
            continue
        with workshop.catalog.read() as transaction:
            names = transaction.extent_files(prefix.id)
        sync_files(workshop, [*names, prefix.file or ""])
    workshop.files.sync_directory(workshop.directory.segments)
    workshop.files.sync_directory(workshop.directory.rows)
    with workshop.catalog.write(on_disk=True) as transaction:
        for prefix in prefixes:
            if workshop.recovery.is_due(prefix):
                continue
            now = transaction.by_id(prefix.id)
            unchanged = (prefix.generation, prefix.row_counts, prefix.state)
            if now is not None and (now.generation, now.row_counts, now.state) == unchanged:
                transaction.mark_synced(prefix.id)


def _recover(workshop: Workshop, prefix: PrefixRow) -> None:
    """Checks what was written under another boot: syncing what is lost would bring nothing back."""
    with workshop.catalog.read() as transaction:
        row = transaction.by_id(prefix.id)
        chain = transaction.chain(row) if row is not None else []
    try:
        workshop.recovery.check(chain)
    except CorruptPrefix as error:
        workshop.space.take_out(error)


def sync_files(workshop: Workshop, names: list[str]) -> None:
    """Brings files to stable storage; one that is gone belongs to a prefix that went meanwhile."""
    for name in filter(None, names):
        with contextlib.suppress(FileNotFoundError):
            file = OpenFile(workshop.directory.resolve(name))
            try:
                workshop.files.sync(file.descriptor)
            finally:
                file.close()


class RowFileNames:
    """Which row files are being written: each has one writer at a time."""

    def __init__(self, instance: str) -> None:
        self._prefix = f"rows/{instance}-"
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def take(self, known: list[str], reservation: int) -> str:
        """Returns a file of this process among the `known` ones that nobody writes, or a new name."""
        with self._lock:
            free = (f for f in known if f.startswith(self._prefix) and f not in self._busy)
            name = next(free, f"{self._prefix}{reservation}.rows")
            self._busy.add(name)
            return name

    def give_back(self, name: str) -> None:
        """Lets the next writer have it."""
        with self._lock:
            self._busy.discard(name)


class RowsSession:
    """Rows being written into one tensor of a live prefix. Publish or abandon it."""

    def __init__(
        self,
        workshop: Workshop,
        header: WriteRowsHeader,
        prefix: int,
        tensor: TensorLayout,
        reservation: int,
        file: str,
    ) -> None:
        self.tensor = tensor
        """How the rows are stored."""
        self._workshop = workshop
        self._header = header
        self._prefix = prefix
        self._reservation = reservation
        self._ended = False
        end = header.first_row + header.row_count
        self._order = RowOrder(Layout((tensor,)), header.first_row, end)
        self._bytes = header.row_count * tensor.row_bytes
        self._came_whole = False
        self._name = file
        try:
            self._file = RowFile(workshop.files, workshop.directory.resolve(file))
        except BaseException:
            workshop.row_files.give_back(file)
            workshop.space.end_reservation(reservation, prefix)
            raise

    def write(self, chunk: RowChunk) -> None:
        """Takes the next chunk; raises as `StoreSession.write` does."""
        self._order.accept(chunk)
        self._file.write(chunk.data)

    def write_arrays(self, arrays: Sequence[memoryview]) -> None:
        """Takes all rows at once, as the bytes of the tensor's arrays.

        Raises:
            DiskFull: they cannot be written.
        """
        sizes = [self._header.row_count * array.row_bytes for array in self.tensor.arrays]
        assert [len(array) for array in arrays] == sizes, "rows of another tensor"
        for array in arrays:
            self._file.write(array)
        self._came_whole = True

    def publish(self) -> RowsWritten:
        """Makes the rows visible, all of them at once.

        Raises:
            InvalidRequest: rows are missing.
            NotStored, LayoutDiffers: the prefix was dropped meanwhile, or declared anew.
            DiskFull: they cannot be written.
        """
        if not (self._came_whole or self._order.complete):
            raise InvalidRequest("rows", "the stream ended before all declared rows came")
        header, on_disk = self._header, self._header.durability is Durability.DISK
        workshop = self._workshop
        checksums = self._file.finish(on_disk=on_disk)
        if on_disk:
            self._sync_rest()
        extent = ExtentRow(
            self.tensor.key,
            0,
            header.first_row,
            header.row_count,
            self._name,
            self._file.offset,
            checksums,
            None if on_disk else workshop.boot,
        )
        try:
            with workshop.catalog.write(on_disk=on_disk) as transaction:
                written = self._publish(transaction, extent, on_disk=on_disk)
        except BaseException:
            self.abandon()
            raise
        self._ended = True
        self._file.close()
        workshop.row_files.give_back(self._name)
        return written

    def abandon(self) -> None:
        """Removes what was written and ends the reservation. Harmless after the end, and twice."""
        if self._ended:
            return
        self._ended = True
        self._file.discard()
        self._workshop.row_files.give_back(self._name)
        self._workshop.space.end_reservation(self._reservation, self._prefix)

    def _sync_rest(self) -> None:
        """Syncs what these rows are served with: those written before, and the parents'."""
        with self._workshop.catalog.read() as transaction:
            row = transaction.by_id(self._prefix)
            chain = transaction.chain(row) if row is not None else []
        unsynced = [prefix for prefix in chain if prefix.boot is not None]
        if unsynced:
            sync_prefixes(self._workshop, unsynced)

    def _publish(
        self, transaction: Transaction, extent: ExtentRow, *, on_disk: bool
    ) -> RowsWritten:
        row = transaction.by_id(self._prefix)
        if row is None or not row.visible:
            raise NotStored(
                f"{self._header.namespace!r} was dropped meanwhile",
                namespace=self._header.namespace,
            )
        if on_disk:  # usually nothing: they were synced before this transaction began
            sync_files(self._workshop, transaction.unsynced_files(row.id))
        transaction.release(self._reservation)
        index, layout, counts = with_tensor(transaction, row, self.tensor)
        end = extent.first_row + extent.row_count
        had = row.base + counts[index]
        counts[index] = max(had, end) - row.base
        overwrites = extent.first_row < had
        if overwrites:
            check_not_shared(transaction, row, extent.first_row)
        kept = min(extent.first_row, row.base + min(counts))
        keep_tokens(transaction, row, kept, layout.fidelity)
        transaction.add_extent(row.id, extent)
        grown = max(end - had, 0)
        Sides(transaction).resized(
            row.id, self.tensor.side.value, grown, grown * self.tensor.row_bytes
        )
        if layout.to_json() != row.layout:
            transaction.update(row.id, layout=layout.to_json(), fidelity=layout.fidelity)
        transaction.update(
            row.id,
            state="live",
            row_counts=json.dumps(counts),
            token_count=row.base + min(counts),
            disk_bytes=row.disk_bytes + self._bytes,
            boot=row.boot if on_disk else self._workshop.boot,
            **outgrown(row),
        )
        transaction.stamp([(row.id, self.tensor.side.value)])
        generation = transaction.new_generation(row.id) if overwrites else row.generation
        return RowsWritten(row.base + counts[index], generation, self._header.durability)


def begin_rows(workshop: Workshop, tenant: str, header: WriteRowsHeader) -> RowsSession:
    """Plans rows: checks the prefix and its tensor, and reserves their bytes.

    Raises:
        NotStored: the prefix is neither registered nor stored.
        LayoutDiffers: it neither has such a tensor nor declares one.
        InvalidRequest: the rows belong to a parent, or a child shares them.
        OverBudget, OverQuota: there is no room.
    """
    workshop.recovery.make_sound(tenant, header.namespace)
    with workshop.catalog.write() as transaction:
        row = transaction.by_name(tenant, header.namespace)
        if row is None:
            raise NotStored(
                f"{header.namespace!r} is not stored: register it first", namespace=header.namespace
            )
        if header.first_row < row.base:
            raise InvalidRequest("first_row", f"the rows before {row.base} belong to its parent")
        tensor = tensor_of(transaction, row, header.slot, header.side)
        if tensor is None:
            raise LayoutDiffers(
                f"{header.namespace!r} has no {header.side.value}.{header.slot}",
                namespace=header.namespace,
            )
        index, _, counts = with_tensor(transaction, row, tensor)
        if header.first_row < row.base + counts[index]:
            check_not_shared(transaction, row, header.first_row)
        size = header.row_count * tensor.row_bytes
        reservation = transaction.reserve(workshop.directory.instance, tenant, row.id, size)
        workshop.space.make_room(transaction, tenant, size)
        known = transaction.extent_files(row.id)
    workshop.space.sweep()
    file = workshop.row_files.take(known, reservation)
    return RowsSession(workshop, header, row.id, tensor, reservation, file)


def tensor_of(
    transaction: Transaction, row: PrefixRow, slot: int, side: Side
) -> TensorLayout | None:
    """Returns the tensor that a prefix has, or would have if rows of it came."""
    for tensor in Layout.from_json(row.layout).tensors:
        if (tensor.slot, tensor.side) == (slot, side):
            return tensor
    declared = Sides(transaction).of(row.id).get(side.value)
    return Declaration.from_json(declared).tensor(slot, side) if declared else None


def with_tensor(
    transaction: Transaction, row: PrefixRow, tensor: TensorLayout
) -> tuple[int, Layout, list[int]]:
    """Returns the place of a tensor, the layout that has it, and the rows of each of its tensors.

    Raises:
        NotStored, LayoutDiffers: the prefix neither has it nor declares it, or something else there.
    """
    tensors = list(Layout.from_json(row.layout).tensors)
    counts = list(own_row_counts(row))
    if tensor in tensors:
        return tensors.index(tensor), Layout(tuple(tensors)), counts
    known = tensor_of(transaction, row, tensor.slot, tensor.side)
    if known is None:
        raise NotStored(f"{row.namespace!r} was dropped meanwhile", namespace=row.namespace)
    if known != tensor:
        raise LayoutDiffers(
            f"{tensor.name} of {row.namespace!r} is something else now", namespace=row.namespace
        )
    index = bisect.bisect([other.key for other in tensors], tensor.key)
    tensors.insert(index, tensor)
    counts.insert(index, 0)
    return index, Layout(tuple(tensors)), counts


def outgrown(row: PrefixRow) -> dict[str, str]:
    """Returns the columns to set before a prefix gets other rows or tensors than its segment has."""
    if row.file is None or row.file_layout is not None:
        return {}
    return {"file_layout": row.layout, "file_row_counts": json.dumps(own_row_counts(row))}


def check_not_shared(transaction: Transaction, row: PrefixRow, first_row: int) -> None:
    """Raises InvalidRequest if a child shares rows from `first_row` on."""
    for child in transaction.children(row.id):
        if child.base > first_row:
            raise InvalidRequest(
                "first_row",
                f"{child.namespace!r} shares the rows before {child.base}: drop it first",
            )


def _check_data(field: str, data: bytes | memoryview, size: int, checksum: int) -> None:
    if len(data) != size:
        raise InvalidRequest(f"{field}.data", f"{len(data)} bytes where {size} belong")
    if size > limits.CHUNK_BYTES_MAX:
        raise InvalidRequest(
            f"{field}.data",
            f"{size} bytes exceed a chunk's {limits.CHUNK_BYTES_MAX}",
            limit=limits.CHUNK_BYTES_MAX,
        )
    if crc32c(data) != checksum:
        raise ChecksumMismatch(
            f"the {field} do not have the checksum they were sent with", field=field
        )
