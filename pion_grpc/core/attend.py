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
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from pion_grpc.backends import (
    Answer,
    Backend,
    QueryError,
    Resident,
    Unwanted,
    always,
    check,
)
from pion_grpc.core.attend_query import FIELDS, Ask
from pion_grpc.core.attend_room import ROOM_WAIT_S, Array, Room
from pion_grpc.core.attend_upload import EntryUpload
from pion_grpc.core.attend_values import (
    EntryInfo,
    EntryState,
    Key,
    Shape,
    Source,
    Telemetry,
    Warmed,
    check_key,
    check_layer_count,
)
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.reading import Reading
from pion_grpc.core.values import FetchQuery
from pion_grpc.errors import (
    Cold,
    GenerationDiffers,
    InvalidRequest,
    Missing,
    NotStored,
    PionError,
    Stalled,
)
from pion_wire import limits
from pion_wire.layout import DType, Side


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
        self._room = Room(backend.dtype, budget_bytes, room_wait_s)
        self._clock = clock
        self._lock = threading.Condition(threading.Lock())
        """Notified when a session becomes free."""
        self._loading: set[tuple[str, str]] = set()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._cold: OrderedDict[Key, _Record] = OrderedDict()
        self._bytes = 0
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
        with self._room.taken([shape]):
            return self._keep(key, _f32(k, shape), _f32(v, shape))

    def begin_rows(self, key: Key, shape: Shape) -> EntryUpload:
        """Begins to take rows in chunks. Publish or abandon the upload. Raises as `store_rows` does."""
        check_key(key)
        return EntryUpload(self._room, shape, functools.partial(self._keep, key), self._clock)

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
        entries, slots = self._load_prefix(tenant, session, source)
        size = sum(entry.resident.nbytes for entry in entries.values())
        return Warmed(len(entries), len(slots) - len(entries), size)

    def _load_prefix(
        self, tenant: str, session: str, source: Source, cold: _Record | None = None
    ) -> tuple[dict[Key, _Entry], set[int]]:
        """Returns the entries made of a prefix, and its layers; raises as `store_prefix` does.

        With `cold` they become resident only in the place of that record.
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
                return self._load_missing(reading, origin, layers, cold), slots

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
        check_key(key)  # that of an entry was checked when it was made
        if record is None:
            raise Missing(
                f"layer {key.layer} of {key.session!r} is unknown: make it resident",
                session=key.session,
                layer=key.layer,
            )
        if warm and record.origin is not None:
            return self._warm(key, record, record.origin)
        raise _cold(key, "make it so")

    def _warm(self, key: Key, record: _Record, origin: _Origin) -> Resident:
        """Makes a cold entry resident again, from exactly the rows that it was made of.

        What has been stored in its place meanwhile stays there, and what was dropped stays dropped.
        """
        shape = record.shape
        layers = frozenset({key.layer})
        # It may have been appended to: the entry was made of the rows that there were.
        source = Source(
            origin.namespace, shape.heads, shape.head_dim, layers, origin.generation, shape.rows
        )
        try:
            entries, _ = self._load_prefix(key.tenant, key.session, source, record)
        except (NotStored, GenerationDiffers) as error:
            raise _cold(key, f"its rows are not stored any more ({error})") from error
        entry = entries.get(key)  # others may have pushed it out again: it answers all the same
        if entry is None or entry.shape != shape:
            raise _cold(key, "its rows are not stored any more")
        return entry.resident

    def _load_missing(
        self, reading: Reading, origin: _Origin, layers: dict[Key, _Layer], cold: _Record | None
    ) -> dict[Key, _Entry]:
        """Makes layers of an opened prefix resident; reads those only that are not."""
        self._room.check_fits([layer.shape for layer in layers.values()])
        with self._lock:
            entries = {
                key: entry
                for key, layer in layers.items()
                if (entry := self._entries.get(key)) is not None
                and (entry.origin, entry.shape) == (origin, layer.shape)
            }
        missing = {key: layer for key, layer in layers.items() if key not in entries}
        with self._room.taken([layer.shape for layer in missing.values()]):
            for key, layer in missing.items():
                k = self._rows(reading, layer.k, layer.shape, "k")
                v = self._rows(reading, layer.v, layer.shape, "v")
                entries[key] = _Entry(self._load(k, v), origin)
            self._admit(entries, cold)
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
        rows = self._room.memory(shape)
        heads, end, head_dim = shape
        first = 0
        for data in reading.rows_of(position, 0, end):
            part = np.frombuffer(data, dtype.numpy).reshape(-1, heads, head_dim)
            self._room.place(rows[:, first : first + len(part)], part.transpose(1, 0, 2), field)
            first += len(part)
        assert first == end, "a tensor has the rows that its prefix says"
        return rows

    def _keep(self, key: Key, k: Array, v: Array) -> Warmed:
        entry = _Entry(self._load(k, v), None)
        self._admit({key: entry})
        return Warmed(1, 0, entry.resident.nbytes)

    def _load(self, k: Array, v: Array) -> Resident:
        try:
            return self.backend.load(k, v)
        except QueryError as error:
            raise InvalidRequest(error.field, error.reason) from error

    def _admit(self, entries: dict[Key, _Entry], cold: _Record | None = None) -> None:
        """Makes entries the most recently used ones, and pushes out what does not fit beside them.

        With `cold` only those that are resident already, or in the place of that record.
        """
        with self._lock:
            for key, entry in entries.items():
                there = self._entries.get(key)
                if cold is not None and there is not entry and self._cold.get(key) != cold:
                    continue
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
