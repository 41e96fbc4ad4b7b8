"""Attention over K/V that the server keeps resident, from arrays: only queries cross the wire.

Knows the messages of Attend and how they travel; neither models nor caches. Arrays are NumPy's or MLX's,
of any float type; they are sent, and answered, as float32.

The one decision: a query takes the fast lane if it can, a stream that stays open (`attend_streams`).
The other lane is a call of its own, which takes half as long again; it is used if the server has no
stream to spare, and with PION_PROMPT_CACHE_NO_STREAM=1.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, overload

import numpy as np

from pion_client.arrays import U32_MAX, U64_MAX, count, invalid, mlx_core, text
from pion_client.attend_streams import AttendStreams
from pion_client.calls import Calls
from pion_client.connection import TRIES_MAX, Deadline, retried
from pion_client.errors import BadAnswer, TooManyStreams
from pion_client.routes import Routes
from pion_client.storing import attend_content
from pion_client.values import Array
from pion_wire.v1 import attend_pb2 as pb

WARM_TIMEOUT_S = 60.0
"""Making a prefix resident reads and decodes all its rows."""

Selector: TypeAlias = Literal["mean", "quest"]
_NO_REAL_NUMBERS = "cSUOMm"
"""NumPy's letters for types that it would convert to real numbers nevertheless: complex, text, time."""
_SELECTORS = {"mean": pb.ATTEND_SELECTOR_MEAN, "quest": pb.ATTEND_SELECTOR_QUEST}


class AttendState(enum.StrEnum):
    """What state an entry is in."""

    MISSING = "missing"
    COLD = "cold"
    RESIDENT = "resident"


_STATES = {
    pb.ATTEND_STATE_UNSPECIFIED: AttendState.MISSING,
    pb.ATTEND_STATE_COLD: AttendState.COLD,
    pb.ATTEND_STATE_RESIDENT: AttendState.RESIDENT,
}


class AttendEntry(NamedTuple):
    """The state of one layer's entry, and its shape unless it is missing."""

    layer: int
    state: AttendState
    heads: int
    rows: int
    head_dim: int


class Warmed(NamedTuple):
    """The result of making entries resident."""

    layers: int
    skipped: int
    """Layers of the prefix that do not have the shape asked for, although others do."""
    resident_bytes: int


class Answer(NamedTuple):
    """The answer to a query, in the query's shape."""

    out: np.ndarray
    """float32 (heads, queries, head_dim)."""
    lse: np.ndarray | None
    """float32 (heads, queries): the log-sum-exp of the scaled scores; None unless asked for."""


