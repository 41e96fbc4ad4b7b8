"""What the tests of the core share: machines that crash and lose power, and rows that prove themselves.

A row is computed from all tokens up to its own, as the K and V of a model are. Whatever the store hands
out for some tokens can so be checked against the tokens alone, without a model of the store.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from crc32c import crc32c

from pion_grpc.core.prefix_store import Fetch, PrefixStore
from pion_grpc.core.reading import Rows
from pion_grpc.core.storing import PrefixUpload
from pion_grpc.core.values import (
    Durability,
    FetchQuery,
    LookupQuery,
    LookupResult,
    MatchQuery,
    MatchResult,
    Position,
    RowRange,
    RowsWritten,
    Stored,
    StoreHeader,
    WriteRowsHeader,
)
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.files import Files, PowerCut
from pion_wire.blocks import pack_token_ids
from pion_wire.framing import PartChunk, RowChunk
from pion_wire.layout import DType, Layout, PartInfo, Side, TensorLayout

TENANT = "t"
MODEL = "mlx1:00000000000000000000000000000000"
BUDGET_BYTES = 64 << 20


class Machine:
    """A machine with one data directory, on which stores start, crash, and lose power."""

    def __init__(self, path: Path, files: Files | None = None, boot: str = "boot-1") -> None:
        self.path = path
        self.files = files or Files()
        self.boot = boot
        self._stores: list[PrefixStore] = []

    def start(self, budget_bytes: int = BUDGET_BYTES, tenant_budget_bytes: int = 0) -> PrefixStore:
        """Starts a process's worth of a store."""
        directory = DataDirectory(self.path)
        try:
            store = PrefixStore(
                directory,
                budget_bytes=budget_bytes,
                tenant_budget_bytes=tenant_budget_bytes,
                files=self.files,
                boot=self.boot,
            )
        except BaseException:
            directory.close()
            raise
        self._stores.append(store)
        return store

    def crash(self, store: PrefixStore) -> None:
        """Ends a process as SIGKILL does: its locks are free, nothing was said to anybody."""
        store.directory.let_go()

    def cut_power(self, target: Path) -> "Machine":
        """Returns the machine after a power cut and a boot: what was not flushed is gone."""
        assert isinstance(self.files, PowerCut)
        self.files.cut(target)
        return Machine(target, PowerCut(target), boot=f"{self.boot}+1")

    def close(self) -> None:
        """Lets go of what its processes hold in this one."""
        for store in self._stores:
            store.workshop.catalog.close()
            store.directory.let_go()


class Interrupted:
    """A part of a store beside which something happens, once, when it comes to a certain step."""

    happens: Callable[[], object] | None = None

    def happen(self) -> None:
        """The step."""
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()


class Meanwhile(Interrupted, Files):
    """Files of a process that is about to begin the next one."""

    def create(self, path: Path) -> int:
        self.happen()
        return super().create(path)


def usage(store: PrefixStore) -> int:
    """Returns the bytes that are counted for all tenants."""
    with store.workshop.catalog.read() as transaction:
        return Accounts(transaction).usage()


def power_cut_machine(path: Path) -> Machine:
    """Returns a machine whose power can be cut and whose disk can be full."""
    path.mkdir()
    return Machine(path, PowerCut(path))


def tokens(count: int, *, salt: int = 0, start: int = 0) -> bytes:
    """Returns packed token ids that differ with the salt from the first one on."""
    return pack_token_ids((np.arange(start, start + count) * 7 + salt * 1_000_003) % 49_152)


def layout(
    slots: int = 1, *, heads: int = 2, head_dim: int = 4, dtype: DType = DType.F16
) -> Layout:
    """Returns a plain layout: the same K and V in each slot."""
    return Layout(
        tuple(
            TensorLayout(slot, side, heads, head_dim, dtype)
            for slot in range(slots)
            for side in (Side.K, Side.V)
        )
    )


SMALL = layout()
ALL_ROWS = RowRange()


