"""Gradients do not depend on how a batch is cut, and the optimizer does what it says."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import random_model

from jigsawrl.trainer import logprobs as logprobs_module
from jigsawrl.trainer.batch import Batch, balanced_shares, flat_indices, micro_batches
from jigsawrl.trainer.logprobs import token_logprobs
from jigsawrl.trainer.optimizer import Optimizer, OptimizerSettings, learning_rate
from jigsawrl.trainer.packed import PackedAttention, group_lengths
from jigsawrl.trainer.trainer import Trainer, evaluate, hidden_states, policy_logprobs, trained_tokens


def make_batch(lengths: list[int], seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(1, 61, (n,), generator=generator) for n in lengths]
    trained = [torch.arange(1 + n // 3, n) for n in lengths]
    total = sum(map(len, trained))
    values = {"advantages": torch.randn(total, generator=generator, dtype=torch.float64)}
    values["weights"] = torch.full((total,), 1 / total, dtype=torch.float64)
    return Batch(tokens, trained, values)


def objective_of(model):
    def objective(micro: Batch, hidden: torch.Tensor):
        logprobs, entropy = token_logprobs(
            hidden, model.head, trained_tokens(micro), 0.7, entropy_gradient=True
        )
        terms = -micro.values["advantages"] * logprobs - 0.01 * entropy
        return (micro.values["weights"] * terms).sum(), {"entropy": (micro.values["weights"] * entropy).sum()}

    return objective


def gradients(model, batch: Batch, budget: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    trainer = Trainer(model, OptimizerSettings(lr=1e-3), budget)
    trainer.forward_backward(batch, objective_of(model))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@given(
    lengths=st.lists(st.integers(2, 70), min_size=1, max_size=12),
    budget=st.integers(1, 400),
    checkpointing=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_the_gradient_of_a_batch_is_exact_however_it_is_cut(lengths, budget, checkpointing):
    model = random_model("qwen3").double()
    batch = make_batch(lengths)
    whole = gradients(model, batch, 10**9)
    model.gradient_checkpointing = checkpointing
    cut = gradients(model, batch, budget)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, atol=1e-12, rtol=1e-10)


def test_between_micro_batches_somebody_else_has_a_say_and_no_graph_of_the_last_one_is_left():
    """A GPU's training may be moved to other processors there; what is left of a graph would stay on the old ones."""
    model, batch = random_model(), make_batch([30, 40, 50, 60])
    trainer = Trainer(model, OptimizerSettings(lr=1e-3), 60)
    losses: list[weakref.ref[torch.Tensor]] = []
    left: list[list[bool]] = []
    objective = objective_of(model)

    def watched(micro, hidden):
        loss, metrics = objective(micro, hidden)
        losses.append(weakref.ref(loss))
        return loss, metrics

    trainer.forward_backward(batch, watched, lambda: left.append([loss() is not None for loss in losses]))
    assert left == [[], [False], [False, False], [False, False, False], [False] * 4][: len(losses)]
    assert len(losses) == len(micro_batches([30, 40, 50, 60], 60)) > 2
    calls: list[None] = []
    evaluate(model, batch, 60, policy_logprobs(model, 1.0), lambda: calls.append(None))
    assert len(calls) == len(losses)


def test_packed_sequences_see_nothing_of_each_other():
    model = random_model().double()
    batch = make_batch([5, 60, 33, 2, 41])
    together = hidden_states(model, batch)
    apart = torch.cat([hidden_states(model, batch.select([i])) for i in range(5)])
    torch.testing.assert_close(together, apart, atol=1e-12, rtol=1e-10)


def test_large_vocabularies_are_cut_into_chunks_with_the_same_result(monkeypatch):
    model = random_model().double()
    batch = make_batch([30, 50, 20])
    whole = gradients(model, batch, 10**9)
    monkeypatch.setattr(logprobs_module, "CHUNK_ELEMENTS", 61 * 7)
    cut = gradients(model, batch, 10**9)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, atol=1e-12, rtol=1e-10)


def test_evaluate_gives_values_in_the_order_of_the_batch():
    model = random_model()
    batch = make_batch([9, 50, 7, 30])
    read = policy_logprobs(model, 1.0)
    whole = evaluate(model, batch, 10**9, read)
    torch.testing.assert_close(evaluate(model, batch, 20, read), whole, atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 500))
