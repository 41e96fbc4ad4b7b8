"""A use is known to every process at once, never as another one's, and is not lost with its process."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.uses import ENTRIES, UseFile


@pytest.fixture
def directories(tmp_path: Path) -> Iterator[list[DataDirectory]]:
    """Two processes on one directory."""
    both = [DataDirectory(tmp_path / "data") for _ in range(2)]
    yield both
    for directory in both:
        directory.close()


@pytest.fixture
def one(directories: list[DataDirectory]) -> UseFile:
    return UseFile(directories[0])


@pytest.fixture
def other(directories: list[DataDirectory]) -> UseFile:
    return UseFile(directories[1])


def keys(uses: list[tuple[int, int]]) -> list[int]:
    return [key for key, _ in uses]


def test_no_use_waits_to_be_known_to_others(one: UseFile, other: UseFile) -> None:
    for key in (5, 7, 5, 6):
        before = time.time_ns()
        one.note(key)
        (seen,) = other.of_others()
        assert seen == one.unwritten()
        assert seen[-1][0] == key
        assert before <= seen[-1][1] <= time.time_ns()
    assert keys(seen) == [7, 5, 6]
    assert other.unwritten() == []


def test_only_what_is_in_the_catalogue_is_left_out(one: UseFile, other: UseFile) -> None:
    for key in (1, 2, 3):
        one.note(key)
    written = one.unwritten()
    one.note(2)
    one.note(4)
    one.written(written[-1][1])
    (seen,) = other.of_others()
    assert keys(seen) == keys(one.unwritten()) == [2, 4]
    one.written(seen[-1][1])
    assert one.unwritten() == []
    assert list(other.of_others()) == [[]]
    one.note(1)
    assert keys(one.unwritten()) == [1]


def test_no_use_is_lost_when_a_file_is_full(one: UseFile, other: UseFile) -> None:
    count = 5 * ENTRIES
    for key in range(count):
        one.note(key)
    (seen,) = other.of_others()
    assert keys(seen) == list(range(count))
    one.written(seen[-3][1])
    assert keys(one.unwritten()) == [count - 2, count - 1]
    assert list(other.of_others()) == [one.unwritten()]
    one.note(0)
    assert keys(one.unwritten()) == [count - 2, count - 1, 0]


def test_files_of_uses_do_not_grow_with_what_was_used_long_ago(
    one: UseFile, directories: list[DataDirectory]
) -> None:
    path = directories[0].run / f"{directories[0].instance}-uses"
    size = path.stat().st_size
    for key in range(20 * ENTRIES):
        one.note(key)
        if key % 100 == 0:
            one.written(one.unwritten()[-1][1])
    assert path.stat().st_size == size


def test_a_file_that_cannot_be_written_stops_nobody(
    other: UseFile, directories: list[DataDirectory]
) -> None:
    in_the_way = directories[0].run / f"{directories[0].instance}-uses.new"
    in_the_way.mkdir()
    one = UseFile(directories[0])
    for key in range(3 * ENTRIES):
        one.note(key)
    assert keys(one.unwritten()) == list(range(3 * ENTRIES))
    assert list(other.of_others()) == [[]]
    in_the_way.rmdir()
    one.written(one.unwritten()[-2][1])
    assert list(other.of_others()) == [one.unwritten()]
    assert keys(one.unwritten()) == [3 * ENTRIES - 1]


WRITER = """
import sys
from pathlib import Path
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.uses import UseFile

uses = UseFile(DataDirectory(Path(sys.argv[1])))
print("ready", flush=True)
number = 0
while True:
    number += 1
    uses.note(number % 5_000 << 32 | number % 5_000)
    if number % 1_500 == 0:
        uses.written(uses.unwritten()[-10][1])
"""


def test_no_reader_ever_sees_half_a_use(other: UseFile, directories: list[DataDirectory]) -> None:
    begun = time.time_ns()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directories[1].path)], stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        seen = 0
        while seen < 100_000:
            for uses in other.of_others():
                seen += len(uses)
                for key, at in uses:
                    assert key >> 32 == key & 0xFFFF_FFFF < 5_000
                    assert begun < at <= time.time_ns()
        writer.kill()
    (instance,) = directories[1].dead_instances()
    assert len(other.of_dead(instance)) >= 9, (
        "it is dead, and what it had used is there all the same"
    )


@pytest.mark.parametrize("size", [0, 5, 8, 16, 24, 16 << 10])
def test_what_a_power_cut_left_is_no_use_of_the_future(
    other: UseFile, directories: list[DataDirectory], size: int
) -> None:
    (directories[1].run / "0123456789ab-uses").write_bytes(os.urandom(size))
    now = time.time_ns()
    assert all(at <= now + 10**9 for _, at in other.of_dead("0123456789ab"))
    assert other.of_dead("ba9876543210") == []
