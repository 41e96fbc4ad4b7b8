"""All commands: one table, put together from one module per family."""

from pion_grpc.resp.command import Command
from pion_grpc.resp.commands import (
    attend,
    connection,
    generic,
    hashes,
    lists,
    prefixes,
    sets,
    sorted_sets,
    states,
    stats,
    strings,
    transactions,
    vstore,
)

COMMANDS: tuple[Command, ...] = (
    *connection.COMMANDS,
    *prefixes.COMMANDS,
    *vstore.COMMANDS,
    *states.COMMANDS,
    *attend.COMMANDS,
    *stats.COMMANDS,
    *generic.COMMANDS,
    *strings.COMMANDS,
    *hashes.COMMANDS,
    *lists.COMMANDS,
    *sets.COMMANDS,
    *sorted_sets.COMMANDS,
    *transactions.COMMANDS,
)
