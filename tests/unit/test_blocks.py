"""Block hashes and names, as every client computes them."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion_wire.blocks import (
    BLOCK_TOKENS,
    block_hashes,
    common_tokens,
    derived_namespace,
    make_namespace,
    pack_token_ids,
    root_hash,
    route_key,
    unpack_token_ids,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "blocks.json").read_text())
ids = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@pytest.mark.parametrize("vector", VECTORS["roots"], ids=lambda v: v["name"])
def test_the_shared_roots_hold(vector: dict[str, str]) -> None:
    root = root_hash(vector["tenant"], vector["model_id"], vector["fidelity"])
    assert root.hex() == vector["root"]


@pytest.mark.parametrize("vector", VECTORS["sequences"], ids=lambda v: v["name"])
def test_the_shared_hashes_hold(vector: dict[str, object]) -> None:
    token_ids = tokens_of(vector["tokens"])  # type: ignore[arg-type]
    assert len(token_ids) == vector["count"]
    packed = pack_token_ids(token_ids)
    tenant, model = str(vector["tenant"]), str(vector["model_id"])
    root = root_hash(tenant, model)
    assert [h.hex() for h in block_hashes(root, packed)] == vector["block_hashes"]
    assert derived_namespace(root, packed) == vector["derived_namespace"]
    assert route_key(tenant, model, packed) == vector["route_key"]


def tokens_of(recipe: dict[str, int]) -> list[int]:
    """Token i is (first + step * i) mod 2^32."""
    return [(recipe["first"] + recipe["step"] * i) % 2**32 for i in range(recipe["count"])]


@pytest.mark.parametrize("vector", VECTORS["namespaces"], ids=lambda v: "|".join(v["parts"]))
def test_the_shared_namespaces_hold(vector: dict[str, object]) -> None:
    assert make_namespace(*vector["parts"]) == vector["namespace"]  # type: ignore[misc]


def test_the_lengths_around_whole_blocks_are_among_the_vectors() -> None:
    counts = {vector["count"] for vector in VECTORS["sequences"]}
    assert {1, 63, 64, 65, 127, 128, 129, 191, 192, 193} <= counts
    assert make_namespace("m", "t", "fp16") == "61a226ee7dc6bcf4203f91316777d237"


def test_parts_of_a_name_may_be_anything_that_has_a_text() -> None:
    assert make_namespace("m", 7, 1.5) == make_namespace("m", "7", "1.5")
    assert make_namespace("a|b") == make_namespace("a", "b")
    assert make_namespace() != make_namespace("", "")


@given(ids, ids)
def test_equal_hashes_mean_equal_beginnings(left: list[int], right: list[int]) -> None:
    root = root_hash("", "m")
    a, b = pack_token_ids(left), pack_token_ids(right)
    shared = common_tokens(a, b)
    for k, (ha, hb) in enumerate(zip(block_hashes(root, a), block_hashes(root, b), strict=False)):
        end = BLOCK_TOKENS * (k + 1)
        assert (ha == hb) == (left[:end] == right[:end])
        assert (ha == hb) or shared < end


@given(ids)
def test_a_hash_covers_all_blocks_before_it(token_ids: list[int]) -> None:
    root = root_hash("t", "m", "raw")
    packed = pack_token_ids(token_ids)
    whole = block_hashes(root, packed)
    assert len(whole) == -(-len(token_ids) // BLOCK_TOKENS)
    for k in range(len(whole)):
        assert block_hashes(root, packed[: 4 * BLOCK_TOKENS * (k + 1)]) == whole[: k + 1]
        parent = whole[k - 1] if k else root
        rest = packed[4 * BLOCK_TOKENS * k :]
        assert block_hashes(parent, rest) == whole[k:]


def test_no_two_fields_of_a_root_can_be_confused() -> None:
    roots = [
        root_hash("ab", "c"), root_hash("a", "bc"), root_hash("", "abc"), root_hash("abc", ""),
        root_hash("ab", "c", "raw2"), root_hash("ab", "craw", ""), root_hash("raw", "ab", "c"),
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)


def test_the_first_block_alone_decides_the_route() -> None:
    long, short = pack_token_ids(range(500)), pack_token_ids(range(64))
    assert route_key("t", "m", long) == route_key("t", "m", short)
    assert route_key("t", "m", pack_token_ids(range(63))) != route_key("t", "m", short)
    assert len(route_key("t", "m", long)) == 64


@given(ids)
def test_ids_come_back_as_they_were_packed(token_ids: list[int]) -> None:
    packed = pack_token_ids(token_ids)
    assert unpack_token_ids(packed) == token_ids
    assert pack_token_ids(np.array(token_ids, dtype=np.uint32)) == packed
    assert pack_token_ids(packed) == packed
    assert packed == b"".join(token.to_bytes(4, "little") for token in token_ids)


@pytest.mark.parametrize(
    "token_ids",
    [[-1], [2**32], [2**64], [1.5], ["a"], [[1, 2]], [True, False], np.zeros((2, 2), int), b"abc",
     [2**63, -1]],
)  # fmt: skip
def test_ids_that_do_not_fit_are_refused(token_ids: object) -> None:
    with pytest.raises(ValueError, match="token id"):
        pack_token_ids(token_ids)  # type: ignore[arg-type]


@given(ids, ids)
def test_what_two_sequences_have_in_common_is_counted_in_tokens(
    left: list[int], right: list[int]
) -> None:
    expected = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    assert common_tokens(pack_token_ids(left), pack_token_ids(right)) == expected
    changed = [*left, 1, *right]
    assert common_tokens(pack_token_ids(left), pack_token_ids(changed)) == len(left)
