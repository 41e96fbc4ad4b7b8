"""What was stored comes back bit for bit, by every road; what was not stored never does."""

import itertools
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np
import pytest

from pion_client import BlockTable, Client, Part, Prefix, PrefixState
from pion_client.errors import (
    GenerationDiffers,
    InvalidRequest,
    LayoutDiffers,
    NotStored,
    OtherContent,
    RowsOutOfRange,
)
from pion_wire.layout import DType, Layout, Side, TensorLayout
from tests.client.links import BF16, Pairs, assert_same, bits, cut_rows, random_bits, random_layers
from tests.conftest import ServerProcess

MODEL = "mlx1:test"
_names = (f"road-{number}" for number in itertools.count())

Fetch = Callable[..., Prefix | None]


@pytest.fixture(scope="module")
def local(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.fixture(scope="module")
def remote(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address, export=False) as client:
        yield client


@pytest.fixture(params=["stream", "stream-mlx", "export", "export-mlx", "export-verified"])
def road(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Fetch]:
    """`fetch`, by one road; asserts that it was taken."""
    transport, _, kind = request.param.partition("-")
    with Client(server.address, export=transport == "export", verify=kind == "verified") as client:

        def fetch(*args: object, **options: object) -> Prefix | None:
            prefix = client.fetch(*args, as_mlx=kind == "mlx", **options)  # type: ignore[arg-type]
            assert prefix is None or prefix.transport == transport, prefix.transport_reason
            return prefix

        yield fetch


@pytest.fixture
def name() -> str:
    return next(_names)


def present(prefix: Prefix | None) -> Prefix:
    assert prefix is not None
    return prefix


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)]


def test_no_16_bit_pattern_changes(local: Client, road: Fetch, name: str) -> None:
    patterns = np.arange(65_536, dtype=np.uint16).reshape(4, 256, 64)
    layers = [
        (patterns.view(np.float16), patterns.view(BF16)),
        (patterns[::-1].view(BF16), patterns[:, ::-1].view(np.float16)),
    ]
    local.store(name, layers=layers, token_ids=range(256), model=MODEL)
    prefix = present(road(name))
    assert_same(prefix.layers, layers)
    assert prefix.token_ids == list(range(256))
    assert (prefix.namespace, prefix.model, prefix.fidelity) == (name, MODEL, "raw")
    assert (prefix.token_count, prefix.rows, prefix.slots) == (256, (0, 256), (0, 1))


def test_no_32_bit_pattern_changes(local: Client, road: Fetch, name: str) -> None:
    layers = random_layers(7, 500, dtype=np.float32, heads=3, dim=8)
    bits(layers[0][0])[0, 0, :4] = [0x7F800001, 0xFF800001, 0x80000000, 0x00000001]
    local.store(name, layers=layers, token_ids=tokens(500), model=MODEL)
    assert_same(present(road(name)).layers, layers)


def test_a_prefix_above_the_default_message_limit_needs_no_option(
    local: Client, road: Fetch, name: str
) -> None:
    layers = random_layers(8, 3_000, slots=3, heads=4, dim=128)
    local.store(name, layers=layers, token_ids=tokens(3_000), model=MODEL)
    seen: list[tuple[int, int]] = []
    prefix = present(road(name, progress=lambda done, total: seen.append((done, total))))
    assert_same(prefix.layers, layers)
    total = sum(array.nbytes for pair in layers for array in pair)
    assert total > 16 << 20
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize("dim", [1, 7, 2_048])
def test_rows_of_any_width_fit_together(local: Client, road: Fetch, name: str, dim: int) -> None:
    # Odd tensors of two bytes put the next one of four bytes at an odd place.
    layers = [
        (random_bits(1, (3, 33, dim), BF16), random_bits(2, (5, 33, 1), np.float32)),
        (random_bits(3, (1, 33, dim), np.float16), random_bits(4, (2, 33, 3), np.float32)),
    ]
    local.store(name, layers=layers, token_ids=tokens(33), model=MODEL)
    assert_same(present(road(name)).layers, layers)


