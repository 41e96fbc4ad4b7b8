"""The connection: one lazily made channel, the metadata and a deadline on every call, and forks.

Knows addresses, TLS and gRPC, nothing of prefixes.

The one decision concerns forks. gRPC's threads do not exist in a forked child, and its sockets are the
parent's. gRPC mends itself in the child only if nothing of it was running at the moment of the fork;
otherwise every further call there hangs, and may read what belongs to the parent. So the child never
touches a channel that it inherited (it does not even free it), and makes one of its own only if gRPC
has mended itself: no call of ours was in flight, and gRPC has started threads anew, which the child
sees as soon as the fork returns. Everything else raises `Forked`. Measured on Linux, 150 of 150 forks
from a quiet process worked, and none of those from a busy one hung.
"""

import base64
import contextlib
import ipaddress
import itertools
import os
import random
import re
import sys
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import grpc

from pion_client.errors import (
    ClientClosed,
    DeadlineExceeded,
    Forked,
    GenerationDiffers,
    InvalidRequest,
    PionError,
    Unavailable,
    from_rpc_error,
    may_ask_again,
)
from pion_client.nodes import RingChannel, direct
from pion_client.ring import Ring
from pion_client.tls import Tls
from pion_client.values import Lookup
from pion_wire.limits import CHUNK_BYTES_MAX
from pion_wire.v1.attend_pb2_grpc import AttendStub
from pion_wire.v1.prefix_store_pb2_grpc import PrefixStoreStub
from pion_wire.v1.ssm_state_pb2_grpc import SSMStateStub
from pion_wire.v1.stats_pb2_grpc import StatsStub

TRIES_MAX = 3
"""How many times a read that brings nothing is tried in all, unless its caller gave a deadline.

A server that has been away for less than the client's `timeout_s` is tried until then: it is being
restarted, and a client may be made just in that moment. One that stays away costs that time once,
however many calls are made meanwhile, and these tries from then on, until it has answered."""
TRIES_ENDLESS = sys.maxsize
"""Until the deadline."""
STREAM_TIMEOUT_S = 3_600.0
"""The deadline of a stream without one of its own: 16 GiB at 5 MB/s; dead ones end sooner."""
_PAUSE_S, _PAUSES_MAX = 0.1, 10
"""Pauses grow by the first, up to so many of it."""

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # The window of a stream, and its frames: what a fast network can have in flight.
    ("grpc.http2.lookahead_bytes", 16 << 20),
    ("grpc.http2.max_frame_size", CHUNK_BYTES_MAX),
    # Answers of Attend are as large as its queries; all other messages stay below gRPC's 4 MiB.
    ("grpc.max_receive_message_length", 66 << 20),
    # A server that comes back is found at once, not after up to two minutes: sooner than tries end.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Otherwise the channel of a forked child would be the parent's connection.
    ("grpc.use_local_subchannel_pool", 1),
)


PING_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Of the pings that measure the link, too: while one is under way, no other is sent.
    ("grpc.http2.ping_timeout_ms", 20_000),
)
"""What finds a machine that went without a word, minutes before TCP gives it up.

On a slow link an answer waits for what is under way: with 5 s, large prefixes never arrived at 0.5 MB/s.
"""

RING_OPTIONS: tuple[tuple[str, int | str], ...] = (
    *PING_OPTIONS,
    # A node that is switched off is given up soon: there are others.
    ("grpc.min_reconnect_backoff_ms", 1_000),
)
"""Where a client hashes by itself, and nobody else finds out who is up."""

Metadata: TypeAlias = tuple[tuple[str, str], ...]
_Result = TypeVar("_Result")


TIMEOUT_S_MAX = 30 * 86_400.0
"""Longer ones overflow what the transport counts with."""


class Deadline:
    """A moment by which something must be done.

    Args:
        timeout_s: from now.
        tries: how often a server that cannot be reached is tried in all.
        patience_s: for how long it is tried after that, each time that it goes.
    """

    def __init__(self, timeout_s: float, tries: int = TRIES_MAX, patience_s: float = 0.0) -> None:
        self.timeout_s = timeout_s
        self.tries = tries
        self._patience_s = patience_s
        self._patient_until = 0.0
        self._end = time.monotonic() + min(timeout_s, TIMEOUT_S_MAX)

    @property
    def remaining_s(self) -> float:
        """Seconds left; 0 when it is over."""
        return max(self._end - time.monotonic(), 0.0)

    def is_patient(self, attempt: int) -> bool:
        """Whether a server that has gone is waited for, after so many attempts in a row."""
        if attempt <= 1:
            self._patient_until = time.monotonic() + self._patience_s
        return time.monotonic() < self._patient_until


