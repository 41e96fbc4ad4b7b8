"""`export` and `import`: one prefix as one file, out of a server and into one.

The file is a segment (`pion_wire.segment`) with base 0 and no parent: rows, parts and token ids of the
whole chain. The header and every page of 256 KiB have a checksum, and any safetensors tool can read it.

The one decision: rows pass through as the bytes they are stored as, chunk by chunk. This module reads
and writes the streams itself instead of asking the client for arrays, so that a prefix larger than
memory can be moved, and one in a lossy codec keeps its codes instead of becoming values that nobody
stored. A file is checked completely before its first byte is sent, and again while it is sent.
"""

import argparse
import contextlib
import functools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from pion_client import Client, answers
from pion_client.calls import Calls
from pion_client.connection import STREAM_TIMEOUT_S, Connection, Watchdog
from pion_client.errors import BadAnswer, Unavailable
from pion_client.fetching import Announced, announced_by
from pion_client.routes import by_name
from pion_client.storing import Content, Framed
from pion_client.values import PrefixInfo, Stored
from pion_grpc import errors as core_errors
from pion_grpc.cli.connecting import Wire, connected, one_node_asked, wired
from pion_grpc.cli.failure import CommandFailed
from pion_grpc.cli.output import Advance, printable, progress, show, size
from pion_grpc.cli.restoring import restore
from pion_grpc.core.checkup import PageReader
from pion_grpc.core.order import PartOrder, RowOrder
from pion_grpc.storage.files import Files
from pion_grpc.storage.pages import CheckedRun, OpenFile, SegmentWriter
from pion_grpc.storage.store_snapshot import is_store_snapshot
from pion_wire import framing
from pion_wire.blocks import route_key
from pion_wire.framing import FrameError, HeaderBytes, PartChunk, RowChunk
from pion_wire.layout import PartInfo
from pion_wire.messages import layout_to_message, part_to_message
from pion_wire.segment import (
    SegmentError,
    SegmentLayout,
    header_length,
    parse_header,
)
from pion_wire.v1 import prefix_store_pb2 as pb
from pion_wire.v1 import types_pb2

STALL_S = 30.0
"""A stream on which nothing arrives for this long is given up."""

Chunk = RowChunk | PartChunk


def export_prefix(options: argparse.Namespace) -> int:
    """Writes one prefix to a file."""
    target: Path = options.file
    _check_target(target, force=options.force)
    with connected(options) as client, wired(options) as wire:
        info = _stored(client, options)
        what = f"exporting {info.namespace}"
        with progress(options, what) as advance, _writing(target) as scratch:
            written = _download(wire.connection, info, scratch, advance)
            _check_target(target, force=options.force)  # it may have come meanwhile

    value = {
        "namespace": info.namespace,
        "file": str(target),
        "token_count": info.token_count,
        "token_ids_count": written.token_ids_count,
        "file_bytes": written.file_bytes,
        "fidelity": info.fidelity,
    }

    def render(console: Console) -> None:
        console.print(
            f"{printable(info.namespace)}: {info.token_count:,} tokens, {size(written.file_bytes)}, "
            f"written to {printable(str(target))}"
        )
        if written.token_ids_count != info.token_count:
            console.print(
                "it was stored without token ids: tools can read the file, but `import` cannot store it"
            )

    show(options, value, render)
    return 0


def import_file(options: argparse.Namespace) -> int:
    """Stores the prefix of a file; with `--data`, makes a data directory of a snapshot."""
    if options.data is None:
        return _import_prefix(options)
    if options.namespace is not None or options.replace:
        raise CommandFailed(
            "--namespace and --replace are for a single prefix; with --data, a whole store is "
            "restored under the names it had",
            reason="INVALID",
        )
    return restore(options)


