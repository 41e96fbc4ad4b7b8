"""Which node of a mesh was asked about a name, so that the same one is asked again."""

import collections
import threading

ROUTES_MAX = 1_000
"""Names that are remembered."""


class Routes:
    """Which node was asked about a name or a lease, so that the same one is asked again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: collections.OrderedDict[str, str] = collections.OrderedDict()

    def remember(self, key: str | bytes, route: str) -> None:
        """Remembers the newest thousand."""
        with self._lock:
            self._routes[_text(key)] = route
            self._routes.move_to_end(_text(key))
            if len(self._routes) > ROUTES_MAX:
                self._routes.popitem(last=False)

    def of(self, key: str | bytes) -> str:
        """Returns the route; of what is not known, the name itself."""
        with self._lock:
            return self._routes.get(_text(key), _text(key))


def _text(key: str | bytes) -> str:
    return key.hex() if isinstance(key, bytes) else key
