"""Several processes, and several threads, on one directory."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pion_grpc.core.declaration import Declaration, LayerSpec
from pion_grpc.core.key_values import LargeValue
from pion_grpc.core.keys import Keys
from pion_grpc.core.keyspace import Keyspace, Work
from pion_grpc.core.opening import Opened, open_prefix, within
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.sessions import Sessions
from pion_grpc.core.storing import PrefixUpload
from pion_grpc.core.values import (
    Durability,
    FetchQuery,
    MissReason,
    RowRange,
    Stored,
    WriteRowsHeader,
)
from pion_grpc.errors import Conflict, Corrupt, Evicted, NotStored
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.extents import Extents
from pion_grpc.storage.transaction import PrefixRow
from pion_wire.layout import Side
from tests.core.support import (
    SMALL,
    TENANT,
    Machine,
    Meanwhile,
    assert_truth,
    begin,
    chunks,
    directory_bytes,
    drain,
    fill,
    look,
    matched,
    opened,
    publish,
    put,
    rows_of,
    stray_files,
    tokens,
    truth,
    usage,
    write,
)

FULL = tokens(300)


# -- two processes


def test_two_stores_on_one_directory_see_each_others_prefixes(machine: Machine) -> None:
    one, two = machine.start(), machine.start()
    put(one, "p", FULL[:400])
    put(two, "c", FULL, parent="p", base=100)
    for store in (one, two):
        assert_truth(store, "p", FULL[:400])
        assert_truth(store, "c", FULL)
        assert matched(store, FULL).matched_tokens == 300
    two.register(TENANT, "live", SMALL)
    for store, row in ((one, 0), (two, 10), (one, 20)):
        for side in Side:
            write(store, "live", row, b"x" * 160, side=side)
    for store in (one, two):
        assert rows_of(store, "live") == dict.fromkeys((0, 1), b"x" * 480)
    assert one.save(TENANT, ["live"]) == 1
    assert rows_of(two, "live") == dict.fromkeys((0, 1), b"x" * 480)
    two.drop(TENANT, ["p", "c"])
    assert look(one, "p").reason is MissReason.NOT_STORED
    assert stray_files(one) == []


def test_no_prefill_time_is_known_only_to_whom_it_was_told(machine: Machine) -> None:
    one, two = machine.start(), machine.start()

    def known(name: str) -> set[float]:
        prefixes = [look(store, name).prefix for store in (one, two)]
        return {prefix.prefill_ms for prefix in prefixes if prefix is not None}

    one.register(TENANT, "p", SMALL, prefill_ms=250.0)
    assert known("p") == {250.0}
    put(two, "p", FULL)
    assert known("p") == {250.0}, "what was declared holds where the Store says nothing else"
    put(two, "q", FULL, prefill_ms=125.0)
    assert known("q") == {125.0}
    put(one, "q", FULL[:400], replace=True)
    assert known("q") == {0.0}, "other rows, of which nobody has said it"
    two.register(TENANT, "p", SMALL)
    assert known("p") == {0.0}


def test_no_prefill_time_is_called_measured_once_its_server_has_ended(machine: Machine) -> None:
    one = machine.start()
    put(one, "p", FULL, prefill_ms=125.0)
    one.register(TENANT, "r", SMALL, prefill_ms=250.0)

    def known(store: PrefixStore) -> list[float]:
        found = [look(store, name).prefix for name in ("p", "r")]
        return [prefix.prefill_ms for prefix in found if prefix is not None]

    two = machine.start()  # another worker of the same server
    assert known(two) == [125.0, 250.0]
    for store in (one, two):
        machine.crash(store)
    three = machine.start()
    assert known(three) == [0.0, 0.0]
    rows_of(three, "p")
    receipt = three.ledger.get()
    assert (receipt.measured_hits, receipt.seconds_measured) == (0, 0)
    assert receipt.seconds_estimated > 0


def test_a_start_or_a_stop_harms_nothing_that_another_process_is_storing(machine: Machine) -> None:
    one = machine.start()
    one.register(TENANT, "live", SMALL)
    upload = begin(one, "p", FULL)
    assert isinstance(upload, PrefixUpload)
    pieces = list(chunks(SMALL, FULL, rows_max=50))
    for piece in pieces[:5]:
        upload.write(piece)
    row_session = one.write_rows(TENANT, WriteRowsHeader("live", 0, Side.K, 0, 2))
    two = machine.start()
    two.clean()
    two.tick()
    two.close()
    three = machine.start()
    three.clean()
    for piece in pieces[5:]:
        upload.write(piece)
    row_session.write_arrays([memoryview(b"x" * 32)])
    publish(upload)
    row_session.publish()
    for store in (one, three):
        assert_truth(store, "p", FULL)


def test_no_receipt_goes_with_its_process(machine: Machine) -> None:
    first, second, last = (machine.start() for _ in range(3))
    put(first, "p", FULL)
    for store in (first, second, first):
        assert look(store, "p").hit
        store.tick()
    for store in (first, second):
        machine.crash(store)
        last.clean()
        assert last.receipt.get().hits == 3
    last.receipt.reset()
    assert last.receipt.get().hits == 0
    another = machine.start()
    assert look(another, "p").hit
    another.tick()
    machine.crash(another)
    last.clean()
    assert last.receipt.get().hits == 1, "what was counted before the reset is not counted again"
    machine.crash(last)
    assert machine.start().receipt.get().hits == 0, "a server that starts has saved nothing yet"


@pytest.mark.parametrize("left", [b"", b"\0" * 90, b"\xff{", b"[1, 2]", b"{}", b"7"])
def test_what_a_power_cut_left_of_counters_stops_nobody(machine: Machine, left: bytes) -> None:
    one = machine.start()
    put(one, "p", FULL)
    (one.directory.run / f"{one.directory.instance}-counters").write_bytes(left)
    machine.crash(one)
    two = machine.start()
    assert_truth(two, "p", FULL)
    assert two.receipt.get().hits == 0


def test_what_a_power_cut_left_without_its_lock_is_removed_and_stops_nobody(
    machine: Machine,
) -> None:
    one = machine.start()
    left = [one.directory.run / f"0123456789ab-{kind}" for kind in ("uses", "counters", "uses.new")]
    for path in left:
        path.write_bytes(b"\xff" * 48)
    sessions = Sessions(one, sides_max=2)
    for name in "ab":
        sessions.register(TENANT, name, {side: Declaration(LayerSpec(8, "fp16")) for side in Side})
    assert not sessions.exists(TENANT, "a")
    one.clean()
    assert not any(path.exists() for path in left)


def test_what_a_dead_process_left_goes_and_what_it_finished_stays(machine: Machine) -> None:
    one = machine.start()
    put(one, "p", FULL[:400])
    one.register(TENANT, "live", SMALL)
    for side in Side:
        write(one, "live", 0, b"x" * 160, side=side)
    before = usage(one)
    fill(begin(one, "open", FULL, parent="p", base=100))  # type: ignore[arg-type]
    rows = one.write_rows(TENANT, WriteRowsHeader("live", 0, Side.K, 10, 2))
    rows.write_arrays([memoryview(b"y" * 32)])
    one.register(TENANT, "other", SMALL)
    unnamed = one.write_rows(TENANT, WriteRowsHeader("other", 0, Side.K, 0, 2))
    unnamed.write_arrays([memoryview(b"z" * 32)])
    two = machine.start()
    assert usage(two) > before
    machine.crash(one)
    two.clean()
    assert usage(two) == before
    assert stray_files(two) == []
    assert sorted(path.name for path in two.directory.run.iterdir()) == [
        f"{two.directory.instance}-uses",
        f"{two.directory.instance}.lock",
    ]
    assert_truth(two, "p", FULL[:400])
    assert rows_of(two, "live") == dict.fromkeys((0, 1), b"x" * 160)
    for side in Side:
        write(two, "live", 10, b"w" * 16, side=side)
    assert rows_of(two, "live") == dict.fromkeys((0, 1), b"x" * 160 + b"w" * 16)
    two.drop(TENANT, ["p", "live", "other"])
    assert usage(two) == 0


def test_a_dropped_parent_goes_when_the_store_of_its_child_dies(machine: Machine) -> None:
    one, two = machine.start(), machine.start()
    put(one, "p", FULL[:400])
    fill(begin(one, "c", FULL, parent="p", base=100))  # type: ignore[arg-type]
    two.drop(TENANT, ["p"])
    assert len(list(two.directory.segments.iterdir())) == 2
    machine.crash(one)
    two.clean()
    assert list(two.directory.segments.iterdir()) == []


def test_many_processes_may_start_at_once_on_a_new_directory(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path;"
        "from tests.core.support import Machine, put, tokens;"
        "store = Machine(Path(sys.argv[1])).start();"
        "put(store, sys.argv[2], tokens(100, salt=int(sys.argv[2])));"
        "store.close()"
    )
    data = tmp_path / "data"
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(data), str(number)])
        for number in range(5)
    ]
    assert [process.wait(60) for process in processes] == [0] * 5
    machine = Machine(data)
    store = machine.start()
    for number in range(5):
        assert_truth(store, str(number), tokens(100, salt=number))
    left = {path.name for path in store.directory.run.iterdir()}
    assert left == {f"{store.directory.instance}-uses", f"{store.directory.instance}.lock"}
    assert store.totals().disk_used_bytes == directory_bytes(data)
    machine.close()


def test_threads_may_start_at_once_on_a_new_directory(tmp_path: Path) -> None:
    for attempt in range(5):
        machine = Machine(tmp_path / str(attempt))
        gate = threading.Barrier(6)

        def start(machine: Machine = machine, gate: threading.Barrier = gate) -> PrefixStore:
            gate.wait()
            return machine.start()

        with ThreadPoolExecutor(6) as pool:
            stores = [job.result() for job in [pool.submit(start) for _ in range(6)]]
        assert len({store.directory.host_token for store in stores}) == 1
        machine.close()


def test_the_token_of_a_directory_never_changes(machine: Machine) -> None:
    one = machine.start()
    token = one.directory.host_token
    assert len(token) == 32
    assert machine.start().directory.host_token == token
    one.close()
    assert machine.start().directory.host_token == token
    assert os.stat(machine.path / "host-token").st_mode & 0o077 == 0


def test_an_instance_that_lives_is_never_taken_for_dead(tmp_path: Path) -> None:
    one, two = DataDirectory(tmp_path / "data"), DataDirectory(tmp_path / "data")
    assert list(one.dead_instances()) == []
    assert one.live_instances() == {one.instance, two.instance}
    one.close()
    assert list(two.dead_instances()) == []
    assert two.live_instances() == {two.instance}
    two.close()


# -- many threads


def together(*jobs: Callable[[], object], times: int = 1) -> list[object]:
    """Runs jobs in threads of their own that begin at once; returns what they returned or raised."""
    gate = threading.Barrier(len(jobs) * times)

    def run(job: Callable[[], object]) -> object:
        gate.wait()
        try:
            return job()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(jobs) * times) as pool:
        futures = [pool.submit(run, job) for job in jobs for _ in range(times)]
        return [future.result() for future in futures]


def test_of_many_stores_of_one_name_exactly_one_is_published(machine: Machine) -> None:
    stores = [machine.start(), machine.start()]
    contents = [tokens(100, salt=salt) for salt in range(3)]
    jobs = [
        lambda store=store, ids=ids: put(store, "p", ids)  # type: ignore[misc]
        for store in stores
        for ids in contents
    ]
    for _ in range(4):
        results = together(*jobs, times=2)
        published = [r for r in results if isinstance(r, Stored) and not r.already_stored]
        assert len(published) == 1
        known = (Stored, Conflict)
        for result in results:
            assert isinstance(result, known) or type(result).__name__ == "OtherContent", result
        (ids,) = [ids for ids in contents if rows_of(stores[0], "p") == truth(SMALL, ids)]
        assert_truth(stores[1], "p", ids)
        assert stray_files(stores[0]) == []
        assert len(list(stores[0].directory.segments.iterdir())) == 1
        stores[0].drop(TENANT, ["p"])


def test_a_reader_sees_the_whole_old_or_the_whole_new_or_a_miss(machine: Machine) -> None:
    store, other = machine.start(), machine.start()
    contents = [tokens(100, salt=salt) for salt in range(2)]
    wholes = [truth(SMALL, ids) for ids in contents]
    stop = threading.Event()
    seen: set[str] = set()

    def read(mine: PrefixStore) -> None:
        while not stop.is_set():
            rows = rows_of(mine, "p")
            assert rows is None or rows in wholes
            seen.add("miss" if rows is None else "hit")
            result = matched(mine, contents[0])
            assert result.matched_tokens in (0, 100)

    def change(times: int) -> None:
        try:
            for number in range(times):
                put(store, "p", contents[number % 2], replace=number % 3 == 0)
                if number % 3 != 2 or number % 2:
                    other.drop(TENANT, ["p"])
        finally:
            stop.set()

    results = together(lambda: change(120), *(lambda m=m: read(m) for m in (store, other) * 2))  # type: ignore[misc]
    assert results == [None] * 5
    assert "hit" in seen
    assert store.totals().corrupt == other.totals().corrupt == 0
    store.drop(TENANT, ["p"])
    assert usage(store) == 0
    assert list(store.directory.segments.iterdir()) == []


def test_rows_written_by_many_at_once_never_mix(machine: Machine) -> None:
    stores = [machine.start(), machine.start()]
    stores[0].register(TENANT, "p", SMALL)

    def write_one(number: int) -> None:
        for turn in range(6):
            row = 10 * (6 * number + turn)
            for side in Side:
                data = bytes([1 + number]) * 160
                write(stores[number % 2], "p", row, data, side=side)

    results = together(*(lambda n=n: write_one(n) for n in range(6)))  # type: ignore[misc]
    assert results == [None] * 6
    expected = b"".join(bytes([1 + number]) * 960 for number in range(6))
    for store in stores:
        assert rows_of(store, "p") == {0: expected, 1: expected}
    assert stores[0].save(TENANT, ["p"]) == 1
    assert rows_of(stores[1], "p") == {0: expected, 1: expected}


def test_saving_while_rows_come_loses_none(machine: Machine) -> None:
    store = machine.start()
    store.register(TENANT, "p", SMALL)
    for side in Side:
        write(store, "p", 0, b"a" * 16, side=side)

    def grow() -> None:
        for row in range(1, 60):
            for side in Side:
                write(store, "p", row, bytes([row]) * 16, side=side)

    def save() -> int:
        return sum(store.save(TENANT, ["p"]) for _ in range(40))

    grown, *saves = together(grow, save, save)
    assert grown is None
    assert all(isinstance(count, int) for count in saves), saves
    store.save(TENANT, ["p"])
    expected = b"a" * 16 + b"".join(bytes([row]) * 16 for row in range(1, 60))
    assert rows_of(store, "p") == {0: expected, 1: expected}
    assert stray_files(store) == []
    assert usage(store) == sum(f.stat().st_size for f in store.directory.segments.iterdir())


def test_durable_rows_from_many_threads_are_all_synced(machine: Machine) -> None:
    store = machine.start()
    store.register(TENANT, "p", SMALL)

    def grow(side: Side, durability: Durability) -> None:
        for row in range(20):
            write(store, "p", row, bytes([row + 1]) * 16, side=side, durability=durability)

    disk, process = Durability.DISK, Durability.PROCESS
    assert together(lambda: grow(Side.K, disk), lambda: grow(Side.V, process)) == [None, None]
    with store.workshop.catalog.read() as transaction:
        row = transaction.by_name(TENANT, "p")
        assert row is not None
        kept = {e.tensor: e.boot for e in Extents(transaction).of(row.id) if e.tensor == 0}
    assert kept == {0: None}


def test_a_writer_whose_prefix_is_dropped_is_told_and_leaves_nothing(machine: Machine) -> None:
    store = machine.start()
    store.register(TENANT, "p", SMALL)
    write(store, "p", 0, b"x" * 160)
    upload = store.write_rows(TENANT, WriteRowsHeader("p", 0, Side.K, 10, 1))
    upload.write_arrays([memoryview(b"y" * 16)])
    store.drop(TENANT, ["p"])
    with pytest.raises(NotStored):
        upload.publish()
    upload.abandon()
    assert usage(store) == 0
    assert list(store.directory.rows.iterdir()) == []


def test_a_child_whose_parent_turns_out_damaged_is_not_published(machine: Machine) -> None:
    store = machine.start()
    put(store, "p", FULL[:400])
    upload = fill(begin(store, "c", FULL, parent="p", base=100))  # type: ignore[arg-type]
    (path, *_) = (p for p in store.directory.segments.iterdir() if p.suffix != ".tmp")
    path.unlink()
    with pytest.raises(Corrupt):
        rows_of(store, "p")
    with pytest.raises(Evicted):
        publish(upload)
    assert not look(store, "c").hit
    assert usage(store) == 0
    assert list(store.directory.segments.iterdir()) == []


def test_a_stream_that_is_given_up_leaves_no_file_open(machine: Machine) -> None:
    store = machine.start()
    put(store, "p", FULL)

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    before = open_files()
    for _ in range(20):
        fetch = opened(store, FetchQuery("p"))
        assert fetch is not None
        del fetch
        found = store.read_rows(TENANT, "p", 0, Side.K, [1])
        del found
    assert open_files() <= before + 1
    fetch = opened(store, FetchQuery("p"))
    assert fetch is not None
    drain(store, fetch)


def test_a_prefix_replaced_again_and_again_while_it_is_opened_is_not_taken_for_damaged(
    machine: Machine,
) -> None:
    store, other = machine.start(), machine.start()
    versions = [tokens(100 + number) for number in range(4)]
    later = iter(versions[1:])
    put(store, "p", versions[0])

    def replaced_meanwhile(asked: RowRange, row: PrefixRow) -> RowRange:
        for version in itertools.islice(later, 1):
            put(other, "p", version, replace=True)
        return within(asked, row)

    found = open_prefix(store.workshop, TENANT, FetchQuery("p"), replaced_meanwhile)
    assert isinstance(found, Opened)
    found.reading.close()
    assert found.token_ids == versions[-1]
    assert store.totals().corrupt == other.totals().corrupt == 0


def test_a_value_replaced_again_and_again_before_its_file_is_opened_is_read(
    machine: Machine,
) -> None:
    store = machine.start()
    keyspace, other = Keyspace(store), Keyspace(machine.start())
    later = iter([b"b", b"c", b"d"])

    def put_value(letter: bytes) -> None:
        value = other.blobs.write(TENANT, letter * 100_000)
        other.writing([Work(TENANT, lambda keys: keys.set(b"k", value))])

    def read(keys: Keys) -> bytes:
        value = keys.get(b"k")
        assert isinstance(value, LargeValue)
        for letter in itertools.islice(later, 1):
            put_value(letter)
            other.blobs.workshop.space.sweep()
        return keys.read(value)

    put_value(b"a")
    assert keyspace.reading(TENANT, read) == b"d" * 100_000


def grown(store: PrefixStore) -> dict[int, bytes]:
    """Stores a prefix and a branch of it, both with a row that is not sealed yet; the branch's rows."""
    put(store, "p", tokens(200))
    put(store, "c", tokens(150), parent="p", base=100)
    for name, row in (("p", 200), ("c", 150)):
        for side in Side:
            write(store, name, row, name.encode() * 16, side=side)
    return {index: rows + b"c" * 16 for index, rows in truth(SMALL, tokens(150)).items()}


def test_a_prefix_that_is_sealed_meanwhile_keeps_no_branch_of_it_from_being_sealed(
    tmp_path: Path,
) -> None:
    files = Meanwhile()
    machine = Machine(tmp_path / "data", files)
    store, other = machine.start(), machine.start()
    rows = grown(store)
    files.happens = lambda: other.save(TENANT, ["p"])
    assert store.save(TENANT, ["c"]) == 1
    assert files.happens is None
    assert rows_of(store, "c") == rows
    assert stray_files(store) == []
    machine.close()


def test_a_branch_of_rows_that_are_gone_is_not_sealed_but_taken_out(machine: Machine) -> None:
    store = machine.start()
    grown(store)
    with store.workshop.catalog.read() as transaction:
        row = transaction.by_name(TENANT, "p")
    assert row is not None
    store.directory.resolve(row.file or "").unlink()
    with pytest.raises(Corrupt):
        store.save(TENANT, ["c"])
    assert not look(store, "c").hit
    assert not look(store, "p").hit
