"""What a run file says of a pipeline's shape, for whoever plans; and what is assumed where it says nothing."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from jigsawrl.config.files import model_spec
from jigsawrl.config.pipelines import PipelineConfig
from jigsawrl.config.settings import ModelConfig, RunConfig
from jigsawrl.config.tasks import ArithmeticTask, CalculatorTask, EnvironmentTask, TextArenaTask
from jigsawrl.graph.shape import ModelShape, PipelineShape
from jigsawrl.model.spec import spec_from_config
from jigsawrl.model.tiny import tiny_config

Floats = NDArray[np.float64]

MEDIAN, SPREAD = 0.25, 0.75
"""Prior of lengths: a log-normal with its median at this part of max_tokens, cut there. Traced workloads have medians
of 0.006 to 1 of it and spreads of 0.4 to 1.4, half of them 0.6 to 0.8."""
PROMPT = 0.25
"""Prior of prompts: this part of max_prompt_tokens; traced ones have 0.2 to 0.7 of it."""


def pipeline_shape(name: str, run: RunConfig, entry: PipelineConfig) -> PipelineShape:
    """One pipeline among others, as its run file and its entry say."""
    algorithm, rollout, task = run.algorithm, run.rollout, run.task
    return PipelineShape(
        name=name,
        model=model_shape(run.model),
        prompts=rollout.prompts_per_step,
        samples=rollout.samples,
        prompt_tokens=_prompt_tokens(run),
        max_tokens=rollout.max_tokens,
        steps=entry.steps or run.steps,
        tp=entry.tp or 1,
        turns=task.max_turns if isinstance(task, CalculatorTask | TextArenaTask | EnvironmentTask) else 1,
        tool_seconds=_tool_seconds(run),
        old_logprobs=algorithm.old_logprobs == "recompute",
        reference=algorithm.kl_coef > 0,
        critic=algorithm.advantage == "gae",
        epochs=algorithm.epochs,
        priority=entry.priority,
        max_slowdown=entry.max_slowdown,
        deadline=entry.deadline,
        arrival=entry.arrival,
    )


def _prompt_tokens(run: RunConfig) -> float:
    task, limit = run.task, run.rollout.max_prompt_tokens
    if isinstance(task, ArithmeticTask | CalculatorTask):
        return float(min(limit, 2 * len(str(task.max_number)) + 2))
    return max(1.0, PROMPT * limit)


def _tool_seconds(run: RunConfig) -> float:
    """The wait of a batch for its slowest call."""
    task = run.task
    return task.latency + task.latency_jitter if isinstance(task, CalculatorTask) else 0.0


def model_shape(model: ModelConfig) -> ModelShape:
    """The numbers of a run file's model: of its folder's config.json, or of the tiny one."""
    if model.tiny is not None:
        tiny = model.tiny
        raw = tiny_config(tiny.layers, tiny.hidden, tiny.heads, tiny.kv_heads)
        spec, name = spec_from_config(raw, Path("tiny")), "tiny"
    else:
        spec, name = model_spec(Path(model.path)), Path(model.path).name
    return ModelShape(
        name,
        float(spec.parameters),
        spec.layers,
        spec.hidden_size,
        spec.kv_heads,
        spec.head_dim,
        bytes_per_parameter=4 if model.dtype == "float32" else 2,
    )


def prior_lengths(max_tokens: float, at: Floats) -> Floats:
    """Lengths of which nothing is known but their limit, at these quantiles."""
    normal = NormalDist(math.log(MEDIAN * max_tokens), SPREAD)
    drawn = np.exp([normal.inv_cdf(min(max(float(each), 1e-9), 1 - 1e-9)) for each in at])
    return np.clip(np.ceil(drawn), 1.0, max_tokens)
