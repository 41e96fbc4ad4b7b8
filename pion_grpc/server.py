"""The server: puts the parts together, serves until told to stop, and stops in order.

SIGTERM: health says NOT_SERVING, proxies get `drain_ms` to notice, running calls `grace_ms` to end, the
store is made durable and closed; then the process ends, even if a handler hangs. A second signal waits
for neither proxies nor calls.
"""

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pion_grpc import __version__, backends
from pion_grpc.config import ONE_OWNER, Address, Config
from pion_grpc.core.access import Access
from pion_grpc.core.attend import Attend
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.states import RecurrentStates
from pion_grpc.errors import Busy, CannotStart, DiskFull, PionError
from pion_grpc.process import pipe_of_signals, raise_files_limit, tune_allocator, tune_blas
from pion_grpc.resp.command import CLIENTS_MAX, RespSettings
from pion_grpc.resp.server import RespServer
from pion_grpc.resp.sockets import UNBOUND, bound, remove_dead_socket, why_not_bound
from pion_grpc.rpc.attend import AttendService
from pion_grpc.rpc.doorman import Credentials, Doorman, Lobby
from pion_grpc.rpc.permits import StreamPermits
from pion_grpc.rpc.prefix_store import PrefixStoreService
from pion_grpc.rpc.service import LARGE_MESSAGES, SMALL_MESSAGES, service_handler
from pion_grpc.rpc.ssm_state import SSMStateService
from pion_grpc.rpc.stats import StatsService
from pion_grpc.rpc.tls import Certificates
from pion_grpc.rpc.unimplemented import UnimplementedService
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.transaction import unix_ms
from pion_grpc.supervisor import Worker, supervise
from pion_wire.certificates import CertificateFiles
from pion_wire.v1 import attend_pb2, prefix_store_pb2, ssm_state_pb2, stats_pb2

UNARY_THREADS = 32
"""Threads beside one for each permitted stream, so that unary calls never wait for those."""
HEALTH_THREADS = 4
"""Threads of health's own, so that it answers whatever the others are busy with."""
TICK_S = 1.0
CLEAN_EVERY_TICKS = 30
CROWD_TICK_S = 0.1
CROWD_TICKS_MAX = 50
HURRY_TICK_S = 0.05

CHANNEL_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a busy port refuses to start
    ("grpc.max_receive_message_length", LARGE_MESSAGES.request),
    ("grpc.max_send_message_length", -1),
    # Proxies of a mesh ping on their own; an answer of GOAWAY would cut long calls.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # Finds out that a peer died without a word.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Every open call costs 20 KB, whatever it asks; a connection with more waits at its client.
    ("grpc.max_concurrent_streams", 2_048),
    # Large chunks want large frames and windows.
    ("grpc.http2.max_frame_size", 4 << 20),
    ("grpc.http2.lookahead_bytes", 8 << 20),
)

SERVICES = {
    name: service
    for file in (prefix_store_pb2, attend_pb2, ssm_state_pb2, stats_pb2)
    for name, service in file.DESCRIPTOR.services_by_name.items()
}
"""What the contract has, by name."""

ATTEND_OFF = "is switched off here: start the server with --attend auto and one worker"

_log = structlog.get_logger()


