"""`nodes.toml`: the one small file that a mesh is made of, read and checked.

Knows the file's words and their defaults; nothing of proxies or init systems. The one decision: a node
is known in the ring by `address:server_port`, wherever its traffic goes, because that is what clients
that hash by themselves are given. Traffic between nodes can take another network; no prefix moves.

    [mesh]
    name = "shelf"              # in the certificates: its servers are node.shelf
    port = 50051                # where clients reach any node: its proxy
    server_port = 50052         # where proxies reach a node: its server

    [[node]]
    name = "mini-1"
    address = "10.0.10.1"       # for clients, and for proxies unless there is
    peer_address = "10.0.20.1"  # another way between the nodes, such as Thunderbolt
    serve = ["--disk-budget", "200GiB"]  # more flags of `pion-grpc serve`

What is written in `[mesh]` beside that holds for every node that does not say otherwise.
"""

import dataclasses
import ipaddress
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

System = Literal["macos", "linux"]

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_OWN_FLAGS = {"--data", "--listen", "--tls-cert", "--tls-key", "--tls-client-ca"}
NODES_MAX = 1_000


class BadMesh(ValueError):
    """The file does not describe a mesh; says where."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie on a node."""

    directory: str
    """What `mesh render` made for it."""
    data: str
    logs: str
    program: str
    envoy: str


PLACES: dict[System, Places] = {
    "macos": Places(
        "/usr/local/etc/pion-grpc",
        "/usr/local/var/pion-grpc",
        "/usr/local/var/log/pion-grpc",
        "/usr/local/opt/pion-grpc/bin/pion-grpc",
        "/usr/local/opt/pion-grpc/bin/envoy",
    ),
    "linux": Places(
        "/etc/pion-grpc",
        "/var/lib/pion-grpc",
        "/var/log/pion-grpc",
        "/opt/pion-grpc/bin/pion-grpc",
        "/opt/pion-grpc/bin/envoy",
    ),
}


@dataclass(frozen=True, slots=True)
class Node:
    """One machine: a server, and a proxy before it."""

    name: str
    address: str
    peer_address: str
    """What other nodes reach it by."""
    port: int
    server_port: int
    admin_port: int
    system: System
    user: str
    """Whose processes they are, in the system's domain."""
    places: Places
    serve: tuple[str, ...]

    @property
    def key(self) -> str:
        """Its name in the ring."""
        return hostport(self.address, self.server_port)

    @property
    def listen(self) -> str:
        """What its server listens on: one address, or all where it has two."""
        if self.peer_address == self.address:
            return self.key
        both = "[::]" if ":" in self.address + self.peer_address else "0.0.0.0"
        return f"{both}:{self.server_port}"


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh: its name, and its nodes in the order of the file."""

    name: str
    nodes: tuple[Node, ...]

    @property
    def server_name(self) -> str:
        """What every server's certificate says beside its addresses, and no client's does."""
        return f"node.{self.name}"


def read_mesh(path: Path) -> Mesh:
    """Reads a file.

    Raises:
        BadMesh: it cannot be read, or does not describe a mesh.
    """
    try:
        return parse_mesh(tomllib.loads(path.read_text()))
    except OSError as error:
        raise BadMesh(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BadMesh(f"{path}: {error}") from error


def parse_mesh(document: dict[str, Any]) -> Mesh:
    """Returns the mesh that a document describes; raises BadMesh."""
    _no_others("the file", document, {"mesh", "node"})
    shared = document.get("mesh", {})
    if not isinstance(shared, dict):
        raise BadMesh("there is one [mesh], a table of words")
    name = checked_name("[mesh] name", shared.get("name", "pion"))
    shared = {word: value for word, value in shared.items() if word != "name"}
    own = document.get("node", [])
    if not isinstance(own, list) or not 0 < len(own) <= NODES_MAX:
        raise BadMesh(f"there must be 1 to {NODES_MAX} [[node]]")
    if not all(isinstance(node, dict) for node in own):
        raise BadMesh("node is a list of tables, each under [[node]]")
    nodes = tuple(_node(f"[[node]] {number}", shared | node) for number, node in enumerate(own, 1))
    for what in ("name", "key"):
        seen = [getattr(node, what) for node in nodes]
        for value in seen:
            if seen.count(value) > 1:
                raise BadMesh(f"{seen.count(value)} nodes are {value}")
    _none_in_two_places(nodes)
    return Mesh(name, nodes)


def hostport(address: str, port: int) -> str:
    """Returns `host:port`, an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


_PLACES = {field.name for field in dataclasses.fields(Places)}
_WORDS = _PLACES | {"name", "address", "peer_address", "port", "server_port", "admin_port"}
_WORDS |= {"system", "user", "serve"}


