"""pion.v1.SSMState: recurrent states as streams of bytes, framed by hand like rows."""

from collections.abc import Iterator

from pion_grpc.core.states import RecurrentStates, StateInfo
from pion_grpc.errors import InvalidRequest
from pion_grpc.rpc.service import Call
from pion_grpc.rpc.streams import byte_chunks, durability_of, durability_value, fill, header_of
from pion_wire.framing import frame_bytes, frame_header
from pion_wire.v1 import ssm_state_pb2 as pb


class SSMStateService:
    """One method per RPC; see the proto for what each does."""

    def __init__(self, states: RecurrentStates) -> None:
        self._states = states

    def Store(self, messages: Iterator[bytes], call: Call) -> pb.SSMStateStoreResponse:
        """Stores one value."""
        header = header_of(messages, pb.SSMStateStoreRequest)
        info = StateInfo(
            header.info.size_bytes,
            header.info.boundary_tokens,
            header.info.description,
            header.info.model_id,
        )
        session = self._states.begin(
            call.tenant, header.session, header.layer, info, durability_of(header.durability)
        )
        stored = fill(session, byte_chunks(messages, pb.SSMStateStoreRequest))
        return pb.SSMStateStoreResponse(
            durability=durability_value(stored.durability), generation=stored.generation
        )

    def Fetch(self, request: pb.SSMStateFetchRequest, call: Call) -> Iterator[bytes]:
        """Streams one value."""
        _check_session(request.session)
        found = self._states.open(call.tenant, request.session, request.layer, request.generation)
        if found is None:
            yield frame_header(pb.SSMStateFetchHeader(found=False).SerializeToString())
            return
        try:
            if request.offset_bytes > found.info.size_bytes:
                raise InvalidRequest("offset_bytes", f"the value has {found.info.size_bytes} bytes")
            header = pb.SSMStateFetchHeader(
                found=True,
                info=pb.SSMStateInfo(**found.info._asdict()),
                generation=found.generation,
            )
            yield frame_header(header.SerializeToString())
            offset = request.offset_bytes
            for data in found.reading.pieces(offset):
                yield frame_bytes(offset, data)
                offset += len(data)
        finally:
            found.reading.close()

    def Drop(self, request: pb.SSMStateDropRequest, call: Call) -> pb.SSMStateDropResponse:
        """Drops values."""
        _check_session(request.session)
        layer = request.layer if request.HasField("layer") else None
        return pb.SSMStateDropResponse(
            dropped_count=self._states.drop(call.tenant, request.session, layer)
        )


def _check_session(session: str) -> None:
    if not session:
        raise InvalidRequest("session", "required")
