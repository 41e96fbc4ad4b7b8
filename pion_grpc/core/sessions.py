"""Sessions: prefixes as clients of the RESP wire see them, one side at a time.

A session id that ends in `_pk` or `_pv` is the K or the V side of the namespace before it; any other
is a namespace with one side. Sides are declared before they have rows, grow layer by layer, and are
counted: `sides_max` of them, over all processes together, after which the one that was not used for
longest goes, whichever of the processes was asked for the others since. A prefix stored over gRPC has
sessions, too, one for each side of its layout; they are never counted, and never go for a declaration.

Refuses to know how a session is asked for. The one decision: there is no second store. A session is a
view of a prefix, so both wires see the same rows, and what holds for prefixes (budgets, checksums,
durability) holds for sessions.
"""

import contextlib
import dataclasses
import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from pion_grpc.core.declaration import Declaration
from pion_grpc.core.indexing import keep_tokens
from pion_grpc.core.live import outgrown
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.reading import CorruptPrefix, own_row_counts
from pion_grpc.core.receipt import Restore
from pion_grpc.core.session_reading import SessionReading
from pion_grpc.core.session_values import (
    LayerInfo,
    OwnTotals,
    SessionInfo,
    SessionName,
    SessionTotals,
    Unsettled,
    WrongSize,
)
from pion_grpc.core.values import (
    BlockTable,
    FetchQuery,
    WriteRowsHeader,
    check_namespace,
    check_prefill,
)
from pion_grpc.errors import InvalidRequest, LayoutDiffers, NotStored
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.extents import ExtentRow, Extents
from pion_grpc.storage.match_index import MatchIndex
from pion_grpc.storage.row_snapshots import RowSnapshotTable
from pion_grpc.storage.sides import Sides
from pion_grpc.storage.transaction import NewPrefix, PrefixRow, Transaction
from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.rows import encode_rows

SIDES_MIN = 2
"""Fewer could not hold both sides of a prefix."""

_NO_TENSORS = Layout(()).to_json()


