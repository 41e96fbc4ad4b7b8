"""From the words of a request to the answer of its handler, with the checks that come before it.

In this order: is there such a command with so many words, has the client logged in, may its tenant do
that, is it inside MULTI. Knows no sockets and no threads: the connection decides when, the command's
entry says where.
"""

from collections.abc import Iterable, Mapping
from typing import cast

from pion_grpc.resp.client import Client
from pion_grpc.resp.command import (
    Answer,
    Call,
    Command,
    Elsewhere,
    Services,
    StreamedValue,
    Uses,
    Where,
)
from pion_grpc.resp.errors import refusal
from pion_grpc.resp.protocol import Request
from pion_grpc.resp.reply import NIL_ARRAY, Error, Reply, Simple, value_bytes

QUEUED = Simple("QUEUED")
QUEUED_COMMANDS_MAX = 10_000
_NAME_BYTES_MAX = 128
_NEVER_QUEUED = frozenset({"EXEC", "DISCARD", "MULTI", "WATCH", "QUIT", "RESET"})
NOT_FOR_TENANTS = Error("NOPERM this command is not allowed for tenant connections")


class Dispatcher:
    """The table of commands, and how it is entered."""

    def __init__(self, services: Services, commands: Iterable[Command]) -> None:
        self.services = services
        self.table: Mapping[bytes, Command] = {c.name.encode(): c for c in commands}

    def find(self, request: Request) -> Command | None:
        """Returns the command that a request names."""
        name = request[0]
        if len(name) > _NAME_BYTES_MAX:
            return None
        return self.table.get(bytes(name).upper())

    def before(self, client: Client, request: Request, command: Command | None) -> Reply | None:
        """Returns the reply to a request that is not executed now; None if it is."""
        reply = self._check(client, request, command)
        if reply is not None:
            if client.queued is not None:
                client.spoiled = True
            return reply
        assert command is not None
        if client.queued is None or command.name in _NEVER_QUEUED:
            return None
        if command.uses is Uses.NOTHING and command.where is not Where.LOOP:
            client.spoiled = True
            return Error(f"ERR {command.name} is not allowed inside MULTI")
        if len(client.queued) >= QUEUED_COMMANDS_MAX:
            client.spoiled = True
            return Error(f"ERR more than {QUEUED_COMMANDS_MAX} commands inside MULTI")
        client.queued.append(request)
        return QUEUED

    def call(self, client: Client, request: Request, *, on_loop: bool = False) -> Call:
        """Returns a checked request as its handler takes it."""
        command = self.find(request)
        assert command is not None
        call = Call(self.services, client, command, request[1:], on_loop)
        if command.name == "EXEC" and client.queued is not None:
            call.queued = client.leave_transaction()
        return call

    def answer_queued(self, call: Call) -> Answer:
        """Runs what came between MULTI and EXEC, on the keys of EXEC; one may fail, the others stand."""
        queued = call.queued
        if queued is None:
            return Error("ERR EXEC without MULTI")
        if queued.spoiled:
            return Error("EXECABORT Transaction discarded because of previous errors.")
        keys = call.keyspace
        if any(keys.revision(name) != revision for name, revision in queued.watched.items()):
            return NIL_ARRAY
        replies: list[Reply] = []
        for request in queued.requests:
            inner = self.call(call.client, request)
            inner.keys, inner.inside = keys, True
            answer = self._answer_alone(inner)
            reply = answer.joined() if isinstance(answer, StreamedValue) else cast(Reply, answer)
            call.hold(value_bytes(reply))  # what raises here undoes all of it
            replies.append(reply)
        return replies

    def _answer_alone(self, call: Call) -> Answer:
        """Runs a handler so that it changes nothing if it fails."""
        try:
            with call.keyspace.undone_on_error():
                return call.command.run(call)
        except Exception as error:
            return refusal(error, call.command.name)

    def answer(self, call: Call) -> Answer:
        """Runs a handler; what it raises becomes the reply, but for `Elsewhere`."""
        try:
            return call.command.run(call)
        except Elsewhere:
            raise
        except Exception as error:
            return refusal(error, call.command.name)

    def _check(self, client: Client, request: Request, command: Command | None) -> Reply | None:
        stranger = self.services.access.required and not client.authenticated
        if stranger and (command is None or not command.before_login):
            return Error("NOAUTH Authentication required.")
        if client.tenant and (command is None or not command.for_tenants):
            return NOT_FOR_TENANTS
        if command is None:
            return _unknown(request)
        if not command.takes(len(request)):
            return Error(command.refusal_of_words())
        return None


def _unknown(request: Request) -> Error:
    """Redis 7's words, with as much of the arguments as it shows."""
    name = bytes(request[0][:_NAME_BYTES_MAX]).decode("utf-8", "surrogateescape")
    shown = ""
    for argument in request[1:]:
        if len(shown) >= _NAME_BYTES_MAX:
            break
        part = bytes(argument[: _NAME_BYTES_MAX - len(shown)]).decode("utf-8", "surrogateescape")
        shown += f"'{part}' "
    return Error(f"ERR unknown command '{name}', with args beginning with: {shown}")
