"""One store, several processes, two wires, every way out: what is read is one version, whole.

Changes of any kind come in any order, by any process and either wire, and a plain reference keeps what
was acknowledged: rows as their codec stores them, the tokens that they are of, parts, recurrent states.
What is read in between, by a road that chance chooses, is held against it bit for bit. A change that
is refused changes nothing; a process that is killed takes nothing along.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors import safe_open

from pion_client import Client, Encoded, Part, Prefix
from pion_client.errors import InvalidRequest, LayoutDiffers, NotStored, OtherContent
from pion_wire.blocks import common_tokens
from pion_wire.layout import DType, Layout, Side, TensorLayout
from pion_wire.rows import decode_rows, encode_rows, zero_row
from tests.conftest import ServerProcess
from tests.resp.wire import Refused
from tests.resp.wire import Wire as Resp

MODEL = "mlx1:test"
HEADS, DIM = 2, 32
WIDTH = HEADS * DIM
NAMES = ("a", "b", "c", "d", "e")
SESSIONS = ("s", "t")
REFUSALS = (InvalidRequest, LayoutDiffers, NotStored, OtherContent)

PATIENCE_S = 60.0
SNAPSHOTS_MAX = 15
"""Of one prefix there may be one more."""

Row = tuple[bytes, ...]
"""One row as it is stored: its bytes in each array of the codec."""


def _layout(dtype: DType, slots: int, k: str, v: str) -> list[TensorLayout]:
    return [
        TensorLayout(slot, side, HEADS, DIM, dtype, k if side is Side.K else v)
        for slot in range(slots)
        for side in Side
    ]


LAYOUTS = (
    _layout(DType.F16, 2, "raw", "raw"),
    _layout(DType.BF16, 1, "raw", "raw"),
    _layout(DType.F32, 1, "int8", "fp16"),
    _layout(DType.F32, 2, "mlx_affine(4,32,f16)", "turbo4"),
)
FIDELITIES = tuple({Layout(tuple(tensors)).fidelity for tensors in LAYOUTS})
TRUNK = np.arange(220, dtype="<u4")


def _sequences() -> list[bytes]:
    whole = [TRUNK[:count] for count in (1, 63, 64, 65, 128, 150, 220)]
    forks = [
        np.concatenate([TRUNK[:at], np.arange(1_000 * at, 1_000 * at + more, dtype="<u4")])
        for at, more in ((1, 30), (64, 40), (100, 9), (128, 70), (150, 60))
    ]
    return [ids.tobytes() for ids in whole + forks]


SEQUENCES = _sequences()
BOUNDARIES = (64, 90, 128, 135, 150)


class Version(NamedTuple):
    """What one name holds; replaced as a whole, never changed."""

    ids: bytes
    """The tokens whose rows are still as they were stored."""
    tensors: dict[TensorLayout, list[Row]]
    parts: dict[int, bytes]
    """By the boundary at which they are exact."""

    @property
    def row_count(self) -> int:
        """Rows that every tensor has."""
        return min(map(len, self.tensors.values()), default=0)

    def cut(self, count: int) -> "Version":
        """With the tokens, and the parts, of so many rows."""
        ids = self.ids[: 4 * count]
        parts = {at: data for at, data in self.parts.items() if 4 * at <= len(ids)}
        return self._replace(ids=ids, parts=parts)

    def written(self, tensor: TensorLayout, first: int, rows: list[Row]) -> "Version":
        old = self.tensors[tensor]
        zero = tuple(zero_row(tensor, index) for index in range(len(tensor.arrays)))
        gap = [zero] * (first - len(old))
        new = [*old[:first], *gap, *rows, *old[first + len(rows) :]]
        after = self._replace(tensors={**self.tensors, tensor: new})
        return after.cut(first if first < len(old) else after.row_count)

    def restored(self, counts: dict[TensorLayout, int]) -> "Version":
        shorter = {t: rows[: counts.get(t, len(rows))] for t, rows in self.tensors.items()}
        after = self._replace(tensors=shorter)
        return after.cut(after.row_count) if shorter != self.tensors else self


NOTHING = Version(b"", {}, {})


def encoded(tensor: TensorLayout, values: np.ndarray) -> list[Row]:
    """Rows as a codec stores them."""
    arrays = encode_rows(tensor, values.view(np.uint8).reshape(-1).data, tensor.dtype)
    return list(
        zip(
            *(
                [
                    bytes(data[i : i + layout.row_bytes])
                    for i in range(0, len(data), layout.row_bytes)
                ]
                for data, layout in zip(arrays, tensor.arrays, strict=True)
            ),
            strict=True,
        )
    )


def decoded(tensor: TensorLayout, rows: list[Row]) -> np.ndarray:
    """The float32 that a codec makes of stored rows: (rows, width)."""
    arrays = [b"".join(array) for array in zip(*rows, strict=True)] or [b""] * len(tensor.arrays)
    return np.frombuffer(decode_rows(tensor, arrays), np.float32).reshape(-1, WIDTH)


def given(tensor: TensorLayout, rows: list[Row]) -> np.ndarray:
    """What a client hands out: the bits of raw rows, else float32; (heads, rows, head_dim)."""
    if tensor.codec == "raw":
        values = np.frombuffer(b"".join(row for (row,) in rows), tensor.dtype.numpy)
    else:
        values = decoded(tensor, rows)
    return values.reshape(-1, HEADS, DIM).transpose(1, 0, 2)


def to_store(tensor: TensorLayout, rows: list[Row]) -> Any:
    """What a client takes to store just these rows."""
    if tensor.codec == "raw":
        return given(tensor, rows)
    arrays = [
        np.frombuffer(b"".join(row[index] for row in rows), layout.numpy)
        for index, layout in enumerate(tensor.arrays)
    ]
    shaped = [
        np.moveaxis(array.reshape(len(rows), *layout.row_shape), 0, -2)
        for array, layout in zip(arrays, tensor.arrays, strict=True)
    ]
    return Encoded(tensor.codec, HEADS, DIM, tuple(shaped), tensor.dtype)


class Process:
    """One server of several on a directory, and every way to it."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.clients = [
            Client(server.address, timeout_s=PATIENCE_S),
            Client(server.address, timeout_s=PATIENCE_S, verify=True),
            Client(server.address, timeout_s=PATIENCE_S, export=False),
        ]
        self.resp = Resp(server.ready["resp"], PATIENCE_S)

    def end(self) -> None:
        for client in self.clients:
            client.close()
        self.resp.close()
        self.server.kill()


