"""Every key of a config.json, against transformers: the same log-probs, or a refusal that names the key.

The keys are those of the configuration classes of the transformers that is installed, so that a new one fails here.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from config_helpers import SUMS, config_of, refusal
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import RopeParameters, RotaryEmbeddingConfigMixin
from transformers_models import (
    CLOSE,
    class_of,
    distance,
    full_config,
    ours,
    quiet,
    theirs,
    without,
    write,
    write_model,
)

from jigsawrl.config import files
from jigsawrl.errors import JigsawError
from jigsawrl.model.config_keys import unknown_keys
from jigsawrl.model.folder import load_model
from jigsawrl.model.spec import FAMILIES, spec_from_config

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
def _quiet():
    with quiet():
        yield


def module_of(family: str) -> ModuleType:
    return getattr(transformers.models, family)


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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", "x"),
        ("max_position_embeddings", None),
        ("num_hidden_layers", "a"),
        ("layer_types", 3),
        ("rms_norm_eps", []),
        ("vocab_size", {}),
        ("auto_map", 3),
        ("num_attention_heads", "inf"),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_in_one_line(key: str, value: object) -> None:
    raw = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    assert spec_from_config(raw, Path("config.json")).layers == 1
    with pytest.raises(JigsawError, match=r"^model\.path: config\.json [^\n]+$"):
        spec_from_config({**raw, key: value}, Path("config.json"))
