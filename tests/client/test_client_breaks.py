"""Connections that break, freeze and damage what passes: nothing is lost, mixed, or waited for long."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from pion_client import Client, Part
from pion_client.connection import TRIES_MAX
from pion_client.errors import (
    ClientClosed,
    DeadlineExceeded,
    NotAuthenticated,
    TooManyStreams,
    Unavailable,
)
from pion_wire.layout import DType, Layout, Side, TensorLayout
from tests.client.links import Link, Pairs, assert_same, linked, random_layers
from tests.conftest import ServerProcess

pytestmark = pytest.mark.faults

MODEL = "mlx1:test"
LAYERS = random_layers(41, 4_000, slots=4, heads=4, dim=64)
SIZE = sum(array.nbytes for pair in LAYERS for array in pair)
MIB = 1 << 20


@pytest.fixture(scope="module")
def direct(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address, export=False) as client:
        client.store("name", layers=LAYERS, token_ids=range(4_000), model=MODEL)
        yield client


def remote(address: str, **options: Any) -> Client:
    return Client(address, export=False, **options)


def breaking(server: ServerProcess, every: int) -> AbstractContextManager[Link]:
    """A link for `cutting`: little more passes before each cut, so that none comes too late."""
    return linked(server.address, freeze_down=every + 2 * MIB)


def cutting(link: Link, every: int) -> Callable[[int, int], None]:
    """A progress callback that cuts the link whenever so many more bytes have arrived."""
    limit = every

    def progress(done: int, total: int) -> None:
        nonlocal limit
        if done >= limit:
            limit = done + every
            link.cut()

    return progress


@pytest.mark.parametrize("as_mlx", [False, True])
def test_a_broken_stream_is_resumed_not_restarted(
    server: ServerProcess, direct: Client, as_mlx: bool
) -> None:
    at = 9 * MIB
    with breaking(server, at) as link, remote(link.address) as client:
        prefix = client.fetch("name", as_mlx=as_mlx, progress=cutting(link, at))
        assert prefix is not None
        assert_same(prefix.layers, LAYERS)
        assert link.down_bytes[1] < SIZE - at + 100_000


def test_rows_of_a_range_are_resumed_where_they_are(server: ServerProcess, direct: Client) -> None:
    at = 3 * MIB
    with breaking(server, at) as link, remote(link.address) as client:
        prefix = client.fetch("name", rows=(1_001, 3_999), progress=cutting(link, at))
        assert prefix is not None
        assert_same(prefix.layers, [(k[:, 1_001:3_999], v[:, 1_001:3_999]) for k, v in LAYERS])
        assert link.down_bytes[1] < SIZE - at


def test_a_live_prefix_that_grows_between_two_streams_is_resumed_as_it_was_announced(
    server: ServerProcess, direct: Client
) -> None:
    layers = random_layers(43, 200_000, heads=1)
    extra = random_layers(44, 1, heads=1)
    tensors = [(slot, side) for slot in range(2) for side in range(2)]
    layout = Layout(
        tuple(TensorLayout(slot, list(Side)[side], 1, 16, DType.BF16) for slot, side in tensors)
    )
    direct.register("live", layout=layout)

    def append(first_row: int, pairs: Pairs) -> None:
        for slot, side in tensors:
            direct.write_rows(
                "live",
                slot=slot,
                side=list(Side)[side],
                first_row=first_row,
                rows=pairs[slot][side],
            )

    append(0, layers)
    once = iter([lambda: append(200_000, extra)])
    with breaking(server, 2 * MIB) as link, remote(link.address) as client:
        cut = cutting(link, 2 * MIB)

        def grow_and_cut(done: int, total: int) -> None:
            if done > 2 * MIB:
                next(once, lambda: None)()
            cut(done, total)

        prefix = client.fetch("live", progress=grow_and_cut)
        assert prefix is not None
        assert_same(prefix.layers, layers)
        assert link.connections > 1
    assert next(once, None) is None, "it has not grown"


def test_parts_are_resumed_where_they_are(server: ServerProcess, direct: Client) -> None:
    layers = random_layers(42, 10)
    parts = [Part("state", slot, 10, bytes([slot + 1]) * (3 * MIB)) for slot in range(3)]
    direct.store("parts", layers=layers, token_ids=range(10), model=MODEL, parts=parts)
    at = 4 * MIB
    with breaking(server, at) as link, remote(link.address) as client:
        prefix = client.fetch("parts", part_kinds=["state"], progress=cutting(link, at))
        assert prefix is not None
        assert_same(prefix.layers, layers)
        assert [bytes(part.data) for part in prefix.parts] == [bytes(p.data) for p in parts]
        assert link.down_bytes[1] < 9 * MIB - at + 100_000


def test_a_stream_that_breaks_again_and_again_goes_on_as_long_as_it_brings_something(
    server: ServerProcess, direct: Client
) -> None:
    with breaking(server, 2 * MIB) as link, remote(link.address) as client:
        prefix = client.fetch("name", progress=cutting(link, 2 * MIB))
        assert prefix is not None
        assert_same(prefix.layers, LAYERS)
        assert link.connections > TRIES_MAX


def test_a_stream_that_never_brings_anything_is_given_up(
    server: ServerProcess, direct: Client
) -> None:
    cut = linked(server.address, cut_down=500, cuts=1_000)
    with cut as link, remote(link.address, timeout_s=1.0) as client:
        with pytest.raises(Unavailable) as given_up:
            client.fetch("name")
        assert given_up.value.from_transport


def test_a_bit_flipped_on_the_way_is_asked_for_again(server: ServerProcess, direct: Client) -> None:
    with linked(server.address, flip_down=5 * MIB + 12_345) as link, remote(link.address) as client:
        prefix = client.fetch("name")
        assert prefix is not None
        assert_same(prefix.layers, LAYERS)


def test_a_prefix_replaced_in_mid_stream_is_never_a_mixture(
    server: ServerProcess, direct: Client
) -> None:
    old, new = LAYERS, random_layers(43, 3_000, slots=4, heads=4, dim=64)
    direct.store("changing", layers=old, token_ids=range(4_000), model=MODEL)

    def replace() -> None:
        direct.store("changing", layers=new, token_ids=range(7, 3_007), model=MODEL, replace=True)

    cut = linked(server.address, cut_down=9 * MIB, on_cut=replace)
    with cut as link, remote(link.address) as client:
        prefix = client.fetch("changing")
    assert prefix is not None
    assert prefix.token_ids == list(range(7, 3_007))
    assert_same(prefix.layers, new)


def test_a_prefix_dropped_in_mid_stream_is_a_miss(server: ServerProcess, direct: Client) -> None:
    direct.store("dropped", layers=LAYERS, token_ids=range(4_000), model=MODEL)

    def drop() -> None:
        direct.drop("dropped")

    cut = linked(server.address, cut_down=9 * MIB, on_cut=drop)
    with cut as link, remote(link.address) as client:
        assert client.fetch("dropped") is None


def test_a_store_that_was_cut_is_repeated_as_a_whole(server: ServerProcess, direct: Client) -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(direct.lookup("cut").hit)

    with (
        linked(server.address, cut_up=5 * MIB, on_cut=look) as link,
        remote(link.address) as client,
    ):
        client.store("cut", layers=LAYERS, token_ids=range(4_000), model=MODEL)
        assert link.connections == 2
    assert seen == [False]
    prefix = direct.fetch("cut")
    assert prefix is not None
    assert_same(prefix.layers, LAYERS)


def test_a_store_that_is_always_cut_leaves_nothing(server: ServerProcess, direct: Client) -> None:
    cut = linked(server.address, cut_up=5 * MIB, cuts=1_000)
    with (
        cut as link,
        remote(link.address, timeout_s=1.0) as client,
        pytest.raises(Unavailable),
    ):
        client.store("never", layers=LAYERS, token_ids=range(4_000), model=MODEL)
    assert not direct.lookup("never").hit


def test_what_is_stored_already_is_not_sent_again(server: ServerProcess, direct: Client) -> None:
    many = LAYERS * 4
    direct.store("already", layers=many, token_ids=range(4_000), model=MODEL)
    with linked(server.address) as link, remote(link.address) as client:
        assert client.store(
            "already", layers=many, token_ids=range(4_000), model=MODEL
        ).already_stored
        assert len(link.up_data) < 4 * SIZE  # what was under way when the answer came


@pytest.mark.parametrize("frozen_at", [0, 5 * MIB])
def test_a_frozen_stream_is_not_waited_for_for_ever(
    server: ServerProcess, direct: Client, frozen_at: int
) -> None:
    with (
        linked(server.address, freeze_down=frozen_at) as link,
        remote(link.address, stall_timeout_s=0.2) as client,
        pytest.raises(DeadlineExceeded, match="no progress"),
    ):
        client.fetch("name")


def test_a_frozen_store_is_not_waited_for_for_ever(server: ServerProcess, direct: Client) -> None:
    with (
        linked(server.address, freeze_down=0) as link,
        remote(link.address, stall_timeout_s=0.2) as client,
        pytest.raises(DeadlineExceeded, match="no progress"),
    ):
        client.store("frozen", layers=LAYERS, token_ids=range(4_000), model=MODEL)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.fetch("name", timeout_s=0.2),
        lambda client: client.lookup("name", timeout_s=0.2),
        lambda client: client.read_rows("name", slot=0, side="k", rows=[0], timeout_s=0.2),
        lambda client: client.drop("nobody", timeout_s=0.2),
        lambda client: client.store(
            "frozen", layers=LAYERS, token_ids=range(4_000), model=MODEL, timeout_s=0.2
        ),
    ],
)
def test_no_call_outlives_its_deadline(
    server: ServerProcess, direct: Client, call: Callable[[Client], object]
) -> None:
    frozen = linked(server.address, freeze_down=0)
    with frozen as link, remote(link.address) as client, pytest.raises(DeadlineExceeded):
        call(client)


def test_a_server_that_is_down_is_told_from_a_miss() -> None:
    with Client("127.0.0.1:1", timeout_s=0.5) as client:
        for call in (client.describe, lambda: client.fetch("name"), lambda: client.drop("name")):
            with pytest.raises(Unavailable) as down:
                call()
            assert down.value.from_transport
            assert down.value.reason == "UNAVAILABLE"


def test_a_client_finds_the_server_again_after_a_crash(
    start_server: Callable[..., ServerProcess],
) -> None:
    first = start_server()
    layers = random_layers(44, 100)
    with remote(first.address) as client:
        client.store("name", layers=layers, token_ids=range(100), model=MODEL)
        first.kill()
        with pytest.raises(Unavailable):
            client.lookup("name", timeout_s=0.5)
        start_server(listen=first.address)
        prefix = client.fetch("name")
        assert prefix is not None
        assert_same(prefix.layers, layers)


def restarted_meanwhile(
    start_server: Callable[..., ServerProcess], server: ServerProcess, call: Callable[[], Any]
) -> Any:
    """What a call comes to whose server is dead when it begins, and comes back after a failure."""
    server.kill()
    threads = [threading.Thread(target=start_server, kwargs={"listen": server.address})]
    with remote(server.address) as other, pytest.raises(Unavailable):
        other.fetch("name", tries=3)  # longer than a call without patience takes
    threads[0].start()
    try:
        return call()
    finally:
        threads[0].join()


@pytest.mark.parametrize("export", [False, True])
def test_a_server_that_restarts_is_waited_for_until_the_deadline_given(
    start_server: Callable[..., ServerProcess], export: bool
) -> None:
    layers = random_layers(45, 100)
    tokens = range(100)
    first = start_server()
    with Client(first.address, export=export) as client:
        client.store("name", layers=layers, token_ids=tokens, model=MODEL)
        prefix = restarted_meanwhile(
            start_server, first, lambda: client.fetch("name", timeout_s=60)
        )
        assert prefix is not None
        assert_same(prefix.layers, layers)


def test_a_store_waits_for_a_server_that_restarts(
    start_server: Callable[..., ServerProcess],
) -> None:
    layers = random_layers(46, 100)
    first = start_server()
    with remote(first.address) as client:
        assert client.lookup("name").hit is False
        restarted_meanwhile(
            start_server,
            first,
            lambda: client.store(
                "name", layers=layers, token_ids=range(100), model=MODEL, timeout_s=60
            ),
        )
        assert client.lookup("name", timeout_s=60).hit


class Enough(Exception):
    pass


@pytest.mark.parametrize("export", [False, True])
def test_a_progress_callback_may_end_a_fetch(
    server: ServerProcess, direct: Client, export: bool
) -> None:
    def enough(done: int, total: int) -> None:
        assert total == SIZE
        raise Enough

    with Client(server.address, export=export) as client:
        for _ in range(3):
            with pytest.raises(Enough):
                client.fetch("name", progress=enough)
        assert client.fetch("name") is not None


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_a_progress_callback_may_end_a_store(
    server: ServerProcess, direct: Client, at: float, caplog: pytest.LogCaptureFixture
) -> None:
    def enough(done: int, total: int) -> None:
        assert total == SIZE
        if done >= at * total:
            raise Enough

    with pytest.raises(Enough):
        direct.store(
            "abandoned", layers=LAYERS, token_ids=range(4_000), model=MODEL, progress=enough
        )
    assert not direct.lookup("abandoned").hit
    assert not caplog.records  # gRPC has nothing to complain about


def test_threads_share_a_client(server: ServerProcess, direct: Client) -> None:
    failures: list[BaseException] = []
    with Client(server.address) as local:

        def work(number: int) -> None:
            layers = random_layers(50 + number, 300)
            ids = [number, *range(299)]
            try:
                for round_number in range(10):
                    client = (local, direct)[round_number % 2]
                    name = f"thread-{number}"
                    client.store(name, layers=layers, token_ids=ids, model=MODEL)
                    assert client.match(model=MODEL, token_ids=ids).namespace == name
                    prefix = client.fetch(name)
                    assert prefix is not None
                    assert_same(prefix.layers, layers)
                    assert client.drop(name) == [True]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_closing_ends_what_other_threads_wait_for(server: ServerProcess, direct: Client) -> None:
    errors: list[BaseException] = []
    with linked(server.address, freeze_down=5 * MIB) as link:
        client = remote(link.address)
        under_way = threading.Event()

        def fetch() -> None:
            try:
                client.fetch("name", progress=lambda done, total: under_way.set())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        assert under_way.wait(30)
        client.close()
        thread.join(30)
        assert not thread.is_alive()
    assert [type(error) for error in errors] == [ClientClosed]


def test_a_closed_client_says_so(server: ServerProcess) -> None:
    client = Client(server.address)
    client.describe()
    client.close()
    client.close()
    never_used = Client(server.address)
    never_used.close()
    for closed in (client, never_used):
        with pytest.raises(ClientClosed):
            closed.describe()
        with pytest.raises(ClientClosed):
            closed.fetch("name")


def test_a_full_house_is_waited_for_not_reported(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--streams-max", "1")
    with remote(server.address) as client:
        client.store("name", layers=LAYERS, token_ids=range(4_000), model=MODEL)
        inside, leave = threading.Event(), threading.Event()

        def linger(done: int, total: int) -> None:
            inside.set()
            assert leave.wait(30)

        thread = threading.Thread(target=lambda: client.fetch("name", progress=linger), daemon=True)
        thread.start()
        assert inside.wait(30)
        with pytest.raises(TooManyStreams) as full:
            client.fetch("name", timeout_s=2)
        assert full.value.retry_after_s
        leave.set()
        thread.join(30)
        assert client.fetch("name") is not None


def test_a_password_is_needed_and_never_shown(
    start_server: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(PION_PASSWORD="open sesame")
    for wrong in (None, "", "close sesame"):
        with Client(server.address, password=wrong) as client:
            with pytest.raises(NotAuthenticated) as refused:
                client.describe()
            assert "sesame" not in repr(refused.value) + repr(client)
            with pytest.raises(NotAuthenticated):
                client.fetch("name")
    with Client(server.address, password="open sesame") as client:
        client.store("name", layers=random_layers(1, 9), token_ids=range(9), model=MODEL)
        assert client.fetch("name") is not None
        assert "sesame" not in repr(client) + repr(vars(client))
    monkeypatch.setenv("PION_PASSWORD", "open sesame")
    with Client(server.address) as client:
        assert client.lookup("name").hit
