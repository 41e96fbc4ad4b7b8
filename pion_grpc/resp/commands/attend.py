"""`ATTEND.*`: attention over K and V that stay on the server; only queries cross the wire.

Takes words apart, and refuses those that contradict each other in the words that clients know. What a
query means, whether it fits what is stored, and its answer are the core's, the same for every wire. The
one decision: a query says how many K/V heads it takes the entry for, and an entry with another number is
an error. On this wire the sizes of K and V in a request follow from that number.

All tensors are little-endian float32; `K` and `V` are head-major, [H][N][D] each.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pion_grpc.core.attend import Attend
from pion_grpc.core.attend_query import Ask, BlockChoice, IndexBytes, SuffixBytes
from pion_grpc.core.attend_values import EntryState, Key, Shape
from pion_grpc.core.values import LAYER_MAX
from pion_grpc.errors import Cold, Missing
from pion_grpc.resp.command import Answer, Call, Command, Where, for_all, is_text, syntax_error
from pion_grpc.resp.protocol import Argument
from pion_grpc.resp.reply import OK, ReplyError, Simple

F32 = npt.NDArray[np.float32]

NO_ENGINE = "ERR attention engine not available (start with --attend)"
COLD = "COLDMISS session evicted to cold tier (call KV.PREFIX.WARM)"
COUNT_MAX = (1 << 31) - 1
"""Of heads, rows, values per head and the like."""
QUEST = 1
"""The number of that selector; every other number is the mean's."""
_STANDING = {
    EntryState.RESIDENT: Simple("HIT"),
    EntryState.COLD: Simple("COLD"),
    EntryState.MISSING: Simple("MISS"),
}


def store(call: Call, attend: Attend) -> Answer:
    """`ATTEND.PREFIX.STORE sid layer H N D K V`: makes one layer resident."""
    shape = Shape(*(_positive(call, index, "H/N/D") for index in (2, 3, 4)))
    attend.store_rows(_key(call), shape, *_stored(call, 5, shape))
    return OK


def lookup(call: Call, attend: Attend) -> Answer:
    """`ATTEND.PREFIX.LOOKUP sid layer`: whether it is resident, cold or unknown."""
    key = _key(call)
    (entry,) = attend.lookup(key.tenant, key.session, [key.layer])
    return _STANDING[entry.state]


def drop(call: Call, attend: Attend) -> Answer:
    """`ATTEND.PREFIX.DROP sid [layer]`: forgets one layer, or all; how many there were."""
    layer = _layer(call) if call.count > 1 else None
    return attend.drop(call.tenant, _session(call), layer)


def query(call: Call, attend: Attend) -> Answer:
    """`ATTEND.PREFIX.QUERY sid layer H D top_k Q [fa_window]`: dense, whatever `top_k` says.

    Callers with more query heads than K/V heads send those that share one as rows: [H][rep * M][D].
    The log-sum-exp follows the answer where there are several rows, and never where there is one.
    """
    heads, dim, _ = (_positive(call, index, "H/D/top_k") for index in (2, 3, 4))
    q = _queries(call, 5, heads, dim)
    ask = Ask(heads, dim, q, kv_heads=heads, window=_window(call, 6))
    return _with_trailer(*attend.ask(_key(call), ask, wanted=call.wanted))


def query_fused(call: Call, attend: Attend) -> Answer:
    """`ATTEND.PREFIX.QUERY_FUSED sid layer H_q D S_suf H_kv Q K_suf V_suf head_map [fa_window]`."""
    heads, dim, kv_heads = (_positive(call, index, "H_q/D/H_kv") for index in (2, 3, 5))
    _check_grouped(heads, kv_heads)
    ask = Ask(
        heads,
        dim,
        _queries(call, 6, heads, dim),
        kv_heads=kv_heads,
        head_map=_head_map(call, 9, (heads,), "mismatch (expected H_q bytes)"),
        window=_window(call, 10),
        suffix=_suffix(call, 4, 7, kv_heads * dim),
    )
    return attend.ask(_key(call), ask, wanted=call.wanted).out.data


