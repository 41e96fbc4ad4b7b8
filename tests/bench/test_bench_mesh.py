"""The mesh that is measured is one: what is fetched through it is right, encrypted or not."""

import json
from pathlib import Path

import numpy as np
import pytest

from pion_client import Client, errors
from pion_grpc.cli.bench import mesh
from pion_grpc.cli.bench.processes import PeerMissing
from pion_grpc.cli.bench.transfer import NAME
from tests.conftest import ServerProcess


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_mesh_that_is_measured_does_not_answer_otherwise(tmp_path, encrypted: bool) -> None:
    shelf = mesh.Shelf(tmp_path, 1, encrypted=encrypted)
    (node,) = shelf.mesh.nodes
    with shelf.server(node):
        try:
            proxy = mesh.Envoy(node)
        except PeerMissing as missing:
            pytest.skip(str(missing))
        with proxy, shelf.client(proxy.address) as through, shelf.client(node.key) as direct:
            mesh._put_small(through)
            for client in (through, direct):
                mesh._look_up(client, mesh.SMALL_PREFIXES - 1)
            with Client(proxy.address, export=False, timeout_s=0.5) as plain:
                if encrypted:
                    with pytest.raises(errors.Unavailable):
                        plain.describe()
                else:
                    assert plain.describe().prefix_count == mesh.SMALL_PREFIXES


def test_the_go_client_is_not_timed_at_anything_else(server: ServerProcess, tmp_path: Path) -> None:
    pionctl, why_not = mesh._pionctl(tmp_path)
    if pionctl is None:
        pytest.skip(why_not)
    rows = np.ones((2, 64, 8), np.float16)
    with Client(server.address) as client:
        client.store(NAME, layers=[(rows, rows)], token_ids=range(64), model="m")
    assert mesh._fetching_with(pionctl, server.address, None, 2 * rows.nbytes)() > 0
    with pytest.raises(AssertionError):
        mesh._fetching_with(pionctl, server.address, None, rows.nbytes)()


def test_nothing_but_certificates_is_left_out() -> None:
    before = {"a": [{"transport_socket": {"x": 1}, "name": "b"}], "transport_socket": 2}
    assert json.loads(mesh._without_tls(json.dumps(before).encode())) == {"a": [{"name": "b"}]}
    assert mesh._without_tls(b"no JSON") == b"no JSON"
