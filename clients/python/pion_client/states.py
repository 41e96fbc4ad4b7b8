"""Recurrent state on a server: one opaque value per session and layer, of any size.

Knows the service SSMState; not what a value is made of (`arrays_cache` writes and reads one form). A
value is stored and fetched as a whole, on the server's host from its file (see `lanes`); else what a
broken stream has brought is kept and the rest asked for, unless the value has been replaced meanwhile,
and then everything comes anew.

The one decision: a session is routed by its own name, always. What is stored under the same name as a
prefix's moves nothing, and whoever knows the name finds what is there.
"""

import collections
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from google.protobuf.message import DecodeError

from pion_client.answers import durability_value
from pion_client.arrays import count, invalid, text
from pion_client.calls import Calls
from pion_client.errors import BadAnswer, DataCorrupt, GenerationDiffers
from pion_client.export import LEASE_MS, ExportedStates
from pion_client.fetching import DamagedChunk
from pion_client.lanes import Lane, Transport
from pion_client.receiving import receive_whole
from pion_client.routes import by_name
from pion_client.storing import states_content
from pion_client.values import DurabilityName, Part, Progress
from pion_wire import limits
from pion_wire.framing import FrameError, HeaderBytes, PartChunk, parse_bytes_message
from pion_wire.v1 import ssm_state_pb2 as pb


class State(NamedTuple):
    """One fetched value."""

    data: memoryview
    """Its bytes, read-only; with `as_mlx`, read from a file, those of the MLX array `data.obj`."""
    boundary_tokens: int
    """The state after this many tokens; 0 if whoever stored it did not say."""
    description: str
    """Cache class, data types and shapes, in the words of whoever stored it."""
    model: str
    generation: int
    transport: Transport
    transport_reason: str
    """Why it was streamed."""


class StateReception:
    """Values on their way, one after the other, over as many streams as it takes."""

    def __init__(
        self, layers: Sequence[int], *, bytes_max: int, progress: Progress | None = None
    ) -> None:
        self._layers = tuple(layers)
        self._bytes_max = bytes_max
        self._progress = progress
        self.done_bytes = 0
        self.restart()

    def restart(self) -> None:
        """Forgets everything: one of the values has changed between two streams."""
        self._left = collections.deque(self._layers)
        """The layers whose values are not all here; the first of them is on its way."""
        self._generations: dict[int, int] = {}
        """Of all layers that are stored, once a header said so."""
        self._bytes_left = self._bytes_max
        self._headed = False
        self._data = np.empty(0, np.uint8)
        self._filled = 0
        self._header: pb.SSMStateFetchHeader | None = None
        """Of the value on its way, once it is."""
        self.values: dict[int, tuple[pb.SSMStateFetchHeader, memoryview]] = {}
        """What is here, of those that are stored."""

    @property
    def announced(self) -> dict[int, int] | None:
        """What will come; None as long as nothing was announced."""
        return self._generations or None

    def ended(self) -> bool:
        """Whether everything is here that is stored."""
        return not self._left

    def begin_stream(self, request: pb.SSMStateFetchRequest) -> None:
        """Makes a request one for what is still missing. A header comes first again."""
        self._headed = False
        request.layer, *more = self._left
        request.more_layers[:] = more
        if self._generations:
            request.generation = self._generations.get(request.layer, 0)
            request.more_generations[:] = [self._generations.get(layer, 0) for layer in more]
            request.offset_bytes = self._filled

    def take(self, message: bytes) -> None:
        """Takes the next message of a stream.

        Raises:
            BadAnswer: it is not the next one, or contradicts what was announced.
            DamagedChunk: its bytes are not those that were sent.
        """
        try:
            parsed = parse_bytes_message(message)
            if isinstance(parsed, HeaderBytes):
                self._take_header(pb.SSMStateFetchHeader.FromString(bytes(parsed.message)))
            else:
                self._take_bytes(parsed)
        except (FrameError, DecodeError) as error:
            raise BadAnswer(str(error)) from error
        if self._headed and self._filled == self._data.nbytes:
            self._finish()

    def _take_header(self, header: pb.SSMStateFetchHeader) -> None:
        if self._headed or not self._left:
            raise BadAnswer("a header came that was not asked for")
        self._headed = True
        if not self._generations:
            generations = header.generation, *header.more_generations
            there = zip(self._left, generations, strict=False)
            self._generations = {layer: generation for layer, generation in there if generation}
        del header.more_generations[:]
        if header.generation != self._generations.get(self._left[0], 0):
            raise GenerationDiffers("a value was replaced or dropped between two streams")
        if self._header is None and header.found:
            size = header.info.size_bytes
            if size > self._bytes_left:
                raise BadAnswer(f"{size} bytes were announced, {self._bytes_left} are wanted")
            self._header, self._data = header, np.empty(size, np.uint8)
            self._bytes_left -= size
        elif self._header is not None and header != self._header:
            raise BadAnswer("a resumed stream announces something else")

    def _take_bytes(self, chunk: PartChunk) -> None:
        end = self._filled + len(chunk.data)
        in_order = self._headed and chunk.offset_bytes == self._filled
        if not in_order or not chunk.data or end > self._data.nbytes:
            raise BadAnswer("bytes came that were not announced")
        if crc32c(chunk.data) != chunk.crc32c:
            raise DamagedChunk("bytes of a state do not have the checksum they were sent with")
        self._data[self._filled : end] = np.frombuffer(chunk.data, np.uint8)
        self._filled = end
        self.done_bytes += len(chunk.data)
        if self._progress is not None:
            self._progress(end, self._data.nbytes)

    def _finish(self) -> None:
        layer = self._left.popleft()
        if self._header is not None:
            self.values[layer] = self._header, self._data.data
        self._header, self._data, self._filled = None, np.empty(0, np.uint8), 0
        self._headed = False