def test_a_side_that_keeps_nothing_comes_back_empty(local: Client, road: Fetch, name: str) -> None:
    latent, nothing = random_bits(5, (1, 70, 576), BF16), np.empty((1, 70, 0), BF16)
    local.store(name, layers=[(latent, nothing)], token_ids=tokens(70), model=MODEL)
    assert_same(present(road(name)).layers, [(latent, nothing)])


def test_slots_keep_their_numbers(local: Client, road: Fetch, name: str) -> None:
    layers = random_layers(9, 40, slots=3)
    local.store(name, layers=layers, slots=[9, 2, 5], token_ids=tokens(40), model=MODEL)
    prefix = present(road(name))
    assert prefix.slots == (2, 5, 9)
    assert_same(prefix.layers, [layers[1], layers[2], layers[0]])
    some = present(road(name, slots=[9, 2]))
    assert some.slots == (2, 9)
    assert_same(some.layers, [layers[1], layers[0]])


@pytest.fixture(scope="module")
def chain(local: Client) -> tuple[str, Pairs, list[int]]:
    """A prefix of three segments: rows 0 to 100, to 170 and to 300."""
    layers, ids = random_layers(11, 300, heads=3, dim=32), tokens(300, 3)
    local.store("chain-0", layers=cut_rows(layers, 0, 130), token_ids=ids[:130], model=MODEL)
    for number, (base, end) in enumerate([(100, 200), (170, 300)]):
        stored = local.store(
            f"chain-{number + 1}",
            layers=cut_rows(layers, base, end),
            token_ids=ids[:end],
            model=MODEL,
            parent=f"chain-{number}",
            base=base,
        )
        assert (stored.base, stored.token_count) == (base, end)
    return "chain-2", layers, ids


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 0), (0, 1), (99, 101), (100, 170), (5, 299), (169, 171), (299, 300)]
)
def test_rows_of_a_chain_are_those_that_were_stored(
    chain: tuple[str, Pairs, list[int]], road: Fetch, begin: int, end: int
) -> None:
    name, layers, ids = chain
    prefix = present(road(name, rows=(begin, end)))
    end = end or 300
    assert_same(prefix.layers, cut_rows(layers, begin, end))
    assert prefix.rows == (begin, end)
    assert prefix.token_count == end - begin
    assert prefix.token_ids == ids[:end]


def test_parts_come_only_where_they_are_exact(local: Client, road: Fetch, name: str) -> None:
    layers = random_layers(12, 64)
    state, ring = bytes(range(256)) * 9_000, b""
    parts = [
        Part("state", 3, 64, state, "f32 (1, 2)"),
        Part("state", 4, 32, b"early"),
        Part("ring", 5, 64, ring),
    ]
    local.store(name, layers=layers, token_ids=tokens(64), model=MODEL, parts=parts)
    assert present(road(name)).parts == ()
    prefix = present(road(name, rows=(0, 64), part_kinds=["state", "ring"]))
    assert_same(prefix.layers, layers)
    got = [(p.kind, p.slot, p.boundary_tokens, bytes(p.data), p.description) for p in prefix.parts]
    assert got == [("state", 3, 64, state, "f32 (1, 2)"), ("ring", 5, 64, ring, "")]
    early = present(road(name, rows=(0, 32), part_kinds=["state"]))
    assert [bytes(part.data) for part in early.parts] == [b"early"]