def true_rows(shape: Layout, token_ids: bytes, tensor: int) -> bytes:
    """Returns the rows of one tensor: each depends on its token and on all before it."""
    ids = np.frombuffer(token_ids, "<u4").astype(np.uint64)
    places = np.arange(1, len(ids) + 1, dtype=np.uint64)
    past = np.cumsum((ids + np.uint64(1)) * (places * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)))
    past += np.uint64((tensor + 1) * 0xC2B2AE3D27D4EB4F % (1 << 64))
    row_bytes = shape.tensors[tensor].row_bytes
    if not len(ids):
        return b""
    words = np.arange(-(-row_bytes // 8), dtype=np.uint64)
    mixed = (past[:, None] ^ (words * np.uint64(0xD6E8FEB86659FD93))) * np.uint64(
        0xFF51AFD7ED558CCD
    )
    return np.ascontiguousarray(mixed.view(np.uint8).reshape(len(ids), -1)[:, :row_bytes]).tobytes()


def chunks(
    shape: Layout, token_ids: bytes, base: int = 0, rows_max: int = 1 << 20
) -> Iterator[RowChunk]:
    """Yields the chunks of a Store of these tokens, from row `base` on."""
    for index, tensor in enumerate(shape.tensors):
        if not tensor.row_bytes:
            continue
        data = memoryview(true_rows(shape, token_ids, index))
        step = min(rows_max, (1 << 20) // tensor.row_bytes)
        for row in range(base, len(token_ids) // 4, step):
            piece = data[row * tensor.row_bytes : (row + step) * tensor.row_bytes]
            count = len(piece) // tensor.row_bytes
            yield RowChunk(index, 0, row, count, crc32c(piece), piece)


def begin(
    store: PrefixStore, name: str, token_ids: bytes, *, tenant: str = TENANT, **fields: object
) -> PrefixUpload | Stored:
    """Begins a Store with the usual layout and model."""
    return store.store(tenant, header(name, token_ids, **fields))


def header(name: str, token_ids: bytes, **fields: object) -> StoreHeader:
    """Returns a header with the usual layout and model."""
    values = {"layout": SMALL, "model_id": MODEL, **fields}
    return StoreHeader(namespace=name, token_ids=token_ids, **values)  # type: ignore[arg-type]


def fill(upload: PrefixUpload, parts: Iterable[bytes] = ()) -> PrefixUpload:
    """Sends everything that an upload waits for, without publishing it."""
    head = upload._header
    try:
        for chunk in chunks(head.layout, head.token_ids, upload._segment.base):
            upload.write(chunk)
        for index, data in enumerate(parts):
            if data:
                upload.write(PartChunk(index, 0, crc32c(data), data))
    except BaseException:
        upload.abandon()
        raise
    return upload


def publish(upload: PrefixUpload) -> Stored:
    """Publishes, and abandons where that fails, as the transports do."""
    try:
        return upload.publish()
    except BaseException:
        upload.abandon()
        raise


def put(
    store: PrefixStore,
    name: str,
    token_ids: bytes,
    *,
    tenant: str = TENANT,
    part_bytes: tuple[bytes, ...] = (),
    **fields: object,
) -> Stored:
    """Stores one prefix."""
    head = header(name, token_ids, **fields)
    upload = store.store(tenant, head)
    if isinstance(upload, PrefixUpload):
        stored = publish(fill(upload, part_bytes))
        store.stored(tenant, head, stored)
        return stored
    return upload


def part(kind: str, boundary: int, data: bytes, slot: int = 0) -> PartInfo:
    """Describes a part."""
    return PartInfo(kind, slot, boundary, len(data))


def write(
    store: PrefixStore,
    name: str,
    first_row: int,
    data: bytes,
    *,
    slot: int = 0,
    side: Side = Side.K,
    row_bytes: int = 16,
    durability: Durability = Durability.PROCESS,
    tenant: str = TENANT,
    count: int = 0,
) -> RowsWritten:
    """Writes rows into one tensor of a live prefix; of rows without bytes, `count` of them."""
    count = count or len(data) // row_bytes
    head = WriteRowsHeader(name, slot, side, first_row, count, durability)
    upload = store.write_rows(tenant, head)
    try:
        step = max(1, (1 << 20) // row_bytes)
        for row in range(0, count if data else 0, step):
            piece = data[row * row_bytes : (row + step) * row_bytes]
            pieces = len(piece) // row_bytes
            upload.write(RowChunk(0, 0, first_row + row, pieces, crc32c(piece), piece))
        return upload.publish()
    except BaseException:
        upload.abandon()
        raise


def opened(store: PrefixStore, query: FetchQuery, tenant: str = TENANT) -> Fetch | None:
    """Opens a fetch; None is a miss. Read it with `drain`."""
    found = store.fetch(tenant, query)
    return None if isinstance(found, LookupResult) else found


def drain(store: PrefixStore, fetch: Fetch) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Returns the rows of each tensor and the bytes of each part that a fetch hands out."""
    rows: dict[int, bytearray] = {index: bytearray() for index in range(len(fetch.reading.tensors))}
    parts: dict[int, bytearray] = {}
    served = fetch.reading.served_layout
    sent = 0
    with store.guarded(fetch.reading):
        for piece in fetch.reading.stream(Position()):
            sent += len(piece.data)
            assert len(piece.data) <= 1 << 20
            if isinstance(piece, Rows):
                row_bytes = served.tensors[piece.tensor_index].row_bytes
                at = fetch.reading.rows.begin + len(rows[piece.tensor_index]) // row_bytes
                assert (piece.first_row, piece.row_count * row_bytes) == (at, len(piece.data))
                rows[piece.tensor_index] += piece.data
            else:
                assert piece.offset == len(parts.setdefault(piece.part_index, bytearray()))
                parts[piece.part_index] += piece.data
        assert sent == fetch.reading.total_bytes, "what was announced is not what came"
    store.fetched(fetch, sent)
    return (
        {index: bytes(data) for index, data in rows.items()},
        {index: bytes(data) for index, data in parts.items()},
    )


def rows_of(
    store: PrefixStore,
    name: str = "",
    *,
    lease: bytes = b"",
    rows: RowRange = ALL_ROWS,
    tenant: str = TENANT,
) -> dict[int, bytes] | None:
    """Returns the rows of each tensor, or None for a miss."""
    fetch = opened(store, FetchQuery(name, lease, rows=rows), tenant)
    return None if fetch is None else drain(store, fetch)[0]


def assert_truth(store: PrefixStore, name: str, token_ids: bytes, shape: Layout = SMALL) -> None:
    """Asserts that a prefix is there, and is what was computed for these tokens."""
    fetch = opened(store, FetchQuery(name))
    assert fetch is not None, f"{name!r} is gone"
    assert fetch.token_ids == token_ids
    assert fetch.prefix.token_count == len(token_ids) // 4
    assert drain(store, fetch)[0] == truth(shape, token_ids)


def truth(shape: Layout, token_ids: bytes) -> dict[int, bytes]:
    """Returns the right rows of every tensor."""
    return {index: true_rows(shape, token_ids, index) for index in range(len(shape.tensors))}


def look(
    store: PrefixStore, name: str, *, tenant: str = TENANT, lease_ms: int = 0, **fields: object
) -> LookupResult:
    """Looks one name up."""
    query = LookupQuery(name, **fields)  # type: ignore[arg-type]
    return store.lookup(tenant, [query], lease_ms)[0]


def matched(
    store: PrefixStore, token_ids: bytes, *, tenant: str = TENANT, **fields: object
) -> MatchResult:
    """Asks for the longest match, without a lease unless told otherwise."""
    values = {"model_id": MODEL, "lease_ms": 0, **fields}
    return store.match(tenant, MatchQuery(token_ids=token_ids, **values))  # type: ignore[arg-type]


def directory_bytes(path: Path) -> int:
    """Returns the bytes of every file below a directory."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def stray_files(store: PrefixStore) -> list[Path]:
    """Returns the files in `segments/` and `rows/` that the catalogue does not name."""
    with store.workshop.catalog.read() as transaction:
        named = transaction.files()
    directory = store.directory
    return [
        path
        for folder in (directory.segments, directory.rows)
        for path in folder.iterdir()
        if directory.name_of(path) not in named
    ]
