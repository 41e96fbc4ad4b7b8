"""pion.v1.Stats: the receipt as messages. It is the server's: of several workers together."""

from pion_grpc.core.receipt import Ledger, Receipt, SharedReceipt
from pion_grpc.errors import NotAllowed
from pion_grpc.rpc.service import Call
from pion_wire.v1 import stats_pb2 as pb


class StatsService:
    """One method per RPC; see the proto for what each does."""

    def __init__(self, counters: Ledger | SharedReceipt) -> None:
        """Takes what counts for the server: one process, or all of its workers."""
        self._counters = counters

    def Get(self, request: pb.StatsGetRequest, call: Call) -> pb.StatsGetResponse:
        """Reads the receipt."""
        _check_tenant(call)
        return pb.StatsGetResponse(receipt=_message(self._counters.get()))

    def Reset(self, request: pb.StatsResetRequest, call: Call) -> pb.StatsResetResponse:
        """Sets it to zero."""
        _check_tenant(call)
        return pb.StatsResetResponse(receipt=_message(self._counters.reset()))


def _check_tenant(call: Call) -> None:
    if call.tenant:
        raise NotAllowed("the receipt is that of all tenants: only the server's owner reads it")


def _message(receipt: Receipt) -> pb.Receipt:
    return pb.Receipt(
        hits=receipt.hits,
        misses=receipt.misses,
        measured_hits=receipt.measured_hits,
        tokens_served=receipt.tokens_served,
        bytes_streamed=receipt.bytes_streamed,
        bytes_exported=receipt.bytes_exported,
        prefill_seconds_avoided=receipt.seconds_avoided,
        prefill_seconds_avoided_measured=receipt.seconds_measured,
        prefill_seconds_avoided_estimated=receipt.seconds_estimated,
        since_unix_ms=receipt.since_unix_ms,
    )
