"""Every key of a config.json that transformers knows: what is read, what changes nothing, what is refused.

A key that is in none of these tables is unknown to transformers too, and is ignored with a line that says so.
`tests/model/test_config_keys.py` compares the tables with transformers' own configuration classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jigsawrl.foreign import shown

READ = frozenset(
    {
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "layer_types",
        "eos_token_id",
    }
)
"""Keys that `spec_from_config` reads for all families; `eos_token_id` is read with the tokenizer."""

WINDOW = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})
READ_OF_FAMILY = {
    "llama": frozenset({"attention_bias"}),
    "mistral": frozenset({"sliding_window"}),
    "qwen2": WINDOW,
    "qwen3": WINDOW | {"attention_bias"},
}
"""Keys that it reads for one family; transformers ignores them for the others."""

READ_OF_ROPE = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    }
)
"""Keys inside `rope_parameters` or `rope_scaling`."""

_OUTPUT = "what transformers returns beside the logits"
_CLASSIFIER = "heads of classifiers; other weights than those of a language model are refused"
_SAMPLING = "the run file says how to sample"
_ORIGIN = "where the file comes from"
_OTHER_ROPE = "only for kinds of rope that are refused"

HARMLESS = {
    "architectures": "transformers chooses the class by model_type",
    "dtype": "model.dtype in the run file decides",
    "torch_dtype": "the older name of dtype",
    "initializer_range": "all weights are read from the folder",
    "chunk_size_feed_forward": "the same result in pieces",
    "pretraining_tp": "the same result in pieces",
    "attn_implementation": "the same result by another kernel",
    "experts_implementation": "there are no experts in these families",
    "bos_token_id": "the tokenizer's own files decide",
    "pad_token_id": "sequences are packed, not padded",
    "use_cache": "the engine always has a cache",
    "return_dict": _OUTPUT,
    "output_attentions": _OUTPUT,
    "output_hidden_states": _OUTPUT,
    "tie_last_hidden_states": _OUTPUT,
    "id2label": _CLASSIFIER,
    "label2id": _CLASSIFIER,
    "num_labels": _CLASSIFIER,
    "problem_type": _CLASSIFIER,
    "transformers_version": _ORIGIN,
    "name_or_path": _ORIGIN,
    "_name_or_path": _ORIGIN,
    "_commit_hash": _ORIGIN,
    "assistant_confidence_threshold": _SAMPLING,
    "assistant_lookbehind": _SAMPLING,
    "bad_words_ids": _SAMPLING,
    "begin_suppress_tokens": _SAMPLING,
    "diversity_penalty": _SAMPLING,
    "do_sample": _SAMPLING,
    "early_stopping": _SAMPLING,
    "encoder_no_repeat_ngram_size": _SAMPLING,
    "encoder_repetition_penalty": _SAMPLING,
    "epsilon_cutoff": _SAMPLING,
    "eta_cutoff": _SAMPLING,
    "exponential_decay_length_penalty": _SAMPLING,
    "forced_bos_token_id": _SAMPLING,
    "forced_eos_token_id": _SAMPLING,
    "length_penalty": _SAMPLING,
    "max_length": _SAMPLING,
    "min_length": _SAMPLING,
    "no_repeat_ngram_size": _SAMPLING,
    "num_assistant_tokens": _SAMPLING,
    "num_assistant_tokens_schedule": _SAMPLING,
    "num_beam_groups": _SAMPLING,
    "num_beams": _SAMPLING,
    "num_return_sequences": _SAMPLING,
    "output_scores": _SAMPLING,
    "remove_invalid_values": _SAMPLING,
    "repetition_penalty": _SAMPLING,
    "return_dict_in_generate": _SAMPLING,
    "suppress_tokens": _SAMPLING,
    "target_lookbehind": _SAMPLING,
    "temperature": _SAMPLING,
    "top_k": _SAMPLING,
    "top_p": _SAMPLING,
    "typical_p": _SAMPLING,
}
"""Keys that change no log-prob and no gradient, with the reason."""

HARMLESS_OF_ROPE = {
    "attention_factor": _OTHER_ROPE,
    "beta_fast": _OTHER_ROPE,
    "beta_slow": _OTHER_ROPE,
    "short_factor": _OTHER_ROPE,
    "long_factor": _OTHER_ROPE,
    "mscale": _OTHER_ROPE,
    "mscale_all_dim": _OTHER_ROPE,
    "truncate": _OTHER_ROPE,
}

ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "hidden_act": (("silu", "swish"), "only silu can be computed"),
    "mlp_bias": ((False, None), "an MLP with biases cannot be computed"),
    "attention_dropout": ((0, None), "training has no dropout; to train without it, set it to 0.0 there"),
    "partial_rotary_factor": ((1, None), "only a rope on the whole head can be computed"),
    "per_layer_config": ((None, {}), "layers that differ cannot be computed"),
    "is_encoder_decoder": ((False, None), "only decoders can be computed"),
    "quantization_config": ((None, {}), "training needs plain weights"),
    "configuration_files": ((None, []), "no other file is read; put what holds for the model there"),
    "transformers_weights": ((None,), "all *.safetensors files of the folder are read"),
}
"""Keys of which only these values can be computed, at the top level or inside of `rope_parameters`."""

OWN_CODE = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")


def rope_name(raw: dict[str, Any]) -> str:
    """The key with the settings of rope; transformers prefers the older one where both are there."""
    return "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"


def rope_of(raw: dict[str, Any]) -> dict[str, Any]:
    return raw.get(rope_name(raw)) or {}


def problem_of(raw: dict[str, Any]) -> str | None:
    """What the first key that cannot be honoured says, and why it cannot."""
    if not isinstance(rope_of(raw), dict):
        return f"has {rope_name(raw)} {shown(rope_of(raw))}; it must be an object"
    for place in (raw, rope_of(raw)):
        for key, (values, reason) in ONLY.items():
            if key in place and place[key] not in values:
                return f"says {key} {shown(place[key])}; {reason}"
    for key, value in rope_of(raw).items():
        if isinstance(value, dict):
            return f"has {rope_name(raw)} for {shown(key)}; only the same for all layers can be computed"
    brought = raw.get("auto_map") or {}
    if not isinstance(brought, dict):
        return f"has auto_map {shown(brought)}; it must be an object"
    own = [name for name in OWN_CODE if name in brought]
    if own:
        return (
            f"brings its own code for {', '.join(own)} (auto_map), which is never run; "
            f"if its weights are those of a plain {raw['model_type']}, remove auto_map there"
        )
    return None


def unknown_keys(raw: dict[str, Any]) -> Iterator[str]:
    """Keys that neither we nor transformers have a use for."""
    known = READ | READ_OF_FAMILY[raw["model_type"]] | HARMLESS.keys() | ONLY.keys() | {"auto_map"}
    yield from (key for key in raw if key not in known)
    known = READ_OF_ROPE | HARMLESS_OF_ROPE.keys() | ONLY.keys()
    yield from (f"{rope_name(raw)}.{key}" for key in rope_of(raw) if key not in known)
