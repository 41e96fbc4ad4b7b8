"""Answers to Lookup and Match: what is stored under a name, or shares most tokens with a sequence.

Counts nothing. The one decision: a hit is never a lie. Before a prefix is named its files have been
found with the right size; what turns out to be damaged is taken out, and what changes while it is looked
at, or goes before it could be leased, is asked for again.
"""

import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

from pion_grpc.core.matching import longest_match, served_with_parts
from pion_grpc.core.opening import prefix_info
from pion_grpc.core.reading import CorruptPrefix
from pion_grpc.core.values import LookupQuery, LookupResult, MatchQuery, MatchResult, MissReason
from pion_grpc.core.workshop import OutOfDate, Workshop
from pion_grpc.errors import OverBudget
from pion_grpc.storage.leases import Leases
from pion_grpc.storage.match_index import MatchIndex
from pion_grpc.storage.transaction import PrefixRow, Transaction, unix_ms
from pion_wire.blocks import common_tokens, root_hash

Answer = TypeVar("Answer")
Result = TypeVar("Result", LookupResult, MatchResult)

LEASE_BYTES = 128
"""What a lease takes in the catalogue."""


def look_up(
    workshop: Workshop, tenant: str, queries: list[LookupQuery], lease_ms: int
) -> list[LookupResult]:
    """Says of each name whether it holds what is expected, and leases what is hit."""
    asks = [functools.partial(_lookup, workshop, tenant, query) for query in queries]
    return _leased(workshop, [_sound(workshop, ask) for ask in asks], asks, lease_ms)


def find_longest(workshop: Workshop, tenant: str, query: MatchQuery) -> MatchResult:
    """Returns the longest stored prefix of a token sequence, leased if it is a hit."""
    ask = functools.partial(_match, workshop, tenant, query)
    (result,) = _leased(workshop, [_sound(workshop, ask)], [ask], query.lease_ms)
    return result


def add_lease(transaction: Transaction, prefix: int, lease_ms: int) -> bytes:
    """Leases a prefix and returns the lease; empty if it went meanwhile."""
    if transaction.by_id(prefix) is None:
        return b""
    lease = secrets.token_bytes(16)
    Leases(transaction).add(lease, prefix, unix_ms() + lease_ms)
    return lease


def _lookup(workshop: Workshop, tenant: str, query: LookupQuery) -> tuple[LookupResult, int]:
    """Returns the answer, and of a hit the prefix."""
    with workshop.catalog.read() as transaction:
        row = transaction.by_name(tenant, query.namespace)
        if row is None:
            return LookupResult(hit=False, reason=MissReason.NOT_STORED), 0
        chain = transaction.chain(row)
        info = prefix_info(transaction, row, chain)
        token_ids = MatchIndex(transaction).token_ids(row.id) if query.token_ids else b""
    reason, difference = _expectation(row, query, token_ids)
    if reason is not MissReason.NONE:
        miss = LookupResult(False, reason, prefix=info, first_difference=difference)
        return miss, 0
    if not workshop.recovery.vouch(chain):
        raise OutOfDate
    workshop.space.uses.note(row.id)
    return LookupResult(hit=True, reason=MissReason.NONE, prefix=info), row.id


def _match(workshop: Workshop, tenant: str, query: MatchQuery) -> tuple[MatchResult, int]:
    """Returns the answer, and of a hit the prefix."""
    requested = len(query.token_ids) // 4
    with workshop.catalog.read() as transaction:
        longest, longest_root = None, b""
        for fidelity in query.fidelities:
            root = root_hash(tenant, query.model_id, fidelity)
            found = longest_match(transaction, root, query.token_ids)
            if found is not None and (longest is None or found.tokens > longest.tokens):
                longest, longest_root = found, root
        if longest is None:
            return MatchResult(False, MissReason.NOT_STORED, None, requested, 0, 0), 0
        row, matched, served, shortened_by = served_with_parts(
            transaction, longest_root, query.token_ids, longest, query.part_kinds
        )
        chain = transaction.chain(row)
        info = prefix_info(transaction, row, chain)
    reason = MissReason.NONE if served == requested else MissReason.PARTIAL
    if shortened_by:
        reason = MissReason.PART_MISSING
    result = MatchResult(
        hit=True,
        reason=reason,
        prefix=info,
        requested_tokens=requested,
        matched_tokens=matched,
        served_tokens=served,
        shortened_by=shortened_by,
        longest=longest.prefix.namespace,
        longest_tokens=longest.tokens,
    )
    if served < max(query.min_tokens, 1):
        reason = reason if shortened_by else MissReason.TOO_SHORT
        return dataclasses.replace(result, hit=False, reason=reason, served_tokens=0), 0
    if not workshop.recovery.vouch(chain):
        raise OutOfDate
    workshop.space.uses.note(row.id)
    return result, row.id


def _expectation(row: PrefixRow, query: LookupQuery, token_ids: bytes) -> tuple[MissReason, int]:
    """Returns why a prefix is not what a query expects, and the first token that differs."""
    if query.model_id and row.model_id != query.model_id:
        return MissReason.MODEL_DIFFERS, 0
    if query.token_ids and token_ids != query.token_ids and row.state != "registered":
        return MissReason.TOKENS_DIFFER, common_tokens(token_ids, query.token_ids)
    if query.layout is not None and row.layout != query.layout.to_json():
        return MissReason.LAYOUT_DIFFERS, 0
    if row.state == "registered":
        return MissReason.NO_ROWS, 0
    return MissReason.NONE, 0


def _sound(workshop: Workshop, ask: Callable[[], Answer]) -> Answer:
    """Asks again after what was found damaged has been taken out."""
    while True:
        try:
            return ask()
        except CorruptPrefix as error:
            workshop.space.take_out(error)
        except OutOfDate:
            continue


def _leased(
    workshop: Workshop,
    found: list[tuple[Result, int]],
    asks: Sequence[Callable[[], tuple[Result, int]]],
    lease_ms: int,
) -> list[Result]:
    """Leases the prefixes of hits in one transaction: one lease each, however often it was hit.

    What was evicted since it was found is asked for again. No lease is given once the catalogue
    itself has reached the budget.
    """
    while lease_ms and any(prefix for _, prefix in found):
        try:
            workshop.space.check_declared(LEASE_BYTES * len(found))
        except OverBudget:
            break
        hits = {prefix for _, prefix in found if prefix}
        with workshop.catalog.write() as transaction:
            leases = {prefix: add_lease(transaction, prefix, lease_ms) for prefix in hits}
        if all(leases.values()):
            return [
                dataclasses.replace(answer, lease_id=leases[prefix]) if prefix else answer
                for answer, prefix in found
            ]
        found = [
            _sound(workshop, ask) if prefix and not leases[prefix] else (answer, prefix)
            for (answer, prefix), ask in zip(found, asks, strict=True)
        ]
    return [answer for answer, _ in found]
