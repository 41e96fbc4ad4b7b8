"""Parts that come later than rows: the rows are not stored again, and nobody goes on otherwise."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache

from pion_client import Client, caches
from pion_client.mlx import PionPromptCache
from pion_client.ring import Ring
from pion_wire.blocks import pack_token_ids, route_key
from tests.mlx import families
from tests.mlx.continuing import decoded
from tests.mlx.conversing import LONGEST, STEP, conversation, prompt_cache
from tests.mlx.conversing import model as conversing_model
from tests.mlx.test_prompt_cache import held_back

WAIT_S = 120.0
"""Longer than anything here takes; only a broken test waits so long."""
ROOT = Path(__file__).parents[2]
ROW_BYTES = 2 * 4 * 64 * 4
"""A token's rows in the one slot of attention."""
STATE_BYTES = 3 * (3 * 64 + 4 * 8 * 8) * 4
BESIDE_BYTES = 12_000
"""More than what a segment here has beside rows and states: header, token ids, checksums."""
OWN = 40
NAMES = [f"{shared}:{OWN}" for shared in range(64, LONGEST, STEP)]


@pytest.fixture(scope="module")
def hybrid():
    return conversing_model()


@pytest.fixture
def client(server):
    with Client(server.address) as client:
        client.drop(*(prefix.namespace for prefix in client.list()))
        yield client


def prefilled(model, ids, *stops):
    """What a run without the server has: in steps, split at these stops as well."""
    cache, begin = make_prompt_cache(model), 0
    for stop in (*stops, len(ids)):
        while begin < stop:
            end = min(begin + STEP, stop)
            model(mx.array([ids[begin:end]]), cache=cache)
            caches.settle(cache)
            begin = end
    return cache


def stored_now(model, client, ids, checkpoints=(), **options):
    """Prefills and stores in an object of its own; returns the cache and what is said about it."""
    with prompt_cache(model, client=client, **options) as mine:
        cache = mine.get_or_prefill(ids, checkpoints=checkpoints)
        assert mine.flush(WAIT_S)
        return cache, mine.stats()


def child_of(client, token_count):
    """The one prefix of so many tokens."""
    (found,) = [prefix for prefix in client.list() if prefix.token_count == token_count]
    return found


def boundaries_of(prefix):
    return sorted({part.boundary_tokens for part in prefix.parts})


def test_ten_checkpoints_of_several_processes_do_not_store_their_rows_twice(
    server, client, hybrid, tmp_path
):
    trunk = families.tokens(LONGEST)
    first, _ = stored_now(hybrid, client, trunk)  # its state is kept at its end only
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.mlx.conversing", server.address, str(file), *names],
            cwd=ROOT,
        )
        for file, names in ((tmp_path / "1.npz", NAMES[::2]), (tmp_path / "2.npz", NAMES[1::2]))
    ]
    assert [process.wait(WAIT_S) for process in running] == [0, 0]
    there = list(client.list())
    assert len(there) == 10
    rows = sum(prefix.token_count - prefix.base for prefix in there)
    assert rows == LONGEST + len(NAMES) * OWN
    states = 1 + 2 * len(NAMES)
    size = sum(prefix.stored_bytes for prefix in there)
    least = rows * ROW_BYTES + states * STATE_BYTES
    assert least <= size < least + len(there) * BESIDE_BYTES
    assert len(there) * BESIDE_BYTES < LONGEST * ROW_BYTES, "else twice the rows would not show"

    # Each goes on as it did where it was prefilled, and as if there were no server.
    logits = {**np.load(tmp_path / "1.npz"), **np.load(tmp_path / "2.npz")}
    with prompt_cache(hybrid, client=client) as other:
        for name in NAMES:
            ids, shared = conversation(name)
            again = decoded(hybrid, other.get_or_prefill(ids), steps=8)
            assert np.array_equal(again, logits[name])
            alone = decoded(hybrid, prefilled(hybrid, ids, shared), steps=8)
            assert np.array_equal(again, alone)
        for shared in range(64, LONGEST, STEP):
            again = decoded(hybrid, other.get_or_prefill(trunk[:shared]), steps=8)
            alone = decoded(hybrid, prefilled(hybrid, trunk[:shared]), steps=8)
            assert np.array_equal(again, alone)
        again = decoded(hybrid, other.get_or_prefill(trunk), steps=8)
        assert np.array_equal(again, decoded(hybrid, first, steps=8))
        stats = other.stats()
    assert (stats["misses"], stats["tokens_prefilled"]) == (0, 0)


