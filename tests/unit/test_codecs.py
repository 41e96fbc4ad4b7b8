"""Row codecs: names, layouts, bytes, accuracy, and what may not happen to a row.

Every property of `TestEveryCodec` holds for each codec; the plain twin in `codecs.reference` and the
vectors shared with other clients say which bytes are right.
"""

import itertools
import json
import pathlib
import subprocess
import sys
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from pion_wire.codecs import (
    CHOICES,
    Bf16RopeFp8Body,
    Codec,
    Fp8,
    Fp16,
    Int8,
    MlxAffine,
    Raw,
    Turbo,
    parse,
    row_type,
)
from pion_wire.codecs.bits import pack, unpack
from pion_wire.codecs.measure import NAMES, measure
from pion_wire.codecs.reference import decode_row, encode_row

VECTORS = json.loads(
    (pathlib.Path(__file__).parents[1] / "vectors" / "codecs.json").read_text(encoding="utf-8")
)

AFFINE = [
    MlxAffine(bits, group, scale_type)
    for bits, group, scale_type in itertools.product(
        (1, 2, 3, 4, 5, 6, 8), (32, 64, 128), ("f16", "bf16", "f32")
    )
]
TURBO = [Turbo(4), Turbo(3), Turbo(2)]
MLX4G32 = MlxAffine(4, 32, "f16")
# Several affine ones stand for the 63 that there are.
SHARED_SCALE = [Int8(), Fp8(), *TURBO, *AFFINE[::13], MLX4G32, Bf16RopeFp8Body(32)]
ALL: list[Codec] = [Raw(), Fp16(), *SHARED_SCALE]
WIDTH = 128  # taken by every codec
BF16 = np.dtype(ml_dtypes.bfloat16)

every_codec = pytest.mark.parametrize("codec", ALL, ids=str)
shared_scale = pytest.mark.parametrize("codec", SHARED_SCALE, ids=str)


def normal(rows: int, width: int = WIDTH, scale: float = 0.6) -> NDArray[np.float32]:
    return np.random.default_rng(7).normal(0, scale, (rows, width)).astype(np.float32)


def uniform(rows: int, width: int = WIDTH) -> NDArray[np.float32]:
    return np.random.default_rng(8).uniform(-1, 1, (rows, width)).astype(np.float32)


def stored_bytes(arrays: tuple[NDArray[Any], ...]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


def bits_of(values: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def errors(codec: Codec, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    difference: NDArray[np.float32] = np.abs(codec.decode(codec.encode(rows)) - rows)
    return difference


def mean_error(codec: Codec, rows: NDArray[np.float32]) -> float:
    return float(errors(codec, rows).mean(dtype=np.float64))


# Values that meet the ends and the middles of the formats' steps, and others that all codecs take.
awkward = st.one_of(
    st.floats(-3e4, 3e4, width=32),
    st.integers(-64, 64).map(lambda i: i / 16),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-38, 3e-8, 6e-8, 1e-4, 5.96e-8, -3e4, 3e4]),
)
awkward_rows = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.just(WIDTH)), elements=awkward, fill=awkward
)


class TestNames:
    @pytest.mark.parametrize("codec", [*ALL, *AFFINE], ids=str)
    def test_no_name_is_lost_between_text_and_value(self, codec: Codec) -> None:
        assert parse(str(codec)) == codec
        assert parse(codec.label) == codec
        assert hash(parse(str(codec))) == hash(codec)

    @pytest.mark.parametrize(
        ("text", "canonical", "label"),
        [
            ("raw", "raw", "raw"),
            ("fp16", "fp16", "fp16"),
            ("turbo3", "turbo3", "turbo3"),
            ("mlx4g32", "mlx_affine(4,32,f16)", "mlx4g32"),
            ("mlx_affine(4, 32, f16)", "mlx_affine(4,32,f16)", "mlx4g32"),
            ("mlx_affine(8,64,bf16)", "mlx_affine(8,64,bf16)", "mlx_affine(8,64,bf16)"),
            ("bf16_rope_fp8_body(64)", "bf16_rope_fp8_body(64)", "bf16_rope_fp8_body(64)"),
        ],
    )
    def test_one_codec_never_has_two_canonical_names(
        self, text: str, canonical: str, label: str
    ) -> None:
        assert str(parse(text)) == canonical
        assert parse(text).label == label

    def test_no_two_codecs_share_a_name(self) -> None:
        names = {str(codec) for codec in {*ALL, *AFFINE}}
        assert len(names) == len({*ALL, *AFFINE})

    @pytest.mark.parametrize(
        "text",
        [
            *("", "RAW", "turbo", "turbo5", "int8()", "raw(1)", " raw", "raw\n"),
            *("bf16_rope_fp8_body", "bf16_rope_fp8_body(-1)", "bf16_rope_fp8_body(٣)"),
            *("mlx_affine", "mlx_affine(4,32)"),
            "mlx_affine(4,32,f16",
            "mlx_affine(4,32,f16,1)",
            "mlx_affine(four,32,f16)",
            "x" * 10_000,
        ],
    )
    def test_an_unknown_name_is_not_refused_without_the_choices(self, text: str) -> None:
        with pytest.raises(ValueError, match="unknown codec") as refusal:
            parse(text)
        assert all(choice in str(refusal.value) for choice in CHOICES)
        assert len(str(refusal.value)) < 400

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("mlx_affine(7,32,f16)", "bits is one of 1, 2, 3, 4, 5, 6, 8, not 7"),
            ("mlx_affine(4,16,f16)", "group is one of 32, 64, 128, not 16"),
            ("mlx_affine(4,32,f64)", "scale type is one of f16, bf16, f32, not f64"),
            ("bf16_rope_fp8_body(0)", "positive rope, not 0"),
        ],
    )
    def test_a_parameter_out_of_range_is_not_refused_namelessly(
        self, text: str, complaint: str
    ) -> None:
        with pytest.raises(ValueError, match=complaint):
            parse(text)

    def test_turbo_takes_no_other_number_of_bits(self) -> None:
        with pytest.raises(ValueError, match="not 5"):
            Turbo(5)

    def test_nothing_but_raw_calls_itself_lossless(self) -> None:
        assert [codec for codec in ALL if codec.lossless] == [Raw()]


