"""Tensors as the bytes of a safetensors file, whose size is known before it is written, and back without a copy."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from jigsawrl.store.locks import locked_mapping
from jigsawrl.store.staging import to_host

_ALIGNMENT = 64
"""Of the first tensor, and so of all whose sizes are multiples of it, which come first, as torch aligns its own. The
others follow by falling element size, so each is aligned to its own."""
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_META = "meta"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MOST_HEADER_BYTES = 256 << 20
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Unreadable(ValueError):
    """A file is torn, or it is not what was written under its name."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A file that is yet to be written: what stands at its beginning, and the tensors that follow in this order."""

    header: bytes
    tensors: list[torch.Tensor]
    size: int
    checked: bool = False
    """Whether it gets a checksum however large it is."""

    def chunks(self) -> Iterator[memoryview]:
        """The file's content; at most one tensor at a time is copied, and only one that is not plain CPU memory."""
        yield memoryview(self.header)
        if any(tensor.is_cuda for tensor in self.tensors):
            yield from to_host(self.tensors)
            return
        for tensor in self.tensors:
            if tensor.numel():
                flat = tensor.detach().contiguous().reshape(-1)
                yield flat.view(torch.uint8).numpy().data


def plan(tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any], checked: bool = False) -> Layout:
    header: dict[str, Any] = {_METADATA: {_META: json.dumps(dict(meta))}}
    ordered = sorted(tensors.items(), key=_rank)
    end = 0
    for name, tensor in ordered:
        if name == _METADATA or tensor.dtype not in _DTYPE_NAMES or tensor.layout != torch.strided:
            raise ValueError(
                f"tensor {name!r} ({tensor.dtype}, {tensor.layout}) has no place in a safetensors file"
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    beginning = _LENGTH.pack(len(text)) + text
    return Layout(beginning, [tensor for _, tensor in ordered], len(beginning) + end, checked)


def _rank(item: tuple[str, torch.Tensor]) -> tuple[bool, int, str]:
    name, tensor = item
    size = tensor.numel() * tensor.element_size()
    return size % _ALIGNMENT != 0, -tensor.element_size(), name


def open_mapped(path: Path, size: int, owner: int | None = None) -> torch.UntypedStorage:
    """The file's pages themselves, shared by all who map it. Who writes to them gets a private copy of that page.

    While they are mapped the file is locked, so that nobody writes something else into it.
    """
    return torch.frombuffer(locked_mapping(path, size, owner), dtype=torch.uint8).untyped_storage()


def unpack(storage: torch.UntypedStorage) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors, each a view of the file's pages that keeps them mapped, and the meta.

    Whatever the bytes are, this returns or is Unreadable.
    """
    size = storage.nbytes()
    if size < _LENGTH.size:
        raise Unreadable("it is too short")
    (length,) = _LENGTH.unpack(_as_bytes(storage, 0, _LENGTH.size))
    begin = _LENGTH.size + length
    if begin > size or length > MOST_HEADER_BYTES:
        raise Unreadable("its header is longer than the file")
    try:
        header = json.loads(_as_bytes(storage, _LENGTH.size, begin))
        meta = json.loads(header.pop(_METADATA)[_META])
        if not isinstance(meta, dict):
            raise TypeError("the meta is no object")
        return {name: _tensor(storage, begin, size, described) for name, described in header.items()}, meta
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise Unreadable(f"its header does not describe it: {type(error).__name__}") from error


def _tensor(storage: torch.UntypedStorage, begin: int, size: int, described: Any) -> torch.Tensor:
    start, end = described["data_offsets"]
    dtype, shape = _DTYPES[described["dtype"]], described["shape"]
    if any(type(number) is not int or number < 0 for number in (start, end, *shape)):
        raise ValueError("a shape or a place is no whole number")
    if prod(shape) * dtype.itemsize != end - start or begin + end > size or (begin + start) % dtype.itemsize:
        raise ValueError("a tensor is not where it is said to be")
    if start == end:
        return torch.empty(shape, dtype=dtype)
    return _view(storage, begin + start, begin + end).view(dtype).reshape(shape)


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """All of a file, without a copy."""
    return _view(storage, 0, storage.nbytes()).numpy().data


def _view(storage: torch.UntypedStorage, start: int, end: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage[start:end])


def _as_bytes(storage: torch.UntypedStorage, start: int, end: int) -> bytes:
    return _view(storage, start, end).numpy().tobytes()
