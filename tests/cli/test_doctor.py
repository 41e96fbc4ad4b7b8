"""`doctor`: it names what is missing, and its sizes are those that are stored."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_client import Client
from pion_grpc.cli import blas, output
from pion_grpc.cli.doctor import SHAPES
from pion_wire.layout import DType, Side, TensorLayout
from tests.cli.conftest import Run


def elsewhere(command: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Runs a shell command that ends with `doctor --json`; returns its findings by name."""
    ran = subprocess.run(
        ["sh", "-c", command.replace("PYTHON", sys.executable)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PION_ADDRESS": "unix:/nobody", **environment},
    )
    assert ran.stderr == ""
    return ran.returncode, {f["what"]: f for f in json.loads(ran.stdout)["findings"]}


def sizes(run: Run, *flags: str) -> list[dict[str, Any]]:
    ran = run("doctor", "--json", *flags)
    assert ran.status == 0, ran.out
    rows: list[dict[str, Any]] = ran.json["sizes"]
    return rows


# The machine


def test_nothing_that_is_required_is_missing_here(run: Run):
    ran = run("doctor", "--json")
    assert ran.status == 0
    findings = {finding["what"]: finding for finding in ran.json["findings"]}
    for name in ("grpcio", "numpy", "protobuf", "apsw", "crc32c", "uvloop", "pion-client"):
        assert findings[name]["level"] == "fine"
        assert findings[name]["found"][0].isdigit()
    for name in ("SQLite", "NumPy's BLAS", "MLX", "open files", "data directory", "server"):
        assert findings[name]["found"]
    for finding in findings.values():
        assert bool(finding["advice"]) == (finding["level"] != "fine")


def test_no_models_name_is_folded_on_a_terminal_of_80_columns(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(output, "PIPE_WIDTH", 80)
    shown = run("doctor").out
    for row in run("doctor", "--json").json["sizes"]:
        assert f" {row['model']} " in shown


def test_people_are_not_shown_less_than_programs(run: Run):
    shown = " ".join(run("doctor").out.split())
    for finding in run("doctor", "--json").json["findings"]:
        assert finding["what"] in shown
    for shape in SHAPES:
        assert shape.name in shown


def test_a_machine_without_mlx_is_no_traceback():
    status, findings = elsewhere(
        """PYTHON -c 'import sys; sys.modules["mlx.core"] = None
from pion_grpc.cli.main import main
sys.exit(main(["doctor", "--json"]))'"""
    )
    assert status == 0
    assert findings["MLX"]["level"] == "note"


def test_a_missing_requirement_is_not_passed_over(tmp_path: Path):
    # Another pion-grpc, whose metadata come first, and which needs what nobody has.
    info = tmp_path / "pion_grpc-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Name: pion-grpc\nVersion: 9\nRequires-Dist: nobody-has-this>=1\n"
    )
    status, findings = elsewhere(
        f"""PYTHON -c 'import sys; sys.path.insert(0, "{tmp_path}")
from pion_grpc.cli.main import main
sys.exit(main(["doctor", "--json"]))'"""
    )
    assert status == 1
    assert findings["nobody-has-this"]["level"] == "problem"
    assert findings["nobody-has-this"]["advice"] == "pip install nobody-has-this"


def test_a_low_limit_is_not_called_fine():
    _, findings = elsewhere("ulimit -n 256; exec PYTHON -m pion_grpc doctor --json")
    assert findings["open files"]["level"] == "note"
    assert "256" in findings["open files"]["found"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Accelerate is always there")
def test_a_slow_blas_is_not_called_fast():
    doctor = "exec PYTHON -m pion_grpc doctor --json"
    _, findings = elsewhere(doctor, LD_PRELOAD="")
    found = findings["MLX's BLAS"]
    assert found["level"] == ("fine" if blas.is_fast(found["found"]) else "note")
    library = blas.preloadable()
    if library:
        assert f"LD_PRELOAD={library}" in found["advice"]
        _, findings = elsewhere(doctor, LD_PRELOAD=library)
        assert findings["MLX's BLAS"]["level"] == "fine"
        assert "openblas" in findings["MLX's BLAS"]["found"]


def test_a_preloaded_library_of_the_users_is_not_replaced():
    assert blas.with_fast_blas({"LD_PRELOAD": "/mine.so"})["LD_PRELOAD"] == "/mine.so"
    if blas.preloadable():
        assert blas.with_fast_blas({})["LD_PRELOAD"] == blas.preloadable()


@pytest.mark.parametrize(
    ("library", "fast"),
    [
        ("/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so", True),
        ("scipy-openblas", True),
        ("accelerate", True),
        ("/opt/intel/libmkl_rt.so.2", True),
        ("/usr/lib/x86_64-linux-gnu/openblas-pthread/../blas/libblas.so.3", False),
        ("mlx_cpu.libs/libblas-bd8a282c.so.3.10.0", False),
        ("", False),
    ],
)
def test_a_library_is_not_judged_by_its_directory(library: str, fast: bool):
    assert blas.is_fast(library) is fast


def test_a_server_that_runs_is_not_called_absent(run: Run, server):
    findings = run("doctor", "--json", "--address", server.address).json["findings"]
    (found,) = (finding for finding in findings if finding["what"] == "server")
    assert found["level"] == "fine"
    assert server.address in found["found"]


# Sizes


def test_a_size_is_not_another_than_what_is_stored(run: Run, server):
    layers, heads, dim, tokens = 3, 2, 40, 256
    flags = ("--layers", str(layers), "--kv-heads", str(heads), "--head-dim", str(dim))
    (row,) = sizes(run, *flags, "--dtype", "f16")
    side = np.zeros((heads, tokens, dim), np.float16)
    with Client(server.address) as client:
        client.store("sized", layers=[(side, side)] * layers, token_ids=range(tokens), model="m")
        (info,) = client.list("sized")
    assert row["chunk_bytes"] == info.row_bytes
    assert row["token_bytes"] * tokens == row["chunk_bytes"]
    assert row["tokens_per_gib"] == (1 << 30) // row["token_bytes"]


def test_a_lossy_codec_is_not_counted_without_its_scales(run: Run):
    for codec in ("int8", "fp8", "mlx4g32"):
        (row,) = sizes(run, "--model", "Llama 3.1 8B", "--codec", codec)
        tensors = [TensorLayout(0, side, 8, 128, DType.BF16, codec) for side in Side]
        assert row["token_bytes"] == 32 * sum(tensor.row_bytes for tensor in tensors)
    assert "(lossy)" in run("doctor", "--codec", "int8").out
    assert "(lossy)" not in run("doctor").out


def test_a_part_of_a_models_name_is_enough(run: Run):
    assert [row["model"] for row in sizes(run, "--model", "qwen3 8")] == ["Qwen3 8B"]
    assert len(sizes(run)) == len(SHAPES)


@pytest.mark.parametrize(
    "flags",
    [
        ("--layers", "3"),
        ("--layers", "3", "--kv-heads", "2"),
        ("--layers", "3", "--kv-heads", "2", "--head-dim", "4", "--model", "Qwen"),
        ("--model", "no such model"),
        ("--codec", "no such codec"),
        ("--layers", "1", "--kv-heads", "9000", "--head-dim", "128"),
        ("--layers", "1", "--kv-heads", "1", "--head-dim", "63", "--codec", "mlx4g32"),
    ],
)
def test_a_layout_that_is_none_is_not_computed(run: Run, flags):
    ran = run("doctor", "--json", *flags)
    assert ran.status == 1
    assert ran.json["error"]["reason"] == "INVALID"


@pytest.mark.parametrize("flags", [("--layers", "0"), ("--head-dim", "x"), ("--dtype", "int8")])
def test_a_number_that_is_none_is_not_taken(run: Run, flags):
    assert run("doctor", *flags).status == 2
