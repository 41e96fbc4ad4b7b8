"""`pion-grpc mesh`: from `nodes.toml` to a directory per node, to be copied to it.

    OUT/mini-1/envoy.json, clusters.json, secret-*.json    Envoy's configuration
              /systemd/*.service or /launchd/*.plist       what starts server and proxy
              /tls/ca.pem, node.pem, node.key              made by `certs`, or put there
       /clients/nodes.txt                                  for clients that hash by themselves
       /clients/<name>/ca.pem, client.pem, client.key      made by `certs --client <name>`
       /authority/ca.pem, ca.key                           made by `certs`; goes to no node

The one decision: a file whose content has not changed is left alone, and one that has is replaced as a
whole, so that the command may be run at any time, also into directories that Envoys watch.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from pion_grpc.cli import output
from pion_grpc.cli.arguments import add_serve
from pion_grpc.cli.failure import CommandFailed
from pion_grpc.cli.mesh import envoy, services
from pion_grpc.cli.mesh.nodes import BadMesh, Mesh, Node, checked_name, read_mesh
from pion_grpc.cli.mesh.writing import write


def render(options: argparse.Namespace) -> int:
    """Runs `mesh render`."""
    mesh = _mesh(options)
    changed = [
        str(path) for path, data in rendered(mesh) if write(options.out / path, data, mode=0o644)
    ]
    missing = [
        node.name for node in mesh.nodes if not (options.out / node.name / "tls/node.pem").exists()
    ]
    if options.json:
        print(json.dumps({"changed": changed, "without_certificate": missing}, indent=2))
        return 0
    console = output.console()
    for path in changed:
        console.print(f"{options.out}/{path}", highlight=False)
    new = output.counted(len(changed), "file is", "files are")
    console.print(f"{new} new, of {output.counted(len(mesh.nodes), 'node', 'nodes')}")
    if missing:
        console.print(
            f"without a certificate yet: {', '.join(missing)}. Make them with `pion-grpc mesh certs`, "
            "or put your own into <node>/tls/: ca.pem, node.pem and node.key"
        )
    return 0


def certs(options: argparse.Namespace) -> int:
    """Runs `mesh certs`."""
    try:
        from pion_grpc.cli.mesh import certificates
    except ImportError as error:
        raise CommandFailed(
            "making certificates needs the extra `mesh`: pip install cryptography",
            reason="NOT_INSTALLED",
        ) from error
    mesh, out = _mesh(options), options.out
    try:
        for name in options.client:
            checked_name("--client", name)
    except BadMesh as error:
        raise CommandFailed(str(error), reason="INVALID") from error
    authority = certificates.authority_in(out / "authority", mesh)
    signed = [
        certificates.sign(
            authority,
            out / node.name / "tls",
            node.name,
            certificates.node_names(mesh, node),
            stem="node",
            days=options.days,
            renew=options.renew,
        )
        for node in mesh.nodes
    ]
    signed += [
        certificates.sign(
            authority,
            out / "clients" / name,
            name,
            [],
            stem="client",
            days=options.days,
            renew=options.renew,
        )
        for name in options.client
    ]
    if options.json:
        shown = [
            {"name": one.name, "directory": str(one.directory), "new": one.is_new}
            | {"until": one.until.isoformat()}
            for one in signed
        ]
        print(json.dumps({"authority": str(out / "authority"), "certificates": shown}, indent=2))
        return 0
    console = output.console()
    for one in signed:
        state = "new" if one.is_new else "kept"
        console.print(
            f"{one.directory}: {state}, valid until {one.until:%Y-%m-%d}", highlight=False
        )
    console.print(f"whoever has {out}/authority/ca.key can let anyone in: it goes to no node")
    return 0


def rendered(mesh: Mesh) -> Iterator[tuple[Path, bytes]]:
    """Yields every file but the certificates, by its path below the output directory."""
    for node in mesh.nodes:
        directory = Path(node.name)
        yield directory / "envoy.json", _json(envoy.bootstrap(mesh, node))
        yield directory / "clusters.json", _json(envoy.clusters(mesh, node))
        for name, secret in envoy.secrets(mesh, node).items():
            yield directory / f"secret-{name}.json", _json(secret)
        for name, data in _services(mesh, node):
            yield directory / name, data
    yield Path("clients/nodes.txt"), "".join(f"{node.key}\n" for node in mesh.nodes).encode()


def _services(mesh: Mesh, node: Node) -> Iterator[tuple[str, bytes]]:
    if node.system == "linux":
        yield "systemd/pion-grpc.service", services.server_unit(mesh, node).encode()
        yield "systemd/pion-envoy.service", services.envoy_unit(mesh, node).encode()
        return
    for label, command in (
        (services.SERVER_LABEL, services.server_command(node)),
        (services.ENVOY_LABEL, services.envoy_command(node)),
    ):
        yield f"launchd/{label}.plist", services.launchd(label, command, node)


def _mesh(options: argparse.Namespace) -> Mesh:
    try:
        mesh = read_mesh(options.nodes)
        for node in mesh.nodes:
            _check_flags(options.nodes, node)
    except BadMesh as error:
        raise CommandFailed(str(error), reason="INVALID") from error
    return mesh


class _Flags(argparse.ArgumentParser):
    """A parser of words that stand in a file: what is wrong with them is wrong with that."""

    def error(self, message: str) -> NoReturn:
        raise BadMesh(message)

    def print_help(self, file: object = None) -> NoReturn:
        raise BadMesh("a server that shows its help does not serve")


def _check_flags(path: Path, node: Node) -> None:
    """Refuses what the server of a node would refuse: there, it would be started again and again."""
    parser = _Flags(allow_abbrev=False)
    add_serve(parser.add_subparsers())
    try:
        parser.parse_args(services.server_command(node)[1:])
    except BadMesh as error:
        raise BadMesh(f"{path}: node {node.name}: serve: {error}") from error


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()
