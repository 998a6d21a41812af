"""Small random models and a trivial tokenizer that the tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from jigsawrl.model.spec import spec_from_config
from jigsawrl.model.transformer import Transformer

TINY = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **TINY, **changes}


def random_model(family: str = "llama", seed: int = 0, scale: float = 4.0, **changes: Any) -> Transformer:
    """Weights large enough that the model has opinions."""
    model = Transformer(spec_from_config(tiny_config(family, **changes), Path("test"))).initialise(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return model


class LetterTokenizer:
    """Token i is the i-th letter; token 0 ends a sample."""

    letters = "_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/"
    eos_token_ids = frozenset({0})

    def stream(self) -> Callable[[int], str]:
        return lambda token: self.letters[token]
