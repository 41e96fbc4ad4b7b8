"""pion.v1.Attend: messages to queries, answers to messages.

The one decision concerns the stream: its queries are answered one by one, in the order they came, on the
thread that serves the stream. So answers are in order for every session, a client that sends faster than
its answers come has no more in flight than the window of one HTTP/2 stream, and a query costs no hop
between threads but the backend's own. Whoever wants two answers at once opens two streams.
"""

import threading
from collections.abc import Iterator
from typing import Literal

import grpc

from pion_grpc.core.attend import Attend
from pion_grpc.core.attend_query import Ask, BlockChoice, IndexBytes, SuffixBytes
from pion_grpc.core.attend_values import (
    EntryInfo,
    EntryState,
    Key,
    Shape,
    Source,
    Warmed,
    check_layer_count,
)
from pion_grpc.errors import InvalidRequest
from pion_grpc.rpc.errors import CODES, problem_of
from pion_grpc.rpc.service import Call, parsed
from pion_grpc.rpc.uploads import byte_chunks, fill, header_of
from pion_wire.v1 import attend_pb2 as pb

_STATES = {
    EntryState.MISSING: pb.ATTEND_STATE_UNSPECIFIED,
    EntryState.COLD: pb.ATTEND_STATE_COLD,
    EntryState.RESIDENT: pb.ATTEND_STATE_RESIDENT,
}
_SELECTORS: dict[int, Literal["mean", "quest"]] = {
    pb.ATTEND_SELECTOR_UNSPECIFIED: "mean",
    pb.ATTEND_SELECTOR_MEAN: "mean",
    pb.ATTEND_SELECTOR_QUEST: "quest",
}


