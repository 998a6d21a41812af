"""Low-rank adapters on the transformer's matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from jigsawrl.model.transformer import Linear, Transformer

LinearOp = Callable[[Tensor, Tensor, Tensor | None], Tensor]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Lora(nn.Module):
    """Adapters for some parts of one stacked matrix: part p of the output gains scale * B_p A_p x."""

    def __init__(
        self, inputs: int, parts: dict[str, int], targets: set[str], rank: int, scale: float
    ) -> None:
        super().__init__()
        self.parts = parts
        self.scale = scale
        self.a = nn.ParameterDict({p: torch.zeros(rank, inputs) for p in parts if p in targets})
        self.b = nn.ParameterDict({p: torch.zeros(rows, rank) for p, rows in parts.items() if p in targets})
        ends = dict(zip(parts, accumulate(parts.values()), strict=True))
        self.bounds = [(ends[part] - parts[part], ends[part]) for part in self.a]
        """First output and the one after the last of each adapted part."""
        self.ranks = [rank] * len(self.a)

    def forward(self, x: Tensor, y: Tensor, linear: LinearOp) -> Tensor:
        """y, which is what the matrix makes of x, and what the adapters add to it."""
        pieces = list(y.split(list(self.parts.values()), dim=-1))
        for i, part in enumerate(self.parts):
            if part in self.a:
                delta = linear(linear(x, self.a[part], None), self.b[part], None)
                pieces[i] = pieces[i] + delta * self.scale
        return torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]

    def with_base(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What the frozen matrix makes of rows x, and what the adapters add to it, with gradients for x and them."""
        out: Tensor = _Adapted.apply(x, weight, bias, self, *self.a.values(), *self.b.values())  # type: ignore[no-untyped-call]
        return out

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """What the matrix and the adapters make of rows x; and what `gradients` needs beside x.

        The adapters' part, which may be less than what rounding the matrix's takes away, is there before the other
        is added to it, unrounded. Outputs and inputs are wide and ranks are low: what is wide is read and written by
        products alone, and as the parts' first products have the same input, they are one product, as are those that
        lead back to it.
        """
        ones = list(self.a.values())
        stacked = torch.cat(ones) if len(ones) > 1 else ones[0]
        low = x.new_empty(x.shape[0], sum(self.ranks))
        low.addmm_(x, stacked.t(), beta=0, alpha=self.scale)
        y = (x.new_empty if len(ones) == len(self.parts) else x.new_zeros)(x.shape[0], len(weight))
        lows = low.split_with_sizes(self.ranks, 1)
        for (start, end), each, b in zip(self.bounds, lows, self.b.values(), strict=True):
            y[:, start:end].addmm_(each, b.t(), beta=0)
        y.addmm_(x, weight.t())
        if bias is not None:
            y += bias
        return y, low, stacked

    def gradients(
        self, grad: Tensor, x: Tensor, low: Tensor, stacked: Tensor, back: Tensor | None
    ) -> list[Tensor]:
        """Of all `a`, then of all `b`, from the gradient of the output; that of x is added to `back` in place."""
        slope = torch.empty_like(low)
        lows, slopes = low.split_with_sizes(self.ranks, 1), slope.split_with_sizes(self.ranks, 1)
        steps: list[Tensor] = []
        for (start, end), each, into, b in zip(self.bounds, lows, slopes, self.b.values(), strict=True):
            part = grad[:, start:end]
            into.addmm_(part, b, beta=0, alpha=self.scale)
            steps.append(torch.mm(part.t(), each))
        if back is not None:
            back.addmm_(slope, stacked)
        return [*torch.mm(slope.t(), x).split_with_sizes(self.ranks), *steps]