def test_rows_do_not_come_without_the_parts_that_are_asked_for(
    local: Client, road: Fetch, name: str
) -> None:
    layers = random_layers(12, 64)
    parts = [
        Part("state", 0, 40, b"a"),
        Part("state", 1, 40, b"b"),
        Part("state", 0, 64, b"slot 1 is not there"),
        Part("drafter", 0, 64, b"c"),
    ]
    local.store(name, layers=layers, token_ids=tokens(64), model=MODEL, parts=parts)
    prefix = present(road(name, part_kinds=["state"]))
    assert_same(prefix.layers, cut_rows(layers, 0, 40))
    assert (prefix.rows, prefix.shortened_by) == ((0, 40), "state")
    assert prefix.token_ids == list(tokens(40))
    assert [bytes(part.data) for part in prefix.parts] == [b"a", b"b"]
    assert present(road(name, part_kinds=["drafter"])).shortened_by == ""
    for rows, kinds in (
        (None, ["state", "drafter"]),
        (None, ["ring"]),
        ((0, 63), ["drafter"]),
        ((41, 0), ["state"]),
    ):
        assert road(name, rows=rows, part_kinds=kinds) is None


def test_one_kind_of_part_is_not_taken_for_its_letters(local: Client, road: Fetch) -> None:
    for kinds in ("state", ["\ud800"], [1]):
        for ask in (
            lambda: road("nothing", part_kinds=kinds),  # noqa: B023
            lambda: local.match(model=MODEL, token_ids=[1], part_kinds=kinds),  # type: ignore[arg-type]  # noqa: B023
        ):
            with pytest.raises(InvalidRequest) as refused:
                ask()
            assert refused.value.field == "part_kinds"


def test_parts_alone_are_a_prefix(local: Client, road: Fetch, name: str) -> None:
    part = Part("state", 0, 10, b"all there is")
    local.store(name, layers=None, token_ids=tokens(10), model=MODEL, parts=[part])
    prefix = present(road(name, part_kinds=["state"]))
    assert prefix.layers == []
    assert bytes(prefix.parts[0].data) == b"all there is"


def test_mlx_arrays_go_in_as_they_are(local: Client, road: Fetch, name: str) -> None:
    expected = random_layers(13, 50, slots=1, dtype=BF16)
    k, v = (mx.array(array.view(np.uint16)).view(mx.bfloat16) for array in expected[0])
    wider = mx.concatenate([k, k], axis=1)
    lazy = wider[:, :50] if name else k  # a view, not yet evaluated
    local.store(name, layers=[(lazy, v)], token_ids=tokens(50), model=MODEL)
    assert_same(present(road(name)).layers, expected)


def test_what_fetch_returned_can_be_stored_again(local: Client, remote: Client, name: str) -> None:
    layers = random_layers(14, 90)
    local.store(name, layers=layers, token_ids=tokens(90), model=MODEL)
    for number, client in enumerate((local, remote)):
        again = f"{name}-{number}"
        fetched = present(client.fetch(name))
        local.store(again, layers=fetched.layers, token_ids=fetched.token_ids, model=MODEL)
        assert_same(present(client.fetch(again)).layers, layers)


def test_fetched_numpy_arrays_are_views_of_token_major_rows(
    local: Client, remote: Client, name: str
) -> None:
    local.store(name, layers=random_layers(15, 20), token_ids=tokens(20), model=MODEL)
    for client in (local, remote):
        for array in itertools.chain(*present(client.fetch(name)).layers):
            assert array.transpose(1, 0, 2).flags.c_contiguous
            assert array.flags.aligned


def test_what_is_not_stored_is_a_miss_and_no_error(road: Fetch, local: Client, name: str) -> None:
    assert road(name) is None
    assert not local.lookup(name).hit
    assert road(None, lease_id=b"a lease unheard ") is None


def test_rows_beyond_the_end_are_an_error(local: Client, road: Fetch, name: str) -> None:
    local.store(name, layers=random_layers(16, 20), token_ids=tokens(20), model=MODEL)
    with pytest.raises(RowsOutOfRange):
        road(name, rows=(0, 21))


def test_rows_of_another_generation_never_come(local: Client, road: Fetch, name: str) -> None:
    layers, others = random_layers(1, 5), random_layers(20, 5)
    first = local.store(name, layers=layers, token_ids=tokens(5), model=MODEL)
    assert_same(present(road(name, generation=first.generation)).layers, layers)
    second = local.store(name, layers=others, token_ids=tokens(5, 1), model=MODEL, replace=True)
    with pytest.raises(GenerationDiffers):
        road(name, generation=first.generation)
    assert_same(present(road(name, generation=second.generation)).layers, others)


