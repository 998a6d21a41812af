"""Small models of every family, computed by us and by transformers from the same folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from config_helpers import config_of
from safetensors.torch import save_file
from torch import Tensor

from jigsawrl.config import files
from jigsawrl.errors import JigsawError
from jigsawrl.model.folder import load_model
from jigsawrl.model.tiny import write_tiny
from jigsawrl.trainer.packed import PackedAttention

TOKENS = torch.randint(0, 98, (48,), generator=torch.Generator().manual_seed(0))
PROMPT = 8
CLOSE = 1e-3


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' bars and warnings from the output."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.enable_progress_bar()
        transformers.logging.set_verbosity(before)


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
