"""The client: one object per server, synchronous, usable from any number of threads.

Knows the services' methods; others know how bytes are framed, placed, read from files or retried.

The one decision: a miss is an answer and an error is an exception. `fetch` returns None where nothing is
stored, also if what was stored has been evicted or found damaged a moment ago, and a prefix only when
every byte of it is here and checked.
"""

import builtins
import heapq
import itertools
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from pion_client import answers, requests, together
from pion_client.addresses import DEFAULT_ADDRESS
from pion_client.arrays import U64_MAX, count, invalid, mlx_core, text
from pion_client.attend import Attending, AttendMixin
from pion_client.calls import Calls
from pion_client.connection import Connection, retried
from pion_client.errors import BadAnswer, DataCorrupt, NotStored
from pion_client.fetching import ScatteredRows
from pion_client.lanes import Lanes
from pion_client.routes import Routes, by_name
from pion_client.rows import rows_of, tensor_rows
from pion_client.states import States
from pion_client.storing import prefix_content
from pion_client.tls import Tls
from pion_client.values import (
    Array,
    BlockTable,
    Codecs,
    Description,
    DurabilityName,
    Encoded,
    Lookup,
    Match,
    Part,
    Prefix,
    PrefixInfo,
    Progress,
    Receipt,
    Registered,
    RowsWritten,
    Stored,
    TokenIds,
    pack_hashes,
)
from pion_wire import limits
from pion_wire.blocks import pack_token_ids, route_key
from pion_wire.codecs import FAMILIES
from pion_wire.layout import Layout, Side
from pion_wire.messages import SIDE_VALUES, layout_to_message
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import stats_pb2


