"""A client without manners: generated stubs and frames by hand, nothing checked before it is sent.

Values that tests need again and again: a `Sample` is a prefix whose every byte follows from its name and
its version, so that whoever fetches it can say which one it got, whole or not.
"""

import base64
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import grpc
import numpy as np
from crc32c import crc32c
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from pion_wire.framing import (
    HeaderBytes,
    PartChunk,
    RowChunk,
    frame_header,
    frame_part,
    frame_rows,
    parse_message,
)
from pion_wire.layout import DType, Layout, PartInfo, Side, TensorLayout
from pion_wire.messages import layout_to_message, part_to_message
from pion_wire.v1 import (
    attend_pb2_grpc,
    prefix_store_pb2_grpc,
    ssm_state_pb2_grpc,
    stats_pb2,
    stats_pb2_grpc,
)
from pion_wire.v1 import prefix_store_pb2 as pb

MODEL = "mlx1:00000000000000000000000000000000"
TIMEOUT_S = 30.0
Answer = TypeVar("Answer")


def layout_of(
    slots: int = 2, heads: int = 2, head_dim: int = 16, dtype: DType = DType.F16
) -> Layout:
    """The layout of a plain model."""
    return Layout(
        tuple(
            TensorLayout(slot, side, heads, head_dim, dtype)
            for slot in range(slots)
            for side in (Side.K, Side.V)
        )
    )


@dataclass(frozen=True)
class Sample:
    """A prefix made up from its name: token ids, rows and parts."""

    namespace: str
    token_count: int = 100
    layout: Layout = field(default_factory=layout_of)
    version: int = 0
    part_sizes: tuple[int, ...] = ()
    model_id: str = MODEL

    def _noise(self, *what: object) -> np.random.Generator:
        text = "|".join(map(str, (self.namespace, self.version, *what)))
        return np.random.default_rng(list(text.encode()))

    @property
    def token_ids(self) -> bytes:
        """Token ids, u32 LE."""
        return self._noise("ids").bytes(4 * self.token_count)

    @property
    def parts(self) -> list[PartInfo]:
        """What is known of the parts."""
        sizes = enumerate(self.part_sizes)
        return [PartInfo("state", slot, self.token_count, size, "a state") for slot, size in sizes]

    def rows(self, tensor: int) -> bytes:
        """All rows of one tensor."""
        size = self.token_count * self.layout.tensors[tensor].row_bytes
        return self._noise("rows", tensor).bytes(size)

    def part(self, index: int) -> bytes:
        """The bytes of one part."""
        return self._noise("part", index).bytes(self.part_sizes[index])

    @property
    def tensors(self) -> list[bytes]:
        """All rows of all tensors."""
        return [self.rows(tensor) for tensor in range(len(self.layout.tensors))]

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows."""
        return self.token_count * self.layout.row_bytes

    def header(self, **fields: Any) -> pb.PrefixStoreStoreHeader:
        """The header of its Store; `fields` replace what it would say."""
        given: dict[str, Any] = {
            "namespace": self.namespace,
            "model_id": self.model_id,
            "token_ids": self.token_ids,
            "layout": layout_to_message(self.layout),
            "parts": [part_to_message(part) for part in self.parts],
        }
        return pb.PrefixStoreStoreHeader(**given | fields)

    def chunks(self, base: int = 0, chunk_bytes: int = 1 << 20) -> Iterator[bytes]:
        """The messages that follow the header."""
        for index, tensor in enumerate(self.layout.tensors):
            rows = self.rows(index)
            for row in range(base, self.token_count, step := chunk_bytes // tensor.row_bytes):
                end = min(row + step, self.token_count)
                data = rows[row * tensor.row_bytes : end * tensor.row_bytes]
                yield frame_rows(index, 0, row, end - row, data)
        for index in range(len(self.part_sizes)):
            part = self.part(index)
            for offset in range(0, len(part), chunk_bytes):
                yield frame_part(index, offset, part[offset : offset + chunk_bytes])

    def messages(self, **fields: Any) -> Iterator[bytes]:
        """All messages of its Store."""
        yield frame_header(self.header(**fields).SerializeToString())
        yield from self.chunks(fields.get("base", 0))

    def child(self, namespace: str, more: int) -> "Continued":
        """A longer prefix that begins with this one."""
        own = Sample(namespace, self.token_count + more, self.layout, self.version)
        return Continued(**vars(own), parent=self)

    def at(self, version: int) -> "Sample":
        """The same name with other content."""
        return replace(self, version=version)


@dataclass(frozen=True, kw_only=True)
class Continued(Sample):
    """A prefix whose first tokens and rows are another one's."""

    parent: Sample

    @property
    def token_ids(self) -> bytes:
        shared = self.parent.token_ids
        return shared + super().token_ids[len(shared) :]

    def rows(self, tensor: int) -> bytes:
        shared = self.parent.rows(tensor)
        return shared + super().rows(tensor)[len(shared) :]

    def messages(self, **fields: Any) -> Iterator[bytes]:
        named = {"parent_namespace": self.parent.namespace, "base": self.parent.token_count}
        return super().messages(**named | fields)


