"""Live prefixes: rows written into one tensor at a time, and sealed into a segment.

Each batch of rows is one extent, named in one transaction; a later one supersedes. A row file has one
writer at a time, and no prefix is sealed while somebody writes to it: the reservation says so.
"""

import bisect
import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple

from pion_grpc.core.declaration import Declaration
from pion_grpc.core.gaps import written_rows
from pion_grpc.core.indexing import keep_tokens
from pion_grpc.core.opening import condemning, guarded
from pion_grpc.core.order import RowOrder
from pion_grpc.core.reading import (
    Reading,
    chain_parts,
    own_row_counts,
    sealed_row_counts,
)
from pion_grpc.core.values import (
    Durability,
    FetchQuery,
    RowRange,
    RowsWritten,
    WriteRowsHeader,
)
from pion_grpc.core.workshop import OutOfDate, Workshop, sync_files, sync_prefixes
from pion_grpc.errors import (
    InvalidRequest,
    LayoutDiffers,
    NotStored,
)
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.extents import ExtentRow, Extents
from pion_grpc.storage.match_index import MatchIndex
from pion_grpc.storage.pages import RowFile, SegmentWriter
from pion_grpc.storage.sides import Sides
from pion_grpc.storage.transaction import PrefixRow, Transaction
from pion_wire import limits
from pion_wire.framing import RowChunk
from pion_wire.layout import Layout, Side, TensorLayout
from pion_wire.segment import SegmentLayout

GAP_BYTES_SEALED = 1 << 20
"""Zeros that may always go into a segment."""


class RowsUpload:
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
        """Takes the next chunk; raises as `PrefixUpload.write` does."""
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
        self._file.abandon()
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
            sync_files(self._workshop, Extents(transaction).unsynced_files(row.id))
        Accounts(transaction).release(self._reservation)
        index, layout, counts = with_tensor(transaction, row, self.tensor)
        end = extent.first_row + extent.row_count
        had = row.base + counts[index]
        counts[index] = max(had, end) - row.base
        overwrites, known = extent.first_row < had, 0
        if overwrites:
            check_not_shared(transaction, row, extent.first_row)
            within = (extent.first_row, end)
            extents = Extents(transaction).latest(row.id, self.tensor.key, *within)
            known = written_rows(row, self.tensor, extents, *within)
        count = row.base + min(counts)
        kept = min(extent.first_row, count) if overwrites else count
        keep_tokens(transaction, row, kept, layout.fidelity)
        Extents(transaction).add(row.id, extent)
        more = extent.row_count - known
        sides = Sides(transaction)
        sides.resized(
            row.id, self.tensor.side.value, max(end - had, 0), more * self.tensor.row_bytes
        )
        sides.count_records(1)
        is_new = layout.to_json() != row.layout
        if is_new:
            transaction.update(row.id, layout=layout.to_json(), fidelity=layout.fidelity)
        transaction.update(
            row.id,
            state="live",
            row_counts=json.dumps(counts),
            token_count=count,
            disk_bytes=row.disk_bytes + self._bytes,
            boot=row.boot if on_disk else self._workshop.boot,
            **outgrown(row),
        )
        transaction.stamp([(row.id, self.tensor.side.value)])
        # Who resumes a stream counts its tensors: another one is no continuation.
        changes = overwrites or is_new
        generation = transaction.new_generation(row.id) if changes else row.generation
        return RowsWritten(row.base + counts[index], generation, self._header.durability)


def begin_rows(workshop: Workshop, tenant: str, header: WriteRowsHeader) -> RowsUpload:
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
        reservation = workshop.space.reserve(transaction, tenant, size, row.id)
        known = Extents(transaction).files(row.id)
    workshop.space.sweep()
    file = workshop.row_files.take(known, reservation)
    return RowsUpload(workshop, header, row.id, tensor, reservation, file)


def tensor_of(
    transaction: Transaction, row: PrefixRow, slot: int, side: Side
) -> TensorLayout | None:
    """Returns the tensor that a prefix has, or would have if rows of it came.

    One that has no token ids, because rows are only ever written to it, takes rows for slots that its
    layout does not name if those it names are all alike on this side: who registered it may not have
    known how many there will be.
    """
    own = [t for t in Layout.from_json(row.layout).tensors if t.side is side]
    for tensor in own:
        if tensor.slot == slot:
            return tensor
    declared = Sides(transaction).of(row.id).get(side.value)
    if declared:
        return Declaration.from_json(declared).tensor(slot, side)
    if slot >= limits.SLOTS_MAX or MatchIndex(transaction).token_ids(row.id):
        return None
    alike = {dataclasses.replace(tensor, slot=slot) for tensor in own}
    return alike.pop() if len(alike) == 1 else None


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


def is_mostly_gaps(row: PrefixRow) -> bool:
    """Says whether the segment of a live prefix would be much larger than the rows it got.

    A gap costs nothing while it is none of the rows that came; a segment has its zeros.
    """
    tensors = Layout.from_json(row.layout).tensors
    counts = zip(tensors, own_row_counts(row), strict=True)
    size = sum(count * tensor.row_bytes for tensor, count in counts)
    return size > 2 * row.disk_bytes + GAP_BYTES_SEALED


