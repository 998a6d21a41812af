"""Pages of the store that a device reads and writes itself, at the speed of its link to the host.

The device must be told of pages first ("pinned"), which takes as long as many copies. So it is done once for the file
of an entry that one process writes and reads again and again, and undone when the file is gone.

Light to import: whoever only looks after a store needs no torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jigsawrl.store.locks import locked_mapping

if TYPE_CHECKING:
    import torch
    from torch import Tensor

POPULATE_WRITE = 23
"""Advice to Linux (5.14 and later): make these pages, to be written."""
FILL_BYTES, FILL_THREADS = 64 << 20, 8


@dataclass(frozen=True, slots=True)
class _Pages:
    """A file's, all of them; the descriptor tells whether it still has a name."""

    memory: Tensor
    descriptor: int

    def let_go(self) -> None:
        import torch

        torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
        os.close(self.descriptor)


_known: dict[tuple[int, int], _Pages] = {}
"""By device and inode."""
_refused: list[str] = []
"""Why no more are pinned, from the first time on that it failed."""


def write(descriptor: int, size: int, header: bytes, tensors: Iterable[Tensor]) -> bool:
    """Fills a file in shared memory from tensors of a device. False, and nothing is done: it cannot be pinned."""
    import torch

    memory = None if _refused else _pinned(descriptor, size)
    if memory is None:
        return False
    torch.cuda.synchronize()  # whatever stream they were made on
    end = len(header)
    memory[:end].numpy().data[:] = header
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        start, end = end, end + len(flat)
        memory[start:end].copy_(flat, non_blocking=True)
    torch.cuda.synchronize()
    return True


def open_pinned(path: Path) -> torch.UntypedStorage | None:
    """The pages of a file, if this process has pinned them: to read, and locked like those that are only mapped."""
    pages = _known.get(_identity(os.lstat(path))) if _known else None
    if pages is None:
        return None
    import torch

    view = (ctypes.c_char * pages.memory.nbytes).from_address(pages.memory.data_ptr())
    vars(view)["kept"] = pages.memory, locked_mapping(path, 1)  # as long as anybody has the view
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def forget(file: os.stat_result) -> None:
    """One that is about to be removed: its pages go with its name."""
    pages = _known.pop(_identity(file), None)
    if pages is not None:
        pages.let_go()


def forget_removed() -> None:
    """Files that other processes have removed, to spill them or to drop them."""
    for pages in list(_known.values()):
        file = os.fstat(pages.descriptor)
        if file.st_nlink == 0:
            forget(file)


def _pinned(descriptor: int, size: int) -> Tensor | None:
    import torch

    identity = _identity(os.fstat(descriptor))
    if identity not in _known:
        forget_removed()
        os.posix_fallocate(descriptor, 0, size)  # a lack of room shows here, and not where pages are written
        # Opened anew: a lock goes with the opening, and this one outlives the writing.
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        pages = _Pages(torch.frombuffer(mmap.mmap(own, size), dtype=torch.uint8), own)
        _fill(pages.memory)
        if not _register(pages.memory):
            os.close(own)
            return None
        _known[identity] = pages
    return _known[identity].memory


def _fill(memory: Tensor) -> None:
    """Gives a mapping its pages, by many threads; pinning would do it by one."""
    madvise = ctypes.CDLL(None).madvise

    def populate(piece: Tensor) -> None:  # a kernel that does not know this refuses: then pinning does it
        madvise(c_void_p(piece.data_ptr()), c_size_t(len(piece)), POPULATE_WRITE)

    with ThreadPoolExecutor(FILL_THREADS) as pool:
        list(pool.map(populate, memory.split(FILL_BYTES)))


def _register(memory: Tensor) -> bool:
    import torch

    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error) == 0:
        return True
    with suppress(RuntimeError):  # CUDA keeps an error for whoever calls it next
        torch.zeros(1, device="cuda")
    _refused.append(str(error))
    warnings.warn(
        f"the store's pages cannot be pinned ({error}): swaps go through buffers, slower", stacklevel=2
    )
    return False


def _identity(file: os.stat_result) -> tuple[int, int]:
    return file.st_dev, file.st_ino
