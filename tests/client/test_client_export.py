"""Files are read only if they are the server's, on this host, inside its directory; else it streams.

What holds for the files of a prefix holds for those of states: the tests that take `what` run for both.
"""

import itertools
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_client import Client, Part
from pion_client.errors import BadAnswer
from pion_client.export import CannotExport, Exported, ExportedStates
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import ssm_state_pb2
from tests.client.links import Pairs, assert_same, linked, random_layers
from tests.conftest import ServerProcess
from tests.server.wire import eventually

MODEL = "mlx1:test"
LAYERS = random_layers(31, 400, heads=3, dim=64)
SIZE = sum(array.nbytes for pair in LAYERS for array in pair)
TOKENS = range(400)
VALUES = {layer: np.random.default_rng(layer).bytes(SIZE // 2) for layer in (3, 0)}


class What(ABC):
    """Something of SIZE bytes that is stored, and may be read from files."""

    @abstractmethod
    def put(self, client: Client, name: str) -> None:
        """Stores it."""

    @abstractmethod
    def fetch(self, client: Client, name: str = "name") -> tuple[str, str] | None:
        """Fetches it; says how, and why, after all bits have been compared. None: a miss."""

    @abstractmethod
    def answer(self, client: Client, name: str = "name") -> Any:
        """What the server answers to Export, to be doctored."""

    @abstractmethod
    def named(self, answer: Any) -> Any:
        """The first file that an answer names."""

    @abstractmethod
    def opened(self, answer: Any, bytes_max: int = 1 << 30) -> Exported | ExportedStates:
        """Opens what an answer names."""

    @abstractmethod
    def check(self, exported: Any, *, as_mlx: bool) -> None:
        """Reads what is open, and compares all bits."""


class APrefix(What):
    def put(self, client: Client, name: str) -> None:
        client.store(name, layers=LAYERS, token_ids=TOKENS, model=MODEL)

    def fetch(self, client: Client, name: str = "name") -> tuple[str, str] | None:
        prefix = client.fetch(name)
        if prefix is None:
            return None
        assert_same(prefix.layers, LAYERS)
        return prefix.transport, prefix.transport_reason

    def answer(self, client: Client, name: str = "name") -> Any:
        return answer(client, name)

    def named(self, answer: Any) -> Any:
        return answer.extents[0]

    def opened(self, answer: Any, bytes_max: int = 1 << 30) -> Exported:
        return opened(answer, bytes_max)

    def check(self, exported: Any, *, as_mlx: bool) -> None:
        assert_same(exported.layers(as_mlx=as_mlx).pairs, LAYERS)


class States(What):
    def put(self, client: Client, name: str) -> None:
        for layer, data in VALUES.items():
            client.states.store(
                name, layer, data, boundary_tokens=layer, description="d", model="m"
            )

    def fetch(self, client: Client, name: str = "name") -> tuple[str, str] | None:
        found = client.states.fetch_all(name, VALUES)
        if not found:
            return None
        assert {layer: bytes(state.data) for layer, state in found.items()} == VALUES
        assert all(state.data.readonly for state in found.values())
        assert {state[1:4] for state in found.values()} == {(0, "d", "m"), (3, "d", "m")}
        ((transport, reason),) = {state[5:] for state in found.values()}
        return transport, reason

    def answer(self, client: Client, name: str = "name", **fields: Any) -> Any:
        request = ssm_state_pb2.SSMStateExportRequest(session=name, layers=VALUES, **fields)
        return client._calls.ask("state_export", request, name, None)

    def named(self, answer: Any) -> Any:
        return answer.values[0]

    def opened(self, answer: Any, bytes_max: int = 1 << 30) -> ExportedStates:
        return ExportedStates(answer, bytes_max=bytes_max)

    def check(self, exported: Any, *, as_mlx: bool) -> None:
        assert list(map(bytes, exported.data(as_mlx=as_mlx))) == list(VALUES.values())


@pytest.fixture(params=[APrefix(), States()], ids=["prefix", "states"])
def what(request: pytest.FixtureRequest) -> What:
    one: What = request.param
    return one


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as client:
        APrefix().put(client, "name")
        States().put(client, "name")
        yield client


@pytest.fixture
def token(server: ServerProcess) -> Iterator[Path]:
    """The host token's path; whatever a test puts there is undone."""
    path = server.directory / "host-token"
    right = path.read_bytes()
    yield path
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    path.write_bytes(right)


def fetched(server: ServerProcess, what: What, **options: Any) -> tuple[str, str]:
    """Fetches with a client of its own; says how, and why."""
    with Client(server.address, **options) as one:
        how = what.fetch(one)
    assert how is not None
    return how


def answer(client: Client, name: str = "name", **fields: Any) -> pb.PrefixStoreExportResponse:
    """What the server answers to Export, to be doctored."""
    request = pb.PrefixStoreExportRequest(namespace=name, **fields)
    answer: pb.PrefixStoreExportResponse = client._calls.ask("export", request, name, None)
    return answer


def opened(answer: pb.PrefixStoreExportResponse, bytes_max: int = 1 << 30) -> Exported:
    return Exported(answer, slots=(), part_kinds=(), bytes_max=bytes_max)


def read(answer: pb.PrefixStoreExportResponse, *, as_mlx: bool = False) -> Pairs:
    exported = opened(answer)
    try:
        return exported.layers(as_mlx=as_mlx).pairs
    finally:
        exported.close()


def test_no_stored_byte_crosses_the_wire(server: ServerProcess, client: Client, what: What) -> None:
    with linked(server.address) as link:
        with Client(link.address) as one:
            assert what.fetch(one) == ("export", "")
        assert sum(link.down_bytes) < SIZE / 10


def test_the_host_token_is_never_sent_back(
    server: ServerProcess, client: Client, token: Path, what: What
) -> None:
    with linked(server.address) as link:
        with Client(link.address) as one:
            assert what.fetch(one) == ("export", "")
        assert token.read_bytes() not in bytes(link.up_data)


@pytest.mark.parametrize("wrong", [b"x" * 32, b"", b"short"])
def test_a_directory_with_a_wrong_host_token_is_never_read(
    server: ServerProcess, client: Client, token: Path, wrong: bytes, what: What
) -> None:
    token.write_bytes(wrong)
    transport, reason = fetched(server, what)
    assert transport == "stream"
    assert "token" in reason


def test_a_host_token_that_goes_on_is_a_wrong_one(
    server: ServerProcess, client: Client, token: Path, what: What
) -> None:
    token.write_bytes(token.read_bytes() + b"!")
    assert fetched(server, what)[0] == "stream"


def test_a_host_token_behind_a_link_is_never_read(
    server: ServerProcess, client: Client, token: Path, what: What
) -> None:
    elsewhere = server.directory.parent / "elsewhere"
    shutil.copy(token, elsewhere)
    token.unlink()
    token.symlink_to(elsewhere)
    transport, reason = fetched(server, what)
    assert (transport, "token" in reason) == ("stream", True)


def test_a_pipe_for_a_host_token_holds_nobody_up(
    server: ServerProcess, client: Client, token: Path, what: What
) -> None:
    token.unlink()
    os.mkfifo(token)
    assert fetched(server, what)[0] == "stream"


def test_a_directory_for_a_host_token_is_no_token(
    server: ServerProcess, client: Client, token: Path, what: What
) -> None:
    token.unlink()
    token.mkdir()
    assert fetched(server, what)[0] == "stream"


def test_a_missing_host_token_is_no_token(
    server: ServerProcess, client: Client, token: Path, what: What
) -> None:
    token.unlink()
    assert fetched(server, what)[0] == "stream"


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer.__setattr__("host_token", b""),
        lambda answer: answer.__setattr__("host_token", answer.host_token[:-1]),
        lambda answer: answer.__setattr__("host_token", b"x" * 32),
        lambda answer: answer.__setattr__("directory", ""),
        lambda answer: answer.__setattr__("directory", "relative/path"),
        lambda answer: answer.__setattr__("directory", "/nowhere/at/all"),
        lambda answer: answer.__setattr__("directory", "/etc\0"),
        lambda answer: answer.__setattr__("directory", f"{answer.directory}/host-token"),
        lambda answer: answer.__setattr__("directory", f"{answer.directory}/segments"),
    ],
)
def test_a_lie_about_the_directory_is_not_believed_again(
    client: Client, change: Callable[[Any], None], what: What
) -> None:
    doctored = what.answer(client)
    change(doctored)
    with pytest.raises(CannotExport) as refused:
        what.opened(doctored)
    assert refused.value.lasting


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../outside",
        "segments/../../outside",
        "segments/./{file}",
        "segments//{file}",
        "/{file}",
        "{directory}/segments/{file}",
        "segments/{file}\0",
        "segments",
        "catalog.db",
        "segments/not-there.safetensors",
    ],
)
def test_export_outside_the_directory_is_refused(client: Client, name: str, what: What) -> None:
    doctored = what.answer(client)
    file = what.named(doctored)
    outside = Path(doctored.directory).parent / "outside"
    segment = Path(doctored.directory) / file.file_name
    shutil.copy(segment, outside)
    name = name.replace("segments", segment.parent.name)
    file.file_name = name.replace("{directory}", doctored.directory).replace("{file}", segment.name)
    status = outside.stat()
    file.device, file.inode = status.st_dev, status.st_ino
    with pytest.raises(CannotExport):
        what.opened(doctored)


