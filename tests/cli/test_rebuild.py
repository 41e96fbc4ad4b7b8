"""`rebuild`: whoever does what the messages say has everything again."""

import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pion_client import Client, Part
from pion_wire.limits import PAGE_BYTES
from tests.cli.conftest import Run, same_bits, store
from tests.conftest import ServerProcess

WIDE_TOKENS = 600
NAMES = ["bf16", "child", "grandchild", "lossy", "root", "sealed", "wide"]
STATE = Part("state", 3, 70, bytes(range(256)) * 1_200, "KVCache [1, 2]")


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def random(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


Seen = dict[str, tuple[Any, ...]]


def seen(client: Client) -> Seen:
    """Everything that a client sees of every prefix, but for generations and times."""
    found: Seen = {}
    for name in sorted(prefix.namespace for prefix in client.list()):
        codecs = ["int8"] if name == "lossy" else []
        info = client.lookup(name).prefix
        assert info is not None
        kinds = {p.kind for p in info.parts if p.boundary_tokens == info.token_count}
        prefix = client.fetch(name, codecs=codecs, part_kinds=sorted(kinds))
        assert prefix is not None, name
        rows = [
            bits(array)
            for pair in prefix.layers
            for side in pair
            for array in (side.arrays if codecs else (side,))
        ]
        parts = [(part.info, b"".join(bytes(b) for b in part.buffers)) for part in prefix.parts]
        found[name] = (
            rows, parts, prefix.layout, prefix.fidelity, prefix.model, prefix.packed_token_ids,
            info.parent, info.base, info.parts,
        )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen]:
    """A directory with prefixes of many kinds, its server stopped, and what they are."""
    directory = tmp_path_factory.mktemp("example") / "a directory"
    server = ServerProcess(directory, listen="127.0.0.1:0")
    with Client(server.address, export=False) as client:
        disk: dict[str, Any] = {"durability": "disk"}
        store(client, "root", 70, parts=[STATE], **disk)
        store(client, "child", 110, parent="root", base=70, **disk)
        store(client, "grandchild", 300, parent="child", base=100, **disk)
        wide = random((8, WIDE_TOKENS, 64))
        client.store("wide", layers=[(wide, wide)], token_ids=range(WIDE_TOKENS), model="w", **disk)
        small = random((2, 90, 32))
        client.store(
            "bf16", layers=[(small.astype(ml_dtypes.bfloat16), small.astype(np.float16))],
            token_ids=range(5, 95), model="b", **disk,
        )  # fmt: skip
        client.store(
            "lossy",
            layers=[(small, small)],
            codecs="int8",
            token_ids=range(7, 97),
            model="l",
            **disk,
        )
        store(client, "sealed", 40)
        rows = np.ones((2, 5, 8), np.float16)
        client.write_rows("sealed", slot=0, side="k", first_row=40, rows=rows)
        assert client.save("sealed") == 1
        found = seen(client)
    assert server.stop() == 0
    assert sorted(found) == NAMES
    return directory, found


@pytest.fixture
def stopped(example: tuple[Path, Seen], short_tmp: Path) -> Path:
    """A copy of it to spoil, in a directory that a shell would split."""
    return Path(shutil.copytree(example[0], short_tmp / "my data"))


def refused(start_server: Callable[..., ServerProcess], directory: Path) -> str:
    """What a server says that does not start."""
    with pytest.raises(RuntimeError) as problem:
        start_server(directory=directory, listen="127.0.0.1:0")
    told = str(problem.value)
    assert "Traceback" not in told
    return told


def follow(run: Run, told: str, *more: str) -> Any:
    """Runs the command that a message advises, as one would type it."""
    (command,) = re.findall(r"`(pion-grpc rebuild [^`]*)`", told)
    return run(*shlex.split(command)[1:], *more)


def segments(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("segments/*")}


def segment_of(directory: Path, name: str) -> Path:
    (path,) = (
        path
        for path in directory.glob("segments/*")
        if f'"namespace":"{name}"'.encode() in path.read_bytes()[:8192]
    )
    return path


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def scramble(path: Path) -> None:
    path.write_bytes(np.random.default_rng(1).bytes(path.stat().st_size))


def scramble_the_rest(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:4096] + b"\x00" * (size - 4096))


LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "scrambled": scramble,
    "all but its first page": scramble_the_rest,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_whoever_follows_the_message_has_everything_again(
    run: Run, start_server, stopped: Path, example: tuple[Path, Seen], loss: str
):
    LOSSES[loss](stopped / "catalog.db")
    before = segments(stopped)
    told = refused(start_server, stopped)
    assert "move" in told
    assert segments(stopped) == before
    checked = run("verify", "--data", stopped)
    assert (checked.status, checked.out) == (1, "")
    assert "pion-grpc rebuild" in checked.err

    ran = follow(run, told, "--json")
    assert ran.status == 0
    assert sorted(prefix["namespace"] for prefix in ran.json["adopted"]) == NAMES
    assert ran.json["not_adopted"] == []
    aside = [file["file"] for file in ran.json["catalogue"]]
    assert ("catalog.db" in aside) == (loss not in ("deleted", "emptied"))
    assert segments(stopped) == before

    server = start_server(directory=stopped, listen="127.0.0.1:0")
    with Client(server.address, export=False) as client:
        assert seen(client) == example[1]
        chain = client.match(model="model", token_ids=range(300))
        assert (chain.namespace, chain.token_count) == ("grandchild", 300)
        part = client.match(model="model", token_ids=range(200), part_kinds=["state"])
        assert part.token_count == 70
        assert client.match(model="w", token_ids=range(1_000)).token_count == WIDE_TOKENS
        assert client.match(model="b", token_ids=range(5, 80)).namespace == "bf16"
        assert not client.match(model="l", token_ids=range(7, 97)).hit
        lossy = example[1]["lossy"][3]
        assert client.match(model="l", token_ids=range(7, 97), fidelities=[lossy]).hit
        layers = store(client, "new", 90, parent="root", base=70)
        fetched = client.fetch("new")
        assert fetched is not None
        assert same_bits([(k[:, 70:], v[:, 70:]) for k, v in fetched.layers],
                         [(k[:, 70:], v[:, 70:]) for k, v in layers])  # fmt: skip
    with Client(server.address) as client:  # by the files themselves
        prefix = client.fetch("wide")
        assert prefix is not None
        assert prefix.transport == "export"
    assert server.stop() == 0
    checked = run("verify", "--data", stopped, "--json")
    assert (checked.status, checked.json["damaged"], checked.json["prefixes"]) == (0, [], 8)
    again = run("rebuild", "--data", stopped)
    assert (again.status, again.out) == (1, "")
    assert "names what is stored" in again.err


def test_whoever_moves_everything_away_starts_empty(start_server, stopped: Path):
    before = segments(stopped)
    (stopped / "catalog.db").unlink()
    told = refused(start_server, stopped)
    (names,) = re.findall(r"or move (.*) away to start empty", told)
    kept = stopped.parent / "kept"
    kept.mkdir()
    for name in names.split(" and "):
        (stopped / name).rename(kept / name)
    server = start_server(directory=stopped, listen="127.0.0.1:0")
    with Client(server.address) as client:
        assert list(client.list()) == []
        store(client, "new", 70)
    assert segments(kept) == before


def test_a_catalogue_deleted_beside_its_log_brings_nothing_back(
    run: Run, start_server, short_tmp: Path
):
    """After a crash the log holds what the new catalogue must never be mixed with."""
    server = start_server()
    with Client(server.address) as client:
        layers = store(client, "kept", 300)
        store(client, "dropped", 301)
        client.drop("dropped")
    server.kill()
    directory = server.directory
    assert (directory / "catalog.db-wal").stat().st_size
    (directory / "catalog.db").unlink()
    ran = follow(run, refused(start_server, directory), "--json")
    assert [prefix["namespace"] for prefix in ran.json["adopted"]] == ["kept"]
    assert "catalog.db-wal" in {file["file"] for file in ran.json["catalogue"]}
    server = start_server()
    with Client(server.address) as client:
        fetched = client.fetch("kept")
        assert fetched is not None
        assert same_bits(fetched.layers, layers)
        assert client.fetch("dropped") is None


