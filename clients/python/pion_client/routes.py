"""Which node of a mesh was asked about a name, so that the same one is asked again.

Of a name that nobody here has asked about only its own route is known. It is the right one if the prefix
was stored without token ids; else, where a client reaches every node by itself, it asks all of them.
"""

import collections
import threading

ROUTES_MAX = 50_000
"""Names that are remembered, 300 bytes each."""
ROUTE_CHARACTERS_MAX = 200
"""What is longer is no name; the server says so, if its route fits into the call's metadata."""


class Routes:
    """Which node was asked about a name or a lease, so that the same one is asked again.

    Args:
        everywhere: a route to each node, where the client knows them.
    """

    def __init__(self, everywhere: tuple[str, ...] = ()) -> None:
        self.everywhere = everywhere
        self._lock = threading.Lock()
        self._routes: collections.OrderedDict[str, str] = collections.OrderedDict()

    def remember(self, key: str | bytes, route: str) -> None:
        """Remembers the newest."""
        with self._lock:
            self._routes[_text(key)] = route
            self._routes.move_to_end(_text(key))
            if len(self._routes) > ROUTES_MAX:
                self._routes.popitem(last=False)

    def of(self, key: str | bytes) -> str:
        """Returns the route; of what is not known, the name itself."""
        with self._lock:
            return self._routes.get(_text(key), by_name(_text(key)))

    def where(self, key: str | bytes) -> tuple[str, ...]:
        """Returns the routes to try, one after the other: all nodes, if it is not known."""
        with self._lock:
            known = _text(key) in self._routes
        return (self.of(key),) if known else (self.of(key), *self.everywhere)


def by_name(name: str) -> str:
    """Returns the route of what is known by its name alone."""
    return name[:ROUTE_CHARACTERS_MAX]


def _text(key: str | bytes) -> str:
    return key.hex() if isinstance(key, bytes) else key
