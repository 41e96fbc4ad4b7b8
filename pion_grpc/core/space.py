"""Space: budgets, eviction, and taking prefixes out of the store.

Budgets are enforced before a byte is written. What goes is the least recently used prefix that nothing
needs: leaves of a chain before their parents, never a leased or an open one. Taking a prefix out has two
steps. *Hiding* takes its name and its matches away at once. *Collecting* removes its rows when no child
and no lease needs them any more, and then whatever waited only for it.

The methods run inside a caller's write transaction and collect the names of files that nobody needs;
the caller removes those files after the commit (`sweep`), so that a crash in between loses nothing.
"""

import contextlib
import threading
from pathlib import Path

from pion_grpc.core.indexing import leave_index
from pion_grpc.core.losses import Losses
from pion_grpc.core.reading import CorruptPrefix
from pion_grpc.core.receipt import leave_behind
from pion_grpc.core.uses import Uses
from pion_grpc.errors import DiskFull, OverBudget, OverQuota
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.blobs import Blobs
from pion_grpc.storage.catalog import Catalog
from pion_grpc.storage.copies import Copies
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.extents import Extents
from pion_grpc.storage.files import Files
from pion_grpc.storage.leases import Leases
from pion_grpc.storage.states import States
from pion_grpc.storage.transaction import PrefixRow, Transaction, unix_ms

CATALOG_HEADROOM_BYTES = 4 << 20
"""What the database may grow between two looks at its size."""
CATALOG_BYTES_PER_TOKEN = 12
"""The id itself and its share of the match index."""
FREE_BYTES_MAX = 2 << 20
"""Pages of the database that may lie empty before they are given back."""