def test_micro_batches_keep_every_sequence_once_and_the_budget(counts, budget):
    groups = micro_batches(counts, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(counts)))
    assert all(len(group) == 1 or sum(counts[i] for i in group) <= budget for group in groups)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 5))
def test_shares_are_balanced_to_within_one_sequence(counts, workers):
    shares = balanced_shares(counts, workers)
    assert sorted(i for share in shares for i in share) == list(range(len(counts)))
    loads = [sum(counts[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(counts)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_attention_groups_waste_little(lengths):
    groups = group_lengths(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert max(lengths[i] for i in group) <= max(32, 1.3 * min(lengths[i] for i in group))


def test_flat_indices_pick_the_tokens_of_some_sequences():
    assert flat_indices(torch.tensor([2, 3, 1]), [2, 0]).tolist() == [5, 0, 1]


def test_attention_over_packed_sequences_is_causal_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(57, h, 8, dtype=torch.float64, generator=generator) for h in (4, 2, 2))
    lengths = [3, 40, 14]
    out = PackedAttention(lengths, q.device)(0, q, k, v)
    start = 0
    for length in lengths:
        for i in range(start, start + length):
            keys = k[start : i + 1].repeat_interleave(2, dim=1)
            values = v[start : i + 1].repeat_interleave(2, dim=1)
            weights = (torch.einsum("hd,shd->hs", q[i], keys) / 8**0.5).softmax(-1)
            torch.testing.assert_close(out[i], torch.einsum("hs,shd->hd", weights, values))
        start += length


def test_bf16_weights_follow_float32_masters():
    model = random_model().bfloat16()
    trainer = Trainer(model, OptimizerSettings(lr=1e-4, max_grad_norm=None), 100)
    batch = make_batch([30, 20])
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        trainer.forward_backward(batch, objective_of(model))
        trainer.optim_step()
    for name, parameter in model.named_parameters():
        master = trainer.optimizer.masters[name]
        assert master.dtype == torch.float32
        assert torch.equal(parameter, master.bfloat16())
    moved = [name for name, p in trainer.optimizer.masters.items() if not torch.equal(p, start[name].float())]
    assert len(moved) == len(start)


def test_state_saved_and_loaded_goes_on_bit_for_bit():
    def some_steps(trainer, model, count):
        for _ in range(count):
            trainer.forward_backward(make_batch([20, 30], seed=trainer.optimizer.steps), objective_of(model))
            trainer.optim_step()

    for dtype in (torch.float32, torch.bfloat16):
        model = random_model().to(dtype)
        trainer = Trainer(model, OptimizerSettings(lr=1e-3, schedule="cosine", total_steps=6), 40)
        some_steps(trainer, model, 2)
        saved = {name: tensor.clone() for name, tensor in trainer.save_state().items()}
        some_steps(trainer, model, 3)
        other = random_model(seed=5).to(dtype)
        resumed = Trainer(other, OptimizerSettings(lr=1e-3, schedule="cosine", total_steps=6), 40)
        resumed.load_state(saved)
        some_steps(resumed, other, 3)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_an_update_with_a_nan_is_left_out_and_counted():
    model = random_model()
    optimizer = Optimizer(model, OptimizerSettings(lr=1.0))
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    assert optimizer.step()["skipped_updates"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_updates_are_those_of_torchs_adamw_bit_for_bit():
    model, other = random_model(), random_model()
    optimizer = Optimizer(model, OptimizerSettings(lr=1e-2, weight_decay=0.1, max_grad_norm=None))
    matrices, vectors = (
        [p for p in other.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=generator)
            theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_schedules(schedule, expected):
    rates = OptimizerSettings(lr=1.0, schedule=schedule, warmup_steps=2, total_steps=6)
    assert [learning_rate(rates, step) for step in range(6)] == pytest.approx(expected)


def test_weight_decay_leaves_norms_alone():
    model = random_model()
    optimizer = Optimizer(model, OptimizerSettings(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    matrix, norm = model.layers[0].o.weight.clone(), model.norm.weight.clone()
    optimizer.step()
    torch.testing.assert_close(model.layers[0].o.weight, matrix * 0.95)
    assert torch.equal(model.norm.weight, norm)
