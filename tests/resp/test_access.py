"""The table of access: every command and method, as each kind of user, inside and outside the rule.

What belongs to one tenant is blue's. The rule that names begin with `app:` holds for the commands that
wire clients register and find prefixes with; it keeps names apart and protects nothing.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest

from pion_grpc.resp.commands.table import COMMANDS
from pion_wire.v1 import attend_pb2, prefix_store_pb2, ssm_state_pb2, stats_pb2, types_pb2
from tests.conftest import ServerProcess
from tests.resp.lane import AUTH, ERROR, FUSED, OK, PING, Lane, fused_body
from tests.resp.test_tenants import NOT_ALLOWED, SERVER_WIDE
from tests.resp.wire import Refused, Wire
from tests.server.wire import Sample, refusal
from tests.server.wire import Wire as Grpc

USERS = {
    "admin": ("default", "secret"),
    "right tenant": ("blue", "azure"),
    "wrong tenant": ("red", "crimson"),
    "nobody": None,
}
RULE = "app:"
NAMES = {"inside": "app:ns", "outside": "ns"}
RULED = {
    f"KV.PREFIX.{name}"
    for name in (
        *("REGISTER", "REGISTER.SCHEMA", "LOOKUP", "DROP", "OWNER", "BLOCKS", "MEMBERSHIP", "WARM"),
    )
}
AGAINST_THE_RULE = Refused(
    f"ERR namespace must start with required prefix '{RULE}' (multi-tenant isolation)"
)
STRANGER = Refused("NOAUTH Authentication required.")
WORDS: dict[str, tuple[Any, ...]] = {
    "KV.PREFIX.REGISTER": (64, "fp16"),
    "KV.PREFIX.REGISTER.SCHEMA": (1, "fmt=fp16,dim=64", "fmt=fp16,dim=64"),
    "KV.PREFIX.MEMBERSHIP": (0, b""),
    "KV.PREFIX.WARM": (2, 32),
}
"""What follows the name, where it is not just enough ones."""
P, S, A, T = prefix_store_pb2, ssm_state_pb2, attend_pb2, stats_pb2
ROW = bytes(range(128))
HEADS, DIM = 2, 16
K = np.ones((HEADS, 4, DIM), np.float32).tobytes()
QUERY = bytes(4 * HEADS * DIM) + bytes(range(HEADS))


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerProcess]:
    path = Path(tempfile.mkdtemp(prefix="pion-", dir="/tmp"))
    tenants = ("--tenant", "blue=azure", "--tenant", "red=crimson")
    server = ServerProcess(
        path / "data",
        "--resp",
        "127.0.0.1:0",
        "--ns-prefix",
        RULE,
        *tenants,
        PION_PASSWORD="secret",
    )
    yield server
    assert server.stop() == 0
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def connect(shared: ServerProcess) -> Iterator[Callable[[str], Wire]]:
    """A new RESP connection of a user: what a command does to it ends with it."""
    opened: list[Wire] = []

    def connect(user: str) -> Wire:
        opened.append(Wire(shared.ready["resp"]))
        if USERS[user]:
            assert opened[-1]("AUTH", *USERS[user]) == "OK"
        return opened[-1]

    yield connect
    for wire in opened:
        wire.close()


def rpc_of(shared: ServerProcess, user: str) -> Grpc:
    name, password = USERS[user] or ("", None)
    return Grpc(shared.address, tenant="" if name == "default" else name, password=password)


@pytest.fixture
def belongings(shared: ServerProcess, connect: Callable[[str], Wire]) -> Callable[[], list[Any]]:
    """Stores what is blue's, under both names; returns how to look whether it is all there."""
    for other in ("admin", "wrong tenant"):  # what earlier rows of the table left
        with rpc_of(shared, other) as rpc:
            rpc.call("Drop", namespaces=NAMES.values())
            for name in NAMES.values():
                rpc.ssm.Drop(S.SSMStateDropRequest(session=name), metadata=rpc.metadata)
                rpc.attend.Drop(A.AttendDropRequest(session=name), metadata=rpc.metadata)
    wire = connect("right tenant")
    for where, name in NAMES.items():
        wire("KV.PREFIX.DROP", name)
        wire("DEL", name)
        if where == "inside":
            assert wire("KV.PREFIX.REGISTER", name, 64, "fp16", "BLOCKS", 64, 1, bytes(8)) == "OK"
        for side in ("pk", "pv"):
            wire("V.CREATE", f"{name}_{side}", 64, "VQUANT", "fp16")
            assert wire("V.STOREBATCH", f"{name}_{side}", 0, 0, 1, ROW, "FMT", "F16") == "OK"
        assert wire("SSM.PREFIX.STORE", name, 0, b"state") == "OK"
        assert wire("ATTEND.PREFIX.STORE", name, 0, HEADS, 4, DIM, K, K) == "OK"
        assert wire("SET", name, "value") == "OK"

    def look() -> list[Any]:
        wire = connect("right tenant")
        return [
            wire(*command)
            for name in NAMES.values()
            for command in (
                ("V.FETCH", f"{name}_pk", 0, "RANGE", 0, 1, "FMT", "NATIVE"),
                ("V.FETCH", f"{name}_pv", 0, "RANGE", 0, 1, "FMT", "NATIVE"),
                ("SSM.PREFIX.FETCH", name, 0),
                ("ATTEND.PREFIX.LOOKUP", name, 0),
                ("GET", name),
                ("TTL", name),
            )
        ]

    assert look() == [ROW, ROW, b"state", "HIT", b"value", -1] * 2
    return look