class Differential:
    """Changes and reads that chance chooses, and the reference that they are held against."""

    def __init__(self, start: Callable[[int], Process], seed: int) -> None:
        self.start = start
        self.processes = [start(number) for number in range(2)]
        self.random = random.Random(seed)
        self.noise = np.random.default_rng(seed)
        self.names: dict[str, Version] = {}
        self.states: dict[str, dict[int, bytes]] = {session: {} for session in SESSIONS}
        self.snapshots: dict[int, tuple[str, dict[TensorLayout, int]]] = {}
        self.history: list[str] = []

    def run(self, steps: int, *, kills: int = 0) -> None:
        """Goes so many steps; some of the first ones kill a process, which is started again."""
        changes = [self.store] * 4 + [self.write] * 5 + [self.save, self.drop, self.put_states]
        changes += [self.snapshot, self.restore, self.restore]
        reads = (
            [self.fetch] * 4 + [self.match] * 2 + [self.over_resp, self.copied, self.fetch_states]
        )
        deaths = {self.random.randrange(steps) for _ in range(kills)}
        for step in range(steps):
            if step in deaths:
                self.die()
            do = self.random.choice(changes if self.random.random() < 0.4 else reads)
            try:
                do()
            except BaseException as error:
                error.add_note("\n".join(self.history[-30:]))
                raise

    @property
    def process(self) -> Process:
        return self.random.choice(self.processes)

    @property
    def client(self) -> Client:
        return self.random.choice(self.process.clients)

    def some_name(self) -> str:
        return self.random.choice(sorted(self.names) or NAMES)

    def change(
        self,
        what: str,
        name: str,
        version: Version,
        call: Callable[..., Any],
        *args: Any,
        **fields: Any,
    ) -> None:
        """Calls, and notes what a name holds then, unless it is refused."""
        self.history.append(what)
        try:
            answer = call(*args, **fields)
        except REFUSALS as error:
            self.history[-1] += f": {error}"
            return
        if isinstance(answer, Refused):
            self.history[-1] += f": {answer.text}"
            return
        self.names[name] = version
        if version is NOTHING:
            del self.names[name]

    # -- changes

    def rows(self, tensor: TensorLayout, count: int) -> list[Row]:
        values = self.noise.standard_normal((count, WIDTH)).astype(np.float16)
        return encoded(tensor, values.astype(tensor.dtype.numpy))

    def store(self) -> None:
        name, ids = self.random.choice(NAMES), self.random.choice(SEQUENCES)
        count, base, parent = len(ids) // 4, 0, ""
        tensors = {t: self.rows(t, count) for t in self.random.choice(LAYOUTS)}
        parts: dict[int, bytes] = {}
        common = {other: common_tokens(self.names[other].ids, ids) for other in self.names}
        if any(common.values()) and self.random.random() < 0.7:
            parent = max(common, key=common.__getitem__)
            base = self.random.choice([common[parent], self.random.randint(1, common[parent])])
            shared = self.names[parent]
            tensors = {
                t: [*rows[:base], *self.rows(t, count - base)] for t, rows in shared.tensors.items()
            }
            parts = shared.cut(base).parts
        # Of its own: behind what it shares, and at its end.
        own = {at for at in self.random.sample(BOUNDARIES, 2) if base < at <= count}
        brought = {at: self.noise.bytes(9) for at in sorted(own | {count})}
        layers: dict[int, list[Any]] = {}
        for tensor, rows in tensors.items():
            layers.setdefault(tensor.slot, []).append(to_store(tensor, rows[base:]))
        replace = self.random.random() < 0.6
        if not replace and self.names.get(name, NOTHING).ids == ids:
            return  # bytes are not compared
        self.change(
            f"store {name} {count} {replace=} {parent=} {base=} parts {[*brought]}",
            name,
            Version(ids, tensors, {**parts, **brought}),
            self.client.store,
            name,
            layers=[(k, v) for k, v in layers.values()],
            token_ids=ids,
            model=MODEL,
            parent=parent,
            base=base,
            replace=replace,
            parts=[Part("state", 0, at, data) for at, data in brought.items()],
        )

    def write(self) -> None:
        if not self.names:
            return
        name = self.some_name()
        version = self.names[name]
        tensor = min(version.tensors, key=lambda tensor: len(version.tensors[tensor]))
        if self.random.random() < 0.3:
            tensor = self.random.choice(list(version.tensors))
        had = len(version.tensors[tensor])
        first = self.random.choice([had, had, had, had + 3, max(had - 5, 0), 0])
        rows = self.rows(tensor, self.random.choice([1, 8, 30]))
        change = partial(
            self.change,
            f"write {name} {tensor.name} at {first} of {had}: {len(rows)} rows",
            name,
            version.written(tensor, first, rows),
        )
        if self.random.random() < 0.5 and tensor.codec in ("raw", "fp16"):
            words = f"{name}_p{tensor.side}", tensor.slot, first, len(rows)
            change(self.process.resp, "V.STOREBATCH", *words, decoded(tensor, rows).tobytes())
        else:
            change(
                self.client.write_rows,
                name,
                slot=tensor.slot,
                side=tensor.side,
                first_row=first,
                rows=to_store(tensor, rows),
            )

    def save(self) -> None:
        if self.names:
            name = self.some_name()
            self.change(f"save {name}", name, self.names[name], self.client.save, name)

    def drop(self) -> None:
        if self.names:
            name = self.some_name()
            change = partial(self.change, f"drop {name}", name, NOTHING)
            if self.random.random() < 0.5:
                change(self.process.resp, "KV.PREFIX.DROP", name)
            else:
                change(self.client.drop, name)

    def snapshot(self) -> None:
        if self.names and len(self.snapshots) < SNAPSHOTS_MAX:
            name = self.some_name()
            counts = {tensor: len(rows) for tensor, rows in self.names[name].tensors.items()}
            if self.random.random() < 0.5:
                self.snapshots[self.client.snapshot(name)] = name, counts
            else:
                of_k = {tensor: n for tensor, n in counts.items() if tensor.side is Side.K}
                self.snapshots[self.process.resp("V.SNAPSHOT", f"{name}_pk")] = name, of_k
            self.history.append(f"snapshot {name} {max(self.snapshots)}")

    def restore(self) -> None:
        known = [number for number in self.snapshots if self.snapshots[number][0] in self.names]
        if known:
            number = self.random.choice(known)
            name, counts = self.snapshots[number]
            restored = self.names[name].restored(counts)
            change = partial(self.change, f"restore {name} {number}", name, restored)
            if all(tensor.side is Side.K for tensor in counts):
                change(self.process.resp, "V.RESTORE", f"{name}_pk", number)
            else:
                change(self.client.restore, name, number)

    def put_states(self) -> None:
        session = self.random.choice(SESSIONS)
        values = {
            layer: self.noise.bytes(self.random.choice([1, 500, 300_000]))
            for layer in self.random.sample(range(3), self.random.randint(1, 3))
        }
        self.history.append(f"states {session} {sorted(values)}")
        if self.random.random() < 0.5:
            self.client.states.store_all(session, values)
        else:
            for layer, data in values.items():
                assert self.process.resp("SSM.PREFIX.STORE", session, layer, data) == "OK"
        self.states[session] |= values

    def die(self) -> None:
        number = self.random.randrange(len(self.processes))
        self.history.append(f"kill {number}")
        self.processes[number].end()
        self.processes[number] = self.start(number)

    # -- reads

    def fetch(self) -> None:
        """All of a name, some of its rows or slots, or as far as there is a part."""
        name = self.random.choice(NAMES)
        version, options = self.names.get(name, NOTHING), dict[str, Any]()
        begin, end = 0, version.row_count
        if end and self.random.random() < 0.4:
            end = self.random.randint(1, end)
            begin = self.random.randint(0, end)
            options["rows"] = begin, end
        if self.random.random() < 0.2:
            options["slots"] = [0]
            tensors = {t: rows for t, rows in version.tensors.items() if t.slot == 0}
            version = version._replace(tensors=tensors)
        if self.random.random() < 0.4:
            options["part_kinds"] = ["state"]
            end = end if "rows" in options else max(version.parts, default=0)
            version = version if end in version.parts else NOTHING
        prefix = self.client.fetch(name, **options)
        self.check(prefix, version, begin, end, parts="part_kinds" in options)

    def match(self) -> None:
        """The longest match, with a part or without, and what its lease brings."""
        ids = self.random.choice(SEQUENCES)[: 4 * self.random.randint(1, 220)]
        kinds = ["state"] if self.random.random() < 0.4 else []
        found = self.client.match(
            model=MODEL, token_ids=ids, fidelities=FIDELITIES, part_kinds=kinds, lease_ms=60_000
        )
        common = [common_tokens(version.ids, ids) for version in self.names.values()]
        assert found.longest_tokens == max(common, default=0)
        assert found.hit or kinds or not any(common)
        if found.hit:
            rows = 0, found.token_count
            prefix = self.client.fetch(lease_id=found.lease_id, rows=rows, part_kinds=kinds)
            self.check(prefix, self.names[found.namespace], *rows, parts=bool(kinds))
            assert prefix is not None
            assert prefix.packed_token_ids == ids[: 4 * found.token_count]

    def check(
        self, prefix: Prefix | None, version: Version, begin: int, end: int, *, parts: bool
    ) -> None:
        if not version.tensors:
            assert prefix is None
            return
        assert prefix is not None
        assert prefix.rows == (begin, end)
        known = len(version.ids) >= 4 * end
        assert prefix.packed_token_ids == (version.ids[: 4 * end] if known else b"")
        brought = {part.boundary_tokens: bytes(part.data) for part in prefix.parts}
        assert brought == ({end: version.parts[end]} if parts else {})
        arrays = [array for pair in prefix.layers for array in pair]
        assert len(arrays) == len(version.tensors)
        for array, (tensor, rows) in zip(arrays, version.tensors.items(), strict=True):
            expected = given(tensor, rows[begin:end])
            assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
            assert array.tobytes() == expected.tobytes(), f"other rows of {tensor.name}"

    def over_resp(self) -> None:
        """One side of a name: rows beyond a layer's end are zeros, a layer without them is nil."""
        name, side = self.random.choice(NAMES), self.random.choice(list(Side))
        begin, end = sorted(self.random.sample(range(230), 2))
        native = ["FMT", "NATIVE"] if self.random.random() < 0.5 else []
        answer = self.process.resp("V.FETCH", f"{name}_p{side}", "BATCH", begin, end, *native)
        if name not in self.names:
            assert answer == Refused("ERR session not found")
            return
        expected: list[bytes | None] = []
        for tensor, rows in self.names[name].tensors.items():
            if tensor.side is side:
                values = decoded(tensor, rows[begin:end])
                if native and (tensor.codec == "fp16" or tensor.dtype is DType.F16):
                    values = values.astype(np.float16)
                zeros = bytes((end - begin) * WIDTH * values.itemsize - values.nbytes)
                expected.append(values.tobytes() + zeros if len(rows) > begin else None)
        assert answer == expected

    def copied(self) -> None:
        """Both sides of a name in a file, head by head as binary16."""
        name = self.random.choice(NAMES)
        version = self.names.get(name, NOTHING)
        if not version.row_count:
            return
        begin, end = sorted(self.random.sample(range(version.row_count + 1), 2))
        shape = len(version.tensors) // 2, HEADS, DIM
        path = self.process.resp("V.EXPORT", f"{name}_pk", f"{name}_pv", begin, end, *shape)
        if isinstance(path, Refused):
            assert "binary16 cannot hold" in path.text
            return
        with safe_open(path.decode(), "np") as file:
            for tensor, rows in version.tensors.items():
                values = decoded(tensor, rows[begin:end]).reshape(-1, HEADS, DIM)
                expected = values.transpose(1, 0, 2)[None].astype(np.float16)
                copy = file.get_tensor(f"{tensor.side}.{tensor.slot}")
                assert copy.tobytes() == expected.tobytes(), f"other rows of {tensor.name}"

    def fetch_states(self) -> None:
        session, layers = self.random.choice(SESSIONS), self.random.sample(range(3), 2)
        expected = {n: data for n, data in self.states[session].items() if n in layers}
        fetched = self.client.states.fetch_all(session, layers)
        assert {layer: bytes(state.data) for layer, state in fetched.items()} == expected
        answer = self.process.resp("SSM.PREFIX.FETCH", session, layers[0])
        assert answer == expected.get(layers[0])


@pytest.fixture
def differential(short_tmp: Path) -> Iterator[Callable[[int], Differential]]:
    """Starts two servers on a directory of their own; they end with the test."""
    begun: list[Differential] = []

    def begin(seed: int) -> Differential:
        directory = short_tmp / f"{seed}"

        def start(number: int) -> Process:
            place = f"unix:{directory}.{number}"
            return Process(
                ServerProcess(directory, "--resp", f"{place}.resp", listen=f"{place}.grpc")
            )

        begun.append(Differential(start, seed))
        return begun[-1]

    yield begin
    for one in begun:
        for process in one.processes:
            process.end()


def test_nothing_but_what_was_acknowledged_comes_out(
    differential: Callable[[int], Differential],
) -> None:
    differential(1).run(200)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
def test_nothing_but_what_was_acknowledged_comes_out_whoever_dies(
    differential: Callable[[int], Differential], seed: int
) -> None:
    differential(seed).run(600, kills=2)
