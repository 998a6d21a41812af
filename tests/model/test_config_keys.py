"""Every key of a config.json, against transformers: the same log-probs, or a refusal that names the key.

The keys are those of the configuration classes of the transformers that is installed, so that a new one fails here.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from config_helpers import SUMS, config_of, refusal
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_rope_utils import RopeParameters, RotaryEmbeddingConfigMixin

from jigsawrl.config import files
from jigsawrl.errors import JigsawError
from jigsawrl.model.config_keys import unknown_keys
from jigsawrl.model.folder import load_model
from jigsawrl.model.spec import FAMILIES, read_spec
from jigsawrl.model.tiny import write_tiny
from jigsawrl.trainer.packed import PackedAttention

TOKENS = torch.randint(0, 98, (48,), generator=torch.Generator().manual_seed(0))
PROMPT = 8
CLOSE = 1e-3
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "attention_bias",
    }
)
WEIGHTS = ("'lm_head.weight'", "'model.embed_tokens.weight'", "'model.layers.")
"""What is named where the weights do not have the shape that a key says."""
READ_ELSEWHERE = {
    "quantization_config": [{"quant_method": "fp8"}],
    "transformers_weights": ["other.safetensors"],
    "configuration_files": [["config.5.0.0.json"]],
    "auto_map": [{"AutoModelForCausalLM": "own.Model"}],
    "original_max_position_embeddings": [32],
    "tie_last_hidden_states": [True],
}
"""Keys that transformers reads in other places than its configuration classes."""
OTHERS: dict[str, list[Any]] = {
    "model_type": ["gpt2"],
    "hidden_act": ["gelu", "swish"],
    "num_hidden_layers": [1, 3],
    "num_key_value_heads": [1, None],
    "head_dim": [16, 25, None],
    "sliding_window": [16, None],
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2, ["chunked_attention"] * 2],
    "max_window_layers": [0, 2],
    "rope_scaling": [LINEAR, LLAMA3, {"rope_type": "yarn", "factor": 2.0}, {"type": "linear", "factor": 3.0}],
    "rope_parameters": [LINEAR, LLAMA3, {"full_attention": LINEAR}, None],
    "rope_theta": [50.0],
    "rope_type": ["linear", "llama3", "dynamic"],
    "low_freq_factor": [0.5, 9.0],
    "partial_rotary_factor": [0.5],
    "per_layer_config": [{"0": {"sliding_window": 16}}],
    "attn_implementation": ["eager"],
    "experts_implementation": ["eager"],
    "dtype": ["bfloat16"],
    "torch_dtype": ["bfloat16"],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "problem_type": ["regression"],
    "return_dict": [True],  # without it transformers' own models fall over
    "short_factor": [[1.0] * 12],
    "long_factor": [[1.0] * 12],
    **READ_ELSEWHERE,
}
"""Other values where the type of the value does not say what they could be."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(before)


def module_of(family: str) -> ModuleType:
    return getattr(transformers.models, family)


def class_of(family: str) -> type[transformers.PreTrainedConfig]:
    return transformers.CONFIG_MAPPING[family]


def full_config(family: str, **changes: Any) -> dict[str, Any]:
    """All keys, with values other than their defaults where that could show, and a window that is wide enough."""
    small = {
        "vocab_size": 98,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 256,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }
    if family == "mistral":
        small |= {"sliding_window": 128}
    elif family != "llama":
        small |= {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}
    raw = class_of(family)(**{**small, **changes}).to_dict()
    if "layer_types" not in changes:
        raw.pop("layer_types", None)  # so that the other keys decide
    return raw


