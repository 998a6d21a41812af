"""Sums of gradients in float32, all of a model's in one launch: hundreds of small ones would keep the host busy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from jigsawrl.trainer.batch import onto
from jigsawrl.trainer.cuda import kernels

TILE = 8192
"""Numbers that a program adds."""


def accumulate(pairs: Sequence[tuple[Tensor, Tensor]], first: bool) -> None:
    """Adds each part, in bfloat16, to its total, in float32; a first part is the total. Each is in one piece."""
    device = pairs[0][0].device
    sizes, tensors, starts = _blocks(tuple(total.numel() for total, _ in pairs), device)
    addresses = onto(device, torch.tensor([(total.data_ptr(), part.data_ptr()) for total, part in pairs]))
    kernels.accumulate_kernel[(len(tensors),)](
        addresses, sizes, tensors, starts, SIZE=TILE, FIRST=first, num_warps=8
    )


@lru_cache(maxsize=8)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The sizes, and of each block which tensor it is of and where it starts there."""
    counts = [-(-size // TILE) for size in sizes]
    tensors = np.repeat(np.arange(len(sizes)), counts)
    starts = np.concatenate([np.arange(count) for count in counts]) * TILE
    found = [onto(device, torch.from_numpy(each)) for each in (np.array(sizes), tensors, starts)]
    return found[0], found[1], found[2]