def test_a_leased_prefix_outlives_its_name(local: Client, road: Fetch, name: str) -> None:
    layers, ids = random_layers(17, 80), tokens(80, 17)
    local.store(name, layers=layers, token_ids=ids, model=MODEL)
    match = local.match(model=MODEL, token_ids=[*ids, 1, 2])
    assert local.drop(name, "nothing") == [True, False]
    assert road(name) is None
    assert_same(present(road(lease_id=match.lease_id)).layers, layers)


def test_a_match_says_what_is_served_and_why_not_more(local: Client, name: str) -> None:
    layers, ids = random_layers(18, 200), tokens(200, 18)
    local.store(name, layers=layers, token_ids=ids, model=MODEL, prefill_ms=12.5)
    whole = local.match(model=MODEL, token_ids=ids)
    assert (whole.hit, whole.reason, whole.token_count, whole.namespace) == (True, "", 200, name)
    assert whole.prefix is not None
    assert whole.prefix.prefill_ms == 12.5
    assert whole.prefix.state is PrefixState.SEALED
    inside = local.match(model=MODEL, token_ids=[*ids[:101], 7, *ids[102:]])
    assert (inside.token_count, inside.matched_tokens, inside.requested_tokens) == (101, 101, 200)
    assert inside.reason == "partial"
    assert local.match(model="another", token_ids=ids).reason == "not_stored"
    short = local.match(model=MODEL, token_ids=ids[:30], min_tokens=31)
    assert (short.hit, short.reason, short.token_count) == (False, "too_short", 0)


def test_a_lookup_never_calls_something_else_a_hit(local: Client, name: str) -> None:
    layers, ids = random_layers(19, 60), tokens(60, 19)
    local.store(name, layers=layers, token_ids=ids, model=MODEL)
    hit = local.lookup(name, model=MODEL, token_ids=ids, lease_ms=1_000)
    assert (hit.hit, hit.reason) == (True, "")
    assert hit.lease_id
    assert hit.prefix is not None
    assert local.lookup(name, model="another").reason == "model_differs"
    differs = local.lookup(name, token_ids=[*ids[:41], 3])
    assert (differs.hit, differs.reason, differs.first_difference) == (False, "tokens_differ", 41)
    other = Layout((TensorLayout(0, Side.K, 1, 1, DType.F16),))
    assert local.lookup(name, layout=other).reason == "layout_differs"
    assert local.lookup(name, layout=hit.prefix.layout).hit


def test_a_name_is_not_overwritten_unless_asked(local: Client, road: Fetch, name: str) -> None:
    first, second = random_layers(20, 40), random_layers(21, 50)
    ids = tokens(50, 20)
    stored = local.store(name, layers=first, token_ids=ids[:40], model=MODEL)
    assert not stored.already_stored
    assert local.store(name, layers=first, token_ids=ids[:40], model=MODEL).already_stored
    with pytest.raises(OtherContent) as other:
        local.store(name, layers=second, token_ids=ids, model=MODEL)
    assert other.value.metadata["namespace"] == name
    with pytest.raises(LayoutDiffers):
        local.store(name, layers=first[:1], token_ids=ids[:40], model=MODEL)
    assert_same(present(road(name)).layers, first)
    local.store(name, layers=second, token_ids=ids, model=MODEL, replace=True)
    assert_same(present(road(name)).layers, second)


def test_a_derived_name_is_the_same_everywhere(local: Client) -> None:
    layers, ids = random_layers(22, 70), tokens(70, 22)
    first = local.store(None, layers=layers, token_ids=ids, model=MODEL)
    assert len(first.namespace) == 32
    again = local.store(None, layers=layers, token_ids=ids, model=MODEL)
    assert (again.namespace, again.already_stored) == (first.namespace, True)
    on_disk = local.store("on-disk", layers=layers, token_ids=ids, model=MODEL, durability="disk")
    assert on_disk.durability == "disk"


