"""Recurrent state on a server: one opaque value per session and layer, of any size.

Knows the service SSMState; not what a value is made of (`arrays_cache` writes and reads one form). A
value is stored and fetched as a whole: what a broken stream has brought is kept and the rest asked for,
unless the value has been replaced meanwhile, and then everything comes anew.

The one decision: a session is routed by its own name, always. What is stored under the same name as a
prefix's moves nothing, and whoever knows the name finds what is there.
"""

from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from google.protobuf.message import DecodeError

from pion_client.answers import durability_value
from pion_client.arrays import count, invalid, text
from pion_client.calls import Calls
from pion_client.errors import BadAnswer
from pion_client.fetching import DamagedChunk, Progress
from pion_client.receiving import receive_whole
from pion_client.routes import by_name
from pion_client.values import DurabilityName, Part
from pion_wire import limits
from pion_wire.framing import FrameError, HeaderBytes, parse_bytes_message
from pion_wire.v1 import ssm_state_pb2 as pb


class State(NamedTuple):
    """One fetched value."""

    data: memoryview
    """Its bytes, read-only."""
    boundary_tokens: int
    """The state after this many tokens; 0 if whoever stored it did not say."""
    description: str
    """Cache class, data types and shapes, in the words of whoever stored it."""
    model: str
    generation: int


class StateReception:
    """A value on its way, over as many streams as it takes."""

    def __init__(self, *, bytes_max: int, progress: Progress | None) -> None:
        self._bytes_max = bytes_max
        self._progress = progress
        self._missed = self._headed = False
        self.restart()

    def restart(self) -> None:
        """Forgets everything: the value has changed between two streams."""
        self.announced: pb.SSMStateFetchHeader | None = None
        self.done_bytes = 0
        self._data = np.empty(0, np.uint8)

    def ended(self) -> bool:
        """Whether everything that was announced is here, or nothing was announced: a miss."""
        return self._missed or (self.announced is not None and self.done_bytes == self._data.nbytes)

    def begin_stream(self, request: pb.SSMStateFetchRequest) -> None:
        """Makes a request one for what is still missing. A header comes first again."""
        self._headed = False
        if self.announced is not None:
            request.generation = self.announced.generation
            request.offset_bytes = self.done_bytes

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
                return
        except (FrameError, DecodeError) as error:
            raise BadAnswer(str(error)) from error
        end = self.done_bytes + len(parsed.data)
        if not self._headed or parsed.offset_bytes != self.done_bytes or end > self._data.nbytes:
            raise BadAnswer("bytes came that were not announced")
        if crc32c(parsed.data) != parsed.crc32c:
            raise DamagedChunk("bytes of a state do not have the checksum they were sent with")
        self._data[self.done_bytes : end] = np.frombuffer(parsed.data, np.uint8)
        self.done_bytes = end
        if self._progress is not None:
            self._progress(end, self._data.nbytes)

    def state(self) -> State | None:
        """Returns the value; None if there is none."""
        if self.announced is None:
            return None
        info = self.announced.info
        return State(
            self._data.data.toreadonly(),
            info.boundary_tokens,
            info.description,
            info.model_id,
            self.announced.generation,
        )

    def _take_header(self, header: pb.SSMStateFetchHeader) -> None:
        if self._headed:
            raise BadAnswer("a second header came")
        self._headed = True
        if not header.found:
            self.restart()  # dropped between two streams, or never there
            self._missed = True
        elif self.announced is None:
            size = header.info.size_bytes
            if size > self._bytes_max:
                raise BadAnswer(f"{size} bytes were announced, {self._bytes_max} are wanted")
            self.announced, self._data = header, np.empty(size, np.uint8)
        elif header != self.announced:
            raise BadAnswer("a resumed stream announces something else")


class States:
    """The states of one client."""

    def __init__(self, calls: Calls, *, bytes_max: int) -> None:
        self._calls = calls
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
        layer = count("layer", layer)
        boundary_tokens = count("boundary_tokens", boundary_tokens, limits.TOKENS_MAX)
        try:
            part = Part("state", layer, boundary_tokens, memoryview(data))
            size_bytes = part.info.size_bytes
        except (TypeError, ValueError) as error:
            raise invalid("data", f"no contiguous bytes: {error}") from error
        header = pb.SSMStateStoreHeader(
            session=text("session", session),
            layer=layer,
            info=pb.SSMStateInfo(
                size_bytes=size_bytes,
                boundary_tokens=boundary_tokens,
                description=text("description", description),
                model_id=text("model", model),
            ),
            durability=durability_value(durability),
        ).SerializeToString()
        deadline = self._calls.stream_deadline(timeout_s)
        answer = self._calls.send_whole(
            lambda: self._calls.send(
                "state_store",
                header,
                (),
                (part,),
                first_row=0,
                progress=progress,
                route=by_name(session),
                deadline=deadline,
                bytes_only=True,
            ),
            deadline,
        )
        return pb.SSMStateStoreResponse.FromString(answer).generation

    def fetch(
        self,
        session: str,
        layer: int,
        *,
        progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> State | None:
        """Brings one value; None if it is not stored.

        Raises:
            As `Client.fetch` does.
        """
        asked = pb.SSMStateFetchRequest(
            session=text("session", session), layer=count("layer", layer)
        )
        reception = StateReception(bytes_max=self._bytes_max, progress=progress)
        deadline = self._calls.stream_deadline(timeout_s)
        receive_whole(self._calls, "state_fetch", asked, reception, by_name(session), deadline)
        return reception.state()

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
