"""`KV.PREFIX.*`: a hit is what was registered, and every refusal changes nothing."""

import random
import struct
from collections.abc import Callable

import numpy as np
import pytest

from tests.resp.conftest import Resp
from tests.resp.wire import Refused, Wire, fields

FORMATS = "int8|turbo4|turbo3|turbo2|fp16|fp8|mlx4g32"


def hashes(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def info(wire: Wire) -> dict[str, int]:
    return {name: int(value) for name, value in fields(wire("KV.PREFIX.INFO")).items()}


def test_a_registered_prefix_is_a_hit_before_it_has_rows(wire: Wire) -> None:
    assert wire("KV.PREFIX.LOOKUP", "empty") == "MISS"
    assert wire("KV.PREFIX.REGISTER", "empty", 64, "FP16") == "OK"
    assert wire("KV.PREFIX.LOOKUP", "empty") == "HIT"
    assert wire("KV.PREFIX.OWNER", "empty") == "0"
    assert wire("KV.PREFIX.DROP", "empty", "empty", "nobody") == 1
    assert wire("KV.PREFIX.LOOKUP", "empty") == "MISS"
    assert wire("KV.PREFIX.OWNER", "empty") == "-1"


def test_half_a_prefix_is_a_miss(wire: Wire) -> None:
    wire("V.CREATE", "half_pk", 64, "VQUANT", "fp16")
    assert wire("KV.PREFIX.LOOKUP", "half") == "MISS"
    wire("V.CREATE", "half_pv", 64, "VQUANT", "int8")
    assert wire("KV.PREFIX.LOOKUP", "half") == "HIT"


@pytest.mark.parametrize("save", [False, True])
def test_a_prefix_whose_store_broke_off_is_a_miss_until_it_is_stored_again(
    wire: Wire, save: bool
) -> None:
    name = f"broken off {save}"
    rows = np.arange(128, dtype=np.float16).tobytes()
    wire("KV.PREFIX.REGISTER", name, 64, "fp16")
    answers = []
    for layer, side, count in [
        (0, "pk", 2), (0, "pv", 1), (0, "pv", 2), (1, "pk", 2), (1, "pv", 2), (0, "pk", 2),
    ]:  # fmt: skip
        wire("V.STOREBATCH", f"{name}_{side}", layer, 0, count, rows[: 128 * count], "FMT", "F16")
        if save:
            assert wire("KV.PREFIX.SAVE") == "OK"
        answers.append(wire("KV.PREFIX.LOOKUP", name))
    assert answers == ["HIT", "MISS", "HIT", "MISS", "HIT", "HIT"]
    assert wire("V.FETCH", f"{name}_pv", 1, "RANGE", 0, 2, "FMT", "NATIVE") == rows


def test_a_session_without_sides_is_no_prefix(wire: Wire) -> None:
    wire("V.CREATE", "bare", 64)
    assert wire("KV.PREFIX.LOOKUP", "bare") == "MISS"
    assert wire("V.INFO", "bare_pv") is None


def test_registering_again_keeps_format_and_rows(wire: Wire) -> None:
    wire("KV.PREFIX.REGISTER", "again", 64, "fp16")
    rows = np.arange(128, dtype=np.float16).tobytes()
    wire("V.STOREBATCH", "again_pk", 0, 0, 2, rows, "FMT", "F16")
    assert wire("KV.PREFIX.REGISTER", "again", 32, "int8") == "OK"
    assert wire("V.FETCH", "again_pk", 0, "RANGE", 0, 2, "FMT", "NATIVE") == rows
    assert fields(wire("V.INFO", "again_pk"))["v_format"] == "fp16"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("ns", "0", "fp16"), "ERR kv_dim out of range"),
        (("ns", "8193", "fp16"), "ERR kv_dim out of range"),
        (("ns", "64x", "fp16"), "ERR kv_dim out of range"),
        (("", "64", "fp16"), "ERR ns_key length must be 1..200"),
        (("n" * 201, "64", "fp16"), "ERR ns_key length must be 1..200"),
        (
            ("ns", "64", "int4"),
            f"ERR KV.PREFIX.REGISTER: unknown vquant 'int4' (want {FORMATS})",
        ),
        (
            ("ns", "64", "fp16", "BLOCKS", "0", "0", ""),
            "ERR BLOCKS block_size out of range (1..8192)",
        ),
        (
            ("ns", "64", "fp16", "BLOCKS", "1", "1048577", ""),
            "ERR BLOCKS hash_count out of range (0..1048576)",
        ),
        (("ns", "64", "fp16", "BLOCKS", "1", "1", "short"), "ERR BLOCKS hash_blob length mismatch"),
        (
            ("ns", "64", "fp16", "BLOCKS", "1"),
            "ERR BLOCKS requires: block_size hash_count hash_blob",
        ),
        (("ns", "64", "fp16", "PREFILL_MS", "-5"), "ERR PREFILL_MS out of range (0..86400000)"),
        (
            ("ns", "64", "fp16", "PREFILL_MS", "86400001"),
            "ERR PREFILL_MS out of range (0..86400000)",
        ),
        (
            ("ns", "64", "fp16", "BLOCKS", "1", "0", "", "PREFILL_MS", "x"),
            "ERR PREFILL_MS out of range (0..86400000)",
        ),
    ],
)
def test_a_refused_registration_changes_nothing(
    wire: Wire, words: tuple[str, ...], refusal: str
) -> None:
    before = info(wire)
    assert wire("KV.PREFIX.REGISTER", *words) == Refused(refusal)
    assert info(wire) == before
    assert wire("KV.PREFIX.LOOKUP", "ns") == "MISS"