class AttendService:
    """One method per RPC; see the proto for what each does."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._lock = threading.Lock()
        self._streams: set[grpc.ServicerContext] = set()

    def Store(self, messages: Iterator[bytes], call: Call) -> pb.AttendStoreResponse:
        """Makes entries resident."""
        header: pb.AttendStoreHeader = header_of(messages, pb.AttendStoreRequest)
        if header.HasField("rows"):
            rows = header.rows
            key = Key(call.tenant, header.session, rows.layer)
            upload = self._attend.begin_rows(key, Shape(rows.heads, rows.rows, rows.head_dim))
            warmed = fill(upload, byte_chunks(messages))
        elif header.HasField("from_prefix"):
            if next(messages, None) is not None:
                raise InvalidRequest("bytes", "nothing follows where a stored prefix is named")
            warmed = self._store_prefix(header.session, header.from_prefix, call)
        else:
            raise InvalidRequest("source", "either rows or from_prefix is required")
        return pb.AttendStoreResponse(
            layer_count=warmed.layers,
            skipped_count=warmed.skipped,
            resident_bytes=warmed.resident_bytes,
        )

    def _store_prefix(self, session: str, wanted: pb.AttendFromPrefix, call: Call) -> Warmed:
        check_layer_count(len(wanted.layers))  # before they are taken in
        source = Source(
            wanted.namespace,
            wanted.heads,
            wanted.head_dim,
            frozenset(wanted.layers),
            wanted.generation,
            wanted.rows,
        )
        warmed = self._attend.store_prefix(call.tenant, session, source)
        if warmed.skipped and not warmed.layers and (wanted.heads or wanted.head_dim):
            given = f"{wanted.heads} heads of {wanted.head_dim} values (0: any)"
            refusal = f"none of {warmed.skipped} layers of {wanted.namespace!r} has {given}"
            raise InvalidRequest("head_dim" if wanted.head_dim else "heads", refusal)
        return warmed

    def Lookup(self, request: pb.AttendLookupRequest, call: Call) -> pb.AttendLookupResponse:
        """Says which entries are resident."""
        check_layer_count(len(request.layers))  # before they are taken in
        found = self._attend.lookup(call.tenant, request.session, list(request.layers))
        return pb.AttendLookupResponse(entries=[_entry(info) for info in found])

    def Query(self, request: pb.AttendQueryRequest, call: Call) -> pb.AttendQueryResponse:
        """Answers one query."""
        return self._answer(request, call)

    def Stream(self, messages: Iterator[bytes], call: Call) -> Iterator[pb.AttendStreamResponse]:
        """Answers many."""
        with self._lock:
            self._streams.add(call.context)
        try:
            for message in messages:
                # Whose answer an error would be is not known: it ends the stream.
                request = parsed(message, pb.AttendStreamRequest, "request")
                yield self._stream_answer(request, call)
        finally:
            with self._lock:
                self._streams.discard(call.context)

    def end_streams(self) -> None:
        """Cuts off the streams that are open: no client ends its stream because a server shuts down."""
        with self._lock:
            streams = list(self._streams)
        for context in streams:
            context.cancel()

    def Drop(self, request: pb.AttendDropRequest, call: Call) -> pb.AttendDropResponse:
        """Forgets entries."""
        layer = request.layer if request.HasField("layer") else None
        dropped = self._attend.drop(call.tenant, request.session, layer)
        return pb.AttendDropResponse(dropped_count=dropped)

    def _answer(self, request: pb.AttendQueryRequest, call: Call) -> pb.AttendQueryResponse:
        key = Key(call.tenant, request.session, request.layer)
        wanted = call.context.is_active
        answer = self._attend.ask(key, _ask(request), warm=request.warm, wanted=wanted)
        given = answer.lse if request.log_sum_exp else None
        return pb.AttendQueryResponse(
            data=answer.out.tobytes(), log_sum_exp=b"" if given is None else given.tobytes()
        )

    def _stream_answer(
        self, request: pb.AttendStreamRequest, call: Call
    ) -> pb.AttendStreamResponse:
        try:
            answer = self._answer(request.query, call)
        except Exception as error:
            problem = problem_of(error, "pion.v1.Attend.Stream")
            failed = pb.AttendStreamError(
                code=CODES[problem.reason].value[0], reason=problem.reason, message=str(problem)
            )
            return pb.AttendStreamResponse(id=request.id, error=failed)
        return pb.AttendStreamResponse(id=request.id, answer=answer)


def _ask(request: pb.AttendQueryRequest) -> Ask:
    queries, suffix, indices, choice = 1, None, None, None
    match request.WhichOneof("kind"):
        case "dense":
            queries = request.dense.queries
        case "fused":
            queries, suffix = request.fused.queries, _suffix(request.fused)
        case "sparse":
            sparse = request.sparse
            indices = IndexBytes(sparse.indices_per_head, sparse.indices, sparse.counts)
        case "sparse_auto":
            choice = _choice(request.sparse_auto)
        case "sparse_auto_fused":
            choice = _choice(request.sparse_auto_fused.choice)
            suffix = _suffix(request.sparse_auto_fused)
        case _:
            raise InvalidRequest("kind", "required: dense, fused, sparse or another")
    return Ask(
        request.heads,
        request.head_dim,
        request.data,
        queries,
        head_map=request.head_map,
        window=request.window_rows if request.HasField("window_rows") else None,
        scale=request.scale if request.HasField("scale") else None,
        log_sum_exp=request.log_sum_exp,
        suffix=suffix,
        indices=indices,
        choice=choice,
    )


def _suffix(kind: pb.AttendFused | pb.AttendSparseAutoFused) -> SuffixBytes:
    return SuffixBytes(kind.suffix_rows, kind.suffix_k, kind.suffix_v)


def _choice(message: pb.AttendSparseAuto) -> BlockChoice:
    selector = _SELECTORS.get(message.selector)
    if selector is None:
        raise InvalidRequest("selector", f"{message.selector} is unknown")
    return BlockChoice(message.block_rows, message.blocks, selector)


def _entry(info: EntryInfo) -> pb.AttendEntry:
    heads, rows, head_dim = info.shape
    return pb.AttendEntry(
        layer=info.layer, state=_STATES[info.state], heads=heads, rows=rows, head_dim=head_dim
    )
