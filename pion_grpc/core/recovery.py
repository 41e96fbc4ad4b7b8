"""After another boot: what was acknowledged without a sync is checked once, before its first answer.

A power cut may have kept a commit and lost the bytes that it names. What was promised for such a
prefix (`PROCESS`) is nothing, but what lies beside it may have been promised more, so the smallest
piece that is damaged goes: a segment takes its prefix and its descendants out of the store; of rows
that were written into a live prefix, a lost batch takes those after it in its tensor, and every row
below them is again what it was before.
"""

import json

from pion_grpc.core.gaps import written_rows
from pion_grpc.core.indexing import keep_tokens
from pion_grpc.core.reading import (
    CorruptPrefix,
    naming,
    own_row_counts,
    sealed_row_counts,
    segment_layout,
)
from pion_grpc.core.space import Space
from pion_grpc.errors import Corrupt
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.catalog import Catalog
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.extents import ExtentRow, Extents
from pion_grpc.storage.pages import CheckedRun, OpenFile, open_segment
from pion_grpc.storage.sides import Sides
from pion_grpc.storage.transaction import PrefixRow, Transaction
from pion_wire.layout import Layout, TensorLayout


class Recovery:
    """Checks prefixes for one process."""

    def __init__(self, directory: DataDirectory, catalog: Catalog, space: Space, boot: str) -> None:
        self._directory = directory
        self._catalog = catalog
        self._space = space
        self._boot = boot

    def is_due(self, prefix: PrefixRow) -> bool:
        """Says whether a prefix may have lost bytes with a power cut."""
        return prefix.boot not in (None, self._boot)

    def check(self, chain: list[PrefixRow]) -> bool:
        """Checks the prefixes of a chain where that is due.

        Returns whether any has lost rows: what the caller knows of them is out of date then.

        Raises:
            CorruptPrefix: a segment is damaged or gone.
        """
        parent, lost = "", False
        for prefix in chain:
            if self.is_due(prefix):
                lost |= self._check(prefix, parent)
            parent = prefix.namespace
        return lost

    def vouch(self, chain: list[PrefixRow]) -> bool:
        """Makes sure that the files of a chain are there, with the right size.

        Returns False if some of its rows turned out to be lost: `chain` is out of date then.

        Raises:
            CorruptPrefix: a file is not there, or not right.
        """
        if self.check(chain):
            return False
        for row in chain:
            self._vouch_file(row, row.file, row.disk_bytes if row.state == "sealed" else None)
        if chain[-1].state == "live":
            with self._catalog.read() as transaction:
                names = Extents(transaction).files(chain[-1].id)
            for name in names:
                self._vouch_file(chain[-1], name, None)
        return True

    def _vouch_file(self, row: PrefixRow, name: str | None, size: int | None) -> None:
        if not name:
            return
        path = self._directory.resolve(name)
        try:
            actual = path.stat().st_size
        except FileNotFoundError:
            actual = -1
        if actual < 0 or (size is not None and actual != size):
            raise CorruptPrefix(Corrupt(f"{path} is damaged"), row.id, path)

    def make_sound(self, tenant: str, namespace: str) -> None:
        """Checks a name before something is built on it, and takes it out if it is damaged."""
        with self._catalog.read() as transaction:
            row = transaction.by_name(tenant, namespace)
            chain = transaction.chain(row) if row is not None else []
        try:
            self.check(chain)
        except CorruptPrefix as error:
            self._space.take_out(error)

    def _check(self, prefix: PrefixRow, parent: str) -> bool:
        with self._catalog.read() as transaction:
            extents = Extents(transaction).of(prefix.id)
        if prefix.file is not None:
            self._check_segment(prefix, parent)
        kept = self._surviving(prefix, extents)
        with self._catalog.write() as transaction:
            now = transaction.by_id(prefix.id)
            if now is None or _state(now) != _state(prefix):
                return True  # somebody was quicker
            if len(kept) < len(extents):
                self._cut(transaction, prefix, extents, kept)
            Extents(transaction).mark_synced(prefix.id)
        self._space.sweep()
        return len(kept) < len(extents)

    def _check_segment(self, prefix: PrefixRow, parent: str) -> None:
        assert prefix.file is not None
        path = self._directory.resolve(prefix.file)
        with naming(prefix.id, path):
            try:
                run = open_segment(path, segment_layout(prefix, parent))
            except FileNotFoundError as error:
                raise Corrupt(f"{path} is gone", namespace=prefix.namespace) from error
            try:
                run.check()
            finally:
                run.file.close()

    def _surviving(self, prefix: PrefixRow, extents: list[ExtentRow]) -> list[ExtentRow]:
        """Returns the extents up to the first lost one of each tensor."""
        tensors = {tensor.key: tensor for tensor in Layout.from_json(prefix.layout).tensors}
        kept, broken = [], set()
        for extent in extents:
            if extent.tensor in broken:
                continue
            if extent.boot is None or self._is_whole(extent, tensors[extent.tensor]):
                kept.append(extent)
            else:
                broken.add(extent.tensor)
        return kept

    def _is_whole(self, extent: ExtentRow, tensor: TensorLayout) -> bool:
        try:
            file = OpenFile(self._directory.resolve(extent.file))
        except FileNotFoundError:
            return False
        try:
            size = extent.row_count * tensor.row_bytes
            CheckedRun(file, extent.offset, size, extent.checksums).check()
        except Corrupt:
            return False
        finally:
            file.close()
        return True

    def _cut(
        self,
        transaction: Transaction,
        prefix: PrefixRow,
        extents: list[ExtentRow],
        kept: list[ExtentRow],
    ) -> None:
        """Makes a prefix what it is without its lost extents."""
        sides = Sides(transaction)
        layout, counts, in_file = _remaining(prefix, kept)
        count = prefix.base + min(counts, default=0)
        keep_tokens(transaction, prefix, count, layout.fidelity)
        Extents(transaction).replace(prefix.id, kept)
        for file in {extent.file for extent in extents} - {extent.file for extent in kept} - {""}:
            Accounts(transaction).add_garbage(file, 0)
        transaction.update(
            prefix.id,
            state="live",
            layout=layout.to_json(),
            fidelity=layout.fidelity,
            row_counts=json.dumps(counts),
            token_count=count,
        )
        if not kept and prefix.file is None:
            transaction.update(prefix.id, state="registered", row_counts="", disk_bytes=0)
        elif not kept and layout == in_file:
            transaction.update(
                prefix.id,
                state="sealed",
                row_counts=sealed_row_counts(counts),
                file_layout=None,
                file_row_counts="",
                disk_bytes=self._directory.resolve(prefix.file or "").stat().st_size,
            )
        transaction.new_generation(prefix.id)
        left = {tensor.key: count for tensor, count in zip(layout.tensors, counts, strict=True)}
        before = zip(Layout.from_json(prefix.layout).tensors, own_row_counts(prefix), strict=True)
        for tensor, count in before:
            end = prefix.base + left.get(tensor.key, 0)
            lost = prefix.base + count - end
            had = written_rows(prefix, tensor, extents[::-1], prefix.base, prefix.base + count)
            has = written_rows(prefix, tensor, kept[::-1], prefix.base, end)
            size = (had - has) * tensor.row_bytes
            sides.resized(prefix.id, tensor.side.value, -lost, -size)


