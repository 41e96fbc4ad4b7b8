"""After a power cut: what was promised is there, and of the rest nothing is half there."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pion_grpc.core.blobs import SYNC_THREADS
from pion_grpc.core.declaration import Declaration, LayerSpec
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.sessions import Sessions
from pion_grpc.core.states import RecurrentStates
from pion_grpc.core.values import Durability, FetchQuery, MissReason, State, Stored
from pion_grpc.errors import Corrupt, NotStored
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.blobs import Blobs
from pion_grpc.storage.files import PowerCut
from pion_wire.layout import DType, Side
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
    part,
    power_cut_machine,
    put,
    rows_of,
    stray_files,
    tokens,
    true_rows,
    truth,
    write,
)

FULL = tokens(300)
BLOB_BYTES = 100_000
DISK, PROCESS = Durability.DISK, Durability.PROCESS


class Cuts:
    """A machine whose power can be cut again and again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._machines = [power_cut_machine(path / "0")]

    @property
    def machine(self) -> Machine:
        return self._machines[-1]

    def start(self) -> PrefixStore:
        return self.machine.start()

    def cut(self) -> PrefixStore:
        """Cuts the power, and returns the store after the next boot."""
        target = self._path / str(len(self._machines))
        self._machines.append(self.machine.cut_power(target))
        return self.start()

    def close(self) -> None:
        for machine in self._machines:
            machine.close()


@pytest.fixture
def cuts(tmp_path: Path) -> Iterator[Cuts]:
    cuts = Cuts(tmp_path)
    yield cuts
    cuts.close()


def rows(count: int, start: int = 0) -> dict[Side, bytes]:
    """Returns the true rows of each side."""
    return {
        side: true_rows(SMALL, FULL, index)[16 * start : 16 * (start + count)]
        for index, side in enumerate(Side)
    }


def append(store: PrefixStore, name: str, start: int, count: int, durability: Durability) -> None:
    for side, data in rows(count, start).items():
        write(store, name, start, data, side=side, durability=durability)


def sync_commits(store: PrefixStore) -> None:
    """Brings every commit to stable storage, as any acknowledgement of DISK does."""
    put(store, "unrelated", tokens(5, salt=9), durability=DISK, replace=True)


def test_what_was_promised_on_disk_is_there_bit_for_bit(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "p", FULL[:400], durability=DISK, parts=(part("s", 100, b"x" * 99),),
        part_bytes=(b"x" * 99,))  # fmt: skip
    put(store, "c", FULL, parent="p", base=100, durability=DISK)
    for _ in range(2):
        store = cuts.cut()
        assert_truth(store, "p", FULL[:400])
        assert_truth(store, "c", FULL)
        assert matched(store, FULL).matched_tokens == 300
        fetch = opened(store, FetchQuery("p", part_kinds=("s",)))
        assert fetch is not None
        assert drain(store, fetch)[1] == {0: b"x" * 99}
        assert stray_files(store) == []


def test_what_was_not_promised_is_whole_or_absent(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "lost", FULL)
    put(store, "also lost", FULL[:400] + tokens(9, salt=2))
    sync_commits(store)  # the catalogue names them, and their bytes are gone
    store = cuts.cut()
    assert matched(store, FULL).matched_tokens == 0
    assert look(store, "lost").reason is MissReason.NOT_STORED
    assert rows_of(store, "also lost") is None
    assert store.totals().corrupt == 2
    put(store, "lost", FULL)
    assert_truth(store, "lost", FULL)
    assert stray_files(store) == []


def test_a_child_that_was_promised_brings_its_parents_with_it(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "g", FULL[:400])
    put(store, "p", FULL[:800], parent="g", base=100)
    put(store, "c", FULL, parent="p", base=200, durability=DISK)
    store = cuts.cut()
    assert_truth(store, "c", FULL)
    assert_truth(store, "g", FULL[:400])


def test_a_child_is_never_built_on_a_parent_that_was_lost(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "p", FULL[:400])
    sync_commits(store)
    store = cuts.cut()
    with pytest.raises(NotStored):
        begin(store, "c", FULL, parent="p", base=100)
    put(store, "c", FULL, durability=DISK)
    assert_truth(store, "c", FULL)


