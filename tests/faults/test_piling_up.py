"""What clients declare and leave lying must not pile up: in the catalogue, on disk, in memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.storage.directory import DataDirectory
from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.messages import layout_to_message
from pion_wire.v1 import types_pb2
from tests.conftest import ServerProcess
from tests.server.wire import Sample, Wire, layout_of, refused

pytestmark = pytest.mark.faults

BUDGET = 32 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PrefixStore]:
    """A store in this process, whose housekeeping is called here."""
    store = PrefixStore(DataDirectory(tmp_path / "data"), budget_bytes=BUDGET)
    yield store
    store.close()


def wide(width: int) -> Layout:
    """A layout that nobody else has, of some 50 KB."""
    return Layout(
        tuple(
            TensorLayout(slot, side, 1, width, DType.F16)
            for slot in range(1_000)
            for side in (Side.K, Side.V)
        )
    )


def directory_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_declarations_alone_do_not_exceed_the_budget(start_server) -> None:
    server: ServerProcess = start_server("--disk-budget", str(BUDGET))
    table = types_pb2.BlockTable(block_tokens=16, hashes=bytes(3_200_000))
    layout = layout_to_message(layout_of())
    with Wire(server.address) as wire:

        def declare_without_end() -> None:
            for index in range(100):
                wire.call("Register", namespace=f"piling/{index}", layout=layout, table=table)

        told = refused(declare_without_end)
        assert (told.reason, told.retry_ms > 0) == ("BUDGET", True)
        assert directory_bytes(server.directory) <= BUDGET
        names = wire.names()
        assert len(names) >= 2
        wire.call("Drop", namespaces=names)
    server.stop()
    with Wire(start_server("--disk-budget", str(BUDGET)).address) as wire:
        wire.call("Register", namespace="piling/after", layout=layout, table=table)
        wire.store(Sample("piling/one", 100))
        assert wire.names() == ["piling/after", "piling/one"]


def test_layouts_that_nobody_has_any_more_are_forgotten(store: PrefixStore) -> None:
    store.register("", "kept", wide(1))
    for width in range(2, 52):
        store.register("", "gone", wide(width))
        store.drop("", ["gone"])
    full = store.directory.catalog_bytes()
    store.clean()
    assert store.directory.catalog_bytes() < full / 4
    assert store.register("", "kept", wide(1)).layout == wide(1)


def snapshot_count(store: PrefixStore) -> int:
    with store.workshop.catalog.read() as transaction:
        return int(transaction.all("SELECT count(*) FROM row_snapshot", ())[0][0])


def test_snapshots_of_dropped_prefixes_are_forgotten(store: PrefixStore) -> None:
    layout = layout_of()
    store.register("", "kept", layout)
    kept = store.row_snapshots.take("", "kept")
    for _ in range(20):
        store.register("", "gone", layout)
        for _ in range(16):
            store.row_snapshots.take("", "gone")
        store.drop("", ["gone"])
    assert snapshot_count(store) == 1
    assert store.row_snapshots.release("", "kept", kept)
    assert snapshot_count(store) == 0
