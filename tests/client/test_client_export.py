"""Files are read only if they are the server's, on this host, inside its directory; else it streams."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pion_client import Client, Part
from pion_client.errors import BadAnswer
from pion_client.export import CannotExport, Exported
from pion_wire.v1 import prefix_store_pb2 as pb
from tests.client.links import Pairs, assert_same, linked, random_layers
from tests.conftest import ServerProcess

MODEL = "mlx1:test"
LAYERS = random_layers(31, 400, heads=3, dim=64)
SIZE = sum(array.nbytes for pair in LAYERS for array in pair)
TOKENS = range(400)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as client:
        client.store("name", layers=LAYERS, token_ids=TOKENS, model=MODEL)
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


def fetched(server: ServerProcess, **options: Any) -> tuple[str, str]:
    """Fetches with a client of its own; says how, and why, after all bits have been compared."""
    with Client(server.address, **options) as one:
        prefix = one.fetch("name")
    assert prefix is not None
    assert_same(prefix.layers, LAYERS)
    return prefix.transport, prefix.transport_reason


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


def test_no_tensor_byte_crosses_the_wire(server: ServerProcess, client: Client) -> None:
    with linked(server.address) as link:
        with Client(link.address) as one:
            prefix = one.fetch("name")
            assert prefix is not None
            assert (prefix.transport, prefix.transport_reason) == ("export", "")
            assert_same(prefix.layers, LAYERS)
        assert sum(link.down_bytes) < SIZE / 10


def test_the_host_token_is_never_sent_back(
    server: ServerProcess, client: Client, token: Path
) -> None:
    with linked(server.address) as link:
        with Client(link.address) as one:
            assert one.fetch("name") is not None
        assert token.read_bytes() not in bytes(link.up_data)


@pytest.mark.parametrize("wrong", [b"x" * 32, b"", b"short"])
def test_a_directory_with_a_wrong_host_token_is_never_read(
    server: ServerProcess, client: Client, token: Path, wrong: bytes
) -> None:
    token.write_bytes(wrong)
    transport, reason = fetched(server)
    assert transport == "stream"
    assert "token" in reason


def test_a_host_token_that_goes_on_is_a_wrong_one(
    server: ServerProcess, client: Client, token: Path
) -> None:
    token.write_bytes(token.read_bytes() + b"!")
    assert fetched(server)[0] == "stream"


def test_a_host_token_behind_a_link_is_never_read(
    server: ServerProcess, client: Client, token: Path
) -> None:
    elsewhere = server.directory.parent / "elsewhere"
    shutil.copy(token, elsewhere)
    token.unlink()
    token.symlink_to(elsewhere)
    transport, reason = fetched(server)
    assert (transport, "token" in reason) == ("stream", True)


def test_a_pipe_for_a_host_token_holds_nobody_up(
    server: ServerProcess, client: Client, token: Path
) -> None:
    token.unlink()
    os.mkfifo(token)
    assert fetched(server)[0] == "stream"


def test_a_directory_for_a_host_token_is_no_token(
    server: ServerProcess, client: Client, token: Path
) -> None:
    token.unlink()
    token.mkdir()
    assert fetched(server)[0] == "stream"


def test_a_missing_host_token_is_no_token(
    server: ServerProcess, client: Client, token: Path
) -> None:
    token.unlink()
    assert fetched(server)[0] == "stream"


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
    client: Client, change: Callable[[Any], None]
) -> None:
    doctored = answer(client)
    change(doctored)
    with pytest.raises(CannotExport) as refused:
        opened(doctored)
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
def test_export_outside_the_directory_is_refused(client: Client, name: str) -> None:
    doctored = answer(client)
    extent = doctored.extents[0]
    outside = Path(doctored.directory).parent / "outside"
    segment = Path(doctored.directory) / extent.file_name
    shutil.copy(segment, outside)
    name = name.replace("{directory}", doctored.directory).replace("{file}", segment.name)
    extent.file_name = name
    status = outside.stat()
    extent.device, extent.inode = status.st_dev, status.st_ino
    with pytest.raises(CannotExport):
        opened(doctored)


@pytest.mark.parametrize("step", ["file", "folder"])
def test_a_link_inside_the_directory_is_not_followed(client: Client, step: str) -> None:
    doctored = answer(client)
    extent = doctored.extents[0]
    link = Path(doctored.directory) / f"link-{step}"
    segment = Path(doctored.directory) / extent.file_name
    link.symlink_to(segment if step == "file" else segment.parent)
    extent.file_name = link.name if step == "file" else f"{link.name}/{segment.name}"
    try:
        with pytest.raises(CannotExport, match="cannot be opened"):
            opened(doctored)
    finally:
        link.unlink()


@pytest.mark.parametrize(
    ("field", "by"),
    [
        ("device", 1),
        ("inode", 1),
        ("size_bytes", 1),
        ("data_offset_bytes", 8),
        ("file_row", 1),
        ("row_count", 1),
        ("row_count", -1),
        ("first_row", 1),
        ("row_count", -400),
    ],
)
def test_what_does_not_agree_is_not_read(client: Client, field: str, by: int) -> None:
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


def test_a_file_that_is_no_segment_is_not_read(client: Client) -> None:
    doctored = answer(client)
    extent = doctored.extents[0]
    impostor = Path(doctored.directory) / "segments" / "impostor"
    impostor.write_bytes(b"\xff" * extent.size_bytes)
    status = impostor.stat()
    extent.file_name = "segments/impostor"
    extent.device, extent.inode = status.st_dev, status.st_ino
    try:
        with pytest.raises(CannotExport, match="not a segment"):
            opened(doctored)
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
    server: ServerProcess, client: Client
) -> None:
    with pytest.raises(BadAnswer):
        opened(answer(client), bytes_max=SIZE - 1)
    with Client(server.address, fetch_bytes_max=SIZE - 1) as one, pytest.raises(BadAnswer):
        one.fetch("name")


@pytest.mark.parametrize("as_mlx", [False, True])
def test_an_open_file_stays_readable_when_its_name_is_gone(client: Client, as_mlx: bool) -> None:
    client.store("going", layers=LAYERS, token_ids=range(1, 401), model=MODEL)
    exported = opened(answer(client, "going"))
    [extent] = answer(client, "going").extents
    (Path(answer(client, "going").directory) / extent.file_name).unlink()
    assert_same(exported.layers(as_mlx=as_mlx).pairs, LAYERS)
    exported.close()
    assert client.fetch("going") is None


@pytest.mark.parametrize("as_mlx", [False, True])
@pytest.mark.parametrize("keep", [0, SIZE // 2])
def test_a_file_cut_short_after_it_was_opened_gives_no_rows(
    client: Client, as_mlx: bool, keep: int
) -> None:
    name = f"cut-{as_mlx}-{keep}"
    client.store(name, layers=LAYERS, token_ids=range(2, 402), model=MODEL)
    named = answer(client, name)
    exported = opened(named)
    os.truncate(Path(named.directory) / named.extents[0].file_name, keep)
    with pytest.raises(CannotExport):
        exported.layers(as_mlx=as_mlx)
    exported.close()
    assert client.fetch(name) is None


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


def test_damaged_rows_are_a_miss_by_every_road(server: ServerProcess, client: Client) -> None:
    client.store("damaged", layers=LAYERS, token_ids=range(4, 404), model=MODEL)
    named = answer(client, "damaged")
    file = Path(named.directory) / named.extents[0].file_name
    content = bytearray(file.read_bytes())
    content[named.extents[0].data_offset_bytes + SIZE // 2] ^= 1
    file.write_bytes(content)
    for export, verify in itertools.product((True, False), repeat=2):
        with Client(server.address, export=export, verify=verify) as one:
            assert one.fetch("damaged") is None


def test_descriptors_do_not_leak(client: Client) -> None:
    doctored = answer(client)
    doctored.extents[0].inode += 1
    before = len(os.listdir("/dev/fd"))
    for _ in range(50):
        with pytest.raises(CannotExport):
            opened(doctored)
        assert client.fetch("name") is not None
    assert len(os.listdir("/dev/fd")) <= before + 2


def test_a_server_that_does_not_export_is_asked_once(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--no-export")
    with linked(server.address) as link, Client(link.address) as one:
        one.store("name", layers=LAYERS, token_ids=TOKENS, model=MODEL)
        for _ in range(3):
            prefix = one.fetch("name")
            assert prefix is not None
            assert prefix.transport == "stream"
            assert "does not export" in prefix.transport_reason
            assert_same(prefix.layers, LAYERS)
        asked = pb.PrefixStoreExportRequest(probe=True)
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
