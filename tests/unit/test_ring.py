"""The ring: no client disagrees with another, and no key moves without need."""

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from pion_client.connection import Connection, targets_of
from pion_client.nodes import DOWN_S_MAX, Health
from pion_client.ring import POINTS_PER_NODE, Ring

VECTORS = json.loads((Path(__file__).resolve().parents[1] / "vectors/ring.json").read_text())
NODES = [f"10.0.0.{number}:50052" for number in range(1, 9)]
ROUTES = [f"{number:064x}" for number in range(20_000)]
UNAVAILABLE, OK = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK


@pytest.mark.parametrize("case", VECTORS["rings"])
def test_no_client_has_a_ring_of_its_own(case: dict[str, Any]) -> None:
    assert VECTORS["points_per_node"] == POINTS_PER_NODE
    ring = Ring(case["nodes"], down=case["down"])
    assert {route: ring.node(route) for route in case["routes"]} == case["routes"]


def test_the_order_of_nodes_means_nothing() -> None:
    one, other = Ring(NODES), Ring(NODES[::-1])
    assert all(one.node(route) == other.node(route) for route in ROUTES[:1_000])


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_new_node_moves_only_what_it_takes(count: int) -> None:
    before, after = Ring(NODES[:count]), Ring(NODES[: count + 1])
    moved = [(before.node(route), after.node(route)) for route in ROUTES]
    moved = [(a, b) for a, b in moved if a != b]
    assert {b for _, b in moved} == {NODES[count]}
    assert 0.7 / (count + 1) < len(moved) / len(ROUTES) < 1.3 / (count + 1)


def test_no_node_has_much_more_than_its_share() -> None:
    counts = Counter(map(Ring(NODES).node, ROUTES))
    share = len(ROUTES) / len(NODES)
    assert all(0.75 * share < count < 1.25 * share for count in counts.values())


def test_nothing_is_sent_to_a_node_that_is_down_while_others_are_up() -> None:
    whole, part = Ring(NODES[:4]), Ring(NODES[:4], down=NODES[:1])
    moved = 0
    for route in ROUTES:
        assert part.node(route) != NODES[0]
        moved += whole.node(route) not in (NODES[0], part.node(route))
    assert moved < 0.3 * len(ROUTES), "what was not the dead node's stays, mostly"
    assert Ring(NODES[:2], down=NODES[:2]).node("x") == Ring(NODES[:2]).node("x")


@pytest.mark.parametrize("nodes", [[], ["a", "a"]])
def test_a_ring_without_nodes_or_with_one_twice_is_refused(nodes: list[str]) -> None:
    with pytest.raises(ValueError, match="each once"):
        Ring(nodes)


def test_addresses_are_several_or_one() -> None:
    assert targets_of("a:1") == ("a:1",)
    assert targets_of("a:1, b:2") == targets_of(["a:1", "b:2"]) == ("a:1", "b:2")
    assert targets_of("unix:/tmp/a,b") == ("unix:/tmp/a,b",)
    for bad in ([], ["a:1", "a:1"], "a:1,", "a:1,b", "a:1,a:1"):
        with pytest.raises(ValueError, match=r"neither|each once"):
            targets_of(bad)
    assert Connection("127.0.0.1:1,[::1]:1").is_local
    assert not Connection("127.0.0.1:1,10.0.0.1:1").is_local


# Which nodes are left out


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(NODES[:3], clock=clock)


def routes_of(node: str, count: int = 50) -> list[str]:
    ring = Ring(NODES[:3])
    return [route for route in ROUTES[:1_000] if ring.node(route) == node][:count]


def test_a_node_that_cannot_be_reached_is_left_out(health: Health) -> None:
    health.note(NODES[0], UNAVAILABLE)
    without = Ring(NODES[:3], down=NODES[:1])
    assert all(health.node(route) == without.node(route) for route in ROUTES[:1_000])


@pytest.mark.parametrize("code", [OK, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INTERNAL, None])
def test_a_node_that_answers_is_not_left_out(health: Health, code: Any) -> None:
    health.note(NODES[0], UNAVAILABLE)
    health.note(NODES[0], code)
    assert {health.node(route) for route in routes_of(NODES[0])} == {NODES[0]}


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_what_our_own_side_says_is_no_answer(health: Health, clock: Clock, code: Any) -> None:
    (route,) = routes_of(NODES[0], 1)
    health.note(NODES[0], UNAVAILABLE)
    health.note(NODES[0], code)
    assert health.node(route) != NODES[0]
    clock.now += 1.25
    assert health.node(route) == NODES[0]
    health.note(NODES[0], code)
    assert health.node(route) != NODES[0]
    clock.now += DOWN_S_MAX + 1
    assert health.node(route) == NODES[0], "it is tried again all the same"


def test_one_call_tries_a_node_and_all_others_stay(health: Health, clock: Clock) -> None:
    health.note(NODES[0], UNAVAILABLE)
    clock.now += 1.5
    without = Ring(NODES[:3], down=NODES[:1])
    elsewhere = routes_of(NODES[1]) + routes_of(NODES[2])
    assert all(health.node(route) == without.node(route) for route in elsewhere)
    first, *rest = routes_of(NODES[0])
    assert health.node(first) == NODES[0], "it is tried with a call of its own"
    assert all(health.node(route) == without.node(route) for route in rest)
    health.note(NODES[0], OK)
    assert {health.node(route) for route in rest} == {NODES[0]}


def test_a_node_that_stays_away_is_tried_less_and_less_but_always_again(
    health: Health, clock: Clock
) -> None:
    (route,) = routes_of(NODES[0], 1)
    waited = []
    health.note(NODES[0], UNAVAILABLE)
    for _ in range(8):
        began = clock.now
        while health.node(route) != NODES[0]:
            clock.now += 0.25
        waited.append(clock.now - began)
        health.note(NODES[0], UNAVAILABLE)
    assert waited[0] <= 1.25
    assert waited == sorted(waited)
    assert waited[-1] <= DOWN_S_MAX + 0.25


def test_calls_that_fail_together_count_once(health: Health, clock: Clock) -> None:
    (route,) = routes_of(NODES[0], 1)
    for _ in range(50):
        health.note(NODES[0], UNAVAILABLE)
    clock.now += 1.25
    assert health.node(route) == NODES[0]


def test_many_threads_and_nodes_keep_few_rings(health: Health) -> None:
    def work(begin: int) -> None:
        for number, route in enumerate(ROUTES[begin : begin + 300]):
            health.note(NODES[number % 3], UNAVAILABLE if number % 2 else OK)
            assert health.node(route) in NODES

    threads = [threading.Thread(target=work, args=(300 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(health._rings) <= 8
