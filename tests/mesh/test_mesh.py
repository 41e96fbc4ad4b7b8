"""A real mesh: three servers, real Envoys, mutual TLS on every connection."""

import base64
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from pion_client import (
    BlockTable,
    Client,
    DType,
    Layout,
    Side,
    TensorLayout,
    Tls,
    errors,
)
from pion_client.ring import Ring
from pion_grpc.cli.main import main
from pion_wire.blocks import pack_token_ids, route_key
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import prefix_store_pb2_grpc
from tests.authorities import Authority
from tests.client.links import assert_same, random_layers
from tests.mesh.prompts import MODEL, Prompt, by_node, prompts
from tests.mesh.shelf import PASSWORD, Shelf
from tests.server.wire import eventually

MANY = prompts(1_000)
BASIC = base64.b64encode(f":{PASSWORD}".encode()).decode()
LARGE = random_layers(3, 8_000, slots=8, heads=4, dim=64)
"""65 MB."""


@pytest.fixture(scope="module")
def stored(shelf: Shelf) -> Shelf:
    """The mesh, with a thousand prefixes that were stored through a proxy."""
    with shelf.client() as client:
        for prompt in MANY:
            prompt.store(client)
    return shelf


def test_of_a_thousand_none_is_lost_or_in_two_places(stored: Shelf) -> None:
    expected = by_node(Ring(stored.keys), MANY)
    assert len(expected) == 3
    for name in "abc":
        assert stored.holds(name) == expected[stored.node(name).key]
    with stored.client() as client:
        assert all(prompt.fetched(client) for prompt in MANY)


@pytest.mark.parametrize("who", ["another proxy", "no proxy", "no proxy, nodes in another order"])
def test_nobody_looks_for_a_prefix_in_another_place(stored: Shelf, who: str) -> None:
    clients = {
        "another proxy": lambda: stored.client("b"),
        "no proxy": stored.hashing,
        "no proxy, nodes in another order": lambda: stored.hashing(backwards=True),
    }
    with clients[who]() as client:
        assert all(prompt.matches(client) for prompt in MANY)
        assert all(prompt.fetched(client) for prompt in MANY[:100])


def test_a_client_of_all_nodes_misses_no_name(stored: Shelf) -> None:
    with stored.hashing() as stranger:
        assert [info.namespace for info in stranger.list("prompt/")] == sorted(p.name for p in MANY)
        for prompt in MANY[:50]:
            assert prompt.is_whole(stranger.fetch(prompt.name)), "it knows nothing but the name"
        for prompt in MANY[50:100]:
            assert stranger.lookup(prompt.name).hit
        assert stranger.fetch("nobody's") is None
        some = prompts(9, first=7_000)
        for prompt in some:
            prompt.store(stranger)
    with stored.hashing() as stranger:
        names = [prompt.name for prompt in some]
        assert stranger.drop(*names, "nobody's") == [True] * 9 + [False]
        assert not {info.namespace for info in stranger.list("prompt/7")} & set(names)


def test_what_is_asked_of_all_nodes_is_not_answered_by_one(stored: Shelf) -> None:
    table = BlockTable(64, [1, 2, 3])
    layout = Layout(tuple(TensorLayout(0, side, 1, 4, DType.F16) for side in Side))
    ring = Ring(stored.keys)
    many = [f"table/{number}" for number in range(500)]
    names = [name for key in stored.keys for name in [n for n in many if ring.node(n) == key][:4]]
    with stored.hashing() as client:
        for name in names:
            client.register(name, layout=layout, table=table)
            client.write_rows(name, slot=0, side="k", first_row=0, rows=np.ones((1, 1, 4), "f2"))
            client.write_rows(name, slot=0, side="v", first_row=0, rows=np.ones((1, 1, 4), "f2"))
        assert all(stored.holds(name) & set(names) for name in "abc")
    with stored.hashing() as stranger:
        found = stranger.membership([*names, "nobody's"], [3, 4])
        assert [list(one) if one is not None else None for one in found] == [[True, False]] * 12 + [
            None
        ]
        assert stranger.save() == 12
        stranger.sync()
        assert stranger.drop(*names) == [True] * 12


def test_who_has_stored_a_prefix_needs_no_more_than_its_name(stored: Shelf) -> None:
    some = prompts(300, first=8_000)
    with stored.client() as client:
        for prompt in some:
            prompt.store(client)
        for prompt in some:
            assert prompt.is_whole(client.fetch(prompt.name))
        assert all(client.drop(prompt.name) == [True] for prompt in some)


