"""Service definitions: what an init system would refuse, or do wrong, is found here."""

import configparser
import os
import plistlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from pion_grpc.cli.mesh import services
from pion_grpc.cli.mesh.nodes import parse_mesh
from pion_grpc.config import SETTINGS, Config, environment_settings, variable_of

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PLISTS = sorted((DEPLOY / "launchd").rglob("*.plist"))
UNITS = sorted((DEPLOY / "systemd").rglob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
STOP_S = (Config().drain_ms + Config().grace_ms) / 1_000 + 20
"""When the server ends itself at the latest."""

MESH = parse_mesh(
    {
        "node": [
            {"name": "mac", "address": "10.0.0.1"},
            {"name": "box", "address": "10.0.0.2", "system": "linux"},
        ]
    }
)
MAC, BOX = MESH.nodes

KNOWN_KEYS = {
    "Label": str,
    "ProgramArguments": list,
    "UserName": str,
    "RunAtLoad": bool,
    "KeepAlive": dict,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
    "Umask": int,
    "SoftResourceLimits": dict,
    "HardResourceLimits": dict,
    "StandardOutPath": str,
    "StandardErrorPath": str,
}
"""What launchd has under these names; it ignores others, and values of other types."""


def jobs() -> list[tuple[str, bool, dict[str, Any]]]:
    """Every property list: its name, whether it is the system's, and what it says."""
    found = [
        (path.name.removesuffix(".plist"), path.parent.name == "daemons", path.read_bytes())
        for path in PLISTS
    ]
    for label, command in (
        (services.SERVER_LABEL, services.server_command(MAC)),
        (services.ENVOY_LABEL, services.envoy_command(MAC)),
    ):
        found.append((label, True, services.launchd(label, command, MAC)))
    return [(label, is_system, plistlib.loads(data)) for label, is_system, data in found]


def test_there_is_a_job_for_each_process_and_domain() -> None:
    names = [str(path.relative_to(DEPLOY / "launchd")) for path in PLISTS]
    labels = (services.ENVOY_LABEL, services.SERVER_LABEL)
    assert names == [f"{kind}/{label}.plist" for kind in ("agents", "daemons") for label in labels]


@pytest.mark.parametrize(("name", "is_system", "job"), jobs())
def test_launchd_finds_what_it_needs(name: str, is_system: bool, job: dict[str, Any]) -> None:
    assert job["Label"] == name, "launchctl names jobs by their files"
    for key, value in job.items():
        assert type(value) is KNOWN_KEYS[key], key
    assert all(isinstance(word, str) for word in job["ProgramArguments"])
    assert job["KeepAlive"] == {"SuccessfulExit": False}, "a stopped server must stay stopped"
    assert job["RunAtLoad"]
    assert job["Umask"] == 0o077
    assert job["ExitTimeOut"] >= STOP_S, "or it is killed while it is still stopping"
    assert job["ProcessType"] in ("Background", "Standard", "Adaptive", "Interactive")
    soft, hard = job["SoftResourceLimits"], job["HardResourceLimits"]
    assert set(soft) == set(hard) == {"NumberOfFiles"}
    assert 10_240 <= soft["NumberOfFiles"] <= hard["NumberOfFiles"]
    assert ("UserName" in job) == is_system, "nothing of ours runs as root; agents are somebody's"
    program, *flags = job["ProgramArguments"]
    paths = [program, job["StandardOutPath"], job["StandardErrorPath"]]
    paths += [flag for flag in flags if "/" in flag]
    for path in paths:
        assert Path(path).is_absolute(), "launchd searches no PATH, and expands no ~"
        assert path.startswith("/Users/you/") != is_system
    assert flags[0] == ("serve" if name == services.SERVER_LABEL else "--config-path")


@pytest.mark.parametrize("name", [services.SERVER_LABEL, services.ENVOY_LABEL])
def test_a_node_of_a_mesh_is_started_as_a_single_machine_is(name: str) -> None:
    (alone,) = [job for label, is_system, job in jobs()[:4] if (label, is_system) == (name, True)]
    (node,) = [job for label, _, job in jobs()[4:] if label == name]
    for job in (alone, node):
        job["ProgramArguments"] = job["ProgramArguments"][:1]
    assert alone == node


def units(directory: Path) -> list[Path]:
    """Every unit, those of a mesh's node written to a directory."""
    (directory / "mesh").mkdir()
    (directory / "mesh/pion-grpc.service").write_text(services.server_unit(MESH, BOX))
    (directory / "mesh/pion-envoy.service").write_text(services.envoy_unit(MESH, BOX))
    return [*UNITS, *sorted((directory / "mesh").iterdir())]


def test_no_unit_is_killed_while_it_is_still_stopping(tmp_path: Path) -> None:
    found = units(tmp_path)
    assert len(found) == 4
    for path in found:
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(path.read_text())
        service = unit["Service"]
        assert int(service["TimeoutStopSec"]) >= STOP_S, path
        assert service["Restart"] == "on-failure"
        assert unit["Unit"]["StartLimitIntervalSec"] == "0", "else it is given up after five starts"
        assert int(service["LimitNOFILE"]) >= 10_240
        assert service["UMask"] == "0077"
        is_system = "system" in path.parts or "mesh" in path.parts
        assert (("User" in service) or ("DynamicUser" in service)) == is_system, "never root"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for path in units(tmp_path):
        # It looks whether programs are there; nothing else about them.
        text = re.sub(r"/opt/pion-grpc/bin/[\w-]+", str(program), path.read_text())
        unit = tmp_path / "checked" / path.name
        unit.parent.mkdir(exist_ok=True)
        unit.write_text(text)
        is_user = path.parent.name == "systemd"
        checked = subprocess.run(
            ["systemd-analyze", "verify", "--user" if is_user else "--system", str(unit)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        )
        assert checked.returncode == 0, checked.stderr
        assert unit.name not in checked.stderr, checked.stderr


# Containers


def documents() -> list[dict[str, Any]]:
    return [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]


def test_kubernetes_knows_every_field() -> None:
    kinds = []
    for document in documents():
        kubernetes_validate.validate(document, "1.37", strict=True)
        kinds.append(document["kind"])
    assert kinds == ["Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"]
    typo = documents()[1]
    typo["spec"]["replica"] = typo["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(typo, "1.37", strict=True)


def test_a_pod_starts_with_settings_that_the_server_knows() -> None:
    service, stateful, budget, policy = documents()
    pod = stateful["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    names = set(map(variable_of, SETTINGS))
    probe = {"PION_ADDRESS", "PION_TLS_CA", "PION_TLS_CERT", "PION_TLS_KEY"}
    assert set(environment) - names == probe
    config = Config(**environment_settings(environment | _image_environment()))
    assert config.knows_clients, "or it refuses to listen beyond its host"
    assert not config.listen.startswith("127.")
    claim = stateful["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    assert config.disk_budget < int(claim.removesuffix("Gi")) << 30
    assert pod["terminationGracePeriodSeconds"] >= STOP_S + 2
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    for selector in (
        service["spec"]["selector"],
        stateful["spec"]["selector"]["matchLabels"],
        budget["spec"]["selector"]["matchLabels"],
        policy["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector == labels
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in stateful["spec"]["volumeClaimTemplates"]}
    assert mounts == claims | {volume["name"] for volume in pod["volumes"]}
    assert str(config.tls_cert).startswith("/tls/")


def test_all_servers_of_a_mesh_are_spelled_in_one_way() -> None:
    """Clients that spell them differently look for most prefixes in different places."""
    text = "".join(path.read_text() for path in MANIFESTS)
    service, stateful, *_ = documents()
    (address,) = re.findall(r"PION_ADDRESS=(\S+)", text)
    ending = f".{service['metadata']['name']}.default.svc:50051"
    assert address.split(",") == [f"pion-{n}{ending}" for n in range(stateful["spec"]["replicas"])]
    assert f"*{ending.removesuffix(':50051')}" in text, "the certificate has the same name"
    shorter = re.findall(r"[\w*-]+\.pion(?!\.default\.svc)\b", text)
    assert not shorter, shorter


def _image_environment() -> dict[str, str]:
    text = (DEPLOY / "docker/Dockerfile").read_text()
    return dict(
        re.findall(r"(PION_\w+)=(\S+)", text.replace("\\\n", " ").split("\nENV ")[1].split("\n")[0])
    )


def test_the_image_is_closed_by_default_and_not_roots() -> None:
    text = (DEPLOY / "docker/Dockerfile").read_text()
    settings = _image_environment()
    assert settings == {"PION_DATA": "/data", "PION_LISTEN": "0.0.0.0:50051"}
    Config(**environment_settings(settings))
    assert re.search(r"^USER \d+:\d+$", text, re.M)
    assert "PASSWORD=" not in re.sub(r"^#.*$", "", text, flags=re.M)
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.M)
        for word in line.split()[:-1]
    }
    ignored = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines()
    for name in copied:
        assert (DEPLOY.parent / name).exists(), name
        assert f"!{name}" in ignored, "it is not sent to the builder"
