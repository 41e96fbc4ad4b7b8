"""The catalogue: refuses what is not its own, and counts what it names."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import pytest

from pion_grpc.errors import Busy, CannotStart, DiskFull
from pion_grpc.storage import catalog as catalog_module
from pion_grpc.storage import schema
from pion_grpc.storage.accounts import Accounts
from pion_grpc.storage.catalog import Catalog
from pion_grpc.storage.catalog_errors import DamagedCatalogue, OtherCatalogue
from pion_grpc.storage.extents import ExtentRow, Extents
from pion_grpc.storage.files import PowerCut
from pion_grpc.storage.leases import Leases
from pion_grpc.storage.schema import APPLICATION_ID, SCHEMA_VERSION
from pion_grpc.storage.transaction import NewPrefix, Transaction, unix_ms


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog.db"


@pytest.fixture
def catalog(path: Path) -> Iterator[Catalog]:
    catalog = Catalog(path)
    yield catalog
    catalog.close()


def new(name: str, *, tenant: str = "t", parent: int | None = None, size: int = 10) -> NewPrefix:
    return NewPrefix(
        tenant=tenant, namespace=name, state="sealed", visible=True, owner=None, model_id="m",
        fidelity="raw", layout="[]", token_count=5, base=0, parent=parent, depth=0, parts="[]",
        disk_bytes=size, durability="process",
    )  # fmt: skip


def insert(catalog: Catalog, name: str, **fields: object) -> int:
    with catalog.write() as transaction:
        return transaction.insert(new(name, **fields))  # type: ignore[arg-type]


# -- what it refuses


def other_database(path: Path, *statements: str) -> bytes:
    connection = apsw.Connection(str(path))
    for statement in statements:
        connection.execute(statement).fetchall()
    connection.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        (["PRAGMA application_id = 77", "CREATE TABLE theirs (x)"], "another program"),
        (["CREATE TABLE meta (key, value)"], "another program"),
        (["PRAGMA user_version = 3", "CREATE TABLE theirs (x)"], "another program"),
        (["PRAGMA journal_mode = WAL", "CREATE TABLE theirs (x)"], "another program"),
        (
            [f"PRAGMA application_id = {APPLICATION_ID}", "PRAGMA user_version = 99"],
            "version 99, written by a newer release",
        ),
    ],
)
def test_what_is_not_ours_is_refused_and_left_as_it_is(
    path: Path, statements: list[str], problem: str
) -> None:
    before = other_database(path, *statements)
    with pytest.raises(CannotStart, match=problem) as caught:
        Catalog(path)
    assert str(path) in str(caught.value)
    assert "--data" in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"garbage " * 1_000, b"SQLite format 3\0" + b"\xff" * 5_000])
def test_garbage_is_refused_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CannotStart, match="damaged") as caught:
        Catalog(path)
    assert "move it away" in str(caught.value)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_damaged_page_is_an_error_and_no_other_answer(path: Path) -> None:
    catalog = Catalog(path)
    for number in range(300):
        insert(catalog, f"n{number}")
    catalog.close()
    with path.open("r+b") as file:
        for page in range(1, path.stat().st_size // 4096):
            file.seek(4096 * page)
            file.write(b"\xee" * 64)
    with pytest.raises(DamagedCatalogue):  # noqa: SIM117 - in one of two places
        with Catalog(path).read() as transaction:
            transaction.page("t", "", "", 1_000)


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_page_that_is_damaged_while_it_is_open_is_told_as_that(path: Path, what: str) -> None:
    catalog = Catalog(path)
    insert(catalog, "p")
    catalog.close()
    catalog = Catalog(path)
    with path.open("r+b") as file:
        for page in range(1, path.stat().st_size // 4096):
            file.seek(4096 * page)
            file.write(b"\xee" * 4096)
    with pytest.raises(DamagedCatalogue, match="rebuild"), getattr(catalog, what)() as transaction:
        transaction.page("t", "", "", 1_000)
    with (
        pytest.raises(DamagedCatalogue),
        catalog.write() as transaction,
        transaction.undone_on_error(),
    ):
        transaction.page("t", "", "", 1_000)
    with pytest.raises(DamagedCatalogue):
        catalog.copy_to(path.with_name("copy.db"))
    catalog.close()


def test_a_lock_that_is_never_given_is_told_as_that(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "BUSY_MS", 1)
    catalog, other = Catalog(path), Catalog(path)
    with (
        other.write(),
        pytest.raises(Busy, match="another process"),
        catalog.write(),
    ):
        pass
    insert(catalog, "p")
    for opened in (catalog, other):
        opened.close()


def test_a_catalogue_that_can_no_longer_be_opened_is_told_as_that(path: Path) -> None:
    moved = path.parent / "mounted"
    moved.mkdir()
    catalog = Catalog(moved / path.name)
    catalog.close()
    moved.rename(path.parent / "elsewhere")
    for what in ("read", "written"):
        asked = catalog.read() if what == "read" else catalog.write()
        with (
            pytest.raises(DiskFull, match=f"the catalogue cannot be {what}: unable to open"),
            asked,
        ):
            pass


def test_a_text_that_is_none_is_damage(path: Path) -> None:
    catalog = Catalog(path)
    insert(catalog, "p")
    with catalog.write() as transaction:
        transaction.run("UPDATE prefix SET model_id = CAST(X'ff' AS TEXT)", ())
    with pytest.raises(DamagedCatalogue, match="utf-8"), catalog.read() as transaction:
        transaction.by_name("t", "p")
    catalog.close()


def test_an_empty_file_is_an_empty_catalogue(path: Path) -> None:
    path.touch()
    catalog = Catalog(path)
    with catalog.read() as transaction:
        assert transaction.totals() == (0, 0, 0)
    catalog.close()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"cannot open.* see who may read and write it"):
        Catalog(tmp_path / "absent" / "catalog.db")


def test_a_catalogue_that_may_only_be_read_is_refused(path: Path) -> None:
    catalog = Catalog(path)
    insert(catalog, "p")
    catalog.close()
    path.chmod(0o400)
    as_others = []
    if os.geteuid() == 0:  # who may write everything
        if shutil.which("setpriv") is None:
            pytest.skip("root without setpriv cannot be anybody else")
        as_others = ["setpriv", "--bounding-set=-dac_override"]
    command = [*as_others, sys.executable, "-c", _OPENS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == f"{path} may only be read: see who may write it\n"


_OPENS = """
import pathlib, sys
from pion_grpc.errors import CannotStart
from pion_grpc.storage.catalog import Catalog
try:
    Catalog(pathlib.Path(sys.argv[1]))
