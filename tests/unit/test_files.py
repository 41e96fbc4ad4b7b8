"""The file layer that forgets: exactly what was not flushed, and nothing that was."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from pion_grpc.storage.files import Files, PowerCut


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    return root


def create(files: Files, path: Path, content: bytes) -> int:
    descriptor = files.create(path)
    files.write(descriptor, content)
    return descriptor


def survivors(files: PowerCut, target: Path) -> dict[str, bytes]:
    files.cut(target)
    return {
        path.relative_to(target).as_posix(): path.read_bytes()
        for path in target.rglob("*")
        if path.is_file()
    }


def test_a_file_survives_with_its_name_and_its_bytes_or_not_at_all(
    root: Path, tmp_path: Path
) -> None:
    files = PowerCut(root)
    both = create(files, root / "both", b"both")
    files.sync(both)
    name_only = create(files, root / "name only", b"lost")
    files.sync_directory(root)
    bytes_only = create(files, root / "bytes only", b"lost")
    files.sync(bytes_only)
    elsewhere = create(files, root / "sub" / "elsewhere", b"lost")
    files.sync(elsewhere)
    assert survivors(files, tmp_path / "cut") == {"both": b"both", "name only": b""}
    assert (tmp_path / "cut" / "sub").is_dir()
    for descriptor in (both, name_only, bytes_only, elsewhere):
        os.close(descriptor)


def test_bytes_after_the_last_sync_are_lost(root: Path, tmp_path: Path) -> None:
    files = PowerCut(root)
    descriptor = create(files, root / "f", b"kept")
    files.sync(descriptor)
    files.sync_directory(root)
    files.write(descriptor, b" lost")
    os.close(descriptor)
    assert survivors(files, tmp_path / "cut") == {"f": b"kept"}


def test_a_rename_or_a_removal_is_undone_until_its_directory_is_synced(
    root: Path, tmp_path: Path
) -> None:
    files = PowerCut(root)
    for name in ("a", "gone"):
        descriptor = create(files, root / name, name.encode())
        files.sync(descriptor)
        os.close(descriptor)
    files.sync_directory(root)
    files.rename(root / "a", root / "b")
    files.unlink(root / "gone")
    files.unlink(root / "gone")
    assert survivors(files, tmp_path / "before") == {"a": b"a", "gone": b"gone"}
    files.sync_directory(root)
    assert survivors(files, tmp_path / "after") == {"b": b"a"}


def test_what_was_there_before_is_on_the_disk(root: Path, tmp_path: Path) -> None:
    (root / "sub" / "old").write_bytes(b"old")
    assert survivors(PowerCut(root), tmp_path / "cut") == {"sub/old": b"old"}


@pytest.mark.parametrize("make", [Files, lambda: PowerCut(Path("/nonexistent"))])
def test_a_file_is_never_created_twice_or_for_others(make: Callable[[], Files], root: Path) -> None:
    files = make()
    os.close(files.create(root / "f"))
    assert (root / "f").stat().st_mode & 0o077 == 0
    with pytest.raises(FileExistsError):
        files.create(root / "f")


def test_a_full_disk_takes_no_byte_beyond_its_last(root: Path) -> None:
    files = PowerCut(root)
    files.fail_after_bytes = 10
    descriptor = create(files, root / "f", b"0123456789")
    with pytest.raises(OSError, match="space") as caught:
        files.write(descriptor, b"x")
    assert caught.value.errno == errno.ENOSPC
    files.fail_after_bytes = None
    files.write(descriptor, b"y")
    os.close(descriptor)
    assert (root / "f").read_bytes() == b"0123456789y"


def test_a_database_keeps_its_synced_commits_and_loses_the_others(
    root: Path, tmp_path: Path
) -> None:
    files = PowerCut(root)
    path = root / "d.db"
    connection = apsw.Connection(str(path), vfs=files.vfs)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE t (x); INSERT INTO t VALUES (1)")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("INSERT INTO t VALUES (2)")

    def rows(target: str) -> list[int]:
        files.cut(tmp_path / target)
        after = apsw.Connection(str(tmp_path / target / "d.db"))
        found = [row[0] for row in after.execute("SELECT x FROM t ORDER BY x")]
        after.close()
        return found

    assert rows("first") == [1]
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("INSERT INTO t VALUES (3)")
    assert rows("second") == [1, 2, 3]
    files.fail_after_bytes = files.written_bytes
    with pytest.raises(apsw.FullError):
        connection.execute("INSERT INTO t VALUES (4)")
    files.fail_after_bytes = None
    connection.execute("INSERT INTO t VALUES (5)")
    connection.close()
    assert rows("third") == [1, 2, 3, 5]


def test_two_fakes_never_share_what_they_know(root: Path, tmp_path: Path) -> None:
    one, two = PowerCut(root), PowerCut(root)
    assert one.vfs != two.vfs
    descriptor = create(one, root / "f", b"x")
    one.sync(descriptor)
    one.sync_directory(root)
    os.close(descriptor)
    assert survivors(one, tmp_path / "one") == {"f": b"x"}
    assert survivors(two, tmp_path / "two") == {}