class States:
    """The states of one client."""

    def __init__(self, calls: Calls, *, export: bool, verify: bool, bytes_max: int) -> None:
        self._calls = calls
        self._lane = Lane(calls, "state_export", export=export)
        self._verify = verify
        self._bytes_max = bytes_max

    def store(
        self,
        session: str,
        layer: int,
        data: Any,
        *,
        boundary_tokens: int = 0,
        description: str = "",
        model: str = "",
        durability: DurabilityName = "process",
        progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Stores one value in the place of what is there; visible as a whole when this returns.

        Args:
            session: 1 to 200 bytes of UTF-8, usually a namespace.
            layer: the layer or cache slot.
            data: its bytes: anything with a buffer that is contiguous.
            boundary_tokens: the state after this many tokens; 0: not said.
            description: cache class, data types and shapes; at most 4,096 bytes of UTF-8.
            model: what computed it; may be empty.
            durability: what the acknowledgement shall promise.
            progress, timeout_s: as in `Client.store`.

        Returns:
            The value's generation.

        Raises:
            As `Client.store` does.
        """
        stored = self.store_all(
            session,
            {layer: data},
            boundary_tokens=boundary_tokens,
            description=description,
            model=model,
            durability=durability,
            progress=progress,
            timeout_s=timeout_s,
        )
        (generation,) = stored.values()
        return generation

    def store_all(
        self,
        session: str,
        values: Mapping[int, Any],
        *,
        boundary_tokens: int = 0,
        description: str | Mapping[int, str] = "",
        model: str = "",
        durability: DurabilityName = "process",
        progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, int]:
        """Stores the values of 1 to 1,000 layers, visible all together when this returns.

        Args:
            values: their bytes by layer.
            description: one for all, or by layer.
            session, boundary_tokens, model, durability, progress, timeout_s: as in `store`.

        Returns:
            Their generations by layer.

        Raises:
            As `Client.store` does.
        """
        if not 1 <= len(values) <= limits.NAMES_MAX:
            raise invalid("values", f"{len(values)} where 1 to {limits.NAMES_MAX} go")
        boundary_tokens = count("boundary_tokens", boundary_tokens, limits.TOKENS_MAX)
        parts = [
            _part(
                count("layer", layer),
                boundary_tokens,
                data,
                description if isinstance(description, str) else description.get(layer, ""),
            )
            for layer, data in values.items()
        ]
        headers = [
            pb.SSMStateStoreHeader(
                session=text("session", session),
                layer=part.slot,
                info=pb.SSMStateInfo(
                    size_bytes=part.info.size_bytes,
                    boundary_tokens=boundary_tokens,
                    description=part.description,
                    model_id=text("model", model),
                ),
                durability=durability_value(durability),
            ).SerializeToString()
            for part in parts
        ]
        answer = self._calls.send(
            "state_store",
            states_content(headers, parts),
            route=by_name(session),
            deadline=self._calls.stream_deadline(timeout_s),
            progress=progress,
            may_repeat=True,
        )
        stored = pb.SSMStateStoreResponse.FromString(answer)
        generations = stored.generation, *stored.more_generations
        if len(generations) != len(parts):
            raise BadAnswer(f"{len(generations)} values were acknowledged, {len(parts)} were sent")
        return dict(zip((part.slot for part in parts), generations, strict=True))

    def fetch(
        self,
        session: str,
        layer: int,
        *,
        as_mlx: bool = False,
        progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> State | None:
        """Brings one value; None if it is not stored, or has been found damaged.

        Args:
            session, layer: whose.
            as_mlx: read a file into an MLX array, which its bytes are then those of.
            progress: called with (bytes received, bytes in all).
            timeout_s: for everything; by default an hour.

        Raises:
            As `Client.fetch` does.
        """
        layer = count("layer", layer)
        found = self._fetch(session, [layer], as_mlx, progress, timeout_s)
        return found.get(layer)

    def fetch_all(
        self,
        session: str,
        layers: Iterable[int],
        *,
        as_mlx: bool = False,
        timeout_s: float | None = None,
    ) -> dict[int, State]:
        """Brings the values of several layers, 1 to 1,000, as `fetch` does; those that are stored.

        They are what the session held at one moment.
        """
        numbers = list(dict.fromkeys(count("layers", layer) for layer in layers))
        if not 1 <= len(numbers) <= limits.NAMES_MAX:
            raise invalid("layers", f"{len(numbers)} where 1 to {limits.NAMES_MAX} go")
        return self._fetch(session, numbers, as_mlx, None, timeout_s)

    def drop(
        self, session: str, layer: int | None = None, *, timeout_s: float | None = None
    ) -> int:
        """Drops one layer of a session, or all; returns how many there were."""
        request = pb.SSMStateDropRequest(
            session=text("session", session),
            layer=None if layer is None else count("layer", layer),
        )
        answer = self._calls.once("state_drop", request, by_name(session), timeout_s)
        return int(answer.dropped_count)

    # Fetching

    def _fetch(
        self,
        session: str,
        layers: Sequence[int],
        as_mlx: bool,
        progress: Progress | None,
        timeout_s: float | None,
    ) -> dict[int, State]:
        route, deadline = by_name(text("session", session)), self._calls.stream_deadline(timeout_s)

        def read(answer: pb.SSMStateExportResponse) -> dict[int, State]:
            return self._from_files(answer, as_mlx, progress)

        def stream(because: str) -> dict[int, State]:
            reception = StateReception(layers, bytes_max=self._bytes_max, progress=progress)
            asked = pb.SSMStateFetchRequest(session=session)
            # One that is damaged has been taken out: asked again, it is not stored.
            for _ in layers:
                with contextlib.suppress(DataCorrupt):
                    receive_whole(self._calls, "state_fetch", asked, reception, route, deadline)
                    break
            return {
                layer: _state(header, data, "stream", because)
                for layer, (header, data) in reception.values.items()
            }

        request = pb.SSMStateExportRequest(session=session, layers=layers, lease_ms=LEASE_MS)
        return self._lane.fetch(request, read, stream, route=route, deadline=deadline)

    def _from_files(
        self, answer: pb.SSMStateExportResponse, as_mlx: bool, progress: Progress | None
    ) -> dict[int, State]:
        exported = ExportedStates(answer, bytes_max=self._bytes_max)
        try:
            if self._verify:
                exported.verify()
            data = exported.data(as_mlx=as_mlx)
        finally:
            exported.close()
        total = sum(value.info.size_bytes for value in answer.values)
        if progress is not None and total:
            progress(total, total)
        return {
            value.layer: _state(value, memory, "export", "")
            for value, memory in zip(answer.values, data, strict=True)
        }


def _part(layer: int, boundary_tokens: int, data: Any, description: str) -> Part:
    try:
        view = memoryview(data)
        flat = view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise invalid("data", f"no contiguous bytes: {error}") from error
    return Part("state", layer, boundary_tokens, flat, text("description", description))


def _state(
    announced: pb.SSMStateFetchHeader | pb.SSMStateExportResponse.Value,
    data: memoryview,
    transport: Transport,
    because: str,
) -> State:
    info = announced.info
    return State(
        data.toreadonly(),
        info.boundary_tokens,
        info.description,
        info.model_id,
        announced.generation,
        transport,
        because,
    )