def test_names_that_cannot_be_are_misses_and_not_errors(wire: Wire) -> None:
    for name in (b"", b"n" * 300, b"\xff\xfe", b"a\0b"):
        assert wire("KV.PREFIX.LOOKUP", name) == "MISS"
        assert wire("KV.PREFIX.DROP", name) == 0
    assert wire("KV.PREFIX.REGISTER", b"\xff\xfe", 64, "fp16") == Refused(
        "ERR ns_key must be UTF-8"
    )
    assert wire("KV.PREFIX.REGISTER", b"a\0b", 64, "fp16").text.startswith("ERR ")


def test_unknown_words_end_the_options_of_register(wire: Wire) -> None:
    assert wire("KV.PREFIX.REGISTER", "words", 64, "fp16", "WHATEVER", "BLOCKS", "0") == "OK"
    assert wire("KV.PREFIX.BLOCKS", "words") == "UNKNOWN"


def test_a_table_comes_back_and_answers_for_its_hashes(wire: Wire) -> None:
    assert wire("KV.PREFIX.BLOCKS", "table") == "UNKNOWN"
    table = hashes(5, 0, 2**64 - 1)
    wire("KV.PREFIX.REGISTER", "table", 64, "fp16", "BLOCKS", 64, 3, table, "PREFILL_MS", 5)
    assert wire("KV.PREFIX.BLOCKS", "table") == struct.pack("<II", 64, 3) + table
    probes = hashes(1, 5, 2**64 - 1, 7, 0, 5, 3, 4, 0)
    assert wire("KV.PREFIX.MEMBERSHIP", "table", 9, probes) == bytes([0b00110110, 0b1])
    assert wire("KV.PREFIX.MEMBERSHIP", "table", 0, "") == b""
    assert wire("KV.PREFIX.MEMBERSHIP", "nobody", 0, "") == "UNKNOWN"
    wire("KV.PREFIX.REGISTER", "table", 64, "fp16")
    assert wire("KV.PREFIX.BLOCKS", "table") == struct.pack("<II", 64, 3) + table
    wire("KV.PREFIX.REGISTER", "table", 64, "fp16", "BLOCKS", 8, 0, "")
    assert wire("KV.PREFIX.BLOCKS", "table") == "UNKNOWN"
    assert wire("KV.PREFIX.MEMBERSHIP", "table", 2, hashes(1)) == Refused(
        "ERR hash_blob length mismatch"
    )
    assert wire("KV.PREFIX.MEMBERSHIP", "table", 1048577, "") == Refused(
        "ERR hash_count out of range (0..1048576)"
    )


