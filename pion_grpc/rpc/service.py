"""How a service's methods become gRPC handlers: parsing, credentials, permits and errors, once for all.

An implementation has one method per RPC, named as in the proto, that takes the parsed request (of a
client stream: an iterator of serialised messages) and a `Call`, and returns the response (of a server
stream: an iterator of messages, or of frames that are serialised already). It raises domain errors.

The size of a message is checked before it is parsed: a megabyte of empty submessages would become fifty
megabytes of objects.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from pion_grpc.errors import InvalidRequest
from pion_grpc.rpc.doorman import Credentials
from pion_grpc.rpc.errors import translated
from pion_grpc.rpc.permits import StreamPermits
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

AnyMessage = TypeVar("AnyMessage", bound=Message)


class Call(NamedTuple):
    """What a handler knows of its call."""

    tenant: str
    context: grpc.ServicerContext


def service_handler(
    descriptor: ServiceDescriptor,
    implementation: object,
    credentials: Credentials,
    permits: StreamPermits,
    sizes: MessageSizes,
) -> grpc.GenericRpcHandler:
    """Returns the handler of all methods of a service."""
    handlers = {
        method.name: _handler(
            method, getattr(implementation, method.name), credentials, permits, sizes
        )
        for method in descriptor.methods
    }
    return grpc.method_handlers_generic_handler(descriptor.full_name, handlers)


def _handler(
    method: MethodDescriptor,
    behaviour: Callable[[Any, Call], Any],
    credentials: Credentials,
    permits: StreamPermits,
    sizes: MessageSizes,
) -> Any:
    request_type = GetMessageClass(method.input_type)
    name = method.full_name

    def parse(message: bytes) -> Message:
        _check_size(message, sizes.request)
        return parsed(message, request_type, "request")

    def incoming(messages: Iterator[bytes], stream: int) -> Iterator[bytes]:
        permits.waits(stream)
        for message in messages:
            permits.works(stream)
            _check_size(message, sizes.streamed)
            yield message
            permits.waits(stream)
        permits.works(stream)

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
            with permits.running(context) as stream:
                for response in behaviour(parse(message), call):
                    permits.waits(stream)
                    yield response
                    permits.works(stream)

    def stream_unary(messages: Iterator[bytes], context: grpc.ServicerContext) -> Message:
        with translated(context, name):
            call = Call(credentials.tenant(context), context)
            with permits.running(context) as stream:
                response: Message = behaviour(incoming(messages, stream), call)
                return response
        raise AssertionError("a translated error has ended the call")

    def stream_stream(
        messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[Message | bytes]:
        with translated(context, name):
            call = Call(credentials.tenant(context), context)
            with permits.running(context, is_conversation=True) as stream:
                for response in behaviour(incoming(messages, stream), call):
                    permits.waits(stream)
                    yield response
                    permits.works(stream)

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


def _serialise(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