def test_live_rows_are_streamed_until_they_are_sealed(
    local: Client, remote: Client, name: str
) -> None:
    array = random_bits(23, (2, 30, 8), np.float16)
    layout = Layout(tuple(TensorLayout(0, side, 2, 8, DType.F16) for side in Side))
    assert local.register(name, layout=layout, model=MODEL).state is PrefixState.REGISTERED
    assert local.lookup(name).prefix is not None
    assert local.fetch(name) is None
    for side in Side:
        written = local.write_rows(name, slot=0, side=side, first_row=0, rows=array[:, :20])
        assert written.row_count == 20
    local.write_rows(name, slot=0, side="k", first_row=20, rows=array[:, 20:])
    prefix = present(local.fetch(name))
    assert prefix.transport == "stream"
    assert "live" in prefix.transport_reason
    assert_same(prefix.layers, [(array[:, :20], array[:, :20])])
    snapshot = local.snapshot(name)
    local.write_rows(name, slot=0, side="v", first_row=20, rows=array[:, 20:])
    assert present(remote.fetch(name)).token_count == 30
    local.restore(name, snapshot)
    assert present(remote.fetch(name)).token_count == 20
    assert local.release(name, snapshot)
    assert not local.release(name, snapshot)
    assert local.save(name) == 1
    assert present(local.fetch(name)).transport == "export"
    local.sync()


def test_rows_written_behind_the_tokens_are_not_out_of_reach(
    local: Client, remote: Client, name: str
) -> None:
    layers = random_layers(29, 60, slots=1)
    local.store(name, layers=cut_rows(layers, 0, 50), token_ids=tokens(50), model=MODEL)
    for side, rows in zip(Side, layers[0], strict=True):
        local.write_rows(name, slot=0, side=side, first_row=50, rows=rows[:, 50:])
    for _ in range(2):
        for client in (local, remote):
            whole = present(client.fetch(name))
            assert_same(whole.layers, layers)
            assert whole.token_ids == [], "those of ten rows are not known"
            assert present(client.fetch(name, rows=(0, 50))).token_ids == tokens(50)
        local.save(name)


def test_scattered_rows_come_in_the_order_asked(local: Client, name: str) -> None:
    layers = random_layers(24, 1_000, slots=1, heads=4, dim=64)
    local.store(name, layers=layers, token_ids=tokens(1_000), model=MODEL)
    wanted = np.random.default_rng(24).integers(0, 1_000, 5_000)
    got = local.read_rows(name, slot=0, side="v", rows=wanted)
    assert got is not None
    np.testing.assert_array_equal(bits(got), bits(layers[0][1])[:, wanted])
    some = local.read_rows(name, slot=0, side=Side.K, rows=[999, 1_000, 0])
    assert some is not None
    assert not bits(some)[:, 1].any()
    assert local.read_rows(name, slot=0, side="k", rows=[1_000]) is None
    with pytest.raises(LayoutDiffers):
        local.read_rows(name, slot=7, side="k", rows=[0])
    with pytest.raises(NotStored):
        local.read_rows(f"{name}-not", slot=0, side="k", rows=[0])


def test_tables_are_compared_and_never_made_up(local: Client, name: str) -> None:
    hashes = [5, 2**64 - 1, 17]
    layout = Layout((TensorLayout(0, Side.K, 1, 8, DType.F16),))
    local.register(name, layout=layout, table=BlockTable(16, hashes))
    table = local.blocks(name)
    assert table is not None
    assert (table.block_tokens, list(table.hashes)) == (16, hashes)
    assert local.blocks(f"{name}-not") is None
    known, unknown = local.membership([name, f"{name}-not"], [17, 4, 5, 2**64 - 1, 0, 1, 2, 3, 17])
    assert known is not None
    assert known.tolist() == [True, False, True, True, False, False, False, False, True]
    assert unknown is None


