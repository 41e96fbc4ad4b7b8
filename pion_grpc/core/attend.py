"""Attend: which K/V is resident beside the compute device, and queries over it.

An entry is one (tenant, session, layer) and has one of three states. *Resident*: K and V are held by
the backend, one copy however many clients ask. *Cold*: pushed out by the budgets; its shape is
remembered, and which rows of which stored prefix it was made of, if it was. *Missing*: nothing is known.
A query over a cold entry is refused as cold, or makes it resident again first if it says so: from the
same rows, or not at all if they have changed since.

The one decision: the lock is held for dictionary operations only. What the backend holds lives for as
long as anybody has a reference, so an entry that is pushed out or replaced while a query runs is
answered all the same, and nothing waits for arithmetic. The price is room: what is being loaded may
take as much again as the budget, and no more, because room is reserved before it is filled. Of a stored
prefix, which the server reads itself, that is everything at once; of an upload, what has come of it.
Whoever finds no room waits a while for those that are loading, and prefixes of one session are loaded
one after the other: who waited finds resident what it was about to load.
"""

import contextlib
import enum
import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from pion_grpc.backends import (
    Answer,
    Backend,
    QueryError,
    Resident,
    Unwanted,
    always,
    check,
    check_range,
)
from pion_grpc.core.attend_query import FIELDS, Ask
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.reading import Reading
from pion_grpc.core.values import FetchQuery, check_namespace
from pion_grpc.errors import (
    ChecksumMismatch,
    Cold,
    GenerationDiffers,
    InvalidRequest,
    Missing,
    NotStored,
    OverBudget,
    PionError,
    Stalled,
)
from pion_wire import limits
from pion_wire.framing import PartChunk
from pion_wire.layout import DType, Side

Array = npt.NDArray[Any]

LAYER_MAX = (1 << 32) - 1
ROOM_WAIT_S = 10.0
"""How long what would fit waits for the room of what is being loaded."""
UPLOAD_BYTES_PER_S = 256 << 10
"""What an upload must bring to keep the room that it has taken."""
UPLOAD_PATIENCE_S = 10.0
"""How much time an upload may be behind with that."""
HUGE_BYTES = 4 << 20
"""Memory that is worth huge pages."""


class EntryState(enum.Enum):
    """Where an entry stands."""

    MISSING = "missing"
    COLD = "cold"
    RESIDENT = "resident"


class Key(NamedTuple):
    """The name of an entry."""

    tenant: str
    session: str
    layer: int


class Shape(NamedTuple):
    """Heads, rows and values per head of an entry."""

    heads: int
    rows: int
    head_dim: int

    @property
    def values(self) -> int:
        """Values of K, and as many of V."""
        return self.heads * self.rows * self.head_dim


class Source(NamedTuple):
    """A stored prefix whose rows become entries."""

    namespace: str
    heads: int = 0
    """K/V heads or, on a grouped model, query heads; 0 takes the layout's."""
    head_dim: int = 0
    """Values per head; 0 takes the layout's."""
    layers: frozenset[int] = frozenset()
    """Empty means all."""
    generation: int = 0
    """Which the rows must be of; 0 takes any."""
    rows: int = 0
    """How many rows from the first one; layers with fewer are skipped. 0 takes all there are."""


class EntryInfo(NamedTuple):
    """Where one entry stands, and its shape unless it is missing."""

    layer: int
    state: EntryState
    shape: Shape = Shape(0, 0, 0)


class Warmed(NamedTuple):
    """What making a prefix resident came to."""

    layers: int
    skipped: int
    """Layers that do not have the shape asked for."""
    resident_bytes: int


class Telemetry(NamedTuple):
    """Counts for people who watch the server."""

    warm: int = 0
    """Entries that are resident."""
    cold: int = 0
    """Entries that are known but not resident."""
    demotions: int = 0
    """Transitions from resident to cold since the start."""
    rehydrates: int = 0
    """Transitions from cold to resident since the start."""
    resident_bytes: int = 0
    """K and V that are resident. Block summaries come on top, at most a quarter of that."""


