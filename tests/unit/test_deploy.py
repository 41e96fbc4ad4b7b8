"""Service definitions: what an init system would refuse, or do wrong, is found here."""

import configparser
import os
import plistlib
import shutil
import subprocess
from pathlib import Path

import pytest

from pion_grpc.config import Config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PLIST = DEPLOY / "launchd/org.pion-grpc.server.plist"
UNIT = DEPLOY / "systemd/pion-grpc.service"
STOP_S = (Config().drain_ms + Config().grace_ms) / 1_000 + 20
"""When the server ends itself at the latest."""


def test_launchd_finds_what_it_needs() -> None:
    job = plistlib.loads(PLIST.read_bytes())
    assert job["Label"] == PLIST.name.removesuffix(".plist"), "launchctl names jobs by their files"
    assert Path(job["ProgramArguments"][0]).is_absolute(), "launchd searches no PATH"
    assert job["ProgramArguments"][1:] == ["serve"]
    assert job["KeepAlive"] == {"SuccessfulExit": False}, "a stopped server must stay stopped"
    assert job["Umask"] == 0o077
    known = {"Label", "ProgramArguments", "RunAtLoad", "KeepAlive", "ExitTimeOut", "Umask"}
    known |= {"SoftResourceLimits", "StandardOutPath", "StandardErrorPath"}
    assert set(job) <= known, "launchd ignores keys that it does not know"


def test_no_service_manager_kills_a_server_that_is_still_stopping() -> None:
    assert plistlib.loads(PLIST.read_bytes())["ExitTimeOut"] >= STOP_S
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    assert int(unit["Service"]["TimeoutStopSec"]) >= STOP_S


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert checked.returncode == 0, checked.stderr
    assert UNIT.name not in checked.stderr, checked.stderr
