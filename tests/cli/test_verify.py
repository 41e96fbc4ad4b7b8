"""`verify`: damage is found wherever it is, and nowhere else, with and without a server."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest

from pion_client import Client
from pion_grpc.core.checkup import check_directory
from pion_grpc.core.keys import Keys
from pion_grpc.core.keyspace import Keyspace, Work
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.errors import CannotStart
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.schema import SCHEMA_VERSION
from pion_wire.limits import PAGE_BYTES
from tests.cli.conftest import Run, store
from tests.conftest import ServerProcess

WIDE_TOKENS = 600
"""Of the prefix whose file has many pages."""


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a prefix of many pages, a chain and live prefixes, its server stopped."""
    directory = tmp_path_factory.mktemp("example") / "data"
    server = ServerProcess(directory, listen="127.0.0.1:0")
    with Client(server.address) as client:
        wide = np.random.default_rng(3).standard_normal((8, WIDE_TOKENS, 128), np.float32)
        client.store("wide", layers=[(wide, wide)], token_ids=range(WIDE_TOKENS), model="m")
        store(client, "root", 70)
        store(client, "child", 110, parent="root", base=70)
        store(client, "live", 40)
        rows = np.ones((2, 5, 8), np.float16)
        for slot in (0, 1):
            for side in "kv":
                client.write_rows("live", slot=slot, side=side, first_row=40, rows=rows)
        store(client, "sealed again", 40)
        client.write_rows("sealed again", slot=0, side="k", first_row=40, rows=rows)
        client.save("sealed again")
    assert server.stop() == 0
    return directory


@pytest.fixture
def stopped(example: Path, short_tmp: Path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(example, short_tmp / "data"))


