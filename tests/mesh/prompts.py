"""Prefixes that can be told apart: every byte of one follows from its number."""

from collections.abc import Iterable
from typing import NamedTuple

from pion_client import Client, Prefix
from pion_client.ring import Ring
from pion_wire.blocks import pack_token_ids, route_key
from tests.client.links import Pairs, assert_same, random_layers

MODEL = "mlx1:mesh"
TOKENS = 16


class Prompt(NamedTuple):
    """One of many."""

    number: int

    @property
    def name(self) -> str:
        """Its namespace."""
        return f"prompt/{self.number}"

    @property
    def token_ids(self) -> range:
        """Its tokens, which no other has."""
        return range(self.number * TOKENS, (self.number + 1) * TOKENS)

    @property
    def layers(self) -> Pairs:
        """Its rows."""
        return random_layers(self.number, TOKENS, slots=1)

    @property
    def route(self) -> str:
        """What proxies see of it."""
        return route_key("", MODEL, pack_token_ids(self.token_ids))

    def store(self, client: Client) -> None:
        """Stores it."""
        client.store(self.name, layers=self.layers, token_ids=self.token_ids, model=MODEL)

    def fetched(self, client: Client) -> bool:
        """Fetches it; False is a miss, and bytes that are not its own are none."""
        found = client.lookup(self.name, model=MODEL, token_ids=self.token_ids)
        return found.hit and self.is_whole(client.fetch(self.name))

    def matches(self, client: Client) -> bool:
        """Looks for its tokens; what is found is it."""
        match = client.match(model=MODEL, token_ids=self.token_ids, lease_ms=0)
        assert not match.hit or match.namespace == self.name
        return match.hit

    def is_whole(self, prefix: Prefix | None) -> bool:
        """Checks what came."""
        if prefix is None:
            return False
        assert_same(prefix.layers, self.layers)
        return True


def prompts(count: int, first: int = 0) -> list[Prompt]:
    """Some of them."""
    return [Prompt(number) for number in range(first, first + count)]


def by_node(ring: Ring, some: Iterable[Prompt]) -> dict[str, set[str]]:
    """Which node holds what, as the ring has it."""
    found: dict[str, set[str]] = {}
    for prompt in some:
        found.setdefault(ring.node(prompt.route), set()).add(prompt.name)
    return found
