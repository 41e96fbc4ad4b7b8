"""`KV.PREFIX.SAVE path`: one file that a fresh server is made of, and that endangers nothing."""

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pion_grpc.cli.main import main
from pion_grpc.errors import CannotStart, OverBudget
from pion_grpc.storage.store_snapshot import MARK, is_store_snapshot, restore_store_snapshot
from tests.conftest import ServerProcess
from tests.resp.conftest import Resp
from tests.resp.wire import Refused, Wire, fields

REFUSED = Refused(
    "ERR KV.PREFIX.SAVE: path must be relative to the data directory, and none of its own files"
)
ROWS = os.urandom(64 * 2 * 3_000)


def fill(wire: Wire) -> None:
    for name, codec in (("one", "fp16"), ("two", "turbo4")):
        wire("KV.PREFIX.REGISTER", name, 64, codec, "BLOCKS", 64, 1, bytes(8))
    for layer in range(3):
        wire("V.STOREBATCH", "one_pk", layer, 0, 3_000, ROWS, "FMT", "F16")
    wire("V.STOREBATCH", "two_pv", 0, 10, 5, bytes(64 * 4 * 5))
    wire("SSM.PREFIX.STORE", "one", 7, ROWS)
    wire("SET", "large", ROWS)
    wire("SET", "small", "v", "EX", 10_000)
    wire("ZADD", "z", "1.5", "m")


def contents(wire: Wire) -> list[object]:
    return [
        wire("KV.PREFIX.LOOKUP", "one"),
        wire("KV.PREFIX.LOOKUP", "two"),
        wire("KV.PREFIX.BLOCKS", "one"),
        wire("V.FETCH", "one_pk", "BATCH", 0, 3_000, "FMT", "NATIVE"),
        wire("V.FETCH", "two_pv", 0, "RANGE", 0, 20),
        wire("SSM.PREFIX.FETCH", "one", 7),
        wire("GET", "large"),
        wire("GET", "small"),
        wire("TTL", "small") > 0,
        wire("ZSCORE", "z", "m"),
        sorted(wire("KEYS", "*")),
    ]


@pytest.mark.parametrize("name", ["backup.pion", "deep/er/backup"])
def test_a_fresh_server_has_everything(
    start_resp: Callable[..., Resp], short_tmp: Path, name: str
) -> None:
    resp = start_resp()
    wire = resp.connect()
    fill(wire)
    (resp.store.directory.path / name).parent.mkdir(parents=True, exist_ok=True)
    expected = contents(wire)
    assert wire("KV.PREFIX.SAVE", name) == "OK"
    snapshot = resp.store.directory.path / name
    assert is_store_snapshot(snapshot)
    assert not list(resp.store.directory.path.rglob("*.tmp"))
    assert not list(resp.store.directory.run.glob("*snapshot*"))
    assert contents(wire) == expected, "saving elsewhere has changed what is stored"
    moved = short_tmp / "moved"
    snapshot.rename(moved)
    wire("FLUSHALL")
    wire("KV.PREFIX.DROP", "one", "two")
    resp.stop()
    restore_store_snapshot(moved, short_tmp / "fresh")
    fresh = Resp(short_tmp / "fresh")
    try:
        wire = fresh.connect()
        assert contents(wire) == expected
        assert wire("V.STOREBATCH", "one_pk", 0, 3_000, 1, bytes(256)) == "OK"
        assert wire("KV.PREFIX.SAVE") == "OK"
    finally:
        fresh.stop()