class Attending:
    """The calls of Attend, of one client."""

    def __init__(self, calls: Calls, routes: Routes) -> None:
        self.lane: Literal["", "stream", "unary"] = ""
        """How the last query was answered."""
        self._calls = calls
        self._routes = routes
        self._sessions = Routes()
        """Apart from names of prefixes, which may be the same: a session stays where its rows are."""
        self._streams = AttendStreams(calls.connection)

    def close(self) -> None:
        """Ends the streams."""
        self._streams.close()

    def follow(self, session: str, namespace: str) -> None:
        """Sends the calls of a session to the node that holds a namespace."""
        self._sessions.remember(session, self._routes.of(namespace))

    def store(
        self, session: str, layer: int, k: Array, v: Array, timeout_s: float | None
    ) -> Warmed:
        """Makes rows resident."""
        sides = _f32("k", k), _f32("v", v)
        if sides[0].ndim != 3 or sides[0].shape != sides[1].shape:
            raise invalid("k", f"{sides[0].shape} and {sides[1].shape} are not (heads, rows, dim)")
        heads, rows, head_dim = sides[0].shape
        layer = count("layer", layer)
        header = pb.AttendStoreHeader(
            session=text("session", session),
            rows=pb.AttendRows(layer=layer, heads=heads, rows=rows, head_dim=head_dim),
        )
        deadline = self._calls.stream_deadline(timeout_s)
        memory = [side.reshape(-1).view(np.uint8).data for side in sides]
        return self._send(header, memory, deadline, None)

    def warm(
        self,
        namespace: str,
        session: str,
        heads: int,
        head_dim: int,
        layers: Sequence[int],
        generation: int,
        rows: int,
        timeout_s: float | None,
    ) -> Warmed:
        """Makes a stored prefix resident."""
        source = pb.AttendFromPrefix(
            namespace=text("namespace", namespace),
            heads=count("heads", heads),
            head_dim=count("head_dim", head_dim),
            layers=_counts("layers", layers),
            generation=count("generation", generation, U64_MAX),
            rows=count("rows", rows, U64_MAX),
        )
        self.follow(session, namespace)
        header = pb.AttendStoreHeader(session=text("session", session), from_prefix=source)
        tries = TRIES_MAX if timeout_s is None else None
        deadline = self._calls.unary_deadline(
            WARM_TIMEOUT_S if timeout_s is None else timeout_s, tries
        )
        # The server reads and decodes everything before it answers.
        return self._send(header, (), deadline, deadline.timeout_s)

    def lookup(
        self, session: str, layers: Sequence[int], timeout_s: float | None
    ) -> list[AttendEntry]:
        """Returns the state of entries."""
        layers = _counts("layers", layers)
        request = pb.AttendLookupRequest(session=text("session", session), layers=layers)
        answer = self._calls.ask("attend_lookup", request, self._sessions.of(session), timeout_s)
        if [entry.layer for entry in answer.entries] != layers:
            raise BadAnswer(f"{len(answer.entries)} answers about {len(layers)} layers")
        return [
            AttendEntry(
                entry.layer,
                _STATES.get(entry.state, AttendState.MISSING),
                entry.heads,
                entry.rows,
                entry.head_dim,
            )
            for entry in answer.entries
        ]

    def drop(self, session: str, layer: int | None, timeout_s: float | None) -> int:
        """Forgets entries."""
        layer = None if layer is None else count("layer", layer)
        request = pb.AttendDropRequest(session=text("session", session), layer=layer)
        answer = self._calls.once("attend_drop", request, self._sessions.of(session), timeout_s)
        return int(answer.dropped_count)

    def ask(self, request: pb.AttendQueryRequest, timeout_s: float | None) -> Answer:
        """Answers a query."""
        # Whoever asks can do without: a server that is away is not waited for.
        deadline = self._calls.unary_deadline(timeout_s, tries=TRIES_MAX)
        message = retried(lambda: self._exchange(request, deadline), deadline)
        heads, head_dim = request.heads, request.head_dim
        if len(message.data) != len(request.data):
            raise BadAnswer(f"{len(message.data)} bytes answer {len(request.data)}")
        out = np.frombuffer(message.data, "<f4").reshape(heads, -1, head_dim)
        if not request.log_sum_exp:
            return Answer(out, None)
        if len(message.log_sum_exp) * head_dim != len(message.data):
            raise BadAnswer(
                f"{len(message.log_sum_exp)} bytes are not the log-sum-exps of this answer"
            )
        return Answer(out, np.frombuffer(message.log_sum_exp, "<f4").reshape(heads, -1))

    def _exchange(
        self, request: pb.AttendQueryRequest, deadline: Deadline
    ) -> pb.AttendQueryResponse:
        route = self._sessions.of(request.session)
        if self._streams.usable():
            try:
                answer = self._streams.exchange(request, route, deadline)
                self.lane = "stream"
                return answer
            except TooManyStreams:
                self._streams.rest()
        with self._calls.connection.calling() as stubs:
            answer = stubs.attend_query(
                request,
                timeout=deadline.remaining_s,
                metadata=self._calls.connection.metadata(route),
            )
        self.lane = "unary"
        return answer

    def _send(
        self,
        header: pb.AttendStoreHeader,
        sides: Sequence[memoryview],
        deadline: Deadline,
        stall_timeout_s: float | None,
    ) -> Warmed:
        message = self._calls.send(
            "attend_store",
            attend_content(header.SerializeToString(), sides),
            route=self._sessions.of(header.session),
            deadline=deadline,
            stall_timeout_s=stall_timeout_s,
            may_repeat=True,
        )
        answer = pb.AttendStoreResponse.FromString(message)
        return Warmed(answer.layer_count, answer.skipped_count, answer.resident_bytes)


