"""Anything in any order, on two processes that crash and on a machine that loses power.

The store is held against a plain dictionary of what was acknowledged. After a crash everything is there
again; after a power cut everything that was promised, and of the rest each name is what it was at some
moment since its last promise, or not there at all.
"""

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.values import Durability, FetchQuery, MissReason
from pion_grpc.errors import InvalidRequest, OtherContent, OverBudget
from pion_wire.blocks import common_tokens
from pion_wire.layout import Side
from tests.core.support import (
    TENANT,
    Machine,
    directory_bytes,
    layout,
    look,
    matched,
    power_cut_machine,
    put,
    rows_of,
    stray_files,
    tokens,
    true_rows,
    write,
)

SHAPE = layout(heads=8, head_dim=128)
ROW_BYTES = 2_048
BUDGET = 9 << 20
"""Beside what the catalogue may need, room for a few prefixes only."""
TRUNK = tokens(200)
SEQUENCES = [
    *(TRUNK[: 4 * count] for count in (1, 63, 64, 65, 130, 192)),
    TRUNK[: 4 * 100] + tokens(30, salt=1),
    TRUNK[: 4 * 64] + tokens(70, salt=2),
    TRUNK[: 4 * 130] + tokens(20, salt=1),
    tokens(90, salt=3),
]
NAMES = ["a", "b", "c", "d", "e", "f"]
DISK, PROCESS = Durability.DISK, Durability.PROCESS

Snapshot = tuple[bytes, bytes]
"""Rows of K and of V, those of parents included."""


class Step(NamedTuple):
    """A method of the machine below, and what it is called with."""

    method: str
    fields: dict[str, Any]