class Client(AttendMixin):
    """Stores, finds and fetches the K/V of prompt prefixes.

    Nothing is connected before the first call. After a fork the child connects anew, or raises `Forked`
    where gRPC cannot go on there; it never hangs.

    Args:
        address: `host:port` or `unix:/path`. Several, or with commas between, are the nodes of a mesh:
            each call goes to the one that a proxy would send it to. What is about all names or several,
            or one that this client has not met, goes to all of them. So do `stats`, `describe` and
            `sync`, which fail if one is away: no other can answer for it.
        export: read the server's files where it runs on this host; False always streams.
        verify: check every page of those files against its checksum first.
        tenant, password: who asks; by default PION_TENANT and PION_PASSWORD of the environment.
        tls: an encrypted connection; by default what PION_TLS_CA, PION_TLS_CERT and PION_TLS_KEY name.
        timeout_s: how long a call may take, what is tried again included; streams have their own.
            A read or a store whose server is away is tried for so long, as it may be starting anew;
            three times if it has been away for longer; with a `timeout_s` of its own until that is over.
        stall_timeout_s: how long a stream may make no progress.
        fetch_bytes_max: more than this is refused before memory is allocated.

    Raises:
        ValueError: the address or a time is not valid, or the certificates cannot be used.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        export: bool = True,
        verify: bool = False,
        tenant: str | None = None,
        password: str | None = None,
        tls: Tls | None = None,
        timeout_s: float = 5.0,
        stall_timeout_s: float = 30.0,
        fetch_bytes_max: int = 16 << 30,
    ) -> None:
        self.address = address
        self._tenant = os.environ.get("PION_TENANT", "") if tenant is None else tenant
        if password is None:
            password = os.environ.get("PION_PASSWORD") or None
        self._connection = Connection(address, tenant=self._tenant, password=password, tls=tls)
        self._calls = Calls(self._connection, timeout_s, stall_timeout_s)
        self._lanes = Lanes(self._calls, export=export, verify=verify, bytes_max=fetch_bytes_max)
        self._routes = Routes(self._connection.everywhere)
        self.states = States(self._calls, export=export, verify=verify, bytes_max=fetch_bytes_max)
        """Recurrent state: `states.store`, `store_all`, `fetch`, `fetch_all`, `drop`."""
        self.attending = Attending(self._calls, self._routes)

    def __repr__(self) -> str:
        return f"Client({self.address!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call that is in flight, and the connection."""
        self._connection.close()
        self.attending.close()

    # Storing

    def store(
        self,
        namespace: str | None,
        *,
        layers: Sequence[tuple[Array | Encoded, Array | Encoded]] | None,
        token_ids: TokenIds,
        model: str,
        slots: Sequence[int] | None = None,
        codecs: Codecs = "raw",
        parent: str | None = None,
        base: int = 0,
        parent_generation: int = 0,
        replace: bool = False,
        durability: DurabilityName = "process",
        prefill_ms: float = 0,
        table: BlockTable | None = None,
        parts: Sequence[Part] = (),
        progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> Stored:
        """Stores one prefix: visible as a whole when this returns, or not at all.

        Args:
            namespace: its name; None derives one from model and token ids.
            layers: (K, V) per slot, each (kv_heads, tokens, head_dim), f32, f16 or bf16, or an
                `Encoded`; None if there are parts only. MLX arrays are evaluated here.
            token_ids: all of them, the parent's share included.
            model: what the rows depend on besides the tokens, 1 to 128 bytes.
            slots: the cache slot of each entry of `layers`; by default 0, 1, 2, …
            codecs: how arrays are stored: one codec for all, or by (slot, side) those that are not to be
                raw, such as {(3, "v"): "int8"}. All but "raw" lose something. An `Encoded` says its own.
            parent: a stored prefix whose first `base` rows are this one's; `layers` then hold the
                rows from `base` on.
            base: how many; if it is all of them there are no rows to send, only parts. In a mesh at
                least 64: what has fewer in common may be on another node than its parent.
            parent_generation: only if the parent still has the rows of it; 0: whatever it has.
            replace: put it in the place of what the name holds.
            durability: what the acknowledgement shall promise.
            prefill_ms: the measured time that computing its rows took, the parent's included; 0: not
                measured.
            table: a router's own hashes.
            parts: opaque pieces that belong to it, at any of its boundaries.
            progress: called with (bytes sent, bytes in all), on another thread. If it raises, the
                store is abandoned and the exception is raised here.
            timeout_s: for everything; by default an hour. If given, a server that restarts meanwhile
                is waited for, and everything sent anew.

        Raises:
            InvalidRequest: something does not fit together; nothing was sent, or nothing kept.
            OtherContent: the name holds other tokens, or another model's.
            LayoutDiffers: it holds these tokens with another layout.
            NotStored: the parent is not there any more, or not in that generation.
            Conflict: another store of this name, with other content, was quicker.
            OverBudget: it does not fit.
            Unavailable, DeadlineExceeded: the server cannot be reached, or not in time.
        """
        if namespace == "":
            raise invalid("namespace", "is empty; None derives one")
        packed, base = requests.some_token_bytes(token_ids), count("base", base)
        tensors = rows_of(layers or (), slots, codecs)
        layout = requests.layout_of(tensors, len(packed) // 4 - base)
        header = pb.PrefixStoreStoreHeader(
            namespace=text("namespace", namespace or ""),
            model_id=text("model", model),
            token_ids=packed,
            layout=layout_to_message(layout) if layers is not None else None,
            parent_namespace=text("parent", parent or ""),
            base=base,
            parent_generation=count("parent_generation", parent_generation, U64_MAX),
            replace=replace,
            durability=answers.durability_value(durability),
            prefill_ms=prefill_ms,
            table=requests.block_table(table),
            parts=[requests.part_info(f"parts[{index}]", part) for index, part in enumerate(parts)],
        )
        route = route_key(self._tenant, model, packed)
        answer = self._calls.send(
            "store",
            prefix_content(header.SerializeToString(), tensors, parts, first_row=base),
            route=route,
            deadline=self._calls.stream_deadline(timeout_s),
            progress=progress,
            may_repeat=True,
        )
        stored = answers.stored(pb.PrefixStoreStoreResponse.FromString(answer))
        self._routes.remember(stored.namespace, route)
        return stored

    def write_rows(
        self,
        namespace: str,
        *,
        slot: int,
        side: Side | str,
        first_row: int,
        rows: Array | Encoded,
        codec: str = "raw",
        durability: DurabilityName = "process",
        timeout_s: float | None = None,
    ) -> RowsWritten:
        """Writes rows of one tensor at a row: appends, overwrites, or leaves a gap of zero rows.

        All of them are visible when this returns, or none. The prefix becomes live. Not retried.

        Args:
            namespace: a registered or stored prefix.
            slot, side: which tensor; the side is "k" or "v".
            first_row: where the first of them goes.
            rows: (kv_heads, tokens, head_dim), of the tensor's type; or an `Encoded`.
            codec: the tensor's; what it stores is encoded here.
            durability: what the acknowledgement shall promise.
            timeout_s: for everything; by default an hour.

        Raises:
            NotStored: there is no such prefix.
            LayoutDiffers: it has no such tensor.
            As `store` does.
        """
        side = requests.side_of(side)
        tensor = tensor_rows("rows", slot, side, rows, codec)
        header = pb.PrefixStoreWriteRowsHeader(
            namespace=text("namespace", namespace),
            slot=slot,
            side=SIDE_VALUES[side],
            first_row=count("first_row", first_row),
            row_count=tensor.token_count,
            durability=answers.durability_value(durability),
        )
        answer = self._calls.send(
            "write_rows",
            prefix_content(header.SerializeToString(), [tensor], first_row=first_row),
            route=self._routes.of(namespace),
            deadline=self._calls.stream_deadline(timeout_s),
        )
        written = pb.PrefixStoreWriteRowsResponse.FromString(answer)
        return RowsWritten(
            written.row_count, written.generation, answers.durability(written.durability)
        )

    def register(
        self,
        namespace: str,
        *,
        layout: Layout,
        model: str = "",
        token_ids: TokenIds | None = None,
        table: BlockTable | None = None,
        prefill_ms: float = 0,
        timeout_s: float | None = None,
    ) -> Registered:
        """Declares layout, table and prefill time of a prefix before there are rows.

        Args:
            namespace, layout, model, table, prefill_ms: what is declared.
            token_ids: those that will be stored, of the same model; at least their first 64. They are
                not sent. In a mesh they say which node `store` will go to; without them the node is
                the name's, and what is declared there binds nothing that is stored by tokens.
            timeout_s: instead of the client's.

        Raises:
            LayoutDiffers: the name is stored with another layout.
        """
        request = pb.PrefixStoreRegisterRequest(
            namespace=text("namespace", namespace),
            layout=layout_to_message(layout),
            model_id=text("model", model),
            table=requests.block_table(table),
            prefill_ms=prefill_ms,
        )
        if token_ids is not None:
            route = route_key(self._tenant, model, requests.some_token_bytes(token_ids))
            self._routes.remember(namespace, route)
        answer = self._calls.once("register", request, self._routes.of(namespace), timeout_s)
        return Registered(answers.state(answer.state), answer.generation)

    # Finding

    def match(
        self,
        *,
        model: str,
        token_ids: TokenIds,
        min_tokens: int = 0,
        lease_ms: int | None = None,
        fidelities: Sequence[str] = (),
        part_kinds: Sequence[str] = (),
        timeout_s: float | None = None,
        tries: int | None = None,
    ) -> Match:
        """Finds the longest stored prefix of a token sequence.

        Args:
            model: the model id; another one never matches.
            token_ids: the prompt, at least one id.
            min_tokens: a shorter match is a miss.
            lease_ms: how long it stays readable; None: 10,000, 0: not at all, at most 60,000.
            fidelities: which may answer; by default only "raw", what was stored without loss.
            part_kinds: parts that are needed at the boundary; it is the latest one that has all of them,
                each of every slot that has it anywhere.
            timeout_s: instead of the client's.
            tries: how often a server that cannot be reached is tried in all; by default until
                `timeout_s`, if that is given, or for the client's, three times at least.
        """
        packed = requests.some_token_bytes(token_ids)
        request = pb.PrefixStoreMatchRequest(
            model_id=text("model", model),
            token_ids=packed,
            fidelities=requests.texts("fidelities", fidelities),
            min_tokens=count("min_tokens", min_tokens),
            lease_ms=None if lease_ms is None else count("lease_ms", lease_ms),
            part_kinds=requests.texts("part_kinds", part_kinds),
        )
        route = route_key(self._tenant, model, packed)
        match = answers.match(self._calls.ask("match", request, route, timeout_s, tries))
        if match.hit:
            self._routes.remember(match.namespace, route)
            self._routes.remember(match.lease_id, route)
        if match.longest_namespace:
            self._routes.remember(match.longest_namespace, route)
        return match

    def lookup(
        self,
        namespace: str,
        *,
        model: str | None = None,
        token_ids: TokenIds | None = None,
        layout: Layout | None = None,
        lease_ms: int = 0,
        restored_tokens: int | None = None,
        restored_prefill_ms: float | None = None,
        timeout_s: float | None = None,
        tries: int | None = None,
    ) -> Lookup:
        """Says what is stored under a name, and whether it is what is expected.

        Args:
            namespace: the name.
            model, token_ids, layout: what is expected, as far as given; else it is a miss.
            lease_ms: how long a hit stays readable, at most 60,000.
            restored_tokens, restored_prefill_ms: for the receipt, where the caller restored rows by
                other means than `fetch`.
            timeout_s: instead of the client's.
            tries: as for `match`.
        """
        packed = b"" if token_ids is None else requests.some_token_bytes(token_ids)
        query = pb.PrefixStoreLookupRequest.Query(
            namespace=text("namespace", namespace),
            model_id=text("model", model or ""),
            token_ids=packed,
            layout=layout_to_message(layout) if layout is not None else None,
            restored_tokens=restored_tokens,
            restored_prefill_ms=restored_prefill_ms,
        )
        request = pb.PrefixStoreLookupRequest(queries=[query], lease_ms=count("lease_ms", lease_ms))
        routes = self._routes.where(namespace)
        if model and packed:
            routes = (route_key(self._tenant, model, packed),)
        for route in routes:
            lookup = answers.lookup(self._calls.ask("lookup", request, route, timeout_s, tries))
            if lookup.hit:
                self._routes.remember(namespace, route)
                self._routes.remember(lookup.lease_id, route)
                break
        return lookup

    def list(self, prefix: str = "", *, timeout_s: float | None = None) -> Iterator[PrefixInfo]:
        """Yields what is visible, ordered by name; asks for a page when it is needed.

        Args:
            prefix: only names that begin with it.
            timeout_s: for each page, instead of the client's.
        """
        text("prefix", prefix)
        routes = self._routes.everywhere or (by_name(prefix),)
        listings = [self._listed(prefix, route, timeout_s) for route in routes]
        merged = heapq.merge(*listings, key=lambda info: info.namespace.encode())
        for _, same in itertools.groupby(merged, key=lambda info: info.namespace):
            yield next(same)

    def _listed(self, prefix: str, route: str, timeout_s: float | None) -> Iterator[PrefixInfo]:
        request = pb.PrefixStoreListRequest(page_size=limits.NAMES_MAX, namespace_prefix=prefix)
        while True:
            page = self._calls.ask("list_page", request, route, timeout_s)
            yield from map(answers.prefix_info, page.prefixes)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def blocks(self, namespace: str, *, timeout_s: float | None = None) -> BlockTable | None:
        """Returns the table that was registered with a prefix; None if there is none."""
        request = pb.PrefixStoreBlocksRequest(namespace=text("namespace", namespace))
        answer = self._calls.ask("blocks", request, self._routes.of(namespace), timeout_s)
        return answers.block_table(answer.table) if answer.known else None

    def membership(
        self,
        namespaces: Sequence[str],
        hashes: bytes | Sequence[int] | np.ndarray,
        *,
        timeout_s: float | None = None,
    ) -> builtins.list[np.ndarray | None]:
        """Says for each name which of the hashes are in its table.

        Args:
            namespaces: at most 1,000.
            hashes: u64 each, at most 400,000, in any order.
            timeout_s: instead of the client's.

        Returns:
            Booleans in the order of the hashes; None for a name without a table.
        """
        try:
            packed = pack_hashes(hashes)
        except ValueError as error:
            raise invalid("hashes", str(error)) from error
        request = pb.PrefixStoreMembershipRequest(
            namespaces=requests.names(namespaces), hashes=packed
        )
        found: builtins.list[np.ndarray | None] = [None] * len(namespaces)
        first = self._routes.of(namespaces[0] if namespaces else "")
        for route in self._routes.everywhere or (first,):
            results = self._calls.ask("membership", request, route, timeout_s).results
            if len(results) != len(namespaces):
                raise BadAnswer(f"{len(results)} answers about {len(namespaces)} names")
            for index, result in enumerate(results):
                if result.known:
                    found[index] = answers.bitmap(result.bitmap, len(packed) // 8)
        return found

    # Fetching

    def fetch(
        self,
        namespace: str | None = None,
        *,
        lease_id: bytes = b"",
        rows: tuple[int, int] | None = None,
        slots: Sequence[int] | None = None,
        generation: int = 0,
        as_mlx: bool = False,
        codecs: Sequence[str] = (),
        part_kinds: Sequence[str] = (),
        counted: bool = True,
        progress: Progress | None = None,
        timeout_s: float | None = None,
        tries: int | None = None,
    ) -> Prefix | None:
        """Brings a prefix back, whole and with the bits that were stored; None is a miss.

        Where the server runs on this host its files are read; `transport` and `transport_reason` of
        the result say what was done. A broken stream is resumed, within the deadline, as long as each
        attempt brings something.

        Args:
            namespace: its name.
            lease_id: instead of the name: what `match` or `lookup` gave.
            rows: only these, half-open; an end of 0 is the last row.
            slots: only these.
            generation: only if the rows are still of it; 0: whatever there is.
            as_mlx: MLX arrays, evaluated, instead of NumPy's.
            codecs: what is stored with one of these comes as it is stored, an `Encoded`; all else that
                was stored lossily comes decoded, float32. A name without parameters, such as
                "mlx_affine", stands for every codec of that name.
            part_kinds: kinds of parts to bring along. Rows never come without them: where `rows` name no
                end, they end where `match` would say, and `shortened_by` of the result tells the kind
                that cut them; a named end that has not every kind is a miss.
            counted: whether this spares a prefill, and the receipt shall say so; it does not if the rows
                are only compared.
            progress: called with (bytes here, bytes in all); if it raises, the fetch is abandoned.
            timeout_s: for everything; by default an hour, as long as it makes progress. If given, a
                server that restarts meanwhile is waited for.
            tries: as for `match`, in a row without anything coming.

        Raises:
            RowsOutOfRange: the prefix has fewer rows.
            GenerationDiffers: it has other rows than those of the generation.
            Forked: MLX arrays are wanted in a process forked from one that has imported MLX.
            BadAnswer: the server announced more than `fetch_bytes_max`, or contradicted itself.
            Unavailable, DeadlineExceeded: the server cannot be reached, or not in time.
        """
        if (namespace is None) == (not lease_id):
            raise invalid("namespace", "either a namespace or a lease_id is needed")
        if as_mlx:
            mlx_core()  # before anything is asked for
        asked = pb.PrefixStoreFetchRequest(
            namespace=text("namespace", namespace or ""),
            lease_id=lease_id,
            rows=requests.row_range(rows) if rows is not None else None,
            slots=[count("slots", slot) for slot in slots or ()],
            generation=count("generation", generation, U64_MAX),
            codecs=FAMILIES,  # decoded here: fewer bytes cross the wire
            part_kinds=requests.texts("part_kinds", part_kinds),
            uncounted=not counted,
        )
        try:
            deadline = self._calls.stream_deadline(timeout_s, tries)
            for route in self._routes.where(lease_id or namespace or ""):
                prefix = self._lanes.fetch(
                    asked,
                    as_mlx=as_mlx,
                    keep=requests.codec_names(codecs),
                    progress=progress,
                    route=route,
                    deadline=deadline,
                )
                if prefix is not None:
                    self._routes.remember(prefix.namespace, route)
                    return prefix
        except (NotStored, DataCorrupt):
            return None
        return None

    def read_rows(
        self,
        namespace: str,
        *,
        slot: int,
        side: Side | str,
        rows: Sequence[int] | np.ndarray,
        timeout_s: float | None = None,
    ) -> np.ndarray | None:
        """Reads scattered rows of one tensor: (kv_heads, rows, head_dim), in the order asked.

        Rows beyond the end are zeros; None if none of them exists.

        Args:
            namespace: the prefix.
            slot, side: which tensor; the side is "k" or "v".
            rows: row numbers, at most 65,536.
            timeout_s: instead of the client's.

        Raises:
            NotStored: there is no such prefix.
            LayoutDiffers: it has no such tensor.
        """
        try:
            numbers = pack_token_ids(rows)
        except ValueError as error:
            raise invalid("rows", "row numbers are integers of 0 to 999,999") from error
        request = pb.PrefixStoreReadRowsRequest(
            namespace=text("namespace", namespace),
            slot=slot,
            side=SIDE_VALUES[requests.side_of(side)],
            rows=numbers,
        )
        deadline = self._calls.unary_deadline(timeout_s)
        route = self._routes.of(namespace)

        def read() -> np.ndarray | None:
            scattered = ScatteredRows(len(numbers) // 4)
            self._calls.receive(
                "read_rows", request, scattered.take, route=route, deadline=deadline
            )
            return scattered.array()

        return retried(read, deadline)

    # Keeping

    def drop(self, *namespaces: str, timeout_s: float | None = None) -> builtins.list[bool]:
        """Takes names away at once; says for each whether anything was stored under it."""
        dropped = []
        for begin in range(0, len(namespaces), limits.NAMES_MAX):
            names = namespaces[begin : begin + limits.NAMES_MAX]
            request = pb.PrefixStoreDropRequest(namespaces=requests.names(names))
            gone = [False] * len(names)
            for route in self._routes.everywhere or (self._routes.of(names[0]),):
                answer = self._calls.once("drop", request, route, timeout_s)
                if len(answer.results) != len(names):
                    raise BadAnswer(f"{len(answer.results)} answers about {len(names)} names")
                gone = [was or one.dropped for was, one in zip(gone, answer.results, strict=True)]
            dropped += gone
        return dropped

    def save(self, *namespaces: str, timeout_s: float | None = None) -> int:
        """Seals live prefixes (all, if none is named); returns how many were sealed."""
        request = pb.PrefixStoreSaveRequest(namespaces=requests.names(namespaces))
        every = self._routes.everywhere or ("",)
        routes = (self._routes.of(namespaces[0]),) if namespaces else every
        return sum(
            int(self._calls.once("save", request, route, timeout_s).sealed_count)
            for route in routes
        )

    def sync(self, *, timeout_s: float | None = None) -> None:
        """Returns when everything that was acknowledged before is on stable storage."""
        for route in self._connection.each:
            self._calls.once("sync", pb.PrefixStoreSyncRequest(), route, timeout_s)

    def snapshot(self, namespace: str, *, timeout_s: float | None = None) -> int:
        """Remembers how many rows each tensor of a live prefix has; returns the snapshot's id."""
        request = pb.PrefixStoreSnapshotRequest(namespace=text("namespace", namespace))
        answer = self._calls.once("snapshot", request, self._routes.of(namespace), timeout_s)
        return int(answer.snapshot_id)

    def restore(self, namespace: str, snapshot_id: int, *, timeout_s: float | None = None) -> int:
        """Cuts every tensor that has grown since back to a snapshot; returns the generation."""
        request = pb.PrefixStoreRestoreRequest(
            namespace=text("namespace", namespace), snapshot_id=snapshot_id
        )
        answer = self._calls.once("restore", request, self._routes.of(namespace), timeout_s)
        return int(answer.generation)

    def release(self, namespace: str, snapshot_id: int, *, timeout_s: float | None = None) -> bool:
        """Forgets a snapshot and keeps the rows; says whether it was known."""
        request = pb.PrefixStoreReleaseRequest(
            namespace=text("namespace", namespace), snapshot_id=snapshot_id
        )
        answer = self._calls.once("release", request, self._routes.of(namespace), timeout_s)
        return bool(answer.released)

    def describe(self, *, timeout_s: float | None = None) -> Description:
        """Describes the server: version, limits, budgets, what it holds; several nodes as one."""
        request = pb.PrefixStoreDescribeRequest()
        return together.descriptions(
            [
                answers.description(self._calls.ask("describe", request, route, timeout_s))
                for route in self._connection.each
            ]
        )

    def stats(self, *, timeout_s: float | None = None) -> Receipt:
        """Returns what the store did for its clients, all nodes together."""
        request = stats_pb2.StatsGetRequest()
        return together.receipts(
            [
                answers.receipt(self._calls.ask("receipt", request, route, timeout_s).receipt)
                for route in self._connection.each
            ]
        )

    def reset_stats(self, *, timeout_s: float | None = None) -> Receipt:
        """Sets every counter of the receipt to zero; returns what they were, all nodes together."""
        request = stats_pb2.StatsResetRequest()
        return together.receipts(
            [
                answers.receipt(
                    self._calls.once("reset_receipt", request, route, timeout_s).receipt
                )
                for route in self._connection.each
            ]
        )
