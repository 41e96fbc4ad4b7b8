"""Lossy rows lose what their codec says and nothing else, whoever encodes them and whoever decodes."""

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pion_client import Client, Encoded, Prefix
from pion_client.errors import InvalidRequest, LayoutDiffers
from pion_wire import codecs
from pion_wire.layout import DType, Side
from tests.client.links import BF16, Link, assert_same, bits, random_bits
from tests.conftest import ServerProcess
from tests.resp.wire import Wire

MODEL = "mlx1:test"
HEADS, TOKENS, DIM = 2, 333, 64
SPOKEN_BY_RESP = ("fp16", "int8", "fp8", "turbo4", "turbo3", "turbo2", "mlx4g32")
EVERY = (*SPOKEN_BY_RESP, "bf16_rope_fp8_body(32)", "mlx_affine(8,64,bf16)", "mlx_affine(3,32,f32)")
_numbers = itertools.count()

Fetch = Callable[..., Prefix | None]


@pytest.fixture(scope="module")
def both() -> Iterator[ServerProcess]:
    """A server of both wires."""
    path = Path(tempfile.mkdtemp(prefix="pion-", dir="/tmp"))
    server = ServerProcess(path / "data", "--resp", f"unix:{path}/resp")
    yield server
    assert server.stop() == 0
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def client(both: ServerProcess) -> Iterator[Client]:
    with Client(both.address) as client:
        yield client


@pytest.fixture
def resp(both: ServerProcess) -> Iterator[Wire]:
    wire = Wire(both.ready["resp"])
    yield wire
    wire.close()


@pytest.fixture(params=["stream", "stream-mlx", "export", "export-mlx"])
def road(request: pytest.FixtureRequest, both: ServerProcess) -> Iterator[Fetch]:
    """`fetch`, by one road; asserts that it was taken."""
    transport, _, kind = request.param.partition("-")
    with Client(both.address, export=transport == "export") as client:

        def fetch(*args: Any, **options: Any) -> Prefix | None:
            prefix = client.fetch(*args, as_mlx=kind == "mlx", **options)
            assert prefix is None or prefix.transport == transport, prefix.transport_reason
            return prefix

        yield fetch


@pytest.fixture
def name() -> str:
    return f"codec-{next(_numbers)}"


def present(prefix: Prefix | None) -> Prefix:
    assert prefix is not None
    return prefix


def tokens(count: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)]


def values(seed: int, count: int = TOKENS, dtype: Any = BF16) -> Any:
    """Rows such as models have, (heads, tokens, dim)."""
    return np.random.default_rng(seed).normal(0, 0.6, (HEADS, count, DIM)).astype(dtype)


def layers(seed: int, count: int = TOKENS, dtype: Any = BF16) -> list[tuple[Any, Any]]:
    return [
        (values(seed + 2 * slot, count, dtype), values(seed + 2 * slot + 1, count, dtype))
        for slot in range(2)
    ]


def token_major(array: Any) -> np.ndarray:
    """[tokens, width]."""
    rows = np.asarray(array.astype(np.float32) if isinstance(array, np.ndarray) else array)
    return np.ascontiguousarray(rows.transpose(1, 0, 2)).reshape(rows.shape[1], -1)


def through(codec: str, array: Any) -> np.ndarray:
    """What becomes of rows that were stored with a codec: [tokens, width]."""
    parsed = codecs.parse(codec)
    rows = np.ascontiguousarray(array.transpose(1, 0, 2)).reshape(array.shape[1], -1)
    return parsed.decode(parsed.encode(rows))


@pytest.mark.parametrize("codec", EVERY)
def test_a_codec_loses_the_same_by_every_road(
    client: Client, road: Fetch, name: str, codec: str
) -> None:
    given = layers(7)
    client.store(name, layers=given, codecs=codec, token_ids=tokens(TOKENS, 7), model=MODEL)
    prefix = present(road(name))
    for pair, stored in zip(given, prefix.layers, strict=True):
        for mine, theirs in zip(pair, stored, strict=True):
            assert str(theirs.dtype).endswith("float32")
            np.testing.assert_array_equal(token_major(theirs), through(codec, mine))
    assert {tensor.codec for tensor in prefix.layout.tensors} == {"raw"}
    assert f"k.0={codecs.parse(codec)}" in prefix.fidelity
    few = present(road(name, rows=(200, 300), slots=[1]))
    np.testing.assert_array_equal(
        token_major(few.layers[0][1]), through(codec, given[1][1])[200:300]
    )


