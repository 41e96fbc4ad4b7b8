"""Files that others watch: each is put in place as a whole, and only if it says something new."""

import os
from pathlib import Path


def write(path: Path, data: bytes, *, mode: int = 0o600) -> bool:
    """Puts a file in place; says whether that changed anything."""
    if path.exists() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    os.replace(new, path)
    return True
