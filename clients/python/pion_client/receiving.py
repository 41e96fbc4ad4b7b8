"""A value that comes over as many streams as it takes.

Knows when a broken stream is asked for again; not what it brings.
"""

from typing import Any, Protocol

from google.protobuf.message import Message

from pion_client.calls import Calls
from pion_client.connection import TRIES_MAX, Deadline, pause
from pion_client.errors import BadAnswer, GenerationDiffers, PionError
from pion_client.fetching import DamagedChunk


class Receiver(Protocol):
    """What takes the messages."""

    done_bytes: int
    """What has come."""

    @property
    def announced(self) -> object | None:
        """What will come; None as long as nothing was announced."""

    def ended(self) -> bool:
        """Whether everything that was announced is here, or nothing was announced: a miss."""

    def begin_stream(self, request: Any) -> None:
        """Makes a request one for what is still missing."""

    def take(self, message: bytes) -> None:
        """Takes the next message."""

    def restart(self) -> None:
        """Forgets everything: what is asked for has changed between two streams."""


def receive_whole(
    calls: Calls,
    method: str,
    asked: Message,
    receiver: Receiver,
    route: str,
    deadline: Deadline,
) -> None:
    """Receives until everything has come, asking again for the rest of what broke off.

    Raises:
        PionError: it cannot be had within the deadline, or not at all.
    """
    fruitless = restarts = 0
    while not receiver.ended():
        before = receiver.done_bytes
        try:
            _receive(calls, method, asked, receiver, route, deadline)
        except PionError as error:
            if receiver.ended():
                break  # only the end of the stream was lost
            if isinstance(error, GenerationDiffers) and receiver.announced is not None:
                receiver.restart()  # another value has taken the name meanwhile: that one, then
                restarts += 1
                if restarts == TRIES_MAX:
                    raise
                continue
            fruitless = 0 if receiver.done_bytes > before else fruitless + 1
            if not _resumes(error, fruitless, deadline):
                raise


def _receive(
    calls: Calls, method: str, asked: Message, receiver: Receiver, route: str, deadline: Deadline
) -> None:
    request = type(asked)()
    request.CopyFrom(asked)
    receiver.begin_stream(request)
    calls.receive(
        method, request.SerializeToString(), receiver.take, route=route, deadline=deadline
    )
    if not receiver.ended():
        raise BadAnswer("the stream ended before everything that was announced came")


def _resumes(error: PionError, attempt: int, deadline: Deadline) -> bool:
    """Gets ready to ask for the rest, if there is a point in it."""
    if isinstance(error, DamagedChunk):
        return attempt < TRIES_MAX
    return pause(error, attempt, deadline)