@pytest.mark.parametrize("codec", EVERY)
def test_what_is_asked_for_encoded_is_not_decoded(
    client: Client, road: Fetch, name: str, codec: str
) -> None:
    given = layers(11)
    client.store(name, layers=given, codecs=codec, token_ids=tokens(TOKENS, 11), model=MODEL)
    family = codec.partition("(")[0].replace("mlx4g32", "mlx_affine")
    for spoken in (codec, family):
        prefix = present(road(name, rows=(10, 300), codecs=[spoken]))
        assert {tensor.codec for tensor in prefix.layout.tensors} == {str(codecs.parse(codec))}
        for pair, stored in zip(given, prefix.layers, strict=True):
            for mine, theirs in zip(pair, stored, strict=True):
                assert isinstance(theirs, Encoded)
                assert (theirs.heads, theirs.head_dim, theirs.token_count) == (HEADS, DIM, 290)
                assert theirs.dtype is DType.BF16
                assert_arrays(theirs, mine[:, 10:300])
    # What came goes into another store as it is.
    again = f"{name} again"
    client.store(
        again, layers=prefix.layers, token_ids=tokens(290, next(_numbers)), model=MODEL, base=0
    )
    copied = present(road(again, codecs=[codec]))
    for pair, stored in zip(prefix.layers, copied.layers, strict=True):
        for mine, theirs in zip(pair, stored, strict=True):
            for one, other in zip(mine.arrays, theirs.arrays, strict=True):
                np.testing.assert_array_equal(unsigned(one), unsigned(other))


def assert_arrays(encoded: Encoded, rows: Any) -> None:
    """Every bit of every array is what encoding the rows gives."""
    flat = np.ascontiguousarray(rows.transpose(1, 0, 2)).reshape(rows.shape[1], -1)
    expected = codecs.parse(encoded.codec).encode(flat)
    for array, wanted in zip(encoded.arrays, expected, strict=True):
        got = unsigned(array)
        got = got.transpose(1, 0, 2) if got.ndim == 3 else got
        np.testing.assert_array_equal(got.reshape(wanted.shape), unsigned(wanted))


def unsigned(array: Any) -> np.ndarray:
    if array.itemsize == 1:
        return np.asarray(array).view(np.uint8)
    return bits(array)


def test_each_tensor_has_its_own_codec(client: Client, road: Fetch, name: str) -> None:
    given = layers(23)
    client.store(
        name,
        layers=given,
        codecs={(1, "v"): "int8", (0, Side.V): "turbo4"},
        token_ids=tokens(TOKENS, 23),
        model=MODEL,
    )
    prefix = present(road(name, codecs=["turbo4"]))
    assert prefix.fidelity == "k.0=raw;v.0=turbo4;k.1=raw;v.1=int8"
    assert [t.codec for t in prefix.layout.tensors] == ["raw", "turbo4", "raw", "raw"]
    assert_same([prefix.layers[0][:1], prefix.layers[1][:1]], [given[0][:1], given[1][:1]])
    assert isinstance(prefix.layers[0][1], Encoded)
    np.testing.assert_array_equal(token_major(prefix.layers[1][1]), through("int8", given[1][1]))