def write_model(folder: Path, raw: dict[str, Any]) -> Path:
    """A folder with these settings, random weights, and a tokenizer."""
    write_tiny(folder, layers=1, hidden=16, heads=2, kv_heads=1, seed=0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(class_of(raw["model_type"])(**raw))
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write(folder, raw)
    return folder


def write(folder: Path, raw: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(raw))


def without(mapping: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in keys}


def problem(folder: Path, length: int = len(TOKENS), **settings: Any) -> str | None:
    """What a run with prompts and responses of so many tokens is told before anything is loaded."""
    rollout = {"max_prompt_tokens": PROMPT, "max_tokens": length - PROMPT, **settings}
    return next(iter(files.problems(config_of(model={"path": str(folder)}, rollout=rollout))), None)


def ours(folder: Path, length: int = len(TOKENS)) -> Tensor:
    if said := problem(folder, length):
        raise JigsawError(said)
    model = load_model(folder, torch.float32)
    with torch.no_grad():
        attend = PackedAttention([length], model.device)
        hidden = model(TOKENS[:length], torch.arange(length), attend)
        return (hidden @ model.head.T).log_softmax(-1)


def theirs(folder: Path, length: int = len(TOKENS)) -> Tensor:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    with torch.no_grad():
        return model(TOKENS[None, :length]).logits[0].log_softmax(-1)


def distance(folder: Path, length: int = len(TOKENS)) -> float:
    return (ours(folder, length) - theirs(folder, length)).abs().max().item()


def popped_by(*functions: Any) -> set[str]:
    """Keys that are no fields, and that these functions take all the same."""
    source = "".join(map(inspect.getsource, functions))
    return set(re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', source))


def keys_of(family: str) -> set[str]:
    base = transformers.PreTrainedConfig.__post_init__, RotaryEmbeddingConfigMixin.convert_rope_params_to_dict
    own = class_of(family)
    return {each.name for each in fields(own)} | popped_by(*base, own.__post_init__) | {"model_type"}


def read_by_the_model(family: str) -> set[str]:
    """Names of the attributes of its configuration that the code of a model mentions."""
    source = inspect.getsource(getattr(module_of(family), f"modeling_{family}"))
    return {a or b for a, b in re.findall(r'\bconfig\.([a-z]\w*)|\bconfig, "([a-z]\w*)"', source)}


def other_values(key: str, raw: dict[str, Any], config: type | None = None) -> list[Any]:
    """Values that the key does not have, of a type that transformers takes."""
    before = raw.get(key)
    if key in OTHERS:
        return OTHERS[key]
    if isinstance(before, bool):
        return [not before]
    if isinstance(before, int):
        return [before * 2 + 1]
    if isinstance(before, float):
        return [before / 2 + 0.25]
    if isinstance(before, str):
        return [f"{before}x"]
    return [
        each
        for each in ("x", 1, True, 0.5, [1], {"0": "x"})
        if config is None or takes(config, raw, key, each)
    ][:1]


def takes(config: type, raw: dict[str, Any], key: str, value: Any) -> bool:
    try:
        config(**{**raw, key: value})
    except Exception:
        return False
    return True


def check_change(folder: Path, key: str, raw: dict[str, Any], also: tuple[str, ...] = ()) -> None:
    """Equal log-probs, or a refusal that names the key, or what does not go with it."""
    write(folder, raw)
    try:
        mine = ours(folder)
    except JigsawError as error:
        said = str(error)
    else:
        difference = (mine - theirs(folder)).abs().max().item()
        assert difference < CLOSE, f"{key}: log-probs differ by {difference} with {raw}"
        return
    names = (key, *also, *(WEIGHTS if key in SHAPES else ()))
    assert any(name in said for name in names), f"{key}: {said}"


@pytest.mark.parametrize("family", FAMILIES)
def test_whatever_a_field_is_set_to_is_computed_as_in_transformers_or_refused_by_name(family, tmp_path):
    raw = full_config(family)
    folder = write_model(tmp_path / "model", raw)
    assert distance(folder) < CLOSE
    for key in sorted(keys_of(family) | READ_ELSEWHERE.keys()):
        values = [each for each in other_values(key, raw, class_of(family)) if each != raw.get(key)]
        assert values or key == "return_dict", f"{key}: what else could it be?"
        for value in values:
            check_change(folder, key, {**raw, key: value})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_missing_counts_as_in_transformers_or_is_refused_by_name(family, tmp_path):
    raw = full_config(family)
    folder = write_model(tmp_path / "model", raw)
    for key in raw:
        check_change(folder, key, without(raw, key))


@pytest.mark.parametrize(
    ("family", "rope"),
    [("mistral", {"rope_type": "default", "rope_theta": 100.0}), ("qwen3", LINEAR), ("llama", LLAMA3)],
)
def test_every_key_of_rope_is_computed_as_in_transformers_or_refused_by_name(family, rope, tmp_path):
    raw = full_config(family)
    folder = write_model(tmp_path / "model", {**raw, "rope_parameters": rope})
    assert distance(folder) < CLOSE
    missing = [(key, without(rope, key)) for key in rope]
    changed = [
        (key, {**rope, key: value})
        for key in RopeParameters.__annotations__
        for value in other_values(key, rope)
    ]
    for place in ("rope_parameters", "rope_scaling"):
        for key, one in [*missing, *changed]:
            needs = ("factor", place) if key == "rope_type" else ()  # another kind has other keys
            check_change(folder, key, {**raw, place: one}, needs)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 50.0},
        {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 50.0, "rope_scaling": LINEAR, "rope_parameters": LLAMA3},
        {"rope_parameters": LLAMA3, "original_max_position_embeddings": 32},
    ],
)
def test_rope_is_that_of_transformers_wherever_a_file_has_it(settings, tmp_path):
    raw = without(full_config("llama"), "rope_parameters")
    folder = write_model(tmp_path / "model", full_config("llama"))
    write(folder, raw | settings)
    assert distance(folder) < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_no_key_that_transformers_knows_is_unknown(family):
    assert "rope_scaling" in keys_of(family)
    assert {"hidden_act", "head_dim", "rope_parameters"} <= read_by_the_model(family)
    sampling = transformers.GenerationConfig._get_default_generation_params()
    ways = {
        name
        for name in dir(transformers.PreTrainedConfig)
        if callable(getattr(transformers.PreTrainedConfig, name))
    }
    names = keys_of(family) | (read_by_the_model(family) - ways) | READ_ELSEWHERE.keys() | sampling.keys()
    raw = dict.fromkeys(names) | {
        "model_type": family,
        "rope_parameters": dict.fromkeys(RopeParameters.__annotations__),
    }
    assert list(unknown_keys(raw)) == []


