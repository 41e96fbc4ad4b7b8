"""What clients of all languages are held against holds for Python's first.

Beside the tests of each format: routes as metadata, frames that are refused, layouts by their text.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from pion_client.connection import Connection
from pion_wire.framing import FrameError, parse_message
from pion_wire.layout import Layout, LayoutError


def section(name: str, key: str) -> list[dict[str, Any]]:
    """Returns a list of vectors; there must be some."""
    vectors: list[dict[str, Any]] = json.loads(
        (Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8")
    )[key]
    assert vectors
    return vectors


@pytest.mark.parametrize("vector", section("blocks", "routes"), ids=lambda v: v["metadata"])
def test_equal_names_do_not_get_different_routes(vector: dict[str, str]) -> None:
    metadata = dict(Connection("127.0.0.1:1").metadata(vector["route"]))
    assert metadata["pion-route"] == vector["metadata"]
    assert vector["metadata"].isascii()


@pytest.mark.parametrize("vector", section("framing", "refused"), ids=lambda v: v["why"])
def test_bytes_that_are_no_message_are_not_taken(vector: dict[str, str]) -> None:
    with pytest.raises(FrameError):
        parse_message(bytes.fromhex(vector["message"]))


@pytest.mark.parametrize("vector", section("layouts", "layouts"), ids=lambda v: v["text"])
def test_a_layout_is_not_another_in_another_language(vector: dict[str, Any]) -> None:
    layout = Layout.from_json(vector["text"])
    assert layout.to_json() == vector["text"]
    assert layout.fidelity == vector["fidelity"]
    assert [tensor.name for tensor in layout.tensors] == vector["names"]
    value_bytes = [t.heads * t.head_dim * t.dtype.itemsize for t in layout.tensors]
    assert value_bytes == vector["row_bytes"]
    for tensor, size in zip(layout.tensors, value_bytes, strict=True):
        assert tensor.codec != "raw" or tensor.row_bytes == size


@pytest.mark.parametrize("vector", section("layouts", "refused"), ids=lambda v: v["why"])
def test_a_text_that_is_no_layout_is_not_taken(vector: dict[str, str]) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(vector["text"])
