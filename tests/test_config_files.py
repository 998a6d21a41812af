"""What a run points to on the disk: models, adapters, data, user code, and its own folder."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from config_helpers import SUMS, config_of, refusal

from jigsawrl.config import load_run_file, text
from jigsawrl.config.pipelines import PipelinesConfig, checked_mix
from jigsawrl.config.runfolder import check_mix_folder, check_run_folder
from jigsawrl.model.tiny import write_tiny

COLD = {"tiny": {"warmup_steps": 0}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", layers=1, hidden=16, heads=2, kv_heads=1, seed=0)


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "rewards.py").write_text("raise SystemExit('imported')\ndef score(completions): ...\n")
    return {"kind": "data", "path": "rows.jsonl", "reward": {"path": "rewards.py:score"}}


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


def test_answers_have_as_many_tokens_as_usual_where_the_model_has_room_for_them(
    tmp_path: Path, model: Path, data: dict[str, Any]
) -> None:
    def max_tokens(positions: int, **rollout: Any) -> int:
        edit_config(model, max_position_embeddings=positions)
        file = write(tmp_path, model={"path": "model"}, task=data, rollout=rollout)
        return load_run_file(file).rollout.max_tokens

    assert max_tokens(8192) == 512
    assert max_tokens(8192, max_tokens=None) == 512
    assert max_tokens(8192, max_tokens=9) == 9
    assert max_tokens(800) == 288
    assert max_tokens(800, max_prompt_tokens=100) == 512
    assert max_tokens(8192, kv_cache_tokens=807) == 288
    for short in ({"model": {"path": "model"}, "task": SUMS}, {"model": COLD, "task": data}):
        assert load_run_file(write(tmp_path, **short)).rollout.max_tokens == 64


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
        (
            lambda m: edit_config(m, hidden_size="wide"),
            "{m}/config.json has hidden_size 'wide'; it must be a whole number from 1 to 16777216",
        ),
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
        f"{notes}: is a file; choose another folder with --out"
    )


@pytest.mark.skipif(
    not Path("/proc/self").is_dir(), reason="needs a folder that nobody can write to, not even root"
)
def test_where_nothing_can_be_written_a_run_does_not_begin() -> None:
    said = refusal(check_run_folder, config_of(), Path("/proc/self/run"), False)
    assert said.startswith("/proc/self/run: cannot be written (")
    assert said.endswith("; choose another folder with --out")


def test_a_run_is_never_written_over_another(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config_of().to_yaml())
    assert refusal(check_run_folder, config_of(), tmp_path, False) == (
        f"{tmp_path}: holds a run already; continue it with --resume, or choose another with --out"
    )


def test_pipelines_go_on_for_more_steps_and_under_another_policy(tmp_path: Path) -> None:
    def mix(**changes: Any) -> PipelinesConfig:
        return checked_mix({"workers": 1, "pipelines": {"a": {"run": "a.yaml", "steps": 2}}, **changes})

    (tmp_path / "config.yaml").write_text(text.dump(mix().model_dump(mode="json")))
    longer = mix(policy="serial", pipelines={"a": {"run": "a.yaml", "steps": 5}})
    assert check_mix_folder(longer, tmp_path, resume=True)
    other = mix(pipelines={"a": {"run": "b.yaml", "steps": 2}})
    assert "pipelines.a.run was 'a.yaml', is 'b.yaml'" in refusal(check_mix_folder, other, tmp_path, True)


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
