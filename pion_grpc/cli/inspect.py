"""What a running server holds and what it has done: `ls`, `stat` and `drop`.

Knows the client, and nothing of how things are stored. The one decision: an estimate is called an
estimate, in the table and in the JSON.
"""

import argparse
import dataclasses
import datetime
from typing import Any

from rich.console import Console

from pion_client.errors import NotAllowed
from pion_client.values import Description, PrefixInfo, Receipt
from pion_grpc.cli.connecting import connected, one_node_asked
from pion_grpc.cli.output import counted, pairs, printable, seconds, show, size, table
from pion_wire.layout import Layout


def ls(options: argparse.Namespace) -> int:
    """Lists prefixes."""
    with connected(options) as client:
        found = list(client.list(options.prefix))

    def render(console: Console) -> None:
        if not found:
            where = f" under a name that begins with {options.prefix!r}" if options.prefix else ""
            console.print(f"nothing is stored{where}")
            return
        shown = table(
            "", "name", "tokens", "on disk", "stored as", "parent", "model", "since",
            numbers=("tokens", "on disk"),
        )  # fmt: skip
        for info in found:
            shown.add_row(
                printable(info.namespace),
                f"{info.token_count:,}",
                size(info.stored_bytes),
                _kept_as(info),
                f"{printable(info.parent)} +{info.base:,}" if info.base else "",
                printable(info.model),
                _moment(info.created_unix_ms),
            )
        console.print(shown)
        total = sum(info.stored_bytes for info in found)
        console.print(f"{counted(len(found), 'prefix', 'prefixes')}, {size(total)}")

    show(options, {"prefixes": [_as_json(info) for info in found]}, render)
    return 0


def stat(options: argparse.Namespace) -> int:
    """Shows the receipt, and what the server holds."""
    with connected(options) as client:
        server = client.describe()
        receipt: Receipt | None = None
        try:
            receipt = client.reset_stats() if options.reset else client.stats()
        except NotAllowed:  # a tenant's
            if options.reset:
                raise

    def render(console: Console) -> None:
        if receipt is not None:
            since = f"since {_moment(receipt.since_unix_ms)}"
            console.print(pairs(f"Receipt, {since}", _receipt_rows(receipt)))
        console.print(pairs(f"Server at {options.address}", _server_rows(server)))
        if options.reset:
            console.print("the receipt has been set to zero")

    value = {
        "receipt": receipt and {**dataclasses.asdict(receipt), "hit_rate": _hit_rate(receipt)},
        "server": {"address": options.address, **dataclasses.asdict(server)},
    }
    show(options, value, render)
    return 0


def drop(options: argparse.Namespace) -> int:
    """Removes prefixes; returns 1 if one was not stored."""
    with connected(options) as client:
        dropped = client.drop(*options.names)
    results = list(zip(options.names, dropped, strict=True))

    def render(console: Console) -> None:
        for name, was_stored in results:
            console.print(f"{printable(name)}: {'dropped' if was_stored else 'was not stored'}")
        if not all(dropped) and (hint := one_node_asked(options)):
            console.print(hint)

    value = {"results": [{"namespace": name, "dropped": done} for name, done in results]}
    show(options, value, render)
    return 0 if all(dropped) else 1


def _receipt_rows(receipt: Receipt) -> "list[tuple[str, str]]":
    rate = _hit_rate(receipt)
    return [
        ("hits", f"{receipt.hits:,}"),
        ("misses", f"{receipt.misses:,}"),
        ("hit rate", "nothing asked yet" if rate is None else f"{rate:.1%}"),
        ("restores with measured prefill time", f"{receipt.measured_hits:,}"),
        ("tokens served", f"{receipt.tokens_served:,}"),
        ("bytes streamed", size(receipt.bytes_streamed)),
        ("bytes exported", size(receipt.bytes_exported)),
        ("prefill avoided, measured", seconds(receipt.prefill_seconds_avoided_measured)),
        (
            "prefill avoided, estimate",
            f"{seconds(receipt.prefill_seconds_avoided_estimated)} (555 µs per token)",
        ),
    ]


def _server_rows(server: Description) -> "list[tuple[str, str]]":
    rows = [
        ("version", server.version),
        ("running since", _moment(server.started_unix_ms)),
        ("prefixes", f"{server.prefix_count:,}"),
        ("rows", f"{server.row_count:,}"),
        ("on disk", _of(server.disk_used_bytes, server.disk_budget_bytes)),
        ("resident", _of(server.resident_used_bytes, server.resident_budget_bytes)),
        ("not sealed yet", size(server.live_bytes)),
        ("evicted", f"{server.evicted_count:,}"),
        ("found damaged", f"{server.corrupt_count:,}"),
        ("attend", server.attend_backend or "off"),
        ("same-host export", "on" if server.export_enabled else "off"),
    ]
    if server.tenant_budget_bytes:
        rows.insert(5, ("per tenant", f"at most {size(server.tenant_budget_bytes)}"))
    if server.attend_backend:
        rows.append(
            ("attend entries", f"{server.attend_warm:,} resident, {server.attend_cold:,} cold")
        )
        moved = (
            f"{server.attend_demotions:,} made cold, {server.attend_rehydrates:,} resident again"
        )
        rows.append(("entries so far", moved))
    return rows


def _as_json(info: PrefixInfo) -> dict[str, Any]:
    return {
        "namespace": info.namespace,
        "state": info.state.value,
        "model": info.model,
        "token_count": info.token_count,
        "base": info.base,
        "parent": info.parent,
        "depth": info.depth,
        "fidelity": info.fidelity,
        "generation": info.generation,
        "stored_bytes": info.stored_bytes,
        "row_bytes": info.row_bytes,
        "durability": info.durability,
        "created_unix_ms": info.created_unix_ms,
        "prefill_ms": info.prefill_ms,
        "tensors": _tensors(info.layout),
        "parts": [part._asdict() for part in info.parts],
    }


def _tensors(layout: Layout) -> list[dict[str, Any]]:
    """Returns the tensors; equal ones of neighbouring slots are one entry."""
    found: list[dict[str, Any]] = []
    for tensor in sorted(layout.tensors, key=lambda tensor: (tensor.side, tensor.slot)):
        alike = {
            "side": tensor.side.value,
            "heads": tensor.heads,
            "head_dim": tensor.head_dim,
            "dtype": tensor.dtype.value,
            "codec": tensor.codec,
        }
        before = found[-1] if found else {}
        if before.items() >= alike.items() and before["last_slot"] == tensor.slot - 1:
            before["last_slot"] = tensor.slot
        else:
            found.append({"first_slot": tensor.slot, "last_slot": tensor.slot, **alike})
    return found


def _kept_as(info: PrefixInfo) -> str:
    """Says what state a prefix is in and how exact it is: `sealed`, `live`, `sealed, int8 (lossy)`."""
    codecs = sorted({tensor.codec for tensor in info.layout.tensors} - {"raw"})
    return f"{info.state.value}, {' '.join(codecs)} (lossy)" if codecs else info.state.value


def _hit_rate(receipt: Receipt) -> float | None:
    asked = receipt.hits + receipt.misses
    return receipt.hits / asked if asked else None


def _of(used: int, budget: int) -> str:
    return f"{size(used)} of {size(budget)}" + (f" ({used / budget:.0%})" if budget else "")


def _moment(unix_ms: int) -> str:
    return datetime.datetime.fromtimestamp(unix_ms / 1_000).strftime("%Y-%m-%d %H:%M:%S")
