"""What happens between two steps of somebody else: between a look and an opening, a plan and its end."""

import io
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PosixPath

import numpy as np
import pytest

from pion_grpc.core.copying import Copier, CopyRequest
from pion_grpc.core.declaration import Declaration, LayerSpec
from pion_grpc.core.exporting import Exports
from pion_grpc.core.keys import Keys
from pion_grpc.core.keyspace import Keyspace, Work
from pion_grpc.core.reading import Reading
from pion_grpc.core.session_values import SessionInfo
from pion_grpc.core.sessions import Sessions
from pion_grpc.core.values import ExportExtent, FetchQuery, WriteRowsHeader
from pion_grpc.errors import Corrupt
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.files import Files, PowerCut
from pion_grpc.storage.pages import RowFile
from pion_grpc.storage.store_snapshot import (
    _archive,
    restore_store_snapshot,
    write_store_snapshot,
)
from pion_wire.layout import DType, Side
from tests.core.support import (
    SMALL,
    TENANT,
    Interrupted,
    Machine,
    Meanwhile,
    power_cut_machine,
    put,
    rows_of,
    stray_files,
    tokens,
    truth,
    usage,
    write,
)

HALVES = Declaration(LayerSpec(8, "fp16"))
THREE = memoryview(np.ones((3, 8), np.float32)).cast("B")
"""Three rows of a layer of that."""


def declared(sessions: Sessions, name: str, layers: int = 1) -> None:
    """Declares both sides of a namespace, and stores three rows in each of their layers."""
    sessions.register(TENANT, name, {Side.K: HALVES, Side.V: HALVES})
    for sid in (f"{name}_pk", f"{name}_pv"):
        for layer in range(layers):
            sessions.write(TENANT, sid, layer, 0, 3, THREE, DType.F32)


# -- sessions


def test_no_side_goes_for_another_while_somebody_writes_to_its_prefix(machine: Machine) -> None:
    store = machine.start()
    sessions = Sessions(store, sides_max=2)
    sessions.register(TENANT, "n", {Side.K: HALVES, Side.V: HALVES})
    uploads = [store.write_rows(TENANT, WriteRowsHeader("n", 0, side, 0, 3)) for side in Side]
    for name in ("a", "b"):
        sessions.create(TENANT, f"{name}_pk", HALVES, exactly=True)
        assert sessions.info(TENANT, f"{name}_pk") is not None, "acknowledged, and gone"
    for upload in uploads:
        upload.write_arrays([memoryview(bytes(48))])
        upload.publish()
    assert sessions.info(TENANT, "a_pk") is None, "nobody wrote to it"
    sessions.create(TENANT, "c_pk", HALVES, exactly=True)
    assert sessions.totals().sides == 2
    store.drop(TENANT, ["n", "a", "b", "c"])
    assert list(store.directory.rows.iterdir()) == []
    assert usage(store) == 0


class Between(Interrupted, Sessions):
    """Sessions of which one has just been looked at."""

    def info(self, tenant: str, sid: str) -> SessionInfo | None:
        info = super().info(tenant, sid)
        self.happen()
        return info


def test_no_session_has_the_rows_of_one_name_and_the_layers_of_its_predecessor(
    machine: Machine,
) -> None:
    store = machine.start()
    between = Between(store)
    declared(between, "n", layers=4)

    def replaced() -> None:
        other = Sessions(store)
        other.drop(TENANT, ["n"])
        declared(other, "n", layers=2)

    between.happens = replaced
    reading = between.open(TENANT, "n_pk")
    assert reading is not None
    reading.close()
    assert reading.layer_count == 2


# -- files for clients on this host


def test_a_copy_that_two_make_at_once_is_there_for_both(tmp_path: Path) -> None:
    files = Meanwhile()
    machine = Machine(tmp_path / "data", files)
    store, other = machine.start(), machine.start()
    declared(Sessions(store), "n")
    request = CopyRequest("n_pk", "n_pv", 0, 3, layers=1, heads=2, head_dim=4)
    paths: list[Path] = []
    files.happens = lambda: paths.append(Copier(other, Sessions(other)).copy(TENANT, request))
    paths.append(Copier(store, Sessions(store)).copy(TENANT, request))
    assert len(paths) == 2
    assert all(path.exists() for path in paths)
    assert set(paths) == set((tmp_path / "data" / "export").iterdir())
    store.drop(TENANT, ["n"])
    machine.close()


class BetweenExports(Interrupted, Exports):
    """Exports that have just been checked, and are not leased yet."""

    def extents(self, reading: Reading) -> Iterator[ExportExtent]:
        yield from super().extents(reading)
        self.happen()


@pytest.mark.parametrize("grown", ["p", "c"])
def test_an_export_names_no_file_that_was_sealed_anew_before_it_was_leased(
    machine: Machine, grown: str
) -> None:
    store, other = machine.start(), machine.start()
    put(store, "p", tokens(200))
    put(store, "c", tokens(150), parent="p", base=100)
    exports = BetweenExports()
    store.exports = exports

    def sealed_anew() -> None:
        for side in Side:
            write(other, grown, 200 if grown == "p" else 150, b"x" * 16, side=side)
        other.save(TENANT, [grown])

    exports.happens = sealed_anew
    exported = store.export(TENANT, FetchQuery("c"), 1_000)
    assert exports.happens is None
    assert len(exported.extents) == 2
    for extent in exported.extents:
        assert store.directory.resolve(extent.file.file_name).exists()


class Going(PosixPath):
    """A file that goes as soon as somebody has asked whether it is there."""

    def exists(self) -> bool:
        there = super().exists()
        self.unlink(missing_ok=True)
        return there


