"""The server that is meant must not be another than the one that was named."""

import pytest

from pion_client.addresses import address_of, default_address
from pion_client.connection import PING_OPTIONS, Connection, targets_of


@pytest.mark.parametrize(
    ("address", "host", "port", "meant"),
    [
        (None, None, None, "unix:/by/environment"),
        ("unix:/tmp/x.sock", None, None, "unix:/tmp/x.sock"),
        (None, "mini-3.local", None, "mini-3.local:50051"),
        (None, None, 1234, "127.0.0.1:1234"),
        (None, "::1", 1234, "[::1]:1234"),
    ],
)
def test_no_other_server_is_asked(monkeypatch, address, host, port, meant):
    monkeypatch.setenv("PION_ADDRESS", "unix:/by/environment")
    assert address_of(address, host, port) == meant


def test_without_any_word_it_is_this_host(monkeypatch):
    monkeypatch.delenv("PION_ADDRESS", raising=False)
    assert default_address() == "127.0.0.1:50051"
    monkeypatch.setenv("PION_ADDRESS", "")  # what is empty is not set
    assert default_address() == "127.0.0.1:50051"


@pytest.mark.parametrize(
    "address",
    ["localhost:1", "node-1.pion_x.local:50051", "10.0.0.1:1", "[::1]:1", "[fe80::1%en0]:50051"],
)
def test_an_address_is_not_refused_or_changed(address):
    assert targets_of(address) == (address,)
    assert targets_of([address, "b:2"]) == (address, "b:2")


@pytest.mark.parametrize(
    "address",
    [
        *(
            "",
            "host",
            "host:",
            ":50051",
            "host:0",
            "host:99999",
            "host:x",
            "host:+5",
            "host:\u0665",
        ),
        *("host:00080", "unix:", "http://host:1", "user@host:1", "ho st:1", "host\n:1", "hést:1"),
        *("fe80::1:50051", "::1:50051", "[::1:1", "::1]:1", "[10.0.0.1]:1", "[host]:1", "[]:1"),
        *("a,b:1", "a:1,a:1", "a:1,"),
    ],
)
def test_what_is_no_address_is_said_to_be_none(address):
    with pytest.raises(ValueError, match=r"neither|each once|needs"):
        targets_of(address)


def test_a_machine_elsewhere_is_not_waited_for_when_it_has_gone_without_a_word():
    for address in ("10.0.0.1:50051", "node.shelf:50051", ["127.0.0.1:1", "127.0.0.1:2"]):
        options = Connection(address).options
        assert len(dict(options)) == len(options)
        assert dict(options).items() >= dict(PING_OPTIONS).items()
    for address in ("unix:/x", "127.0.0.1:1"):  # a process of this host is there, or it is not
        assert not dict(Connection(address).options).keys() & dict(PING_OPTIONS).keys()