def test_the_list_has_every_name_once(local: Client, name: str) -> None:
    names = [f"{name}/{number:03}" for number in range(5)]
    for one in names:
        local.store(one, layers=random_layers(25, 8), token_ids=tokens(8, len(one)), model=MODEL)
    assert [info.namespace for info in local.list(f"{name}/")] == names
    assert all(local.drop(*names))
    assert list(local.list(f"{name}/")) == []


def test_the_receipt_counts_the_road_that_was_taken(
    local: Client, remote: Client, name: str
) -> None:
    layers = random_layers(26, 100)
    local.store(name, layers=layers, token_ids=tokens(100), model=MODEL)
    size = sum(array.nbytes for pair in layers for array in pair)
    local.reset_stats()
    local.fetch(name)
    assert (local.stats().bytes_exported, local.stats().bytes_streamed) == (size, 0)
    remote.fetch(name)
    assert (local.stats().bytes_exported, local.stats().bytes_streamed) == (size, size)
    assert local.stats().tokens_served == 200
    for client in (local, remote):
        local.reset_stats()
        client.fetch(name, slots=[1], rows=(10, 60))
        half = sum(array[:, 10:60].nbytes for array in layers[1])
        assert local.stats().bytes_exported + local.stats().bytes_streamed == half


def test_the_receipt_counts_once_what_a_client_cannot_read_here(
    server: ServerProcess, name: str
) -> None:
    layers = random_layers(27, 100)
    token = server.directory / "host-token"
    with Client(server.address) as first, Client(server.address) as second:
        first.store(name, layers=layers, token_ids=tokens(100), model=MODEL)
        lossy = f"{name}-lossy"
        ones = [(np.ones((2, 100, 16), np.float32),) * 2] * 2
        first.store(lossy, layers=ones, token_ids=tokens(100, 1), model=MODEL, codecs="int8")
        first.reset_stats()
        present(first.fetch(lossy))
        assert first.stats().tokens_served == 100
        first.reset_stats()
        held = token.read_bytes()
        token.write_bytes(bytes(32))  # as on another host
        try:
            prefix = present(second.fetch(name))
        finally:
            token.write_bytes(held)
        assert prefix.transport == "stream"
        assert first.stats().tokens_served == 100
        assert first.stats().bytes_exported == 0


def test_a_prefill_time_that_was_declared_stays_measured(local: Client, name: str) -> None:
    layers = random_layers(28, 100)
    layout = Layout(
        tuple(TensorLayout(slot, side, 2, 16, DType.BF16) for slot in range(2) for side in Side)
    )
    local.register(name, layout=layout, model=MODEL, prefill_ms=2_000)
    local.store(name, layers=layers, token_ids=tokens(100), model=MODEL)
    local.reset_stats()
    local.fetch(name)
    receipt = local.stats()
    assert receipt.prefill_seconds_avoided_measured == pytest.approx(2.0)
    assert receipt.prefill_seconds_avoided_estimated == 0


def test_parts_that_were_not_stored_are_never_acknowledged(local: Client, name: str) -> None:
    fields = {"layers": random_layers(29, 100), "token_ids": tokens(100), "model": MODEL}
    logits = Part("logits", 0, 100, b"l" * 40)
    local.store(name, **fields)  # type: ignore[arg-type]
    with pytest.raises(OtherContent, match="logits"):
        local.store(name, **fields, parts=[logits])  # type: ignore[arg-type]
    local.store(name, **fields, parts=[logits], replace=True)  # type: ignore[arg-type]
    again = local.store(name, **fields, parts=[logits])  # type: ignore[arg-type]
    assert again.already_stored
    assert local.store(name, **fields).already_stored, "fewer are there"  # type: ignore[arg-type]
    got = present(local.fetch(name, part_kinds=["logits"]))
    assert [bytes(part.data) for part in got.parts] == [b"l" * 40]


