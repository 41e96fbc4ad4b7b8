"""How a service's methods become gRPC handlers: parsing, credentials, permits and errors, once for all.

An implementation has one method per RPC, named as in the proto, that takes the parsed request (of a
client stream: an iterator of serialised messages) and a `Call`, and returns the response (of a server
stream: an iterator of messages, or of frames that are serialised already). It raises domain errors.
"""

import base64
import binascii
import hmac
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from pion_grpc.errors import InvalidRequest, NotAuthenticated, TooManyStreams
from pion_grpc.rpc.errors import translated


class Call(NamedTuple):
    """What a handler knows of its call."""

    tenant: str
    context: grpc.ServicerContext
    progress: Callable[[], None]
    """Says that the peer has taken or sent something; a stream that never does is cut off."""


class Credentials:
    """Who may call: the pairs of tenant and password, or everybody if there are none."""

    def __init__(self, passwords: dict[str, str]) -> None:
        self._passwords = {tenant: secret.encode() for tenant, secret in passwords.items()}

    def tenant(self, context: grpc.ServicerContext) -> str:
        """Returns the tenant of a call.

        Raises:
            NotAuthenticated: no credentials where some are needed, or wrong ones.
        """
        if not self._passwords:
            return ""
        for key, value in context.invocation_metadata():
            if key == "authorization":
                return self._check(value if isinstance(value, str) else value.decode("latin-1"))
        raise NotAuthenticated("this server needs a password: set PION_PASSWORD")

    def _check(self, header: str) -> str:
        scheme, _, encoded = header.partition(" ")
        try:
            tenant, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            scheme = tenant = password = ""
        known = self._passwords.get(tenant)
        # Compared in constant time, also where the tenant is unknown.
        right = hmac.compare_digest(password.encode(), known if known is not None else b"")
        if scheme.lower() != "basic" or known is None or not right:
            raise NotAuthenticated("unknown tenant, or wrong password")
        return tenant


class Streams:
    """Permits for streams, and the watch over those whose peer does nothing."""

    def __init__(self, streams_max: int, stall_ms: int) -> None:
        self._streams_max = streams_max
        self._stall_s = stall_ms / 1_000
        self._lock = threading.Lock()
        self._running: dict[int, tuple[grpc.ServicerContext, float]] = {}
        self._serial = 0

    def open(self, context: grpc.ServicerContext) -> int:
        """Takes a permit.

        Raises:
            TooManyStreams: none is left.
        """
        with self._lock:
            if len(self._running) >= self._streams_max:
                raise TooManyStreams(
                    f"{self._streams_max} streams are running: try again in a moment",
                    limit=self._streams_max,
                )
            self._serial += 1
            self._running[self._serial] = context, time.monotonic()
            return self._serial

    def progress(self, stream: int) -> None:
        """Notes that the peer did something."""
        with self._lock:
            context, _ = self._running[stream]
            self._running[stream] = context, time.monotonic()

    def close(self, stream: int) -> None:
        """Gives the permit back."""
        with self._lock:
            del self._running[stream]

    def cut_stalled(self) -> int:
        """Cancels the streams whose peer did nothing for too long; returns how many."""
        if not self._stall_s:
            return 0
        oldest = time.monotonic() - self._stall_s
        with self._lock:
            stalled = [context for context, last in self._running.values() if last < oldest]
        for context in stalled:
            context.cancel()
        return len(stalled)


def service_handler(
    descriptor: ServiceDescriptor,
    implementation: object,
    credentials: Credentials,
    streams: Streams,
) -> grpc.GenericRpcHandler:
    """Returns the handler of all methods of a service."""
    handlers = {
        method.name: _handler(method, getattr(implementation, method.name), credentials, streams)
        for method in descriptor.methods
    }
    return grpc.method_handlers_generic_handler(descriptor.full_name, handlers)


def _handler(
    method: MethodDescriptor,
    behaviour: Callable[[Any, Call], Any],
    credentials: Credentials,
    streams: Streams,
) -> Any:
    request_type = GetMessageClass(method.input_type)
    name = method.full_name

    def unary(message: bytes, context: grpc.ServicerContext) -> Message:
        with translated(context, name):
            call = Call(credentials.tenant(context), context, _nothing)
            response: Message = behaviour(_parse(request_type, message), call)
            return response
        raise AssertionError("a translated error has ended the call")

    def unary_stream(message: bytes, context: grpc.ServicerContext) -> Iterator[Message | bytes]:
        with translated(context, name):
            tenant = credentials.tenant(context)
            stream = streams.open(context)
            try:
                call = Call(tenant, context, lambda: streams.progress(stream))
                for response in behaviour(_parse(request_type, message), call):
                    yield response
                    streams.progress(stream)
            finally:
                streams.close(stream)

    def stream_unary(messages: Iterator[bytes], context: grpc.ServicerContext) -> Message:
        with translated(context, name):
            tenant = credentials.tenant(context)
            stream = streams.open(context)
            try:
                call = Call(tenant, context, lambda: streams.progress(stream))
                response: Message = behaviour(_noting(messages, call), call)
                return response
            finally:
                streams.close(stream)
        raise AssertionError("a translated error has ended the call")

    def stream_stream(
        messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[Message | bytes]:
        with translated(context, name):
            tenant = credentials.tenant(context)
            stream = streams.open(context)
            try:
                call = Call(tenant, context, lambda: streams.progress(stream))
                yield from behaviour(_noting(messages, call), call)
            finally:
                streams.close(stream)

    if method.client_streaming and method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(stream_stream, None, _serialise)
    if method.client_streaming:
        return grpc.stream_unary_rpc_method_handler(stream_unary, None, _serialise)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(unary_stream, None, _serialise)
    return grpc.unary_unary_rpc_method_handler(unary, None, _serialise)


def _noting(messages: Iterator[bytes], call: Call) -> Iterator[bytes]:
    for message in messages:
        call.progress()
        yield message


def _parse(request_type: type[Message], message: bytes) -> Message:
    try:
        return request_type.FromString(message)
    except DecodeError as error:
        raise InvalidRequest("request", f"not a {request_type.DESCRIPTOR.name}") from error


def _serialise(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _nothing() -> None:
    pass
