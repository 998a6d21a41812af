"""Lengths foreseen from the last steps."""

from __future__ import annotations

import numpy as np
import pytest

from jigsawrl.graph.forecast import POINTS, Forecast

LIMIT = 8192


def step(rng: np.random.Generator, scale: float = 300.0) -> np.ndarray:
    """A batch like the traces': a body that repeats, and a few stragglers that do not."""
    body = scale * rng.lognormal(0, 0.6, 1020)
    stragglers = rng.uniform(1000, LIMIT, 4)
    return np.minimum(np.concatenate((body, stragglers)), LIMIT)


def foreseen_after(steps: int, growth: float = 1.0, seed: int = 0) -> tuple[Forecast, np.ndarray]:
    rng = np.random.default_rng(seed)
    forecast = Forecast.from_prior(step(rng), LIMIT)
    for i in range(1, steps):
        forecast = forecast.after(step(rng, 300.0 * growth**i))
    return forecast, step(rng, 300.0 * growth**steps)


def test_the_body_is_foreseen_and_the_last_straggler_is_said_not_to_be() -> None:
    forecast, actual = foreseen_after(6)
    quantiles = np.quantile(actual, POINTS)
    body = slice(0, 112)  # up to where one sequence in eight is left
    assert forecast.quantiles()[body] == pytest.approx(quantiles[body], rel=0.15)
    spread = forecast.spread()
    assert spread[body].max() < 0.15
    assert spread[-1] > 1.5 * np.median(spread[body])


def test_a_cautious_forecast_is_longer() -> None:
    forecast, _ = foreseen_after(6)
    assert (forecast.quantiles(0.9) >= forecast.quantiles(0.5)).all()
    assert forecast.quantiles(0.9).max() <= LIMIT


def test_one_step_of_history_makes_no_promises() -> None:
    forecast, _ = foreseen_after(1)
    assert forecast.spread().min() >= 0.5


def test_growing_answers_are_followed() -> None:
    forecast, actual = foreseen_after(8, growth=1.2)
    median = forecast.quantiles()[64]
    assert median == pytest.approx(np.median(actual), rel=0.15)


def test_noise_is_no_trend() -> None:
    errors = []
    for seed in range(20):
        forecast, actual = foreseen_after(8, seed=seed)
        errors.append(forecast.quantiles()[64] / np.median(actual) - 1)
    assert abs(np.mean(errors)) < 0.03
    assert np.std(errors) < 0.08


def test_lengths_are_a_batch_of_the_foreseen_distribution() -> None:
    forecast, _ = foreseen_after(6)
    lengths = forecast.lengths(1000)
    assert len(lengths) == 1000
    assert (np.diff(lengths) < 0).any(), "in mixed order, as requests come"
    assert np.median(lengths) == pytest.approx(forecast.quantiles()[64], rel=0.05)


def test_survivors_are_foreseen_from_where_they_are() -> None:
    forecast, _ = foreseen_after(6)
    here = forecast.quantiles()[100]
    left = forecast.beyond(here, 30)
    assert len(left) == 30
    assert left.min() >= 1
    assert here + left.max() <= LIMIT
    late = forecast.beyond(LIMIT - 10, 3)
    assert (late >= 1).all()
    assert late.max() <= 10
