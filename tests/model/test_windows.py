"""Sliding windows, against transformers: the same log-probs up to the window, and a refusal beyond it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_helpers import config_of
from torch import Tensor
from transformers_models import (
    CLOSE,
    TOKENS,
    distance,
    full_config,
    problem,
    quiet,
    theirs,
    without,
    write,
    write_model,
)

from jigsawrl.config import files
from jigsawrl.model.spec import read_spec


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


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


def test_of_a_model_with_a_window_the_length_of_episodes_is_said(tmp_path):
    folder = write_model(tmp_path / "model", full_config("mistral"))
    config = config_of(
        model={"path": str(folder)}, task={"kind": "calculator"}, rollout={"max_prompt_tokens": 64}
    )
    assert files.problems(config) == []
    assert files.remarks(config) == [f"{folder}: episodes end at 128 tokens, the sliding_window of the model"]