class _Sealing(NamedTuple):
    """A live prefix as it was when its segment was planned."""

    chain: list[PrefixRow]
    extents: list[ExtentRow]
    token_ids: bytes
    segment: SegmentLayout
    reservation: int

    @property
    def row(self) -> PrefixRow:
        """The prefix itself."""
        return self.chain[-1]


def seal(workshop: Workshop, row: PrefixRow) -> bool:
    """Writes a live prefix as a segment; False if somebody was writing to it."""
    workshop.recovery.make_sound(row.tenant, row.namespace)
    while (plan := _plan_segment(workshop, row.id)) is not None:
        workshop.space.sweep()
        with contextlib.suppress(OutOfDate):
            return _carry_out(workshop, plan)
    return False


def _carry_out(workshop: Workshop, plan: _Sealing) -> bool:
    """Writes and publishes a segment; False if the rows have changed meanwhile.

    Raises:
        OutOfDate: the plan is no longer right: a parent has been sealed anew meanwhile.
    """
    row, sealed = plan.row, False
    name = f"segments/{workshop.directory.instance}-{row.id}-{plan.reservation}.safetensors"
    try:
        _write_segment(workshop, plan, name)
        sync_prefixes(workshop, [link for link in plan.chain[:-1] if link.boot is not None])
        sealed = _publish_segment(workshop, plan, name)
    finally:
        if not sealed:
            workshop.files.unlink(workshop.directory.resolve(name))
            workshop.space.end_reservation(plan.reservation, row.id)
    workshop.space.sweep()
    return sealed


def _plan_segment(workshop: Workshop, prefix: int) -> _Sealing | None:
    """Reserves the bytes of a segment; None if the prefix is not to be sealed now."""
    with workshop.catalog.write() as transaction:
        row = transaction.by_id(prefix)
        if (
            row is None
            or not row.visible
            or row.state != "live"
            or Accounts(transaction).is_reserved(row.id)
        ):
            return None
        chain = transaction.chain(row)
        token_ids = MatchIndex(transaction).token_ids(row.id)
        segment = SegmentLayout(
            layout=Layout.from_json(row.layout),
            row_counts=own_row_counts(row),
            token_count=len(token_ids) // 4,
            model_id=row.model_id,
            base=row.base,
            parent=chain[-2].namespace if len(chain) > 1 else "",
            parts=chain_parts([row], len(token_ids) // 4),
            namespace=row.namespace,
        )
        reservation = workshop.space.reserve(transaction, row.tenant, segment.file_bytes, row.id)
        return _Sealing(chain, Extents(transaction).of(row.id), token_ids, segment, reservation)


def _write_segment(workshop: Workshop, plan: _Sealing, name: str) -> None:
    """Copies the rows, page by page against their checksums, to stable storage."""
    row, counts = plan.row, plan.segment.row_counts
    writer = SegmentWriter(workshop.files, workshop.directory.resolve(name), plan.segment)
    try:
        whole = RowRange(row.base, row.base + max(counts, default=0))
        query = FetchQuery(row.namespace)
        with condemning(workshop, plan.chain, plan.extents):
            reading = Reading(workshop.directory, plan.chain, plan.extents, query, whole)
        with guarded(workshop.space, reading):
            for piece in reading.stream_own(plan.segment):
                writer.write(piece)
        writer.write(plan.token_ids)
        writer.finish(on_disk=True)
    except BaseException:
        writer.abandon()
        raise


def _publish_segment(workshop: Workshop, plan: _Sealing, name: str) -> bool:
    """Puts the segment in the place of the rows; False if these have changed meanwhile."""
    row, segment = plan.row, plan.segment
    with workshop.catalog.write(on_disk=True) as transaction:
        Accounts(transaction).release(plan.reservation)
        now = transaction.by_id(row.id)
        seen = row.generation, row.row_counts
        untouched = now is not None and (now.generation, now.row_counts) == seen
        if not untouched or Accounts(transaction).is_reserved(row.id):
            workshop.space.collect(transaction, row.id)
            return False
        old = [file for file in Extents(transaction).files(row.id) if file]
        old += [row.file] if row.file else []
        for index, file in enumerate(old):
            Accounts(transaction).add_garbage(file, 0 if index else row.disk_bytes)
        Extents(transaction).replace(row.id, [])
        transaction.update(
            row.id,
            state="sealed",
            file=name,
            file_tokens=segment.token_count,
            file_layout=None,
            file_row_counts="",
            row_counts=sealed_row_counts(segment.row_counts),
            parts=json.dumps([list(part) for part in segment.parts]),
            disk_bytes=segment.file_bytes,
            durability=Durability.DISK.value,
            boot=None,
        )
        for side in Side:
            sizes = (
                count * tensor.row_bytes
                for tensor, count in zip(segment.layout.tensors, segment.row_counts, strict=True)
                if tensor.side is side
            )
            Sides(transaction).sealed(row.id, side.value, sum(sizes))
    return True
