"""Work in the background: never lost in silence, never in the way, never keeping a program alive."""

import gc
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest

from pion_client.background import Abandoned, Background

WAIT_S = 30.0
"""Longer than anything here takes; only a broken test waits so long."""


class Gate:
    """A job that tells when it runs and ends when it is let go."""

    def __init__(self):
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.entered.set()
        assert self.opened.wait(WAIT_S)


def test_jobs_do_not_overtake_each_other():
    background, done = Background(), []
    for number in range(20):
        assert background.put(lambda number=number: done.append(number), size_bytes=1)
    assert background.flush(WAIT_S)
    assert done == list(range(20))
    assert background.pending_bytes == 0


def test_the_caller_is_not_kept_waiting():
    background, gate = Background(), Gate()
    assert background.put(gate, size_bytes=1)
    assert gate.entered.wait(WAIT_S)
    assert not background.flush(0)
    gate.opened.set()
    assert background.flush(WAIT_S)


def test_a_job_queued_as_the_thread_ends_is_not_forgotten():
    background, done = Background(), []
    for number in range(300):
        background.put(lambda number=number: done.append(number), size_bytes=0)
        assert background.flush(WAIT_S)  # the thread is ending, or has ended
    assert len(done) == 300


def test_no_more_waits_than_there_is_room_for():
    background, gate = Background(jobs_max=2), Gate()
    assert background.put(gate, size_bytes=1)
    assert gate.entered.wait(WAIT_S)
    assert [background.put(lambda: None, size_bytes=1) for _ in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    gate.opened.set()
    assert background.flush(WAIT_S)
    assert background.put(lambda: None, size_bytes=1)
    assert background.flush(WAIT_S)


def test_no_more_memory_is_held_than_allowed_but_for_a_single_job():
    background, gate = Background(bytes_max=100), Gate()
    assert background.put(gate, size_bytes=1_000)
    assert gate.entered.wait(WAIT_S)
    assert not background.put(lambda: None, size_bytes=1)  # the job that runs counts
    gate.opened.set()
    assert background.flush(WAIT_S)
    assert background.put(lambda: None, size_bytes=60)
    assert background.flush(WAIT_S)


def test_a_delay_is_not_waited_out_by_who_waits():
    background, done = Background(), []
    for number in range(3):
        background.put(lambda number=number: done.append(number), size_bytes=1, delay_s=3_600)
    assert background.flush(WAIT_S)
    assert done == [0, 1, 2]
    background.put(lambda: done.append("too early"), size_bytes=1, delay_s=3_600)
    background.abandon()  # the hurry was over: this one still waited
    assert background.flush(WAIT_S)
    assert done == [0, 1, 2]


def test_a_delay_does_not_outlast_itself():
    background, done = Background(), threading.Event()
    background.put(done.set, size_bytes=1, delay_s=0.01)
    assert done.wait(WAIT_S)


def test_what_a_job_holds_is_let_go_when_it_is_done():
    class Array:
        pass

    background, array = Background(), Array()
    watched = weakref.ref(array)
    background.put(lambda array=array: None, size_bytes=1)
    del array
    assert background.flush(WAIT_S)
    gc.collect()
    assert watched() is None


def test_a_job_that_fails_does_not_take_the_next_one_with_it(caplog):
    background, done = Background(), []
    background.put(lambda: 1 / 0, size_bytes=1)
    background.put(lambda: done.append(1), size_bytes=1)
    assert background.flush(WAIT_S)
    assert done == [1]
    assert "ZeroDivisionError" in caplog.text


def test_abandoned_jobs_are_neither_run_nor_silent():
    background, gate, done, dropped = Background(), Gate(), [], []

    def running():
        gate()
        with pytest.raises(Abandoned):
            background.check()
        background.check()
        done.append("after the check")  # pragma: no cover

    background.put(running, size_bytes=5)
    background.put(
        lambda: done.append("waiting"), size_bytes=5, abandoned=lambda: dropped.append(1)
    )
    assert gate.entered.wait(WAIT_S)
    background.abandon()
    gate.opened.set()
    assert background.flush(WAIT_S)
    assert (done, dropped) == ([], [1])
    assert background.pending_bytes == 0
    assert not background.put(lambda: None, size_bytes=1)


# The end of the program


def run(program):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_work_queued_last_is_not_lost_when_the_program_ends():
    ran = run(
        """
        import threading
        from pion_client.background import Background

        def job(number):
            # As gRPC does: a thread of its own, started after the main one has ended.
            threading.main_thread().join()
            helper = threading.Thread(target=print, args=(number,))
            helper.start()
            helper.join()

        background = Background()
        for number in range(3):
            assert background.put(lambda number=number: job(number), size_bytes=1)
        """
    )
    assert (ran.stdout.split(), ran.stderr, ran.returncode) == (["0", "1", "2"], "", 0)


def test_a_delay_does_not_hold_up_the_end():
    ran = run(
        """
        from pion_client.background import Background

        background = Background()
        for number in range(2):
            background.put(lambda number=number: print(number), size_bytes=1, delay_s=3_600)
        """
    )
    assert (ran.stdout.split(), ran.stderr, ran.returncode) == (["0", "1"], "", 0)


def test_work_that_does_not_end_does_not_keep_the_program_alive():
    ran = run(
        """
        import threading
        from pion_client import background as module
        module.EXIT_GRACE_S = 0.2

        background = module.Background()

        def endless():
            tick = threading.Event()
            while True:
                tick.wait(0.01)
                background.check()

        background.put(endless, size_bytes=1)
        background.put(lambda: print("ran"), size_bytes=1, abandoned=lambda: print("abandoned"))
        """
    )
    assert (ran.stdout.split(), ran.stderr, ran.returncode) == (["abandoned"], "", 0)
