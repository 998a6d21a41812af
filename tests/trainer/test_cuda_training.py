"""The training step on CUDA against wider floats, on fresh random numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from small_models import random_model
from torch import Tensor

from jigsawrl.model.folder import fill_buffers
from jigsawrl.model.lora import add_lora
from jigsawrl.model.ops import PLAIN
from jigsawrl.model.transformer import Transformer
from jigsawrl.trainer import trainer as trainer_module
from jigsawrl.trainer.batch import Batch, onto
from jigsawrl.trainer.logprobs import chunked_logprobs, token_logprobs
from jigsawrl.trainer.optimizer import OptimizerSettings
from jigsawrl.trainer.packed import FlashAttention, PackedAttention
from jigsawrl.trainer.trainer import Trainer, trained_tokens

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs an NVIDIA GPU of the Hopper kind or newer", allow_module_level=True)

from jigsawrl.trainer.cuda import logprobs as fused_logprobs
from jigsawrl.trainer.cuda import ops as cuda

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, by the first product
CUDA = torch.device("cuda")
SHAPES = [(896, 64, 14, 2, 4864), (1536, 128, 12, 2, 8960), (3584, 128, 28, 4, 18944), (80, 40, 3, 1, 100)]
"""Hidden size, head size, heads, key heads and inner size of Qwen2.5 0.5B, 1.5B and 7B, and of none."""
ROUNDING = 5e-3


def noise(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=CUDA) * scale).bfloat16()


def distance(out: Tensor, reference: Tensor) -> float:
    return ((out.double() - reference.double()).norm() / reference.double().norm()).item()


def outputs_and_gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor], dtype: torch.dtype, seed: int
) -> list[Tensor]:
    """Those of random gradients of its outputs, which are the same for the same seed."""
    leaves = [x.to(dtype).detach().clone().requires_grad_() for x in inputs]
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator(CUDA).manual_seed(seed)
    chosen = [torch.randn(out.shape, device=CUDA, generator=generator).bfloat16() for out in outputs]
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


@pytest.mark.parametrize("rows", [1, 77, 3000])
@pytest.mark.parametrize("shape", SHAPES, ids=["0.5B", "1.5B", "7B", "odd"])
def test_kernels_between_products_and_their_gradients_are_those_of_float64(shape, rows):
    hidden, size, heads, kv_heads, inner = shape
    x, change, weight = noise(rows, hidden), noise(rows, hidden), noise(hidden)
    angles = torch.randn(rows, 1, size // 2, device=CUDA)
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


@pytest.mark.parametrize("shape", SHAPES[:3], ids=["0.5B", "1.5B", "7B"])
@pytest.mark.parametrize("lengths", [[700], [5, 600, 33, 1, 258, 64, 65]], ids=["one", "many"])
def test_attention_over_packed_sequences_is_that_of_float64(shape, lengths):
    _, size, heads, kv_heads, _ = shape
    rows = sum(lengths)
    assert_close(
        lambda q, k, v: FlashAttention(lengths, CUDA)(0, q, k, v),
        lambda q, k, v: PackedAttention(lengths, CUDA)(0, q, k, v),
        noise(rows, heads, size),
        noise(rows, kv_heads, size),
        noise(rows, kv_heads, size),
        within=2e-2,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 61), (300, 5003), (900, 32000)])
def test_logprobs_and_entropies_are_those_of_float64_however_many_rows_fit(
    rows, vocabulary, temperature, monkeypatch
):
    monkeypatch.setattr(fused_logprobs, "CHUNK_ELEMENTS", 256 * vocabulary)
    hidden, head = noise(rows, 256), noise(vocabulary, 256, scale=0.1)
    targets = torch.randint(vocabulary, (rows,), device=CUDA)

    def ours(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, head, targets, temperature, entropy_gradient=True)

    def reference(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        # Logits are what the product of bfloat16 numbers is rounded to, whoever goes on from there.
        rounded = hidden @ head.T + ((hidden @ head.T).bfloat16().double() - hidden @ head.T).detach()
        logprobs = (rounded / temperature).log_softmax(-1)
        return logprobs[torch.arange(rows), targets], -(logprobs.exp() * logprobs).sum(-1)

    assert_close(ours, reference, hidden, head)


def test_logits_of_a_whole_batch_are_never_there():
    hidden, head = noise(16384, 256).requires_grad_(), noise(151_936, 256, scale=0.1).requires_grad_()
    targets = torch.randint(len(head), (len(hidden),), device=CUDA)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, entropies = token_logprobs(hidden, head, targets, 1.0, entropy_gradient=True)
    (logprobs.sum() + entropies.sum()).backward()
    assert torch.cuda.max_memory_allocated() - before < 0.4 * 2 * len(hidden) * len(head)


def make_batch(lengths: list[int]) -> Batch:
    tokens = [torch.randint(1, 500, (n,)) for n in lengths]
    trained = [torch.arange(1 + n // 3, n) for n in lengths]
    total = sum(map(len, trained))
    weights = torch.full((total,), 1 / total, dtype=torch.float64)
    return Batch(tokens, trained, {"advantages": torch.randn(total, dtype=torch.float64), "weights": weights})


def objective_of(model: Transformer, logprobs_of: Callable[..., Any]) -> trainer_module.Objective:
    def objective(micro: Batch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values = {name: onto(hidden.device, value) for name, value in micro.values.items()}
        targets = onto(hidden.device, trained_tokens(micro))
        logprobs, entropy = logprobs_of(hidden, model.head, targets, 0.8, entropy_gradient=True)
        loss = (values["weights"] * (-values["advantages"] * logprobs - 0.01 * entropy)).sum()
        return loss, {"entropy": (values["weights"] * entropy).sum()}

    return objective


def wide_model(family: str, adapters: bool) -> Transformer:
    torch.manual_seed(0)
    model = random_model(
        family,
        scale=1.5,
        vocab_size=500,
        hidden_size=256,
        head_dim=64,
        intermediate_size=512,
        max_position_embeddings=2048,
    )
    if adapters:
        add_lora(model, 8, 16.0, {"q_proj", "v_proj", "down_proj"}, seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".b." in name:
                    parameter.normal_(std=0.05)
    model = model.bfloat16()
    fill_buffers(model)
    return model.to(CUDA)


def learned(
    model: Transformer, batch: Batch, logprobs_of: Callable[..., Any], budget: int
) -> dict[str, Tensor]:
    """Gradients, and metrics beside them."""
    trainer = Trainer(model, OptimizerSettings(lr=1e-3), budget)
    metrics = trainer.forward_backward(batch, objective_of(model, logprobs_of))
    found = {name: m.grad for name, m in trainer.optimizer.masters.items() if m.grad is not None}
    return found | {name: torch.tensor(value) for name, value in metrics.items()}


def by_operators(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        trainer_module, "_ways", lambda model, lengths: (PackedAttention(lengths, model.device), PLAIN)
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gradients_are_as_near_to_float32_as_those_of_torchs_operators(
    family, adapters, checkpointing, monkeypatch
):
    batch = make_batch([9, 300, 41, 2, 130, 77])
    models = [wide_model(family, adapters) for _ in range(3)]
    models[2].float()  # after its buffers, which are wide in all
    for model in models:
        model.gradient_checkpointing = checkpointing
    ours = learned(models[0], batch, token_logprobs, 400)
    with monkeypatch.context() as patch:
        by_operators(patch)
        plain = learned(models[1], batch, chunked_logprobs, 400)
        wanted = learned(models[2], batch, chunked_logprobs, 400)
    assert ours.keys() == plain.keys() == wanted.keys()
    for name in ("loss", "entropy"):
        assert abs(ours.pop(name) - wanted.pop(name)) < 1e-2
    far = {name: distance(plain[name], reference) for name, reference in wanted.items()}
    near = {name: distance(ours[name], reference) for name, reference in wanted.items()}
    assert all(near[name] < max(2 * far[name], 1e-2) for name in wanted), (near, far)
    assert sum(near.values()) < 1.2 * sum(far.values())


def test_in_deterministic_mode_gradients_are_the_same_every_time():
    batch = make_batch([500, 300, 1200, 900, 33])
    models = [wide_model("qwen2", False) for _ in range(2)]
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (learned(model, batch, token_logprobs, 4096) for model in models)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_first_wait_for_the_device_is_for_the_metrics_after_the_last_micro_batch():
    model, batch = wide_model("qwen2", False), make_batch([60] * 12)
    trainer = Trainer(model, OptimizerSettings(lr=1e-3), 60)
    objective = objective_of(model, token_logprobs)
    trainer.forward_backward(batch, objective)
    seen: list[Batch] = []

    def counting(micro: Batch, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(micro)
        return objective(micro, hidden)

    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            trainer.forward_backward(batch, counting)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) == 12
