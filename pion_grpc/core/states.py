"""Recurrent states: opaque values, one for each layer of a session, exact at one token boundary.

A session is a name of its own: states may be there without a prefix of that name, and the other way
round. A value is replaced as a whole, dropped durably, and as large as the budget allows; there is no
limit on their number. Both wires see the same ones. What a value means, only its owner knows.

A value is the only part of a segment of its own: what is true of parts in files (their checksums, how a
client on this host reads them) is true of states.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pion_grpc.core.blobs import BlobReading, BlobStore, BlobWriter, WrittenBlob
from pion_grpc.core.order import PartOrder
from pion_grpc.core.prefix_store import PrefixStore
from pion_grpc.core.values import (
    Durability,
    ExportedFile,
    check_layer,
    check_lease,
    check_namespace,
    check_number,
    check_text,
)
from pion_grpc.core.workshop import OutOfDate
from pion_grpc.errors import GenerationDiffers, InvalidRequest
from pion_grpc.storage.blobs import Blobs
from pion_grpc.storage.states import StateRow, States
from pion_grpc.storage.transaction import unix_ms
from pion_wire import limits
from pion_wire.framing import PartChunk
from pion_wire.layout import Layout, PartInfo
from pion_wire.segment import SegmentLayout

NUMBER_MAX = (1 << 62) - 1
"""What the catalogue keeps, and can add to another, in 64 bits."""


class StateInfo(NamedTuple):
    """What a value is, in its owner's words."""

    size_bytes: int
    boundary_tokens: int = 0
    description: str = ""
    model_id: str = ""


class StoredStates(NamedTuple):
    """The acknowledgement of a Store."""

    generations: tuple[int, ...]
    """Of the values, in order."""
    durability: Durability


class FoundState(NamedTuple):
    """An open value. Close its reading."""

    info: StateInfo
    generation: int
    reading: BlobReading


class StateExport(NamedTuple):
    """A value for a client on this host that reads its file itself."""

    layer: int
    info: StateInfo
    generation: int
    file: ExportedFile | None
    """None: it is in no segment; an earlier release has written it."""


class _Incoming(NamedTuple):
    """A value whose bytes are coming."""

    layer: int
    info: StateInfo
    order: PartOrder
    writer: BlobWriter


class _Value(NamedTuple):
    """A value that is written, and nobody sees yet."""

    layer: int
    info: StateInfo
    written: WrittenBlob


class StatesUpload:
    """Values of one session on their way into the store, one after the other. Publish or abandon it."""

    def __init__(
        self, states: "RecurrentStates", tenant: str, session: str, durability: Durability
    ) -> None:
        self._states = states
        self._tenant = tenant
        self._session = session
        self._durability = durability
        self._values: list[_Value] = []
        self._incoming: _Incoming | None = None

    def begin(self, session: str, layer: int, info: StateInfo) -> None:
        """Plans the next value.

        Raises:
            InvalidRequest: the one before is not complete, it is of another session, or a name or a
                number is out of range.
            OverBudget, OverQuota: there is no room.
            DiskFull: the one before cannot be written.
        """
        self._end_value()
        _check(session, layer, info)
        if session != self._session:
            raise InvalidRequest("session", "is another than that of the first value")
        if len(self._values) >= limits.NAMES_MAX:
            raise InvalidRequest(
                "layer", f"more than {limits.NAMES_MAX} values", limit=limits.NAMES_MAX
            )
        if any(layer == value.layer for value in self._values):
            raise InvalidRequest("layer", f"{layer} is there twice")
        part = PartInfo("state", layer, info.boundary_tokens, info.size_bytes, info.description)
        segment = SegmentLayout(
            layout=Layout(()),
            row_counts=(),
            token_count=0,
            model_id=info.model_id,
            parts=(part,),
            namespace=session,
        )
        writer = self._states.blobs.begin(self._tenant, info.size_bytes, segment)
        self._incoming = _Incoming(layer, info, PartOrder([info.size_bytes], "bytes"), writer)

    def write(self, chunk: PartChunk) -> None:
        """Takes the next bytes of a value.

        Raises:
            InvalidRequest, ChecksumMismatch: they are not the next ones, or damaged.
            DiskFull: they cannot be written.
        """
        assert self._incoming is not None, "a value begins before its bytes come"
        self._incoming.order.accept(chunk)
        self._incoming.writer.write(chunk.data)

    def write_whole(self, data: bytes | memoryview) -> None:
        """Takes all bytes of a value at once.

        Raises:
            DiskFull: they cannot be written.
        """
        assert self._incoming is not None, "a value begins before its bytes come"
        self._incoming.writer.write(data)

    def publish(self) -> StoredStates:
        """Makes the values visible in place of those before, all of them together.

        Raises:
            InvalidRequest: bytes are missing.
            DiskFull: they cannot be written.
        """
        self._end_value()
        blobs = self._states.blobs
        on_disk = self._durability is Durability.DISK
        try:
            with blobs.workshop.catalog.write(on_disk=on_disk) as transaction:
                generations = tuple(
                    States(transaction).put(
                        self._tenant,
                        self._session,
                        layer,
                        blobs.publish(transaction, written),
                        info.boundary_tokens,
                        info.description,
                        info.model_id,
                    )
                    for layer, info, written in self._values
                )
        except BaseException:
            self.abandon()
            raise
        blobs.workshop.space.sweep()
        return StoredStates(generations, self._durability)

    def abandon(self) -> None:
        """Removes what was written; nobody ever saw it. Twice is once."""
        incoming, self._incoming = self._incoming, None
        values, self._values = self._values, []
        if incoming is not None:
            incoming.writer.abandon()
        for value in values:
            self._states.blobs.abandon(value.written)

    def _end_value(self) -> None:
        if self._incoming is None:
            return
        layer, info, _, writer = self._incoming
        if not writer.complete:
            raise InvalidRequest("bytes", "not all declared bytes of a value came")
        written = writer.finish(on_disk=self._durability is Durability.DISK)
        self._values.append(_Value(layer, info, written))
        self._incoming = None


