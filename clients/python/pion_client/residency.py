"""Where a prefix's rows can be attended to: resident on the server, or at hand in this process.

Knows namespaces, sessions and the client; neither models nor how attention is computed (`attention`).

The one decision: the name of a session says what is in it, a namespace, *its generation and its rows*.
So nothing that is asked about can change under an answer that is being written: what is stored anew
under the same namespace, or grows, is another session, and what the server makes resident is used only
if the namespace is afterwards what it was before. What callers upload themselves has generation 0.
"""

import collections
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from pion_client.attend import Answer, AttendState, Query
from pion_client.caches import Rows
from pion_client.client import Client
from pion_client.errors import Cold, NotStored, PionError
from pion_client.values import Array, PrefixInfo
from pion_wire.blocks import make_namespace
from pion_wire.layout import Side

KEPT_BYTES_MAX = 2 << 30
"""Rows that stay at hand in this process, for the lane without calls; least recently used go first."""
SESSIONS_MAX = 1_000
ATTEND_TIMEOUT_S = 30.0
"""For one query: thousands of them at once, over tens of thousands of rows, take seconds on a CPU."""
SAMPLES_MAX = 256

Lane = Literal["", "in-process", "stream", "unary"]


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
    summaries: dict[Any, Any] = field(default_factory=dict)
    """What was computed about them once: by slot, and how."""

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


class Residency:
    """What one prompt cache knows of residency; usable from several threads."""

    def __init__(self, client: Client, *, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self.lane: Lane = ""
        """How attention was last computed."""
        self.reason = ""
        """Why not on the server, where it should have been; in one word."""
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
        """Returns the rows of a namespace, if they are at hand and so many."""
        with self._lock:
            kept = self._kept.get(namespace)
            if kept is None or kept.token_count != token_count:
                return None
            self._kept.move_to_end(namespace)
            return kept

    # Sessions

    def session_of(self, namespace: str) -> str:
        """Returns the session of a namespace: what was made resident last, or what was uploaded."""
        with self._lock:
            return self._sessions.get(namespace) or _session_name(namespace)

    def uploaded(self, namespace: str) -> str:
        """Returns the session of what callers upload, and makes it the one of the namespace."""
        name = _session_name(namespace)
        self._remember(namespace, name)
        return name

    def ensure(self, info: PrefixInfo) -> Session:
        """Has the rows of a stored prefix resident, every layer; none of them crosses the wire.

        Raises:
            NotResident: they are not all there now, and cannot be.
            PionError: the server cannot do it, or cannot be reached.
        """
        name = _session_name(info.namespace, info.generation, info.token_count)
        self._client.attending.follow(name, info.namespace)
        # Twice: what one layer pushes out may be another of the same prefix.
        for _ in range(2):
            if not (absent := self._absent(name, info)):
                break
            warmed = self._client.warm(info.namespace, session=name, layers=absent)
            if warmed.layers < len(absent):
                raise NotResident(f"{len(absent) - warmed.layers} layers have no such rows")
            self._check_unchanged(name, info)
        else:
            if self._absent(name, info):
                raise NotResident("the server has no room for all layers at once")
        self._remember(info.namespace, name)
        return Session(name, info)

    def again(self, session: Session) -> None:
        """Makes resident once more what a query did not find; raises as `ensure` does."""
        with self._warming:  # one thread does it, the others find it done
            if self._absent(session.name, session.info):
                self.rehydrates += 1
            self.ensure(session.info)

    # Queries

    def ask(self, session: Session, query: Query) -> Answer:
        """Asks, and if the entry is gone makes the prefix resident once and asks again.

        Raises:
            Cold, NotStored: it went a second time.
            PionError: as `ensure` does, or what the server says about the query.
        """
        started = time.perf_counter()
        try:
            answer = self._client.attending.ask(query.message, ATTEND_TIMEOUT_S)
        except (Cold, NotStored):
            self.again(session)
            answer = self._client.attending.ask(query.message, ATTEND_TIMEOUT_S)
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
        """Returns what a query over so many rows takes, by those that were asked; None: none was."""
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

    def _check_unchanged(self, session: str, info: PrefixInfo) -> None:
        now = self._client.lookup(info.namespace).prefix
        if not now or (now.generation, now.token_count) != (info.generation, info.token_count):
            self._client.attend_drop(session)  # whatever it is, it is not what its name says
            raise NotResident(f"{info.namespace!r} changed meanwhile")

    def _absent(self, session: str, info: PrefixInfo) -> list[int]:
        """Returns the layers that are not resident as the prefix has them."""
        expected = {
            tensor.slot: (AttendState.RESIDENT, tensor.heads, info.token_count, tensor.head_dim)
            for tensor in info.layout.tensors
            if tensor.side is Side.K
        }
        entries = self._client.attend_lookup(session, list(expected))
        return [entry.layer for entry in entries if entry[1:] != expected[entry.layer]]

    def _remember(self, namespace: str, session: str) -> None:
        with self._lock:
            self._sessions.pop(namespace, None)
            self._sessions[namespace] = session
            if len(self._sessions) > SESSIONS_MAX:
                self._sessions.popitem(last=False)


class AttendByNamespace:
    """Attention by namespace instead of session; layers are cache slots, arrays NumPy's or MLX's.

    `options` are those of the client's method of the same name. An entry that is not resident any more
    is made so from the stored prefix, once, before the query is asked again.
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
        self._client.attend_store(self.residency.uploaded(namespace), layer, k, v)

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
        """Forgets what is resident of a namespace; what is stored stays. Returns how many entries."""
        return self._client.attend_drop(self.residency.session_of(namespace))

    def warm(self, namespace: str) -> int:
        """Makes a stored prefix resident; returns the number of its layers.

        Raises:
            NotStored: there is no such prefix.
            As `Client.warm` does.
        """
        found = self._client.lookup(namespace)
        if not found.hit or found.prefix is None:
            raise NotStored(f"{namespace!r} is not stored: {found.reason or 'no rows'}")
        session = self.residency.ensure(found.prefix)
        return len({tensor.slot for tensor in session.info.layout.tensors})

    def _asked(self, method: str, namespace: str, *given: Any, **options: Any) -> Any:
        ask = getattr(self._client, method)
        try:
            answer = ask(self.residency.session_of(namespace), *given, **options)
        except (Cold, NotStored) as gone:
            try:
                self.warm(namespace)
            except NotStored:
                raise gone from None  # it was uploaded: nobody but the caller has its rows
            self.residency.rehydrates += isinstance(gone, Cold)
            answer = ask(self.residency.session_of(namespace), *given, **options)
        self.residency.lane = self._client.attend_lane
        return answer

    def _array(self, method: str, namespace: str, *given: Any, **options: Any) -> np.ndarray:
        array: np.ndarray = self._asked(method, namespace, *given, **options)
        return array


def _session_name(namespace: str, generation: int = 0, rows: int = 0) -> str:
    """Returns the name of a session; any namespace has one, whatever its length."""
    return make_namespace("attend", namespace, generation, rows)
