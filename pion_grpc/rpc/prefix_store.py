"""pion.v1.PrefixStore: messages to values, values to messages, and chunks framed by hand."""

import itertools
import struct
from collections.abc import Iterable, Iterator, Sized

from crc32c import crc32c

from pion_grpc import __version__
from pion_grpc.config import Config
from pion_grpc.core.attend import Attend
from pion_grpc.core.attend_values import Telemetry
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.reading import Rows
from pion_grpc.core.storing import PrefixUpload
from pion_grpc.core.values import (
    BlockTable,
    FetchQuery,
    LookupQuery,
    LookupResult,
    MatchQuery,
    MissReason,
    Position,
    PrefixInfo,
    RowRange,
    State,
    StoreHeader,
    WriteRowsHeader,
)
from pion_grpc.errors import InvalidRequest, NoBackend
from pion_grpc.rpc.service import SMALL_MESSAGES, Call
from pion_grpc.rpc.uploads import durability_of, durability_value, fill, header_of, row_chunks
from pion_wire import codecs, limits
from pion_wire.framing import frame_header, frame_part, frame_rows
from pion_wire.layout import LayoutError, Side
from pion_wire.messages import (
    layout_from_message,
    layout_to_message,
    part_from_message,
    part_to_message,
    side_from_value,
    tensor_to_message,
)
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import types_pb2

_REASONS = {
    MissReason.NONE: types_pb2.MISS_REASON_UNSPECIFIED,
    MissReason.NOT_STORED: types_pb2.MISS_REASON_NOT_STORED,
    MissReason.NO_ROWS: types_pb2.MISS_REASON_NO_ROWS,
    MissReason.TOKENS_DIFFER: types_pb2.MISS_REASON_TOKENS_DIFFER,
    MissReason.MODEL_DIFFERS: types_pb2.MISS_REASON_MODEL_DIFFERS,
    MissReason.LAYOUT_DIFFERS: types_pb2.MISS_REASON_LAYOUT_DIFFERS,
    MissReason.TOO_SHORT: types_pb2.MISS_REASON_TOO_SHORT,
    MissReason.PART_MISSING: types_pb2.MISS_REASON_PART_MISSING,
    MissReason.PARTIAL: types_pb2.MISS_REASON_PARTIAL,
}
_STATES = {
    State.REGISTERED: types_pb2.PREFIX_STATE_REGISTERED,
    State.LIVE: types_pb2.PREFIX_STATE_LIVE,
    State.SEALED: types_pb2.PREFIX_STATE_SEALED,
}


_HEADER_REST_BYTES = 16 << 10
"""Names, numbers and the lengths of everything in the header of a Fetch, generously."""
_LIST_ENTRY_BYTES = 8
"""Bytes around an entry of a list, at most, for entries below 2 MiB."""


