"""Run files: what is accepted is exact, and what is refused says what to do."""

import json
import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.config import RunConfig, load_run_file, text
from jigsawrl.config.runfile import validated
from jigsawrl.config.runfolder import check_run_folder, differences
from jigsawrl.config.schema import all_settings, section_at, sections
from jigsawrl.errors import JigsawError
from jigsawrl.model.tiny import write_tiny
from jigsawrl.pipeline.algorithms import Advantage, Loss, default_aggregation, default_clip

SUMS = {"kind": "arithmetic"}


def config_of(**values: Any) -> RunConfig:
    return validated({"task": SUMS, **values})


def refusal(function: Any, *arguments: Any) -> str:
    """The message of the error, which is one to three lines without a hole in them."""
    with pytest.raises(JigsawError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 3
    assert all(line.strip() for line in message.splitlines())
    return message


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "sums.yaml"
    path.write_text("task: {kind: arithmetic}\n")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", layers=1, hidden=16, heads=2, kv_heads=1, seed=0)


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "rewards.py").write_text("raise SystemExit('imported')\ndef score(completions): ...\n")
    return {"kind": "data", "path": "rows.jsonl", "reward": {"path": "rewards.py:score"}}


COLD = {"tiny": {"warmup_steps": 0}}


# --- values -----------------------------------------------------------------------------------------------


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


def test_three_problems_are_shown_and_the_others_counted() -> None:
    wrong = {"samples": 0, "max_tokens": 0, "top_p": 0, "min_p": 2, "top_k": -1}
    lines = refusal(validated, {"task": SUMS, "rollout": wrong}).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "rollout.samples",
        "rollout.max_tokens",
        "rollout.top_p",
    ]
    assert lines[-1].endswith("(default 1.0) (and 2 more)")


# --- defaults ---------------------------------------------------------------------------------------------


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


# --- YAML -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; a run file is a mapping, such as 'task: {kind: arithmetic}'"),
        (b"# nothing yet\n", "is empty; a run file is a mapping, such as 'task: {kind: arithmetic}'"),
        (b"- task\n", "is a list; a run file is a mapping, such as 'task: {kind: arithmetic}'"),
        (b"task\n", "is 'task'; a run file is a mapping, such as 'task: {kind: arithmetic}'"),
        (b"seed: 1\nname: \xff\xfe\n", "is not UTF-8 text (byte 14); save it as UTF-8"),
        (b"[" * 5000, "nested too deeply to be a run file"),
        (b"a: !!python/object:os.system {}\n", None),
    ],
)
def test_what_is_no_run_file_is_refused(run_file: Path, content: bytes, message: str | None) -> None:
    run_file.write_bytes(content)
    shown = refusal(load_run_file, run_file)
    assert shown.startswith(str(run_file))
    assert message is None or shown == f"{run_file}: {message}"


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("task:\n\tkind: arithmetic\n", 2, "a tab where only spaces may be; indent with spaces"),
        ("seed: 1\nsteps: 2\nseed: 3\n", 3, "'seed' is already given on line 1; remove one"),
        ("task:\n  kind: data\n  kind: data\n", 3, "'kind' is already given on line 2; remove one"),
        (
            "a: b: c\n",
            1,
            "a second ':' on the line, or a wrong indentation; put text with ': ' in quotes",
        ),
        ("seed: 1\n---\nseed: 2\n", 2, "a second document begins here ('---'); a run file holds one"),
        ("seed: [1, 2\nsteps: 3\n", 2, None),
        ("seed: 'a\n", 2, None),
    ],
)
def test_a_yaml_error_names_the_line(run_file: Path, content: str, line: int, message: str | None) -> None:
    run_file.write_text(content)
    shown = refusal(load_run_file, run_file)
    assert shown.startswith(f"{run_file}:{line}: not valid YAML: ")
    assert message is None or shown.endswith(f": {message}")


def test_a_run_file_that_is_not_there_or_a_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(load_run_file, tmp_path / "no.yaml") == f"{tmp_path}/no.yaml: there is no such run file"
    assert (
        refusal(load_run_file, tmp_path)
        == f"{tmp_path}: is a folder; give a run file, such as {tmp_path}/run.yaml"
    )


def test_numbers_in_scientific_notation_are_numbers(run_file: Path) -> None:
    run_file.write_text("task: {kind: arithmetic}\ntrainer: {lr: 1e-6, eps: 1E-7, weight_decay: 1.e-2}\n")
    trainer = load_run_file(run_file).trainer
    assert (trainer.lr, trainer.eps, trainer.weight_decay) == (1e-6, 1e-7, 1e-2)
    assert "'1e-6' is not allowed" in refusal(load_run_file, run_file, ["trainer.lr='1e-6'"])


