"""How a service's methods become gRPC handlers: parsing, credentials, permits and errors, once for all.

An implementation has one method per RPC, named as in the proto, that takes the parsed request (of a
client stream: an iterator of serialised messages) and a `Call`, and returns the response (of a server
stream: an iterator of messages, or of frames that are serialised already). It raises domain errors.

The size of a message is checked before it is parsed: a megabyte of empty submessages would become fifty
megabytes of objects.
"""

import base64
import binascii
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from pion_grpc.core.access import Access
from pion_grpc.errors import InvalidRequest, NotAuthenticated, TooManyStreams
from pion_grpc.rpc.errors import translated
from pion_wire import limits


class MessageSizes(NamedTuple):
    """The largest messages of a service, in bytes."""

    request: int
    streamed: int
    """One message of a client stream."""
    response: int


SMALL_MESSAGES = MessageSizes(
    request=limits.MESSAGE_BYTES_MAX, streamed=8 << 20, response=limits.MESSAGE_BYTES_MAX
)
"""Only the header of a Store may be larger: a million token ids, a table of 400,000 hashes, and a little
else."""
LARGE_MESSAGES = MessageSizes(request=65 << 20, streamed=65 << 20, response=65 << 20)
"""Of Attend: tensors of 64 MiB, and the fields beside them."""
CROWD_WAIT_S = 0.25
"""How long the request of a unary call may take when many are being waited for."""
HEALTH_SERVICE = "grpc.health.v1.Health"

AnyMessage = TypeVar("AnyMessage", bound=Message)


class Call(NamedTuple):
    """What a handler knows of its call."""

    tenant: str
    context: grpc.ServicerContext