@pytest.mark.parametrize("where", NAMES)
@pytest.mark.parametrize("user", ["nobody", "wrong tenant", "right tenant", "admin"])
def test_no_command_does_for_a_user_what_it_may_not(
    connect: Callable[[str], Wire], belongings: Callable[[], list[Any]], user: str, where: str
) -> None:
    before = belongings()
    for command in COMMANDS:
        if command.name in ("QUIT", "RESET"):
            continue  # they are anybody's, and end the connection
        few = abs(command.arity) - 1
        words = [NAMES[where], *WORDS.get(command.name, ["1"] * (few - 1))]
        most = 9 if user == "nobody" else few  # more words a stranger may not send
        answer = connect(user)(command.name, *(words[:most] if few else ()))
        if user == "nobody" and not command.before_login:
            assert answer == STRANGER, command.name
        elif user.endswith("tenant") and command.name in SERVER_WIDE:
            assert answer == NOT_ALLOWED, command.name
        elif where == "outside" and command.name in RULED:
            assert answer == AGAINST_THE_RULE, command.name
        else:
            assert answer not in (STRANGER, NOT_ALLOWED, AGAINST_THE_RULE), command.name
    if user != "right tenant":
        assert belongings() == before


# gRPC


class Method(NamedTuple):
    """A call about a name, and how its answer tells that the name is the caller's."""

    service: str
    name: str
    ask: Callable[[Grpc, str], Any]
    sees: Callable[[Any], bool] | None
    """None: it says nothing of names."""


def unary(service: str, name: str, module: Any, **fields: Any) -> Callable[[Grpc, str], Any]:
    stub = {"PrefixStore": "prefixes", "SSMState": "ssm", "Attend": "attend", "Stats": "stats"}

    def ask(rpc: Grpc, namespace: str) -> Any:
        named = {k: v(namespace) if callable(v) else v for k, v in fields.items()}
        request = getattr(module, f"{service}{name}Request")(**named)
        return getattr(getattr(rpc, stub[service]), name)(request, metadata=rpc.metadata)

    return ask


def itself(namespace: str) -> str:
    return namespace


def alone(namespace: str) -> list[str]:
    return [namespace]


