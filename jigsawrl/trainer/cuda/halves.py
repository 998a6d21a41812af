"""A layer before and after its attention, each with its gradients by hand.

Where a batch is small, the host takes longer to note an operator on autograd's tape than the device takes to run it.
Here a layer is two such notes, attention's and the last product's, instead of a dozen. That product is left to itself
because it is not needed where activations are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsawrl.model.ops import Halves
from jigsawrl.model.transformer import Layer, Linear, RMSNorm
from jigsawrl.trainer.cuda.ops import (
    FUSED,
    add_norm,
    norm,
    norm_gradient,
    rotate,
    rotate_back,
    swiglu,
    swiglu_gradient,
)

Gradients = list[Tensor | None]


class _Before(torch.autograd.Function):
    """x -> x, q, k, v. As x comes out again, all its gradients meet here, where they are added at no cost."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: Layer, cos: Tensor, sin: Tensor, *_: Tensor
    ) -> tuple[Tensor, ...]:
        spec, ahead = layer.spec, layer.input_layernorm
        normed, scales = norm(x, ahead.weight, ahead.eps)
        qkv, kept = _product(layer.qkv, normed)
        qkv = qkv.view(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        qk, v = qkv.split((spec.heads + spec.kv_heads, spec.kv_heads), dim=1)
        raw: list[Tensor] = []
        if layer.q_norm is None or layer.k_norm is None:
            q, k = rotate(qk, cos, sin).split((spec.heads, spec.kv_heads), dim=1)
        else:
            ours, theirs = (each.contiguous() for each in qk.split((spec.heads, spec.kv_heads), dim=1))
            q, q_scales = norm(ours, layer.q_norm.weight, layer.q_norm.eps)
            k, k_scales = norm(theirs, layer.k_norm.weight, layer.k_norm.eps)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            raw = [ours, q_scales, theirs, k_scales]
        ctx.layer = layer
        ctx.save_for_backward(x, normed, scales, cos, sin, *kept, *raw)
        return x, q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_q, d_k, d_v = grads
        layer, saved = ctx.layer, iter(ctx.saved_tensors)
        x, normed, scales, cos, sin = (next(saved) for _ in range(5))
        kept = _kept(layer.qkv, saved)
        counts = [each.shape[1] for each in (d_q, d_k, d_v)]
        d_qkv = d_q.new_empty(len(d_q), sum(counts), d_q.shape[2])
        into_q, into_k, into_v = d_qkv.split(counts, dim=1)
        into_v.copy_(d_v)
        d_norms: Gradients = []
        for each, d, into in ((layer.q_norm, d_q, into_q), (layer.k_norm, d_k, into_k)):
            rotate_back(d, cos, sin, into)
            if each is not None:
                d, d_weight = norm_gradient(
                    into.contiguous(), None, next(saved), each.weight, next(saved), each.weight.requires_grad
                )
                into.copy_(d)
                d_norms.append(d_weight)
        ahead = layer.input_layernorm
        flat, needed = d_qkv.flatten(1), ctx.needs_input_grad[0] or ahead.weight.requires_grad
        back = torch.mm(flat, layer.qkv.weight) if needed else None
        d_matrix = _gradients(layer.qkv, normed, kept, flat, back)
        first: Gradients = [None, None]
        if back is not None:
            trained = ahead.weight.requires_grad
            first = [*norm_gradient(back, d_x.contiguous(), x, ahead.weight, scales, trained)]
        return first[0], None, None, None, first[1], *d_matrix, *d_norms


class _After(torch.autograd.Function):
    """x and what attention has made of it -> their sum, and what the last product makes the next layer's x of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, attended: Tensor, layer: Layer, *_: Tensor) -> tuple[Tensor, Tensor]:
        between = layer.post_attention_layernorm
        change, kept_o = _product(layer.o, attended)
        summed, normed, scales = add_norm(x, change, between.weight, between.eps)
        gate_up, kept_gate_up = _product(layer.gate_up, normed)
        ctx.layer = layer
        ctx.save_for_backward(attended, summed, normed, scales, gate_up, *kept_o, *kept_gate_up)
        return summed, swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_summed, d_mlp = (grad.contiguous() for grad in grads)
        layer, saved = ctx.layer, iter(ctx.saved_tensors)
        attended, summed, normed, scales, gate_up = (next(saved) for _ in range(5))
        kept_o, kept_gate_up = (_kept(m, saved) for m in (layer.o, layer.gate_up))
        between = layer.post_attention_layernorm.weight
        d_gate_up = swiglu_gradient(d_mlp, gate_up)
        d_normed = torch.mm(d_gate_up, layer.gate_up.weight)
        d_matrix = _gradients(layer.gate_up, normed, kept_gate_up, d_gate_up, d_normed)
        d_x, d_norm = norm_gradient(d_normed, d_summed, summed, between, scales, between.requires_grad)
        d_attended = torch.mm(d_x, layer.o.weight)
        d_o = _gradients(layer.o, attended, kept_o, d_x, d_attended)
        return d_x, d_attended, None, *d_o, d_norm, *d_matrix


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        normed, scales = norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scales)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        trained = ctx.needs_input_grad[1]
        return *norm_gradient(grads[0].contiguous(), None, x, weight, scales, trained), None


def _before(layer: Layer, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    modules = layer.input_layernorm, layer.qkv, layer.q_norm, layer.k_norm
    return _Before.apply(x.contiguous(), layer, *rope, *_parameters(*modules))  # type: ignore[no-untyped-call, no-any-return]


def _after(layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
    modules = layer.o, layer.post_attention_layernorm, layer.gate_up
    summed, mlp = _After.apply(x, attended, layer, *_parameters(*modules))  # type: ignore[no-untyped-call]
    if layer.down.lora is None:
        return torch.addmm(summed, mlp, layer.down.weight.t())
    return summed + layer.down.forward(mlp, F.linear)  # rounded in between: x would swallow what adapters add


def _parameters(*modules: Linear | RMSNorm | None) -> Iterator[Tensor]:
    """In the order in which gradients come back."""
    for module in modules:
        if module is not None:
            yield module.weight
        if isinstance(module, Linear) and module.bias is not None:
            yield module.bias
        if isinstance(module, Linear) and module.lora is not None:
            yield from module.lora.a.values()
            yield from module.lora.b.values()


def _product(matrix: Linear, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What a matrix and its adapters make of x, and what the way back needs beside x."""
    if matrix.lora is None:
        return F.linear(x, matrix.weight, matrix.bias), ()
    y, *kept = matrix.lora.product(x, matrix.weight, matrix.bias)
    return y, tuple(kept)


def _kept(matrix: Linear, saved: Iterator[Tensor]) -> tuple[Tensor, ...]:
    """The second of the above again."""
    return () if matrix.lora is None else (next(saved), next(saved))


def _gradients(
    matrix: Linear, x: Tensor, kept: tuple[Tensor, ...], grad: Tensor, back: Tensor | None
) -> Gradients:
    """Of the matrix's parameters; `back`, which is what the matrix alone makes of x's, becomes that of x."""
    found: Gradients = [torch.mm(grad.t(), x) if matrix.weight.requires_grad else None]
    if matrix.bias is not None:
        found.append(grad.sum(0) if matrix.bias.requires_grad else None)
    if matrix.lora is not None:
        low, stacked = kept
        found += matrix.lora.gradients(grad, x, low, stacked, back)
    return found


TRAINED = replace(FUSED, norm=_Norm.apply, halves=Halves(_before, _after))
"""With gradients."""
