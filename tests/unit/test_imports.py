"""The layers and the imports allowed between them are read from the code itself."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ALLOWED = {
    "pion_grpc.errors": set(),
    "pion_grpc.config": {"pion_grpc.errors"},
    "pion_grpc.storage": {"pion_grpc.errors", "pion_wire"},
    "pion_grpc.backends": {"pion_grpc.errors", "pion_wire"},
    "pion_grpc.core": {"pion_grpc.storage", "pion_grpc.backends", "pion_grpc.errors", "pion_wire"},
    "pion_grpc.rpc": {
        "pion_grpc",
        "pion_grpc.core",
        "pion_grpc.config",
        "pion_grpc.errors",
        "pion_wire",
    },
    "pion_grpc.resp": {
        "pion_grpc",
        "pion_grpc.core",
        "pion_grpc.config",
        "pion_grpc.errors",
        "pion_wire",
    },
    "pion_wire": set(),
    "pion_client": {"pion_wire"},
}
"""What each package may import of ours, beside itself. `pion_grpc` alone is the version."""


def owner(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "pion_grpc" else parts[0]


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {owner(name) for name in found if name.split(".")[0].startswith("pion_")}


def sources(package: str) -> list[Path]:
    base = ROOT if package.startswith("pion_grpc") else ROOT / "clients/python"
    path = base / package.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


@pytest.mark.parametrize("package", ALLOWED)
def test_no_layer_imports_what_is_above_or_beside_it(package: str) -> None:
    for path in sources(package):
        if path.parts[-2] == "v1":
            continue
        allowed = ALLOWED[package] | {package}
        for name in imports(path):
            # `from pion_grpc import __version__` names the attribute, not a module
            known = "pion_grpc" if name == "pion_grpc.__version__" else name
            assert known in allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", ["pion_grpc", "pion_wire"])
def test_no_module_imports_itself_through_others(package: str) -> None:
    """But for types, and in the command line, which imports what a command needs when it runs."""
    base = ROOT if package == "pion_grpc" else ROOT / "clients/python"
    paths = {
        ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources(package)
        if path.parts[-2] != "v1" and not path.is_relative_to(ROOT / "pion_grpc/cli")
    }
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text())
        for_types = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        named = {
            module if (module := f"{node.module}.{alias.name}") in paths else node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and node not in for_types
            for alias in node.names
        }
        graph[name] = (named & paths.keys()) - {name}
    assert any(graph.values())
    graphlib.TopologicalSorter(graph).prepare()  # raises if there is a circle


def test_only_the_command_line_imports_the_client() -> None:
    for path in sources("pion_grpc"):
        if path.is_relative_to(ROOT / "pion_grpc/cli"):
            continue
        assert "pion_client" not in imports(path), path


@pytest.mark.parametrize(
    ("package", "only_in"),
    [("mlx", "pion_grpc/backends/mlx_backend.py"), ("grpc", "pion_grpc/rpc")],
)
def test_heavy_libraries_stay_where_they_belong(package: str, only_in: str) -> None:
    for path in sources("pion_grpc"):
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith(("pion_grpc/cli/", only_in)) or relative == "pion_grpc/server.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
            assert not [n for n in names if n.split(".")[0] == package], (
                f"{relative} imports {package}"
            )