def test_the_largest_table_is_taken_and_given_back(wire: Wire) -> None:
    table = np.arange(1 << 20, dtype="<u8").tobytes()
    assert wire("KV.PREFIX.REGISTER", "huge", 8, "fp16", "BLOCKS", 1, 1 << 20, table) == "OK"
    assert wire("KV.PREFIX.BLOCKS", "huge")[8:] == table
    assert wire("KV.PREFIX.MEMBERSHIP", "huge", 1 << 20, table) == b"\xff" * (1 << 17)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("BOGUS", "1"), "ERR KV.PREFIX.LOOKUP unknown option (TOKENS, PREFILL_MS)"),
        (("TOKENS",), "ERR KV.PREFIX.LOOKUP option needs a value"),
        (("TOKENS", "-1"), "ERR TOKENS out of range (0..100000000)"),
        (("TOKENS", "100000001"), "ERR TOKENS out of range (0..100000000)"),
        (("TOKENS", "1", "PREFILL_MS", "86400001"), "ERR PREFILL_MS out of range (0..86400000)"),
    ],
)
def test_a_refused_lookup_is_not_counted(wire: Wire, words: tuple[str, ...], refusal: str) -> None:
    wire("KV.PREFIX.REGISTER", "counted", 8, "fp16")
    before = wire("PION.STATS")
    assert wire("KV.PREFIX.LOOKUP", "counted", *words) == Refused(refusal)
    after = wire("PION.STATS")
    assert after[4:] == before[4:]


def test_what_the_receipt_says_is_what_was_saved(start_resp: Callable[..., Resp]) -> None:
    wire = start_resp().connect()

    def stats() -> dict[str, object]:
        flat = wire("PION.STATS")
        return {flat[i].decode(): flat[i + 1] for i in range(0, 32, 2)}

    names = list(stats())
    assert names == [
        "worker_id", "uptime_in_seconds", "kvprefix_hits", "kvprefix_misses",
        "kvprefix_hits_measured", "kvprefix_tokens_served", "kvprefix_bytes_served",
        "kvprefix_prefill_us_saved", "kvprefix_prefill_us_measured", "prefill_seconds_avoided",
        "prefill_seconds_avoided_measured", "semantic_hits", "semantic_misses", "moe_hits",
        "moe_misses", "vector_queries",
    ]  # fmt: skip
    assert {value for name, value in stats().items() if name != "uptime_in_seconds"} == {
        0,
        b"0.000",
    }

    wire("KV.PREFIX.LOOKUP", "measured", "TOKENS", "999")  # a miss credits nothing
    wire("KV.PREFIX.REGISTER", "measured", 64, "fp16", "PREFILL_MS", 1_200)
    for _ in range(3):
        wire("KV.PREFIX.LOOKUP", "measured")
    now = stats()
    assert (now["kvprefix_hits"], now["kvprefix_misses"], now["kvprefix_hits_measured"]) == (
        3,
        1,
        3,
    )
    assert now["kvprefix_prefill_us_saved"] == now["kvprefix_prefill_us_measured"] == 3_600_000
    assert now["prefill_seconds_avoided"] == now["prefill_seconds_avoided_measured"] == b"3.600"
    assert fields(wire("INFO", "pion"))["prefill_seconds_avoided"] == "3.600"

    wire("KV.PREFIX.REGISTER", "estimated", 8, "fp16")
    wire("V.STOREBATCH", "estimated_pk", 0, 0, 100, bytes(3_200))
    wire("KV.PREFIX.LOOKUP", "estimated")
    now = stats()
    assert now["kvprefix_tokens_served"] == 100
    assert now["kvprefix_prefill_us_saved"] == 3_600_000 + 100 * 555
    assert now["kvprefix_prefill_us_measured"] == 3_600_000
    assert now["prefill_seconds_avoided"] == b"3.655"
    assert now["kvprefix_hits_measured"] == 3

    wire("V.FETCH", "estimated_pk", 0, "RANGE", 0, 100)
    wire("V.FETCH", "estimated_pk", "BATCH", 0, 50, "FMT", "NATIVE")
    assert stats()["kvprefix_bytes_served"] == 3_200 + 800

    assert wire("PION.STATS", "RESET") == "OK"
    wire("KV.PREFIX.LOOKUP", "measured", "TOKENS", 300)  # drops the registered time
    assert stats()["prefill_seconds_avoided"] == b"0.166"
    wire("KV.PREFIX.LOOKUP", "measured", "PREFILL_MS", 10, "TOKENS", 5, "TOKENS", 7)
    now = stats()
    assert now["kvprefix_tokens_served"] == 307
    assert now["kvprefix_prefill_us_measured"] == 10_000
    wire("HELLO", "3")
    assert list(wire("PION.STATS")) == names


