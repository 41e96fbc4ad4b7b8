"""Continuing from a cache; as a program, in a process that has nothing but a server's address.

    python -m tests.mlx.continuing ADDRESS RESULTS.npz JOB…

Each job is `family:dtype:tokens`, with `:steps` if it is continued by more than a few tokens. Its logits
go into the file under its name, and what the prompt cache says about it to the standard output, one JSON
object a line.
"""

import json
import sys

import mlx.core as mx
import numpy as np

from pion_client.mlx import PionPromptCache
from tests.mlx import families

STEPS = 32


def decoded(model, cache, steps=STEPS):
    """The logits of so many single tokens, which are the same whatever the logits are."""
    logits = []
    for token in families.tokens(steps, seed=99):
        logits.append(model(mx.array([[token]]), cache=cache)[0, -1])
        mx.eval(logits[-1])
    return np.asarray(mx.stack(logits).astype(mx.float32))


def prompt(job):
    """The model of a job, its tokens (no two lengths share a beginning), and its steps."""
    family, dtype, count, *steps = job.split(":")
    ids = families.tokens(int(count), seed=int(count))
    return families.build(family, dtype), ids, int(steps[0]) if steps else STEPS


def main(address, results, *jobs):
    """Fetches what each job has stored, and decodes."""
    logits = {}
    for job in jobs:
        model, ids, steps = prompt(job)
        with PionPromptCache(model, address=address) as prompt_cache:
            logits[job] = decoded(model, prompt_cache.get_or_prefill(ids), steps)
            print(json.dumps(prompt_cache.stats()))
    np.savez(results, **logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
