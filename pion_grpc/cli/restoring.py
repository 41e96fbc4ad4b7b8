"""`pion-grpc import SNAPSHOT --data DIR`: a data directory from a snapshot that KV.PREFIX.SAVE wrote."""

import argparse
import shlex

from rich.console import Console

from pion_grpc.cli.output import printable, show
from pion_grpc.storage.store_snapshot import restore_store_snapshot


def restore(options: argparse.Namespace) -> int:
    """Restores a snapshot to a new data directory."""
    restore_store_snapshot(options.file, options.data)
    value = {"file": str(options.file), "data": str(options.data)}

    def render(console: Console) -> None:
        directory = printable(shlex.quote(str(options.data)))
        console.print(f"restored; start a server on it with: pion-grpc serve --data {directory}")

    show(options, value, render)
    return 0
