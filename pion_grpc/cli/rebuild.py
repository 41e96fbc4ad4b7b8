"""`rebuild`: a new catalogue, made from the segments beside it."""

import argparse
import shlex

from rich.console import Console

from pion_grpc.cli.failure import CommandFailed
from pion_grpc.cli.output import counted, printable, progress, show, size, table
from pion_grpc.core.rebuild import rebuild
from pion_grpc.errors import DiskFull
from pion_grpc.storage.directory import NOT_ADOPTED


def rebuild_catalogue(options: argparse.Namespace) -> int:
    """Rebuilds the catalogue; returns 1 if a file was not adopted."""
    try:
        with progress(options, "checking") as advance:
            rebuilt = rebuild(options.data, options.tenant, advance)
    except DiskFull as error:
        raise CommandFailed(str(error), reason=error.reason) from error
    aside = [*rebuilt.catalogue, *rebuilt.not_adopted]
    hidden = sum(not prefix.visible for prefix in rebuilt.adopted)

    def render(console: Console) -> None:
        if aside:
            shown = table(f"Moved to {NOT_ADOPTED}", "file", "why")
            for file in aside:
                shown.add_row(printable(file.file), printable(file.problem))
            console.print(shown)
        kept = f" ({hidden:,} of them replaced, kept for their children)" if hidden else ""
        console.print(
            f"{counted(len(rebuilt.adopted), 'prefix', 'prefixes')} adopted{kept}, "
            f"{counted(len(rebuilt.not_adopted), 'file', 'files')} not; {size(rebuilt.bytes_read)} read"
        )
        directory = printable(shlex.quote(str(options.data)))
        console.print(f"start a server on it with: pion-grpc serve --data {directory}")

    value = {
        "directory": str(options.data),
        "tenant": options.tenant,
        "adopted": [prefix._asdict() for prefix in rebuilt.adopted],
        "not_adopted": [file._asdict() for file in rebuilt.not_adopted],
        "catalogue": [file._asdict() for file in rebuilt.catalogue],
        "bytes_read": rebuilt.bytes_read,
    }
    show(options, value, render)
    return 1 if rebuilt.not_adopted else 0
