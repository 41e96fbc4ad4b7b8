"""Who is let in: calls with the right credentials, and none that holds a thread without asking anything.

Knows gRPC's handlers and metadata; not what a call is about. The one decision: gRPC waits for a request
in a thread of the pool, as long as its client likes. So every call waits here, where it can be cut off.
"""

import base64
import binascii
import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from typing import Any

import grpc

from pion_grpc.core.access import Access
from pion_grpc.errors import InvalidRequest, NotAuthenticated
from pion_grpc.rpc.errors import translated

CROWD_WAIT_S = 0.25
"""How long the request of a unary call may take when many are being waited for."""
HEALTH_SERVICE = "grpc.health.v1.Health"


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


def _refusing(error: NotAuthenticated, method: str) -> Any:
    def refuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with translated(context, method):
            raise error

    # A stream of messages is what every kind of call is on the wire.
    return grpc.stream_stream_rpc_method_handler(refuse)
