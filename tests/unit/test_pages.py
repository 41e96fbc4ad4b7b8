"""Pages: nothing unchecked leaves, nothing is written that does not count."""

import errno
import os
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_grpc.errors import Corrupt, DiskFull
from pion_grpc.storage.files import Files, PowerCut
from pion_grpc.storage.pages import (
    CheckedRun,
    OpenFile,
    RowFile,
    SegmentWriter,
    disk_errors,
    open_segment,
)
from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.limits import CHUNK_BYTES_MAX, PAGE_BYTES
from pion_wire.segment import PageChecksums, SegmentLayout, page_count

SEGMENT = SegmentLayout(
    layout=Layout((TensorLayout(0, Side.K, 8, 128, DType.F16),)),
    row_counts=(300,),
    token_count=300,
    model_id="m",
)
DATA = os.urandom(300 * 2048 + 1200)


def run_of(path: Path, content: bytes, *, before: bytes = b"") -> CheckedRun:
    path.write_bytes(before + content + b"behind")
    checksums = PageChecksums()
    checksums.update(content)
    return CheckedRun(OpenFile(path), len(before), len(content), checksums.finish())


def segment_at(path: Path) -> bytes:
    writer = SegmentWriter(Files(), path, SEGMENT)
    writer.write(DATA)
    writer.finish(on_disk=False)
    assert path.stat().st_size == SEGMENT.file_bytes
    return path.read_bytes()


# -- checksums


@given(st.lists(st.integers(0, 3 * PAGE_BYTES), max_size=6))
@settings(deadline=None)
def test_it_does_not_matter_in_which_pieces_bytes_come(sizes: list[int]) -> None:
    content = bytes(sum(sizes)) if sum(sizes) % 2 else b"\x01" * sum(sizes)
    pieces = PageChecksums()
    position = 0
    for size in sizes:
        pieces.update(memoryview(content)[position : position + size])
        position += size
    expected = b"".join(
        crc32c(content[start : start + PAGE_BYTES]).to_bytes(4, "little")
        for start in range(0, len(content), PAGE_BYTES)
    )
    assert pieces.finish() == expected
    assert len(expected) == 4 * page_count(len(content))


@pytest.mark.parametrize(
    "span",
    [(0, 0), (0, 1), (PAGE_BYTES - 1, PAGE_BYTES + 1), (PAGE_BYTES, 2 * PAGE_BYTES),
     (0, 3 * PAGE_BYTES + 5), (3 * PAGE_BYTES + 4, 3 * PAGE_BYTES + 5)],
)  # fmt: skip
def test_a_read_is_exactly_what_was_asked(tmp_path: Path, span: tuple[int, int]) -> None:
    content = os.urandom(3 * PAGE_BYTES + 5)
    run = run_of(tmp_path / "f", content, before=b"before")
    assert run.read(*span) == content[slice(*span)]


def test_every_page_that_is_touched_is_checked_and_no_other(tmp_path: Path) -> None:
    content = os.urandom(3 * PAGE_BYTES + 5)
    run = run_of(tmp_path / "f", content)
    with (tmp_path / "f").open("r+b") as file:
        file.seek(PAGE_BYTES + 7)
        file.write(bytes([content[PAGE_BYTES + 7] ^ 1]))
    for begin, end in ((0, PAGE_BYTES + 1), (PAGE_BYTES, PAGE_BYTES + 1), (0, len(content))):
        with pytest.raises(Corrupt, match="page at byte"):
            run.read(begin, end)
    with pytest.raises(Corrupt):
        run.check()
    assert run.read(0, PAGE_BYTES) == content[:PAGE_BYTES]
    assert run.read(2 * PAGE_BYTES, len(content)) == content[2 * PAGE_BYTES :]


@given(
    st.integers(1, 70_000), st.integers(0, 60), st.integers(0, 60),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_chunks_are_whole_rows_in_order_and_never_too_large(
    row_bytes: int, first: int, count: int
) -> None:
    path = Path(f"/tmp/pion-chunks-{os.getpid()}")
    content = os.urandom(row_bytes * (first + count))
    run = run_of(path, content)
    try:
        chunks = list(run.chunks(first * row_bytes, (first + count) * row_bytes, row_bytes))
    finally:
        run.file.close()
        path.unlink()
    assert b"".join(chunks) == content[first * row_bytes :]
    assert all(0 < len(chunk) <= CHUNK_BYTES_MAX for chunk in chunks)
    assert all(len(chunk) % row_bytes == 0 for chunk in chunks)


def test_checksums_of_another_size_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100)
    with pytest.raises(Corrupt, match="checksums"):
        CheckedRun(OpenFile(tmp_path / "f"), 0, 100, b"")


# -- reading