class Fetched(NamedTuple):
    """What a Fetch brought; every chunk was checked and belonged where it came."""

    header: pb.PrefixStoreFetchHeader
    tensors: list[bytes]
    parts: list[bytes]


class Refusal(NamedTuple):
    """What a failed call says."""

    code: grpc.StatusCode
    reason: str
    metadata: dict[str, str]
    fields: list[str]
    retry_ms: int
    message: str


class Wire:
    """One channel to one server."""

    def __init__(
        self,
        address: str,
        *,
        password: str | None = None,
        tenant: str = "",
        options: Iterable[tuple[str, Any]] = (),
    ) -> None:
        self.address = address
        alone = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        self.channel = grpc.insecure_channel(address, options=[*alone, *options])
        self.prefixes = prefix_store_pb2_grpc.PrefixStoreStub(self.channel)
        self.attend = attend_pb2_grpc.AttendStub(self.channel)
        self.ssm = ssm_state_pb2_grpc.SSMStateStub(self.channel)
        self.stats = stats_pb2_grpc.StatsStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.metadata: tuple[tuple[str, str], ...] = ()
        if password is not None:
            pair = base64.b64encode(f"{tenant}:{password}".encode()).decode()
            self.metadata = (("authorization", f"Basic {pair}"),)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.channel.close()

    def raw(self, method: str, message: bytes, service: str = "PrefixStore") -> bytes:
        """A unary call of bytes."""
        call = self.channel.unary_unary(f"/pion.v1.{service}/{method}")
        return call(message, timeout=TIMEOUT_S, metadata=self.metadata)

    def call(self, method: str, **fields: Any) -> Any:
        """A unary call of the PrefixStore by the fields of its request."""
        request = getattr(pb, f"PrefixStore{method}Request")(**fields)
        stub = getattr(self.prefixes, method)
        return stub(request, timeout=TIMEOUT_S, metadata=self.metadata)

    def send(self, messages: Iterable[bytes], method: str = "Store") -> Any:
        """A client stream of bytes."""
        answer = getattr(pb, f"PrefixStore{method}Response").FromString
        call = self.channel.stream_unary(f"/pion.v1.PrefixStore/{method}", None, answer)
        return call(iter(messages), timeout=TIMEOUT_S, metadata=self.metadata)

    def store(self, sample: Sample, **fields: Any) -> pb.PrefixStoreStoreResponse:
        """Stores a sample."""
        answer: pb.PrefixStoreStoreResponse = self.send(sample.messages(**fields))
        return answer

    def streaming(self, timeout_s: float | None = TIMEOUT_S, **fields: Any) -> Any:
        """The call of a Fetch: an iterator of bytes that can be cancelled."""
        call = self.channel.unary_stream(
            "/pion.v1.PrefixStore/Fetch", pb.PrefixStoreFetchRequest.SerializeToString
        )
        request = pb.PrefixStoreFetchRequest(**fields)
        return call(request, timeout=timeout_s, metadata=self.metadata)

    def fetch(self, namespace: str = "", **fields: Any) -> Fetched:
        """Fetches, and checks that chunks come in order, whole, and with their checksums."""
        return collect(self.streaming(namespace=namespace, **fields))

    def lookup(self, namespace: str, **fields: Any) -> pb.PrefixStoreLookupResponse.Result:
        """Looks one name up."""
        lease_ms = fields.pop("lease_ms", 0)
        query = pb.PrefixStoreLookupRequest.Query(namespace=namespace, **fields)
        (result,) = self.call("Lookup", queries=[query], lease_ms=lease_ms).results
        return result

    def names(self) -> list[str]:
        """The names of everything visible."""
        names: list[str] = []
        token = ""
        while True:
            page = self.call("List", page_size=1_000, page_token=token)
            names += [info.namespace for info in page.prefixes]
            token = page.next_page_token
            if not token:
                return names

    def receipt(self) -> stats_pb2.Receipt:
        """The receipt."""
        request = stats_pb2.StatsGetRequest()
        return self.stats.Get(request, timeout=TIMEOUT_S, metadata=self.metadata).receipt

    def healthy(self, service: str = "") -> int:
        """What health says of a service."""
        request = health_pb2.HealthCheckRequest(service=service)
        status: int = self.health.Check(request, timeout=TIMEOUT_S).status
        return status


