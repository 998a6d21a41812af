"""What a run file says of a pipeline's shape, for whoever plans; and what is assumed where it says nothing."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np

from jigsawrl.config.files import model_spec
from jigsawrl.config.pipelines import PipelineConfig
from jigsawrl.config.settings import ModelConfig, RunConfig
from jigsawrl.config.tasks import ArithmeticTask, CalculatorTask, EpisodeTask
from jigsawrl.graph.forecast import Floats
from jigsawrl.graph.shape import ModelShape, PipelineShape
from jigsawrl.model.spec import ModelSpec, spec_from_config
from jigsawrl.model.tiny import tiny_config

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
        turns=task.max_turns if isinstance(task, EpisodeTask) else 1,
        tool_seconds=_tool_seconds(run),
        old_logprobs=algorithm.evaluates_old_policy,
        reference=algorithm.kl_coef > 0,
        critic=algorithm.advantage == "gae",
        epochs=algorithm.epochs,
        priority=entry.priority,
        max_slowdown=entry.max_slowdown,
        deadline=entry.deadline,
        arrival=entry.arrival,
        cache_tokens=rollout.kv_cache_tokens,
        trained=trained_parameters(run.model),
        micro_batch_tokens=run.trainer.micro_batch_tokens,
        longest=rollout.max_prompt_tokens + rollout.max_tokens,
        recomputed=run.model.gradient_checkpointing,
        base=shared_base(run),
    )


def shared_base(run: RunConfig) -> str:
    """What must be the same for pipelines with adapters to share their actors; empty: it shares with nobody.

    A tiny model is each pipeline's own, even where it looks like another's.
    """
    model, rollout = run.model, run.rollout
    if model.lora is None or model.path == "tiny" or rollout.backend != "jigsaw":
        return ""
    same = (model.dtype, model.trust_remote_code, run.deterministic, rollout.block_size)
    return " ".join(map(str, (Path(model.path).resolve(), *same)))


def trained_parameters(model: ModelConfig) -> float | None:
    """Of adapters; None where the whole model is trained."""
    if model.lora is None:
        return None
    spec = spec_of(model)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    ends = {
        "q_proj": hidden + spec.q_size,
        "k_proj": hidden + spec.kv_size,
        "v_proj": hidden + spec.kv_size,
        "o_proj": spec.q_size + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    return float(spec.layers * model.lora.rank * sum(ends[target] for target in model.lora.targets))


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
    """The numbers of a run file's model."""
    spec = spec_of(model)
    return ModelShape(
        "tiny" if model.tiny is not None else Path(model.path).name,
        float(spec.parameters),
        spec.layers,
        spec.hidden_size,
        spec.kv_heads,
        spec.head_dim,
        bytes_per_parameter=4 if model.dtype == "float32" else 2,
    )


def spec_of(model: ModelConfig) -> ModelSpec:
    """Of its folder's config.json, or of the tiny one."""
    if model.tiny is None:
        return model_spec(Path(model.path))
    tiny = model.tiny
    return spec_from_config(tiny_config(tiny.layers, tiny.hidden, tiny.heads, tiny.kv_heads), Path("tiny"))


def prior_lengths(max_tokens: float, at: Floats) -> Floats:
    """Lengths of which nothing is known but their limit, at these quantiles."""
    normal = NormalDist(math.log(MEDIAN * max_tokens), SPREAD)
    drawn = np.exp([normal.inv_cdf(min(max(float(each), 1e-9), 1 - 1e-9)) for each in at])
    return np.clip(np.ceil(drawn), 1.0, max_tokens)
