"""A tiny character-level Llama with random weights, written as a Hugging Face folder: no download, no training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from jigsawrl import durable
from jigsawrl.errors import JigsawError

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
MAX_POSITIONS = 1024


def write_tiny(folder: Path, *, layers: int, hidden: int, heads: int, kv_heads: int, seed: int) -> Path:
    """Writes the model into `folder` and returns it; the same arguments give the same bytes.

    The vocabulary is printable ASCII and the newline, a token a character; any other character is read
    as "?".
    """
    _check_shape(hidden, heads, kv_heads)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(layers, hidden, heads, kv_heads)
    for name, content in {
        "config.json": config,
        "generation_config.json": {"eos_token_id": 1, "pad_token_id": 0},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
        },
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = folder / "model.safetensors"
    with durable.usual_mode(weights):
        save_file(_weights(config, seed), weights, metadata={"format": "pt"})
    return folder


def _check_shape(hidden: int, heads: int, kv_heads: int) -> None:
    if hidden % (2 * heads):
        raise JigsawError(f"model.tiny: hidden ({hidden}) must be a multiple of twice the heads ({heads})")
    if heads % kv_heads:
        raise JigsawError(f"model.tiny: heads ({heads}) must be a multiple of kv_heads ({kv_heads})")


def tiny_config(layers: int, hidden: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Its config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(CHARACTERS) + 2,
        "hidden_size": hidden,
        # The usual 8/3 of a gated MLP, down to a size that kernels like.
        "intermediate_size": max(64, hidden * 8 // 3 // 128 * 128),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def _tokenizer() -> dict[str, Any]:
    """A BPE without merges is a token a character; the Fuse decoder joins them with nothing between."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": text, **special} for id, text in enumerate((PAD, EOS))],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "?",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: id for id, text in enumerate((PAD, EOS, *CHARACTERS))},
            "merges": [],
        },
    }


def _weights(config: dict[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    """Normal weights that keep the variance; what is added to the residual stream shrinks with the depth.

    On additions of two numbers up to 20, 300 steps from here end at a loss of 0.04, from the customary
    standard deviation of 0.02 at 0.45.
    """
    rng = np.random.default_rng(seed)
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def linear(rows: int, columns: int, scale: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * (scale / math.sqrt(columns))).astype(np.float32)

    ones = np.ones(hidden, dtype=np.float32)
    residual = 1 / math.sqrt(2 * layers)
    weights = {"model.embed_tokens.weight": linear(config["vocab_size"], hidden)}
    for index in range(layers):
        layer = {
            "input_layernorm": ones,
            "self_attn.q_proj": linear(hidden, hidden),
            "self_attn.k_proj": linear(kv, hidden),
            "self_attn.v_proj": linear(kv, hidden),
            "self_attn.o_proj": linear(hidden, hidden, residual),
            "post_attention_layernorm": ones,
            "mlp.gate_proj": linear(inner, hidden),
            "mlp.up_proj": linear(inner, hidden),
            "mlp.down_proj": linear(hidden, inner, residual),
        }
        weights |= {f"model.layers.{index}.{name}.weight": weight for name, weight in layer.items()}
    weights["model.norm.weight"] = ones
    return weights
