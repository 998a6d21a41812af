"""Losses against TRL's formulas, by hand, by finite differences, and however a batch is cut."""

import math
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jigsawrl.pipeline.algorithms import Aggregation, KLEstimator, Loss, OldLogprobs, default_clip
from jigsawrl.pipeline.losses import (
    LossInputs,
    LossSettings,
    aggregation_weights,
    kl_estimate,
    mean_metrics,
    policy_loss,
    value_loss,
)

LOSSES: tuple[Loss, ...] = get_args(Loss)
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
MAX_TOKENS = 9


def default_settings(loss: Loss) -> LossSettings:
    """The loss with its own clips, GSPO's wide enough that random ratios fall on both sides of them."""
    low, high = default_clip("ppo") if loss == "gspo" else default_clip(loss)
    return LossSettings(loss=loss, clip_low=low, clip_high=high)


def random_inputs(
    lengths: list[int], seed: int = 0, aggregation: Aggregation = "token_mean", spread: float = 0.3
) -> LossInputs:
    """A micro-batch that is the whole batch: all tensors filled, one advantage a sequence, in float64."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(lengths, dtype=torch.int64)
    total = int(sizes.sum())

    def near(logprobs: Tensor) -> Tensor:
        return logprobs + spread * torch.randn(total, generator=generator, dtype=torch.float64)

    logprobs = -torch.rand(total, generator=generator, dtype=torch.float64) * 3
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=near(logprobs.detach()),
        advantages=advantages.repeat_interleave(sizes),
        weights=aggregation_weights(aggregation, sizes, MAX_TOKENS),
        sequence=torch.arange(len(lengths)).repeat_interleave(sizes),
        ref_logprobs=near(logprobs.detach()),
        entropy=torch.rand(total, generator=generator, dtype=torch.float64).requires_grad_(),
        engine_logprobs=near(logprobs.detach()),
    )


def trl_loss(
    inputs: LossInputs, lengths: list[int], settings: LossSettings, aggregation: Aggregation
) -> Tensor:
    """The loss of trl 1.16's GRPOTrainer by its formulas: a table padded to the longest sequence, and a mask."""
    table = (len(lengths), max(lengths))
    mask = torch.zeros(table, dtype=torch.float64)
    for row, length in zip(mask, lengths, strict=True):
        row[:length] = 1

    def pad(tokens: Tensor | None) -> Tensor:
        assert tokens is not None
        return torch.zeros(table, dtype=tokens.dtype).masked_scatter(mask.bool(), tokens)

    logprobs, old, advantages = pad(inputs.logprobs), pad(inputs.old_logprobs), pad(inputs.advantages)[:, :1]
    ratio = (logprobs - old).exp()
    if settings.loss == "gspo":
        means = ((logprobs - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        ratio = means.exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    if settings.loss == "cispo":
        losses = -clipped.detach() * advantages * logprobs
    else:
        if settings.old_logprobs == "engine":
            ratio = ratio.clamp(max=settings.tis_clip)  # what TRL calls delta
        losses = -torch.min(ratio * advantages, clipped * advantages)
    if settings.old_logprobs == "recompute" and settings.tis_clip is not None:
        losses = losses * (old - pad(inputs.engine_logprobs)).exp().clamp(max=settings.tis_clip)
    if settings.kl_coef:
        gap = pad(inputs.ref_logprobs) - logprobs
        losses = losses + settings.kl_coef * (gap.exp() - gap - 1)
    match aggregation:
        case "sequence_mean":
            return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
        case "token_mean":
            return (losses * mask).sum() / mask.sum().clamp(min=1)
        case "constant":
            return (losses * mask).sum() / (len(lengths) * MAX_TOKENS)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(0, MAX_TOKENS), min_size=1, max_size=5).filter(any), seed=st.integers(0, 99)
)
def test_value_and_gradient_are_those_of_trl(
    loss: Loss, aggregation: Aggregation, lengths: list[int], seed: int
) -> None:
    inputs = random_inputs(lengths, seed, aggregation)
    chosen = replace(default_settings(loss), kl_coef=0.1)
    ours, _ = policy_loss(inputs, chosen)
    theirs = trl_loss(inputs, lengths, chosen, aggregation)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(each, inputs.logprobs)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("old_logprobs", "tis_clip"), [("recompute", 1.1), ("engine", 1.5)])
