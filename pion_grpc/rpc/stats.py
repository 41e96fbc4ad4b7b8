"""pion.v1.Stats: the receipt as messages."""

from pion_grpc.core.receipt import Ledger, Receipt
from pion_grpc.rpc.service import Call
from pion_wire.v1 import stats_pb2 as pb


class StatsService:
    """One method per RPC; see the proto for what each does."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def Get(self, request: pb.StatsGetRequest, call: Call) -> pb.StatsGetResponse:
        """Reads the receipt."""
        return pb.StatsGetResponse(receipt=_message(self._ledger.get()))

    def Reset(self, request: pb.StatsResetRequest, call: Call) -> pb.StatsResetResponse:
        """Sets it to zero."""
        return pb.StatsResetResponse(receipt=_message(self._ledger.reset()))


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