class _Adapted(torch.autograd.Function):
    """x W^T + bias, and scale * x A^T B^T added to parts of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora: Lora, *pairs: Tensor
    ) -> Tensor:
        y, low, stacked = lora.product(x, weight, bias)
        ctx.lora = lora
        ctx.save_for_backward(x, weight, low, stacked)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        x, weight, low, stacked = ctx.saved_tensors
        back = torch.mm(grad, weight) if ctx.needs_input_grad[0] else None
        return back, None, None, None, *ctx.lora.gradients(grad, x, low, stacked, back)


def linears(model: Transformer) -> list[tuple[str, Linear]]:
    """Every adaptable matrix with the Hugging Face prefix of the module it belongs to."""
    found: list[tuple[str, Linear]] = []
    for i, layer in enumerate(model.blocks()):
        prefix = f"model.layers.{i}"
        found += [
            (f"{prefix}.self_attn", layer.qkv),
            (f"{prefix}.self_attn", layer.o),
            (f"{prefix}.mlp", layer.gate_up),
            (f"{prefix}.mlp", layer.down),
        ]
    return found


def share_base(model: Transformer) -> Transformer:
    """A second model without adapters on the very same base, which is frozen from now on; nothing is copied.

    Each of the two can be given adapters of its own, and no gradient of the base ever exists.
    """
    with torch.device("meta"):
        twin = type(model)(model.spec)
    twin.gradient_checkpointing = model.gradient_checkpointing
    for name, module in twin.named_modules():
        source = model.get_submodule(name)
        for key, parameter in source.named_parameters(recurse=False):
            setattr(module, key, parameter.requires_grad_(False))
        for key, buffer in source.named_buffers(recurse=False):
            setattr(module, key, buffer)
    return twin


def adapters_on(base: Transformer, model: Transformer) -> dict[Tensor, Lora]:
    """The model's adapters by the matrix of the base that each of them stands beside."""
    found: dict[Tensor, Lora] = {}
    for (prefix, below), (_, linear) in zip(linears(base), linears(model), strict=True):
        if below.weight is not linear.weight:
            raise ValueError(f"the model does not share {prefix} with the base: see share_base")
        if linear.lora is not None:
            found[below.weight] = linear.lora
    return found


def add_lora(model: Transformer, rank: int, alpha: float, targets: set[str], seed: int) -> None:
    """Freezes the model and puts fresh adapters beside it; B is zero, so the output does not change."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for _, linear in linears(model):
        if targets.isdisjoint(linear.parts):
            continue
        inputs = linear.weight.shape[1]
        lora = Lora(inputs, linear.parts, targets, rank, alpha / rank)
        for a in lora.a.values():
            bound = inputs**-0.5
            a.data.copy_((torch.rand(a.shape, generator=generator) * 2 - 1) * bound)
        linear.lora = lora.to(device=model.device, dtype=model.dtype)


@contextmanager
def without_lora(model: Transformer) -> Iterator[None]:
    """The base model as it was before the adapters."""
    adapted = [(linear, linear.lora) for _, linear in linears(model)]
    for linear, _ in adapted:
        linear.lora = None
    try:
        yield
    finally:
        for linear, lora in adapted:
            linear.lora = lora


def lora_state(model: Transformer) -> dict[str, Tensor]:
    """Adapter weights under PEFT's names."""
    state: dict[str, Tensor] = {}
    for prefix, linear in linears(model):
        if linear.lora is not None:
            for part in linear.lora.a:
                name = f"base_model.model.{prefix}.{part}"
                state[f"{name}.lora_A.weight"] = linear.lora.a[part].detach()
                state[f"{name}.lora_B.weight"] = linear.lora.b[part].detach()
    return state


@torch.no_grad()
def load_lora_state(model: Transformer, state: dict[str, Tensor]) -> None:
    """The inverse of `lora_state`; names must match exactly."""
    mine = lora_state(model)
    if mine.keys() != state.keys():
        odd = sorted(mine.keys() ^ state.keys())
        raise ValueError(f"the adapter does not fit this model: {len(odd)} names differ, such as {odd[0]}")
    for name, tensor in mine.items():
        if tensor.shape != state[name].shape:
            raise ValueError(
                f"the adapter does not fit this model: {name} is {list(state[name].shape)}, not {list(tensor.shape)}"
            )
        tensor.copy_(state[name])


@torch.no_grad()
def merged_weight(linear: Linear) -> Tensor:
    """The matrix with its adapters folded in."""
    if linear.lora is None:
        return linear.weight
    lora, out = linear.lora, linear.weight.clone()
    for part, rows in zip(lora.parts, out.split(list(lora.parts.values())), strict=True):
        if part in lora.a:
            rows += F.linear(lora.b[part], lora.a[part].T) * lora.scale
    return out