def test_a_child_never_has_a_part_that_its_parent_has(local: Client, name: str) -> None:
    layers, ids = random_layers(30, 200), tokens(200, 5)
    mine = Part("state", 0, 64, b"parent")
    local.store(
        name, layers=cut_rows(layers, 0, 100), token_ids=ids[:100], model=MODEL, parts=[mine]
    )
    child = {"layers": cut_rows(layers, 64, 200), "token_ids": ids, "model": MODEL}
    with pytest.raises(InvalidRequest, match="state"):
        local.store(
            f"{name}-child",
            **child,
            parent=name,
            base=64,
            parts=[Part("state", 0, 64, b"child")],  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("field", "ask"),
    [
        ("min_tokens", lambda pion: pion.match(model=MODEL, token_ids=[1], min_tokens=-1)),
        ("lease_ms", lambda pion: pion.match(model=MODEL, token_ids=[1], lease_ms=-1)),
        ("lease_ms", lambda pion: pion.lookup("x", lease_ms=-1)),
        ("slots", lambda pion: pion.fetch("x", slots=[-1])),
        ("namespace", lambda pion: pion.lookup(b"x")),
        ("namespace", lambda pion: pion.fetch(7)),
        ("namespace", lambda pion: pion.lookup("x" * 20_000)),
        ("namespace", lambda pion: pion.fetch("é" * 20_000)),
    ],
)
def test_what_cannot_be_asked_is_refused_by_its_field(
    local: Client, field: str, ask: Callable[[Client], object]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ask(local)
    assert field in refused.value.field


def test_a_slot_that_a_prefix_does_not_have_is_no_empty_answer(
    local: Client, remote: Client, name: str
) -> None:
    local.store(name, layers=random_layers(31, 100), token_ids=tokens(100), model=MODEL)
    for client in (local, remote):
        with pytest.raises(InvalidRequest, match="no slot 99"):
            client.fetch(name, slots=[99])


def test_a_deadline_that_never_comes_is_no_deadline_now(local: Client, name: str) -> None:
    local.store(name, layers=random_layers(32, 10), token_ids=tokens(10), model=MODEL)
    assert local.fetch(name, timeout_s=9e15) is not None


def test_the_server_describes_itself(local: Client) -> None:
    described = local.describe()
    assert described.export_enabled
    assert described.limits["chunk_bytes_max"] == 1 << 20
    assert described.disk_used_bytes <= described.disk_budget_bytes


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"namespace": ""}, "namespace"),
        ({"namespace": "\ud800"}, "namespace"),
        ({"model": "\ud800"}, "model"),
        ({"parent": "\ud800"}, "parent"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [2**32]}, "token_ids"),
        ({"token_ids": [0.5]}, "token_ids"),
        ({"token_ids": b"123"}, "token_ids"),
        ({"token_ids": b"\0" * 4_000_004}, "token_ids"),
        ({"token_ids": range(9)}, "layers.k.0"),
        ({"base": 3}, "layers.k.0"),
        ({"base": -1}, "base"),
        ({"base": "1"}, "base"),
        ({"parts": [Part("state", -1, 8, b"")]}, "parts[0].slot"),
        ({"parts": [Part("state", 0, 8, b""), Part("state", 2**32, 8, b"")]}, "parts[1].slot"),
        ({"parts": [Part("state", 0, -1, b"")]}, "parts[0].boundary_tokens"),
        ({"parts": [Part("state", 0, 0.5, b"")]}, "parts[0].boundary_tokens"),  # type: ignore[arg-type]
        ({"parts": [Part("\ud800", 0, 8, b"")]}, "parts[0].kind"),
        ({"parts": [Part("state", 0, 8, b"", "\ud800")]}, "parts[0].description"),
        ({"parts": [Part("state", 0, 8, "text")]}, "parts[0].data"),  # type: ignore[arg-type]
        ({"slots": [0, 0]}, "slots"),
        ({"slots": [0]}, "slots"),
        ({"slots": [0, 1_024]}, "layers[1].k.slot"),
        ({"durability": "perhaps"}, "durability"),
        ({"layers": [(np.zeros((1, 8)), np.zeros((1, 8)))] * 2}, "layers[0].k"),
        ({"layers": [(np.zeros((1, 8, 2)), np.zeros((1, 8, 2)))] * 2}, "layers[0].k.data_type"),
        ({"layers": [([[[0.0]]], [[[0.0]]])] * 2}, "layers[0].k"),
        ({"layers": [np.zeros((3, 1, 8), np.float16)] * 2}, "layers[0]"),
        ({"layers": [(np.zeros((2, 8, 2**15), np.float16),) * 2] * 2}, "layers[0].k.head_dim"),
        ({"layers": [(mx.zeros((1, 8, 2), mx.int32),) * 2] * 2}, "layers[0].k.data_type"),
    ],
)
def test_what_does_not_fit_is_never_sent(fields: dict[str, object], field: str) -> None:
    good = {
        "namespace": "never",
        "layers": random_layers(27, 8),
        "token_ids": range(8),
        "model": MODEL,
    }
    with Client("127.0.0.1:1") as nobody, pytest.raises(InvalidRequest) as refused:
        nobody.store(**good | fields)  # type: ignore[arg-type]
    assert refused.value.field == field
    assert refused.value.reason == "INVALID"


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda client: client.match(model="m", token_ids=[]), "token_ids"),
        (lambda client: client.match(model="\ud800", token_ids=[1]), "model"),
        (lambda client: client.lookup("name", token_ids=[]), "token_ids"),
        (lambda client: client.lookup("name", tries=0), "tries"),
        (lambda client: client.match(model="m", token_ids=[1], fidelities="raw"), "fidelities"),
        (lambda client: client.fetch("name", rows=(-1, 10)), "rows"),
        (lambda client: client.fetch("name", rows=(1,)), "rows"),
        (lambda client: client.fetch("name", rows=("a", "b")), "rows"),
        *(
            (lambda client, call=call: call(client, "\ud800"), field)
            for call, field in (
                (Client.fetch, "namespace"),
                (Client.lookup, "namespace"),
                (Client.blocks, "namespace"),
                (Client.snapshot, "namespace"),
                (Client.drop, "namespaces"),
                (Client.save, "namespaces"),
                (Client.attend_drop, "session"),
            )
        ),
        *(
            (lambda client, call=call, time=time: call(client, timeout_s=time), "timeout_s")
            for call, time in itertools.product(
                (Client.describe, Client.sync, lambda client, **t: client.fetch("name", **t)),
                (0, -1.0, float("nan"), float("inf")),
            )
        ),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_field(
    call: Callable[[Client], object], field: str
) -> None:
    with Client("127.0.0.1:1") as nobody, pytest.raises(InvalidRequest) as refused:
        call(nobody)
    assert refused.value.field == field


