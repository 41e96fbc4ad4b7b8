"""`verify`: a data directory compared with its checksums, with or without a server on it."""

import argparse
from pathlib import Path

from rich.console import Console

from pion_grpc.cli.output import counted, printable, progress, show, size, table
from pion_grpc.core.checkup import Damage, check_directory
from pion_grpc.storage.directory import rebuild_command


def verify(options: argparse.Namespace) -> int:
    """Reads every page; returns 1 if something is damaged."""
    directory: Path = options.data
    with progress(options, "checking") as advance:
        checkup = check_directory(directory, advance)

    def render(console: Console) -> None:
        read = (
            f"{counted(checkup.prefixes, 'prefix', 'prefixes')} and "
            f"{counted(checkup.values, 'large value', 'large values')}, {size(checkup.bytes_read)} read"
        )
        if not checkup.damaged:
            console.print(f"everything is as it was stored: {read}")
            return
        shown = table("Damaged", "what", "name", "problem")
        for damage in checkup.damaged:
            shown.add_row(damage.kind, _name(damage), printable(damage.problem))
        console.print(shown)
        console.print(f"{read}; {len(checkup.damaged):,} damaged")
        if any(damage.kind == "catalogue" for damage in checkup.damaged):
            console.print(
                "a damaged catalogue can be rebuilt: stop the server, move "
                f"{directory / 'catalog.db'} and the files whose names begin with it out of the way, "
                f"and run {rebuild_command(directory)}"
            )
        console.print(
            "a server never serves damaged data: when it comes across it, it removes the prefix and its "
            "children; `pion-grpc drop NAME` removes them now"
        )

    value = {
        "directory": str(directory),
        "prefixes": checkup.prefixes,
        "values": checkup.values,
        "bytes_read": checkup.bytes_read,
        "damaged": [damage._asdict() for damage in checkup.damaged],
    }
    show(options, value, render)
    return 1 if checkup.damaged else 0


def _name(damage: Damage) -> str:
    name = f"{damage.tenant}:{damage.name}" if damage.tenant else damage.name
    return printable(name) + ("" if damage.visible else " (dropped, kept for its children)")
