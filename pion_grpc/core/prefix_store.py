"""The prefix store: what is stored under which name, and what of it is served.

What is asked, what matches and what is served are three numbers, and where they differ there is a
reason. A miss is an answer. A hit is never a lie: before a prefix is named in an answer its files have
been found with the right size, and after a boot that followed no clean stop every page of what was
acknowledged without a sync has been checked once.

Reads never write: uses are noted beside the catalogue and flushed by `tick`.
"""

import contextlib
import dataclasses
import functools
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from pion_grpc.core.blobs import BlobStore
from pion_grpc.core.exporting import Exports
from pion_grpc.core.live import RowsSession, begin_rows, is_mostly_gaps, seal, tensor_of
from pion_grpc.core.matching import cut_to_parts, longest_match, served_with_parts
from pion_grpc.core.membership import membership
from pion_grpc.core.reading import (
    CorruptPrefix,
    Reading,
    chain_parts,
)
from pion_grpc.core.receipt import NO_RESTORE, Ledger, Receipt, Restore, summed
from pion_grpc.core.recovery import Recovery
from pion_grpc.core.snapshots import Snapshots
from pion_grpc.core.space import Space
from pion_grpc.core.storing import StoreSession, begin_store
from pion_grpc.core.values import (
    TABLE_HASHES_MAX,
    BlockTable,
    Durability,
    Export,
    FetchQuery,
    LookupQuery,
    LookupResult,
    MatchQuery,
    MatchResult,
    MissReason,
    PrefixInfo,
    RowRange,
    State,
    Stored,
    StoreHeader,
    WriteRowsHeader,
    check_lease,
    check_model_id,
    check_names,
    check_namespace,
    check_prefill,
    check_slots,
)
from pion_grpc.core.workshop import RowFileNames, Workshop, sync_prefixes
from pion_grpc.errors import (
    Corrupt,
    DiskFull,
    Evicted,
    GenerationDiffers,
    InvalidRequest,
    LayoutDiffers,
    NotStored,
    OverBudget,
    PionError,
    RowsOutOfRange,
    Unreadable,
)
from pion_grpc.storage.blobs import Blobs
from pion_grpc.storage.catalog import (
    BlockTableRow,
    Catalog,
    ExtentRow,
    NewPrefix,
    PrefixRow,
    Transaction,
    unix_ms,
)
from pion_grpc.storage.directory import DataDirectory, boot_id
from pion_grpc.storage.files import Files
from pion_grpc.storage.row_snapshots import RowSnapshots
from pion_grpc.storage.sides import Sides
from pion_wire import limits
from pion_wire.blocks import common_tokens, root_hash
from pion_wire.layout import Layout, PartInfo, Side

Answer = TypeVar("Answer")
Result = TypeVar("Result", LookupResult, MatchResult)


LEASE_BYTES = 128
"""What a lease takes in the catalogue."""


class Fetch(NamedTuple):
    """An opened prefix, ready to be streamed. Close its reading."""

    prefix: PrefixInfo
    reading: Reading
    token_ids: bytes
    restore: Restore
    shortened_by: str
    """The kind of part that cut the rows; empty if none did."""


class Totals(NamedTuple):
    """What is stored, and what it takes."""

    prefixes: int
    rows: int
    disk_used_bytes: int
    live_bytes: int
    evicted: int
    corrupt: int


class _Opened(NamedTuple):
    prefix: PrefixRow
    info: PrefixInfo
    reading: Reading
    token_ids: bytes
    shortened_by: str


