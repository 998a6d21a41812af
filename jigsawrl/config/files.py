"""What the settings point to on the disk: looked at before anything heavy is imported, never executed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jigsawrl.config.combinations import length_problem
from jigsawrl.config.targets import target_problem
from jigsawrl.config.tasks import DataTask, EnvironmentTask, EpisodeTask
from jigsawrl.errors import JigsawError
from jigsawrl.foreign import shortened
from jigsawrl.model.config_keys import unknown_keys
from jigsawrl.model.spec import ModelSpec, spec_from_config
from jigsawrl.model.tokenizer_files import check_tokenizer_files
from jigsawrl.model.weights import check_index, check_weights, weight_files
from jigsawrl.regular import read_json_object

if TYPE_CHECKING:
    from jigsawrl.config.settings import LoraConfig, RunConfig

PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def problems(config: RunConfig) -> list[str]:
    """One line for each file, folder, function or package that is not there or not what it should be."""
    found: list[str] = []
    for key, check in (("model.path", _model), ("task.path", _task), ("task", _packages)):
        try:
            found += check(config)
        except OSError as error:
            found.append(f"{key}: {error.filename} cannot be read ({error.strerror})")
    return found


def _model(config: RunConfig) -> Iterator[str]:
    if config.model.tiny is None:
        folder = Path(config.model.path)
        try:
            spec = read_model(folder, config.model.trust_remote_code)
        except JigsawError as error:
            yield str(error).replace("\n", " ")
        else:
            if problem := length_problem(config, spec.max_positions, _limit(spec, folder)):
                yield problem
    if config.model.lora and config.model.lora.path:
        yield from _adapter(config.model.lora, Path(config.model.lora.path))


def _limit(spec: ModelSpec, folder: Path) -> str:
    if spec.window is None:
        return f"{spec.max_positions} positions of the model in {folder}"
    return (
        f"sliding_window of {spec.window} tokens of the model in {folder}, and attention is computed over all "
        "tokens, which is the same only up to there"
    )


def remarks(config: RunConfig) -> list[str]:
    """Lines about the files of a run that has no problems: what is ignored in them, and what follows from them."""
    if config.model.tiny is not None:
        return []
    folder = Path(config.model.path)
    spec = model_spec(folder)
    said = []
    if unknown := ", ".join(unknown_keys(spec.raw)):
        said.append(f"{folder}/config.json: ignored, as transformers ignores them: {unknown}")
    if spec.window is not None and isinstance(config.task, EpisodeTask):
        said.append(f"{folder}: episodes end at {spec.window} tokens, the sliding_window of the model")
    return said


def read_model(folder: Path, trusted: bool) -> ModelSpec:
    """The model in a folder that has all it needs; a JigsawError for any other folder."""
    spec = model_spec(folder)
    _check_weights(folder, spec)
    _check_tokenizer(folder, trusted)
    return spec


def model_spec(folder: Path) -> ModelSpec:
    """What a model folder's config.json says; weights need not be there."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise JigsawError(
            f"model.path: {folder} {what}; give a Hugging Face folder on this machine, or tiny "
            "('jigsaw fetch smollm2' makes a folder)"
        )
    raw = read_json_object(folder / "config.json", "model.path", "so it is not a Hugging Face model folder")
    return spec_from_config(raw, folder / "config.json")


def _check_weights(folder: Path, spec: ModelSpec) -> None:
    check_index(folder)
    if not weight_files(folder):
        pickled = [p.name for p in sorted(folder.iterdir()) if p.suffix in PICKLED]
        found = f"only pickled weights ({pickled[0]}), which are never loaded" if pickled else "no weights"
        raise JigsawError(f"model.path: {folder} has {found}; save the model as safetensors")
    check_weights(folder, spec)


def _check_tokenizer(folder: Path, trusted: bool) -> None:
    has = {path.name for path in folder.iterdir()}
    if not ({"tokenizer.json", "tokenizer.model"} & has or {"vocab.json", "merges.txt"} <= has):
        raise JigsawError(f"model.path: {folder} has no tokenizer; put the model's tokenizer.json there")
    check_tokenizer_files(folder)
    if "tokenizer_config.json" in has and not trusted:
        own_code = read_json_object(folder / "tokenizer_config.json", "model.path", "").get("auto_map")
        if own_code:
            raise JigsawError(
                f"model.path: the tokenizer in {folder} brings its own code ({shortened(str(own_code))}); "
                "if you trust it, set model.trust_remote_code to true"
            )


def _adapter(lora: LoraConfig, folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        yield f"model.lora.path: {folder} is not a folder; give the folder of a PEFT adapter, or null"
        return
    try:
        raw = read_json_object(
            folder / "adapter_config.json", "model.lora.path", "so it is not a PEFT adapter"
        )
    except JigsawError as error:
        yield str(error)
        return
    if not (folder / "adapter_model.safetensors").is_file():
        yield f"model.lora.path: {folder} has no adapter_model.safetensors (pickled weights are never loaded)"
    targets = raw.get("target_modules")
    for key, mine, theirs in (
        ("rank", lora.rank, raw.get("r")),
        ("alpha", lora.alpha, raw.get("lora_alpha")),
        ("targets", sorted(lora.targets), sorted(targets) if isinstance(targets, list) else targets),
    ):
        if mine != theirs:
            fix = f"set model.lora.{key} to {json.dumps(theirs)}"
            yield f"model.lora.{key}: {json.dumps(mine)} is not that of the adapter in {folder}; {fix}"


def _task(config: RunConfig) -> Iterator[str]:
    task = config.task
    if isinstance(task, DataTask):
        if not Path(task.path).exists():
            yield f"task.path: there is no file or folder {task.path}"
        if problem := target_problem(task.reward.path):
            yield f"task.reward.path: {problem}"
    elif isinstance(task, EnvironmentTask) and (problem := target_problem(task.path)):
        yield f"task.path: {problem}"


def _packages(config: RunConfig) -> Iterator[str]:
    if config.rollout.backend == "vllm" and find_spec("vllm") is None:
        yield "rollout.backend: vllm is not installed; pip install 'jigsawrl[vllm]', or set it to jigsaw"
    if config.telemetry.wandb and find_spec("wandb") is None:
        yield "telemetry.wandb: wandb is not installed; pip install 'jigsawrl[wandb]', or set it to null"
