"""The data directory: who it belongs to, and what in it counts."""

import os
import stat
from pathlib import Path

import pytest

from pion_grpc.errors import CannotStart, DiskFull
from pion_grpc.storage import directory as directory_module
from pion_grpc.storage.directory import DataDirectory, boot_id, file_system_type


def test_nobody_else_may_look_into_a_data_directory(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "data")
    for path in [directory.path, *directory.path.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    directory.close()


def test_every_process_has_a_name_of_its_own(tmp_path: Path) -> None:
    one, two = DataDirectory(tmp_path), DataDirectory(tmp_path)
    assert one.instance != two.instance
    assert one.live_instances() == {one.instance, two.instance}
    assert list(one.dead_instances()) == []
    one.close()
    two.close()
    assert list((tmp_path / "run").iterdir()) == []


def test_counters_that_cannot_be_written_are_told_in_words_of_the_domain(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "data")
    directory.run.rename(tmp_path / "gone")  # a full disk is another reason
    for note in (lambda: directory.publish("1"), directory.note_reset):
        with pytest.raises(DiskFull, match="what was counted cannot be written"):
            note()
    directory.let_go()


def test_a_dead_process_is_found_once_its_lock_is_free(tmp_path: Path) -> None:
    dead, living = DataDirectory(tmp_path), DataDirectory(tmp_path)
    os.close(dead._lock)
    assert list(living.dead_instances()) == [dead.instance]
    assert list(living.dead_instances()) == []
    living.close()


def test_while_one_buries_the_dead_another_does_not(tmp_path: Path) -> None:
    dead, one, two = (DataDirectory(tmp_path) for _ in range(3))
    os.close(dead._lock)
    burial = one.dead_instances()
    assert next(burial) == dead.instance
    assert list(two.dead_instances()) == []
    burial.close()
    assert list(two.dead_instances()) == [dead.instance], "it was not buried to the end"
    one.close()
    two.close()


def test_the_files_of_a_process_are_known_by_their_names(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    mine = [
        directory.segments / f"{directory.instance}-1.safetensors",
        directory.segments / f"{directory.instance}-2.safetensors.tmp",
        directory.rows / f"{directory.instance}-3.rows",
    ]
    others = directory.rows / "0123456789ab-3.rows"
    strange = directory.segments / "notes.txt"
    for path in [*mine, others, strange]:
        path.touch()
    assert sorted(directory.files_of(directory.instance)) == sorted(mine)
    assert sorted(directory.written_files()) == sorted([*mine, others])
    for path in mine:
        assert directory.resolve(directory.name_of(path)) == path
    directory.close()


def test_every_file_is_counted_once(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    empty = directory.foreign_bytes(set(), {directory.instance})
    named = directory.segments / "0123456789ab-1.safetensors"
    named.write_bytes(bytes(100))
    (directory.segments / "0123456789ab-2.safetensors").write_bytes(bytes(10))
    (directory.rows / f"{directory.instance}-1.rows").write_bytes(bytes(1000))
    for suffix in ("", "-wal", "-shm"):
        (tmp_path / f"catalog.db{suffix}").write_bytes(bytes(5))
    (tmp_path / "catalog.db.v1").write_bytes(bytes(3))
    found = directory.foreign_bytes({directory.name_of(named)}, {directory.instance})
    assert found - empty == 13
    assert directory.catalog_bytes() == 15
    directory.close()


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_token_of_another_size_is_made_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "host-token").write_bytes(content)
    directory = DataDirectory(tmp_path)
    assert len(directory.host_token) == 32
    assert (tmp_path / "host-token").read_bytes() == directory.host_token
    assert directory.host_token not in (bytes(32), content)
    directory.close()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotStart, match=r"file"):
        DataDirectory(tmp_path / "file" / "data")


def test_the_file_system_of_a_path_is_that_of_its_nearest_mount(tmp_path: Path) -> None:
    assert file_system_type(Path("/proc/self")) == "proc"
    assert file_system_type(tmp_path) not in ("unknown", "proc")
    assert file_system_type(tmp_path) not in directory_module.NETWORK_FILE_SYSTEMS


def test_a_boot_has_one_name() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) >= 8
