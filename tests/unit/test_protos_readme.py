"""The table of the contract: each command of the other wire has a line there, and no RPC is invented."""

import re
from collections.abc import Iterator
from pathlib import Path

from pion_grpc.resp.commands.table import COMMANDS
from pion_wire.v1 import attend_pb2, prefix_store_pb2, ssm_state_pb2, stats_pb2

TEXT = (Path(__file__).parents[2] / "protos" / "README.md").read_text()
LINES = re.findall(r"^\| (`[A-Z][^|]+) \| ([^|]+) \|", TEXT, re.MULTILINE)
SERVICES = {
    service.name: set(service.methods_by_name)
    for file in (prefix_store_pb2, attend_pb2, ssm_state_pb2, stats_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}


def names(cell: str) -> Iterator[str]:
    """The names in a cell; `A.X`, `Y` stands for `A.X` and `A.Y`."""
    family = ""
    for name in re.findall(r"`([\w.]+)[^`]*`", cell):
        family = name.rpartition(".")[0] or family
        yield f"{family}.{name.rpartition('.')[2]}" if family else name


def test_no_command_is_without_a_line() -> None:
    named = {name for cell, _ in LINES for name in names(cell)}
    assert {entry.name for entry in COMMANDS if "." in entry.name} - named == set()


def test_no_rpc_is_named_that_does_not_exist() -> None:
    named = [name.partition(".") for _, cell in LINES for name in names(cell)]
    ours = {(service, method) for service, _, method in named if method[:1].isupper()}
    assert {service for service, _ in ours} == set(SERVICES)
    assert {name for name in ours if name[1] not in SERVICES[name[0]]} == set()