class _Origin(NamedTuple):
    """The rows that an entry was made of: `shape.rows` rows of a prefix at a generation."""

    namespace: str
    generation: int


class _Entry(NamedTuple):
    resident: Resident
    origin: _Origin | None

    @property
    def shape(self) -> Shape:
        held = self.resident
        return Shape(held.heads, held.tokens, held.dim)


class _Record(NamedTuple):
    """What is remembered of an entry that was pushed out."""

    shape: Shape
    origin: _Origin | None


class _Layer(NamedTuple):
    """A layer of an opened prefix: where its K and V are among the tensors, and what they become."""

    layer: int
    k: int
    v: int
    shape: Shape


class Attend:
    """All operations on resident K/V; safe to use from many threads."""

    def __init__(
        self,
        backend: Backend,
        store: PrefixStore,
        budget_bytes: int,
        *,
        window: int = 0,
        room_wait_s: float = ROOM_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend = backend
        self.window = window
        """Window of queries that do not name one; 0: all rows."""
        self.budget_bytes = budget_bytes
        self._store = store
        self._room_wait_s = room_wait_s
        self._clock = clock
        self._lock = threading.Condition(threading.Lock())
        """Notified when room or a session becomes free."""
        self._loading: set[tuple[str, str]] = set()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._cold: OrderedDict[Key, _Record] = OrderedDict()
        self._bytes = 0
        self._loading_bytes = 0
        self._demotions = 0
        self._rehydrates = 0

    # -- making resident

    def store_rows(self, key: Key, shape: Shape, k: memoryview, v: memoryview) -> Warmed:
        """Makes rows resident: f32, head-major [heads][rows][head_dim] each.

        The bytes may be kept without a copy: nobody changes them afterwards, and they are not part of
        something larger that would live as long.

        Raises:
            InvalidRequest: sizes contradict each other, or a value does not fit the residency's type.
            OverBudget: it would not fit with everything else gone; what is resident stays.
        """
        for field, data in (("k", k), ("v", v)):
            if len(data) != 4 * shape.values:
                raise InvalidRequest(
                    field, f"{len(data)} bytes are not the {4 * shape.values} of {tuple(shape)}"
                )
        check_key(key)
        with self._reserved([shape]):
            return self._keep(key, _f32(k, shape), _f32(v, shape))

    def begin_rows(self, key: Key, shape: Shape) -> "Upload":
        """Begins to take rows in chunks. Publish or abandon the upload. Raises as `store_rows` does."""
        return Upload(self, key, shape)

    def store_prefix(self, tenant: str, session: str, source: Source) -> Warmed:
        """Makes the rows of a stored prefix resident: all layers at once, or none of them.

        Entries are what the prefix holds now; they do not follow what happens to it later. Those that
        are resident already, of the same rows, are used, not read again.

        Raises:
            InvalidRequest: the prefix does not have a layer that is named.
            NotStored: the prefix has no rows.
            GenerationDiffers: they are of another generation.
            OverBudget: it would not fit with everything else gone.
            Corrupt: a page of it is damaged.
        """
        check_layer_count(len(source.layers))
        for layer in (0, *source.layers):
            check_key(Key(tenant, session, layer))
        for field in ("heads", "head_dim", "rows"):
            if getattr(source, field) < 0:
                raise InvalidRequest(field, "is below 0")
        query = FetchQuery(
            source.namespace,
            generation=source.generation,
            slots=source.layers,
            codecs=frozenset(),
            raw_types=frozenset({DType.F32, DType.F16}),
        )
        reading = self._store.open_rows(tenant, query)
        if reading is None:
            raise NotStored(f"{source.namespace!r} has no rows", namespace=source.namespace)
        with self._store.guarded(reading):
            slots = {reading.layout.tensors[index].slot for index in reading.tensors}
            if absent := sorted(source.layers - slots):
                raise InvalidRequest("layers", f"{source.namespace!r} has no rows of {absent}")
            origin = _Origin(source.namespace, reading.chain[-1].generation)
            layers = {
                Key(tenant, session, layer.layer): layer for layer in _layers(reading, source)
            }
            with self._turn(tenant, session):
                entries = self._load_missing(reading, origin, layers)
        size = sum(entry.resident.nbytes for entry in entries.values())
        return Warmed(len(entries), len(slots) - len(entries), size)

    # -- asking

    def lookup(self, tenant: str, session: str, layers: list[int]) -> list[EntryInfo]:
        """Says where entries stand; nothing moves."""
        check_layer_count(len(layers))
        keys = [Key(tenant, session, layer) for layer in layers]
        for key in keys:
            check_key(key)
        with self._lock:
            return [self._info(key) for key in keys]

    def drop(self, tenant: str, session: str, layer: int | None = None) -> int:
        """Forgets entries, resident and cold; returns how many."""
        check_key(Key(tenant, session, layer or 0))
        with self._lock:
            doomed = [
                key
                for key in (*self._entries, *self._cold)
                if key[:2] == (tenant, session) and layer in (None, key.layer)
            ]
            for key in doomed:
                if key in self._entries:
                    self._bytes -= self._entries.pop(key).resident.nbytes
                else:
                    del self._cold[key]
            return len(doomed)

    def ask(
        self, key: Key, ask: Ask, *, warm: bool = False, wanted: Callable[[], bool] = always
    ) -> Answer:
        """Answers one query over an entry.

        Args:
            key: which.
            ask: the query.
            warm: make the entry resident first if it is cold.
            wanted: whether somebody waits for the answer.

        Raises:
            Cold: the entry is known, not resident, and `warm` was not asked for or cannot be done.
            Missing: it is unknown.
            InvalidRequest: the query does not fit the entry.
            OverBudget, Corrupt: it could not be made resident.
            Stalled: nobody waits any more.
        """
        return self._answer(self._resident(key, warm=warm), ask, wanted)

    def compute(
        self,
        shape: Shape,
        k: memoryview,
        v: memoryview,
        ask: Ask,
        *,
        wanted: Callable[[], bool] = always,
    ) -> Answer:
        """Answers a query over K and V that come with it; nothing becomes resident.

        Raises:
            InvalidRequest: sizes contradict each other, or a value does not fit the residency's type.
            Stalled: nobody waits any more.
        """
        if min(shape) < 1 or len(k) != 4 * shape.values or len(v) != 4 * shape.values:
            raise InvalidRequest(
                "k",
                f"K and V of {len(k)} and {len(v)} bytes are not {tuple(shape)} f32 values each",
            )
        return self._answer(self._load(_f32(k, shape), _f32(v, shape)), ask, wanted)

    def telemetry(self) -> Telemetry:
        """Returns the counts."""
        with self._lock:
            return Telemetry(
                len(self._entries), len(self._cold), self._demotions, self._rehydrates, self._bytes
            )

    def close(self) -> None:
        """Releases the backend."""
        self.backend.close()

    # -- parts of the above

    def _answer(self, resident: Resident, ask: Ask, wanted: Callable[[], bool] = always) -> Answer:
        try:
            query = ask.query(resident, self.window)
            check(query, resident)
        except QueryError as error:
            raise InvalidRequest(FIELDS.get(error.field, error.field), error.reason) from error
        try:
            return self.backend.attend(resident, query, wanted)
        except Unwanted as error:
            raise Stalled("nobody waits for the answer any more") from error

    def _resident(self, key: Key, *, warm: bool) -> Resident:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return entry.resident
            record = self._cold.get(key)
        check_key(key)  # of an entry it has been
        if record is None:
            raise Missing(
                f"layer {key.layer} of {key.session!r} is unknown: make it resident",
                session=key.session,
                layer=key.layer,
            )
        if warm and record.origin is not None:
            return self._warm(key, record.shape, record.origin)
        raise _cold(key, "make it so")

    def _warm(self, key: Key, shape: Shape, origin: _Origin) -> Resident:
        """Makes a cold entry resident again, from exactly the rows that it was made of."""
        layers = frozenset({key.layer})
        # It may have been appended to: the entry was made of the rows that there were.
        source = Source(
            origin.namespace, shape.heads, shape.head_dim, layers, origin.generation, shape.rows
        )
        try:
            self.store_prefix(key.tenant, key.session, source)
        except (NotStored, GenerationDiffers) as error:
            raise _cold(key, f"its rows are not stored any more ({error})") from error
        with self._lock:
            entry = self._entries.get(key)
        if entry is None or entry.shape != shape:
            raise _cold(key, "its rows are not stored any more")
        return entry.resident

    def _load_missing(
        self, reading: Reading, origin: _Origin, layers: dict[Key, _Layer]
    ) -> dict[Key, _Entry]:
        """Makes layers of an opened prefix resident; reads those only that are not."""
        self._check_fits([layer.shape for layer in layers.values()])
        with self._lock:
            entries = {
                key: entry
                for key, layer in layers.items()
                if (entry := self._entries.get(key)) is not None
                and (entry.origin, entry.shape) == (origin, layer.shape)
            }
        missing = {key: layer for key, layer in layers.items() if key not in entries}
        with self._reserved([layer.shape for layer in missing.values()]):
            for key, layer in missing.items():
                k = self._rows(reading, layer.k, layer.shape, "k")
                v = self._rows(reading, layer.v, layer.shape, "v")
                entries[key] = _Entry(self._load(k, v), origin)
            self._admit(entries)
        return entries

    @contextlib.contextmanager
    def _turn(self, tenant: str, session: str) -> Iterator[None]:
        """Lets one at a time load a prefix into a session."""
        name = tenant, session
        with self._lock:
            self._lock.wait_for(lambda: name not in self._loading)
            self._loading.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._loading.remove(name)
                self._lock.notify_all()

    def _rows(self, reading: Reading, position: int, shape: Shape, field: str) -> Array:
        """Reads a tensor, head-major, in the residency's own type."""
        dtype = reading.served_layout.tensors[position].dtype
        rows = self._memory(shape)
        heads, end, head_dim = shape
        first = 0
        for data in reading.rows_of(position, 0, end):
            part = np.frombuffer(data, dtype.numpy).reshape(-1, heads, head_dim)
            self._place(rows[:, first : first + len(part)], part.transpose(1, 0, 2), field)
            first += len(part)
        assert first == end, "a tensor has the rows that its prefix says"
        return rows

    def _memory(self, shape: Shape) -> Array:
        """Pages of their own: taken as they are filled, given back with the last reference.

        A heap would keep them, in pieces between others, and so hold twice what is resident.
        """
        dtype = np.dtype(np.float16 if self.backend.dtype == "f16" else np.float32)
        size = shape.values * dtype.itemsize
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, dtype).reshape(shape)

    def _place(self, room: Array, values: Array, field: str) -> None:
        """Puts values into memory of the residency's type."""
        try:
            check_range(values, self.backend.dtype, field)
        except QueryError as error:
            raise InvalidRequest(error.field, error.reason) from error
        room[...] = values

    def _keep(self, key: Key, k: Array, v: Array) -> Warmed:
        entry = _Entry(self._load(k, v), None)
        self._admit({key: entry})
        return Warmed(1, 0, entry.resident.nbytes)

    def _load(self, k: Array, v: Array) -> Resident:
        try:
            return self.backend.load(k, v)
        except QueryError as error:
            raise InvalidRequest(error.field, error.reason) from error

    @contextlib.contextmanager
    def _reserved(self, shapes: Sequence[Shape]) -> Iterator[None]:
        """Holds room for what is being loaded."""
        size = self._check_fits(shapes)
        self._reserve(size)
        try:
            yield
        finally:
            self._release(size)

    def _check_fits(self, shapes: Sequence[Shape]) -> int:
        """Returns the bytes of entries; raises unless they would fit with everything else gone."""
        if any(min(shape) < 1 for shape in shapes):
            raise InvalidRequest("rows", "heads, rows and head_dim are at least 1 each")
        if len(shapes) > limits.ATTEND_ENTRIES_MAX:
            raise OverBudget(
                f"{len(shapes)} layers are more than the {limits.ATTEND_ENTRIES_MAX} entries there are"
            )
        itemsize = 2 if self.backend.dtype == "f16" else 4
        size = sum(2 * shape.values * itemsize for shape in shapes)
        if size > self.budget_bytes:
            raise self._over_budget(size, "raise --resident-budget")
        return size

    def _reserve(self, size: int) -> None:
        """Takes room, and waits for it if others are loading."""
        with self._lock:
            free = self._lock.wait_for(
                lambda: self._loading_bytes + size <= self.budget_bytes, self._room_wait_s
            )
            if not free:
                raise self._over_budget(size, f"{self._loading_bytes} are being loaded")
            self._loading_bytes += size

    def _release(self, size: int) -> None:
        with self._lock:
            self._loading_bytes -= size
            self._lock.notify_all()

    def _over_budget(self, size: int, why: str) -> OverBudget:
        return OverBudget(
            f"{size} bytes do not fit into the resident budget of {self.budget_bytes}: {why}",
            needed_bytes=size,
            budget_bytes=self.budget_bytes,
        )

    def _admit(self, entries: dict[Key, _Entry]) -> None:
        """Makes entries the most recently used ones, and pushes out what does not fit beside them."""
        with self._lock:
            for key, entry in entries.items():
                old = self._entries.pop(key, None)
                self._bytes += entry.resident.nbytes - (old.resident.nbytes if old else 0)
                self._entries[key] = entry
                if self._cold.pop(key, None) is not None:
                    self._rehydrates += 1
            while len(self._entries) > limits.ATTEND_ENTRIES_MAX or self._bytes > self.budget_bytes:
                victim, gone = self._entries.popitem(last=False)
                self._bytes -= gone.resident.nbytes
                self._demotions += 1
                self._cold[victim] = _Record(gone.shape, gone.origin)
                if len(self._cold) > limits.ATTEND_COLD_MAX:
                    self._cold.popitem(last=False)

    def _info(self, key: Key) -> EntryInfo:
        if key in self._entries:
            return EntryInfo(key.layer, EntryState.RESIDENT, self._entries[key].shape)
        if key in self._cold:
            return EntryInfo(key.layer, EntryState.COLD, self._cold[key].shape)
        return EntryInfo(key.layer, EntryState.MISSING)


