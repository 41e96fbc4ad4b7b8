"""The prefix store: what is stored under which name, and what of it is served.

What is asked, what matches and what is served are three numbers, and where they differ there is a
reason. A miss is an answer. A hit is never a lie: before a prefix is named in an answer its files have
been found with the right size, and after a boot that followed no clean stop every page of what was
acknowledged without a sync has been checked once.

Reads never write: uses are noted beside the catalogue and flushed by `tick`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pion_grpc.core import housekeeping
from pion_grpc.core.asking import add_lease, find_longest, look_up
from pion_grpc.core.blobs import BlobStore
from pion_grpc.core.exporting import Exports
from pion_grpc.core.housekeeping import Totals
from pion_grpc.core.live import RowsUpload, begin_rows, is_mostly_gaps, seal, tensor_of
from pion_grpc.core.membership import membership
from pion_grpc.core.opening import guarded, open_prefix, prefix_info, within
from pion_grpc.core.reading import Reading
from pion_grpc.core.receipt import NO_RESTORE, Ledger, Restore, SharedReceipt, restore_of
from pion_grpc.core.recovery import Recovery
from pion_grpc.core.row_snapshots import RowSnapshots
from pion_grpc.core.space import Space
from pion_grpc.core.storing import PrefixUpload, begin_store
from pion_grpc.core.values import (
    BlockTable,
    Export,
    FetchQuery,
    LookupQuery,
    LookupResult,
    MatchQuery,
    MatchResult,
    MissReason,
    PrefixInfo,
    State,
    Stored,
    StoreHeader,
    WriteRowsHeader,
    check_hashes,
    check_lease,
    check_model_id,
    check_names,
    check_namespace,
    check_number,
    check_prefill,
    check_slots,
)
from pion_grpc.core.workshop import RowFileNames, Workshop, sync_prefixes
from pion_grpc.errors import (
    DiskFull,
    InvalidRequest,
    LayoutDiffers,
    NotStored,
    PionError,
    Unreadable,
)
from pion_grpc.storage.catalog import Catalog
from pion_grpc.storage.directory import DataDirectory, boot_id
from pion_grpc.storage.files import Files
from pion_grpc.storage.match_index import MatchIndex
from pion_grpc.storage.sides import Sides
from pion_grpc.storage.transaction import NewPrefix, PrefixRow, Transaction
from pion_wire import limits
from pion_wire.layout import Layout, Side


class Fetch(NamedTuple):
    """An opened prefix, ready to be streamed. Close its reading."""

    prefix: PrefixInfo
    reading: Reading
    token_ids: bytes
    restore: Restore
    shortened_by: str
    """The kind of part that cut the rows; empty if none did."""


class PrefixStore:
    """All operations on prefixes; safe to use from many threads, and from several processes at once."""

    def __init__(
        self,
        directory: DataDirectory,
        *,
        budget_bytes: int,
        tenant_budget_bytes: int = 0,
        files: Files | None = None,
        boot: str | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """Opens the store, and cleans up after processes that are gone.

        Raises:
            CannotStart: the catalogue cannot be used, or is lost while what it named is here.
        """
        self.directory = directory
        self.ledger = ledger or Ledger()
        files = files or Files()
        with directory.alone():
            self._catalog = Catalog(
                directory.catalog, files, before_new=directory.refuse_new_catalogue
            )
        self.space = Space(directory, self._catalog, files, budget_bytes, tenant_budget_bytes)
        boot = boot or boot_id()
        self.workshop = Workshop(
            directory,
            self._catalog,
            files,
            self.space,
            RowFileNames(directory.instance),
            Recovery(directory, self._catalog, self.space, boot),
            boot,
        )
        """The parts of the store, for the other modules of the core."""
        self.blobs = BlobStore(self.workshop)
        self.receipt = SharedReceipt(directory, self._catalog, self.ledger)
        """What all processes on the directory did together."""
        self.exports = Exports()
        """What has been checked of the files that are named to clients."""
        self.row_snapshots = RowSnapshots(self.workshop)
        self.space.bury_dead_instances()
        self.is_first = housekeeping.begin_if_alone(self.workshop)
        """Whether a server has begun with this process: no other was there."""
        self._catalog.hold_reserve()
        self.space.measure()

    def close(self) -> None:
        """Makes everything acknowledged durable and gives the directory back.

        Raises:
            DiskFull: the catalogue cannot note it; all is as safe as its acknowledgement said.
        """
        with contextlib.ExitStack() as last:  # each of them, whatever becomes of the others
            last.callback(self.directory.close)
            last.callback(self._catalog.close)
            last.callback(self.sync)
            self.tick()

    # -- asking

    def register(
        self,
        tenant: str,
        namespace: str,
        layout: Layout,
        model_id: str = "",
        table: BlockTable | None = None,
        prefill_ms: float = 0.0,
    ) -> PrefixInfo:
        """Declares a prefix before it has rows; of an existing one replaces table and prefill time.

        One whose sides were declared as sessions has a layout if they say the same of its tensors.

        Raises:
            LayoutDiffers: it exists with another layout.
            InvalidRequest: a name or a number is out of range.
            OverBudget: the catalogue has reached the budget.
            OverQuota: the table does not fit into what the tenant may have.
        """
        check_namespace(namespace)
        check_prefill(prefill_ms)
        if model_id:
            check_model_id(model_id)
        if not layout.tensors:
            raise InvalidRequest("layout", "required")
        table_bytes = len(table.hashes) if table is not None else 0
        self.space.check_declared(table_bytes)
        with self._catalog.write() as transaction:
            row = transaction.by_name(tenant, namespace)
            if (
                row is not None
                and row.layout != layout.to_json()
                and not _declares(transaction, row, layout)
            ):
                raise LayoutDiffers(f"{namespace!r} has another layout", namespace=namespace)
            if row is None:
                identity = transaction.insert(
                    NewPrefix.registered(
                        tenant,
                        namespace,
                        layout.to_json(),
                        model_id=model_id,
                        fidelity=layout.fidelity,
                    )
                )
                row = transaction.by_id(identity)
                assert row is not None
            if table is not None:
                MatchIndex(transaction).set_block_table(row.id, table.block_tokens, table.hashes)
                self.space.keep_quota(transaction, tenant, table_bytes, row.id)
            transaction.update(row.id, prefill_ms=prefill_ms)
            info = prefix_info(transaction, row._replace(prefill_ms=prefill_ms))
        if table is not None:
            self.space.sweep()
        return info

    def lookup(
        self, tenant: str, queries: list[LookupQuery], lease_ms: int = 0
    ) -> list[LookupResult]:
        """Says of each name whether it holds what is expected; counts a hit or a miss each."""
        check_lease(lease_ms)
        if len(queries) > limits.NAMES_MAX:
            raise InvalidRequest("queries", f"more than {limits.NAMES_MAX}", limit=limits.NAMES_MAX)
        results = look_up(self.workshop, tenant, queries, lease_ms)
        for query, result in zip(queries, results, strict=True):
            self.ledger.lookup(hit=result.hit)
            if result.hit:
                self._credit(query, result)
        return results

    def match(self, tenant: str, query: MatchQuery) -> MatchResult:
        """Returns the longest stored prefix of a token sequence; counts a hit or a miss."""
        result = find_longest(self.workshop, tenant, query)
        self.ledger.lookup(hit=result.hit)
        return result

    def list_page(
        self, tenant: str, *, prefix: str = "", after: str = "", count: int = 100
    ) -> list[PrefixInfo]:
        """Returns visible prefixes by name, those that follow `after`."""
        check_number("page_size", count, limits.NAMES_MAX, least=1)
        with self._catalog.read() as transaction:
            rows = transaction.page(tenant, prefix, after, count)
            return [prefix_info(transaction, row) for row in rows]

    def block_table(self, tenant: str, namespace: str) -> BlockTable | None:
        """Returns the caller's table of a prefix."""
        check_namespace(namespace)
        with self._catalog.read() as transaction:
            row = transaction.by_name(tenant, namespace)
            table = MatchIndex(transaction).block_table(row.id) if row else None
        if row is None or table is None:
            return None
        self.space.uses.note(row.id, "k")
        return BlockTable(table.block_tokens, bytes(table.hashes))

    def membership(self, tenant: str, namespace: str, probes: bytes) -> bytes | None:
        """Returns a bitmap: bit i & 7 of byte i >> 3 says whether probe i (u64 LE) is in the table.

        None if the prefix is unknown or has no table.
        """
        check_hashes("hashes", probes)
        table = self.block_table(tenant, namespace)
        if table is None or not table.hashes:
            return None
        return membership(table.hashes, probes)

    # -- storing

    def store(self, tenant: str, header: StoreHeader) -> PrefixUpload | Stored:
        """Begins a Store; returns an upload, or the acknowledgement if the same is stored.

        Pass what `publish` returns to `stored`.
        """
        return begin_store(self.workshop, tenant, header)

    def stored(self, tenant: str, header: StoreHeader, stored: Stored) -> None:
        """Notes the measured prefill time of a published prefix, in place of one that was declared."""
        if not header.prefill_ms:
            return
        # Without room for it the prefix is stored all the same.
        with contextlib.suppress(DiskFull), self._catalog.write() as transaction:
            row = transaction.by_name(tenant, stored.namespace)
            if row is not None and row.generation == stored.generation:
                transaction.update(row.id, prefill_ms=header.prefill_ms)

    def write_rows(self, tenant: str, header: WriteRowsHeader) -> RowsUpload:
        """Begins to write rows into one tensor of a registered or stored prefix."""
        return begin_rows(self.workshop, tenant, header)

    def drop(self, tenant: str, namespaces: list[str]) -> list[bool]:
        """Takes names and their matches away at once; says of each whether anything was there."""
        check_names(namespaces)
        dropped = []
        with self._catalog.write(removing=True) as transaction:
            for namespace in namespaces:
                row = transaction.by_name(tenant, namespace)
                if row is not None:
                    self.space.remove(transaction, row)
                dropped.append(row is not None)
        self.space.sweep()
        return dropped

    def save(self, tenant: str | None, namespaces: list[str]) -> int:
        """Seals live prefixes (of one tenant, or all): one segment each, on stable storage.

        Returns how many are segments now and were not before. Those that nobody names, and that would
        be zeros for the most part, are brought to stable storage as the rows they are.

        Raises:
            NotStored: one that is named is not there.
            PionError: why the first of those that could not be sealed was not; all others are.
        """
        check_names(namespaces)
        with self._catalog.read() as transaction:
            if namespaces:
                rows = []
                for namespace in namespaces:
                    row = transaction.by_name(tenant or "", namespace)
                    if row is None:
                        raise NotStored(f"{namespace!r} is not stored", namespace=namespace)
                    rows.append(row)
            else:
                rows = transaction.live(tenant)
        sealed, failed = 0, None
        for row in rows:
            try:
                if not namespaces and is_mostly_gaps(row):
                    sync_prefixes(self.workshop, [row])
                elif row.state == "live":
                    sealed += seal(self.workshop, row)
            except PionError as error:
                problem = error.problem if isinstance(error, Unreadable) else error
                self.space.losses.trouble(
                    row.namespace, f"{row.namespace!r} is not sealed: {problem}"
                )
                failed = failed or error
        if failed is not None:
            raise failed
        return sealed

    def sync(self) -> None:
        """Returns when everything acknowledged before is on stable storage."""
        with self._catalog.read() as transaction:
            unsynced = transaction.unsynced()
        self.blobs.sync()
        sync_prefixes(self.workshop, unsynced)

    # -- fetching

    def fetch(self, tenant: str, query: FetchQuery) -> Fetch | LookupResult:
        """Opens rows for streaming; a result without a hit says why there are none.

        Parts that are asked for cut the rows to a boundary that has them all, unless the query names
        where the rows end: then one that is not there is a miss.

        Pass the fetch to `fetched` when it has ended well.

        Raises:
            RowsOutOfRange: the prefix does not have them.
            GenerationDiffers: it changed since the generation asked for.
            Evicted: the lease has ended.
            Corrupt: a file is damaged; the prefix has been taken out.
        """
        opened = open_prefix(self.workshop, tenant, query, within)
        if isinstance(opened, LookupResult):
            return opened
        try:
            check_slots(query.slots, opened.info.layout)
        except InvalidRequest:
            opened.reading.close()
            raise
        rows = opened.reading.rows
        self.space.uses.note(opened.prefix.id)
        restore = NO_RESTORE
        # Some of the tensors spare nobody a prefill.
        if query.counted and len(opened.reading.tensors) == len(opened.info.layout.tensors):
            restore = restore_of(opened.reading.chain, rows)
        token_ids = opened.token_ids[: 4 * rows.end]
        return Fetch(opened.info, opened.reading, token_ids, restore, opened.shortened_by)

    def open_rows(self, tenant: str, query: FetchQuery) -> Reading | None:
        """Opens a prefix to read any rows of its tensors, also those that not all of them have.

        None if it has no rows. `guarded` closes it. Raises as `fetch` does.
        """
        opened = open_prefix(self.workshop, tenant, query, lambda asked, row: asked)
        if isinstance(opened, LookupResult):
            return None
        self.space.uses.note(opened.prefix.id, "".join(side.value for side in query.sides))
        return opened.reading

    def guarded(self, reading: Reading) -> contextlib.AbstractContextManager[None]:
        """Closes a reading at the end, and takes out the prefix whose damage it meets."""
        return guarded(self.space, reading)

    def fetched(self, fetch: Fetch, streamed_bytes: int) -> None:
        """Counts a Fetch that has ended well."""
        self.ledger.restored(fetch.restore, streamed=streamed_bytes)

    def export(self, tenant: str, query: FetchQuery, lease_ms: int) -> Export:
        """Names the segments that hold rows, for a client on the same host, and leases them.

        Raises:
            NotStored: there is nothing, or not with the parts asked for, or there are rows that are in
                no segment (stream those instead).
            As `fetch` does.
        """
        check_lease(lease_ms)
        while True:
            found = self.fetch(tenant, query)
            if isinstance(found, LookupResult):
                name = found.prefix.namespace if found.prefix else query.namespace
                without = f" with the {found.shortened_by!r}" if found.shortened_by else ""
                raise NotStored(f"{name!r} is not stored{without}", namespace=name)
            with self.guarded(found.reading):
                if found.prefix.state is not State.SEALED:
                    raise NotStored(
                        f"{found.prefix.namespace!r} is live, its rows are in no segment yet: stream "
                        "them",
                        namespace=found.prefix.namespace,
                    )
                extents = tuple(self.exports.extents(found.reading))
                lease = b""
                with self._catalog.write() as transaction:
                    chain = found.reading.chain
                    if all(_has_file(transaction, row) for row in chain):
                        lease = add_lease(transaction, chain[-1].id, max(lease_ms, 1))
            if lease:  # else files went before they could be leased: look again
                self.ledger.restored(found.restore, exported=found.reading.total_bytes)
                rows, cut = found.reading.rows, found.shortened_by
                return Export(found.prefix, rows, extents, found.token_ids, lease, cut)

    def read_rows(
        self, tenant: str, namespace: str, slot: int, side: Side, rows: Sequence[int]
    ) -> tuple[Layout, Iterator[bytes]] | None:
        """Returns scattered rows of one tensor in the order asked; those beyond the end are zeros.

        None if none of them exists. The layout has that tensor only.

        Raises:
            NotStored: the prefix is not stored.
            LayoutDiffers: it has no such tensor.
        """
        if not 1 <= len(rows) <= limits.SCATTERED_ROWS_MAX:
            raise InvalidRequest("rows", f"1 to {limits.SCATTERED_ROWS_MAX} rows are allowed")
        query = FetchQuery(
            namespace, slots=frozenset({slot}), codecs=frozenset(), sides=frozenset({side})
        )
        opened = open_prefix(self.workshop, tenant, query, lambda asked, row: asked)
        if isinstance(opened, LookupResult):
            if opened.reason is MissReason.NO_ROWS:
                return None
            raise NotStored(f"{namespace!r} is not stored", namespace=namespace)
        reading = opened.reading
        if not reading.tensors:
            reading.close()
            raise LayoutDiffers(f"{namespace!r} has no {side.value}.{slot}", namespace=namespace)
        self.space.uses.note(opened.prefix.id)
        if min(rows) >= reading.row_counts[reading.tensors[0]]:
            reading.close()
            return None
        return reading.served_layout, self._scattered(reading, rows)

    # -- housekeeping

    def tick(self) -> None:
        """Flushes uses, ends leases and removes what waited for them: call it about once a second."""
        self.space.uses.flush()
        housekeeping.end_leases(self.workshop)
        self.receipt.publish()

    def clean(self) -> None:
        """Buries what is dead, counts foreign files, folds the log: call it every half minute."""
        housekeeping.clean(self.workshop)

    def totals(self, tenant: str | None = None) -> Totals:
        """Returns what is stored, and what it takes: in all, or of one tenant."""
        return housekeeping.totals(self.workshop, tenant)

    # -- parts of the above

    def _credit(self, query: LookupQuery, result: LookupResult) -> None:
        """Counts what a caller restored by other means than Fetch, if it says so."""
        if query.restored_tokens is None and query.restored_prefill_ms is None:
            return
        assert result.prefix is not None
        tokens = query.restored_tokens
        if tokens is None:
            tokens = result.prefix.token_count
        self.ledger.restored(Restore.reported(tokens, query.restored_prefill_ms))

    def _scattered(self, reading: Reading, rows: Sequence[int]) -> Iterator[bytes]:
        per_chunk = max(1, limits.CHUNK_BYTES_MAX // max(reading.served_layout.row_bytes, 1))
        with self.guarded(reading):
            for start in range(0, len(rows), per_chunk):
                yield b"".join(reading.row(0, row) for row in rows[start : start + per_chunk])


def _has_file(transaction: Transaction, row: PrefixRow) -> bool:
    """Whether a prefix of which a file was opened has not been removed, or sealed anew."""
    now = transaction.by_id(row.id)
    return now is not None and now.file == row.file


def _declares(transaction: Transaction, row: PrefixRow, layout: Layout) -> bool:
    """Whether sessions declare just these sides of a prefix, and of all these tensors the same."""
    sides = {tensor.side for tensor in layout.tensors}
    return sides == set(map(Side, Sides(transaction).of(row.id))) and all(
        tensor_of(transaction, row, tensor.slot, tensor.side) == tensor for tensor in layout.tensors
    )
