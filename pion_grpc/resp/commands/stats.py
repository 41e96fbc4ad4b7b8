"""What the server is, and what it saved: `INFO`, `PION.STATS`, `CONFIG`, and Redis's own `SAVE`.

Counters are of one worker; those that begin with `server_` are of all workers together. Those of
features that are not part of this product (`semantic_*`, `moe_*`, `vector_queries`) are 0. A tenant
sees none of them: they would tell what others do.
"""

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pion_grpc.core.patterns import matches
from pion_grpc.core.receipt import Receipt
from pion_grpc.core.saving import save_all
from pion_grpc.resp.command import Answer, Call, Command, Where, for_all
from pion_grpc.resp.commands.connection import REDIS_VERSION, may_see
from pion_grpc.resp.commands.prefixes import attention, lines
from pion_grpc.resp.reply import OK, Reply, ReplyError, Simple, Verbatim

_SECOND_US = 1_000_000
_NOT_WHILE_IT_RUNS = {
    "maxmemory": "it is the budget on disk, which all workers and the files that are there keep to: "
    "start the server with another (--disk-budget, or --maxmemory of pion-server)",
    "maxmemory-policy": "keys are never evicted: without room a write is refused",
    "appendonly": "everything acknowledged survives a kill of the server; SAVE or KV.PREFIX.COMMIT "
    "bring it to stable storage",
    "save": "everything acknowledged survives a kill of the server, without snapshots",
}
"""Why a parameter stays as it is, for those that clients like to set."""


def pion_stats(call: Call) -> Answer:
    """`PION.STATS [RESET]`: the receipt."""
    ledger = call.services.store.ledger
    if call.word(0) == "RESET":
        ledger.reset()
        return OK
    return {
        "worker_id": call.services.facts.worker,
        "uptime_in_seconds": call.services.facts.uptime_s,
        **_counters(ledger.get(), with_microseconds=True),
    }


def info(call: Call) -> Answer:
    """`INFO [section …]`."""
    wanted = {call.word(index) for index in range(call.count)}
    sections = _SECTIONS if not call.tenant else {name: _SECTIONS[name] for name in _FOR_TENANTS}
    everything = not wanted or bool(wanted & {"ALL", "DEFAULT", "EVERYTHING"})
    text = "\r\n".join(
        f"# {title}\r\n" + lines(section(call)).decode()
        for title, section in sections.items()
        if everything or title.upper() in wanted
    )
    return Verbatim(text)


def config(call: Call) -> Answer:
    """`CONFIG GET pattern …`, `CONFIG SET name value …`, `CONFIG RESETSTAT`.

    Nothing can be changed while the server runs; setting what is so already is no change.
    """
    word = call.word(0)
    if word == "GET" and call.count >= 2:
        patterns = [call.raw(index).lower() for index in range(1, call.count)]
        return {
            name: value
            for name, value in _configuration(call).items()
            if any(matches(pattern, name.encode()) for pattern in patterns)
        }
    if word == "SET" and call.count >= 3 and call.count % 2:
        return _set_config(call)
    if word == "RESETSTAT":
        call.services.store.ledger.reset()
        return OK
    if word in ("GET", "SET"):
        raise ReplyError(f"ERR wrong number of arguments for 'config|{word.lower()}' command")
    raise ReplyError(
        f"ERR unknown subcommand '{call.text(0)}': CONFIG knows GET, SET and RESETSTAT"
    )


def _configuration(call: Call) -> dict[str, Reply]:
    return {
        "maxmemory": str(call.services.settings.memory_max),
        "maxmemory-policy": "noeviction",
        "appendonly": "no",
        "save": "",
        "port": str(call.services.facts.port),
        "timeout": "0",
    }


def _set_config(call: Call) -> Answer:
    known = _configuration(call)
    for at in range(1, call.count, 2):
        name = call.text(at).lower()
        if name not in known:
            raise ReplyError(
                f"ERR Unknown option or number of arguments for CONFIG SET - '{call.text(at)}'"
            )
        if call.text(at + 1).lower() != known[name]:
            raise ReplyError(
                f"ERR CONFIG SET failed (possibly related to argument '{call.text(at)}') - "
                + _NOT_WHILE_IT_RUNS.get(name, "can't change while the server runs")
            )
    return OK


def save(call: Call) -> Answer:
    """`SAVE`: everything acknowledged before is on stable storage."""
    save_all(call.services.store)
    return OK


def background_save(call: Call) -> Answer:
    """`BGSAVE`: as `SAVE`, done when it answers."""
    save_all(call.services.store)
    return Simple("Background saving started")


def last_save(call: Call) -> Answer:
    """`LASTSAVE`: when `SAVE` last ended well."""
    return call.services.sessions.totals().since_start.saved_unix_s


def wait(call: Call) -> Answer:
    """`WAIT replicas timeout`: there are no replicas."""
    call.integer(0)
    call.integer(1)
    return 0


