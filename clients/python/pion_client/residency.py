"""Where a prefix's rows can be attended to: resident on the server, or at hand in this process.

Knows namespaces, sessions and the client; neither models nor how attention is computed (`attention`).

The one decision: the name of a session says what is in it, a namespace, *its generation and its rows*,
and only these rows are ever made resident under it. So nothing that is asked about can change under an
answer that is being written: what is stored anew under the same namespace, or grows, is another session.
What callers upload themselves has generation 0.

A name by itself means what is stored there at that moment: it is looked up each time. Only what callers
have uploaded under it comes first, layer by layer, and is never taken for anything else.
"""

import collections
import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from pion_client.attend import Answer, AttendState, Query
from pion_client.caches import Rows
from pion_client.client import Client
from pion_client.connection import of_now
from pion_client.errors import Cold, NotStored, PionError
from pion_client.values import Array, PrefixInfo
from pion_wire.blocks import make_namespace
from pion_wire.layout import Side

KEPT_BYTES_MAX = 2 << 30
"""Rows that stay at hand in this process, for the lane without calls; least recently used go first."""
SESSIONS_MAX = 1_000
UPLOADS_MAX = 65_536
"""Uploaded layers that are remembered: many more than a server has entries."""
ATTEND_TIMEOUT_S = 30.0
"""For one query: thousands of them at once, over tens of thousands of rows, take seconds on a CPU."""
SAMPLES_MAX = 256

Lane = Literal["", "in-process", "stream", "unary"]
T = TypeVar("T")


class NotResident(PionError):
    """A prefix could not be made resident; the text says why."""

    reason_default = "NOT_RESIDENT"


@dataclass(frozen=True, eq=False)
class Kept:
    """Rows of a prefix at hand."""

    model_id: str
    token_ids: bytes
    """u32, little-endian."""
    rows: Sequence[Rows]
    """One pair per slot, evaluated MLX arrays (kv_heads, tokens, head_dim)."""
    summaries: dict[tuple[int, str], list[Any]] = field(default_factory=dict)
    """What ranks the blocks of each slot's keys, by block size and selector; evaluated MLX arrays."""

    @property
    def token_count(self) -> int:
        """How many tokens they are of."""
        return len(self.token_ids) // 4

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return sum(side.nbytes for pair in self.rows for side in pair)


class Session(NamedTuple):
    """Resident rows of a prefix at a generation."""

    name: str
    info: PrefixInfo
    token_ids: bytes = b""
    """Of these rows, u32, little-endian; empty if they are not known."""
    ensured: bool = False
    """Whether they were resident once, as far as is known here."""


