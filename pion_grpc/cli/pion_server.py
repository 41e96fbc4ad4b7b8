"""`pion-server`: the command line that existing scripts use to start their server, for this one.

Its flags are taken as they are; flags for features that this product does not have are accepted and have
no effect. All data is in `pion-data` in the working directory. Whatever keeps the server from starting
is printed as one line that begins with FATAL, because scripts look for that.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pion_grpc import __version__
from pion_grpc.config import ONE_OWNER, Config, environment_settings, parse_bytes, parse_path
from pion_grpc.errors import CannotStart

DATA = "pion-data"
SESSIONS_MAX = 256

_IGNORED_FLAGS = (
    "--no-auto-detect", "--no-auto-embed", "--no-crash-log",
)  # fmt: skip
_IGNORED_VALUES = (
    "--wal-size",
    "--wal-max-segments",
    "--wal-full-policy",
    "--profile",
    "--io-threads",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CannotStart(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a server and returns its exit status."""
    try:
        options = parser().parse_args(argv)
        config = config_of(options)
        from pion_grpc.cli.logs import set_up_logs
        from pion_grpc.server import serve

        set_up_logs(sys.stdout)
        serve(config)
    except CannotStart as error:
        print(f"FATAL: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def config_of(options: argparse.Namespace) -> Config:
    """Returns the configuration that a command line means.

    Raises:
        CannotStart: it contradicts itself, or a value cannot be used.
    """
    if options.workers > 1 and not options.independent_workers:
        raise CannotStart("-w above 1 needs --independent-workers")
    attend = options.metal_attention or options.metal_attention_fp16 or options.cuda_attention
    if options.workers > 1 and attend:
        raise CannotStart(ONE_OWNER)
    password = _password(options)
    host = options.bind or ("0.0.0.0" if password else "127.0.0.1")
    given: dict[str, Any] = {
        "data": Path(options.data),
        "listen": options.listen or f"unix:{options.data}/grpc.sock",
        "resp": f"{host}:{options.port}",
        "workers": options.workers,
        "max_sessions": SESSIONS_MAX,
        "ns_prefix": options.ns_prefix,
        "attend": "auto" if attend else "off",
        "attend_dtype": "f16" if options.metal_attention_fp16 else "f32",
        "fa_window": options.fa_window,
        "insecure_bind": bool(options.bind),
        "no_wal": options.no_wal,
        "drain_ms": 0,
        "grace_ms": 3_000,
        **password,
    }
    if options.tenant:
        given["tenants"] = tuple(options.tenant)
    if options.maxmemory:
        given["disk_budget"] = options.maxmemory
    try:
        return Config(**{**environment_settings(), **given})
    except ValueError as error:
        problem = str(error).replace("--resp", "--bind and --port")  # the flags that were given
        if options.maxmemory:
            problem = problem.replace("--disk-budget", "--maxmemory")
        raise CannotStart(problem) from error


def _password(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that the password is in; none without one."""
    if options.requirepass == "":  # a variable that was not set, rather than no protection wanted
        raise CannotStart("--requirepass: the password is empty")
    if options.data == "":  # likewise
        raise CannotStart("--data: the path is empty")
    if options.requirepass is not None:
        return {"password_text": options.requirepass}
    if options.requirepass_file is not None:
        return {"password_file": options.requirepass_file}
    password = os.environ.get("PION_REQUIREPASS")
    return {"password_text": password} if password else {}


def _memory(text: str) -> int:
    """Returns bytes of a size, or of a share of the machine's memory."""
    try:
        if not text.endswith("%"):
            return parse_bytes(text)
        share = float(text[:-1]) / 100
        if 0 < share <= 1:
            return int(share * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 20gb, 512mb, 50% or bytes")


def _tenant(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError("a tenant is written NAME=PASSWORD")
    return text


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = _Parser(
        prog="pion-server",
        description="Runs a server for clients of the RESP wire.",
        allow_abbrev=False,
    )
    made.add_argument("-v", "--version", action="version", version=f"pion-server {__version__}")
    made.add_argument("-p", "--port", type=int, default=1974, metavar="N", help="RESP port")
    made.add_argument("-w", "--workers", type=int, default=1, metavar="N", help="processes")
    made.add_argument("--independent-workers", action="store_true", help="required for -w above 1")
    made.add_argument("--kvcache", action="store_true", help="no effect: always on")
    made.add_argument("--metal-attention", action="store_true", help="answer attention queries")
    made.add_argument(
        "--metal-attention-fp16", action="store_true", help="the same, with K and V kept as f16"
    )
    made.add_argument("--cuda-attention", action="store_true", help="answer attention queries")
    made.add_argument(
        "--fa-window",
        type=int,
        default=0,
        metavar="ROWS",
        help="rows at the end that attention queries see; 0: all",
    )
    made.add_argument(
        "--ns-prefix", default="", metavar="TEXT", help="what names of prefixes must begin with"
    )
    made.add_argument("--requirepass", metavar="PASSWORD", help="the password (PION_REQUIREPASS)")
    made.add_argument(
        "--requirepass-file", metavar="FILE", type=parse_path, help="file with the password"
    )
    made.add_argument(
        "--tenant",
        action="append",
        default=[],
        type=_tenant,
        metavar="NAME=PASSWORD",
        help="a tenant and its password; may be repeated",
    )
    made.add_argument(
        "--bind",
        metavar="ADDRESS",
        help="IPv4 address to listen on (127.0.0.1; with a password 0.0.0.0)",
    )
    made.add_argument(
        "--no-wal", action="store_true", help="tell clients that commits promise nothing"
    )
    made.add_argument(
        "--maxmemory",
        type=_memory,
        metavar="SIZE",
        help="bytes on disk, or a percentage of the memory",
    )
    made.add_argument("--data", default=DATA, metavar="DIR", help=f"data directory ({DATA})")
    made.add_argument("--listen", metavar="ADDRESS", help="gRPC address (a Unix socket in DIR)")
    for flag in _IGNORED_FLAGS:
        made.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    for flag in _IGNORED_VALUES:
        made.add_argument(flag, metavar="VALUE", help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    sys.exit(main())
