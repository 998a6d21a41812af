"""One decoder-only transformer for the Llama, Mistral, Qwen2 and Qwen3 families.

It works on a flat row of tokens, whatever sequences they belong to. Attention is the only place where tokens
meet, and it is passed in: the trainer attends inside packed sequences, the engine through its paged cache.

    tokens [T], positions [T] -> embed -> layers (norm, qkv, rope, attend, o, norm, mlp) -> hidden [T, H]
"""

from __future__ import annotations

import math
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jigsawrl.model.lora import LinearOp, Lora
from jigsawrl.model.ops import PLAIN, Ops
from jigsawrl.model.spec import ModelSpec


class Attend(Protocol):
    """Attention of one layer over flat tokens: q [T, heads, D], k and v [T, kv_heads, D] -> [T, heads, D]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Linear(nn.Module):
    """One matrix that may stand for several of a Hugging Face folder, stacked: `parts` gives name and rows."""

    def __init__(self, inputs: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__()
        self.parts = parts
        outputs = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.lora: Lora | None = None

    def forward(self, x: Tensor, linear: LinearOp) -> Tensor:
        if self.lora is not None and linear is F.linear:
            return self.lora.with_base(x, self.weight, self.bias)
        y = linear(x, self.weight, self.bias)
        return y if self.lora is None else cast(Tensor, self.lora(x, y, linear))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, ops: Ops = PLAIN) -> Tensor:
        return ops.norm(x, self.weight, self.eps)

    def after(self, x: Tensor, change: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """x + change, and the norm of it."""
        return ops.add_norm(x, change, self.weight, self.eps)


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.qkv = Linear(
            spec.hidden_size,
            {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size},
            spec.qkv_bias,
        )
        self.o = Linear(spec.q_size, {"o_proj": spec.hidden_size}, spec.o_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        mlp = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self.gate_up = Linear(spec.hidden_size, mlp, False)
        self.down = Linear(spec.intermediate_size, {"down_proj": spec.hidden_size}, False)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        index: int,
        attend: Attend,
        linear: LinearOp,
        ops: Ops = PLAIN,
    ) -> Tensor:
        # `forward` and not a call: decoding small models is bound by Python, and nobody hooks these modules.
        spec = self.spec
        if ops.halves is not None:
            x, q, k, v = ops.halves.before(self, x, rope)
            return ops.halves.after(self, x, attend(index, q, k, v).reshape(-1, spec.q_size))
        qkv = self.qkv.forward(self.input_layernorm.forward(x, ops), linear)
        qkv = qkv.view(-1, spec.heads + 2 * spec.kv_heads, spec.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split((spec.heads, spec.kv_heads, spec.kv_heads), dim=1)
            q, k = ops.rotate(self.q_norm(q), *rope), ops.rotate(self.k_norm(k), *rope)
        else:
            qk, v = qkv.split((spec.heads + spec.kv_heads, spec.kv_heads), dim=1)
            q, k = ops.rotate(qk, *rope).split((spec.heads, spec.kv_heads), dim=1)
        change = self.o.forward(attend(index, q, k, v).reshape(-1, spec.q_size), linear)
        x, normed = self.post_attention_layernorm.after(x, change, ops)
        return x + self.down.forward(ops.swiglu(self.gate_up.forward(normed, linear)), linear)


class Transformer(nn.Module):
    """Weights and the way through them; knows nothing of batches, caches or losses."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.lm_head = None if spec.tied else nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))
        self.gradient_checkpointing = False
        # On `meta` nothing has values, and working out their shapes would import torch's compiler.
        shape = spec.max_positions, spec.head_dim
        cos, sin = (torch.empty(shape),) * 2 if self.embed_tokens.is_meta else rope_tables(spec)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.dtype

    def blocks(self) -> list[Layer]:
        return [cast(Layer, layer) for layer in self.layers]

    @property
    def head(self) -> Tensor:
        """The matrix from hidden states to logits."""
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        linear: LinearOp = F.linear,
        ops: Ops = PLAIN,
    ) -> Tensor:
        """Final hidden states [T, hidden] of flat tokens."""
        x = F.embedding(tokens, self.embed_tokens)
        rope = (self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))
        for index, layer in enumerate(self.layers):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, rope, index, attend, linear, ops, use_reentrant=False)
            else:
                x = layer(x, rope, index, attend, linear, ops)
        return self.norm(x, ops)

    @torch.no_grad()
    def initialise(self, seed: int) -> Transformer:
        """Random weights, the same for a seed on every machine."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        return self


def rope_tables(spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """cos and sin for every position, [positions, head_dim], the sign of the rotation folded into sin."""
    half = spec.head_dim // 2
    frequency = spec.rope_theta ** (-torch.arange(0, half, dtype=torch.float64) * 2 / spec.head_dim)
    if spec.rope_scaling is not None:
        frequency = _scaled(frequency, spec.rope_scaling)
    angles = torch.outer(torch.arange(spec.max_positions, dtype=torch.float64), frequency)
    cos = torch.cat((angles.cos(), angles.cos()), dim=1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=1)
    return cos.float(), sin.float()


def _scaled(frequency: Tensor, scaling: dict[str, Any]) -> Tensor:
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return frequency / factor
    # Llama 3: low frequencies are stretched, high ones kept, a smooth ramp in between.
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequency / factor + smooth * frequency