class Upload:
    """Rows of one entry on their way in: all of K, then all of V, in order. Publish or abandon it.

    It has the room of what has come, not of what was declared, and loses it if too little comes.
    """

    def __init__(self, attend: Attend, key: Key, shape: Shape) -> None:
        check_key(key)
        attend._check_fits([shape])
        self._attend = attend
        self._key = key
        self._side_bytes = 4 * shape.values
        self._sides = [attend._memory(shape) for _ in range(2)]
        self._filled = [0, 0]
        self._cut = b""
        """Begin of a value whose end is in the next chunk."""
        self._reserved = 0
        self._patience_s = UPLOAD_PATIENCE_S
        self._waits_since = attend._clock()

    def write(self, chunk: PartChunk) -> None:
        """Takes the next chunk; part 0 is K, 1 is V.

        Raises:
            InvalidRequest, ChecksumMismatch: it is not the next one, or damaged, or a value does not
                fit the residency's type.
            OverBudget: others are loading, and leave no room for it.
            Stalled: less comes than must.
        """
        part = int(self._filled[0] == self._side_bytes)
        begin = self._filled[part]
        end = begin + len(chunk.data)
        if (chunk.part_index, chunk.offset_bytes) != (part, begin):
            raise InvalidRequest(
                "bytes",
                f"part {chunk.part_index} at {chunk.offset_bytes} came where part {part} at {begin} "
                "was next",
            )
        if not begin < end <= self._side_bytes:
            left = self._side_bytes - begin
            raise InvalidRequest("bytes", f"{len(chunk.data)} bytes came where {left} are missing")
        if crc32c(chunk.data) != chunk.crc32c:
            raise ChecksumMismatch(f"the bytes of part {part} at {begin} arrived damaged")
        self._keep_pace(len(chunk.data))
        self._take(chunk.data, part)
        self._filled[part] = end
        self._waits_since = self._attend._clock()  # what this took is not the peer's time

    def publish(self) -> Warmed:
        """Makes the entry resident.

        Raises:
            InvalidRequest: rows are missing.
        """
        if self._filled != [self._side_bytes] * 2:
            raise InvalidRequest("bytes", "the stream ended before all declared rows came")
        warmed = self._attend._keep(self._key, *self._sides)
        self.abandon()
        return warmed

    def abandon(self) -> None:
        """Gives the room back."""
        self._attend._release(self._reserved)
        self._reserved = 0

    def _take(self, data: bytes | memoryview, part: int) -> None:
        """Puts the values that are whole now where they belong."""
        first = self._filled[part] // 4
        data = self._cut + data if self._cut else data
        count = len(data) // 4
        self._cut = bytes(data[4 * count :])
        if count:
            room = self._sides[part].reshape(-1)[first : first + count]
            self._attend._reserve(room.nbytes)
            self._reserved += room.nbytes
            self._attend._place(room, np.frombuffer(data, "<f4", count), "kv"[part])

    def _keep_pace(self, byte_count: int) -> None:
        """Raises Stalled unless enough has come lately: what came long ago earns no time."""
        self._patience_s -= self._attend._clock() - self._waits_since
        if self._patience_s < 0:
            raise Stalled(f"less than {UPLOAD_BYTES_PER_S} bytes per second came")
        earned_s = byte_count / UPLOAD_BYTES_PER_S
        self._patience_s = min(self._patience_s + earned_s, UPLOAD_PATIENCE_S)


