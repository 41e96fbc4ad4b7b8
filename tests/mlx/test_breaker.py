"""A server that is down must not be paid for again and again, nor given up for ever."""

import contextlib

import pytest

from pion_client.breaker import Breaker, NotAsked
from pion_client.errors import DeadlineExceeded, NotStored, PionError, Unavailable


class Clock:
    def __init__(self):
        self.now_s = 1_000.0

    def __call__(self):
        return self.now_s


def opened(**options):
    clock = Clock()
    breaker = Breaker(clock=clock, **options)
    for _ in range(3):
        assert breaker.allow()
        breaker.failed()
    return breaker, clock


def test_it_does_not_open_before_the_third_failure_in_a_row():
    breaker = Breaker(clock=Clock())
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        assert breaker.allow()
        breaker.succeeded()
    assert not breaker.is_open


def test_an_open_one_lets_nobody_through_until_its_time_is_over():
    breaker, clock = opened()
    assert breaker.is_open
    clock.now_s += 29.9
    assert not breaker.allow()
    clock.now_s += 0.2
    assert breaker.allow()


def test_a_deadline_is_not_paid_twice():
    breaker = Breaker(clock=Clock())
    breaker.failed(at_once=True)
    assert not breaker.allow()


def test_only_one_caller_tries_whether_the_server_is_back():
    breaker, clock = opened()
    clock.now_s += 31
    assert [breaker.allow() for _ in range(3)] == [True, False, False]
    breaker.failed()  # a single failure is enough now
    clock.now_s += 29
    assert not breaker.allow()
    clock.now_s += 2
    assert breaker.allow()
    breaker.succeeded()
    assert [breaker.allow() for _ in range(3)] == [True, True, True]
    assert not breaker.is_open


def test_a_caller_that_never_reports_does_not_keep_it_open_for_ever():
    breaker, clock = opened()
    clock.now_s += 31
    assert breaker.allow()
    clock.now_s += 31
    assert breaker.allow()


def guarded(breaker, error=None):
    """A call that ends with this error; every answer of a server that is there is no failure."""
    with breaker.guarding(lambda error: not isinstance(error, Unavailable | DeadlineExceeded)):
        if error:
            raise error


def test_a_call_that_is_not_let_through_is_not_made():
    breaker, clock = opened()
    with pytest.raises(NotAsked), breaker.guarding(lambda _: True):
        pytest.fail("asked")
    clock.now_s += 31
    guarded(breaker)
    assert not breaker.is_open


def test_a_server_that_refuses_is_not_taken_for_one_that_is_down():
    breaker = Breaker(clock=Clock())
    for error in (*[Unavailable("")] * 2, NotStored(""), *[Unavailable("")] * 2):
        with pytest.raises(type(error)):
            guarded(breaker, error)
        assert not breaker.is_open
    with pytest.raises(DeadlineExceeded):
        guarded(breaker, DeadlineExceeded(""))
    assert breaker.is_open, "a deadline was paid"


def test_an_error_of_ones_own_says_nothing_about_the_server():
    breaker, _ = opened()
    breaker.succeeded()
    for _ in range(5):
        with contextlib.suppress(KeyError):
            guarded(breaker, KeyError())
    assert not breaker.is_open
    with contextlib.suppress(PionError):
        guarded(breaker, Unavailable(""))
    assert not breaker.is_open, "that was the first failure"
