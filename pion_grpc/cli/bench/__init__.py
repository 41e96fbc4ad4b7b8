"""`pion-grpc bench`: what this costs and saves, measured beside its peers in the same run.

`ROWS` is the registry: a row is a line here and a function that takes a `measuring.Context` and returns
results (`results.Result`), each one of our figures beside at most one peer's. Nothing else has to know
of it.

The one decision: a benchmark is not a test. It never fails because of a figure; it says what was
measured, on which machine, and whether that meets a bound. It does fail if an answer is wrong: every row
checks what it times.

This module is imported with the command line; the rows are imported when they run.
"""

import argparse
from typing import Any, NamedTuple

Commands = Any  # argparse's subparsers action, which has no public name


class Entry(NamedTuple):
    """A row of the registry."""

    name: str
    what: str
    where: str
    """The function that measures it, `module:function`."""


_HERE = __name__

ROWS = (
    Entry("fetch", "Fetch of a large prefix against a bare socket", f"{_HERE}.transfer:fetch"),
    Entry("redis", "Fetch of a large prefix against redis-server", f"{_HERE}.transfer:redis"),
    Entry("store", "Store of a large prefix against writing a file", f"{_HERE}.transfer:store"),
    Entry("export", "same-host fetch into MLX against its file", f"{_HERE}.transfer:export"),
    Entry("memory", "server memory with 8 concurrent fetches", f"{_HERE}.transfer:memory"),
    Entry(
        "first-token", "first token of a second process, real model", f"{_HERE}.first_token:real"
    ),
    Entry(
        "long-prompts", "the same with long prompts, random model", f"{_HERE}.first_token:random"
    ),
    Entry("workload", "few prompts, many queries: hits and speed", f"{_HERE}.workload:workload"),
    Entry("miss", "first token on a miss; with the server down", f"{_HERE}.miss:miss"),
    Entry("calls", "small calls with few and many prefixes", f"{_HERE}.scale:calls"),
    Entry("start-up", "start-up with many prefixes stored", f"{_HERE}.scale:start_up"),
    Entry("attend", "one query of attention on the server", f"{_HERE}.attend:calls"),
    Entry("attend-bulk", "what residency saves and costs", f"{_HERE}.attend:bulk"),
    Entry(
        "attend-backend",
        "attention alone, with and without the backend",
        f"{_HERE}.attend:backends",
    ),
    Entry(
        "attend-first-token",
        "first token with attention on the server, real model",
        f"{_HERE}.attend:first_token",
    ),
    Entry(
        "attend-resp", "one query over RESP and over the binary lane", f"{_HERE}.attend_resp:calls"
    ),
    Entry(
        "attend-resp-first-token",
        "the first token with pion-vllm-mlx, by lane, real model",
        f"{_HERE}.attend_resp:first_token",
    ),
    Entry("resp-fetch", "V.FETCH against redis GET and a bare socket", f"{_HERE}.resp:fetch"),
    Entry("resp-store", "V.STOREBATCH against redis SET, appendonly", f"{_HERE}.resp:store"),
    Entry("resp-small", "redis-benchmark, beside redis-server", f"{_HERE}.resp:small"),
    Entry(
        "resp-membership", "MEMBERSHIP beyond a PING, and in the core", f"{_HERE}.resp:membership"
    ),
    Entry(
        "resp-first-token",
        "first token with pion-vllm-mlx, real model",
        f"{_HERE}.resp:first_token",
    ),
    Entry("codecs", "each codec's speed on one core", f"{_HERE}.codecs:speed"),
    Entry("codecs-memory", "memory beyond 4 GB of codes", f"{_HERE}.codecs:memory"),
    Entry("formats", "what each format does to a real model", f"{_HERE}.codecs:formats"),
    Entry("state", "recurrent state against K/V rows", f"{_HERE}.hybrid:state"),
    Entry("hybrid-first-token", "first token, random hybrid", f"{_HERE}.hybrid:first_token"),
    Entry("mesh", "Fetch direct, through Envoy, with mTLS", f"{_HERE}.mesh:fetch"),
    Entry("mesh-calls", "small calls through a mesh, 1 to 64 clients", f"{_HERE}.mesh:calls"),
    Entry("retrieval", "first token after a retrieved chunk", f"{_HERE}.retrieval:chunks"),
    Entry("retrieval-packs", "packs joined, against the same text", f"{_HERE}.retrieval:packs"),
)


def add_bench(commands: Commands) -> None:
    """`pion-grpc bench`."""
    parser = commands.add_parser(
        "bench",
        help="measure against peers and the machine's own limits",
        description="Measures, prints one table and writes one JSON file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "rows",
        nargs="*",
        metavar="ROW",
        help="what to measure (default: everything); `list` lists the rows",
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument(
        "--json", metavar="FILE", help="where to write (default: bench-results/<time>.json)"
    )
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="measure nothing: print the newest full-size figures of bench-results/ as Markdown",
    )
    workload = parser.add_argument_group("the size of the row `workload`")
    for flag, default, text in (
        ("--prompts", 5, "prompts"),
        ("--queries", 30, "queries for each prompt"),
        ("--prompt-repeats", 8, "how often a prompt's text is repeated"),
        ("--cold-queries", 3, "queries for each prompt that are also answered without the store"),
    ):
        workload.add_argument(
            flag, type=_count, default=default, metavar="N", help=f"{text} (default {default})"
        )
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    from pion_grpc.cli.bench.command import bench

    return bench(options)


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 10000")
    return int(text)
