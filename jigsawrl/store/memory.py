"""Tensors that give their memory back and get it again in place: whoever holds one, or a view of it, still does."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

OTHERS = 0.05
"""Part of a GPU's memory that others have if there are any."""


def release(tensors: Iterable[Tensor]) -> None:
    """Frees the memory of tensors and keeps everything else about them. None of them may be a part of another."""
    for tensor in tensors:
        if not tensor.untyped_storage().resizable():  # a file's pages: let go of, not freed
            tensor.data = _without_memory(tensor)
        tensor.untyped_storage().resize_(0)


def reclaim(tensors: Iterable[Tensor]) -> None:
    """Gives memory to those that have none; what it holds is undefined."""
    for tensor in tensors:
        if is_released(tensor):
            tensor.untyped_storage().resize_(tensor.nbytes)


def is_released(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == 0


def return_to_system(device: torch.device) -> None:
    """What was freed is kept by allocators, for this process only, until they are told."""
    if device.type == "cuda":
        return_to_gpu(device)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's
        trim(0)


def spare_others(device: torch.device) -> None:
    """What a phase needed and the next one does not, torch would keep; who plans for all counts on it."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others > OTHERS * total:
        return_to_gpu(device)


def return_to_gpu(device: torch.device | int) -> None:
    """All that was freed. Torch itself waits for the stream that had taken it, and for no other: what a training took
    before it moved to another part of the GPU is read there still, and the read would fail."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _without_memory(like: Tensor) -> Tensor:
    bare = torch.empty(0, dtype=like.dtype, device=like.device)
    storage = bare.untyped_storage()
    storage.resize_(like.nbytes)
    bare.set_(storage, 0, like.shape, like.stride())
    storage.resize_(0)
    return bare
