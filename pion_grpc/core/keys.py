"""One tenant's keys: strings, hashes, lists, sets and sorted sets, inside one transaction.

The semantics are Redis's, without its commands: methods take and return plain values. What is refused
raises a `KeyspaceError`, which means nothing has changed.

Refuses to know whose transaction it is and when it is committed. The one decision: a
collection that has become empty does not exist, whichever operation has emptied it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

from pion_grpc.core.blobs import INLINE_BYTES_MAX, BlobStore, WrittenBlob
from pion_grpc.core.key_values import (
    LargeValue,
    NewValue,
    NoSuchKey,
    ScoreRules,
    ScoresAdded,
    ScoreSpan,
    TooLong,
    Value,
    WrongKind,
)
from pion_grpc.core.numbers import checked_sum, float_sum
from pion_grpc.core.patterns import matches
from pion_grpc.storage.blobs import Blobs
from pion_grpc.storage.keyspace import KeyRow, KeyTable
from pion_grpc.storage.keyspace import Kind as Kind
from pion_grpc.storage.transaction import Transaction

STRING_BYTES_MAX = 512 << 20


class Keys:
    """One tenant's keys inside one transaction."""

    def __init__(
        self,
        transaction: Transaction,
        tenant: str,
        blobs: BlobStore,
        now_unix_ms: int,
        make_room: Callable[[int], None] = lambda size: None,
        files: list[str] | None = None,
    ) -> None:
        """`files` gets the names of those that are written here: see `BlobStore.remove_unnamed`."""
        self.now_unix_ms = now_unix_ms
        self.make_room = make_room
        """Call it before keys grow by more bytes than a request has; refuses where they do not fit."""
        self._files = [] if files is None else files
        self._transaction = transaction
        self._table = KeyTable(transaction, tenant, now_unix_ms)
        self._blobs = blobs
        self.tenant = tenant

    def undone_on_error(self) -> AbstractContextManager[None]:
        """Undoes what is done inside, and nothing before it, if it raises."""
        return self._transaction.undone_on_error()

    # -- keys of any kind

    def kind(self, name: bytes) -> Kind | None:
        """Returns what a key holds; None if there is none."""
        key = self._table.get(name)
        return key.kind if key else None

    def revision(self, name: bytes) -> int:
        """Returns a number that changes with every change of a key; 0 if there is none."""
        key = self._table.get(name)
        return key.revision if key else 0

    def inline_bytes(self, name: bytes) -> int:
        """Returns about how many bytes a copy of a key would add to the database."""
        key = self._table.get(name)
        return self._table.inline_bytes(key) if key else 0

    def remove(self, names: Iterable[bytes]) -> int:
        """Removes keys; returns how many there were."""
        return self._table.remove_all(names)

    def expires_unix_ms(self, name: bytes) -> int | None:
        """Returns when a key expires; None: never.

        Raises:
            NoSuchKey: there is none.
        """
        return self._existing(name).expires_unix_ms

    def set_expiry(self, name: bytes, expires_unix_ms: int | None) -> bool:
        """Sets when a key expires, or that it never does; says whether there is one.

        A time that has passed removes the key.
        """
        key = self._table.get(name)
        if key is None:
            return False
        if expires_unix_ms is not None and expires_unix_ms <= self.now_unix_ms:
            self._table.remove(name)
        else:
            self._table.set_expiry(key.id, expires_unix_ms)
        return True

    def rename(self, name: bytes, new_name: bytes) -> None:
        """Gives a key another name; what had it is replaced.

        Raises:
            NoSuchKey: there is none.
        """
        key = self._existing(name)
        if new_name != name:
            self._table.rename(key, new_name)

    def names(self, pattern: bytes) -> list[bytes]:
        """Returns the names that match a pattern."""
        return [name for name in self._table.names() if matches(pattern, name)]

    def random_name(self) -> bytes | None:
        """Returns the name of some key."""
        return self._table.random_name()

    def scan(
        self, cursor: int, count: int, pattern: bytes = b"*", kind: Kind | None = None
    ) -> tuple[int, list[bytes]]:
        """Returns the next of about `count` keys that match, and where to go on; 0 at the end.

        A key that is there all the time is returned exactly once.
        """
        page = self._table.page(cursor, count)
        names = [
            key.name
            for key in page
            if not self._table.is_expired(key)
            and kind in (None, key.kind)
            and matches(pattern, key.name)
        ]
        return (page[-1].id if len(page) == count else 0), names

    def count(self) -> tuple[int, int]:
        """Returns how many keys there are, and how many of them expire."""
        return self._table.count()

    def clear(self) -> None:
        """Removes every key."""
        self._table.clear()

    # -- strings

    def get(self, name: bytes) -> Value | None:
        """Returns a string.

        Raises:
            WrongKind: it is not a string.
        """
        key = self._of_kind(name, Kind.STRING)
        return self._value(key) if key else None

    def set(self, name: bytes, value: NewValue, expires_unix_ms: int | None = None) -> None:
        """Sets a string, whatever was there."""
        if expires_unix_ms is not None and expires_unix_ms <= self.now_unix_ms:
            self._table.remove(name)
            self.discard(value)
        else:
            self._put(name, value, expires_unix_ms)

    def discard(self, value: NewValue) -> None:
        """Gives up a value that came for a key and is not wanted."""
        if isinstance(value, WrittenBlob):
            blob = self._blobs.publish(self._transaction, value)
            Blobs(self._transaction).remove(blob)

    def length(self, name: bytes) -> int:
        """Returns the bytes of a string; 0 if there is none."""
        value = self.get(name)
        return value.size if isinstance(value, LargeValue) else len(value or b"")

    def whole(self, name: bytes) -> bytes:
        """Returns all bytes of a string, wherever they are; none if there is none."""
        value = self.get(name)
        return self.read(value) if isinstance(value, LargeValue) else value or b""

    def is_string(self, name: bytes) -> bool:
        """Says whether a key is a string."""
        return self.kind(name) is Kind.STRING

    def read(self, value: LargeValue) -> bytes:
        """Returns all bytes of a large value."""
        row = Blobs(self._transaction).get(value.blob)
        assert row is not None, "a value outlives the transaction that found it"
        return self._blobs.read_inside(row)

    def append(self, name: bytes, more: bytes) -> int:
        """Puts bytes at the end of a string, and returns its new length."""
        return self._overwrite(name, self.whole(name) + more)

    def set_range(self, name: bytes, offset: int, part: bytes) -> int:
        """Writes bytes into a string, with zeros before them if it is shorter; returns its length."""
        if not part:
            return self.length(name)
        if offset + len(part) > STRING_BYTES_MAX:
            raise TooLong("string exceeds maximum allowed size (512MB)")
        whole = bytearray(self.whole(name).ljust(offset, b"\0"))
        whole[offset : offset + len(part)] = part
        return self._overwrite(name, bytes(whole))

    def increment(self, name: bytes, by: int) -> int:
        """Adds to a string that is an integer, and returns the sum.

        Raises:
            NotANumber: it is not an integer, or the sum has more than 64 bits.
        """
        total = checked_sum(self._number(name), by, "value")
        self._overwrite(name, b"%d" % total)
        return total

    def increment_float(self, name: bytes, by: float) -> bytes:
        """Adds to a string that is a number, and returns the sum as it is stored now."""
        total = float_sum(self._number(name), by, "value")
        self._overwrite(name, total)
        return total

    # -- hashes

    def fields(self, name: bytes) -> list[tuple[bytes, bytes]]:
        """Returns the fields of a hash with their values."""
        key = self._of_kind(name, Kind.HASH)
        return self._table.fields(key.id) if key else []

    def field_values(self, name: bytes, fields: Iterable[bytes]) -> Iterator[bytes | None]:
        """Yields the values of fields, None for those that are not there."""
        key = self._of_kind(name, Kind.HASH)
        for field in fields:
            yield self._table.field(key.id, field) if key else None

    def set_fields(self, name: bytes, pairs: Iterable[tuple[bytes, bytes]]) -> int:
        """Sets fields of a hash; returns how many are new."""
        key = self._made(name, Kind.HASH)
        return sum(self._table.set_field(key, field, value) for field, value in pairs)

    def remove_fields(self, name: bytes, fields: Iterable[bytes]) -> int:
        """Removes fields of a hash; returns how many there were."""
        key = self._of_kind(name, Kind.HASH)
        if key is None:
            return 0
        removed = sum(self._table.remove_field(key.id, field) for field in fields)
        self._changed(key)
        return removed

    def increment_field(self, name: bytes, field: bytes, by: int) -> int:
        """Adds to a field that is an integer; raises as `increment` does."""
        (value,) = self.field_values(name, [field])
        total = checked_sum(b"0" if value is None else value, by, "hash value")
        self.set_fields(name, [(field, b"%d" % total)])
        return total

    def increment_field_float(self, name: bytes, field: bytes, by: float) -> bytes:
        """Adds to a field that is a number; raises as `increment` does."""
        (value,) = self.field_values(name, [field])
        total = float_sum(b"0" if value is None else value, by, "hash value")
        self.set_fields(name, [(field, total)])
        return total

    # -- lists

    def push(self, name: bytes, values: Sequence[bytes], *, left: bool) -> int:
        """Puts values one by one at an end of a list, and returns its new length."""
        key = self._made(name, Kind.LIST)
        begin, end = self._table.list_ends(key)
        for value in values:
            if left:
                begin -= 1
                self._table.set_item(key, begin, value)
            else:
                self._table.set_item(key, end, value)
                end += 1
        return end - begin

    def pop(self, name: bytes, count: int, *, left: bool) -> list[bytes] | None:
        """Takes values from an end of a list; None if there is no list."""
        key = self._of_kind(name, Kind.LIST)
        if key is None:
            return None
        begin, end = self._table.list_ends(key.id)
        if left:
            first, last = begin, min(begin + count, end)
        else:
            first, last = max(end - count, begin), end
        values = self._table.items(key.id, first, last)
        self._table.remove_items(key.id, first, last)
        self._changed(key)
        return values if left else values[::-1]

    def list_length(self, name: bytes) -> int:
        """Returns the number of values in a list."""
        key = self._of_kind(name, Kind.LIST)
        begin, end = self._table.list_ends(key.id) if key else (0, 0)
        return end - begin

    def list_range(self, name: bytes, start: int, stop: int) -> list[bytes]:
        """Returns values by index, both included; negative ones count from the end."""
        key = self._of_kind(name, Kind.LIST)
        if key is None:
            return []
        begin, end = self._table.list_ends(key.id)
        first, last = span(start, stop, end - begin)
        return self._table.items(key.id, begin + first, begin + last)

    def set_index(self, name: bytes, index: int, value: bytes) -> bool:
        """Replaces one value of a list; says whether there is such an index.

        Raises:
            NoSuchKey: there is no list.
        """
        key = self._of_kind(name, Kind.LIST)
        if key is None:
            raise NoSuchKey("no such key")
        begin, end = self._table.list_ends(key.id)
        position = begin + index if index >= 0 else end + index
        if not begin <= position < end:
            return False
        self._table.set_item(key.id, position, value)
        self._table.touch(key.id)
        return True

    def trim(self, name: bytes, start: int, stop: int) -> None:
        """Keeps only these values of a list."""
        key = self._of_kind(name, Kind.LIST)
        if key is None:
            return
        begin, end = self._table.list_ends(key.id)
        first, last = span(start, stop, end - begin)
        self._table.remove_items(key.id, begin, begin + first)
        self._table.remove_items(key.id, begin + max(first, last), end)
        self._changed(key)

    def replace_list(self, name: bytes, values: Sequence[bytes]) -> None:
        """Puts these values in place of those of a list; without any there is no list."""
        expires = self._existing(name).expires_unix_ms
        self._table.remove(name)
        if values:
            self.push(name, values, left=False)
            self.set_expiry(name, expires)

    # -- sets

    def members(self, name: bytes, most: int = -1) -> list[bytes]:
        """Returns the members of a set, so many at most; -1: all."""
        key = self._of_kind(name, Kind.SET)
        return self._table.members(key.id, most) if key else []

    def add_members(self, name: bytes, members: Iterable[bytes]) -> int:
        """Adds members to a set; returns how many are new."""
        key = self._made(name, Kind.SET)
        return sum(self._table.add_member(key, member) for member in members)

    def remove_members(self, name: bytes, members: Iterable[bytes]) -> int:
        """Removes members of a set; returns how many there were."""
        key = self._of_kind(name, Kind.SET)
        if key is None:
            return 0
        removed = sum(self._table.remove_member(key.id, member) for member in members)
        self._changed(key)
        return removed

    def has_members(self, name: bytes, members: Iterable[bytes]) -> list[bool]:
        """Says of each whether it is in a set."""
        key = self._of_kind(name, Kind.SET)
        return [key is not None and self._table.has_member(key.id, m) for m in members]

    def replace_set(self, name: bytes, members: Iterable[bytes]) -> int:
        """Puts a set in place of whatever has the name; returns its size. An empty one is not kept."""
        self._table.remove(name)
        wanted = list(members)
        return self.add_members(name, wanted) if wanted else 0

    # -- sorted sets

    def add_scores(
        self, name: bytes, scores: Iterable[tuple[bytes, float]], rules: ScoreRules
    ) -> ScoresAdded:
        """Sets scores of members, new ones and old ones as the rules allow.

        Raises:
            NotANumber: a sum is not a number.
        """
        if self._of_kind(name, Kind.SORTED_SET) is None and rules.only_known:
            return ScoresAdded(0, 0, None)
        key = self._made(name, Kind.SORTED_SET)
        added = changed = 0
        last: float | None = None
        for member, wanted in scores:
            known = self._table.score(key, member)
            score = rules.outcome(known, wanted)
            last = score
            if score is None or score == known:
                continue
            self._table.set_score(key, member, score)
            added += known is None
            changed += known is not None
        held = self._table.get(name)
        assert held is not None
        self._table.remove_if_empty(held)
        return ScoresAdded(added, changed, last)

    def remove_scored(self, name: bytes, members: Iterable[bytes]) -> int:
        """Removes members of a sorted set; returns how many there were."""
        key = self._of_kind(name, Kind.SORTED_SET)
        if key is None:
            return 0
        removed = self._table.remove_scored(key.id, members)
        self._changed(key)
        return removed

    def score(self, name: bytes, member: bytes) -> float | None:
        """Returns the score of a member."""
        key = self._of_kind(name, Kind.SORTED_SET)
        return self._table.score(key.id, member) if key else None

    def rank(self, name: bytes, member: bytes, *, reverse: bool) -> int | None:
        """Returns how many members come before this one; None if it is not there."""
        key = self._of_kind(name, Kind.SORTED_SET)
        score = self._table.score(key.id, member) if key else None
        if key is None or score is None:
            return None
        rank = self._table.rank(key.id, member, score)
        return self._table.item_count(key) - 1 - rank if reverse else rank

    def by_rank(
        self, name: bytes, start: int, stop: int, *, reverse: bool = False
    ) -> list[tuple[bytes, float]]:
        """Returns members with their scores by rank, both included; negative ones from the end."""
        key = self._of_kind(name, Kind.SORTED_SET)
        if key is None:
            return []
        first, last = span(start, stop, self._table.item_count(key))
        return self._table.by_rank(key.id, first, last - first, reverse=reverse)

    def by_score(
        self, name: bytes, scores: ScoreSpan, *, reverse: bool, begin: int, count: int
    ) -> list[tuple[bytes, float]]:
        """Returns members whose scores are in a span, in order; `count` -1 means all."""
        key = self._of_kind(name, Kind.SORTED_SET)
        if key is None or begin < 0:
            return []
        low, high = scores.closed()
        return self._table.by_score(
            key.id, low, high, reverse=reverse, begin=begin, count=max(count, -1)
        )

    def copy_scores(self, source: bytes, target: bytes) -> None:
        """Adds the members of one sorted set to another."""
        self.add_scores(target, self.by_rank(source, 0, -1), ScoreRules())

    def item_count(self, name: bytes, kind: Kind) -> int:
        """Returns how many fields or members a key of a kind has."""
        key = self._of_kind(name, kind)
        return self._table.item_count(key) if key else 0

    # -- parts of the above

    def _number(self, name: bytes) -> bytes:
        return b"0" if self.get(name) is None else self.whole(name)

    def _existing(self, name: bytes) -> KeyRow:
        key = self._table.get(name)
        if key is None:
            raise NoSuchKey("no such key")
        return key

    def _of_kind(self, name: bytes, kind: Kind) -> KeyRow | None:
        key = self._table.get(name)
        if key is not None and key.kind is not kind:
            raise WrongKind("Operation against a key holding the wrong kind of value")
        return key

    def _made(self, name: bytes, kind: Kind) -> int:
        key = self._of_kind(name, kind)
        if key is None:
            return self._table.add(name, kind)
        self._table.touch(key.id)
        return key.id

    def _changed(self, key: KeyRow) -> None:
        self._table.touch(key.id)
        self._table.remove_if_empty(key)

    def _value(self, key: KeyRow) -> Value:
        if key.blob is None:
            return bytes(key.string or b"")
        return LargeValue(key.blob, Blobs(self._transaction).size(key.blob))

    def _overwrite(self, name: bytes, value: bytes) -> int:
        """Sets a string that keeps its time; returns its length."""
        if len(value) > STRING_BYTES_MAX:
            raise TooLong("string exceeds maximum allowed size (512MB)")
        key = self._of_kind(name, Kind.STRING)
        if len(value) <= INLINE_BYTES_MAX:
            self.make_room(len(value))
        self._put(name, value, key.expires_unix_ms if key else None)
        return len(value)

    def _put(self, name: bytes, value: NewValue, expires_unix_ms: int | None) -> None:
        blob: int | None = None
        if isinstance(value, WrittenBlob):
            blob = self._blobs.publish(self._transaction, value)
        elif len(value) > INLINE_BYTES_MAX:
            blob = self._blobs.write_inside(self._transaction, self.tenant, value, self._files)
        inline = value if isinstance(value, bytes) and blob is None else None
        self._table.put_string(name, inline, blob, expires_unix_ms)


def span(start: int, stop: int, count: int) -> tuple[int, int]:
    """Returns begin and end (exclusive) of inclusive indices, negative ones counted from the end."""
    first = max(start + count if start < 0 else start, 0)
    last = min(stop + count if stop < 0 else stop, count - 1)
    return (first, last + 1) if first <= last else (0, 0)
