"""The data of one update: whole sequences, and flat per-token values for the tokens that are trained.

Flat means: the trained tokens of all sequences, one after the other. A batch can be cut by sequences in any way
(micro-batches, workers) and every cut carries its part of each value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """Sequences of token ids, which of their positions are trained, and named flat values [T] of those."""

    tokens: list[Tensor]
    trained: list[Tensor]
    """For each sequence the positions (int64, never 0) whose tokens the policy chose."""
    values: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> Tensor:
        """Trained tokens of each sequence."""
        return torch.tensor([len(t) for t in self.trained], dtype=torch.int64)

    @property
    def sequence(self) -> Tensor:
        """[T] the sequence each trained token belongs to."""
        return repeated(torch.arange(len(self)), self.lengths)

    def select(self, indices: list[int]) -> Batch:
        """The part of the batch with these sequences, in this order."""
        pick = flat_indices(self.lengths, indices)
        values = {name: value[pick] for name, value in self.values.items()}
        return Batch([self.tokens[i] for i in indices], [self.trained[i] for i in indices], values)


def flat_indices(lengths: Tensor, indices: list[int]) -> Tensor:
    """Where the tokens of these sequences stand in a flat value of all."""
    starts = (lengths.cumsum(0) - lengths)[indices]
    chosen = lengths[indices]
    return repeated(starts, chosen) + counted(chosen)


def counted(lengths: Tensor) -> Tensor:
    """0, 1, 2, ... for each sequence, flat."""
    begins = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - repeated(begins, lengths)


def repeated(values: Tensor, counts: Tensor) -> Tensor:
    """Each value so many times. By numpy: torch calls all threads for it, and waiting for them takes milliseconds."""
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


def onto(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of the host on a device, without waiting for what the device is at."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def micro_batches(token_counts: list[int], budget: int) -> list[list[int]]:
    """Cuts sequences into groups of at most `budget` tokens (or one sequence), longest first, alike together."""
    order = sorted(range(len(token_counts)), key=lambda i: (-token_counts[i], i))
    groups: list[list[int]] = []
    room = 0
    for i in order:
        if not groups or token_counts[i] > room:
            groups.append([])
            room = budget
        groups[-1].append(i)
        room -= token_counts[i]
    return groups


def balanced_shares(token_counts: list[int], workers: int) -> list[list[int]]:
    """Deals sequences to workers so that their token counts are close: the longest to the least loaded."""
    shares: list[list[int]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for i in sorted(range(len(token_counts)), key=lambda i: (-token_counts[i], i)):
        worker = loads.index(min(loads))
        shares[worker].append(i)
        loads[worker] += token_counts[i]
    return [sorted(share) for share in shares]
