"""Matrix products of a pass whose rows belong to several owners: the base's for all, adapters for each one's rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jigsawrl.model.lora import LinearOp, Lora

Adapters = dict[Tensor, Lora]
"""Somebody's adapters by the base's matrix that they stand beside."""


@dataclass(slots=True)
class Part:
    """One owner's rows of a pass and its adapters. `padded` are its rows and some more, up to whole tiles."""

    rows: Tensor
    padded: Tensor
    adapters: Adapters


@dataclass(slots=True)
class MixedLinear:
    product: LinearOp
    parts: list[Part]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self.product(x, weight, bias)
        for part in self.parts:
            lora = part.adapters.get(weight)
            if lora is not None:
                mine = (x.index_select(0, part.padded), y.index_select(0, part.padded))
                y.index_copy_(0, part.rows, lora.forward(*mine, self.product)[: len(part.rows)])
        return y


def mixed(
    product: LinearOp,
    owners: list[tuple[int, int]],
    adapters: dict[int, Adapters],
    tile: int,
    device: torch.device,
) -> LinearOp:
    """The product for a pass with so many rows of each owner, one after the other: (owner, rows)."""
    rows: dict[int, list[int]] = {}
    start = 0
    for owner, count in owners:
        rows.setdefault(owner, []).extend(range(start, start + count))
        start += count
    parts: list[Part] = []
    for owner, mine in rows.items():
        if adapters.get(owner):
            padded = mine + mine[-1:] * (-len(mine) % tile)
            index = torch.tensor(padded, device=device)
            parts.append(Part(index[: len(mine)], index, adapters[owner]))
    return MixedLinear(product, parts) if parts else product