@pytest.mark.parametrize("time", ["timeout_s", "stall_timeout_s"])
def test_a_client_without_time_is_none(time: str) -> None:
    with pytest.raises(ValueError, match=time):
        Client(**{time: 0.0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.fetch(),
        lambda client: client.fetch("name", lease_id=b"and a lease"),
        lambda client: client.membership(["a"], [-1]),
        lambda client: client.membership(["a"], b"odd"),
        lambda client: client.read_rows("a", slot=0, side="q", rows=[0]),
        lambda client: client.read_rows("a", slot=0, side="k", rows=[-1]),
        lambda client: client.write_rows(
            "a", slot=0, side="k", first_row=0, rows=np.zeros(3, np.float16)
        ),
    ],
)
def test_senseless_questions_are_never_asked(call: Callable[[Client], object]) -> None:
    with Client("127.0.0.1:1") as nobody, pytest.raises(InvalidRequest):
        call(nobody)


def test_the_servers_refusals_name_the_field(local: Client, name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        local.fetch("n" * 201)
    assert refused.value.field == "namespace"
    with pytest.raises(NotStored):
        local.store(
            name,
            layers=random_layers(28, 10),
            token_ids=tokens(50),
            model=MODEL,
            parent="nobody",
            base=40,
        )
    assert not local.lookup(name).hit