def test_a_certificate_is_no_password(stored: Shelf) -> None:
    for address in (f"127.0.0.1:{stored.node('a').port}", stored.node("a").key, stored.keys):
        client = stored.client_of(address, password="wrong")
        with client, pytest.raises(errors.NotAuthenticated):
            client.fetch(MANY[0].name)


def test_attention_is_not_computed_from_another_nodes_rows(stored: Shelf) -> None:
    some = [of_node(stored, name, 1)[0] for name in "abc"]
    random = np.random.default_rng(2)
    layers = [(random.normal(size=(2, 64, 8)).astype("f4"),) * 2 for _ in some]
    for who in (stored.client, stored.hashing):
        with who() as client:
            for prompt, pair in zip(some, layers, strict=True):
                name, query = f"attend/{prompt.number}", np.ones((2, 8), np.float32)
                ids = [*prompt.token_ids, *range(48)]
                client.store(name, layers=[pair], token_ids=ids, model=MODEL, replace=True)
                client.warm(name)
                answer = client.attend_query(name, 0, query)
                assert client.attend_lane == "stream"
                np.testing.assert_allclose(answer, attention(query, *pair), rtol=1e-4, atol=1e-5)
                client.drop(name)


def test_a_session_is_not_lost_when_a_prefix_has_its_name(stored: Shelf) -> None:
    """Of twelve names at least one belongs to another node than the tokens, or the test says nothing."""
    ring = Ring(stored.keys)
    some = prompts(12, first=9_000)
    assert any(ring.node(prompt.name) != ring.node(prompt.route) for prompt in some)
    pair = np.ones((1, 4, 8), np.float32), np.ones((1, 4, 8), np.float32)
    for who in (stored.client, stored.hashing):
        with who() as client, who() as stranger:
            for prompt in some:
                client.states.store(prompt.name, 0, b"state")
                client.attend_store(prompt.name, 0, *pair)
                prompt.store(client)
                assert prompt.matches(client)
                assert prompt.fetched(client)
                assert client.states.fetch(prompt.name, 0) is not None
                assert client.attend_query(prompt.name, 0, np.ones((1, 8), np.float32)).any()
                assert stranger.states.fetch(prompt.name, 0) is not None
                assert client.states.drop(prompt.name) == 1
                assert client.attend_drop(prompt.name) == 1
                client.drop(prompt.name)


def test_a_prefix_shorter_than_a_block_is_found_as_the_guide_says(stored: Shelf) -> None:
    """If longer prompts find it one day, the guide must say so."""
    ring = Ring(stored.keys)

    def longer(prompt: Prompt) -> list[int]:
        return [*prompt.token_ids, *range(64)]

    def moves(prompt: Prompt) -> bool:
        route = route_key("", MODEL, pack_token_ids(longer(prompt)))
        return ring.node(route) != ring.node(prompt.route)

    short = next(prompt for prompt in prompts(50, first=9_200) if moves(prompt))
    with stored.client() as client:
        short.store(client)
        assert short.matches(client)
        assert short.is_whole(client.fetch(short.name))
        assert not client.match(model=MODEL, token_ids=longer(short), lease_ms=0).hit
        child = random_layers(1, 64, slots=1)
        with pytest.raises(errors.NotStored):
            client.store(
                None,
                layers=child,
                token_ids=longer(short),
                model=MODEL,
                parent=short.name,
                base=len(short.token_ids),
            )
        client.drop(short.name)