def _node(where: str, words: dict[str, Any]) -> Node:
    _no_others(where, words, _WORDS)
    for word in ("name", "address"):
        if word not in words:
            raise BadMesh(f"{where}: {word} is missing")
    name = checked_name(f"{where} name", words["name"])
    if name in ("clients", "authority"):
        raise BadMesh(f"{where}: no node is called {name}: something else has that directory")
    where = f"node {name}"
    system = words.get("system", "macos")
    if system not in get_args(System):
        raise BadMesh(f"{where}: system is {' or '.join(get_args(System))}, not {system!r}")
    places = {word: _path(f"{where}: {word}", words[word]) for word in _PLACES & set(words)}
    serve = words.get("serve", [])
    if not isinstance(serve, list) or not all(isinstance(flag, str) for flag in serve):
        raise BadMesh(f'{where}: serve is a list of texts, such as ["--disk-budget", "200GiB"]')
    for flag in serve:
        if not flag.isprintable():
            raise BadMesh(
                f"{where}: serve: {flag!r} has a character that does not belong in a line"
            )
        if flag.partition("=")[0] in _OWN_FLAGS:
            raise BadMesh(f"{where}: serve: {flag} is made from the rest of the file")
    user = words.get("user", "_pion" if system == "macos" else "pion")
    if not isinstance(user, str) or not _USER.fullmatch(user):
        raise BadMesh(f"{where}: {user!r} is nobody's name on a machine")
    ports = {
        word: _port(f"{where}: {word}", words.get(word, default))
        for word, default in (("port", 50_051), ("server_port", 50_052), ("admin_port", 9_901))
    }
    if len(set(ports.values())) < len(ports):
        raise BadMesh(f"{where}: port, server_port and admin_port are three ports")
    address = _address(f"{where}: address", words["address"])
    peer = words.get("peer_address")
    return Node(
        name=name,
        address=address,
        peer_address=address if peer is None else _address(f"{where}: peer_address", peer),
        system=system,
        user=user,
        places=dataclasses.replace(PLACES[system], **places),
        serve=tuple(serve),
        **ports,
    )


def checked_name(where: str, value: Any) -> str:
    """Returns what may be the name of a directory, a host and a certificate; raises BadMesh."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise BadMesh(f"{where}: {value!r} is no name: small letters, digits and - make one")
    return value


def _none_in_two_places(nodes: tuple[Node, ...]) -> None:
    """Two nodes that share an address are on one machine: they share both, and no port.

    Proxies would reach one of them under the names of both, and nobody would notice.
    """
    machines: dict[str, Node] = {}
    taken: dict[tuple[str, int], Node] = {}
    for node in nodes:
        for address in dict.fromkeys((node.address, node.peer_address)):
            other = machines.setdefault(address, node)
            if (other.address, other.peer_address) != (node.address, node.peer_address):
                raise BadMesh(
                    f"{address} is an address of node {other.name} and of node {node.name}; "
                    "on one machine they would have the same address and the same peer_address"
                )
        for port in (node.port, node.server_port, node.admin_port):
            other = taken.setdefault((node.address, port), node)
            if other is not node:
                raise BadMesh(
                    f"nodes {other.name} and {node.name} are on one machine and both have port {port}"
                )


def _no_others(where: str, words: dict[str, Any], known: set[str]) -> None:
    for word in words:
        if word not in known:
            raise BadMesh(f"{where}: {word!r} is none of {', '.join(sorted(known))}")


def _address(where: str, value: Any) -> str:
    try:
        address = ipaddress.ip_address(str(value))
    except ValueError:
        raise BadMesh(f"{where}: {value!r} is no IP address; proxies ask no name server") from None
    if address.is_unspecified or address.is_multicast:
        raise BadMesh(f"{where}: nobody can be reached at {value}")
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            raise BadMesh(f"{where}: {value} is written {address.ipv4_mapped}")
        if address.scope_id is not None:
            raise BadMesh(f"{where}: {value}: proxies know no zones (%{address.scope_id})")
        if address.is_link_local:
            raise BadMesh(f"{where}: {value} is nowhere without a zone, and proxies know none")
    return str(address)


def _port(where: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 65_536:
        raise BadMesh(f"{where}: {value!r} is no port")
    return value


def _path(where: str, value: Any) -> str:
    if not isinstance(value, str) or not PurePosixPath(value).is_absolute():
        raise BadMesh(f"{where}: {value!r} is no absolute path")
    if not value.isprintable():
        raise BadMesh(f"{where}: {value!r} has a character that does not belong in a line")
    return str(PurePosixPath(value))
