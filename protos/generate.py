"""Generates `pion_wire/v1` from `protos/pion/v1`: messages, services and their types.

protoc derives Python imports from proto paths (`pion.v1`); the stubs live inside `pion_wire`, so the
import lines, and nothing else, are rewritten. Runs in a virtual environment of its own because the
generator must be older than the runtime: stubs made by grpcio-tools 1.78 load under protobuf 6.33 and
7, which is what lets a client live beside programs that hold protobuf back.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
TARGET = PROTOS.parent / "clients/python/pion_wire/v1"
INIT = '"""Generated from protos/pion/v1; `make proto` writes everything here but this line."""\n'


def main() -> None:
    """Writes the stubs, removing those whose proto is gone."""
    with tempfile.TemporaryDirectory() as scratch:
        names = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.glob("pion/v1/*.proto"))
        outputs = [
            f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")
        ]
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *names], check=True
        )
        made = {p.name: rewrite(p.read_text()) for p in Path(scratch, "pion/v1").iterdir()}
    for old in TARGET.glob("*_pb2*"):
        if old.name not in made:
            old.unlink()
    made["__init__.py"] = INIT
    for name, text in made.items():
        path = TARGET / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def rewrite(text: str) -> str:
    """Points the imports of a generated file at `pion_wire.v1`."""
    text = re.sub(r"^from pion\.v1 import", "from pion_wire.v1 import", text, flags=re.MULTILINE)
    return re.sub(r"\bpion\.v1\.(\w+_pb2)\b", r"pion_wire.v1.\1", text)


if __name__ == "__main__":
    main()
