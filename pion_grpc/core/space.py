"""Space: budgets, eviction, and taking prefixes out of the store.

Budgets are enforced before a byte is written. What goes is the least recently used prefix that nothing
needs: leaves of a chain before their parents, never a leased or an open one. Taking a prefix out has two
steps. *Hiding* takes its name and its matches away at once. *Collecting* removes its rows when no child
and no lease needs them any more, and then whatever waited only for it.

The methods run inside a caller's write transaction and collect the names of files that nobody needs;
the caller removes those files after the commit (`sweep`), so that a crash in between loses nothing.
"""

import threading
from collections.abc import Iterable

from pion_grpc.core.matching import nodes
from pion_grpc.errors import OverBudget, OverQuota
from pion_grpc.storage.catalog import Catalog, PrefixRow, Transaction, unix_ms
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.files import Files

CATALOG_HEADROOM_BYTES = 4 << 20
"""What the database may grow between two looks at its size."""


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
        self._foreign_bytes = 0
        self._evicted = 0

    @property
    def evicted_count(self) -> int:
        """Prefixes evicted since the start."""
        return self._evicted

    def used_bytes(self, transaction: Transaction) -> int:
        """Returns the bytes of every file of the directory, reservations included."""
        return transaction.usage() + self._foreign_bytes + self._directory.catalog_bytes()

    def make_room(self, transaction: Transaction, tenant: str, needed: int) -> None:
        """Evicts until what is reserved fits; call it after the reservation was inserted.

        Raises:
            OverBudget: it cannot fit, even with everything gone that may go.
            OverQuota: the tenant's quota would be exceeded.
        """
        overhead = self._foreign_bytes + self._directory.catalog_bytes() + CATALOG_HEADROOM_BYTES
        if needed + overhead > self.budget_bytes:
            raise self._over_budget(needed)
        evicted = 0
        while transaction.stored_bytes() + overhead > self.budget_bytes:
            victim = transaction.victim(unix_ms(), None)
            if victim is None:
                raise self._over_budget(needed)
            self.remove(transaction, victim)
            evicted += 1
        quota = self.tenant_budget_bytes
        while quota and transaction.usage(tenant) > quota:
            victim = transaction.victim(unix_ms(), tenant)
            if victim is None or needed > quota:
                raise OverQuota(
                    f"{needed} bytes do not fit into the tenant's {quota}",
                    needed_bytes=needed,
                    budget_bytes=quota,
                )
            self.remove(transaction, victim)
            evicted += 1
        with self._lock:
            self._evicted += evicted

    def remove(self, transaction: Transaction, prefix: PrefixRow) -> None:
        """Hides a prefix, and collects it if nothing needs its rows."""
        self.hide(transaction, prefix)
        self.collect(transaction, prefix.id)

    def hide(self, transaction: Transaction, prefix: PrefixRow) -> None:
        """Takes a prefix's name and matches away; its children answer for the tokens they share."""
        if not prefix.visible:
            return
        token_ids = transaction.token_ids(prefix.id)
        if token_ids:
            transaction.remove_nodes(prefix.id, _nodes(prefix, token_ids))
            for child in transaction.children(prefix.id):
                if child.visible:
                    shared = token_ids[: 4 * child.base]
                    transaction.add_nodes(child.id, whole_nodes(child, shared))
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
                or transaction.is_leased(prefix, unix_ms())
                or transaction.is_reserved(prefix)
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

    def sweep(self) -> None:
        """Removes the files that nobody names any more."""
        with self._catalog.read() as transaction:
            garbage = transaction.garbage()
        if not garbage:
            return
        for name in garbage:
            self._files.unlink(self._directory.resolve(name))
        with self._catalog.write() as transaction:
            transaction.forget_garbage(garbage)

    def bury_dead_instances(self) -> int:
        """Cleans up after processes that are gone: their open prefixes, reservations and files.

        Returns the number of instances.
        """
        buried = 0
        for instance in self._directory.dead_instances():
            self._bury(instance)
            buried += 1
        with self._catalog.read() as transaction:
            owners = transaction.owners()
        for instance in owners - self._directory.live_instances():
            self._bury(instance)
            buried += 1
        self.sweep()
        return buried

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
            transaction.release_all(instance)
        left = list(self._directory.files_of(instance))
        with self._catalog.read() as transaction:
            named = transaction.files() if left else set()
        for path in left:
            if self._directory.name_of(path) not in named:
                self._files.unlink(path)

    def _over_budget(self, needed: int) -> OverBudget:
        return OverBudget(
            f"{needed} bytes do not fit into the budget of {self.budget_bytes}: raise --disk-budget, or "
            "drop prefixes that are leased",
            needed_bytes=needed,
            budget_bytes=self.budget_bytes,
        )


def whole_nodes(prefix: PrefixRow, token_ids: bytes) -> Iterable[tuple[bytes, bytes]]:
    """Returns the index entries of the whole blocks of `token_ids`, as a prefix of `prefix`'s kind."""
    from_whole_blocks = token_ids[: len(token_ids) // 256 * 256]
    return _nodes(prefix, from_whole_blocks) if from_whole_blocks else []


def _nodes(prefix: PrefixRow, token_ids: bytes) -> list[tuple[bytes, bytes]]:
    return nodes(prefix.tenant, prefix.model_id, prefix.fidelity, token_ids)