class _OutOfDate(Exception):
    """What was read of a prefix is no longer so: ask again."""


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
        self._recovery = Recovery(directory, self._catalog, self.space, boot)
        self.workshop = Workshop(
            directory,
            self._catalog,
            files,
            self.space,
            RowFileNames(directory.instance),
            self._recovery,
            boot,
        )
        """What the other halves of the core work with."""
        self.blobs = BlobStore(self.workshop)
        self._published: Receipt | None = None
        self.exports = Exports(directory)
        """What has been checked of the files that are named to clients."""
        self.snapshots = Snapshots(self.workshop)
        with self._catalog.starting():
            self.space.bury_dead_instances()
            self.is_first = self._begin_if_alone()
            """Whether a server has begun with this process: no other was there."""
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
        """
        check_namespace(namespace)
        check_prefill(prefill_ms)
        if model_id:
            check_model_id(model_id)
        if not layout.tensors:
            raise InvalidRequest("layout", "required")
        self.space.check_declared(len(table.hashes) if table is not None else 0)
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
                transaction.set_block_table(row.id, BlockTableRow(table.block_tokens, table.hashes))
            transaction.update(row.id, prefill_ms=prefill_ms)
            return self._info(transaction, row._replace(prefill_ms=prefill_ms))

    def lookup(
        self, tenant: str, queries: list[LookupQuery], lease_ms: int = 0
    ) -> list[LookupResult]:
        """Says of each name whether it holds what is expected; counts a hit or a miss each."""
        check_lease(lease_ms)
        if len(queries) > limits.NAMES_MAX:
            raise InvalidRequest("queries", f"more than {limits.NAMES_MAX}", limit=limits.NAMES_MAX)
        asks = [functools.partial(self._lookup, tenant, query) for query in queries]
        results = self._leased([self._sound(ask) for ask in asks], asks, lease_ms)
        for query, result in zip(queries, results, strict=True):
            self.ledger.lookup(hit=result.hit)
            if result.hit:
                self._credit(query, result)
        return results

    def match(self, tenant: str, query: MatchQuery) -> MatchResult:
        """Returns the longest stored prefix of a token sequence; counts a hit or a miss."""
        ask = functools.partial(self._match, tenant, query)
        (result,) = self._leased([self._sound(ask)], [ask], query.lease_ms)
        self.ledger.lookup(hit=result.hit)
        return result

    def list_page(
        self, tenant: str, *, prefix: str = "", after: str = "", count: int = 100
    ) -> list[PrefixInfo]:
        """Returns visible prefixes by name, those that follow `after`."""
        if not 1 <= count <= limits.NAMES_MAX:
            raise InvalidRequest("page_size", f"{count} is outside 1..{limits.NAMES_MAX}")
        with self._catalog.read() as transaction:
            rows = transaction.page(tenant, prefix, after, count)
            return [self._info(transaction, row) for row in rows]

    def block_table(self, tenant: str, namespace: str) -> BlockTable | None:
        """Returns the caller's table of a prefix."""
        check_namespace(namespace)
        with self._catalog.read() as transaction:
            row = transaction.by_name(tenant, namespace)
            table = transaction.block_table(row.id) if row else None
        if row is None or table is None:
            return None
        self.note_use(row.id, "k")
        return BlockTable(table.block_tokens, bytes(table.hashes))

    def membership(self, tenant: str, namespace: str, probes: bytes) -> bytes | None:
        """Returns a bitmap: bit i & 7 of byte i >> 3 says whether probe i (u64 LE) is in the table.

        None if the prefix is unknown or has no table.
        """
        if len(probes) % 8 or len(probes) > 8 * TABLE_HASHES_MAX:
            raise InvalidRequest(
                "hashes",
                f"{len(probes)} bytes are not at most {TABLE_HASHES_MAX} hashes of 8 bytes",
            )
        table = self.block_table(tenant, namespace)
        if table is None or not table.hashes:
            return None
        return membership(table.hashes, probes)

    # -- storing

    def store(self, tenant: str, header: StoreHeader) -> StoreSession | Stored:
        """Begins a Store; returns a session, or the acknowledgement if the same is stored.

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

    def write_rows(self, tenant: str, header: WriteRowsHeader) -> RowsSession:
        """Begins to write rows into one tensor of a registered or stored prefix."""
        return begin_rows(self.workshop, tenant, header)

    def drop(self, tenant: str, namespaces: list[str]) -> list[bool]:
        """Takes names and their matches away at once; says of each whether anything was there."""
        check_names(namespaces)
        dropped = []
        with self._catalog.write() as transaction:
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
                self.space.note_trouble(row.namespace, f"{row.namespace!r} is not sealed: {error}")
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
        opened = self._open(tenant, query, _range)
        if isinstance(opened, LookupResult):
            return opened
        try:
            check_slots(query.slots, opened.info.layout)
        except InvalidRequest:
            opened.reading.close()
            raise
        rows = opened.reading.rows
        self.note_use(opened.prefix.id)
        restore = NO_RESTORE
        # Some of the tensors spare nobody a prefill.
        if query.counted and len(opened.reading.tensors) == len(opened.info.layout.tensors):
            restore = self._restore(opened.reading.chain, rows)
        token_ids = opened.token_ids[: 4 * rows.end]
        return Fetch(opened.info, opened.reading, token_ids, restore, opened.shortened_by)

    def open_rows(self, tenant: str, query: FetchQuery) -> Reading | None:
        """Opens a prefix to read any rows of its tensors, also those that not all of them have.

        None if it has no rows. `guarded` closes it. Raises as `fetch` does.
        """
        opened = self._open(tenant, query, lambda asked, row: asked)
        if isinstance(opened, LookupResult):
            return None
        self.note_use(opened.prefix.id, "".join(side.value for side in query.sides))
        return opened.reading

    @contextlib.contextmanager
    def guarded(self, reading: Reading) -> Iterator[None]:
        """Closes a reading at the end, and takes out the prefix whose damage it meets."""
        try:
            yield
        except CorruptPrefix as error:
            error.metadata["namespace"] = reading.chain[-1].namespace
            self.space.take_out(error)
            raise
        finally:
            reading.close()

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
        found = self.fetch(tenant, query)
        if isinstance(found, LookupResult):
            name = found.prefix.namespace if found.prefix else query.namespace
            without = f" with the {found.shortened_by!r}" if found.shortened_by else ""
            raise NotStored(f"{name!r} is not stored{without}", namespace=name)
        with self.guarded(found.reading):
            if found.prefix.state is not State.SEALED:
                raise NotStored(
                    f"{found.prefix.namespace!r} is live, its rows are in no segment yet: stream them",
                    namespace=found.prefix.namespace,
                )
            extents = tuple(self.exports.extents(found.reading))
            row = found.reading.chain[-1]
            with self._catalog.write() as transaction:
                lease = _lease(transaction, row.id, max(lease_ms, 1))
            if not lease:
                raise Evicted(f"{row.namespace!r} went meanwhile", namespace=row.namespace)
        self.ledger.restored(found.restore, exported=found.reading.total_bytes)
        rows, cut = found.reading.rows, found.shortened_by
        return Export(found.prefix, rows, extents, found.token_ids, lease, cut)

    def read_rows(
        self, tenant: str, namespace: str, slot: int, side: Side, rows: np.ndarray
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
        opened = self._open(tenant, query, lambda asked, row: asked)
        if isinstance(opened, LookupResult):
            if opened.reason is MissReason.NO_ROWS:
                return None
            raise NotStored(f"{namespace!r} is not stored", namespace=namespace)
        reading = opened.reading
        if not reading.tensors:
            reading.close()
            raise LayoutDiffers(f"{namespace!r} has no {side.value}.{slot}", namespace=namespace)
        self.note_use(opened.prefix.id)
        if int(rows.min()) >= reading.row_counts[reading.tensors[0]]:
            reading.close()
            return None
        return reading.served_layout, self._scattered(reading, rows)

    # -- housekeeping

    def tick(self) -> None:
        """Flushes uses, ends leases and removes what waited for them: call it about once a second."""
        self.flush_uses()
        with self._catalog.read() as transaction:
            waiting = transaction.hidden()
            expired = transaction.has_expired_leases(unix_ms())
            expired = expired or Blobs(transaction).has_expired_leases()
        if waiting or expired:
            with self._catalog.write() as transaction:
                transaction.end_leases(unix_ms())
                Blobs(transaction).collect()
                for row in waiting:
                    self.space.collect(transaction, row.id)
        self.space.sweep()
        self._publish_receipt()

    def summed_receipt(self) -> Receipt:
        """Returns the receipt of all processes on this directory; of the others up to a second ago."""
        begun = self.directory.reset_unix_ms()
        others = [Receipt(*json.loads(text)) for text in self.directory.published()]
        counting = [other for other in others if other.since_unix_ms >= begun]
        return summed([self.ledger.get(), *counting])

    def reset_receipts(self) -> Receipt:
        """Begins to count anew in all processes on this directory; returns what they had together."""
        total = self.summed_receipt()
        self.directory.note_reset()
        self.ledger.reset()
        return total

    def _publish_receipt(self) -> None:
        receipt = self.ledger.get()
        if receipt.since_unix_ms < self.directory.reset_unix_ms():
            self.ledger.reset()
            receipt = self.ledger.get()
        if receipt != self._published:
            self.directory.publish(json.dumps(receipt))
            self._published = receipt

    def flush_uses(self) -> None:
        """Writes down which prefixes and states were used since the last flush."""
        self.space.uses.flush()

    def clean(self) -> None:
        """Buries what is dead, counts foreign files, folds the log: call it every half minute."""
        self.space.bury_dead_instances()
        self.space.measure()
        self.space.forget_layouts()
        self.keep_within_budget()
        self._catalog.checkpoint()

    def keep_within_budget(self) -> None:
        """Evicts what is too much, as after a start with a smaller budget."""
        with self._catalog.read() as transaction:
            too_much = self.space.used_bytes(transaction) > self.space.budget_bytes
        if too_much:
            # What is leased, or the catalogue alone, may be more than it should be.
            with contextlib.suppress(OverBudget), self._catalog.write() as transaction:
                self.space.make_room(transaction, "", 0)
            self.space.sweep()

    def totals(self, tenant: str | None = None) -> Totals:
        """Returns what is stored, and what it takes: in all, or of one tenant."""
        with self._catalog.read() as transaction:
            counted = transaction.totals(tenant)
            live = sum(row.disk_bytes for row in transaction.live(tenant))
            if tenant:
                return Totals(counted.prefixes, counted.rows, transaction.usage(tenant), live, 0, 0)
            used = self.space.used_bytes(transaction)
        space = self.space
        return Totals(
            counted.prefixes, counted.rows, used, live, space.evicted_count, space.corrupt_count
        )

    # -- parts of the above

    def _begin_if_alone(self) -> bool:
        """Forgets what lasts as long as a server, if no process of one is here; says whether so.

        On a full disk it stays: ways back that nobody knows of, and counts that go on.
        """
        with contextlib.suppress(DiskFull), self._catalog.write() as transaction:
            # In here: who is there has its lock, and who comes later writes nothing before this ends.
            if self.directory.live_instances() == {self.directory.instance}:
                RowSnapshots(transaction).clear()
                Sides(transaction).begin_counting()
                return True
        return False

    def _lookup(self, tenant: str, query: LookupQuery) -> tuple[LookupResult, int]:
        """Returns the answer, and of a hit the prefix."""
        with self._catalog.read() as transaction:
            row = transaction.by_name(tenant, query.namespace)
            if row is None:
                return LookupResult(hit=False, reason=MissReason.NOT_STORED), 0
            chain = transaction.chain(row)
            info = self._info(transaction, row, chain)
            token_ids = transaction.token_ids(row.id) if query.token_ids else b""
        reason, difference = _expectation(row, query, token_ids)
        if reason is not MissReason.NONE:
            miss = LookupResult(False, reason, prefix=info, first_difference=difference)
            return miss, 0
        if not self._recovery.vouch(chain):
            raise _OutOfDate
        self.note_use(row.id)
        return LookupResult(hit=True, reason=MissReason.NONE, prefix=info), row.id

    def _match(self, tenant: str, query: MatchQuery) -> tuple[MatchResult, int]:
        """Returns the answer, and of a hit the prefix."""
        requested = len(query.token_ids) // 4
        with self._catalog.read() as transaction:
            longest, longest_root = None, b""
            for fidelity in query.fidelities:
                root = root_hash(tenant, query.model_id, fidelity)
                found = longest_match(transaction, root, query.token_ids)
                if found is not None and (longest is None or found.tokens > longest.tokens):
                    longest, longest_root = found, root
            if longest is None:
                return MatchResult(False, MissReason.NOT_STORED, None, requested, 0, 0), 0
            row, matched, served, shortened_by = served_with_parts(
                transaction, longest_root, query.token_ids, longest, query.part_kinds
            )
            chain = transaction.chain(row)
            info = self._info(transaction, row, chain)
        reason = MissReason.NONE if served == requested else MissReason.PARTIAL
        if shortened_by:
            reason = MissReason.PART_MISSING
        result = MatchResult(
            hit=True,
            reason=reason,
            prefix=info,
            requested_tokens=requested,
            matched_tokens=matched,
            served_tokens=served,
            shortened_by=shortened_by,
            longest=longest.prefix.namespace,
            longest_tokens=longest.tokens,
        )
        if served < max(query.min_tokens, 1):
            reason = reason if shortened_by else MissReason.TOO_SHORT
            return dataclasses.replace(result, hit=False, reason=reason, served_tokens=0), 0
        if not self._recovery.vouch(chain):
            raise _OutOfDate
        self.note_use(row.id)
        return result, row.id

    def _sound(self, ask: Callable[[], Answer]) -> Answer:
        """Asks again after what was found damaged has been taken out."""
        while True:
            try:
                return ask()
            except CorruptPrefix as error:
                self.space.take_out(error)
            except _OutOfDate:
                continue

    def _credit(self, query: LookupQuery, result: LookupResult) -> None:
        """Counts what a caller restored by other means than Fetch, if it says so."""
        if query.restored_tokens is None and query.restored_prefill_ms is None:
            return
        assert result.prefix is not None
        tokens = query.restored_tokens
        if tokens is None:
            tokens = result.prefix.token_count
        seconds = (query.restored_prefill_ms or 0.0) / 1_000
        self.ledger.restored(Restore(tokens, seconds, 0 if seconds else tokens))

    def _open(
        self, tenant: str, query: FetchQuery, clamp: Callable[[RowRange, PrefixRow], RowRange]
    ) -> _Opened | LookupResult:
        attempts = 0
        while True:
            with self._catalog.read() as transaction:
                row = self._find(transaction, tenant, query)
                if row is None or row.state == "registered":
                    reason = MissReason.NO_ROWS if row else MissReason.NOT_STORED
                    return LookupResult(hit=False, reason=reason)
                chain = transaction.chain(row)
                extents = transaction.extents(row.id) if row.state == "live" else []
                token_ids = transaction.token_ids(row.id)
                info = self._info(transaction, row, chain)
            if query.generation and query.generation != row.generation:
                raise GenerationDiffers(
                    f"{row.namespace!r} has changed: ask for it anew",
                    namespace=row.namespace,
                    generation=row.generation,
                )
            try:
                if self._recovery.check(chain):
                    continue  # it has fewer rows than the catalogue said
                rows, cut = clamp(query.rows, row), ""
                if query.part_kinds:
                    rows, cut = _with_parts(query, rows, info.parts)
                    if not rows.end:
                        return LookupResult(False, MissReason.PART_MISSING, info, shortened_by=cut)
                reading = Reading(self.directory, chain, extents, query, rows)
            except FileNotFoundError as error:
                attempts += 1
                if attempts == 1:
                    continue  # evicted or saved meanwhile: look again
                self._take_out_missing(chain, extents)
                raise Corrupt(f"a file is gone: {error}", namespace=row.namespace) from error
            except CorruptPrefix as error:
                error.metadata["namespace"] = row.namespace
                self.space.take_out(error)
                raise
            except Unreadable as error:
                error.metadata["namespace"] = row.namespace
                self.space.note_trouble(row.namespace, str(error))
                raise
            return _Opened(row, info, reading, token_ids, cut)

    def _find(self, transaction: Transaction, tenant: str, query: FetchQuery) -> PrefixRow | None:
        if not query.lease_id:
            return transaction.by_name(tenant, query.namespace)
        row = transaction.by_lease(query.lease_id, unix_ms())
        if row is None or row.tenant != tenant:
            raise Evicted("the lease has ended: look the prefix up again")
        return row

    def _leased(
        self,
        found: list[tuple[Result, int]],
        asks: Sequence[Callable[[], tuple[Result, int]]],
        lease_ms: int,
    ) -> list[Result]:
        """Leases the prefixes of hits in one transaction: one lease each, however often it was hit.

        What was evicted since it was found is asked for again. No lease is given once the catalogue
        itself has reached the budget.
        """
        while lease_ms and any(prefix for _, prefix in found):
            try:
                self.space.check_declared(LEASE_BYTES * len(found))
            except OverBudget:
                break
            hits = {prefix for _, prefix in found if prefix}
            with self._catalog.write() as transaction:
                leases = {prefix: _lease(transaction, prefix, lease_ms) for prefix in hits}
            if all(leases.values()):
                return [
                    dataclasses.replace(answer, lease_id=leases[prefix]) if prefix else answer
                    for answer, prefix in found
                ]
            found = [
                self._sound(ask) if prefix and not leases[prefix] else (answer, prefix)
                for (answer, prefix), ask in zip(found, asks, strict=True)
            ]
        return [answer for answer, _ in found]

    def _scattered(self, reading: Reading, rows: np.ndarray) -> Iterator[bytes]:
        per_chunk = max(1, limits.CHUNK_BYTES_MAX // max(reading.served_layout.row_bytes, 1))
        with self.guarded(reading):
            for start in range(0, len(rows), per_chunk):
                wanted = rows[start : start + per_chunk].tolist()
                yield b"".join(reading.row(0, row) for row in wanted)

    def _take_out_missing(self, chain: list[PrefixRow], extents: list[ExtentRow]) -> None:
        """Takes out the first prefix of a chain whose file is gone."""
        for row in chain:
            names = [row.file or ""]
            if row is chain[-1]:
                names += [extent.file for extent in extents]
            for path in (self.directory.resolve(name) for name in names if name):
                if not path.exists():
                    self.space.take_out(CorruptPrefix(Corrupt(f"{path} is gone"), row.id, path))
                    return

    def _info(
        self, transaction: Transaction, row: PrefixRow, chain: list[PrefixRow] | None = None
    ) -> PrefixInfo:
        parent = transaction.by_id(row.parent) if row.parent is not None else None
        chain = chain or transaction.chain(row)
        return PrefixInfo(
            namespace=row.namespace,
            state=State(row.state),
            model_id=row.model_id,
            layout=Layout.from_json(row.layout),
            token_count=row.token_count,
            base=row.base,
            parent=parent.namespace if parent is not None and parent.visible else "",
            depth=row.depth,
            generation=row.generation,
            stored_bytes=row.disk_bytes,
            fidelity=row.fidelity,
            created_unix_ms=row.created_unix_ms,
            durability=Durability.DISK if row.boot is None else Durability.PROCESS,
            parts=chain_parts(chain),
            prefill_ms=row.prefill_ms,
        )

    def _restore(self, chain: list[PrefixRow], rows: RowRange) -> Restore:
        """Returns what handing out rows saves, by what is known of the chain's prefill times."""
        seconds, unknown = 0.0, 0
        for depth, row in enumerate(chain):
            above = chain[depth + 1].base if depth + 1 < len(chain) else rows.end
            served = max(0, min(above, rows.end) - max(row.base, rows.begin))
            if row.prefill_ms and row.token_count:  # of all its tokens, its parents' included
                seconds += row.prefill_ms / 1_000 * served / row.token_count
            else:
                unknown += served
        return Restore(rows.end - rows.begin, seconds, unknown)

    def note_use(self, prefix: int, sides: str = "") -> None:
        """Remembers that a prefix, or these sides of it, was used now."""
        self.space.uses.note(prefix, sides)

    def note_state_use(self, tenant: str, session: str) -> None:
        """Remembers that the states of a session were used now."""
        self.space.uses.note_state(tenant, session)


