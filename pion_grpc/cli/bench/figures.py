"""The figures that the product was described with, and ours beside them.

Each entry is one table of that description: its figures, the command that measures the same here, and
the hardware that the rest of it needs. They were measured on Apple silicon with models of one to four
billion parameters; ours come from whatever machine ran the benchmark.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pion_grpc.cli.bench.results import Result, Row
from pion_grpc.cli.bench.table import markdown_table, number

NO_FIGURE = "not measured yet"


class Figure(NamedTuple):
    """One table of the description."""

    what: str
    figure: str
    command: str
    """What measures it here."""
    row: str = ""
    """The row of the benchmark whose results are ours."""
    containing: tuple[str, ...] = ()
    """Of these results only those whose `what` has one of these texts in it."""
    needs: str = ""
    """What the rest would need."""


_APPLE = "Apple silicon with Metal"
_BENCH = "pion-grpc bench"

FIGURES = (
    Figure(
        "workload of 5 prompts × 30 queries",
        "hits 145 of 150 (96.7 %). Llama-3.2-1B 4-bit: 846 → 91 ms to the first token (9.26 ×), "
        "throughput 9.20 ×; 3B: 2,075 → 278 ms (7.47 ×), 7.46 ×; first tokens agree in 50 of 50",
        f"{_BENCH} workload --prompts 5 --queries 30 --prompt-repeats 8",
        "workload",
        needs=f"{_APPLE}, the two Llama models",
    ),
    Figure(
        "second client, another process and model object",
        "finds the hit before any work of its own; 50 greedy tokens identical (BLEU 1.0000)",
        "pion-grpc demo; pytest tests/mlx/test_real_model.py",
        needs="nothing: asserted by the tests on SmolLM2-135M",
    ),
    Figure(
        "time to first token by prompt length",
        "1B: cold 186, 743, 1,530 ms at 256, 1,024, 2,048 tokens; cache rebuilt from the store 11.5, "
        "35.1, 83.8 ms; 3B at 1,024: 1,951 → 137 ms",
        f"{_BENCH} first-token",
        "first-token",
        needs=f"{_APPLE}, the two Llama models",
    ),
    Figure(
        "receipt: prefill time avoided per token",
        "555 µs, from 2,022 tokens of the 1B model: cold 1,218 ms, warm 95 ms",
        f"{_BENCH} first-token (cold and export at 2,048 tokens)",
        "first-token",
        ("2,048 tokens, SmolLM2-135M: export, against cold",),
        needs=f"{_APPLE}, Llama-3.2-1B 4-bit",
    ),
    Figure(
        "code assistants: repository prefix of 6,000 tokens and more",
        "the gain grows with the prefix (no figure)",
        f"{_BENCH} long-prompts",
        "long-prompts",
        needs="a real model, and a machine that prefills it in seconds",
    ),
    Figure(
        "Membership, 1,562 of 1,562 hashes",
        "125 µs p50, 270 µs p99 over loopback, most of it the round trip; answer 196 bytes",
        f"{_BENCH} calls",
        "calls",
        ("Membership",),
        needs=_APPLE,
    ),
    Figure(
        "bytes per token",
        "mlx4g32: 640 bytes per token and side at a row of 1,024 values, fp16 2,048 (3.2 ×): 86,580 "
        "tokens of a 4B model in 16 GB. INT4: 8, 32, 80 KB a token for models of 1B, 8B, 70B, 2, 8, "
        "20 MB per 256-token chunk",
        "pion-grpc doctor",
        needs="nothing: arithmetic, asserted by the codec tests",
    ),
    Figure(
        "mlx4g32: error of K",
        "mean absolute error 0.038 where turbo4 has 0.047; affine beats symmetric by 2.92 points; "
        "groups of 64 changed digits of recalled facts",
        "pytest tests/unit/test_codecs.py",
        needs=f"{_APPLE} and the models for the generations",
    ),
    Figure(
        "formats: BLEU of 50 greedy tokens, 20 questions",
        "fp16 0.969, first tokens 20 of 20; turbo4 (3.51 × smaller) 0.538, 18 of 20; int8 (2 ×) first "
        "tokens right in 95 % and more",
        f"{_BENCH} formats",
        "formats",
        tuple(f"K and V {codec}: first" for codec in ("fp16", "int8", "turbo4", "mlx4g32")),
        needs=f"{_APPLE}, Llama-3.2-1B 4-bit",
    ),
    Figure(
        "boundary layers in fp16, middle layers of V in fp8",
        "first token 2.88 × sooner, throughput 2.87 ×, first tokens 15 of 15; all fp16: 2.75 ×, 2.74 ×, "
        "14 of 15. Drift less by 33 % (int8) and 42 % (turbo4)",
        f"{_BENCH} formats",
        "formats",
        ("V fp8", "V int8", "V turbo4"),
        needs=f"{_APPLE}, Llama-3.2-1B 4-bit",
    ),
    Figure(
        "attention on the server, H=8 N=2,048",
        "D=64: K/V sent each time 194 ms, only Q 1.33 ms (146 ×); native Metal: store 4.6 ms, query "
        "0.65 ms. D=128, M=1: 0.441 ms where MLX alone takes 0.489. Cosine 1.0000; 20 of 20 tokens",
        f"{_BENCH} attend-bulk",
        "attend-bulk",
        ("sent once", "uploaded"),
        needs=_APPLE,
    ),
    Figure(
        "patched mlx-lm, attention on the server, first token",
        "1B: 23.8, 26.0, 30.2 ms at 256, 1,024, 2,048 tokens; 3B at 1,024: 53.7 ms; ahead of the "
        "rebuilt cache from some 512 tokens on",
        f"{_BENCH} attend-first-token",
        "attend-first-token",
        needs=f"{_APPLE}, the two Llama models",
    ),
    Figure(
        "several queries of a step at once (M > 1)",
        "22.9 ms at the shape of the 3B model, one by one 754 ms (32.9 ×)",
        f"{_BENCH} attend-bulk",
        "attend-bulk",
        ("queries at once",),
        needs=_APPLE,
    ),
    Figure(
        "lanes of the patched model, 5 × 20 requests",
        "first token 108 ms over RESP, 91.6 over the binary lane, 39.6 in the process; one call 1.63 "
        "and 0.99 ms",
        f"{_BENCH} attend-resp-first-token",
        "attend-resp-first-token",
        needs=f"{_APPLE}, Llama-3.2-1B 4-bit",
    ),
    Figure(
        "sparse attention at 64K tokens",
        "needle found in 100 %, first token 326 × sooner than without",
        f"{_BENCH} attend-bulk",
        "attend-bulk",
        ("blocks of 64",),
        needs=f"{_APPLE}, Gemma-4-E2B 4-bit",
    ),
    Figure(
        "cold tier",
        "warming an entry takes 50 to 200 ms, a query of a warm one less than 1 ms",
        f"{_BENCH} attend-bulk",
        "attend-bulk",
        ("made resident",),
        needs=_APPLE,
    ),
    Figure(
        "recurrent state",
        "Mamba-130M, Mamba-370M, RWKV-7 168M: bit-equal after a round trip, all tokens agree",
        f"{_BENCH} state; pytest tests/mlx/test_families.py",
        "state",
        needs="the three models; bits and tokens are asserted by the tests on small random ones",
    ),
    Figure(
        "hybrid model Qwen3.5-4B 4-bit, first token",
        "6,080 → 246 ms at 2,048 tokens (24.8 ×), 12,757 → 390 at 4,096 (32.7 ×), 27,598 → 2,373 at "
        "8,192 (11.6 ×); 18, 16, 18 of 18 tokens agree; 3.3 × at 174 tokens",
        f"{_BENCH} hybrid-first-token",
        "hybrid-first-token",
        needs=f"{_APPLE}, the model",
    ),
    Figure(
        "retrieved chunks from the store",
        "first token sooner by 46 % (29 to 61), in the process by 55 % (37 to 73)",
        f"{_BENCH} retrieval",
        "retrieval",
        ("saved",),
        needs=f"{_APPLE}, Llama-3.2-1B 4-bit",
    ),
)


def markdown(measured: Mapping[str, Row]) -> str:
    """The table of the documentation."""
    lines = [
        [
            figure.what,
            figure.figure,
            f"`{figure.command}`" if figure.command.startswith(_BENCH) else figure.command,
            ours(figure, measured),
            figure.needs,
        ]
        for figure in FIGURES
    ]
    headings = ("what", "described with", "our command", "our figure", "needed for the rest")
    return markdown_table(headings, lines)


def ours(figure: Figure, measured: Mapping[str, Row]) -> str:
    """Our figures for a table of the description; empty where no row measures it."""
    if not figure.row:
        return ""
    row = measured.get(figure.row)
    chosen = [
        result
        for result in (row.results if row else ())
        if result.figure is not None
        and (not figure.containing or any(text in result.what for text in figure.containing))
    ]
    return "<br>".join(map(_text, chosen)) or NO_FIGURE


def _text(result: Result) -> str:
    assert result.figure is not None
    text = f"{result.what}: {number(result.figure)} {result.unit}"
    if result.peer is None or result.peer_figure is None or result.ratio is None:
        return text
    return f"{text}, {result.peer.name} {number(result.peer_figure)} ({number(result.ratio)} ×)"
