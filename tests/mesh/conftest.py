"""Meshes for tests: one that all share, and one of its own for a test that breaks it."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mesh.shelf import Shelf


def _shelves(names: str, proxies: str) -> Iterator[Shelf]:
    path = Path(tempfile.mkdtemp(prefix="pion-mesh-", dir="/tmp"))
    shelf = Shelf(path)
    try:
        shelf.open(names, proxies=proxies)
        yield shelf
    finally:
        shelf.close()
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def shelf() -> Iterator[Shelf]:
    """Three nodes, of which two have a proxy."""
    yield from _shelves("abc", "ab")


@pytest.fixture
def fragile() -> Iterator[Shelf]:
    """Three nodes and a proxy, of one test."""
    yield from _shelves("abc", "a")