class TestLayouts:
    @pytest.mark.parametrize(
        ("name", "arrays"),
        [
            ("raw", [("", "BF16", (8, 128))]),
            ("fp16", [("", "F16", (8, 128))]),
            (
                "int8",
                [(".codes", "I8", (8, 128)), (".scales", "F32", (1,)), (".biases", "F32", (1,))],
            ),
            ("fp8", [(".codes", "U8", (4 + 32 * 34,))]),
            ("turbo4", [(".codes", "U8", (4 + 32 * 18,))]),
            ("turbo3", [(".codes", "U8", (4 + 32 * 14,))]),
            ("turbo2", [(".codes", "U8", (4 + 32 * 10,))]),
            ("bf16_rope_fp8_body(64)", [(".codes", "U8", (2 * 64 + 30 * 34,))]),
            (
                "mlx4g32",
                [
                    (".codes", "U32", (8, 16)),
                    (".scales", "F16", (8, 4)),
                    (".biases", "F16", (8, 4)),
                ],
            ),
            (
                "mlx_affine(3,64,f32)",
                [
                    (".codes", "U32", (8, 12)),
                    (".scales", "F32", (8, 2)),
                    (".biases", "F32", (8, 2)),
                ],
            ),
        ],
    )
    def test_no_array_lies_elsewhere_than_documented(
        self, name: str, arrays: list[tuple[str, str, tuple[int, ...]]]
    ) -> None:
        assert [tuple(array) for array in parse(name).arrays(8, 128, "BF16")] == arrays

    @pytest.mark.parametrize(
        ("name", "row_bytes"),
        [
            *(("raw", 4096), ("fp16", 2048), ("int8", 1032), ("fp8", 1092), ("turbo4", 580)),
            *(("turbo3", 452), ("turbo2", 324), ("mlx4g32", 640)),
            ("bf16_rope_fp8_body(32)", 64 + 31 * 34),
        ],
    )
    def test_no_row_takes_more_bytes_than_documented(self, name: str, row_bytes: int) -> None:
        assert parse(name).row_bytes(8, 128, "F32") == row_bytes

    @pytest.mark.parametrize(
        ("name", "heads", "head_dim", "complaint"),
        [
            ("turbo4", 1, 100, "turbo4 cannot take kv_dim 100"),
            ("turbo2", 3, 24, "turbo2 cannot take kv_dim 72"),
            ("fp8", 1, 0, "fp8 cannot take kv_dim 0"),
            ("int8", 1, 0, "int8 cannot take head_dim 0"),
            ("mlx4g32", 2, 80, r"mlx4g32 cannot take head_dim 80 \(kv_dim 160\)"),
            ("mlx_affine(8,64,f16)", 2, 96, r"mlx_affine\(8,64,f16\) cannot take head_dim 96"),
            (
                "bf16_rope_fp8_body(64)",
                1,
                64,
                "cannot take kv_dim 64: it must be 64 \\+ a positive multiple of 32",
            ),
            ("bf16_rope_fp8_body(64)", 1, 100, "cannot take kv_dim 100"),
            ("bf16_rope_fp8_body(64)", 1, 32, "cannot take kv_dim 32"),
            ("raw", 0, 64, "raw cannot take 0 heads"),
            ("fp16", 1, -1, "fp16 cannot take 1 heads of -1"),
        ],
    )
    def test_a_dimension_that_does_not_fit_is_not_taken(
        self, name: str, heads: int, head_dim: int, complaint: str
    ) -> None:
        for refuse in (
            lambda: parse(name).check(heads, head_dim),
            lambda: parse(name).arrays(heads, head_dim, "F32"),
            lambda: parse(name).row_bytes(heads, head_dim, "F32"),
        ):
            with pytest.raises(ValueError, match=complaint):
                refuse()

    def test_blocks_across_heads_are_not_refused(self) -> None:
        Turbo(4).check(2, 80)
        Fp8().check(4, 8)

    def test_a_side_without_values_is_not_refused_by_the_plain_codecs(self) -> None:
        empty = np.empty((5, 0), np.float32)
        for codec in (Raw(), Fp16()):
            assert codec.decode(codec.encode(empty)).shape == (5, 0)

    def test_rows_of_an_unknown_type_are_not_taken(self) -> None:
        for codec in ALL:
            with pytest.raises(ValueError, match="F32, F16, BF16"):
                codec.encode(np.zeros((1, WIDTH)))
            with pytest.raises(ValueError, match="F32, F16, BF16"):
                codec.arrays(1, WIDTH, "F64")
        assert [row_type(np.dtype(t)) for t in ("f4", "f2", BF16)] == ["F32", "F16", "BF16"]

    def test_the_package_does_not_bring_in_a_transport_or_a_framework(self) -> None:
        script = (
            "import sys, pion_wire.codecs, pion_wire.codecs.measure;"
            "print(sorted({'grpc', 'google', 'mlx'} & {name.split('.')[0] for name in sys.modules}))"
        )
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )
        assert result.stdout.strip() == "[]"