def stored(rpc: Grpc, namespace: str) -> Any:
    return rpc.store(Sample(f"{namespace} by grpc", 10))


def rows_written(rpc: Grpc, namespace: str) -> Any:
    header = prefix_store_pb2.PrefixStoreWriteRowsHeader(
        namespace=namespace, slot=0, side=types_pb2.SIDE_K, first_row=0, row_count=1
    )
    message = prefix_store_pb2.PrefixStoreWriteRowsRequest(header=header)
    return rpc.prefixes.WriteRows(iter([message]), metadata=rpc.metadata)


def state_stored(rpc: Grpc, namespace: str) -> Any:
    header = ssm_state_pb2.SSMStateStoreHeader(
        session=f"{namespace} by grpc", info=ssm_state_pb2.SSMStateInfo(size_bytes=0)
    )
    message = ssm_state_pb2.SSMStateStoreRequest(header=header)
    return rpc.ssm.Store(iter([message]), metadata=rpc.metadata)


def entry_stored(rpc: Grpc, namespace: str) -> Any:
    return rpc.attend.Store(iter([]), metadata=rpc.metadata)


def asked_on_a_stream(rpc: Grpc, namespace: str) -> Any:
    return list(rpc.attend.Stream(iter([]), metadata=rpc.metadata))


def first(ask: Callable[[Grpc, str], Any]) -> Callable[[Grpc, str], Any]:
    return lambda rpc, namespace: next(iter(ask(rpc, namespace)))


LAYOUT = types_pb2.Layout(
    tensors=[
        types_pb2.TensorLayout(
            side=types_pb2.SIDE_K, heads=1, head_dim=1, data_type=types_pb2.DATA_TYPE_F32
        )
    ]
)
METHODS = [
    Method("PrefixStore", "Lookup", unary(
        "PrefixStore", "Lookup", P,
        queries=lambda n: [P.PrefixStoreLookupRequest.Query(namespace=n)],
    ), lambda a: a.results[0].hit),
    Method("PrefixStore", "Match", unary(
        "PrefixStore", "Match", P, model_id="m", token_ids=bytes(4)), None),
    Method("PrefixStore", "Fetch", first(unary(
        "PrefixStore", "Fetch", P, namespace=itself)), lambda a: a.header.found),
    Method("PrefixStore", "Export", unary("PrefixStore", "Export", P, namespace=itself), None),
    Method("PrefixStore", "List", unary(
        "PrefixStore", "List", P), lambda a: any(p.namespace in NAMES.values() for p in a.prefixes)),
    Method("PrefixStore", "Blocks", unary(
        "PrefixStore", "Blocks", P, namespace=lambda _: NAMES["inside"]), lambda a: a.known),
    Method("PrefixStore", "Membership", unary(
        "PrefixStore", "Membership", P, namespaces=lambda _: [NAMES["inside"]], hashes=bytes(8)),
        lambda a: a.results[0].known),
    Method("PrefixStore", "ReadRows", first(unary(
        "PrefixStore", "ReadRows", P, namespace=itself, side=types_pb2.SIDE_K, rows=bytes(4))),
        lambda a: a.tensor.head_dim == 64),
    Method("PrefixStore", "Describe", unary("PrefixStore", "Describe", P), None),
    Method("PrefixStore", "Sync", unary("PrefixStore", "Sync", P), None),
    Method("PrefixStore", "Save", unary("PrefixStore", "Save", P, namespaces=alone), None),
    Method("PrefixStore", "Snapshot", unary(
        "PrefixStore", "Snapshot", P, namespace=itself), lambda a: a.snapshot_id > 0),
    Method("PrefixStore", "Restore", unary(
        "PrefixStore", "Restore", P, namespace=itself, snapshot_id=1), None),
    Method("PrefixStore", "Release", unary(
        "PrefixStore", "Release", P, namespace=itself, snapshot_id=1), None),
    Method("PrefixStore", "Store", stored, None),
    Method("PrefixStore", "WriteRows", rows_written, None),
    Method("PrefixStore", "Register", unary(
        "PrefixStore", "Register", P, namespace=lambda n: f"{n} declared", layout=LAYOUT), None),
    Method("SSMState", "Fetch", first(unary(
        "SSMState", "Fetch", S, session=itself)), lambda a: a.header.found),
    Method("SSMState", "Export", unary(
        "SSMState", "Export", S, session=itself, layers=lambda _: [0]), None),
    Method("SSMState", "Store", state_stored, None),
    Method("Attend", "Lookup", unary(
        "Attend", "Lookup", A, session=itself, layers=[0],
    ), lambda a: a.entries[0].state == A.ATTEND_STATE_RESIDENT),
    Method("Attend", "Store", entry_stored, None),
    Method("Attend", "Query", unary("Attend", "Query", A), None),
    Method("Attend", "Stream", asked_on_a_stream, None),
    Method("Stats", "Get", unary("Stats", "Get", T), None),
    Method("Stats", "Reset", unary("Stats", "Reset", T), None),
    # what takes away comes last
    Method("PrefixStore", "Drop", unary(
        "PrefixStore", "Drop", P, namespaces=alone), lambda a: a.results[0].dropped),
    Method("SSMState", "Drop", unary("SSMState", "Drop", S, session=itself), None),
    Method("Attend", "Drop", unary(
        "Attend", "Drop", A, session=itself), lambda a: a.dropped_count > 0),
]  # fmt: skip


