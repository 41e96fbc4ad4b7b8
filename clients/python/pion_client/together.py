"""What several nodes say of themselves, as one answer: a client of all of them asks about the store.

Knows what the numbers mean; nothing of calls. The one decision: no node is left out or answered for. A
sum without the node that is away would look like one with it.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from pion_client.values import Description, Receipt

_SUMS = [
    field.name
    for field in dataclasses.fields(Description)
    if field.name.endswith(("_bytes", "_count"))
    or (field.name.startswith("attend_") and field.name != "attend_backend")
]


def receipts(each: Sequence[Receipt]) -> Receipt:
    """Returns the sums, since the first of them began to count."""
    names = [field.name for field in dataclasses.fields(Receipt) if field.name != "since_unix_ms"]
    sums = {name: sum(getattr(one, name) for one in each) for name in names}
    return Receipt(**sums, since_unix_ms=min(one.since_unix_ms for one in each))


def descriptions(each: Sequence[Description]) -> Description:
    """Returns what they are together.

    What is counted is the sum, a limit the smallest, a codec or a feature one that all have; versions
    and backends that differ are named one after the other.
    """
    first = each[0]
    backends = [one.attend_backend for one in each]
    sums = {name: sum(getattr(one, name) for one in each) for name in _SUMS}
    if not all(one.tenant_budget_bytes for one in each):
        sums["tenant_budget_bytes"] = 0  # no quota
    return dataclasses.replace(
        first,
        **sums,
        version=_each_once(one.version for one in each),
        limits={
            name: min(one.limits.get(name, value) for one in each)
            for name, value in first.limits.items()
        },
        codecs=tuple(codec for codec in first.codecs if all(codec in one.codecs for one in each)),
        attend_backend=_each_once(backends) if all(backends) else "",
        started_unix_ms=max(one.started_unix_ms for one in each),
        export_enabled=all(one.export_enabled for one in each),
    )


def _each_once(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))