@pytest.mark.parametrize(
    ("stored", "asked", "answer"),
    [
        (("SET", "k", "v"), ("GET", "k"), b"v"),
        (("SSM.PREFIX.STORE", "s", 7, ROWS), ("SSM.PREFIX.FETCH", "s", 7), ROWS),
        (("PING",), ("DBSIZE",), 0),
    ],
)
def test_what_has_no_sessions_is_not_said_to_have_failed(
    start_resp: Callable[..., Resp],
    short_tmp: Path,
    stored: tuple[object, ...],
    asked: tuple[object, ...],
    answer: object,
) -> None:
    resp = start_resp()
    wire = resp.connect()
    wire(*stored)
    saved = (
        "OK" if answer else Refused("ERR KV.PREFIX.SAVE failed (no active sessions or io error)")
    )
    assert wire("KV.PREFIX.SAVE") == saved
    assert wire("KV.PREFIX.SAVE", "x") == "OK"
    restore_store_snapshot(resp.store.directory.path / "x", short_tmp / "fresh")
    fresh = Resp(short_tmp / "fresh")
    try:
        assert fresh.connect()(*asked) == answer
    finally:
        fresh.stop()


@pytest.mark.parametrize(
    "path",
    ["/tmp/x", "~/x", "..", "../x", "a/../x", "a/..", "a\nb", "", "catalog.db", "catalog.db-wal",
     "segments/x", "rows/x", "blobs/x", "run/x.lock", "host-token", b"a\0b",
     ".", "./", "./catalog.db", ".//.//catalog.db", "catalog.db/", "catalog.db/.", "./catalog.db-wal",
     "segments", "run", "export/x", "not-adopted/x", "Not-Adopted", "EXPORT", "catalog.db-journal",
     "catalog.db.pion",
     "CATALOG.DB", "./Catalog.db", "\u017fegments/x", "./segments/x", "./Rows//x", "./host-token"],
)  # fmt: skip
def test_no_path_leads_out_of_the_directory_or_onto_its_files(
    start_resp: Callable[..., Resp], path: str
) -> None:
    resp = start_resp()
    wire = resp.connect()
    fill(wire)
    expected = contents(wire)
    assert wire("KV.PREFIX.SAVE", path) == REFUSED
    assert contents(wire) == expected
    assert not Path("/tmp/x").exists()


def test_a_name_that_only_begins_like_one_of_the_servers_own_is_not_refused(
    start_resp: Callable[..., Resp],
) -> None:
    resp = start_resp()
    wire = resp.connect()
    fill(wire)
    expected = contents(wire)
    data = resp.store.directory.path
    (data / "deep").mkdir()
    names = (
        "runs.pion", "exported-2026.pion", "segments.tar", "rows-of-monday", "blobs.bak", "catalog",
        "host-token.pion", "not-adopted.pion", "deep/run", "deep/catalog.db",
    )  # fmt: skip
    for name in names:
        assert wire("KV.PREFIX.SAVE", name) == "OK", name
        assert is_store_snapshot(data / name), name
    assert contents(wire) == expected


