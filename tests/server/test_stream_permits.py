"""Permits of streams, and who is cut off: handlers called as gRPC calls them, with our own clock."""

from collections.abc import Iterator
from typing import Any, cast

import grpc

from pion_grpc.core.access import Access
from pion_grpc.rpc.doorman import Credentials
from pion_grpc.rpc.permits import StreamPermits
from pion_grpc.rpc.service import LARGE_MESSAGES, Call, service_handler
from pion_wire.v1 import attend_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Attend"]
STALL_S = 10


class Context:
    """A call that nobody makes."""

    def __init__(self) -> None:
        self.cancelled = False

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def is_active(self) -> bool:
        return not self.cancelled

    def cancel(self) -> None:
        self.cancelled = True


class Bench:
    """A service whose every answer takes longer than a peer may take."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.streams = StreamPermits(64, STALL_S * 1_000, lambda: self.now)
        self.cut: list[int] = []
        self.context = Context()

    def __getattr__(self, name: str) -> Any:
        return None  # methods that nobody calls

    def Store(self, messages: Iterator[bytes], call: Call) -> pb.AttendStoreResponse:  # noqa: N802
        for _ in messages:
            self.work()
        self.work()
        return pb.AttendStoreResponse()

    def Stream(self, messages: Iterator[bytes], call: Call) -> Iterator[pb.AttendStreamResponse]:  # noqa: N802
        for _ in messages:
            self.work()
            yield pb.AttendStreamResponse()
        self.work()

    def work(self) -> None:
        self.now += 2 * STALL_S
        self.cut.append(self.streams.cut_stalled())

    def handler(self, method: str) -> Any:
        credentials = Credentials(Access({}))
        handlers = service_handler(SERVICE, self, credentials, self.streams, LARGE_MESSAGES)
        details = cast(grpc.HandlerCallDetails, Details(f"/pion.v1.Attend/{method}"))
        return handlers.service(details)


class Details:
    """What asks for a handler."""

    invocation_metadata = ()

    def __init__(self, method: str) -> None:
        self.method = method


def test_a_stream_is_not_cut_off_for_what_its_server_takes() -> None:
    bench = Bench()
    answers = bench.handler("Stream").stream_stream(iter([b"", b""]), bench.context)
    assert len(list(answers)) == 2
    assert bench.cut == [0, 0, 0]


def test_an_upload_is_not_cut_off_for_what_its_server_takes() -> None:
    bench = Bench()
    bench.handler("Store").stream_unary(iter([b"", b""]), bench.context)
    assert bench.cut == [0, 0, 0]


def test_a_peer_that_does_not_take_its_answer_is_cut_off() -> None:
    bench = Bench()
    answers = bench.handler("Stream").stream_stream(iter([b"", b""]), bench.context)
    next(answers)
    bench.now += STALL_S - 1
    assert bench.streams.cut_stalled() == 0
    bench.now += 2
    assert bench.streams.cut_stalled() == 1
    assert bench.context.cancelled


def test_a_peer_that_sends_nothing_is_cut_off() -> None:
    bench = Bench()
    cut: list[int] = []

    def nothing_more() -> Iterator[bytes]:
        yield b""
        bench.now += STALL_S + 1
        cut.append(bench.streams.cut_stalled())

    bench.handler("Store").stream_unary(nothing_more(), bench.context)
    assert cut == [1]
