"""The receipt claims nothing that did not happen: each of its numbers, and what must not move it."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.messages import layout_to_message
from pion_wire.v1 import stats_pb2
from tests.conftest import ServerProcess
from tests.server.wire import MODEL, Sample, Wire, eventually, layout_of, refused

SECONDS_PER_TOKEN = 555e-6


@pytest.fixture
def wire(server: ServerProcess) -> Iterator[Wire]:
    with Wire(server.address) as wire:
        wire.stats.Reset(stats_pb2.StatsResetRequest())
        yield wire


def counted(wire: Wire) -> stats_pb2.Receipt:
    """The receipt without its date."""
    receipt = wire.receipt()
    assert receipt.since_unix_ms > 1_700_000_000_000
    receipt.since_unix_ms = 0
    return receipt


def test_a_hit_is_counted_once_by_lookup_or_match(wire: Wire) -> None:
    sample = Sample("receipt/hits", 100)
    wire.store(sample)
    assert counted(wire) == stats_pb2.Receipt(), "storing saves nothing"
    wire.lookup("receipt/hits")
    wire.call("Match", model_id=MODEL, token_ids=sample.token_ids)
    wire.lookup("receipt/none")
    wire.lookup("receipt/hits", model_id="another")
    wire.call("Match", model_id="another", token_ids=sample.token_ids)
    assert counted(wire) == stats_pb2.Receipt(hits=2, misses=3)
    wire.fetch("receipt/hits")
    wire.call("List")
    wire.call("Describe")
    wire.call("Blocks", namespace="receipt/hits")
    assert (counted(wire).hits, counted(wire).misses) == (2, 3)


def test_a_measured_prefill_is_not_called_an_estimate(wire: Wire) -> None:
    sample = Sample("receipt/measured", 100)
    wire.store(sample, prefill_ms=2_000.0)
    wire.fetch("receipt/measured")
    receipt = counted(wire)
    assert receipt.prefill_seconds_avoided == pytest.approx(2.0)
    assert receipt.prefill_seconds_avoided_measured == pytest.approx(2.0)
    assert receipt.prefill_seconds_avoided_estimated == 0
    assert (receipt.measured_hits, receipt.tokens_served) == (1, 100)
    assert receipt.bytes_streamed == sample.row_bytes
    assert receipt.bytes_exported == 0


def test_an_estimate_is_not_called_measured(wire: Wire) -> None:
    sample = Sample("receipt/estimated", 100, part_sizes=(1_000,))
    wire.store(sample)
    wire.fetch("receipt/estimated", part_kinds=["state"])
    receipt = counted(wire)
    assert receipt.prefill_seconds_avoided_measured == 0
    assert receipt.prefill_seconds_avoided_estimated == pytest.approx(100 * SECONDS_PER_TOKEN)
    assert receipt.prefill_seconds_avoided == receipt.prefill_seconds_avoided_estimated
    assert (receipt.measured_hits, receipt.tokens_served) == (0, 100)
    assert receipt.bytes_streamed == sample.row_bytes + 1_000


def test_a_chain_of_both_kinds_is_split(wire: Wire) -> None:
    root = Sample("receipt/root", 100)
    child = root.child("receipt/child", 50)
    wire.store(root)
    wire.store(child, prefill_ms=500.0)
    wire.fetch("receipt/child")
    receipt = counted(wire)
    # What is measured is the prefill of all its tokens, of which a third are rows of its own.
    assert receipt.prefill_seconds_avoided_measured == pytest.approx(0.5 / 3)
    assert receipt.prefill_seconds_avoided_estimated == pytest.approx(100 * SECONDS_PER_TOKEN)
    assert (receipt.measured_hits, receipt.tokens_served) == (0, 150), "not all of it is measured"


def test_a_prefill_is_not_counted_once_more_for_each_link_of_its_chain(wire: Wire) -> None:
    sample = Sample("receipt/link 0", 100)
    wire.store(sample, prefill_ms=1_000.0)
    for link in range(1, 4):
        sample = sample.child(f"receipt/link {link}", 100)
        wire.store(sample, prefill_ms=1_000.0 * (link + 1))
    wire.fetch("receipt/link 3")
    assert counted(wire).prefill_seconds_avoided_measured == pytest.approx(4)


def test_rows_that_are_only_compared_spare_nobody_a_prefill(wire: Wire) -> None:
    sample = Sample("receipt/compared", 100)
    wire.store(sample, prefill_ms=1_000.0)
    wire.fetch("receipt/compared", uncounted=True)
    wire.call("Export", namespace="receipt/compared", uncounted=True, lease_ms=0)
    size = sample.row_bytes
    assert counted(wire) == stats_pb2.Receipt(bytes_streamed=size, bytes_exported=size)


def test_only_the_rows_that_were_asked_for_count(wire: Wire) -> None:
    sample = Sample("receipt/range", 100)
    wire.store(sample, prefill_ms=1_000.0)
    wire.fetch("receipt/range", rows={"begin": 20, "end": 50})
    receipt = counted(wire)
    assert receipt.tokens_served == 30
    assert receipt.prefill_seconds_avoided_measured == pytest.approx(0.3)
    assert receipt.bytes_streamed == 30 * sample.layout.row_bytes


def test_a_part_of_the_tensors_spares_nobody_a_prefill(wire: Wire) -> None:
    sample = Sample("receipt/slots", 100)
    wire.store(sample, prefill_ms=1_000.0)
    wire.fetch("receipt/slots", slots=[0])
    assert counted(wire) == stats_pb2.Receipt(bytes_streamed=sample.row_bytes // 2)
    wire.fetch("receipt/slots", slots=[0, 1])
    receipt = counted(wire)
    assert (receipt.tokens_served, receipt.measured_hits) == (100, 1)
    assert receipt.prefill_seconds_avoided_measured == pytest.approx(1.0)


def test_a_fetch_that_is_cancelled_saves_nothing(wire: Wire) -> None:
    wide = Layout((TensorLayout(0, Side.K, 16, 1_024, DType.F16),))
    sample = Sample("receipt/cancelled", 2_000, wide)
    wire.store(sample)
    for messages in (1, 2, 5):
        call = wire.streaming(namespace="receipt/cancelled")
        for _ in range(messages):
            next(call)
        call.cancel()
    with Wire(wire.address, options=[("grpc.max_receive_message_length", 1 << 10)]) as small:
        refused(lambda: small.fetch("receipt/cancelled"))
    fetched = wire.fetch("receipt/cancelled")
    assert fetched.tensors == sample.tensors
    receipt = eventually(lambda: counted(wire) if counted(wire).tokens_served else None)
    assert (receipt.tokens_served, receipt.bytes_streamed) == (2_000, sample.row_bytes)


def test_what_is_not_found_or_refused_saves_nothing(wire: Wire) -> None:
    wire.call("Register", namespace="receipt/empty", layout=layout_to_message(layout_of()))
    wire.fetch("receipt/nothing")
    wire.fetch("receipt/empty")
    refused(lambda: wire.fetch("receipt/empty", rows={"begin": 1, "end": 0}, lease_id=b"x"))
    refused(lambda: wire.call("Export", namespace="receipt/nothing"))
    assert counted(wire) == stats_pb2.Receipt()


def test_an_export_counts_when_it_is_answered(wire: Wire) -> None:
    sample = Sample("receipt/export", 100)
    wire.store(sample, prefill_ms=1_000.0)
    wire.call("Export", namespace="receipt/export", rows={"end": 50})
    receipt = counted(wire)
    assert receipt.bytes_exported == 50 * sample.layout.row_bytes
    assert (receipt.bytes_streamed, receipt.tokens_served, receipt.hits) == (0, 50, 0)
    assert receipt.prefill_seconds_avoided_measured == pytest.approx(0.5)


def test_what_a_caller_restored_itself_is_credited_with_its_hit_only(wire: Wire) -> None:
    wire.store(Sample("receipt/credit", 100))
    wire.lookup("receipt/credit", restored_tokens=40, restored_prefill_ms=250.0)
    wire.lookup("receipt/none", restored_tokens=1_000, restored_prefill_ms=250.0)
    receipt = counted(wire)
    assert (receipt.tokens_served, receipt.hits, receipt.misses) == (40, 1, 1)
    assert receipt.prefill_seconds_avoided_measured == pytest.approx(0.25)


def test_reset_answers_with_what_was_and_begins_anew(wire: Wire) -> None:
    wire.store(Sample("receipt/reset", 10))
    wire.lookup("receipt/reset")
    before = wire.receipt()
    answer = wire.stats.Reset(stats_pb2.StatsResetRequest()).receipt
    assert answer == before
    assert counted(wire) == stats_pb2.Receipt()
    assert wire.receipt().since_unix_ms >= before.since_unix_ms


def test_the_workers_of_a_server_have_one_receipt(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--workers", "2", "--resp", "127.0.0.1:0", listen="127.0.0.1:0")
    with contextlib.ExitStack() as stack:
        # The kernel spreads connections: enough of them reach both workers.
        wires = [stack.enter_context(Wire(server.address)) for _ in range(12)]
        for number, wire in enumerate(wires):
            wire.lookup(f"receipt/nobody-{number}")

        def everybody_says(misses: int) -> bool:
            return [wire.receipt().misses for wire in wires] == [misses] * len(wires)

        eventually(lambda: everybody_says(12))
        assert wires[0].stats.Reset(stats_pb2.StatsResetRequest()).receipt.misses == 12
        eventually(lambda: everybody_says(0))
        wires[3].lookup("receipt/nobody")
        eventually(lambda: everybody_says(1))


def test_a_tenant_reads_no_numbers_but_its_own(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--tenant", "blue=azure", "--tenant", "red=crimson", PION_PASSWORD="s")
    with (
        Wire(server.address, password="s") as owner,
        Wire(server.address, tenant="blue", password="azure") as blue,
        Wire(server.address, tenant="red", password="crimson") as red,
    ):
        sample = Sample("receipt/blue", 100)
        stored = blue.store(sample)
        blue.fetch("receipt/blue")
        assert owner.receipt().tokens_served == 100
        for tenant in (blue, red):
            assert refused(tenant.receipt).reason == "NOT_ALLOWED"
            reset = refused(
                lambda tenant=tenant: tenant.stats.Reset(
                    stats_pb2.StatsResetRequest(), metadata=tenant.metadata
                )
            )
            assert reset.reason == "NOT_ALLOWED"
        assert owner.receipt().tokens_served == 100
        told = [wire.call("Describe") for wire in (owner, blue, red)]
        assert [answer.prefix_count for answer in told] == [1, 1, 0]
        assert [answer.row_count for answer in told] == [100, 100, 0]
        assert told[1].disk_used_bytes == stored.stored_bytes
        assert told[2].disk_used_bytes == 0
        assert told[0].disk_used_bytes > stored.stored_bytes
