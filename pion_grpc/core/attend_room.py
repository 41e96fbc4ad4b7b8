"""Room for K/V on its way to the compute device: how much may be loading at once, and its memory.

The one decision: what is being loaded may take as much as the budget, beside what is resident, and no
more, because room is taken before it is filled. Whoever finds none waits a while for the others.
"""

import contextlib
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pion_grpc.backends import QueryError, check_range
from pion_grpc.core.attend_values import Shape
from pion_grpc.errors import InvalidRequest, OverBudget
from pion_wire import limits

Array = npt.NDArray[Any]

ROOM_WAIT_S = 10.0
"""How long what would fit waits for the room of what is being loaded."""
HUGE_BYTES = 4 << 20
"""Memory that is worth huge pages."""


class Room:
    """The room of one compute device; safe to use from many threads."""

    def __init__(
        self, dtype: Literal["f32", "f16"], budget_bytes: int, wait_s: float = ROOM_WAIT_S
    ) -> None:
        self.dtype = dtype
        """Type of what is resident."""
        self.budget_bytes = budget_bytes
        self._wait_s = wait_s
        self._lock = threading.Condition(threading.Lock())
        self._taken_bytes = 0

    @contextlib.contextmanager
    def taken(self, shapes: Sequence[Shape]) -> Iterator[None]:
        """Holds room for entries that are being loaded; raises as `check_fits` and `take` do."""
        size = self.check_fits(shapes)
        self.take(size)
        try:
            yield
        finally:
            self.give_back(size)

    def check_fits(self, shapes: Sequence[Shape]) -> int:
        """Returns the bytes of entries.

        Raises:
            InvalidRequest: a shape is empty.
            OverBudget: they would not fit with everything else gone.
        """
        if any(min(shape) < 1 for shape in shapes):
            raise InvalidRequest("rows", "heads, rows and head_dim are at least 1 each")
        if len(shapes) > limits.ATTEND_ENTRIES_MAX:
            raise OverBudget(
                f"{len(shapes)} layers are more than the {limits.ATTEND_ENTRIES_MAX} entries there are"
            )
        itemsize = 2 if self.dtype == "f16" else 4
        size = sum(2 * shape.values * itemsize for shape in shapes)
        if size > self.budget_bytes:
            raise self._over_budget(size, "raise --resident-budget")
        return size

    def take(self, size: int) -> None:
        """Takes room in bytes, and waits for it while others are loading.

        Raises:
            OverBudget: they did not finish in time.
        """
        with self._lock:
            free = self._lock.wait_for(
                lambda: self._taken_bytes + size <= self.budget_bytes, self._wait_s
            )
            if not free:
                raise self._over_budget(size, f"{self._taken_bytes} are being loaded")
            self._taken_bytes += size

    def give_back(self, size: int) -> None:
        """Frees what was taken."""
        with self._lock:
            self._taken_bytes -= size
            self._lock.notify_all()

    def memory(self, shape: Shape) -> Array:
        """Returns memory for K or V, (heads, rows, head_dim), in pages of their own.

        They are taken as they are filled, and given back with the last reference.

        A heap would keep them, in pieces between others, and so hold twice what is resident.
        """
        dtype = np.dtype(np.float16 if self.dtype == "f16" else np.float32)
        size = shape.values * dtype.itemsize
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, dtype).reshape(shape)

    def place(self, room: Array, values: Array, field: str) -> None:
        """Puts values into memory; raises InvalidRequest if one does not fit the type."""
        try:
            check_range(values, self.dtype, field)
        except QueryError as error:
            raise InvalidRequest(error.field, error.reason) from error
        room[...] = values

    def _over_budget(self, size: int, why: str) -> OverBudget:
        return OverBudget(
            f"{size} bytes do not fit into the resident budget of {self.budget_bytes}: {why}",
            needed_bytes=size,
            budget_bytes=self.budget_bytes,
        )