def test_anchors_and_merges_are_no_duplicates(run_file: Path) -> None:
    run_file.write_text(
        "task: {kind: arithmetic}\nrollout: &r {samples: 4}\nmodel: {lora: &l {rank: 4}}\n"
        "trainer: {<<: &t {lr: 0.1, eps: 0.1}, lr: 0.2}\n"
    )
    trainer = load_run_file(run_file).trainer
    assert (trainer.lr, trainer.eps) == (0.2, 0.1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
numeric_text = st.from_regex(r"[-+]?[0-9]*\.?[0-9]*[eE]?[-+]?[0-9]+", fullmatch=True)


@settings(deadline=None, max_examples=60)
@given(
    params=st.dictionaries(st.text() | numeric_text, json_values | numeric_text, max_size=4),
    stop=st.lists(st.text(min_size=1) | numeric_text, max_size=3),
    lr=st.floats(min_value=0, max_value=1),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
    lora=st.none() | st.just({"rank": 3, "targets": ["q_proj", "down_proj"]}),
)
def test_a_resolved_file_gives_the_same_config(
    params: dict[str, Any], stop: list[str], lr: float, name: str, lora: Any
) -> None:
    config = validated(
        {
            "name": name,
            "task": {"kind": "reasoning_gym", "name": "chain_sum", "params": params},
            "rollout": {"stop": stop},
            "trainer": {"lr": lr},
            "model": {"lora": lora},
        }
    )
    again = validated(text.parse(config.to_yaml(), "resolved"))
    assert again == config
    assert again.to_yaml() == config.to_yaml()
    assert differences(config, again) == []


# --- overrides --------------------------------------------------------------------------------------------


def test_overrides_are_yaml_and_make_the_sections_they_need(run_file: Path) -> None:
    overrides = [
        "steps=7",
        "model.lora.rank=4",
        "rollout.stop=['a=b', \"\\n\"]",
        "algorithm.overlong={buffer: 4}",
        "trainer.max_grad_norm=",
        "trainer.lr=1e-5",
        "name=x",
    ]
    config = load_run_file(run_file, overrides)
    assert (config.name, config.steps, config.trainer.lr, config.trainer.max_grad_norm) == (
        "x",
        7,
        1e-5,
        None,
    )
    assert config.rollout.stop == ("a=b", "\n")
    assert config.model.lora
    assert config.model.lora.rank == 4
    assert config.algorithm.overlong
    assert config.algorithm.overlong.buffer == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "'steps' is no override; write section.key=value, such as rollout.samples=8"),
        ("=3", "'=3' is no override; write section.key=value, such as rollout.samples=8"),
        ("a..b=3", "'a..b=3' is no override; write section.key=value, such as rollout.samples=8"),
        ("rollout.sampels=3", "rollout.sampels: no such setting; did you mean 'samples'?"),
        ("rolout.samples=3", "rolout: no such setting; did you mean 'rollout'?"),
        ("name.x=3", "name.x=3: name is 'sums', not a section"),
        ("rollout.stop=[a", None),
    ],
)
def test_a_wrong_override_is_refused(run_file: Path, override: str, message: str | None) -> None:
    shown = refusal(load_run_file, run_file, [override])
    assert shown == message if message else shown.startswith(f"{override}:1: not valid YAML: ")


# --- files ------------------------------------------------------------------------------------------------


