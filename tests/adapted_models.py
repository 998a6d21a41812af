"""Models in bfloat16 with others on them that have adapters, and what float32 makes of them."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from small_models import random_model

from jigsawrl.model.lora import TARGETS, add_lora, linears, lora_state, share_base
from jigsawrl.model.transformer import Transformer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ADAPTERS = [
    (4, 8.0, {"q_proj", "v_proj"}),
    (16, 16.0, set(TARGETS)),
    (40, 10.0, {"k_proj", "up_proj", "o_proj"}),
]
"""Rank, alpha and targets of models that decode together."""
KINDS = [
    ("qwen2", {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}),
    ("qwen3", {"num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128}),
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}),
]


def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


def distance(out: torch.Tensor, reference: torch.Tensor) -> float:
    return ((out.double() - reference.double()).norm() / reference.double().norm()).item()


def bfloat16_model(family: str, **changes) -> Transformer:
    sizes = {
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 448,
        "max_position_embeddings": 4096,
    }
    model = random_model(family, scale=2.0, **{**sizes, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.to(DEVICE, torch.bfloat16)


def in_float32(model: Transformer) -> Transformer:
    twin = Transformer(model.spec).to(DEVICE)
    for (_, mine), (_, source) in zip(linears(twin), linears(model), strict=True):
        mine.lora = copy.deepcopy(source.lora)
    twin.float().load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    return twin


def adapted(base: Transformer, number: int) -> Transformer:
    model = share_base(base)
    rank, alpha, targets = ADAPTERS[number]
    add_lora(model, rank, alpha, targets, seed=number)
    train(model)
    return model


def train(model: Transformer) -> None:
    """Leaves other adapters behind."""
    with torch.no_grad():
        for tensor in lora_state(model).values():
            tensor.copy_(noise(*tensor.shape, scale=0.1))


def causal(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