class Credentials:
    """The `authorization: Basic` header of a call, checked against the passwords of the server."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def tenant(self, context: grpc.ServicerContext) -> str:
        """Returns the tenant of a call.

        Raises:
            NotAuthenticated: no credentials where some are needed, or wrong ones.
        """
        return self.tenant_of(context.invocation_metadata())

    def tenant_of(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """Returns the tenant that metadata names; raises as `tenant` does."""
        if not self._access.required:
            return ""
        for key, value in metadata:
            if key == "authorization":
                return self._check(value if isinstance(value, str) else value.decode("latin-1"))
        raise NotAuthenticated("this server needs a password: set PION_PASSWORD")

    def _check(self, header: str) -> str:
        scheme, _, encoded = header.partition(" ")
        try:
            user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            scheme = user = password = ""
        tenant = self._access.tenant(user, password.encode(), strict=True)
        if scheme.lower() != "basic" or tenant is None:
            raise NotAuthenticated("unknown tenant, or wrong password")
        return tenant


class Doorman(grpc.ServerInterceptor):
    """Lets calls in: without credentials only health checks, and none that holds a thread for nothing.

    gRPC waits for the single request message of a call in a thread of the pool. Calls that never send it
    would take every thread, and health checks would go unanswered. So a call with one request message is
    served as if it were a stream, and waits for the message in the lobby; health has its own threads.
    """

    def __init__(self, credentials: Credentials, lobby: "Lobby", health_threads: Executor) -> None:
        self._credentials = credentials
        self._lobby = lobby
        self._health_threads = health_threads
        self._handlers: dict[str, Any] = {}

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Returns the handler of a call, or one that refuses it."""
        method: str = details.method
        is_health = method.startswith(f"/{HEALTH_SERVICE}/")
        if not is_health:
            try:
                self._credentials.tenant_of(details.invocation_metadata)
            except NotAuthenticated as error:
                return _refusing(error, method)
        if method not in self._handlers:
            handler = continuation(details)
            if handler is None:
                return None  # there is no such method; remembering each would never end
            self._handlers[method] = self._waiting(handler, method, is_health)
        return self._handlers[method]

    def _waiting(self, handler: Any, method: str, is_health: bool) -> Any:
        """Returns a handler that takes a stream of messages, of which it uses one."""
        one_answer = handler.unary_unary
        if handler.request_streaming or (is_health and not one_answer):
            return handler  # health's Watch brings its own threads
        ask = one_answer or handler.unary_stream

        def behaviour(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
            with translated(context, method):
                with self._lobby.waiting(context):
                    message = next(messages, None)
                if message is None:
                    raise InvalidRequest("request", "the call ended without one")
            return ask(message, context)

        if is_health:
            behaviour.experimental_thread_pool = self._health_threads  # type: ignore[attr-defined]
        make = (
            grpc.stream_unary_rpc_method_handler
            if one_answer
            else grpc.stream_stream_rpc_method_handler
        )
        return make(behaviour, handler.request_deserializer, handler.response_serializer)


class Lobby:
    """Calls whose request has not arrived yet. Each holds a thread: in a crowd nobody may wait long."""

    def __init__(self, stall_ms: int, crowd: int) -> None:
        """Lets calls wait for `stall_ms` (0: for ever), of `crowd` or more only for `CROWD_WAIT_S`."""
        self._stall_s = stall_ms / 1_000 or float("inf")
        self._crowd = crowd
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[grpc.ServicerContext, float]] = {}
        self._serial = 0

    @contextlib.contextmanager
    def waiting(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Counts a call as waiting for as long as the context is open."""
        with self._lock:
            self._serial += 1
            ticket = self._serial
            self._waiting[ticket] = context, time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._waiting[ticket]

    @property
    def crowded(self) -> bool:
        """Whether so many wait that other calls may find no free thread."""
        return len(self._waiting) >= self._crowd

    def cut_stalled(self) -> int:
        """Cancels the calls that have waited too long; returns how many."""
        with self._lock:
            patience_s = CROWD_WAIT_S if self.crowded else self._stall_s
            oldest = time.monotonic() - min(patience_s, self._stall_s)
            stalled = [context for context, since in self._waiting.values() if since < oldest]
        for context in stalled:
            context.cancel()
        return len(stalled)


class _Stream(NamedTuple):
    context: grpc.ServicerContext
    is_conversation: bool
    waits_since: float
    """Since when its peer should have sent or taken something; infinite while the server works."""


class Streams:
    """Permits for streams, and a watch over those whose peer does nothing.

    Bidirectional streams are conversations: their clients keep them open between two questions. They
    have as many permits of their own, so that they cannot use up those of streams that end.
    """

    def __init__(
        self, streams_max: int, stall_ms: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._streams_max = streams_max
        self._stall_s = stall_ms / 1_000
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[int, _Stream] = {}
        self._serial = 0

    @contextlib.contextmanager
    def running(
        self, context: grpc.ServicerContext, *, is_conversation: bool = False
    ) -> Iterator[int]:
        """Holds a permit, and yields the number of the stream, on which it is the server's turn.

        Raises:
            TooManyStreams: no permit is left.
        """
        with self._lock:
            kind = [one for one in self._running.values() if one.is_conversation is is_conversation]
            if len(kind) >= self._streams_max:
                raise TooManyStreams(
                    f"{self._streams_max} streams are running: try again in a moment",
                    limit=self._streams_max,
                )
            self._serial += 1
            stream = self._serial
            self._running[stream] = _Stream(context, is_conversation, float("inf"))
        try:
            yield stream
        finally:
            with self._lock:
                del self._running[stream]

    def waits(self, stream: int) -> None:
        """Notes that it is the peer's turn."""
        self._note(stream, self._clock())

    def works(self, stream: int) -> None:
        """Notes that it is the server's turn."""
        self._note(stream, float("inf"))

    def _note(self, stream: int, waits_since: float) -> None:
        with self._lock:
            self._running[stream] = self._running[stream]._replace(waits_since=waits_since)

    def cut_stalled(self) -> int:
        """Cancels the streams whose peer did nothing for too long; returns how many."""
        if not self._stall_s:
            return 0
        oldest = self._clock() - self._stall_s
        with self._lock:
            stalled = [one.context for one in self._running.values() if one.waits_since < oldest]
        for context in stalled:
            context.cancel()
        return len(stalled)


def service_handler(
    descriptor: ServiceDescriptor,
    implementation: object,
    credentials: Credentials,
    streams: Streams,
    sizes: MessageSizes,
) -> grpc.GenericRpcHandler:
    """Returns the handler of all methods of a service."""
    handlers = {
        method.name: _handler(
            method, getattr(implementation, method.name), credentials, streams, sizes
        )
        for method in descriptor.methods
    }
    return grpc.method_handlers_generic_handler(descriptor.full_name, handlers)


def _handler(
    method: MethodDescriptor,
    behaviour: Callable[[Any, Call], Any],
    credentials: Credentials,
    streams: Streams,
    sizes: MessageSizes,
) -> Any:
    request_type = GetMessageClass(method.input_type)
    name = method.full_name

    def parse(message: bytes) -> Message:
        _check_size(message, sizes.request)
        return parsed(message, request_type, "request")

    def incoming(messages: Iterator[bytes], stream: int) -> Iterator[bytes]:
        streams.waits(stream)
        for message in messages:
            streams.works(stream)
            _check_size(message, sizes.streamed)
            yield message
            streams.waits(stream)
        streams.works(stream)

    def unary(message: bytes, context: grpc.ServicerContext) -> bytes:
        with translated(context, name):
            call = Call(credentials.tenant(context), context)
            response = _serialise(behaviour(parse(message), call))
            if len(response) > sizes.response:
                problem = f"the answer would have {len(response)} bytes: ask for less at once"
                raise InvalidRequest("request", problem, limit=sizes.response)
            return response
        raise AssertionError("a translated error has ended the call")

    def unary_stream(message: bytes, context: grpc.ServicerContext) -> Iterator[Message | bytes]:
        with translated(context, name):
            call = Call(credentials.tenant(context), context)
            with streams.running(context) as stream:
                for response in behaviour(parse(message), call):
                    streams.waits(stream)
                    yield response
                    streams.works(stream)

    def stream_unary(messages: Iterator[bytes], context: grpc.ServicerContext) -> Message:
        with translated(context, name):
            call = Call(credentials.tenant(context), context)
            with streams.running(context) as stream:
                response: Message = behaviour(incoming(messages, stream), call)
                return response
        raise AssertionError("a translated error has ended the call")

    def stream_stream(
        messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[Message | bytes]:
        with translated(context, name):
            call = Call(credentials.tenant(context), context)
            with streams.running(context, is_conversation=True) as stream:
                for response in behaviour(incoming(messages, stream), call):
                    streams.waits(stream)
                    yield response
                    streams.works(stream)

    if method.client_streaming and method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(stream_stream, None, _serialise)
    if method.client_streaming:
        return grpc.stream_unary_rpc_method_handler(stream_unary, None, _serialise)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(unary_stream, None, _serialise)
    return grpc.unary_unary_rpc_method_handler(unary, None, _serialise)


def parsed(message: bytes, kind: type[AnyMessage], field: str) -> AnyMessage:
    """Returns a message from its bytes.

    Raises:
        InvalidRequest: they are not one; `field` says which.
    """
    try:
        return kind.FromString(message)
    except DecodeError as error:
        problem = f"not a {kind.DESCRIPTOR.name}, or a text in it is not UTF-8"
        raise InvalidRequest(field, problem) from error


def _check_size(message: bytes, limit: int) -> None:
    if len(message) > limit:
        raise InvalidRequest("request", f"{len(message)} bytes exceed {limit}", limit=limit)


def _refusing(error: NotAuthenticated, method: str) -> Any:
    def refuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with translated(context, method):
            raise error

    # A stream of messages is what every kind of call is on the wire.
    return grpc.stream_stream_rpc_method_handler(refuse)


def _serialise(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
