"""`V.EXPORT`: a file equals what a fetch would have brought, and there is never more than room for."""

import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from pion_grpc.core.access import Access
from pion_grpc.core.copying import Copier, CopyRequest
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.session_reading import SessionReading
from pion_grpc.core.sessions import Sessions
from tests.resp.conftest import Resp
from tests.resp.wire import Refused, Wire

H, D, LAYERS, N = 4, 32, 3, 37
RNG = np.random.default_rng(468)


def stored(wire: Wire, name: str, codec: str = "fp16", rows: int = N) -> None:
    wire("KV.PREFIX.REGISTER", name, H * D, codec)
    for layer in range(LAYERS):
        for side in ("pk", "pv"):
            values = RNG.standard_normal((rows, H * D)).astype(np.float32)
            wire("V.STOREBATCH", f"{name}_{side}", layer, 0, rows, values.tobytes())


def export(wire: Wire, name: str, begin: int = 0, end: int = N, *shape: int) -> Any:
    words = shape or (LAYERS, H, D)
    answer = wire("V.EXPORT", f"{name}_pk", f"{name}_pv", begin, end, *words)
    return Path(answer.decode()) if isinstance(answer, bytes) else answer


def tensors(path: Path) -> dict[str, Any]:
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def fetched(wire: Wire, sid: str, begin: int, end: int) -> list[Any]:
    """What a client makes of the rows of a fetch."""
    layers = wire("V.FETCH", sid, "BATCH", begin, end, LAYERS)
    rows = [np.frombuffer(layer, np.float32).reshape(-1, H, D) for layer in layers]
    return [layer.transpose(1, 0, 2)[None].astype(np.float16) for layer in rows]


@pytest.mark.parametrize("codec", ["fp16", "int8", "fp8", "turbo4", "turbo3", "turbo2", "mlx4g32"])
@pytest.mark.parametrize(("begin", "end"), [(0, N), (5, 20), (N - 1, N)])
def test_no_value_differs_from_a_fetch(wire: Wire, codec: str, begin: int, end: int) -> None:
    name = f"export {codec} {begin}"
    stored(wire, name, codec)
    path = export(wire, name, begin, end)
    assert path.is_absolute()
    assert path.suffix == ".safetensors"
    found = tensors(path)
    assert list(found) == [f"{side}.{i}" for side in "kv" for i in range(LAYERS)]
    for side, sid in (("k", f"{name}_pk"), ("v", f"{name}_pv")):
        for layer, expected in enumerate(fetched(wire, sid, begin, end)):
            assert found[f"{side}.{layer}"].shape == (1, H, end - begin, D)
            assert np.array_equal(found[f"{side}.{layer}"], expected)


def test_patterns_pass_through_untouched(wire: Wire) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    count = (1 << 16) // (H * D)
    wire("KV.PREFIX.REGISTER", "patterns", H * D, "fp16")
    for side in ("pk", "pv"):
        wire("V.STOREBATCH", f"patterns_{side}", 0, 0, count, patterns.tobytes(), "FMT", "F16")
    path = export(wire, "patterns", 0, count, 1, H, D)
    got = tensors(path)["k.0"].view(np.uint16)[0].transpose(1, 0, 2).ravel()
    assert np.array_equal(got, patterns)


def test_a_long_prefix_is_turned_around_piece_by_piece(wire: Wire) -> None:
    rows = 9_000  # more than one piece of a stream, by several pages
    stored(wire, "long", "fp16", rows)
    found = tensors(export(wire, "long", 1, rows))
    for layer, expected in enumerate(fetched(wire, "long_pv", 1, rows)):
        assert np.array_equal(found[f"v.{layer}"], expected)


def test_the_same_question_finds_the_same_file_until_rows_change(wire: Wire) -> None:
    stored(wire, "stable")
    path = export(wire, "stable")
    written = path.stat().st_mtime_ns
    assert export(wire, "stable") == path
    assert path.stat().st_mtime_ns == written
    part = export(wire, "stable", 0, 5)
    rows = RNG.standard_normal((N, H * D)).astype(np.float32).tobytes()
    wire("V.STOREBATCH", "stable_pv", 1, 0, N, rows)
    newer = export(wire, "stable")
    assert newer != path
    assert not path.exists(), "a stale file can still be mapped"
    assert part.exists()
    assert np.array_equal(tensors(newer)["v.1"], fetched(wire, "stable_pv", 0, N)[1])
    snapshot = wire("V.SNAPSHOT", "stable_pk")
    wire("V.STOREBATCH", "stable_pk", 0, N, 1, rows[: H * D * 4])
    wire("V.RESTORE", "stable_pk", snapshot)
    assert export(wire, "stable") != newer
    assert wire("KV.PREFIX.DROP", "stable") == 1
    assert export(wire, "stable") == Refused("ERR session not found")


class Restless(Sessions):
    """Sessions of a store in which something happens once a first side has been opened."""

    def __init__(self, store: PrefixStore, happens: Callable[[], None]) -> None:
        super().__init__(store)
        self._happens = happens

    def open(
        self, tenant: str, sid: str, layers: Sequence[int] = (), *, halves: bool = False
    ) -> SessionReading | None:
        reading = super().open(tenant, sid, layers, halves=halves)
        happens, self._happens = self._happens, lambda: None
        happens()
        return reading


