"""Recurrent state through the client: whole, as it was stored, whatever breaks on the way."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pion_client import Client
from pion_client.errors import BadAnswer, GenerationDiffers, InvalidRequest, Unavailable
from pion_client.states import State, StateReception
from pion_wire.framing import frame_bytes, frame_header
from pion_wire.v1 import ssm_state_pb2 as pb
from tests.client.links import linked
from tests.conftest import ServerProcess

MIB = 1 << 20
SIZES = [0, 1, MIB - 1, MIB, MIB + 1, 5 * MIB + 17]


def value(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def present(state: State | None) -> State:
    assert state is not None
    return state


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.mark.parametrize("size", SIZES)
def test_no_bit_of_a_state_changes(client: Client, size: int) -> None:
    data = value(size, size)
    told: list[tuple[int, int]] = []
    client.states.store(
        "bits", size, data, boundary_tokens=100, description="ArraysCache f32", model="m"
    )
    found = present(client.states.fetch("bits", size, progress=lambda *done: told.append(done)))
    assert bytes(found.data) == data
    assert found[1:4] == (100, "ArraysCache f32", "m")
    assert found.data.readonly
    assert told[-1:] == ([(size, size)] if size else [])


@pytest.mark.parametrize("size", [*SIZES, 65 * MIB + 3])  # more than any message may have
def test_a_state_is_the_same_by_every_road(
    server: ServerProcess, client: Client, size: int
) -> None:
    data = value(size, size)
    client.states.store("roads", 0, data)
    for export, verify, as_mlx in itertools.product((True, False), repeat=3):
        with Client(server.address, export=export, verify=verify) as one:
            state = present(one.states.fetch("roads", 0, as_mlx=as_mlx))
        assert bytes(state.data) == data
        assert state.transport == ("export" if export else "stream")
        if export and as_mlx and size:
            assert isinstance(state.data.obj, mx.array)


def test_several_layers_come_at_once_and_those_that_are_not_there_are_left_out(
    server: ServerProcess, client: Client
) -> None:
    for layer in (0, 2, 5):
        client.states.store("several", layer, value(MIB + layer, layer))
    for export in (True, False):
        with linked(server.address) as link, Client(link.address, export=export) as one:
            found = one.states.fetch_all("several", iter([5, 1, 0, 5, np.int64(2)]))
            assert list(found) == [5, 0, 2]
            for layer, state in found.items():
                assert bytes(state.data) == value(MIB + layer, layer)
            assert one.states.fetch_all("nobody", range(4)) == {}
    for layers in ([], range(1_001)):
        with pytest.raises(InvalidRequest) as refused:
            client.states.fetch_all("several", layers)
        assert refused.value.field == "layers"


def test_several_layers_are_stored_as_one(server: ServerProcess, client: Client) -> None:
    layers = {7: value(3 * MIB, 1), 0: b"", 2: value(5 * MIB + 1, 2)}
    told: list[tuple[int, int]] = []
    with linked(server.address, cut_up=4 * MIB) as link, Client(link.address) as broken:
        stored = broken.states.store_all(
            "as one",
            layers,
            boundary_tokens=9,
            description={7: "seven", 2: "two"},
            model="m",
            progress=lambda *done: told.append(done),
        )
        assert link.connections == 2
    assert told[-1] == (8 * MIB + 1, 8 * MIB + 1)
    found = client.states.fetch_all("as one", layers)
    assert {layer: bytes(state.data) for layer, state in found.items()} == layers
    assert {layer: state.generation for layer, state in found.items()} == stored
    assert [state.description for state in found.values()] == ["seven", "", "two"]
    assert {(state.boundary_tokens, state.model) for state in found.values()} == {(9, "m")}


def test_a_server_that_is_killed_within_a_store_of_several_has_all_the_old_ones(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    old = {layer: value(1_000 + layer, layer) for layer in range(3)}

    def kill(done: int, total: int) -> None:
        if done > total // 2 and server.process.poll() is None:
            server.kill()

    with Client(server.address, timeout_s=0.5) as client:
        client.states.store_all("killed", old)
        with pytest.raises(Unavailable):
            client.states.store_all(
                "killed", {layer: value(24 * MIB, layer) for layer in old}, progress=kill
            )
    server = start_server()
    with Client(server.address) as client:
        found = client.states.fetch_all("killed", old)
        assert {layer: bytes(state.data) for layer, state in found.items()} == old
        assert len(list((server.directory / "blobs").iterdir())) == len(old)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("values", {}),
        ("values", dict.fromkeys(range(1_001), b"")),
        ("layer", {0: b"x", -1: b"y"}),
        ("data", {0: b"x", 1: np.zeros((4, 4))[:, ::2]}),
        ("data", {0: b"x", 1: None}),
    ],
)
def test_of_several_layers_none_is_stored_if_one_cannot_be(
    client: Client, field: str, values: dict[int, Any]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client.states.store_all("none", values)
    assert refused.value.field == field
    assert client.states.fetch_all("none", [0, 1]) == {}


def test_a_layer_whose_file_no_reader_of_segments_takes_is_streamed(client: Client) -> None:
    client.states.store("far", 2**32 - 1, b"state")
    state = present(client.states.fetch("far", 2**32 - 1))
    assert (bytes(state.data), state.transport) == (b"state", "stream")
    assert "not a segment" in state.transport_reason


def test_anything_with_a_buffer_is_a_state(client: Client) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    client.states.store("buffers", 0, array)
    assert bytes(present(client.states.fetch("buffers", 0)).data) == array.tobytes()
    with pytest.raises(InvalidRequest, match="contiguous"):
        client.states.store("buffers", 0, array[:, ::2])
    with pytest.raises(InvalidRequest, match="contiguous"):
        client.states.store("buffers", 0, "text")
    assert bytes(present(client.states.fetch("buffers", 0)).data) == array.tobytes()


@pytest.mark.parametrize("layer", [-1, 2**32, "1", 1.0, None])
def test_a_layer_that_is_none_is_not_blamed_on_the_bytes(client: Client, layer: object) -> None:
    for ask in (
        lambda: client.states.store("layers", layer, b"data"),  # type: ignore[arg-type]
        lambda: client.states.store("layers", 0, b"data", boundary_tokens=layer),  # type: ignore[arg-type]
        lambda: client.states.fetch("layers", layer),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequest) as refused:
            ask()
        assert refused.value.field in ("layer", "boundary_tokens")


def test_a_whole_number_of_another_type_is_one(client: Client) -> None:
    for layer in (True, np.int64(1)):
        client.states.store("numbers", layer, bytes(1), boundary_tokens=np.uint32(7))  # type: ignore[arg-type]
        assert present(client.states.fetch("numbers", 1)).boundary_tokens == 7


def test_a_state_is_replaced_whole_and_dropped_by_layer_or_all(client: Client) -> None:
    first = client.states.store("drops", 0, b"old")
    assert client.states.store("drops", 0, b"newer", durability="disk") != first
    for layer in (1, 2):
        client.states.store("drops", layer, b"x")
    assert bytes(present(client.states.fetch("drops", 0)).data) == b"newer"
    assert client.states.drop("drops", 1) == 1
    assert client.states.fetch("drops", 1) is None
    assert client.states.drop("drops") == 2
    assert client.states.fetch("drops", 0) is None
    assert client.states.drop("drops") == 0


@pytest.mark.parametrize(
    ("field", "ask"),
    [
        ("session", lambda states: states.fetch("", 0)),
        ("session", lambda states: states.store("s" * 201, 0, b"x")),
        ("session", lambda states: states.drop(7)),
        ("layer", lambda states: states.fetch("s", -1)),
        ("boundary_tokens", lambda states: states.store("s", 0, b"x", boundary_tokens=-1)),
        ("durability", lambda states: states.store("s", 0, b"x", durability="tape")),
        ("description", lambda states: states.store("s", 0, b"x", description="d" * 5_000)),
    ],
)
def test_what_cannot_be_a_state_is_refused_by_its_field(
    client: Client, field: str, ask: Callable[..., object]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ask(client.states)
    assert field in refused.value.field
    assert client.states.fetch("s", 0) is None


def test_a_broken_fetch_asks_for_the_rest_only(server: ServerProcess, client: Client) -> None:
    data = value(40 * MIB)
    client.states.store("broken", 0, data)
    with (
        linked(server.address, cut_down=10 * MIB) as link,
        Client(link.address, export=False) as broken,
    ):
        assert bytes(present(broken.states.fetch("broken", 0)).data) == data
        assert link.connections == 2
        assert sum(link.down_bytes) < len(data) + 12 * MIB


@pytest.mark.parametrize("cut", [3 * MIB, 7 * MIB + 100, 13 * MIB])
def test_a_broken_fetch_of_several_layers_is_whole_in_the_end(
    server: ServerProcess, client: Client, cut: int
) -> None:
    layers = {2: value(6 * MIB, 1), 0: b"", 1: value(9 * MIB, 2)}
    for layer, data in layers.items():
        client.states.store("broken/all", layer, data)
    with linked(server.address, cut_down=cut) as link:
        with Client(link.address, export=False) as broken:
            found = broken.states.fetch_all("broken/all", [2, 7, 0, 1, 8])
        assert {layer: bytes(state.data) for layer, state in found.items()} == layers
        assert link.connections == 2


def header(size: int, generation: int = 7, more: tuple[int, ...] = ()) -> bytes:
    info = pb.SSMStateInfo(size_bytes=size)
    message = pb.SSMStateFetchHeader(
        found=True, info=info, generation=generation, more_generations=more
    )
    return frame_header(message.SerializeToString())


MISSING = frame_header(pb.SSMStateFetchHeader(found=False).SerializeToString())


def rest_of(reception: StateReception) -> tuple[dict[int, int], int]:
    """Returns the layers that are asked for with their generations, and the offset in the first."""
    request = pb.SSMStateFetchRequest(session="s")
    reception.begin_stream(request)
    layers = request.layer, *request.more_layers
    generations = request.generation, *(request.more_generations or [0] * (len(layers) - 1))
    return dict(zip(layers, generations, strict=True)), request.offset_bytes


def test_what_is_here_is_not_asked_for_again() -> None:
    reception = StateReception([2, 9, 0, 1], bytes_max=100)
    assert rest_of(reception) == ({2: 0, 9: 0, 0: 0, 1: 0}, 0)
    reception.take(header(5, 7, (0, 3, 8)))
    reception.take(frame_bytes(0, 0, b"abc"))
    assert rest_of(reception) == ({2: 7, 9: 0, 0: 3, 1: 8}, 3)
    reception.take(header(5, 7, (0, 3, 8)))
    reception.take(frame_bytes(0, 3, b"de"))
    reception.take(MISSING)
    assert rest_of(reception) == ({0: 3, 1: 8}, 0)
    reception.take(header(0, 3, (8,)))
    reception.take(header(1, 8))
    assert not reception.ended()
    reception.take(frame_bytes(0, 0, b"h"))
    assert reception.ended()
    found = {layer: bytes(data) for layer, (_, data) in reception.values.items()}
    assert found == {2: b"abcde", 0: b"", 1: b"h"}


@pytest.mark.parametrize("changed", [header(5, 8), MISSING])
def test_values_of_two_moments_are_never_mixed(changed: bytes) -> None:
    reception = StateReception([0, 1, 2], bytes_max=100)
    reception.take(header(1, 7, (7, 0)))
    reception.take(frame_bytes(0, 0, b"a"))
    rest_of(reception)  # the stream broke, and another one begins
    with pytest.raises(GenerationDiffers):
        reception.take(changed)
    reception.restart()
    assert (rest_of(reception), reception.values) == (({0: 0, 1: 0, 2: 0}, 0), {})


@pytest.mark.parametrize(
    "messages",
    [
        [frame_bytes(0, 0, b"a")],
        [header(5), header(5)],
        [header(5), MISSING],
        [header(5), frame_bytes(0, 1, b"a")],
        [header(5), frame_bytes(0, 0, b"abcdef")],
        [header(5), frame_bytes(0, 0, b"")],
        [header(1), frame_bytes(0, 0, b"a"), frame_bytes(0, 1, b"b")],
        [header(60, more=(7,)), frame_bytes(0, 0, bytes(60)), header(41)],
        [MISSING, MISSING, header(1)],
        [header(5), frame_bytes(0, 0, b"a"), None, header(6)],
        [b"\x0a\x01"],
        [frame_header(b"\xff")],
    ],
)
def test_what_was_not_announced_is_not_taken(messages: list[bytes | None]) -> None:
    reception = StateReception([0, 1], bytes_max=100)
    *sound, last = messages
    for message in sound:
        if message is None:
            rest_of(reception)  # the stream broke, and another one begins
        else:
            reception.take(message)
    assert last is not None
    with pytest.raises(BadAnswer):
        reception.take(last)


@pytest.mark.parametrize("export", [True, False])
def test_who_reads_while_layers_are_replaced_gets_those_of_one_store(
    server: ServerProcess, export: bool
) -> None:
    over = threading.Event()

    def replace() -> None:
        with Client(server.address) as writer:
            for number in itertools.count(1):
                if over.is_set():
                    return
                if number % 5 == 0:
                    writer.states.drop("one moment")
                values = {layer: bytes([number % 256]) * 50_000 for layer in range(6)}
                writer.states.store_all("one moment", values)

    with ThreadPoolExecutor(1) as pool, Client(server.address, export=export) as reader:
        writing = pool.submit(replace)
        try:
            whole = 0
            while whole < 100 and not writing.done():
                found = reader.states.fetch_all("one moment", range(7))
                assert len(found) in (0, 6)
                assert len({bytes(state.data) for state in found.values()}) <= 1
                whole += bool(found)
        finally:
            over.set()
        writing.result()


def test_a_layer_replaced_between_two_streams_is_never_mixed_into_the_others(
    server: ServerProcess, client: Client
) -> None:
    layers = {layer: value(8 * MIB, layer) for layer in range(3)}
    for layer, data in layers.items():
        client.states.store("mixed/all", layer, data)
    layers[1] = value(5 * MIB, 9)

    def replace() -> None:
        client.states.store("mixed/all", 1, layers[1])

    with (
        linked(server.address, cut_down=12 * MIB, on_cut=replace) as link,
        Client(link.address, export=False) as broken,
    ):
        found = broken.states.fetch_all("mixed/all", range(3))
    assert {layer: bytes(state.data) for layer, state in found.items()} == layers


def test_all_layers_together_are_not_more_than_is_wanted(
    server: ServerProcess, client: Client
) -> None:
    for layer in range(3):
        client.states.store("sum", layer, bytes(MIB))
    for export in (True, False):
        with Client(server.address, export=export, fetch_bytes_max=3 * MIB) as one:
            assert len(one.states.fetch_all("sum", range(4))) == 3
        few = Client(server.address, export=export, fetch_bytes_max=3 * MIB - 1)
        with few, pytest.raises(BadAnswer):
            few.states.fetch_all("sum", range(4))


def test_a_state_replaced_between_two_streams_is_never_mixed(
    server: ServerProcess, client: Client
) -> None:
    old, new = value(20 * MIB, 1), value(18 * MIB, 2)
    client.states.store("mixed", 0, old)

    def replace() -> None:
        client.states.store("mixed", 0, new)

    with (
        linked(server.address, cut_down=8 * MIB, on_cut=replace) as link,
        Client(link.address, export=False) as broken,
    ):
        assert bytes(present(broken.states.fetch("mixed", 0)).data) == new


def test_a_store_that_breaks_is_sent_anew(server: ServerProcess, client: Client) -> None:
    data = value(20 * MIB, 3)
    with (
        linked(server.address, cut_up=6 * MIB) as link,
        Client(link.address, export=False) as broken,
    ):
        broken.states.store("again", 0, data)
        assert link.connections == 2
    assert bytes(present(client.states.fetch("again", 0)).data) == data


def test_a_flipped_bit_is_never_taken_for_a_state(server: ServerProcess, client: Client) -> None:
    data = value(20 * MIB, 4)
    client.states.store("flipped", 0, data)
    with (
        linked(server.address, flip_down=9 * MIB) as link,
        Client(link.address, export=False) as damaged,
    ):
        assert bytes(present(damaged.states.fetch("flipped", 0)).data) == data


def test_more_than_is_wanted_is_not_allocated(server: ServerProcess, client: Client) -> None:
    client.states.store("large", 0, value(MIB + 1, 5))
    with Client(server.address, fetch_bytes_max=MIB) as small, pytest.raises(BadAnswer):
        small.states.fetch("large", 0)


def test_without_a_server_nothing_hangs(tmp_path: object) -> None:
    with Client(f"unix:{tmp_path}/nobody", timeout_s=1) as nobody:
        with pytest.raises(Unavailable):
            nobody.states.fetch("s", 0)
        with pytest.raises(Unavailable):
            nobody.states.store("s", 0, b"x")