class Stubs:
    """The calls of one channel. Streams of chunks stay bytes, framed and parsed by hand."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        prefixes, stats = PrefixStoreStub(channel), StatsStub(channel)
        self.register = prefixes.Register
        self.lookup = prefixes.Lookup
        self.match = prefixes.Match
        self.store: Any = channel.stream_unary("/pion.v1.PrefixStore/Store")
        self.fetch: Any = channel.unary_stream("/pion.v1.PrefixStore/Fetch")
        self.export = prefixes.Export
        self.drop = prefixes.Drop
        self.list_page = prefixes.List
        self.blocks = prefixes.Blocks
        self.membership = prefixes.Membership
        self.save = prefixes.Save
        self.sync = prefixes.Sync
        self.write_rows: Any = channel.stream_unary("/pion.v1.PrefixStore/WriteRows")
        self.read_rows = prefixes.ReadRows
        self.snapshot = prefixes.Snapshot
        self.restore = prefixes.Restore
        self.release = prefixes.Release
        self.describe = prefixes.Describe
        self.state_store: Any = channel.stream_unary("/pion.v1.SSMState/Store")
        self.state_fetch: Any = channel.unary_stream("/pion.v1.SSMState/Fetch")
        states = SSMStateStub(channel)
        self.state_export = states.Export
        self.state_drop = states.Drop
        self.receipt = stats.Get
        self.reset_receipt = stats.Reset
        attend = AttendStub(channel)
        self.attend_store: Any = channel.stream_unary("/pion.v1.Attend/Store")
        self.attend_lookup = attend.Lookup
        self.attend_query = attend.Query
        self.attend_stream = attend.Stream
        self.attend_drop = attend.Drop


class Connection:
    """One server, as one client sees it. Thread-safe; see the module for forks."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tenant: str = "",
        password: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Connects nothing yet.

        Args:
            address: `host:port` or `unix:/path`; or the nodes of a mesh, several or with commas between.
            tenant, password: who asks.
            tls: by default what the environment names; nothing there: not encrypted.

        Raises:
            ValueError: an address is not valid or there twice, or the certificates cannot be used.
        """
        self.targets = targets_of(address)
        self.is_local = all(map(is_local, self.targets))
        self._tls = _tls_of(self.targets, tls)
        self._stamp: object = None
        self._authorization: Metadata = ()
        if password is not None:
            pair = base64.b64encode(f"{tenant}:{password}".encode()).decode()
            self._authorization = (("authorization", f"Basic {pair}"),)
        self._lock = threading.Lock()
        self._stubs: Stubs | None = None
        self._closed = False
        self._away_since_s: float | None = None
        _process.connections.add(self)

    @property
    def everywhere(self) -> tuple[str, ...]:
        """A route to each node; of one server, or of a proxy whose nodes are not known, none."""
        return Ring(self.targets).routes() if len(self.targets) > 1 else ()

    @property
    def each(self) -> tuple[str, ...]:
        """A route to each node where no other can answer for it; of one server, one that leads there."""
        return tuple(map(direct, self.targets)) if len(self.targets) > 1 else ("",)

    @property
    def away_s(self) -> float:
        """For how long the server has not been reached, though it was called; 0 if it was there last."""
        since_s = self._away_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def metadata(self, route: str) -> Metadata:
        """Returns what every call carries: where a proxy shall send it, and who asks."""
        # Metadata is ASCII; what is not is percent-encoded, so that equal names have equal routes.
        return (("pion-route", urllib.parse.quote(route, safe=_ROUTE_SAFE)), *self._authorization)

    @contextlib.contextmanager
    def calling(self) -> Iterator[Stubs]:
        """Lends the stubs for one call, and turns what the transport raises into our errors.

        Raises:
            ClientClosed, Forked: there is nothing to lend.
            PionError: what the status of the call means.
        """
        stubs = self._connected()
        with _process.call():
            try:
                yield stubs
                self._away_since_s = None
            except grpc.RpcError as error:
                if self._closed:
                    raise ClientClosed("the client was closed during the call") from error
                meaning = self._explained(from_rpc_error(error))
                if meaning.from_transport:
                    self._renew(stubs)
                raise meaning from error
            except ValueError as error:
                if self._closed and not isinstance(error, PionError):  # gRPC's word for it
                    raise ClientClosed("the client has been closed") from error
                raise

    def close(self) -> None:
        """Ends every call and the connection."""
        with self._lock:
            self._closed = True
            stubs, self._stubs = self._stubs, None
        if stubs is not None:
            stubs.channel.close()

    def _explained(self, error: PionError) -> PionError:
        """Notes whether the server is away, and returns what the caller should know."""
        if not error.from_transport:
            self._away_since_s = None
        elif isinstance(error, Unavailable):
            self._away_since_s = self._away_since_s or time.monotonic()
        elif isinstance(error, DeadlineExceeded) and self._away_since_s is not None:
            # The last of several attempts had little time: that nobody is there is the reason.
            return Unavailable(str(error), from_transport=True)
        return error

    def _connected(self) -> Stubs:
        with self._lock:
            if self._closed:
                raise ClientClosed("the client has been closed")
            if self._stubs is None:
                _process.opening()
                _keep_freed_chunks()
                self._stubs = Stubs(self._channel())
            return self._stubs

    @property
    def options(self) -> list[tuple[str, int | str]]:
        """What a channel is made with."""
        options = list(CHANNEL_OPTIONS)
        if self.is_local:  # a proxy elsewhere cannot reach this host's loopback
            options.append(("grpc.enable_http_proxy", 0))
        if len(self.targets) > 1:
            options += RING_OPTIONS
        elif not self.is_local:
            options += PING_OPTIONS
        return options

    def _channel(self) -> grpc.Channel:
        open_channel, options = self._opener(), self.options
        channels = {target: open_channel(target, options) for target in self.targets}
        return RingChannel(channels) if len(channels) > 1 else channels[self.targets[0]]

    def _opener(self) -> Callable[[str, list[tuple[str, int | str]]], grpc.Channel]:
        if self._tls is None:
            return grpc.insecure_channel
        self._stamp = self._tls.files.stamp()
        try:
            credentials = self._tls.credentials()
        except ValueError as error:
            raise InvalidRequest(str(error), metadata={"field": "tls"}) from error
        return lambda target, options: grpc.secure_channel(target, credentials, options)

    def _renew(self, stubs: Stubs) -> None:
        """Has the next call make a new channel if there are new certificates.

        The old one is left to the calls that are on it, and goes with the last of them.
        """
        if self._tls is None:
            return
        stamp = self._tls.files.stamp()
        with self._lock:
            if self._stubs is stubs and stamp != self._stamp:
                self._stubs = None

    def _forked(self) -> None:
        """In the child: leaves what belongs to the parent alone, for ever."""
        self._lock = threading.Lock()  # whoever held it does not exist here
        if self._stubs is not None:
            _process.inherited.append(self._stubs)
            self._stubs = None


class Watchdog:
    """Cancels a call that makes no progress for `stall_s`; touch it when it does.

    One thread per stream, which wakes once per `stall_s`.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._touched = time.monotonic()
        self._over = threading.Event()
        self._expired = False

    def touch(self) -> None:
        """Notes progress."""
        self._touched = time.monotonic()

    @contextlib.contextmanager
    def over(self, call: Any) -> Iterator[None]:
        """Watches a call; at the end it is cancelled, whatever is left of it.

        Raises:
            DeadlineExceeded: it made no progress for too long.
        """
        thread = threading.Thread(
            target=self._watch, args=(call,), name="pion-watchdog", daemon=True
        )
        try:
            thread.start()
            yield
        except grpc.RpcError as error:
            if self._expired:
                message = f"the stream made no progress for {self._stall_s:g} s"
                raise DeadlineExceeded(message) from error
            raise
        finally:
            call.cancel()  # what is abandoned without it runs on at the server
            self._over.set()
            if thread.ident is not None:
                thread.join()

    def _watch(self, call: Any) -> None:
        while (left := self._touched + self._stall_s - time.monotonic()) > 0:
            if self._over.wait(left):
                return
        self._expired = True
        call.cancel()


