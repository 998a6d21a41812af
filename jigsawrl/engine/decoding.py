"""Which code decodes on a GPU: kernels of this package, or torch's operators, and why. Pure; no GPU is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jigsawrl.engine.mixed import Adapters
    from jigsawrl.model.transformer import Transformer

CAPABILITY = (9, 0)
"""Least compute capability of a GPU: Hopper's."""
HEAD_SIZES = (64, 128)
MULTIPLE = 64
"""Of which the sizes of a model's products are."""
MOST_RANK = 64
"""Of adapters."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What is decoded, and on what."""

    capability: tuple[int, int]
    dtype: torch.dtype
    head_size: int
    sizes: Sequence[int]
    """Of the products' rows: hidden, all heads together, inside of the MLP."""
    deterministic: bool


def decoded_by(model: Transformer, deterministic: bool) -> Decoded:
    """A model that is on a GPU."""
    spec = model.spec
    sizes = (spec.hidden_size, spec.q_size, spec.intermediate_size)
    capability = torch.cuda.get_device_capability(model.device)
    return Decoded(capability, model.dtype, spec.head_dim, sizes, deterministic)


def why_not_kernels(what: Decoded) -> str | None:
    """Why torch's operators are used and no kernels; None: kernels are used."""
    if what.deterministic:
        return "deterministic: true needs sums that do not depend on the batch"
    if what.capability < CAPABILITY:
        has, needed = (".".join(map(str, each)) for each in (what.capability, CAPABILITY))
        return f"the GPU has compute capability {has}, and the kernels need {needed} (Hopper) or later"
    if what.dtype != torch.bfloat16:
        return f"the model is in {str(what.dtype).removeprefix('torch.')}, and the kernels need bfloat16"
    if what.head_size not in HEAD_SIZES:
        known = " or ".join(map(str, HEAD_SIZES))
        return f"the model's heads have size {what.head_size}, and the kernels need {known}"
    for size in what.sizes:
        if size % MULTIPLE:
            return f"the model has a size of {size}, and the kernels need multiples of {MULTIPLE}"
    return None


def why_not_with(adapters: Adapters) -> str | None:
    """Why kernels cannot take these adapters; None: they can."""
    matrices = [a for lora in adapters.values() for a in lora.a.values()]
    for a in matrices:
        if a.shape[0] > MOST_RANK:
            return f"adapters have rank {a.shape[0]}, and the kernels take up to {MOST_RANK}"
        if a.dtype != torch.bfloat16:
            return f"adapters are in {str(a.dtype).removeprefix('torch.')}, and the kernels need bfloat16"
    return None if all(a.is_cuda for a in matrices) else "adapters are not on the GPU"


def told_of_decoding(gpu: str, why_not: str | None) -> str:
    """For the user."""
    if why_not is None:
        return f"decoding on {gpu} with jigsawrl's kernels"
    return (
        f"decoding on {gpu} with torch's operators, which is slower than with jigsawrl's kernels: {why_not}"
    )