@pytest.mark.parametrize("loss", ["ppo", "dapo"])
def test_truncated_importance_sampling_is_that_of_trl(
    loss: Loss, old_logprobs: OldLogprobs, tis_clip: float
) -> None:
    lengths = [4, 9, 1, 0, 6]
    chosen = replace(default_settings(loss), old_logprobs=old_logprobs, tis_clip=tis_clip)
    inputs = random_inputs(lengths, spread=1.0)
    ours, theirs = policy_loss(inputs, chosen)[0], trl_loss(inputs, lengths, chosen, "token_mean")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(each, inputs.logprobs)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_single_precision_is_close_to_trl_in_double() -> None:
    lengths = [5, 3, 8]
    inputs = random_inputs(lengths, aggregation="sequence_mean")
    theirs = trl_loss(inputs, lengths, default_settings("ppo"), "sequence_mean")
    single = replace(
        inputs,
        logprobs=inputs.logprobs.float(),
        old_logprobs=inputs.old_logprobs.float(),
        advantages=inputs.advantages.float(),
    )
    ours, _ = policy_loss(single, default_settings("ppo"))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)


def one_token(ratio: float, advantage: float, **others: Tensor) -> LossInputs:
    return LossInputs(
        logprobs=torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True),
        old_logprobs=torch.tensor([-1.0], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        weights=torch.ones(1, dtype=torch.float64),
        sequence=torch.zeros(1, dtype=torch.int64),
        **others,
    )


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "value", "gradient", "clipped"),
    [
        ("ppo", 1.1, 2.0, -2.2, -2.2, False),
        ("ppo", 1.25, 2.0, -2.4, 0.0, True),
        ("ppo", 1.25, -2.0, 2.5, 2.5, False),
        ("ppo", 0.7, 2.0, -1.4, -1.4, False),
        ("ppo", 0.7, -2.0, 1.6, 0.0, True),
        ("dapo", 1.25, 2.0, -2.5, -2.5, False),
        ("dapo", 1.3, 2.0, -2.56, 0.0, True),
        ("gspo", 1.0002, 2.0, -2.0004, -2.0004, False),
        ("gspo", 1.1, 2.0, -2.0008, 0.0, True),
        ("cispo", 1.1, 2.0, -2.2 * (math.log(1.1) - 1), -2.2, False),
        ("cispo", 0.01, 2.0, -0.02 * (math.log(0.01) - 1), -0.02, False),
        ("cispo", 6.0, 2.0, -10.0 * (math.log(6.0) - 1), -10.0, True),
    ],
)
def test_one_token_worked_by_hand(
    loss: Loss, ratio: float, advantage: float, value: float, gradient: float, clipped: bool
) -> None:
    low, high = default_clip(loss)
    inputs = one_token(ratio, advantage)
    result, metrics = policy_loss(inputs, LossSettings(loss, low, high))
    result.backward()
    assert inputs.logprobs.grad is not None
    assert float(result.detach()) == pytest.approx(value)
    assert float(inputs.logprobs.grad) == pytest.approx(gradient)
    assert mean_metrics(metrics) == pytest.approx(
        {"clip_fraction": float(clipped), "ratio": ratio, "approx_kl": ratio - 1 - math.log(ratio)}
    )


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "gradient"),
    [
        ("ppo", 1.9, -1.0, 1.9),
        ("ppo", 2.1, -1.0, 0.0),
        ("gspo", 2.1, -1.0, 0.0),
        ("cispo", 2.1, 1.0, -2.0),
        ("cispo", 2.1, -1.0, 2.0),
    ],
)
def test_with_old_logprobs_of_the_engine_the_ratio_is_truncated(
    loss: Loss, ratio: float, advantage: float, gradient: float
) -> None:
    inputs = one_token(ratio, advantage)
    chosen = replace(default_settings(loss), tis_clip=2.0, old_logprobs="engine")
    result, metrics = policy_loss(inputs, chosen)
    result.backward()
    assert inputs.logprobs.grad is not None
    assert float(inputs.logprobs.grad) == pytest.approx(gradient)
    assert mean_metrics(metrics)["tis_weight"] == pytest.approx(min(ratio, 2.0))
    assert mean_metrics(metrics)["ratio"] == pytest.approx(ratio)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("engine_logprob", "weight"), [(-1.0, 1.0), (-0.5, math.exp(-0.5)), (-4.0, 2.0)])