def test_a_word_too_many_saves_nothing(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    wire("KV.PREFIX.REGISTER", "ns", 8, "fp16")
    assert wire("KV.PREFIX.SAVE", "one", "two") == Refused("ERR syntax error")
    assert not (resp.store.directory.path / "one").exists()
    assert fields(wire("KV.PREFIX.INFO"))["wal_appended"] == "2", "nothing has been saved"


def test_nothing_but_an_older_snapshot_is_replaced(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    fill(wire)
    data = resp.store.directory.path
    (data / "notes").write_text("of somebody else")
    (data / "folder").mkdir()
    (data / "link").symlink_to(data / "catalog.db")
    (data / "dangling").symlink_to(data / "nowhere")
    os.mkfifo(data / "pipe")
    before = {path.name: path.lstat().st_ino for path in data.iterdir()}
    for name in ("notes", "folder", "link", "dangling", "pipe", "./notes"):
        assert wire("KV.PREFIX.SAVE", name).text.startswith("ERR KV.PREFIX.SAVE failed ("), name
    assert {path.name: path.lstat().st_ino for path in data.iterdir()} == before
    assert (data / "notes").read_text() == "of somebody else"
    assert wire("KV.PREFIX.SAVE", "x") == "OK"
    first = (data / "x").stat().st_ino
    wire("SET", "new", "v")
    assert wire("KV.PREFIX.SAVE", "./x") == "OK"
    assert (data / "x").stat().st_ino != first


def test_a_directory_that_is_not_there_is_an_error(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    fill(wire)
    data = resp.store.directory.path
    (data / "notes").write_text("of somebody else")
    before = set(data.iterdir())
    for name in ("nowhere", "notes", "no/where"):
        assert wire("KV.PREFIX.SAVE", f"{name}/x") == Refused(
            f"ERR KV.PREFIX.SAVE failed ('{name}/x' cannot be written: there is no directory '{name}')"
        )
    assert set(data.iterdir()) == before
    assert wire("KV.PREFIX.LOOKUP", "one") == "HIT"


def test_no_error_names_the_files_of_the_machine(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    name = "n" * 300  # more than file systems take
    assert wire("KV.PREFIX.SAVE", name) == Refused(
        f"ERR KV.PREFIX.SAVE failed ('{name}' cannot be written: File name too long)"
    )


def test_a_snapshot_that_does_not_fit_evicts_nothing(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp(budget_bytes=20 << 20)
    wire = resp.connect()
    for name in ("a", "b", "c"):  # more than half of the budget together
        wire("KV.PREFIX.REGISTER", name, 4_096, "fp16")
        wire("V.STOREBATCH", f"{name}_pk", 0, 0, 420, bytes(420 * 8_192), "FMT", "F16")
        assert wire("KV.PREFIX.SAVE") == "OK"
    assert wire("KV.PREFIX.SAVE", "x").text.startswith("ERR KV.PREFIX.SAVE failed (")
    assert [wire("KV.PREFIX.LOOKUP", name) for name in ("a", "b", "c")] == ["HIT"] * 3
    assert not (resp.store.directory.path / "x").exists()
    assert not list(resp.store.directory.path.rglob("*.tmp"))


def segments(resp: Resp) -> int:
    return sum(path.stat().st_size for path in resp.store.directory.segments.iterdir())


def unsynced(resp: Resp) -> int:
    with resp.store.workshop.catalog.read() as transaction:
        return len(transaction.unsynced())


def test_a_row_behind_a_long_gap_neither_fills_the_disk_nor_ends_saving_for_all(
    start_resp: Callable[..., Resp],
) -> None:
    resp = start_resp()
    wire = resp.connect()
    wire("V.CREATE", "gap", 8_192, "VQUANT", "fp16")
    wire("V.STOREBATCH", "gap", 0, 199_999, 1, b"r" * 16_384, "FMT", "F16")  # 3.3 GB of zeros
    fill(wire)
    for _ in range(2):
        assert wire("SAVE") == "OK"
        assert unsynced(resp) == 0
        assert wire("KV.PREFIX.SAVE", "x") == "OK"
        with resp.store.workshop.catalog.read() as transaction:
            assert [row.namespace for row in transaction.live(None)] == ["gap"]
        assert 3 * len(ROWS) < segments(resp) < 3 * len(ROWS) + (1 << 20)
    got = wire("V.FETCH", "gap", 0, "RANGE", 199_998, 200_000, "FMT", "NATIVE")
    assert got == bytes(16_384) + b"r" * 16_384


def test_what_has_no_room_for_its_segment_keeps_nobody_else_from_being_saved(
    start_resp: Callable[..., Resp],
) -> None:
    resp = start_resp(budget_bytes=32 << 20)
    wire = resp.connect()
    for name, rows in (("large", 1_200), ("one", 10), ("two", 10)):
        wire("V.CREATE", name, 8_192, "VQUANT", "fp16")
        assert (
            wire("V.STOREBATCH", name, 0, 0, rows, os.urandom(rows * 16_384), "FMT", "F16") == "OK"
        )
    before = contents_of(wire, "large", "one", "two")
    assert wire("SAVE") == "OK"
    assert unsynced(resp) == 0
    with resp.store.workshop.catalog.read() as transaction:
        assert [row.namespace for row in transaction.live(None)] == ["large"]
    assert [problem.partition(":")[0] for problem in resp.store.space.losses.report().troubles] == [
        "'large' is not sealed"
    ]
    with pytest.raises(OverBudget):  # who asks for this very thing is told
        resp.store.save(None, [])
    assert contents_of(wire, "large", "one", "two") == before


def contents_of(wire: Wire, *sids: str) -> list[object]:
    return [wire("V.FETCH", sid, "BATCH", 0, 1_200, "FMT", "NATIVE") for sid in sids]


def test_what_is_evicted_meanwhile_is_not_in_it(
    start_resp: Callable[..., Resp], short_tmp: Path
) -> None:
    resp = start_resp()
    wire = resp.connect()
    fill(wire)
    wire("KV.PREFIX.SAVE")
    for path in (*resp.store.directory.segments.iterdir(), *resp.store.directory.blobs.iterdir()):
        path.unlink()  # as an eviction between the copy of the catalogue and its files does it
    assert wire("KV.PREFIX.SAVE", "x") == "OK"
    snapshot = resp.store.directory.path / "x"
    restore_store_snapshot(snapshot, short_tmp / "fresh")
    fresh = Resp(short_tmp / "fresh")
    try:
        wire = fresh.connect()
        assert wire("KV.PREFIX.LOOKUP", "one") == "MISS"
        assert wire("SSM.PREFIX.FETCH", "one", 7) is None
        assert wire("GET", "large") is None
        assert wire("GET", "small") == b"v"
    finally:
        fresh.stop()


_DIES_WHILE_IT_SAVES = """
import os, signal, sys
from pathlib import Path
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.saving import snapshot_to
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.files import Files

class Killed(Files):
    def rename(self, source, target):
        os.kill(os.getpid(), signal.SIGKILL)

store = PrefixStore(DataDirectory(Path(sys.argv[1])), budget_bytes=1 << 30, files=Killed())
snapshot_to(store, "x")
"""


def test_a_save_that_was_killed_leaves_nothing(
    start_resp: Callable[..., Resp], short_tmp: Path
) -> None:
    resp = start_resp()
    fill(resp.connect())
    assert resp.connect()("SAVE") == "OK"
    resp.stop()
    run = short_tmp / "data" / "run"
    command = [sys.executable, "-c", _DIES_WHILE_IT_SAVES, str(short_tmp / "data")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (dead,) = run.glob("*.lock")
    (left,) = run.glob(f"{dead.stem}-snapshot-*")
    assert list(left.glob("*.tar"))
    older = run / "0123456789ab-snapshot"  # of which nobody has a lock any more
    (older / "segments").mkdir(parents=True)
    (older / "segments" / "x").touch()
    resp = start_resp()
    mine = run / f"{resp.store.directory.instance}-snapshot-x"
    mine.mkdir()
    resp.store.space.bury_dead_instances()
    assert [path for path in run.iterdir() if path.is_dir()] == [mine], "of one that is at work"
    assert not dead.exists()
    assert not (short_tmp / "data" / "x").exists()
    assert resp.connect()("KV.PREFIX.LOOKUP", "one") == "HIT"


def test_saves_at_once_do_not_end_each_other(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    fill(resp.connect())
    wires = [resp.connect() for _ in range(6)]
    for index, wire in enumerate(wires):
        wire.send("KV.PREFIX.SAVE", f"x{index % 3}")
    assert [wire.read() for wire in wires] == ["OK"] * 6


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_nothing_is_made_of_a_snapshot_that_is_not_what_was_saved(
    start_resp: Callable[..., Resp], short_tmp: Path
) -> None:
    resp = start_resp()
    wire = resp.connect()
    wire("V.CREATE", "s", 64, "VQUANT", "fp16")
    wire("V.STOREBATCH", "s", 0, 0, 100, ROWS[: 64 * 2 * 100], "FMT", "F16")
    wire("SET", "large", ROWS[:70_000])
    assert wire("KV.PREFIX.SAVE", "x") == "OK"
    saved = (resp.store.directory.path / "x").read_bytes()
    whole = short_tmp / "whole"
    (whole / "unfinished-import" / "segments").mkdir(parents=True)  # of an import that was killed
    restore_store_snapshot(resp.store.directory.path / "x", whole)
    names = sorted(files_of(whole))
    assert [name.partition("/")[0] for name in names] == ["blobs", "catalog.db", "segments"]
    damaged, target = short_tmp / "damaged", short_tmp / "fresh"
    chance = random.Random(20261130)
    offsets = [chance.randrange(len(saved)) for _ in range(60)]
    offsets += [saved.index(files_of(whole)[name]) + 5_000 for name in names]
    inside = offsets[60:]
    for offset in offsets:
        flipped = bytearray(saved)
        flipped[offset] ^= 1 << chance.randrange(8)
        damaged.write_bytes(flipped)
        if offset in inside or chance.random() < 0.5:
            target.mkdir()  # as it may be there, empty, and is then left so
        was_there = target.exists()
        try:
            restore_store_snapshot(damaged, target)
        except CannotStart:
            assert target.exists() == was_there
            assert not was_there or not list(target.iterdir())
        else:
            assert offset not in inside
            assert files_of(target) == files_of(whole), "harmless: between two members"
        shutil.rmtree(target, ignore_errors=True)
    for length in (
        0,
        1_000,
        len(saved) // 2,
        len(saved) // 2 // 512 * 512,
        saved.index(b"sha256sums"),
    ):
        damaged.write_bytes(saved[:length])
        with pytest.raises(CannotStart):
            restore_store_snapshot(damaged, target)
        assert not target.exists()


def test_a_server_started_on_an_import_has_everything(
    start_server: Callable[..., ServerProcess], short_tmp: Path
) -> None:
    server = start_server("--resp", "127.0.0.1:0")
    wire = Wire(server.ready["resp"])
    fill(wire)
    expected = contents(wire)
    assert wire("KV.PREFIX.SAVE", "x") == "OK"
    wire.close()
    server.kill()
    fresh = short_tmp / "fresh"
    command = ["import", str(server.directory / "x"), "--data", str(fresh), "--json"]
    assert main(command) == 0
    assert main(command) == 1, "a directory that is not empty"
    assert not fresh.stat().st_mode & 0o077, "others could read it"
    server = start_server("--resp", "127.0.0.1:0", directory=fresh)
    wire = Wire(server.ready["resp"])
    assert contents(wire) == expected
    wire.close()


def test_what_is_no_snapshot_makes_no_directory(short_tmp: Path) -> None:
    import tarfile

    other = short_tmp / "other"
    other.write_bytes(os.urandom(10_000))
    with pytest.raises(CannotStart, match="not a snapshot"):
        restore_store_snapshot(other, short_tmp / "fresh")
    for name in ("../evil", "/evil", "segments/../../evil", "host-token", "segments/.."):
        hostile = short_tmp / "hostile"
        with tarfile.open(hostile, "w") as archive:
            archive.addfile(tarfile.TarInfo(MARK))
            archive.addfile(tarfile.TarInfo(name))
        target = short_tmp / f"fresh{len(name)}"
        with pytest.raises(CannotStart, match="no snapshot has"):
            restore_store_snapshot(hostile, target)
    assert not (short_tmp / "evil").exists()
    (short_tmp / "full").mkdir()
    (short_tmp / "full" / "x").touch()
    with tarfile.open(hostile, "w") as archive:
        archive.addfile(tarfile.TarInfo(MARK))
    with pytest.raises(CannotStart, match="not empty"):
        restore_store_snapshot(hostile, short_tmp / "full")
