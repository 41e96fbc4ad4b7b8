"""The two ways a fetch takes: the server's own files where it runs on this host, else a stream.

The caller sees no difference but in `transport` and `transport_reason`. A lane that can never work (the
server is elsewhere, or does not export) is not tried again.
"""

from collections.abc import Callable, Container
from typing import Any, Literal, TypeVar

from google.protobuf.message import Message

from pion_client.arrays import Layers
from pion_client.calls import Calls
from pion_client.connection import Deadline, retried
from pion_client.errors import (
    DataCorrupt,
    GenerationDiffers,
    NotStored,
    NotSupported,
    RowsOutOfRange,
)
from pion_client.export import LEASE_MS, CannotExport, Exported, OpenFiles
from pion_client.fetching import Announced, Reception
from pion_client.receiving import receive_whole
from pion_client.values import Part, Prefix, Progress
from pion_wire.layout import Layout
from pion_wire.v1 import prefix_store_pb2 as pb

Transport = Literal["export", "stream"]
Fetched = TypeVar("Fetched")


class Lane:
    """Whether a client can read the files that one method of the server names; it finds out once."""

    def __init__(self, calls: Calls, method: str, *, export: bool) -> None:
        self._calls = calls
        self._method = method
        self._readable = False
        self._stream_because = ""
        if not export:
            self._stream_because = "export=False"
        elif not calls.connection.is_local:
            self._stream_because = "the server is not on this host"

    def fetch(
        self,
        request: Message,
        read: Callable[[Any], Fetched],
        stream: Callable[[str], Fetched],
        *,
        route: str,
        deadline: Deadline,
    ) -> Fetched:
        """Returns what `read` makes of the files that are named; else what `stream` brings, told why.

        Raises:
            Whatever the two raise, but CannotExport.
        """
        because = self._stream_because
        if not because:
            try:
                self._probe(type(request), route, deadline)
                return read(self._ask(request, route, deadline))
            except CannotExport as why:
                because = str(why)
                if why.lasting:
                    self._stream_because = because
        return stream(because)

    def _probe(self, kind: Callable[..., Message], route: str, deadline: Deadline) -> None:
        """Finds out whether the server's files can be read here: what it exports, it counts."""
        if not self._readable:
            OpenFiles(self._ask(kind(probe=True), route, deadline)).close()
            self._readable = True

    def _ask(self, request: Message, route: str, deadline: Deadline) -> Any:
        def ask() -> Any:
            once = Deadline(min(self._calls.timeout_s, deadline.remaining_s))
            return self._calls.call(self._method, request, route, once)

        try:
            return retried(ask, deadline)
        except NotSupported as error:
            raise CannotExport(f"the server does not export: {error}", lasting=True) from error
        except (NotStored, DataCorrupt, RowsOutOfRange) as error:
            # Or not with its parts, in no segment yet, or of another generation: the stream decides.
            raise CannotExport(str(error)) from error


class Lanes:
    """How one client fetches prefixes."""

    def __init__(self, calls: Calls, *, export: bool, verify: bool, bytes_max: int) -> None:
        self._calls = calls
        self._lane = Lane(calls, "export", export=export)
        self._verify = verify
        self._bytes_max = bytes_max

    def fetch(
        self,
        asked: pb.PrefixStoreFetchRequest,
        *,
        as_mlx: bool,
        keep: Container[str],
        progress: Progress | None,
        route: str,
        deadline: Deadline,
    ) -> Prefix | None:
        """Brings what was asked for by the better way; None if there is nothing.

        Raises:
            NotStored, DataCorrupt: there is nothing any more.
            GenerationDiffers: there is something else.
            As `Client.fetch` does.
        """

        def read(answer: pb.PrefixStoreExportResponse) -> Prefix | None:
            return self._from_files(answer, asked, as_mlx, keep, progress)

        def stream(because: str) -> Prefix | None:
            return self._from_stream(asked, as_mlx, keep, progress, route, deadline, because)

        request = pb.PrefixStoreExportRequest(
            namespace=asked.namespace,
            lease_id=asked.lease_id,
            rows=asked.rows if asked.HasField("rows") else None,
            lease_ms=LEASE_MS,
            slots=asked.slots,
            part_kinds=asked.part_kinds,
            uncounted=asked.uncounted,
        )
        return self._lane.fetch(request, read, stream, route=route, deadline=deadline)

    def _from_files(
        self,
        answer: pb.PrefixStoreExportResponse,
        asked: pb.PrefixStoreFetchRequest,
        as_mlx: bool,
        keep: Container[str],
        progress: Progress | None,
    ) -> Prefix:
        exported = Exported(
            answer,
            slots=asked.slots,
            part_kinds=asked.part_kinds,
            bytes_max=self._bytes_max,
            keep=keep,
        )
        try:
            _check_generation(asked, exported.announced)
            if self._verify:
                exported.verify()
            layers = exported.layers(as_mlx=as_mlx, progress=progress)
            parts = exported.parts(as_mlx=as_mlx)
            return _prefix(exported.announced, exported.layout, layers, parts, "export", "")
        finally:
            exported.close()

    def _from_stream(
        self,
        asked: pb.PrefixStoreFetchRequest,
        as_mlx: bool,
        keep: Container[str],
        progress: Progress | None,
        route: str,
        deadline: Deadline,
        because: str,
    ) -> Prefix | None:
        reception = Reception(
            bytes_max=self._bytes_max, as_mlx=as_mlx, keep=keep, progress=progress
        )
        receive_whole(self._calls, "fetch", asked, reception, route, deadline)
        if reception.announced is None:
            return None
        layers, parts = reception.layers(), reception.parts()
        return _prefix(reception.announced, reception.layout, layers, parts, "stream", because)


def _check_generation(asked: pb.PrefixStoreFetchRequest, announced: Announced) -> None:
    there = announced.prefix.generation
    if asked.generation not in (0, there):
        raise GenerationDiffers(
            f"{announced.prefix.namespace!r} is of generation {there}, not {asked.generation}"
        )


def _prefix(
    announced: Announced,
    layout: Layout,
    layers: Layers,
    parts: tuple[Part, ...],
    transport: Transport,
    because: str,
) -> Prefix:
    return Prefix(
        namespace=announced.prefix.namespace,
        model=announced.prefix.model,
        packed_token_ids=announced.token_ids,
        rows=announced.rows,
        layers=layers.pairs,
        slots=layers.slots,
        layout=layout,
        fidelity=announced.prefix.fidelity,
        parts=parts,
        generation=announced.prefix.generation,
        transport=transport,
        transport_reason=because,
        shortened_by=announced.shortened_by,
    )
