"""The match index: which entries a prefix has, and what is found among them."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pion_grpc.core.indexing import nodes
from pion_grpc.core.matching import EXAMINED_MAX, Served, longest_match, served_with_parts
from pion_grpc.storage.catalog import Catalog
from pion_grpc.storage.match_index import EQUALS_MAX, MatchIndex
from pion_grpc.storage.transaction import NewPrefix
from pion_wire.blocks import block_hashes, pack_token_ids, root_hash

ROOT = root_hash("t", "m", "raw")


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(tmp_path / "catalog.db")
    yield catalog
    catalog.close()


def index(
    catalog: Catalog,
    name: str,
    ids: list[int],
    *,
    fidelity: str = "raw",
    boundaries: Sequence[int] = (),
    kind: str = "state",
) -> int:
    parts = json.dumps([[kind, 0, boundary, 1, ""] for boundary in boundaries])
    with catalog.write() as transaction:
        prefix = transaction.insert(
            NewPrefix(
                tenant="t", namespace=name, state="sealed", visible=True, owner=None, model_id="m",
                fidelity=fidelity, layout="[]", token_count=len(ids), base=0, parent=None, depth=0,
                parts=parts, disk_bytes=1, durability="process",
            )
        )  # fmt: skip
        MatchIndex(transaction).set_token_ids(prefix, pack_token_ids(ids))
        MatchIndex(transaction).add(prefix, nodes("t", "m", fidelity, pack_token_ids(ids)))
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


# With parts


def find_with_parts(catalog: Catalog, ids: list[int], *kinds: str) -> Served:
    packed = pack_token_ids(ids)
    with catalog.read() as transaction:
        longest = longest_match(transaction, ROOT, packed)
        assert longest is not None
        return served_with_parts(transaction, ROOT, packed, longest, kinds)


def common(ids: list[int], others: list[int]) -> int:
    pairs = enumerate(zip(ids, others, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ids), len(others)))


@pytest.mark.parametrize("seed", range(20))
def test_no_boundary_is_later_than_the_one_that_is_served(catalog: Catalog, seed: int) -> None:
    chance = random.Random(seed)
    trunk = [chance.randrange(4) for _ in range(600)]
    stored: dict[str, tuple[list[int], list[int]]] = {}
    for number in range(25):
        ids = trunk[: chance.randrange(1, 600)]
        ids = ids + [chance.randrange(4) for _ in range(chance.choice([0, 0, 3, 70, 200]))]
        boundaries = sorted(chance.sample(range(1, len(ids) + 1), min(len(ids), 2)))
        boundaries = boundaries if chance.random() < 0.5 else []
        stored[f"p{number}"] = (ids, boundaries)
        index(catalog, f"p{number}", ids, boundaries=boundaries)
    for _ in range(20):
        query = trunk[: chance.randrange(1, 600)] + [chance.randrange(4) for _ in range(50)]
        served = find_with_parts(catalog, query, "state")
        possible = {
            name: max((b for b in boundaries if b <= common(ids, query)), default=0)
            for name, (ids, boundaries) in stored.items()
        }
        if max(possible.values()) >= 64:  # below, only the longest match is looked at
            assert served.tokens == max(possible.values())
        if served.tokens:
            assert possible[served.prefix.namespace] == served.tokens
        assert served.matched == common(stored[served.prefix.namespace][0], query)


def test_a_boundary_that_only_one_kind_has_is_not_served(catalog: Catalog) -> None:
    ids = list(range(200))
    index(catalog, "state", ids, boundaries=[150])
    index(catalog, "ring", [*ids[:180], 7], boundaries=[150, 100], kind="ring")
    assert find_with_parts(catalog, ids, "state").tokens == 150
    assert find_with_parts(catalog, ids, "ring").tokens == 150
    assert find_with_parts(catalog, ids, "state", "ring").tokens == 0
    assert find_with_parts(catalog, ids).tokens == 200


def test_no_more_prefixes_are_looked_at_than_said(catalog: Catalog) -> None:
    trunk = list(range(128))
    index(catalog, "old", [*trunk, 1], boundaries=[129])
    for number in range(EXAMINED_MAX + 5):
        index(catalog, f"p{number}", [*trunk, 1_000 + number])
    assert find_with_parts(catalog, [*trunk, 2], "state").tokens == 0
    index(catalog, "young", [*trunk, 3], boundaries=[128])
    assert find_with_parts(catalog, [*trunk, 2], "state").tokens == 128