def test_no_file_has_one_side_of_a_prefix_and_the_other_of_its_successor(
    wire: Wire, resp: Resp
) -> None:
    def replace() -> None:
        wire("KV.PREFIX.DROP", "torn")
        stored(wire, "torn")

    stored(wire, "torn")
    copier = Copier(resp.store, Restless(resp.store, replace))
    found = tensors(copier.copy("", CopyRequest("torn_pk", "torn_pv", 0, N, LAYERS, H, D)))
    for side in "kv":
        for layer, expected in enumerate(fetched(wire, f"torn_p{side}", 0, N)):
            assert np.array_equal(found[f"{side}.{layer}"], expected)


def test_a_file_that_somebody_removed_is_made_again(wire: Wire) -> None:
    stored(wire, "removed")
    path = export(wire, "removed")
    before = tensors(path)
    path.unlink()
    again = tensors(export(wire, "removed"))
    assert again.keys() == before.keys()
    assert all(np.array_equal(before[name], value) for name, value in again.items())


def test_only_the_owner_can_read_it(wire: Wire) -> None:
    stored(wire, "modes")
    path = export(wire, "modes")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not list(path.parent.glob("*.tmp"))


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("bad_pk", "bad_pv", 0, N, LAYERS, H), "ERR V.EXPORT requires: "),
        (("nope_pk", "bad_pv", 0, N, LAYERS, H, D), "ERR session not found"),
        (("bad_pk", "nope_pv", 0, N, LAYERS, H, D), "ERR session not found"),
        (("bad_pk", "bad_pv", 9, 9, LAYERS, H, D), "ERR V.EXPORT: invalid range"),
        (("bad_pk", "bad_pv", -1, 9, LAYERS, H, D), "ERR V.EXPORT: invalid range"),
        (
            ("bad_pk", "bad_pv", 0, N + 1, LAYERS, H, D),
            "ERR V.EXPORT: layer 0 of 'bad_pk' has 37 rows",
        ),
        (
            ("bad_pk", "bad_pv", 0, N, LAYERS + 1, H, D),
            "ERR V.EXPORT: 'bad_pk' does not have 4 layers",
        ),
        (("bad_pk", "bad_pv", 0, N, 0, H, D), "ERR V.EXPORT: invalid range"),
        (("bad_pk", "bad_pv", 0, N, 81, H, D), "ERR V.EXPORT: invalid range"),
        (
            ("bad_pk", "bad_pv", 0, N, LAYERS, 3, D),
            "ERR V.EXPORT: rows of layer 0 of 'bad_pk' have 128",
        ),
        (("bad_pk", "bad_pv", 0, N, LAYERS, H, 0), "ERR V.EXPORT: invalid range"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_no_file(
    wire: Wire, resp: Resp, words: tuple[Any, ...], refusal: str
) -> None:
    stored(wire, "bad")
    before = sorted((resp.store.directory.path / "export").iterdir())
    assert wire("V.EXPORT", *words).text.startswith(refusal)
    assert sorted((resp.store.directory.path / "export").iterdir()) == before
    assert wire("PING") == "PONG"


def test_files_stay_inside_the_budget_and_go_before_anything_else(
    start_resp: Callable[..., Resp],
) -> None:
    resp = start_resp(budget_bytes=24 << 20)
    wire = resp.connect()
    rows = 2_000
    stored(wire, "budget", "fp16", rows)  # 3 MiB
    paths = [export(wire, "budget", begin, rows) for begin in range(12)]
    assert all(isinstance(path, Path) for path in paths), "it grew without a bound"
    resp.store.tick()
    left = [path for path in paths if path.exists()]
    assert 2 <= len(left) < 8
    assert left == paths[-len(left) :], "not the least recently used one went"
    assert wire("KV.PREFIX.LOOKUP", "budget") == "HIT"
    total = sum(p.stat().st_size for p in resp.store.directory.path.rglob("*") if p.is_file())
    assert total <= 24 << 20


def test_files_outlive_a_restart_and_count(start_resp: Callable[..., Resp]) -> None:
    resp = start_resp()
    wire = resp.connect()
    stored(wire, "again")
    path = export(wire, "again")
    used = resp.store.totals().disk_used_bytes
    resp.stop()
    resp = start_resp()
    assert resp.store.totals().disk_used_bytes >= used - (1 << 20)
    assert export(resp.connect(), "again") == path


def test_tenants_and_other_hosts_get_no_paths(start_resp: Callable[..., Resp]) -> None:
    wire = start_resp(access=Access({"": "secret", "blue": "azure"})).connect()
    wire("AUTH", "secret")
    stored(wire, "shared")
    assert export(wire, "shared") == Refused("ERR V.EXPORT is switched off here")


def test_it_can_be_switched_off(start_resp: Callable[..., Resp]) -> None:
    wire = start_resp(export=False).connect()
    stored(wire, "off")
    assert export(wire, "off") == Refused("ERR V.EXPORT is switched off here")
