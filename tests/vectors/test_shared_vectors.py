"""What clients of all languages are held against holds for Python's first.

Beside the tests of each format: routes as metadata, frames that are refused, layouts by their text, and
the details of statuses.
"""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from pion_client.connection import Connection
from pion_client.errors import from_rpc_error
from pion_wire.framing import FrameError, parse_message
from pion_wire.layout import Layout, LayoutError


class EndedCall(grpc.RpcError):
    """A call that ended with these details."""

    def __init__(self, details: bytes) -> None:
        self._details = details
        try:
            self._status = status_pb2.Status.FromString(details)
        except DecodeError:
            self._status = status_pb2.Status()

    def code(self) -> grpc.StatusCode:
        """As the details say."""
        codes = {code.value[0]: code for code in grpc.StatusCode}
        return codes[self._status.code or 13]

    def details(self) -> str:
        """The message."""
        return self._status.message

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The details themselves."""
        return (("grpc-status-details-bin", self._details),)


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


@pytest.mark.parametrize("vector", section("errors", "statuses"), ids=lambda v: v["name"])
def test_a_reason_is_not_lost_on_its_way(vector: dict[str, Any]) -> None:
    error = from_rpc_error(EndedCall(bytes.fromhex(vector["status"])))
    assert error.from_transport == (vector["reason"] is None)
    if vector["reason"] is not None:
        assert error.reason == vector["reason"]
        assert error.metadata == vector["metadata"]
        retry_ms = None if error.retry_after_s is None else round(1_000 * error.retry_after_s)
        assert retry_ms == vector["retry_ms"]