@pytest.mark.parametrize(("group", "bits_"), [(32, 4), (64, 4), (128, 8), (64, 3)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_what_mlx_has_quantised_comes_back_in_the_same_codes(
    client: Client, road: Fetch, name: str, group: int, bits_: int, dtype: Any
) -> None:
    def quantised(seed: int) -> tuple[Any, Encoded]:
        rows = mx.array(values(seed, dtype=np.float32)).astype(dtype)
        rows = mx.concatenate([rows, rows], axis=-1)  # 128 values a head
        arrays = mx.quantize(rows, group_size=group, bits=bits_)
        return arrays, Encoded.quantized(*arrays, group=group, bits=bits_)

    sides = [quantised(seed) for seed in (1, 2)]
    client.store(
        name, layers=[tuple(side for _, side in sides)], token_ids=tokens(TOKENS, 5), model=MODEL
    )  # fmt: skip
    prefix = present(road(name, codecs=["mlx_affine"]))
    plain = present(road(name))
    for (arrays, side), got, decoded in zip(sides, prefix.layers[0], plain.layers[0], strict=True):
        assert got.codec == side.codec
        for mine, theirs in zip(arrays, got.arrays, strict=True):
            assert theirs.shape == mine.shape
            np.testing.assert_array_equal(unsigned(theirs), unsigned(mine))
        # By MLX in the type of its scales, here in float32.
        wide = [arrays[0], *(array.astype(mx.float32) for array in arrays[1:])]
        expected = mx.dequantize(*wide, group_size=group, bits=bits_)
        np.testing.assert_allclose(np.asarray(decoded), np.asarray(expected), atol=1e-5)


def test_codes_in_a_segment_are_what_mlx_reads(
    both: ServerProcess, client: Client, name: str
) -> None:
    given = layers(27, dtype=np.float32)
    before = set((both.directory / "segments").iterdir())
    client.store(name, layers=given, codecs="mlx4g32", token_ids=tokens(TOKENS, 27), model=MODEL)
    (segment,) = set((both.directory / "segments").iterdir()) - before
    loaded = mx.load(str(segment), format="safetensors")
    assert isinstance(loaded, dict)
    types = {"codes": mx.uint32, "scales": mx.float16, "biases": mx.float16}
    for slot, pair in enumerate(given):
        for side, rows in zip("kv", pair, strict=True):
            arrays = [loaded[f"{side}.{slot}.{kind}"] for kind in types]
            assert [array.dtype for array in arrays] == list(types.values())
            assert [array.shape for array in arrays] == [(TOKENS, HEADS, n) for n in (8, 2, 2)]
            wide = [arrays[0], *(array.astype(mx.float32) for array in arrays[1:])]
            got = mx.dequantize(*wide, group_size=32, bits=4)
            np.testing.assert_allclose(
                np.asarray(got).reshape(TOKENS, -1), through("mlx4g32", rows), atol=1e-6
            )


@pytest.mark.parametrize("codec", SPOKEN_BY_RESP)
def test_rows_of_resp_reach_a_client_in_either_form(
    resp: Wire, road: Fetch, name: str, codec: str
) -> None:
    rows = token_major(values(31, dtype=np.float32))
    assert resp("KV.PREFIX.REGISTER", name, HEADS * DIM, codec) == "OK"
    for side in ("pk", "pv"):
        resp("V.STOREBATCH", f"{name}_{side}", 0, 0, 200, rows[:200].tobytes())
        resp("V.STOREBATCH", f"{name}_{side}", 0, 200, TOKENS - 200, rows[200:].tobytes())
    over_resp = np.frombuffer(resp("V.FETCH", f"{name}_pv", 0, "RANGE", 0, TOKENS), np.float32)
    assert resp("KV.PREFIX.SAVE") == "OK"  # rows that may still grow are streamed
    decoded = present(road(name)).layers[0][1]
    assert decoded.shape == (1, TOKENS, HEADS * DIM)
    np.testing.assert_array_equal(np.asarray(decoded).ravel(), over_resp)
    stored = present(road(name, codecs=[codec])).layers[0][1]
    assert_arrays(stored, rows[None])


@pytest.mark.parametrize("codec", SPOKEN_BY_RESP)
def test_rows_of_a_client_reach_resp_as_what_they_are(
    client: Client, resp: Wire, name: str, codec: str
) -> None:
    given = layers(41)
    client.store(name, layers=given, codecs=codec, token_ids=tokens(TOKENS, 41), model=MODEL)
    assert resp("KV.PREFIX.LOOKUP", name) == "HIT"
    for side in range(2):
        got = resp("V.FETCH", f"{name}_p{'kv'[side]}", "BATCH", 0, TOKENS)
        assert got == [through(codec, pair[side]).tobytes() for pair in given]


@pytest.mark.parametrize("codec", ["int8", "turbo3", "mlx4g32"])
def test_rows_are_appended_in_the_codec_of_the_tensor(
    client: Client, name: str, codec: str
) -> None:
    given, more = layers(51), values(99, 40)
    client.store(name, layers=given, codecs=codec, token_ids=tokens(TOKENS, 51), model=MODEL)
    written = client.write_rows(
        name, slot=1, side="v", first_row=TOKENS - 3, rows=more, codec=codec
    )
    assert written.row_count == TOKENS + 37
    got = client.read_rows(name, slot=1, side="v", rows=range(TOKENS - 4, TOKENS + 37))
    assert got is not None
    expected = np.concatenate([through(codec, given[1][1])[-4:-3], through(codec, more)])
    np.testing.assert_array_equal(token_major(got), expected)
    for wrong in ({"rows": more}, {"rows": more, "codec": "fp8"}):
        with pytest.raises((InvalidRequest, LayoutDiffers)):
            client.write_rows(name, slot=1, side="v", first_row=0, **wrong)  # type: ignore[arg-type]


def test_a_lossy_prefix_is_no_answer_to_who_did_not_ask_for_it(client: Client, name: str) -> None:
    ids = tokens(TOKENS, 61)
    client.store(name, layers=layers(61), codecs="int8", token_ids=ids, model=MODEL)
    assert not client.match(model=MODEL, token_ids=ids).hit
    lookup = client.lookup(name)
    assert lookup.prefix is not None
    fidelity = lookup.prefix.fidelity
    assert fidelity == "k.0=int8;v.0=int8;k.1=int8;v.1=int8"
    match = client.match(model=MODEL, token_ids=ids, fidelities=[fidelity])
    assert (match.hit, match.token_count, match.namespace) == (True, TOKENS, name)
    raw = client.store(None, layers=layers(61), token_ids=ids, model=MODEL)
    assert client.match(model=MODEL, token_ids=ids).namespace == raw.namespace


def test_a_child_goes_on_in_the_codec_of_its_parent(client: Client, road: Fetch, name: str) -> None:
    whole = layers(71)
    ids = tokens(TOKENS, 71)
    client.store(
        name, layers=[(k[:, :200], v[:, :200]) for k, v in whole], codecs="turbo4",
        token_ids=ids[:200], model=MODEL,
    )  # fmt: skip
    child = client.store(
        None, layers=[(k[:, 150:], v[:, 150:]) for k, v in whole], codecs="turbo4",
        token_ids=ids, model=MODEL, parent=name, base=150,
    )  # fmt: skip
    prefix = present(road(child.namespace))
    for pair, got in zip(whole, prefix.layers, strict=True):
        for mine, theirs in zip(pair, got, strict=True):
            np.testing.assert_array_equal(token_major(theirs), through("turbo4", mine))
    assert_arrays(present(road(child.namespace, codecs=["turbo4"])).layers[1][0], whole[1][0])


@pytest.mark.parametrize("cut_down", [1_000_000, 2_300_000, 2_550_000, 2_700_000])
def test_a_broken_stream_goes_on_in_the_array_where_it_broke(
    both: ServerProcess, client: Client, name: str, cut_down: int
) -> None:
    given = [(values(5, 10_000), values(6, 10_000))]
    client.store(name, layers=given, codecs="int8", token_ids=tokens(10_000, 83), model=MODEL)
    with contextlib.closing(Link(both.address, cut_down=cut_down)) as link:
        with Client(link.address, export=False) as cut:
            prefix = present(cut.fetch(name, codecs=["int8"]))
        assert link.connections == 2
    for mine, theirs in zip(given[0], prefix.layers[0], strict=True):
        assert_arrays(theirs, mine)


def test_what_a_codec_cannot_take_is_refused_by_name(client: Client, name: str) -> None:
    def store(array: Any, codec: Any) -> None:
        client.store(
            name, layers=[(array, array)], codecs=codec, token_ids=range(8), model=MODEL
        )  # fmt: skip

    narrow = np.zeros((2, 8, 10), np.float32)
    with pytest.raises(InvalidRequest, match=r"turbo4 .*20"):
        store(narrow, "turbo4")
    with pytest.raises(InvalidRequest, match="unknown codec 'fp12'"):
        store(narrow, "fp12")
    with pytest.raises(InvalidRequest, match=r"there is no \(3, 'v'\)"):
        store(narrow, {(3, "v"): "int8"})
    hole = np.zeros((2, 8, 32), np.float32)
    hole[1, 5, 0] = np.nan
    with pytest.raises(InvalidRequest, match="row 5"):
        store(hole, "int8")
    assert client.lookup(name).prefix is None
    with pytest.raises(InvalidRequest, match="unknown codec 'fp12'"):
        client.fetch(name, codecs=["fp12"])


@pytest.mark.parametrize("wrong", ["short", "type", "few", "heads"])
def test_arrays_that_are_not_their_codecs_are_refused(
    client: Client, name: str, wrong: str
) -> None:
    codes, scales, biases = (
        np.zeros((2, 8, 8), np.uint32), *(np.zeros((2, 8, 2), np.float16) for _ in range(2))
    )  # fmt: skip
    arrays = {
        "short": (codes, scales, biases[:, :7]),
        "type": (codes.view(np.int32), scales, biases),
        "few": (codes, scales),
        "heads": (codes, scales, biases.reshape(1, 16, 2)),
    }[wrong]
    side = Encoded("mlx4g32", 2, 64, arrays)
    with pytest.raises(InvalidRequest, match="not the arrays of mlx_affine"):
        client.store(name, layers=[(side, side)], token_ids=range(8), model=MODEL)


def test_16_bit_patterns_pass_through_fp16(client: Client, road: Fetch, name: str) -> None:
    patterns = random_bits(3, (2, 100, 32), np.float16)
    client.store(
        name, layers=[(patterns, patterns)], codecs="fp16", token_ids=tokens(100, 81), model=MODEL
    )
    (got, _) = present(road(name, codecs=["fp16"])).layers[0]
    np.testing.assert_array_equal(unsigned(got.arrays[0]), unsigned(patterns))
