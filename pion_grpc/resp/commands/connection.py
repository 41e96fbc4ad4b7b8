"""The connection itself: who is there, which version of the protocol, and what others can see of it."""

import time
from collections.abc import Callable

from pion_grpc.resp.client import Client
from pion_grpc.resp.command import Answer, Call, Command, Where, for_all, syntax_error
from pion_grpc.resp.reply import OK, Reply, ReplyError, Simple, Verbatim, Version

WRONG_PASSWORD = "WRONGPASS invalid username-password pair or user is disabled."
_NAME_REFUSAL = "ERR Client names cannot contain spaces, newlines or special characters."


def ping(call: Call) -> Answer:
    """`PING [message]`."""
    if call.count > 1:
        raise ReplyError("ERR wrong number of arguments for 'ping' command")
    return call.raw(0) if call.count else Simple("PONG")


def echo(call: Call) -> Answer:
    """`ECHO message`."""
    return call.raw(0)


def select(call: Call) -> Answer:
    """`SELECT 0`: there is one database."""
    if call.integer(0, refusal="ERR invalid DB index") != 0:
        raise ReplyError("ERR DB index is out of range")
    return OK


def quit_(call: Call) -> Answer:
    """`QUIT`: the connection closes once this has been sent."""
    call.client.ending = True
    return OK


def reset(call: Call) -> Answer:
    """`RESET`: the connection is as it was at the beginning."""
    call.client.forget()
    return Simple("RESET")


def auth(call: Call) -> Answer:
    """`AUTH [user] password`."""
    if call.count > 2:
        raise syntax_error()
    if not call.services.access.required:
        raise ReplyError(
            "ERR AUTH <password> called without any password configured for the default user. "
            "Are you sure your configuration is correct?"
        )
    user = call.text(0) if call.count == 2 else None
    _log_in(call, user, call.raw(call.count - 1))
    return OK


def hello(call: Call) -> Answer:
    """`HELLO [2|3] [AUTH user password] [SETNAME name]`."""
    client, services = call.client, call.services
    version: Version = client.version
    if call.count:
        refusal = "NOPROTO unsupported protocol version"
        version = 3 if call.integer(0, 2, 3, refusal) == 3 else 2
    credentials: tuple[str, bytes] | None = None
    name: str | None = None
    at = 1
    while at < call.count:
        if call.word(at) == "AUTH" and at + 2 < call.count:
            credentials = call.text(at + 1), call.raw(at + 2)
            at += 3
        elif call.word(at) == "SETNAME" and at + 1 < call.count:
            name = _client_name(call.raw(at + 1))
            at += 2
        else:
            raise ReplyError("ERR syntax error in HELLO option '" + call.text(at) + "'")
    if credentials is not None:
        _log_in(call, *credentials)
    elif services.access.required and not client.authenticated:
        raise ReplyError(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO "
            "<proto> AUTH <user> <pass> option can be used to authenticate the client and select the "
            "RESP protocol version at the same time"
        )
    client.version = version
    if name is not None:
        client.name = name
    return {
        "server": "pion",
        "version": REDIS_VERSION,
        "proto": version,
        "id": client.number,
        "mode": "standalone",
        "role": "master",
        "modules": [],
    }


def client(call: Call) -> Answer:
    """`CLIENT` and its subcommands."""
    handler = _SUBCOMMANDS.get(call.word(0))
    if handler is None:
        name = call.text(0)
        raise ReplyError(f"ERR unknown subcommand '{name}'. Try CLIENT HELP.")
    return handler(call)


def command(call: Call) -> Answer:
    """`COMMAND [COUNT|INFO|LIST|DOCS]`: the table itself."""
    word = call.word(0)
    table = call.services.commands
    if word == "COUNT":
        return len(table)
    if word == "LIST":
        return [entry.name.lower() for entry in table]
    if word == "DOCS":
        return {}
    if word == "INFO" and call.count > 1:
        known = {entry.name: entry for entry in table}
        asked = [call.word(index) for index in range(1, call.count)]
        return [_entry(known[name]) if name in known else None for name in asked]
    if word in ("", "INFO"):
        return [_entry(entry) for entry in table]
    raise ReplyError(
        f"ERR unknown subcommand '{call.text(0)}': COMMAND knows COUNT, DOCS, INFO and LIST"
    )


