"""The receipt: measured and estimated seconds never mix, and nothing is counted twice or lost."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pion_grpc.core.receipt import ESTIMATED_SECONDS_PER_TOKEN, Ledger, Restore


def test_an_empty_receipt_claims_nothing() -> None:
    receipt = Ledger().get()
    assert (receipt.hits, receipt.misses, receipt.measured_hits, receipt.tokens_served) == (0,) * 4
    assert receipt.seconds_avoided == 0
    assert receipt.since_unix_ms > 1_600_000_000_000


def test_measured_and_estimated_seconds_never_mix() -> None:
    ledger = Ledger()
    ledger.restored(Restore(100, 2.0, 0), streamed=10)
    ledger.restored(Restore(50, 0.0, 50), exported=20)
    ledger.restored(Restore(80, 1.0, 30), streamed=5)
    receipt = ledger.get()
    assert receipt.seconds_measured == pytest.approx(3.0)
    assert receipt.seconds_estimated == pytest.approx(80 * ESTIMATED_SECONDS_PER_TOKEN)
    assert receipt.seconds_avoided == receipt.seconds_measured + receipt.seconds_estimated
    assert (receipt.tokens_served, receipt.bytes_streamed, receipt.bytes_exported) == (230, 15, 20)
    assert receipt.measured_hits == 1, "only what was measured whole is a measured hit"


def test_an_estimate_is_what_it_says() -> None:
    assert pytest.approx(0.000555) == ESTIMATED_SECONDS_PER_TOKEN


def test_a_reset_loses_no_count_and_keeps_none() -> None:
    ledger = Ledger()
    ledger.lookup(hit=True)
    ledger.lookup(hit=False)
    before = ledger.reset()
    assert (before.hits, before.misses) == (1, 1)
    after = ledger.get()
    assert (after.hits, after.misses) == (0, 0)
    assert after.since_unix_ms >= before.since_unix_ms


def test_counts_from_many_threads_add_up() -> None:
    ledger = Ledger()
    gate = threading.Barrier(8)
    resets = []

    def work(number: int) -> None:
        gate.wait()
        for _ in range(300):
            ledger.lookup(hit=number % 2 == 0)
            ledger.restored(Restore(1, 0.001, 0), streamed=1)
        if number == 0:
            resets.append(ledger.reset())

    with ThreadPoolExecutor(8) as pool:
        for job in [pool.submit(work, number) for number in range(8)]:
            job.result()
    parts = [*resets, ledger.get()]
    assert sum(part.hits for part in parts) == 1_200
    assert sum(part.misses for part in parts) == 1_200
    assert sum(part.tokens_served for part in parts) == 2_400
    assert sum(part.seconds_measured for part in parts) == pytest.approx(2.4)