class Space:
    """The budgets of one data directory, and what is done to keep them."""

    def __init__(
        self,
        directory: DataDirectory,
        catalog: Catalog,
        files: Files,
        budget_bytes: int,
        tenant_budget_bytes: int = 0,
    ) -> None:
        self._directory = directory
        self._catalog = catalog
        self._files = files
        self.budget_bytes = budget_bytes
        self.tenant_budget_bytes = tenant_budget_bytes
        self._lock = threading.Lock()
        self.uses = Uses(directory, catalog)
        """What was used when: eviction chooses by it."""
        self.losses = Losses()
        """What has gone, for the log."""
        self._foreign_bytes = 0
        self._ended_stores: set[int] = set()
        self._ended_reservations: dict[int, int] = {}
        self._damaged_blobs: set[int] = set()

    def used_bytes(self, transaction: Transaction) -> int:
        """Returns the bytes of every file of the directory, reservations included."""
        return Accounts(transaction).usage() + self._foreign_bytes + self._directory.catalog_bytes()

    def _overhead_bytes(self) -> int:
        """Returns what counts beside the files that the catalogue names, the database's own included."""
        return self._foreign_bytes + self._directory.catalog_bytes() + CATALOG_HEADROOM_BYTES

    def reserve(self, transaction: Transaction, tenant: str, size: int, prefix: int = 0) -> int:
        """Counts bytes that are about to be written, and evicts until they fit; sweep afterwards.

        Args:
            transaction: to write in.
            tenant: whose bytes they are.
            size: how many.
            prefix: the live prefix that they belong to; 0: to none.

        Returns:
            The reservation, to be released when they are written.

        Raises:
            As `make_room` does.
        """
        owner = self._directory.instance
        reservation = Accounts(transaction).reserve(owner, tenant, prefix, size)
        self.make_room(transaction, tenant, size)
        return reservation

    def make_room(
        self,
        transaction: Transaction,
        tenant: str,
        needed: int,
        token_count: int = 0,
        grown_bytes: int = 0,
    ) -> None:
        """Evicts until what is reserved fits; call it after the reservation was inserted.

        Token ids take room in the catalogue itself, the more so until its log has been folded.
        `grown_bytes` is what this transaction has added to it, which its file does not show yet.

        Raises:
            OverBudget: it cannot fit, even with everything gone that may go.
            OverQuota: the tenant's quota would be exceeded.
        """
        growth = token_count * CATALOG_BYTES_PER_TOKEN
        # What is written to the database is in its log as well.
        overhead = self._overhead_bytes() + growth + grown_bytes
        if needed + overhead > self.budget_bytes:
            raise self._over_budget(needed)

        def too_much() -> bool:
            left_free = max(0, growth - transaction.free_bytes())
            return Accounts(transaction).stored_bytes() + overhead + left_free > self.budget_bytes

        evicted: list[str] = []
        if too_much():
            self.uses.gather(transaction)
        while too_much():
            if not self._give_way(transaction, None, evicted):
                raise self._over_budget(needed)
        self.keep_quota(transaction, tenant, needed)
        self.losses.evicted(evicted)  # not before: what is refused evicts nothing

    def keep_quota(
        self, transaction: Transaction, tenant: str, needed: int, prefix: int = 0
    ) -> None:
        """Evicts what is the tenant's until its quota holds; call it after all of it was counted.

        `prefix`, if it is one, is not evicted for itself.

        Raises:
            OverQuota: it cannot hold.
        """
        quota = self.tenant_budget_bytes

        def too_much() -> bool:
            return bool(quota) and Accounts(transaction).usage(tenant) > quota

        evicted: list[str] = []
        if too_much():
            self.uses.gather(transaction)
        while too_much():
            if (
                needed > quota
                or not self._give_way(transaction, tenant, evicted)
                or (prefix and transaction.by_id(prefix) is None)
            ):
                raise OverQuota(
                    f"{needed} bytes do not fit into the tenant's {quota}",
                    needed_bytes=needed,
                    budget_bytes=quota,
                )
        self.losses.evicted(evicted)

    def has_room(
        self, transaction: Transaction, tenant: str, needed: int, grown_bytes: int = 0
    ) -> bool:
        """Whether this many bytes fit into what a transaction sees, with nothing reserved or evicted."""
        stored = (
            Accounts(transaction).stored_bytes() + needed + self._overhead_bytes() + grown_bytes
        )
        quota = self.tenant_budget_bytes
        return stored <= self.budget_bytes and (
            not quota or Accounts(transaction).usage(tenant) + needed <= quota
        )

    def _give_way(self, transaction: Transaction, tenant: str | None, evicted: list[str]) -> bool:
        """Evicts one: a copy if there is any, else the least recently used prefix or session of states.

        Returns whether there was one to evict.
        """
        if Copies(transaction).remove_least_used(tenant):
            return True
        prefix = transaction.victim(unix_ms(), tenant)
        states = States(transaction).least_used(tenant)
        if states is not None and (prefix is None or states[2] < prefix.last_use):
            States(transaction).remove(*states[:2])
        elif prefix is not None:
            self.remove(transaction, prefix)
            evicted.append(prefix.namespace)
        else:
            return False
        return True

    def check_declared(self, size: int) -> None:
        """Refuses what is declared without rows once the catalogue itself has reached the budget.

        Nothing is evicted for it: pages of the catalogue come back later, with the next clean-up.

        Raises:
            OverBudget: it cannot fit.
        """
        if self._overhead_bytes() + 2 * size > self.budget_bytes:  # in the database and in its log
            raise self._over_budget(size)

    def remove(self, transaction: Transaction, prefix: PrefixRow) -> None:
        """Hides a prefix, and collects it if nothing needs its rows."""
        self.hide(transaction, prefix)
        self.collect(transaction, prefix.id)

    def hide(self, transaction: Transaction, prefix: PrefixRow) -> None:
        """Takes a prefix's name and matches away; its children answer for the tokens they share."""
        if not prefix.visible:
            return
        leave_index(transaction, prefix)
        transaction.update(prefix.id, visible=0)

    def collect(self, transaction: Transaction, prefix: int | None) -> None:
        """Deletes a hidden prefix that nothing needs, then its parent if it waited for that only."""
        while prefix is not None:
            row = transaction.by_id(prefix)
            if (
                row is None
                or row.visible
                or row.state == "open"
                or transaction.children(prefix)
                or Leases(transaction).is_leased(prefix, unix_ms())
                or Accounts(transaction).is_reserved(prefix)
            ):
                return
            transaction.delete(prefix)
            prefix = row.parent

    def condemn(self, transaction: Transaction, prefix: int) -> None:
        """Takes a damaged prefix and its descendants out, whatever needs them."""
        row = transaction.by_id(prefix)
        if row is None:
            return
        self.hide(transaction, row)
        for child in transaction.children(prefix):
            self.condemn(transaction, child.id)
        transaction.delete(prefix)
        self.collect(transaction, row.parent)

    def end_store(self, prefix: int) -> None:
        """Forgets an open prefix that will not be published."""
        with self._lock:
            self._ended_stores.add(prefix)
        self.sweep()

    def end_reservation(self, reservation: int, prefix: int = 0) -> None:
        """Gives back the bytes that were reserved, for rows of a live prefix if one is named."""
        with self._lock:
            self._ended_reservations[reservation] = prefix
        self.sweep()

    def end_blob(self, blob: int) -> None:
        """Leaves a damaged value to the next sweep: whoever met it may be inside a transaction."""
        with self._lock:
            self._damaged_blobs.add(blob)

    @property
    def has_damaged_blobs(self) -> bool:
        """Whether the next sweep takes out a damaged value."""
        return bool(self._damaged_blobs)

    def take_out(self, error: CorruptPrefix) -> bool:
        """Takes out the prefix whose damage was met, and its descendants.

        Returns False if it has gone, or has another file by now: what was read was on its way out.
        """
        with self._catalog.write() as transaction:
            row = transaction.by_id(error.prefix)
            if row is None:
                return False
            name = self._directory.name_of(error.path)
            if name != row.file and name not in Extents(transaction).files(row.id):
                return False
            self.condemn(transaction, row.id)
            self.losses.corrupt(name)
        self.losses.trouble(name, str(error))
        self.sweep()
        return True

    def sweep(self) -> None:
        """Forgets what has ended, and removes the files that nobody names any more.

        It fails where the catalogue cannot be written, on a full disk; what is left is the next
        one's, and whoever calls has done its own work by then. So is a file that does not go.
        """
        with contextlib.suppress(DiskFull):
            self._forget_ended()
            with self._catalog.read() as transaction:
                garbage = Accounts(transaction).garbage()
            if not garbage:
                return
            gone = [name for name in garbage if self._removed(self._directory.resolve(name))]
            if not gone:
                return
            with self._catalog.write() as transaction:
                Accounts(transaction).forget_garbage(gone)
                free = transaction.free_bytes()
            if free > FREE_BYTES_MAX:
                self._catalog.checkpoint()
            self._catalog.hold_reserve()

    def _removed(self, path: Path) -> bool:
        """Removes a file; says whether it is gone."""
        try:
            self._files.unlink(path)
        except OSError as error:
            self.losses.trouble(self._directory.name_of(path), f"{path} stays: {error.strerror}")
            return False
        return True

    def _forget_ended(self) -> None:
        with self._lock:
            stores, self._ended_stores = self._ended_stores, set()
            reservations, self._ended_reservations = self._ended_reservations, {}
            blobs, self._damaged_blobs = self._damaged_blobs, set()
        if not stores and not reservations and not blobs:
            return
        try:
            with self._catalog.write() as transaction:
                for prefix in stores:
                    row = transaction.by_id(prefix)
                    if row is not None and row.state == "open":
                        transaction.delete(prefix)
                        self.collect(transaction, row.parent)
                for reservation, prefix in reservations.items():
                    if Accounts(transaction).release(reservation):
                        self.collect(transaction, prefix)
                for blob in blobs:
                    Blobs(transaction).condemn(blob)
        except BaseException:
            with self._lock:
                self._ended_stores |= stores
                self._ended_reservations |= reservations
                self._damaged_blobs |= blobs
            raise

    def bury_dead_instances(self) -> None:
        """Cleans up after processes that are gone: their open prefixes, reservations and files."""
        for instance in self._directory.dead_instances():
            self._bury(instance)
        with self._catalog.read() as transaction:
            owners = transaction.owners()
        for instance in owners - self._directory.live_instances():
            self._bury(instance)
        self._directory.remove_scratch()
        self._remove_ownerless_files()
        self.sweep()

    def forget_layouts(self) -> None:
        """Removes the layouts that no prefix has any more; clients may invent new ones without end."""
        with self._catalog.read() as transaction:
            unused = transaction.unused_layouts()
        if unused:
            with self._catalog.write() as transaction:
                transaction.forget_layouts()

    def measure(self) -> None:
        """Counts the files of the directory that the catalogue does not."""
        with self._catalog.read() as transaction:
            named = transaction.files()
        live = self._directory.live_instances()
        self._foreign_bytes = self._directory.foreign_bytes(named, live)

    def _bury(self, instance: str) -> None:
        with self._catalog.write() as transaction:
            for prefix in transaction.open_of(instance):
                transaction.delete(prefix.id)
                self.collect(transaction, prefix.parent)
            Accounts(transaction).release_all(instance)
            self.uses.inherit(transaction, instance)
            published = self._directory.published_by(instance)
            leave_behind(transaction, published, self._directory.reset_unix_ms())
        self._remove_unnamed(list(self._directory.files_of(instance)))

    def _remove_ownerless_files(self) -> None:
        """Removes files that came back with a power cut or a copy, after their writer was buried."""
        # In this order: who writes a file has a lock before, and names it before the lock goes.
        left = list(self._directory.written_files())
        live = self._directory.live_instances()
        self._remove_unnamed([path for path in left if path.name.partition("-")[0] not in live])

    def _remove_unnamed(self, left: list[Path]) -> None:
        if not left:
            return
        with self._catalog.read() as transaction:
            named = transaction.files()
        unnamed = [path for path in left if self._directory.name_of(path) not in named]
        removed = [path for path in unnamed if self._removed(path)]
        # What a process noted in run/ for its own use was never stored.
        self.losses.ownerless(sum(self._directory.run not in path.parents for path in removed))

    def _over_budget(self, needed: int) -> OverBudget:
        return OverBudget(
            f"{needed} bytes do not fit into the budget of {self.budget_bytes}: raise --disk-budget, or "
            "drop prefixes that are leased",
            needed_bytes=needed,
            budget_bytes=self.budget_bytes,
        )
