"""TLS: whoever should not come in does not, and certificates are renewed while calls run."""

import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pion_client import Client, Tls, errors
from pion_client.connection import Connection
from tests.authorities import Authority, put, serve_flags
from tests.client.links import assert_same, random_layers
from tests.conftest import ServerProcess
from tests.server.wire import eventually

LAYERS = random_layers(7, 64)
LARGE = random_layers(8, 4_000, slots=6, heads=4, dim=64)
LOOPBACK = "127.0.0.1:0"


def client_of(
    server: ServerProcess, tls: Tls | None = None, address: str = "", **options: float
) -> Client:
    return Client(address or server.address, export=False, tls=tls, **options)


def stranger_of(server: ServerProcess, tls: Tls | None) -> Client:
    """One who is refused, and has no patience with it."""
    return client_of(server, tls, timeout_s=0.5)


def store(client: Client, name: str = "tls/one", layers=LAYERS) -> None:
    tokens = range(layers[0][0].shape[1])
    client.store(name, layers=layers, token_ids=tokens, model="m")


def cannot_start(start_server, *flags: str, **options: str) -> str:
    with pytest.raises(RuntimeError) as failed:
        start_server(*flags, **options)
    output = str(failed.value)
    assert "Traceback" not in output
    return output


@pytest.fixture
def authority(short_tmp: Path) -> Authority:
    return Authority(short_tmp / "authority")


@pytest.fixture
def mutual(start_server, authority: Authority) -> ServerProcess:
    """A server that asks its clients for certificates."""
    flags = serve_flags(authority.server(), authority.ca)
    server: ServerProcess = start_server(*flags, listen=LOOPBACK)
    return server


def test_strangers_are_refused_by_mutual_tls(mutual: ServerProcess, authority, short_tmp) -> None:
    friend = authority.issue("friend")
    other = Authority(short_tmp / "other")
    theirs = other.issue("stranger")
    strangers = {
        "not encrypted": None,
        "no certificate": Tls(authority.ca),
        "another authority's": Tls(authority.ca, theirs.cert, theirs.key),
        "expired": authority.issue("expired", expired=True),
    }
    with client_of(mutual, friend) as client:
        store(client)
        for what, tls in strangers.items():
            with stranger_of(mutual, tls) as stranger:
                with pytest.raises(errors.Unavailable) as refused:
                    stranger.fetch("tls/one")
                assert refused.value.from_transport, what
                with pytest.raises(errors.Unavailable):
                    store(stranger, "tls/two")
        fetched = client.fetch("tls/one")
        assert fetched is not None
        assert_same(fetched.layers, LAYERS)
        assert [info.namespace for info in client.list()] == ["tls/one"]


def test_no_client_talks_to_a_server_that_it_does_not_trust(start_server, short_tmp) -> None:
    trusted, other = Authority(short_tmp / "trusted"), Authority(short_tmp / "other")
    servers = {
        "another authority's": other.server(),
        "expired": trusted.server(expired=True),
        "another name": trusted.issue("elsewhere", "elsewhere.example"),
    }
    for number, (what, own) in enumerate(servers.items()):
        server = start_server(
            *serve_flags(own), directory=short_tmp / f"data{number}", listen=LOOPBACK
        )
        with stranger_of(server, Tls(trusted.ca)) as client:
            with pytest.raises(errors.Unavailable) as refused:
                client.describe()
            assert refused.value.from_transport, what


def test_certificates_are_renewed_under_running_calls(
    mutual: ServerProcess, authority: Authority, short_tmp: Path
) -> None:
    old = authority.issue("client")
    successor = Authority(short_tmp / "successor")
    new, renewed = successor.issue("client"), successor.server()
    halfway, go_on = threading.Event(), threading.Event()

    def pause(done: int, total: int) -> None:
        if done > total // 2:
            halfway.set()
            assert go_on.wait(30)

    with client_of(mutual, old) as before, client_of(mutual, new) as after:
        store(before, "tls/large", LARGE)
        fetched = []
        thread = threading.Thread(
            target=lambda: fetched.append(before.fetch("tls/large", progress=pause))
        )
        thread.start()
        assert halfway.wait(30)
        with pytest.raises(errors.Unavailable):
            after.describe()
        put(authority.ca, successor.ca.read_bytes())
        put(Path(authority.directory / "server.key"), Path(str(renewed.key)).read_bytes())
        put(Path(authority.directory / "server.pem"), Path(str(renewed.cert)).read_bytes())
        store(after, "tls/after")
        assert before.lookup("tls/after").hit, "a connection that stands goes on"
        go_on.set()
        thread.join(30)
        assert fetched[0] is not None
        assert_same(fetched[0].layers, LARGE)
    late = stranger_of(mutual, Tls(successor.ca, old.cert, old.key))
    with late, pytest.raises(errors.Unavailable):
        late.describe()
    assert [entry for entry in mutual.log if entry["event"] == "new certificates"]