def test_no_command_says_of_what_is_stored_that_it_is_not(
    stored: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: str, *arguments: str, address: str) -> tuple[int, str]:
        tls = stored.tls
        flags = ["--address", address, "--password-file", str(stored.directory / "password")]
        flags += ["--tls-ca", str(tls.ca), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
        status = main([command, *arguments, *flags])
        shown = capsys.readouterr()
        return status, " ".join((shown.out + shown.err).split())

    ring = Ring(stored.keys)
    some = [p for p in prompts(60, first=9_400) if ring.node(p.name) != ring.node(p.route)][:6]
    assert some
    proxy, servers = f"127.0.0.1:{stored.node('a').port}", ",".join(stored.keys)
    with stored.client() as client:
        for prompt in some:
            prompt.store(client)
    for prompt in some:
        file = tmp_path / str(prompt.number)
        for command in (["export", prompt.name, str(file)], ["drop", prompt.name]):
            status, said = run(*command, address=proxy)
            assert status == 1
            assert "only the node that the name belongs to was asked" in said
            status, said = run(*command, address=servers)
            assert status == 0, said
            assert "only the node" not in said
        assert file.stat().st_size > sum(side.nbytes for pair in prompt.layers for side in pair)


def test_a_declared_layout_binds_the_store_that_follows(stored: Shelf) -> None:
    ring = Ring(stored.keys)
    some = prompts(12, first=9_100)
    assert any(ring.node(prompt.name) != ring.node(prompt.route) for prompt in some)
    other = Layout(
        (TensorLayout(0, Side.K, 1, 4, DType.F32), TensorLayout(0, Side.V, 1, 4, DType.F32))
    )
    for who in (stored.client, stored.hashing):
        with who() as client:
            for prompt in some:
                client.register(prompt.name, layout=other, model=MODEL, token_ids=prompt.token_ids)
                with pytest.raises(errors.LayoutDiffers):
                    prompt.store(client)
                assert client.drop(prompt.name) == [True]


def attention(query: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = np.einsum("hd,hnd->hn", query, k) / np.sqrt(k.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found: np.ndarray = np.einsum("hn,hnd->hd", weights / weights.sum(-1, keepdims=True), v)
    return found


def test_a_proxy_that_comes_back_is_found_again(stored: Shelf) -> None:
    with stored.client("b") as client:
        assert MANY[0].fetched(client)
        stored.start_proxy("b")
        eventually(stored.all_healthy)
        assert all(prompt.fetched(client) for prompt in MANY[:20])


@pytest.mark.faults
def test_no_call_fails_while_a_proxy_is_restarted(fragile: Shelf) -> None:
    some, failed_newcomers, over = prompts(30), [], threading.Event()

    def come_anew() -> None:  # as a script that is started just then does
        while not over.is_set():
            try:
                with fragile.client() as newcomer:
                    assert some[0].fetched(newcomer)
            except (errors.PionError, AssertionError) as error:
                failed_newcomers.append(error)

    with fragile.client() as client:
        for prompt in some:
            prompt.store(client)
        newcomers = threading.Thread(target=come_anew)
        newcomers.start()
        with working(client, some, threads=4) as failures:
            for _ in range(2):
                fragile.proxies["a"].ask("/drain_listeners?graceful", post=True)
                fragile.start_proxy("a")
                eventually(fragile.all_healthy)
        over.set()
        newcomers.join(60)
        assert not newcomers.is_alive(), "a call hangs"
        assert not failures
        assert not failed_newcomers
        assert all(prompt.fetched(client) for prompt in some)


def test_strangers_get_nothing_from_a_proxy_or_a_node(stored: Shelf, tmp_path) -> None:
    friend, other = stored.tls, Authority(tmp_path / "other").issue("stranger")
    strangers = {
        "not encrypted": None,
        "no certificate": Tls(friend.ca),
        "another authority's": Tls(friend.ca, other.cert, other.key),
        "expired": stored.stranger("late"),
    }
    proxy, node = f"127.0.0.1:{stored.node('a').port}", stored.node("a").key
    for what, tls in strangers.items():
        for address in (proxy, node):
            with stored.client_of(address, tls=tls, timeout_s=0.5) as client:
                with pytest.raises(errors.Unavailable):
                    client.fetch(MANY[0].name)
                with pytest.raises(errors.Unavailable):
                    Prompt(5_000).store(client)
                assert what
    assert not any(Prompt(5_000).name in stored.holds(name) for name in "abc")


def test_a_clients_certificate_does_not_make_a_node(stored: Shelf, start_server) -> None:
    tls = stored.tls
    flags = ["--tls-cert", str(tls.cert), "--tls-key", str(tls.key), "--tls-client-ca", str(tls.ca)]
    impostor = start_server(*flags, listen="127.0.0.1:0")
    client = stored.client_of(impostor.address, timeout_s=0.5)
    with client, pytest.raises(errors.Unavailable):
        client.describe()


def test_large_prefixes_come_through_bit_by_bit(stored: Shelf) -> None:
    with stored.client() as client:
        client.store("large", layers=LARGE, token_ids=range(8_000), model=MODEL)
        prefix = client.fetch("large")
        assert prefix is not None
        assert prefix.transport == "stream"
        assert_same(prefix.layers, LARGE)
        client.drop("large")


def test_no_message_is_larger_than_clients_of_any_language_take(stored: Shelf) -> None:
    with stored.client() as client:
        client.store("limits", layers=LARGE, token_ids=range(8_000), model=MODEL)
        address = client.address
        (node,) = [name for name in "abc" if "limits" in stored.holds(name)]
    request = pb.PrefixStoreFetchRequest(namespace="limits")
    for target in (address, stored.node(node).key):
        with grpc.secure_channel(target, stored.tls.credentials()) as channel:
            stub = prefix_store_pb2_grpc.PrefixStoreStub(channel)  # nothing is set but certificates
            route = Ring(stored.keys)
            name = next(p.route for p in MANY if route.node(p.route) == stored.node(node).key)
            metadata = [("pion-route", name), ("authorization", f"Basic {BASIC}")]
            messages = stub.Fetch(request, metadata=metadata, timeout=30)
            total = sum(message.ByteSize() for message in messages)
    assert total > sum(side.nbytes for pair in LARGE for side in pair)


def test_every_proxy_answers_to_the_name_that_all_have(stored: Shelf) -> None:
    """The guide gives clients one name for all of them."""
    for name in "ab":
        context = ssl.create_default_context(cafile=str(stored.tls.ca))
        context.load_cert_chain(str(stored.tls.cert), str(stored.tls.key))
        with socket.create_connection(("127.0.0.1", stored.node(name).port), timeout=10) as bare:
            shared = stored.mesh.server_name
            with context.wrap_socket(bare, server_hostname=shared) as peer:  # it checks
                assert peer.version()


def test_certificates_are_renewed_under_running_calls(stored: Shelf) -> None:
    def served(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as bare:
            context = ssl.create_default_context(cafile=str(stored.tls.ca))
            context.load_cert_chain(str(stored.tls.cert), str(stored.tls.key))
            with context.wrap_socket(bare, server_hostname="127.0.0.1") as peer:
                shown = peer.getpeercert(binary_form=True)
                assert shown is not None
                return shown

    ports = stored.node("a").port, stored.node("a").server_port
    before = {port: served(port) for port in ports}
    with stored.client() as busy, working(busy, prompts(30, first=3_000)) as failures:
        stored.command("certs", "--renew", "--client", "user")
        for port in ports:
            eventually(lambda port=port: served(port) != before[port])
        with stored.client() as client:
            assert all(prompt.fetched(client) for prompt in MANY[:50])
    assert not failures


def test_only_what_a_new_node_takes_over_moves(stored: Shelf) -> None:
    """The last test of this mesh: it has four nodes afterwards."""
    many = {prompt.name for prompt in MANY}
    before = {name: stored.holds(name) & many for name in "abc"}
    with stored.client() as busy, working(busy, prompts(50, first=2_000)) as failures:
        stored.render("abcd")
        stored.command("certs", "--client", "user")
        stored.start("d")
        eventually(stored.all_healthy)
        ring = Ring(stored.keys)
        new = stored.node("d").key
        assert not failures
        with stored.client() as client:
            moved = {prompt.name for prompt in MANY if not prompt.matches(client)}
            assert moved == by_node(ring, MANY)[new]
            assert 0 < len(moved) <= 1.3 / 4 * len(MANY)
            for prompt in MANY:
                if prompt.name in moved:
                    prompt.store(client)
            assert all(prompt.matches(client) for prompt in MANY)
    assert not failures
    assert stored.holds("d") & many == moved
    assert before == {name: stored.holds(name) & many for name in "abc"}


# Nodes that go, and come back


@contextmanager
def working(client: Client, some: list[Prompt], threads: int = 1) -> Iterator[list[str]]:
    """Has prompts fetched all the time, and stored where they are missing; yields what went wrong."""
    failures: list[str] = []
    over = threading.Event()

    def work(begin: int) -> None:
        while not over.is_set():
            for prompt in some[begin::threads]:
                try:
                    if not prompt.fetched(client):
                        prompt.store(client)
                except (errors.PionError, AssertionError) as error:
                    failures.append(f"{prompt.name}: {error!r}")

    workers = [threading.Thread(target=work, args=(begin,)) for begin in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield failures
    finally:
        over.set()
        for worker in workers:
            worker.join(60)
            assert not worker.is_alive(), "a call hangs"


def of_node(shelf: Shelf, name: str, count: int) -> list[Prompt]:
    """Prompts that a node holds while all are up."""
    ring = Ring(shelf.keys)
    return [p for p in MANY if ring.node(p.route) == shelf.node(name).key][:count]


@pytest.mark.faults
@pytest.mark.parametrize("proxied", [True, False])
def test_a_node_that_dies_costs_misses_and_nothing_else(fragile: Shelf, proxied: bool) -> None:
    some = MANY[:90]
    lost = {prompt.name for prompt in of_node(fragile, "c", 1_000)} & {p.name for p in some}
    with fragile.hashing() as direct, fragile.client() as through:
        client = through if proxied else direct
        for prompt in some:
            prompt.store(client)
        assert fragile.holds("c") == lost
        with working(client, some) as failures:
            fragile.servers["c"].kill()
            eventually(lambda: lost <= fragile.holds("a") | fragile.holds("b"))
            eventually(lambda: not fragile.all_healthy())
        assert not failures
        # Who hashes by himself and who asks a proxy agree on who stands in.
        for prompt in some:
            if not prompt.fetched(client):
                prompt.store(client)
        for who in (direct, through):
            assert all(prompt.fetched(who) for prompt in some)
        with working(client, some) as failures:
            fragile.start("c")
            eventually(fragile.all_healthy)
            assert fragile.holds("c") >= lost, "what was acknowledged is there"
        assert not failures
        assert all(prompt.fetched(client) for prompt in some)


@pytest.mark.faults
def test_a_node_that_dies_in_the_middle_of_a_stream_leaves_nothing_short(fragile: Shelf) -> None:
    def store(client: Client, **options: Any) -> None:
        client.store("large", layers=LARGE, token_ids=range(8_000), model=MODEL, **options)

    def killing(name: str) -> Callable[[int, int], None]:
        def kill(done: int, total: int) -> None:
            fragile.servers[name].kill()  # at the first bytes: the last ones are not under way yet

        return kill

    with fragile.client() as client:
        store(client)
        (first,) = [name for name in "abc" if fragile.holds(name)]
        assert client.fetch("large", progress=killing(first)) is None, "nobody else has it"
        store(client)
        (second,) = [name for name in "abc" if name != first and fragile.holds(name)]
        client.drop("large")
        store(client, progress=killing(second))
        (third,) = {*"abc"} - {first, second}
        assert fragile.holds(third) == {"large"}
        fetched = client.fetch("large")
        assert fetched is not None
        assert_same(fetched.layers, LARGE)


@pytest.mark.faults
def test_a_proxy_that_dies_in_the_middle_of_a_stream_costs_only_what_is_missing(
    fragile: Shelf,
) -> None:
    restarted_at: list[int] = []

    def restart(done: int, total: int) -> None:
        if not restarted_at and done > total // 2:
            fragile.proxies["a"].process.kill()
            fragile.start_proxy("a")
            eventually(fragile.all_healthy)
            restarted_at.append(done)
        assert done >= max(restarted_at, default=0), "what has come is asked for again"

    with fragile.client() as client:
        client.store("large", layers=LARGE, token_ids=range(8_000), model=MODEL)
        fetched = client.fetch("large", progress=restart)
        assert fetched is not None
        assert restarted_at
        assert_same(fetched.layers, LARGE)


@pytest.mark.faults
def test_a_node_that_is_stopped_ends_what_runs_and_nobody_notices(fragile: Shelf) -> None:
    some = MANY[:60]
    halfway, go_on = threading.Event(), threading.Event()
    fetched = []

    def pause(done: int, total: int) -> None:
        if done > total // 4:
            halfway.set()
            assert go_on.wait(60)

    with fragile.client() as slow, fragile.client() as client:
        slow.store("large", layers=LARGE, token_ids=range(8_000), model=MODEL)
        (holder,) = [name for name in "abc" if fragile.holds(name) == {"large"}]
        thread = threading.Thread(
            target=lambda: fetched.append(slow.fetch("large", progress=pause))
        )
        thread.start()
        assert halfway.wait(30)
        with working(client, some) as failures:
            fragile.servers[holder].process.terminate()
            eventually(lambda: not fragile.all_healthy())
            go_on.set()
            assert fragile.servers[holder].process.wait(60) == 0
            thread.join(30)
            fragile.start(holder)
            eventually(fragile.all_healthy)
        assert not failures
        assert fetched[0] is not None
        assert_same(fetched[0].layers, LARGE)
        assert client.lookup("large", model=MODEL, token_ids=range(8_000)).hit
