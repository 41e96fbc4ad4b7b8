"""What a person gets wrong is answered with one sentence that says what, and never with a traceback."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import grpc
import pytest

from pion_client import Client
from pion_grpc.cli.connecting import how_to_start
from tests.authorities import Authority, serve_flags
from tests.cli.conftest import Run, store


def complaint(ran) -> str:
    """The one line that a command that failed has said."""
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("pion-grpc: ")
    assert ran.err.count("\n") == 1
    assert "[Errno" not in ran.err
    return ran.err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("import none", "none cannot be opened: No such file"),
        ("import none --data new", "none cannot be opened: No such file"),
        ("import text --data new", "text is not a snapshot of a store"),
        ("import text", "text is not what `pion-grpc export` wrote"),
        ("import tensors", "nothing was stored: not a segment: it has no '__metadata__'"),
        ("import loop", "loop cannot be opened: Too many levels of symbolic links"),
        ("export name none/file", "none is not a directory"),
        ("ls --password-file none", "--password-file: none cannot be read: No such file"),
        ("ls --password-file bytes", "--password-file: bytes is no text"),
        ("verify --data none", "none is not a data directory"),
        ("verify --data text", "text is not a data directory"),
        ("rebuild --data none", "none is not a data directory"),
        ("rebuild --data text", "text is not a data directory"),
        ("serve --password-file none", "the password file none cannot be read: No such file"),
        ("serve --password-file bytes", "the password file bytes is no text"),
        ("mesh render none --out new", "none: No such file"),
        ("mesh render text --out new", "text: "),
    ],
)
def test_what_is_not_there_or_not_right_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, said: str
):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("what a person wrote, and no program\n")
    Path("bytes").write_bytes(b"\xff\xfe")
    Path("loop").symlink_to("loop")
    Path("tensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert said in complaint(run(*command.split()))
    assert sorted(os.listdir()) == ["bytes", "loop", "tensors", "text"]


def test_nobody_is_told_to_start_one_server_where_several_should_be(run: Run):
    told = complaint(run("ls", "--address", "127.0.0.1:1,127.0.0.1:2", "--timeout", "1"))
    assert "one or more of 127.0.0.1:1,127.0.0.1:2 do not answer" in told


def test_who_forgets_tls_is_not_told_that_nobody_is_there_and_no_more(
    run: Run, start_server, short_tmp: Path
):
    flags = serve_flags(Authority(short_tmp / "authority").server())
    server = start_server(*flags, listen="127.0.0.1:0")
    told = complaint(run("ls", "--address", server.address))
    assert f"no server answers at {server.address} (" in told
    assert "it may have TLS: --tls-ca" in told


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("127.0.0.1:50051", "start one with `pion-grpc serve`, or "),
        ("localhost:1", "start one with `pion-grpc serve --listen localhost:1`, or "),
        ("unix:/s", "start one with `pion-grpc serve --listen unix:/s`, or "),
        ("10.0.0.1:50051", ""),
        ("host:50051", ""),
    ],
)
def test_nobody_is_told_to_start_a_server_on_another_machine(address: str, advice: str):
    assert how_to_start(address) == advice


def test_another_program_at_the_address_is_told_from_a_server(run: Run):
    with ThreadPoolExecutor(1) as pool:
        other = grpc.server(pool)
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        told = complaint(run("ls", "--address", f"127.0.0.1:{port}"))
        other.stop(None).wait()
    assert f"what answers at 127.0.0.1:{port} is no pion-grpc server" in told


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--data", ""),
        ("serve", "--password-file", ""),
        ("verify", "--data", ""),
        ("rebuild", "--data", ""),
        ("import", ""),
        ("export", "name", ""),
    ],
)
def test_a_path_that_is_empty_is_not_the_working_directory(run: Run, command: tuple[str, ...]):
    ran = run(*command)
    assert ran.status == 2
    assert "the path is empty" in ran.err


@pytest.mark.parametrize("flags", [["--timeout", "soon"], ["--kv-heads", "few"]])
def test_a_number_that_is_none_is_not_spoken_of_in_words_of_python(run: Run, flags: list[str]):
    ran = run("doctor", *flags)
    assert ran.status == 2
    assert f"{flags[1]!r} is not a " in ran.err
    assert "could not convert" not in ran.err


def test_the_file_of_a_benchmark_is_not_taken_for_json_in_the_output(run: Run):
    assert "no row 'none'" in complaint(run("bench", "none", "--json", "file"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a Linux device")
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_disk_that_is_full_of_output_is_no_traceback(server, flags: list[str]):
    command = [sys.executable, "-m", "pion_grpc", "ls", "--address", server.address, *flags]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "pion-grpc: the output cannot be written: No space left on device\n",
    )


def test_a_reader_that_leaves_before_an_error_causes_no_traceback(short_tmp: Path):
    command = "ls", "--json", "--timeout", "0.1", "--address", f"unix:{short_tmp}/nobody"
    with subprocess.Popen(
        [sys.executable, "-m", "pion_grpc", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `head` does
        assert process.stderr.read() == b""


def test_the_catalogue_of_another_version_is_refused_by_every_command(run: Run, start_server):
    server = start_server()
    with Client(server.address) as client:
        store(client, "kept")
    assert server.stop() == 0
    connection = apsw.Connection(str(server.directory / "catalog.db"))
    connection.execute("ALTER TABLE prefix RENAME COLUMN base TO foundation")
    connection.close()
    with pytest.raises(RuntimeError) as refused:
        start_server()
    for told in (str(refused.value), complaint(run("verify", "--data", server.directory))):
        assert "has other tables than this version" in told
        assert "pion-grpc rebuild" in told
        assert "Traceback" not in told
    rebuilt = run("rebuild", "--data", server.directory, "--json")
    assert [prefix["namespace"] for prefix in rebuilt.json["adopted"]] == ["kept"]
    assert "of another version" in rebuilt.json["catalogue"][0]["problem"]
    assert run("verify", "--data", server.directory).status == 0
