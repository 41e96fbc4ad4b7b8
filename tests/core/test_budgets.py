"""Budgets hold: what is evicted, in which order, and what never is."""

import contextlib
import errno
import os
import resource
from pathlib import Path

import pytest

from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.storing import PrefixUpload
from pion_grpc.core.values import LookupQuery, WriteRowsHeader
from pion_grpc.errors import OverBudget, OverQuota, TooManyFiles, Unreadable
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.files import Files
from pion_wire.layout import DType, Layout, Side, TensorLayout
from tests.core.support import (
    SMALL,
    TENANT,
    Machine,
    assert_truth,
    begin,
    directory_bytes,
    fill,
    layout,
    look,
    matched,
    publish,
    put,
    rows_of,
    stray_files,
    tokens,
    truth,
    write,
)

WIDE = layout(2, heads=8, head_dim=64)
"""4 KiB per token."""
BUDGET = 16 << 20
BIG = 256
"""Tokens of a prefix of 1 MiB."""


@pytest.fixture
def store(machine: Machine) -> PrefixStore:
    return machine.start(BUDGET)


def big(store: PrefixStore, name: str, *, salt: int, **fields: object) -> None:
    put(store, name, tokens(BIG, salt=salt), layout=WIDE, **fields)  # type: ignore[arg-type]


def names(store: PrefixStore, tenant: str = TENANT) -> list[str]:
    return [info.namespace for info in store.list_page(tenant, count=1_000)]


def fill_up(store: PrefixStore) -> list[str]:
    """Stores prefixes until one more would evict; returns their names in order of storing."""
    stored: list[str] = []
    while store.totals().evicted == 0:
        name = f"{len(stored):03}"
        big(store, name, salt=len(stored))
        stored.append(name)
    assert names(store) == stored[1:], "the first one stored was not the one to go"
    return stored[1:]


def test_what_another_process_has_just_used_does_not_go(machine: Machine) -> None:
    one, other = machine.start(BUDGET), machine.start(BUDGET)
    first, second, third, *_ = fill_up(one)
    assert look(other, first).hit
    assert rows_of(other, third)
    for number in range(2):
        big(one, f"more{number}", salt=1_000 + number)
    assert {first, second, third} & set(names(one)) == {first, third}


def test_a_thousand_stores_never_exceed_the_budget(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "data")
    budget = 50 << 20
    store = machine.start(budget)
    shape = layout(2, heads=4, head_dim=64)
    for number in range(1_000):
        ids = tokens(96, salt=number)
        put(store, f"n{number}", ids, layout=shape)
        if number % 4 == 3:
            longer = ids + tokens(32, salt=number + 1)
            put(store, f"c{number}", longer, parent=f"n{number}", base=96, layout=shape)
        if number % 100 == 99:
            store.tick()
            store.clean()
        if number % 10 == 9:
            assert directory_bytes(machine.path) <= budget
    assert directory_bytes(machine.path) <= budget
    totals = store.totals()
    assert totals.evicted > 500
    assert totals.prefixes > 200
    assert abs(totals.disk_used_bytes - directory_bytes(machine.path)) < 1 << 16
    assert stray_files(store) == []
    assert_truth(store, "n999", tokens(96, salt=999), shape)
    machine.close()


def test_what_was_used_last_stays_whatever_its_age(store: PrefixStore) -> None:
    stored = fill_up(store)
    for name in (stored[0], stored[2]):
        assert look(store, name).hit
    assert rows_of(store, stored[4]) is not None
    assert matched(store, tokens(BIG, salt=int(stored[6]))).hit
    big(store, "one more", salt=900)
    big(store, "and one", salt=901)
    big(store, "and a third", salt=902)
    gone = [name for name in stored if name not in names(store)]
    unused = [name for name in stored if name not in (stored[0], stored[2], stored[4], stored[6])]
    assert len(gone) >= 3
    assert gone == unused[: len(gone)]


