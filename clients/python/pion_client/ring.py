"""The ring: which node of a mesh a route belongs to, computed as the mesh's proxies compute it.

Knows names and hashes; neither connections nor who is up. It is Envoy's ring hash: every node has its
points on a circle of 64-bit numbers, XXH64 of `<node>_<index>` (seed 0); a route belongs to the node
whose point is the first at or after XXH64 of the route, around the end if there is none.

The one decision: the circle has `POINTS_PER_NODE` points for each node that there is, up or down, and
those that are up share all of them. That is what a proxy does whose smallest ring is set to that total.
With a node more everyone keeps the points that it has, so only what the new node takes over moves. While
a node is down the others share its points, too: of their own keys some move among them, never more than
the dead one had, and all of them move back when it returns.
"""

import bisect
import itertools
import math
from collections.abc import Collection, Sequence

import xxhash

POINTS_PER_NODE = 256
"""Shares differ by about 1/√256, a sixteenth."""


class Ring:
    """A circle of nodes.

    Args:
        nodes: their names, which are their addresses where nothing else was agreed; all of them.
        down: those that have no place on it now; if that is all of them, none is left out.

    Raises:
        ValueError: there are no nodes, or two of the same name.
    """

    def __init__(self, nodes: Sequence[str], *, down: Collection[str] = ()) -> None:
        if not nodes or len(set(nodes)) < len(nodes):
            raise ValueError("a ring needs nodes, each once")
        up = [node for node in nodes if node not in down] or nodes
        each = math.ceil(POINTS_PER_NODE * len(nodes) / len(up))
        # Of equal hashes, which 64 bits do not have in practice, Envoy's order is not defined either.
        points = sorted((_hash(f"{node}_{index}"), node) for node in up for index in range(each))
        self._hashes = [point for point, _ in points]
        self._nodes = [node for _, node in points]

    def routes(self) -> tuple[str, ...]:
        """Returns a route to each node that is up: some text that belongs to it."""
        found: dict[str, str] = {}
        for number in itertools.count():
            if len(found) == len(set(self._nodes)):
                return tuple(found.values())
            found.setdefault(self.node(str(number)), str(number))
        raise AssertionError("numbers have no end")

    def node(self, route: str) -> str:
        """Returns the node of a route, as it stands in the metadata `pion-route`."""
        index = bisect.bisect_left(self._hashes, _hash(route))
        return self._nodes[index % len(self._nodes)]


def _hash(text: str) -> int:
    return xxhash.xxh64_intdigest(text.encode())
