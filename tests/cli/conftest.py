"""Commands run in this process, and prefixes for them to work on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pion_client import Client
from pion_grpc.cli.main import main

Layers = list[tuple[np.ndarray, np.ndarray]]


class Ran(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `pion-grpc` with these arguments, in an environment that says nothing of servers."""
    for name in ("ADDRESS", "TENANT", "PASSWORD", "PASSWORD_FILE", "DATA", "TIMEOUT"):
        monkeypatch.delenv(f"PION_{name}", raising=False)

    def run(*arguments: str | Path) -> Ran:
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as refused:  # argparse
            status = int(str(refused.code))
        captured = capsys.readouterr()
        return Ran(status, captured.out, captured.err)

    return run


def noise(tokens: int, *, slots: int = 2, salt: int = 0) -> Layers:
    """Rows of every bit pattern, NaNs among them."""
    random = np.random.default_rng([tokens, slots, salt])

    def side() -> np.ndarray:
        return random.integers(0, 1 << 16, (2, tokens, 8), np.uint16).view(np.float16)

    return [(side(), side()) for _ in range(slots)]


def same_bits(one: Layers, other: Layers) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.view(np.uint16), b.view(np.uint16))
        for pair, others in zip(one, other, strict=True)
        for a, b in zip(pair, others, strict=True)
    )


def store(client: Client, name: str, tokens: int = 70, **options: Any) -> Layers:
    """Stores a prefix whose token ids count up, and returns its rows."""
    layers = noise(tokens, salt=len(name))
    base = options.get("base", 0)
    client.store(
        name,
        layers=[(k[:, base:], v[:, base:]) for k, v in layers],
        token_ids=range(tokens),
        model=options.pop("model", "model"),
        **options,
    )
    return layers
