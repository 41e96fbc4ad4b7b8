"""`doctor`: what this machine has, what would be slow or fail on it, and how large prefixes are.

Each check is a finding: fine, worth a note, or a problem; one that is not fine says what to do. Nothing
is timed: on a busy machine a stopwatch would call a fast library slow.
"""

import argparse
import importlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console

from pion_grpc import __version__
from pion_grpc.cli import blas
from pion_grpc.cli.connecting import connected
from pion_grpc.cli.failure import CommandFailed
from pion_grpc.cli.output import counted, printable, show, size, table
from pion_grpc.config import default_data
from pion_wire.layout import DType, Layout, LayoutError, Side, TensorLayout

CHUNK_TOKENS = 256
"""Tokens per chunk in engines that keep K/V in chunks."""
OPEN_FILES_WANTED = 4_096
"""64 streams may each read a chain of 32 segments; connections and the catalogue need files too."""
FREE_BYTES_WANTED = 1 << 30


class Finding(NamedTuple):
    """What one check found."""

    level: Literal["fine", "note", "problem"]
    what: str
    found: str
    advice: str = ""


class Shape(NamedTuple):
    """What a model keeps per token: layers with full attention, K/V heads, values per head."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int


SHAPES = (
    Shape("SmolLM2 135M", 30, 3, 64),
    Shape("SmolLM2 1.7B", 24, 32, 64),
    Shape("Qwen2.5 0.5B", 24, 2, 64),
    Shape("Qwen2.5 7B", 28, 4, 128),
    Shape("Qwen2.5 32B", 64, 8, 128),
    Shape("Qwen3 4B", 36, 8, 128),
    Shape("Qwen3 8B", 36, 8, 128),
    Shape("Qwen3 32B", 64, 8, 128),
    Shape("Llama 3.2 1B", 16, 8, 64),
    Shape("Llama 3.2 3B", 28, 8, 128),
    Shape("Llama 3.1 8B", 32, 8, 128),
    Shape("Llama 3.3 70B", 80, 8, 128),
    Shape("Mistral 7B v0.3", 32, 8, 128),
    Shape("Phi-4 14B", 40, 10, 128),
)
"""Well-known models whose every layer keeps all rows."""


def doctor(options: argparse.Namespace) -> int:
    """Checks the machine and computes sizes; 1 if something would not work."""
    sizes = [_sizes(shape, options) for shape in _shapes(options)]
    findings = [*_installed(), *_computing(), *_limits(), _server(options)]

    def render(console: Console) -> None:
        shown = table("This machine", "", "what", "found", "what to do")
        marks = {"fine": "ok", "note": "note", "problem": "PROBLEM"}
        for finding in findings:
            shown.add_row(
                marks[finding.level],
                finding.what,
                printable(finding.found),
                printable(finding.advice),
            )
        console.print(shown)
        kept_as = f"{options.dtype}, {options.codec}"
        title = f"Size of K/V, {kept_as}" + ("" if options.codec == "raw" else " (lossy)")
        # In two lines, so that the names of models have room on a terminal of 80 columns.
        columns = (
            "layers", "K/V\nheads", "head\ndim", "a token", f"{CHUNK_TOKENS}\ntokens",
            "tokens\nin 1 GiB",
        )  # fmt: skip
        made = table(title, "model", *columns, numbers=columns)
        for row in sizes:
            made.add_row(
                row["model"],
                str(row["layers"]),
                str(row["kv_heads"]),
                str(row["head_dim"]),
                f"{row['token_bytes']:,} B",
                size(row["chunk_bytes"]),
                f"{row['tokens_per_gib']:,}",
            )
        console.print(made)

    show(options, {"findings": [f._asdict() for f in findings], "sizes": sizes}, render)
    return 1 if any(finding.level == "problem" for finding in findings) else 0


# What is installed


def _installed() -> Iterator[Finding]:
    yield Finding("fine", "pion-grpc", f"{__version__}, Python {platform.python_version()}")
    yield Finding("fine", "machine", f"{platform.platform()}, {os.cpu_count()} CPUs")
    for name in sorted(_required()):
        try:
            yield Finding("fine", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("problem", name, "missing", f"pip install {name}")
    try:
        yield Finding("fine", "mlx-lm", importlib.metadata.version("mlx-lm"))
    except importlib.metadata.PackageNotFoundError:
        advice = "pip install 'clients/python[mlx]', in a clone: prompt caches and the demo need it"
        yield Finding("note", "mlx-lm", "missing", advice)
    yield _sqlite()


def _required() -> set[str]:
    """Returns the names of what is required on every platform; MLX has checks of its own."""
    try:
        requirements = importlib.metadata.requires("pion-grpc") or []
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return set()
    return {
        re.split(r"[\s<>=!~\[]", text, maxsplit=1)[0] for text in requirements if ";" not in text
    }


def _sqlite() -> Finding:
    try:
        import apsw

        from pion_grpc.storage.catalog import SQLITE_OLDEST
    except ImportError as error:
        return Finding("problem", "SQLite", str(error), "pip install apsw")
    found = apsw.sqlite_lib_version()
    if tuple(int(part) for part in found.split(".")) < SQLITE_OLDEST:
        oldest = ".".join(map(str, SQLITE_OLDEST))
        advice = f"older than {oldest}, which may lose transactions: pip install -U apsw"
        return Finding("problem", "SQLite", found, advice)
    return Finding("fine", "SQLite", f"{found}, inside apsw")


# What computes on what


def _computing() -> Iterator[Finding]:
    library = blas.of_numpy()
    if blas.is_fast(library):
        yield Finding("fine", "NumPy's BLAS", library)
    else:
        yield Finding("note", "NumPy's BLAS", library, "slow; NumPy's own wheel brings a fast one")
    try:
        core: Any = importlib.import_module("mlx.core")
    except ImportError as error:
        yield Finding("note", "MLX", str(error), "needed on the side that runs a model")
        return
    device = str(core.default_device())
    metal = "Metal" if core.metal.is_available() else "CPU"
    yield Finding("fine", "MLX", f"{core.__version__} on {metal}: {device}")
    if metal == "CPU":
        yield _mlx_blas()


def _mlx_blas() -> Finding:
    library = blas.of_mlx()
    if blas.is_fast(library):
        return Finding("fine", "MLX's BLAS", library)
    preload = blas.preloadable()
    advice = f"start processes with LD_PRELOAD={preload}"
    if not preload:
        advice = (
            "install OpenBLAS (Debian: apt install libopenblas0-pthread), then run doctor again; "
            "float32 models prefill 8 to 18 times faster with it"
        )
    return Finding("note", "MLX's BLAS", f"{library or 'unknown'}: the slow reference", advice)


# Limits


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES_WANTED:
        yield Finding("fine", "open files", _count(soft))
    else:
        able = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES_WANTED
        advice = f"ulimit -n {OPEN_FILES_WANTED}" if able else "raise the hard limit of this user"
        found = f"{_count(soft)} (hard limit {_count(hard)})"
        yield Finding("note", "open files", found, f"{advice}, before `pion-grpc serve`")
    yield _disk(Path(os.environ.get("PION_DATA") or default_data()))


def _disk(data: Path) -> Finding:
    from pion_grpc.storage.directory import NETWORK_FILE_SYSTEMS, file_system_type

    there = next(path for path in (data, *data.parents) if path.exists())
    kind = file_system_type(there.resolve())
    free = shutil.disk_usage(there).free
    found = f"{data} ({kind}, {size(free)} free)"
    if kind in NETWORK_FILE_SYSTEMS:
        return Finding("problem", "data directory", found, "network: name a local one with --data")
    if free < FREE_BYTES_WANTED:
        return Finding("note", "data directory", found, "free some, or name another with --data")
    return Finding("fine", "data directory", found)


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _server(options: argparse.Namespace) -> Finding:
    try:
        with connected(options) as client:
            server = client.describe()
    except CommandFailed as failure:
        return Finding("note", "server", f"not at {options.address}", str(failure))
    prefixes = counted(server.prefix_count, "prefix", "prefixes")
    found = f"{server.version} at {options.address}, {prefixes}"
    return Finding("fine", "server", found)


# Sizes


def _shapes(options: argparse.Namespace) -> list[Shape]:
    given = (options.layers, options.kv_heads, options.head_dim)
    if any(given):
        if not all(given) or options.model:
            raise CommandFailed(
                "give --layers, --kv-heads and --head-dim together, or --model",
                reason="INVALID",
            )
        return [Shape("your layout", *given)]
    wanted = (options.model or "").lower()
    found = [shape for shape in SHAPES if wanted in shape.name.lower()]
    if not found:
        known = ", ".join(shape.name for shape in SHAPES)
        raise CommandFailed(
            f"this model is not known here: give --layers, --kv-heads and --head-dim. Known: {known}",
            reason="INVALID",
        )
    return found


def _sizes(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    dtype = DType[options.dtype.upper()]
    try:
        layout = Layout(
            tuple(
                TensorLayout(slot, side, shape.kv_heads, shape.head_dim, dtype, options.codec)
                for slot in range(shape.layers)
                for side in Side
            )
        )
    except LayoutError as error:
        raise CommandFailed(f"{shape.name}: {error}", reason="INVALID") from error
    return {
        "model": shape.name,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "dtype": options.dtype,
        "codec": layout.tensors[0].codec,
        "token_bytes": layout.row_bytes,
        "chunk_bytes": layout.row_bytes * CHUNK_TOKENS,
        "tokens_per_gib": (1 << 30) // layout.row_bytes,
    }