def server_time(call: Call) -> Answer:
    """`TIME`: seconds and microseconds."""
    now = time.time_ns() // 1_000
    return [str(now // 1_000_000), str(now % 1_000_000)]


def _log_in(call: Call, user: str | None, password: bytes) -> None:
    tenant = call.services.access.tenant(user, password)
    if tenant is None or not call.services.access.required:
        raise ReplyError(WRONG_PASSWORD)
    call.client.tenant = tenant
    call.client.authenticated = True


def _entry(entry: Command) -> Reply:
    flags = [Simple("write" if entry.grows else "readonly")] if entry.keys[0] else []
    return [entry.name.lower(), entry.arity, flags, *entry.keys, [], [], [], []]


def _client_name(name: bytes) -> str:
    if any(byte <= 0x20 or byte >= 0x7F for byte in name):
        raise ReplyError(_NAME_REFUSAL)
    return name.decode()


def _client_id(call: Call) -> Answer:
    return call.client.number


def _client_setname(call: Call) -> Answer:
    _want(call, 2)
    call.client.name = _client_name(call.raw(1))
    return OK


def _client_getname(call: Call) -> Answer:
    return call.client.name.encode() or None


def _client_setinfo(call: Call) -> Answer:
    _want(call, 3)
    attribute, value = call.word(1), _client_name(call.raw(2))
    if attribute == "LIB-NAME":
        call.client.library = value
    elif attribute == "LIB-VER":
        call.client.library_version = value
    else:
        raise ReplyError(f"ERR Unrecognized option '{call.text(1)}'")
    return OK


def _client_no_evict(call: Call) -> Answer:
    _want(call, 2)
    if call.word(1) not in ("ON", "OFF"):
        raise syntax_error()
    return OK


def _client_info(call: Call) -> Answer:
    return Verbatim(call.client.line() + "\n")


def _client_list(call: Call) -> Answer:
    listed = list(call.services.clients)
    if call.word(1) == "ID":
        wanted = {call.integer(index) for index in range(2, call.count)}
        listed = [one for one in listed if one.number in wanted]
    visible = [one for one in listed if may_see(call, one)]
    return Verbatim("".join(one.line() + "\n" for one in visible))


def _client_kill(call: Call) -> Answer:
    if call.count == 2:
        killed = _kill(call, lambda one: one.peer == call.text(1))
        if not killed:
            raise ReplyError("ERR No such client")
        return OK
    if call.count < 3 or call.count % 2 == 0:
        raise syntax_error()
    filters = {call.word(at): call.text(at + 1) for at in range(1, call.count, 2)}
    if set(filters) - {"ID", "ADDR", "LADDR", "USER", "TYPE", "SKIPME"}:
        raise syntax_error()
    skip_me = filters.pop("SKIPME", "yes").lower() != "no"

    def wanted(one: Client) -> bool:
        facts = {
            "ID": str(one.number),
            "ADDR": one.peer,
            "LADDR": one.local,
            "USER": one.tenant or "default",
            "TYPE": "normal",
        }
        mine = one is call.client and skip_me
        return not mine and all(facts[key] == value for key, value in filters.items())

    return _kill(call, wanted)


def _client_pause(call: Call) -> Answer:
    _refuse_tenants(call)
    _want(call, 2, 3)
    if call.count == 3 and call.word(2) not in ("ALL", "WRITE"):
        raise syntax_error()
    refusal = "ERR timeout is not an integer or out of range"
    call.services.pause(call.integer(1, 0, 1 << 40, refusal) / 1_000)
    return OK


def _client_unpause(call: Call) -> Answer:
    _refuse_tenants(call)
    call.services.pause(0)
    return OK


def _client_reply(call: Call) -> Answer:
    _want(call, 2)
    mode = call.word(1)
    if mode == "ON":
        call.client.replies, call.client.skip_replies = True, 0
    elif mode == "OFF":
        call.client.replies = False
    elif mode == "SKIP":
        call.client.skip_replies = 2  # this one's and the next
    else:
        raise syntax_error()
    return OK


def _client_unblock(call: Call) -> Answer:
    _want(call, 2, 3)
    call.integer(1)
    return 0  # nothing blocks here


def _client_tracking(call: Call) -> Answer:
    raise ReplyError("ERR client tracking is not supported")


def _client_help(call: Call) -> Answer:
    return [Simple(f"CLIENT {name}") for name in sorted(_SUBCOMMANDS)]


def _kill(call: Call, wanted: Callable[[Client], bool]) -> int:
    victims = [one for one in call.services.clients if wanted(one) and may_see(call, one)]
    for victim in victims:
        if victim is call.client:
            victim.ending = True  # once it has its reply
        else:
            victim.abort()
    return len(victims)


def may_see(call: Call, other: Client) -> bool:
    """Whether who asks may know of another connection: a tenant knows of its own ones."""
    return not call.client.tenant or other.tenant == call.client.tenant


def _refuse_tenants(call: Call) -> None:
    if call.client.tenant:
        raise ReplyError("NOPERM this command is not allowed for tenant connections")


def _want(call: Call, *counts: int) -> None:
    if call.count not in counts:
        name = f"client|{call.word(0).lower()}"
        raise ReplyError(f"ERR wrong number of arguments for '{name}' command")


REDIS_VERSION = "7.0.0"
"""What clients expect that look at it before they use a command."""

_SUBCOMMANDS = {
    "ID": _client_id,
    "SETNAME": _client_setname,
    "GETNAME": _client_getname,
    "SETINFO": _client_setinfo,
    "NO-EVICT": _client_no_evict,
    "NO-TOUCH": _client_no_evict,
    "INFO": _client_info,
    "LIST": _client_list,
    "KILL": _client_kill,
    "PAUSE": _client_pause,
    "UNPAUSE": _client_unpause,
    "REPLY": _client_reply,
    "UNBLOCK": _client_unblock,
    "TRACKING": _client_tracking,
    "HELP": _client_help,
}

COMMANDS = (
    for_all("PING", -1, ping, Where.LOOP),
    for_all("ECHO", 2, echo, Where.LOOP),
    for_all("SELECT", 2, select, Where.LOOP),
    for_all("QUIT", -1, quit_, Where.LOOP, before_login=True),
    for_all("RESET", 1, reset, Where.LOOP, before_login=True),
    for_all("AUTH", -2, auth, Where.LOOP, before_login=True),
    for_all("HELLO", -1, hello, Where.LOOP, before_login=True),
    for_all("CLIENT", -2, client, Where.LOOP),
    for_all("COMMAND", -1, command, Where.LOOP),
    Command("TIME", 1, server_time, Where.LOOP),
)
