"""mlx-lm's attention over prefixes that are elsewhere: the patch, and the caches that go with it.

Knows mlx-lm's caches and the one function that its models' attention goes through; of the server only
what `residency` tells.

The one decision: a cache either has all rows, or makes it known at once that it has not. If its prefix
is resident on the server, it gives its model something that is not an array in place of keys and values
(`ServedRows`). The patched attention knows what to do with that. A model whose attention goes another
way is told first (`why_not`), and would fail immediately rather than attend to a part of the rows. If
the server cannot answer exactly (a mask that hides a part of the prefix, sinks) or not at all, the cache
fetches the rows and continues like any other.

Attention over both is one softmax. While the suffix is short it travels with each query (`fused`);
later its share is computed here, and the two are joined by their log-sum-exps.
"""

import copy
import functools
import inspect
import os
import sys
from types import ModuleType
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, create_attention_mask, make_prompt_cache

from pion_client.arrays import count, invalid
from pion_client.attend import Query
from pion_client.caches import Cache, require_rows
from pion_client.errors import NotStored, PionError
from pion_client.local_attention import (
    Blocks,
    Part,
    Selector,
    attend,
    merge,
    over_blocks,
    summarise,
)
from pion_client.residency import Kept, Residency, Session

FUSED_BYTES_MAX = 96 << 10
"""A longer suffix is not sent along with each query: joining two parts here took 100 µs, and each KiB
that is sent 1 µs."""
QUERY_BYTES_MAX = 16 << 20
"""Queries beyond this are asked in pieces; a message has at most 64 MiB."""
PATCHED = "scaled_dot_product_attention"

_PARAMETERS = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")
_original: Any = base.scaled_dot_product_attention
"""The function that the patch replaced."""
_kv_cache: Any = KVCache  # mlx-lm is not typed
_mask: Any = create_attention_mask
_begin_eval: Any = mx.async_eval


class PatchError(RuntimeError):
    """The installed mlx-lm is not one that the patch knows; nothing was patched."""


class PromptCache(Protocol):
    """What this module needs of a `PionPromptCache`."""

    residency: Residency

    def at_hand(self, namespace: str, token_count: int) -> Kept | None:
        """Returns the rows of a prefix, if this process has them and the name still stands for them."""

    def session_for(self, namespace: str, token_count: int) -> Session:
        """Returns the resident rows of a prefix, which are made resident if necessary."""

    def rows_for(self, namespace: str, token_count: int, session: Session | None = None) -> Kept:
        """Returns the rows of a prefix from wherever they are; those of a session and no others."""


def install_pion_attention_patch() -> None:
    """Makes mlx-lm's models attend to prefixes on the server, if a cache says so.

    Other caches work as before. Installing it twice changes nothing.

    Raises:
        PatchError: mlx-lm's attention has another signature than the one known here, or not all of
            its modules have the same; nothing was patched.
    """
    global _original
    if is_installed():
        return
    current = getattr(base, PATCHED)
    found = inspect.signature(current)
    if tuple(found.parameters) != _PARAMETERS:
        raise PatchError(
            f"mlx-lm's {PATCHED} is {PATCHED}{found}, not ({', '.join(_PARAMETERS)}): this release of "
            "pion-client does not know it; nothing was patched"
        )
    for name, module in _users().items():
        if (other := getattr(module, PATCHED)) not in (current, _attention):
            raise PatchError(
                f"{name} has a {PATCHED}{inspect.signature(other)} of its own, which is not mlx-lm's: "
                "a model there would go past the patch; nothing was patched"
            )
    _original = current
    _replace(current, _attention)


def uninstall_pion_attention_patch() -> None:
    """Removes the patch everywhere."""
    _replace(_attention, _original)


def is_installed() -> bool:
    """Whether the patch is installed."""
    return getattr(base, PATCHED) is _attention


