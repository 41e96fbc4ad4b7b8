"""A client of several nodes, of which some are not there: it waits for none of them for long."""

import dataclasses
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from pion_client import Client
from pion_client.connection import CHANNEL_OPTIONS, RING_OPTIONS, Connection
from pion_client.errors import ClientClosed, InvalidRequest, Unavailable
from pion_client.nodes import ROUTE, Health, direct
from pion_client.ring import Ring
from pion_client.together import descriptions
from pion_wire.blocks import pack_token_ids, route_key
from tests.client.links import assert_same, random_layers
from tests.client.test_client_fork import PROGRAM
from tests.conftest import ServerProcess

LAYERS = random_layers(17, 64)
MODEL = "m"
LOOPBACK = "127.0.0.1:0"


@pytest.fixture
def live(start_server) -> ServerProcess:
    node: ServerProcess = start_server("--attend", "off", listen="127.0.0.1:0")
    return node


@pytest.fixture(params=["refuses", "says nothing", "takes nobody"])
def gone(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a node that is not there, in one of the ways that there are."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        held = []
        if request.param != "refuses":
            bound.listen(64 if request.param == "says nothing" else 0)
        if request.param == "takes nobody":  # as a machine that is switched off
            for _ in range(3):
                held.append(socket.socket())
                held[-1].setblocking(False)
                held[-1].connect_ex(bound.getsockname())
        yield address
        for one in held:
            one.close()


def ids_of(nodes: list[str], node: str) -> list[list[int]]:
    """Token ids that belong to a node while all are up."""
    ring = Ring(nodes)
    many = [[number] * 64 for number in range(200)]
    return [ids for ids in many if ring.node(route_key("", MODEL, pack_token_ids(ids))) == node]


def test_a_node_that_is_not_there_is_not_waited_for(live: ServerProcess, gone: str) -> None:
    nodes = [live.address, gone]
    lost = ids_of(nodes, gone)[:20]
    assert len(lost) == 20
    with Client(nodes, export=False) as client:
        began = time.monotonic()
        for number, ids in enumerate(lost):
            client.store(f"lost/{number}", layers=LAYERS, token_ids=ids, model=MODEL)
            fetched = client.fetch(f"lost/{number}")
            assert fetched is not None
            assert_same(fetched.layers, LAYERS)
        assert time.monotonic() - began < 20, "what is not there is tried, but not with every call"
        assert client.match(model=MODEL, token_ids=lost[0]).hit


@pytest.mark.soak
def test_a_node_that_falls_silent_is_left_out(
    live: ServerProcess, start_server: Callable[..., ServerProcess], short_tmp: Path
) -> None:
    silent = start_server("--attend", "off", directory=short_tmp / "silent", listen=LOOPBACK)
    nodes = [live.address, silent.address]
    lost = ids_of(nodes, silent.address)[0]
    with Client(nodes, export=False) as client:
        client.store("lost", layers=LAYERS, token_ids=lost, model=MODEL)
        assert client.match(model=MODEL, token_ids=lost).hit
        with silent.frozen():
            assert not client.match(model=MODEL, token_ids=lost, timeout_s=50.0).hit
            client.store("lost", layers=LAYERS, token_ids=lost, model=MODEL)
            assert client.match(model=MODEL, token_ids=lost).hit, "the other one stands in"


def test_nodes_that_are_all_gone_are_an_error(gone: str) -> None:
    with Client([gone, "127.0.0.1:1"], export=False) as client, pytest.raises(Unavailable):
        client.match(model=MODEL, token_ids=range(64))


def test_what_is_asked_about_all_nodes_is_not_answered_by_one(
    start_server: Callable[..., ServerProcess], short_tmp: Path
) -> None:
    flags = [("--attend", "off"), ("--attend", "numpy", "--no-export")]
    servers = [
        start_server(*own, "--disk-budget", "1GiB", directory=short_tmp / own[1], listen=LOOPBACK)
        for own in flags
    ]
    nodes = [server.address for server in servers]
    prompts = [ids for node in nodes for ids in ids_of(nodes, node)[:5]]
    with Client(nodes, export=False) as client:
        for number, ids in enumerate(prompts):
            client.store(f"n/{number}", layers=LAYERS, token_ids=ids, model=MODEL)
            assert client.match(model=MODEL, token_ids=ids, lease_ms=0).hit
            client.fetch(f"n/{number}")
        server = client.describe()
        assert (server.prefix_count, server.row_count) == (10, 640)
        assert server.disk_budget_bytes == 2 << 30
        assert (server.attend_backend, server.export_enabled) == ("", False), "not all of them can"
        client.sync()
        for expected in (client.stats(), client.reset_stats()):
            assert (expected.hits, expected.tokens_served) == (10, 640)
        assert client.stats().hits == 0
    for node in nodes:
        with Client(node) as client:
            assert client.describe().prefix_count == 5
            assert client.stats().hits == 0, "it has not been reset"


def test_nobody_answers_for_a_node_that_is_away(live: ServerProcess) -> None:
    with Client([live.address, "127.0.0.1:1"], timeout_s=0.5) as client:
        for _ in range(2):  # also when it is known to be away
            for ask in (client.describe, client.stats, client.reset_stats, client.sync):
                with pytest.raises(Unavailable):
                    ask()


def test_what_differs_between_nodes_is_not_hidden(live: ServerProcess) -> None:
    with Client(live.address) as client:
        one = client.describe()
    lesser = {name: value - 1 for name, value in one.limits.items()}
    other = dataclasses.replace(
        one,
        version="other",
        codecs=one.codecs[1:],
        limits=lesser,
        attend_backend="mlx",
        tenant_budget_bytes=5,
    )
    both = descriptions([dataclasses.replace(one, attend_backend="numpy"), other, other])
    assert both.version == f"{one.version}, other"
    assert (both.codecs, both.limits) == (one.codecs[1:], lesser)
    assert both.attend_backend == "numpy, mlx"
    assert both.tenant_budget_bytes == 0, "one has no quota"
    assert descriptions([other, other]).tenant_budget_bytes == 10
    assert descriptions([one]) == one


def test_no_name_is_more_than_the_metadata_of_a_call_holds(live: ServerProcess) -> None:
    long = "ß" * 50_000
    with Client(live.address, export=False) as client:
        assert list(client.list(long)) == []
        for ask in (client.lookup, client.fetch, client.drop, client.blocks):
            with pytest.raises(InvalidRequest):
                ask(long)


def test_no_name_is_taken_for_a_node() -> None:
    node = Health(["a:1", "b:2"]).node
    assert node(dict(Connection("a:1").metadata(direct("b:2")))[ROUTE]) == "b:2"
    ring = Ring(["a:1", "b:2"])
    for name in ("b:2", "%00b:2", "%2500b:2"):
        route = dict(Connection("a:1").metadata(name))[ROUTE]
        assert node(route) == ring.node(route)


def test_a_closed_client_calls_no_node(live: ServerProcess) -> None:
    client = Client([live.address, "127.0.0.1:1"], export=False)
    client.list()
    client.close()
    with pytest.raises(ClientClosed):
        client.lookup("x")


def test_a_child_does_not_use_its_parents_nodes(live: ServerProcess) -> None:
    with Client(live.address) as client:
        client.store("name", layers=LAYERS, token_ids=range(64), model=MODEL)
    program = """
        client = Client(f"{address},127.0.0.1:1", export=False)
        print(fetched(client))
        print(in_child(lambda: fetched(client)))
        print(fetched(client))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM) + textwrap.dedent(program), live.address],
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
        text=True,
    )
    first, forked, last = done.stdout.splitlines()
    assert first == last == "stream 64"
    assert forked in ("stream 64", "Forked")


def test_no_option_is_given_twice_or_ignored_for_its_name() -> None:
    core = Path(cygrpc.__file__).read_bytes()
    names = [name for name, _ in (*CHANNEL_OPTIONS, *RING_OPTIONS)]
    assert len(set(names)) == len(names)
    for name in names:
        assert name.encode() + b"\0" in core
