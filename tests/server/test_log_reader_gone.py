"""A server whose log nobody reads any more."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def test_a_closed_log_pipe_keeps_no_server_from_serving_or_stopping(short_tmp: Path) -> None:
    address = f"unix:{short_tmp}/s"
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "pion_grpc", "serve", "--data", str(short_tmp / "d")]
    process = subprocess.Popen(
        [*command, "--listen", address, "--drain-ms", "0"], stdout=writing, stderr=writing
    )
    try:
        os.close(writing)
        with open(reading, "rb", buffering=0) as log:
            assert b'"ready"' in log.readline()
        # The pipe is closed: whatever the server logs from now on cannot be written.
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()
