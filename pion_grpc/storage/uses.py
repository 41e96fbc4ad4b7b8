"""Uses: when a process last used which prefixes, where every process of the directory can read it.

`run/<instance>-uses` is mapped into memory and consists of 64-bit words in the machine's order::

    word  0            uses up to this time are in the catalogue
    word  1            number of entries
    words 2, 3, 4 …    key and time of the first entry, of the second …

A time is in unix nanoseconds; of two uses in one process the later one has the greater time. What a
key means is the caller's. There is one entry for each, and a file that is full is replaced by a new
one, with the entries that are not in the catalogue yet.

The one decision to understand: **nobody locks anything against readers.** A key is written once, before
it counts; a time is one aligned word. So a reader finds a use or, if it looks in the very moment of it,
does not yet. Noting one costs no system call: it happens at every request, reading only before
something goes for want of room.
"""

import mmap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pion_grpc.storage.directory import DataDirectory

ENTRIES = 1_023
"""Of a new file, which has 16 KiB then; more where a second brings more."""
_HEADER_WORDS = 2

Use = tuple[int, int]
"""Key and time."""


class UseFile:
    """The uses of one process; safe to use from many threads."""

    def __init__(self, directory: DataDirectory) -> None:
        self._directory = directory
        self._path = _path(directory, directory.instance)
        self._lock = threading.Lock()
        self._latest = 0
        self._written = 0
        self._begin([])

    def note(self, key: int) -> None:
        """Notes a use now."""
        now = time.time_ns()
        with self._lock:
            self._latest = now = max(now, self._latest + 1)
            place = self._places.get(key)
            if place is not None:
                self._words[place] = now
            else:
                self._add(key, now)

    def unwritten(self) -> list[Use]:
        """Returns the uses that are not in the catalogue yet, the earliest first."""
        if self._latest == self._written:
            return []
        with self._lock:  # of two uses, never the later one without the earlier
            return _unwritten(np.frombuffer(self._mapped, np.uint64))

    def written(self, until: int) -> None:
        """Notes that all uses up to a time are in the catalogue."""
        with self._lock:
            self._written = max(self._written, until)
            self._words[0] = self._written
            if len(self._places) > self._entries_max // 2 or not self._shared:
                self._begin_anew()

    def of_others(self) -> Iterator[list[Use]]:
        """Yields what each of the other processes has not written into the catalogue yet."""
        for instance in self._directory.live_instances() - {self._directory.instance}:
            yield _read(_path(self._directory, instance))

    def of_dead(self, instance: str) -> list[Use]:
        """Returns what a process that is gone has not written into the catalogue.

        What a power cut has left of its file may be anything, but no use is of the future.
        """
        now = time.time_ns()
        return [use for use in _read(_path(self._directory, instance)) if use[1] <= now]

    def _add(self, key: int, now: int) -> None:
        if len(self._places) == self._entries_max:
            self._begin_anew()
        count = len(self._places)
        place = _HEADER_WORDS + 2 * count + 1
        self._words[place - 1], self._words[place] = key, now
        self._words[1] = count + 1
        self._places[key] = place

    def _begin_anew(self) -> None:
        self._begin(_unwritten(np.frombuffer(self._mapped, np.uint64)))

    def _begin(self, uses: list[Use]) -> None:
        """Makes a file with these uses, in place of the one before.

        On a full disk it is memory of this process alone, until what is in it has been written down.
        """
        entries_max = ENTRIES
        while entries_max < 2 * len(uses):
            entries_max = 2 * entries_max + 1
        words = np.zeros(_HEADER_WORDS + 2 * entries_max, np.uint64)
        words[:_HEADER_WORDS] = self._written, len(uses)
        words[_HEADER_WORDS : _HEADER_WORDS + 2 * len(uses)] = np.array(uses, np.uint64).ravel()
        try:
            self._mapped, self._shared = _mapped_file(self._path, words.tobytes()), True
        except OSError:
            self._mapped, self._shared = mmap.mmap(-1, words.nbytes), False
            self._mapped.write(words.tobytes())
        self._words = memoryview(self._mapped).cast("Q")
        self._entries_max = entries_max
        self._places = {key: _HEADER_WORDS + 2 * place + 1 for place, (key, _) in enumerate(uses)}


def _path(directory: DataDirectory, instance: str) -> Path:
    return directory.run / f"{instance}-uses"


def _mapped_file(path: Path, content: bytes) -> mmap.mmap:
    """Returns a file of that content, in place of the one before.

    Raises:
        OSError: it cannot be written.
    """
    scratch = path.with_suffix(".new")
    try:
        # Written and not only made longer: a page that the disk has no room for ends the process.
        scratch.write_bytes(content)
        with scratch.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), len(content))
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    return mapped


def _read(path: Path) -> list[Use]:
    """Returns the unwritten uses of a file; none if it is gone, or what a power cut left of one."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):
        return []
    words = np.frombuffer(mapped, np.uint64, len(mapped) // 8)
    return _unwritten(words) if len(words) >= _HEADER_WORDS else []


def _unwritten(words: npt.NDArray[np.uint64]) -> list[Use]:
    written, count = (int(word) for word in words[:_HEADER_WORDS])
    count = min(count, len(words) // 2 - 1)
    entries = words[_HEADER_WORDS : _HEADER_WORDS + 2 * count].reshape(-1, 2).copy()
    fresh = entries[entries[:, 1] > written]
    return [(key, at) for key, at in fresh[fresh[:, 1].argsort()].tolist()]
