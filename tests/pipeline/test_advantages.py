"""Advantage estimators against plain Python, by hand, and by what must always hold."""

import math
import statistics
from dataclasses import dataclass
from typing import get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jigsawrl.pipeline.advantages import (
    AdvantageInputs,
    compute_advantages,
    discounted_sums,
    gae,
    grpo,
    overlong_penalty,
    rloo,
    whiten,
    zero_variance_groups,
)
from jigsawrl.pipeline.algorithms import Advantage

KINDS: tuple[Advantage, ...] = get_args(Advantage)
GROUPED: tuple[Advantage, ...] = ("grpo", "dr_grpo", "rloo")
finite = st.floats(-10, 10, allow_subnormal=False)


@dataclass
class Batch:
    """A batch in plain lists: one list of token rewards and of values for each sequence."""

    rewards: list[float]
    groups: list[int]
    token_rewards: list[list[float]]
    values: list[list[float]]
    gamma: float = 1.0
    lam: float = 1.0

    def inputs(self) -> AdvantageInputs:
        return AdvantageInputs(
            rewards=torch.tensor(self.rewards, dtype=torch.float64),
            groups=torch.tensor(self.groups, dtype=torch.int64),
            lengths=torch.tensor([len(each) for each in self.values], dtype=torch.int64),
            token_rewards=flat(self.token_rewards),
            values=flat(self.values),
            gamma=self.gamma,
            lam=self.lam,
        )

    def reordered(self, order: list[int]) -> "Batch":
        return Batch(
            rewards=[self.rewards[i] for i in order],
            groups=[self.groups[i] for i in order],
            token_rewards=[self.token_rewards[i] for i in order],
            values=[self.values[i] for i in order],
            gamma=self.gamma,
            lam=self.lam,
        )


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def split(tokens: torch.Tensor, batch: Batch) -> list[list[float]]:
    return [part.tolist() for part in tokens.split([len(each) for each in batch.values])]


@st.composite
def batches(draw: st.DrawFn, max_sequences: int = 8) -> Batch:
    count = draw(st.integers(1, max_sequences))
    lengths = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    rows = st.tuples(*(st.lists(finite, min_size=n, max_size=n) for n in lengths)).map(list)
    return Batch(
        rewards=draw(st.lists(finite, min_size=count, max_size=count)),
        groups=draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count)),
        token_rewards=draw(rows),
        values=draw(rows),
        gamma=draw(st.sampled_from([1.0, 0.9, 0.0])),
        lam=draw(st.sampled_from([1.0, 0.95, 0.0])),
    )


def whitened(rows: list[list[float]]) -> list[list[float]]:
    tokens = [x for row in rows for x in row]
    if len(tokens) < 2:
        return [[0.0] * len(row) for row in rows]
    mean, std = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
    return [[(x - mean) / std for x in row] for row in rows]


def reference(kind: Advantage, batch: Batch) -> tuple[list[list[float]], list[list[float]] | None]:
    """The definitions, sequence by sequence and token by token."""
    totals = [r + sum(row) for r, row in zip(batch.rewards, batch.token_rewards, strict=True)]
    members = {g: [totals[i] for i, other in enumerate(batch.groups) if other == g] for g in batch.groups}
    scalars = []
    for i, (total, g) in enumerate(zip(totals, batch.groups, strict=True)):
        group = members[g]
        others = [totals[j] for j, other in enumerate(batch.groups) if other == g and j != i]
        std = statistics.stdev(group) if len(group) > 1 else 0.0
        centred = total - statistics.fmean(group)
        loo = total - statistics.fmean(others) if others else 0.0
        scalars.append({"grpo": centred / (std + 1e-4), "rloo": loo}.get(kind, centred))
    if kind in GROUPED:
        return [[a] * len(row) for a, row in zip(scalars, batch.values, strict=True)], None
    if kind == "reinforce_pp_baseline":
        return whitened([[a] * len(row) for a, row in zip(scalars, batch.values, strict=True)]), None

    rows, returns = [], []
    for reward, extra, values in zip(batch.rewards, batch.token_rewards, batch.values, strict=True):
        n = len(values)
        rewards = [extra[t] + (reward if t == n - 1 else 0.0) for t in range(n)]
        if kind == "reinforce_pp":
            rows.append([sum(batch.gamma ** (k - t) * rewards[k] for k in range(t, n)) for t in range(n)])
        else:
            following = [*values[1:], 0.0]
            delta = [rewards[t] + batch.gamma * following[t] - values[t] for t in range(n)]
            decay = batch.gamma * batch.lam
            rows.append([sum(decay ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)])
            returns.append([a + v for a, v in zip(rows[-1], values, strict=True)])
    return whitened(rows), returns if kind == "gae" else None


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(batch=batches())
def test_estimators_agree_with_their_definitions(kind: Advantage, batch: Batch) -> None:
    result = compute_advantages(kind, batch.inputs())
    advantages, returns = reference(kind, batch)
    torch.testing.assert_close(result.advantages, flat(advantages), rtol=1e-6, atol=1e-6)
    if returns is None:
        assert result.returns is None
    else:
        torch.testing.assert_close(result.returns, flat(returns), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # groups 7 and 3 interleaved: rewards 1, 0, 1 | 2, 2; std of the first is sqrt(1/3)
        ("grpo", [0.57725, 0.57725, 0.0, -1.15450, -1.15450, -1.15450, 0.57725]),
        ("dr_grpo", [1 / 3, 1 / 3, 0.0, -2 / 3, -2 / 3, -2 / 3, 1 / 3]),
        ("rloo", [0.5, 0.5, 0.0, -1.0, -1.0, -1.0, 0.5]),
        ("reinforce_pp", [1.0, 1.0, 2.0, 0.0, 0.0, 0.0, 1.0]),
        ("reinforce_pp_baseline", [1 / 3, 1 / 3, 0.0, -2 / 3, -2 / 3, -2 / 3, 1 / 3]),
    ],
)
def test_a_small_batch_worked_by_hand(kind: Advantage, expected: list[float]) -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 2.0, 0.0, 2.0, 1.0]),
        groups=torch.tensor([7, 3, 7, 3, 7]),
        lengths=torch.tensor([2, 1, 3, 0, 1]),
    )
    wanted = torch.tensor(expected)
    if kind.startswith("reinforce"):
        wanted = (wanted - wanted.mean()) / wanted.std()
    result = compute_advantages(kind, inputs).advantages
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)