@pytest.mark.parametrize("step", ["file", "folder"])
def test_a_link_inside_the_directory_is_not_followed(client: Client, step: str, what: What) -> None:
    doctored = what.answer(client)
    file = what.named(doctored)
    link = Path(doctored.directory) / f"link-{step}"
    segment = Path(doctored.directory) / file.file_name
    link.symlink_to(segment if step == "file" else segment.parent)
    file.file_name = link.name if step == "file" else f"{link.name}/{segment.name}"
    try:
        with pytest.raises(CannotExport, match="cannot be opened"):
            what.opened(doctored)
    finally:
        link.unlink()


@pytest.mark.parametrize("field", ["device", "inode", "size_bytes", "data_offset_bytes"])
def test_another_file_than_the_one_named_is_not_read(
    client: Client, field: str, what: What
) -> None:
    doctored = what.answer(client)
    file = what.named(doctored)
    setattr(file, field, getattr(file, field) + 8)
    with pytest.raises(CannotExport):
        what.opened(doctored)


@pytest.mark.parametrize(
    ("field", "by"),
    [
        ("file_row", 1),
        ("row_count", 1),
        ("row_count", -1),
        ("first_row", 1),
        ("row_count", -400),
    ],
)
def test_rows_that_do_not_agree_are_not_read(client: Client, field: str, by: int) -> None:
    doctored = answer(client)
    extent = doctored.extents[0]
    setattr(extent, field, getattr(extent, field) + by)
    with pytest.raises(CannotExport):
        opened(doctored)