def test_the_least_used_sides_go_and_no_others(start_resp: Callable[..., Resp]) -> None:
    wire = start_resp(sides_max=32).connect()
    row = bytes(64)
    for number in range(16):
        wire("KV.PREFIX.REGISTER", f"lru{number}", 16, "fp16")
        for side in ("pk", "pv"):
            wire("V.STOREBATCH", f"lru{number}_{side}", 0, 0, 1, row)
    for number in range(4):
        assert wire("KV.PREFIX.LOOKUP", f"lru{number}") == "HIT"
    for number in range(4, 8):
        for side in ("pk", "pv"):
            wire("V.FETCH", f"lru{number}_{side}", 0, "RANGE", 0, 1)
    for side in ("pk", "pv"):
        wire("V.INFO", f"lru8_{side}")  # looking is no use
    before = info(wire)["vstore_evictions"]
    for number in range(16, 20):
        wire("KV.PREFIX.REGISTER", f"lru{number}", 16, "fp16")
        assert wire("KV.PREFIX.LOOKUP", f"lru{number}") == "HIT"
    after = info(wire)
    assert after["vstore_evictions"] - before == 8
    assert after["vstore_sessions"] == after["vstore_max_sessions"] == 32
    answers = {n: wire("KV.PREFIX.LOOKUP", f"lru{n}") for n in range(20)}
    assert [n for n, answer in answers.items() if answer == "MISS"] == [8, 9, 10, 11]


def test_one_side_goes_without_the_other(start_resp: Callable[..., Resp]) -> None:
    wire = start_resp(sides_max=4).connect()
    rows = np.arange(32, dtype=np.float16).tobytes()
    for name in ("a", "b"):
        wire("KV.PREFIX.REGISTER", name, 16, "fp16")
        for side in ("pk", "pv"):
            wire("V.STOREBATCH", f"{name}_{side}", 0, 0, 2, rows, "FMT", "F16")
    assert wire("KV.PREFIX.SAVE") == "OK"
    for sid in ("a_pk", "b_pk", "b_pv"):
        wire("V.FETCH", sid, 0, 0)
    wire("V.CREATE", "c", 16)  # a_pv is what was not used for longest
    assert wire("V.INFO", "a_pv") is None
    assert wire("V.FETCH", "a_pv", 0, 0) == Refused("ERR session not found")
    assert wire("V.FETCH", "a_pk", 0, "RANGE", 0, 2, "FMT", "NATIVE") == rows
    assert wire("KV.PREFIX.LOOKUP", "a") == "MISS"
    wire("KV.PREFIX.DROP", "b", "c")
    wire("KV.PREFIX.REGISTER", "a", 16, "fp16")
    assert wire("KV.PREFIX.LOOKUP", "a") == "HIT"
    assert wire("V.FETCH", "a_pv", 0, "RANGE", 0, 2) is None, "rows of the side before came back"
    wire("V.STOREBATCH", "a_pv", 0, 1, 1, rows[:32], "FMT", "F16")
    assert wire("V.FETCH", "a_pv", 0, "RANGE", 0, 2, "FMT", "NATIVE") == bytes(32) + rows[:32]
    wire("KV.PREFIX.SAVE")
    assert wire("V.FETCH", "a_pv", 0, "RANGE", 0, 2, "FMT", "NATIVE") == bytes(32) + rows[:32]
    assert wire("V.FETCH", "a_pk", 0, "RANGE", 0, 2, "FMT", "NATIVE") == rows


