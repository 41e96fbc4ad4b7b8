"""Addresses, routes, errors of the transport, channel options: what every call depends on."""

import functools
import itertools
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pion_client import Client, errors, make_namespace
from pion_client.connection import (
    CHANNEL_OPTIONS,
    Connection,
    Deadline,
    is_local,
    pause,
    retried,
    target_of,
)
from pion_client.routes import Routes
from pion_wire.blocks import pack_token_ids, route_key
from pion_wire.framing import frame_header
from pion_wire.v1 import error_reason_pb2, types_pb2
from pion_wire.v1 import prefix_store_pb2 as pb

Result = pb.PrefixStoreLookupResponse.Result


@pytest.mark.parametrize(
    ("address", "target", "local"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50051", True),
        ("127.8.9.1:1", "127.8.9.1:1", True),
        ("localhost:50051", "localhost:50051", True),
        ("[::1]:50051", "[::1]:50051", True),
        ("unix:/tmp/socket", "unix:/tmp/socket", True),
        ("unix:///tmp/socket", "unix:/tmp/socket", True),
        ("10.0.0.5:50051", "10.0.0.5:50051", False),
        ("mini-3.local:50051", "mini-3.local:50051", False),
        ("localhost.example.com:50051", "localhost.example.com:50051", False),
        ("[2001:db8::1]:50051", "[2001:db8::1]:50051", False),
        ("0.0.0.0:50051", "0.0.0.0:50051", False),
    ],
)
def test_only_addresses_of_this_host_are_local(address: str, target: str, local: bool) -> None:
    assert target_of(address) == target
    assert is_local(target) == local


@pytest.mark.parametrize(
    "address",
    ["", "host", ":1", "host:", "host:0", "host:65536", "host:http", "unix:", "dns:///host:1"],
)
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(ValueError, match=r"neither host:port nor|unix: needs"):
        Client(address)


def test_every_channel_option_exists_in_the_installed_grpc() -> None:
    library = b"".join(
        path.read_bytes() for path in (Path(grpc.__file__).parent / "_cython").glob("*.so")
    )
    for name, _ in (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)):
        # The C core keeps its option names as whole strings.
        assert b"\0" + name.encode() + b"\0" in library, name
    assert b"grpc.http2.no_such_option" not in library


def test_metadata_is_printable_ascii_for_any_name() -> None:
    connection = Connection("127.0.0.1:1")
    routes = ["greeting|v1", "Grüße", "a b", "a%20b", "日本", "", "~!\"'"]
    encoded = [dict(connection.metadata(route))["pion-route"] for route in routes]
    assert encoded[0] == "greeting|v1"
    assert len(set(encoded)) == len(routes)
    for value in encoded:
        assert all(0x21 <= ord(character) < 0x7F for character in value)


def test_credentials_are_sent_only_where_there_are_some() -> None:
    assert "authorization" not in dict(Connection("127.0.0.1:1").metadata("r"))
    metadata = dict(Connection("127.0.0.1:1", tenant="t", password="Grüße").metadata("r"))
    assert metadata["authorization"] == "Basic dDpHcsO8w59l"


def test_names_are_made_as_everywhere() -> None:
    assert make_namespace("m", "t", "fp16") == "61a226ee7dc6bcf4203f91316777d237"


