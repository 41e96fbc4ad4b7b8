"""The rows about attention over RESP: that they run to their end, whatever the figures are."""

from pion_grpc.cli.bench import Entry, command
from pion_grpc.cli.bench.measuring import Workload


def test_no_lane_answers_otherwise_than_the_computation_it_is_held_against(tmp_path):
    entry = Entry("attend-resp", "queries", "pion_grpc.cli.bench.attend_resp:calls")
    measured, failed = command.run([entry], tmp_path / "r.json", quick=True, workload=Workload())
    results = measured.rows[0].results
    assert not failed, results[0].note
    assert len(results) == 15
    assert all(result.figure for result in results)
