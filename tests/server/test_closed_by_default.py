"""What a server does not do unless told: listen to strangers, or believe them."""

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.conftest import ServerProcess
from tests.server.wire import Sample, Wire, refused

PASSWORD = "open sésame: with a colon"


def cannot_start(start_server, *flags: str, **options: str) -> str:
    with pytest.raises(RuntimeError) as failed:
        start_server(*flags, **options)
    output = str(failed.value)
    assert "Traceback" not in output
    return output


@pytest.fixture(params=["environment", "file", "file named by the environment"])
def guarded(request, start_server, short_tmp) -> ServerProcess:
    """A server with a password, however it was told."""
    secret = short_tmp / "secret"
    secret.write_text(PASSWORD + "\n")
    if request.param == "environment":
        return start_server(PION_PASSWORD=PASSWORD)
    if request.param == "file":
        return start_server("--password-file", str(secret))
    return start_server(PION_PASSWORD_FILE=str(secret))


def test_only_the_password_opens(guarded: ServerProcess) -> None:
    with Wire(guarded.address, password=PASSWORD) as friend:
        friend.store(Sample("auth/one", 10))
        assert friend.fetch("auth/one").tensors == Sample("auth/one", 10).tensors
    strangers = {
        "no password": Wire(guarded.address),
        "a wrong one": Wire(guarded.address, password=PASSWORD[:-1]),
        "an empty one": Wire(guarded.address, password=""),
        "another tenant": Wire(guarded.address, password=PASSWORD, tenant="another"),
        "an empty one of another tenant": Wire(guarded.address, password="", tenant="another"),
    }
    for what, stranger in strangers.items():
        for ask in (
            lambda: stranger.lookup("auth/one"),  # noqa: B023
            lambda: stranger.call("Describe"),  # noqa: B023
            lambda: stranger.fetch("auth/one"),  # noqa: B023
            lambda: stranger.store(Sample("auth/two", 10)),  # noqa: B023
            lambda: stranger.receipt(),  # noqa: B023
            lambda: stranger.raw("Query", b"", "Attend"),  # noqa: B023
        ):
            told = refused(ask)
            assert (told.code, told.reason) == (
                grpc.StatusCode.UNAUTHENTICATED,
                "NOT_AUTHENTICATED",
            ), what
            assert PASSWORD not in told.message
        stranger.close()
    with Wire(guarded.address, password=PASSWORD) as friend:
        assert friend.names() == ["auth/one"]


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Basic",
        "Basic ",
        "Basic !!!",
        "Basic /w==",
        "Bearer eHh4",
        "Basic OnNlc2FtZQ==",
        "x" * 4_000,
    ],
)
def test_no_odd_credentials_open(start_server, header: str) -> None:
    server = start_server(PION_PASSWORD=PASSWORD)
    with Wire(server.address) as wire:
        wire.metadata = (("authorization", header),)
        assert refused(lambda: wire.lookup("auth/one")).reason == "NOT_AUTHENTICATED"


def services(wire: Wire) -> list[str]:
    """Asks reflection what there is."""
    stub = reflection_pb2_grpc.ServerReflectionStub(wire.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), metadata=wire.metadata, timeout=30)
    return sorted(service.name for service in answer.list_services_response.service)


def test_health_needs_no_password_and_reflection_does(start_server) -> None:
    server = start_server(PION_PASSWORD=PASSWORD)
    with Wire(server.address) as stranger, Wire(server.address, password=PASSWORD) as friend:
        assert stranger.healthy() == health_pb2.HealthCheckResponse.SERVING
        told = refused(lambda: services(stranger))
        assert (told.code, told.reason) == (grpc.StatusCode.UNAUTHENTICATED, "NOT_AUTHENTICATED")
        assert "pion.v1.PrefixStore" in services(friend)
        unknown = stranger.channel.unary_unary("/pion.v2.PrefixStore/Lookup")
        assert refused(lambda: unknown(b"")).reason == "NOT_AUTHENTICATED"
        lookalike = stranger.channel.unary_unary("/grpc.health.v1.HealthX/Check")
        assert refused(lambda: lookalike(b"")).reason == "NOT_AUTHENTICATED"


def test_reflection_names_every_service(server: ServerProcess) -> None:
    with Wire(server.address) as wire:
        assert services(wire) == [
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            "pion.v1.Attend",
            "pion.v1.PrefixStore",
            "pion.v1.SSMState",
            "pion.v1.Stats",
        ]


def test_health_answers_per_service(server: ServerProcess) -> None:
    with Wire(server.address) as wire:
        for service in ("", *(f"pion.v1.{name}" for name in ("PrefixStore", "SSMState", "Stats"))):
            assert wire.healthy(service) == health_pb2.HealthCheckResponse.SERVING
        assert refused(lambda: wire.healthy("pion.v1.Nonsense")).code == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "listen",
    ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.invalid:0"],
)
def test_no_stranger_is_listened_to_without_a_password(start_server, listen: str) -> None:
    output = cannot_start(start_server, listen=listen)
    assert "PION_PASSWORD" in output
    assert "--insecure-bind" in output


def test_listening_to_strangers_is_logged_at_every_start(start_server) -> None:
    server = start_server("--insecure-bind", listen="0.0.0.0:0")
    (warning,) = [entry for entry in server.log if entry["level"] == "warning"]
    assert warning["listen"] == "0.0.0.0:0"
    with Wire(f"127.0.0.1:{server.address.rpartition(':')[2]}") as wire:
        assert wire.names() == []
    server.stop()
    safe = start_server("--insecure-bind", listen="127.0.0.1:0")
    assert not [entry for entry in safe.log if entry["level"] == "warning"]


def test_a_password_lets_strangers_knock(start_server) -> None:
    server = start_server(PION_PASSWORD=PASSWORD, listen="0.0.0.0:0")
    assert not [entry for entry in server.log if entry["level"] == "warning"]
    with Wire(f"127.0.0.1:{server.address.rpartition(':')[2]}", password=PASSWORD) as wire:
        assert wire.names() == []


def test_secrets_are_not_logged(start_server) -> None:
    server = start_server(PION_PASSWORD=PASSWORD)
    with Wire(server.address, password="wrong") as wire:
        refused(lambda: wire.lookup("auth/one"))
    server.stop()
    assert PASSWORD not in "".join(server.output)


def test_an_empty_or_missing_password_file_is_no_password(start_server, short_tmp) -> None:
    empty = short_tmp / "empty"
    empty.write_text("\n")
    assert "password file" in cannot_start(start_server, "--password-file", str(empty))
    missing = str(short_tmp / "missing")
    assert "password file" in cannot_start(start_server, "--password-file", missing)


def test_files_and_sockets_are_the_owners_alone(start_server) -> None:
    server = start_server()
    with Wire(server.address) as wire:
        wire.store(Sample("mode/one", 10))
    socket = server.directory.with_name(server.directory.name + ".sock")
    paths = [socket, server.directory, *server.directory.rglob("*")]
    assert len(paths) > 8
    assert [path for path in paths if path.stat().st_mode & 0o077] == []