def collect(messages: Iterable[bytes]) -> Fetched:
    """Puts the messages of a Fetch together."""
    stream = iter(messages)
    first = parse_message(next(stream))
    assert isinstance(first, HeaderBytes)
    header = pb.PrefixStoreFetchHeader.FromString(bytes(first.message))
    tensors = [bytearray() for _ in header.layout.tensors]
    parts = [bytearray() for _ in header.parts]
    next_row: dict[int, int] = {}
    for message in stream:
        chunk = parse_message(message)
        assert not isinstance(chunk, HeaderBytes), "a second header"
        assert crc32c(chunk.data) == chunk.crc32c
        assert len(chunk.data) <= 1 << 20
        if isinstance(chunk, RowChunk):
            expected = next_row.get(chunk.tensor_index, chunk.first_row)
            assert chunk.first_row == expected
            next_row[chunk.tensor_index] = chunk.first_row + chunk.row_count
            tensors[chunk.tensor_index] += chunk.data
        else:
            assert isinstance(chunk, PartChunk)
            parts[chunk.part_index] += chunk.data
    return Fetched(header, [bytes(rows) for rows in tensors], [bytes(part) for part in parts])


def refused(ask: Callable[[], object]) -> Refusal:
    """Asks for what must fail; returns what the failure says."""
    try:
        answer = ask()
    except grpc.RpcError as error:
        return refusal(error)
    raise AssertionError(f"was not refused: {answer}")


def refusal(error: grpc.RpcError) -> Refusal:
    """Takes a failed call's rich status apart; no reason if it has none."""
    status = rpc_status.from_call(error)
    reason, metadata, fields, retry_ms = "", {}, [], 0
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            assert info.domain == "pion.v1"
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad):
            fields = [violation.field for violation in bad.field_violations]
        elif detail.Unpack(retry):
            retry_ms = retry.retry_delay.ToMilliseconds()
    return Refusal(error.code(), reason, metadata, fields, retry_ms, error.details())


def eventually(condition: Callable[[], Answer], within_s: float = 60.0) -> Answer:
    """Asks until the answer is true; fails when the time is up."""
    deadline = time.monotonic() + within_s
    for pause in itertools.chain((0.005, 0.01, 0.02), itertools.repeat(0.05)):
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, "has not come true"
        time.sleep(pause)
    raise AssertionError
