"""A file system with no space left: the write is refused, and nothing that was there is lost."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import redis

from tests.conftest import ServerProcess
from tests.server.wire import Sample, Wire, eventually, layout_of, refusal, refused

pytestmark = pytest.mark.faults

LAYOUT = layout_of(4, 4, 64)
"""4 KiB per token."""


@pytest.fixture
def small_disk(short_tmp: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs Linux and root")
    mount = short_tmp / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(path: Path) -> None:
    """Takes every byte that is left."""
    with path.open("wb", buffering=0) as file:
        for block in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(bytes(block))
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017


def test_a_full_disk_refuses_the_write_and_loses_nothing(
    start_server: Callable[..., ServerProcess], small_disk: Path
) -> None:
    server = start_server(directory=small_disk / "data")
    kept: list[Sample] = []
    with Wire(server.address) as wire:
        while True:
            sample = Sample(f"full/{len(kept)}", 500, LAYOUT)
            try:
                wire.store(sample)
            except grpc.RpcError as error:
                told = refusal(error)
                break
            kept.append(sample)
        assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "DISK_FULL")
        assert told.retry_ms > 0
        assert len(kept) > 3
        names = sorted(sample.namespace for sample in kept)
        assert wire.names() == names
        segments = server.directory / "segments"
        assert len(os.listdir(segments)) == len(kept), "nothing of the refused one is left"
        for sample in kept:
            assert wire.fetch(sample.namespace).tensors == sample.tensors
        wire.call("Drop", namespaces=[kept.pop().namespace])
        kept.append(Sample("full/after", 400, LAYOUT))
        wire.store(kept[-1])
        assert wire.fetch("full/after").tensors == kept[-1].tensors
    assert server.stop() == 0
    with Wire(start_server(directory=small_disk / "data").address) as wire:
        for sample in kept:
            assert wire.fetch(sample.namespace).tensors == sample.tensors


def test_a_disk_that_others_fill_to_the_last_byte_stays_readable(
    start_server: Callable[..., ServerProcess], small_disk: Path
) -> None:
    server = start_server(directory=small_disk / "data")
    sample = Sample("full/kept", 500, LAYOUT)
    with Wire(server.address) as wire:
        wire.store(sample)
        fill(small_disk / "others")
        for attempt in range(5):
            told = refused(lambda: wire.store(Sample(f"full/{attempt}", 500, LAYOUT)))  # noqa: B023
            assert told.reason == "DISK_FULL"
        assert wire.fetch("full/kept").tensors == sample.tensors
        assert wire.lookup("full/kept").hit
        assert wire.names() == ["full/kept"]
        (small_disk / "others").unlink()
        wire.store(Sample("full/again", 500, LAYOUT))
        assert wire.names() == ["full/again", "full/kept"]
        assert len(os.listdir(server.directory / "segments")) == 2
    server.stop()
    assert not [entry for entry in server.log if entry["level"] == "error"]
    told = [entry["problem"] for entry in server.log if entry["event"] == "housekeeping failed"]
    assert len(told) == len(set(told)), "a full disk is not told of each second"


def test_a_disk_that_others_fill_does_not_keep_what_is_dropped(
    start_server: Callable[..., ServerProcess], small_disk: Path
) -> None:
    server = start_server("--resp", "127.0.0.1:0", directory=small_disk / "data")
    host, _, port = server.ready["resp"].rpartition(":")
    samples = [Sample(f"full/{index}", 500, LAYOUT) for index in range(3)]
    with Wire(server.address) as wire, redis.Redis(host, int(port)) as keys:
        for sample in samples:
            wire.store(sample)
        keys.set("value", bytes(100))
        drops: tuple[Callable[[], object], ...] = (
            lambda: wire.call("Drop", namespaces=["full/0"]),
            lambda: keys.execute_command("KV.PREFIX.DROP", "full/1"),
            lambda: keys.delete("value"),
        )
        for step, drop in enumerate(drops):
            fill(small_disk / f"others-{step}")
            assert (
                refused(lambda: wire.store(Sample("full/more", 500, LAYOUT))).reason == "DISK_FULL"
            )
            drop()
        assert wire.names() == ["full/2"]
        assert not keys.exists("value")
        assert len(os.listdir(server.directory / "segments")) == 1


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_server_that_ends_on_a_full_disk_starts_and_serves_there(
    start_server: Callable[..., ServerProcess], small_disk: Path, end: str
) -> None:
    server = start_server(directory=small_disk / "data")
    sample = Sample("full/kept", 500, LAYOUT)
    with Wire(server.address) as wire:
        wire.store(sample)
        fill(small_disk / "others")
        refused(lambda: wire.store(Sample("full/more", 500, LAYOUT)))
    if end == "stop":
        assert server.stop() == 0
        assert "Traceback" not in "".join(server.output)
        assert [entry for entry in server.log if "full disk" in entry["event"]]
    else:
        server.kill()
    server = start_server(directory=small_disk / "data")
    with Wire(server.address) as wire:
        assert wire.fetch("full/kept").tensors == sample.tensors
        assert wire.names() == ["full/kept"]
        (small_disk / "others").unlink()
        wire.store(Sample("full/more", 500, LAYOUT))
    assert server.stop() == 0


def test_a_budget_is_not_exceeded_by_what_comes_and_goes(
    start_server: Callable[..., ServerProcess],
) -> None:
    budget = 50 << 20
    server = start_server("--disk-budget", str(budget))
    with Wire(server.address) as wire:
        for index in range(60):
            sample = Sample(f"budget/{index}", 700, LAYOUT)
            wire.store(sample)
            on_disk = sum(p.stat().st_size for p in server.directory.rglob("*") if p.is_file())
            assert on_disk <= budget
            assert wire.fetch(sample.namespace).tensors == sample.tensors, "the newest stays"
        answer = wire.call("Describe")
        assert answer.evicted_count > 40
        assert answer.disk_used_bytes <= budget
        assert 10 < answer.prefix_count < 20
        eventually(lambda: len(os.listdir(server.directory / "segments")) == answer.prefix_count)