@pytest.mark.parametrize("export", [True, False])
def test_a_prompt_that_ends_within_a_stored_one_does_not_bring_rows(server, client, hybrid, export):
    trunk = families.tokens(LONGEST)
    stored_now(hybrid, client, trunk)
    cache, stats = stored_now(hybrid, client, trunk[:320], checkpoints=(128,))
    assert (stats["tokens_prefilled"], stats["stores"], stats["stored_whole"]) == (320, 1, {})
    child = child_of(client, 320)
    assert (child.base, boundaries_of(child)) == (320, [128, 320])
    assert child.stored_bytes < 2 * STATE_BYTES + BESIDE_BYTES
    with (
        Client(server.address, export=export) as reader,
        prompt_cache(hybrid, client=reader) as other,
    ):
        again = other.get_or_prefill(trunk[:320])
        assert other.stats()["lane"] == ("export" if export else "stream")
        assert np.array_equal(decoded(hybrid, again), decoded(hybrid, cache))
        early, rest = other.reuse(trunk[:200])
        assert len(rest) == 200 - 128
        alone = prefilled(hybrid, trunk[:128])
        assert np.array_equal(decoded(hybrid, early), decoded(hybrid, alone))
    # What continues it has its parts, and they outlive it.
    longer = [*trunk[:320], *families.tokens(100, seed=5)]
    _, stats = stored_now(hybrid, client, longer)
    assert stats["tokens_served"] == 320
    client.drop(child.namespace, child_of(client, LONGEST).namespace)
    assert boundaries_of(child_of(client, 420)) == [128, 320, 420]
    with prompt_cache(hybrid, client=client) as other:
        again, rest = other.reuse([*trunk[:330], 1])
        assert len(rest) == 11
        cache = prefilled(hybrid, trunk[:320], 128)
        assert np.array_equal(decoded(hybrid, again), decoded(hybrid, cache))


def test_the_receipt_does_not_claim_a_prefill_for_rows_that_were_compared(client, hybrid):
    trunk = families.tokens(LONGEST)
    stored_now(hybrid, client, trunk)
    client.reset_stats()
    stored_now(hybrid, client, trunk[:320])
    assert child_of(client, 320).base == 320
    receipt = client.stats()
    assert (receipt.hits, receipt.tokens_served, receipt.prefill_seconds_avoided_measured) == (
        0,
        0,
        0,
    )


def test_rows_that_are_dropped_meanwhile_are_stored(client, hybrid):
    trunk = families.tokens(LONGEST)
    stored_now(hybrid, client, trunk)
    with prompt_cache(hybrid, client=client) as mine:
        with held_back(mine):
            cache = mine.get_or_prefill(trunk[:320])
            client.drop(*(prefix.namespace for prefix in client.list()))
        assert mine.flush(WAIT_S)
        assert mine.stats()["stored_whole"] == {"parent_gone": 1}
    assert child_of(client, 320).base == 0
    with prompt_cache(hybrid, client=client) as other:
        again = other.get_or_prefill(trunk[:320])
        assert other.stats()["tokens_prefilled"] == 0
        assert np.array_equal(decoded(hybrid, again), decoded(hybrid, cache))


def changed_at(row, layers, side):
    """The same rows but for one bit."""
    pairs = [[np.array(array) for array in pair] for pair in layers]
    pairs[0][side].view(np.uint32)[-1, row, -1] ^= 1
    return pairs


@pytest.mark.parametrize(
    ("row", "side", "base"), [(299, 0, 299), (150, 1, 150), (63, 0, 0), (0, 1, 0), (300, 1, 300)]
)
def test_rows_of_other_bits_are_not_shared(client, hybrid, row, side, base):
    trunk = families.tokens(LONGEST)
    source = prefilled(hybrid, trunk)
    held = caches.expected_of(source)
    layers = changed_at(row, caches.take(source), side)
    client.store(None, layers=layers, slots=held.slots, token_ids=trunk, model="m")
    ids = [*trunk[:300], *families.tokens(50, seed=8)]
    cache, stats = stored_now(hybrid, client, ids, checkpoints=(256,), model_id="m")
    assert stats["stored_whole"] == ({} if base == 300 else {"rows_differ": 1})
    assert child_of(client, 350).base == base
    with prompt_cache(hybrid, client=client, model_id="m") as other:
        again = other.get_or_prefill(ids)
        assert other.stats()["tokens_prefilled"] == 0
        assert np.array_equal(decoded(hybrid, again), decoded(hybrid, cache))


@pytest.mark.parametrize("row", [130, 63])
def test_what_was_served_is_extended_where_the_longest_match_has_other_bits(client, hybrid, row):
    trunk = families.tokens(LONGEST)
    source = prefilled(hybrid, trunk)
    held = caches.expected_of(source)
    stored_now(hybrid, client, trunk[:128], model_id="m")
    layers = changed_at(row, caches.take(source), 0)
    client.store(None, layers=layers, slots=held.slots, token_ids=trunk, model="m")
    ids = [*trunk[:300], *families.tokens(50, seed=8)]
    cache, stats = stored_now(hybrid, client, ids, model_id="m")
    assert (stats["tokens_served"], stats["stored_whole"]) == (128, {"rows_differ": 1})
    child = child_of(client, 350)
    assert (child.base, child.parent) == (128, child_of(client, 128).namespace)
    with prompt_cache(hybrid, client=client, model_id="m") as other:
        assert np.array_equal(decoded(hybrid, other.get_or_prefill(ids)), decoded(hybrid, cache))


