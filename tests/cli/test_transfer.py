"""`export` and `import`: a file comes out as it was stored, goes in as it came out, or is refused."""

import argparse
import contextlib
import os
import shutil
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

from pion_client import Client, DType, Layout, Part, PartInfo, Side, TensorLayout, errors
from pion_grpc.cli import transfer
from pion_grpc.cli.connecting import wired
from pion_grpc.cli.failure import CommandFailed
from pion_grpc.storage.files import Files
from pion_grpc.storage.pages import SegmentWriter
from pion_grpc.storage.store_snapshot import MARK
from pion_wire.limits import PAGE_BYTES
from pion_wire.segment import SegmentLayout
from tests.cli.conftest import Run, noise, same_bits, store

NO_TLS = dict.fromkeys(("tls_ca", "tls_cert", "tls_key"))
RAW = Layout(tuple(TensorLayout(0, side, 1, 4, DType.F16) for side in Side))


@pytest.fixture
def at(server) -> tuple[str, str]:
    return "--address", server.address


@pytest.fixture
def client(server) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client
        client.drop(*(info.namespace for info in client.list()))


def segment_file(path: Path, segment: SegmentLayout, token_ids: range | None = None) -> bytes:
    """Writes a segment of random rows, and returns the file."""
    ids = np.array(token_ids or range(segment.token_count), "<u4").tobytes()
    writer = SegmentWriter(Files(), path, segment)
    table = segment.arrays["crc32c"]
    writer.write(np.random.default_rng(7).bytes(table.begin - len(ids)))
    writer.write(ids)
    writer.finish(on_disk=False)
    return path.read_bytes()


def small(tokens: int = 3, *, layout: Layout = RAW, **facts: object) -> SegmentLayout:
    rows = (tokens - int(str(facts.get("base", 0))),) * len(layout.tensors)
    return SegmentLayout(layout, rows, tokens, **{"model_id": "m", "namespace": "small", **facts})  # type: ignore[arg-type]


# Round trips


def test_a_chain_does_not_lose_a_bit_on_its_way(run: Run, client, at, tmp_path: Path):
    layers = noise(200, slots=3)
    half = [(k[:, :130], v[:, :130]) for k, v in layers]
    rest = [(k[:, 130:], v[:, 130:]) for k, v in layers]
    state = Part("state", 1, 130, os.urandom(600_000), "ArraysCache")
    early = Part("ring", 0, 64, b"early")
    late = Part("state", 1, 200, b"late")
    client.store("root", layers=half, token_ids=range(130), model="m", parts=[state, early])
    client.store(
        "child", layers=rest, token_ids=range(200), model="m", parent="root", base=130, parts=[late]
    )  # fmt: skip
    file = tmp_path / "child.safetensors"

    written = run("export", "child", file, "--json", *at)
    assert (written.status, written.err) == (0, "")
    assert written.json["file_bytes"] == file.stat().st_size
    assert (written.json["token_count"], written.json["token_ids_count"]) == (200, 200)
    assert all(client.drop("child", "root"))

    stored = run("import", file, "--json", *at)
    assert (stored.status, stored.err) == (0, "")
    assert stored.json["namespace"] == "child"
    assert stored.json["durability"] == "disk"
    back = client.fetch("child", part_kinds=["state"])
    assert back is not None
    assert same_bits(back.layers, layers)
    assert (back.token_ids, back.model) == (list(range(200)), "m")
    assert [(p.info, bytes(p.data)) for p in back.parts] == [(late.info, b"late")]
    middle = client.fetch("child", rows=(0, 130), part_kinds=["state"])
    assert middle is not None
    assert [(p.info, bytes(p.data)) for p in middle.parts] == [(state.info, bytes(state.data))]
    (info,) = client.list()
    assert (info.parent, info.base, len(info.parts)) == ("", 0, 3)