class Peer:
    """Whatever may be at the other end: a proxy, a newer release. Answers as it is told."""

    def __init__(self) -> None:
        self.statuses: list[Any] = []
        self.routes: list[str] = []
        self.deadlines: list[float] = []
        handlers: dict[str, Any] = {
            method: grpc.unary_unary_rpc_method_handler(self._answer)
            for method in ("Describe", "Match", "Lookup", "Drop", "Export", "Register", "List")
        }
        handlers["Fetch"] = grpc.unary_stream_rpc_method_handler(self._stream)
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("pion.v1.PrefixStore", handlers),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        metadata = dict(context.invocation_metadata())
        self.routes.append(str(metadata.get("pion-route")))
        self.deadlines.append(context.time_remaining() or 1e9)
        status = self.statuses.pop(0)
        if isinstance(status, bytes):
            return status
        if isinstance(status, tuple):
            context.abort(*status)
        context.abort_with_status(rpc_status.to_status(status))
        raise AssertionError

    def _stream(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield self._answer(request, context)


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.stop()


def status(code: grpc.StatusCode, reason: str, domain: str = "pion.v1", **metadata: str) -> Any:
    """A rich status; `retry_after_ms` is not metadata."""
    number: int = code.value[0]
    rich = status_pb2.Status(code=number, message="why")
    delay = metadata.pop("retry_after_ms", None)
    details: list[Any] = [
        error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata)
    ]
    if delay is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(int(delay))
        details.append(retry)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        rich.details.append(packed)
    return rich


def failure(peer: Peer, *statuses: Any) -> errors.PionError:
    """What a call that may not be repeated raises."""
    peer.statuses = list(statuses)
    with Client(peer.address) as client, pytest.raises(errors.PionError) as raised:
        client.drop("x")
    assert not peer.statuses
    return raised.value


def test_every_reason_has_its_class(peer: Peer) -> None:
    names = {
        name.removeprefix("ERROR_REASON_")
        for name, number in error_reason_pb2.ErrorReason.items()
        if number
    }
    assert set(errors.BY_REASON) == names
    for reason, kind in errors.BY_REASON.items():
        error = failure(peer, status(grpc.StatusCode.ABORTED, reason, namespace="n"))
        assert type(error) is kind
        assert (error.reason, error.metadata, str(error)) == (reason, {"namespace": "n"}, "why")
        assert not error.from_transport


def test_a_reason_of_a_newer_server_is_still_an_error(peer: Peer) -> None:
    error = failure(peer, status(grpc.StatusCode.ABORTED, "FROM_THE_FUTURE"))
    assert (type(error), error.reason) == (errors.PionError, "FROM_THE_FUTURE")


def test_a_delay_is_handed_on(peer: Peer) -> None:
    full = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "BUDGET", retry_after_ms="1500")
    assert failure(peer, full).retry_after_s == 1.5


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.INTERNAL, errors.Unavailable),
        (grpc.StatusCode.CANCELLED, errors.Unavailable),
        (grpc.StatusCode.UNKNOWN, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, errors.NotSupported),
        (grpc.StatusCode.UNAUTHENTICATED, errors.NotAuthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, errors.NotAllowed),
        (grpc.StatusCode.DATA_LOSS, errors.PionError),
    ],
)
def test_what_a_proxy_says_is_not_taken_for_the_servers_word(
    peer: Peer, code: grpc.StatusCode, kind: type[errors.PionError]
) -> None:
    foreign = status(code, "CORRUPT", domain="example.com")
    for answer in ((code, "from a proxy"), foreign):
        error = failure(peer, answer)
        assert type(error) is kind
        assert error.from_transport


DRAINING = status(grpc.StatusCode.UNAVAILABLE, "DRAINING", retry_after_ms="1")
FULL = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS", retry_after_ms="1")
BROKEN = (grpc.StatusCode.INTERNAL, "RST_STREAM error code 2")
AWAY = (grpc.StatusCode.UNAVAILABLE, "")


@pytest.mark.parametrize("broken", [BROKEN, AWAY, DRAINING, FULL])
def test_a_read_is_tried_again_where_that_is_safe(peer: Peer, broken: Any) -> None:
    peer.statuses = [
        broken,
        broken,
        HERE,
    ]
    with Client(peer.address) as client:
        assert client.describe().version == "9"
    assert not peer.statuses


@pytest.mark.parametrize(
    "refusal",
    [
        status(grpc.StatusCode.INTERNAL, "INTERNAL"),
        status(grpc.StatusCode.RESOURCE_EXHAUSTED, "BUDGET", retry_after_ms="1"),
        status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID"),
        status(grpc.StatusCode.UNAVAILABLE, "STARTING", retry_after_ms="60000"),  # no time
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "a proxy's limit"),
        (grpc.StatusCode.UNAUTHENTICATED, ""),
    ],
)
def test_a_read_is_not_tried_again_where_that_is_useless(peer: Peer, refusal: Any) -> None:
    peer.statuses = [refusal, b""]
    with Client(peer.address) as client, pytest.raises(errors.PionError):
        client.describe()
    assert peer.statuses == [b""]


