"""The shape of a model, read from a Hugging Face folder's config.json without importing torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import shown
from jigsawrl.model.config_keys import problem_of, rope_name, rope_of
from jigsawrl.regular import read_json_object

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FULL, SLIDING = "full_attention", "sliding_attention"
# What transformers takes where a file is silent; without key-value heads, llama has as many as heads.
KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
POSITIONS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
HEAD_DIM = {"qwen3": 128}
SLIDING_WINDOW, MAX_WINDOW_LAYERS = 4096, 28
MAX_LAYERS = 4096
"""Several times the layers of the deepest models that there are."""
MAX_SIZE = 1 << 24
"""Of any width, and of the vocabulary; the product of all is compared with the weights that there are."""
MAX_NUMBER = 1e18
MAX_ROPE_SIZE = 1 << 27
"""Positions times the size of a head: the tables of rope hold it twice, in 1 GiB. A million positions of 128."""


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
    missing = "so it is not a Hugging Face model folder"
    return spec_from_config(read_json_object(path, "model.path", missing), path)


def spec_from_config(raw: dict[str, Any], source: Path) -> ModelSpec:
    """The spec that a config.json gives; a clear error where it cannot be computed, or is out of all proportion."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise JigsawError(
            f"model.path: {source} says model_type {shown(family)}; supported are {', '.join(FAMILIES)}"
        )
    config = _Config(raw, source)
    if problem := problem_of(raw):
        raise config.refused(problem)
    heads = config.count("num_attention_heads")
    hidden = config.count("hidden_size")
    kv_heads = config.count("num_key_value_heads", KV_HEADS.get(family, heads), null=heads)
    usual = HEAD_DIM.get(family) or max(1, hidden // heads)
    head_dim = config.count("head_dim", usual, null=usual)
    if heads % kv_heads:
        raise config.refused(
            f"has num_attention_heads {heads}, which is no multiple of "
            f"num_key_value_heads {kv_heads}{'' if 'num_key_value_heads' in raw else ', the default'}"
        )
    if head_dim % 2:
        raise config.refused(f"has an odd head_dim, {head_dim}, which rope cannot rotate")
    layers = config.count("num_hidden_layers", most=MAX_LAYERS)
    positions = config.count("max_position_embeddings", POSITIONS[family], most=MAX_ROPE_SIZE)
    window = _window(config, layers)
    own_bias = config.flag("attention_bias") and family in ("llama", "qwen3")
    spec = ModelSpec(
        family=family,
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.count("intermediate_size"),
        max_positions=positions if window is None else min(positions, window),
        window=window if window is not None and window < positions else None,
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        rope_theta=config.positive("rope_theta", 10000.0, inside=rope_of(raw)),
        rope_scaling=_rope_scaling(config, positions),
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or own_bias,
        o_bias=own_bias,
        qk_norm=family == "qwen3",
        raw=raw,
    )
    if spec.max_positions * head_dim > MAX_ROPE_SIZE:
        raise config.refused(
            f"has max_position_embeddings {positions}, for which the tables of rope take too much memory; "
            f"set it there to at most {MAX_ROPE_SIZE // head_dim}"
        )
    return spec


class _Config:
    """The values of a config.json: each is of its type and in proportion, or refused by its name."""

    def __init__(self, raw: dict[str, Any], source: Path) -> None:
        self.raw = raw
        self.source = source

    def refused(self, problem: str) -> JigsawError:
        return JigsawError(f"model.path: {self.source} {problem}")

    def count(
        self, key: str, default: int | None = None, null: int | None = None, most: int = MAX_SIZE
    ) -> int:
        """A whole number from 1 to `most`; `null` is what null stands for, where it may."""
        value = self.raw.get(key, default)
        if value is None and null is not None:
            value = null
        elif value is None and key not in self.raw:
            raise self.refused(f"has no {key!r}")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.refused(f"has {key} {shown(value)}; it must be a whole number from 1 to {most}")
        return value

    def positive(self, key: str, default: float, inside: dict[str, Any] | None = None) -> float:
        """A finite number above 0, from `inside` if it has it; null is the default."""
        values = ((inside or {}).get(key), self.raw.get(key), default)
        value = next(value for value in values if value is not None)
        return self.number(key, value)

    def number(self, key: str, value: Any) -> float:
        """The value, if it is a finite number above 0."""
        right = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_NUMBER
        if not right:
            raise self.refused(f"has {key} {shown(value)}; it must be a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if not isinstance(value, bool | None):
            raise self.refused(f"has {key} {shown(value)}; it must be true or false")
        return bool(value)


def _window(config: _Config, layers: int) -> int | None:
    """How many tokens some layer attends to at most, its own among them; None: every layer attends to all."""
    raw = config.raw
    family, kinds = raw["model_type"], raw.get("layer_types")
    possible = (FULL,) if family == "llama" else (FULL, SLIDING)
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == layers and all(kind in possible for kind in kinds)
    ):
        raise config.refused(
            f"says layer_types {shown(kinds)}; it must be a list of {layers}, one for each layer, "
            f"of {' or '.join(possible)}"
        )
    window = None
    if family == "mistral" or (family != "llama" and config.flag("use_sliding_window")):
        given = raw.get("sliding_window", SLIDING_WINDOW)
        window = None if given is None else config.count("sliding_window", SLIDING_WINDOW, most=MAX_ROPE_SIZE)
    if kinds is not None and SLIDING in kinds and window is None:
        raise config.refused(f"has {SLIDING} among its layer_types, and no sliding_window")
    if family == "mistral" or window is None:
        return (
            window  # for mistral in all layers: transformers' classes differ in what they make of layer_types
        )
    first = raw.get("max_window_layers", MAX_WINDOW_LAYERS)
    if isinstance(first, bool) or not isinstance(first, int):
        raise config.refused(f"has max_window_layers {shown(first)}; it must be a whole number")
    slides = first < layers if kinds is None else SLIDING in kinds
    return window if slides else None


def _rope_scaling(config: _Config, positions: int) -> dict[str, Any] | None:
    raw = config.raw
    rope = rope_of(raw)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise config.refused(f"has {rope_name(raw)} of type {shown(kind)}; supported are linear and llama3")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": config.number("rope factor", rope.get("factor"))}
    if kind == "linear":
        return scaling
    # transformers prefers the length of the pretraining at the top level.
    original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    low, high = (config.number(key, rope.get(key)) for key in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise config.refused(f"has low_freq_factor {low}, not below high_freq_factor {high}")
    return scaling | {
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": config.number(
            "original_max_position_embeddings", original or positions
        ),
    }