def test_grpo_matches_trl_on_equal_groups() -> None:
    rewards = torch.rand(6 * 4, generator=torch.Generator().manual_seed(0))
    table = rewards.view(6, 4)
    trl = (table - table.mean(1, keepdim=True)) / (table.std(1, keepdim=True) + 1e-4)
    groups = torch.arange(6).repeat_interleave(4)
    torch.testing.assert_close(grpo(rewards.double(), groups).float(), trl.view(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", GROUPED)
@settings(deadline=None, max_examples=40)
@given(batch=batches())
def test_advantages_of_a_group_sum_to_zero(kind: Advantage, batch: Batch) -> None:
    inputs = batch.inputs()
    inputs.lengths = torch.ones_like(inputs.lengths)
    inputs.token_rewards = None
    advantages = compute_advantages(kind, inputs).advantages
    for group in inputs.groups.unique():
        assert abs(float(advantages[inputs.groups == group].sum())) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_permuting_the_sequences_permutes_the_result(kind: Advantage, data: st.DataObject) -> None:
    batch = data.draw(batches())
    order = data.draw(st.permutations(range(len(batch.rewards))))
    before = split(compute_advantages(kind, batch.inputs()).advantages, batch)
    shuffled = batch.reordered(order)
    after = split(compute_advantages(kind, shuffled.inputs()).advantages, shuffled)
    torch.testing.assert_close(flat(after), flat([before[i] for i in order]), rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(rewards=st.lists(finite, min_size=2, max_size=8), scale=st.floats(1, 100), shift=st.floats(-100, 100))
def test_scale_and_shift_of_the_rewards_are_nothing_to_grpo(
    rewards: list[float], scale: float, shift: float
) -> None:
    assume(statistics.stdev(rewards) > 0.1)
    before = torch.tensor(rewards, dtype=torch.float64)
    group = torch.zeros(len(rewards), dtype=torch.int64)
    # not exactly nothing: the epsilon beside the standard deviation is worth one part in a thousand here
    torch.testing.assert_close(
        grpo(scale * before + shift, group), grpo(before, group), rtol=1.1e-3, atol=0.0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_alone_in_its_group_has_a_finite_advantage(kind: Advantage) -> None:
    inputs = AdvantageInputs(
        torch.tensor([3.0]), torch.tensor([0]), torch.tensor([1]), values=torch.tensor([1.0])
    )
    assert compute_advantages(kind, inputs).advantages.tolist() == [0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", [0, 3])
def test_a_batch_without_tokens_has_no_advantages(kind: Advantage, sequences: int) -> None:
    inputs = AdvantageInputs(
        rewards=torch.ones(sequences),
        groups=torch.zeros(sequences, dtype=torch.int64),
        lengths=torch.zeros(sequences, dtype=torch.int64),
        values=torch.zeros(0),
    )
    assert compute_advantages(kind, inputs).advantages.shape == (0,)


@pytest.mark.parametrize("kind", GROUPED)
def test_equal_rewards_give_exactly_zero_in_the_dtype_of_the_rewards(kind: Advantage) -> None:
    inputs = AdvantageInputs(
        rewards=torch.full((7,), 0.1),
        groups=torch.zeros(7, dtype=torch.int64),
        lengths=torch.ones(7, dtype=torch.int64),
    )
    advantages = compute_advantages(kind, inputs).advantages
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [0.0] * 7


@settings(deadline=None, max_examples=40)
@given(batch=batches())
def test_gae_undiscounted_is_return_minus_value(batch: Batch) -> None:
    inputs = batch.inputs()
    assert inputs.token_rewards is not None
    assert inputs.values is not None
    to_go = discounted_sums(inputs.token_rewards, inputs.lengths, 1.0)
    advantages = gae(inputs.token_rewards, inputs.values, inputs.lengths, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, to_go - inputs.values, rtol=1e-12, atol=1e-12)


def test_gae_with_lam_zero_is_the_td_error_and_stops_at_the_end_of_a_sequence() -> None:
    rewards = torch.tensor([0.0, 1.0, 5.0])
    values = torch.tensor([0.5, 0.25, 2.0])
    advantages = gae(rewards, values, torch.tensor([2, 1]), gamma=0.5, lam=0.0)
    assert advantages.tolist() == [0.5 * 0.25 - 0.5, 1.0 - 0.25, 5.0 - 2.0]


def test_gae_whitens_what_the_policy_sees_but_not_what_the_critic_sees() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0]),
        groups=torch.tensor([0, 0]),
        lengths=torch.tensor([2, 1]),
        values=torch.tensor([0.5, 0.5, 0.5]),
    )
    result = compute_advantages("gae", inputs)
    assert result.returns is not None
    assert result.returns.tolist() == [1.0, 1.0, 0.0]
    torch.testing.assert_close(result.advantages, torch.tensor([1.0, 1.0, -2.0]) / math.sqrt(3))


def test_gae_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="critic"):
        compute_advantages("gae", AdvantageInputs(torch.ones(1), torch.zeros(1), torch.ones(1).long()))


def test_a_penalty_on_tokens_lowers_the_reward_of_its_sequence() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 1.0]),
        groups=torch.tensor([0, 0]),
        lengths=torch.tensor([2, 1]),
        token_rewards=torch.tensor([-0.25, -0.25, -0.1]),
    )
    advantages = compute_advantages("rloo", inputs).advantages
    torch.testing.assert_close(advantages, torch.tensor([-0.4, -0.4, 0.4]))


