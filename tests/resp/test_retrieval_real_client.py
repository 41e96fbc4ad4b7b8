"""Chunks of `pion-vllm-mlx`, unmodified: what one object ingests another prepares, and not otherwise."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pion_client.retrieval import HybridRetrievalCache
from pion_grpc.cli.smollm2 import random_llama
from tests.conftest import ServerProcess
from tests.resp.test_real_clients import (
    SUFFIX,
    TOKENS,
    decoded,
    port,
    prefilled,
    prompt,
    rounded,
    same_run,
)

client = pytest.importorskip("pion_vllm_mlx", reason="pion-vllm-mlx is not installed")


@pytest.fixture(scope="module")
def model() -> Any:
    return random_llama()


@pytest.fixture
def retrieval(
    model: Any, start_server: Callable[..., ServerProcess]
) -> Iterator[Callable[[], Any]]:
    """Makes objects that ask the same server, as processes of their own would."""
    server = start_server("--resp", "127.0.0.1:0")
    made: list[Any] = []

    def make() -> Any:
        made.append(client.HybridRetrievalCache(model, backend="pion", port=port(server)))
        return made[-1]

    yield make
    for one in made:
        one._pion.resp.sock.close()


def test_a_chunk_that_another_ingested_does_not_continue_otherwise(
    model: Any, retrieval: Callable[[], Any]
) -> None:
    retrieval().ingest("Eiffel: passage 1", prompt())
    second = retrieval()
    assert second.has("Eiffel: passage 1")
    assert not second.has("Eiffel: passage 2")
    cache, suffix = second.prepare("Eiffel: passage 1", SUFFIX, chunk_token_count=TOKENS)
    assert suffix == SUFFIX
    same_run(model, cache, rounded(model, prefilled(model, prompt())))
    assert second.stats()["hydrate_count"] == 1
    with pytest.raises(KeyError):
        second.prepare("Eiffel: passage 2", SUFFIX, chunk_token_count=TOKENS)


def test_its_compositions_are_not_others_than_ours(model: Any) -> None:
    theirs, ours = client.HybridRetrievalCache(model), HybridRetrievalCache(model)
    for one in (theirs, ours):
        one.set_shared_stub(prompt(1, 20))
        for number in (2, 3, 4):
            one.ingest_pack(str(number), prompt(number, 30))
    order = ["4", "2", "3"]
    answers = [decoded(model, one.prepare_multi(order, SUFFIX)[0], 4) for one in (theirs, ours)]
    (_, expected), (_, logits) = answers
    assert np.abs(logits - expected).max() < 1e-3
