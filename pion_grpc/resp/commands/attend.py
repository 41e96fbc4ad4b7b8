"""`ATTEND.PREFIX.*`: attention beside the store, of which this server has no engine yet."""

from pion_grpc.resp.command import Answer, Call, Command
from pion_grpc.resp.reply import ReplyError

NO_ENGINE = "ERR attention engine not available (start with --attend)"


def refuse(call: Call) -> Answer:
    """Says that there is no engine, whatever was asked."""
    raise ReplyError(NO_ENGINE)


COMMANDS = tuple(
    Command(f"ATTEND.PREFIX.{name}", -1, refuse)
    for name in (
        "STORE",
        "LOOKUP",
        "QUERY",
        "QUERY_FUSED",
        "QUERY_SPARSE",
        "QUERY_SPARSE_AUTO",
        "QUERY_SPARSE_AUTO_FUSED",
    )
)