def test_a_short_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = run_of(tmp_path / "f", b"x" * 1000)
    os.truncate(tmp_path / "f", 999)
    with pytest.raises(Corrupt, match=r"/f ends after 999 bytes"):
        run.read(0, 10)


def test_an_open_file_stays_readable_when_its_name_goes(tmp_path: Path) -> None:
    run = run_of(tmp_path / "f", b"x" * 1000)
    (tmp_path / "f").unlink()
    assert run.read(0, 1000) == b"x" * 1000
    run.file.close()
    run.file.close()
    with pytest.raises(Corrupt, match="cannot be read"):
        run.read(0, 1)


def test_a_file_that_nobody_closes_does_not_stay_open(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    descriptor = OpenFile(tmp_path / "f").descriptor
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_segment_reads_as_it_was_written(tmp_path: Path) -> None:
    segment_at(tmp_path / "s")
    run = open_segment(tmp_path / "s", SEGMENT)
    run.check()
    assert run.read(0, len(DATA)) == DATA
    run.file.close()


@pytest.mark.parametrize("size", [0, 7, 500, -1, 1])
def test_a_segment_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    whole = segment_at(tmp_path / "s")
    (tmp_path / "s").write_bytes(whole[:size] if size != 1 else whole + b"\0")
    with pytest.raises(Corrupt, match="bytes instead of"):
        open_segment(tmp_path / "s", SEGMENT)


def test_a_segment_of_something_else_is_refused(tmp_path: Path) -> None:
    segment_at(tmp_path / "s")
    other = SegmentLayout(layout=SEGMENT.layout, row_counts=(300,), token_count=300, model_id="n")
    with pytest.raises(Corrupt, match="another header"):
        open_segment(tmp_path / "s", other)
    with pytest.raises(FileNotFoundError):
        open_segment(tmp_path / "absent", SEGMENT)


# -- writing


def test_a_segment_has_no_name_before_it_is_finished(tmp_path: Path) -> None:
    writer = SegmentWriter(Files(), tmp_path / "s", SEGMENT)
    writer.write(DATA[:1000])
    assert [path.name for path in tmp_path.iterdir()] == ["s.tmp"]
    writer.abandon()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_finished_segment_is_never_removed_by_giving_up(tmp_path: Path) -> None:
    writer = SegmentWriter(Files(), tmp_path / "s", SEGMENT)
    writer.write(DATA)
    writer.finish(on_disk=True)
    writer.abandon()
    assert (tmp_path / "s").exists()


@pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1])
def test_a_segment_takes_exactly_its_bytes(tmp_path: Path, size: int) -> None:
    writer = SegmentWriter(Files(), tmp_path / "s", SEGMENT)
    data = DATA[:size] + b"!" * (size - len(DATA))

    def write() -> None:
        writer.write(data)
        writer.finish(on_disk=False)

    with pytest.raises(AssertionError):
        write()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_segment(tmp_path: Path) -> None:
    for room in (0, 10, 2_000, len(DATA), SEGMENT.file_bytes - 1):
        files = PowerCut(tmp_path)
        files.fail_after_bytes = room

        def write(files: Files = files) -> None:
            writer = SegmentWriter(files, tmp_path / "s", SEGMENT)
            try:
                writer.write(DATA)
                writer.finish(on_disk=True)
            finally:
                writer.abandon()

        with pytest.raises(DiskFull):
            write()
        assert list(tmp_path.iterdir()) == []


def test_rows_are_appended_and_what_is_given_up_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "r"
    first = RowFile(Files(), path)
    first.write(b"a" * 100)
    checksums = first.finish(on_disk=False)
    first.close()
    second = RowFile(Files(), path)
    assert second.offset == 100
    second.write(b"b" * 50)
    second.abandon()
    assert path.read_bytes() == b"a" * 100
    third = RowFile(Files(), path)
    assert third.offset == 100
    third.write(b"c")
    third.finish(on_disk=True)
    third.close()
    run = CheckedRun(OpenFile(path), 0, 100, checksums)
    assert run.read(0, 100) == b"a" * 100
    assert path.read_bytes() == b"a" * 100 + b"c"


def test_a_row_file_that_was_made_for_nothing_goes(tmp_path: Path) -> None:
    made = RowFile(Files(), tmp_path / "r")
    made.write(b"a")
    made.abandon()
    made.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_as_one(number: int) -> None:
    with pytest.raises(DiskFull, match="disk-budget"), disk_errors(Path("x")):
        raise OSError(number, "full")


def test_other_errors_of_the_system_are_not_taken_for_a_full_disk() -> None:
    with pytest.raises(PermissionError), disk_errors(Path("x")):
        raise PermissionError(errno.EACCES, "no")
