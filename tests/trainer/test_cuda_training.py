"""The training step on CUDA against wider floats, on fresh random numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapted_models import distance, noise
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
from jigsawrl.trainer.packed import PackedAttention
from jigsawrl.trainer.trainer import Trainer, trained_tokens

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs an NVIDIA GPU of the Hopper kind or newer", allow_module_level=True)


os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, by the first product
CUDA = torch.device("cuda")


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
