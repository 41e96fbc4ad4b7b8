"""Keys at other positions than they were computed at: rotary embeddings turned on, exactly.

Knows a model's layers and the rotations in them; neither chunks nor servers. A rotary embedding turns
each pair of values of a key by an angle that is the position times a frequency, so a key is moved by
`delta` positions by turning it further, and values need nothing::

    K' = K · cos(delta · f) + half(K) · sin(delta · f),   f[i] = base^(-2i/d),  i = 0 … d/2 - 1
    half(K) = (-K[d/2:], K[:d/2]),   cos and sin repeated for both halves; in float32, then cast back

(Su et al., RoFormer, 2021, §3.2.2; in the layout of halves, not of neighbours.)

The one decision: a model is believed when it has been asked. What is known not to be movable is refused
with its reason, from the classes of its caches and rotations, and from arguments by which attention
grows with the position. Then a few tokens are run twice, at two places, and what the formula makes of
the first run's keys is compared with the second's, layer by layer, and so are the logits: positions
that enter anywhere else (learned ones, scaled attention, a key of which another share is turned) show
as a difference, even in architectures that nobody has thought of here. Scaling that begins only after
many tokens shows only there, so a model is probed again before keys are moved further (`Reach`).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.cache import KVCache, create_attention_mask, make_prompt_cache

from pion_client.identity import arguments

_PROBE_IDS = range(1, 9)
"""Any tokens that every model has."""
PROBE_SHIFT = 1_000
PROBE_DIFFERENCE_MAX = 0.05
"""Root mean square of the difference over that of the rows. Rounding of 16-bit types makes 0.01; a
rotation of another kind makes 1."""


_SCALING = ("llama_4_scaling_beta", "attn_temperature_tuning")
"""Arguments of models whose queries are scaled by their position, unless they are 0."""


class PositionsFixed(NotImplementedError):
    """Keys of this model cannot be moved to other positions; the text says why."""


class Rotation(NamedTuple):
    """The rotary embedding of one layer."""

    dims: int
    """Values at the beginning of a head that are turned."""
    base: float


def moved(keys: mx.array, rotation: Rotation, delta: int) -> mx.array:
    """Returns keys as they are `delta` positions later; by 0 they are the same array.

    Args:
        keys: (…, tokens, head_dim), of any floating type, which the result has too.
        rotation: what turned them.
        delta: how far, of all rows alike; may be negative.
    """
    if not delta:
        return keys
    dims = rotation.dims
    cos, sin = (mx.array(factors) for factors in _turn(rotation, delta))
    turning = keys[..., :dims].astype(mx.float32)
    low, high = mx.split(turning, 2, axis=-1)
    turned = turning * cos + mx.concatenate([-high, low], axis=-1) * sin
    return mx.concatenate([turned.astype(keys.dtype), keys[..., dims:]], axis=-1)


@functools.lru_cache(64)
def _turn(rotation: Rotation, delta: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine per value; in float64 first, for angles may be of many turns."""
    dims = rotation.dims
    angles = delta * rotation.base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    twice = np.tile(angles, 2)
    return np.cos(twice).astype(np.float32), np.sin(twice).astype(np.float32)


def rotations(model: Any, cache: Sequence[Any] | None = None) -> list[Rotation]:
    """Returns the rotation of every slot of a model whose keys can be moved.

    The model runs on eight tokens, twice.

    Args:
        model: a loaded mlx-lm model.
        cache: an empty one as its keys are kept in; by default mlx-lm's own.

    Raises:
        PositionsFixed: they cannot be.
    """
    cache = make_prompt_cache(model) if cache is None else cache
    for slot, one in enumerate(cache):
        if type(one) is not KVCache:
            raise PositionsFixed(f"slot {slot} is a {type(one).__name__}: it has no rows to move")
    layers = getattr(model, "layers", ())
    if len(layers) != len(cache):
        raise PositionsFixed(f"{len(layers)} layers have {len(cache)} caches")
    scaled = {name for name, value in arguments(model) if name in _SCALING and value}
    if scaled:
        raise PositionsFixed(f"attention is scaled by the position: {', '.join(sorted(scaled))}")
    found = [_rotation(index, layer) for index, layer in enumerate(layers)]
    probe(model, found, PROBE_SHIFT)
    return found


