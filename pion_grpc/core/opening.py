"""Opening a stored prefix: from a name or a lease to files that can be read.

Knows nothing of what reading is worth to anybody. The one decision: the catalogue is read first and the
files are opened after it, without a lock in between. So a file that is gone is no damage in itself: the
prefix may have been evicted, replaced or sealed meanwhile. It is damage if the catalogue still names the
file afterwards; if not, the prefix is looked up again.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pion_grpc.core.matching import cut_to_parts
from pion_grpc.core.reading import CorruptPrefix, Reading, chain_parts, damaged
from pion_grpc.core.space import Space
from pion_grpc.core.values import (
    Durability,
    FetchQuery,
    LookupResult,
    MissReason,
    PrefixInfo,
    RowRange,
    State,
)
from pion_grpc.core.workshop import OutOfDate, Workshop
from pion_grpc.errors import Corrupt, Evicted, GenerationDiffers, RowsOutOfRange, Unreadable
from pion_grpc.storage.extents import ExtentRow, Extents
from pion_grpc.storage.match_index import MatchIndex
from pion_grpc.storage.transaction import PrefixRow, Transaction, unix_ms
from pion_wire.layout import Layout, PartInfo


class Opened(NamedTuple):
    """A prefix whose files are open. Close its reading."""

    prefix: PrefixRow
    info: PrefixInfo
    reading: Reading
    token_ids: bytes
    shortened_by: str


def open_prefix(
    workshop: Workshop,
    tenant: str,
    query: FetchQuery,
    clamp: Callable[[RowRange, PrefixRow], RowRange],
) -> Opened | LookupResult:
    """Opens what a query names; a result without a hit says why there is nothing.

    Args:
        workshop, tenant, query: where, whose and what.
        clamp: returns the rows to open, of those asked for and of a prefix.

    Raises:
        As `PrefixStore.fetch` does.
    """
    while True:
        with workshop.catalog.read() as transaction:
            row = _find(transaction, tenant, query)
            if row is None or row.state == "registered":
                reason = MissReason.NO_ROWS if row else MissReason.NOT_STORED
                return LookupResult(hit=False, reason=reason)
            chain = transaction.chain(row)
            extents = Extents(transaction).of(row.id) if row.state == "live" else []
            token_ids = MatchIndex(transaction).token_ids(row.id)
            info = prefix_info(transaction, row, chain)
        if query.generation and query.generation != row.generation:
            raise GenerationDiffers(
                f"{row.namespace!r} has changed: ask for it anew",
                namespace=row.namespace,
                generation=row.generation,
            )
        try:
            with condemning(workshop, chain, extents):
                if workshop.recovery.check(chain):
                    continue  # it has fewer rows than the catalogue said
                rows, cut = clamp(query.rows, row), ""
                if query.part_kinds:
                    rows, cut = _with_parts(query, rows, info.parts)
                    if not rows.end:
                        return LookupResult(False, MissReason.PART_MISSING, info, shortened_by=cut)
                reading = Reading(workshop.directory, chain, extents, query, rows)
        except OutOfDate:
            continue
        except Unreadable as error:
            error.metadata["namespace"] = row.namespace
            workshop.space.losses.trouble(row.namespace, error.problem)
            raise
        return Opened(row, info, reading, token_ids, cut)


@contextlib.contextmanager
def condemning(
    workshop: Workshop, chain: list[PrefixRow], extents: list[ExtentRow]
) -> Iterator[None]:
    """Takes out what of a chain turns out to be damaged or gone while its files are opened.

    Raises:
        Corrupt: something has been taken out.
        OutOfDate: what is damaged or gone is no longer named by the catalogue.
    """
    try:
        yield
    except (FileNotFoundError, CorruptPrefix) as error:
        met = error if isinstance(error, CorruptPrefix) else _missing(workshop, chain, extents)
        if met is not None and workshop.space.take_out(met):
            raise damaged(chain[-1].namespace) from error
        raise OutOfDate from error


@contextlib.contextmanager
def guarded(space: Space, reading: Reading) -> Iterator[None]:
    """Closes a reading at the end, and takes out the prefix whose damage it meets."""
    try:
        yield
    except CorruptPrefix as error:
        space.take_out(error)
        raise damaged(reading.chain[-1].namespace) from error
    finally:
        reading.close()


def prefix_info(
    transaction: Transaction, row: PrefixRow, chain: list[PrefixRow] | None = None
) -> PrefixInfo:
    """Returns what is known of a prefix; its chain is read unless it is given."""
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
        parts=chain_parts(chain, MatchIndex(transaction).token_count(row.id)),
        prefill_ms=row.prefill_ms,
    )


def within(asked: RowRange, row: PrefixRow) -> RowRange:
    """Returns the rows asked for, up to the end if none is named.

    Raises:
        RowsOutOfRange: the prefix does not have them.
    """
    end = asked.end or row.token_count
    if not asked.begin <= end <= row.token_count:
        raise RowsOutOfRange(
            f"rows {asked.begin} to {end} of {row.namespace!r}, which has {row.token_count}",
            rows=row.token_count,
            namespace=row.namespace,
        )
    return RowRange(asked.begin, end)


def _find(transaction: Transaction, tenant: str, query: FetchQuery) -> PrefixRow | None:
    if not query.lease_id:
        return transaction.by_name(tenant, query.namespace)
    row = transaction.by_lease(query.lease_id, unix_ms())
    if row is None or row.tenant != tenant:
        raise Evicted("the lease has ended: look the prefix up again")
    return row


def _missing(
    workshop: Workshop, chain: list[PrefixRow], extents: list[ExtentRow]
) -> CorruptPrefix | None:
    """Returns the first file of a chain that is not there."""
    for row in chain:
        names = [row.file or ""]
        if row is chain[-1]:
            names += [extent.file for extent in extents]
        for path in (workshop.directory.resolve(name) for name in names if name):
            if not path.exists():
                return CorruptPrefix(Corrupt(f"{path} is gone"), row.id, path)
    return None


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
