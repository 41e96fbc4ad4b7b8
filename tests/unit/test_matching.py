"""The match index: which entries a prefix has, and what is found among them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pion_grpc.core.matching import longest_match, nodes
from pion_grpc.storage.catalog import EQUALS_MAX, Catalog, NewPrefix
from pion_wire.blocks import block_hashes, pack_token_ids, root_hash

ROOT = root_hash("t", "m", "raw")


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(tmp_path / "catalog.db")
    yield catalog
    catalog.close()


def index(catalog: Catalog, name: str, ids: list[int], *, fidelity: str = "raw") -> int:
    with catalog.write() as transaction:
        prefix = transaction.insert(
            NewPrefix(
                tenant="t", namespace=name, state="sealed", visible=True, owner=None, model_id="m",
                fidelity=fidelity, layout="[]", token_count=len(ids), base=0, parent=None, depth=0,
                parts="[]", disk_bytes=1, durability="process",
            )
        )  # fmt: skip
        transaction.add_nodes(prefix, nodes("t", "m", fidelity, pack_token_ids(ids)))
        return prefix


def find(catalog: Catalog, ids: list[int]) -> tuple[str, int] | None:
    with catalog.read() as transaction:
        found = longest_match(transaction, ROOT, pack_token_ids(ids))
    return None if found is None else (found.prefix.namespace, found.tokens)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 128, 130])
def test_a_prefix_has_one_entry_for_each_block(count: int) -> None:
    ids = pack_token_ids(range(count))
    entries = nodes("t", "m", "raw", ids)
    assert b"".join(tokens for _, tokens in entries) == ids
    assert [parent for parent, _ in entries] == [ROOT, *block_hashes(ROOT, ids)][:-1]
    assert all(len(tokens) == 256 for _, tokens in entries[:-1])


def test_nothing_is_found_in_an_empty_index(catalog: Catalog) -> None:
    assert find(catalog, list(range(200))) is None


def test_an_entry_that_begins_otherwise_is_not_found(catalog: Catalog) -> None:
    index(catalog, "p", [1, 2, 3])
    assert find(catalog, [2, 1, 3]) is None
    assert find(catalog, [1]) == ("p", 1)
    assert find(catalog, [1, 9]) == ("p", 1)
    assert find(catalog, [1, 2, 3, 4]) == ("p", 3)


def test_both_neighbours_are_looked_at(catalog: Catalog) -> None:
    index(catalog, "below", [5, 5, 1])
    index(catalog, "above", [5, 7, 9])
    assert find(catalog, [5, 5, 2]) == ("below", 2)
    assert find(catalog, [5, 7, 1]) == ("above", 2)
    assert find(catalog, [5, 6, 1]) is not None
    # Little-endian bytes sort otherwise than numbers do.
    index(catalog, "byte", [256, 1])
    assert find(catalog, [256, 2]) == ("byte", 1)
    assert find(catalog, [1, 1]) is None


def test_other_fidelities_are_other_trees(catalog: Catalog) -> None:
    index(catalog, "lossy", [1, 2, 3], fidelity="k.0=int8")
    assert find(catalog, [1, 2, 3]) is None


def test_among_more_equals_than_are_looked_at_one_is_found(catalog: Catalog) -> None:
    for number in range(EQUALS_MAX + 20):
        index(catalog, f"{number}", [1, 2, 3, number + 10])
    found = find(catalog, [1, 2, 3, 5])
    assert found is not None
    assert found[1] == 3