def query_sparse(call: Call, attend: Attend) -> Answer:
    """`ATTEND.PREFIX.QUERY_SPARSE sid layer H D K_max Q indices counts [fa_window]`."""
    heads, dim, width = (_positive(call, index, "H/D/K_sparse_max") for index in (2, 3, 4))
    q = _one_query(call, 5, heads, dim)
    indices, counts = call.arguments[6:8]
    _require(len(indices) == 4 * heads * width, "indices blob size must be H*K_sparse_max*4")
    _require(len(counts) == 4 * heads, "counts blob size must be H*4")
    chosen = IndexBytes(width, indices, counts)
    ask = Ask(heads, dim, q, 1, kv_heads=heads, window=_window(call, 8), indices=chosen)
    return attend.ask(_key(call), ask, wanted=call.wanted).out.data


def query_sparse_auto(call: Call, attend: Attend) -> Answer:
    """`ATTEND.PREFIX.QUERY_SPARSE_AUTO sid layer H_q D B K_top H_kv Q head_map [window] [selector]`."""
    return _sparse_auto(call, attend, None)


def query_sparse_auto_fused(call: Call, attend: Attend) -> Answer:
    """`ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED`: as above, `S_suf` before Q, `K_suf V_suf` after."""
    heads, dim = (_positive(call, index, "H_q/D/B/K_top/H_kv") for index in (6, 3))
    return _sparse_auto(call, attend, _suffix(call, 7, 9, heads * dim))


def query_batch(call: Call, attend: Attend) -> Answer:
    """`ATTEND.QUERYBATCH H N D top_k Q K V`: over K and V that come along; keeps nothing."""
    heads, rows, dim, _ = (_positive(call, index, "H/N/D/top_k") for index in range(4))
    shape = Shape(heads, rows, dim)
    ask = Ask(heads, dim, _queries(call, 4, heads, dim))
    return _with_trailer(*attend.compute(shape, *_stored(call, 5, shape), ask, wanted=call.wanted))


def _sparse_auto(call: Call, attend: Attend, suffix: SuffixBytes | None) -> Answer:
    """Answers a query over the best blocks."""
    heads, dim, block_rows, blocks, kv_heads = (
        _positive(call, index, "H_q/D/B/K_top/H_kv") for index in range(2, 7)
    )
    _check_grouped(heads, kv_heads)
    at_q, at_map = (7, 8) if suffix is None else (8, 11)
    quest = call.count > at_map + 2 and call.integer(at_map + 2) == QUEST
    ask = Ask(
        heads,
        dim,
        _one_query(call, at_q, heads, dim),
        1,
        kv_heads=kv_heads,
        head_map=_head_map(call, at_map, (0, heads), "must be 0 (identity) or H_q bytes"),
        window=_window(call, at_map + 1),
        suffix=suffix,
        choice=BlockChoice(block_rows, blocks, "quest" if quest else "mean"),
    )
    return attend.ask(_key(call), ask, wanted=call.wanted).out.data


def _with_trailer(out: F32, lse: F32 | None) -> bytes | memoryview:
    """Returns an answer's bytes, then the log-sum-exp if there are several rows per head."""
    if out.shape[1] == 1:
        return out.data
    assert lse is not None, "several rows always have one"
    return out.tobytes() + lse.tobytes()


def _key(call: Call) -> Key:
    return Key(call.tenant, _session(call), _layer(call))


def _session(call: Call) -> str:
    session = call.text(0)
    _require(is_text(session), "sid must be UTF-8")
    return session


def _layer(call: Call) -> int:
    return call.integer(1, 0, LAYER_MAX, "ERR invalid layer_id (must be >= 0)")


def _positive(call: Call, index: int, what: str) -> int:
    return call.integer(index, 1, COUNT_MAX, f"ERR invalid {what} (must be > 0)")


