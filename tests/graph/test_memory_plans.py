"""What a plan says of memory is what a pipeline needs: adapters little, a cache as much as it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.config.settings import LoraConfig, ModelConfig, TinyConfig
from jigsawrl.config.shapes import spec_of, trained_parameters
from jigsawrl.errors import JigsawError
from jigsawrl.graph.fits import refuse_what_cannot_fit
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.gpu import gpu_costs
from jigsawrl.graph.hardware import HARDWARE
from jigsawrl.graph.known_models import dense
from jigsawrl.graph.memory import (
    AT_ONCE_SHARE,
    FEWEST_TOKENS,
    MOST_KEPT,
    MOST_TOKENS,
    Memory,
    activation_bytes,
    memory,
    tokens_at_once,
)
from jigsawrl.graph.outlook import Outlook
from jigsawrl.graph.shape import ModelShape, PipelineShape
from jigsawrl.model.lora import TARGETS, add_lora
from jigsawrl.model.transformer import Transformer

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_train.json"


@pytest.mark.parametrize("targets", [TARGETS, *((target,) for target in TARGETS)])
def test_the_plan_counts_the_parameters_that_adapters_really_have(targets: tuple[str, ...]) -> None:
    lora = LoraConfig.model_validate({"rank": 3, "targets": targets})
    config = ModelConfig(tiny=TinyConfig(), lora=lora)
    model = Transformer(spec_of(config))
    add_lora(model, lora.rank, lora.alpha, set(lora.targets), seed=0)
    assert trained_parameters(config) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_adapters_fit_where_the_whole_model_does_not() -> None:
    model = dense(7, "7B")
    whole, adapters = (
        memory(
            model, sequences=8, tokens=1024, tp=1, workers=1, device_bytes=80e9, trained=trained, whole=True
        )
        for trained in (None, 40e6)
    )
    assert adapters.training < 40e9 < 100e9 < whole.training
    assert adapters.rollout > model.weight_bytes


def test_the_whole_model_is_trained_where_nothing_else_is_said() -> None:
    assert trained_parameters(ModelConfig(path=str(Path("anywhere")))) is None


def test_a_cache_whose_size_is_told_is_planned_with_it() -> None:
    model = dense(1.5, "1.5B")
    told, untold = (
        memory(model, sequences=64, tokens=2048, cache_tokens=size, tp=1, workers=1, device_bytes=140e9)
        for size in (10_000, None)
    )
    assert told.rollout == model.weight_bytes + 10_000 * model.kv_bytes_per_token
    assert untold.rollout == model.weight_bytes + 64 * 2048 * model.kv_bytes_per_token
    assert told.training == untold.training


def of_an_actor(model: ModelShape, **more: Any) -> Memory:
    return memory(model, sequences=64, tokens=2048, tp=1, workers=1, device_bytes=140e9, whole=True, **more)


def test_an_actor_keeps_its_cache_while_it_waits_and_trains_and_one_without_an_engine_has_none() -> None:
    model = dense(1.5, "1.5B")
    many, few = (of_an_actor(model, cache_tokens=size) for size in (100_000, 0))
    cache = 100_000 * model.kv_bytes_per_token
    assert many.awake == many.rollout == few.awake + cache
    assert many.training == few.training + cache
    assert many.training_apart == few.training_apart == few.training
    assert many.host == few.host == few.awake


def test_training_by_kernels_needs_room_for_logits_and_for_gradients_that_are_not_added_up_yet() -> None:
    model = dense(0.5, "0.5B")
    there, here = (of_an_actor(model, by_kernels=kernels) for kernels in (True, False))
    assert there.training - here.training > model.weight_bytes
    assert there.awake == here.awake


@pytest.mark.parametrize(("name", "layers", "hidden"), [("0.5B", 24, 896), ("1.5B", 28, 1536)])
def test_activations_that_are_kept_take_what_a_gpu_was_seen_to_need(
    name: str, layers: int, hidden: int
) -> None:
    points = json.loads(MEASURED.read_text())["result"]["points"]
    peaks = {
        each["micro_batch_tokens"]: 1e9 * each["peak_gigabytes"]
        for each in points
        if (each["way"], each["shape"]) == ("kernels", name)
    }
    model = ModelShape(name, 1e9, layers, hidden, 2, 64)
    planned = {
        tokens: of_an_actor(model, by_kernels=True, micro_batch_tokens=tokens, recomputed=False).training
        for tokens in peaks
    }
    few, many = min(peaks), max(peaks)
    assert many > few
    assert planned[many] - planned[few] == pytest.approx(peaks[many] - peaks[few], rel=0.1)


@pytest.mark.parametrize(
    ("recomputed", "advice"),
    [
        (
            False,
            "set model.gradient_checkpointing, lower trainer.micro_batch_tokens, or train adapters (model.lora)",
        ),
        (True, "; lower trainer.micro_batch_tokens, or train adapters (model.lora)"),
    ],
)
def test_a_training_that_is_too_large_is_refused_with_what_would_help(recomputed: bool, advice: str) -> None:
    shape = PipelineShape(
        "big", ModelShape("4B", 4.2e9, 36, 2560, 8, 128), prompts=8, samples=8, prompt_tokens=100, max_tokens=1000,
        cache_tokens=1000, whole=True, recomputed=recomputed,
    )  # fmt: skip
    worker = HARDWARE["h100"]
    forecast = Forecast.from_prior(np.full(64, 100.0), 1000)
    outlook = Outlook(shape, gpu_costs(shape.model, worker, 1), worker, forecast)
    with pytest.raises(JigsawError, match=r"big: training needs \d+ GB on each of 1 workers") as refused:
        refuse_what_cannot_fit([outlook], worker, 1)
    assert str(refused.value).endswith(advice)


@pytest.mark.parametrize(
    ("layers", "hidden", "kept", "gigabytes", "tokens"),
    [
        (24, 896, True, None, 4096),  # on cores
        (24, 896, True, 24, 4096),
        (24, 896, True, 140, 8192),
        (24, 896, False, 140, 16_384),
        (28, 1536, True, 140, 8192),
        (28, 1536, False, 140, 16_384),
        (28, 3584, True, 80, 4096),
    ],
)
def test_a_gpu_trains_on_more_tokens_at_once_where_their_activations_are_a_small_part_of_its_memory(
    layers: int, hidden: int, kept: bool, gigabytes: float | None, tokens: int
) -> None:
    assert tokens_at_once(layers, hidden, kept, gigabytes and 1e9 * gigabytes) == tokens


@given(st.integers(1, 80), st.integers(64, 8192), st.booleans(), st.floats(1, 300))
def test_more_memory_never_means_fewer_tokens_at_once_and_beyond_the_fewest_they_fit(
    layers: int, hidden: int, kept: bool, gigabytes: float
) -> None:
    few, many = (tokens_at_once(layers, hidden, kept, factor * 1e9 * gigabytes) for factor in (1, 2))
    assert FEWEST_TOKENS <= few <= many <= (MOST_KEPT if kept else MOST_TOKENS)
    if few > FEWEST_TOKENS:
        assert few * activation_bytes(layers, hidden, kept) <= AT_ONCE_SHARE * 1e9 * gigabytes


def test_plans_count_the_tokens_that_suit_the_device_and_one_sequence_at_least() -> None:
    model = ModelShape("1.5B", 1.5e9, 28, 1536, 2, 128)

    def training(**more: Any) -> float:
        return of_an_actor(model, by_kernels=True, recomputed=False, **more).training

    assert training(micro_batch_tokens=None) == training(micro_batch_tokens=8192)
    assert training(micro_batch_tokens=None, longest=10_000) == training(micro_batch_tokens=10_000)
    assert training(micro_batch_tokens=4096, longest=100) == training(micro_batch_tokens=4096)
