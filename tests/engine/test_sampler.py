"""Sampling: the right distribution, the right log-prob, and randomness from the key alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.engine.sampler import keyed_uniforms, sample
from jigsawrl.engine.types import SampleKey, SamplingParams


def uniforms_of(key: int, count: int) -> np.ndarray:
    return keyed_uniforms(np.full(count, key, dtype=np.uint64), np.arange(count))


def draw(logits: torch.Tensor, params: SamplingParams, count: int = 20_000) -> torch.Tensor:
    uniforms = torch.from_numpy(uniforms_of(12345, count))
    tokens, _ = sample(logits.expand(count, -1), [params] * count, uniforms)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / count


def test_keyed_numbers_are_uniform_and_unrelated_between_keys_and_positions():
    numbers = np.stack([uniforms_of(key, 4096) for key in range(64)])
    assert 0 <= numbers.min() < 1e-3 < 0.999 < numbers.max() < 1
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    expected = numbers.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi-square with 63 degrees: p about 1e-5
    correlations = np.corrcoef(numbers)
    assert np.abs(correlations[~np.eye(64, dtype=bool)]).max() < 0.08
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.01


def test_every_part_of_a_key_counts():
    key = SampleKey(seed=1, pipeline="a", step=2, prompt=3, sample=4)
    others = [
        SampleKey(2, "a", 2, 3, 4),
        SampleKey(1, "b", 2, 3, 4),
        SampleKey(1, "a", 3, 3, 4),
        SampleKey(1, "a", 2, 4, 4),
        SampleKey(1, "a", 2, 3, 5),
    ]
    assert len({key.hashed(), *(other.hashed() for other in others)}) == 6
    assert key.hashed() == 9912702694580901605  # the same on every machine, for ever


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.5),
        SamplingParams(1, temperature=2.0, top_k=4),
        SamplingParams(1, top_p=0.7),
        SamplingParams(1, min_p=0.2),
        SamplingParams(1, temperature=1.5, top_k=6, top_p=0.8, min_p=0.05),
    ],
)
def test_tokens_are_drawn_from_the_distribution_that_transformers_computes(params):
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1.5
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None])[0].softmax(-1)
    drawn = draw(logits, params)
    assert torch.equal(drawn > 0, expected > 1e-4)
    torch.testing.assert_close(drawn, expected, atol=0.015, rtol=0)


def test_the_logprob_is_that_of_the_full_softmax_at_the_temperature():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(1, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1)] * 5
    tokens, logprobs = sample(logits, params, torch.tensor([0.0, 0.2, 0.5, 0.8, 0.999]))
    expected = (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


def test_temperature_zero_takes_the_likeliest_token_in_a_mixed_batch():
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(1, temperature=0.0), SamplingParams(1), SamplingParams(1, temperature=0.0)]
    tokens, logprobs = sample(logits, params, torch.tensor([0.9, 0.0, 0.9]))
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    assert tokens[1] == 0  # the smallest number falls on the first token
    torch.testing.assert_close(logprobs[0], logits[0].log_softmax(-1).max())


@given(st.integers(2, 40), st.integers(0, 2**32 - 1), st.floats(0, 1 - 2**-23, width=32))
def test_a_token_that_was_cut_is_never_drawn(vocabulary, seed, uniform):
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * 5
    token, _ = sample(logits, [SamplingParams(1, top_k=2)], torch.tensor([uniform]))
    assert token.item() in logits[0].topk(2).indices.tolist()