class Sessions:
    """All operations on sessions; safe to use from many threads, and from several processes at once."""

    def __init__(self, store: PrefixStore, *, sides_max: int = 0) -> None:
        """`sides_max` 0 means no limit."""
        assert sides_max == 0 or sides_max >= SIDES_MIN
        self.sides_max = sides_max
        self._store = store
        self._workshop = store.workshop
        self._catalog = store.workshop.catalog
        self._lock = threading.Lock()
        self._fetched_rows: Counter[str] = Counter()

    # -- declaring

    def register(
        self,
        tenant: str,
        namespace: str,
        declarations: dict[Side, Declaration],
        table: BlockTable | None = None,
        prefill_ms: float = 0.0,
    ) -> None:
        """Declares sides of a namespace; those that exist keep what they are and have.

        A table replaces the old one, and the prefill time is always set.

        Raises:
            InvalidRequest: a name or a number is out of range.
            LayoutDiffers: a session of the namespace's own name is its K side, and declared otherwise.
            OverBudget: the catalogue has reached the budget.
            OverQuota: the table does not fit into what the tenant may have.
        """
        check_namespace(namespace)
        check_prefill(prefill_ms)
        space, table_bytes = self._workshop.space, len(table.hashes) if table is not None else 0
        space.check_declared(table_bytes)
        with self._catalog.write() as transaction:
            row = self._found_or_new(transaction, tenant, namespace)
            existing = _sides(transaction, row)
            names = "".join(side.value for side in declarations)
            # What exists is used before anything is declared that it might have to go for.
            transaction.stamp([(row.id, names)])
            for side, declaration in declarations.items():
                if side not in existing:
                    self._declare(transaction, row.id, side, declaration, names)
                else:
                    _check_same_by_name(transaction, row, side, declaration)
            if table is not None:
                MatchIndex(transaction).set_block_table(row.id, table.block_tokens, table.hashes)
                space.keep_quota(transaction, tenant, table_bytes, row.id)
                Sides(transaction).count_records(1)
            transaction.update(row.id, prefill_ms=prefill_ms)
        if table is not None:
            space.sweep()

    def create(self, tenant: str, sid: str, declaration: Declaration, *, exactly: bool) -> int:
        """Declares one session and returns its number; one that exists stays as it is.

        Raises:
            LayoutDiffers: it exists and is `exactly` not that, or not that and of another name.
            InvalidRequest: the name is out of range.
        """
        namespace, side = SessionName.of(sid)
        check_namespace(namespace)
        declaration = dataclasses.replace(declaration, bare=sid == namespace)
        with self._catalog.write() as transaction:
            row = self._found_or_new(transaction, tenant, namespace)
            transaction.stamp([(row.id, side.value)])
            if side not in _sides(transaction, row):
                self._declare(transaction, row.id, side, declaration, side.value)
            else:
                _check_same_by_name(transaction, row, side, declaration)
                known = Sides(transaction).of(row.id).get(side)
                if exactly and not (
                    known and Declaration.from_json(known).same_tensors(declaration)
                ):
                    raise LayoutDiffers(f"{sid!r} exists, and is declared otherwise", namespace=sid)
        return _number(row.id, side)

    def drop(self, tenant: str, namespaces: Iterable[str]) -> int:
        """Drops namespaces, and returns how many of them existed."""
        dropped = 0
        with self._catalog.write(removing=True) as transaction:
            for namespace in namespaces:
                row = transaction.by_name(tenant, namespace)
                if row is not None:
                    gone = len(_sides(transaction, row))
                    self._workshop.space.remove(transaction, row)
                    dropped += 1
                    Sides(transaction).count_gone(gone)
        self._workshop.space.sweep()
        return dropped

    # -- asking

    def lookup(
        self,
        tenant: str,
        namespace: str,
        restored_tokens: int | None = None,
        restored_prefill_ms: float | None = None,
        *,
        settle: bool = True,
    ) -> bool:
        """Says whether both sides of a namespace exist; counts a hit or a miss.

        It is a miss, too, if a layer has more rows on one side than on the other, unless one side has
        none at all: a client died while it stored them, and the next one shall store them again.

        A hit credits the rows of K's first layer with the registered prefill time, unless the caller
        says which tokens, or which time, it restored. Without `settle` nothing is read but the
        catalogue, and nothing is written.

        Raises:
            Unsettled: its files have to be looked at first, or taken out; ask again with `settle`.
        """
        row, sides, is_even = self._vouched(tenant, namespace, settle=settle)
        hit = len(sides) == len(Side) and is_even
        self._store.ledger.lookup(hit=hit)
        if row is not None:
            self._workshop.space.uses.note(row.id, "".join(sorted(sides)))
        if hit and row is not None:
            tokens = restored_tokens
            prefill_ms = restored_prefill_ms
            if tokens is None:
                tokens = _first_layer_rows(row)
                if prefill_ms is None:
                    prefill_ms = row.prefill_ms
            self._store.ledger.restored(Restore.reported(tokens, prefill_ms))
        return hit

    def _vouched(
        self, tenant: str, namespace: str, *, settle: bool
    ) -> tuple[PrefixRow | None, frozenset[Side], bool]:
        """Returns a prefix whose files are there, its sides, and whether those have the same rows."""
        while True:
            with self._catalog.read() as transaction:
                row = transaction.by_name(tenant, namespace)
                if row is None:
                    return None, frozenset(), True
                declared = _declared(transaction, row)
                sides = declared | _sides_of_tensors(row)
                is_even = len(declared) < len(Side) or _is_even(row)
                chain = transaction.chain(row)
            if not settle and any(self._workshop.recovery.is_due(link) for link in chain):
                raise Unsettled(namespace)
            try:
                if self._workshop.recovery.vouch(chain):
                    return row, sides, is_even
            except CorruptPrefix as error:
                if not settle:
                    raise Unsettled(namespace) from error
                self._workshop.space.take_out(error)

    def exists(self, tenant: str, namespace: str) -> bool:
        """Says whether any side of a namespace exists."""
        with self._catalog.read() as transaction:
            row = transaction.by_name(tenant, namespace)
            return row is not None and bool(_sides(transaction, row))

    def info(self, tenant: str, sid: str) -> SessionInfo | None:
        """Returns what is known of a session; None if it does not exist. This is no use of it."""
        namespace, side = SessionName.of(sid)
        with self._catalog.read() as transaction:
            row = transaction.by_name(tenant, namespace)
            if row is None or side not in _sides(transaction, row):
                return None
            declared = Sides(transaction).of(row.id).get(side)
        counts = zip(Layout.from_json(row.layout).tensors, own_row_counts(row), strict=True)
        layers = tuple(
            LayerInfo(tensor.slot, tensor, row.base + count)
            for tensor, count in counts
            if tensor.side is side
        )
        declaration = Declaration.from_json(declared) if declared else None
        return SessionInfo(_number(row.id, side), row.generation, declaration, layers)

    def totals(self) -> SessionTotals:
        """Counts the sessions of all tenants that were declared, not those of gRPC."""
        with self._catalog.read() as transaction:
            totals, counts = Sides(transaction).totals(), Sides(transaction).counts()
        with self._lock:
            fetched_rows = self._fetched_rows.total()
        return SessionTotals(
            totals.k_sides,
            totals.k_rows,
            totals.sides,
            totals.rows,
            totals.bytes,
            fetched_rows,
            self._store.directory.rows_bytes(),
            counts,
        )

    def own_totals(self, tenant: str) -> OwnTotals:
        """Counts the sessions of one tenant that were declared."""
        with self._catalog.read() as transaction:
            totals = Sides(transaction).totals(tenant)
        with self._lock:
            return OwnTotals(totals.sides, totals.rows, self._fetched_rows[tenant])

    def fingerprint(self, tenant: str, sid: str) -> tuple[int, ...] | None:
        """Returns numbers that change whenever rows of a session do; None if it does not exist.

        The first two are the `version` of who reads them: it stays when rows are appended.
        """
        namespace, side = SessionName.of(sid)
        with self._catalog.read() as transaction:
            row = transaction.by_name(tenant, namespace)
            if row is None or side not in _sides(transaction, row):
                return None
        return row.id, row.generation, *own_row_counts(row)

    # -- rows

    def write(
        self,
        tenant: str,
        sid: str,
        layer: int,
        first_row: int,
        row_count: int,
        rows: memoryview,
        dtype: DType,
    ) -> None:
        """Writes rows of a layer: appends, overwrites, or leaves a gap of zero rows.

        Raises:
            WrongSize: the bytes are not so many rows.
            NotStored: there is no such session.
            LayoutDiffers: it has no such layer, and none is declared.
            InvalidRequest: the rows belong to a parent, or cannot be stored exactly.
            OverBudget, OverQuota, DiskFull: there is no room.
        """
        namespace, side = SessionName.of(sid)
        header = WriteRowsHeader(namespace, layer, side, first_row, row_count)
        try:
            upload = self._store.write_rows(tenant, header)
        except LayoutDiffers:
            self._known(tenant, sid)  # without the side at all that is what is wrong
            raise
        try:
            tensor = upload.tensor
            expected = row_count * tensor.heads * tensor.head_dim * dtype.itemsize
            if len(rows) != expected:
                raise WrongSize(len(rows), expected)
            upload.write_arrays(_encoded(tensor, rows, dtype))
            upload.publish()
        except BaseException:
            upload.abandon()
            raise

    def open(
        self, tenant: str, sid: str, layers: Sequence[int] = (), *, halves: bool = False
    ) -> SessionReading | None:
        """Opens the rows of a session, of some layers or of all; None if it has none.

        Values come as float32; with `halves` those kept as binary16 come as they are.

        Raises:
            NotStored: there is no such session.
            Corrupt: a file is damaged; the prefix has been taken out.
        """
        namespace, side = SessionName.of(sid)
        query = FetchQuery(
            namespace,
            slots=frozenset(layers),
            codecs=frozenset({"fp16"} if halves else ()),
            raw_types=frozenset({DType.F16} if halves else ()),
            sides=frozenset({side}),
        )
        while True:
            info = self.info(tenant, sid)
            if info is None:
                raise NotStored(f"{sid!r} is not stored", namespace=sid)
            reading = self._store.open_rows(tenant, query)
            if reading is None:
                self._workshop.space.uses.note(info.number // 2, side.value)
                return None
            row = reading.chain[-1]
            if (row.id, row.generation) == (info.number // 2, info.generation):
                break
            reading.close()  # the name was taken anew meanwhile: its layers are not these
        if not reading.tensors:
            reading.close()
            return None
        return SessionReading(self._store, reading, info.layer_count)

    def fetched(self, tenant: str, row_count: int, size: int) -> None:
        """Counts rows that a tenant asked for, and the bytes they took."""
        with self._lock:
            self._fetched_rows[tenant] += row_count
        self._store.ledger.streamed(size)

    # -- snapshots

    def snapshot(self, tenant: str, sid: str) -> int:
        """Remembers the rows of every layer; raises as `RowSnapshots.take` does."""
        namespace, side = self._known(tenant, sid)
        return self._store.row_snapshots.take(tenant, namespace, side.value)

    def restore(self, tenant: str, sid: str, snapshot: int) -> None:
        """Cuts layers that have grown since; raises as `RowSnapshots.restore` does."""
        namespace, side = self._known(tenant, sid)
        self._store.row_snapshots.restore(tenant, namespace, snapshot, side.value)

    def release(self, tenant: str, sid: str, snapshot: int) -> bool:
        """Forgets a snapshot and keeps the rows; says whether it was known."""
        namespace, side = self._known(tenant, sid)
        return self._store.row_snapshots.release(tenant, namespace, snapshot, side.value)

    # -- parts of the above

    def _known(self, tenant: str, sid: str) -> SessionName:
        name = SessionName.of(sid)
        with self._catalog.read() as transaction:
            row = transaction.by_name(tenant, name.namespace)
            if row is None or name.side not in _sides(transaction, row):
                raise NotStored(f"{sid!r} is not stored", namespace=sid)
        return name

    def _found_or_new(self, transaction: Transaction, tenant: str, namespace: str) -> PrefixRow:
        row = transaction.by_name(tenant, namespace)
        if row is None:
            identity = transaction.insert(NewPrefix.registered(tenant, namespace, _NO_TENSORS))
            row = transaction.by_id(identity)
        assert row is not None
        return row

    def _declare(
        self,
        transaction: Transaction,
        prefix: int,
        side: Side,
        declaration: Declaration,
        kept_sides: str,
    ) -> None:
        """Declares a side; if there are too many then, others go, but none of those kept."""
        sides = Sides(transaction)
        sides.add(prefix, side, declaration.to_json())
        sides.count_records(1)
        if self.sides_max and sides.count() > self.sides_max:
            self._workshop.space.uses.gather(transaction)
        while self.sides_max and sides.count() > self.sides_max:
            victim = sides.least_used(prefix, kept_sides)
            if victim is None:
                return  # the others are all being written to: the next declaration makes room
            row = transaction.by_id(victim.prefix)
            assert row is not None, "sides go with their prefix"
            self._take_out(transaction, row, Side(victim.side))
            sides.count_gone(1)

    def _take_out(self, transaction: Transaction, row: PrefixRow, side: Side) -> None:
        """Removes one side of a prefix; the last one, or one that children share, takes it whole."""
        Sides(transaction).remove(row.id, side)
        RowSnapshotTable(transaction).remove_side(row.id, side.value)
        if not _sides(transaction, row) - {side} or transaction.children(row.id):
            self._workshop.space.remove(transaction, row)
            return
        tensors = Layout.from_json(row.layout).tensors
        kept = [
            (tensor, count)
            for tensor, count in zip(tensors, own_row_counts(row), strict=True)
            if tensor.side is not side
        ]
        files = set(Extents(transaction).files(row.id))
        for tensor in tensors:
            if tensor.side is side:
                Extents(transaction).remove(row.id, tensor.key)
                # What a segment still has of it must not come back when it is declared again.
                if row.file is not None:
                    hole = ExtentRow(tensor.key, 0, row.base, _ROWS_OF_ANY_SEGMENT, "", 0, b"")
                    Extents(transaction).add(row.id, hole)
        layout = Layout(tuple(tensor for tensor, _ in kept))
        keep_tokens(transaction, row, 0, layout.fidelity)
        counts = [count for _, count in kept]
        freed = self._discard_files(transaction, row, files)
        transaction.update(
            row.id,
            state="live" if kept else "registered",
            layout=layout.to_json(),
            fidelity=layout.fidelity,
            row_counts=json.dumps(counts),
            token_count=row.base + min(counts, default=0),
            disk_bytes=row.disk_bytes - freed,
            **outgrown(row),
        )
        transaction.new_generation(row.id)

    def _discard_files(self, transaction: Transaction, row: PrefixRow, before: set[str]) -> int:
        """Marks row files that hold nothing any more for removal; returns their bytes."""
        freed = 0
        for name in before - set(Extents(transaction).files(row.id)) - {""}:
            size = 0
            with contextlib.suppress(FileNotFoundError):
                size = os.stat(self._store.directory.resolve(name)).st_size
            Accounts(transaction).add_garbage(name, size)
            freed += size
        return freed


_ROWS_OF_ANY_SEGMENT = 1 << 31


def _sides(transaction: Transaction, row: PrefixRow) -> frozenset[Side]:
    """Returns the sides that a prefix has: declared ones, and those of its tensors."""
    return _declared(transaction, row) | _sides_of_tensors(row)


def _declared(transaction: Transaction, row: PrefixRow) -> frozenset[Side]:
    return frozenset(map(Side, Sides(transaction).of(row.id)))


def _sides_of_tensors(row: PrefixRow) -> frozenset[Side]:
    return frozenset(tensor.side for tensor in Layout.from_json(row.layout).tensors)


def _is_even(row: PrefixRow) -> bool:
    """Whether no layer has more rows on one side than on the other.

    A side that has no rows at all yet is another matter.
    """
    rows: dict[Side, dict[int, int]] = {side: {} for side in Side}
    tensors = Layout.from_json(row.layout).tensors
    for tensor, count in zip(tensors, own_row_counts(row), strict=True):
        if count:
            rows[tensor.side][tensor.slot] = count
    return rows[Side.K] == rows[Side.V] or not all(rows.values())


def _check_same_by_name(
    transaction: Transaction, row: PrefixRow, side: Side, declaration: Declaration
) -> None:
    """Refuses `s` where there is another `s_pk`, and the other way round: both name one session.

    One that is declared by both is the side of a prefix.

    Raises:
        LayoutDiffers: they are not alike.
    """
    sides = Sides(transaction)
    text = sides.of(row.id).get(side)
    known = Declaration.from_json(text) if text else None
    if known is None or known.bare == declaration.bare:
        return
    if not known.same_tensors(declaration):
        name = row.namespace
        raise LayoutDiffers(
            f"{name!r} and '{name}_pk' are one session, declared otherwise", namespace=name
        )
    if known.bare:
        sides.redeclare(row.id, side, declaration.to_json())


def _first_layer_rows(row: PrefixRow) -> int:
    counts = zip(Layout.from_json(row.layout).tensors, own_row_counts(row), strict=True)
    return next((row.base + count for tensor, count in counts if tensor.side is Side.K), 0)


def _encoded(tensor: TensorLayout, rows: memoryview, dtype: DType) -> list[memoryview]:
    try:
        return encode_rows(tensor, rows, dtype)
    except ValueError as error:
        raise InvalidRequest("rows", str(error)) from error


def _number(prefix: int, side: Side) -> int:
    return 2 * prefix + (side is Side.V)
