"""Attention over the paged cache.

Single rows (decode) are grouped by the context length they are padded to, a function of their own length alone, so
what a row computes does not depend on its neighbours. In deterministic mode the tokens of a prefill are such rows
too: a token's keys and values come out the same, bit for bit, decoded or run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from jigsawrl.model.spec import ModelSpec

LADDER = np.array(
    [32, 64, 128, 192, 256, 384, 512, 768]
    + [2**i + j * 2 ** (i - 1) for i in range(10, 21) for j in range(2)]
)
"""Padded context lengths: a third wasted at most from 128 on, few different shapes."""
GROUP_COST = 768
"""Attending one more group of rows takes as long as this much more padding (measured on a CPU)."""


class KVCache:
    """Keys and values of every layer, in blocks."""

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (spec.layers, num_blocks, block_size, spec.kv_heads, spec.head_dim)
        # Zeros, not rubbish: masked entries are multiplied by zero and must be finite.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.block_size = block_size
        # Views by block and by token, made once: making them anew in every layer and pass takes time.
        self.blocks = list(zip(self.keys.unbind(0), self.values.unbind(0), strict=True))
        self.tokens = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self.blocks]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        keys, values = self.tokens[layer]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def read(self, layer: int, blocks: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values of flat blocks, as many for each sequence, each [sequences, kv_heads, length, D]."""
        keys, values = self.blocks[layer]
        shape = (sequences, -1, keys.shape[2], keys.shape[3])
        k = keys.index_select(0, blocks).view(shape)
        v = values.index_select(0, blocks).view(shape)
        return k.transpose(1, 2), v.transpose(1, 2)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        source, target = torch.tensor(pairs, device=self.keys.device).unbind(1)
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]


@dataclass(slots=True)
class Rows:
    """Tokens that attend one by one: `rows` of the pass, each over its own of `sequences` lines of blocks, or all
    over one."""

    rows: Tensor
    blocks: Tensor
    sequences: int
    mask: Tensor


@dataclass(slots=True)
class Chunk:
    """A run of one sequence's tokens: pass rows start..end, with `context` tokens cached before them."""

    start: int
    end: int
    context: int
    blocks: Tensor
    mask: Tensor | None


class PagedAttention:
    """One pass's attention: writes the new keys and values, then attends row groups and chunks."""

    def __init__(
        self, spec: ModelSpec, cache: KVCache, slots: Tensor, groups: list[Rows], chunks: list[Chunk]
    ) -> None:
        self.spec = spec
        self.cache = cache
        self.slots = slots
        self.groups = groups
        self.chunks = chunks

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer, self.slots, k, v)
        only = self.groups[0] if len(self.groups) == 1 and not self.chunks else None
        if only is not None and len(only.rows) == len(q):
            return self._rows(layer, only, q)
        out = torch.zeros_like(q)
        for group in self.groups:
            out.index_copy_(0, group.rows, self._rows(layer, group, q.index_select(0, group.rows)))
        for chunk in self.chunks:
            part = slice(chunk.start, chunk.end)
            out[part] = self._chunk(layer, chunk, q[part], k[part], v[part])
        return out

    def _rows(self, layer: int, group: Rows, q: Tensor) -> Tensor:
        spec, count = self.spec, len(q)
        k, v = self.cache.read(layer, group.blocks, group.sequences)
        if group.sequences == 1:
            k, v = k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)
        # Query heads that share a key head stand as extra query rows of it.
        grouped = q.reshape(count, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask).reshape(q.shape)

    def _chunk(self, layer: int, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = q.transpose(0, 1).unsqueeze(0)
        if chunk.context == 0:
            keys, values = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        else:
            keys, values = self.cache.read(layer, chunk.blocks, 1)
            length = chunk.context + len(q)
            keys, values = keys[:, :, :length], values[:, :, :length]
        out = F.scaled_dot_product_attention(
            heads, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def padded_lengths(lengths: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """The length each context is padded to: the next rung of the ladder, in whole blocks."""
    rungs = LADDER[np.searchsorted(LADDER, lengths)]
    return -(-rungs // block_size) * block_size


def merged(padded: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lengths padded further where a group of its own would cost more than the padding."""
    counts = Counter(padded.tolist())
    widths = sorted(counts, reverse=True)
    target = {widths[0]: widths[0]}
    for wider, width in pairwise(widths):
        padding = counts[width] * (target[wider] - width)
        target[width] = target[wider] if padding <= GROUP_COST else width
    if len(set(target.values())) == 1:
        return np.full_like(padded, widths[0])
    return np.array([target[width] for width in padded.tolist()])


def row_groups(
    rows: NDArray[np.int64],
    lengths: NDArray[np.int64],
    padded: NDArray[np.int64],
    blocks_of: Callable[[NDArray[np.int64], int], NDArray[np.int64]],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Rows]:
    """Groups rows by padded context length; `blocks_of(members, width)` are the block ids they attend over."""
    groups: list[Rows] = []
    for width in sorted(set(padded.tolist())):
        members = np.flatnonzero(padded == width)
        blocks = blocks_of(members, width)
        groups.append(
            Rows(
                rows=torch.from_numpy(rows[members]).to(device),
                blocks=torch.from_numpy(blocks.reshape(-1)).to(device),
                sequences=len(blocks),
                mask=length_mask(lengths[members], width, dtype, device),
            )
        )
    return groups


def length_mask(lengths: NDArray[np.int64], width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [rows, 1, 1, width]: zero up to each row's length, minus infinity beyond."""
    mask = np.zeros((len(lengths), 1, 1, width), dtype=np.float32)
    mask[np.arange(width) >= lengths[:, None, None, None]] = -np.inf
    return torch.from_numpy(mask).to(device, dtype)
