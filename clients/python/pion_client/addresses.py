"""Which server is meant, where callers may leave it open. Knows the environment; nothing of connections.

The one decision: what a caller says is said once. A host and an address contradict each other, or will.
"""

import os

DEFAULT_ADDRESS = "127.0.0.1:50051"


def default_address() -> str:
    """Returns PION_ADDRESS of the environment, else the port that a server takes on this host."""
    return os.environ.get("PION_ADDRESS") or DEFAULT_ADDRESS


def address_of(address: str | None, host: str | None, port: int | None) -> str:
    """Returns the one address that was given, whole or in two; the default if none was."""
    if not (address or host or port):
        return default_address()
    host = host or "127.0.0.1"
    return address or (f"[{host}]" if ":" in host else host) + f":{port or 50051}"