class PrefixStoreService:
    """One method per RPC; see the proto for what each does."""

    def __init__(
        self,
        store: PrefixStore,
        config: Config,
        started_unix_ms: int,
        attend: Attend | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._started_unix_ms = started_unix_ms
        self._attend = attend

    def Register(
        self, request: pb.PrefixStoreRegisterRequest, call: Call
    ) -> pb.PrefixStoreRegisterResponse:
        """Declares a prefix."""
        table = _table(request.table) if request.HasField("table") else None
        info = self._store.register(
            call.tenant,
            request.namespace,
            layout_from_message(request.layout),
            request.model_id,
            table,
            request.prefill_ms,
        )
        return pb.PrefixStoreRegisterResponse(state=_STATES[info.state], generation=info.generation)

    def Lookup(
        self, request: pb.PrefixStoreLookupRequest, call: Call
    ) -> pb.PrefixStoreLookupResponse:
        """Says what is stored under names."""
        _check_count("queries", request.queries, limits.NAMES_MAX)
        queries = [
            LookupQuery(
                query.namespace,
                query.model_id,
                query.token_ids,
                layout_from_message(query.layout) if query.HasField("layout") else None,
                query.restored_tokens if query.HasField("restored_tokens") else None,
                query.restored_prefill_ms if query.HasField("restored_prefill_ms") else None,
            )
            for query in request.queries
        ]
        results = self._store.lookup(call.tenant, queries, request.lease_ms)
        return pb.PrefixStoreLookupResponse(
            results=[
                pb.PrefixStoreLookupResponse.Result(
                    hit=result.hit,
                    reason=_REASONS[result.reason],
                    prefix=_info(result.prefix),
                    first_difference=result.first_difference,
                    lease_id=result.lease_id,
                )
                for result in results
            ]
        )

    def Match(self, request: pb.PrefixStoreMatchRequest, call: Call) -> pb.PrefixStoreMatchResponse:
        """Finds the longest stored prefix."""
        _check_count("part_kinds", request.part_kinds, limits.PARTS_MAX)
        query = MatchQuery(
            request.model_id,
            request.token_ids,
            tuple(request.fidelities) or ("raw",),
            request.min_tokens,
            request.lease_ms if request.HasField("lease_ms") else limits.LEASE_MS_DEFAULT,
            tuple(request.part_kinds),
        )
        result = self._store.match(call.tenant, query)
        return pb.PrefixStoreMatchResponse(
            hit=result.hit,
            reason=_REASONS[result.reason],
            prefix=_info(result.prefix),
            requested_tokens=result.requested_tokens,
            matched_tokens=result.matched_tokens,
            served_tokens=result.served_tokens,
            shortened_by=result.shortened_by,
            lease_id=result.lease_id,
            longest_namespace=result.longest,
            longest_tokens=result.longest_tokens,
        )

    def Store(self, messages: Iterator[bytes], call: Call) -> pb.PrefixStoreStoreResponse:
        """Stores one prefix."""
        header = _store_header(header_of(messages, pb.PrefixStoreStoreRequest))
        begun = self._store.store(call.tenant, header)
        if isinstance(begun, PrefixUpload):
            stored = fill(begun, row_chunks(messages, parts=True))
            self._store.stored(call.tenant, header, stored)
        else:
            stored = begun
        return pb.PrefixStoreStoreResponse(
            namespace=stored.namespace,
            already_stored=stored.already_stored,
            generation=stored.generation,
            token_count=stored.token_count,
            stored_bytes=stored.stored_bytes,
            durability=durability_value(stored.durability),
            base=stored.base,
        )

    def Fetch(self, request: pb.PrefixStoreFetchRequest, call: Call) -> Iterator[bytes]:
        """Streams rows."""
        _check_count("slots", request.slots, limits.SLOTS_MAX)
        _check_count("part_kinds", request.part_kinds, limits.PARTS_MAX)
        _check_count("codecs", request.codecs, limits.TENSORS_MAX)
        resume = Position(
            request.resume_tensor_index,
            request.resume_array_index,
            request.resume_row,
            request.resume_part,
            request.resume_part_offset_bytes,
        )
        query = FetchQuery(
            request.namespace,
            request.lease_id,
            request.generation,
            RowRange(request.rows.begin, request.rows.end),
            frozenset(request.slots),
            tuple(request.part_kinds),
            codecs=_codecs(request.codecs),
            counted=not request.uncounted,
        )
        found = self._store.fetch(call.tenant, query)
        if isinstance(found, LookupResult):
            header = pb.PrefixStoreFetchHeader(
                reason=_REASONS[found.reason],
                prefix=_info(found.prefix),
                shortened_by=found.shortened_by,
            )
            yield frame_header(header.SerializeToString())
            return
        reading = found.reading
        sent = 0
        with self._store.guarded(reading):
            header = pb.PrefixStoreFetchHeader(
                found=True,
                reason=_cut(found.shortened_by),
                prefix=_info(found.prefix),
                layout=layout_to_message(reading.served_layout),
                rows=types_pb2.RowRange(begin=reading.rows.begin, end=reading.rows.end),
                total_bytes=reading.total_bytes,
                token_ids=_all_or_none(found.token_ids, reading.rows),
                parts=[part_to_message(part) for part in reading.parts],
                shortened_by=found.shortened_by,
            )
            yield frame_header(header.SerializeToString())
            for piece in reading.stream(resume):
                if isinstance(piece, Rows):
                    yield frame_rows(*piece)
                else:
                    yield frame_part(*piece)
                sent += len(piece.data)
        self._store.fetched(found, sent)

    def Export(
        self, request: pb.PrefixStoreExportRequest, call: Call
    ) -> pb.PrefixStoreExportResponse:
        """Names the files of a prefix."""
        if not self._config.exports:
            raise NoBackend("export is switched off here: stream instead")
        directory = self._store.directory
        if request.probe:
            return pb.PrefixStoreExportResponse(
                directory=str(directory.path), host_token=directory.host_token
            )
        _check_count("part_kinds", request.part_kinds, limits.PARTS_MAX)
        query = FetchQuery(
            request.namespace,
            request.lease_id,
            rows=RowRange(request.rows.begin, request.rows.end),
            slots=frozenset(request.slots),
            part_kinds=tuple(request.part_kinds),
            counted=not request.uncounted,
        )
        lease_ms = request.lease_ms if request.HasField("lease_ms") else limits.LEASE_MS_DEFAULT
        export = self._store.export(call.tenant, query, lease_ms)
        return pb.PrefixStoreExportResponse(
            directory=str(directory.path),
            host_token=directory.host_token,
            prefix=_info(export.prefix),
            rows=types_pb2.RowRange(begin=export.rows.begin, end=export.rows.end),
            extents=[
                pb.PrefixStoreExportResponse.Extent(
                    **extent.file._asdict(),
                    file_row=extent.file_row,
                    row_count=extent.row_count,
                    first_row=extent.first_row,
                )
                for extent in export.extents
            ],
            token_ids=_all_or_none(export.token_ids, export.rows),
            lease_id=export.lease_id,
            reason=_cut(export.shortened_by),
            shortened_by=export.shortened_by,
        )

    def Drop(self, request: pb.PrefixStoreDropRequest, call: Call) -> pb.PrefixStoreDropResponse:
        """Takes names away."""
        _check_count("namespaces", request.namespaces, limits.NAMES_MAX)
        names = list(request.namespaces)
        results = zip(names, self._store.drop(call.tenant, names), strict=True)
        return pb.PrefixStoreDropResponse(
            results=[
                pb.PrefixStoreDropResponse.Result(namespace=name, dropped=dropped)
                for name, dropped in results
            ]
        )

    def List(self, request: pb.PrefixStoreListRequest, call: Call) -> pb.PrefixStoreListResponse:
        """Lists what is visible; a page ends early where it would outgrow a message."""
        count = request.page_size or 100
        page = self._store.list_page(
            call.tenant, prefix=request.namespace_prefix, after=request.page_token, count=count
        )
        answer = pb.PrefixStoreListResponse()
        size = 0
        for info in map(_prefix_info, page):
            size += info.ByteSize() + _LIST_ENTRY_BYTES
            if answer.prefixes and size > SMALL_MESSAGES.response:
                break
            answer.prefixes.append(info)
        if len(answer.prefixes) < len(page) or len(page) == count:
            answer.next_page_token = answer.prefixes[-1].namespace
        return answer

    def Blocks(
        self, request: pb.PrefixStoreBlocksRequest, call: Call
    ) -> pb.PrefixStoreBlocksResponse:
        """Returns a table."""
        table = self._store.block_table(call.tenant, request.namespace)
        if table is None:
            return pb.PrefixStoreBlocksResponse(known=False)
        _check_hashes("namespace", table.hashes)  # larger ones come over the other wire only
        message = types_pb2.BlockTable(block_tokens=table.block_tokens, hashes=table.hashes)
        return pb.PrefixStoreBlocksResponse(known=True, table=message)

    def Membership(
        self, request: pb.PrefixStoreMembershipRequest, call: Call
    ) -> pb.PrefixStoreMembershipResponse:
        """Probes tables."""
        _check_count("namespaces", request.namespaces, limits.NAMES_MAX)
        _check_hashes("hashes", request.hashes)
        answer_bytes = (len(request.hashes) // 64 + _LIST_ENTRY_BYTES) * len(request.namespaces)
        if answer_bytes > SMALL_MESSAGES.response:
            raise InvalidRequest(
                "hashes",
                f"the answer would have {answer_bytes} bytes: probe fewer names at once",
                limit=SMALL_MESSAGES.response,
            )
        bitmaps = [
            self._store.membership(call.tenant, name, request.hashes) for name in request.namespaces
        ]
        return pb.PrefixStoreMembershipResponse(
            results=[
                pb.PrefixStoreMembershipResponse.Result(
                    known=bitmap is not None, bitmap=bitmap or b""
                )
                for bitmap in bitmaps
            ]
        )

    def Save(self, request: pb.PrefixStoreSaveRequest, call: Call) -> pb.PrefixStoreSaveResponse:
        """Seals live prefixes."""
        _check_count("namespaces", request.namespaces, limits.NAMES_MAX)
        count = self._store.save(call.tenant, list(request.namespaces))
        return pb.PrefixStoreSaveResponse(sealed_count=count)

    def Sync(self, request: pb.PrefixStoreSyncRequest, call: Call) -> pb.PrefixStoreSyncResponse:
        """The durability barrier."""
        self._store.sync()
        return pb.PrefixStoreSyncResponse()

    def WriteRows(self, messages: Iterator[bytes], call: Call) -> pb.PrefixStoreWriteRowsResponse:
        """Writes rows of one tensor."""
        message = header_of(messages, pb.PrefixStoreWriteRowsRequest)
        header = WriteRowsHeader(
            message.namespace,
            message.slot,
            _side(message.side),
            message.first_row,
            message.row_count,
            durability_of(message.durability),
        )
        written = fill(self._store.write_rows(call.tenant, header), row_chunks(messages))
        return pb.PrefixStoreWriteRowsResponse(
            row_count=written.row_count,
            generation=written.generation,
            durability=durability_value(written.durability),
        )

    def ReadRows(
        self, request: pb.PrefixStoreReadRowsRequest, call: Call
    ) -> Iterator[pb.PrefixStoreReadRowsResponse]:
        """Reads scattered rows."""
        if len(request.rows) % 4:
            raise InvalidRequest("rows", f"{len(request.rows)} bytes are not a sequence of u32")
        rows = struct.unpack(f"<{len(request.rows) // 4}I", request.rows)
        side = _side(request.side)
        found = self._store.read_rows(call.tenant, request.namespace, request.slot, side, rows)
        if found is None:
            yield pb.PrefixStoreReadRowsResponse(reason=types_pb2.MISS_REASON_NO_ROWS)
            return
        layout, pieces = found
        # Begun before anything is sent: pieces that nobody begins would never close their files.
        first = next(pieces)
        yield pb.PrefixStoreReadRowsResponse(tensor=tensor_to_message(layout.tensors[0]))
        for data in itertools.chain((first,), pieces):
            yield pb.PrefixStoreReadRowsResponse(crc32c=crc32c(data), data=data)

    def Snapshot(
        self, request: pb.PrefixStoreSnapshotRequest, call: Call
    ) -> pb.PrefixStoreSnapshotResponse:
        """Remembers row counts."""
        snapshot_id = self._store.row_snapshots.take(call.tenant, request.namespace)
        return pb.PrefixStoreSnapshotResponse(snapshot_id=snapshot_id)

    def Restore(
        self, request: pb.PrefixStoreRestoreRequest, call: Call
    ) -> pb.PrefixStoreRestoreResponse:
        """Cuts rows back."""
        generation = self._store.row_snapshots.restore(
            call.tenant, request.namespace, request.snapshot_id
        )
        return pb.PrefixStoreRestoreResponse(generation=generation)

    def Release(
        self, request: pb.PrefixStoreReleaseRequest, call: Call
    ) -> pb.PrefixStoreReleaseResponse:
        """Forgets a snapshot."""
        released = self._store.row_snapshots.release(
            call.tenant, request.namespace, request.snapshot_id
        )
        return pb.PrefixStoreReleaseResponse(released=released)

    def Describe(
        self,
        request: pb.PrefixStoreDescribeRequest,
        call: Call,
    ) -> pb.PrefixStoreDescribeResponse:
        """Describes the server."""
        config, totals = self._config, self._store.totals(call.tenant or None)
        in_force = {
            name.lower(): value for name, value in vars(limits).items() if isinstance(value, int)
        }
        in_force |= {name: getattr(config, name) for name in ("streams_max", "stall_ms")}
        # A tenant sees what is its own.
        resident = self._attend.telemetry() if self._attend and not call.tenant else Telemetry()
        return pb.PrefixStoreDescribeResponse(
            version=__version__,
            limits=[
                pb.PrefixStoreDescribeResponse.Limit(name=name, value=value)
                for name, value in sorted(in_force.items())
            ],
            codecs=codecs.CHOICES,
            disk_budget_bytes=config.disk_budget,
            disk_used_bytes=totals.disk_used_bytes,
            attend_backend=self._attend.backend.name if self._attend else "",
            resident_budget_bytes=config.resident_budget,
            resident_used_bytes=resident.resident_bytes,
            attend_warm=resident.warm,
            attend_cold=resident.cold,
            attend_demotions=resident.demotions,
            attend_rehydrates=resident.rehydrates,
            prefix_count=totals.prefixes,
            row_count=totals.rows,
            evicted_count=totals.evicted,
            corrupt_count=totals.corrupt,
            live_bytes=totals.live_bytes,
            started_unix_ms=self._started_unix_ms,
            export_enabled=config.exports,
            tenant_budget_bytes=config.tenant_budget,
        )


def _store_header(message: pb.PrefixStoreStoreHeader) -> StoreHeader:
    _check_count("parts", message.parts, limits.PARTS_MAX)
    # What the header of a Fetch will have: layout and parts as they are stored, and as they are served.
    twice = message.layout.ByteSize()
    twice += sum(part.ByteSize() + _LIST_ENTRY_BYTES for part in message.parts)
    if len(message.token_ids) + 2 * twice > SMALL_MESSAGES.response - _HEADER_REST_BYTES:
        raise InvalidRequest(
            "parts" if message.parts else "token_ids",
            "token ids, layout and parts would not fit into the header of a Fetch",
            limit=SMALL_MESSAGES.response,
        )
    return StoreHeader(
        message.namespace,
        message.model_id,
        message.token_ids,
        layout_from_message(message.layout),
        message.parent_namespace,
        message.base,
        message.replace,
        durability_of(message.durability),
        message.prefill_ms,
        _table(message.table) if message.HasField("table") else None,
        tuple(part_from_message(part) for part in message.parts),
        message.parent_generation,
    )


def _check_count(field: str, values: Sized, limit: int) -> None:
    """Refuses a list before a value is made of each of its entries."""
    if len(values) > limit:
        raise InvalidRequest(field, f"{len(values)} exceed {limit}", limit=limit)


def _cut(shortened_by: str) -> types_pb2.MissReason.ValueType:
    """Returns why rows end before the prefix does; nothing if no part cut them."""
    return _REASONS[MissReason.PART_MISSING if shortened_by else MissReason.NONE]


def _all_or_none(token_ids: bytes, rows: RowRange) -> bytes:
    """Returns the token ids of rows, or none where some are of unknown tokens: written to a row."""
    return token_ids if len(token_ids) == 4 * rows.end else b""


def _side(value: int) -> Side:
    try:
        return side_from_value(value)
    except LayoutError as error:
        raise InvalidRequest("side", error.message) from error


def _check_hashes(field: str, hashes: bytes) -> None:
    """Refuses more hashes than a message of ours may hold."""
    if len(hashes) > 8 * limits.HASHES_MAX:
        raise InvalidRequest(field, f"more than {limits.HASHES_MAX}", limit=limits.HASHES_MAX)


def _codecs(names: Iterable[str]) -> frozenset[str]:
    """Returns the codecs that a client decodes itself, by canonical name or by family."""
    try:
        return frozenset(
            name if name in codecs.FAMILIES else str(codecs.parse(name)) for name in names
        )
    except ValueError as error:
        raise InvalidRequest("codecs", str(error)) from error


def _table(message: types_pb2.BlockTable) -> BlockTable:
    _check_hashes("table.hashes", message.hashes)
    return BlockTable(message.block_tokens, message.hashes)


def _info(info: PrefixInfo | None) -> pb.PrefixInfo | None:
    return None if info is None else _prefix_info(info)


def _prefix_info(info: PrefixInfo) -> pb.PrefixInfo:
    return pb.PrefixInfo(
        namespace=info.namespace,
        state=_STATES[info.state],
        model_id=info.model_id,
        layout=layout_to_message(info.layout),
        token_count=info.token_count,
        base=info.base,
        parent_namespace=info.parent,
        generation=info.generation,
        stored_bytes=info.stored_bytes,
        row_bytes=info.row_bytes,
        fidelity=info.fidelity,
        created_unix_ms=info.created_unix_ms,
        durability=durability_value(info.durability),
        parts=[part_to_message(part) for part in info.parts],
        prefill_ms=info.prefill_ms,
        depth=info.depth,
    )
