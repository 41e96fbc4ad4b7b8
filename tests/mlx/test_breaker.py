"""A server that is down must not be paid for again and again, nor given up for ever."""

from pion_client.breaker import Breaker


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
