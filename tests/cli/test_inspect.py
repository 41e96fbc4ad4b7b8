"""`ls`, `stat`, `drop`, and what all commands have in common, against a real server."""

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pion_client import Client, Layout, Side, TensorLayout
from pion_client.values import DurabilityName
from pion_wire.layout import DType
from tests.authorities import Authority
from tests.cli.conftest import Run, store

COMMANDS = (
    ("demo",),
    ("ls",),
    ("stat",),
    ("drop", "name"),
    ("export", "name", "file"),
    ("import", "file"),
    ("verify",),
    ("doctor",),
)


@pytest.fixture
def at(server) -> tuple[str, str]:
    return "--address", server.address


@pytest.fixture
def client(server):
    with Client(server.address) as client:
        yield client
        client.drop(*(info.namespace for info in client.list()))


# All commands


@pytest.mark.parametrize("command", [("serve",), *COMMANDS])
def test_an_unknown_option_is_not_ignored(run: Run, command):
    ran = run(*command, "--no-such-option")
    assert (ran.status, ran.out) == (2, "")
    assert "unrecognized arguments: --no-such-option" in ran.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_shortened_option_is_not_guessed(run: Run, command):
    assert run(*command, "--jso").status == 2


@pytest.mark.parametrize("command", [("ls",), ("stat",), ("drop", "a"), ("export", "a", "FILE")])
def test_a_server_that_is_down_is_no_traceback(run: Run, short_tmp: Path, command):
    address = f"unix:{short_tmp}/nobody"
    command = [part.replace("FILE", f"{short_tmp}/file") for part in command]
    ran = run(*command, "--address", address, "--timeout", "0.5")
    assert (ran.status, ran.out) == (1, "")
    assert f"no server answers at {address}" in ran.err
    assert f"pion-grpc serve --listen {address}" in ran.err
    assert not (short_tmp / "file").exists()


