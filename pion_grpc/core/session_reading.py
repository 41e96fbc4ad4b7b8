"""Rows of one session, open for reading, layer by layer.

Refuses to know how rows lie in files; `Reading` does. The one decision: layers are asked for by number,
whichever of them exist, and rows beyond a layer's end are zeros: clients ask without asking first.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.reading import Reading
from pion_wire.layout import TensorLayout


class SessionReading:
    """Open rows of a session. Close it, or read them to the end inside `guarded`."""

    def __init__(self, store: PrefixStore, reading: Reading, layer_count: int) -> None:
        self.layer_count = layer_count
        self._store = store
        self._reading = reading
        tensors = reading.served_layout.tensors
        self._positions = {tensor.slot: position for position, tensor in enumerate(tensors)}
        self._tensors = tensors

    @property
    def version(self) -> tuple[int, int]:
        """Whose rows they are: the prefix, and its generation."""
        prefix = self._reading.chain[-1]
        return prefix.id, prefix.generation

    def row_count(self, layer: int) -> int:
        """Returns the rows that a layer has; 0 if it does not exist."""
        position = self._positions.get(layer)
        if position is None:
            return 0
        return self._reading.row_counts[self._reading.tensors[position]]

    def row_bytes(self, layer: int) -> int:
        """Returns the bytes of a row as it is handed out, of a layer that exists."""
        return self._tensors[self._positions[layer]].row_bytes

    def tensor(self, layer: int) -> TensorLayout:
        """Returns how the rows of a layer that exists are handed out."""
        return self._tensors[self._positions[layer]]

    def stored_tensor(self, layer: int) -> TensorLayout:
        """Returns how the rows of a layer that exists are stored."""
        return self._reading.layout.tensors[self._reading.tensors[self._positions[layer]]]

    def rows(self, layer: int, begin: int, end: int) -> Iterator[memoryview]:
        """Yields rows of a layer that exists, in pieces of at most 1 MiB; zeros beyond its end.

        Raises:
            CorruptPrefix: a page does not have its checksum; see `guarded`.
        """
        return self._reading.rows_of(self._positions[layer], begin, end)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Closes the files at the end, and takes out the prefix if it turned out to be damaged."""
        with self._store.guarded(self._reading):
            yield

    def close(self) -> None:
        """Closes the files."""
        self._reading.close()
