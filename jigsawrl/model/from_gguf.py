"""Turns SmolLM2's GGUF into a Hugging Face folder: plain bfloat16 weights, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3
BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def convert_smollm2(gguf_file: Path, folder: Path) -> None:
    """Writes the model in `gguf_file` into `folder`, which exists.

    Only SmolLM2's architecture and tokenizer: other GGUF files differ in ways that this does not look for.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    config = _config(fields, tokens)
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": PAD}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in {
        "config.json": config,
        "generation_config.json": ids,
        "tokenizer.json": _tokenizer(fields, tokens),
        "tokenizer_config.json": settings,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    (folder / "model.safetensors").write_bytes(_weights(reader, config))


def _config(fields: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # Stored as float32: six digits give back the number that was meant.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": tokens.index(BOS),
        "eos_token_id": tokens.index(EOS),
        "pad_token_id": tokens.index(PAD),
        "torch_dtype": "bfloat16",
    }


def _tokenizer(fields: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Byte-level BPE, each digit a token of its own (what GGUF calls the pre-tokenizer `smollm`)."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    kinds = fields["tokenizer.ggml.token_type"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": text, **flags}
            for id, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: id for id, text in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def _weights(reader: Any, config: dict[str, Any]) -> bytes:
    """The dequantised weights as a safetensors file; the output layer is the embedding."""
    import torch
    from gguf import dequantize
    from safetensors.torch import save

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for stored in reader.tensors:
        value = dequantize(stored.data, stored.tensor_type)
        part = stored.name.split(".")[-2]
        if part in heads:
            # GGUF keeps the two halves of each rotary pair side by side, Hugging Face half a head apart.
            rows, columns = value.shape
            value = value.reshape(heads[part], -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        tensors[_name(stored.name)] = torch.tensor(value).to(torch.bfloat16)
    data: bytes = save(tensors, metadata={"format": "pt"})
    return data


def _name(gguf_name: str) -> str:
    match gguf_name.split("."):
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
        case ["blk", index, part, "weight"]:
            return f"model.layers.{index}.{_LAYER_NAMES[part]}.weight"
    raise ValueError(f"unexpected tensor {gguf_name}")