def test_with_recomputed_logprobs_the_policy_terms_are_weighed(
    loss: Loss, engine_logprob: float, weight: float
) -> None:
    extra = {"ref_logprobs": torch.tensor([-2.0]), "engine_logprobs": torch.tensor([engine_logprob])}
    inputs = one_token(1.1, 1.0, **extra)
    chosen = replace(default_settings(loss), kl_coef=0.1)
    plain, _ = policy_loss(inputs, replace(chosen, kl_coef=0.0))
    kl = policy_loss(inputs, chosen)[0] - plain
    weighed, metrics = policy_loss(inputs, replace(chosen, tis_clip=2.0))
    torch.testing.assert_close(weighed, weight * plain + kl)
    assert mean_metrics(metrics)["tis_weight"] == pytest.approx(weight)


def finite_differences(inputs: LossInputs, name: str, chosen: LossSettings, step: float = 1e-6) -> Tensor:
    base = getattr(inputs, name).detach()
    slopes = []
    for t in range(len(base)):
        shift = torch.zeros_like(base)
        shift[t] = step
        up, down = (policy_loss(replace(inputs, **{name: base + s}), chosen)[0] for s in (shift, -shift))
        slopes.append(float(up.detach() - down.detach()) / (2 * step))
    return torch.tensor(slopes, dtype=base.dtype)


@pytest.mark.parametrize("estimator", get_args(KLEstimator))
@pytest.mark.parametrize("loss", ["ppo", "dapo", "gspo"])
def test_gradients_are_slopes(loss: Loss, estimator: KLEstimator) -> None:
    inputs = random_inputs([4, 7, 1], aggregation="sequence_mean")
    chosen = replace(default_settings(loss), kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.2)
    total, _ = policy_loss(inputs, chosen)
    total.backward()
    for name in ("logprobs", "entropy"):
        slopes = finite_differences(inputs, name, chosen)
        torch.testing.assert_close(getattr(inputs, name).grad, slopes, rtol=1e-6, atol=1e-8)


def test_gspo_with_advantages_of_tokens_gives_each_token_its_own_gradient() -> None:
    inputs = random_inputs([3], spread=0.01)
    inputs.advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    total, _ = policy_loss(inputs, default_settings("gspo"))
    total.backward()
    ratio = torch.exp((inputs.logprobs.detach() - inputs.old_logprobs).mean())
    torch.testing.assert_close(inputs.logprobs.grad, -inputs.weights * inputs.advantages * ratio)


def micro_batch(inputs: LossInputs, members: list[int]) -> LossInputs:
    """These sequences of a batch, in this order."""
    places = torch.tensor([t for i in members for t in (inputs.sequence == i).nonzero()], dtype=torch.int64)
    tensors = {f.name: getattr(inputs, f.name)[places] for f in fields(inputs)}
    lengths = torch.tensor([int((inputs.sequence == i).sum()) for i in members], dtype=torch.int64)
    tensors["sequence"] = torch.arange(len(members)).repeat_interleave(lengths)
    return LossInputs(**tensors)


