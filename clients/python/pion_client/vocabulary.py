"""Token ids that a model can be run on.

Knows embeddings and token ids; neither texts nor tokenizers. The one decision: an id is compared with
the rows of the model's embedding before the model sees it, wherever it comes from: a caller, a file or
a server. MLX does not compare, and reads beyond the memory of the embedding. Which one that is, the
model's arguments tell: others embed positions, or several tokens at once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding

from pion_client.identity import arguments
from pion_wire import blocks


class Vocabulary:
    """How many token ids a model has.

    Args:
        model: a loaded mlx-lm model. Of one that tells nothing, every id is taken.
    """

    def __init__(self, model: Any) -> None:
        modules: list[Any] = []
        if isinstance(model, Module):
            modules = model.modules()  # type: ignore[no-untyped-call]
        embeddings = (m for m in modules if isinstance(m, Embedding | QuantizedEmbedding))
        rows = max((int(one.weight.shape[0]) for one in embeddings), default=1 << 32)
        said = [size for name, size in arguments(model) if name == "vocab_size" and size]
        self.size: int = min(rows, max(said, default=rows))
        """Ids are below it."""

    def packed(self, token_ids: Sequence[int]) -> bytes:
        """Returns token ids as u32, little-endian.

        Args:
            token_ids: at least one: a list, a NumPy or an MLX array.

        Raises:
            ValueError: there are none, they are not token ids, or the model does not have one of them.
        """
        if isinstance(token_ids, str | bytes):
            raise ValueError("token ids are needed, not text: encode it first")
        packed = blocks.pack_token_ids(np.asarray(token_ids))
        if not packed:
            raise ValueError("there are no token ids")
        if not self.has(packed):
            raise ValueError(f"a token id is not below {self.size}, the size of the vocabulary")
        return packed

    def has(self, packed: bytes) -> bool:
        """Whether there are packed ids, and the model has all of them."""
        return bool(packed) and int(np.frombuffer(packed, "<u4").max()) < self.size