def test_the_table_has_every_method() -> None:
    known = {
        (service.name, method.name)
        for module in (P, S, A, T)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert known == {(method.service, method.name) for method in METHODS}


@pytest.mark.parametrize("where", NAMES)
@pytest.mark.parametrize("user", ["nobody", "wrong tenant", "right tenant", "admin"])
def test_no_method_does_for_a_user_what_it_may_not(
    shared: ServerProcess, belongings: Callable[[], list[Any]], user: str, where: str
) -> None:
    before = belongings()
    with rpc_of(shared, user) as rpc:
        for method in METHODS:
            told, answer = None, None
            try:
                answer = method.ask(rpc, NAMES[where])
            except grpc.RpcError as error:
                told = refusal(error)
            if user == "nobody":
                assert told is not None, method
                assert told.code is grpc.StatusCode.UNAUTHENTICATED, method
            else:
                assert told is None or told.code is not grpc.StatusCode.UNAUTHENTICATED, method
                denied = told is not None and told.code is grpc.StatusCode.PERMISSION_DENIED
                closed = user.endswith("tenant") and method.service == "Stats"
                assert denied is closed, method
                if method.sees is not None:
                    sees = answer is not None and method.sees(answer)
                    assert sees is (user == "right tenant"), method
    if user != "right tenant":
        assert belongings() == before


# The binary lane


@pytest.mark.parametrize("where", NAMES)
def test_the_lane_is_the_administrators_alone(
    shared: ServerProcess,
    connect: Callable[[str], Wire],
    belongings: Callable[[], list[Any]],
    where: str,
) -> None:
    belongings()
    own = f"{NAMES[where]} of admin"
    admin = connect("admin")
    assert admin("ATTEND.PREFIX.STORE", own, 0, HEADS, 4, DIM, K, K) == "OK"
    for user, secret in USERS.items():
        lane = Lane(shared.ready["resp"])
        if secret is not None:
            opened = lane(AUTH, secret[1].encode()).status
            assert opened == (OK if user == "admin" else ERROR), user
        may = OK if user == "admin" else ERROR
        assert lane(PING).status == may, user
        for name, status in ((own, may), (NAMES[where], ERROR)):
            body = fused_body(name.encode(), 0, (HEADS, 1, DIM), (HEADS, 0), QUERY)
            assert lane(FUSED, body).status == status, (user, name)
        assert lane(0x37, b"a guess").status == ERROR
        lane.close()