def test_a_use_counts_for_the_whole_chain_and_leaves_go_first(store: PrefixStore) -> None:
    ids = tokens(3 * BIG, salt=800)
    put(store, "root", ids[: 4 * BIG], layout=WIDE)
    put(store, "middle", ids[: 8 * BIG], layout=WIDE, parent="root", base=BIG)
    put(store, "leaf", ids, layout=WIDE, parent="middle", base=2 * BIG)
    order = []
    number = 0
    while "root" in names(store):  # asking by name would be a use
        number += 1
        big(store, f"n{number}", salt=number)
        order += [n for n in ("leaf", "middle", "root") if n not in order + names(store)]
        if number == 6:
            assert rows_of(store, "leaf") is not None
        if "leaf" not in order:
            assert_truth(store, "middle", ids[: 8 * BIG], WIDE)
    assert order == ["leaf", "middle", "root"]
    assert stray_files(store) == []


def test_what_is_leased_is_never_evicted(store: PrefixStore) -> None:
    stored = fill_up(store)
    leases = [look(store, name, lease_ms=60_000).lease_id for name in stored[:3]]
    store.drop(TENANT, stored[:1])
    for number in range(3 * len(stored)):
        big(store, f"more {number}", salt=1_000 + number)
    for name, lease in zip(stored[:3], leases, strict=True):
        ids = tokens(BIG, salt=int(name))
        assert rows_of(store, lease=lease) == truth(WIDE, ids)
    assert directory_bytes(store.directory.path) <= BUDGET


def test_one_call_takes_one_lease_of_a_prefix_however_often_it_names_it(
    store: PrefixStore,
) -> None:
    for number in range(2):
        big(store, f"{number}", salt=number)
    results = store.lookup(TENANT, [LookupQuery(f"{n % 3}") for n in range(999)], 60_000)
    leases = [result.lease_id for result in results]
    assert leases == [*leases[:2], b""] * 333
    assert leases[0] != leases[1]
    with store.workshop.catalog.read() as transaction:
        assert transaction.all("SELECT COUNT(*) FROM lease", ()) == [(2,)]


def test_leases_never_take_the_directory_past_its_budget(machine: Machine) -> None:
    store = machine.start(7 << 20)
    put(store, "p", tokens(100))
    given = 0
    for _ in range(40_000):
        lease = look(store, "p", lease_ms=60_000).lease_id
        given += bool(lease)
        if not lease:
            break
        assert directory_bytes(store.directory.path) <= 7 << 20
    assert 100 < given < 40_000
    assert look(store, "p", lease_ms=60_000).hit