def test_damaged_segments_are_reported_and_kept(run: Run, start_server, stopped: Path):
    wide, child = segment_of(stopped, "wide"), segment_of(stopped, "child")
    flip(wide, 3 * PAGE_BYTES)
    flip(child, 100)
    damaged = {wide.name: wide.read_bytes(), child.name: child.read_bytes()}
    (stopped / "catalog.db").unlink()
    ran = run("rebuild", "--data", stopped)
    assert ran.status == 1
    for text in ("Moved to not-adopted", wide.name, "does not have its checksum", child.name,
                 "its parent 'child' is not there", "4 prefixes adopted, 3 files not",
                 f"pion-grpc serve --data '{stopped}'"):  # fmt: skip
        assert text in " ".join(ran.out.split())
    for name, data in damaged.items():
        assert (stopped / "not-adopted" / "segments" / name).read_bytes() == data
    server = start_server(directory=stopped, listen="127.0.0.1:0")
    with Client(server.address) as client:
        names = sorted(prefix.namespace for prefix in client.list())
        assert names == ["bf16", "lossy", "root", "sealed"]
    assert server.stop() == 0
    for name, data in damaged.items():
        assert (stopped / "not-adopted" / "segments" / name).read_bytes() == data


AS_NOBODY = """
import os, sys
from pathlib import Path
from pion_grpc.core.rebuild import rebuild
from pion_grpc.errors import CannotStart
if os.geteuid() == 0:  # root may read anything
    os.setuid(65534)
try:
    rebuild(Path(sys.argv[1]))
except CannotStart as error:
    print(error)
"""


def test_what_may_not_be_read_is_not_called_damaged(run: Run, stopped: Path):
    (stopped / "catalog.db").unlink()
    for path in (stopped.parent, stopped, *stopped.rglob("*")):
        path.chmod(0o777)
    closed = segment_of(stopped, "wide")
    before = segments(stopped)
    closed.chmod(0)
    ran = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(stopped)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = f"{closed} cannot be opened: Permission denied\n"
    assert (ran.stdout, ran.stderr) == (told, "")
    closed.chmod(0o600)
    assert segments(stopped) == before
    assert run("rebuild", "--data", stopped).status == 0


def test_a_running_server_is_not_rebuilt(run: Run, start_server):
    server = start_server()
    with Client(server.address) as client:
        layers = store(client, "p", 300)
        ran = run("rebuild", "--data", server.directory, "--json")
        assert (ran.status, ran.json["error"]["reason"]) == (1, "CANNOT_START")
        assert "a server runs on it: stop it first" in ran.json["error"]["message"]
        fetched = client.fetch("p")
        assert fetched is not None
        assert same_bits(fetched.layers, layers)


KILLED = """
import os, signal, sys
from pathlib import Path
from pion_grpc.core.rebuild import rebuild
def progress(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
rebuild(Path(sys.argv[1]), progress=progress)
"""


def test_a_killed_rebuild_can_be_run_again(
    run: Run, start_server, stopped: Path, example: tuple[Path, Seen]
):
    (stopped / "catalog.db").unlink()
    before = segments(stopped)
    for _ in range(2):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, str(stopped)], check=False, timeout=60
        )
        assert killed.returncode == -signal.SIGKILL
        assert segments(stopped) == before
        told = refused(start_server, stopped)
        assert segments(stopped) == before
    assert follow(run, told).status == 0
    server = start_server(directory=stopped, listen="127.0.0.1:0")
    with Client(server.address, export=False) as client:
        assert seen(client) == example[1]
    assert server.stop() == 0
    assert list((stopped / "run").iterdir()) == []
    assert segments(stopped) == before


def test_what_a_start_removes_is_in_the_log(start_server):
    server = start_server()
    with Client(server.address) as client:
        store(client, "kept", 70)
    assert server.stop() == 0
    for number in range(3):
        (server.directory / "segments" / f"0123456789ab-{number}.safetensors").touch()
    server = start_server()
    (entry,) = (entry for entry in server.log if "removed" in entry["event"])
    assert (entry["event"], entry["count"]) == ("files that nothing names removed", 3)
    with Client(server.address) as client:
        assert client.fetch("kept") is not None


def test_a_directory_of_something_else_is_left_alone(run: Run, tmp_path: Path):
    for directory in (tmp_path, tmp_path / "none"):
        ran = run("rebuild", "--data", directory)
        assert (ran.status, ran.out) == (1, "")
        assert "is not a data directory" in ran.err
    assert run("rebuild").status == 2
    assert list(tmp_path.iterdir()) == []