def catalogue(directory: Path, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    connection = apsw.Connection(str(directory / "catalog.db"))
    try:
        return connection.execute(statement, values).fetchall()
    finally:
        connection.close()


def file_of(directory: Path, name: str) -> Path:
    ((file,),) = catalogue(directory, "SELECT file FROM prefix WHERE namespace = ?", name)
    return directory / str(file)


def rows_file(directory: Path) -> Path:
    (file,) = (directory / "rows").iterdir()
    return file


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def damaged(run: Run, directory: Path) -> list[str]:
    ran = run("verify", "--data", directory, "--json")
    names = [damage["name"] for damage in ran.json["damaged"]]
    assert ran.status == (1 if names else 0)
    return sorted(names)


# Nothing is wrong


def test_what_is_sound_is_not_called_damaged(run: Run, stopped: Path):
    ran = run("verify", "--data", stopped, "--json")
    assert (ran.status, ran.json["damaged"], ran.json["prefixes"]) == (0, [], 5)
    stored = sum(p.stat().st_size for d in ("segments", "rows") for p in (stopped / d).iterdir())
    assert 0.9 * stored < ran.json["bytes_read"] <= stored
    assert "everything is as it was stored: 5 prefixes" in run("verify", "--data", stopped).out


def test_nothing_that_is_stored_is_changed(run: Run, stopped: Path):
    def content() -> dict[str, bytes]:
        files = (p for p in stopped.rglob("*") if p.is_file())
        return {str(p): p.read_bytes() for p in files if not p.name.endswith(("-shm", "-wal"))}

    before = content()
    assert run("verify", "--data", stopped).status == 0
    assert content() == before


def test_a_server_at_work_does_not_look_damaged(start_server):
    server = start_server()
    done = threading.Event()
    failed: list[BaseException] = []

    def work(worker: int) -> None:
        rows = np.ones((2, 3, 8), np.float16)
        with Client(server.address) as client:
            try:
                for turn in range(10_000):
                    name = f"{worker} {turn % 3}"
                    store(client, name, 64, replace=True)
                    store(client, f"{name} child", 100, parent=name, base=64, replace=True)
                    client.drop(f"{name} child")
                    for slot in (0, 1):
                        client.write_rows(name, slot=slot, side="k", first_row=64, rows=rows)
                    client.save(name)
                    client.drop(name)
                    if done.is_set():
                        return
            except BaseException as error:
                failed.append(error)
                raise

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    try:
        checked = 0
        while checked < 200 and not failed:
            checkup = check_directory(server.directory)
            assert checkup.damaged == []
            checked += checkup.prefixes
    finally:
        done.set()
        for worker in workers:
            worker.join()
    assert failed == []


def test_a_killed_server_does_not_look_damaged(run: Run, start_server):
    server = start_server()
    with Client(server.address) as client:
        store(client, "kept", 300)
    server.kill()
    ran = run("verify", "--data", server.directory, "--json")
    assert (ran.status, ran.json["prefixes"], ran.json["damaged"]) == (0, 1, [])


def test_progress_does_not_end_before_the_end(stopped: Path):
    seen: list[tuple[int, int]] = []
    check_directory(stopped, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0


# Something is wrong

DAMAGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a bit in a page": (lambda d: flip(file_of(d, "wide"), 9 * PAGE_BYTES), ["wide"]),
    "a bit in the header": (lambda d: flip(file_of(d, "wide"), 100), ["wide"]),
    "a bit in a checksum": (lambda d: flip(file_of(d, "wide"), -1), ["wide"]),
    "a file cut short": (
        lambda d: os.truncate(file_of(d, "wide"), 3 * PAGE_BYTES),
        ["wide"],
    ),
    "a file gone": (lambda d: file_of(d, "wide").unlink(), ["wide"]),
    "an empty file": (lambda d: os.truncate(file_of(d, "wide"), 0), ["wide"]),
    "another prefix's file": (
        lambda d: shutil.copy(file_of(d, "root"), file_of(d, "wide")) and None,
        ["wide"],
    ),
    "a parent": (lambda d: flip(file_of(d, "root"), -100), ["child", "root"]),
    "a child": (lambda d: flip(file_of(d, "child"), -100), ["child"]),
    "rows that were appended": (lambda d: flip(rows_file(d), 17), ["live"]),
    "appended rows cut short": (
        lambda d: os.truncate(rows_file(d), rows_file(d).stat().st_size - 1),
        ["live"],
    ),
    "appended rows gone": (lambda d: rows_file(d).unlink(), ["live"]),
    "the segment under appended rows": (lambda d: flip(file_of(d, "live"), -200), ["live"]),
    "a segment sealed again": (
        lambda d: flip(file_of(d, "sealed again"), -200),
        ["sealed again"],
    ),
    "tokens that matches are answered with": (
        lambda d: (
            catalogue(
                d,
                "UPDATE tokens SET token_ids = zeroblob(length(token_ids)) WHERE prefix ="
                " (SELECT id FROM prefix WHERE namespace = 'wide')",
            )
            and None
        ),
        ["wide"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_not_overlooked(run: Run, stopped: Path, damage: str):
    spoil, names = DAMAGES[damage]
    spoil(stopped)
    assert damaged(run, stopped) == names


def test_all_damage_is_told_not_only_the_first(run: Run, stopped: Path):
    for name in ("wide", "child", "live"):
        flip(file_of(stopped, name), -200)
    assert damaged(run, stopped) == ["child", "live", "wide"]
    shown = run("verify", "--data", stopped)
    assert shown.status == 1
    assert "3 damaged" in shown.out
    for name in ("wide", "child", "live", "does not have its checksum"):
        assert name in shown.out


def test_rows_that_only_children_need_are_not_left_out(run: Run, start_server):
    server = start_server()
    with Client(server.address) as client:
        store(client, "root", 70)
        store(client, "child", 110, parent="root", base=70)
        file = file_of(server.directory, "root")
        client.drop("root")
    server.stop()
    flip(file, -100)
    assert damaged(run, server.directory) == ["child", "root"]
    assert "(dropped, kept for its children)" in run("verify", "--data", server.directory).out


def test_damage_is_found_while_a_server_runs(run: Run, start_server):
    server = start_server()
    with Client(server.address) as client:
        store(client, "good", 70)
        store(client, "bad", 71)
        flip(file_of(server.directory, "bad"), -100)
        assert damaged(run, server.directory) == ["bad"]
        # The server meets it in its turn and takes it out: there is nothing left to find.
        assert client.fetch("bad") is None
        assert client.describe().corrupt_count == 1
        assert damaged(run, server.directory) == []


# Values of keys


@pytest.fixture
def keyed(tmp_path: Path) -> Path:
    """A directory with a large value and a small one."""
    store = PrefixStore(DataDirectory(tmp_path / "data"), budget_bytes=1 << 30)
    keyspace = Keyspace(store)
    values = {b"large": os.urandom(3 * PAGE_BYTES + 5), b"small": b"small"}

    def put(keys: Keys) -> None:
        for name, value in values.items():
            keys.set(name + b"\xff", value)

    assert keyspace.writing([Work("tenant", put)]) == [None]
    store.close()
    return tmp_path / "data"


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path, 2 * PAGE_BYTES),
        lambda path: os.truncate(path, PAGE_BYTES),
        lambda path: path.unlink(),
    ],
)
def test_a_damaged_value_of_a_key_is_not_overlooked(run: Run, keyed: Path, damage):
    sound = run("verify", "--data", keyed, "--json")
    assert (sound.status, sound.json["values"], sound.json["damaged"]) == (0, 1, [])
    assert sound.json["bytes_read"] == 3 * PAGE_BYTES + 5
    (file,) = (keyed / "blobs").iterdir()
    damage(file)
    ran = run("verify", "--data", keyed, "--json")
    assert ran.status == 1
    (found,) = ran.json["damaged"]
    assert (found["kind"], found["tenant"], found["name"]) == ("value", "tenant", "large\\xff")
    assert "tenant:large" in run("verify", "--data", keyed).out


# Not a data directory


def test_a_directory_without_a_catalogue_is_not_called_sound(run: Run, tmp_path: Path):
    for directory in (tmp_path, tmp_path / "none"):
        ran = run("verify", "--data", directory)
        assert (ran.status, ran.out) == (1, "")
        assert "is not a data directory" in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def database(tmp_path: Path) -> Iterator[apsw.Connection]:
    connection = apsw.Connection(str(tmp_path / "catalog.db"))
    yield connection
    connection.close()


def test_another_programs_database_is_not_read(run: Run, tmp_path: Path, database):
    database.execute("CREATE TABLE prefix (id)")
    assert "belongs to another program" in run("verify", "--data", tmp_path).err


def test_another_releases_catalogue_is_not_guessed_at(run: Run, stopped: Path):
    catalogue(stopped, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    ran = run("verify", "--data", stopped, "--json")
    assert (ran.status, ran.json["error"]["reason"]) == (1, "CANNOT_START")
    assert f"version {SCHEMA_VERSION + 1}" in ran.json["error"]["message"]


def test_a_damaged_catalogue_is_no_traceback(run: Run, stopped: Path):
    database = stopped / "catalog.db"
    database.write_bytes(b"\xff" * 4096 + database.read_bytes()[4096:])
    ran = run("verify", "--data", stopped)
    assert (ran.status, ran.out) == (1, "")
    assert "pion-grpc rebuild --data" in ran.err


def test_a_damaged_page_of_the_catalogue_is_not_overlooked(run: Run, stopped: Path):
    ((page,),) = catalogue(stopped, "SELECT rootpage FROM sqlite_schema WHERE name = 'prefix_use'")
    size = 4096
    data = bytearray((stopped / "catalog.db").read_bytes())
    data[(page - 1) * size : page * size] = bytes(size)
    (stopped / "catalog.db").write_bytes(data)
    ran = run("verify", "--data", stopped)
    assert ran.status == 1
    assert "catalogue" in ran.out or "pion-grpc rebuild --data" in ran.err


AS_NOBODY = """
import os, sys
from pathlib import Path
from pion_grpc.cli.main import main
from pion_grpc.cli.verify import check_directory
if os.geteuid() == 0:  # root may write anywhere
    os.setuid(65534)
print(check_directory(Path(sys.argv[1])).damaged)
"""


def test_a_medium_that_cannot_be_written_can_still_be_checked(stopped: Path, short_tmp: Path):
    for leftover in stopped.glob("catalog.db-*"):
        leftover.unlink()
    short_tmp.chmod(0o755)
    for path in (stopped, *stopped.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        ran = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(stopped)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        for path in (stopped, *stopped.rglob("*")):
            path.chmod(0o700)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_what_may_not_be_read_is_neither_sound_nor_a_traceback(run: Run, stopped: Path):
    for closed, mode in ((next((stopped / "segments").iterdir()), 0), (stopped, 0o700)):
        for path in (stopped.parent, stopped, *stopped.rglob("*")):
            path.chmod(0o777)
        closed.chmod(mode)
        code = AS_NOBODY.replace("check_directory(Path(sys.argv[1])).damaged", "main(sys.argv[1:])")
        ran = subprocess.run(
            [sys.executable, "-c", code + "\n", "verify", "--data", str(stopped)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert re.search("cannot be (read|opened): Permission denied", ran.stderr)
        assert "Traceback" not in ran.stderr
        assert ran.stdout == "1\n"
    ran = run("verify", "--data", stopped / ("x" * 300))
    assert (ran.status, ran.out) == (1, "")
    assert "cannot be read: File name too long" in ran.err


def test_a_program_need_not_start_a_command_to_check(stopped: Path, tmp_path: Path):
    assert check_directory(stopped).prefixes == 5
    with pytest.raises(CannotStart):
        check_directory(tmp_path)