WINDOWED = {"use_sliding_window": True, "sliding_window": 16}
DROP = object()


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {"sliding_window": 16}, 16),
        ("mistral", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}, 16),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {**WINDOWED, "max_window_layers": 1}, 16),
        ("qwen2", {**WINDOWED, "max_window_layers": 2}, None),
        ("qwen2", {**WINDOWED, "max_window_layers": DROP}, None),
        ("qwen2", {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}, 16),
        ("qwen3", {**WINDOWED, "layer_types": ["full_attention"] * 2}, None),
        ("qwen3", {**WINDOWED, "layer_types": None}, 16),
        ("qwen3", {**WINDOWED, "use_sliding_window": False}, None),
        ("qwen3", {**WINDOWED, "use_sliding_window": DROP}, None),
        ("qwen3", {**WINDOWED, "sliding_window": None}, None),
        ("llama", {"layer_types": ["full_attention"] * 2, **WINDOWED}, None),
    ],
)
def test_a_sliding_window_is_a_limit_of_prompt_and_response(family, changes, window, tmp_path):
    raw = full_config(family) | changes
    folder = write_model(tmp_path / "model", full_config(family))
    write(folder, {key: value for key, value in raw.items() if value is not DROP})
    assert read_spec(folder).window == window
    assert read_spec(folder).max_positions == (window or 256)
    assert distance(folder, window or len(TOKENS)) < CLOSE
    if window:
        assert (theirs(folder)[-1] - theirs_without_window(folder)[-1]).abs().max() > 0.1
        said = problem(folder, window + 1)
        assert said == (
            "rollout.max_tokens: 9, with rollout.max_prompt_tokens 8, is more than the sliding_window of 16 tokens "
            f"of the model in {folder}, and attention is computed over all tokens, which is the same only up to "
            "there; lower rollout.max_tokens to at most 8"
        )


def theirs_without_window(folder: Path) -> Tensor:
    raw = json.loads((folder / "config.json").read_text())
    write(folder, without(raw, "layer_types", "use_sliding_window") | {"sliding_window": None})
    found = theirs(folder)
    write(folder, raw)
    return found


@pytest.mark.parametrize(
    ("family", "window"), [("llama", None), ("mistral", 4096), ("qwen2", None), ("qwen3", None)]
)
def test_a_file_without_a_window_has_that_of_transformers(family, window, tmp_path):
    raw = full_config(family, max_position_embeddings=5000)
    raw = without(raw, "sliding_window", "use_sliding_window", "max_window_layers")
    folder = write_model(tmp_path / "model", raw)
    assert (problem(folder, 4096), problem(folder, 5000) is None) == (None, window is None)
    assert read_spec(folder).window == window
    engine = problem(folder, 5000, backend="vllm") or ""  # vLLM would honour the window, and the trainer not
    assert ("sliding_window of 4096" in engine) == (window is not None)


def test_a_head_that_is_not_the_embedding_it_should_be_tied_to_is_refused(tmp_path):
    folder = write_model(tmp_path / "model", full_config("llama"))
    write(folder, full_config("llama") | {"tie_word_embeddings": True})
    assert "tie_word_embeddings" in refusal(load_model, folder, torch.float32)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert distance(folder) < CLOSE


def test_what_neither_we_nor_transformers_know_is_named_once_and_ignored(tmp_path):
    raw = full_config("llama", rope_parameters={**LINEAR, "mrope_section": [1]})
    folder = write_model(tmp_path / "model", {**raw, "use_mrope": True, "sliding_window": 16})
    assert distance(folder) < CLOSE
    assert files.remarks(config_of(model={"path": str(folder)})) == [
        f"{folder}/config.json: ignored, as transformers ignores them: use_mrope, sliding_window, "
        "rope_parameters.mrope_section"
    ]
    write(folder, raw | {"rope_parameters": LINEAR})
    assert files.remarks(config_of(model={"path": str(folder)})) == []
    assert files.remarks(config_of(task=SUMS)) == []


def test_of_a_model_with_a_window_the_length_of_episodes_is_said(tmp_path):
    folder = write_model(tmp_path / "model", full_config("mistral"))
    config = config_of(
        model={"path": str(folder)}, task={"kind": "calculator"}, rollout={"max_prompt_tokens": 64}
    )
    assert files.problems(config) == []
    assert files.remarks(config) == [f"{folder}: episodes end at 128 tokens, the sliding_window of the model"]