def test_a_prefix_whose_parts_are_in_the_way_is_not_extended(client, hybrid):
    trunk = families.tokens(LONGEST)
    source = prefilled(hybrid, trunk)
    held = caches.expected_of(source)
    good = [taken.part() for taken in caches.take_parts(prefilled(hybrid, trunk[:256]), 256)]
    end = [taken.part() for taken in caches.take_parts(source, LONGEST)]
    bad = [dataclasses.replace(part, description="?") for part in good]
    for parts, missed, whole in (
        ([good[0], *end], "part_missing", {"parent_refused": 1}),
        (bad, "part_differs", {}),
    ):
        client.store(
            None,
            layers=caches.take(source),
            slots=held.slots,
            token_ids=trunk,
            model="m",
            parts=parts,
            replace=True,
        )
        ids = [*trunk[:300], *families.tokens(50, seed=len(parts))]
        cache, stats = stored_now(hybrid, client, ids, checkpoints=(256,), model_id="m")
        assert (stats["miss_reasons"], stats["stored_whole"]) == ({missed: 1}, whole)
        child = child_of(client, 350)
        assert (child.base, boundaries_of(child)) == (0, [256, 350])
        with prompt_cache(hybrid, client=client, model_id="m") as other:
            again = other.get_or_prefill(ids)
            assert other.stats()["tokens_prefilled"] == 0
            assert np.array_equal(decoded(hybrid, again), decoded(hybrid, cache))
        client.drop(child.namespace)


@pytest.mark.parametrize("vquant", ["int8", "mlx4g32"])
def test_rows_stored_with_loss_are_not_stored_twice_either(client, hybrid, vquant):
    trunk = families.tokens(LONGEST)
    stored_now(hybrid, client, trunk, vquant=vquant)
    _, stats = stored_now(hybrid, client, trunk[:256], vquant=vquant)
    assert stats["stored_whole"] == {}
    assert child_of(client, 256).base == 256
    with prompt_cache(hybrid, client=client, vquant=vquant) as other:
        other.get_or_prefill(trunk[:256])
        assert other.stats()["hits"] == 1


def test_rows_of_half_floats_and_codes_are_not_stored_twice_either(client):
    half = families.build("gemma3_text", "bfloat16")
    assert caches.take(prefilled(half, [1, 2]))[0].keys.dtype == ml_dtypes.bfloat16
    model = families.build("gemma3_text", head_dim=32)

    def make_cache(model):
        return [
            QuantizedKVCache(32, 4) if number % 2 else RotatingKVCache(families.WINDOW)
            for number in range(len(model.layers))
        ]

    for which, options in ((half, {}), (model, {"make_cache": make_cache})):
        trunk = families.tokens(300)
        stored_now(which, client, trunk, **options)
        cache, stats = stored_now(which, client, trunk[:192], **options)
        assert stats["stored_whole"] == {}
        assert child_of(client, 192).base == 192
        with prompt_cache(which, client=client, **options) as other:
            again = other.get_or_prefill(trunk[:192])
            assert other.stats()["tokens_prefilled"] == 0
            assert np.array_equal(decoded(which, again), decoded(which, cache))
        client.drop(*(prefix.namespace for prefix in client.list()))


def apart(nodes, ids):
    """Whether the first turn of a conversation, shorter than a block, is on another node."""
    ring = Ring(nodes)
    first, later = (ring.node(route_key("", "m", pack_token_ids(some))) for some in (ids[:40], ids))
    return first != later


def test_in_a_mesh_no_child_is_looked_for_on_another_node_than_its_parent(
    start_server, short_tmp, hybrid
):
    nodes = [
        start_server("--attend", "off", listen="127.0.0.1:0", directory=short_tmp / name).address
        for name in "ab"
    ]
    talks = {apart(nodes, ids): ids for ids in (families.tokens(400, seed=n) for n in range(99))}
    assert set(talks) == {True, False}
    with Client(nodes) as client:
        for ids in talks.values():
            with prompt_cache(hybrid, client=client, model_id="m") as mine:
                for turn in (40, 100, 250, 400):
                    cache = mine.get_or_prefill(ids[:turn])
                    assert mine.flush(WAIT_S)
                stats = mine.stats()
            assert (stats["stores"], stats["skipped"]) == (4, {})
            assert stats["stored_whole"] in ({"base_short": 1}, {})
            with prompt_cache(hybrid, client=client, model_id="m") as other:
                again = other.get_or_prefill(ids)
                other.get_or_prefill(ids[:40])
                assert other.stats()["tokens_prefilled"] == 0
            assert np.array_equal(decoded(hybrid, again), decoded(hybrid, cache))
            stored_now(hybrid, client, ids[:164], model_id="m")
        bases = [(prefix.token_count, prefix.base) for prefix in client.list()]
    wanted = [(40, 0), (100, 0), (164, 164), (250, 100), (400, 250)]
    assert sorted(bases) == sorted(2 * wanted)


def test_a_step_of_no_tokens_is_refused(hybrid):
    with pytest.raises(ValueError, match="prefill_step_size"):
        PionPromptCache(hybrid, prefill_step_size=0)
