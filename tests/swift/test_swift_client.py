"""The Swift client's own tests: run where Swift is installed, against a server of this checkout.

Before Swift 6.1 that is the module without dependencies alone. Later ones need `protoc`, and to reach
the repositories of the dependencies: where they cannot, nothing is built.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ServerProcess

CLIENT = Path(__file__).parents[2] / "clients" / "swift"
SWIFT = shutil.which("swift")

pytestmark = pytest.mark.skipif(
    SWIFT is None, reason="no Swift here: clients/swift was neither built nor tested"
)


def swift(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the Swift package manager on the package; returns how that ended and what it printed."""
    assert SWIFT is not None
    return subprocess.run(
        [SWIFT, *arguments, "--package-path", str(CLIENT)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_swift_client_does_not_lose_a_bit(server: ServerProcess) -> None:
    manifest = swift("package", "dump-package")
    assert manifest.returncode == 0, manifest.stdout
    resolved = swift("package", "resolve")
    if resolved.returncode != 0:
        pytest.skip(f"the dependencies of clients/swift cannot be had:\n{resolved.stdout[-500:]}")
    done = swift("test", PION_TEST_ADDRESS=server.address)
    assert done.returncode == 0, done.stdout[-20_000:]
    assert re.search(r"Test run with [1-9]\d* tests passed", done.stdout), done.stdout
