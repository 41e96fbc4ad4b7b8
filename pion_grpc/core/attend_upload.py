"""K/V that a client sends to be resident, on its way in.

The one decision: an upload has the room of what has come, not of what was declared, and loses it if too
little comes.
"""

import time
from collections.abc import Callable

import numpy as np

from pion_grpc.core.attend_room import Array, Room
from pion_grpc.core.attend_values import Shape, Warmed
from pion_grpc.core.order import PartOrder
from pion_grpc.errors import InvalidRequest, Stalled
from pion_wire.framing import PartChunk

UPLOAD_BYTES_PER_S = 256 << 10
"""The rate at which an upload must bring data to keep the room it has taken."""
UPLOAD_PATIENCE_S = 10.0
"""How long an upload may fall short of that."""


class EntryUpload:
    """Rows of one entry on their way in: all of K, then all of V, in order. Publish or abandon it.

    Args:
        room: of the device.
        shape: of K, and of V.
        keep: makes both resident, in memory of the room.
        clock: in seconds.

    Raises:
        InvalidRequest, OverBudget: the shape is empty or larger than the budget.
    """

    def __init__(
        self,
        room: Room,
        shape: Shape,
        keep: Callable[[Array, Array], Warmed],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        room.check_fits([shape])
        self._room = room
        self._keep = keep
        self._clock = clock
        self._order = PartOrder([4 * shape.values] * 2, "bytes")
        self._sides = [room.memory(shape) for _ in range(2)]
        self._cut = b""
        """Begin of a value whose end is in the next chunk."""
        self._reserved = 0
        self._patience_s = UPLOAD_PATIENCE_S
        self._waits_since = clock()

    def write(self, chunk: PartChunk) -> None:
        """Takes the next chunk; part 0 is K, 1 is V.

        Raises:
            InvalidRequest, ChecksumMismatch: it is not the next one, or damaged, or a value does not
                fit the residency's type.
            OverBudget: others are loading, and leave no room for it.
            Stalled: less comes than must.
        """
        self._order.accept(chunk)
        self._keep_pace(len(chunk.data))
        self._take(chunk)
        self._waits_since = self._clock()  # what this took is not the peer's time

    def publish(self) -> Warmed:
        """Makes the entry resident.

        Raises:
            InvalidRequest: rows are missing.
        """
        if not self._order.complete:
            raise InvalidRequest("bytes", "the stream ended before all declared rows came")
        warmed = self._keep(*self._sides)
        self.abandon()
        return warmed

    def abandon(self) -> None:
        """Gives the room back."""
        self._room.give_back(self._reserved)
        self._reserved = 0

    def _take(self, chunk: PartChunk) -> None:
        """Puts the values that are whole now where they belong."""
        first = chunk.offset_bytes // 4
        data = self._cut + chunk.data if self._cut else chunk.data
        count = len(data) // 4
        self._cut = bytes(data[4 * count :])
        if count:
            room = self._sides[chunk.part_index].reshape(-1)[first : first + count]
            self._room.take(room.nbytes)
            self._reserved += room.nbytes
            self._room.place(room, np.frombuffer(data, "<f4", count), "kv"[chunk.part_index])

    def _keep_pace(self, byte_count: int) -> None:
        """Raises Stalled unless enough has come lately: what came long ago earns no time."""
        self._patience_s -= self._clock() - self._waits_since
        if self._patience_s < 0:
            raise Stalled(f"less than {UPLOAD_BYTES_PER_S} bytes per second came")
        earned_s = byte_count / UPLOAD_BYTES_PER_S
        self._patience_s = min(self._patience_s + earned_s, UPLOAD_PATIENCE_S)
