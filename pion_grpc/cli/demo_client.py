"""One client process of the demo: `python -m pion_grpc.cli.demo_client ADDRESS`.

Both clients run this program; only what the server has stored differs. It asks for the prompt's cache,
continues it with the question, and waits until everything is stored. Its report goes to stdout, one JSON
object per line.

The one decision: the answer is computed the same way with and without a hit, on a cache of exactly the
prompt's tokens. So the prefill of both processes is split at the same token, and the answers can be
compared token for token.
"""

import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pion_grpc.cli.smollm2 import Tokenizer

ANSWER_TOKENS_MAX = 48
STORE_TIMEOUT_S = 60.0
QUESTION = "When was the great lens made?"
PROMPT = """\
You are the guide of a small museum. Answer the visitor's question in one short sentence, from \
this handbook only.

The Lantern House is a museum of lighthouses and of the people who kept them. It stands on the \
north pier of Port Halden, in the keeper's cottage of a lighthouse that was lit for the first \
time in 1871 and put out for good in 1963. The museum was opened in 1978 by Ingrid Solberg, the \
daughter of the last keeper.

Opening hours. The museum is open every day except Monday, from ten in the morning until five in \
the afternoon. In July and August it stays open until eight in the evening. It is closed from \
the first of January to the end of February, when the pier is often covered by ice.

Tickets. A ticket costs nine crowns for adults and four crowns for students. Children under \
twelve enter free of charge. School classes pay thirty crowns together, and should write a week \
before they come. Tickets are sold at the door, by Martin, who also takes care of the garden.

The tower. Visitors can climb the tower, which is 31 metres high and has 148 steps. At most six \
people may be in the lamp room at the same time. The tower is closed when the wind is stronger \
than fifteen metres per second, because the door of the gallery can no longer be held.

The collection. The great lens on the ground floor was made in Paris in 1869. It weighs two \
tonnes, floats in a bath of mercury, and can be turned with one finger. In the next room are the \
log books of four keepers. The oldest one tells of the storm of 1894, in which the brig Aurora \
was lost with eleven men. In the cellar there is a fog horn that is sounded once a day, at noon; \
visitors who are afraid of loud noises are asked to wait in the garden.

The cafe. The cafe in the old boat house serves fish soup, rye bread and waffles with cloudberry \
jam. It closes half an hour before the museum. Dogs are welcome in the cafe and in the garden, \
but not in the tower.

How to get there. Bus number 7 goes from the railway station to the north pier every twenty \
minutes; the ride takes a quarter of an hour. There is no car park on the pier. A ferry from \
Saltholm lands beside the museum at eleven and at three o'clock from May to September.
"""


def main(address: str) -> None:
    """Gets the cache, answers, waits until it is stored, and reports."""
    _report("loading")
    try:
        from pion_client.mlx import PionPromptCache, model_id
        from pion_grpc.cli import smollm2
        from pion_grpc.cli.decode import greedy
    except ImportError as error:
        sys.exit(f"{error}: the demo needs mlx-lm; in a clone: pip install 'clients/python[mlx]'")
    try:
        model, tokenizer = smollm2.load()
    except (smollm2.ModelMissingError, OSError) as error:
        sys.exit(str(error))
    model_id(model)  # computed once per loaded model, not once per prompt
    prompt_ids, question_ids = conversation(tokenizer)
    with PionPromptCache(model, address=address) as prompts:
        _report("asking", prompt_tokens=len(prompt_ids), question_tokens=len(question_ids))
        started = time.perf_counter()
        cache = prompts.get_or_prefill(prompt_ids)
        cache_ms = (time.perf_counter() - started) * 1e3
        answer = greedy(model, question_ids, cache, ANSWER_TOKENS_MAX, eos_id=tokenizer.eos_id)
        _report(
            "answered",
            cache_ms=cache_ms,
            ttft_ms=cache_ms + answer.ttft_ms,
            answer_ids=answer.ids,
            answer=tokenizer.decode(answer.ids, skip_special_tokens=True).strip(),
            hit=prompts.stats()["hits"] == 1,
        )
        flushed = prompts.flush(STORE_TIMEOUT_S)
        _report("done", flushed=flushed, stats=prompts.stats())


def conversation(tokenizer: "Tokenizer") -> tuple[list[int], list[int]]:
    """Returns the tokens of the prompt, and those of the question that follows it.

    The cut is where the system's turn ends: what comes before it is the same for every question.
    """
    ids = tokenizer.chat(
        [{"role": "system", "content": PROMPT}, {"role": "user", "content": QUESTION}]
    )
    turn = ids[0]  # every turn begins with the same token
    cut = ids.index(turn, 1)
    return ids[:cut], ids[cut:]


def _report(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