class TestBytes:
    # One token of 32 values, x_i = (i - 15.5)/8 but x_3 = 2.0 and x_20 = -0.3.
    PUBLISHED = (
        ("turbo4", ("2ea73042 9234 819292af73a3b4b4c5c5d6d6d6e7e7f8",)),
        ("turbo3", ("02004042 5539 492e49db369224cbb6b6edff",)),
        ("turbo2", ("731c4742 5539 c0545555aaa9eaff",)),
        (
            "fp8",
            ("7ade3542 4420 f7f6f577f3f2f1f0eeeceae8e5e1dbcf4f5b6165e16a6c6e7071727374757677",),
        ),
        ("mlx4g32", ("00f12233445566778899a6bacbdcedfe", "3334", "c0bf")),
    )

    @pytest.mark.parametrize(("name", "arrays"), PUBLISHED, ids=[name for name, _ in PUBLISHED])
    def test_no_published_byte_differs(self, name: str, arrays: tuple[str, ...]) -> None:
        row = ((np.arange(32) - 15.5) / 8).astype(np.float32)
        row[3], row[20] = 2.0, -0.3
        expected = [bytes.fromhex(text) for text in arrays]
        assert stored_bytes(parse(name).encode(row[np.newaxis])) == expected
        assert list(encode_row(parse(name), list(row))) == expected

    @pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda v: f"{v['codec']}-{v['row']}")
    def test_no_client_could_read_other_bytes(self, vector: dict[str, Any]) -> None:
        codec = parse(vector["codec"])
        assert str(codec) == vector["codec"]
        row = np.frombuffer(bytes.fromhex(VECTORS["rows"][vector["row"]]), "<f4")
        stored = [bytes.fromhex(array["hex"]) for array in vector["arrays"]]
        layouts = codec.arrays(1, row.size, "F32")
        assert [(a["suffix"], a["dtype"]) for a in vector["arrays"]] == [a[:2] for a in layouts]
        assert stored_bytes(codec.encode(row[np.newaxis])) == stored
        assert list(encode_row(codec, list(row))) == stored
        arrays = [
            np.frombuffer(data, layout.numpy)[np.newaxis]
            for data, layout in zip(stored, layouts, strict=True)
        ]
        decoded = bytes.fromhex(vector["decoded"])
        assert codec.decode(arrays).tobytes() == decoded
        assert np.array(decode_row(codec, stored), "<f4").tobytes() == decoded

    @every_codec
    @given(rows=awkward_rows)
    @settings(deadline=None, max_examples=25)
    def test_no_row_differs_from_the_plain_twin(
        self, codec: Codec, rows: NDArray[np.float32]
    ) -> None:
        stored = codec.encode(rows)
        decoded = codec.decode(stored)
        for i, row in enumerate(rows):
            expected = encode_row(codec, list(row))
            assert [array[i].tobytes() for array in stored] == list(expected)
            assert decoded[i].tobytes() == np.array(decode_row(codec, expected), "<f4").tobytes()

    @pytest.mark.parametrize("codec", AFFINE, ids=str)
    def test_no_parameters_differ_from_the_plain_twin(self, codec: Codec) -> None:
        rows = normal(2)
        stored = codec.encode(rows)
        for i, row in enumerate(rows):
            assert [array[i].tobytes() for array in stored] == list(encode_row(codec, list(row)))

    @pytest.mark.parametrize(
        ("name", "ends", "values", "expected"),
        [
            ("turbo4", (-7, 7), (0.5, 1.5, 2.5, -0.5, -2.5), (1, 2, 3, -1, -3)),
            ("turbo3", (-3, 3), (0.5, 1.5, 2.5, -0.5, -2.5), (1, 2, 3, -1, -3)),
            ("turbo2", (-1.5, 1.5), (0, 1, -1), (0.5, 1.5, -0.5)),
            ("mlx4g32", (0, 15), (0.5, 1.5, 2.5, 0.49), (1, 2, 3, 0)),
            ("int8", (0, 254), (0.99, 1.5, 2.5), (0, 1, 2)),
        ],
    )
    def test_a_value_between_two_steps_never_goes_to_the_wrong_one(
        self,
        name: str,
        ends: tuple[float, ...],
        values: tuple[float, ...],
        expected: tuple[float, ...],
    ) -> None:
        row = np.full((1, 32), ends[0], np.float32)  # the ends make the step 1
        row[0, -1] = ends[1]
        row[0, 1 : 1 + len(values)] = values
        decoded = parse(name).decode(parse(name).encode(row))
        assert decoded[0, 1 : 1 + len(values)].tolist() == list(expected)

    def test_no_8_bit_float_is_rounded_but_to_nearest_even(self) -> None:
        # Every code up to the peak, and every middle between two, in blocks whose scale is 1.
        codes = np.arange(0x78, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        values = np.concatenate((codes, (codes[1:] + codes[:-1]) / 2))
        values = np.concatenate((values, -values))
        blocks = np.full((-(-len(values) // 31), 32), 240, np.float32)
        blocks[:, 1:].flat[: len(values)] = values
        stored = Fp8().encode(blocks)[0]
        assert [row.tobytes() for row in stored] == [
            encode_row(Fp8(), list(block))[0] for block in blocks
        ]

    @pytest.mark.parametrize("bits", range(1, 9))
    def test_no_bit_of_a_stream_is_lost(self, bits: int) -> None:
        codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 5, 16), dtype=np.uint8)
        packed = pack(codes, bits)
        assert packed.shape == (3, 5, 2 * bits)
        whole = int.from_bytes(packed[1, 2].tobytes(), "little")
        assert [whole >> bits * i & (1 << bits) - 1 for i in range(16)] == codes[1, 2].tolist()
        np.testing.assert_array_equal(unpack(packed, bits), codes)


class TestEveryCodec:
    @every_codec
    @given(rows=awkward_rows, data=st.data())
    @settings(deadline=None, max_examples=25)
    def test_a_row_never_depends_on_the_rows_beside_it(
        self, codec: Codec, rows: NDArray[np.float32], data: st.DataObject
    ) -> None:
        first = data.draw(st.integers(0, len(rows)))
        together = codec.encode(rows)
        apart = zip(codec.encode(rows[:first]), codec.encode(rows[first:]), strict=True)
        assert stored_bytes(together) == [a.tobytes() + b.tobytes() for a, b in apart]
        again = codec.decode([array[first:] for array in together])
        assert again.tobytes() == codec.decode(together)[first:].tobytes()

    @every_codec
    def test_many_rows_are_not_stored_otherwise_than_one(self, codec: Codec) -> None:
        rows = normal(700)  # more than are worked on at a time
        rows[300] = 0
        whole = codec.encode(rows)
        decoded = codec.decode(whole)
        for i in (0, 255, 256, 300, 699):
            one = codec.encode(rows[i : i + 1])
            assert stored_bytes(one) == [array[i].tobytes() for array in whole]
            assert codec.decode(one).tobytes() == decoded[i].tobytes()

    @every_codec
    def test_no_array_differs_from_its_layout(self, codec: Codec) -> None:
        rows = normal(3)
        for array, layout in zip(codec.encode(rows), codec.arrays(1, WIDTH, "F32"), strict=True):
            assert array.dtype == layout.numpy
            assert array.shape == (3, layout.row_items)
            assert array.flags.c_contiguous
            assert array[0].nbytes == layout.row_bytes
        assert sum(a[0].nbytes for a in codec.encode(rows)) == codec.row_bytes(1, WIDTH, "F32")

    @every_codec
    def test_the_number_of_heads_never_changes_a_byte(self, codec: Codec) -> None:
        rows = normal(3, 4 * WIDTH)
        stored = codec.encode(rows)
        layouts = codec.arrays(4, WIDTH, "F32")
        shaped = [
            array.reshape(3, *layout.row_shape)
            for array, layout in zip(stored, layouts, strict=True)
        ]
        assert codec.decode(shaped).tobytes() == codec.decode(stored).tobytes()

    @every_codec
    @pytest.mark.parametrize("dtype", [np.dtype("f2"), BF16], ids=str)
    def test_16_bit_rows_are_not_stored_otherwise_than_widened(
        self, codec: Codec, dtype: np.dtype[Any]
    ) -> None:
        rows = normal(3).astype(dtype)
        decoded = codec.decode(codec.encode(rows))
        assert decoded.dtype == np.float32
        assert decoded.tobytes() == codec.decode(codec.encode(rows.astype(np.float32))).tobytes()

    @every_codec
    def test_the_rows_given_are_not_written_to(self, codec: Codec) -> None:
        rows = normal(3)
        before = rows.tobytes()
        codec.decode(codec.encode(rows))
        assert rows.tobytes() == before
        rows.flags.writeable = False
        for array in (stored := codec.encode(rows)):
            array.flags.writeable = False
        codec.decode(stored)

    @every_codec
    def test_rows_that_do_not_lie_together_are_not_misread(self, codec: Codec) -> None:
        rows = normal(6, 2 * WIDTH)
        expected = stored_bytes(codec.encode(np.ascontiguousarray(rows[::2, ::2])))
        assert stored_bytes(codec.encode(rows[::2, ::2])) == expected
        turned = np.asfortranarray(rows[::2, ::2])
        assert stored_bytes(codec.encode(turned)) == expected
        stored = codec.encode(rows[:, :WIDTH])
        assert (
            codec.decode([array[::2] for array in stored]).tobytes()
            == codec.decode(stored)[::2].tobytes()
        )

    @every_codec
    def test_no_rows_are_not_an_error(self, codec: Codec) -> None:
        stored = codec.encode(np.empty((0, WIDTH), np.float32))
        assert codec.decode(stored).shape == (0, WIDTH)

    @every_codec
    def test_a_given_buffer_is_not_ignored_and_a_wrong_one_not_used(self, codec: Codec) -> None:
        stored = codec.encode(normal(3))
        wide = np.full((3, 2 * WIDTH), 9, np.float32)
        out = wide[:, :WIDTH]  # rows apart in memory, as in a larger tensor
        assert codec.decode(stored, out) is out
        assert out.tobytes() == codec.decode(stored).tobytes()
        assert (wide[:, WIDTH:] == 9).all()
        for wrong in (np.empty((3, 1), np.float32), np.empty((3, WIDTH), np.float64)):
            with pytest.raises(ValueError, match="out is"):
                codec.decode(stored, wrong)  # type: ignore[arg-type]

    @every_codec
    def test_arrays_that_do_not_fit_are_not_decoded(self, codec: Codec) -> None:
        stored = codec.encode(normal(3))
        wrong: list[list[NDArray[Any]]] = [[], [*stored, stored[0]]]
        wrong += [
            [*stored[:i], stored[i].astype("c16"), *stored[i + 1 :]] for i in range(len(stored))
        ]
        if len(stored) > 1:
            wrong += [list(stored[:-1]), [stored[0][:2], *stored[1:]], list(stored[::-1])]
        if codec not in (Raw(), Fp16(), Int8()):  # these take rows of any width
            wrong += [[stored[0][:, :-1], *stored[1:]], [stored[0][:, :0], *stored[1:]]]
        for arrays in wrong:
            with pytest.raises(ValueError, match=r"not rows of|rows are"):
                codec.decode(arrays)

    @every_codec
    def test_rows_of_another_rank_are_not_taken(self, codec: Codec) -> None:
        with pytest.raises(ValueError, match="two dimensions"):
            codec.encode(np.zeros(WIDTH, np.float32))
        with pytest.raises(ValueError, match="two dimensions"):
            codec.encode(np.zeros((1, 1, WIDTH), np.float16))

    @every_codec
    @given(data=st.data())
    @settings(deadline=None, max_examples=25)
    def test_no_bytes_make_decoding_fail_or_warn(self, codec: Codec, data: st.DataObject) -> None:
        arrays = []
        for layout in codec.arrays(1, WIDTH, "F32"):
            size = 2 * layout.row_bytes
            stored = data.draw(st.binary(min_size=size, max_size=size))
            arrays.append(np.frombuffer(stored, layout.numpy).reshape(2, -1))
        assert codec.decode(arrays).shape == (2, WIDTH)

    @every_codec
    def test_zeros_never_become_anything_else(self, codec: Codec) -> None:
        zeros = np.zeros((2, WIDTH), np.float32)
        np.testing.assert_array_equal(codec.decode(codec.encode(zeros)), zeros)

    @every_codec
    def test_values_too_small_for_a_scale_do_not_become_large(self, codec: Codec) -> None:
        for size in (1e-45, 1e-40, 1e-38, 1e-30, 1e-12):
            rows = (uniform(2) * np.float32(size)).astype(np.float32)
            assert errors(codec, rows).max() <= max(2 * size, 1e-8)
            expected = [encode_row(codec, list(row)) for row in rows]
            assert stored_bytes(codec.encode(rows)) == [
                b"".join(a) for a in zip(*expected, strict=True)
            ]


class TestNotFinite:
    BAD = (np.nan, -np.nan, np.inf, -np.inf)

    @shared_scale
    @pytest.mark.parametrize("bad", BAD, ids=str)
    @pytest.mark.parametrize("column", [WIDTH - 1, 97, 40])
    def test_a_value_without_magnitude_never_spoils_its_neighbours(
        self, codec: Codec, bad: float, column: int
    ) -> None:
        rows = normal(400)
        rows[[333, 350], column] = bad
        with pytest.raises(ValueError, match="cannot take row 333: a value is not finite") as error:
            codec.encode(rows)
        assert str(error.value).startswith(codec.label)

    @shared_scale
    def test_a_row_of_one_infinity_is_not_taken_for_a_constant(self, codec: Codec) -> None:
        for bad in self.BAD:
            with pytest.raises(ValueError, match="row 0"):
                codec.encode(np.full((1, WIDTH), bad, np.float32))

    @shared_scale
    def test_a_value_too_large_for_the_scale_is_not_stored_as_something_else(
        self, codec: Codec
    ) -> None:
        rows = normal(2)
        rows[1, 40], rows[1, 41] = 3e38, -3e38  # their distance overflows float32 too
        with pytest.raises(ValueError, match="row 1"):
            codec.encode(rows)

    @pytest.mark.parametrize(
        ("name", "largest"),
        [
            *(("turbo4", 7 * 65504), ("turbo3", 3 * 65504), ("turbo2", 3 * 65504)),
            *(("fp8", 240 * 65504), ("mlx4g32", 65504)),
        ],
    )
    def test_the_largest_value_is_taken_and_not_much_beyond(self, name: str, largest: int) -> None:
        row = np.zeros((1, WIDTH), np.float32)
        row[0, 5] = -largest
        decoded = parse(name).decode(parse(name).encode(row))
        np.testing.assert_allclose(decoded[0, 5], -largest, rtol=1e-3)
        with pytest.raises(ValueError, match="too large"):
            parse(name).encode(row * np.float32(1.001))

    def test_infinities_and_nans_pass_where_values_stand_alone(self) -> None:
        row = normal(1)
        row[0, :4] = self.BAD
        for codec in (Raw(), Fp16(), Bf16RopeFp8Body(32)):
            decoded = codec.decode(codec.encode(row))
            np.testing.assert_array_equal(decoded[0, :4], row[0, :4])
            assert np.isfinite(decoded[0, 4:]).all()

    def test_16_bits_do_not_wrap_around_when_too_small(self) -> None:
        row = np.full((1, WIDTH), 65519.996, np.float32)
        row[0, 0], row[0, 1] = 65520, -1e30
        decoded = Fp16().decode(Fp16().encode(row))
        assert decoded[0, :3].tolist() == [np.inf, -np.inf, 65504]
        row[0, 0] = np.finfo(np.float32).max
        assert Bf16RopeFp8Body(32).decode(Bf16RopeFp8Body(32).encode(row))[0, 0] == np.inf


class TestPlain:
    PATTERNS = np.arange(65536, dtype=np.uint16).reshape(-1, WIDTH)

    @pytest.mark.parametrize("dtype", [np.dtype("f2"), BF16], ids=str)
    def test_raw_never_changes_a_16_bit_pattern(self, dtype: np.dtype[Any]) -> None:
        rows = self.PATTERNS.view(dtype)
        (stored,) = Raw().encode(rows)
        assert stored is rows
        np.testing.assert_array_equal(bits_of(stored), self.PATTERNS)
        decoded = Raw().decode((stored,))
        if dtype == BF16:
            np.testing.assert_array_equal(bits_of(decoded) >> 16, self.PATTERNS)
        else:
            np.testing.assert_array_equal(decoded, rows.astype(np.float32))

    def test_raw_never_changes_a_32_bit_pattern(self) -> None:
        patterns = np.random.default_rng(0).integers(0, 1 << 32, (64, WIDTH), dtype=np.uint32)
        patterns[0, :4] = 0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0x80000000
        rows = patterns.view(np.float32)
        np.testing.assert_array_equal(bits_of(Raw().encode(rows)[0]), patterns)
        np.testing.assert_array_equal(bits_of(Raw().decode(Raw().encode(rows))), patterns)

    def test_fp16_never_changes_a_pattern_of_f16(self) -> None:
        rows = self.PATTERNS.view(np.float16)
        (stored,) = Fp16().encode(rows)
        assert stored is rows
        np.testing.assert_array_equal(bits_of(stored), self.PATTERNS)
        np.testing.assert_array_equal(Fp16().decode((stored,)), rows.astype(np.float32))

    def test_fp16_is_not_rounded_but_to_nearest_even(self) -> None:
        # Every finite f16 and the middle between it and the next, exactly and to both sides.
        low = np.arange(0x7BFF, dtype=np.uint16)
        below = low.view(np.float16).astype(np.float64)
        middle = (below + (low + 1).view(np.float16).astype(np.float64)) / 2
        for nudge, expected in ((1 - 2**-23, low), (1, low + (low & 1)), (1 + 2**-23, low + 1)):
            rows = (middle * nudge).astype(np.float32)[np.newaxis]
            np.testing.assert_array_equal(bits_of(Fp16().encode(rows)[0])[0], expected)

    def test_the_rope_keeps_every_finite_pattern_of_bf16(self) -> None:
        patterns = self.PATTERNS[~np.isnan(self.PATTERNS.view(BF16).astype(np.float32)).any(axis=1)]
        rows = np.zeros((len(patterns), WIDTH + 32), BF16)
        rows[:, :WIDTH] = patterns.view(BF16)
        codec = Bf16RopeFp8Body(WIDTH)
        np.testing.assert_array_equal(codec.encode(rows)[0][:, : 2 * WIDTH].view("u2"), patterns)
        np.testing.assert_array_equal(
            bits_of(codec.decode(codec.encode(rows))[:, :WIDTH]) >> 16, patterns
        )


class TestAccuracy:
    @pytest.mark.parametrize(
        ("name", "cosine_min", "error_max"),
        [
            ("fp16", 0.999999, 2**-12),
            ("int8", 0.99, 0.05),
            ("fp8", 0.99, 0.04),
            ("turbo4", 0.95, 0.35),
            ("turbo3", 0.95, 0.75),
            ("turbo2", 0.90, 0.75),
            ("mlx4g32", 0.95, 0.35),
        ],
    )
    def test_no_format_is_further_off_than_it_may_be(
        self, name: str, cosine_min: float, error_max: float
    ) -> None:
        rows = uniform(256, 1024)
        decoded = parse(name).decode(parse(name).encode(rows))
        assert cosine(rows, decoded) > cosine_min
        assert np.abs(rows - decoded).max() <= error_max

    def test_a_value_is_never_further_off_than_its_step(self) -> None:
        rows = uniform(64)
        blocks = rows.reshape(64, -1, 32)
        peak = np.abs(blocks).max(axis=2, keepdims=True)
        extent = np.ptp(blocks, axis=2, keepdims=True)
        # Half a step, and what rounding the scale to f16 adds at the far end.
        for codec, bound in (
            (Turbo(4), peak / 14),
            (Turbo(3), peak / 6),
            (Turbo(2), peak / 3),
            (MLX4G32, extent / 30),
        ):
            off = errors(codec, rows).reshape(blocks.shape)
            assert (off <= bound + 2**-10 * peak).all(), str(codec)
        # int8 cuts off: a whole step.
        step = np.ptp(rows, axis=1, keepdims=True) / 254
        assert (errors(Int8(), rows) <= step * 1.0001).all()

    def test_the_rope_is_not_as_coarse_as_the_body(self) -> None:
        rows = normal(64, 576)
        codec = Bf16RopeFp8Body(64)
        decoded = codec.decode(codec.encode(rows))
        assert cosine(rows[:, :64], decoded[:, :64]) > 0.999
        assert cosine(rows[:, 64:], decoded[:, 64:]) > 0.99
        assert np.abs(rows[:, :64] - decoded[:, :64]).max() < np.abs(rows - decoded).max()
        np.testing.assert_array_equal(
            decoded[:, :64], rows[:, :64].astype(ml_dtypes.bfloat16).astype(np.float32)
        )

    def test_mlx4g32_is_not_as_coarse_as_turbo4(self) -> None:
        rows = normal(512, 1024)
        error = {name: mean_error(parse(name), rows) for name in ("int8", "turbo4", "mlx4g32")}
        assert error["mlx4g32"] <= 0.040
        assert error["mlx4g32"] <= 0.82 * error["turbo4"]
        assert error["int8"] < error["mlx4g32"]

    def test_no_format_is_secretly_another(self) -> None:
        rows = normal(64, 1024)
        names = ("raw", "fp16", "int8", "fp8", "turbo4", "turbo3", "turbo2", "mlx4g32")
        errors_of = [mean_error(parse(name), rows) for name in names]
        assert len(set(errors_of)) == len(names)

    def test_turbo2_does_not_double_its_values(self) -> None:
        rows = uniform(64)
        decoded = Turbo(2).decode(Turbo(2).encode(rows))
        assert np.abs(decoded).max() <= np.abs(rows).max() * 1.001
        assert 0.8 < float((decoded * rows).sum() / (rows * rows).sum()) < 1.25

    def test_appending_an_outlier_never_harms_earlier_rows_of_int8(self) -> None:
        rows = normal(4)
        rows[3] *= 1000
        alone = Int8().decode(Int8().encode(rows[:3]))
        assert Int8().decode(Int8().encode(rows))[:3].tobytes() == alone.tobytes()


class TestMlx:
    """Arrays go to mlx and come from it without being decoded in between."""

    @staticmethod
    def to_mlx(array: NDArray[Any]) -> mx.array:
        if array.dtype == BF16:
            return mx.array(array.view(np.uint16)).view(mx.bfloat16)
        return mx.array(array)

    @staticmethod
    def to_numpy(array: mx.array) -> NDArray[Any]:
        if array.dtype == mx.bfloat16:
            return np.array(array.view(mx.uint16)).view(BF16)
        return np.array(array)

    def dequantize(self, codec: MlxAffine, arrays: tuple[NDArray[Any], ...]) -> NDArray[Any]:
        codes, scales, biases = map(self.to_mlx, arrays)
        return self.to_numpy(
            mx.dequantize(codes, scales, biases, group_size=codec.group, bits=codec.bits)
        )

    @pytest.mark.parametrize("codec", AFFINE, ids=str)
    def test_mlx_never_reads_other_values(self, codec: MlxAffine) -> None:
        rows = normal(4)
        rows[1, :32] = 0.1
        codes, scales, biases = codec.encode(rows)
        exact = (codes, scales.astype(np.float32), biases.astype(np.float32))
        ours = codec.decode((codes, scales, biases))
        if codec.scale_type == "f32":  # mlx may fuse the product and the sum
            np.testing.assert_allclose(self.dequantize(codec, exact), ours, rtol=0, atol=1e-6)
        else:  # products of so few bits are exact: fused or not, it is one rounding
            np.testing.assert_array_equal(self.dequantize(codec, exact), ours)
        # In the scales' own type mlx rounds the result too, and perhaps on the way.
        own = self.dequantize(codec, (codes, scales, biases)).astype(np.float32)
        ulp = {"f16": 2**-10, "bf16": 2**-7, "f32": 2**-22}[codec.scale_type]
        np.testing.assert_allclose(own, ours, rtol=0, atol=2 * ulp * np.abs(rows).max())

    @pytest.mark.parametrize("codec", AFFINE, ids=str)
    def test_what_mlx_quantised_is_not_misread(self, codec: MlxAffine) -> None:
        dtype = {"f16": mx.float16, "bf16": mx.bfloat16, "f32": mx.float32}[codec.scale_type]
        rows = mx.array(normal(6)).astype(dtype).reshape(3, 2, WIDTH)
        quantised = mx.quantize(rows, group_size=codec.group, bits=codec.bits)
        arrays = [self.to_numpy(array) for array in quantised]
        for array, layout in zip(arrays, codec.arrays(2, WIDTH, "BF16"), strict=True):
            assert array.dtype == layout.numpy
            assert array.shape == (3, *layout.row_shape)
        wide = [array.astype(np.float32) for array in arrays[1:]]
        expected = self.dequantize(codec, (arrays[0], *wide)).reshape(3, -1)
        ours = codec.decode(arrays)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)

    def test_a_constant_group_never_divides_by_its_range(self) -> None:
        for value in (0.0, 1.0, -2.5, 1000.0, 6e-8):
            rows = np.full((2, WIDTH), value, np.float16).astype(np.float32)
            stored = MLX4G32.encode(rows)
            np.testing.assert_array_equal(MLX4G32.decode(stored), rows)
            assert not stored[0].any()
            np.testing.assert_array_equal(self.dequantize(MLX4G32, stored).astype(np.float32), rows)


class TestMeasure:
    def test_no_codec_goes_unmeasured_and_nothing_is_printed(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        table = measure(rows=8, heads=2, head_dim=64)
        assert [rate.codec for rate in table] == [str(parse(name)) for name in NAMES]
        families = {parse(name).name for name in NAMES} | {"raw"}
        assert families == {codec.name for codec in ALL}
        assert all(rate.encode_gb_s > 0 and rate.decode_gb_s > 0 for rate in table)
        assert table[0].stored_bits == 16
        assert capsys.readouterr() == ("", "")

    def test_no_other_codec_is_measured_than_asked(self) -> None:
        codecs = [MlxAffine(8, 64, "bf16"), Int8()]
        assert [rate.codec for rate in measure(codecs, rows=2)] == [str(c) for c in codecs]