def test_certificates_are_not_spoken_of_where_there_are_none(run: Run, short_tmp: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    command = "ls", "--address", address, "--timeout", "0.5"
    assert "certificate" not in run(*command).err
    authority = Authority(short_tmp / "authority")
    assert "--tls-ca" in run(*command, "--tls-ca", authority.ca).err


def test_a_program_does_not_read_errors_from_prose(run: Run, short_tmp: Path):
    ran = run("ls", "--json", "--timeout", "0.5", "--address", f"unix:{short_tmp}/nobody")
    assert (ran.status, ran.err) == (1, "")
    assert ran.json["error"]["reason"] == "UNAVAILABLE"
    assert "pion-grpc serve" in ran.json["error"]["message"]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_that_never_comes_is_not_waited_for(run: Run, seconds):
    ran = run("ls", f"--timeout={seconds}")
    assert ran.status == 2
    assert "--timeout" in ran.err


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:port", "unix:", ""])
def test_an_address_that_is_none_is_not_tried(run: Run, address):
    ran = run("ls", "--address", address)
    assert ran.status == 1
    assert "neither host:port nor unix:/path" in ran.err or "needs a path" in ran.err


def test_the_address_of_the_environment_is_not_overlooked(
    run: Run, server, client, monkeypatch: pytest.MonkeyPatch
):
    store(client, "here")
    monkeypatch.setenv("PION_ADDRESS", server.address)
    assert [p["namespace"] for p in run("ls", "--json").json["prefixes"]] == ["here"]


def test_without_the_password_nothing_is_shown(run: Run, start_server, short_tmp: Path):
    server = start_server(PION_PASSWORD="open sesame")
    ran = run("ls", "--address", server.address)
    assert ran.status == 1
    assert "PION_PASSWORD" in ran.err
    assert run("ls", "--json", "--address", server.address).json["error"]["reason"] == (
        "NOT_AUTHENTICATED"
    )

    secret = short_tmp / "secret"
    secret.write_text("open sesame\n")
    ran = run("ls", "--address", server.address, "--password-file", secret)
    assert (ran.status, ran.out) == (0, "nothing is stored\n")
    ran = run("ls", "--address", server.address, "--password-file", short_tmp / "none")
    assert ran.status == 1
    assert "--password-file" in ran.err


def test_a_reader_that_leaves_early_causes_no_traceback(server, client):
    for index in range(50):
        store(client, f"name {index}", 3)
    command = [sys.executable, "-m", "pion_grpc", "ls", "--address", server.address]
    for flags in ([], ["--json"]):
        with subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()  # as `head` does
            assert process.stderr.read() == b""


# ls


def test_nothing_stored_is_not_left_out_of_a_list(run: Run, client, at):
    store(client, "root", 70)
    store(client, "root/child", 110, parent="root", base=70)
    listed = run("ls", *at)
    assert listed.status == 0
    assert "root/child" in listed.out
    assert "root +70" in listed.out
    assert "2 prefixes" in listed.out
    assert "1 prefix, " in run("ls", "root/", *at).out

    child = run("ls", "root/", "--json", *at).json["prefixes"]
    assert [info["namespace"] for info in child] == ["root/child"]
    assert child[0]["token_count"] == 110
    assert (child[0]["parent"], child[0]["base"], child[0]["depth"]) == ("root", 70, 1)
    assert child[0]["tensors"] == [
        {
            "first_slot": 0,
            "last_slot": 1,
            "side": side,
            "heads": 2,
            "head_dim": 8,
            "dtype": "F16",
            "codec": "raw",
        }
        for side in ("k", "v")
    ]
    assert (
        run("ls", "no such", *at).out
        == "nothing is stored under a name that begins with 'no such'\n"
    )


def test_tensors_that_differ_are_not_shown_as_alike(run: Run, client, at):
    tensors = [
        TensorLayout(slot, side, heads, 32, DType.BF16, codec)
        for slot, heads, codec in ((0, 1, "raw"), (1, 2, "raw"), (4, 2, "raw"), (5, 2, "int8"))
        for side in (Side.K, Side.V)
    ]
    client.register("mixed", layout=Layout(tuple(tensors)), model="m")
    (info,) = run("ls", "--json", *at).json["prefixes"]
    assert info["state"] == "registered"
    shown = [
        (t["first_slot"], t["last_slot"], t["heads"], t["codec"])
        for t in info["tensors"]
        if t["side"] == "k"
    ]
    assert shown == [(0, 0, 1, "raw"), (1, 1, 2, "raw"), (4, 4, 2, "raw"), (5, 5, 2, "int8")]
    assert "registered, int8 (lossy)" in run("ls", *at).out


def test_a_name_cannot_dress_itself_up(run: Run, client, at):
    name = "[bold red]alarm[/] :boom: \\[x]"
    store(client, name, model="\x1b[2J\x07evil\n")
    listed = run("ls", *at).out
    assert name in listed
    assert "\x1b" not in listed
    assert "\x07" not in listed
    assert "\\x1b[2J\\x07evil\\n" in listed
    assert run("drop", name, *at).out == f"{name}: dropped\n"


def test_a_long_name_is_not_cut_where_no_terminal_is(run: Run, client, at):
    name = "n" * 120
    store(client, name)
    assert name in run("ls", *at).out


def test_a_name_that_begins_with_a_dash_can_be_dropped(run: Run, client, at):
    store(client, "--json")
    assert run("drop", *at, "--", "--json").out == "--json: dropped\n"


# stat


def test_the_receipt_is_not_flattering(run: Run, client, at):
    client.reset_stats()
    layers = store(client, "measured", 100, prefill_ms=500)
    del layers
    store(client, "estimated", 80, model="other")
    assert client.match(model="model", token_ids=range(100)).hit
    assert client.fetch("measured") is not None
    assert client.match(model="other", token_ids=range(80)).hit
    assert client.fetch("estimated") is not None
    assert not client.match(model="none", token_ids=range(80)).hit

    receipt = run("stat", "--json", *at).json["receipt"]
    assert (receipt["hits"], receipt["misses"], receipt["measured_hits"]) == (2, 1, 1)
    assert receipt["hit_rate"] == pytest.approx(2 / 3)
    assert receipt["tokens_served"] == 180
    assert receipt["prefill_seconds_avoided_measured"] == pytest.approx(0.5)
    assert receipt["prefill_seconds_avoided_estimated"] == pytest.approx(80 * 555e-6)

    shown = " ".join(run("stat", *at).out.split())
    assert "hit rate 66.7%" in shown
    assert "prefill avoided, measured 500 ms" in shown
    assert "prefill avoided, estimate 44 ms (555 µs per token)" in shown


def test_a_hit_rate_of_nothing_is_not_zero(run: Run, client, at):
    client.reset_stats()
    assert run("stat", "--json", *at).json["receipt"]["hit_rate"] is None
    assert "nothing asked yet" in run("stat", *at).out


def test_resetting_does_not_lose_what_was_counted(run: Run, client, at):
    client.reset_stats()
    assert not client.lookup("absent").hit
    assert run("stat", "--reset", "--json", *at).json["receipt"]["misses"] == 1
    assert run("stat", "--json", *at).json["receipt"]["misses"] == 0


def test_budgets_are_shown_with_what_is_used(run: Run, client, at):
    store(client, "one")
    server = run("stat", "--json", *at).json["server"]
    assert server["prefix_count"] == 1
    assert 0 < server["disk_used_bytes"] < server["disk_budget_bytes"] == 20 << 30
    assert "of 20.0 GiB" in run("stat", *at).out


def test_no_count_of_attend_is_shown_for_another(run: Run, client, at):
    rows = np.ones((1, 1, 1), np.float32)
    for layer in (*range(260), 0):  # four more than there are entries; the first comes back
        client.attend_store("counted", layer, rows, rows)
    server = run("stat", "--json", *at).json["server"]
    counts = [server[f"attend_{name}"] for name in ("warm", "cold", "demotions", "rehydrates")]
    assert counts == [256, 4, 5, 1]
    shown = " ".join(run("stat", *at).out.split())
    assert "256 resident, 4 cold" in shown
    assert "5 made cold, 1 resident again" in shown
    assert client.attend_drop("counted") == 260


def test_asking_what_is_there_does_not_change_the_receipt(run: Run, client, at):
    client.reset_stats()
    store(client, "one")
    for command in (("ls",), ("stat",), ("doctor",)):
        run(*command, *at)
    receipt = client.stats()
    assert (receipt.hits, receipt.misses) == (0, 0)


# drop


def test_a_drop_of_nothing_is_not_a_success(run: Run, client, at):
    store(client, "there")
    ran = run("drop", "there", "not there", *at)
    assert ran.status == 1
    assert ran.out == "there: dropped\nnot there: was not stored\n"
    assert run("drop", "there", "--json", *at).json == {
        "results": [{"namespace": "there", "dropped": False}]
    }


def test_what_was_dropped_is_not_served(run: Run, client, at):
    durability: DurabilityName = "disk"
    store(client, "gone", durability=durability)
    assert run("drop", "gone", *at).status == 0
    assert client.fetch("gone") is None