class Server:
    """One server process."""

    def __init__(self, config: Config, worker: Worker | None = None) -> None:
        """Opens the store and binds the address, without serving yet.

        Raises:
            CannotStart: with the reason and what to do.
        """
        self._config = config
        self._worker = worker
        try:
            passwords = config.access()
            access = Access(passwords)
        except ValueError as error:
            raise CannotStart(str(error)) from error
        check_exposure(config, passwords.get("", ""))
        certificates = certificates_of(config)
        os.umask(0o077)
        tune_allocator()
        tune_blas()
        files_max = raise_files_limit()
        backend = attend_backend(config)
        self._directory = DataDirectory(config.data)
        self.store = self._opened_store()
        self.states = RecurrentStates(self.store)
        self.attend: Attend | None = None
        if backend is not None:
            self.attend = Attend(
                backend, self.store, config.resident_budget, window=config.fa_window
            )
        self._attending = AttendService(self.attend) if self.attend else None
        self._permits = StreamPermits(config.streams_max, config.stall_ms)
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        conversations_max = config.streams_max if self.attend else 0
        self._pool = ThreadPoolExecutor(
            config.streams_max + conversations_max + UNARY_THREADS, thread_name_prefix="grpc"
        )
        credentials = Credentials(access)
        self._lobby = Lobby(config.stall_ms, UNARY_THREADS // 2)
        self._health_pool = ThreadPoolExecutor(HEALTH_THREADS, thread_name_prefix="health")
        doorman = Doorman(credentials, self._lobby, self._health_pool)
        options = dict(CHANNEL_OPTIONS)
        options["grpc.so_reuseport"] = int(worker is not None and worker.shares_grpc)
        self._server = grpc.server(
            self._pool, options=tuple(options.items()), interceptors=[doorman]
        )
        self._health = health.HealthServicer(experimental_thread_pool=self._health_pool)
        self._add_services(credentials)
        self.address = self._bind(config.grpc_address, certificates)
        self.resp = self._resp_server(access, files_max // 2)

    def start(self) -> None:
        """Begins to serve."""
        self._server.start()
        if self.resp is not None:
            self.resp.start()
        self._housekeeper = threading.Thread(target=self._keep_house, name="housekeeping")
        self._housekeeper.start()
        for name in self._services:
            off = name == SERVICES["Attend"].full_name and self.attend is None
            status = health_pb2.HealthCheckResponse
            self._health.set(name, status.NOT_SERVING if off else status.SERVING)
        self._log_losses()  # of those that were here before
        _log.info(
            "ready" if self._worker is None else "worker ready",
            **({} if self._worker is None else {"worker": self._worker.index}),
            grpc=self.address,
            **({"resp": self.resp.address} if self.resp is not None else {}),
            pid=os.getpid(),
            **({"tls": tls_kind(self._config)} if self._config.tls_cert is not None else {}),
            data=str(self._directory.path),
            version=__version__,
            attend=self.attend.backend.name if self.attend else "off",
        )

    def stop(self, drain_ms: int | None = None) -> None:
        """Stops in order; returns when everything is closed."""
        self._health.enter_graceful_shutdown()
        _log.info("draining")
        drain = self._config.drain_ms if drain_ms is None else drain_ms
        self._hurry.wait(drain / 1_000)
        if self.resp is not None:
            self.resp.stop()
        ended = self._server.stop(self._config.grace_ms / 1_000)
        if self._attending is not None:
            self._attending.end_streams()  # they last as long as their clients do
        while not ended.wait(HURRY_TICK_S):
            if self._hurry.is_set():
                self._server.stop(None).wait()
        self._stopping.set()
        self._housekeeper.join()
        if self.attend is not None:
            self.attend.close()
        self._log_losses()
        self._close_store()
        self._pool.shutdown(wait=False)
        self._health_pool.shutdown(wait=False)
        _log.info("stopped")

    def hurry(self) -> None:
        """Cuts the drain short, and the calls that still run."""
        self._hurry.set()

    def _opened_store(self) -> PrefixStore:
        try:
            return PrefixStore(
                self._directory,
                budget_bytes=self._config.disk_budget,
                tenant_budget_bytes=self._config.tenant_budget,
            )
        except (OSError, DiskFull, Busy) as error:
            self._directory.close()
            problem = error.strerror if isinstance(error, OSError) else error
            raise CannotStart(
                f"cannot use the data directory {self._config.data}: {problem}"
            ) from error
        except CannotStart:
            self._directory.close()
            raise

    def _close_store(self) -> None:
        try:
            self.store.close()
        except DiskFull as error:
            _log.warning(
                "stopped on a full disk; nothing is lost unless this machine loses its power",
                problem=str(error),
            )

    def _log_losses(self) -> None:
        lost = self.store.space.losses.report()
        if lost.evicted:
            _log.info("evicted", count=lost.evicted, prefixes=lost.evicted_names)
        if lost.ownerless:
            _log.info("files that nothing names removed", count=lost.ownerless)
        if lost.corrupt:
            _log.warning("damaged prefixes taken out", count=lost.corrupt, files=lost.corrupt_files)
        for problem in lost.troubles:
            _log.warning("file in trouble", problem=problem)

    def _add_services(self, credentials: Credentials) -> None:
        alone = self._config.workers == 1
        implementations = {
            "PrefixStore": PrefixStoreService(self.store, self._config, unix_ms(), self.attend),
            "Attend": self._attending or UnimplementedService(SERVICES["Attend"], ATTEND_OFF),
            "SSMState": SSMStateService(self.states, self._config),
            "Stats": StatsService(self.store.ledger if alone else self.store.receipt),
        }
        handlers = [
            service_handler(
                SERVICES[name],
                implementation,
                credentials,
                self._permits,
                LARGE_MESSAGES if name == "Attend" else SMALL_MESSAGES,
            )
            for name, implementation in implementations.items()
        ]
        self._server.add_generic_rpc_handlers(handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._services = ["", *(service.full_name for service in SERVICES.values())]
        reflection.enable_server_reflection(
            [*self._services[1:], health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )

    def _bind(self, listen: Address, certificates: Certificates | None) -> str:
        if self._worker is not None and not self._worker.serves_grpc(listen):
            return ""
        if listen.path:
            remove_dead_socket(Path(listen.path))
        try:
            if certificates is None:
                port = self._server.add_insecure_port(str(listen))
            else:
                port = self._server.add_secure_port(str(listen), certificates.credentials())
        except RuntimeError as error:
            self.store.close()
            raise CannotStart(f"cannot listen on {listen}: {_why_not(listen)}") from error
        return str(listen._replace(port=port))

    def _resp_server(self, access: Access, clients_max: int) -> RespServer | None:
        config = self._config
        listen = config.resp_address
        if listen is None:
            return None
        settings = RespSettings(
            listen=listen,
            sides_max=config.max_sessions,
            namespace_prefix=config.ns_prefix,
            memory_max=config.disk_budget,
            export=config.exports,
            logged=not config.no_wal,
            worker=self._worker.index if self._worker else 0,
            clients_max=min(CLIENTS_MAX, clients_max),
        )
        sockets = self._worker.resp if self._worker else None
        try:
            return RespServer(
                self.store, self.states, access, settings, self.attend, sockets=sockets
            )
        except CannotStart:
            self.store.close()
            raise

    def _keep_house(self) -> None:
        ticks, told = 0, ""
        while not self._stopping.wait(TICK_S):
            ticks += 1
            self._clear_lobby()
            try:
                self._log_losses()
                self.store.tick()
                if self.resp is not None:
                    self.resp.tick()
                cut = self._permits.cut_stalled()
                if cut:
                    _log.warning("streams cut off", count=cut, stall_ms=self._config.stall_ms)
                if ticks % CLEAN_EVERY_TICKS == 0:
                    self.store.clean()
            except PionError as error:
                if told != str(error):  # a full disk is none the emptier for being told each second
                    _log.warning("housekeeping failed", reason=error.reason, problem=str(error))
                told = str(error)
            except Exception:
                _log.exception("housekeeping failed")
            else:
                told = ""

    def _clear_lobby(self) -> None:
        """Cuts off who says nothing, over and over as long as others may stand in line."""
        cut = self._lobby.cut_stalled()
        for _ in range(CROWD_TICKS_MAX):  # housekeeping must go on as well
            if not self._lobby.crowded or self._stopping.wait(CROWD_TICK_S):
                break
            cut += self._lobby.cut_stalled()
        if cut:
            _log.warning("silent calls cut off", count=cut)


def serve(config: Config, worker: Worker | None = None) -> None:
    """Runs a server until SIGTERM or SIGINT, or the workers of one.

    Raises:
        CannotStart: with the reason and what to do.
    """
    if config.workers > 1 and worker is None:
        if config.attend == "auto":
            _log.info(f"attend is off: {ONE_OWNER}")
        sys.exit(supervise(config))
    server = Server(config, worker)
    signals = pipe_of_signals()
    server.start()
    if worker is not None:
        with contextlib.suppress(BrokenPipeError):  # no parent: a SIGTERM comes instead
            os.write(worker.ready, b"\1")
    os.read(signals, 1)

    def hurry_when_told_again() -> None:
        os.read(signals, 1)
        server.hurry()

    threading.Thread(target=hurry_when_told_again, name="hurry", daemon=True).start()
    limit_s = (config.drain_ms + config.grace_ms) / 1_000 + 20
    last_resort = threading.Timer(limit_s, os._exit, (1,))  # a handler hangs
    last_resort.daemon = True
    last_resort.start()
    status = 1
    try:
        server.stop()
        status = 0
    except Exception:
        _log.exception("stopped badly")
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)  # threads of libraries may linger; everything of ours is closed


def _why_not(listen: Address) -> str:
    """Says why an address cannot be listened on, by trying to: gRPC does not tell it."""
    try:
        bound(listen).close()
    except UNBOUND as error:
        return why_not_bound(listen, error)
    if listen.path:
        Path(listen.path).unlink(missing_ok=True)
    return "it is free now: try again"


def check_exposure(config: Config, password: str) -> None:
    """Raises CannotStart for an address beyond this host that anyone could use."""
    if password:
        return
    for listen, closed in (
        (config.grpc_address, config.knows_clients),
        (config.resp_address, False),
    ):
        if listen is None or closed or listen.is_local:
            continue
        if not config.insecure_bind:
            instead = (
                ""
                if listen == config.resp_address
                else "or have clients show a certificate (--tls-client-ca), "
            )
            raise CannotStart(
                f"{listen} can be reached from other hosts and no password is set: set PION_PASSWORD "
                f"or --password-file, {instead}or listen on 127.0.0.1; --insecure-bind overrides"
            )
        _log.warning("anyone who can reach this address may read and write", listen=str(listen))


def certificates_of(config: Config) -> Certificates | None:
    """Returns the certificates that a configuration names; None: no TLS.

    Raises:
        CannotStart: they cannot be used.
    """
    if config.tls_cert is None:
        return None
    return Certificates(CertificateFiles(config.tls_client_ca, config.tls_cert, config.tls_key))


def tls_kind(config: Config) -> str:
    """Returns what the log calls it."""
    return "mutual" if config.knows_clients else "server"


def attend_backend(config: Config) -> backends.Backend | None:
    """Returns what computes attention; None if it is switched off.

    Raises:
        CannotStart: what the configuration names is not installed.
    """
    if config.attend == "off" or config.workers > 1:
        return None
    try:
        return backends.create(config.attend, config.attend_dtype)
    except ImportError as error:
        raise CannotStart(
            f"--attend {config.attend}: {error}; install it, or choose numpy or off"
        ) from error
