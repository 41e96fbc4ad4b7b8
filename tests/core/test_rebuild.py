"""A lost catalogue loses nothing: no start does without it, and a rebuild finds everything again."""

import dataclasses
import shutil
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apsw
import pytest

from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.rebuild import Rebuilt, rebuild
from pion_grpc.core.storing import PrefixUpload
from pion_grpc.core.values import Durability, FetchQuery, MissReason
from pion_grpc.errors import CannotStart, DiskFull
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.files import PowerCut
from pion_wire.layout import Side
from pion_wire.segment import parse_header
from tests.core.support import (
    MODEL,
    SMALL,
    TENANT,
    Machine,
    assert_truth,
    begin,
    drain,
    fill,
    header,
    layout,
    look,
    matched,
    opened,
    part,
    power_cut_machine,
    put,
    rows_of,
    stray_files,
    tokens,
    write,
)

FULL = tokens(300)
OTHER = FULL[:400] + tokens(200, salt=3)
"""Begins with the same 100 tokens."""
STATE = b"state" * 1_000


def lose_catalogue(path: Path) -> None:
    for file in path.glob("catalog.db*"):
        file.unlink()


def content(path: Path) -> dict[str, bytes]:
    """What lies in a directory, but for what a process leaves behind of itself."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.parent.name != "run" and file.name[-4:] not in ("-wal", "-shm")
    }


def segment_of(machine: Machine, name: str) -> Path:
    """The youngest file of a name."""
    found = [
        path
        for path in machine.path.glob("segments/*")
        if f'"namespace":"{name}"'.encode() in path.read_bytes()[:4096]
    ]
    return max(found, key=lambda path: int(path.stem.split("-")[1]))


def fill_directory(store: PrefixStore) -> None:
    """A chain of three with parts, a lone prefix, and one that was sealed with uneven rows."""
    put(store, "root", FULL[:400], parts=(part("s", 100, STATE),), part_bytes=(STATE,))
    put(store, "child", FULL[:800], parent="root", base=90)
    put(store, "grandchild", FULL, parent="child", base=200)
    put(store, "lone", tokens(70, salt=1), layout=layout(2))
    store.register(TENANT, "uneven", SMALL)
    write(store, "uneven", 0, b"k" * 160)
    write(store, "uneven", 0, b"v" * 80, side=Side.V)
    assert store.save(TENANT, ["uneven"]) == 1


def assert_filled(store: PrefixStore) -> None:
    assert_truth(store, "root", FULL[:400])
    assert_truth(store, "child", FULL[:800])
    assert_truth(store, "grandchild", FULL)
    assert_truth(store, "lone", tokens(70, salt=1), layout(2))
    assert rows_of(store, "uneven") == {0: b"k" * 80, 1: b"v" * 80}
    found = opened(store, FetchQuery("root", part_kinds=("s",)))
    assert found is not None
    assert drain(store, found)[1] == {0: STATE}
    assert matched(store, FULL).matched_tokens == 300
    assert matched(store, FULL[:360] + tokens(50, salt=7)).matched_tokens == 90
    assert stray_files(store) == []


NAMES = ["root", "child", "grandchild", "lone", "uneven"]


def names(rebuilt: Rebuilt) -> list[str]:
    return [prefix.namespace for prefix in rebuilt.adopted]


def filled(machine: Machine) -> None:
    store = machine.start()
    fill_directory(store)
    store.close()


# -- a start without a catalogue


def forget(path: Path) -> None:
    lose_catalogue(path)


def empty(path: Path) -> None:
    lose_catalogue(path)
    (path / "catalog.db").touch()


def never_written(path: Path) -> None:
    """As a power cut in the very moment of its making leaves it."""
    lose_catalogue(path)
    connection = apsw.Connection(str(path / "catalog.db"))
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    connection.close()


LOSSES = {"forgotten": forget, "empty": empty, "never written": never_written}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_start_without_a_catalogue_removes_nothing(machine: Machine, loss: str) -> None:
    filled(machine)
    LOSSES[loss](machine.path)
    before = content(machine.path)
    for _ in range(2):
        with pytest.raises(
            CannotStart, match="missing or empty, but 5 files lie in segments"
        ) as told:
            machine.start()
        assert f"`pion-grpc rebuild --data {machine.path}`" in str(told.value)
        assert content(machine.path) == before
        assert list((machine.path / "run").iterdir()) == []
    assert names(rebuild(machine.path, TENANT)) == NAMES
    assert_filled(machine.start())


def test_rows_and_values_alone_are_not_removed_either(machine: Machine) -> None:
    store = machine.start()
    store.register(TENANT, "live", SMALL)
    write(store, "live", 0, b"k" * 160)
    store.close()
    (machine.path / "blobs" / "0123456789ab-1").write_bytes(b"state")
    lose_catalogue(machine.path)
    with pytest.raises(CannotStart, match="2 files lie in blobs and rows") as told:
        machine.start()
    assert "move blobs and rows away" in str(told.value)
    for name in ("blobs", "rows"):
        (machine.path / name).rename(machine.path.parent / name)
    assert machine.start().totals().prefixes == 0


def test_what_was_never_stored_does_not_keep_a_server_from_starting(machine: Machine) -> None:
    DataDirectory(machine.path).close()
    (machine.path / "segments" / ".DS_Store").touch()
    (machine.path / "export" / "0123456789ab-1.safetensors").touch()
    store = machine.start()
    assert store.totals().prefixes == 0
    assert [path.name for path in store.directory.segments.iterdir()] == [".DS_Store"]


def test_of_many_that_start_at_once_none_is_refused(tmp_path: Path) -> None:
    for number in range(15):
        machine = Machine(tmp_path / str(number))
        together = threading.Barrier(4)

        def start(name: str, machine: Machine = machine, together: Any = together) -> None:
            together.wait(30)
            store = machine.start()
            put(store, name, FULL)  # as early as the others still start
            assert_truth(store, name, FULL)

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(start, "abcd")) == [None] * 4
        machine.close()


def test_the_first_power_cut_keeps_no_server_from_starting(tmp_path: Path) -> None:
    """The files of a Store are on the disk before the commit that names them."""
    machine = power_cut_machine(tmp_path / "0")
    store = machine.start()
    put(store, "p", FULL)
    (path,) = store.directory.segments.iterdir()
    with path.open("rb") as file:
        machine.files.sync(file.fileno())
    machine.files.sync_directory(store.directory.segments)
    after = machine.cut_power(tmp_path / "1")
    assert (after.path / "segments" / path.name).stat().st_size == path.stat().st_size
    store = after.start()
    assert look(store, "p").reason is MissReason.NOT_STORED
    assert stray_files(store) == []
    assert store.space.losses.report().ownerless == 1


def test_what_a_start_removes_is_counted_once(machine: Machine) -> None:
    filled(machine)
    dead = machine.start()
    upload = begin(dead, "unfinished", tokens(9, salt=8))
    assert isinstance(upload, PrefixUpload)
    fill(upload)
    (machine.path / "run" / f"{dead.directory.instance}-counters").touch()
    machine.crash(dead)
    for name in ("segments/0123456789ab-77.safetensors", "rows/0123456789ab-1.rows"):
        (machine.path / name).touch()
    store = machine.start()
    assert store.space.losses.report().ownerless == 3
    assert store.space.losses.report().ownerless == 0
    assert_filled(store)


# -- a rebuild


def test_a_rebuilt_store_goes_on_as_if_nothing_had_been(machine: Machine) -> None:
    store = machine.start()
    fill_directory(store)
    before = {name: look(store, name).prefix for name in NAMES}
    used = store.totals()
    store.close()
    lose_catalogue(machine.path)
    read: list[tuple[int, int]] = []
    rebuilt = rebuild(machine.path, TENANT, lambda done, total: read.append((done, total)))
    assert names(rebuilt) == NAMES
    assert (rebuilt.not_adopted, rebuilt.catalogue) == ([], [])
    size = sum(path.stat().st_size for path in machine.path.glob("segments/*"))
    assert read[-1] == (size, size)
    assert 0.5 * size < rebuilt.bytes_read <= size
    assert not (machine.path / "not-adopted").exists()
    assert list((machine.path / "run").iterdir()) == []

    store = machine.start()
    for name, was in before.items():
        now = look(store, name).prefix
        assert was is not None
        assert now is not None
        for field in ("model_id", "layout", "token_count", "base", "parent", "depth", "parts",
                      "stored_bytes", "fidelity"):  # fmt: skip
            assert getattr(now, field) == getattr(was, field), field
        assert now.durability is Durability.DISK
    assert store.totals()[:2] == used[:2]
    assert_filled(store)
    # New children, a replacement and a drop find what they need.
    put(store, "child", OTHER, parent="root", base=100, replace=True)
    put(store, "more", FULL[:1160], parent="grandchild", base=280)
    assert store.drop(TENANT, ["lone", "root"]) == [True, True]
    assert_truth(store, "child", OTHER)
    assert_truth(store, "grandchild", FULL)
    assert look(store, "root").reason is MissReason.NOT_STORED
    assert matched(store, FULL[:400]).matched_tokens == 100
    with store.workshop.catalog.read() as transaction:
        assert Accounts(transaction).usage() == sum(
            path.stat().st_size for path in machine.path.glob("segments/*")
        )


def test_whose_a_prefix_was_is_for_the_caller_to_say(machine: Machine) -> None:
    filled(machine)
    lose_catalogue(machine.path)
    rebuild(machine.path, "somebody")
    store = machine.start()
    assert rows_of(store, "lone") is None
    assert matched(store, FULL).matched_tokens == 0
    assert matched(store, FULL, tenant="somebody").matched_tokens == 300
    with pytest.raises(CannotStart, match="not a tenant's name"):
        rebuild(machine.path, "some body")


def put_back(machine: Machine, path: Path, data: bytes) -> None:
    """As if a file that was to be removed had not been, when the process was killed."""
    assert not path.exists()
    path.write_bytes(data)


def test_a_replaced_prefix_does_not_get_its_name_back(machine: Machine) -> None:
    store = machine.start()
    put(store, "p", FULL[:400])
    put(store, "child", FULL, parent="p", base=100)
    put(store, "p", OTHER, replace=True)  # the old one stays for its child
    put(store, "p's", OTHER + tokens(9, salt=4), parent="p", base=300)
    put(store, "q", FULL[:400])
    replaced = segment_of(machine, "q")
    data = replaced.read_bytes()
    put(store, "q", OTHER[:600], replace=True)
    store.close()
    put_back(machine, replaced, data)
    lose_catalogue(machine.path)
    rebuilt = rebuild(machine.path, TENANT)
    assert [(prefix.namespace, prefix.visible) for prefix in rebuilt.adopted] == [
        ("p", False), ("child", True), ("p", True), ("p's", True), ("q", True)]  # fmt: skip
    (file,) = rebuilt.not_adopted
    assert file.file == f"segments/{replaced.name}"
    assert "was replaced" in file.problem
    assert (machine.path / file.moved_to).read_bytes() == data

    store = machine.start()
    assert_truth(store, "p", OTHER)
    assert_truth(store, "child", FULL)
    assert_truth(store, "p's", OTHER + tokens(9, salt=4))
    assert_truth(store, "q", OTHER[:600])
    assert matched(store, FULL).matched_tokens == 300
    # The last child takes the old one with it.
    files = len(list(store.directory.segments.iterdir()))
    store.drop(TENANT, ["child"])
    store.tick()
    assert len(list(store.directory.segments.iterdir())) == files - 2
    assert stray_files(store) == []


def test_a_prefix_that_replaced_its_own_parent_finds_it(machine: Machine) -> None:
    store = machine.start()
    put(store, "turn", FULL[:400])
    put(store, "turn", FULL[:800], parent="turn", base=100, replace=True)
    put(store, "turn", FULL, parent="turn", base=200, replace=True)
    store.close()
    for _ in range(2):
        lose_catalogue(machine.path)
        rebuilt = rebuild(machine.path, TENANT)
        assert [(p.token_count, p.visible) for p in rebuilt.adopted] == [
            (100, False), (200, False), (300, True)]  # fmt: skip
        store = machine.start()
        assert_truth(store, "turn", FULL)
        store.close()


def test_files_keep_their_order_through_a_rebuild(machine: Machine) -> None:
    """What is stored after one rebuild is younger at the next one."""
    store = machine.start()
    for number in range(20):
        put(store, f"gone {number}", tokens(9, salt=number))
    put(store, "p", FULL[:400])
    put(store, "child", FULL, parent="p", base=100)
    store.drop(TENANT, [f"gone {number}" for number in range(20)])
    store.close()
    lose_catalogue(machine.path)
    rebuild(machine.path, TENANT)
    store = machine.start()
    put(store, "p", OTHER, replace=True)
    store.close()
    lose_catalogue(machine.path)
    rebuild(machine.path, TENANT)
    store = machine.start()
    assert_truth(store, "p", OTHER)
    assert_truth(store, "child", FULL)


def test_a_live_prefix_is_what_it_was_when_it_was_sealed(machine: Machine) -> None:
    store = machine.start()
    put(store, "live", FULL[:400])
    put(store, "child", FULL, parent="live", base=100)
    write(store, "live", 100, b"k" * 160)
    write(store, "live", 100, b"v" * 160, side=Side.V)
    store.register(TENANT, "never sealed", SMALL)
    write(store, "never sealed", 0, b"k" * 160)
    store.close()
    rows = {path.name: path.read_bytes() for path in machine.path.glob("rows/*")}
    lose_catalogue(machine.path)
    rebuilt = rebuild(machine.path, TENANT)
    assert names(rebuilt) == ["live", "child"]
    assert {Path(file.file).name for file in rebuilt.not_adopted} == set(rows)
    assert all("never sealed" in file.problem for file in rebuilt.not_adopted)
    for file in rebuilt.not_adopted:
        assert (machine.path / file.moved_to).read_bytes() == rows[Path(file.file).name]
    store = machine.start()
    assert_truth(store, "live", FULL[:400])
    assert_truth(store, "child", FULL)
    assert look(store, "never sealed").reason is MissReason.NOT_STORED


# -- what is not adopted


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a page": (lambda path: flip(path, -200), "does not have its checksum"),
    "the header": (lambda path: flip(path, 100), "has changed"),
    "a checksum": (lambda path: flip(path, -1), "does not have its checksum"),
    "the end": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "bytes instead of"),
    "everything": (lambda path: path.write_bytes(b""), "ends after 0 bytes"),
    "another file": (lambda path: path.write_bytes(b"not a segment " * 99), "absurd"),
    "a directory": (lambda path: path.unlink() or path.mkdir(), "not a regular file"),
    "a link to nowhere": (
        lambda path: path.unlink() or path.symlink_to("nowhere"),
        "not a regular file",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_told_and_kept(machine: Machine, damage: str) -> None:
    filled(machine)
    path = segment_of(machine, "child")
    spoil, problem = DAMAGES[damage]
    spoil(path)
    lose_catalogue(machine.path)
    rebuilt = rebuild(machine.path, TENANT)
    assert names(rebuilt) == ["root", "lone", "uneven"]
    told = {file.file: file for file in rebuilt.not_adopted}
    child, grandchild = told[f"segments/{path.name}"], told.popitem()[1]
    assert problem in child.problem
    assert "parent 'child' " in grandchild.problem
    for file in rebuilt.not_adopted:
        assert (machine.path / file.moved_to).is_symlink() or (
            machine.path / file.moved_to
        ).exists()
        assert not (machine.path / file.file).exists()
    reasons = (machine.path / "not-adopted" / "reasons.jsonl").read_text().splitlines()
    assert len(reasons) == 2
    assert "parent 'child' " in reasons[1]
    store = machine.start()
    assert_truth(store, "root", FULL[:400])
    assert look(store, "child").reason is MissReason.NOT_STORED
    assert matched(store, FULL).matched_tokens == 100


def test_a_child_is_not_put_on_rows_of_other_tokens(machine: Machine) -> None:
    for number, (kind, parent) in enumerate({
        "other tokens": header("p", FULL[:356] + tokens(30, salt=9)),
        "fewer tokens": header("p", FULL[:356]),
        "another model": header("p", FULL[:400], model_id=MODEL.replace("0", "1")),
        "other tensors": header("p", FULL[:400], layout=layout(heads=1, head_dim=8)),
        "none": header("not p", FULL[:400]),
    }.items()):  # fmt: skip
        one = Machine(machine.path / str(number))
        two = Machine(machine.path / f"{number} with the parent")
        store, other = one.start(), two.start()
        put(store, "unrelated", tokens(3, salt=5))
        put(store, parent.namespace, parent.token_ids, layout=parent.layout,
            model_id=parent.model_id)  # fmt: skip
        put(other, "p", FULL[:400])
        put(other, "c", FULL, parent="p", base=90)
        store.close()
        other.close()
        child = segment_of(two, "c")
        shutil.copy(child, one.path / "segments" / f"{child.name.split('-')[0]}-9.safetensors")
        lose_catalogue(one.path)
        rebuilt = rebuild(one.path, TENANT)
        assert names(rebuilt) == ["unrelated", parent.namespace], kind
        (file,) = rebuilt.not_adopted
        expected = "'p' is not there" if kind == "none" else "'p' is another now"
        assert expected in file.problem, kind


def test_a_file_without_a_name_is_not_given_one(machine: Machine) -> None:
    """It would not be what the catalogue says: the name is in its header."""
    filled(machine)
    lone = segment_of(machine, "lone")
    with lone.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        segment = parse_header(file.read(size))
        rest = file.read()
    nameless = lone.with_name("0123456789ab-99.safetensors")
    nameless.write_bytes(dataclasses.replace(segment, namespace="").header + rest)
    lose_catalogue(machine.path)
    rebuilt = rebuild(machine.path, TENANT)
    assert names(rebuilt) == NAMES
    (file_aside,) = rebuilt.not_adopted
    assert "pion-grpc import" in file_aside.problem
    assert_filled(machine.start())


def test_a_name_does_not_go_back_to_what_a_damaged_one_replaced(machine: Machine) -> None:
    store = machine.start()
    put(store, "p", FULL[:400])
    put(store, "child", FULL, parent="p", base=100)
    put(store, "p", OTHER, replace=True)
    put(store, "young", OTHER + tokens(9, salt=4), parent="p", base=100)
    store.close()
    flip(segment_of(machine, "p"), -200)
    lose_catalogue(machine.path)
    rebuilt = rebuild(machine.path, TENANT)
    assert [(p.namespace, p.visible) for p in rebuilt.adopted] == [("p", False), ("child", True)]
    # Its first hundred tokens are the old one's as well, and its rows may not be.
    assert "parent 'p' was not adopted" in rebuilt.not_adopted[1].problem
    store = machine.start()
    assert look(store, "p").reason is MissReason.NOT_STORED
    assert_truth(store, "child", FULL)
    assert matched(store, FULL[:400]).matched_tokens == 100


def test_files_of_one_name_do_not_push_each_other_out_of_the_way(machine: Machine) -> None:
    for turn in range(3):
        DataDirectory(machine.path).close()
        lost = machine.path / "rows" / "0123456789ab-1.rows"
        lost.write_bytes(b"turn %d" % turn)
        rebuild(machine.path)
        lose_catalogue(machine.path)
    kept = sorted((machine.path / "not-adopted" / "rows").iterdir())
    assert [path.read_bytes() for path in kept] == [b"turn 0", b"turn 1", b"turn 2"]


# -- whose turn it is


def test_nothing_is_rebuilt_under_a_running_server(machine: Machine) -> None:
    store = machine.start()
    fill_directory(store)
    with pytest.raises(CannotStart, match="a server runs on it"):
        rebuild(machine.path, TENANT)
    assert_filled(store)


def test_no_server_starts_under_a_rebuild(machine: Machine) -> None:
    filled(machine)
    lose_catalogue(machine.path)
    refused = []

    def start(done: int, total: int) -> None:
        with pytest.raises(CannotStart, match="is being rebuilt"):
            machine.start()
        with pytest.raises(CannotStart, match="a server runs on it"):
            rebuild(machine.path, TENANT)
        refused.append(done)

    assert names(rebuild(machine.path, TENANT, start)) == NAMES
    assert len(refused) >= 5
    assert_filled(machine.start())


def test_a_sound_catalogue_is_not_made_anew(machine: Machine) -> None:
    filled(machine)
    before = content(machine.path)
    with pytest.raises(CannotStart, match="names what is stored"):
        rebuild(machine.path, TENANT)
    assert content(machine.path).keys() == before.keys()
    assert_filled(machine.start())


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CannotStart, match="not a data directory"):
            rebuild(path)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


# -- a rebuild that does not end


class Interrupted(PowerCut):
    """Keeps what a killed process, and what a power cut, would leave at each step."""

    def __init__(self, root: Path, copies: Path) -> None:
        super().__init__(root)
        self._copied, self._copies, self._count = root, copies, 0

    def _keep(self) -> None:
        self._count += 1
        shutil.copytree(self._copied, self._copies / f"{self._count} killed")
        self.cut(self._copies / f"{self._count} cut")

    def sync(self, descriptor: int) -> None:
        self._keep()
        super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        self._keep()
        super().sync_directory(path)
        self._keep()

    def rename(self, source: Path, target: Path) -> None:
        self._keep()
        super().rename(source, target)
        self._keep()


def stored(path: Path) -> set[bytes]:
    """The content of every file of rows, wherever it is."""
    found = [*path.glob("segments/*"), *path.glob("rows/*"), *path.glob("not-adopted/*/*")]
    return {file.read_bytes() for file in found}


def test_a_rebuild_may_end_at_any_moment(machine: Machine, tmp_path: Path) -> None:
    filled(machine)
    flip(segment_of(machine, "grandchild"), -200)
    (machine.path / "rows" / "0123456789ab-1.rows").write_bytes(b"rows")
    (machine.path / "catalog.db").write_bytes(b"damaged" * 999)
    everything = stored(machine.path)
    copies = tmp_path / "copies"
    copies.mkdir()
    files = Interrupted(machine.path, copies)
    assert names(rebuild(machine.path, TENANT, files=files)) == ["root", "child", "lone", "uneven"]
    assert stored(machine.path) == everything
    finished = set()
    for path in sorted(copies.iterdir()):
        assert stored(path) == everything, path
        copy = Machine(path)
        try:
            store = copy.start()
        except CannotStart:
            assert names(rebuild(path, TENANT)) == ["root", "child", "lone", "uneven"], path
            store = copy.start()
        else:
            finished.add(path)
        assert_truth(store, "child", FULL[:800])
        assert_truth(store, "lone", tokens(70, salt=1), layout(2))
        assert stray_files(store) == []
        store.close()
        assert stored(path) == everything, path
    last = max(int(path.name.split()[0]) for path in copies.iterdir())
    assert {copies / f"{last} killed", copies / f"{last} cut"} < finished
    assert len(finished) < 6, "the last step is the one that counts"


def test_what_was_never_synced_is_on_the_disk_once_it_is_adopted(tmp_path: Path) -> None:
    machine = power_cut_machine(tmp_path / "0")
    store = machine.start()
    put(store, "p", FULL)
    machine.crash(store)
    machine.close()
    lose_catalogue(machine.path)
    assert names(rebuild(machine.path, TENANT, files=machine.files)) == ["p"]
    assert_truth(machine.cut_power(tmp_path / "1").start(), "p", FULL)


def test_without_room_for_a_catalogue_nothing_is_moved(machine: Machine) -> None:
    filled(machine)
    flip(segment_of(machine, "grandchild"), -200)
    lose_catalogue(machine.path)
    before = content(machine.path)
    files = PowerCut(machine.path)
    files.fail_after_bytes = 60_000
    with pytest.raises((CannotStart, DiskFull)):
        rebuild(machine.path, TENANT, files=files)
    assert content(machine.path) == before
    assert list((machine.path / "run").iterdir()) == []
    assert names(rebuild(machine.path, TENANT)) == ["root", "child", "lone", "uneven"]


@pytest.mark.parametrize("begin", [0, 100, 4096])
def test_a_damaged_catalogue_is_set_aside_and_not_lost(machine: Machine, begin: int) -> None:
    filled(machine)
    damaged = bytearray((machine.path / "catalog.db").read_bytes())
    damaged[begin:] = b"\xee" * (len(damaged) - begin)
    (machine.path / "catalog.db").write_bytes(damaged)
    before = content(machine.path)
    with pytest.raises(CannotStart, match=r"is damaged .*pion-grpc rebuild --data"):
        machine.start()
    assert content(machine.path) == before
    rebuilt = rebuild(machine.path, TENANT)
    assert names(rebuilt) == NAMES
    assert rebuilt.catalogue[0].moved_to == "not-adopted/catalog.db"
    assert "damaged" in rebuilt.catalogue[0].problem
    assert (machine.path / "not-adopted" / "catalog.db").read_bytes() == damaged
    assert_filled(machine.start())
