"""Settings that are fine alone and impossible together. Every problem says what to set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jigsawrl.config.settings import RunConfig, TinyConfig

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")

MOST_TRAJECTORIES = 1_000_000

NO_DEMONSTRATIONS = ("data", "textarena", "environment")


def problems(config: RunConfig) -> list[str]:
    """One line for each impossible combination of values; no file is looked at."""
    return [*_algorithm(config), *_batch(config), *_engine(config), *_model(config)]


def length_problem(config: RunConfig, limit: int, of: str) -> str | None:
    """The problem of trajectories longer than a limit of the model; `of` says which limit that is."""
    prompt, tokens = config.rollout.max_prompt_tokens, config.rollout.max_tokens
    if prompt + tokens <= limit:
        return None
    fix = "both"
    if prompt < limit:
        fix = f"rollout.max_tokens to at most {limit - prompt}"
    elif tokens < limit:
        fix = f"rollout.max_prompt_tokens to at most {limit - tokens}"
    return (
        f"rollout.max_tokens: {tokens}, with rollout.max_prompt_tokens {prompt}, is more than the {of}; "
        f"lower {fix}"
    )


def _algorithm(config: RunConfig) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.advantage in GROUP_ADVANTAGES and rollout.samples < 2:
        yield (
            f"rollout.samples: 1 leaves advantage {algorithm.advantage} nothing to compare with; "
            "set rollout.samples to 2 or more, or algorithm.advantage to gae or reinforce_pp"
        )
    elif algorithm.dynamic_sampling and rollout.samples < 2:
        yield "algorithm.dynamic_sampling: needs rollout.samples of 2 or more; with 1 no reward differs"
    if algorithm.kl_in == "reward" and algorithm.kl_coef == 0:
        yield (
            "algorithm.kl_in: reward has no effect with kl_coef 0; set algorithm.kl_coef above 0 "
            "(such as 0.01), or algorithm.kl_in to loss"
        )
    if algorithm.overlong and algorithm.overlong.buffer > rollout.max_tokens:
        yield (
            f"algorithm.overlong.buffer: {algorithm.overlong.buffer} is more than rollout.max_tokens "
            f"{rollout.max_tokens}; set it to at most {rollout.max_tokens}"
        )
    if config.trainer.warmup_steps > config.steps:
        yield (
            f"trainer.warmup_steps: {config.trainer.warmup_steps} is more than steps {config.steps}; "
            f"set it to at most {config.steps}"
        )


def _batch(config: RunConfig) -> Iterator[str]:
    prompts, samples = config.rollout.prompts_per_step, config.rollout.samples
    batch, cuts = prompts * samples, config.algorithm.minibatches
    if batch > MOST_TRAJECTORIES:
        yield (
            f"rollout.prompts_per_step: {prompts}, with rollout.samples {samples}, makes {batch} trajectories; "
            f"lower one of them, to {MOST_TRAJECTORIES} of them a step at most"
        )
    elif batch % cuts:
        fits = next(n for n in range(min(batch, cuts), 0, -1) if batch % n == 0)
        yield (
            f"algorithm.minibatches: {cuts} does not divide the {batch} trajectories of a step "
            f"(prompts_per_step {prompts} x samples {samples}); set it to {fits}, for example"
        )
    if config.gang > prompts:
        key = "workers" if config.ranks is None else "ranks"
        yield (
            f"{key}: {config.gang} is more than rollout.prompts_per_step {prompts}; "
            f"set {key} to at most {prompts}, or more prompts"
        )
    size = getattr(config.task, "size", None)
    if size is not None and prompts > size:
        yield (
            f"rollout.prompts_per_step: {prompts} is more than the {size} prompts of the task; "
            f"set task.size to {prompts} or more"
        )


def _engine(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.backend == "vllm" and config.deterministic:
        yield (
            "deterministic: true needs rollout.backend jigsaw, and it is vllm; "
            "set rollout.backend to jigsaw, or deterministic to false"
        )
    if rollout.backend == "vllm" and rollout.block_size % 16:
        yield f"rollout.block_size: {rollout.block_size} does not go with vllm; set it to a multiple of 16"
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        yield (
            f"rollout.max_num_batched_tokens: {rollout.max_num_batched_tokens} is less than max_num_seqs "
            f"{rollout.max_num_seqs}, and each sequence needs a token; raise it, or lower max_num_seqs"
        )
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    needed = -(-longest // rollout.block_size) * rollout.block_size
    if rollout.kv_cache_tokens is not None and rollout.kv_cache_tokens < needed:
        yield (
            f"rollout.kv_cache_tokens: {rollout.kv_cache_tokens} does not hold one sequence of "
            f"max_prompt_tokens + max_tokens; set it to {needed} or more, or to null"
        )


def _model(config: RunConfig) -> Iterator[str]:
    tiny = config.model.tiny
    if tiny is not None:
        yield from _tiny_shape(tiny)
        if tiny.warmup_steps and config.task.kind in NO_DEMONSTRATIONS:
            yield (
                f"model.tiny.warmup_steps: a task of kind {config.task.kind} has no demonstrations to warm up on; "
                "set model.path to a trained model, or model.tiny.warmup_steps to 0"
            )
        from jigsawrl.model.tiny import MAX_POSITIONS

        if problem := length_problem(config, MAX_POSITIONS, f"{MAX_POSITIONS} positions of the tiny model"):
            yield problem


def _tiny_shape(tiny: TinyConfig) -> Iterator[str]:
    if tiny.hidden % (2 * tiny.heads):
        yield (
            f"model.tiny.hidden: {tiny.hidden} is not a multiple of {2 * tiny.heads} (twice the heads); "
            f"set it to {-(-tiny.hidden // (2 * tiny.heads)) * 2 * tiny.heads}, for example"
        )
    if tiny.heads % tiny.kv_heads:
        yield (
            f"model.tiny.kv_heads: {tiny.kv_heads} does not divide the {tiny.heads} heads; "
            f"set it to 1 or {tiny.heads}, for example"
        )