def make_pion_prompt_cache(
    model: Any,
    namespace: str,
    prompt_cache: PromptCache,
    prefix_len: int,
    sparse_full_layers: dict[str, int] | None = None,
    selector: Selector | None = None,
) -> Cache:
    """Returns a cache whose first `prefix_len` tokens are a stored prefix, attended to where it is.

    That is in this process, if it has prefilled or fetched the prefix (unless
    PION_PROMPT_CACHE_NO_INPROC=1), and otherwise on the server.

    Args:
        model: a loaded mlx-lm model.
        namespace: of the prefix.
        prompt_cache: the `PionPromptCache` of the model.
        prefix_len: the number of tokens of the prefix.
        sparse_full_layers: {"K_block": rows, "K_blocks": count}: when a token is decoded, every layer
            attends only to this many blocks of the prefix, the best ones, and to all that follows it.
        selector: how blocks are ranked, "mean" (default) or "quest"; only "quest" finds single keys that
            matter much (`Client.attend_query_sparse_auto`).

    Raises:
        NotStored: the prefix is neither stored nor at hand: call `get_or_prefill` first.
        NotResident: what is stored there has fewer tokens.
        UnsupportedCache: the model's cache does not consist of plain rows.
        ValueError: `prefix_len` is not at least 1, or the sparse settings make no sense.
        RuntimeError: attention would run on the server and the patch is not installed, or the model's
            attention does not go through it.
    """
    choice = _blocks(sparse_full_layers, selector)
    if count("prefix_len", prefix_len) < 1:
        raise invalid("prefix_len", "a prefix has tokens")
    layers = make_prompt_cache(model)
    require_rows(layers)
    prefix = ServedPrefix(prompt_cache, namespace, prefix_len, choice)
    prefix.find()
    if prefix.kept is None or choice is not None:
        _require_patched(model, prefix, len(layers))
    return [PionCache(prefix, layer) for layer in range(len(layers))]


class ServedRows:
    """Stands for keys or values whose first rows are on the server. Not an array, on purpose."""

    def __init__(self, cache: "PionCache", own: mx.array) -> None:
        self.cache = cache
        self.dtype = own.dtype
        batch, heads, rows, head_dim = own.shape
        self.shape = (batch, heads, cache.prefix.token_count + rows, head_dim)


class ServedPrefix:
    """A prefix with which the caches of several layers begin, and where its rows are."""

    def __init__(
        self,
        prompt_cache: PromptCache,
        namespace: str,
        token_count: int,
        choice: Blocks | None = None,
        session: Session | None = None,
    ) -> None:
        self.token_count = token_count
        self.choice = choice
        self.kept: Kept | None = None
        """The rows, once they are here."""
        self.residency = prompt_cache.residency
        self._prompt_cache = prompt_cache
        self._namespace = namespace
        self._session = session

    def find(self) -> None:
        """Finds out where the rows are.

        Raises:
            NotStored: they are nowhere.
        """
        if os.environ.get("PION_PROMPT_CACHE_NO_INPROC") != "1":
            self.kept = self._prompt_cache.at_hand(self._namespace, self.token_count)
        if self.kept is not None:
            self.residency.lane = "in-process"
            return
        try:
            self._session = self._prompt_cache.session_for(self._namespace, self.token_count)
        except PionError as error:
            try:
                self.fetch(error.reason.lower())
            except NotStored:
                raise error from None

    def fetch(self, reason: str) -> None:
        """Brings the rows here, because the server cannot attend to them.

        Raises:
            NotStored: they are nowhere; other rows that have taken their name are not used.
        """
        self.kept = self._prompt_cache.rows_for(self._namespace, self.token_count, self._session)
        self.residency.reason = reason

    def summary(self, layer: int) -> mx.array:
        """Returns the summary by which the blocks of a layer are ranked; all are computed once."""
        assert self.kept is not None
        assert self.choice is not None
        name = self.choice.block_rows, self.choice.selector
        if name not in self.kept.summaries:
            found = [summarise(rows.keys, self.choice) for rows in self.kept.rows]
            mx.eval(found)  # other threads use them too, and could not evaluate them
            self.kept.summaries[name] = found
        summary: mx.array = self.kept.summaries[name][layer]
        return summary

    def ask(
        self,
        layer: int,
        q: np.ndarray,
        scale: float,
        *,
        suffix: tuple[np.ndarray, np.ndarray] | None = None,
        choice: Blocks | None = None,
    ) -> Part:
        """Asks the server; with a suffix, the answer has no log-sum-exp."""
        assert self._session is not None
        # The whole prefix is what the model would see here, whatever window the server is set to.
        usual = scale == q.shape[-1] ** -0.5  # which the server knows in float64
        query = Query(self._session.name, layer, q, b"", 0, None if usual else scale, warm=False)
        if choice is not None:
            query.choose(*choice)
        if suffix is not None:
            query.bring(*suffix)
        query.message.log_sum_exp = suffix is None
        answer = self.residency.ask(self._session, query)
        lse = np.empty(0, np.float32) if answer.lse is None else answer.lse
        return Part(mx.array(answer.out), mx.array(lse))