def test_half_a_renewal_is_not_used(mutual: ServerProcess, authority: Authority) -> None:
    friend = authority.issue("friend")
    successor = Authority(authority.directory / "successor")
    renewed = successor.server()
    own = authority.directory / "server.pem", authority.directory / "server.key"
    put(own[0], Path(str(renewed.cert)).read_bytes())
    for _ in range(3):
        with client_of(mutual, friend) as client:
            client.describe()
    (warning,) = [entry for entry in mutual.log if entry["level"] == "warning"]
    assert warning["event"] == "new certificates are not used"
    assert str(own[0]) in warning["problem"]
    put(own[1], Path(str(renewed.key)).read_bytes())
    with client_of(mutual, Tls(successor.ca, friend.cert, friend.key)) as client:
        client.describe()


def test_a_client_goes_on_with_a_renewed_certificate(
    start_server, authority: Authority, short_tmp: Path
) -> None:
    own = authority.issue("client")
    first = start_server(*serve_flags(authority.server(), authority.ca), listen=LOOPBACK)
    successor = Authority(short_tmp / "successor")
    with client_of(first, own) as client:
        store(client)
        first.stop()
        second = start_server(*serve_flags(successor.server(), successor.ca), listen=first.address)
        with pytest.raises(errors.Unavailable):
            client.describe()
        renewed = successor.issue("client")
        put(authority.ca, successor.ca.read_bytes())
        put(Path(str(own.key)), Path(str(renewed.key)).read_bytes())
        put(Path(str(own.cert)), Path(str(renewed.cert)).read_bytes())
        assert client.lookup("tls/one").hit
    assert second.address == first.address


@pytest.mark.skipif(sys.platform != "linux", reason="workers share a port on Linux only")
def test_every_worker_asks_for_certificates(start_server, authority: Authority) -> None:
    flags = serve_flags(authority.server(), authority.ca)
    server = start_server("--workers", "2", *flags, listen=LOOPBACK)
    friend = authority.issue("friend")
    for _ in range(8):
        with client_of(server, friend) as client:
            client.describe()
        with stranger_of(server, Tls(authority.ca)) as stranger, pytest.raises(errors.Unavailable):
            stranger.describe()


# What may be reached from elsewhere


def test_mutual_tls_lets_strangers_knock_and_a_certificate_alone_does_not(
    start_server, authority: Authority, short_tmp: Path
) -> None:
    own = authority.server()
    mutual = start_server(*serve_flags(own, authority.ca), listen="0.0.0.0:0")
    assert mutual.ready["tls"] == "mutual"
    assert not [entry for entry in mutual.log if entry["level"] == "warning"]
    port = mutual.address.rpartition(":")[2]
    with client_of(mutual, authority.issue("friend"), f"127.0.0.1:{port}") as client:
        client.describe()
    data = short_tmp / "other"
    output = cannot_start(start_server, *serve_flags(own), listen="0.0.0.0:0", directory=data)
    assert "--tls-client-ca" in output
    output = cannot_start(
        start_server,
        *serve_flags(own, authority.ca),
        "--resp",
        "0.0.0.0:0",
        listen=LOOPBACK,
        directory=data,
    )
    assert "PION_PASSWORD" in output
    assert "--tls-client-ca" not in output, "the RESP wire has no TLS"


