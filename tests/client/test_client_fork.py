"""After a fork the child connects anew or raises; it never hangs, nor touches what is its parent's.

Each test is a program of its own: nobody forks a test runner that has threads.
"""

import os
import subprocess
import sys
import textwrap

import pytest

from pion_client import Client
from tests.client.links import random_layers
from tests.conftest import ServerProcess

pytestmark = pytest.mark.faults

LAYERS = random_layers(61, 4_000, slots=4, heads=4, dim=64)

PROGRAM = """
    import os, signal, sys, threading
    from pion_client import Client
    from pion_client.errors import Forked

    def in_child(work):
        # Forks; what `work` does must end within ten seconds. Returns what it returned.
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(10)
            try:
                answer = str(work())
            except Forked:
                answer = "Forked"
            os.write(writer, answer.encode())
            os._exit(0)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"the child ended with {status}: 14 is a hang"
        with os.fdopen(reader) as file:
            return file.read()

    def fetched(client):
        prefix = client.fetch("name")
        return f"{prefix.transport} {prefix.token_count}"

    address = sys.argv[1]
"""


@pytest.fixture(scope="module")
def address(server: ServerProcess) -> str:
    with Client(server.address) as client:
        client.store("name", layers=LAYERS, token_ids=range(4_000), model="m")
    return server.address


def run(address: str, program: str, **environment: str) -> list[str]:
    """Runs a program, which must end; returns the lines that it printed."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM) + textwrap.dedent(program), address],
        env={**os.environ, "GRPC_VERBOSITY": "NONE", **environment},
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
        text=True,
    )
    return result.stdout.splitlines()


USED = """
    for export in (True, False):
        client = Client(address, export=export)
        assert fetched(client)
        print(in_child(lambda: fetched(client)))
        print(fetched(client))
        client.close()
"""


def test_after_fork_the_child_does_not_hang(address: str) -> None:
    in_child_and_parent = run(address, USED)
    assert in_child_and_parent[1::2] == ["export 4000", "stream 4000"]
    for answer, expected in zip(
        in_child_and_parent[::2], ["export 4000", "stream 4000"], strict=True
    ):
        # Where gRPC has not mended itself, a clear word instead.
        assert answer in (expected, "Forked")


def test_a_client_used_only_after_the_fork_works_in_the_child(address: str) -> None:
    program = """
        client = Client(address)
        print(in_child(lambda: fetched(client)))
        print(fetched(client))
    """
    for support in ("0", "1"):
        answers = run(address, program, GRPC_ENABLE_FORK_SUPPORT=support)
        assert answers == ["export 4000", "export 4000"]


def test_where_grpc_does_not_mend_itself_the_child_is_told(address: str) -> None:
    answers = run(address, USED, GRPC_ENABLE_FORK_SUPPORT="0")
    assert answers == ["Forked", "export 4000", "Forked", "stream 4000"]


def test_a_fork_in_the_middle_of_a_call_is_told_and_harms_no_parent(address: str) -> None:
    program = """
        client = Client(address, export=False)
        inside, leave, answers = threading.Event(), threading.Event(), []

        def linger(done, total):
            inside.set()
            leave.wait()

        def fetch():
            answers.append(client.fetch("name", progress=linger).token_count)

        thread = threading.Thread(target=fetch)
        thread.start()
        inside.wait()
        print(in_child(lambda: fetched(client)))
        print(in_child(lambda: fetched(Client(address))))
        leave.set()
        thread.join()
        print(answers)
    """
    assert run(address, program) == ["Forked", "Forked", "[4000]"]


def test_a_child_ends_as_usual_with_what_it_inherited(address: str) -> None:
    program = """
        client = Client(address)
        assert fetched(client)
        child = os.fork()
        if not child:
            signal.alarm(10)
            client.close()
            del client
            sys.exit(0)
        print(os.waitpid(child, 0)[1])
        print(fetched(client))
    """
    assert run(address, program) == ["0", "export 4000"]


def test_mlx_of_the_parent_is_not_waited_for_in_the_child(address: str) -> None:
    program = """
        import mlx.core as mx
        import numpy as np

        array = mx.zeros((1, 8, 2))
        mx.eval(array)
        client = Client(address)
        for export in (True, False):
            own = Client(address, export=export)
            print(in_child(lambda: own.fetch("name", as_mlx=True)))
        given = {"layers": [(array, array)], "token_ids": range(8), "model": "m"}
        print(in_child(lambda: client.store("x", **given)))
        print(in_child(lambda: client.attend_store("x", 0, array, array)))
        print(in_child(lambda: fetched(client)))
        print(client.fetch("name", as_mlx=True).token_count)
    """
    *forked, numpy, parent = run(address, program)
    assert forked == ["Forked"] * 4
    assert (numpy, parent) == ("export 4000", "4000")


def test_mlx_that_only_the_child_imports_is_used(address: str) -> None:
    program = """
        client = Client(address)
        print(in_child(lambda: client.fetch("name", as_mlx=True).token_count))
    """
    assert run(address, program) == ["4000"]


def test_a_prompt_cache_is_not_waited_for_in_the_child(address: str) -> None:
    program = """
        from pion_client.mlx import PionPromptCache
        from pion_grpc.cli.smollm2 import random_llama

        model, ids = random_llama(), list(range(100))
        cache = PionPromptCache(model, address=address)
        cache.get_or_prefill(ids)
        for work in (
            lambda: cache.get_or_prefill(ids),
            lambda: cache.reuse(ids),
            lambda: cache.lookup("name"),
            lambda: cache.flush(),
            lambda: PionPromptCache(model, address=address),
            lambda: cache.close(),
        ):
            print(in_child(work))
        cache.close()
    """
    assert run(address, program) == ["Forked"] * 5 + ["None"]