def test_a_smaller_budget_holds_from_the_start_on(machine: Machine) -> None:
    store = machine.start(BUDGET)
    stored = fill_up(store)
    store.close()
    store = machine.start(BUDGET // 2)
    store.clean()
    assert directory_bytes(store.directory.path) <= BUDGET // 2
    left = names(store)
    assert 0 < len(left) < len(stored)
    assert left == stored[-len(left) :], "not the ones that were stored last"


class Stubborn(Files):
    """Files of which some cannot be removed."""

    kept: str = ""

    def unlink(self, path: Path) -> None:
        if self.kept and path.name == self.kept:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        super().unlink(path)


def test_a_file_that_cannot_be_removed_keeps_nobody_from_storing(tmp_path: Path) -> None:
    files = Stubborn()
    machine = Machine(tmp_path / "data", files)
    store = machine.start(BUDGET)
    big(store, "a", salt=1)
    (segment,) = store.directory.segments.iterdir()
    used = store.totals().disk_used_bytes
    files.kept = segment.name
    assert store.drop(TENANT, ["a"]) == [True]
    assert not look(store, "a").hit
    big(store, "b", salt=2)
    store.drop(TENANT, ["b"])
    store.tick()
    assert [path.name for path in store.directory.segments.iterdir()] == [segment.name]
    assert store.totals().disk_used_bytes >= used - 4_096, "what lies there counts"
    (trouble,) = store.space.losses.report().troubles
    assert segment.name in trouble
    assert store.space.losses.report().troubles == (), "told once"
    files.kept = ""
    store.tick()
    assert list(store.directory.segments.iterdir()) == []
    machine.close()


def test_a_file_that_cannot_be_opened_is_no_reason_to_throw_it_away(store: PrefixStore) -> None:
    put(store, "p", tokens(100))
    (segment,) = store.directory.segments.iterdir()
    aside = segment.with_suffix(".aside")
    segment.rename(aside)
    segment.symlink_to(segment)  # a loop, which nobody can open
    for _ in range(2):
        with pytest.raises(Unreadable) as caught:
            rows_of(store, "p")
        assert caught.value.metadata["namespace"] == "p"
    (trouble,) = store.space.losses.report().troubles
    assert segment.name in trouble
    segment.unlink()
    aside.rename(segment)
    assert_truth(store, "p", tokens(100))


def test_without_descriptors_nothing_is_taken_for_damaged(store: PrefixStore) -> None:
    put(store, "p", tokens(100))
    assert_truth(store, "p", tokens(100))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(TooManyFiles) as caught:
            rows_of(store, "p")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.retry_after_ms
    assert caught.value.metadata == {"limit": str(lowest)}
    assert_truth(store, "p", tokens(100))


def test_when_everything_is_leased_a_store_is_refused(store: PrefixStore) -> None:
    stored = fill_up(store)
    for name in stored:
        assert look(store, name, lease_ms=60_000).hit
    with pytest.raises(OverBudget) as caught:
        big(store, "one more", salt=900)
    assert caught.value.metadata["budget_bytes"] == str(BUDGET)
    assert names(store) == stored
    assert stray_files(store) == []


def test_a_store_that_is_refused_evicts_and_counts_nothing(store: PrefixStore) -> None:
    stored = fill_up(store)
    for name in stored[2:]:
        assert look(store, name, lease_ms=60_000).hit
    evicted = store.totals().evicted
    with pytest.raises(OverBudget):
        begin(store, "large", tokens(4 * BIG), layout=WIDE)
    assert names(store) == stored
    assert store.totals().evicted == evicted
    assert stray_files(store) == []


def test_what_is_being_stored_is_neither_evicted_nor_forgotten(store: PrefixStore) -> None:
    upload = begin(store, "slow", tokens(BIG, salt=700), layout=WIDE)
    put(store, "parent", tokens(BIG, salt=701), layout=WIDE)
    child_ids = tokens(BIG, salt=701) + tokens(BIG, salt=702)
    child = begin(store, "child", child_ids, layout=WIDE, parent="parent", base=BIG)
    store.register(TENANT, "live", SMALL)
    write(store, "live", 0, b"x" * 16)
    rows = store.write_rows(TENANT, WriteRowsHeader("live", 0, Side.K, 1, 1))
    for number in range(40):
        big(store, f"n{number}", salt=number)
        assert directory_bytes(store.directory.path) <= BUDGET
    assert isinstance(upload, PrefixUpload)
    assert isinstance(child, PrefixUpload)
    publish(fill(upload))
    publish(fill(child))
    rows.write_arrays([memoryview(b"y" * 16)])
    assert rows.publish().row_count == 2
    assert_truth(store, "slow", tokens(BIG, salt=700), WIDE)
    assert_truth(store, "child", child_ids, WIDE)


def test_what_can_never_fit_evicts_nothing(store: PrefixStore) -> None:
    stored = fill_up(store)
    evicted = store.totals().evicted
    before = directory_bytes(store.directory.path)
    for count in (4_096, 1_000_000):
        with pytest.raises(OverBudget):
            begin(store, "huge", tokens(count), layout=WIDE)
    store.register(TENANT, "live", WIDE)
    with pytest.raises(OverBudget):
        store.write_rows(TENANT, WriteRowsHeader("live", 0, Side.K, 0, 900_000))
    assert names(store) == [*stored, "live"]
    assert store.totals().evicted == evicted
    assert directory_bytes(store.directory.path) <= before + (1 << 20)


def test_reservations_count_before_a_byte_is_written(store: PrefixStore) -> None:
    fill_up(store)
    uploads: list[object] = []

    def open_many() -> None:
        for number in range(40):
            uploads.append(begin(store, f"open {number}", tokens(BIG, salt=number), layout=WIDE))

    with pytest.raises(OverBudget):
        open_many()
    assert 4 < len(uploads) < 16
    assert names(store) == []
    for upload in uploads:
        assert isinstance(upload, PrefixUpload)
        publish(fill(upload))
    assert directory_bytes(store.directory.path) <= BUDGET


def test_dropped_parents_count_until_their_last_child_is_gone(store: PrefixStore) -> None:
    ids = tokens(2 * BIG, salt=5)
    put(store, "p", ids[: 4 * BIG], layout=WIDE)
    put(store, "c", ids, layout=WIDE, parent="p", base=BIG)
    used = store.totals().disk_used_bytes
    store.drop(TENANT, ["p"])
    assert store.totals().disk_used_bytes > used - (1 << 19)
    store.drop(TENANT, ["c"])
    assert store.totals().disk_used_bytes < used - (2 << 20) + (1 << 18)


def test_every_file_of_the_directory_counts(machine: Machine, store: PrefixStore) -> None:
    (machine.path / "export" / "foreign").write_bytes(bytes(6 << 20))
    (machine.path / "catalog.db.v0").write_bytes(bytes(1 << 20))
    store.clean()
    assert abs(store.totals().disk_used_bytes - directory_bytes(machine.path)) < 1 << 16
    fill_up(store)
    assert directory_bytes(machine.path) <= BUDGET


def test_rows_count_and_make_room(store: PrefixStore) -> None:
    fill_up(store)
    store.register(TENANT, "live", WIDE)
    for row in range(0, 3_000, 300):
        write(store, "live", row, bytes(1024 * 300), row_bytes=1024)
        assert directory_bytes(store.directory.path) <= BUDGET
    assert look(store, "live").hit
    for number in range(20):
        big(store, f"later {number}", salt=2_000 + number)
    assert not look(store, "live").hit
    assert list(store.directory.rows.iterdir()) == []


def test_a_tenant_never_takes_the_room_of_another(machine: Machine) -> None:
    store = machine.start(40 << 20, 5 << 20)
    big(store, "theirs", salt=1, tenant="other")
    for number in range(10):
        big(store, f"n{number}", salt=number)
        with store.workshop.catalog.read() as transaction:
            assert Accounts(transaction).usage(TENANT) <= 5 << 20
    assert names(store, "other") == ["theirs"]
    assert names(store) == ["n6", "n7", "n8", "n9"]
    with pytest.raises(OverQuota) as caught:
        begin(store, "huge", tokens(BIG * 6), layout=WIDE)
    assert caught.value.metadata["budget_bytes"] == str(5 << 20)
    assert names(store) == ["n6", "n7", "n8", "n9"]


BARE = Layout((TensorLayout(0, Side.K, 1, 0, DType.F16),))
"""Rows without values: all that grows is the catalogue."""


def test_long_token_sequences_never_grow_the_catalogue_past_the_budget(machine: Machine) -> None:
    budget = 48 << 20
    store = machine.start(budget)
    stored = 0
    for number in range(5):
        with contextlib.suppress(OverBudget):
            put(store, f"n{number}", tokens(1_000_000, salt=number), layout=BARE)
            stored += 1
        assert directory_bytes(machine.path) <= budget, f"after {number + 1}"
    assert stored >= 2


def test_a_catalogue_that_was_large_does_not_stay_so(machine: Machine, store: PrefixStore) -> None:
    for number in range(12):
        put(store, f"n{number}", tokens(50_000, salt=number), layout=BARE)
    assert store.directory.catalog_bytes() > 6 << 20
    store.drop(TENANT, [f"n{number}" for number in range(12)])
    store.clean()
    assert store.directory.catalog_bytes() < 3 << 20
