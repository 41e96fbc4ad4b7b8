"""Programs of `pion-lmcache` find what they stored, under the rules of every other prefix."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pion_client import Client
from pion_client.errors import InvalidRequest, LayoutDiffers, NotStored
from pion_client.lmcache import LMCacheRemoteBackend, PionStore
from pion_wire import codecs
from tests.conftest import ServerProcess
from tests.resp.wire import Wire

LAYERS, TOKENS, KV_DIM = 4, 100, 64
_numbers = itertools.count()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = Path(f"/tmp/{tmp_path_factory.mktemp('pion').name}-{id(tmp_path_factory)}")
    server = ServerProcess(directory, "--resp", f"unix:{directory}.resp")
    yield server
    assert server.stop() == 0


@pytest.fixture
def name() -> str:
    return f"my_app|prompt_{next(_numbers)}"


def rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("vquant", ["fp16", "int8", "turbo4", "turbo3", "turbo2", "raw"])
def test_a_prefix_comes_back_as_its_codec_keeps_it(
    both: ServerProcess, name: str, vquant: str
) -> None:
    k, v = rows(1, LAYERS, TOKENS, KV_DIM), rows(2, LAYERS, TOKENS, KV_DIM)
    with PionStore(address=both.address, vquant=vquant, auto_redirect=False) as store:
        assert not store.lookup(name)
        assert store.owner(name) == -1
        store.store_prefix(name, k, v, kv_dim=KV_DIM)
        assert store.lookup(name)
        assert (store.owner(name), store.redirect_count) == (0, 0)
        got = store.fetch_prefix(name, n_layers=LAYERS, n_tokens=TOKENS, kv_dim=KV_DIM)
        for mine, theirs in zip((k, v), got, strict=True):
            assert theirs.dtype == np.float32
            np.testing.assert_array_equal(theirs, through(vquant, mine))
        few, _ = store.fetch_prefix(name, 2, 10, KV_DIM, token_offset=50)
        np.testing.assert_array_equal(few, through(vquant, k)[:2, 50:60])


def through(codec: str, side: np.ndarray) -> np.ndarray:
    parsed = codecs.parse(codec)
    flat = side.reshape(-1, side.shape[-1])
    return parsed.decode(parsed.encode(flat)).reshape(side.shape)


def test_layers_come_one_by_one_and_in_any_order(both: ServerProcess, name: str) -> None:
    with PionStore(address=both.address) as store:
        store.register(name, kv_dim=KV_DIM)
        store.register(name, kv_dim=KV_DIM)
        assert store.lookup(name)
        v = rows(3, 30, KV_DIM)
        store.store_layer(name, "V", layer=7, token_offset=0, tensor_fp32=v)
        store.store_layer(name, "V", layer=7, token_offset=40, tensor_fp32=v[:5].astype(float))
        store.store_layer(name, "V", layer=2, token_offset=0, tensor_fp32=v[:0])
        got = store.fetch_layer(name, "V", 7, 28, 50, KV_DIM)
        expected = np.zeros((22, KV_DIM), np.float32)
        half = v.astype(np.float16).astype(np.float32)
        expected[:2], expected[12:17] = half[28:], half[:5]
        np.testing.assert_array_equal(got, expected)
        for side, layer in (("K", 0), ("V", 0)):
            with pytest.raises(NotStored):
                store.fetch_layer(name, side, layer, 0, 5, KV_DIM)
        with pytest.raises(NotStored):
            store.fetch_prefix(name, 8, 30, KV_DIM)
        for bad in (lambda: store.fetch_layer(name, "V", 7, 5, 5, KV_DIM),
                    lambda: store.fetch_layer(name, "V", 7, 0, 5, KV_DIM + 1),
                    lambda: store.fetch_layer(name, "v", 7, 0, 5, KV_DIM),
                    lambda: store.store_layer(name, "V", 7, 0, v[0]),
                    lambda: store.store_layer(name, "V", 7, 0, v[:, :32])):  # fmt: skip
            with pytest.raises(ValueError, match=r"."):
                bad()


def test_storing_counts_no_hits(start_server, name: str) -> None:  # type: ignore[no-untyped-def]
    with PionStore(address=start_server().address) as store:
        store.store_prefix(name, *(rows(1, LAYERS, 5, KV_DIM) for _ in "kv"))
        store.owner(name)
        receipt = store._client.stats()
    assert (receipt.hits, receipt.misses) == (0, 0)


def test_rows_of_a_namespace_that_was_dropped_are_not_written(
    both: ServerProcess, name: str
) -> None:
    with PionStore(address=both.address) as store, PionStore(address=both.address) as other:
        store.register(name, KV_DIM)
        other.store_layer(name, "K", 0, 0, rows(1, 5, KV_DIM))  # registered by somebody else
        store._client.drop(name)
        with pytest.raises(NotStored):
            store.store_layer(name, "K", 0, 0, rows(1, 5, KV_DIM))
        assert not store.lookup(name)


def test_layers_of_different_lengths_end_in_zeros(both: ServerProcess, name: str) -> None:
    k = rows(4, LAYERS, TOKENS, KV_DIM)
    with PionStore(address=both.address, vquant="raw") as store:
        store.store_prefix(name, k, k)
        store.store_layer(name, "K", 1, TOKENS, k[1, :20])
        keys, values = store.fetch_prefix(name, LAYERS, TOKENS + 20, KV_DIM)
    np.testing.assert_array_equal(values[:, :TOKENS], k)
    assert not values[:, TOKENS:].any()
    np.testing.assert_array_equal(keys[1, TOKENS:], k[1, :20])


def test_what_is_declared_otherwise_is_never_taken_for_the_same(
    both: ServerProcess, name: str
) -> None:
    with PionStore(address=both.address, vquant="int8") as store:
        store.store_prefix(name, *(rows(5, 1, 10, KV_DIM) for _ in "kv"))
        with pytest.raises(LayoutDiffers):
            store.register(name, KV_DIM, "turbo4")
        with pytest.raises(LayoutDiffers):
            store.register(name, 32)
        with pytest.raises(ValueError, match=r"turbo4.*kv_dim.*40"):
            store.register("other", 40, "turbo4")
        assert not store.lookup("other")
        with pytest.raises(NotStored):
            store.store_layer("other", "K", 0, 0, rows(6, 1, 40))
    with pytest.raises(ValueError, match="fp12"):
        PionStore(address=both.address, vquant="fp12")


@pytest.mark.parametrize("vquant", ["fp16", "int8", "turbo4", "mlx4g32"])
def test_what_the_other_wire_declared_is_no_other_layout(
    both: ServerProcess, name: str, vquant: str
) -> None:
    k = rows(10, KV_DIM, KV_DIM)
    resp = Wire(both.ready["resp"])
    assert resp("KV.PREFIX.REGISTER", name, KV_DIM, vquant) == "OK"
    assert resp("V.CREATE", f"{name}-bare", KV_DIM, "VQUANT", vquant) > 0
    with PionStore(address=both.address, vquant=vquant) as store:
        for width, codec in ((KV_DIM, "turbo3"), (2 * KV_DIM, vquant)):
            with pytest.raises(LayoutDiffers):
                store.register(name, width, codec)
        with pytest.raises(LayoutDiffers):
            store.register(f"{name}-bare", KV_DIM)  # has one side
        for layer in range(2):
            store.register(name, KV_DIM)  # before there are rows, and with some
            store.store_layer(name, "K", layer, 0, k)
        got = resp("V.FETCH", f"{name}_pk", "BATCH", 0, KV_DIM)
        assert got == [through(vquant, k).tobytes()] * 2
        with pytest.raises(LayoutDiffers):
            store.register(name, KV_DIM, "turbo3")
    resp.close()


def test_rows_are_the_same_over_the_other_wire(both: ServerProcess, name: str) -> None:
    k, v = rows(7, LAYERS, TOKENS, KV_DIM), rows(8, LAYERS, TOKENS, KV_DIM)
    resp = Wire(both.ready["resp"])
    with PionStore(address=both.address, vquant="int8", tenant_prefix="app:") as store:
        store.register(name, KV_DIM)
        assert resp("KV.PREFIX.LOOKUP", f"app:{name}") == "HIT"
        store.store_prefix(name, k, v)
        got = resp("V.FETCH", f"app:{name}_pv", "BATCH", 0, TOKENS)
        assert got == [layer.tobytes() for layer in through("int8", v)]
        resp("KV.PREFIX.REGISTER", f"app:{name}2", KV_DIM, "int8")
        for layer in range(LAYERS):
            for side, tensor in (("pk", k), ("pv", v)):
                sid, data = f"app:{name}2_{side}", tensor[layer].tobytes()
                assert resp("V.STOREBATCH", sid, layer, 0, TOKENS, data) == "OK"
        keys, values = store.fetch_prefix(f"{name}2", LAYERS, TOKENS, KV_DIM)
        np.testing.assert_array_equal(keys, through("int8", k))
        np.testing.assert_array_equal(values, through("int8", v))
        store.store_layer(f"{name}2", "K", LAYERS, 0, k[0])
        assert len(resp("V.FETCH", f"app:{name}2_pk", "BATCH", 0, TOKENS)) == LAYERS + 1
    resp.close()


def test_nothing_acknowledged_is_lost_with_the_server(start_server, name: str) -> None:  # type: ignore[no-untyped-def]
    k = rows(9, LAYERS, TOKENS, KV_DIM)
    server = start_server()
    with PionStore(address=server.address) as store:
        store.store_prefix(name, k, k)
        before = store.fetch_prefix(name, LAYERS, TOKENS, KV_DIM)
        assert store.info()["wal_bytes"] > 0
    server.kill()
    with PionStore(address=start_server().address) as store:
        assert store.lookup(name)
        np.testing.assert_array_equal(before, store.fetch_prefix(name, LAYERS, TOKENS, KV_DIM))
        assert store.save()
        info = store.info()
        assert (info["wal_bytes"], info["registered_prefixes"]) == (0, 1)
        np.testing.assert_array_equal(before, store.fetch_prefix(name, LAYERS, TOKENS, KV_DIM))


# Blobs


def test_a_blob_is_there_until_it_is_removed(both: ServerProcess) -> None:
    with LMCacheRemoteBackend(address=both.address) as backend:
        assert backend.ping()
        for key in ("model@1@0@deadbeef@fp16", "x" * 500, "two\nlines", b"\xff\xfe", ("a", 1)):
            assert (backend.contains(key), backend.get(key), backend.remove(key)) == (
                False, None, False
            )  # fmt: skip
            for blob in (b"", bytes(range(256)) * 1024, bytearray(b"shorter"), memoryview(b"v")):
                assert backend.put(key, blob)
                assert backend.get(key) == blob
                assert backend.put(key, blob)
            assert backend.contains(key)
            assert backend.remove(key)
            assert not backend.contains(key)


def test_two_deployments_do_not_see_each_others_blobs(both: ServerProcess, name: str) -> None:
    with (
        LMCacheRemoteBackend(address=both.address, ns_prefix="a") as a,
        LMCacheRemoteBackend(address=both.address, ns_prefix="b") as b,
    ):
        assert a.put(name, b"alpha")
        assert b.put(name, b"beta")
        assert (a.get(name), b.get(name)) == (b"alpha", b"beta")
        assert a.put(name, rows(1, 1 << 21).data)  # 8 MiB
        assert a.get(name) == rows(1, 1 << 21).tobytes()


def test_chunks_of_many_threads_are_not_mixed_up(both: ServerProcess, name: str) -> None:
    problems: list[str] = []

    def work(number: int) -> None:
        with LMCacheRemoteBackend(address=both.address) as backend:
            for size in (256 << 10, 1 << 20, 8 << 20):
                key, blob = f"{name}@{number:x}@{size}", np.random.default_rng(number).bytes(size)
                if not (backend.put(key, blob) and backend.contains(key)):
                    problems.append("not kept")
                if backend.get(key) != blob:
                    problems.append("another chunk came back")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_a_key_of_something_else_is_no_blob(both: ServerProcess, name: str) -> None:
    with (
        PionStore(address=both.address) as store,
        LMCacheRemoteBackend(address=both.address) as backend,
    ):
        store.store_prefix(name, rows(1, 1, 5, KV_DIM), rows(2, 1, 5, KV_DIM))
        assert not backend.contains(name)
        assert backend.get(name) is None


def test_a_backend_never_raises(both: ServerProcess, name: str) -> None:
    with LMCacheRemoteBackend(address=both.address) as backend:
        assert not backend.put(name, object())
        assert not backend.put(name, "text")
    gone = Client("unix:/tmp/pion-nobody.sock", timeout_s=0.2)
    with gone, LMCacheRemoteBackend(client=gone) as backend:
        assert not any(
            (backend.ping(), backend.put("k", b"v"), backend.contains("k"), backend.remove("k"))
        )
        assert backend.get("k") is None
    with pytest.raises(InvalidRequest):  # what a store of rows does instead
        PionStore(address=both.address).register("", KV_DIM)