def test_a_checkpoint_without_rows_of_its_own_does_not_travel_without_them(
    run: Run, client, at, server, tmp_path: Path
):
    layers = noise(200, slots=3)
    parts = [Part("state", 1, boundary, os.urandom(boundary)) for boundary in (64, 130)]
    none = [(k[:, 130:130], v[:, 130:130]) for k, v in layers]
    client.store("root", layers=layers, token_ids=range(200), model="m")
    client.store(
        "mark", layers=none, token_ids=range(130), model="m", parent="root", base=130, parts=parts
    )
    (own,) = (
        path for path in server.directory.glob("segments/*") if b'"mark"' in path.read_bytes()
    )
    shutil.copy(own, tmp_path / "own")
    assert run("export", "mark", tmp_path / "whole", *at).status == 0
    for file, base in (("whole", 0), ("own", 130)):
        assert client.drop("mark") == [True]
        stored = run("import", tmp_path / file, *at)
        assert (stored.status, stored.err) == (0, "")
        info = next(info for info in client.list() if info.namespace == "mark")
        assert (info.token_count, info.base) == (130, base)
        for part in parts:
            end = part.boundary_tokens
            back = client.fetch("mark", rows=(0, end), part_kinds=["state"])
            assert back is not None
            assert same_bits(back.layers, [(k[:, :end], v[:, :end]) for k, v in layers])
            assert [(p.info, bytes(p.data)) for p in back.parts] == [(part.info, part.data)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_no_type_becomes_another_one(run: Run, client, at, tmp_path: Path, dtype):
    bits = np.random.default_rng(1).bytes(2 * 40 * 8 * np.dtype(dtype).itemsize)
    side = np.frombuffer(bits, dtype).reshape(2, 40, 8)
    client.store("typed", layers=[(side, side)], token_ids=range(40), model="m")
    file = tmp_path / "typed.safetensors"
    assert run("export", "typed", file, *at).status == 0
    client.drop("typed")
    assert run("import", file, *at).status == 0
    back = client.fetch("typed")
    assert back is not None
    for array in back.layers[0]:
        assert array.dtype == dtype
        assert array.tobytes() == side.tobytes()


@pytest.mark.parametrize(
    "codec", ["raw", "fp16", "int8", "fp8", "turbo4", "mlx4g32", "mlx_affine(8,64,bf16)"]
)
def test_a_codec_does_not_change_its_codes(run: Run, client, at, tmp_path: Path, codec):
    tensors = [TensorLayout(s, side, 2, 64, DType.F32, codec) for s in (0, 3) for side in Side]
    parts = (PartInfo("state", 0, 90, 10), PartInfo("state", 0, 300, 300_000, "later"))
    segment = small(300, layout=Layout(tuple(tensors)), parts=parts)
    one, two = tmp_path / "one", tmp_path / "two"
    before = segment_file(one, segment)
    assert run("import", one, *at).status == 0
    assert run("export", "small", two, *at).status == 0
    assert two.read_bytes() == before


def test_other_tools_are_not_locked_out(run: Run, client, at, tmp_path: Path):
    layers = store(client, "open", 70)
    file = tmp_path / "open.safetensors"
    assert run("export", "open", file, *at).status == 0
    numpy, mlx = load_file(file), mx.load(str(file))
    assert isinstance(mlx, dict)
    for slot, (k, v) in enumerate(layers):
        for name, side in ((f"k.{slot}", k), (f"v.{slot}", v)):
            rows = side.transpose(1, 0, 2).view(np.uint16)
            assert np.array_equal(numpy[name].view(np.uint16), rows)
            assert np.array_equal(np.asarray(mlx[name].view(mx.uint16)), rows)
    assert numpy["token_ids"].tolist() == list(range(70))
    with safetensors.safe_open(file, "np") as opened:
        assert opened.metadata()["namespace"] == "open"
        assert opened.metadata()["model_id"] == "model"


def test_an_export_does_not_count_as_a_question(run: Run, client, at, tmp_path: Path):
    store(client, "asked")
    client.reset_stats()
    assert run("export", "asked", tmp_path / "file", *at).status == 0
    receipt = client.stats()
    assert (receipt.hits, receipt.misses) == (0, 0)


# Names


def test_a_name_of_the_callers_is_not_ignored(run: Run, client, at, tmp_path: Path):
    segment_file(tmp_path / "file", small())
    assert run("import", tmp_path / "file", "--namespace", "mine", *at).status == 0
    assert [info.namespace for info in client.list()] == ["mine"]


def test_a_file_without_a_name_is_not_left_without_one(run: Run, client, at, tmp_path: Path):
    segment_file(tmp_path / "file", small(namespace=""))
    stored = run("import", tmp_path / "file", "--json", *at).json
    assert [info.namespace for info in client.list()] == [stored["namespace"]]
    assert client.match(model="m", token_ids=range(3)).namespace == stored["namespace"]


def test_what_is_there_is_not_stored_twice(run: Run, client, at, tmp_path: Path):
    segment_file(tmp_path / "file", small())
    assert run("import", tmp_path / "file", "--json", *at).json["already_stored"] is False
    assert run("import", tmp_path / "file", "--json", *at).json["already_stored"] is True
    assert "was already stored" in run("import", tmp_path / "file", *at).out


def test_other_content_is_not_overwritten_unasked(run: Run, client, at, tmp_path: Path):
    layers = store(client, "small", 50)
    segment_file(tmp_path / "file", small())
    refused = run("import", tmp_path / "file", "--json", *at)
    assert (refused.status, refused.json["error"]["reason"]) == (1, "OTHER_CONTENT")
    kept = client.fetch("small")
    assert kept is not None
    assert same_bits(kept.layers, layers)
    assert run("import", tmp_path / "file", "--replace", *at).status == 0
    (info,) = client.list()
    assert info.token_count == 3


def test_a_child_is_not_stored_without_its_parent(run: Run, client, at, tmp_path: Path):
    child = small(100, base=60, parent="root", namespace="child")
    segment_file(tmp_path / "child", child)
    refused = run("import", tmp_path / "child", "--json", *at)
    assert (refused.status, refused.json["error"]["reason"]) == (1, "NOT_STORED")
    segment_file(tmp_path / "root", small(60, namespace="root"))
    assert run("import", tmp_path / "root", *at).status == 0
    assert run("import", tmp_path / "child", *at).status == 0
    whole = client.fetch("child")
    assert whole is not None
    assert whole.token_count == 100


def test_rows_without_tokens_are_not_stored_as_if_they_had_some(
    run: Run, client, at, tmp_path: Path
):
    client.register("rows", layout=RAW, model="m")
    refused = run("export", "rows", tmp_path / "file", "--json", *at)
    assert refused.json["error"]["reason"] == "NO_ROWS"
    for side in Side:
        rows = np.ones((1, 5, 4), np.float16)
        client.write_rows("rows", slot=0, side=side, first_row=0, rows=rows)
    exported = run("export", "rows", tmp_path / "file", *at)
    assert exported.status == 0
    assert "stored without token ids" in exported.out
    assert load_file(tmp_path / "file")["k.0"].shape == (5, 1, 4)
    refused = run("import", tmp_path / "file", "--namespace", "other", *at)
    assert refused.status == 1
    assert "token id" in refused.err
    assert client.fetch("other") is None


def test_a_whole_store_is_not_taken_for_a_prefix(run: Run, at, tmp_path: Path):
    snapshot = tmp_path / "snapshot"
    with tarfile.open(snapshot, "w") as archive:
        archive.addfile(tarfile.TarInfo(MARK))
    refused = run("import", snapshot, *at)
    assert refused.status == 1
    assert "--data" in refused.err
    for flags in (("--namespace", "name"), ("--replace",)):  # would have no effect
        refused = run("import", snapshot, "--data", tmp_path / "data", *flags, "--json")
        assert refused.json["error"]["reason"] == "INVALID"
        assert not (tmp_path / "data").exists()


# Damaged files


def test_no_flipped_bit_is_imported(tmp_path: Path):
    path = tmp_path / "file"
    whole = segment_file(path, small(parts=(PartInfo("state", 0, 3, 5, "text"),)))
    with transfer.opened(path) as source:
        transfer._check_pages(source, lambda done, total: None)
    descriptor = os.open(path, os.O_RDWR)
    with contextlib.closing(os.fdopen(descriptor, "rb+", buffering=0)):
        for index in range(8 * len(whole)):
            byte = whole[index // 8]
            os.pwrite(descriptor, bytes([byte ^ 1 << index % 8]), index // 8)
            with pytest.raises(CommandFailed, match="nothing was stored"), transfer.opened(
                path
            ) as source:  # fmt: skip
                transfer._check_pages(source, lambda done, total: None)
            os.pwrite(descriptor, bytes([byte]), index // 8)
    assert path.read_bytes() == whole


def _cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def _flip(path: Path, offset: int) -> None:
    with path.open("rb+") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: _flip(path, 3 * PAGE_BYTES),
        lambda path: _flip(path, -1),  # the last checksum itself
        lambda path: _flip(path, path.read_bytes().index(b"secret model")),
        lambda path: _cut(path, path.stat().st_size - 1),
        lambda path: _cut(path, path.stat().st_size // 2),
        lambda path: _cut(path, 100),
        lambda path: _cut(path, 7),
        lambda path: _cut(path, 0),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: path.write_bytes(b"\xff" * 100),
        lambda path: path.write_bytes(b"{}" * 100),
    ],
)
def test_a_damaged_file_stores_nothing(run: Run, client, at, tmp_path: Path, damage):
    path = tmp_path / "file"
    wide = Layout(tuple(TensorLayout(0, side, 8, 128, DType.F32) for side in Side))
    segment_file(path, small(150, layout=wide, model_id="secret model"))
    damage(path)
    refused = run("import", path, "--json", *at)
    assert refused.status == 1
    assert refused.json["error"]["reason"] == "CORRUPT"
    assert "nothing was stored" in refused.json["error"]["message"]
    assert list(client.list()) == []


def test_what_is_no_file_is_no_traceback(run: Run, at, tmp_path: Path):
    for path in (tmp_path, tmp_path / "none", tmp_path / "none" / "none"):
        refused = run("import", path, *at)
        assert refused.status == 1
        assert refused.err.startswith("pion-grpc: ")
        assert "Traceback" not in refused.err


def test_a_file_that_changes_after_it_was_checked_is_not_stored(client, server, tmp_path: Path):
    path = tmp_path / "file"
    wide = Layout(tuple(TensorLayout(0, side, 8, 128, DType.F32) for side in Side))
    segment_file(path, small(600, layout=wide))
    options = argparse.Namespace(
        address=server.address, tenant=None, password_file=None, timeout=5.0, **NO_TLS
    )
    with wired(options) as wire, transfer.opened(path) as source:
        transfer._check_pages(source, lambda done, total: None)
        _flip(path, 7 * PAGE_BYTES)
        with pytest.raises(CommandFailed, match="does not have its checksum"):
            transfer._upload(wire, source, "x", replace=False, advance=lambda done, total: None)
    assert list(client.list()) == []


# Files that are there


def test_nothing_stored_writes_no_file(run: Run, client, at, tmp_path: Path):
    store(client, "another")
    refused = run("export", "anothe", tmp_path / "file", *at)
    assert refused.status == 1
    assert "nothing is stored as 'anothe'" in refused.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_not_overwritten_unasked(run: Run, client, at, tmp_path: Path):
    store(client, "name")
    file = tmp_path / "file"
    file.write_text("precious")
    refused = run("export", "name", file, *at)
    assert refused.status == 1
    assert "--force" in refused.err
    assert file.read_text() == "precious"
    assert run("export", "name", file, "--force", *at).status == 0
    assert load_file(file)["token_ids"].size == 70
    assert run("export", "name", tmp_path, "--force", *at).status == 1
    assert run("export", "name", tmp_path / "none" / "file", *at).status == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_export_leaves_neither_a_part_nor_a_loss(
    run: Run, start_server, short_tmp: Path, tmp_path: Path
):
    server = start_server("--no-export")
    with Client(server.address) as client:
        wide = [(np.ones((8, 600, 128), np.float32),) * 2]
        client.store("name", layers=wide, token_ids=range(600), model="m")
        (segment,) = (server.directory / "segments").iterdir()
        _flip(segment, 9 * PAGE_BYTES)
        file = tmp_path / "file"
        file.write_text("the last good one")
        refused = run("export", "name", file, "--force", "--address", server.address)
        assert refused.status == 1
        assert "checksum" in refused.err
        assert file.read_text() == "the last good one"
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        with contextlib.suppress(errors.DataCorrupt):
            assert client.fetch("name") is None


def test_what_is_no_file_is_neither_replaced_nor_read(run: Run, client, at, tmp_path: Path):
    store(client, "name")
    (tmp_path / "precious").write_text("kept")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("precious")
    (tmp_path / "dangling").symlink_to("nothing")
    with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(tmp_path):
        bound.bind("socket")
    names = ("fifo", "link", "dangling", "socket")
    before = {name: (tmp_path / name).lstat().st_ino for name in names}
    for name in names:
        refused = run("export", "name", tmp_path / name, "--force", *at)
        assert (refused.status, refused.out) == (1, "")
        assert "not a regular file" in refused.err
    assert run("export", "name", "/dev/null", "--force", *at).status == 1
    assert Path("/dev/null").is_char_device()
    assert {name: (tmp_path / name).lstat().st_ino for name in names} == before
    assert (tmp_path / "precious").read_text() == "kept"

    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):  # a FIFO has nobody to wait for
        refused = run("import", path, *at)
        assert (refused.status, refused.out) == (1, "")
        assert "not a regular file" in refused.err


def test_others_cannot_read_what_was_exported(run: Run, client, at, tmp_path: Path):
    store(client, "private")
    assert run("export", "private", tmp_path / "file", *at).status == 0
    assert (tmp_path / "file").stat().st_mode & 0o077 == 0


def test_a_node_that_is_away_keeps_nobody_from_exporting_what_another_has(
    run: Run, start_server, short_tmp: Path, tmp_path: Path
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        away = f"127.0.0.1:{taken.getsockname()[1]}"
    here = start_server(listen="127.0.0.1:0").address
    with Client(here) as client:
        layers = [store(client, f"prefix {number}", 70) for number in range(4)]
    for number in range(len(layers)):
        for order in (f"{away},{here}", f"{here},{away}"):
            file = tmp_path / "file"
            ran = run("export", f"prefix {number}", file, "--force", "--address", order)
            assert ran.status == 0, ran.err