HERE = pb.PrefixStoreDescribeResponse(version="9").SerializeToString()
NOT_STORED = b"\x0a\x00"
"""Of a stream: a header, nothing found."""


def test_a_server_is_waited_for_while_it_is_restarted(peer: Peer) -> None:
    peer.statuses = [*[AWAY] * 5, HERE, *[AWAY] * 5, HERE]
    with Client(peer.address, timeout_s=60) as client:
        assert client.describe().version == "9", "this client is new: it has never been answered"
        assert client.describe().version == "9"
        peer.statuses = [AWAY] * 10
        with pytest.raises(errors.Unavailable):
            client.lookup("x", tries=1)
        with pytest.raises(errors.Unavailable):
            client.drop("x")
    assert len(peer.statuses) == 8, "a caller that can do without, and a change, are asked once"


def test_a_server_that_stays_away_is_not_waited_for_again_and_again(peer: Peer) -> None:
    with Client(peer.address, timeout_s=0.2, export=False) as client:
        peer.statuses = [AWAY] * 100
        for _ in range(3):
            with pytest.raises(errors.Unavailable):
                client.fetch("x")  # which may take an hour, were it not for this
            tries, peer.statuses = 100 - len(peer.statuses), [AWAY] * 100
        assert tries == 3
        peer.statuses = [NOT_STORED]
        assert client.fetch("x") is None
        assert client._connection.away_s == 0, "it is there: the next time it is waited for"


def test_a_server_that_is_away_is_not_called_slow_when_the_time_is_up(peer: Peer) -> None:
    late = (grpc.StatusCode.DEADLINE_EXCEEDED, "")
    with Client(peer.address) as client:
        peer.statuses = [AWAY, late]
        with pytest.raises(errors.Unavailable):
            client.lookup("x", tries=1)
        with pytest.raises(errors.Unavailable, match="DEADLINE_EXCEEDED"):
            client.lookup("x", tries=1)
        peer.statuses = [HERE, late]
        client.describe()
        with pytest.raises(errors.DeadlineExceeded):
            client.lookup("x", tries=1)


@pytest.mark.parametrize("answer", [DRAINING, status(grpc.StatusCode.ABORTED, "CONFLICT")])
def test_a_server_that_refuses_is_not_away(peer: Peer, answer: Any) -> None:
    with Client(peer.address) as client:
        for reply, is_away in ((AWAY, True), (answer, False)):
            peer.statuses = [reply]
            with pytest.raises(errors.PionError):
                client.drop("x")
            assert (client._connection.away_s > 0) == is_away


def test_patience_ends() -> None:
    error = errors.Unavailable("gone", from_transport=True)
    deadline = Deadline(60.0, patience_s=0.05)
    assert pause(error, 1, deadline), "a pause is longer than the patience"
    assert not pause(error, 3, deadline)
    assert pause(error, 1, deadline), "it was back meanwhile"


def test_a_read_with_a_deadline_of_its_own_is_not_given_up_before(peer: Peer) -> None:
    peer.statuses = [BROKEN] * 4 + [HERE]
    with Client(peer.address) as client:
        assert client.describe(timeout_s=60).version == "9"


def test_a_caller_that_can_do_without_is_not_kept_waiting(peer: Peer) -> None:
    for broken, asked in ((BROKEN, 1), (FULL, 3)):
        peer.statuses = [broken] * 10
        with Client(peer.address) as client:
            for call in (
                functools.partial(client.lookup, "x"),
                functools.partial(client.match, model="m", token_ids=[1]),
                functools.partial(client.fetch, "x"),
            ):
                before = len(peer.statuses)
                with pytest.raises(errors.PionError):
                    call(timeout_s=60, tries=1)
                assert before - len(peer.statuses) == asked


