"""What the guides tell people to type exists: no command, flag or variable is remembered wrongly."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion_grpc.cli.pion_server import parser as parser_of_pion_server
from pion_grpc.config import SETTINGS, variable_of
from tests.cli.conftest import Run

ROOT = Path(__file__).parents[2]
GUIDES = sorted(
    path
    for where in ("*.md", "docs/*.md", "protos/*.md", "deploy/**/*.md", "clients/*/*.md")
    for path in ROOT.glob(where)
)
SOURCES = [
    path
    for where in ("pion_grpc/**/*.py", "clients/*/**/*.py", "clients/go/**/*.go")
    for path in ROOT.glob(where)
] + list(ROOT.glob("clients/swift/Tests/**/*.swift"))
_CODE = re.compile(r"`([^`\n]+)`|^    (.+)$", re.MULTILINE)
_TYPED = re.compile(r"(?:\S*/)?(pion-grpc|pion-server)((?: +[^\s#]+)+)")
_FLAG = re.compile(r"--[a-z][a-z-]*")
_VARIABLE = re.compile(r"\bPION_[A-Z0-9_]*[A-Z0-9]\b")


def typed(path: Path) -> Iterator[tuple[list[str], set[str]]]:
    """Yields the program and its command, and the flags, of whatever a guide says to type."""
    for span, line in _CODE.findall(path.read_text()):
        if found := _TYPED.match(span or line):
            words = found[2].split()
            count = 2 if words[0] == "mesh" and len(words) > 1 else 1
            command = [] if words[0].startswith("-") else words[:count]
            yield [found[1], *command], set(_FLAG.findall(found[2]))


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_guide_has_a_flag_that_its_command_does_not_know(run: Run, path: Path) -> None:
    for names, flags in typed(path):
        if names[0] == "pion-server":
            told = parser_of_pion_server().format_help()
        else:
            shown = run(*names[1:], "--help")
            assert shown.status == 0, f"{path.name}: {' '.join(names)}"
            told = shown.out
        unknown = flags - set(_FLAG.findall(told))
        assert not unknown, f"{path.name}: {' '.join(names)} {unknown}"


def test_guides_say_what_to_type() -> None:
    """The test above would have nothing to say if it found nothing."""
    found = {" ".join(names[1:2]) for path in GUIDES for names, _ in typed(path)}
    assert found >= {"serve", "ls", "stat", "drop", "export", "import", "verify", "rebuild", "mesh"}


def test_no_guide_has_a_variable_that_nobody_reads() -> None:
    sources = "\n".join(path.read_text() for path in SOURCES)
    read = set(_VARIABLE.findall(sources)) | {variable_of(field) for field in SETTINGS}
    for path in GUIDES:
        unread = set(_VARIABLE.findall(path.read_text())) - read
        assert not unread, f"{path.name}: {unread}"