def test_a_file_with_another_layout_is_not_read(client: Client) -> None:
    doctored = answer(client)
    doctored.prefix.layout.tensors[0].head_dim = 32
    with pytest.raises(CannotExport, match="layout"):
        opened(doctored)


def test_a_file_that_is_no_segment_is_not_read(client: Client, what: What) -> None:
    doctored = what.answer(client)
    file = what.named(doctored)
    impostor = Path(doctored.directory) / "segments" / "impostor"
    impostor.write_bytes(b"\xff" * file.size_bytes)
    status = impostor.stat()
    file.file_name = "segments/impostor"
    file.device, file.inode = status.st_dev, status.st_ino
    try:
        with pytest.raises(CannotExport, match="not a segment"):
            what.opened(doctored)
    finally:
        impostor.unlink()


def test_rows_named_twice_or_not_at_all_are_not_read(client: Client) -> None:
    doctored = answer(client)
    doctored.extents.append(doctored.extents[0])
    with pytest.raises(CannotExport):
        opened(doctored)
    del doctored.extents[:]
    with pytest.raises(CannotExport):
        opened(doctored)


def test_more_than_the_caller_wants_is_refused_before_it_is_read(
    server: ServerProcess, client: Client, what: What
) -> None:
    with pytest.raises(BadAnswer):
        what.opened(what.answer(client), bytes_max=SIZE - 1)
    for export in (True, False):
        few = Client(server.address, export=export, fetch_bytes_max=SIZE - 1)
        with few, pytest.raises(BadAnswer):
            what.fetch(few)


