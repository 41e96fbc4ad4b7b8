"""A client beside which others do something between two of its calls."""

from collections.abc import Callable, Iterator
from typing import Any

from pion_client import Client
from pion_client.values import Lookup


class Between(Client):
    """What `happens` does so, one thing each time that a name has been looked up."""

    happens: Iterator[Callable[[], object]] = iter(())

    def lookup(self, namespace: str, **options: Any) -> Lookup:
        found = super().lookup(namespace, **options)
        next(self.happens, bool)()
        return found