def test_what_was_lost_is_never_said_to_be_stored_already(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "p", FULL)
    sync_commits(store)
    store = cuts.cut()
    stored = put(store, "p", FULL, durability=DISK)
    assert not stored.already_stored
    store = cuts.cut()
    assert_truth(store, "p", FULL)


def test_a_promise_is_kept_also_where_it_was_stored_before(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "p", FULL[:400])
    put(store, "c", FULL, parent="p", base=100)
    late = fill(begin(store, "late", FULL, durability=DISK))  # type: ignore[arg-type]
    put(store, "late", FULL)
    assert put(store, "c", FULL, durability=DISK).durability is DISK
    assert late.publish() == Stored(
        "late", True, look(store, "late").prefix.generation, 300, 0, DISK, 0
    )  # type: ignore[union-attr]
    store = cuts.cut()
    assert_truth(store, "c", FULL)
    assert_truth(store, "late", FULL)


def test_a_barrier_promises_everything_before_it(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "p", FULL[:400])
    store.register(TENANT, "live", SMALL)
    append(store, "live", 0, 50, PROCESS)
    store.sync()
    store.register(TENANT, "declared", SMALL)
    store.drop(TENANT, ["p"])
    store.sync()
    store = cuts.cut()
    assert [info.namespace for info in store.list_page(TENANT)] == ["declared", "live"]
    assert rows_of(store, "live") == dict(enumerate(rows(50).values()))


def test_rows_that_were_promised_bring_those_before_them(cuts: Cuts) -> None:
    store = cuts.start()
    store.register(TENANT, "p", SMALL)
    append(store, "p", 0, 50, PROCESS)
    append(store, "p", 50, 50, DISK)
    store = cuts.cut()
    assert rows_of(store, "p") == dict(enumerate(rows(100).values()))
    append(store, "p", 100, 10, DISK)
    store = cuts.cut()
    assert rows_of(store, "p") == dict(enumerate(rows(110).values()))


def test_rows_that_were_lost_take_none_that_were_promised(cuts: Cuts) -> None:
    store = cuts.start()
    store.register(TENANT, "p", SMALL)
    append(store, "p", 0, 50, DISK)
    before = look(store, "p").prefix
    append(store, "p", 50, 50, PROCESS)
    write(store, "p", 10, b"changed." * 2)
    sync_commits(store)
    store = cuts.cut()
    assert rows_of(store, "p") == dict(enumerate(rows(50).values()))
    after = look(store, "p").prefix
    assert before is not None
    assert after is not None
    assert (after.token_count, after.state) == (50, State.LIVE)
    assert after.generation != before.generation
    assert stray_files(store) == []
    append(store, "p", 50, 20, PROCESS)
    assert rows_of(store, "p") == dict(enumerate(rows(70).values()))


def test_a_saved_prefix_outlives_rows_that_were_appended_and_lost(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "p", FULL[:400])
    append(store, "p", 100, 20, PROCESS)
    assert store.save(TENANT, ["p"]) == 1
    append(store, "p", 120, 20, PROCESS)
    put(store, "c", FULL, durability=DISK)
    store = cuts.cut()
    assert rows_of(store, "p") == dict(enumerate(rows(120).values()))
    info = look(store, "p").prefix
    assert info is not None
    assert info.state is State.SEALED
    assert matched(store, FULL[:400]).matched_tokens == 100
    put(store, "d", FULL, parent="p", base=100, replace=True)
    assert_truth(store, "d", FULL)


def test_rows_appended_to_a_parent_and_lost_take_no_child(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "p", FULL[:400], durability=DISK)
    put(store, "c", FULL, parent="p", base=100, durability=DISK)
    append(store, "p", 100, 20, PROCESS)
    sync_commits(store)
    store = cuts.cut()
    assert_truth(store, "c", FULL)
    assert_truth(store, "p", FULL[:400])


def test_a_name_whose_only_rows_were_lost_is_declared_and_empty(cuts: Cuts) -> None:
    store = cuts.start()
    store.register(TENANT, "p", SMALL)
    append(store, "p", 0, 50, PROCESS)
    sync_commits(store)
    store = cuts.cut()
    assert rows_of(store, "p") is None
    assert look(store, "p").reason is MissReason.NO_ROWS
    append(store, "p", 0, 20, PROCESS)
    assert rows_of(store, "p") == dict(enumerate(rows(20).values()))


