"""Hugging Face folders and PEFT adapters, against the packages that define them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from small_models import random_model

from jigsawrl.errors import JigsawError
from jigsawrl.model import folder
from jigsawrl.model.folder import export_adapter, export_model, load_adapter, load_model, places
from jigsawrl.model.lora import add_lora, lora_state, without_lora
from jigsawrl.model.transformer import Transformer
from jigsawrl.trainer.packed import PackedAttention

TOKENS = torch.randint(1, 61, (40,), generator=torch.Generator().manual_seed(0))


def logits(model: Transformer) -> torch.Tensor:
    hidden = model(TOKENS, torch.arange(len(TOKENS)), PackedAttention([len(TOKENS)], model.device))
    return hidden @ model.head.T


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("qwen3", {"head_dim": 24})]
)
def test_a_model_is_the_same_after_a_round_trip_and_in_transformers(family, changes, tmp_path):
    import transformers

    model = random_model(family, tie_word_embeddings=False, **changes)
    export_model(model, tmp_path, tmp_path / "out")
    again = load_model(tmp_path / "out", torch.float32)
    assert all(torch.equal(tensor, places(model)[name]) for name, tensor in places(again).items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(theirs(TOKENS[None]).logits[0], logits(model), atol=1e-4, rtol=1e-4)


def test_llama3_rope_scaling_is_that_of_transformers(tmp_path):
    import transformers

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    model = random_model(rope_parameters=scaling)
    export_model(model, tmp_path, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(theirs(TOKENS[None]).logits[0], logits(model), atol=1e-4, rtol=1e-4)


def test_large_models_are_saved_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "SHARD_BYTES", 50_000)
    model = random_model()
    export_model(model, tmp_path, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    again = load_model(tmp_path / "out", torch.float32)
    assert torch.equal(logits(model), logits(again))


@pytest.fixture
def adapted(tmp_path):
    """A model with trained adapters on some matrices, and the folder of its base."""
    model = random_model()
    export_model(model, tmp_path, tmp_path / "base")
    add_lora(model, rank=4, alpha=8.0, targets={"q_proj", "v_proj", "down_proj"}, seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in lora_state(model).items():
        if "lora_B" in name:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model


def test_fresh_adapters_change_nothing_and_are_all_that_is_trained():
    model = random_model()
    before = logits(model)
    add_lora(model, rank=4, alpha=8.0, targets={"k_proj", "gate_proj"}, seed=0)
    assert torch.equal(logits(model), before)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora." in name for name in trained)


def test_an_adapter_goes_to_peft_and_comes_back(adapted, tmp_path):
    import peft
    import transformers

    export_adapter(adapted, tmp_path / "base", 4, 8.0, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(theirs(TOKENS[None]).logits[0], logits(adapted), atol=1e-4, rtol=1e-4)
    theirs.save_pretrained(tmp_path / "from-peft")
    again = load_model(tmp_path / "base", torch.float32)
    assert load_adapter(again, tmp_path / "from-peft") == (4, 8.0)
    assert torch.equal(logits(again), logits(adapted))


def test_the_exported_model_has_its_adapters_merged_in(adapted, tmp_path):
    export_model(adapted, tmp_path / "base", tmp_path / "merged")
    merged = load_model(tmp_path / "merged", torch.float32)
    torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-4, rtol=1e-4)
    with without_lora(adapted):
        assert torch.equal(logits(adapted), logits(load_model(tmp_path / "base", torch.float32)))


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "has no .safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"torn"), "is cut off or no safetensors file"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "is not valid JSON"),
        (lambda f: save_file({"odd": torch.zeros(1)}, f / "model.safetensors"), "holds 'odd'"),
        (
            lambda f: save_file({"model.norm.weight": torch.zeros(64)}, f / "model.safetensors"),
            "lacks 19 weights",
        ),
        (lambda f: save_file({"model.norm.weight": torch.zeros(3)}, f / "model.safetensors"), r"is \[3\]"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_with_the_reason(break_it, says, tmp_path):
    export_model(random_model(), tmp_path, tmp_path / "out")
    break_it(tmp_path / "out")
    with pytest.raises(JigsawError, match=says):
        load_model(tmp_path / "out", torch.float32)