def _stored(call: Call, at: int, shape: Shape) -> tuple[memoryview, memoryview]:
    """Returns K and V of a shape: the word `at` and the next."""
    k, v = call.arguments[at : at + 2]
    size = 4 * shape.values
    _require(len(k) == len(v) == size, "K/V blob size mismatch (expected H*N*D*4 each)")
    return memoryview(k), memoryview(v)


def _queries(call: Call, at: int, heads: int, dim: int) -> Argument:
    q = call.arguments[at]
    whole = len(q) > 0 and len(q) % (4 * heads * dim) == 0
    _require(whole, "Q blob size must be a positive multiple of H*D*4")
    return q


def _one_query(call: Call, at: int, heads: int, dim: int) -> Argument:
    q = call.arguments[at]
    _require(len(q) == 4 * heads * dim, "Q blob size must be H*D*4")
    return q


def _suffix(call: Call, at_rows: int, at: int, width: int) -> SuffixBytes:
    rows = call.integer(at_rows, 0, COUNT_MAX, "ERR invalid S_suf (must be >= 0)")
    k, v = call.arguments[at : at + 2]
    whole = len(k) == len(v) == 4 * rows * width
    _require(whole, "K_suf / V_suf size mismatch (expected H_kv*S_suf*D*4 each)")
    return SuffixBytes(rows, k, v)


def _head_map(call: Call, at: int, sizes: tuple[int, ...], refusal: str) -> bytes:
    _require(len(call.arguments[at]) in sizes, f"head_map size {refusal}")
    return call.raw(at)


def _window(call: Call, at: int) -> int | None:
    """Returns how many rows are visible; None where the server's default holds."""
    window = call.integer(at) if call.count > at else -1
    return window if window >= 0 else None


def _check_grouped(heads: int, kv_heads: int) -> None:
    _require(heads % kv_heads == 0, "H_q must be a multiple of H_kv (GQA)")


def _require(holds: bool, refusal: str) -> None:
    if not holds:
        raise ReplyError(f"ERR {refusal}")


def _command(
    name: str,
    run: Callable[[Call, Attend], Answer],
    usage: str,
    optional: int = 0,
    where: Where = Where.WORKER,
) -> Command:
    """Returns the entry of a command that takes the words of `usage`, the last of them `optional`."""
    words_max = len(usage.split())

    def attending(call: Call) -> Answer:
        if call.services.attend is None:
            raise ReplyError(NO_ENGINE)
        if call.count > words_max:
            raise syntax_error()
        try:
            return run(call, call.services.attend)
        except Cold as error:
            raise ReplyError(COLD) from error
        except Missing as error:
            raise ReplyError(
                f"ERR {name} failed (session not found, or a layer that it does not have)"
            ) from error

    arity = -(1 + words_max - optional)
    return for_all(name, arity, attending, where, usage=usage)


COMMANDS = (
    _command("ATTEND.PREFIX.STORE", store, "sid layer H N D K V"),
    _command("ATTEND.PREFIX.LOOKUP", lookup, "sid layer", where=Where.QUICK),
    _command("ATTEND.PREFIX.DROP", drop, "sid [layer]", 1, Where.QUICK),
    _command("ATTEND.PREFIX.QUERY", query, "sid layer H D top_k Q [fa_window]", 1),
    _command(
        "ATTEND.PREFIX.QUERY_FUSED",
        query_fused,
        "sid layer H_q D S_suf H_kv Q K_suf V_suf head_map [fa_window]",
        1,
    ),
    _command(
        "ATTEND.PREFIX.QUERY_SPARSE",
        query_sparse,
        "sid layer H D K_sparse_max Q indices counts [fa_window]",
        1,
    ),
    _command(
        "ATTEND.PREFIX.QUERY_SPARSE_AUTO",
        query_sparse_auto,
        "sid layer H_q D B K_top H_kv Q head_map [fa_window] [selector]",
        2,
    ),
    _command(
        "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED",
        query_sparse_auto_fused,
        "sid layer H_q D B K_top H_kv S_suf Q K_suf V_suf head_map [fa_window] [selector]",
        2,
    ),
    _command("ATTEND.QUERYBATCH", query_batch, "H N D top_k Q K V"),
)
