"""The Go client's own tests, which start servers of this checkout: run where Go is installed."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.mesh.shelf import PASSWORD, Shelf

CLIENT = Path(__file__).parents[2] / "clients" / "go"
GO = shutil.which("go") or shutil.which("/usr/local/go/bin/go")

pytestmark = pytest.mark.skipif(GO is None, reason="no Go here: clients/go was not tested")


def go(*arguments: str, **environment: str) -> None:
    """Runs the go tool in the module; what it prints is the reason of a failure."""
    assert GO is not None
    done = subprocess.run(
        [GO, *arguments],
        cwd=CLIENT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"go {' '.join(arguments)}:\n{done.stdout[-20_000:]}"


def test_the_go_client_does_not_lose_a_bit() -> None:
    go("vet", "./...")
    go("test", "-count=1", "./...")


def test_the_go_client_loses_nothing_behind_a_proxy() -> None:
    with tempfile.TemporaryDirectory(prefix="pion-go-", dir="/tmp") as directory:
        shelf = Shelf(Path(directory))
        try:
            shelf.open("abc", proxies="a")
            node = shelf.node("a")
            go(
                *("test", "-count=1", "-run", "NothingIsLost", "./pion"),
                PION_TEST_MESH=f"{node.address}:{node.port}",
                PION_TEST_NODES=",".join(shelf.keys),
                PION_TEST_TLS=str(shelf.out / "clients/user"),
                PION_PASSWORD=PASSWORD,
            )
            assert all(shelf.holds(name) for name in "abc")
        finally:
            shelf.close()


@pytest.mark.soak
def test_the_go_client_has_no_race_and_needs_no_memory_for_a_gigabyte() -> None:
    go("test", "-count=1", "-race", "./...")
    go("test", "-count=1", "-run", "Gigabyte|FallsSilent", "./pion", PION_LONG_TESTS="1")