def write(folder: Path, **values: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(text.dump({"task": SUMS, **values}))
    return path


def test_paths_are_relative_to_the_run_file_and_those_of_overrides_to_the_current_folder(
    tmp_path: Path, model: Path, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = write(tmp_path, model={"path": "model"}, task=data)
    config = load_run_file(Path("..", "run.yaml"))
    assert config.model.path == str(model)
    assert config.task.path == f"{tmp_path}/rows.jsonl"
    assert config.task.reward.path == f"{tmp_path}/rewards.py:score"
    assert load_run_file(path, ["model.path=../model"]).model.path == str(model)
    assert refusal(load_run_file, path, ["model.path=model"]).startswith(
        f"model.path: {tmp_path}/elsewhere/model "
    )
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert load_run_file(tmp_path / "resolved.yaml") == config


def test_a_model_folder_is_accepted_and_its_positions_count(tmp_path: Path, model: Path) -> None:
    assert load_run_file(write(tmp_path, model={"path": "model"})).model.path == str(model)
    assert refusal(
        load_run_file, write(tmp_path, model={"path": "model"}, rollout={"max_prompt_tokens": 961})
    ) == (
        f"rollout.max_tokens: 64, with rollout.max_prompt_tokens 961, is more than the 1024 positions of the model "
        f"in {model}; lower rollout.max_tokens to at most 63"
    )


def edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda m: (m / "config.json").unlink(),
            "{m} has no config.json, so it is not a Hugging Face model folder",
        ),
        (lambda m: (m / "config.json").write_text("[]"), "{m}/config.json is not a JSON object"),
        (lambda m: (m / "config.json").write_text("{"), "{m}/config.json is not valid JSON ("),
        (
            lambda m: edit_config(m, model_type="gpt2"),
            "{m}/config.json says model_type 'gpt2'; supported are llama, mistral, qwen2, qwen3",
        ),
        (lambda m: edit_config(m, hidden_size="wide"), "{m}/config.json does not describe a model ("),
        (
            lambda m: (m / "model.safetensors").unlink(),
            "{m} has no weights; save the model as safetensors",
        ),
        (
            lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"),
            "{m} has only pickled weights (pytorch_model.bin), which are never loaded; save the model as safetensors",
        ),
        (
            lambda m: (m / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            "{m}/model.safetensors is cut off or no safetensors file; download it again",
        ),
        (
            lambda m: (m / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "b.safetensors"}}'
            ),
            "{m} lacks b.safetensors, named by model.safetensors.index.json; copy it there",
        ),
        (
            lambda m: (m / "tokenizer.json").unlink(),
            "{m} has no tokenizer; put the model's tokenizer.json there",
        ),
        (
            lambda m: (m / "tokenizer_config.json").write_text('{"auto_map": "tok.Tok"}'),
            "the tokenizer in {m} brings its own code (tok.Tok); if you trust it, set model.trust_remote_code",
        ),
    ],
)
def test_a_folder_that_is_no_model_we_can_load_is_refused(
    tmp_path: Path, model: Path, spoil: Any, message: str
) -> None:
    spoil(model)
    shown = refusal(load_run_file, write(tmp_path, model={"path": "model"}))
    assert shown.startswith(f"model.path: {message.format(m=model)}")


def test_a_model_that_is_not_there_is_refused_with_where_to_get_one(tmp_path: Path) -> None:
    assert refusal(load_run_file, write(tmp_path, model={"path": "org/name"})) == (
        f"model.path: {tmp_path}/org/name does not exist; give a Hugging Face folder on this machine, or tiny "
        "('jigsaw fetch smollm2' makes a folder)"
    )


def test_an_adapter_must_be_there_and_have_the_settings_of_the_run(tmp_path: Path) -> None:
    path = write(tmp_path, model={"lora": {"path": "adapter", "rank": 4, "targets": ["q_proj", "k_proj"]}})
    adapter = tmp_path / "adapter"
    assert refusal(load_run_file, path) == (
        f"model.lora.path: {adapter} is not a folder; give the folder of a PEFT adapter, or null"
    )
    adapter.mkdir()
    assert refusal(load_run_file, path) == (
        f"model.lora.path: {adapter} has no adapter_config.json, so it is not a PEFT adapter"
    )
    fields = {"r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    assert refusal(load_run_file, path).splitlines() == [
        f"model.lora.path: {adapter} has no adapter_model.safetensors (pickled weights are never loaded)",
        f"model.lora.rank: 4 is not that of the adapter in {adapter}; set model.lora.rank to 8",
    ]
    (adapter / "adapter_model.safetensors").touch()
    assert load_run_file(path, ["model.lora.rank=8"]).model.lora


