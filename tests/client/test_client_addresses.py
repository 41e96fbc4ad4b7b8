"""The server that is meant must not be another than the one that was named."""

import pytest

from pion_client.addresses import address_of, default_address


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