except CannotStart as error:
    print(error)
"""

# -- older and newer ones

OLD = (schema.MIGRATIONS[0],)
NEXT = (*schema.MIGRATIONS, "ALTER TABLE prefix ADD COLUMN note TEXT DEFAULT 'new'")


def versions(path: Path) -> tuple[int, list[str]]:
    connection = apsw.Connection(str(path))
    try:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(prefix)")]
        return connection.pragma("user_version"), columns
    finally:
        connection.close()


def test_an_older_catalogue_is_brought_up_to_date_after_a_copy(path: Path) -> None:
    old = Catalog(path, migrations=OLD)
    insert(old, "kept")
    # Not closed: what was committed last is in the log only, and belongs into the copy.
    assert path.with_name("catalog.db-wal").stat().st_size > 0
    catalog = Catalog(path, migrations=NEXT)
    with catalog.read() as transaction:
        assert transaction.by_name("t", "kept") is not None
        assert transaction.all("SELECT note FROM prefix", ()) == [("new",)]
    copy = path.with_name(f"catalog.db.v{len(OLD)}")
    version, columns = versions(copy)
    assert version == len(OLD)
    assert "note" not in columns
    kept = Catalog(copy, migrations=OLD)
    with kept.read() as transaction:
        assert transaction.by_name("t", "kept") is not None
    for opened in (old, catalog, kept):
        opened.close()
    with pytest.raises(CannotStart, match="newer release"):
        Catalog(path, migrations=OLD)


def test_a_migration_that_fails_changes_nothing(path: Path) -> None:
    old = Catalog(path, migrations=OLD)
    insert(old, "kept")
    old.close()
    broken = (*NEXT[:-1], NEXT[-1] + "; CREATE TABLE prefix (x)")
    with pytest.raises(CannotStart):
        Catalog(path, migrations=broken)
    version, columns = versions(path)
    assert version == len(OLD)
    assert "note" not in columns
    again = Catalog(path, migrations=OLD)
    with again.read() as transaction:
        assert transaction.by_name("t", "kept") is not None
    again.close()


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            "ALTER TABLE prefix RENAME COLUMN base TO foundation",
            "without prefix.base, with prefix.f",
        ),
        ("ALTER TABLE prefix ADD COLUMN colour TEXT", "with prefix.colour"),
        ("DROP TABLE row_snapshot", "without row_snapshot"),
        ("DROP TRIGGER prefix_resized", "without prefix_resized"),
        ("DROP INDEX prefix_name", "without prefix_name"),
        (
            "CREATE TABLE another (a, b, c, d, e)",
            "with another.a, with another.b, with another.c, and 2",
        ),
    ],
)
def test_a_catalogue_from_between_two_releases_is_refused_and_left_as_it_is(
    path: Path, change: str, difference: str
) -> None:
    catalog = Catalog(path)
    insert(catalog, "p")
    catalog.close()
    before = other_database(path, change)
    with pytest.raises(OtherCatalogue) as caught:
        Catalog(path)
    assert difference in str(caught.value)
    assert f"`pion-grpc rebuild --data {path.parent}`" in str(caught.value)
    assert path.read_bytes() == before


def test_what_sqlite_makes_for_itself_is_no_difference(path: Path) -> None:
    catalog = Catalog(path)
    insert(catalog, "p")
    catalog.close()
    other_database(path, "ANALYZE")
    Catalog(path).close()


def test_the_version_is_that_of_the_last_migration() -> None:
    assert len(schema.MIGRATIONS) == SCHEMA_VERSION


# -- transactions


def test_a_write_that_fails_leaves_nothing(catalog: Catalog) -> None:
    def fail(transaction: Transaction) -> None:
        transaction.insert(new("p"))
        raise KeyError("p")

    with pytest.raises(KeyError), catalog.write() as transaction:
        fail(transaction)
    with catalog.read() as transaction:
        assert transaction.by_name("t", "p") is None
        assert Accounts(transaction).usage() == 0


def test_a_reader_sees_one_moment_whatever_is_written_meanwhile(catalog: Catalog) -> None:
    insert(catalog, "a")
    with catalog.read() as transaction:
        assert transaction.totals().prefixes == 1
        insert(catalog, "b")
        assert transaction.totals().prefixes == 1
    with catalog.read() as transaction:
        assert transaction.totals().prefixes == 2


def test_two_visible_prefixes_never_have_one_name(catalog: Catalog) -> None:
    insert(catalog, "p")
    insert(catalog, "p", tenant="other")
    with pytest.raises(apsw.ConstraintError):
        insert(catalog, "p")
    with catalog.write() as transaction:
        row = transaction.by_name("t", "p")
        assert row is not None
        transaction.update(row.id, visible=0)
    insert(catalog, "p")


def test_writers_wait_for_each_other_and_lose_nothing(path: Path) -> None:
    catalogs = [Catalog(path) for _ in range(3)]
    gate = threading.Barrier(6)

    def work(number: int) -> None:
        gate.wait()
        for turn in range(40):
            insert(catalogs[number % 3], f"{number} {turn}")

    with ThreadPoolExecutor(6) as pool:
        for job in [pool.submit(work, number) for number in range(6)]:
            job.result()
    with catalogs[0].read() as transaction:
        assert transaction.totals().prefixes == 240
        rows = transaction.page("t", "", "", 1_000)
        assert len({row.generation for row in rows}) == 240
        assert len({row.last_use for row in rows}) == 240
    for catalog in catalogs:
        catalog.close()


def test_a_full_disk_is_told_as_one_and_loses_nothing(tmp_path: Path) -> None:
    files = PowerCut(tmp_path)
    catalog = Catalog(tmp_path / "catalog.db", files)
    insert(catalog, "kept")
    files.fail_after_bytes = files.written_bytes
    for _ in range(2):
        with pytest.raises(DiskFull):
            insert(catalog, "lost")
        with pytest.raises(DiskFull):
            insert(catalog, "also lost")
    with catalog.read() as transaction:
        assert [row.namespace for row in transaction.page("t", "", "", 10)] == ["kept"]
    files.fail_after_bytes = None
    insert(catalog, "lost")
    catalog.close()


def test_a_commit_on_disk_survives_and_brings_those_before_it(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    files = PowerCut(tmp_path / "0")
    catalog = Catalog(tmp_path / "0" / "catalog.db", files)
    insert(catalog, "first")
    with catalog.write(on_disk=True):
        pass  # nothing of its own to write
    insert(catalog, "second")
    files.cut(tmp_path / "1")
    after = Catalog(tmp_path / "1" / "catalog.db")
    with after.read() as transaction:
        assert [row.namespace for row in transaction.page("t", "", "", 10)] == ["first"]
    after.close()
    catalog.close()


# -- counting


def test_usage_is_always_the_sum_of_what_is_named(catalog: Catalog) -> None:
    def expected(transaction: Transaction) -> int:
        parts = ("prefix", "disk_bytes"), ("reservation", "bytes"), ("garbage", "bytes")
        return sum(
            transaction.all(f"SELECT coalesce(sum({column}), 0) FROM {table}", ())[0][0]
            for table, column in parts
        )

    first = insert(catalog, "a", size=100)
    second = insert(catalog, "b", size=50, tenant="other")
    with catalog.write() as transaction:
        reservation = Accounts(transaction).reserve("me", "t", first, 30)
        assert Accounts(transaction).usage() == expected(transaction) == 180
        assert Accounts(transaction).usage("t") == 130
        transaction.update(first, disk_bytes=70, file="segments/x")
        Extents(transaction).add(first, ExtentRow(0, 0, 0, 5, "rows/y", 0, b""))
        assert Accounts(transaction).usage() == expected(transaction) == 150
        transaction.delete(first)
        assert sorted(Accounts(transaction).garbage()) == ["rows/y", "segments/x"]
        assert not Accounts(transaction).release(reservation)
        assert Accounts(transaction).usage() == expected(transaction) == 120
        assert Accounts(transaction).stored_bytes() == 50
        Accounts(transaction).forget_garbage(Accounts(transaction).garbage())
        transaction.delete(second)
        assert Accounts(transaction).usage() == expected(transaction) == 0


def test_only_what_nothing_needs_may_be_evicted(catalog: Catalog) -> None:
    parent = insert(catalog, "parent")
    child = insert(catalog, "child", parent=parent)
    leased, written, empty = (insert(catalog, n) for n in ("leased", "written", "empty"))
    with catalog.write() as transaction:
        Leases(transaction).add(b"l" * 16, leased, unix_ms() + 60_000)
        Accounts(transaction).reserve("me", "t", written, 5)
        transaction.update(empty, disk_bytes=0)
        open_one = transaction.insert(new("open")._replace(state="open", visible=False))
        assert open_one
        victim = transaction.victim(unix_ms(), None)
        assert victim is not None
        assert victim.id == child
        transaction.delete(child)
        victim = transaction.victim(unix_ms(), None)
        assert victim is not None
        assert victim.id == parent
        transaction.delete(parent)
        assert transaction.victim(unix_ms(), None) is None
        victim = transaction.victim(unix_ms() + 120_000, None)
        assert victim is not None
        assert victim.id == leased


def test_of_extents_the_later_one_has_the_higher_serial(catalog: Catalog) -> None:
    prefix = insert(catalog, "p")
    with catalog.write() as transaction:
        for tensor in (0, 1, 0, 0):
            Extents(transaction).add(prefix, ExtentRow(tensor, 0, 0, 1, "rows/a", 0, b"", "boot"))
        extents = Extents(transaction).of(prefix)
        assert [(e.tensor, e.serial) for e in extents] == [(0, 1), (0, 2), (0, 3), (1, 1)]
        assert Extents(transaction).unsynced_files(prefix) == ["rows/a"]
        Extents(transaction).mark_synced(prefix)
        assert Extents(transaction).unsynced_files(prefix) == []
        Extents(transaction).replace(prefix, extents[:1])
        assert Extents(transaction).of(prefix) == extents[:1]


def test_a_generation_is_never_given_twice(catalog: Catalog) -> None:
    prefix = insert(catalog, "p")
    seen = set()
    for _ in range(50):
        with catalog.write() as transaction:
            seen.add(transaction.new_generation(prefix))
    assert len(seen) == 50
    assert min(seen) > 0


def test_every_file_of_many_extents_is_named_once(catalog: Catalog) -> None:
    prefix, other = insert(catalog, "p"), insert(catalog, "q")
    with catalog.write() as transaction:
        assert Extents(transaction).files(prefix) == []
        for number in range(300):
            file = ["rows/b", "", "rows/a"][number % 3]
            Extents(transaction).add(prefix, ExtentRow(number % 7, 0, number, 1, file, 0, b""))
        Extents(transaction).add(other, ExtentRow(0, 0, 0, 1, "rows/z", 0, b""))
        assert Extents(transaction).files(prefix) == ["", "rows/a", "rows/b"]
        assert Extents(transaction).files(other) == ["rows/z"]
