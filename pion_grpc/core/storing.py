"""Storing a prefix, from its header to its publication.

Three plain steps. *Plan* checks everything and reserves the bytes in one transaction. *Write* takes the
rows in order, each chunk against its checksum, straight into the file. *Publish* names the file in one
transaction: before it nobody sees anything, after it everybody sees all. Whatever ends in between leaves
bytes that nothing names, which are removed at once, or by the next process that finds its owner gone.
"""

import dataclasses
import json
from typing import NamedTuple

from pion_grpc.core.indexing import enter_index
from pion_grpc.core.order import PartOrder, RowOrder
from pion_grpc.core.reading import chain_parts, parts_of
from pion_grpc.core.values import (
    Durability,
    Stored,
    StoreHeader,
)
from pion_grpc.core.workshop import Workshop, sync_prefixes
from pion_grpc.errors import (
    Conflict,
    Evicted,
    InvalidRequest,
    LayoutDiffers,
    NotStored,
    OtherContent,
)
from pion_grpc.storage.match_index import MatchIndex
from pion_grpc.storage.pages import SegmentWriter
from pion_grpc.storage.transaction import NewPrefix, PrefixRow, Transaction
from pion_wire import limits
from pion_wire.blocks import common_tokens, derived_namespace, root_hash
from pion_wire.framing import PartChunk, RowChunk
from pion_wire.layout import PartInfo
from pion_wire.segment import HEADER_BYTES_MAX, SegmentLayout

_PART_BYTES = limits.PART_KIND_BYTES_MAX + 32
"""What a part takes in a message beside its description, at most."""


class SegmentFile(NamedTuple):
    """A segment that is complete, and that nothing names yet."""

    name: str
    """As the catalogue knows it."""
    size: int
    token_ids: bytes
    boot: str | None
    """Boot under which it was written unsynced; None: on disk."""


class PrefixUpload:
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
        self._parts = PartOrder([part.size_bytes for part in segment.parts])
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
        existing = transaction.by_name(row.tenant, row.namespace)
        if existing is not None:
            if existing.state == "registered":
                if not header.replace:
                    _check_registered(existing, header)
                if header.table is None:
                    _inherit_table(transaction, existing.id, row.id)
            elif not header.replace:
                stored = compare(transaction, existing, header, concurrent=True)
                transaction.delete(row.id)
                space.collect(transaction, row.parent)
                return stored
            space.remove(transaction, existing)
        boot = None if on_disk else self._workshop.boot
        segment = SegmentFile(self._file, self._segment.file_bytes, header.token_ids, boot)
        generation = name_segment(transaction, row, segment)
        return Stored(
            row.namespace,
            already_stored=False,
            generation=generation,
            token_count=header.token_count,
            stored_bytes=self._segment.file_bytes,
            durability=header.durability,
            base=row.base,
        )

    def _sync_parents(self) -> None:
        with self._workshop.catalog.read() as transaction:
            row = transaction.by_id(self._prefix)
            parents = transaction.chain(row)[:-1] if row is not None else []
        unsynced = [parent for parent in parents if parent.boot is not None]
        sync_prefixes(self._workshop, unsynced)


def name_segment(transaction: Transaction, row: PrefixRow, segment: SegmentFile) -> int:
    """Makes a prefix that is in the catalogue what its segment holds, visible and found by its tokens.

    Returns its generation.
    """
    transaction.update(
        row.id,
        state="sealed",
        visible=1,
        owner=None,
        file=segment.name,
        file_tokens=len(segment.token_ids) // 4,
        disk_bytes=segment.size,
        boot=segment.boot,
    )
    generation = transaction.new_generation(row.id)
    transaction.stamp([(row.id, "")])
    enter_index(transaction, row, segment.token_ids)
    return generation


def extends(parent: PrefixRow, base: int) -> bool:
    """Says whether a child with so many of its rows takes anything of this prefix: a row, or a part.

    If not it extends the parent's parent instead, so the bases of a chain never go back.
    """
    return parent.base < base or (
        parent.base == base and any(part.boundary_tokens <= base for part in parts_of(parent))
    )


def begin_store(workshop: Workshop, tenant: str, header: StoreHeader) -> PrefixUpload | Stored:
    """Plans a Store: checks it against what is there, and reserves its bytes.

    Returns an upload that takes the rows, or the acknowledgement if the same is stored already.

    Raises:
        LayoutDiffers, OtherContent: the name holds something else.
        NotStored: the parent is not stored.
        InvalidRequest: the parent's tokens, or its depth, do not fit.
        OverBudget, OverQuota, DiskFull: there is no room.
    """
    if not header.namespace:
        root = root_hash(tenant, header.model_id, header.layout.fidelity)
        name = derived_namespace(root, header.token_ids)
        header = dataclasses.replace(header, namespace=name)
    for name in filter(None, (header.namespace, header.parent)):
        workshop.recovery.make_sound(tenant, name)
    known = _known(workshop, tenant, header)
    if known is not None:
        return durable(workshop, tenant, known, header.durability)
    with workshop.catalog.write() as transaction:
        existing = transaction.by_name(tenant, header.namespace)
        if existing is not None and existing.state == "registered" and not header.replace:
            _check_registered(existing, header)
        parent = _parent(transaction, tenant, header)
        segment = _segment(header, parent)
        prefix = transaction.insert(
            NewPrefix(
                tenant=tenant,
                namespace=header.namespace,
                state="open",
                visible=False,
                owner=workshop.directory.instance,
                model_id=header.model_id,
                fidelity=header.layout.fidelity,
                layout=header.layout.to_json(),
                token_count=header.token_count,
                base=header.base,
                parent=parent.id if parent else None,
                depth=parent.depth + 1 if parent else 0,
                parts=json.dumps([list(part) for part in header.parts]),
                disk_bytes=segment.file_bytes,
                durability=header.durability.value,
            )
        )
        table = header.table
        if table is not None:
            MatchIndex(transaction).set_block_table(prefix, table.block_tokens, table.hashes)
        workshop.space.make_room(transaction, tenant, segment.file_bytes, header.token_count)
    workshop.space.sweep()
    name = f"segments/{workshop.directory.instance}-{prefix}.safetensors"
    return PrefixUpload(workshop, tenant, header, prefix, name, segment)


