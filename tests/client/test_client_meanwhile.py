"""What others do between two calls of one client."""

import numpy as np
import pytest

from pion_client.mlx import HybridRetrievalCache
from pion_grpc.cli.smollm2 import random_llama
from tests.client.between import Between
from tests.conftest import ServerProcess

OLD, LONGER, SHORTER = (
    np.random.default_rng(count).integers(0, 512, count).tolist() for count in (100, 150, 70)
)


@pytest.mark.parametrize("newer", [LONGER, SHORTER], ids=["longer", "shorter"])
def test_a_chunk_that_is_replaced_meanwhile_never_has_a_part_of_its_tokens(
    server: ServerProcess, newer: list[int]
) -> None:
    model = random_llama()
    with (
        Between(server.address) as client,
        HybridRetrievalCache(model, backend="pion", address=server.address) as other,
        HybridRetrievalCache(model, backend="pion", client=client) as retrieval,
    ):
        other.ingest("c", OLD)
        client.happens = iter([lambda: other.ingest("c", newer)])
        cache, rest = retrieval.prepare("c", [1, 2, 3])
        assert next(client.happens, None) is None
        assert (cache[0].offset, rest) == (len(newer), [1, 2, 3])
        assert retrieval.stats()["alone"] == 0
        assert other.evict("c")
