"""The shape of a model, read from a Hugging Face folder's config.json without importing torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.model.config_keys import problem_of, rope_name, rope_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FULL, SLIDING = "full_attention", "sliding_attention"
# What transformers takes where a file is silent; without key-value heads, llama has as many as heads.
KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
POSITIONS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
HEAD_DIM = {"qwen3": 128}
SLIDING_WINDOW, MAX_WINDOW_LAYERS = 4096, 28


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
    """The longest sequence that can be computed: with a window, one that fits into it."""
    window: int | None
    """The sliding window of the layers that have one, where that is less than the model's positions."""
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
    try:
        if problem := problem_of(raw):
            raise JigsawError(f"model.path: {source} {problem}")
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        kv_heads = int(raw.get("num_key_value_heads", KV_HEADS.get(family)) or heads)
        head_dim = int(raw.get("head_dim") or HEAD_DIM.get(family) or hidden // heads)
        if heads % kv_heads:
            raise JigsawError(
                f"model.path: {source} has num_attention_heads {heads}, which is no multiple of "
                f"num_key_value_heads {kv_heads}{'' if 'num_key_value_heads' in raw else ', the default'}"
            )
        if head_dim % 2:
            raise JigsawError(
                f"model.path: {source} has an odd head_dim, {head_dim}, which rope cannot rotate"
            )
        layers = int(raw["num_hidden_layers"])
        positions = int(raw.get("max_position_embeddings", POSITIONS[family]))
        window = _window(raw, layers, source)
        own_bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3")
        return ModelSpec(
            family=family,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=int(raw["intermediate_size"]),
            max_positions=positions if window is None else min(positions, window),
            window=window if window is not None and window < positions else None,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope_of(raw).get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(raw, positions, source),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or own_bias,
            o_bias=own_bias,
            qk_norm=family == "qwen3",
            raw=raw,
        )
    except KeyError as error:
        raise JigsawError(f"model.path: {source} has no {error.args[0]!r}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise JigsawError(f"model.path: {source} does not describe a model ({error})") from None


def _window(raw: dict[str, Any], layers: int, source: Path) -> int | None:
    """How many tokens some layer attends to at most, its own among them; None: every layer attends to all."""
    family, kinds = raw["model_type"], raw.get("layer_types")
    possible = {FULL} if family == "llama" else {FULL, SLIDING}
    if kinds is not None and (len(kinds) != layers or not possible.issuperset(kinds)):
        raise JigsawError(
            f"model.path: {source} says layer_types {kinds!r}; it must be a list of {layers}, one for each layer, "
            f"of {' or '.join(sorted(possible))}"
        )
    window = None
    if family == "mistral" or (family != "llama" and raw.get("use_sliding_window", False)):
        window = raw.get("sliding_window", SLIDING_WINDOW)
    if kinds is not None and SLIDING in kinds and window is None:
        raise JigsawError(f"model.path: {source} has {SLIDING} among its layer_types, and no sliding_window")
    if family == "mistral" or window is None:
        return (
            window  # for mistral in all layers: transformers' classes differ in what they make of layer_types
        )
    first = raw.get("max_window_layers", MAX_WINDOW_LAYERS)
    slides = first < layers if kinds is None else SLIDING in kinds
    return window if slides else None


def _rope_scaling(raw: dict[str, Any], positions: int, source: Path) -> dict[str, Any] | None:
    rope = rope_of(raw)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise JigsawError(
            f"model.path: {source} has {rope_name(raw)} of type {kind!r}; supported are linear and llama3"
        )
    factor = float(rope["factor"])
    if not 0 < factor < math.inf:
        raise JigsawError(
            f"model.path: {source} has a rope factor of {rope['factor']}, and it must be above 0"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    # transformers prefers the length of the pretraining at the top level.
    original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    if low >= high:
        raise JigsawError(
            f"model.path: {source} has low_freq_factor {low}, not below high_freq_factor {high}"
        )
    return scaling | {
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": float(original or positions),
    }
