"""LMCache 0.5.6 keeps its chunks here, by its own `resp://` and `redis://` connectors, unchanged.

What it has in two forms is called in the asynchronous one: its synchronous calls wait for ever for an
answer that comes before they have noted that they wait for it.
"""

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import CreateConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

TOKENS, HEADS, DIM = 256, 8, 128
LAYERS = {"256 KB": 1, "1 MB": 1, "8 MB": 8}
DTYPE = {"256 KB": torch.float8_e4m3fn, "1 MB": torch.bfloat16, "8 MB": torch.bfloat16}
WAIT_S = 60


class Engine:
    """What LMCache's engine has of one connector: its loop, its memory, its keys."""

    def __init__(self, url: str, size: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.dtype = DTYPE[size]
        shape = (LAYERS[size], 2, TOKENS, HEADS, DIM // (2 if size == "256 KB" else 1))
        metadata = LMCacheMetadata("model/name", 1, 1, 0, 0, self.dtype, shape, chunk_size=TOKENS)
        is_resp = url.startswith("resp")
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=False,
            max_local_cpu_size=0.5,
            remote_url=url,
            remote_serde="naive",
            save_unfull_chunk=not is_resp,
            extra_config={"save_chunk_meta": not is_resp},
        )
        self.memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self.connector: Any = CreateConnector(url, self.loop, self.memory, config, metadata)
        self.shape = metadata.get_shapes()[0]

    def key(self, number: int) -> CacheEngineKey:
        return CacheEngineKey("model/name", 1, 0, number, self.dtype)

    def chunk(self, seed: int) -> Any:
        chunk = self.memory.allocate(self.shape, self.dtype)
        room = memoryview(chunk.byte_array).cast("B")
        room[:] = random.Random(seed).randbytes(len(room))
        return chunk

    def run(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(WAIT_S)

    def close(self) -> None:
        """Not by `connector.close()`, which in this version waits on the loop for the loop itself."""
        wrapped = self.connector.getWrappedConnector()
        if hasattr(wrapped, "client"):
            wrapped.client.close()
        self.run(_end_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


async def _end_tasks() -> None:
    """Ends what the connector has running for as long as its loop does."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(params=[(s, n) for s in ("resp", "redis") for n in LAYERS], ids=" ".join)
def engine(request: pytest.FixtureRequest, port: int) -> Iterator[Engine]:
    scheme, size = request.param
    engine = Engine(f"{scheme}://127.0.0.1:{port}", size)
    yield engine
    engine.close()


@pytest.fixture
def numbers(request: pytest.FixtureRequest) -> list[int]:
    """Hashes of chunks that nobody else uses."""
    generator = random.Random(request.node.name)
    return [generator.getrandbits(63) for _ in range(16)]


def test_a_chunk_comes_back_bit_for_bit(engine: Engine, numbers: list[int]) -> None:
    for number in numbers:
        key = engine.key(number)
        assert not engine.run(engine.connector.exists(key))
        chunk = engine.chunk(number)
        engine.run(engine.connector.put(key, chunk))
        assert engine.run(engine.connector.exists(key))
        got = engine.run(engine.connector.get(key))
        assert bytes(got.byte_array) == bytes(chunk.byte_array)
        got.ref_count_down()
        chunk.ref_count_down()


def test_batches_are_not_mixed_up(engine: Engine, numbers: list[int]) -> None:
    keys, chunks = [engine.key(n) for n in numbers], [engine.chunk(n) for n in numbers]
    if engine.connector.support_batched_put():
        engine.run(engine.connector.batched_put(keys, chunks))
    else:
        for key, chunk in zip(keys, chunks, strict=True):
            engine.run(engine.connector.put(key, chunk))
    if engine.connector.support_batched_async_contains():
        contains = engine.connector.batched_async_contains
        absent = [engine.key(number + 1) for number in numbers[:3]]
        assert engine.run(contains("id", keys + absent)) == len(keys)
        assert engine.run(contains("id", keys[:4] + absent + keys[4:])) == 4
    if engine.connector.support_batched_get():
        got = engine.run(engine.connector.batched_get(keys))
    else:
        got = [engine.run(engine.connector.get(key)) for key in keys]
    for mine, theirs in zip(chunks, got, strict=True):
        assert bytes(theirs.byte_array) == bytes(mine.byte_array)
    for chunk in (*chunks, *got):
        chunk.ref_count_down()


def test_what_is_not_there_is_a_miss(engine: Engine, numbers: list[int]) -> None:
    key = engine.key(numbers[0])
    assert not engine.run(engine.connector.exists(key))