class Reach:
    """How far the keys of a model have been found to be movable."""

    def __init__(self, model: Any, rotations: Sequence[Rotation]) -> None:
        self._model, self._rotations = model, rotations
        self._end = PROBE_SHIFT

    def extend(self, end: int) -> None:
        """Probes the model beyond a position, unless it has been probed there or further on.

        Raises:
            PositionsFixed: keys cannot be moved so far.
        """
        if end <= self._end:
            return
        position = 1 << end.bit_length()  # a few looks are enough for all that will be asked
        probe(self._model, self._rotations, position)
        self._end = position


def _rotation(index: int, layer: Any) -> Rotation:
    plain = [module for module in layer.modules() if type(module) is RoPE]
    others = {
        name
        for module in layer.modules()
        if (name := type(module).__name__).lower().endswith(("rope", "nope")) and name != "RoPE"
    }
    if others:
        raise PositionsFixed(f"layer {index}: {', '.join(sorted(others))} is not a plain RoPE")
    if len(plain) != 1:
        raise PositionsFixed(f"layer {index}: {len(plain)} rotary embeddings where 1 is needed")
    rope: Any = plain[0]
    if rope.traditional:
        raise PositionsFixed(f"layer {index}: interleaved RoPE turns neighbours, not halves")
    if rope.scale != 1.0:
        raise PositionsFixed(f"layer {index}: RoPE is scaled by {rope.scale:g}")
    return Rotation(int(rope.dims), float(rope.base))


class _Elsewhere:
    """What a model takes for a cache: empty, but its first row stands at a position of choice."""

    def __init__(self, position: int) -> None:
        self._position = self.offset = position
        self.rows: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.rows = keys, values
        self.offset += keys.shape[2]
        return self.rows

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        return create_attention_mask(count, self.offset - self._position, return_array, window_size)


def probe(model: Any, found: Sequence[Rotation], position: int) -> None:
    """Asks a model whether its keys can be moved to a position.

    Raises:
        PositionsFixed: they cannot.
    """
    here, said = _run_at(model, 0, _PROBE_IDS)
    there, says = _run_at(model, position, _PROBE_IDS)
    for index, (rotation, mine, models) in enumerate(zip(found, here, there, strict=True)):
        if mine is None or models is None:
            raise PositionsFixed(f"layer {index} has no rows of its own")
        _compare(f"layer {index}: keys", moved(mine[0], rotation, position), models[0], position)
        _compare(f"layer {index}: values", mine[1], models[1], position)
    _compare("logits", said, says, position)  # queries leave no rows


def _compare(what: str, ours: mx.array, wanted: mx.array, position: int) -> None:
    difference = _rms(ours - wanted) / max(_rms(wanted), 1e-30)
    if not difference <= PROBE_DIFFERENCE_MAX:
        raise PositionsFixed(
            f"{what} moved to {position} differ from the model's own by {difference:.0%}"
        )


def rows_at(
    model: Any, position: int, token_ids: Sequence[int]
) -> list[tuple[mx.array, mx.array] | None]:
    """Runs tokens from a position on, with nothing before them; returns the rows of every layer."""
    return _run_at(model, position, token_ids)[0]


def _run_at(
    model: Any, position: int, token_ids: Sequence[int]
) -> tuple[list[tuple[mx.array, mx.array] | None], mx.array]:
    cache = [_Elsewhere(position) for _ in model.layers]
    logits = model(mx.array([list(token_ids)], mx.int32), cache=cache)
    rows = [slot.rows for slot in cache]
    mx.eval(rows, logits)
    return rows, logits


def _rms(array: mx.array) -> float:
    return float(mx.sqrt(mx.mean(mx.square(array.astype(mx.float32)))))
