"""What starts a node's two processes: units of systemd, property lists of launchd.

Knows both formats and what the processes need of them; not what is in their configuration. Both run as a
user of their own, come back when they fail, stay down when they were stopped, and are given the time
that the server takes to end what runs.
"""

import plistlib
from typing import Any

from pion_grpc.cli.mesh.envoy import DRAIN_MS
from pion_grpc.cli.mesh.nodes import Mesh, Node

SERVER_LABEL = "org.pion-grpc.server"
ENVOY_LABEL = "org.pion-grpc.envoy"
STOP_S = 40
"""A server is gone after its drain, 10 s for what runs, and 20 to close, at the latest."""
ENVOY_DRAIN_S = 10
FILES_MAX = 65_536
"""Descriptors: one per file of each stream; chains have up to 32 files."""


def server_command(node: Node) -> list[str]:
    """The server's command line."""
    tls = f"{node.places.directory}/tls"
    return [
        node.places.program,
        "serve",
        *("--data", node.places.data),
        *("--listen", node.listen),
        *("--tls-cert", f"{tls}/node.pem"),
        *("--tls-key", f"{tls}/node.key"),
        *("--tls-client-ca", f"{tls}/ca.pem"),
        *("--drain-ms", str(DRAIN_MS)),
        *node.serve,
    ]


def envoy_command(node: Node) -> list[str]:
    """The proxy's command line."""
    return [
        node.places.envoy,
        *("--config-path", f"{node.places.directory}/envoy.json"),
        "--disable-hot-restart",  # it would share memory with every other Envoy of the machine
        *("--drain-time-s", str(ENVOY_DRAIN_S)),
    ]


def launchd(label: str, command: list[str], node: Node) -> bytes:
    """A daemon of the system's domain, `/Library/LaunchDaemons/<label>.plist`."""
    log = f"{node.places.logs}/{label.rpartition('.')[2]}.log"
    limits = {"NumberOfFiles": FILES_MAX}
    job: dict[str, Any] = {
        "Label": label,
        "ProgramArguments": command,
        "UserName": node.user,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 5,
        "ExitTimeOut": STOP_S,
        "ProcessType": "Interactive",  # others are throttled when somebody uses the machine
        "Umask": 0o077,
        "SoftResourceLimits": limits,
        "HardResourceLimits": limits,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return plistlib.dumps(job, sort_keys=False)


def server_unit(mesh: Mesh, node: Node) -> str:
    """`pion-grpc.service`, a unit of the system's manager."""
    return _unit(
        f"pion-grpc: server {node.name} of the mesh {mesh.name}",
        server_command(node),
        node,
        [f"ReadWritePaths={_quoted(node.places.data)}"],
    )


def envoy_unit(mesh: Mesh, node: Node) -> str:
    """`pion-envoy.service`. It tells its clients to go before it goes itself."""
    drain = f"http://127.0.0.1:{node.admin_port}/drain_listeners?graceful"
    return _unit(
        f"pion-grpc: proxy {node.name} of the mesh {mesh.name}",
        envoy_command(node),
        node,
        [
            f"ExecStop=-/usr/bin/env curl --silent --fail --request POST {drain}",
            f"ExecStop=-/usr/bin/env sleep {ENVOY_DRAIN_S}",
        ],
    )


def _unit(description: str, command: list[str], node: Node, more: list[str]) -> str:
    return "\n".join(
        [
            "[Unit]",
            f"Description={description}",
            "Wants=network-online.target",
            "After=network-online.target",
            # An address may come late, after a cable for instance: it is never given up.
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={' '.join(map(_quoted, command))}",
            f"User={node.user}",
            "Restart=on-failure",
            "RestartSec=1",
            f"TimeoutStopSec={STOP_S}",
            "KillMode=mixed",
            "UMask=0077",
            f"LimitNOFILE={FILES_MAX}",
            "NoNewPrivileges=yes",
            "PrivateTmp=yes",
            "ProtectHome=yes",
            "ProtectSystem=strict",
            *more,
            "",
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        ]
    )


def _quoted(argument: str) -> str:
    """One word of a command line, as systemd reads it."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"')
    escaped = escaped.replace("%", "%%").replace("$", "$$")
    plain = escaped and not set(escaped) & set(" \t'\"\\;")
    return escaped if plain else f'"{escaped}"'