def test_a_saved_child_brings_its_parents_with_it(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "p", FULL[:400])
    put(store, "c", FULL[:800], parent="p", base=100)
    append(store, "c", 200, 100, PROCESS)
    store.save(TENANT, ["c"])
    store = cuts.cut()
    assert rows_of(store, "c") == truth(SMALL, FULL)


def test_a_cut_while_rows_are_being_saved_loses_none(cuts: Cuts) -> None:
    store = cuts.start()
    store.register(TENANT, "p", SMALL)
    append(store, "p", 0, 50, DISK)
    store.save(TENANT, ["p"])
    append(store, "p", 50, 50, DISK)
    store = cuts.cut()  # the old row file may be back, the new one is there
    assert rows_of(store, "p") == dict(enumerate(rows(100).values()))
    store.save(TENANT, ["p"])
    store = cuts.cut()
    assert rows_of(store, "p") == dict(enumerate(rows(100).values()))
    assert stray_files(store) == []
    assert list(store.directory.rows.iterdir()) == []


def test_a_replacement_that_was_promised_never_gives_way_to_the_old(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "p", FULL, durability=DISK)
    put(store, "p", FULL[:400], replace=True, durability=DISK)
    store = cuts.cut()
    assert_truth(store, "p", FULL[:400])
    assert stray_files(store) == []


def test_files_that_come_back_with_the_power_are_removed_and_count(cuts: Cuts) -> None:
    store = cuts.start()
    store.register(TENANT, "live", SMALL)
    put(store, "p", FULL, durability=DISK)
    put(store, "q", FULL[:400], durability=DISK)
    store.drop(TENANT, ["p"])
    append(store, "live", 0, 5, DISK)  # syncs the drop, and not the directory where its file was
    store = cuts.cut()
    assert stray_files(store) == []
    assert len(list(store.directory.segments.iterdir())) == 1
    totals = store.totals()
    assert abs(totals.disk_used_bytes - directory_bytes(cuts.machine.path)) < 1 << 16


def test_a_store_that_was_cut_off_leaves_nothing(cuts: Cuts) -> None:
    store = cuts.start()
    fill(begin(store, "open", FULL, layout=layout(2)))  # type: ignore[arg-type]
    put(store, "q", FULL[:400], durability=DISK)
    store = cuts.cut()
    assert stray_files(store) == []
    assert len(list(store.directory.segments.iterdir())) == 1
    with store.workshop.catalog.read() as transaction:
        assert Accounts(transaction).usage() == transaction.totals().bytes


def test_rows_that_were_promised_bring_the_segment_below_them(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "p", FULL[:400])
    put(store, "c", FULL[:800], parent="p", base=100)
    append(store, "c", 200, 100, DISK)
    store = cuts.cut()
    assert rows_of(store, "c") == truth(SMALL, FULL)