def check_key(key: Key) -> None:
    """Raises InvalidRequest unless an entry may have that name."""
    check_namespace(key.session, "session")
    if not 0 <= key.layer <= LAYER_MAX:
        raise InvalidRequest("layer", f"{key.layer} is outside 0..{LAYER_MAX}", limit=LAYER_MAX)


def check_layer_count(count: int) -> None:
    """Raises InvalidRequest for more layers than a request may name."""
    if count > limits.ATTEND_LAYERS_MAX:
        raise InvalidRequest(
            "layers",
            f"more than {limits.ATTEND_LAYERS_MAX}",
            limit=limits.ATTEND_LAYERS_MAX,
        )


def _cold(key: Key, why: str) -> PionError:
    return Cold(
        f"layer {key.layer} of {key.session!r} is not resident any more: {why}",
        session=key.session,
        layer=key.layer,
    )


def _f32(data: memoryview, shape: Shape) -> Array:
    return np.frombuffer(data, "<f4").reshape(shape)


def _layers(reading: Reading, source: Source) -> Iterator[_Layer]:
    """Yields the layers of an opened prefix that can have the shape asked for."""
    positions: dict[int, dict[Side, int]] = {}
    for position, index in enumerate(reading.tensors):
        tensor = reading.layout.tensors[index]
        positions.setdefault(tensor.slot, {})[tensor.side] = position
    for slot, sides in positions.items():
        if len(sides) != 2:
            continue
        indices = [reading.tensors[sides[side]] for side in Side]
        k, v = (reading.layout.tensors[index] for index in indices)
        stored_rows = min(reading.row_counts[index] for index in indices)
        rows = source.rows or stored_rows
        width = k.heads * k.head_dim
        head_dim = source.head_dim or k.head_dim
        alike = (k.heads, k.head_dim) == (v.heads, v.head_dim)
        if not (stored_rows and width and alike) or rows > stored_rows or width % head_dim:
            continue
        heads = width // head_dim
        # On a grouped model callers know their query heads; the row's width says how many are stored.
        if source.heads % heads == 0:
            yield _Layer(slot, sides[Side.K], sides[Side.V], Shape(heads, rows, head_dim))
