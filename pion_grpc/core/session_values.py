"""What is said about sessions: which one an id means, what it holds, and what all of them hold.

Knows no store. The one decision: an id is taken apart here and nowhere else, so what `_pk` and `_pv` at
its end mean is one rule.
"""

import dataclasses
from typing import NamedTuple

from pion_grpc.core.declaration import Declaration
from pion_grpc.errors import InvalidRequest
from pion_grpc.storage.sides import SideCounts
from pion_wire.layout import Side, TensorLayout


class SessionName(NamedTuple):
    """Which side of which namespace a session id means."""

    namespace: str
    side: Side

    @classmethod
    def of(cls, sid: str) -> "SessionName":
        """Returns what `sid` means."""
        for side in Side:
            namespace = sid.removesuffix(f"_p{side.value}")
            if namespace and namespace != sid:
                return cls(namespace, side)
        return cls(sid, Side.K)


class WrongSize(InvalidRequest):
    """The bytes are not the rows that they were said to be."""

    def __init__(self, size: int, expected: int) -> None:
        super().__init__("rows", f"{size} bytes where {expected} belong")
        self.size = size
        self.expected = expected


class Unsettled(Exception):
    """Whether a prefix can be answered for is not known without looking at its files."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerInfo:
    """One layer of a session."""

    layer: int
    tensor: TensorLayout
    rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class SessionInfo:
    """What is known of a session."""

    number: int
    """Its own among all sessions."""
    generation: int
    """Of its prefix."""
    declaration: Declaration | None
    """None: stored over gRPC, where the layout says everything."""
    layers: tuple[LayerInfo, ...]
    """Those that have a tensor, in order."""

    @property
    def layer_count(self) -> int:
        """Layers from 0 on, those without a tensor included."""
        declared = len(self.declaration.layers) if self.declaration else 0
        return max(declared, self.layers[-1].layer + 1 if self.layers else 0)

    @property
    def rows(self) -> int:
        """Rows of all layers."""
        return sum(layer.rows for layer in self.layers)


class OwnTotals(NamedTuple):
    """What the counted sessions of one tenant hold."""

    sides: int
    rows: int
    fetched_rows: int


class SessionTotals(NamedTuple):
    """What the counted sessions hold, and what became of them."""

    prefixes: int
    """That have a K side."""
    prefix_rows: int
    """Of these sides, over all layers."""
    sides: int
    rows: int
    bytes: int
    fetched_rows: int
    """In this process."""
    unsaved_bytes: int
    """Size of the files that hold rows not saved yet."""
    since_start: SideCounts