def test_passwords_are_asked_for_under_tls_too(start_server, authority: Authority) -> None:
    flags = serve_flags(authority.server(), authority.ca)
    server = start_server(*flags, listen=LOOPBACK, PION_PASSWORD="secret")
    friend = authority.issue("friend")
    with client_of(server, friend) as client, pytest.raises(errors.NotAuthenticated):
        client.describe()
    with Client(server.address, tls=friend, password="secret") as client:
        client.describe()


# Configurations that cannot work


def test_certificates_that_cannot_be_used_refuse_to_start(start_server, authority) -> None:
    own, other = authority.server(), authority.issue("other")
    absent = authority.directory / "absent.pem"
    empty = authority.directory / "empty.pem"
    empty.touch()
    cases = {
        "absent.pem": serve_flags(Tls(None, absent, own.key)),
        "server.pem": serve_flags(Tls(None, own.cert, other.key)),
        "empty.pem": serve_flags(own, empty),
        "--tls-key": ["--tls-cert", str(own.cert)],
        "--tls-cert": ["--tls-client-ca", str(authority.ca)],
    }
    for named, flags in cases.items():
        assert named in cannot_start(start_server, *flags, listen=LOOPBACK)
    assert "Unix socket" in cannot_start(start_server, *serve_flags(own))


def test_certificates_that_cannot_be_used_are_told_before_any_call(authority, tmp_path) -> None:
    own, other = authority.issue("own"), authority.issue("other")
    empty = tmp_path / "empty.pem"
    empty.touch()
    for tls in (
        Tls(tmp_path / "absent.pem"),
        Tls(empty),
        Tls(authority.ca, own.cert),
        Tls(authority.ca, own.cert, other.key),
    ):
        with pytest.raises(ValueError, match=r"\.pem|go together"):
            Client("127.0.0.1:1", tls=tls)
    with pytest.raises(ValueError, match="not encrypted"):
        Client("unix:/tmp/socket", tls=own)


def test_the_environment_names_certificates_for_addresses_only(
    mutual: ServerProcess, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    friend = authority.issue("friend")
    named = {"CA": friend.ca, "CERT": friend.cert, "KEY": friend.key}
    assert Tls.from_environment({}) is None
    assert Tls.from_environment({"PION_TLS_CA": ""}) is None
    for name, path in named.items():
        monkeypatch.setenv(f"PION_TLS_{name}", str(path))
    with client_of(mutual) as client:
        client.describe()
    Connection("unix:/tmp/socket").close()


def test_a_server_does_not_take_its_clients_certificates_for_its_own(
    start_server, authority: Authority
) -> None:
    friend, own = authority.issue("friend"), authority.server()
    plain = start_server(
        listen=LOOPBACK,
        PION_TLS_CA=str(friend.ca),
        PION_TLS_CERT=str(friend.cert),
        PION_TLS_KEY=str(friend.key),
    )
    with client_of(plain) as client:
        client.describe()
    plain.stop()
    named = {"CERT": own.cert, "KEY": own.key, "CLIENT_CA": authority.ca}
    environment = {f"PION_SERVER_TLS_{name}": str(path) for name, path in named.items()}
    assert start_server(listen=LOOPBACK, **environment).ready["tls"] == "mutual"


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pion_grpc", "ls", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_commands_show_their_certificates(mutual: ServerProcess, authority: Authority) -> None:
    friend = authority.issue("friend")
    named = [("ca", friend.ca), ("cert", friend.cert), ("key", friend.key)]
    flags = itertools.chain.from_iterable((f"--tls-{name}", str(path)) for name, path in named)
    shown = command("--address", mutual.address, *flags)
    assert shown.returncode == 0, shown.stdout
    refused = command("--address", mutual.address, "--timeout", "0.5")
    assert json.loads(refused.stdout)["error"]["reason"] == "UNAVAILABLE"
    odd = command("--address", mutual.address, "--tls-ca", "/nowhere.pem")
    assert "/nowhere.pem" in json.loads(odd.stdout)["error"]["message"]


def test_a_server_logs_no_secret_and_no_key(mutual: ServerProcess, authority: Authority) -> None:
    with client_of(mutual, authority.issue("friend")) as client:
        client.describe()
    eventually(lambda: mutual.log)
    mutual.stop()
    assert "PRIVATE KEY" not in "".join(mutual.output)