@pytest.mark.parametrize("tis_clip", [None, 1.1])
@pytest.mark.parametrize("loss", LOSSES)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_batch_may_be_cut_anyhow(loss: Loss, tis_clip: float | None, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, MAX_TOKENS), min_size=1, max_size=6))
    aggregation = data.draw(st.sampled_from(AGGREGATIONS))
    inputs = random_inputs(lengths, data.draw(st.integers(0, 99)), aggregation)
    inputs.advantages = inputs.advantages + inputs.old_logprobs  # no longer one for all tokens of a sequence
    chosen = replace(default_settings(loss), kl_coef=0.1, entropy_coef=0.1, tis_clip=tis_clip)
    whole, metrics = policy_loss(inputs, chosen)
    assert inputs.entropy is not None
    leaves = (inputs.logprobs, inputs.entropy)
    gradients = torch.autograd.grad(whole, leaves)

    homes = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    order = data.draw(st.permutations(range(len(lengths))))
    total, sums = torch.zeros((), dtype=torch.float64), dict[str, Tensor]()
    for home in range(4):
        part, metrics_of_part = policy_loss(
            micro_batch(inputs, [i for i in order if homes[i] == home]), chosen
        )
        total = total + part
        sums = {name: sums.get(name, 0.0) + each for name, each in metrics_of_part.items()}
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(total, leaves), gradients, rtol=1e-12, atol=1e-12)
    assert mean_metrics(sums) == pytest.approx(mean_metrics(metrics), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_micro_batch_without_tokens_adds_nothing(loss: Loss) -> None:
    inputs = random_inputs([0, 0])
    total, metrics = policy_loss(inputs, replace(default_settings(loss), kl_coef=0.1, tis_clip=2.0))
    total.backward()
    assert float(total.detach()) == 0.0
    assert set(mean_metrics(metrics).values()) == {0.0}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_absurd_ratios_stay_finite(loss: Loss, gap: float, advantage: float) -> None:
    tokens = torch.full((3,), gap - 1.0)
    inputs = LossInputs(
        logprobs=tokens.requires_grad_(),
        old_logprobs=torch.full((3,), -1.0),
        advantages=torch.full((3,), advantage),
        weights=torch.full((3,), 1 / 3),
        sequence=torch.zeros(3, dtype=torch.int64),
        ref_logprobs=torch.full((3,), -1.0),
        engine_logprobs=torch.full((3,), -1.0 - gap),
    )
    total, metrics = policy_loss(inputs, replace(default_settings(loss), kl_coef=0.1, tis_clip=2.0))
    total.backward()
    assert inputs.logprobs.grad is not None
    assert torch.isfinite(total)
    assert torch.isfinite(inputs.logprobs.grad).all()
    assert all(math.isfinite(value) for value in mean_metrics(metrics).values())


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 5] * 5),
        ("sequence_mean", [1 / 6, 1 / 6, 1 / 9, 1 / 9, 1 / 9]),
        ("constant", [1 / 30] * 5),
    ],
)
def test_weights_of_a_batch(aggregation: Aggregation, expected: list[float]) -> None:
    weights = aggregation_weights(aggregation, torch.tensor([2, 0, 3]), max_tokens=10)
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_of_nothing_are_nothing(aggregation: Aggregation) -> None:
    for lengths in ([], [0, 0]):
        assert aggregation_weights(aggregation, torch.tensor(lengths, dtype=torch.int64), 10).shape == (0,)


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=10))
def test_means_weigh_a_batch_as_one(lengths: list[int]) -> None:
    for aggregation in ("token_mean", "sequence_mean"):
        assert float(aggregation_weights(aggregation, torch.tensor(lengths), 50).sum()) == pytest.approx(1.0)


def test_metrics_are_means_whatever_the_weights_sum_to() -> None:
    inputs = random_inputs([4, 2, 5], aggregation="constant")
    _, sums = policy_loss(inputs, default_settings("ppo"))
    logprobs, old = inputs.logprobs.detach(), inputs.old_logprobs
    ratio = torch.exp(logprobs - old)
    clipped = ((ratio > 1.2) & (inputs.advantages > 0)) | ((ratio < 0.8) & (inputs.advantages < 0))
    assert inputs.entropy is not None
    assert inputs.ref_logprobs is not None
    assert mean_metrics(sums) == pytest.approx(
        {
            "ratio": float(ratio.mean()),
            "clip_fraction": float(clipped.double().mean()),
            "approx_kl": float((ratio - 1 - ratio.log()).mean()),
            "kl_ref": float(kl_estimate("k3", logprobs, inputs.ref_logprobs).mean()),
            "entropy": inputs.entropy.mean().item(),
        }
    )


