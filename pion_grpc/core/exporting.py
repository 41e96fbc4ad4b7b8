"""Export: the files that hold a prefix or a state, named for a client on this host that reads them.

Only files whose pages this process has checked since they last changed are named, so that such a client
need not check them again.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator

from pion_grpc.core.reading import Reading, segment_layout
from pion_grpc.core.values import ExportedFile, ExportExtent

CHECKED_MAX = 100_000
"""Files that are remembered as checked; the oldest are checked again."""


class Exports:
    """What one process has checked of the files that it names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checked: dict[str, tuple[int, int, int, int]] = {}

    def extents(self, reading: Reading) -> Iterator[ExportExtent]:
        """Yields the files that hold the rows or parts of an open prefix, every page of them checked.

        Raises:
            CorruptPrefix: a page does not have its checksum.
        """
        parent = ""
        with_parts = reading.part_owners
        for depth, row in enumerate(reading.chain):
            assert row.file is not None
            begin = min(max(row.base, reading.rows.begin), reading.rows.end)
            above = (
                reading.chain[depth + 1].base if depth + 1 < len(reading.chain) else row.token_count
            )
            count = max(0, min(above, reading.rows.end) - begin)
            if count or row.id in with_parts:
                file = self.checked(
                    row.file,
                    reading.segment_status(row.id),
                    segment_layout(row, parent).data_offset,
                    functools.partial(reading.check, row.id),
                )
                yield ExportExtent(file, begin - row.base if count else 0, count, begin)
            parent = row.namespace

    def checked(
        self, file: str, status: os.stat_result, data_offset: int, check: Callable[[], None]
    ) -> ExportedFile:
        """Names a segment, whose every page is checked unless it has not changed since it was.

        Args:
            file: as the catalogue knows it.
            status: of the open file.
            data_offset: where the data begins in it.
            check: reads every page; what it raises is raised.
        """
        exported = ExportedFile(file, status.st_dev, status.st_ino, status.st_size, data_offset)
        # Who changes a file can set its mtime back, but not its ctime.
        state = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        with self._lock:
            if self._checked.get(file) == state:
                return exported
        check()
        with self._lock:
            self._checked[file] = state
            if len(self._checked) > CHECKED_MAX:
                del self._checked[next(iter(self._checked))]
        return exported