def _lease(transaction: Transaction, prefix: int, lease_ms: int) -> bytes:
    """Leases a prefix and returns the lease; empty if it went meanwhile."""
    if transaction.by_id(prefix) is None:
        return b""
    lease = secrets.token_bytes(16)
    transaction.add_lease(lease, prefix, unix_ms() + lease_ms)
    return lease


def _range(asked: RowRange, row: PrefixRow) -> RowRange:
    end = asked.end or row.token_count
    if not asked.begin <= end <= row.token_count:
        raise RowsOutOfRange(
            f"rows {asked.begin} to {end} of {row.namespace!r}, which has {row.token_count}",
            rows=row.token_count,
            namespace=row.namespace,
        )
    return RowRange(asked.begin, end)


def _with_parts(
    query: FetchQuery, rows: RowRange, parts: Sequence[PartInfo]
) -> tuple[RowRange, str]:
    """Returns the rows that end where the parts are, and the kind that cut them; none if there are none.

    An end that is named is the boundary, whichever slots have parts there; else it is the latest one
    that is whole.
    """
    if query.rows.end:
        there = {part.kind for part in parts if part.boundary_tokens == rows.end}
        cut = next((kind for kind in query.part_kinds if kind not in there), "")
        return (RowRange() if cut else rows), cut
    end, cut = cut_to_parts(parts, query.part_kinds, rows.end)
    return (RowRange(rows.begin, end) if end >= rows.begin else RowRange()), cut


def _declares(transaction: Transaction, row: PrefixRow, layout: Layout) -> bool:
    """Whether sessions declare just these sides of a prefix, and of all these tensors the same."""
    sides = {tensor.side for tensor in layout.tensors}
    return sides == set(map(Side, Sides(transaction).of(row.id))) and all(
        tensor_of(transaction, row, tensor.slot, tensor.side) == tensor for tensor in layout.tensors
    )


def _expectation(row: PrefixRow, query: LookupQuery, token_ids: bytes) -> tuple[MissReason, int]:
    """Returns why a prefix is not what a query expects, and the first token that differs."""
    if query.model_id and row.model_id != query.model_id:
        return MissReason.MODEL_DIFFERS, 0
    if query.token_ids and token_ids != query.token_ids and row.state != "registered":
        return MissReason.TOKENS_DIFFER, common_tokens(token_ids, query.token_ids)
    if query.layout is not None and row.layout != query.layout.to_json():
        return MissReason.LAYOUT_DIFFERS, 0
    if row.state == "registered":
        return MissReason.NO_ROWS, 0
    return MissReason.NONE, 0