def test_entropy_lowers_the_loss() -> None:
    inputs = random_inputs([3, 2])
    plain, _ = policy_loss(inputs, default_settings("ppo"))
    with_bonus, metrics = policy_loss(inputs, replace(default_settings("ppo"), entropy_coef=0.5))
    torch.testing.assert_close(with_bonus, plain - 0.5 * metrics["entropy"])


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (1.1, 1.1), (3.0, 1.2)])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_cispo_bounds_the_weight_on_both_sides_if_asked(
    ratio: float, weight: float, advantage: float
) -> None:
    inputs = one_token(ratio, advantage)
    total, metrics = policy_loss(inputs, LossSettings("cispo", clip_low=0.2, clip_high=0.2))
    (gradient,) = torch.autograd.grad(total, inputs.logprobs)
    assert gradient.item() == pytest.approx(-weight * advantage)
    assert mean_metrics(metrics)["clip_fraction"] == float(ratio != weight)


def test_what_has_no_coefficient_is_measured_but_sends_no_gradient() -> None:
    inputs = random_inputs([3, 2])
    policy_loss(inputs, default_settings("ppo"))[0].backward()
    assert inputs.entropy is not None
    assert inputs.entropy.grad is None


def expected_gradient(kind: KLEstimator, logits: Tensor, ref: Tensor) -> Tensor:
    """The mean over tokens drawn from the policy of the gradient that an estimate sends into the logits."""
    logprobs = logits.log_softmax(0)
    drawn = logprobs.exp().detach()
    return torch.autograd.grad((drawn * kl_estimate(kind, logprobs, ref)).sum(), logits)[0]


def test_kl_estimates_have_the_means_and_the_gradients_they_are_said_to_have() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    reverse = (logprobs.exp() * (logprobs - ref)).sum()
    forward = (ref.exp() * (ref - logprobs)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((logprobs.exp() * kl_estimate(kind, logprobs, ref)).sum(), reverse)
    (reverse_gradient,) = torch.autograd.grad(reverse, logits, retain_graph=True)
    (forward_gradient,) = torch.autograd.grad(forward, logits)
    torch.testing.assert_close(expected_gradient("k1", logits, ref), torch.zeros_like(logits))
    torch.testing.assert_close(expected_gradient("k2", logits, ref), reverse_gradient)
    torch.testing.assert_close(expected_gradient("k3", logits, ref), forward_gradient)


def test_kl_estimates_by_hand() -> None:
    logprobs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -2.0])
    assert kl_estimate("k1", logprobs, ref).tolist() == [1.0, 0.0]
    assert kl_estimate("k2", logprobs, ref).tolist() == [0.5, 0.0]
    assert kl_estimate("k3", logprobs, ref).tolist() == pytest.approx([math.exp(-1), 0.0])


@pytest.mark.parametrize(
    ("value", "clip", "expected", "gradient"),
    [
        (1.0, None, 2.0, -2.0),  # (3 - 1)^2 / 2
        (1.0, 0.5, 3.125, 0.0),  # the value moved by 1 towards the return; only 0.5 of it counts
        (0.3, 0.5, 3.645, -2.7),  # within the clip
        (-1.0, 0.5, 8.0, -4.0),  # moved away: the larger, unclipped error
    ],
)
def test_value_loss_by_hand(value: float, clip: float | None, expected: float, gradient: float) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    old, returns, weights = (torch.tensor([x], dtype=torch.float64) for x in (0.0, 3.0, 1.0))
    result = value_loss(values, old, returns, weights, clip)
    result.backward()
    assert values.grad is not None
    assert float(result.detach()) == pytest.approx(expected)
    assert float(values.grad) == pytest.approx(gradient)
