"""What goes without anybody having asked for it does not go in silence."""

from pathlib import Path

import grpc

from tests.server.wire import Sample, Wire, eventually, layout_of, refused

LAYOUT = layout_of(4, 4, 64)
"""4 KiB per token."""


def test_an_eviction_is_not_silent(start_server) -> None:
    server = start_server("--disk-budget", "16MiB")
    with Wire(server.address) as wire:
        for index in range(8):
            wire.store(Sample(f"losses/{index}", 700, LAYOUT))
        left = set(wire.names())
        count = wire.call("Describe").evicted_count
    assert count > 0
    assert server.stop() == 0
    told = [entry for entry in server.log if entry["event"] == "evicted"]
    assert sum(entry["count"] for entry in told) == count, "each is told once"
    names = {name for entry in told for name in entry["prefixes"]}
    assert names == {f"losses/{index}" for index in range(8)} - left


def test_damage_is_not_silent(start_server) -> None:
    server = start_server()
    with Wire(server.address) as wire:
        wire.store(Sample("losses/damaged", 2_000, LAYOUT))
        wire.store(Sample("losses/sound", 10, LAYOUT))
        (path,) = (p for p in segments(server.directory) if p.stat().st_size > 1 << 20)
        with path.open("r+b") as file:
            file.seek(3_500_000)
            file.write(b"not what was stored")
        told = refused(lambda: wire.fetch("losses/damaged"))
        assert told.code == grpc.StatusCode.DATA_LOSS
        assert told.message.startswith("'losses/damaged' is damaged and has been taken out")
        (entry,) = eventually(
            lambda: [entry for entry in server.log if entry["event"].startswith("damaged")]
        )
        assert wire.names() == ["losses/sound"]
    assert (entry["level"], entry["count"]) == ("warning", 1)
    assert entry["files"] == [f"segments/{path.name}"]
    (trouble,) = eventually(lambda: [e for e in server.log if e["event"] == "file in trouble"])
    assert f"{path}: the page at byte" in trouble["problem"], "the operator learns which"


def segments(directory: Path) -> list[Path]:
    return list((directory / "segments").iterdir())
