"""The kernels of training against float64; where there is no GPU, on numpy and for fewer rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from adapted_models import DEVICE, distance, noise
from torch import Tensor
from triton_on_numpy import kernels_on_numpy

from jigsawrl.model.ops import PLAIN
from jigsawrl.trainer.packed import FlashAttention, PackedAttention

ON_GPU = torch.cuda.is_available()
if ON_GPU and torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs an NVIDIA GPU of the Hopper kind or newer, or none", allow_module_level=True)

with kernels_on_numpy(unless=ON_GPU):
    from jigsawrl.trainer.cuda import logprobs as fused_logprobs
    from jigsawrl.trainer.cuda import ops as cuda
    from jigsawrl.trainer.cuda.accumulate import TILE, accumulate

SHAPES = [(896, 64, 14, 2, 4864), (1536, 128, 12, 2, 8960), (3584, 128, 28, 4, 18944), (80, 40, 3, 1, 100)]
"""Hidden size, head size, heads, key heads and inner size of Qwen2.5 0.5B, 1.5B and 7B, and of none."""
ROUNDING = 5e-3


def outputs_and_gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor], dtype: torch.dtype, seed: int
) -> list[Tensor]:
    """Those of random gradients of its outputs, which are the same for the same seed."""
    leaves = [x.to(dtype).detach().clone().requires_grad_() for x in inputs]
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    chosen = [torch.randn(out.shape, device=DEVICE, generator=generator).bfloat16() for out in outputs]
    torch.autograd.backward(outputs, [each.to(out.dtype) for each, out in zip(chosen, outputs, strict=True)])
    assert all(leaf.grad is not None for leaf in leaves)
    return [*outputs, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_close(
    ours: Callable[..., Any], reference: Callable[..., Any], *inputs: Tensor, within: float = ROUNDING
) -> None:
    found = outputs_and_gradients(ours, inputs, torch.bfloat16, 1)
    wanted = outputs_and_gradients(reference, inputs, torch.float64, 1)
    distances = [distance(a, b) for a, b in zip(found, wanted, strict=True)]
    assert max(distances) < within, distances


def assert_near(
    ours: Sequence[Tensor], reference: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> None:
    """Outputs, and inputs' gradients from those of the outputs."""
    leaves = [x.double().detach().requires_grad_() for x in inputs]
    found = reference(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    wanted = [*outputs, *torch.autograd.grad(outputs, leaves, [grad.double() for grad in grads])]
    distances = [distance(a, b) for a, b in zip(ours, wanted, strict=True)]
    assert max(distances) < ROUNDING, distances


@pytest.mark.parametrize("rows", [1, 77, 3000] if ON_GPU else [1, 77])
@pytest.mark.parametrize("shape", SHAPES, ids=["0.5B", "1.5B", "7B", "odd"])
def test_kernels_between_products_and_their_gradients_are_those_of_float64(shape, rows):
    hidden, size, heads, kv_heads, inner = shape
    x, change, weight = noise(rows, hidden), noise(rows, hidden), noise(hidden)
    angles = torch.randn(rows, 1, size // 2, device=DEVICE)
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)

    def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
        return PLAIN.norm(x, weight, 1e-6)

    normed, scales = cuda.norm(x, weight, 1e-6)
    d_normed, d_x = noise(rows, hidden), noise(rows, hidden)
    found = cuda.norm_gradient(d_normed, None, x, weight, scales, trained=True)
    assert_near([normed, *found], plain_norm, [x, weight], [d_normed])
    summed, normed, scales = cuda.add_norm(x, change, weight, 1e-6)
    found = cuda.norm_gradient(d_normed, d_x, summed, weight, scales, trained=True)
    assert_near(
        [summed, normed, found[0], *found],
        lambda *args: PLAIN.add_norm(*args, 1e-6),
        [x, change, weight],
        [d_x, d_normed],
    )
    qkv, d_qkv = noise(rows, heads + 2 * kv_heads, size), noise(rows, heads + 2 * kv_heads, size)
    qk, d_qk = qkv[:, : heads + kv_heads], d_qkv[:, : heads + kv_heads]
    into = torch.empty_like(qkv)[:, : heads + kv_heads]
    cuda.rotate_back(d_qk, cos, sin, into)
    assert_near([cuda.rotate(qk, cos, sin), into], lambda x: PLAIN.rotate(x, cos, sin), [qk], [d_qk])
    gate_up, d_mlp = noise(rows, 2 * inner, scale=2), noise(rows, inner)
    assert_near(
        [cuda.swiglu(gate_up), cuda.swiglu_gradient(d_mlp, gate_up)], PLAIN.swiglu, [gate_up], [d_mlp]
    )


@pytest.mark.skipif(not ON_GPU, reason="torch has this attention for GPUs alone")
@pytest.mark.parametrize("shape", SHAPES[:3], ids=["0.5B", "1.5B", "7B"])
@pytest.mark.parametrize("lengths", [[700], [5, 600, 33, 1, 258, 64, 65]], ids=["one", "many"])
def test_attention_over_packed_sequences_is_that_of_float64(shape, lengths):
    _, size, heads, kv_heads, _ = shape
    rows = sum(lengths)
    assert_close(
        lambda q, k, v: FlashAttention(lengths, DEVICE)(0, q, k, v),
        lambda q, k, v: PackedAttention(lengths, DEVICE)(0, q, k, v),
        noise(rows, heads, size),
        noise(rows, kv_heads, size),
        noise(rows, kv_heads, size),
        within=2e-2,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 61), (300, 5003), *([(900, 32000)] if ON_GPU else [])])
def test_logprobs_and_entropies_are_those_of_float64_however_many_rows_fit(
    rows, vocabulary, temperature, monkeypatch
):
    monkeypatch.setattr(fused_logprobs, "CHUNK_ELEMENTS", 256 * vocabulary)
    hidden, head = noise(rows, 256), noise(vocabulary, 256, scale=0.1)
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)

    def ours(hidden: Tensor, head: Tensor = head) -> tuple[Tensor, Tensor]:
        return fused_logprobs.token_logprobs(hidden, head, targets, temperature, entropy_gradient=True)

    def reference(hidden: Tensor, head: Tensor = head) -> tuple[Tensor, Tensor]:
        hidden, head = hidden.double(), head.double()
        # Logits are what the product of bfloat16 numbers is rounded to, whoever goes on from there.
        rounded = hidden @ head.T + ((hidden @ head.T).bfloat16().double() - hidden @ head.T).detach()
        logprobs = (rounded / temperature).log_softmax(-1)
        return logprobs[torch.arange(rows), targets], -(logprobs.exp() * logprobs).sum(-1)

    # Products of bfloat16 numbers with sums in float32, which the head's gradient needs, torch has for GPUs alone.
    assert_close(ours, reference, hidden, *([head] if ON_GPU else []))


def test_many_gradients_are_added_up_at_once():
    sizes = (5, TILE, 3 * TILE + 17)
    totals = [torch.full((size,), float("nan"), device=DEVICE) for size in sizes]
    first, second = ([noise(size) for size in sizes] for _ in range(2))
    accumulate(list(zip(totals, first, strict=True)), first=True)
    assert all(torch.equal(total, part.float()) for total, part in zip(totals, first, strict=True))
    accumulate(list(zip(totals, second, strict=True)), first=False)
    for total, *parts in zip(totals, first, second, strict=True):
        assert torch.equal(total, parts[0].float() + parts[1].float())
