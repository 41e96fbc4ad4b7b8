"""Conversations that begin alike and part; as a program, in a process of its own.

    python -m tests.mlx.conversing ADDRESS RESULTS.npz SHARED:OWN…

Each conversation has so many tokens in common with the longest, and so many of its own; the boundary
between them is kept as a checkpoint. The logits that follow it in this process go into the file under
its name.
"""

import sys

import numpy as np

from pion_client.mlx import PionPromptCache
from tests.mlx import families
from tests.mlx.continuing import decoded

LONGEST = 352
STEP = 32
"""All prefills are split alike."""
WAIT_S = 120.0


def model():
    """Three recurrent slots and one of attention, whose rows are large beside what describes them."""
    return families.build("qwen3_next", head_dim=64, num_key_value_heads=4)


def conversation(name):
    """The tokens of a conversation, and how many it shares."""
    shared, own = map(int, name.split(":"))
    return [*families.tokens(LONGEST)[:shared], *families.tokens(own, seed=shared)], shared


def prompt_cache(which, **options):
    """One that keeps nothing between the boundaries it is told."""
    return PionPromptCache(which, checkpoint_every=0, prefill_step_size=STEP, **options)


def main(address, results, *names):
    """Prefills, stores and goes on with each conversation."""
    logits, which = {}, model()
    for name in names:
        ids, shared = conversation(name)
        with prompt_cache(which, address=address) as mine:
            cache = mine.get_or_prefill(ids, checkpoints=(shared,))
            logits[name] = decoded(which, cache, steps=8)
            assert mine.flush(WAIT_S)
            stats = mine.stats()
            assert (stats["stores"], stats["stored_whole"]) == (1, {}), stats
    np.savez(results, **logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
