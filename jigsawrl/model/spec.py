"""The shape of a model, read from a Hugging Face folder's config.json without importing torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jigsawrl.errors import JigsawError

DEFAULT_POSITIONS = 2048
"""Where config.json does not say how long a sequence may be."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the transformer needs to know about itself; `raw` is the config.json it came from."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tied: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    raw: dict[str, Any] = field(compare=False, hash=False)

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """How many weights there are."""
        attention = 2 * self.hidden_size * (self.q_size + self.kv_size)
        biases = self.qkv_bias * (self.q_size + 2 * self.kv_size) + self.o_bias * self.hidden_size
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        layer = attention + biases + norms + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden_size


def read_spec(folder: Path) -> ModelSpec:
    """The spec of the model in `folder`; a clear error for anything that is not a model we can run."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JigsawError(
            f"model.path: {folder} has no config.json, so it is not a Hugging Face model folder"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise JigsawError(f"model.path: {path} is not valid JSON ({error})") from None
    return spec_from_config(raw, path)


def spec_from_config(raw: dict[str, Any], source: Path) -> ModelSpec:
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise JigsawError(
            f"model.path: {source} says model_type {family!r}; supported are {', '.join(FAMILIES)}"
        )
    if raw.get("quantization_config"):
        raise JigsawError(f"model.path: {source} is a quantized model; training needs plain weights")
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        return ModelSpec(
            family=family,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            # Where a file is silent, transformers takes 128 for Qwen3 whatever the hidden size.
            head_dim=int(raw.get("head_dim") or (128 if family == "qwen3" else hidden // heads)),
            intermediate_size=int(raw["intermediate_size"]),
            max_positions=int(raw.get("max_position_embeddings", DEFAULT_POSITIONS)),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(rope, source),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or bool(raw.get("attention_bias", False)),
            o_bias=family in ("llama", "qwen3") and bool(raw.get("attention_bias", False)),
            qk_norm=family == "qwen3",
            raw=raw,
        )
    except KeyError as error:
        raise JigsawError(f"model.path: {source} has no {error.args[0]!r}") from None


def _rope_scaling(rope: dict[str, Any], source: Path) -> dict[str, Any] | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise JigsawError(f"model.path: {source} scales rope by {kind!r}; supported are linear and llama3")
    return dict(rope, rope_type=kind)
