"""Which node of a mesh was asked about a name, so that the same one is asked again.

For a name that this client has not asked about, only the route of the name itself is known. It is the
right one if the prefix was stored without token ids; otherwise a client that reaches every node by
itself asks all of them.
"""

import collections
import threading

ROUTES_MAX = 50_000
"""Names that are remembered, 300 bytes each; and as many leases, which displace no name."""
ROUTE_CHARACTERS_MAX = 200
"""A longer name is not valid. The server says so, provided that its route fits into the metadata."""


class Routes:
    """The newest routes by name and by lease.

    Args:
        everywhere: a route to each node, where the client knows them.
    """

    def __init__(self, everywhere: tuple[str, ...] = ()) -> None:
        self.everywhere = everywhere
        self._lock = threading.Lock()
        self._names: collections.OrderedDict[str | bytes, str] = collections.OrderedDict()
        self._leases: collections.OrderedDict[str | bytes, str] = collections.OrderedDict()

    def remember(self, key: str | bytes, route: str) -> None:
        """Remembers a route, and forgets the oldest if there are too many."""
        with self._lock:
            routes = self._of_kind(key)
            routes[key] = route
            routes.move_to_end(key)
            if len(routes) > ROUTES_MAX:
                routes.popitem(last=False)

    def of(self, key: str | bytes) -> str:
        """Returns the route; if it is not known, the name itself."""
        with self._lock:
            known = self._of_kind(key).get(key)
        return known or by_name(key.hex() if isinstance(key, bytes) else key)

    def where(self, key: str | bytes) -> tuple[str, ...]:
        """Returns the routes to try, one after another: all nodes if the route is not known."""
        with self._lock:
            known = key in self._of_kind(key)
        return (self.of(key),) if known else (self.of(key), *self.everywhere)

    def _of_kind(self, key: str | bytes) -> collections.OrderedDict[str | bytes, str]:
        return self._leases if isinstance(key, bytes) else self._names


def by_name(name: str) -> str:
    """Returns the route of something that is known by its name alone."""
    return name[:ROUTE_CHARACTERS_MAX]
