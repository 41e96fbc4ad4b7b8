"""The proxy of a node: Envoy's configuration, as the JSON objects that it reads.

Knows Envoy's words; nothing of files but their names. What a call meets here: mutual TLS, a ring over
`pion-route`, mutual TLS again, and the server of the node it belongs to.

The one decision: the size of the ring and its nodes are one file, `clusters.json`, which Envoy watches.
The size is a total. If it stayed as it was while a node joined, every node's share of the points would
change, and nearly half of all keys would move instead of one in N (measured with a fourth node: 46 %
against 25 %, all of them to the new one). So both change in one step, and nothing is started anew.

Left as it is on purpose: no deadline of the proxy's own (a stream of 16 GiB takes its time; the client's
deadline and the server's own watch end what hangs), no compression, no access log.
"""

from typing import Any

from pion_client.ring import POINTS_PER_NODE
from pion_grpc.cli.mesh.nodes import Mesh, Node

Json = dict[str, Any]

CLUSTER = "pion"
HEALTH_MS = 500
"""How often a node is asked whether it serves. A node that says no gets nothing more at once."""
DRAIN_MS = 3_000
"""How long a server that was told to stop says so before it refuses calls: several health checks."""
CONNECT_S = 1
WINDOW_BYTES = 16 << 20
"""Of a stream: what a fast link can have in flight."""
BUFFER_BYTES = 4 << 20
"""Of a connection: what is read ahead of a slow reader."""

CONNECTIONS_MAX = 10_000
"""From clients, at once."""

READS = {
    "PrefixStore": ("Lookup", "Match", "Fetch", "Export", "List", "Blocks", "Membership"),
    "SSMState": ("Fetch", "Export"),
    "Stats": ("Get",),
}
"""Calls that change nothing: what failed before an answer began may be asked of another node."""
_NOT_BEGUN = "connect-failure,refused-stream,reset-before-request"
"""The node has not seen the call: it may be made elsewhere, whatever it does."""

_TYPE = "type.googleapis.com/envoy."
_CLUSTER_TYPE = f"{_TYPE}config.cluster.v3.Cluster"
_SECRET_TYPE = f"{_TYPE}extensions.transport_sockets.tls.v3.Secret"


def bootstrap(mesh: Mesh, node: Node) -> Json:
    """`envoy.json`: what Envoy starts with. Changes of it need a restart; those of the others do not."""
    return {
        "node": {"id": node.name, "cluster": mesh.name},
        "admin": {"address": _socket("127.0.0.1", node.admin_port)},
        "dynamic_resources": {"cds_config": _file(node, "clusters.json")},
        "static_resources": {"listeners": [_listener(node)]},
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": (
                            f"{_TYPE}extensions.resource_monitors.downstream_connections.v3"
                            ".DownstreamConnectionsConfig"
                        ),
                        "max_active_downstream_connections": CONNECTIONS_MAX,
                    },
                }
            ]
        },
    }


def clusters(mesh: Mesh, node: Node) -> Json:
    """`clusters.json`: the nodes, the size of the ring, and how a node is told to be well."""
    cluster = {
        "@type": _CLUSTER_TYPE,
        "name": CLUSTER,
        "type": "STATIC",
        "connect_timeout": f"{CONNECT_S}s",
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "lb_policy": "RING_HASH",
        "ring_hash_lb_config": {
            "hash_function": "XX_HASH",
            "minimum_ring_size": POINTS_PER_NODE * len(mesh.nodes),
            "maximum_ring_size": 8 << 20,
        },
        "common_lb_config": {
            # Otherwise what health checks find reaches the ring a second late, or at start not at all.
            "update_merge_window": "0s",
            # Nobody is sent to nodes that are down for want of ones that are up.
            "healthy_panic_threshold": {"value": 0},
        },
        "health_checks": [_health_check()],
        "outlier_detection": _outlier_detection(),
        "circuit_breakers": {"thresholds": [_thresholds("DEFAULT"), _thresholds("HIGH")]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_TYPE}extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {
                    # Pings find a machine that went without a word. The server takes them.
                    "http2_protocol_options": _http2(interval_s=10, timeout_s=10)
                },
            }
        },
        "transport_socket": _upstream_tls(mesh, node),
        "load_assignment": {
            "cluster_name": CLUSTER,
            "endpoints": [{"lb_endpoints": [_endpoint(node, other) for other in mesh.nodes]}],
        },
    }
    return _resources(cluster)


def secrets(mesh: Mesh, node: Node) -> dict[str, Json]:
    """The secrets by name: which files certificates are. They are read anew when those are replaced."""
    tls = f"{node.places.directory}/tls"
    watched = {"path": tls}
    own = {
        "certificate_chain": {"filename": f"{tls}/node.pem"},
        "private_key": {"filename": f"{tls}/node.key"},
        "watched_directory": watched,
    }
    clients: Json = {"trusted_ca": {"filename": f"{tls}/ca.pem"}, "watched_directory": watched}
    servers = clients | {
        "match_typed_subject_alt_names": [
            {"san_type": "DNS", "matcher": {"exact": mesh.server_name}}
        ]
    }
    contents = {
        "own": {"tls_certificate": own},
        "clients": {"validation_context": clients},
        "servers": {"validation_context": servers},
    }
    return {
        name: _resources({"@type": _SECRET_TYPE, "name": name} | content)
        for name, content in contents.items()
    }