@pytest.mark.parametrize("broken", [BROKEN, AWAY, DRAINING])
def test_a_change_is_never_made_twice(peer: Peer, broken: Any) -> None:
    failure(peer, broken)
    assert len(peer.routes) == 1


def test_there_is_no_second_try_after_the_deadline() -> None:
    tries = itertools.count()

    def ask() -> None:
        next(tries)
        raise errors.Unavailable("gone", from_transport=True)

    with pytest.raises(errors.Unavailable):
        retried(ask, Deadline(0.0))
    assert next(tries) == 1
    assert not pause(errors.Unavailable("full", retry_after_s=10.0), 1, Deadline(5.0))


def test_every_call_has_a_deadline_and_a_route(peer: Peer) -> None:
    ids = list(range(100))
    by_tokens = route_key("", "m", pack_token_ids(ids))
    found = pb.PrefixStoreMatchResponse(
        hit=True,
        prefix=pb.PrefixInfo(
            namespace="other",
            state=types_pb2.PREFIX_STATE_SEALED,
            durability=types_pb2.DURABILITY_DISK,
        ),
        lease_id=b"l" * 16,
    )
    with Client(peer.address, export=False) as client:
        peer.statuses = [NOT_STORED]
        client.fetch("Grüße|v1")
        peer.statuses = [found.SerializeToString(), NOT_STORED, NOT_STORED]
        client.match(model="m", token_ids=ids)
        client.fetch(lease_id=b"l" * 16)  # only the node that was asked knows the lease
        client.fetch("other")
        peer.statuses = [b"\x0a\x00"]
        client.lookup("name", model="m", token_ids=ids)
    assert peer.routes == ["Gr%C3%BC%C3%9Fe|v1", by_tokens, by_tokens, by_tokens, by_tokens]
    assert max(peer.deadlines) < 4_000  # gRPC rounds long ones up


def test_leases_displace_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pion_client.routes.ROUTES_MAX", 2)
    routes = Routes()
    routes.remember("name", "by tokens")
    for number in range(5):
        routes.remember(bytes([number]) * 16, f"lease {number}")
        routes.remember("another", "elsewhere")
    assert routes.of("name") == "by tokens"
    assert routes.of(bytes([4]) * 16) == "lease 4"
    assert routes.of(bytes(16)) == bytes(16).hex(), "the oldest are forgotten"


@pytest.mark.parametrize(
    "answer",
    [
        pb.PrefixStoreLookupResponse(),
        pb.PrefixStoreLookupResponse(results=[Result(reason=cast(Any, 99))]),
        pb.PrefixStoreLookupResponse(results=[Result(prefix=pb.PrefixInfo(state=cast(Any, 99)))]),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error(peer: Peer, answer: Any) -> None:
    peer.statuses = [answer.SerializeToString()]
    with Client(peer.address) as client, pytest.raises(errors.BadAnswer):
        client.lookup("n")


def test_a_stream_that_ends_too_early_with_ok_is_an_error(peer: Peer) -> None:
    tensor = types_pb2.TensorLayout(
        side=types_pb2.SIDE_K, heads=1, head_dim=1, data_type=types_pb2.DATA_TYPE_F32
    )
    header = pb.PrefixStoreFetchHeader(
        found=True,
        prefix=pb.PrefixInfo(
            state=types_pb2.PREFIX_STATE_SEALED, durability=types_pb2.DURABILITY_DISK
        ),
        layout=types_pb2.Layout(tensors=[tensor]),
        rows=types_pb2.RowRange(end=10),
        total_bytes=40,
    ).SerializeToString()
    peer.statuses = [frame_header(header)]
    with (
        Client(peer.address, export=False) as client,
        pytest.raises(errors.BadAnswer, match="ended"),
    ):
        client.fetch("n")


def test_importing_the_client_imports_no_mlx() -> None:
    program = (
        "import sys, pion_client; sys.exit('mlx' in sys.modules or 'pion_grpc' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
