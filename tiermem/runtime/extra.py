"""What a caller keeps with a commit or a snapshot, as JSON holds it and back.

Owns the form of what JSON has no word for: tensors, arrays, bytes, tuples, and dicts whose keys are not text, which
are what data loaders, samplers and optimizers give as their states. Does not write files. Guarantees that what comes
back is equal (tensors in ordinary memory), and that anything else is refused by its place, before anything is kept.

Each of these is an object with the one key `MARK`, the kind, and what it takes. A caller's dict with that key has the
form of one whose keys are not text, so nobody's data is mistaken for ours.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tiermem.checkpoint.tensor_file import bytes_of, tensor_of
from tiermem.errors import ConfigError
from tiermem.registry import registry

MARK = "$tiermem"
LARGEST = 16 << 20
"""Bytes of a tensor, an array or of `bytes`: the record of a commit is read and written whole."""

_FAR = 10**sys.int_info.default_max_str_digits
_AS_THEY_ARE = frozenset({type(None), bool, int, float, str})  # not their subclasses, such as numpy's floats
_KEYS = (str, bool, int, float, type(None))


def to_record(value: Any, what: str = "extra") -> Any:
    """A copy of `value` as JSON holds it. Raises ConfigError naming the place of what cannot be kept."""
    try:
        return _record(value, what)
    except RecursionError:
        raise ConfigError(
            f"{what}: expected at most a few hundred values in one another; one may hold itself"
        ) from None


def _record(value: Any, what: str) -> Any:
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and MARK not in value:
            return {str(key): _record(item, f"{what}[{key!r}]") for key, item in value.items()}
        for key in value:
            if not isinstance(key, _KEYS):
                raise ConfigError(f"{what}: expected text or numbers for keys, found {key!r}")
        items = [[_plain(key, what), _record(item, f"{what}[{key!r}]")] for key, item in value.items()]
        return {MARK: "dict", "items": items}
    if isinstance(value, tuple):  # random.setstate, for one, takes no list
        return {MARK: "tuple", "items": _record(list(value), what)}
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds <= _AS_THEY_ARE and not (int in kinds and _holds_long(value)):
            return list(value)  # at once: there may be the numbers of thousands of parameters
        return [_record(item, f"{what}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, torch.Tensor):
        return _of_tensor(value, what)
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, (float, str, bytes)):
        return _of_array(value, what)
    if isinstance(value, (bytes, bytearray)):
        return {MARK: "bytes", "data": _text(bytes(value), what)}
    return _plain(value, what)


def from_record(record: Any) -> Any:
    """A copy of what `to_record` was given."""
    if isinstance(record, list):
        return [from_record(item) for item in record]
    if not isinstance(record, dict):
        return record
    if MARK not in record:
        return {key: from_record(item) for key, item in record.items()}
    return _READERS[record[MARK]](record)


def _plain(value: Any, what: str) -> Any:
    """A number, text or None as JSON holds it. Raises ConfigError naming what JSON cannot hold."""
    if _is_long(value):
        raise ConfigError(
            f"{what}: an integer of more than {sys.int_info.default_max_str_digits} digits, which Python makes no text "
            "of, and reads from none; keep it as text in hexadecimal (hex(), int(text, 16)), or as bytes"
        )
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, (bool, int, float, str)):
        return json.loads(json.dumps(value))  # subclasses become what they stand for
    raise ConfigError(
        f"{what}: expected numbers, text, None, lists, tuples, dicts, tensors, arrays of numbers or bytes, found "
        f"{type(value).__name__}; convert it, for example with .tolist() or str()"
    )


def _is_long(value: Any) -> bool:
    return isinstance(value, int) and not -_FAR < value < _FAR


def _holds_long(values: Sequence[Any]) -> bool:
    whole = [value for value in values if type(value) is int]
    return _is_long(min(whole)) or _is_long(max(whole))


def _of_tensor(value: torch.Tensor, what: str) -> dict[str, Any]:
    if registry.find(value) is not None:  # its values are elsewhere: a placeholder would be kept
        raise ConfigError(f"{what}: an offloaded parameter, which every commit holds anyway")
    if value.layout is not torch.strided or value.is_nested or value.is_quantized or value.is_meta:
        kind = f"{value.dtype} on {value.device}, {value.layout}"
        raise ConfigError(f"{what}: expected a dense tensor with values, found one of {kind}")
    whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = bytes_of(whole).tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return {MARK: "tensor", "dtype": dtype, "shape": list(value.shape), "data": _text(data, what)}


def _of_array(value: np.ndarray[Any, Any] | np.generic[Any], what: str) -> dict[str, Any]:
    if value.dtype.hasobject or value.dtype.names is not None or isinstance(value, np.ma.MaskedArray):
        found = f"{type(value).__name__} of dtype {value.dtype}"
        raise ConfigError(f"{what}: expected an array of numbers, found {found}; convert it")
    kind = "number" if isinstance(value, np.generic) else "array"
    data = _text(value.tobytes(), what)
    return {MARK: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": data, "kind": kind}


def _text(data: bytes, what: str) -> str:
    if len(data) > LARGEST:
        raise ConfigError(
            f"{what}: {len(data)} bytes in one piece, at most {LARGEST} go with a commit; keep it in a file of its own"
        )
    return base64.b64encode(data).decode("ascii")


def _bytes_of(record: dict[str, Any]) -> bytes:
    return base64.b64decode(record["data"])


def _array_of(record: dict[str, Any]) -> Any:
    """What of no dimensions was kept without its kind, as it once was, is a number of numpy's."""
    array = np.frombuffer(_bytes_of(record), dtype=np.dtype(record["dtype"])).reshape(record["shape"]).copy()
    return array if record.get("kind") == "array" else array[()]


_READERS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "dict": lambda record: {key: from_record(item) for key, item in record["items"]},
    "tuple": lambda record: tuple(from_record(record["items"])),
    "bytes": _bytes_of,
    "tensor": lambda record: tensor_of(record["dtype"], record["shape"], record["data"]),
    "array": _array_of,
}