def test_a_row_file_that_goes_before_it_is_opened_is_no_error(tmp_path: Path) -> None:
    path = Going(tmp_path / "x.rows")
    path.touch()
    file = RowFile(Files(), path)
    file.write(b"rows")
    file.close()
    assert path.read_bytes() == b"rows"


# -- keys


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_damaged_value_that_is_added_to_does_not_block_those_who_write(
    machine: Machine, damage: str
) -> None:
    store = machine.start()
    keyspace = Keyspace(store)
    value = keyspace.blobs.write(TENANT, b"x" * 100_000)
    keyspace.writing([Work(TENANT, lambda keys: keys.set(b"k", value))])
    (path,) = store.directory.blobs.iterdir()
    path.unlink() if damage == "gone" else path.write_bytes(b"y" * 100_000)

    def append(keys: Keys) -> int:
        return keys.append(b"k", b"more")

    both = [Work(TENANT, append), Work(TENANT, lambda keys: keys.set(b"other", b"1"))]
    refused, done = keyspace.writing(both)
    assert isinstance(refused, Corrupt)
    assert "the value of key 'k'" in str(refused)
    assert done is None
    assert keyspace.writing([Work(TENANT, append)]) == [4], "it was taken out"
    assert list(store.directory.blobs.iterdir()) == []


def test_a_value_made_in_a_transaction_that_is_undone_leaves_no_file(tmp_path: Path) -> None:
    machine = power_cut_machine(tmp_path / "data")
    store, files = machine.start(), machine.files
    assert isinstance(files, PowerCut)
    keyspace = Keyspace(store)

    def refused(keys: Keys) -> None:
        keys.append(b"k", b"x" * 100_000)
        raise LookupError

    (error,) = keyspace.writing([Work(TENANT, refused)])
    assert isinstance(error, LookupError)
    for room in (0, 50_000, 100_000, 104_000):
        files.fail_after_bytes = files.written_bytes + room
        (error,) = keyspace.writing([Work(TENANT, lambda keys: keys.append(b"k", b"x" * 100_000))])
        assert isinstance(error, Exception)
        files.fail_after_bytes = None
    assert list(store.directory.blobs.iterdir()) == []
    assert stray_files(store) == []
    assert usage(store) == 0
    machine.close()


# -- counters


def test_counting_that_several_begin_anew_at_once_does_not_fail(machine: Machine) -> None:
    store = machine.start()
    store.ledger.lookup(hit=True)

    def begin_anew(_: int) -> None:
        store.receipt.reset()
        store.receipt.publish()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(begin_anew, range(400))) == [None] * 400
    assert store.receipt.get().hits == 0
    kinds = {
        path.name.removeprefix(store.directory.instance) for path in store.directory.run.iterdir()
    }
    assert kinds == {".lock", "-uses", "-counters", "counters-reset"}


# -- snapshots of a store


class BetweenNames(Interrupted, DataDirectory):
    """A directory in which a first file is about to be looked for."""

    def resolve(self, name: str) -> Path:
        self.happen()
        return super().resolve(name)


def test_what_is_replaced_or_sealed_while_a_snapshot_is_made_is_in_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "data")
    store = machine.start()
    keyspace = Keyspace(store)

    def set_key(letter: bytes) -> None:
        value = keyspace.blobs.write(TENANT, letter * 100_000)
        keyspace.writing([Work(TENANT, lambda keys: keys.set(b"k", value))])

    def meanwhile() -> None:
        set_key(b"b")
        store.save(TENANT, ["p"])
        put(store, "q", tokens(40), replace=True)
        store.space.sweep()

    set_key(b"a")
    put(store, "q", tokens(50))
    put(store, "p", tokens(200))
    put(store, "c", tokens(150), parent="p", base=100)
    for side in Side:
        write(store, "p", 200, b"x" * 16, side=side)
    directory = BetweenNames(tmp_path / "data")
    directory.happens = meanwhile
    target, files = tmp_path / "data" / "snapshot", store.workshop.files
    write_store_snapshot(store.workshop.catalog, directory, files, target, 1 << 30)
    assert directory.happens is None
    directory.close()
    machine.close()
    restore_store_snapshot(target, tmp_path / "restored")
    fresh = Machine(tmp_path / "restored")
    store = fresh.start()
    whole = Keyspace(store).reading(TENANT, lambda keys: keys.whole(b"k"))
    assert whole in (b"a" * 100_000, b"b" * 100_000)
    assert rows_of(store, "c") == truth(SMALL, tokens(150))
    grown = {index: rows + b"x" * 16 for index, rows in truth(SMALL, tokens(200)).items()}
    assert rows_of(store, "p") == grown
    assert rows_of(store, "q") in (truth(SMALL, tokens(50)), truth(SMALL, tokens(40)))
    fresh.close()


class Cutting(io.BytesIO):
    """Takes an archive, and cuts a file once its size has been written down."""

    def __init__(self, cut: Path, size: int) -> None:
        super().__init__()
        self._cut, self._size = cut, size

    def write(self, data: bytes) -> int:
        if self._cut.name.encode() in data[:512]:
            with self._cut.open("r+b") as file:
                file.truncate(self._size)
        return super().write(data)


def test_a_row_file_that_an_abandoned_write_is_cut_from_meanwhile_spoils_no_snapshot(
    tmp_path: Path,
) -> None:
    rows = tmp_path / "one.rows"
    rows.write_bytes(b"named" + b"abandoned" * 5_000)
    archive = Cutting(rows, 5)
    _archive(archive, tmp_path, [rows.name])
    archive.seek(0)
    with tarfile.open(fileobj=archive) as members:
        member = members.extractfile(rows.name)
        assert member is not None
        assert member.read().startswith(b"named")