class PionCache:
    """One layer's cache: a prefix that may be elsewhere, and the rows that followed it.

    It has the interface of mlx-lm's `KVCache`; the prefix cannot be trimmed.
    """

    def __init__(self, prefix: ServedPrefix, layer: int) -> None:
        self.prefix = prefix
        self._layer = layer
        self._whole = False
        self._own = _kv_cache()
        """The rows that followed the prefix; all rows, once those of the prefix are here."""

    @property
    def offset(self) -> int:
        """Tokens so far."""
        own: int = self._own.offset
        return own if self._whole else self.prefix.token_count + own

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Appends rows; returns all of them, or what stands for them.

        Raises:
            ValueError: the rows belong to several sequences.
        """
        if keys.shape[0] != 1:
            raise ValueError(f"a batch of {keys.shape[0]} sequences: this cache's prefix is one's")
        self._gather()
        self._own.update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """All rows, or what stands for them; layers without rows of their own attend to another's."""
        self._gather()
        keys, values = self._own.keys_and_values()
        if self._whole:
            return keys, values
        return ServedRows(self, keys), ServedRows(self, values)

    def make_mask(self, *given: Any, **options: Any) -> Any:
        """As `KVCache` does."""
        return _mask(*given, offset=self.offset, **options)

    @property
    def state(self) -> Any:
        """What was computed here, to be evaluated; saving it is refused, with the reason."""
        return *self._own.state, _UNSAVED

    @state.setter
    def state(self, state: Any) -> None:
        self._own.state = state[:-1]

    def size(self) -> int:
        """Tokens so far."""
        return self.offset

    def empty(self) -> bool:
        """Never."""
        return False

    @property
    def nbytes(self) -> int:
        """Memory of the rows that are here."""
        return int(self._own.nbytes)

    def is_trimmable(self) -> bool:
        """Always true: down to the prefix."""
        return True

    def trim(self, n: int) -> int:
        """Removes the last tokens, but none of the prefix; returns how many."""
        return int(self._own.trim(min(n, self.offset - self.prefix.token_count)))

    def __deepcopy__(self, memo: Any) -> "PionCache":
        """The prefix is shared: it never changes."""
        twin = PionCache(self.prefix, self._layer)
        twin._own = copy.deepcopy(self._own, memo)
        twin._whole = self._whole
        return twin

    def attention(
        self, q: mx.array, keys: Any, values: Any, *, scale: float, mask: Any, sinks: Any
    ) -> Any:
        """Attention over prefix and suffix, wherever they are; shape and type as q."""
        if isinstance(keys, ServedRows):
            self._gather()  # another layer may have brought them since
            if not self._whole:
                try:
                    return self._on_the_server(q, scale, mask, sinks).astype(q.dtype)
                except _Inexact as why:
                    self.prefix.fetch(str(why))
                except PionError as error:
                    self.prefix.fetch(error.reason.lower())
            keys, values = self.keys_and_values()
        self.prefix.residency.lane = "in-process"
        choice = self.prefix.choice
        if choice and q.shape[2] == 1 and mask is None and sinks is None:
            summary = self.prefix.summary(self._layer)
            prefix_rows = self.prefix.token_count
            return over_blocks(q, keys, values, prefix_rows, summary, choice, scale)
        return _original(q, keys, values, cache=None, scale=scale, mask=mask, sinks=sinks)

    def _gather(self) -> None:
        """Puts the rows of the prefix before the own ones, if they are here by now."""
        if self._whole or self.prefix.kept is None:
            return
        whole = _kv_cache()
        rows = self.prefix.kept.rows[self._layer]
        whole.keys, whole.values = rows.keys[None], rows.values[None]
        whole.offset = self.prefix.token_count
        if not self._own.empty():
            whole.update_and_fetch(*self._own.keys_and_values())
        self._own, self._whole = whole, True

    def _on_the_server(self, q: mx.array, scale: float, mask: Any, sinks: Any) -> mx.array:
        """Returns [1][heads][queries][dim].

        Raises:
            _Inexact: the server does not know this kind of attention.
            PionError: it cannot answer.
        """
        _, heads, queries, head_dim = q.shape
        if sinks is not None:
            raise _Inexact("sinks")
        mask = self._own_mask(mask)
        keys, values = self._own.keys_and_values()
        choice = self.prefix.choice if queries == 1 else None
        ask = functools.partial(self.prefix.ask, self._layer, scale=scale, choice=choice)
        step = max(1, QUERY_BYTES_MAX // (4 * heads * head_dim))
        if _fused_fits(keys, queries, mask) and queries <= step:
            asked, *suffix = _numpy(q, keys, values)
            return ask(asked, suffix=tuple(suffix)).out[None]
        (asked,) = _numpy(q)
        mine = attend(q, keys, values, scale, mask)
        _begin_eval(mine.out, mine.lse)  # is computed while the server does its part
        pieces = [ask(asked[:, begin : begin + step]) for begin in range(0, queries, step)]
        theirs = Part(*(mx.concatenate(list(side), axis=1) for side in zip(*pieces, strict=True)))
        return merge(theirs, mine)[None]

    def _own_mask(self, mask: Any) -> Any:
        """Returns the mask of the own rows.

        Raises:
            _Inexact: a part of the prefix is hidden.
        """
        if mask is None or isinstance(mask, str):
            return mask
        prefix, own = mask[..., : self.prefix.token_count], mask[..., self.prefix.token_count :]
        visible = prefix.all() if mask.dtype == mx.bool_ else (prefix == 0).all()
        if not visible.item():
            raise _Inexact("mask")
        return own


class _Trial(PionCache):
    """Finds out whether attention over it comes to the patch; what it answers means nothing."""

    arrived = False

    def attention(
        self, q: mx.array, keys: Any, values: Any, *, scale: float, mask: Any, sinks: Any
    ) -> Any:
        self.arrived = True
        return mx.zeros((*q.shape[:3], values.shape[3]), q.dtype)

    @property
    def passed_by(self) -> bool:
        """Whether there are rows over which no attention came."""
        return not (self.arrived or self._own.empty())


class _Unsaved:
    """Stands in a cache's state for the rows that are elsewhere: `save_prompt_cache` raises its text."""

    def __str__(self) -> str:
        return (
            "this cache begins with a prefix that a server keeps, and is not written to a file. Have "
            "what shall last stored under a name (get_or_prefill); `pion-grpc export` writes that"
        )


_UNSAVED = _Unsaved()


class _Inexact(Exception):
    """The server would answer something else than is meant; the text says why in one word."""


def _fused_fits(keys: mx.array, queries: int, mask: Any) -> bool:
    """Whether a suffix is to travel with its queries."""
    causal = mask == "causal" if isinstance(mask, str) else mask is None and queries == 1
    small = 2 * 4 * keys.size <= FUSED_BYTES_MAX
    return causal and small and os.environ.get("PION_DISABLE_FUSED_ATTEND") != "1"


def _attention(
    queries: Any,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: Any = None,
) -> Any:
    """Takes the place of mlx-lm's function."""
    owner = keys.cache if isinstance(keys, ServedRows) else cache
    if isinstance(owner, PionCache):
        return owner.attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    return _original(queries, keys, values, cache, scale, mask, sinks)


def _users() -> dict[str, ModuleType]:
    """Returns the modules of mlx-lm that have its attention, by name."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "mlx_lm" and hasattr(module, PATCHED)
    }


def _replace(old: Any, new: Any) -> None:
    """Puts a function in another's place, in every module of mlx-lm that has imported it."""
    for module in _users().values():
        if getattr(module, PATCHED) is old:
            setattr(module, PATCHED, new)


def why_not(model: Any, prefix: ServedPrefix, slots: int) -> str:
    """Says why a model's attention does not come to the patch; nothing if it does.

    The model is called once over rows that are here, and once over what stands for others. MLX knows
    shapes and types before it evaluates, and nothing is.

    Args:
        model: a loaded mlx-lm model.
        prefix: the one that it will attend to.
        slots: how many caches it has.
    """
    known, here = prefix.residency.refusals, prefix.kept is not None
    if here not in known:
        known[here] = _tried(model, prefix, slots, 1) or _tried(model, prefix, slots, 2)
    return known[here]


def _tried(model: Any, prefix: ServedPrefix, slots: int, tokens: int) -> str:
    trials = [_Trial(prefix, slot) for slot in range(slots)]
    try:
        model(mx.zeros((1, tokens), mx.int32), cache=trials)
    except Exception as error:  # whatever a model does to arrays that are none
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    passed_by = [slot for slot, trial in enumerate(trials) if trial.passed_by]
    return f"not that of slot {passed_by[0]}" if passed_by else ""


def _require_patched(model: Any, prefix: ServedPrefix, slots: int) -> None:
    if not is_installed():
        raise RuntimeError("call install_pion_attention_patch() first: this cache needs it")
    if reason := why_not(model, prefix, slots):
        raise RuntimeError(
            f"{type(model).__module__}: this model's attention does not go through mlx-lm's {PATCHED}; "
            f"it can only run over rows that are in this process ({reason})"
        )


def _blocks(settings: dict[str, int] | None, selector: Selector | None) -> Blocks | None:
    if selector not in (None, "mean", "quest"):
        raise ValueError(f"selector={selector!r} is neither 'mean' nor 'quest'")
    if settings is None:
        return None
    whole = all(isinstance(number, int) and number >= 1 for number in settings.values())
    if set(settings) != {"K_block", "K_blocks"} or not whole:
        raise ValueError(f'sparse_full_layers={settings}: {{"K_block": 64, "K_blocks": 8}}, please')
    return Blocks(settings["K_block"], settings["K_blocks"], selector or "mean")


def _numpy(*arrays: mx.array) -> tuple[Any, ...]:
    """Returns float32 arrays without the first axis; evaluates all of them at once."""
    wide = [array[0].astype(mx.float32) for array in arrays]
    mx.eval(wide)
    return tuple(np.asarray(array) for array in wide)