def retried(ask: Callable[[], _Result], deadline: Deadline) -> _Result:
    """Returns the answer to a read; asks again within the deadline, as often as that allows."""
    for attempt in itertools.count(1):
        try:
            return ask()
        except PionError as error:
            if not pause(error, attempt, deadline):
                raise
    raise AssertionError("the loop ends by itself")


def of_now(look: Callable[[], Lookup], use: Callable[[Lookup], _Result]) -> _Result:
    """Returns what `use` makes of what a name means; of something else that takes the name meanwhile.

    Raises:
        GenerationDiffers: where it is used, the name does not mean what it means where it is looked up.
    """
    refused = 0
    while True:
        found = look()
        try:
            return use(found)
        except GenerationDiffers:
            generation = found.prefix.generation if found.prefix else 0
            if generation == refused:
                raise
            refused = generation


def pause(error: PionError, attempt: int, deadline: Deadline) -> bool:
    """Waits before a read is asked again; False if it should not be, or not in time.

    Args:
        error: what the last attempt came to.
        attempt: how many in a row have brought nothing; 0 if this one broke off on the way.
        deadline: of everything.
    """
    wait_s = may_ask_again(error)
    # A server that says itself when to come back is there: it is not given up at once.
    tries = deadline.tries if error.from_transport else max(deadline.tries, TRIES_MAX)
    is_patient = deadline.is_patient(attempt) and error.from_transport
    if wait_s is None or (attempt >= tries and not is_patient):
        return False
    # Spread, so that clients do not come back in step.
    pauses = min(max(attempt, 1), _PAUSES_MAX)
    wait_s = wait_s or _PAUSE_S * pauses * (1 + random.random() / 2)
    if wait_s >= deadline.remaining_s:
        return False
    time.sleep(wait_s)
    return True