class Meanwhile(PowerCut):
    """Does something else while a directory is being synced, as another thread might."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.act: Callable[[], object] = lambda: None

    def sync_directory(self, path: Path) -> None:
        act, self.act = self.act, lambda: None
        act()
        super().sync_directory(path)


@pytest.mark.parametrize("syncs_before", [0, 1, 2])
def test_rows_that_come_while_others_are_synced_take_none_with_them(
    tmp_path: Path, syncs_before: int
) -> None:
    (tmp_path / "0").mkdir()
    files = Meanwhile(tmp_path / "0")
    machine = Machine(tmp_path / "0", files)
    store = machine.start()
    store.register(TENANT, "p", SMALL)
    append(store, "p", 0, 10, PROCESS)

    def wait(left: int) -> None:
        if left:
            files.act = lambda: wait(left - 1)
        else:
            write(store, "p", 10, b"unsynced" * 2)

    wait_first = files.act = lambda: wait(syncs_before)
    assert wait_first
    write(store, "p", 11, b"promised" * 2, durability=DISK)
    after = machine.cut_power(tmp_path / "1")
    found = after.start().read_rows(TENANT, "p", 0, Side.K, range(12))
    assert found is not None
    promised = rows(10)[Side.K] + b"unsynced" * 2 + b"promised" * 2
    assert b"".join(found[1]) == promised
    after.close()
    machine.close()


def test_none_of_many_values_that_were_saved_is_lost(cuts: Cuts) -> None:
    store = cuts.start()
    states = RecurrentStates(store)
    values = {layer: bytes([layer]) * 100_000 for layer in range(3 * SYNC_THREADS)}
    for layer, value in values.items():
        states.store(TENANT, "many", layer, value)
    gone = states.open(TENANT, "many", 0)
    assert gone is not None
    states.drop(TENANT, "many", 0)
    gone.reading.close()
    store.sync()
    states.store(TENANT, "later", 0, b"unsynced" * 9_000)
    after = RecurrentStates(cuts.cut())
    assert after.drop(TENANT, "many", 0) == 0
    for layer, value in list(values.items())[1:]:
        found = after.open(TENANT, "many", layer)
        assert found is not None
        with contextlib.closing(found.reading) as reading:
            assert b"".join(reading.pieces()) == value
    with contextlib.suppress(Corrupt):
        found = after.open(TENANT, "later", 0)
        assert found is None


def test_a_value_that_cannot_be_synced_is_not_said_to_be_saved(tmp_path: Path) -> None:
    class Failing(PowerCut):
        fails = False

        def sync(self, descriptor: int) -> None:
            if self.fails and os.fstat(descriptor).st_size > BLOB_BYTES:
                raise OSError(errno.EIO, "as a broken disk says it")
            super().sync(descriptor)

    (tmp_path / "0").mkdir()
    files = Failing(tmp_path / "0")
    machine = Machine(tmp_path / "0", files)
    store = machine.start()
    states = RecurrentStates(store)
    for layer in range(2 * SYNC_THREADS):
        states.store(TENANT, "many", layer, bytes(BLOB_BYTES + layer))
    files.fails = True
    with pytest.raises(OSError, match="broken disk"):
        store.blobs.sync()
    with store.workshop.catalog.read() as transaction:
        assert len(Blobs(transaction).unsynced()) == 2 * SYNC_THREADS
    files.fails = False
    store.sync()
    with store.workshop.catalog.read() as transaction:
        assert Blobs(transaction).unsynced() == []
    machine.close()


def test_a_crash_loses_nothing_that_a_power_cut_may(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "p", FULL[:400])
    store.register(TENANT, "live", SMALL)
    append(store, "live", 0, 50, PROCESS)
    cuts.machine.crash(store)
    store = cuts.start()
    assert_truth(store, "p", FULL[:400])
    assert rows_of(store, "live") == dict(enumerate(rows(50).values()))


def test_a_clean_stop_promises_everything(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "p", FULL[:400])
    store.register(TENANT, "live", SMALL)
    append(store, "live", 0, 50, PROCESS)
    store.close()
    store = cuts.cut()
    assert_truth(store, "p", FULL[:400])
    assert rows_of(store, "live") == dict(enumerate(rows(50).values()))
    assert store.totals().corrupt == 0


def test_lost_rows_of_a_session_are_not_counted(cuts: Cuts) -> None:
    store = cuts.start()
    sessions = Sessions(store)
    declared = {side: Declaration(LayerSpec(8, "fp16")) for side in Side}
    sessions.register(TENANT, "s", declared)
    for side in Side:
        sessions.write(TENANT, f"s_p{side}", 0, 0, 10, memoryview(bytes(160)), DType.F16)
        sessions.write(TENANT, f"s_p{side}", 2, 20, 10, memoryview(bytes(160)), DType.F16)
    store.sync()
    before = sessions.totals()
    assert before.bytes == 2 * 20 * 16
    for side in Side:
        sessions.write(TENANT, f"s_p{side}", 2, 15, 10, memoryview(bytes(160)), DType.F16)
        sessions.write(TENANT, f"s_p{side}", 0, 10, 10, memoryview(bytes(160)), DType.F16)
        sessions.write(TENANT, f"s_p{side}", 1, 0, 10, memoryview(bytes(160)), DType.F16)
    sync_commits(store)
    store = cuts.cut()
    assert look(store, "s").hit
    after = Sessions(store).totals()
    assert (after.rows, after.sides, after.bytes) == (before.rows, before.sides, before.bytes)


def test_a_generation_means_one_content_for_ever(cuts: Cuts) -> None:
    store = cuts.start()
    put(store, "other", FULL[:40], durability=DISK)
    lost = {put(store, "p", tokens(100, salt=n), replace=True).generation for n in range(5)}
    store = cuts.cut()
    new = {put(store, "p", tokens(100, salt=9 + n), replace=True).generation for n in range(5)}
    assert lost.isdisjoint(new)