class Residency:
    """What one prompt cache knows of residency; usable from several threads."""

    def __init__(self, client: Client, *, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self.lane: Lane = ""
        """How attention was last computed."""
        self.reason = ""
        """Why not on the server, where it should have been; in one word."""
        self.refusals: dict[bool, str] = {}
        """Why the model's attention passes the patch by, over rows at hand (True) or elsewhere."""
        self.calls = 0
        self.call_ms = 0.0
        self.rehydrates = 0
        """How often a query found its entry gone, and the prefix was made resident again."""
        self._client = client
        self._kept_bytes_max = kept_bytes_max
        self._lock = threading.Lock()
        self._warming = threading.Lock()
        self._kept: collections.OrderedDict[str, Kept] = collections.OrderedDict()
        self._sessions: collections.OrderedDict[str, str] = collections.OrderedDict()
        """Names of sessions that were used, and their namespaces."""
        self._uploads: collections.OrderedDict[tuple[str, int], None] = collections.OrderedDict()
        """Namespaces and layers that callers have uploaded rows for."""
        self._samples: collections.deque[tuple[int, float]] = collections.deque(maxlen=SAMPLES_MAX)

    # Rows at hand

    def keep(self, namespace: str, kept: Kept) -> None:
        """Keeps rows at hand, if there is room; others may go for them."""
        with self._lock:
            self._kept.pop(namespace, None)
            if kept.size_bytes > self._kept_bytes_max:
                return
            self._kept[namespace] = kept
            while sum(one.size_bytes for one in self._kept.values()) > self._kept_bytes_max:
                self._kept.popitem(last=False)

    def kept(self, namespace: str, token_count: int) -> Kept | None:
        """Returns the rows of a namespace, if they are at hand and this many."""
        with self._lock:
            kept = self._kept.get(namespace)
            if kept is None or kept.token_count != token_count:
                return None
            self._kept.move_to_end(namespace)
            return kept

    # Sessions

    def uploaded(self, namespace: str, layer: int) -> None:
        """Notes that a caller has uploaded rows: from now on the layer means them."""
        with self._lock:
            _remember(self._uploads, (namespace, layer), None, UPLOADS_MAX)

    def is_uploaded(self, namespace: str, layer: int) -> bool:
        """Whether a caller has uploaded rows of a layer."""
        with self._lock:
            return (namespace, layer) in self._uploads

    def sessions_of(self, namespace: str) -> list[str]:
        """Returns all sessions of a namespace that are known here, and forgets them."""
        with self._lock:
            names = [name for name, one in self._sessions.items() if one == namespace]
            for name in names:
                del self._sessions[name]
            for upload in [upload for upload in self._uploads if upload[0] == namespace]:
                del self._uploads[upload]
        return [session_name(namespace), *names]

    def session(self, info: PrefixInfo) -> Session:
        """Returns the session of a stored prefix, resident or not."""
        name = session_name(info.namespace, info.generation, info.token_count)
        self._client.attending.follow(name, info.namespace)
        with self._lock:
            _remember(self._sessions, name, info.namespace, SESSIONS_MAX)
        return Session(name, info)

    def ensure(self, info: PrefixInfo) -> Session:
        """Has the rows of a stored prefix resident, every layer; none of them crosses the wire.

        Raises:
            NotResident: they are not all there now, and cannot be.
            GenerationDiffers, NotStored: they are not stored any more.
            PionError: the server cannot do it, or cannot be reached.
        """
        session = self.session(info)
        name = session.name
        # Twice: what one layer pushes out may be another of the same prefix.
        for _ in range(2):
            if not (absent := self._absent(name, info)):
                break
            warmed = self._client.warm(
                info.namespace,
                session=name,
                layers=absent,
                generation=info.generation,
                rows=info.token_count,
            )
            if warmed.layers < len(absent):
                raise NotResident(f"{len(absent) - warmed.layers} layers have no such rows")
        else:
            if self._absent(name, info):
                raise NotResident("the server has no room for all layers at once")
        return session._replace(ensured=True)

    # Queries

    def ask(self, session: Session, query: Query) -> Answer:
        """Asks, and if the entry is gone makes the prefix resident once and asks again.

        Raises:
            Cold, NotStored: it went a second time.
            PionError: as `ensure` does, or what the server says about the query.
        """
        return self.asked(
            session, lambda: self._client.attending.ask(query.message, ATTEND_TIMEOUT_S)
        )

    def asked(self, session: Session, ask: Callable[[], T]) -> T:
        """As `ask`, in the caller's own way."""
        started = time.perf_counter()
        try:
            answer = ask()
        except (Cold, NotStored) as gone:
            self._again(session, counted=session.ensured or isinstance(gone, Cold))
            answer = ask()
        self.answered(session.info.token_count, (time.perf_counter() - started) * 1e3)
        return answer

    def answered(self, token_count: int, call_ms: float) -> None:
        """Notes a query that was answered."""
        with self._lock:
            self.lane = self._client.attend_lane
            self.calls += 1
            self.call_ms += call_ms
            self._samples.append((token_count, call_ms))

    def call_ms_expected(self, token_count: int) -> float | None:
        """Returns how long a query over this many rows takes, by those before; None without any."""
        with self._lock:
            samples = list(self._samples)
        if not samples:
            return None
        rows, took = np.array(samples).T
        if np.ptp(rows) == 0:
            return float(np.median(took))
        slope, fixed = np.polyfit(rows, took, 1)
        return max(float(fixed + slope * token_count), float(took.min()))

    def stats(self) -> dict[str, Any]:
        """What happened so far."""
        with self._lock:
            return {
                "calls": self.calls,
                "call_ms_total": self.call_ms,
                "cold_rehydrates": self.rehydrates,
                "kept_bytes": sum(kept.size_bytes for kept in self._kept.values()),
                "reason": self.reason,
            }

    def _again(self, session: Session, *, counted: bool) -> None:
        """Makes resident once more what a query did not find; raises as `ensure` does."""
        with self._warming:  # one thread does it, the others find it done
            if counted and self._absent(session.name, session.info):
                self.rehydrates += 1
            self.ensure(session.info)

    def _absent(self, session: str, info: PrefixInfo) -> list[int]:
        """Returns the layers that are not resident as the prefix has them."""
        expected = {
            tensor.slot: (AttendState.RESIDENT, tensor.heads, info.token_count, tensor.head_dim)
            for tensor in info.layout.tensors
            if tensor.side is Side.K
        }
        entries = self._client.attend_lookup(session, list(expected))
        return [entry.layer for entry in entries if entry[1:] != expected[entry.layer]]


class AttendByNamespace:
    """Attention by namespace instead of session; layers are cache slots, arrays NumPy's or MLX's.

    `options` are those of the client's method of the same name. A query is about what `attend_store`
    of this object has put in the layer, else about what is stored under the namespace now, which costs
    a look-up, else about what another object has put there. Stored rows that are not resident (any
    more) are made so, once; uploaded ones cannot be: Cold or NotStored says so.
    """

    residency: Residency
    _client: Client

    @property
    def cold_rehydrates_observed(self) -> int:
        """How often a query found its entry gone, and the prefix was made resident again."""
        return self.residency.rehydrates

    def attend_store(self, namespace: str, layer: int, k: Array, v: Array) -> None:
        """Makes rows of one layer resident that need not be stored; see `Client.attend_store`."""
        # Never into a session whose name says that it is a stored prefix.
        self._client.attend_store(session_name(namespace), layer, k, v)
        self.residency.uploaded(namespace, layer)

    def attend_query(self, namespace: str, layer: int, q: Array, **options: Any) -> Any:
        """See `Client.attend_query`."""
        return self._asked("attend_query", namespace, layer, q, **options)

    def attend_query_fused(
        self, namespace: str, layer: int, q: Array, suffix_k: Array, suffix_v: Array, **options: Any
    ) -> np.ndarray:
        """See `Client.attend_query_fused`."""
        return self._array("attend_query_fused", namespace, layer, q, suffix_k, suffix_v, **options)

    def attend_query_sparse(
        self, namespace: str, layer: int, q: Array, indices: Any, counts: Any = None, **options: Any
    ) -> np.ndarray:
        """See `Client.attend_query_sparse`."""
        return self._array("attend_query_sparse", namespace, layer, q, indices, counts, **options)

    def attend_query_sparse_auto(
        self, namespace: str, layer: int, q: Array, block_rows: int, blocks: int, **options: Any
    ) -> np.ndarray:
        """See `Client.attend_query_sparse_auto`."""
        choice = block_rows, blocks
        return self._array("attend_query_sparse_auto", namespace, layer, q, *choice, **options)

    def attend_query_sparse_auto_fused(
        self,
        namespace: str,
        layer: int,
        q: Array,
        block_rows: int,
        blocks: int,
        suffix_k: Array,
        suffix_v: Array,
        **options: Any,
    ) -> np.ndarray:
        """See `Client.attend_query_sparse_auto_fused`."""
        given = block_rows, blocks, suffix_k, suffix_v
        return self._array("attend_query_sparse_auto_fused", namespace, layer, q, *given, **options)

    def attend_drop(self, namespace: str) -> int:
        """Forgets what is resident of a namespace; what is stored stays. Returns how many entries.

        That is what was uploaded under it, by whomever; the rows that are stored under it now, whoever
        made them resident; and earlier ones that this object made resident.
        """
        if prefix := self._stored(namespace):
            self.residency.session(prefix)
        return sum(map(self._client.attend_drop, self.residency.sessions_of(namespace)))

    def warm(self, namespace: str) -> int:
        """Makes a stored prefix resident; returns the number of its layers.

        Raises:
            NotStored: there is no such prefix.
            As `Client.warm` does.
        """

        def layers(prefix: PrefixInfo) -> int:
            self.residency.ensure(prefix)
            return len({tensor.slot for tensor in prefix.layout.tensors})

        warmed = self._of_stored(namespace, layers)
        if warmed is None:
            raise NotStored(f"{namespace!r} is not stored, or has no rows")
        return warmed

    def _of_stored(self, namespace: str, use: Callable[[PrefixInfo], T]) -> T | None:
        """Returns what is made of what is stored under a name; None if nothing is."""
        return of_now(
            functools.partial(self._client.lookup, namespace),
            lambda found: use(found.prefix) if found.hit and found.prefix else None,
        )

    def _stored(self, namespace: str) -> PrefixInfo | None:
        found = self._client.lookup(namespace)
        return found.prefix if found.hit else None

    def _asked(self, method: str, namespace: str, layer: int, *given: Any, **options: Any) -> Any:
        ask = functools.partial(getattr(self._client, method), **options)

        def of(prefix: PrefixInfo) -> Any:
            session = self.residency.session(prefix)
            return self.residency.asked(session, lambda: ask(session.name, layer, *given))

        uploaded = self.residency.is_uploaded(namespace, layer)
        answer = None if uploaded else self._of_stored(namespace, of)
        if answer is None:  # nobody but who uploaded them has these rows
            answer = ask(session_name(namespace), layer, *given)
            self.residency.lane = self._client.attend_lane
        return answer

    def _array(
        self, method: str, namespace: str, layer: int, *given: Any, **options: Any
    ) -> np.ndarray:
        array: np.ndarray = self._asked(method, namespace, layer, *given, **options)
        return array


def session_name(namespace: str, generation: int = 0, rows: int = 0) -> str:
    """Returns the name of a session; any namespace has one, whatever its length."""
    return make_namespace("attend", namespace, generation, rows)


def _remember(
    known: collections.OrderedDict[Any, Any], key: Any, value: Any, entries_max: int
) -> None:
    """Makes an entry the newest, and forgets the oldest of too many."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > entries_max:
        known.popitem(last=False)
