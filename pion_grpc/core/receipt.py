"""The value receipt: what the store did for its clients.

A hit is counted once, when Lookup or Match answers; tokens, bytes and seconds when a Fetch has ended
well or an Export has been answered. Bytes count whatever they are of; tokens and seconds only where all
tensors were asked for, as some of them spare nobody a prefill. Seconds are of two kinds and never mixed:
measured ones come from a prefill time that a client reported, estimated ones from a constant per token.

Each process counts by itself. What one of several had counted goes on counting when it is gone.
"""

import json
import threading
from collections.abc import Iterable
from typing import NamedTuple

from pion_grpc.core.values import RowRange
from pion_grpc.storage.catalog import Catalog
from pion_grpc.storage.directory import DataDirectory
from pion_grpc.storage.transaction import PrefixRow, Transaction, unix_ms

ESTIMATED_SECONDS_PER_TOKEN = 555e-6
"""Prefill of a 4-bit model with 1 billion parameters on an M-series Mac; larger ones cost more."""


class Receipt(NamedTuple):
    """The counters since `since_unix_ms`."""

    hits: int
    misses: int
    measured_hits: int
    tokens_served: int
    bytes_streamed: int
    bytes_exported: int
    seconds_measured: float
    seconds_estimated: float
    since_unix_ms: int

    @property
    def seconds_avoided(self) -> float:
        """Prefill time avoided, of both kinds."""
        return self.seconds_measured + self.seconds_estimated


def summed(receipts: Iterable[Receipt]) -> Receipt:
    """Returns what several processes did together, since the one that counts longest began."""
    total = _empty()
    for receipt in receipts:
        added = (mine + other for mine, other in zip(total[:-1], receipt[:-1], strict=True))
        since = min(total.since_unix_ms, receipt.since_unix_ms)
        total = Receipt(*added, since_unix_ms=since)  # type: ignore[misc,arg-type]
    return total


def leave_behind(transaction: Transaction, published: str, since_unix_ms: int) -> None:
    """Adds what a process that is gone had published to the receipt of those before it.

    Unless it began to count before the last reset (`since_unix_ms`): that does not count any more.
    """
    try:
        receipt = Receipt(*json.loads(published))
    except (TypeError, ValueError):
        return  # nothing, or what a power cut has left of it
    if receipt.since_unix_ms >= since_unix_ms:
        total = summed([receipt, *_left_behind(transaction, since_unix_ms)])
        transaction.remember(_OF_THE_GONE, json.dumps(total))


def forget_left_behind(transaction: Transaction) -> None:
    """Begins with a server of which no process is gone."""
    transaction.remember(_OF_THE_GONE, "")


class Restore(NamedTuple):
    """What one restore saved: tokens whose prefill time is known, and tokens whose is not."""

    tokens: int
    measured_seconds: float
    estimated_tokens: int

    @classmethod
    def reported(cls, tokens: int, prefill_ms: float | None) -> "Restore":
        """Returns what a client says that it restored, in a prefill time that it measured or did not."""
        seconds = (prefill_ms or 0.0) / 1_000
        return cls(tokens, seconds, 0 if seconds else tokens)


NO_RESTORE = Restore(0, 0.0, 0)
"""Bytes were handed out that save no prefill."""


def restore_of(chain: list[PrefixRow], rows: RowRange) -> Restore:
    """Returns what handing out rows saves, by what is known of the chain's prefill times."""
    seconds, unknown = 0.0, 0
    for depth, row in enumerate(chain):
        above = chain[depth + 1].base if depth + 1 < len(chain) else rows.end
        served = max(0, min(above, rows.end) - max(row.base, rows.begin))
        if row.prefill_ms and row.token_count:  # of all its tokens, its parents' included
            seconds += row.prefill_ms / 1_000 * served / row.token_count
        else:
            unknown += served
    return Restore(rows.end - rows.begin, seconds, unknown)


class Ledger:
    """Counts; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receipt = _empty()

    def lookup(self, *, hit: bool) -> None:
        """Counts the answer of one Lookup or Match."""
        with self._lock:
            now = self._receipt
            self._receipt = now._replace(hits=now.hits + hit, misses=now.misses + (not hit))

    def restored(self, restore: Restore, *, streamed: int = 0, exported: int = 0) -> None:
        """Counts a Fetch that ended well or an Export that was answered; sizes in bytes."""
        estimated = restore.estimated_tokens * ESTIMATED_SECONDS_PER_TOKEN
        with self._lock:
            now = self._receipt
            self._receipt = now._replace(
                measured_hits=now.measured_hits
                + (restore.measured_seconds > 0 and restore.estimated_tokens == 0),
                tokens_served=now.tokens_served + restore.tokens,
                bytes_streamed=now.bytes_streamed + streamed,
                bytes_exported=now.bytes_exported + exported,
                seconds_measured=now.seconds_measured + restore.measured_seconds,
                seconds_estimated=now.seconds_estimated + estimated,
            )

    def streamed(self, size: int) -> None:
        """Counts bytes whose tokens are counted with a Lookup."""
        with self._lock:
            now = self._receipt
            self._receipt = now._replace(bytes_streamed=now.bytes_streamed + size)

    def get(self) -> Receipt:
        """Returns the counters."""
        with self._lock:
            return self._receipt

    def reset(self) -> Receipt:
        """Sets every counter to zero and returns what they were."""
        with self._lock:
            before, self._receipt = self._receipt, _empty()
            return before


class SharedReceipt:
    """The receipt of all processes on one directory; of the others up to a second ago."""

    def __init__(self, directory: DataDirectory, catalog: Catalog, ledger: Ledger) -> None:
        self._directory = directory
        self._catalog = catalog
        self._ledger = ledger
        self._published: Receipt | None = None

    def get(self) -> Receipt:
        """Returns what they did together since counting last began anew."""
        begun = self._directory.reset_unix_ms()
        others = [Receipt(*json.loads(text)) for text in self._directory.published()]
        counting = [other for other in others if other.since_unix_ms >= begun]
        with self._catalog.read() as transaction:
            counting += _left_behind(transaction, begun)
        return summed([self._ledger.get(), *counting])

    def reset(self) -> Receipt:
        """Begins to count anew in all of them; returns what they had together."""
        total = self.get()
        self._directory.note_reset()
        self._ledger.reset()
        return total

    def publish(self) -> None:
        """Lets the others read what this one has counted, and begins anew if one of them has."""
        receipt = self._ledger.get()
        if receipt.since_unix_ms < self._directory.reset_unix_ms():
            self._ledger.reset()
            receipt = self._ledger.get()
        if receipt != self._published:
            self._directory.publish(json.dumps(receipt))
            self._published = receipt


_OF_THE_GONE = "receipt of processes that are gone"


def _left_behind(transaction: Transaction, since_unix_ms: int) -> list[Receipt]:
    text = transaction.remembered(_OF_THE_GONE)
    receipts = [Receipt(*json.loads(text))] if text else []
    return [receipt for receipt in receipts if receipt.since_unix_ms >= since_unix_ms]


def _empty() -> Receipt:
    return Receipt(0, 0, 0, 0, 0, 0, 0.0, 0.0, unix_ms())
