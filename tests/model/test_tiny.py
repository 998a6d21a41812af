from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from jigsawrl.errors import JigsawError
from jigsawrl.model.spec import read_spec
from jigsawrl.model.tiny import CHARACTERS, EOS, PAD, write_tiny
from jigsawrl.model.tokenizer import Tokenizer, load_tokenizer


def small(folder: Path, seed: int = 0) -> Path:
    return write_tiny(folder, layers=2, hidden=64, heads=4, kv_heads=2, seed=seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny_tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder, trust_remote_code=False)


def test_the_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = small(tmp_path / "again")
    files = sorted(file.name for file in folder.iterdir())
    assert files == sorted(file.name for file in again.iterdir())
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in files)


def test_another_seed_gives_other_weights_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    other = small(tmp_path / "other", seed=1)
    changed = [
        file.name for file in folder.iterdir() if file.read_bytes() != (other / file.name).read_bytes()
    ]
    assert changed == ["model.safetensors"]


def test_transformers_loads_every_weight_and_runs_it(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == 1
    logits = model(torch.tensor([[2, 3, 4]])).logits
    assert logits.shape == (1, 3, 98)
    assert logits.std() < 2


def test_our_own_reader_agrees_on_the_shape(folder: Path) -> None:
    spec = read_spec(folder)
    assert (spec.layers, spec.hidden_size, spec.heads, spec.kv_heads, spec.head_dim) == (2, 64, 4, 2, 16)
    assert (spec.vocab_size, spec.max_positions, spec.tied) == (98, 1024, True)


@pytest.mark.parametrize(("layers", "hidden", "heads", "millions"), [(2, 128, 4, 0.31), (6, 384, 6, 9.48)])
def test_the_sizes_of_the_benchmarks(
    tmp_path: Path, layers: int, hidden: int, heads: int, millions: float
) -> None:
    write_tiny(tmp_path, layers=layers, hidden=hidden, heads=heads, kv_heads=2, seed=0)
    weights = load_file(tmp_path / "model.safetensors")
    assert sum(weight.size for weight in weights.values()) / 1e6 == pytest.approx(millions, abs=0.01)
    assert all(weight.dtype == np.float32 for weight in weights.values())


@settings(deadline=None)
@given(st.text(alphabet=CHARACTERS).filter(lambda text: PAD not in text and EOS not in text))
def test_every_text_round_trips_a_token_a_character(tiny_tokenizer: Tokenizer, text: str) -> None:
    ids = tiny_tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tiny_tokenizer.decode(ids) == text


def test_the_vocabulary_is_printable_ascii_and_the_newline(tiny_tokenizer: Tokenizer) -> None:
    assert set(CHARACTERS) == set(string.printable) - set("\t\r\x0b\x0c")
    assert tiny_tokenizer.encode("a b\n") != tiny_tokenizer.encode("a b ")
    assert tiny_tokenizer.decode(tiny_tokenizer.encode("naïve\t")) == "na?ve?"
    assert tiny_tokenizer.eos_token_ids == {1}
    assert tiny_tokenizer.pad_token_id == 0
    assert tiny_tokenizer.prefix_ids == []
    assert not tiny_tokenizer.has_chat_template
    assert tiny_tokenizer.decode([1, 40, 1, 0], skip_special_tokens=True) == tiny_tokenizer.decode([40])


def test_transformers_own_loader_gives_the_same_tokenizer(folder: Path, tiny_tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(folder)
    for text in (CHARACTERS, "7+5=<eos>12<pad>", "naïve\t🙂", ""):
        ids = tiny_tokenizer.encode(text)
        assert inner(text)["input_ids"] == ids
        for skip in (True, False):
            assert inner.decode(ids, skip_special_tokens=skip) == tiny_tokenizer.decode(
                ids, skip_special_tokens=skip
            )
    assert inner.decode(inner(CHARACTERS)["input_ids"]) == CHARACTERS
    assert ({inner.eos_token_id}, inner.pad_token_id) == (
        tiny_tokenizer.eos_token_ids,
        tiny_tokenizer.pad_token_id,
    )
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == len(inner)


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "words"),
    [(100, 8, 2, "hidden (100) must be a multiple"), (64, 4, 3, "multiple of kv_heads (3)")],
)
def test_impossible_shapes_are_refused(
    tmp_path: Path, hidden: int, heads: int, kv_heads: int, words: str
) -> None:
    with pytest.raises(JigsawError) as caught:
        write_tiny(tmp_path / "x", layers=1, hidden=hidden, heads=heads, kv_heads=kv_heads, seed=0)
    assert words in str(caught.value)
    assert not (tmp_path / "x").exists()