def _import_prefix(options: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        with progress(options, "checking") as advance:
            source = stack.enter_context(opened(options.file))
            _check_pages(source, advance)
        wire = stack.enter_context(wired(options))
        advance = stack.enter_context(progress(options, "storing"))
        name = options.namespace or source.segment.namespace
        stored = _upload(wire, source, name, replace=options.replace, advance=advance)

    value = {
        "file": str(options.file),
        "namespace": stored.namespace,
        "already_stored": stored.already_stored,
        "token_count": stored.token_count,
        "stored_bytes": stored.stored_bytes,
        "generation": stored.generation,
        "durability": stored.durability,
    }

    def render(console: Console) -> None:
        what = "was already stored" if stored.already_stored else "stored, and synced to disk"
        console.print(f"{printable(stored.namespace)}: {stored.token_count:,} tokens; {what}")

    show(options, value, render)
    return 0


# Out of a server


class _Written(NamedTuple):
    file_bytes: int
    token_ids_count: int


def _stored(client: Client, options: argparse.Namespace) -> PrefixInfo:
    """Returns what is stored under a name. `list` counts neither a hit nor a miss."""
    name: str = options.name
    found = next(client.list(name), None)  # of all names that begin so, itself is the first
    if found is None or found.namespace != name:
        text = f"nothing is stored as {name!r}: `pion-grpc ls` shows what is"
        if hint := one_node_asked(options):
            text = f"{text}; {hint}"
        raise CommandFailed(text, reason="NOT_STORED")
    if not found.token_count:
        raise CommandFailed(f"{name!r} holds no rows yet", reason="NO_ROWS")
    return found


def _check_target(target: Path, *, force: bool) -> None:
    """Refuses what must not be replaced: a rename would replace a device or a link by a file."""
    try:
        mode = target.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not target.parent.is_dir():
            raise CommandFailed(f"{target.parent} is not a directory", reason="INVALID") from None
        return
    except OSError as error:
        raise CommandFailed(
            f"{target} cannot be written: {error.strerror}", reason="INVALID"
        ) from error
    if stat.S_ISDIR(mode):
        raise CommandFailed(f"{target} is a directory: name a file in it", reason="INVALID")
    if not stat.S_ISREG(mode):
        raise CommandFailed(
            f"{target} is not a regular file and is left as it is: name another", reason="INVALID"
        )
    if not force:
        raise CommandFailed(f"{target} exists: --force replaces it", reason="INVALID")


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """Yields a path beside `target` to write to; the complete file gets the target's name."""
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    files = Files()
    try:
        yield scratch
        files.rename(scratch, target)
        files.sync_directory(target.parent)
    except OSError as error:
        raise CommandFailed(
            f"{target} cannot be written: {error.strerror}", reason="DISK"
        ) from error
    except core_errors.DiskFull as error:
        raise CommandFailed(f"no space for {target}", reason="DISK_FULL") from error
    finally:
        files.unlink(scratch)


class _Stream(NamedTuple):
    """A Fetch in progress: what was announced, and the chunks that follow."""

    announced: Announced
    chunks: Iterator[Chunk]


def _download(connection: Connection, info: PrefixInfo, path: Path, advance: Advance) -> _Written:
    """Writes the whole chain of a prefix as one segment."""
    parts = sorted(info.parts, key=lambda part: part.boundary_tokens)
    with _fetching(connection, _request(info, types_pb2.RowRange(end=info.token_count))) as rows:
        if rows.announced.layout != info.layout:
            raise BadAnswer("the server would not send the rows as they are stored")
        segment = SegmentLayout(
            layout=info.layout,
            row_counts=(info.token_count,) * len(info.layout.tensors),
            token_count=len(rows.announced.token_ids) // 4,
            model_id=info.model,
            parts=tuple(parts),
            namespace=info.namespace,
        )
        writer = SegmentWriter(Files(), path, segment)
        done = 0
        try:
            for data in _data(connection, info, rows, parts):
                writer.write(data)
                done += len(data)
                advance(done, segment.file_bytes)
            writer.finish(on_disk=True)
        finally:
            writer.abandon()
    return _Written(segment.file_bytes, segment.token_count)


def _data(
    connection: Connection, info: PrefixInfo, rows: _Stream, parts: list[PartInfo]
) -> Iterator[bytes | memoryview]:
    """Yields the data of the segment, in the order of the file."""
    yield from _in_order(rows.chunks, RowOrder(info.layout, 0, info.token_count))
    for boundary in sorted({part.boundary_tokens for part in parts}):
        wanted = [part for part in parts if part.boundary_tokens == boundary]
        # No rows, only the parts that are exact after this many tokens.
        nothing = types_pb2.RowRange(begin=boundary, end=boundary)
        with _fetching(connection, _request(info, nothing, wanted)) as stream:
            if list(stream.announced.parts) != wanted:
                raise BadAnswer("the server does not send the parts that it lists")
            yield from _in_order(stream.chunks, PartOrder([part.size_bytes for part in wanted]))
    yield rows.announced.token_ids


def _request(
    info: PrefixInfo, rows: types_pb2.RowRange, parts: "list[PartInfo] | None" = None
) -> pb.PrefixStoreFetchRequest:
    return pb.PrefixStoreFetchRequest(
        namespace=info.namespace,
        generation=info.generation,
        rows=rows,
        codecs=sorted({tensor.codec for tensor in info.layout.tensors}),
        part_kinds=sorted({part.kind for part in parts or ()}),
    )


@contextlib.contextmanager
def _fetching(connection: Connection, request: pb.PrefixStoreFetchRequest) -> Iterator[_Stream]:
    # Where all nodes are known, the one that has it is known to none but itself.
    away: Unavailable | None = None
    for route in connection.everywhere or (by_name(request.namespace),):
        with contextlib.ExitStack() as stack:
            try:
                stream = stack.enter_context(_asked(connection, request, route))
            except Unavailable as error:
                away = error  # the others may have it
                continue
            if stream is not None:
                yield stream
                return
    raise away or CommandFailed(
        f"{request.namespace!r} has just been dropped, or is on a node that was not asked",
        reason="NOT_STORED",
    )


@contextlib.contextmanager
def _asked(
    connection: Connection, request: pb.PrefixStoreFetchRequest, route: str
) -> Iterator[_Stream | None]:
    """Yields what the node of a route has; None if it has nothing of that name."""
    watchdog = Watchdog(STALL_S)
    with connection.calling() as stubs:
        call: Any = stubs.fetch(
            request.SerializeToString(),
            timeout=STREAM_TIMEOUT_S,
            metadata=connection.metadata(route),
        )
        with watchdog.over(call):
            messages = _messages(call, watchdog)
            header = next(messages, None)
            if not isinstance(header, HeaderBytes):
                raise BadAnswer("the stream does not begin with a header")
            message = pb.PrefixStoreFetchHeader.FromString(bytes(header.message))
            yield _Stream(announced_by(message), _chunks(messages)) if message.found else None


def _messages(call: Any, watchdog: Watchdog) -> Iterator[HeaderBytes | Chunk]:
    for message in call:
        watchdog.touch()
        try:
            yield framing.parse_message(message)
        except FrameError as error:
            raise BadAnswer(str(error)) from error


def _chunks(messages: Iterator[HeaderBytes | Chunk]) -> Iterator[Chunk]:
    for message in messages:
        if isinstance(message, HeaderBytes):
            raise BadAnswer("a second header came")
        yield message


def _in_order(chunks: Iterator[Chunk], order: RowOrder | PartOrder) -> Iterator[bytes | memoryview]:
    """Yields the data of all chunks, in the right order and with the right checksums."""
    for chunk in chunks:
        try:
            if isinstance(order, RowOrder) and isinstance(chunk, RowChunk):  # noqa: SIM114
                order.accept(chunk)
            elif isinstance(order, PartOrder) and isinstance(chunk, PartChunk):
                order.accept(chunk)
            else:
                raise BadAnswer(f"a {type(chunk).__name__} came out of turn")
        except core_errors.PionError as error:
            raise BadAnswer(f"what the server sent is not what it announced: {error}") from error
        yield chunk.data
    if not order.complete:
        raise BadAnswer("the stream ended before everything that was announced came")


# Into a server


class Source(NamedTuple):
    """An open file whose header is sound; its pages are checked as they are read."""

    path: Path
    segment: SegmentLayout
    run: CheckedRun


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Source]:
    """Opens a file that `export` wrote.

    Raises:
        CommandFailed: it is not such a file, or has changed since it was written.
    """
    try:
        file = OpenFile(path)
    except OSError as error:
        raise CommandFailed(
            f"{path} cannot be opened: {error.strerror}", reason="INVALID"
        ) from error
    except core_errors.Unreadable as error:
        raise CommandFailed(error.problem, reason="INVALID") from error
    with contextlib.closing(file):
        if not stat.S_ISREG(os.fstat(file.descriptor).st_mode):
            raise CommandFailed(f"{path} is not a regular file", reason="INVALID")
        if is_store_snapshot(path):
            raise CommandFailed(
                f"{path} is a snapshot of a whole store: add --data DIR to make a data directory of it",
                reason="INVALID",
            )
        try:
            length = header_length(file.read(0, 8))
            segment = parse_header(file.read(8, length))
            actual = os.fstat(file.descriptor).st_size
            if actual != segment.file_bytes:
                raise SegmentError(f"{actual} bytes long, its header says {segment.file_bytes}")
            table = segment.arrays["crc32c"]
            checksums = file.read(segment.data_offset + table.begin, table.end - table.begin)
            run = CheckedRun(file, segment.data_offset, segment.paged_bytes, checksums)
        except (SegmentError, core_errors.Corrupt) as error:
            raise _refused(path, error) from error
        yield Source(path, segment, run)