class AttendMixin:
    """Attend's part of the client. Arrays are (heads, rows or queries, head_dim), of any float type.

    In all queries: `head_map` names the K/V head of each query head, by default in groups, as in GQA;
    `window` is how many of the last rows are visible, 0 all, None the server's setting; `scale`
    is 1/√head_dim unless given; `warm` makes a cold entry resident first, from the prefix it came from.
    `q` without the middle axis is one query per head, and the answer has the same shape.

    All raise InvalidRequest if something does not fit, NotSupported if the server does not compute
    attention, Unavailable if it cannot be reached, and DeadlineExceeded if it does not answer in time.
    Queries raise Cold for an entry that is no longer resident, and NotStored (MISSING) for an unknown
    one.
    """

    attending: Attending
    """The calls beneath, for code that builds on them."""

    @property
    def attend_lane(self) -> Literal["", "stream", "unary"]:
        """How the last query was answered."""
        return self.attending.lane

    def attend_store(
        self, session: str, layer: int, k: Array, v: Array, *, timeout_s: float | None = None
    ) -> Warmed:
        """Makes K and V of one layer resident under a session's name, replacing what is there.

        Raises:
            OverBudget: it does not fit; what is resident stays.
        """
        return self.attending.store(session, layer, k, v, timeout_s)

    def warm(
        self,
        namespace: str,
        *,
        session: str | None = None,
        heads: int = 0,
        head_dim: int = 0,
        layers: Sequence[int] = (),
        generation: int = 0,
        rows: int = 0,
        timeout_s: float | None = None,
    ) -> Warmed:
        """Makes the rows of a stored prefix resident; no row crosses the wire.

        Args:
            namespace: the prefix.
            session: the name to attend under; by default the namespace.
            heads: K/V heads or, on a grouped model, query heads; 0: as stored.
            head_dim: 0: as stored.
            layers: only these; by default all.
            generation: the generation that the rows must still have; 0: any.
            rows: how many, from the first one; 0: all.
            timeout_s: by default a minute.

        Raises:
            InvalidRequest: a layer named is not there, or no layer can have the shape given.
            NotStored: there is no such prefix, or it has no rows.
            GenerationDiffers: its rows have changed since that generation.
            OverBudget: it does not fit; what is resident stays.
        """
        session = namespace if session is None else session
        return self.attending.warm(
            namespace, session, heads, head_dim, layers, generation, rows, timeout_s
        )

    def attend_lookup(
        self, session: str, layers: Sequence[int], *, timeout_s: float | None = None
    ) -> list[AttendEntry]:
        """Returns the state of the entries of layers; at most 1,024 of them."""
        return self.attending.lookup(session, layers, timeout_s)

    def attend_drop(
        self, session: str, layer: int | None = None, *, timeout_s: float | None = None
    ) -> int:
        """Forgets one layer of a session, or all; returns how many were resident or cold."""
        return self.attending.drop(session, layer, timeout_s)

    @overload
    def attend_query(
        self,
        session: str,
        layer: int,
        q: Array,
        *,
        with_lse: Literal[False] = ...,
        head_map: Sequence[int] | bytes = ...,
        window: int | None = ...,
        scale: float | None = ...,
        warm: bool = ...,
        timeout_s: float | None = ...,
    ) -> np.ndarray: ...

    @overload
    def attend_query(
        self,
        session: str,
        layer: int,
        q: Array,
        *,
        with_lse: Literal[True],
        head_map: Sequence[int] | bytes = ...,
        window: int | None = ...,
        scale: float | None = ...,
        warm: bool = ...,
        timeout_s: float | None = ...,
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def attend_query(
        self,
        session: str,
        layer: int,
        q: Array,
        *,
        with_lse: bool = False,
        head_map: Sequence[int] | bytes = b"",
        window: int | None = None,
        scale: float | None = None,
        warm: bool = False,
        timeout_s: float | None = None,
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Attention over all rows: float32, in the shape of `q`.

        Args:
            session, layer: the entry.
            q: what is asked.
            with_lse: also return the log-sum-exp of the scaled scores, (heads, queries), with which two
                answers over different rows can be joined (`pion_wire.softmax.merge`).
            head_map, window, scale, warm: see the class.
            timeout_s: instead of the client's.
        """
        asked = Query(session, layer, q, head_map, window, scale, warm=warm)
        asked.message.log_sum_exp = bool(with_lse)
        answer = self.attending.ask(asked.message, timeout_s)
        if answer.lse is None:
            return asked.shaped(answer.out)
        return asked.shaped(answer.out), answer.lse.reshape(asked.shape[:-1])

    def attend_query_fused(
        self,
        session: str,
        layer: int,
        q: Array,
        suffix_k: Array,
        suffix_v: Array,
        *,
        head_map: Sequence[int] | bytes = b"",
        window: int | None = None,
        scale: float | None = None,
        warm: bool = False,
        timeout_s: float | None = None,
    ) -> np.ndarray:
        """Attention over all rows and a causal suffix, aligned at the end.

        Of a suffix of S rows, query m of M sees the first max(S - M, 0) + m + 1, or all if there are
        fewer.

        Args:
            session, layer: the entry.
            q: what is asked, M queries per head.
            suffix_k, suffix_v: (kv heads, S, head_dim), S possibly 0.
            head_map, window, scale, warm: see the class; the suffix is never windowed.
            timeout_s: instead of the client's.
        """
        asked = Query(session, layer, q, head_map, window, scale, warm=warm)
        asked.bring(suffix_k, suffix_v)
        return asked.shaped(self.attending.ask(asked.message, timeout_s).out)

    def attend_query_sparse(
        self,
        session: str,
        layer: int,
        q: Array,
        indices: np.ndarray | Sequence[Sequence[int]],
        counts: np.ndarray | Sequence[int] | None = None,
        *,
        head_map: Sequence[int] | bytes = b"",
        window: int | None = None,
        scale: float | None = None,
        warm: bool = False,
        timeout_s: float | None = None,
    ) -> np.ndarray:
        """Attention over rows that the caller chooses; one query per head.

        Args:
            session, layer: the entry.
            q: what is asked.
            indices: (heads, width) row numbers; those outside the rows or the window are skipped.
            counts: how many of each head's indices count; by default all.
            head_map, window, scale, warm: see the class.
            timeout_s: instead of the client's.
        """
        asked = Query(session, layer, q, head_map, window, scale, warm=warm)
        table = np.asarray(indices)
        if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):
            raise invalid("indices", "row numbers are integers, (heads, width)")
        asked.pick(table, [table.shape[1]] * len(table) if counts is None else counts)
        return asked.shaped(self.attending.ask(asked.message, timeout_s).out)

    def attend_query_sparse_auto(
        self,
        session: str,
        layer: int,
        q: Array,
        block_rows: int,
        blocks: int,
        *,
        selector: Selector = "mean",
        head_map: Sequence[int] | bytes = b"",
        window: int | None = None,
        scale: float | None = None,
        warm: bool = False,
        timeout_s: float | None = None,
    ) -> np.ndarray:
        """Attention over the highest-ranking blocks of rows, and the last block; one query per head.

        Args:
            session, layer: the entry.
            q: what is asked.
            block_rows, blocks: the size of a block, and how many are chosen, the same for all heads.
            selector: "mean" ranks by the mean key of a block. It is cheaper, and good if a block's keys
                are alike, but a single key that stands out is only 1/block_rows of the mean and easily
                missed. "quest" ranks by the largest score that a key within the block's bounds could
                have, and finds such a key (Tang et al. 2024, arXiv:2406.10774).
            head_map, window, scale, warm: see the class.
            timeout_s: instead of the client's.
        """
        asked = Query(session, layer, q, head_map, window, scale, warm=warm)
        asked.choose(block_rows, blocks, selector)
        return asked.shaped(self.attending.ask(asked.message, timeout_s).out)

    def attend_query_sparse_auto_fused(
        self,
        session: str,
        layer: int,
        q: Array,
        block_rows: int,
        blocks: int,
        suffix_k: Array,
        suffix_v: Array,
        *,
        selector: Selector = "mean",
        head_map: Sequence[int] | bytes = b"",
        window: int | None = None,
        scale: float | None = None,
        warm: bool = False,
        timeout_s: float | None = None,
    ) -> np.ndarray:
        """Like `attend_query_sparse_auto`, with a suffix that is seen as in `attend_query_fused`."""
        asked = Query(session, layer, q, head_map, window, scale, warm=warm)
        asked.choose(block_rows, blocks, selector)
        asked.bring(suffix_k, suffix_v)
        return asked.shaped(self.attending.ask(asked.message, timeout_s).out)


class Query:
    """A request, and the shape that its answer must have.

    It is dense, unless `pick`, `choose` or `bring` makes it another kind.

    Raises:
        InvalidRequest: an array or a number has no place in a request.
    """

    def __init__(
        self,
        session: str,
        layer: int,
        q: Array,
        head_map: Sequence[int] | bytes,
        window: int | None,
        scale: float | None,
        *,
        warm: bool,
    ) -> None:
        array = _f32("q", q)
        self.shape = array.shape
        if array.ndim not in (2, 3):
            raise invalid("q", f"{self.shape} is not (heads, queries, head_dim)")
        self.queries = array.shape[1] if array.ndim == 3 else 1
        try:
            self.message = pb.AttendQueryRequest(
                session=text("session", session),
                layer=count("layer", layer),
                heads=array.shape[0],
                head_dim=array.shape[-1],
                head_map=bytes(_counts("head_map", head_map, 255)),
                window_rows=None if window is None else count("window", window, U64_MAX),
                scale=scale,
                warm=bool(warm),
                data=array.tobytes(),
            )
        except TypeError as error:  # nothing else is left to be of a wrong type
            raise invalid("scale", str(error)) from error
        self.message.dense.queries = self.queries

    def pick(self, table: np.ndarray, counts: Sequence[int] | np.ndarray) -> None:
        """Asks over rows (heads, width) that the caller chose, the first `counts` of each head."""
        sparse = self.message.sparse
        # What no row can have is skipped by the server; clipped, it stays so in 32 bits.
        sparse.indices = np.clip(table, -1, 2**31 - 1).astype("<i4").tobytes()
        sparse.counts = np.array(_counts("counts", counts, table.shape[1]), "<u4").tobytes()
        sparse.indices_per_head = table.shape[1]

    def choose(self, block_rows: int, blocks: int, selector: str) -> None:
        """Asks over the highest-ranking blocks of rows."""
        if selector not in tuple(_SELECTORS):
            raise invalid("selector", f"{selector!r} is neither 'mean' nor 'quest'")
        choice = pb.AttendSparseAuto(
            block_rows=count("block_rows", block_rows),
            blocks=count("blocks", blocks),
            selector=_SELECTORS[selector],
        )
        self.message.sparse_auto.CopyFrom(choice)

    def bring(self, suffix_k: Array, suffix_v: Array) -> None:
        """Asks over a suffix as well, after the rows that were chosen, if any."""
        k, v = _f32("suffix_k", suffix_k), _f32("suffix_v", suffix_v)
        if k.ndim != 3 or k.shape != v.shape:
            raise invalid("suffix_k", f"{k.shape} and {v.shape} are not (kv heads, rows, head_dim)")
        brought = {"suffix_rows": k.shape[1], "suffix_k": k.tobytes(), "suffix_v": v.tobytes()}
        if self.message.HasField("sparse_auto"):
            fused = pb.AttendSparseAutoFused(choice=self.message.sparse_auto, **brought)
            self.message.sparse_auto_fused.CopyFrom(fused)
        else:
            self.message.fused.CopyFrom(pb.AttendFused(queries=self.queries, **brought))

    def shaped(self, out: np.ndarray) -> np.ndarray:
        """Returns an answer in the shape of the query."""
        return out.reshape(self.shape)


def _f32(field: str, array: Array) -> np.ndarray:
    """Returns an array as contiguous float32; evaluates MLX's."""
    if type(array).__module__.startswith("mlx.") and array.dtype != mlx_core().complex64:
        array = array.astype(mlx_core().float32)  # NumPy does not know bfloat16
    try:
        array = np.asarray(array)
        if array.dtype.kind in _NO_REAL_NUMBERS:
            raise TypeError(f"{array.dtype}")
        return np.ascontiguousarray(array, "<f4")
    except (ValueError, TypeError) as error:
        raise invalid(field, f"not an array of real numbers: {error}") from error


def _counts(field: str, values: Iterable[int], most: int = U32_MAX) -> list[int]:
    """Returns numbers that can be sent; raises as `count` does."""
    try:
        return [count(field, value, most) for value in values]
    except TypeError as error:
        raise invalid(field, f"{values!r} is not several numbers") from error
