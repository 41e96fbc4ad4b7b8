"""The two classes of `pion-lmcache`, over gRPC: `PionStore` for rows, `LMCacheRemoteBackend` for blobs.

A program written for that package runs after changing its import and its port. What these classes store
is ordinary: a namespace of `PionStore` is a prefix that grows row by row, with one head of `kv_dim`, as
clients of the RESP wire make it; a blob is a prefix with one part and no rows. Knows the client;
neither LMCache itself, which is not needed, nor the wire.

The one decision: every server answers for every prefix, so there is no owner to be redirected to.
`auto_redirect` is accepted and changes nothing, and `owner` only tells whether something is stored.
"""

import contextlib
import hashlib
from typing import Any, Self

import numpy as np

from pion_client.client import Client
from pion_client.errors import LayoutDiffers, NotStored, PionError, RowsOutOfRange
from pion_client.values import Part, PrefixInfo
from pion_wire import codecs, limits
from pion_wire.layout import DType, Layout, LayoutError, Side, TensorLayout

BLOB_MODEL = "pion-lmcache/blob"
"""The model id of blobs, which no model has computed: nothing else ever matches them."""
BLOB_KIND = "blob"
READ_ROWS_MAX = limits.SCATTERED_ROWS_MAX


class _Connected:
    """A client of one's own, or a given one."""

    def __init__(
        self,
        host: str,
        port: int,
        address: str | None,
        client: Client | None,
        options: dict[str, Any],
    ) -> None:
        self._owned = contextlib.ExitStack()
        self._client = client or self._owned.enter_context(
            Client(address or f"{host}:{port}", **options)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the client, unless it was given."""
        self._owned.close()


class PionStore(_Connected):
    """K and V of prefixes, layer by layer, as float32 arrays of (tokens, kv_dim).

    Args:
        host, port: of the server; or instead
        address: `host:port` or `unix:/path`; or instead
        client: a client to use; it is not closed here.
        vquant: how rows of both sides are stored: any codec; "raw" keeps float32.
        auto_redirect: accepted without effect: every server has every prefix.
        tenant_prefix: put before every namespace.
        options: of the client, such as `tenant` and `password`.

    Raises:
        ValueError: `vquant` is not a codec.
    """

    redirect_count = 0
    """Nothing was ever redirected."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 50051,
        vquant: str = "fp16",
        client: Client | None = None,
        auto_redirect: bool = True,
        *,
        tenant_prefix: str = "",
        address: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(host, port, address, client, options)
        codecs.parse(vquant)
        self._layouts: dict[
            str, Layout
        ] = {}  # of namespaces that were registered or written to here
        self.vquant = vquant
        self.auto_redirect = auto_redirect
        self.tenant_prefix = tenant_prefix

    def register(self, namespace: str, kv_dim: int, vquant: str | None = None) -> None:
        """Declares a namespace before it has rows; if it is already declared like this, nothing changes.

        Args:
            namespace: its name, without `tenant_prefix`.
            kv_dim: values in a row.
            vquant: instead of the store's.

        Raises:
            ValueError: the codec cannot take rows of this width; the text names both.
            LayoutDiffers: the namespace has rows of another width or codec.
        """
        codec = vquant or self.vquant
        try:
            layout = Layout(tuple(_tensor(0, side, kv_dim, codec) for side in Side))
        except LayoutError as error:
            raise ValueError(f"vquant={codec!r}, kv_dim={kv_dim}: {error.message}") from error
        self._layouts.pop(namespace, None)
        try:
            self._client.register(self._name(namespace), layout=layout)
        except LayoutDiffers:  # or it has more layers by now
            known = self._info(namespace)
            wanted = {(kv_dim, str(codecs.parse(codec)))}
            if known is None or _forms(known) != wanted:
                raise
        self._layouts[namespace] = layout

    def lookup(self, namespace: str) -> bool:
        """Whether something is stored or declared there."""
        return self._info(namespace) is not None

    def store_layer(
        self, namespace: str, side: str, layer: int, token_offset: int, tensor_fp32: np.ndarray
    ) -> None:
        """Writes rows of one layer of a registered namespace.

        They are visible when this returns, and survive if the server is killed.

        Args:
            namespace: a registered one.
            side: "K" or "V".
            layer: which.
            token_offset: the first row; a gap before it reads as zeros.
            tensor_fp32: (tokens, kv_dim).

        Raises:
            ValueError: shape or values cannot be stored.
            NotStored: the namespace is not registered.
        """
        rows = np.asarray(tensor_fp32, np.float32)
        if rows.ndim != 2:
            raise ValueError(f"shape {rows.shape} is not (tokens, kv_dim)")
        if not len(rows):
            return
        which = _side(side)
        self._client.write_rows(
            self._name(namespace),
            slot=layer,
            side=which,
            first_row=token_offset,
            rows=rows[np.newaxis],
            codec=self._codec(namespace, layer, which),
        )

    def fetch_layer(
        self,
        namespace: str,
        side: str,
        layer: int,
        token_start: int,
        token_end: int,
        kv_dim: int,
    ) -> np.ndarray:
        """Returns rows of one layer as float32, (token_end - token_start, kv_dim).

        Rows beyond the last one are zeros.

        Raises:
            ValueError: the range is empty, or rows have another width.
            NotStored: none of the rows exists.
        """
        if token_end <= token_start:
            raise ValueError(f"there are no rows from {token_start} to {token_end}")
        numbers = np.arange(token_start, token_end)
        found = []
        for first in range(0, len(numbers), READ_ROWS_MAX):
            some = numbers[first : first + READ_ROWS_MAX]
            rows = self._client.read_rows(
                self._name(namespace), slot=layer, side=_side(side), rows=some
            )
            if rows is None and not first:
                raise NotStored(f"{namespace!r} has none of these rows in layer {layer}")
            found.append(
                np.zeros((len(some), kv_dim), np.float32) if rows is None else _flat(rows, kv_dim)
            )
        return found[0] if len(found) == 1 else np.concatenate(found)

    def store_prefix(
        self,
        namespace: str,
        K: np.ndarray,  # noqa: N803 - as in the package that this stands for
        V: np.ndarray,  # noqa: N803
        token_offset: int = 0,
        kv_dim: int | None = None,
        vquant: str | None = None,
    ) -> None:
        """Registers a namespace and writes all layers, each side (layers, tokens, kv_dim).

        Raises:
            ValueError: the shapes differ from each other, or from this one.
            As `register` and `store_layer` do.
        """
        if K.shape != V.shape or K.ndim != 3 or kv_dim not in (None, K.shape[-1]):
            raise ValueError(f"{K.shape} and {V.shape} are not both (layers, tokens, {kv_dim})")
        self.register(namespace, K.shape[-1], vquant)
        for layer, (keys, values) in enumerate(zip(K, V, strict=True)):
            self.store_layer(namespace, "K", layer, token_offset, keys)
            self.store_layer(namespace, "V", layer, token_offset, values)

    def fetch_prefix(
        self, namespace: str, n_layers: int, n_tokens: int, kv_dim: int, token_offset: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns K and V of the first layers, each (n_layers, n_tokens, kv_dim), as float32.

        Rows beyond the last one are zeros.

        Raises:
            ValueError: rows have another width.
            NotStored: it is not there, has none of these rows, or has fewer layers.
        """
        span = token_offset, token_offset + n_tokens
        try:
            prefix = self._client.fetch(self._name(namespace), slots=range(n_layers), rows=span)
        except RowsOutOfRange:  # some layer is shorter: each by itself, filled up with zeros
            sides = (
                [
                    self.fetch_layer(namespace, side, layer, *span, kv_dim)
                    for layer in range(n_layers)
                ]
                for side in "KV"
            )
            keys, values = map(np.stack, sides)
            return keys, values
        if prefix is None or len(prefix.layers) < n_layers:
            raise NotStored(f"{namespace!r} does not have {n_layers} layers")
        keys, values = (
            np.stack([_flat(pair[side], kv_dim) for pair in prefix.layers]) for side in range(2)
        )
        return keys, values

    def save(self) -> bool:
        """Seals what has grown, one file per namespace, on stable storage; False if that failed."""
        try:
            self._client.save()
        except PionError:
            return False
        return True

    def info(self) -> dict[str, int]:
        """Returns the server's figures: those of `KV.PREFIX.INFO` that exist here, and its budgets."""
        server = self._client.describe()
        return {
            "registered_prefixes": server.prefix_count,
            "total_prefix_tokens": server.row_count,
            "vstore_evictions": server.evicted_count,
            "wal_bytes": server.live_bytes,
            "corrupt_prefixes": server.corrupt_count,
            "disk_used_bytes": server.disk_used_bytes,
            "disk_budget_bytes": server.disk_budget_bytes,
            "sdpa_warm": server.attend_warm,
            "sdpa_cold": server.attend_cold,
            "sdpa_demotions": server.attend_demotions,
            "sdpa_rehydrates": server.attend_rehydrates,
        }

    def owner(self, namespace: str) -> int:
        """0 if something is stored or declared, for every worker has it; otherwise -1. Counts no hit."""
        name = self._name(namespace)
        found = next(self._client.list(name), None)  # its own name is the first that begins so
        return 0 if found and found.namespace == name else -1

    def _name(self, namespace: str) -> str:
        return self.tenant_prefix + namespace

    def _info(self, namespace: str) -> PrefixInfo | None:
        return self._client.lookup(self._name(namespace)).prefix

    def _codec(self, namespace: str, layer: int, side: Side) -> str:
        """Returns how rows of a layer are stored: as it says, or as others of its side are."""
        if namespace not in self._layouts:
            known = self._info(namespace)
            if known is None:
                raise NotStored(f"{namespace!r} is not registered")
            self._layouts[namespace] = known.layout
        own = [tensor for tensor in self._layouts[namespace].tensors if tensor.side is side]
        of_layer = [tensor for tensor in own if tensor.slot == layer]
        return next((tensor.codec for tensor in of_layer + own), self.vquant)


class LMCacheRemoteBackend(_Connected):
    """Blobs by key, as LMCache wants them from a remote backend. No method raises.

    Args:
        host, port, address, client, options: as for `PionStore`.
        ns_prefix: put before every key, with a colon, so that deployments that share a server do not
            see each other's keys.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 50051,
        ns_prefix: str = "",
        *,
        client: Client | None = None,
        address: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(host, port, address, client, options)
        self.ns_prefix = ns_prefix

    def put(self, key: Any, blob: Any) -> bool:
        """Keeps a blob, replacing what the key holds; returns whether it is kept."""
        try:
            data = memoryview(blob).cast("B")
            digest = hashlib.sha256(data).digest()  # stands for the tokens: equal blobs are one
            part = Part(BLOB_KIND, 0, len(digest) // 4, data)
            self._client.store(
                self._name(key), layers=None, token_ids=digest, model=BLOB_MODEL, parts=[part],
                replace=True,
            )  # fmt: skip
        except _FAILURES:
            return False
        return True

    def get(self, key: Any) -> bytes | None:
        """Returns a blob; None if it is not there or cannot be fetched."""
        try:
            prefix = self._client.fetch(self._name(key), part_kinds=[BLOB_KIND])
        except _FAILURES:
            return None
        if prefix is None or prefix.model != BLOB_MODEL or not prefix.parts:
            return None
        return bytes(prefix.parts[0].data)

    def contains(self, key: Any) -> bool:
        """Whether there is a blob."""
        try:
            return self._client.lookup(self._name(key), model=BLOB_MODEL).hit
        except _FAILURES:
            return False

    def remove(self, key: Any) -> bool:
        """Drops a blob; returns whether there was one."""
        try:
            return self._client.drop(self._name(key))[0]
        except _FAILURES:
            return False

    def ping(self) -> bool:
        """Whether the server answers."""
        try:
            self._client.describe()
        except _FAILURES:
            return False
        return True

    def _name(self, key: Any) -> str:
        raw = bytes(key) if isinstance(key, bytes | bytearray | memoryview) else str(key).encode()
        prefix = f"{self.ns_prefix}:" if self.ns_prefix else ""
        name = prefix + raw.decode(errors="replace")
        fits = len(name.encode()) <= limits.NAMESPACE_BYTES_MAX and name.isprintable()
        if fits and "\ufffd" not in name:
            return name
        return f"{prefix}sha256:{hashlib.sha256(raw).hexdigest()}"


_FAILURES = (PionError, TypeError, ValueError)


def _tensor(slot: int, side: Side, kv_dim: int, codec: str) -> TensorLayout:
    """What the RESP wire makes of rows of this codec, so that both wires write the same prefix."""
    dtype = DType.F16 if codec == "fp16" else DType.F32
    return TensorLayout(slot, side, 1, kv_dim, dtype, codec)


def _forms(prefix: PrefixInfo) -> set[tuple[int, str]]:
    """Returns width and codec of the rows of a prefix."""
    return {(t.heads * t.head_dim, t.codec) for t in prefix.layout.tensors}


def _side(name: str) -> Side:
    if name not in ("K", "V"):
        raise ValueError(f"side {name!r} is neither 'K' nor 'V'")
    return Side(name.lower())


def _flat(rows: np.ndarray, kv_dim: int) -> np.ndarray:
    """Returns (heads, tokens, dim) as float32 (tokens, kv_dim)."""
    heads, tokens, dim = rows.shape
    if heads * dim != kv_dim:
        raise ValueError(f"rows have {heads * dim} values, not kv_dim={kv_dim}")
    flat = np.ascontiguousarray(rows.transpose(1, 0, 2)).reshape(tokens, kv_dim)
    return flat.astype(np.float32, copy=False)