def _known(workshop: Workshop, tenant: str, header: StoreHeader) -> Stored | None:
    """Returns the acknowledgement of what is stored already; None if there is something to store.

    Raises as `compare` does.
    """
    if header.replace:
        return None
    with workshop.catalog.read() as transaction:
        existing = transaction.by_name(tenant, header.namespace)
        if existing is None or existing.state == "registered":
            return None
        return compare(transaction, existing, header, concurrent=False)


def _segment(header: StoreHeader, parent: PrefixRow | None) -> SegmentLayout:
    """Returns where everything will lie in the file.

    Raises:
        InvalidRequest: what the parts are described with would exceed a header.
    """
    segment = SegmentLayout(
        layout=header.layout,
        row_counts=(header.token_count - header.base,) * len(header.layout.tensors),
        token_count=header.token_count,
        model_id=header.model_id,
        base=header.base,
        parent=parent.namespace if parent else "",
        parts=header.parts,
        namespace=header.namespace,
    )
    if segment.data_offset > HEADER_BYTES_MAX:
        raise InvalidRequest("parts", f"their descriptions exceed {HEADER_BYTES_MAX} bytes")
    return segment


def _check_parts(parents: list[PrefixRow], header: StoreHeader) -> None:
    """Raises InvalidRequest if a prefix could not be described with the parts of its parents."""
    inherited = chain_parts(parents, header.base)
    own = {(part.kind, part.slot, part.boundary_tokens) for part in header.parts}
    for part in inherited:
        if (part.kind, part.slot, part.boundary_tokens) in own:
            raise InvalidRequest(
                "parts",
                f"the parent has a {part.kind!r} of slot {part.slot} at {part.boundary_tokens} already",
            )
    parts = [*inherited, *header.parts]
    described = sum(len(part.description.encode()) + _PART_BYTES for part in parts)
    # One message has the token ids, all parts, and once more those that it announces.
    described_max = (limits.MESSAGE_BYTES_MAX - len(header.token_ids)) // 2
    if len(parts) > limits.PARTS_MAX or described > described_max:
        raise InvalidRequest(
            "parts", f"{len(parts)} with those of its parents are too many: store it whole"
        )


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
    stored_ids = MatchIndex(transaction).token_ids(existing.id)
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
    elif missing := _missing_part(transaction, existing, header):
        problem = OtherContent(
            f"{name!r} is stored without the {missing.kind!r} of slot {missing.slot} at "
            f"{missing.boundary_tokens}, or with another; replace it",
            namespace=name,
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


def _missing_part(
    transaction: Transaction, existing: PrefixRow, header: StoreHeader
) -> PartInfo | None:
    """Returns a part that a request brings and a stored prefix does not have."""
    count = header.token_count
    stored = set(chain_parts(transaction.chain(existing), count)) if header.parts else set()
    return next((part for part in header.parts if part not in stored), None)


def _check_registered(existing: PrefixRow, header: StoreHeader) -> None:
    name = existing.namespace
    if existing.layout != header.layout.to_json():
        raise LayoutDiffers(f"{name!r} was registered with another layout", namespace=name)
    if existing.model_id not in ("", header.model_id):
        raise OtherContent(f"{name!r} was registered for another model", namespace=name)


def _parent(transaction: Transaction, tenant: str, header: StoreHeader) -> PrefixRow | None:
    """Returns the prefix whose first `base` rows are this one's first; None if it has no parent.

    Raises:
        NotStored: there is none of that name and generation.
        OtherContent, LayoutDiffers, InvalidRequest: this one cannot extend it.
    """
    if not header.parent:
        return None
    parent = transaction.by_name(tenant, header.parent)
    if parent is None or parent.state != "sealed":
        raise NotStored(f"the parent {header.parent!r} is not stored", namespace=header.parent)
    if header.parent_generation not in (0, parent.generation):
        raise NotStored(f"the parent {header.parent!r} is another now", namespace=header.parent)
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
    agreeing = common_tokens(MatchIndex(transaction).token_ids(parent.id), header.token_ids)
    if agreeing < header.base:
        raise InvalidRequest(
            "token_ids",
            f"token {agreeing} is another than the parent's: base can be at most {agreeing}",
        )
    ancestor: PrefixRow | None = parent
    while ancestor is not None and not extends(ancestor, header.base):
        assert ancestor.parent is not None, "whoever has no parent has rows from the first one on"
        ancestor = transaction.by_id(ancestor.parent)
    assert ancestor is not None, "a parent outlives its children"
    if ancestor.depth + 1 >= limits.CHAIN_DEPTH_MAX:
        raise InvalidRequest(
            "parent_namespace",
            f"the chain would be deeper than {limits.CHAIN_DEPTH_MAX}: store this prefix whole",
            limit=limits.CHAIN_DEPTH_MAX,
        )
    _check_parts(transaction.chain(ancestor), header)
    return ancestor


def _inherit_table(transaction: Transaction, declared: int, stored: int) -> None:
    table = MatchIndex(transaction).block_table(declared)
    if table is not None:
        MatchIndex(transaction).set_block_table(stored, *table)
