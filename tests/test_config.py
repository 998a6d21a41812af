"""Settings: what is accepted is exact, and what is refused says what to do."""

import datetime
import re
from typing import Any, get_args

import pytest
from config_helpers import SUMS, config_of, refusal

from jigsawrl.config import RunConfig, text
from jigsawrl.config.runfile import validated
from jigsawrl.config.schema import all_settings, section_at, sections
from jigsawrl.pipeline.algorithms import Advantage, Loss, default_aggregation, default_clip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout": {"sampels": 3}}, "rollout.sampels: no such setting; did you mean 'samples'?"),
        ({"rolout": {"samples": 3}}, "rolout: no such setting; did you mean 'rollout'?"),
        ({"rollout": {"lr": 1}}, "rollout.lr: no such setting; did you mean 'trainer.lr'?"),
        ({"lr": 1}, "lr: no such setting; did you mean 'trainer.lr'?"),
        ({"checkpoint": {"zzz": 1}}, "checkpoint.zzz: no such setting; checkpoint has every, keep"),
        (
            {"task": {"kind": "arithmetic", "reward": {}}},
            "task.reward: no such setting; task has kind, max_number, operations, size",
        ),
        (
            {"rollout": {"samples": "ten"}},
            "rollout.samples: 'ten' is not allowed; it must be a whole number, at least 1 (default 8)",
        ),
        (
            {"rollout": {"samples": True}},
            "rollout.samples: true is not allowed; it must be a whole number, at least 1 (default 8)",
        ),
        (
            {"rollout": {"samples": 8.0}},
            "rollout.samples: 8.0 is not allowed; it must be a whole number, at least 1 (default 8)",
        ),
        (
            {"rollout": {"samples": "8"}},
            "rollout.samples: '8' is not allowed; it must be a whole number, at least 1; write it without quotes",
        ),
        (
            {"rollout": {"top_p": 0}},
            "rollout.top_p: 0 is not allowed; it must be a number, above 0 and at most 1 (default 1.0)",
        ),
        (
            {"rollout": {"temperature": float("nan")}},
            "rollout.temperature: .nan is not allowed; it must be a number, above 0 (default 1.0)",
        ),
        (
            {"algorithm": {"kl_coef": float("inf")}},
            "algorithm.kl_coef: .inf is not allowed; it must be a number, at least 0 (default 0.0)",
        ),
        (
            {"trainer": {"lr": 10**400}},
            f"trainer.lr: 1{'0' * 56}... is not allowed; it must be a number, at least 0 and at most 1 "
            "(default 1e-06)",
        ),
        (
            {"trainer": {"lr": True}},
            "trainer.lr: true is not allowed; it must be a number, at least 0 and at most 1 (default 1e-06)",
        ),
        (
            {"algorithm": {"clip_low": 1.5}},
            "algorithm.clip_low: 1.5 is not allowed; it must be a number, at least 0 and at most 1",
        ),
        (
            {"algorithm": {"loss": "pppo"}},
            "algorithm.loss: 'pppo' is not allowed; it must be one of ppo, dapo, gspo, cispo; did you mean 'ppo'?",
        ),
        ({"deterministic": 1}, "deterministic: 1 is not allowed; it must be true or false (default false)"),
        (
            {"threads": 0},
            "threads: 0 is not allowed; it must be a whole number, at least 1 and at most 1024, or null",
        ),
        (
            {"rollout": {"stop": "x"}},
            "rollout.stop: 'x' is not allowed; it must be a list, each text, not empty",
        ),
        (
            {"rollout": {"stop": ["a", 3]}},
            "rollout.stop[1]: 3 is not allowed; it must be text, not empty; write it in quotes",
        ),
        (
            {"trainer": {"betas": [0.9]}},
            "trainer.betas: [0.9] is not allowed; it must be a list of 2, each a number, at least 0 and below 1",
        ),
        (
            {"rollout": None},
            "rollout: null is not allowed; it must be a section (keys beneath it); remove the key for the defaults",
        ),
        ({"rollout": 3}, "rollout: 3 is not allowed; it must be a section (keys beneath it)"),
        ({"name": 7}, "name: 7 is not allowed; it must be text; write it in quotes"),
        (
            {"name": "a/b"},
            "name: 'a/b' cannot name a folder; use letters, digits, '.', '_' and '-', 100 at most",
        ),
        ({1: 2}, "1: a key must be text; write it in quotes"),
        (
            {"task": {"kind": "arithmetc"}},
            "task.kind: 'arithmetc' is not allowed; it must be one of arithmetic, data, reasoning_gym, calculator, "
            "textarena, environment; did you mean 'arithmetic'?",
        ),
        (
            {"task": {"max_number": 3}},
            "task.kind: missing; it must be one of arithmetic, data, reasoning_gym, calculator, textarena, "
            "environment",
        ),
        ({"task": 3}, "task: 3 is not allowed; it must be a section with a kind, such as {kind: arithmetic}"),
        (
            {"task": {"kind": "arithmetic", "operations": ["+", "+"]}},
            'task.operations: ["+", "+"] names something twice',
        ),
        (
            {"task": {"kind": "arithmetic", "operations": ["/"]}},
            "task.operations[0]: '/' is not allowed; it must be one of +, -, *",
        ),
        (
            {"task": {"kind": "environment", "path": "env.py"}},
            "task.path: 'env.py' must have the form 'file.py:name' or 'module:name'",
        ),
        (
            {"task": {"kind": "reasoning_gym", "name": "x", "params": {"a": float("nan")}}},
            "task.params: must hold finite numbers only, no .nan and no .inf",
        ),
        (
            {"telemetry": {"wandb": {}}},
            "telemetry.wandb.project: missing; it must be text, not empty (name of the project)",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_what_is_allowed(values: Any, message: str) -> None:
    assert refusal(validated, {"task": SUMS, **values}) == message


def test_a_run_file_without_a_task_is_refused() -> None:
    assert refusal(validated, {}) == (
        "task: missing; it must be a section with a kind, such as {kind: arithmetic} (what it learns)"
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rollout": {"samples": 1}},
            "rollout.samples: 1 leaves advantage grpo nothing to compare with; set rollout.samples to 2 or more, "
            "or algorithm.advantage to gae or reinforce_pp",
        ),
        (
            {"rollout": {"samples": 1}, "algorithm": {"advantage": "gae", "dynamic_sampling": {}}},
            "algorithm.dynamic_sampling: needs rollout.samples of 2 or more; with 1 no reward differs",
        ),
        (
            {"algorithm": {"kl_in": "reward"}},
            "algorithm.kl_in: reward has no effect with kl_coef 0; set algorithm.kl_coef above 0 (such as 0.01), "
            "or algorithm.kl_in to loss",
        ),
        (
            {"algorithm": {"minibatches": 5}},
            "algorithm.minibatches: 5 does not divide the 128 trajectories of a step (prompts_per_step 16 x "
            "samples 8); set it to 4, for example",
        ),
        (
            {"workers": 17},
            "workers: 17 is more than rollout.prompts_per_step 16; set workers to at most 16, or more prompts",
        ),
        (
            {"task": {"kind": "arithmetic", "size": 8}},
            "rollout.prompts_per_step: 16 is more than the 8 prompts of the task; set task.size to 16 or more",
        ),
        (
            {"deterministic": True, "rollout": {"backend": "vllm"}},
            "deterministic: true needs rollout.backend jigsaw, and it is vllm; set rollout.backend to jigsaw, "
            "or deterministic to false",
        ),
        (
            {"rollout": {"backend": "vllm", "block_size": 8}},
            "rollout.block_size: 8 does not go with vllm; set it to a multiple of 16",
        ),
        (
            {"rollout": {"max_num_batched_tokens": 100}},
            "rollout.max_num_batched_tokens: 100 is less than max_num_seqs 256, and each sequence needs a token; "
            "raise it, or lower max_num_seqs",
        ),
        (
            {"rollout": {"kv_cache_tokens": 575, "max_prompt_tokens": 513}},
            "rollout.kv_cache_tokens: 575 does not hold one sequence of max_prompt_tokens + max_tokens; "
            "set it to 592 or more, or to null",
        ),
        (
            {"rollout": {"max_tokens": 513}},
            "rollout.max_tokens: 513, with rollout.max_prompt_tokens 512, is more than the 1024 positions of "
            "the tiny model; lower rollout.max_tokens to at most 512",
        ),
        (
            {"algorithm": {"overlong": {"buffer": 65}}},
            "algorithm.overlong.buffer: 65 is more than rollout.max_tokens 64; set it to at most 64",
        ),
        (
            {"steps": 5, "trainer": {"warmup_steps": 6}},
            "trainer.warmup_steps: 6 is more than steps 5; set it to at most 5",
        ),
        (
            {"model": {"path": "somewhere", "tiny": {"layers": 3}}},
            "model.tiny: goes only with model.path tiny, and that is 'somewhere'; remove model.tiny",
        ),
        (
            {"task": {"kind": "textarena", "name": "x"}},
            "model.tiny.warmup_steps: a task of kind textarena has no demonstrations to warm up on; "
            "set model.path to a trained model, or model.tiny.warmup_steps to 0",
        ),
        (
            {"model": {"tiny": {"hidden": 100}}},
            "model.tiny.hidden: 100 is not a multiple of 8 (twice the heads); set it to 104, for example",
        ),
        (
            {"model": {"tiny": {"kv_heads": 3}}},
            "model.tiny.kv_heads: 3 does not divide the 4 heads; set it to 1 or 4, for example",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused_with_what_to_set(values: Any, message: str) -> None:
    assert refusal(validated, {"task": SUMS, **values}) == message


@pytest.mark.parametrize(
    "values",
    [
        {"rollout": {"samples": 1}, "algorithm": {"advantage": "reinforce_pp"}},
        {"rollout": {"samples": 1}, "algorithm": {"advantage": "gae"}},
        {"algorithm": {"kl_in": "reward", "kl_coef": 0.01}},
        {"algorithm": {"minibatches": 128, "overlong": {"buffer": 64}}},
        {"workers": 16, "task": {"kind": "arithmetic", "size": 16}},
        {"rollout": {"kv_cache_tokens": 576, "top_p": 1, "max_num_batched_tokens": 256}},
        {"rollout": {"max_tokens": 512}},
    ],
)
def test_the_nearest_possible_values_are_accepted(values: Any) -> None:
    assert validated({"task": SUMS, **values})


@pytest.mark.parametrize("date", ["2026-11-19", datetime.date(2026, 11, 19)])
def test_a_date_may_be_quoted_or_not_and_comes_back_the_same(date: Any) -> None:
    config = config_of(rollout={"date": date})
    assert config.rollout.date == datetime.date(2026, 11, 19)
    assert config_of(**text.parse(config.to_yaml(), "run")) == config


@pytest.mark.parametrize("date", [20261119, 0, True, datetime.datetime(2026, 11, 19, 8, 30), "19.11.2026"])
def test_a_date_is_nothing_but_a_date(date: Any) -> None:
    assert refusal(validated, {"task": SUMS, "rollout": {"date": date}}).startswith("rollout.date: ")


def test_three_problems_are_shown_and_the_others_counted() -> None:
    wrong = {"samples": 0, "max_tokens": 0, "top_p": 0, "min_p": 2, "top_k": -1}
    lines = refusal(validated, {"task": SUMS, "rollout": wrong}).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "rollout.samples",
        "rollout.max_tokens",
        "rollout.top_p",
    ]
    assert lines[-1].endswith("(default 1.0) (and 2 more)")


@pytest.mark.parametrize("loss", get_args(Loss))
@pytest.mark.parametrize("advantage", get_args(Advantage))
def test_nulls_of_the_algorithm_become_the_published_values(loss: Loss, advantage: Advantage) -> None:
    algorithm = config_of(algorithm={"loss": loss, "advantage": advantage, "clip_low": None}).algorithm
    assert (algorithm.clip_low, algorithm.clip_high) == default_clip(loss)
    assert algorithm.aggregation == default_aggregation(loss, advantage)


def test_what_the_user_sets_is_not_replaced() -> None:
    algorithm = config_of(algorithm={"loss": "dapo", "clip_high": 0.5, "aggregation": "constant"}).algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.aggregation) == (0.2, 0.5, "constant")


def test_the_tiny_model_has_its_settings_and_a_folder_has_none() -> None:
    tiny = config_of().model.tiny
    assert tiny is not None
    assert tiny.layers == 2
    assert config_of(model={"path": "somewhere"}).model.tiny is None


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config_of().steps = 3


def test_every_setting_has_one_line_that_says_what_it_is() -> None:
    for name in all_settings(RunConfig):
        *path, last = name.split(".")
        models = [section_at(RunConfig, path, {})] if "task" not in path else []
        if path == ["task"]:
            models = [
                m for m in sections(RunConfig.model_fields["task"].annotation) if last in m.model_fields
            ]
        for model in models:
            assert model
            description = model.model_fields[last].description
            assert description, name
            assert re.fullmatch(r"[^\n]{8,110}\.", description), name
