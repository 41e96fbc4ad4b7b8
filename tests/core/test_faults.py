"""Damaged files and full disks: an error or a miss, never a wrong byte, and nothing else is lost."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.states import RecurrentStates
from pion_grpc.core.storing import PrefixUpload
from pion_grpc.core.values import Durability, FetchQuery, MissReason
from pion_grpc.errors import CannotStart, Corrupt, DiskFull, NotStored, PionError
from pion_grpc.storage.files import PowerCut
from pion_wire.layout import Layout, Side
from tests.core.support import (
    SMALL,
    TENANT,
    Machine,
    assert_truth,
    begin,
    directory_bytes,
    drain,
    fill,
    layout,
    look,
    matched,
    opened,
    power_cut_machine,
    publish,
    put,
    rows_of,
    stray_files,
    tokens,
    true_rows,
    truth,
    usage,
    write,
)

WIDE = layout(2, heads=4, head_dim=64)
"""Rows of 512 bytes: 600 of them are several pages."""
FULL = tokens(900)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = power_cut_machine(tmp_path / "data")
    yield machine
    assert isinstance(machine.files, PowerCut)
    machine.files.fail_after_bytes = None
    machine.close()


# -- damaged files


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def remove(path: Path) -> None:
    path.unlink()


def flip(at: Callable[[int], int]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        place = at(path.stat().st_size)
        with path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 0x10]))

    return change


SEGMENT_DAMAGES = {
    "truncated": truncate,
    "emptied": empty,
    "lengthened": lengthen,
    "missing": remove,
    "flipped header length": flip(lambda size: 0),
    "flipped header": flip(lambda size: 200),
    "flipped first page": flip(lambda size: 6_000),
    "flipped middle": flip(lambda size: size // 2),
    "flipped token ids": flip(lambda size: size - 100),
    "flipped checksums": flip(lambda size: size - 1),
}


def file_of(store: PrefixStore, name: str) -> Path:
    with store.workshop.catalog.read() as transaction:
        row = transaction.by_name(TENANT, name)
    assert row is not None
    assert row.file is not None
    return store.directory.resolve(row.file)


def family(store: PrefixStore) -> dict[str, bytes]:
    """Stores a parent, two children of it and a grandchild."""
    ids = {"p": FULL[: 4 * 300], "c": FULL[: 4 * 600], "g": FULL}
    ids["s"] = ids["p"] + tokens(300, salt=3)
    put(store, "p", ids["p"], layout=WIDE)
    put(store, "c", ids["c"], layout=WIDE, parent="p", base=300)
    put(store, "g", ids["g"], layout=WIDE, parent="c", base=600)
    put(store, "s", ids["s"], layout=WIDE, parent="p", base=300)
    return ids


def fetch_whole(store: PrefixStore, name: str) -> dict[int, bytes] | None:
    fetch = opened(store, FetchQuery(name))
    return None if fetch is None else drain(store, fetch)[0]


@pytest.mark.parametrize("damage", SEGMENT_DAMAGES)
@pytest.mark.parametrize("reader", ["c", "g"])
def test_damage_is_told_once_and_takes_nothing_sound_with_it(
    store: PrefixStore, damage: str, reader: str
) -> None:
    ids = family(store)
    SEGMENT_DAMAGES[damage](file_of(store, "c"))
    with pytest.raises(Corrupt):
        fetch_whole(store, reader)
    for name in ("c", "g"):
        assert rows_of(store, name) is None
        assert look(store, name).reason is MissReason.NOT_STORED
    assert matched(store, FULL).matched_tokens == 300
    for name in ("p", "s"):
        assert_truth(store, name, ids[name], WIDE)
    assert store.totals().corrupt == 1
    put(store, "c", ids["c"], layout=WIDE, parent="p", base=300)
    assert_truth(store, "c", ids["c"], WIDE)
    assert stray_files(store) == []


@pytest.mark.parametrize("damage", ["truncated", "emptied", "lengthened", "missing"])
def test_a_hit_is_never_answered_for_a_file_that_is_not_whole(
    store: PrefixStore, damage: str
) -> None:
    ids = family(store)
    SEGMENT_DAMAGES[damage](file_of(store, "c"))
    assert look(store, "g").reason is MissReason.NOT_STORED
    assert look(store, "c").reason is MissReason.NOT_STORED
    result = matched(store, FULL)
    assert (result.hit, result.matched_tokens) == (True, 300)
    assert_truth(store, "p", ids["p"], WIDE)


def test_no_page_leaves_unchecked_wherever_the_bit_was_flipped(store: PrefixStore) -> None:
    ids = FULL[: 4 * 300]
    put(store, "p", ids, layout=WIDE)
    path = file_of(store, "p")
    sound = path.read_bytes()
    for place in range(len(sound) - 1, 8, -max(1, len(sound) // 60)):
        flip(lambda size, place=place: place)(path)  # type: ignore[misc]
        with pytest.raises(Corrupt):
            fetch_whole(store, "p")
        assert rows_of(store, "p") is None
        put(store, "p", ids, layout=WIDE)
        path = file_of(store, "p")
        assert path.read_bytes() == sound


def test_damage_is_not_met_where_it_is_not_read(store: PrefixStore) -> None:
    put(store, "p", FULL, layout=WIDE)
    flip(lambda size: size * 4 // 5)(file_of(store, "p"))
    fetch = opened(
        store,
        FetchQuery(
            "p",
            slots=frozenset({0}),
        ),
    )
    assert fetch is not None
    rows, _ = drain(store, fetch)
    assert rows == {i: true_rows(WIDE, FULL, i) for i in (0, 1)}


def test_an_export_never_names_a_damaged_file(store: PrefixStore) -> None:
    ids = family(store)
    flip(lambda size: size // 2)(file_of(store, "c"))
    store.export(TENANT, FetchQuery("p"), 1_000)
    with pytest.raises(Corrupt):
        store.export(TENANT, FetchQuery("g"), 1_000)
    with pytest.raises(NotStored):
        store.export(TENANT, FetchQuery("g"), 1_000)
    assert_truth(store, "s", ids["s"], WIDE)


@pytest.mark.parametrize("damage", ["truncated", "emptied", "missing", "flipped middle"])
def test_damaged_rows_of_a_live_prefix_are_told_once(store: PrefixStore, damage: str) -> None:
    put(store, "other", tokens(80, salt=7))
    store.register(TENANT, "p", SMALL)
    for side in Side:
        write(store, "p", 0, true_rows(SMALL, FULL, 0), side=side)
    (path,) = store.directory.rows.iterdir()
    SEGMENT_DAMAGES[damage](path)
    with pytest.raises(Corrupt):
        fetch_whole(store, "p")
    assert look(store, "p").reason is MissReason.NOT_STORED
    store.register(TENANT, "p", SMALL)
    write(store, "p", 0, b"x" * 16)
    assert_truth(store, "other", tokens(80, salt=7))


def test_saving_damaged_rows_never_makes_them_look_sound(store: PrefixStore) -> None:
    store.register(TENANT, "p", SMALL)
    for side in Side:
        write(store, "p", 0, true_rows(SMALL, FULL, 0), side=side)
    flip(lambda size: size // 2)(next(store.directory.rows.iterdir()))
    with pytest.raises(Corrupt):
        store.save(TENANT, ["p"])
    assert look(store, "p").reason is MissReason.NOT_STORED
    assert list(store.directory.segments.iterdir()) == []
    assert list(store.directory.rows.iterdir()) == []


def test_damage_in_a_file_that_was_saved_anew_does_not_take_the_new_one_out(
    store: PrefixStore,
) -> None:
    put(store, "p", FULL, layout=WIDE)
    fetch = opened(store, FetchQuery("p"))
    assert fetch is not None
    old = file_of(store, "p")
    with old.open("r+b") as held:
        for tensor in WIDE.tensors:
            write(store, "p", 900, bytes(512), slot=tensor.slot, side=tensor.side, row_bytes=512)
        assert store.save(TENANT, ["p"]) == 1
        assert not old.exists()
        held.seek(100_000)
        held.write(b"damage")
    with pytest.raises(Corrupt):
        drain(store, fetch)
    assert rows_of(store, "p") == {i: d + bytes(512) for i, d in truth(WIDE, FULL).items()}
    assert store.totals().corrupt == 0


# -- full disks


def sweep_of_full_disks(
    machine: Machine,
    store: PrefixStore,
    act: Callable[[], object],
    undo: Callable[[], object],
    check_failed: Callable[[], object],
) -> int:
    """Lets the disk be full at every byte where it can hurt; returns how often it was."""
    files = machine.files
    assert isinstance(files, PowerCut)
    failed = 0
    step = 1_100
    before = usage(store)
    for room in range(0, 1 << 20, step):
        files.fail_after_bytes = files.written_bytes + room
        try:
            act()
        except DiskFull:
            failed += 1
            check_failed()
            files.fail_after_bytes = None
            check_failed()
            store.tick()
            assert usage(store) == before, f"bytes are lost with room for {room}"
            assert stray_files(store) == []
        else:
            files.fail_after_bytes = None
            return failed
        finally:
            files.fail_after_bytes = None
        act()
        undo()
        store.tick()
        assert stray_files(store) == []
    raise AssertionError("the disk is never large enough")


@pytest.mark.parametrize("durability", Durability)
def test_a_store_on_a_full_disk_leaves_nothing(
    machine: Machine, store: PrefixStore, durability: Durability
) -> None:
    kept = tokens(100, salt=2)
    put(store, "kept", kept)
    ids = kept + tokens(100, salt=4)

    def gone() -> None:
        assert look(store, "p").reason is MissReason.NOT_STORED
        assert matched(store, ids).matched_tokens == 100
        assert_truth(store, "kept", kept)

    failed = sweep_of_full_disks(
        machine,
        store,
        lambda: put(store, "p", ids, durability=durability),
        lambda: store.drop(TENANT, ["p"]),
        gone,
    )
    assert failed > 10
    assert_truth(store, "p", ids)


@pytest.mark.parametrize("durability", Durability)
def test_a_replacement_on_a_full_disk_is_all_or_nothing(
    machine: Machine, store: PrefixStore, durability: Durability
) -> None:
    old, new = tokens(120, salt=1), tokens(150, salt=2)
    put(store, "p", old)
    files = machine.files
    assert isinstance(files, PowerCut)
    outcomes = set()
    for room in range(0, 200_000, 3_000):
        files.fail_after_bytes = files.written_bytes + room
        try:
            put(store, "p", new, replace=True, durability=durability)
            expected = new
        except DiskFull:
            expected = old
        files.fail_after_bytes = None
        outcomes.add(expected == new)
        store.tick()
        assert_truth(store, "p", expected)
        assert stray_files(store) == []
        put(store, "p", old, replace=True)
    assert outcomes == {True, False}


@pytest.mark.parametrize("durability", Durability)
def test_rows_on_a_full_disk_leave_what_was_there(
    machine: Machine, store: PrefixStore, durability: Durability
) -> None:
    store.register(TENANT, "p", SMALL)
    for side in Side:
        write(store, "p", 0, b"a" * 1600, side=side)
    snapshot = store.row_snapshots.take(TENANT, "p")
    usage = []

    def unchanged() -> None:
        assert rows_of(store, "p") == dict.fromkeys((0, 1), b"a" * 1600)
        usage.append(sum(path.stat().st_size for path in store.directory.rows.iterdir()))

    files = machine.files
    assert isinstance(files, PowerCut)
    failed = 0
    for room in range(0, 40_000, 500):
        files.fail_after_bytes = files.written_bytes + room
        try:
            write(store, "p", 100, b"b" * 8_000, durability=durability)
        except DiskFull:
            failed += 1
            files.fail_after_bytes = None
            store.tick()
            unchanged()
        else:
            files.fail_after_bytes = None
            break
    assert failed > 4
    assert set(usage) == {3200}, "rows that were given up still lie there"
    assert store.row_snapshots.restore(TENANT, "p", snapshot)
    unchanged()


def test_a_save_on_a_full_disk_leaves_the_rows_where_they_are(
    machine: Machine, store: PrefixStore
) -> None:
    rows = true_rows(SMALL, FULL, 0)
    serial = iter(range(10_000))
    name = ""

    def grow() -> None:
        nonlocal name
        name = f"p{next(serial)}"
        store.register(TENANT, name, SMALL)
        for side in Side:
            write(store, name, 0, rows, side=side)

    files = machine.files
    assert isinstance(files, PowerCut)
    failed = 0
    grow()
    for room in range(0, 200_000, 2_000):
        files.fail_after_bytes = files.written_bytes + room
        try:
            store.save(TENANT, [name])
        except DiskFull:
            failed += 1
            files.fail_after_bytes = None
            store.tick()
            assert rows_of(store, name) == {0: rows, 1: rows}
            assert stray_files(store) == []
            assert list(store.directory.segments.iterdir()) == []
            assert usage(store) == 2 * len(rows)
        else:
            files.fail_after_bytes = None
            break
    assert failed > 10
    assert rows_of(store, name) == {0: rows, 1: rows}
    assert list(store.directory.rows.iterdir()) == []


def test_a_state_on_a_full_disk_leaves_nothing(store: PrefixStore, machine: Machine) -> None:
    states, files = RecurrentStates(store), machine.files
    assert isinstance(files, PowerCut)
    failed = 0
    for room in itertools.count(99_900, 30):  # from the last of its bytes on
        files.fail_after_bytes = files.written_bytes + room
        try:
            states.store(TENANT, "s", 0, bytes(100_000))
        except DiskFull:
            failed += 1
            files.fail_after_bytes = None
            store.tick()
            assert list(store.directory.blobs.iterdir()) == []
            assert usage(store) == 0
        else:
            files.fail_after_bytes = None
            break
    assert failed > 10


def test_a_full_disk_does_not_stop_reading(machine: Machine, store: PrefixStore) -> None:
    ids = family(store)
    files = machine.files
    assert isinstance(files, PowerCut)
    files.fail_after_bytes = files.written_bytes
    for name, token_ids in ids.items():
        assert look(store, name).hit
        assert matched(store, token_ids).matched_tokens == len(token_ids) // 4
        assert_truth(store, name, token_ids, WIDE)
    with pytest.raises(DiskFull):
        look(store, "p", lease_ms=1_000)
    with pytest.raises(DiskFull):
        store.drop(TENANT, ["p"])
    assert look(store, "p").hit


def test_a_store_that_cannot_stop_cleanly_still_gives_its_directory_back(
    machine: Machine, store: PrefixStore
) -> None:
    put(store, "p", FULL)
    files = machine.files
    assert isinstance(files, PowerCut)
    files.fail_after_bytes = files.written_bytes
    with pytest.raises(DiskFull):
        store.close()
    files.fail_after_bytes = None
    assert list(store.directory.run.iterdir()) == []
    again = machine.start()
    assert_truth(again, "p", FULL)


# -- catalogues that are not ours, not of this release, or not whole


def test_a_directory_of_garbage_never_starts(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "data")
    store = machine.start()
    put(store, "p", FULL)
    store.close()
    catalog = tmp_path / "data" / "catalog.db"
    catalog.write_bytes(b"garbage " * 1_000)
    before = directory_bytes(tmp_path)
    with pytest.raises(CannotStart, match="is damaged"):
        machine.start()
    assert catalog.read_bytes() == b"garbage " * 1_000
    assert directory_bytes(tmp_path) == before
    catalog.unlink()
    with pytest.raises(CannotStart, match="1 file lies in segments"):
        machine.start()
    (tmp_path / "data" / "segments").rename(tmp_path / "segments")
    assert machine.start().list_page(TENANT) == []


def test_an_interrupted_store_is_not_finished_by_others(store: PrefixStore) -> None:
    upload = begin(store, "p", FULL, layout=WIDE)
    assert isinstance(upload, PrefixUpload)
    with pytest.raises(PionError, match="before all declared rows"):
        publish(upload)
    assert not look(store, "p").hit
    assert list(store.directory.segments.iterdir()) == []
    upload = begin(store, "p", FULL, layout=WIDE)
    assert isinstance(upload, PrefixUpload)
    publish(fill(upload))
    assert isinstance(WIDE, Layout)
    assert_truth(store, "p", FULL, WIDE)