def _remaining(prefix: PrefixRow, kept: list[ExtentRow]) -> tuple[Layout, list[int], Layout | None]:
    """Returns the layout, the rows of each of its tensors, and the layout of the segment.

    A tensor that has come since the segment, and has no extent left, is not there any more.
    """
    layout = Layout.from_json(prefix.layout)
    segment = segment_layout(prefix, "") if prefix.file is not None else None
    in_file: dict[TensorLayout, int] = {}
    if segment is not None:
        in_file = dict(zip(segment.layout.tensors, segment.row_counts, strict=True))
        written = {extent.tensor for extent in kept}
        there = (t for t in layout.tensors if t in in_file or t.key in written)
        layout = Layout(tuple(there))
    counts = {tensor.key: in_file.get(tensor, 0) for tensor in layout.tensors}
    for extent in kept:
        if extent.tensor not in counts:
            continue  # a hole over what the segment still has of a side that went
        first = extent.first_row - prefix.base
        # A hole stands where rows were cut off.
        end = max(counts[extent.tensor], first + extent.row_count) if extent.file else first
        counts[extent.tensor] = end
    return layout, list(counts.values()), segment.layout if segment is not None else None


def _state(prefix: PrefixRow) -> tuple[object, ...]:
    return prefix.generation, prefix.row_counts, prefix.state, prefix.file
