"""A client of several nodes, of which some are not there: it waits for none of them for long."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from pion_client import Client
from pion_client.connection import CHANNEL_OPTIONS, RING_OPTIONS
from pion_client.errors import ClientClosed, Unavailable
from pion_client.ring import Ring
from pion_wire.blocks import pack_token_ids, route_key
from tests.client.links import assert_same, random_layers
from tests.client.test_client_fork import PROGRAM
from tests.conftest import ServerProcess

LAYERS = random_layers(17, 64)
MODEL = "m"


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


def test_nodes_that_are_all_gone_are_an_error(gone: str) -> None:
    with Client([gone, "127.0.0.1:1"], export=False) as client, pytest.raises(Unavailable):
        client.match(model=MODEL, token_ids=range(64))


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
