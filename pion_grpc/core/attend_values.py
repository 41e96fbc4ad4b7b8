"""What Attend is asked for and answers: names, shapes and states of resident K/V."""

import enum
from typing import NamedTuple

from pion_grpc.core.values import check_layer, check_namespace
from pion_grpc.errors import InvalidRequest
from pion_wire import limits


class EntryState(enum.Enum):
    """Where an entry stands."""

    MISSING = "missing"
    COLD = "cold"
    RESIDENT = "resident"


class Key(NamedTuple):
    """The name of an entry."""

    tenant: str
    session: str
    layer: int


class Shape(NamedTuple):
    """Heads, rows and values per head of an entry."""

    heads: int
    rows: int
    head_dim: int

    @property
    def values(self) -> int:
        """Values of K, and as many of V."""
        return self.heads * self.rows * self.head_dim


class Source(NamedTuple):
    """A stored prefix whose rows become entries."""

    namespace: str
    heads: int = 0
    """K/V heads or, on a grouped model, query heads; 0 takes the layout's."""
    head_dim: int = 0
    """Values per head; 0 takes the layout's."""
    layers: frozenset[int] = frozenset()
    """Empty means all."""
    generation: int = 0
    """Which the rows must be of; 0 takes any."""
    rows: int = 0
    """How many rows from the first one; layers with fewer are skipped. 0 takes all there are."""


class EntryInfo(NamedTuple):
    """Where one entry stands, and its shape unless it is missing."""

    layer: int
    state: EntryState
    shape: Shape = Shape(0, 0, 0)


class Warmed(NamedTuple):
    """What making a prefix resident came to."""

    layers: int
    skipped: int
    """Layers that do not have the shape asked for."""
    resident_bytes: int


class Telemetry(NamedTuple):
    """Counts for people who watch the server."""

    warm: int = 0
    """Entries that are resident."""
    cold: int = 0
    """Entries that are known but not resident."""
    demotions: int = 0
    """Transitions from resident to cold since the start."""
    rehydrates: int = 0
    """Transitions from cold to resident since the start."""
    resident_bytes: int = 0
    """K and V that are resident. Block summaries come on top, at most a quarter of that."""


def check_key(key: Key) -> None:
    """Raises InvalidRequest unless an entry may have that name."""
    check_namespace(key.session, "session")
    check_layer(key.layer)


def check_layer_count(count: int) -> None:
    """Raises InvalidRequest for more layers than a request may name."""
    if count > limits.ATTEND_LAYERS_MAX:
        raise InvalidRequest(
            "layers",
            f"more than {limits.ATTEND_LAYERS_MAX}",
            limit=limits.ATTEND_LAYERS_MAX,
        )
