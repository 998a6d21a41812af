"""What a run leaves behind, loaded with transformers and PEFT as anybody would: the trained weights, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from config_helpers import config_of
from torch import Tensor

from jigsawrl.model.folder import iterate_weights, places
from jigsawrl.model.lora import linears, lora_state, merged_weight
from jigsawrl.model.tiny import write_tiny
from jigsawrl.model.transformer import Transformer
from jigsawrl.pipeline.actor import Actor
from jigsawrl.pipeline.warmup import prepare_base

BASES: dict[str, dict[str, str]] = {
    "without a type": {},
    "new key": {"dtype": "bfloat16"},
    "old key": {"torch_dtype": "float16"},
    "both keys": {"dtype": "bfloat16", "torch_dtype": "float32"},
}
DTYPES = ("float32", "bfloat16")
STEP = {"float32": 1e-6, "bfloat16": 1e-2}
"""Ten steps at a learning rate of 1e-6 move a weight so far: less than bfloat16 can tell."""


def base_of(folder: Path, types: Mapping[str, str]) -> Path:
    """A tiny model whose config.json says these types of its weights."""
    write_tiny(folder, layers=2, hidden=32, heads=2, kv_heads=1, seed=0)
    raw = json.loads((folder / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(raw | types))
    return folder


def trained_actor(base: Path, dtype: str, **model: Any) -> Actor:
    """An actor whose weights were moved a little, as training would."""
    rollout = {"max_prompt_tokens": 16, "max_tokens": 8, "prompts_per_step": 2, "samples": 2}
    config = config_of(model={"path": str(base), "dtype": dtype, **model}, rollout=rollout)
    actor = Actor(config, base, "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in actor.model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=generator).to(parameter) * STEP[dtype]
    return actor


def merged(model: Transformer) -> dict[str, Tensor]:
    """The weights by their names in a folder, adapters merged in."""
    with torch.no_grad():
        for _, linear in linears(model):
            whole, linear.lora = merged_weight(linear), None
            linear.weight.copy_(whole)
    return places(model)


def check_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert wanted.keys() <= found.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def types_said(folder: Path) -> dict[str, str]:
    raw = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in raw.items() if "dtype" in key}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("types", BASES.values(), ids=BASES)
@pytest.mark.parametrize(
    "lora", [None, {"rank": 2, "targets": ["q_proj", "down_proj"]}], ids=["full", "lora"]
)
def test_the_exported_model_has_the_trained_weights_whatever_type_its_base_had(lora, types, dtype, tmp_path):
    base = base_of(tmp_path / "base", types)
    actor = trained_actor(base, dtype, lora=lora)
    actor.export(tmp_path)
    wanted = merged(actor.model)
    assert any(not torch.equal(wanted[name].float(), before) for name, before in iterate_weights(base))
    assert types_said(tmp_path / "model") == {"torch_dtype": dtype}
    check_equal(dict(iterate_weights(tmp_path / "model")), wanted)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    check_equal(loaded.state_dict(), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("types", BASES.values(), ids=BASES)
def test_an_exported_adapter_finds_its_base_and_has_the_trained_weights(types, dtype, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    base_of(tmp_path / "base", types)
    monkeypatch.chdir(tmp_path)
    actor = trained_actor(Path("base"), dtype, lora={"rank": 2, "targets": ["k_proj", "up_proj"]})
    actor.export(Path())
    monkeypatch.chdir("elsewhere")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained("../adapter")
    found = peft.get_peft_model_state_dict(loaded)
    wanted = lora_state(actor.model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in wanted.items())
    before = dict(iterate_weights(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    check_equal(base.state_dict(), before)


def test_the_base_that_is_built_for_a_run_says_the_type_of_its_weights(tmp_path):
    tiny = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "warmup_steps": 1}
    base = prepare_base(config_of(model={"tiny": tiny}), tmp_path, print)
    assert types_said(base) == {"torch_dtype": "float32"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(base)
    check_equal(loaded.state_dict(), dict(iterate_weights(base)))