def step(method: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.builds(Step, st.just(method), st.fixed_dictionaries(fields))


def weighted(*choices: tuple[int, st.SearchStrategy[Step]]) -> st.SearchStrategy[Step]:
    repeated = [choice for weight, choice in choices for _ in range(weight)]
    return st.integers(0, len(repeated) - 1).flatmap(repeated.__getitem__)


which = st.integers(0, 1)
pick = st.integers(0, 29)
CHANGES = weighted(
    (
        6,
        step(
            "store",
            which=which,
            name=st.sampled_from(NAMES),
            sequence=st.integers(0, len(SEQUENCES) - 1),
            parent=st.sampled_from([None, *NAMES]),
            share=st.integers(1, 200),
            replace=st.booleans(),
            durability=st.sampled_from(Durability),
        ),
    ),
    (
        6,
        step(
            "write",
            which=which,
            pick=pick,
            side=st.sampled_from(Side),
            place=st.sampled_from(["append", "append", "append", "gap", "inside", "start"]),
            count=st.integers(1, 40),
            durability=st.sampled_from([PROCESS, PROCESS, DISK]),
        ),
    ),
    (2, step("save", which=which, pick=pick)),
    (2, step("drop", which=which, pick=pick)),
    (1, step("register", which=which, name=st.sampled_from(NAMES))),
    (1, step("take_snapshot", which=which, pick=pick)),
    (2, step("restore_snapshot", which=which, pick=pick)),
    (1, step("sync", which=which)),
    (1, step("lease", which=which, pick=pick)),
)
INTERRUPTIONS = weighted(
    (2, step("crash", which=which)),
    (1, step("stop_and_start", which=which)),
    (1, step("keep_house")),
    (3, step("cut_power")),
)
QUESTIONS = weighted(
    (
        4,
        step("match", which=which, sequence=st.integers(0, len(SEQUENCES) - 1), tail=st.booleans()),
    ),
    (1, step("look_at_everything")),
)


class Known:
    """One prefix, as long as it lives under its name or keeps rows for others."""

    def __init__(
        self, ids: bytes, rows: Snapshot, base: int = 0, parent: "Known | None" = None
    ) -> None:
        self.ids = ids
        self.rows = rows
        self.base = base
        self.parent = parent
        self.state = "sealed" if ids else "registered"
        self.generation = 0
        self.past = [rows]
        """What it was since its last promise, now included."""
        self.promised = False
        """Whether the first of `past` must be found after a power cut."""

    @property
    def token_count(self) -> int:
        return min(map(len, self.rows)) // ROW_BYTES

    def change(self, rows: Snapshot) -> None:
        self.rows = rows
        self.state = "live"
        self.past.append(rows)
        self.ids = self.ids[: 4 * self.token_count]

    def promise(self) -> None:
        self.past = [self.rows]
        self.promised = True

    def may_be(self, found: Snapshot) -> bool:
        """Whether a power cut may have left that of it: each tensor as it was at some moment."""
        return all(
            any(rows[side] == past[side] for past in self.past)
            for side, rows in ((0, found), (1, found))
        )


class PrefixStoreMachine(RuleBasedStateMachine):
    """Rules for everything that changes a store, and everything that may interrupt it."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="pion-", dir="/tmp"))
        self.machines = [power_cut_machine(self.path / "0")]
        self.stores: list[PrefixStore] = []
        self.names: dict[str, Known] = {}
        self.ghosts: dict[str, list[Known | None]] = {}
        """What else a name may be after a power cut: commits since the last synced one may be lost."""
        self.leases: dict[bytes, tuple[Known, Snapshot]] = {}
        self.once_leased: list[Known] = []
        self.snapshots: dict[int, tuple[str, Known, tuple[int, int]]] = {}
        self.evicted = 0
        self.serial = 0

    def teardown(self) -> None:
        for machine in self.machines:
            machine.close()
        shutil.rmtree(self.path, ignore_errors=True)

    # -- the model

    @property
    def machine(self) -> Machine:
        return self.machines[-1]

    @initialize()
    def start(self) -> None:
        self.stores = [self.machine.start(BUDGET), self.machine.start(BUDGET)]
        self.evicted = 0

    def become(self, name: str, known: Known | None) -> None:
        """Notes that a name is something else now."""
        self.ghosts.setdefault(name, []).append(self.names.pop(name, None))
        if known is not None:
            self.names[name] = known

    def synced(self) -> None:
        """Notes that every commit is on stable storage."""
        self.ghosts.clear()
        for known in self.names.values():
            # A declaration is all catalogue; rows may still roll back to none.
            known.promised |= known.past[0] == (b"", b"")

    def promise_chain(self, known: Known) -> None:
        """Notes that a prefix, what it needs, and every commit are on stable storage."""
        line: Known | None = known
        while line is not None:
            line.promise()
            line = line.parent
        self.synced()

    def settle(self, *spared: str) -> None:
        """Notes what has been evicted since, and that it might be."""
        visible = {info.namespace for info in self.stores[0].list_page(TENANT, count=100)}
        gone = self.names.keys() - visible
        evicted = sum(store.totals().evicted for store in self.stores)
        assert len(gone) <= evicted - self.evicted, f"{gone} went, and nobody took them"
        self.evicted = evicted
        assert visible - self.names.keys() == set()
        assert not gone & set(spared)
        leased = {known for known, _ in self.leases.values()}
        took = [self.names[name] for name in gone]
        for name in gone:
            assert self.names[name] not in leased, f"{name} was leased"
            self.become(name, None)
        assert not any(known.parent in took for known in self.names.values()), "a parent went first"

    def store_of(self, number: int) -> PrefixStore:
        return self.stores[number % len(self.stores)]

    def found(self, name: str) -> tuple[Snapshot, bytes] | None:
        """Returns all rows of both tensors, and the token ids; None for a name that is not there."""
        store = self.stores[0]
        result = look(store, name)
        if result.prefix is None:
            return None
        if result.reason is MissReason.NO_ROWS:
            return (b"", b""), b""
        fetch = store.fetch(TENANT, FetchQuery(name))
        reading = store.open_rows(TENANT, FetchQuery(name))
        assert reading is not None
        assert hasattr(fetch, "token_ids")
        fetch.reading.close()
        with store.guarded(reading):
            k, v = (
                b"".join(reading.rows_of(index, 0, reading.row_counts[index])) for index in (0, 1)
            )
        ids = fetch.token_ids
        count = len(ids) // 4
        for index, rows in enumerate((k, v)):
            assert rows[: ROW_BYTES * count] == true_rows(SHAPE, ids, index), "rows of other tokens"
        return (k, v), ids

    def data(self, rows: int) -> bytes:
        """Returns rows that nobody has written yet."""
        self.serial += 1
        marks = np.arange(rows, dtype="<u4") + (self.serial << 12)
        return np.repeat(marks, ROW_BYTES // 4).tobytes()

    @rule(steps=st.lists(CHANGES, min_size=1, max_size=6))
    def change(self, steps: list[Step]) -> None:
        for method, fields in steps:
            getattr(self, method)(**fields)

    @rule(steps=st.lists(CHANGES, min_size=1, max_size=6), interruption=INTERRUPTIONS)
    def change_and_interrupt(self, steps: list[Step], interruption: Step) -> None:
        self.change(steps)
        self.ask(interruption)

    @rule(question=QUESTIONS)
    def ask(self, question: Step) -> None:
        method, fields = question
        getattr(self, method)(**fields)

    # -- what changes a store

    def store(
        self, which: int, name: str, sequence: int, parent: str | None, share: int, replace: bool,
        durability: Durability,
    ) -> None:  # fmt: skip
        store, ids = self.store_of(which), SEQUENCES[sequence]
        fields: dict[str, Any] = {"layout": SHAPE, "replace": replace, "durability": durability}
        ancestor = self.names.get(parent or "")
        base = 0
        if ancestor is not None and ancestor.state == "sealed":
            base = min(share, common_tokens(ancestor.ids, ids), ancestor.token_count)
        if base and ancestor is not None:
            fields |= {"parent": parent, "base": base}
            while base <= ancestor.base and ancestor.parent is not None:
                ancestor = ancestor.parent
        else:
            ancestor = None
        old = self.names.get(name)
        if old is not None and old.state != "registered" and not replace and old.ids != ids:
            with pytest.raises(OtherContent):
                put(store, name, ids, **fields)
            return
        try:
            stored = put(store, name, ids, **fields)
        except OverBudget:
            self.settle()
            return
        if stored.already_stored:
            assert old is not None
            assert not replace
            assert stored.generation == old.generation
            known = old
        else:
            rows = true_rows(SHAPE, ids, 0), true_rows(SHAPE, ids, 1)
            known = Known(ids, rows, base, ancestor)
            known.generation = stored.generation
            assert old is None or old.generation != stored.generation
            self.become(name, known)
        assert stored.durability is DISK or durability is PROCESS
        if stored.already_stored and stored.durability is DISK:
            # Perhaps it was on stable storage before, and nothing else has been synced for it.
            known.promise()
            self.ghosts.pop(name, None)
        elif durability is DISK:
            self.promise_chain(known)
        self.settle(name)

    def register(self, which: int, name: str) -> None:
        info = self.store_of(which).register(TENANT, name, SHAPE)
        if name not in self.names:
            known = Known(b"", (b"", b""))
            known.generation = info.generation
            self.become(name, known)
        assert info.generation == self.names[name].generation
        assert info.state.value == self.names[name].state

    def write(
        self, which: int, pick: int, side: Side, place: str, count: int, durability: Durability
    ) -> None:
        if not self.names:
            return
        name = sorted(self.names)[pick % len(self.names)]
        known = self.names[name]
        index = list(Side).index(side)
        old = known.rows[index]
        had = len(old) // ROW_BYTES
        row = {"append": had, "gap": had + 3, "inside": max(had - 2, 0), "start": known.base}[place]
        data = self.data(count)
        try:
            written = write(
                self.store_of(which), name, row, data, side=side, row_bytes=ROW_BYTES,
                durability=durability,
            )  # fmt: skip
        except OverBudget:
            self.settle()
            return
        except InvalidRequest:
            shared = [other for other in self.alive() if other.parent is known and other.base > row]
            assert row < known.base or shared, "nobody shares these rows"
            return
        assert row >= known.base
        new = old[: ROW_BYTES * row].ljust(ROW_BYTES * row, b"\0") + data
        new += old[len(new) :]
        self.forget_leases(known)
        known.ids = known.ids[: 4 * row] if row < had else known.ids
        known.change((new, known.rows[1]) if index == 0 else (known.rows[0], new))
        assert written.row_count == len(new) // ROW_BYTES
        assert (written.generation == known.generation) == (row >= had)
        known.generation = written.generation
        if durability is DISK:
            self.promise_chain(known)
        self.settle(name)

    def save(self, which: int, pick: int) -> None:
        if not self.names:
            return
        name = sorted(self.names)[pick % len(self.names)]
        known = self.names[name]
        try:
            count = self.store_of(which).save(TENANT, [name])
        except OverBudget:
            self.settle()
            return
        assert count == (known.state == "live")
        if count:
            known.state = "sealed"
            self.promise_chain(known)
            self.forget_leases(known)
        self.settle(name)

    def drop(self, which: int, pick: int) -> None:
        if not self.names:
            return
        name = sorted(self.names)[pick % len(self.names)]
        assert self.store_of(which).drop(TENANT, [name]) == [True]
        self.become(name, None)

    def take_snapshot(self, which: int, pick: int) -> None:
        if not self.names:
            return
        name = sorted(self.names)[pick % len(self.names)]
        known = self.names[name]
        with contextlib.suppress(OverBudget):
            identity = self.store_of(which).row_snapshots.take(TENANT, name)
            counts = len(known.rows[0]) // ROW_BYTES, len(known.rows[1]) // ROW_BYTES
            self.snapshots[identity] = (name, known, counts)

    def restore_snapshot(self, which: int, pick: int) -> None:
        if not self.snapshots:
            return
        key = list(self.snapshots)[pick % len(self.snapshots)]
        name, known, counts = self.snapshots[key]
        if self.names.get(name) is not known:
            del self.snapshots[key]
            return
        kept = tuple(
            rows[: ROW_BYTES * count] for rows, count in zip(known.rows, counts, strict=True)
        )
        try:
            generation = self.store_of(which).row_snapshots.restore(TENANT, name, key)
        except InvalidRequest:
            least = min(map(len, kept)) // ROW_BYTES
            assert any(o.parent is known and o.base > least for o in self.alive())
            return
        assert (generation == known.generation) == (kept == known.rows)
        known.generation = generation
        if kept != known.rows:
            self.forget_leases(known)
            known.change((kept[0], kept[1]))

    def sync(self, which: int) -> None:
        self.store_of(which).sync()
        for known in self.names.values():
            known.promise()
        self.synced()

    def lease(self, which: int, pick: int) -> None:
        if not self.names:
            return
        name = sorted(self.names)[pick % len(self.names)]
        known = self.names[name]
        result = look(self.store_of(which), name, lease_ms=60_000)
        assert result.hit == (known.state != "registered")
        if known.state == "sealed" and len(self.leases) < 3:
            self.leases[result.lease_id] = known, known.rows
        self.once_leased.append(known)

    def forget_leases(self, known: Known) -> None:
        """Rows that a lease keeps are those of its prefix: they change with it."""
        self.leases = {i: entry for i, entry in self.leases.items() if entry[0] is not known}

    def alive(self) -> list[Known]:
        """Returns everything that may still need rows of a parent."""
        known = [*self.names.values(), *self.once_leased]
        known += [ghost for ghosts in self.ghosts.values() for ghost in ghosts if ghost is not None]
        for one in list(known):
            while one.parent is not None:
                one = one.parent
                known.append(one)
        return known

    # -- what interrupts it

    def crash(self, which: int) -> None:
        which %= len(self.stores)
        self.machine.crash(self.stores[which])
        self.stores[which] = self.machine.start(BUDGET)
        self.evicted = sum(store.totals().evicted for store in self.stores)
        assert stray_files(self.stores[which]) == []
        self.look_at_everything()

    def stop_and_start(self, which: int) -> None:
        which %= len(self.stores)
        self.stores[which].close()
        self.stores[which] = self.machine.start(BUDGET)
        for known in self.names.values():
            known.promise()
        self.synced()
        self.evicted = sum(store.totals().evicted for store in self.stores)

    def keep_house(self) -> None:
        for store in self.stores:
            store.tick()
            store.clean()

    def cut_power(self) -> None:
        self.machines.append(self.machine.cut_power(self.path / str(len(self.machines))))
        before, self.names = self.names, {}
        ghosts, self.ghosts = self.ghosts, {}
        self.leases, self.snapshots = {}, {}  # leases may be there again, or not; snapshots are not
        self.start()
        assert stray_files(self.stores[0]) == []
        for name in NAMES:
            current = before.get(name)
            possible = [current, *reversed(ghosts.get(name, []))]
            found = self.found(name)
            if found is None:
                assert any(k is None or not k.promised for k in possible), f"{name!r} was promised"
                continue
            rows, ids = found
            info = look(self.stores[0], name).prefix
            assert info is not None
            fits = [k for k in possible if k and k.base == info.base and k.may_be(rows)]
            assert fits, f"{name!r} is what it never was"
            adopted = fits[0]
            adopted.rows, adopted.ids = rows, ids
            adopted.state, adopted.generation = info.state.value, info.generation
            adopted.promise()
            self.names[name] = adopted
        assert stray_files(self.stores[0]) == []
        self.look_at_everything()

    # -- what must always hold

    def match(self, which: int, sequence: int, tail: bool) -> None:
        query = SEQUENCES[sequence] + (tokens(3, salt=8) if tail else b"")
        result = matched(self.store_of(which), query)
        common = {name: common_tokens(known.ids, query) for name, known in self.names.items()}
        assert result.matched_tokens == max(common.values(), default=0)
        if result.hit:
            assert result.prefix is not None
            assert common[result.prefix.namespace] == result.matched_tokens

    def look_at_everything(self) -> None:
        for name, known in self.names.items():
            found = self.found(name)
            assert found is not None, f"{name!r} is gone"
            rows, ids = found
            assert ids == known.ids
            assert rows == known.rows
        for name in set(NAMES) - self.names.keys():
            assert self.found(name) is None

    @invariant()
    def no_byte_is_over_the_budget(self) -> None:
        assert directory_bytes(self.machine.path) <= BUDGET

    @invariant()
    def what_is_leased_is_readable(self) -> None:
        for lease, (_, rows) in self.leases.items():
            served = rows_of(self.stores[0], lease=lease)
            count = min(map(len, rows))
            assert served == {0: rows[0][:count], 1: rows[1][:count]}


unhurried = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


def test_nothing_acknowledged_is_lost_and_nothing_else_is_found() -> None:
    """The same run each time, so that what fails was caused by the last change."""
    run_state_machine_as_test(
        PrefixStoreMachine,
        settings=settings(unhurried, max_examples=40, stateful_step_count=12, derandomize=True),
    )


@pytest.mark.soak
def test_nothing_is_lost_in_long_lives_either() -> None:
    run_state_machine_as_test(
        PrefixStoreMachine, settings=settings(unhurried, max_examples=100, stateful_step_count=30)
    )