class RecurrentStates:
    """All operations on states; safe to use from many threads, and from several processes at once."""

    def __init__(self, store: PrefixStore) -> None:
        self._store = store
        self._catalog = store.workshop.catalog
        self.directory = store.directory
        self.blobs: BlobStore = store.blobs

    def begin(
        self,
        tenant: str,
        session: str,
        layer: int,
        info: StateInfo,
        durability: Durability = Durability.PROCESS,
    ) -> StatesUpload:
        """Plans a value; others of the same session may follow it.

        Raises:
            As `StatesUpload.begin` does.
        """
        self._store.space.uses.flush()
        upload = StatesUpload(self, tenant, session, durability)
        upload.begin(session, layer, info)
        return upload

    def store(
        self, tenant: str, session: str, layer: int, data: bytes | memoryview
    ) -> StoredStates:
        """Stores a value that is all there; raises as `begin` and `StatesUpload.publish` do."""
        upload = self.begin(tenant, session, layer, StateInfo(len(data)))
        try:
            upload.write_whole(data)
            return upload.publish()
        except BaseException:
            upload.abandon()
            raise

    def open(self, tenant: str, session: str, layer: int) -> FoundState | None:
        """Opens a value; None if it is not stored. Raises as `opened` does."""
        (found,) = self._open(tenant, session, [layer], [0])
        return found

    @contextlib.contextmanager
    def opened(
        self,
        tenant: str,
        session: str,
        layers: Sequence[int],
        generations: Sequence[int] = (),
    ) -> Iterator[list[FoundState | None]]:
        """Lends values of a session as they are at one moment; None for what is not stored.

        Args:
            tenant, session: whose.
            layers: which.
            generations: of each what it must be of; 0: any. None at all: any of all.

        Raises:
            GenerationDiffers: one was replaced since the generation asked for.
            Corrupt: a file is damaged; its value has been taken out.
        """
        values = self._open(tenant, session, layers, generations or [0] * len(layers))
        with contextlib.ExitStack() as stack:
            for value in filter(None, values):
                stack.callback(value.reading.close)
            yield values

    def _open(
        self, tenant: str, session: str, layers: Sequence[int], generations: Sequence[int]
    ) -> list[FoundState | None]:
        while True:
            with self._catalog.read() as transaction:
                states = [States(transaction).get(tenant, session, layer) for layer in layers]
                blobs = [Blobs(transaction).get(state.blob) if state else None for state in states]
            for layer, state, generation in zip(layers, states, generations, strict=True):
                if state and generation and generation != state.generation:
                    raise GenerationDiffers(
                        f"layer {layer} of {session!r} was replaced: ask for it anew",
                        namespace=session,
                        generation=state.generation,
                    )
            with contextlib.ExitStack() as opened:
                found: list[FoundState | None] = []
                for state, blob in zip(states, blobs, strict=True):
                    if state is None or blob is None:
                        found.append(None)
                        continue
                    try:
                        reading = opened.enter_context(contextlib.closing(self.blobs.open(blob)))
                    except OutOfDate:
                        break  # replaced meanwhile: look again
                    found.append(FoundState(_info(state, reading.size), state.generation, reading))
                else:
                    opened.pop_all()
                    if any(found):
                        self._store.space.uses.note_state(tenant, session)
                    return found

    def export(
        self, tenant: str, session: str, layers: Sequence[int], lease_ms: int
    ) -> list[StateExport]:
        """Names the files of a session's values, of those layers that have one, and leases them.

        Every page of them has been checked.

        Raises:
            InvalidRequest: the lease would be too long.
            Corrupt: a file is damaged; its value has been taken out.
        """
        check_lease(lease_ms)
        while True:
            exported, blobs = [], []
            with self.opened(tenant, session, layers) as values:
                for layer, found in zip(layers, values, strict=True):
                    if found is not None:
                        file = found.reading.exported(self._store.exports)
                        exported.append(StateExport(layer, found.info, found.generation, file))
                        blobs.append(found.reading.id)
            if not blobs:
                return []
            with self._catalog.write() as transaction:
                if Blobs(transaction).lease(blobs, unix_ms() + max(lease_ms, 1)):
                    return exported  # else one was replaced meanwhile: look again

    def drop(self, tenant: str, session: str, layer: int | None = None) -> int:
        """Drops one layer of a session, or all; returns how many there were."""
        with self._catalog.write(removing=True) as transaction:
            dropped = States(transaction).remove(tenant, session, layer)
        if dropped:
            self.blobs.workshop.space.sweep()
        return dropped


def _info(state: StateRow, size: int) -> StateInfo:
    return StateInfo(size, state.boundary_tokens, state.description, state.model_id)


def _check(session: str, layer: int, info: StateInfo) -> None:
    check_namespace(session, "session")
    check_layer(layer)
    check_number("info.boundary_tokens", info.boundary_tokens, NUMBER_MAX)
    check_number("info.size_bytes", info.size_bytes, NUMBER_MAX)
    check_text("info.description", info.description, 0, limits.DESCRIPTION_BYTES_MAX)
    check_text("info.model_id", info.model_id, 0, limits.MODEL_ID_BYTES_MAX)
