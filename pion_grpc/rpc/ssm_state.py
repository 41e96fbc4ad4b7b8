"""pion.v1.SSMState: recurrent states as streams of bytes, framed by hand like rows, or as files."""

from collections.abc import Iterator, Sequence

from pion_grpc.config import Config
from pion_grpc.core.states import FoundState, RecurrentStates, StateInfo
from pion_grpc.errors import InvalidRequest, NoBackend
from pion_grpc.rpc.service import Call
from pion_grpc.rpc.uploads import (
    byte_chunks,
    durability_of,
    durability_value,
    fill,
    header_of,
    parsed_header,
)
from pion_wire import limits
from pion_wire.framing import frame_bytes, frame_header
from pion_wire.v1 import ssm_state_pb2 as pb


class SSMStateService:
    """One method per RPC; see the proto for what each does."""

    def __init__(self, states: RecurrentStates, config: Config) -> None:
        self._states = states
        self._config = config

    def Store(self, messages: Iterator[bytes], call: Call) -> pb.SSMStateStoreResponse:
        """Stores values."""
        header = header_of(messages, pb.SSMStateStoreRequest)
        upload = self._states.begin(
            call.tenant,
            header.session,
            header.layer,
            _info_of(header),
            durability_of(header.durability),
        )

        def begin_next(message: bytes) -> None:
            header = parsed_header(message, pb.SSMStateStoreRequest)
            upload.begin(header.session, header.layer, _info_of(header))

        stored = fill(upload, byte_chunks(messages, begin_next))
        return pb.SSMStateStoreResponse(
            durability=durability_value(stored.durability),
            generation=stored.generations[0],
            more_generations=stored.generations[1:],
        )

    def Fetch(self, request: pb.SSMStateFetchRequest, call: Call) -> Iterator[bytes]:
        """Streams values."""
        _check_session(request.session)
        layers = request.layer, *request.more_layers
        _check_layers(layers)
        more = request.more_generations or (0,) * len(request.more_layers)
        if len(more) != len(request.more_layers):
            raise InvalidRequest("more_generations", f"{len(more)} for {len(layers) - 1} layers")
        with self._states.opened(
            call.tenant, request.session, layers, (request.generation, *more)
        ) as (first, *others):
            generations = [value.generation if value else 0 for value in others]
            yield from _value(first, request.offset_bytes, generations)
            for other in others:
                yield from _value(other, 0)

    def Export(self, request: pb.SSMStateExportRequest, call: Call) -> pb.SSMStateExportResponse:
        """Names the files of values."""
        if not self._config.exports:
            raise NoBackend("export is switched off here: stream instead")
        directory = self._states.directory
        answer = pb.SSMStateExportResponse(
            directory=str(directory.path), host_token=directory.host_token
        )
        if request.probe:
            return answer
        _check_session(request.session)
        _check_layers(request.layers)
        lease_ms = request.lease_ms if request.HasField("lease_ms") else limits.LEASE_MS_DEFAULT
        for layer, info, generation, file in self._states.export(
            call.tenant, request.session, request.layers, lease_ms
        ):
            where = file._asdict() if file else {}
            answer.values.add(layer=layer, info=_info(info), generation=generation, **where)
        return answer

    def Drop(self, request: pb.SSMStateDropRequest, call: Call) -> pb.SSMStateDropResponse:
        """Drops values."""
        _check_session(request.session)
        layer = request.layer if request.HasField("layer") else None
        return pb.SSMStateDropResponse(
            dropped_count=self._states.drop(call.tenant, request.session, layer)
        )


def _value(
    found: FoundState | None, offset: int, more_generations: Sequence[int] = ()
) -> Iterator[bytes]:
    """Yields the messages of a value, the bytes from `offset` on."""
    header = pb.SSMStateFetchHeader(more_generations=more_generations)
    if found is None:
        yield frame_header(header.SerializeToString())
        return
    if offset > found.reading.size:
        raise InvalidRequest("offset_bytes", f"the value has {found.reading.size} bytes")
    header.found, header.generation = True, found.generation
    header.info.CopyFrom(_info(found.info))
    yield frame_header(header.SerializeToString())
    for data in found.reading.pieces(offset):
        yield frame_bytes(0, offset, data)
        offset += len(data)


def _info_of(header: pb.SSMStateStoreHeader) -> StateInfo:
    info = header.info
    return StateInfo(info.size_bytes, info.boundary_tokens, info.description, info.model_id)


def _info(info: StateInfo) -> pb.SSMStateInfo:
    return pb.SSMStateInfo(**info._asdict())


def _check_layers(layers: Sequence[int]) -> None:
    if not 1 <= len(layers) <= limits.NAMES_MAX:
        raise InvalidRequest(
            "layers", f"{len(layers)} where 1 to {limits.NAMES_MAX} go", limit=limits.NAMES_MAX
        )
    if len(set(layers)) < len(layers):
        raise InvalidRequest("layers", "one is there twice")


def _check_session(session: str) -> None:
    if not session:
        raise InvalidRequest("session", "required")