@settings(deadline=None, max_examples=40)
@given(values=st.lists(st.integers(-50, 50), min_size=2, max_size=20))
def test_whitened_values_have_mean_zero_and_variance_one(values: list[int]) -> None:
    result = whiten(torch.tensor(values, dtype=torch.float64))
    assert abs(float(result.mean())) < 1e-9
    assert float(result.var()) == pytest.approx(float(len(set(values)) > 1), abs=1e-6)


def test_overlong_penalty_falls_linearly_in_the_buffer() -> None:
    lengths = torch.tensor([0, 80, 84, 90, 99, 100, 120])
    penalties = overlong_penalty(lengths, max_tokens=100, buffer=20, penalty=0.5)
    torch.testing.assert_close(penalties, torch.tensor([0.0, 0.0, -0.1, -0.25, -0.475, -0.5, -0.5]))


@settings(deadline=None, max_examples=60)
@given(pairs=st.lists(st.tuples(st.integers(-1, 2), st.sampled_from([0.0, 0.1, 1.0])), max_size=10))
def test_groups_of_equal_rewards_are_found(pairs: list[tuple[int, float]]) -> None:
    groups = torch.tensor([g for g, _ in pairs], dtype=torch.int64)
    rewards = torch.tensor([r for _, r in pairs])
    expected = [len({r for other, r in pairs if other == g}) == 1 for g, _ in pairs]
    assert zero_variance_groups(rewards, groups).tolist() == expected


def test_rloo_is_a_scaled_dr_grpo() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 4.0], dtype=torch.float64)
    group = torch.zeros(4, dtype=torch.int64)
    torch.testing.assert_close(rloo(rewards, group), (rewards - rewards.mean()) * 4 / 3)


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_at_the_ends_of_float32_have_finite_advantages(kind: Advantage) -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([3e38, -3e38, -3e38, 3e38]),
        groups=torch.tensor([0, 0, 1, 1]),
        lengths=torch.tensor([2, 1, 1, 3]),
        values=torch.full((7,), 1e38),
    )
    result = compute_advantages(kind, inputs)
    assert result.advantages.isfinite().all()
    assert result.advantages[0] > 0 > result.advantages[2]
    assert result.returns is None or result.returns.isfinite().all()
