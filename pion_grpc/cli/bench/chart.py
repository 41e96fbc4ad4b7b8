"""A picture of the results for the documentation, in Mermaid, which code hosts draw.

Knows only the row whose figure matters most to a user: the time to the first token.
"""

import re

from pion_grpc.cli.bench.results import Row

_LENGTH = re.compile(r"first token after ([\d,]+) tokens.*, against cold$")


def first_tokens(row: Row) -> str:
    """Bars for each length of prompt: cold, and in front of it the same prompt from the store."""
    lengths: list[str] = []
    cold: list[int] = []
    warm: list[int] = []
    for result in row.results:
        found = _LENGTH.match(result.what)
        if found and result.figure is not None and result.peer_figure is not None:
            lengths.append(f'"{found[1]}"')
            cold.append(round(result.peer_figure))
            warm.append(round(result.figure))
    return "\n".join(
        [
            "```mermaid",
            "xychart-beta",
            '    title "Time to first token: cold, and in front of it from the store"',
            f'    x-axis "tokens of the prompt" [{", ".join(lengths)}]',
            f'    y-axis "ms" 0 --> {max(cold, default=1)}',
            f"    bar {cold}",
            f"    bar {warm}",
            "```",
        ]
    )