def _counters(receipt: Receipt, *, with_microseconds: bool) -> dict[str, int | str]:
    measured_us = round(receipt.seconds_measured * _SECOND_US)
    saved_us = measured_us + round(receipt.seconds_estimated * _SECOND_US)
    counters: dict[str, int | str] = {
        "kvprefix_hits": receipt.hits,
        "kvprefix_misses": receipt.misses,
        "kvprefix_hits_measured": receipt.measured_hits,
        "kvprefix_tokens_served": receipt.tokens_served,
        "kvprefix_bytes_served": receipt.bytes_streamed,
    }
    if with_microseconds:
        counters["kvprefix_prefill_us_saved"] = saved_us
        counters["kvprefix_prefill_us_measured"] = measured_us
    return counters | {
        "prefill_seconds_avoided": _seconds(saved_us),
        "prefill_seconds_avoided_measured": _seconds(measured_us),
        "semantic_hits": 0,
        "semantic_misses": 0,
        "moe_hits": 0,
        "moe_misses": 0,
        "vector_queries": 0,
    }


def _seconds(microseconds: int) -> str:
    """Truncated to milliseconds."""
    return f"{microseconds // _SECOND_US}.{microseconds // 1_000 % 1_000:03d}"


def _server(call: Call) -> dict[str, int | str]:
    facts = call.services.facts
    return {
        "redis_version": REDIS_VERSION,
        "pion_version": f"{facts.version}+{facts.build}",
        "pion_vector": 0,
        "redis_mode": "standalone",
        "os": f"{os.uname().sysname} {os.uname().release} {os.uname().machine}",
        "arch_bits": 64,
        "process_id": os.getpid(),
        "tcp_port": facts.port,
        "server_time_usec": time.time_ns() // 1_000,
        "uptime_in_seconds": facts.uptime_s,
        "uptime_in_days": facts.uptime_s // 86_400,
    }


def _clients(call: Call) -> dict[str, int | str]:
    visible = sum(may_see(call, one) for one in call.services.clients)
    return {"connected_clients": visible, "blocked_clients": 0}


def _memory(call: Call) -> dict[str, int | str]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak *= 1 if sys.platform == "darwin" else 1_024
    used = _resident_bytes(peak)
    limit = call.services.settings.memory_max
    return {
        "used_memory": used,
        "used_memory_human": _human(used),
        "used_memory_rss": used,
        "used_memory_peak": max(peak, used),
        "total_system_memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "maxmemory": limit,
        "maxmemory_human": _human(limit),
        "maxmemory_policy": "noeviction",
    }


def _cluster(call: Call) -> dict[str, int | str]:
    return {"cluster_enabled": 0}


def _replication(call: Call) -> dict[str, int | str]:
    return {"role": "master", "connected_slaves": 0}


def _persistence(call: Call) -> dict[str, int | str]:
    totals = call.services.sessions.totals()
    return {
        "loading": 0,
        "wal_segments_sealed": 0,
        "wal_segment_bytes": 0,
        "wal_tail_offset": totals.unsaved_bytes,
        "wal_dropped_entries": 0,
        "wal_dropped_bytes": 0,
        "wal_full_policy": "refuse",
        "wal_durability_lost": 0,
        "snapshot_version": 2,
        "streams_persisted": 0,
        "ttls_persisted": 1,
    }


def _stats(call: Call) -> dict[str, int | str]:
    return {
        "total_connections_received": call.services.clients.accepted,
        "send_eagain_stalls": 0,
    }


def _pion(call: Call) -> dict[str, int | str]:
    return {
        "stats_scope": "worker",
        "worker_id": call.services.facts.worker,
        **_counters(call.services.store.ledger.get(), with_microseconds=False),
        **attention(call),
    }


def _all_workers(call: Call) -> dict[str, int | str]:
    total = _counters(call.services.store.receipt.get(), with_microseconds=False)
    return {f"server_{name}": value for name, value in total.items()}


def _keyspace(call: Call) -> dict[str, int | str]:
    keys, expires = call.services.keyspace.reading(call.tenant, lambda keys: keys.count())
    return {"db0": f"keys={keys},expires={expires},avg_ttl=0"} if keys else {}


_SECTIONS: dict[str, Callable[[Call], dict[str, int | str]]] = {
    "Server": _server,
    "Clients": _clients,
    "Memory": _memory,
    "Cluster": _cluster,
    "Replication": _replication,
    "Persistence": _persistence,
    "Stats": _stats,
    "Pion": _pion,
    "Workers": _all_workers,
    "Keyspace": _keyspace,
}


_FOR_TENANTS = ("Server", "Clients", "Cluster", "Replication", "Keyspace")
"""Sections that say nothing of what others do."""


def _resident_bytes(unknown: int) -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return unknown
    return pages * os.sysconf("SC_PAGE_SIZE")


def _human(size: int) -> str:
    scaled, unit = float(size), "B"
    for larger in "KMG":
        if scaled >= 1_024:
            scaled, unit = scaled / 1_024, larger
    return f"{scaled:.2f}{unit}"


COMMANDS = (
    Command("PION.STATS", -1, pion_stats),
    for_all("INFO", -1, info),
    Command("CONFIG", -2, config, Where.LOOP),
    Command("SAVE", 1, save),
    Command("BGSAVE", -1, background_save),
    Command("LASTSAVE", 1, last_save),
    Command("WAIT", 3, wait),
)
