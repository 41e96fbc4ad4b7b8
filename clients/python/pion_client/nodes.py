"""Several nodes as one channel: each call goes to the node that its route belongs to.

Knows gRPC's channels and the ring; nothing of what is called. A node that cannot be reached, or says
that it is going, is left out for a moment, and its calls go where a proxy would send them; whether a
call is made again is its caller's business.

The one decision: it is a `grpc.Channel` that looks at the metadata `pion-route`, so that nothing above
it knows whether there is one server, a proxy, or many.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import grpc

from pion_client.ring import Ring

ROUTE = "pion-route"
_DIRECT = "\0"
"""Begins the route to a node itself; no name has such a character, and in metadata it is `%00`."""
DOWN_S, DOWN_S_MAX = 1.0, 16.0
"""How long a node is left alone after a call that did not reach it; doubled as long as none does."""
RINGS_MAX = 32
"""Rings that are kept, one for each set of nodes that are down."""


_OUR_OWN = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""What our own side says: whether there is a node at the other end remains open."""


def direct(node: str) -> str:
    """Returns the route to a node, whether it is up or not: no other can answer for it."""
    return _DIRECT + node


class _Down(NamedTuple):
    """A node that is left alone."""

    again_s: float
    """When it is tried."""
    pause_s: float
    tried: bool = False
    """Whether a call is on its way to it, to see."""


class Health:
    """Which nodes are left out, and the ring of the others."""

    def __init__(
        self, nodes: Iterable[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.nodes = tuple(nodes)
        self._clock = clock
        self._lock = threading.Lock()
        self._down: dict[str, _Down] = {}
        self._rings: dict[frozenset[str], Ring] = {}

    def node(self, route: str) -> str:
        """Returns the node of a route, of those that are up; now and then one that may be up again.

        It is one of its own calls that a node is tried with. All others keep to the ring without it,
        until it has answered: otherwise they would go back and forth between two rings.
        """
        if route.startswith("%00"):
            return route.removeprefix("%00")
        now = self._clock()
        with self._lock:
            again = [node for node, down in self._down.items() if down.again_s <= now]
            if again:
                node = self._ring(frozenset(self._down).difference(again)).node(route)
                if node in again:
                    self._down[node] = _Down(now + DOWN_S_MAX, self._down[node].pause_s, True)
                    return node
            return self._ring(frozenset(self._down)).node(route)

    def note(self, node: str, code: grpc.StatusCode | None) -> None:
        """Notes how a call to a node ended."""
        with self._lock:
            if code is grpc.StatusCode.UNAVAILABLE:
                self._leave_out(node)
            elif code not in _OUR_OWN:
                self._down.pop(node, None)

    def _leave_out(self, node: str) -> None:
        down = self._down.get(node)
        if down is None:
            self._down[node] = _Down(self._clock() + DOWN_S, DOWN_S)
        elif down.tried:  # else a call that was on its way when the first one failed
            pause_s = min(2 * down.pause_s, DOWN_S_MAX)
            self._down[node] = _Down(self._clock() + pause_s, pause_s)

    def _ring(self, down: frozenset[str]) -> Ring:
        if down not in self._rings:
            if len(self._rings) >= RINGS_MAX:
                self._rings.clear()
            self._rings[down] = Ring(self.nodes, down=down)
        return self._rings[down]


class RingChannel(grpc.Channel):
    """A channel to each node of a ring."""

    def __init__(self, channels: Mapping[str, grpc.Channel]) -> None:
        self._channels = dict(channels)
        self._health = Health(self._channels)

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """As `grpc.Channel` has it; so are the other three."""
        return self._routed(lambda channel: channel.unary_unary, arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """One message there, many back."""
        return self._routed(lambda channel: channel.unary_stream, arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """Many messages there, one back."""
        return self._routed(lambda channel: channel.stream_unary, arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """Many messages both ways."""
        return self._routed(lambda channel: channel.stream_stream, arguments, options)

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        """Tells of every node's connectivity."""
        for channel in self._channels.values():
            channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """Tells no more."""
        for channel in self._channels.values():
            channel.unsubscribe(callback)

    def close(self) -> None:
        """Ends every call, to every node."""
        for channel in self._channels.values():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _routed(
        self,
        kind: Callable[[grpc.Channel], Callable[..., Any]],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> "_Routed":
        calls = {
            node: kind(channel)(*arguments, **options) for node, channel in self._channels.items()
        }
        return _Routed(self._health, calls)


class _Routed:
    """One method on every node."""

    def __init__(self, health: Health, calls: Mapping[str, Any]) -> None:
        self._health = health
        self._calls = calls

    def __call__(self, request: Any, **options: Any) -> Any:
        """Makes a call; of one with a single answer, returns that."""
        node = self._node(options)
        try:
            answer = self._calls[node](request, **options)
        except grpc.RpcError as error:
            self._health.note(node, error.code())
            raise
        if isinstance(answer, grpc.RpcContext):
            self._watch(node, answer)
        else:
            self._health.note(node, grpc.StatusCode.OK)
        return answer

    def future(self, request: Any, **options: Any) -> Any:
        """Begins a call with a single answer."""
        node = self._node(options)
        call = self._calls[node].future(request, **options)
        self._watch(node, call)
        return call

    def _node(self, options: Mapping[str, Any]) -> str:
        metadata = options.get("metadata") or ()
        return self._health.node(next((value for key, value in metadata if key == ROUTE), ""))

    def _watch(self, node: str, call: Any) -> None:
        def ended() -> None:
            self._health.note(node, call.code())

        if not call.add_callback(ended):
            ended()