def test_dropped_and_evicted_sessions_stay_gone(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp(sides_max=4)
    wire = resp.connect()
    for name in ("old", "kept", "new"):
        wire("KV.PREFIX.REGISTER", name, 16, "fp16")
        wire("V.STOREBATCH", f"{name}_pk", 0, 0, 1, bytes(64))
    wire("KV.PREFIX.DROP", "kept")
    resp.stop()
    wire = start_resp(sides_max=4).connect()
    answers = [wire("KV.PREFIX.LOOKUP", name) for name in ("old", "kept", "new")]
    assert answers == ["MISS", "MISS", "HIT"]


def test_a_session_of_its_own_name_is_no_prefix_and_never_two_sessions(
    start_resp: Callable[..., Resp],
) -> None:
    wire = start_resp().connect()
    number = wire("V.CREATE", "own", 64, "VQUANT", "fp16")
    wire("V.STOREBATCH", "own", 0, 0, 1, bytes(64 * 4))
    assert [info(wire)[name] for name in ("registered_prefixes", "total_prefix_tokens")] == [0, 0]
    assert info(wire)["vstore_sessions"] == 1
    for refused in (
        wire("V.CREATE", "own_pk", 128, "VQUANT", "fp16"),
        wire("V.CREATE", "own_pk", 64),
        wire("KV.PREFIX.REGISTER", "own", 64, "int8"),
    ):
        assert refused.text.startswith("ERR "), refused
        assert "one session" in refused.text
    assert wire("KV.PREFIX.LOOKUP", "own") == "MISS"
    assert wire("V.CREATE", "own", 128) == number, "the same name declares nothing anew"
    assert wire("KV.PREFIX.REGISTER", "own", 64, "fp16") == "OK"
    assert wire("V.CREATE", "own", 64, "VQUANT", "fp16") == number
    assert [info(wire)[name] for name in ("registered_prefixes", "total_prefix_tokens")] == [1, 1]
    assert wire("V.CREATE", "own", 64).text.startswith("ERR V.CREATE: ")


def test_counters_follow_what_is_stored(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    wire("KV.PREFIX.REGISTER", "a", 64, "fp16")
    assert info(wire)["wal_appended"] == 2
    for layer in range(2):
        for side in ("pk", "pv"):
            wire("V.STOREBATCH", f"a_{side}", layer, 0, 10, bytes(10 * 64 * 4))
    wire("V.STOREBATCH", "a_pk", 0, 5, 5, bytes(5 * 64 * 4))  # rows that were there: nothing more
    now = info(wire)
    assert now["vstore_bytes"] == 4 * 10 * 128
    assert now["registered_prefixes"] == 1
    assert now["total_prefix_tokens"] == 20
    assert now["vstore_sessions"] == now["directory_entries"] == 2
    assert now["wal_appended"] == 7
    assert now["wal_bytes"] == 4 * 10 * 128 + 5 * 128
    assert now["wal_replayed"] == 0
    assert now["directory_enabled"] == now["wal_enabled"] == 1
    resp.stop()

    wire = start_resp().connect()
    assert info(wire)["wal_replayed"] == 7
    assert wire("KV.PREFIX.SAVE") == "OK"
    now = info(wire)
    assert now["wal_appended"] == now["wal_bytes"] == 0
    assert now["vstore_bytes"] == 4 * 10 * 128
    snapshot = wire("V.SNAPSHOT", "a_pk")
    wire("V.STOREBATCH", "a_pk", 0, 10, 5, bytes(5 * 64 * 4))
    wire("V.RESTORE", "a_pk", snapshot)
    assert info(wire)["vstore_bytes"] == 4 * 10 * 128
    wire("KV.PREFIX.DROP", "a")
    now = info(wire)
    assert now["vstore_bytes"] == now["vstore_sessions"] == 0
    assert now["vstore_evictions"] == 2


def test_gaps_are_no_bytes_that_are_stored(start_resp: Callable[..., Resp]) -> None:
    wire = start_resp().connect()
    wire("KV.PREFIX.REGISTER", "gaps", 64, "fp16")
    draw, written, ends = random.Random(3), [set[int](), set[int]()], [0, 0]
    snapshot, then = 0, [0, 0]
    for turn in range(120):
        layer, first, count = draw.randrange(2), draw.randrange(300), draw.randrange(1, 40)
        rows = bytes(count * 128)
        assert wire("V.STOREBATCH", "gaps_pk", layer, first, count, rows, "FMT", "F16") == "OK"
        written[layer] |= set(range(first, first + count))
        ends[layer] = max(ends[layer], first + count)
        if turn % 20 == 5:
            snapshot, then = wire("V.SNAPSHOT", "gaps_pk"), list(ends)
        if turn % 20 == 15:
            wire("V.RESTORE", "gaps_pk", snapshot)
            ends = list(map(min, ends, then))
            written = [{r for r in w if r < end} for w, end in zip(written, ends, strict=True)]
        if turn == 60:
            wire("KV.PREFIX.SAVE")  # its segment has zeros where the gaps were
            written = [set(range(end)) for end in ends]
        if turn % 30 == 29:
            wire("V.RESTORE", "gaps_pk", snapshot)
            ends = list(map(min, ends, then))
            written = [{r for r in w if r < end} for w, end in zip(written, ends, strict=True)]
        assert info(wire)["vstore_bytes"] == 128 * sum(map(len, written)), turn
    assert info(wire)["total_prefix_tokens"] == sum(ends)


def test_names_must_begin_as_the_server_was_told(start_resp: Callable[..., Resp]) -> None:
    wire = start_resp(namespace_prefix="tenant_a:").connect()
    refusal = Refused(
        "ERR namespace must start with required prefix 'tenant_a:' (multi-tenant isolation)"
    )
    for command in (
        ("KV.PREFIX.REGISTER", "b", 8, "fp16"),
        ("KV.PREFIX.LOOKUP", "b"),
        ("KV.PREFIX.DROP", "tenant_a:x", "b"),
        ("KV.PREFIX.OWNER", "b"),
        ("KV.PREFIX.BLOCKS", "b"),
        ("KV.PREFIX.MEMBERSHIP", "b", 0, ""),
    ):
        assert wire(*command) == refusal, command
    assert wire("KV.PREFIX.REGISTER", "tenant_a:x", 8, "fp16") == "OK"
    assert wire("KV.PREFIX.LOOKUP", "tenant_a:x") == "HIT", (
        "DROP took one before it refused another"
    )
    assert wire("KV.PREFIX.COMMIT") == "OK"


def test_saving_nothing_is_an_error_and_committing_is_not(start_resp: Callable[..., Resp]) -> None:
    wire = start_resp().connect()
    assert wire("KV.PREFIX.SAVE").text.startswith(
        "ERR KV.PREFIX.SAVE failed (no active sessions or io error)"
    )
    assert wire("KV.PREFIX.COMMIT") == "OK"
    assert wire("SAVE") == "OK"
    assert wire("LASTSAVE") > 1_600_000_000


def test_each_layer_may_be_declared_by_itself(wire: Wire) -> None:
    specs = ["fmt=fp16,dim=64", "fmt=fp8,dim=64"]
    assert (
        wire("KV.PREFIX.REGISTER.SCHEMA", "schema", 2, *specs, *specs[::-1], "PREFILL_MS", 5)
        == "OK"
    )
    assert wire("KV.PREFIX.LOOKUP", "schema") == "HIT"
    k, v = fields(wire("V.INFO", "schema_pk")), fields(wire("V.INFO", "schema_pv"))
    assert (k["layer_0_fmt"], k["layer_1_fmt"]) == ("fp16", "fp8")
    assert (v["layer_0_fmt"], v["layer_1_fmt"]) == ("fp8", "fp16")
    assert wire("KV.PREFIX.REGISTER.SCHEMA", "schema2", 2, *specs, specs[0]).text.endswith(
        "not enough layer specs (need 2)"
    )
    assert wire("KV.PREFIX.LOOKUP", "schema2") == "MISS"
