"""`V.*`: rows come back as they were stored, or as near as their format says, and never as others."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pion_wire import codecs
from tests.resp.conftest import Resp
from tests.resp.wire import Refused, Wire, fields

D = 64
RNG = np.random.default_rng(20260928)
TOO_FAR = "ERR end must not exceed 200000"
FORMATS = ("int8", "turbo4", "turbo3", "turbo2", "fp16", "fp8", "mlx4g32")


def uniform(rows: int, width: int = D) -> "np.ndarray[Any, np.dtype[np.float32]]":
    return RNG.uniform(-1, 1, (rows, width)).astype(np.float32)


def floats(payload: bytes, width: int = D) -> "np.ndarray[Any, np.dtype[np.float32]]":
    return np.frombuffer(payload, np.float32).reshape(-1, width)


def cosine(a: Any, b: Any) -> float:
    a, b = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize(
    ("name", "error_max", "cosine_min"),
    [
        ("fp16", 0.001, 0.9999),
        ("int8", 0.05, 0.99),
        ("fp8", 0.1, 0.99),
        ("turbo4", 0.35, 0.95),
        ("turbo3", 0.75, 0.8),
        ("turbo2", 0.75, 0.7),
        ("mlx4g32", 0.35, 0.95),
    ],
)
def test_no_format_loses_more_than_it_may(
    wire: Wire, name: str, error_max: float, cosine_min: float
) -> None:
    rows = uniform(200)
    wire("V.CREATE", f"accurate {name}", D, "VQUANT", name)
    assert wire("V.STOREBATCH", f"accurate {name}", 0, 0, 200, rows.tobytes()) == "OK"
    got = floats(wire("V.FETCH", f"accurate {name}", 0, "RANGE", 0, 200))
    assert np.abs(got - rows).max() <= error_max
    assert cosine(got, rows) > cosine_min
    # What came is what the codec says, so both wires agree on it.
    codec = codecs.parse(name)
    assert np.array_equal(got, codec.decode(codec.encode(rows)))


def test_no_two_formats_are_secretly_the_same(wire: Wire) -> None:
    rows = RNG.normal(0, 0.6, (64, 1_024)).astype(np.float32)
    errors = {}
    for name in FORMATS:
        wire("V.CREATE", f"distinct {name}", 1_024, "VQUANT", name.upper())
        wire("V.STOREBATCH", f"distinct {name}", 0, 0, 64, rows.tobytes())
        got = floats(wire("V.FETCH", f"distinct {name}", 0, "RANGE", 0, 64), 1_024)
        errors[name] = float(np.abs(got - rows).mean())
        assert fields(wire("V.INFO", f"distinct {name}"))["v_format"] == name
    assert len({round(error, 9) for error in errors.values()}) == len(FORMATS)
    assert errors["fp16"] < errors["int8"] < errors["mlx4g32"] < errors["turbo4"]
    assert errors["mlx4g32"] <= 0.040
    assert errors["mlx4g32"] <= 0.82 * errors["turbo4"]


def test_sixteen_bit_patterns_come_back_bit_for_bit(wire: Wire) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).tobytes()
    count = (1 << 16) // D
    wire("V.CREATE", "patterns", D, "VQUANT", "fp16")
    wire("V.STOREBATCH", "patterns", 0, 0, count, patterns, "FMT", "f16")
    assert wire("V.FETCH", "patterns", 0, "RANGE", 0, count, "fmt", "native") == patterns
    assert wire("V.FETCH", "patterns", "BATCH", 0, count, "FMT", "NATIVE") == [patterns]
    wide = floats(wire("V.FETCH", "patterns", 0, "RANGE", 0, count))
    with np.errstate(invalid="ignore"):
        expected = np.frombuffer(patterns, np.float16).astype(np.float32)
    assert np.array_equal(wide.ravel(), expected, equal_nan=True)


def test_wide_input_is_rounded_to_nearest_even(wire: Wire) -> None:
    rows = RNG.normal(0, 3, (100, D)).astype(np.float32)
    rows[0, :4] = (1 + 2**-11, 1 + 3 * 2**-11, 65_519.0, -0.0)
    wire("V.CREATE", "rounded", D, "VQUANT", "fp16")
    wire("V.STOREBATCH", "rounded", 0, 0, 100, rows.tobytes())
    got = wire("V.FETCH", "rounded", 0, "RANGE", 0, 100, "FMT", "NATIVE")
    assert got == rows.astype(np.float16).tobytes()


@pytest.mark.parametrize("name", [f for f in FORMATS if f != "fp16"])
def test_native_is_float32_where_rows_are_not_halves(wire: Wire, name: str) -> None:
    wire("V.CREATE", f"native {name}", D, "VQUANT", name)
    wire("V.STOREBATCH", f"native {name}", 0, 0, 3, uniform(3).tobytes())
    plain = wire("V.FETCH", f"native {name}", 0, "RANGE", 0, 3)
    assert wire("V.FETCH", f"native {name}", 0, "RANGE", 0, 3, "FMT", "NATIVE") == plain
    assert len(plain) == 3 * D * 4


@pytest.mark.parametrize("name", FORMATS)
def test_appending_never_harms_earlier_rows(wire: Wire, name: str) -> None:
    sid = f"appended {name}"
    wire("V.CREATE", sid, D, "VQUANT", name)
    wire("V.STOREBATCH", sid, 0, 0, 10, uniform(10).tobytes())
    before = wire("V.FETCH", sid, 0, "RANGE", 0, 10)
    wire("V.STOREBATCH", sid, 0, 10, 10, (1_000 * uniform(10)).tobytes())
    assert wire("V.FETCH", sid, 0, "RANGE", 0, 10) == before


@pytest.mark.parametrize("name", FORMATS)
def test_rows_that_were_never_stored_are_zeros(wire: Wire, name: str) -> None:
    sid = f"zeros {name}"
    wire("V.CREATE", sid, D, "VQUANT", name)
    wire("V.STOREBATCH", sid, 0, 10, 5, uniform(5).tobytes())
    got = floats(wire("V.FETCH", sid, 0, "RANGE", 0, 20))
    assert got.shape == (20, D)
    assert not got[:10].any()
    assert not got[15:].any()
    assert got[10:15].any(axis=1).all()
    scattered = floats(wire("V.FETCH", sid, 0, 12, 3, 100, 12, 14))
    assert np.array_equal(scattered, got[[12, 3, 19, 12, 14]])
    wire("KV.PREFIX.SAVE")
    assert np.array_equal(floats(wire("V.FETCH", sid, 0, "RANGE", 0, 20)), got)


def test_what_is_not_there_at_all_is_nil(wire: Wire) -> None:
    wire("V.CREATE", "absent", D, "VQUANT", "fp16")
    assert wire("V.FETCH", "absent", 0, "RANGE", 0, 1) is None
    assert wire("V.FETCH", "absent", 0, 0) is None
    assert wire("V.FETCH", "absent", "BATCH", 0, 1) == Refused(
        "ERR V.FETCH BATCH: session has no stored layers"
    )
    wire("V.STOREBATCH", "absent", 2, 0, 2, uniform(2).tobytes())
    assert wire("V.FETCH", "absent", 0, "RANGE", 0, 1) is None
    assert wire("V.FETCH", "absent", 2, "RANGE", 2, 5) is None
    assert wire("V.FETCH", "absent", 2, 2, 3) is None
    assert wire("V.FETCH", "absent", 77, "RANGE", 0, 1) is None
    assert wire("V.FETCH", "absent", 10**9, "RANGE", 0, 1) is None
    first, second, third = wire("V.FETCH", "absent", "BATCH", 0, 3)
    assert first is second is None
    assert len(third) == 3 * D * 4


def test_batches_have_as_many_layers_as_were_asked_or_are_there(wire: Wire) -> None:
    wire("V.CREATE", "layers", D, "VQUANT", "fp16")
    stored = [uniform(4).astype(np.float16).tobytes() for _ in range(3)]
    for layer in (2, 0, 1):
        wire("V.STOREBATCH", "layers", layer, 0, 4, stored[layer], "FMT", "F16")
    for words, count in (((), 3), ((2,), 2), ((0,), 3), ((80,), 3), ((-1,), 3)):
        got = wire("V.FETCH", "layers", "BATCH", 1, 3, *words, "FMT", "NATIVE")
        assert got == [rows[D * 2 : 3 * D * 2] for rows in stored[:count]]
    wire("HELLO", "3")
    wire("V.STOREBATCH", "layers", 4, 0, 4, stored[0], "FMT", "F16")
    assert wire("V.FETCH", "layers", "BATCH", 0, 4, "FMT", "NATIVE")[3] is None


def test_rows_may_be_overwritten(wire: Wire) -> None:
    wire("V.CREATE", "over", D, "VQUANT", "fp16")
    old, new = (uniform(n).astype(np.float16) for n in (10, 4))
    wire("V.STOREBATCH", "over", 0, 0, 10, old.tobytes(), "FMT", "F16")
    wire("V.STOREBATCH", "over", 0, 3, 4, new.tobytes(), "FMT", "F16")
    expected = old.copy()
    expected[3:7] = new
    assert wire("V.FETCH", "over", 0, "RANGE", 0, 10, "FMT", "NATIVE") == expected.tobytes()
    assert fields(wire("V.INFO", "over"))["layer_0_tokens"] == "10"


def test_many_small_batches_and_overwrites_read_as_one(wire: Wire) -> None:
    wire("V.CREATE", "many", D, "VQUANT", "fp16")
    expected = np.zeros((400, D), np.float16)
    for _ in range(120):
        start = int(RNG.integers(0, 380))
        rows = uniform(int(RNG.integers(1, 20))).astype(np.float16)
        expected[start : start + len(rows)] = rows
        wire("V.STOREBATCH", "many", 0, start, len(rows), rows.tobytes(), "FMT", "F16")
    count = int(fields(wire("V.INFO", "many"))["layer_0_tokens"])
    for save in (False, True):
        if save:
            wire("KV.PREFIX.SAVE")
        for begin, end in ((0, count), (17, 201), (count - 1, 400)):
            got = wire("V.FETCH", "many", 0, "RANGE", begin, end, "FMT", "NATIVE")
            assert got == expected[begin:end].tobytes()


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("nobody", 0, 0, 1, bytes(256)), "ERR session not found"),
        (("r", -1, 0, 1, bytes(256)), "ERR invalid layer_id/start_id/count"),
        (("r", 0, -1, 1, bytes(256)), "ERR invalid layer_id/start_id/count"),
        (("r", 0, 0, 0, b""), "ERR invalid layer_id/start_id/count"),
        (("r", 0, "01", 1, bytes(256)), "ERR invalid layer_id/start_id/count"),
        (("r", 80, 0, 1, bytes(256)), "ERR V.STOREBATCH: layer_id exceeds MAX_VS_LAYERS"),
        (("r", 0, 200_000, 1, bytes(256)), "ERR V.STOREBATCH failed"),
        (("r", 0, 0, 200_001, b""), "ERR V.STOREBATCH failed"),
        (
            ("r", 0, 0, 1, bytes(255)),
            "ERR V.STOREBATCH: blob size 255 != expected 256 (count * dim * 4)",
        ),
        (
            ("r", 0, 0, 1, bytes(257)),
            "ERR V.STOREBATCH: blob size 257 != expected 256 (count * dim * 4)",
        ),
        (
            ("r", 0, 0, 1, bytes(256), "FMT", "F16"),
            "ERR V.STOREBATCH: blob size 256 != expected 128 (count * dim * 2)",
        ),
        (
            ("r", 0, 0, 1, bytes(256), "FMT"),
            "ERR V.STOREBATCH: unknown option (expected FMT F16)",
        ),
        (
            ("r", 0, 0, 1, bytes(256), "FMT", "BF16"),
            "ERR V.STOREBATCH: unknown option (expected FMT F16)",
        ),
        (
            ("r", 0, 0, 1, bytes(128), "FMT", "F16", "x"),
            "ERR V.STOREBATCH: unknown option (expected FMT F16)",
        ),
    ],
)
def test_a_refused_batch_stores_nothing(wire: Wire, words: tuple[Any, ...], refusal: str) -> None:
    wire("V.CREATE", "r", D, "VQUANT", "fp16")
    assert wire("V.STOREBATCH", *words) == Refused(refusal)
    assert "layer_0_tokens" not in fields(wire("V.INFO", "r"))


@pytest.mark.parametrize("name", ["int8", "turbo4", "fp8", "mlx4g32"])
def test_values_that_would_spoil_their_neighbours_are_refused(wire: Wire, name: str) -> None:
    sid = f"spoiled {name}"
    wire("V.CREATE", sid, D, "VQUANT", name)
    for value in (np.nan, np.inf):
        rows = uniform(3)
        rows[1, 5] = value
        refused = wire("V.STOREBATCH", sid, 0, 0, 3, rows.tobytes())
        assert refused.text.startswith("ERR V.STOREBATCH failed (rows: ")
        assert "row 1" in refused.text
    assert wire("V.FETCH", sid, 0, "RANGE", 0, 3) is None
    assert wire("V.STOREBATCH", sid, 0, 0, 3, uniform(3).tobytes()) == "OK"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("nobody", 0, "RANGE", 0, 1), "ERR session not found"),
        (("nobody", "BATCH", 0, 1), "ERR session not found"),
        (("nobody", 0, 1), "ERR session not found"),
        (("f", 0, "RANGE", 5, 5), "ERR invalid RANGE: end must exceed start (>=0)"),
        (("f", 0, "RANGE", -1, 5), "ERR invalid RANGE: end must exceed start (>=0)"),
        (("f", "BATCH", 5, 4), "ERR V.FETCH BATCH invalid range: end must exceed start (>=0)"),
        (("f", 0, "RANGE", 0, 200_001), TOO_FAR),
        (("f", 0, "RANGE", 199_999, 2**63 - 1), TOO_FAR),
        (("f", "BATCH", 0, 2**63 - 1), TOO_FAR),
        (("f", 0, 1, "FMT", "NATIVE"), "ERR FMT NATIVE requires the RANGE or BATCH form"),
        (("f", 0, ""), "ERR no token IDs provided"),
        (("f", 0, "RANGE", 1), "ERR V.FETCH RANGE requires: sid layer RANGE start end"),
        (("f", "BATCH", 1), "ERR V.FETCH BATCH requires: sid BATCH start end [num_layers]"),
        (("f", 0, "RANGE", 0, 1, "FMT"), "ERR V.FETCH: unknown option (expected FMT NATIVE)"),
        (("f", -1, "RANGE", 0, 1), "ERR value is not an integer or out of range"),
        (("f", 0, "x"), "ERR value is not an integer or out of range"),
    ],
)
def test_a_fetch_that_makes_no_sense_says_so(
    wire: Wire, words: tuple[Any, ...], refusal: str
) -> None:
    wire("V.CREATE", "f", D, "VQUANT", "fp16")
    wire("V.STOREBATCH", "f", 0, 0, 1, bytes(D * 4))
    assert wire("V.FETCH", *words) == Refused(refusal)
    assert wire("PING") == "PONG"


def test_a_range_far_beyond_the_end_costs_no_memory(wire: Wire) -> None:
    wire("V.CREATE", "far", 8_192, "VQUANT", "fp16")
    wire("V.STOREBATCH", "far", 0, 0, 1, bytes(8_192 * 4))
    wire.send("V.FETCH", "far", 0, "RANGE", 0, 100_000)
    size = int(wire.file.readline()[1:])
    assert size == 100_000 * 8_192 * 4  # 3.3 GB, of which the first is read
    assert wire.file.read(1 << 20) == bytes(1 << 20)
    wire.close()


def test_what_was_never_sent_is_not_counted(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()

    def served() -> int:
        words = wire("PION.STATS")
        return int(words[words.index(b"kvprefix_bytes_served") + 1])

    wire("V.CREATE", "cut", 8_192, "VQUANT", "fp16")
    wire("V.STOREBATCH", "cut", 0, 0, 1, bytes(8_192 * 4))
    assert len(wire("V.FETCH", "cut", 0, "RANGE", 0, 1)) == 8_192 * 4
    assert served() == 8_192 * 4
    assert len(wire("V.FETCH", "cut", "BATCH", 0, 100)[0]) == 100 * 8_192 * 4
    assert served() == 101 * 8_192 * 4
    greedy = resp.connect()
    greedy.send("V.FETCH", "cut", 0, "RANGE", 0, 200_000)  # 6.5 GB, of which the first is read
    assert greedy.file.read(1 << 20)
    greedy.close()
    assert 101 * 8_192 * 4 < served() < 500 << 20


def test_ids_beyond_the_thousandth_are_left_out(wire: Wire) -> None:
    wire("V.CREATE", "ids", D, "VQUANT", "fp16")
    wire("V.STOREBATCH", "ids", 0, 0, 2, bytes(2 * D * 4))
    assert len(wire("V.FETCH", "ids", 0, *([1] * 2_000))) == 1_024 * D * 4
    assert len(wire("V.FETCH", "ids", 0, 1, 0, "", 1)) == 2 * D * 4


def test_int8_is_what_a_width_without_blocks_gets(wire: Wire) -> None:
    for name in ("mlx4g32", "turbo4", "fp8"):
        assert isinstance(wire("V.CREATE", f"hundred {name}", 100, "VQUANT", name), int)
        assert fields(wire("V.INFO", f"hundred {name}"))["v_format"] == "int8"


def test_creating_twice_is_once(wire: Wire) -> None:
    number = wire("V.CREATE", "twice", D)
    assert number >= 0
    assert wire("V.CREATE", "twice", 32, "VQUANT", "fp16", "whatever") == number
    info = fields(wire("V.INFO", "twice"))
    assert (info["value_dim"], info["v_format"]) == ("64", "int8")
    assert wire("V.CREATE", "other", D) != number


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("0",), "ERR invalid value_dim (must be 1-8192)"),
        (("8193",), "ERR invalid value_dim (must be 1-8192)"),
        (("64", "VQUANT", "int5"), "ERR V.CREATE: unknown VQUANT format 'int5' (want int8|turbo4|"),
        (("64", "VQUANT", "bf16_rope_fp8_body"), "SCHEMA"),
        (("0", "SCHEMA", "0"), "ERR V.CREATE SCHEMA: N must be positive"),
        (("0", "SCHEMA", "x"), "ERR V.CREATE SCHEMA: N must be positive"),
        (("0", "SCHEMA", "60"), "exceeds"),
        (("SCHEMA", "2", "dim=64"), "not enough layer specs (need 2)"),
        (("9000", "SCHEMA", "1", "fmt=fp16"), "default_dim must be 0-8192"),
        (("0", "SCHEMA", "1", "fmt=int5,dim=64"), "layer 0 unknown fmt"),
        (("0", "SCHEMA", "2", "dim=64", "size=4"), "layer 1 unknown key"),
        (("0", "SCHEMA", "1", "dim=0"), "layer 0 dim must be 1-8192"),
        (("0", "SCHEMA", "1", "fmt=fp16"), "layer 0 missing dim and no default supplied"),
        (("64", "SCHEMA", "1", "s=4"), "S-tensor reserved"),
        (("64", "SCHEMA", "1", "rope=9000"), "layer 0 rope must be 1-8192"),
        (("0", "SCHEMA", "1", "fmt=fp8,dim=100"), "turbo/fp8 dim must be multiple of 32"),
        (("0", "SCHEMA", "1", "fmt=mlx4g32,dim=100"), "multiple of 32"),
        (("64", "SCHEMA", "1", "fmt=bf16_rope_fp8_body"), "needs rope=N (0 < N < dim)"),
        (("64", "SCHEMA", "1", "fmt=bf16_rope_fp8_body,rope=64"), "rope=N"),
        (
            ("64", "SCHEMA", "1", "fmt=bf16_rope_fp8_body,rope=16"),
            "(dim - rope) must be multiple of 32",
        ),
    ],
)
def test_a_session_that_cannot_be_is_not_created(
    wire: Wire, words: tuple[str, ...], refusal: str
) -> None:
    answer = wire("V.CREATE", "impossible", *words)
    assert isinstance(answer, Refused)
    assert refusal in answer.text
    assert wire("V.INFO", "impossible") is None


def test_layers_keep_what_the_schema_says_of_each(wire: Wire) -> None:
    specs = (
        "fmt=fp16,dim=64",
        "FMT=TURBO4,DIM=96",
        "fmt=bf16_rope_fp8_body,dim=96,rope=32",
        "dim=50",
    )
    wire("V.CREATE", "schema", 0, "SCHEMA", 4, *specs)
    widths = (64, 96, 96, 50)
    stored = [uniform(20, width) for width in widths]
    info = fields(wire("V.INFO", "schema"))
    assert info["num_layers"] == "4"
    for layer, rows in enumerate(stored):
        assert wire("V.STOREBATCH", "schema", layer, 0, 20, rows.tobytes()) == "OK"
    assert wire("V.STOREBATCH", "schema", 4, 0, 1, bytes(256)).text.startswith(
        "ERR V.STOREBATCH failed ("
    )
    info = fields(wire("V.INFO", "schema"))
    assert info["schema"] == "heterogeneous"
    assert [info[f"layer_{i}_fmt"] for i in range(4)] == [
        "fp16", "turbo4", "bf16_rope_fp8_body", "int8",
    ]  # fmt: skip
    assert [info[f"layer_{i}_dim"] for i in range(4)] == ["64", "96", "96", "50"]
    assert info["layer_2_rope"] == "32"
    assert "layer_1_rope" not in info
    assert info["total_tokens"] == "80"
    got = [
        floats(part, widths[i]) for i, part in enumerate(wire("V.FETCH", "schema", "BATCH", 0, 20))
    ]
    assert np.array_equal(got[0], stored[0].astype(np.float16).astype(np.float32))
    assert cosine(got[1], stored[1]) > 0.95
    assert cosine(got[2][:, :32], stored[2][:, :32]) > 0.999
    assert cosine(got[2][:, 32:], stored[2][:, 32:]) > 0.99
    assert np.abs(got[3] - stored[3]).max() <= 0.05


def test_a_live_schema_is_not_overwritten(wire: Wire) -> None:
    specs = ("fmt=fp16,dim=64", "fmt=fp8,dim=64")
    number = wire("V.CREATE", "fixed", 0, "SCHEMA", 2, *specs)
    assert wire("V.CREATE", "fixed", 0, "SCHEMA", 2, *specs) == number
    assert wire("V.CREATE", "fixed", 0, "SCHEMA", 2, *specs[::-1]).text.startswith(
        "ERR V.CREATE SCHEMA: "
    )


def test_layers_beyond_a_schema_are_the_default(wire: Wire) -> None:
    wire("V.CREATE", "default", 64, "SCHEMA", 1, "fmt=fp16")
    assert wire("V.STOREBATCH", "default", 1, 0, 1, bytes(256)) == "OK"
    info = fields(wire("V.INFO", "default"))
    assert (info["layer_0_fmt"], info["layer_1_fmt"]) == ("fp16", "int8")


def test_info_of_nothing_is_nil(wire: Wire) -> None:
    assert wire("V.INFO", "nobody") is None
    assert set(fields(wire("V.INFO"))) == {"enabled", "sessions", "total_tokens", "total_fetches"}


def test_snapshots_cut_back_what_grew_and_nothing_else(wire: Wire) -> None:
    wire("KV.PREFIX.REGISTER", "spec", D, "fp16")
    rows = uniform(20).astype(np.float16).tobytes()
    for side in ("pk", "pv"):
        wire("V.STOREBATCH", f"spec_{side}", 0, 0, 20, rows, "FMT", "F16")
    snapshot = wire("V.SNAPSHOT", "spec_pk")
    assert snapshot > 0
    for side in ("pk", "pv"):
        wire("V.STOREBATCH", f"spec_{side}", 0, 20, 20, rows, "FMT", "F16")
        wire("V.STOREBATCH", f"spec_{side}", 1, 0, 20, rows, "FMT", "F16")
    assert wire("V.RESTORE", "spec_pk", snapshot) == "OK"
    assert wire("V.FETCH", "spec_pk", 0, "RANGE", 0, 20, "FMT", "NATIVE") == rows
    assert wire("V.FETCH", "spec_pk", 0, "RANGE", 20, 40) is None
    assert wire("V.FETCH", "spec_pk", 1, "RANGE", 0, 20) is None
    assert wire("V.FETCH", "spec_pv", 0, "RANGE", 20, 40, "FMT", "NATIVE") == rows
    wire("V.STOREBATCH", "spec_pk", 0, 22, 1, rows[: D * 2], "FMT", "F16")
    assert wire("V.FETCH", "spec_pk", 0, "RANGE", 20, 23, "FMT", "NATIVE") == (
        bytes(2 * D * 2) + rows[: D * 2]
    )
    assert wire("V.RESTORE", "spec_pk", snapshot) == "OK"  # it stays valid
    assert wire("V.COMMIT", "spec_pk", snapshot) == 1
    assert wire("V.COMMIT", "spec_pk", snapshot) == 0
    assert wire("V.RESTORE", "spec_pk", snapshot).text.startswith("ERR V.RESTORE: unknown snap_id")


def test_snapshots_are_counted_by_session_and_never_mixed_up(wire: Wire) -> None:
    wire("KV.PREFIX.REGISTER", "slots", D, "fp16")
    taken = [wire("V.SNAPSHOT", "slots_pk") for _ in range(16)]
    assert taken == sorted(set(taken))
    assert wire("V.SNAPSHOT", "slots_pk") == Refused(
        "ERR V.SNAPSHOT: no free snapshot slot (max 16 per session)"
    )
    other = wire("V.SNAPSHOT", "slots_pv")
    assert other > taken[-1]
    assert wire("V.RESTORE", "slots_pk", other).text.startswith("ERR V.RESTORE: unknown snap_id")
    assert wire("V.COMMIT", "slots_pk", taken[0]) == 1
    assert wire("V.SNAPSHOT", "slots_pk") > other
    assert wire("V.RESTORE", "slots_pk", 0) == Refused("ERR V.RESTORE: snap_id must be positive")
    assert wire("V.COMMIT", "slots_pk", -1) == Refused("ERR V.COMMIT: snap_id must be positive")
    for command in ("V.SNAPSHOT", "V.RESTORE", "V.COMMIT"):
        words = () if command == "V.SNAPSHOT" else (1,)
        assert wire(command, "nobody", *words) == Refused("ERR session not found")


@pytest.mark.parametrize("save", [False, True])
def test_values_are_the_same_bits_after_a_restart(
    start_resp: Callable[..., Resp], save: bool
) -> None:
    resp = start_resp()
    wire = resp.connect()
    before = {}
    for name in FORMATS:
        wire("KV.PREFIX.REGISTER", name, D, name)
        for layer in range(2):
            wire("V.STOREBATCH", f"{name}_pk", layer, 0, 100, uniform(100).tobytes())
            wire("V.STOREBATCH", f"{name}_pv", layer, 0, 100, uniform(100).tobytes())
        before[name] = wire("V.FETCH", f"{name}_pk", "BATCH", 0, 100)
    if save:
        assert wire("KV.PREFIX.SAVE") == "OK"
    resp.stop()
    wire = start_resp().connect()
    for name in FORMATS:
        assert wire("V.FETCH", f"{name}_pk", "BATCH", 0, 100) == before[name]
        assert wire("KV.PREFIX.LOOKUP", name) == "HIT"


def test_the_same_rows_are_stored_alike_each_time(wire: Wire) -> None:
    rows = uniform(50).tobytes()
    for name in FORMATS:
        for sid in ("x", "y"):
            wire("V.CREATE", f"alike {name} {sid}", D, "VQUANT", name)
            wire("V.STOREBATCH", f"alike {name} {sid}", 0, 0, 50, rows)
        assert wire("V.FETCH", f"alike {name} x", 0, "RANGE", 0, 50) == wire(
            "V.FETCH", f"alike {name} y", 0, "RANGE", 0, 50
        )