def targets_of(address: str | Sequence[str]) -> tuple[str, ...]:
    """Returns gRPC's names for one address or several; raises ValueError as `target_of` does."""
    if isinstance(address, str):
        address = [address] if address.startswith("unix:") else address.split(",")
    targets = tuple(target_of(one.strip()) for one in address)
    if not targets or len(set(targets)) < len(targets):
        raise ValueError(f"{address!r}: a mesh has nodes, each once")
    return targets


def target_of(address: str) -> str:
    """Returns gRPC's name for `host:port` or `unix:/path`.

    Raises:
        ValueError: the address is neither.
    """
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if path.startswith("//"):
            path = path.removeprefix("//")
        if not path:
            raise ValueError("unix: needs a path")
        return f"unix:{path}"
    host, _, port = address.rpartition(":")
    if not _is_host(host) or not _PORT.fullmatch(port) or int(port) > 65_535:
        raise ValueError(f"{address!r} is neither host:port nor unix:/path")
    return address


def _is_host(text: str) -> bool:
    """Whether this is a name, an address of IPv4, or one of IPv6 in brackets."""
    if not text.startswith("["):
        return _NAME.fullmatch(text) is not None
    try:
        return text.endswith("]") and ipaddress.ip_address(text[1:-1]).version == 6
    except ValueError:
        return False


def is_local(target: str) -> bool:
    """Whether a target can only be this host: loopback or a Unix socket. Asks no name server."""
    if target.startswith("unix:"):
        return True
    host = target.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tls_of(targets: Sequence[str], tls: Tls | None) -> Tls | None:
    """Returns how targets are spoken to; a Unix socket is never encrypted.

    Raises:
        ValueError: the certificates cannot be used.
    """
    if any(target.startswith("unix:") for target in targets):
        if tls is not None:
            raise ValueError("tls: a Unix socket is not encrypted")
        return None
    tls = Tls.from_environment() if tls is None else tls
    if tls is not None:
        tls.credentials()
    return tls


class _Process:
    """What a fork must know: gRPC is one per process, whoever uses it."""

    def __init__(self) -> None:
        self.connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self.inherited: list[Stubs] = []
        self.broken = False
        self._opened = False
        self._in_flight = 0
        self._lock = threading.Lock()

    def opening(self) -> None:
        """Called before a channel is made.

        Raises:
            Forked: gRPC is not whole in this process.
        """
        if self.broken:
            raise Forked(_FORKED)
        self._opened = True

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Counts a call in flight."""
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def forked(self) -> None:
        """Runs in the child, before anything else does."""
        self._lock = threading.Lock()
        if self._opened and (self._in_flight or _threads() < 2):
            self.broken = True
        self._in_flight = 0
        for connection in list(self.connections):
            connection._forked()


def _threads() -> int:
    """Returns the number of this process's threads, those that Python does not know included."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # macOS: cannot be known, so count on nothing
        return 1


def _keep_freed_chunks() -> None:
    """Teaches glibc to keep freed blocks of a chunk's size instead of giving them back.

    gRPC allocates several such blocks per message. By default glibc maps and unmaps each, and the
    kernel clears every page again: that took a third of the time. It stops as soon as it has seen a
    larger block freed; that is what happens here, without touching a page.
    """
    bytearray(_LARGEST_KEPT_BYTES)


_LARGEST_KEPT_BYTES = (32 << 20) - (64 << 10)
_FORKED = (
    "this process was forked while gRPC was at work, and cannot use it: start workers with 'spawn' or "
    "'forkserver', or fork before the first call"
)
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_ROUTE_SAFE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")

_process = _Process()
os.register_at_fork(after_in_child=lambda: _process.forked())
