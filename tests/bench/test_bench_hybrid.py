"""What rows about hybrid models must not say: that others agree, or another growth than there was."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from rich.progress import Progress

from pion_grpc.cli.bench import hybrid
from pion_grpc.cli.bench.hybrid import HybridSizes, _agreed, _contents, _growth, _prefilled
from pion_grpc.cli.bench.measuring import Context

SMALL = HybridSizes(hidden=64)


def test_what_comes_after_the_first_difference_is_not_counted_as_agreement():
    assert _agreed([1, 2, 3], [1, 2, 3]) == 3
    assert _agreed([1, 2, 3], [1, 9, 3]) == 1
    assert _agreed([9, 2, 3], [1, 2, 3]) == 0


def test_a_hybrid_has_three_recurrent_layers_to_one_of_attention():
    kinds = [type(slot) for slot in make_prompt_cache(SMALL.build())]
    assert kinds == [ArraysCache, ArraysCache, ArraysCache, KVCache] * hybrid.BLOCKS


def test_equal_sizes_do_not_give_other_models():
    parameters, again = (tree_flatten(SMALL.build().parameters()) for _ in range(2))
    for (name, one), (other_name, other) in zip(parameters, again, strict=True):
        assert name == other_name
        assert mx.array_equal(one, other)


def test_the_state_of_a_hybrid_does_not_leave_its_answer_the_same():
    """Else agreement would say nothing about it."""
    model = SMALL.build()
    first, second = (_prefilled(model, [token] * 40) for token in (30, 31))
    for slot, other in zip(first, second, strict=True):
        if isinstance(slot, KVCache):
            slot.state = other.state  # the same attention, other recurrent state
    logits = [np.asarray(model(mx.array([[5]]), cache=cache)) for cache in (first, second)]
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


@pytest.mark.parametrize(("megabytes", "layers"), [(1, 1), (2, 3)])
def test_state_and_rows_are_the_same_bytes(megabytes, layers):
    contents = _contents(megabytes, layers)
    parts = b"".join(bytes(part.data) for part in contents.parts)
    rows = b"".join(side.transpose(1, 0, 2).tobytes() for pair in contents.layers for side in pair)
    assert parts == rows
    assert len(parts) == contents.size_bytes
    assert abs(contents.size_bytes - layers * megabytes * 1_000_000) < layers * 5_000


def test_neither_form_of_state_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(hybrid, "QUICK_STATES", ((1, 2),))
    with Progress(disable=True) as progress:
        results = hybrid.state(Context(tmp_path, progress, quick=True))
    named = [(result.ours.name, result.peer.name) for result in results]
    assert named == [("parts", "K/V rows")] * 3 + [("values", "K/V rows")] * 3
    assert len({result.what for result in results}) == 6


def test_growth_is_held_against_that_of_bytes():
    (result,) = _growth(
        (174, 2_048, 4_096), {174: 1.0, 2_048: 2.0, 4_096: 6.0}, {2_048: 5, 4_096: 10}
    )
    assert (result.figure, result.peer_figure, result.verdict) == (3.0, 2.0, "missed")
    assert _growth((174, 2_048), {}, {}) == []
