"""The machine a benchmark ran on: what a reader needs in order to compare figures.

Whatever cannot be found out is left empty; a benchmark never fails because of it.
"""

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from pion_grpc import __version__
from pion_grpc.storage.directory import file_system_type

_LIBRARIES = (
    *("grpcio", "protobuf", "numpy", "apsw", "crc32c", "safetensors", "mlx", "mlx-lm"),
    *("redis", "hiredis"),
)


def description(scratch: Path) -> dict[str, Any]:
    """Describes the machine, what is installed, and how busy it is; `scratch` is where files go."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "file_system": file_system_type(scratch),
        "version": __version__,
        "commit": _commit(),
        "libraries": {name: found for name in _LIBRARIES if (found := _installed(name))},
        "blas": _blas(),
        "load_average": load_average(),
    }


def load_average() -> float:
    """How many processes wanted to run during the last minute."""
    return round(os.getloadavg()[0], 2)


def _cpu() -> str:
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str:
    here = str(Path(__file__).parent)
    commit = _output("git", "-C", here, "rev-parse", "--short", "HEAD")
    changed = commit and _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}, with changes" if changed else commit


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _blas() -> dict[str, str]:
    """Which BLAS the processes with a model have: their environment is not this process's."""
    found = _output(sys.executable, "-c", _BLAS).splitlines()
    return dict(zip(("numpy", "mlx"), found or ("", ""), strict=True))


_BLAS = """
import os, mlx.core
from pion_grpc.cli import blas
print(os.path.basename(blas.of_numpy()), os.path.basename(blas.of_mlx()), sep="\\n")
"""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