def _check_pages(source: Source, advance: Advance) -> None:
    """Reads every page.

    Raises:
        CommandFailed: a page has changed since it was written.
    """
    try:
        PageReader(advance, source.run.size).check(source.run)
    except core_errors.Corrupt as error:
        raise _refused(source.path, error) from error


def _refused(path: Path, error: Exception) -> CommandFailed:
    text = printable(str(error))
    return CommandFailed(
        f"{path} is not what `pion-grpc export` wrote, and nothing was stored: {text}",
        reason="CORRUPT",
    )


def _upload(
    wire: Wire, source: Source, namespace: str, *, replace: bool, advance: Advance
) -> Stored:
    """Stores the prefix of a file; it is on stable storage when this returns."""
    segment = source.segment
    own_rows = segment.token_count - segment.base
    if not segment.token_count or set(segment.row_counts) - {own_rows}:
        raise CommandFailed(
            f"{source.path} cannot be stored: it does not have a token id for each row, because "
            "its rows were written without token ids",
            reason="INVALID",
        )
    ids = source.segment.arrays["token_ids"]
    token_ids = bytes(source.run.read(ids.begin, ids.end))
    header = pb.PrefixStoreStoreHeader(
        namespace=namespace,
        model_id=segment.model_id,
        token_ids=token_ids,
        layout=layout_to_message(segment.layout) if segment.layout.tensors else None,
        parent_namespace=segment.parent,
        base=segment.base,
        replace=replace,
        durability=types_pb2.DURABILITY_DISK,
        parts=[part_to_message(part) for part in segment.parts],
    )
    messages = functools.partial(_messages_of, header.SerializeToString(), source)
    calls = Calls(wire.connection, STREAM_TIMEOUT_S, STALL_S)
    try:
        answer = calls.send(
            "store",
            Content(ids.begin, messages),  # before the token ids there are rows and parts
            route=route_key(wire.tenant, segment.model_id, token_ids),
            deadline=calls.stream_deadline(None),
            progress=advance,
        )
    except core_errors.Corrupt as error:  # it has changed since it was checked
        raise _refused(source.path, error) from error
    return answers.stored(pb.PrefixStoreStoreResponse.FromString(answer))


def _messages_of(header: bytes, source: Source) -> Iterator[Framed]:
    segment, run = source.segment, source.run
    yield Framed(framing.frame_header(header))
    for tensor_index, tensor in enumerate(segment.layout.tensors):
        for array_index, array in enumerate(tensor.arrays):
            entry, row = segment.arrays[tensor.name + array.suffix], segment.base
            if entry.begin == entry.end:
                continue
            for data in run.chunks(entry.begin, entry.end, array.row_bytes):
                count = len(data) // array.row_bytes
                framed = framing.frame_rows(tensor_index, array_index, row, count, data)
                yield Framed(framed, len(data))
                row += count
    for index, part in enumerate(segment.parts):
        begin = segment.arrays[f"part.{index}"].begin
        offset = 0
        for data in run.chunks(begin, begin + part.size_bytes, 1):
            yield Framed(framing.frame_part(index, offset, data), len(data))
            offset += len(data)