@pytest.mark.parametrize("as_mlx", [False, True])
def test_an_open_file_stays_readable_when_its_name_is_gone(
    client: Client, as_mlx: bool, what: What
) -> None:
    what.put(client, "going")
    named = what.answer(client, "going")
    exported = what.opened(named)
    for file in Path(named.directory).glob(f"{Path(what.named(named).file_name).parent}/*"):
        if file.stat().st_ino == what.named(named).inode:
            file.unlink()
    what.check(exported, as_mlx=as_mlx)
    exported.close()
    with pytest.raises(CannotExport):
        what.opened(named)
    client.drop("going")
    client.states.drop("going")


@pytest.mark.parametrize("as_mlx", [False, True])
@pytest.mark.parametrize("keep", [0, SIZE // 4])
def test_a_file_cut_short_after_it_was_opened_gives_nothing(
    client: Client, as_mlx: bool, keep: int, what: What
) -> None:
    name = f"cut-{as_mlx}-{keep}"
    what.put(client, name)
    named = what.answer(client, name)
    exported = what.opened(named)
    os.truncate(Path(named.directory) / what.named(named).file_name, keep)
    with pytest.raises(CannotExport):
        what.check(exported, as_mlx=as_mlx)
    exported.close()


@pytest.mark.parametrize("place", ["rows", "part", "checksums"])
def test_a_flipped_bit_is_found_when_every_page_is_checked(client: Client, place: str) -> None:
    name = f"flipped-{place}"
    part = Part("state", 0, 400, b"p" * 300_000)
    client.store(name, layers=LAYERS, token_ids=range(3, 403), model=MODEL, parts=[part])
    named = answer(client, name)
    file = Path(named.directory) / named.extents[0].file_name
    intact = opened(named)
    intact.verify()
    intact.close()
    offset = {"rows": SIZE // 2, "part": SIZE + 200_000, "checksums": None}[place]
    content = bytearray(file.read_bytes())
    content[-1 if offset is None else named.extents[0].data_offset_bytes + offset] ^= 1
    file.write_bytes(content)
    damaged = opened(named)
    with pytest.raises(CannotExport, match="checksum"):
        damaged.verify()
    damaged.close()


def test_what_is_damaged_is_a_miss_by_every_road(
    server: ServerProcess, client: Client, what: What
) -> None:
    for export, verify in itertools.product((True, False), repeat=2):
        what.put(client, "damaged")
        named = what.answer(client, "damaged")
        file = Path(named.directory) / what.named(named).file_name
        content = bytearray(file.read_bytes())
        content[what.named(named).data_offset_bytes + SIZE // 4] ^= 1
        file.write_bytes(content)
        with Client(server.address, export=export, verify=verify) as one:
            if isinstance(what, States):
                assert list(one.states.fetch_all("damaged", VALUES)) == [0]
            else:
                assert what.fetch(one, "damaged") is None


@pytest.mark.parametrize("damage", ["value", "checksums"])
def test_a_flipped_bit_of_a_state_is_found_when_every_page_is_checked(
    client: Client, damage: str
) -> None:
    states = States()
    states.put(client, "flipped")
    named = states.answer(client, "flipped")
    file = Path(named.directory) / named.values[0].file_name
    content = bytearray(file.read_bytes())
    begin = named.values[0].data_offset_bytes
    content[-1 if damage == "checksums" else begin + SIZE // 2 - 1] ^= 1
    file.write_bytes(content)
    exported = states.opened(named)
    with pytest.raises(CannotExport, match="checksum"):
        exported.verify()
    exported.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.info.__setattr__("size_bytes", value.info.size_bytes - 1),
        lambda value: value.info.__setattr__("boundary_tokens", 9),
        lambda value: value.info.__setattr__("description", "another"),
        lambda value: value.info.__setattr__("model_id", "another"),
        lambda value: value.__setattr__("layer", 1),
        lambda value: value.__setattr__("file_name", ""),
    ],
)
def test_a_file_that_holds_another_state_is_not_read(
    client: Client, change: Callable[[Any], None]
) -> None:
    doctored = States().answer(client)
    change(doctored.values[0])
    with pytest.raises(CannotExport):
        States().opened(doctored)


def test_a_state_that_was_replaced_is_not_read_when_its_lease_has_ended(client: Client) -> None:
    client.states.store("replaced", 3, b"old")
    named = States().answer(client, "replaced", lease_ms=1)
    client.states.store("replaced", 3, b"new")
    file = Path(named.directory) / named.values[0].file_name
    eventually(lambda: not file.exists())
    with pytest.raises(CannotExport, match="cannot be opened"):
        States().opened(named)
    found = client.states.fetch("replaced", 3)
    assert found is not None
    assert (bytes(found.data), found.transport) == (b"new", "export")


@pytest.mark.parametrize("export", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_branch_does_not_get_a_part_of_what_it_branches_from(
    server: ServerProcess, export: bool, depth: int
) -> None:
    """Both have one like it at a boundary that comes after the tokens that they have in common."""
    layers = random_layers(1, 400)
    with Client(server.address, export=export) as client:
        for level in range(depth + 1):
            base = 200 - 10 * level if level else 0
            client.store(
                f"branch {level}",
                layers=[(k[:, base:], v[:, base:]) for k, v in layers],
                token_ids=[*range(base), *range(1_000 * level + base, 1_000 * level + 400)],
                model="m",
                parent=f"branch {level - 1}" if level else None,
                base=base,
                parts=[Part("state", 0, 256, bytes([level]) * 1_000)],
            )
        for level in range(depth + 1):
            for rows in ((0, 256), (250, 256)):
                found = client.fetch(f"branch {level}", rows=rows, part_kinds=["state"])
                assert found is not None
                assert found.transport == ("export" if export else "stream")
                (part,) = found.parts
                assert bytes(part.data) == bytes([level]) * 1_000
        client.drop(*(f"branch {level}" for level in range(depth + 1)))


def test_descriptors_do_not_leak(client: Client, what: What) -> None:
    doctored = what.answer(client)
    what.named(doctored).inode += 1
    before = len(os.listdir("/dev/fd"))
    for _ in range(50):
        with pytest.raises(CannotExport):
            what.opened(doctored)
        assert what.fetch(client) == ("export", "")
    assert len(os.listdir("/dev/fd")) <= before + 2


def test_a_server_that_does_not_export_is_asked_once(
    start_server: Callable[..., ServerProcess], what: What
) -> None:
    server = start_server("--no-export")
    with linked(server.address) as link, Client(link.address) as one:
        what.put(one, "name")
        for _ in range(3):
            how = what.fetch(one)
            assert how is not None
            assert how[0] == "stream"
            assert "does not export" in how[1]
        asked = pb.PrefixStoreExportRequest(probe=True)
        if isinstance(what, States):
            asked = ssm_state_pb2.SSMStateExportRequest(probe=True)
        framed = b"\0" + asked.ByteSize().to_bytes(4) + asked.SerializeToString()
        assert bytes(link.up_data).count(framed) == 1


def read_bytes() -> int:
    """How much this process has read so far, from files and all else."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what is read")
@pytest.mark.parametrize("as_mlx", [False, True])
def test_few_rows_of_a_large_file_are_read_alone(client: Client, as_mlx: bool) -> None:
    named = answer(client, rows={"begin": 5, "end": 15})
    expected = [(k[:, 5:15], v[:, 5:15]) for k, v in LAYERS]
    read(named, as_mlx=as_mlx)  # imports what it needs
    before = read_bytes()
    pairs = read(named, as_mlx=as_mlx)
    assert read_bytes() - before < SIZE / 10
    assert_same(pairs, expected)