def _listener(node: Node) -> Json:
    manager = {
        "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "pion",
        "codec_type": "HTTP2",
        "http2_protocol_options": _http2(interval_s=30, timeout_s=20),
        # Streams live as long as they do something; whoever serves them watches that.
        "stream_idle_timeout": "0s",
        "request_timeout": "0s",
        "drain_timeout": "10s",
        "route_config": {
            "name": "pion",
            "validate_clusters": False,  # the one there is comes from the file
            "virtual_hosts": [{"name": "pion", "domains": ["*"], "routes": _routes()}],
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": f"{_TYPE}extensions.filters.http.router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            }
        ],
    }
    return {
        "name": "pion",
        "address": _socket(node.address, node.port),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": manager,
                    }
                ],
                "transport_socket": {
                    "name": "envoy.transport_sockets.tls",
                    "typed_config": {
                        "@type": (
                            f"{_TYPE}extensions.transport_sockets.tls.v3.DownstreamTlsContext"
                        ),
                        "require_client_certificate": True,
                        "common_tls_context": _tls_context(node, "clients"),
                    },
                },
            }
        ],
    }


def _routes() -> list[Json]:
    reads = [
        {"match": {"path": f"/pion.v1.{service}/{method}"}, "route": _route(reads=True)}
        for service, methods in READS.items()
        for method in methods
    ]
    return [*reads, {"match": {"prefix": "/"}, "route": _route(reads=False)}]


def _route(*, reads: bool) -> Json:
    return {
        "cluster": CLUSTER,
        "timeout": "0s",
        "idle_timeout": "0s",
        "hash_policy": [{"header": {"header_name": "pion-route"}}],
        "retry_policy": {
            "retry_on": f"{_NOT_BEGUN},reset" if reads else _NOT_BEGUN,
            "num_retries": 2,
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": {
                        "@type": (
                            f"{_TYPE}extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                        )
                    },
                }
            ],
            # The next points of the ring may be the same node's: so many of them are passed over.
            "host_selection_retry_max_attempts": 64,
            "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.1s"},
        },
    }


def _endpoint(node: Node, other: Node) -> Json:
    address = other.address if other.name == node.name else other.peer_address
    return {
        "endpoint": {"address": _socket(address, other.server_port)},
        "metadata": {"filter_metadata": {"envoy.lb": {"hash_key": other.key}}},
    }


def _health_check() -> Json:
    return {
        "timeout": "1s",
        "interval": f"{HEALTH_MS / 1_000}s",
        # A minute without traffic otherwise passes before a node is looked at again.
        "no_traffic_interval": f"{HEALTH_MS / 1_000}s",
        # Of checks that fail; an answer of NOT_SERVING counts at once.
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": "pion.v1.PrefixStore"},
    }


def _outlier_detection() -> Json:
    """Who cannot be reached twice in a row is left out at once, and not only after the next checks.

    A large upload cannot be kept to be sent again by the proxy, so its client sends it again: when it
    does, the node must be known to be gone. Nothing that a server answers counts: those are its own
    words.
    """
    answers = ["consecutive_5xx", "consecutive_gateway_failure", "success_rate"]
    answers += ["local_origin_success_rate", "failure_percentage"]
    return {
        "split_external_local_origin_errors": True,
        "consecutive_local_origin_failure": 2,
        "base_ejection_time": "1s",
        "max_ejection_time": "4s",
        "max_ejection_percent": 50,
        "interval": "1s",
    } | {f"enforcing_{kind}": 0 for kind in answers}


def _thresholds(priority: str) -> Json:
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"priority": priority} | dict.fromkeys(limits, 8_192)


def _http2(*, interval_s: int, timeout_s: int) -> Json:
    return {
        "initial_stream_window_size": WINDOW_BYTES,
        "initial_connection_window_size": 4 * WINDOW_BYTES,
        "max_concurrent_streams": 2_048,
        "connection_keepalive": {"interval": f"{interval_s}s", "timeout": f"{timeout_s}s"},
    }


def _upstream_tls(mesh: Mesh, node: Node) -> Json:
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": f"{_TYPE}extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "sni": mesh.server_name,
            "common_tls_context": _tls_context(node, "servers") | {"alpn_protocols": ["h2"]},
        },
    }


def _tls_context(node: Node, trusted: str) -> Json:
    def secret(name: str) -> Json:
        return {"name": name, "sds_config": _file(node, f"secret-{name}.json")}

    return {
        "tls_params": {
            "tls_minimum_protocol_version": "TLSv1_2",
            "tls_maximum_protocol_version": "TLSv1_3",
        },
        "tls_certificate_sds_secret_configs": [secret("own")],
        "validation_context_sds_secret_config": secret(trusted),
        "alpn_protocols": ["h2"],
    }


def _file(node: Node, name: str) -> Json:
    directory = node.places.directory
    return {
        "resource_api_version": "V3",
        "path_config_source": {
            "path": f"{directory}/{name}",
            "watched_directory": {"path": directory},
        },
    }


def _socket(address: str, port: int) -> Json:
    return {"socket_address": {"address": address, "port_value": port}}


def _resources(*resources: Json) -> Json:
    return {"resources": list(resources)}