def test_user_code_is_looked_at_and_never_run(tmp_path: Path, data: dict[str, Any]) -> None:
    assert load_run_file(write(tmp_path, model=COLD, task=data))
    file = tmp_path / "rewards.py"
    path = write(tmp_path, model=COLD, task=data | {"reward": {"path": "rewards.py:scores"}})
    assert refusal(load_run_file, path) == (
        f"task.reward.path: {file} does not define 'scores'; did you mean 'score'?"
    )
    file.write_text("def f(:\n")
    assert refusal(load_run_file, path).startswith(f"task.reward.path: {file}, line 1 is not valid Python: ")
    file.unlink()
    (tmp_path / "rows.jsonl").unlink()
    assert refusal(load_run_file, path).splitlines() == [
        f"task.path: there is no file or folder {tmp_path}/rows.jsonl",
        f"task.reward.path: there is no file {file}",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "async def score(completions): ...",
        "class score: ...",
        "from elsewhere import other as score",
        "from elsewhere import *",
        "try:\n    import fast as score\nexcept ImportError:\n    score = None",
        "if True:\n    def score(): ...",
        "a, (score, b) = f()",
        "score: int = 3",
        "# -*- coding: latin-1 -*-\nscore = '\xe9'",
        "def __getattr__(name): ...",
        "score = '\\d'",
    ],
)
def test_all_ways_to_define_a_name_are_seen(
    tmp_path: Path, data: dict[str, Any], source: str, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "rewards.py").write_bytes(source.encode("latin-1"))
    assert load_run_file(write(tmp_path, model=COLD, task=data))
    assert not recwarn.list


@pytest.mark.parametrize("source", ["def f():\n    def score(): ...", "print(score)", "score.x = 1"])
def test_a_name_that_the_file_does_not_define_is_not_seen(
    tmp_path: Path, data: dict[str, Any], source: str
) -> None:
    (tmp_path / "rewards.py").write_text(source)
    assert "does not define 'score'" in refusal(load_run_file, write(tmp_path, model=COLD, task=data))


def test_modules_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "envs" / "games.py").write_text("class Game: ...")
    monkeypatch.syspath_prepend(tmp_path)
    task = {"kind": "environment", "path": "envs.games:Game"}
    assert load_run_file(write(tmp_path, model=COLD, task=task)).task.path == "envs.games:Game"
    assert refusal(load_run_file, write(tmp_path, model=COLD, task=task | {"path": "envs.games:Gam"})) == (
        f"task.path: {tmp_path}/envs/games.py does not define 'Gam'; did you mean 'Game'?"
    )
    assert refusal(load_run_file, write(tmp_path, model=COLD, task=task | {"path": "envs.toys:Game"})) == (
        "task.path: there is no module 'envs.toys'; install it, or give a file (path/to/file.py:Game)"
    )


# --- the run folder ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_is_new_or_empty_holds_no_run(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / ".config.yaml.tmp").touch()
    (tmp_path / "empty").mkdir()
    for name in ("new", "new/deep", "empty", "killed"):
        assert check_run_folder(config_of(), tmp_path / name, resume) is False
    assert sorted(os.listdir(tmp_path)) == ["empty", "killed"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, resume: bool) -> None:
    notes = tmp_path / "notes.txt"
    notes.touch()
    assert refusal(check_run_folder, config_of(), tmp_path, resume) == (
        f"{tmp_path}: is not empty, and holds no run; choose another folder with --out"
    )
    assert refusal(check_run_folder, config_of(), notes, resume) == (
        f"{notes}: is a file; choose another folder with --out"
    )
    assert refusal(check_run_folder, config_of(), notes / "x" / "y", resume) == (
        f"{notes}/x/y: {notes} is a file; choose another folder with --out"
    )


def test_a_run_is_never_written_over_another(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config_of().to_yaml())
    assert refusal(check_run_folder, config_of(), tmp_path, False) == (
        f"{tmp_path}: holds a run already; continue it with --resume, or choose another with --out"
    )


def test_a_run_goes_on_with_the_settings_it_had(tmp_path: Path) -> None:
    before = config_of(steps=5, rollout={"samples": 4})
    (tmp_path / "config.yaml").write_text(before.to_yaml())
    longer = config_of(
        steps=9, rollout={"samples": 4}, checkpoint={"every": 1}, telemetry={"wandb": {"project": "p"}}
    )
    assert check_run_folder(before, tmp_path, resume=True)
    assert check_run_folder(longer, tmp_path, resume=True)
    other = config_of(steps=5, rollout={"samples": 2}, model={"lora": {}})
    assert refusal(check_run_folder, other, tmp_path, True).splitlines() == [
        f"{tmp_path}: holds a run with other settings: model.lora was null, "
        """is {"rank": 8, "alpha": 16.0, "targets": ["q_proj", "k_proj"...; rollout.samples was 4, is 2""",
        "resume it with the settings it had, or choose another folder with --out",
    ]


def test_a_run_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config_of().to_yaml() + "novelty: 1\n")
    assert refusal(check_run_folder, config_of(), tmp_path, True).startswith(
        f"{tmp_path}/config.yaml: cannot be resumed: novelty: no such setting; "
    )
