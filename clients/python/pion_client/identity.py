"""The model id: a name for everything that the K/V of a token sequence depend on.

Knows parameters and arguments of a loaded mlx-lm model; neither caches nor servers. The tokenizer is
not part of it: K/V depend on token ids.

The format, `mlx1:` and the first 32 hex digits of SHA-256 over these bytes (integers little-endian,
text UTF-8, text and JSON after their length as u32)::

    u32   number of parameters
    then for each, sorted by the bytes of its name:
      text  name, as mlx.utils.tree_flatten(model.parameters()) gives it
      u32   number of dimensions, then u64 per dimension
      text  type, as MLX names it without its module: "float32", "bfloat16", "uint32", ...
      u32   CRC-32C of its values, row-major, little-endian
    text  the model's `args` (or `config`, as some call it) as JSON: keys sorted, separators "," and ":",
          ASCII only; `null` if none

Adapters and quantisation are parameters. Two things are not and count as some: the `scale` of a module
with a parameter `lora_a`, and the public numbers of a module whose class is named for RoPE (`base`,
`scale`, `dims`, `traditional`, ...), because a rope can be given another base after the model was made.
They are Python numbers, and enter as parameters `<module>.<attribute>` of no dimensions and type
"float64". (Arrays that a rope derives from its arguments do not enter: they differ by the device.)
Arguments count as they are, defaults included: another version of mlx-lm may know other arguments, and
then its ids are others too.

The one decision: the id is computed once per loaded model, by a thread of its own that is started
when a `PionPromptCache` is made, over bytes that were evaluated on the caller's thread. Whether the
model is still the same is asked before every use, by *where* its parameters lie in memory: about 1 ms
for the 273 arrays of 30 layers. The buffers that were seen stay referenced, so an address is never
taken anew, and MLX copies a shared buffer before it writes into it: loading weights, quantising, adding
or reloading an adapter, assigning into a parameter all show as another address. (While a model is
trained, its weights as they were at the last use therefore stay in memory.) Other plain attributes of
modules are not looked at: whoever changes one passes a `model_id` of their own.
"""

import dataclasses
import hashlib
import json
import struct
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from crc32c import crc32c


class _Parameter(NamedTuple):
    """One entry of the format above; its values as plain bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: Any


class _Known(NamedTuple):
    """A model that was met, what it was made of then, and its id, perhaps still in the making."""

    model: "weakref.ref[Any]"
    seen: list[Any]
    pinned: list[mx.array]
    model_id: "Future[str]"


_known: dict[int, _Known] = {}  # by id(): modules are dictionaries and have no hash
_lock = threading.Lock()
_digester = ThreadPoolExecutor(1, thread_name_prefix="pion-model-id")
_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def model_id(model: Any) -> str:
    """Returns the id of a loaded model, computing it if this model has not been met as it is now.

    Call it on a thread that may evaluate the model's parameters: the one that loaded it.

    Raises:
        TypeError: the model's arguments have no JSON.
    """
    return begin(model).result()


def begin(model: Any) -> "Future[str]":
    """Starts to compute the id of a model and returns at once; `result()` waits for it.

    Lazy parameters are evaluated here, as any use of the model would. Errors as in `model_id`.
    """
    parts = list(_parts(model))
    mx.eval([part for _, part in parts])
    args_json = _args_json(model)
    seen = [args_json, *(_seen(name, part) for name, part in parts)]
    with _lock:
        known = _known.get(id(model))
        if known is None or known.model() is not model or known.seen != seen:
            # Other array objects over the same memory: an assignment into a parameter leaves them.
            pinned = {name: part[None] for name, part in parts if isinstance(part, mx.array)}
            mx.eval(pinned)
            started = _digester.submit(_digest, _parameters(parts, pinned), args_json)
            known = _Known(_watched(model), seen, list(pinned.values()), started)
            _known[id(model)] = known
    return known.model_id


def _watched(model: Any) -> "weakref.ref[Any]":
    key = id(model)
    return weakref.ref(model, lambda _: _known.pop(key, None))


def _seen(name: str, part: Any) -> tuple[Any, ...]:
    if not isinstance(part, mx.array):
        return name, part
    return name, _address(part), part.shape, part.dtype


def _address(array: mx.array) -> int:
    memory: Any = array  # a buffer, though its type does not say so
    try:
        values = np.frombuffer(memory, np.uint8)  # any type, bfloat16 too, but contiguous
    except BufferError:
        values = np.asarray(array.view(_UNSIGNED[array.itemsize]))
    return int(values.__array_interface__["data"][0])


def _parts(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Names and arrays of a module tree, as `parameters()` has them, and the scales of adapters."""
    for key, value in module.items():
        if not key.startswith("_"):
            yield from _below(value, f"{path}.{key}" if path else key)
    if "lora_a" in module and isinstance(getattr(module, "scale", None), int | float):
        yield f"{path}.scale", float(module.scale)
    if "rope" in type(module).__name__.lower():
        for key, value in sorted(vars(module).items()):
            if not key.startswith("_") and isinstance(value, int | float):
                yield f"{path}.{key}", float(value)


def _below(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, mx.array):
        yield path, value
    elif isinstance(value, dict):
        yield from _parts(value, path)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _below(item, f"{path}.{index}")


def _parameters(
    parts: Iterable[tuple[str, Any]], pinned: Mapping[str, mx.array]
) -> list[_Parameter]:
    flat = {name: array.reshape(-1).view(mx.uint8) for name, array in pinned.items()}
    mx.eval(flat)
    return [
        _Parameter(name, tuple(part.shape), _type_name(part.dtype), np.asarray(flat[name]))
        if name in flat
        else _Parameter(name, (), "float64", struct.pack("<d", part))
        for name, part in parts
    ]


def _type_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def arguments(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields names and values of a model's arguments, and of those within them."""
    return _within(_args(model))


def _within(args: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(args):
        args = vars(args)
    if isinstance(args, Mapping):
        for name, value in args.items():
            yield str(name), value
            yield from _within(value)


def _args(model: Any) -> Any:
    return getattr(model, "args", None) or getattr(model, "config", None)


def _args_json(model: Any) -> str:
    try:
        return json.dumps(_args(model), default=_plain, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TypeError(f"the model's args have no JSON ({error}); pass model_id=…") from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} is not a value")


def _digest(parameters: Iterable[_Parameter], args_json: str) -> str:
    ordered = sorted(parameters, key=lambda parameter: parameter.name.encode())
    digest = hashlib.sha256(struct.pack("<I", len(ordered)))
    for parameter in ordered:
        digest.update(_text(parameter.name))
        digest.update(struct.pack("<I", len(parameter.shape)))
        digest.update(struct.pack(f"<{len(parameter.shape)}Q", *parameter.shape))
        digest.update(_text(parameter.dtype))
        digest.update(struct.pack("<I", crc32c(parameter.values)))
    digest.update(_text(args_json))
    return f"mlx1:{digest.hexdigest()[:32]}"


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<I", len(encoded)) + encoded
