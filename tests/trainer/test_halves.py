"""The layer that trains on GPUs, whose gradients are written out, against autograd's: here with torch's operators
where its kernels are."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from small_models import random_model
from torch import Tensor

from jigsawrl.model.lora import TARGETS, add_lora
from jigsawrl.model.ops import PLAIN, Ops
from jigsawrl.model.transformer import Transformer
from jigsawrl.trainer import trainer as trainer_module
from jigsawrl.trainer.batch import Batch
from jigsawrl.trainer.packed import PackedAttention
from jigsawrl.trainer.trainer import hidden_states

PACKAGE = "jigsawrl.trainer.cuda"
ADAPTED = {
    "all weights": None,
    "all adapters": set(TARGETS),
    "some adapters": {"q_proj", "v_proj", "down_proj"},
}


def gradient_of(function, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in inputs]
        return torch.autograd.grad(function(*leaves), leaves, grad)


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return PLAIN.norm(x, weight, eps), torch.tensor(eps, dtype=torch.float64)


def add_norm(x: Tensor, change: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x + change, *norm(x + change, weight, eps)


def norm_gradient(
    d_normed: Tensor, d_x: Tensor | None, x: Tensor, weight: Tensor, kept: Tensor, trained: bool
) -> tuple[Tensor, Tensor | None]:
    back, d_weight = gradient_of(lambda *given: PLAIN.norm(*given, float(kept)), (x, weight), d_normed)
    return back if d_x is None else back + d_x, d_weight if trained else None


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    out.copy_(gradient_of(lambda each: PLAIN.rotate(each, cos, sin), (torch.zeros_like(x),), x)[0])


def swiglu_gradient(d_out: Tensor, gate_up: Tensor) -> Tensor:
    return gradient_of(PLAIN.swiglu, (gate_up,), d_out)[0]


@pytest.fixture
def halves(monkeypatch) -> Ops:
    kernels = SimpleNamespace(
        FUSED=PLAIN,
        norm=norm,
        add_norm=add_norm,
        norm_gradient=norm_gradient,
        rotate=PLAIN.rotate,
        rotate_back=rotate_back,
        swiglu=PLAIN.swiglu,
        swiglu_gradient=swiglu_gradient,
    )
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.ops", kernels)
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.halves", None)
    del sys.modules[f"{PACKAGE}.halves"]  # what was there comes back after the test
    return importlib.import_module(f"{PACKAGE}.halves").TRAINED


def made(family: str, adapted: str, checkpointing: bool) -> Transformer:
    model = random_model(family, scale=1.5).double()
    if (targets := ADAPTED[adapted]) is not None:
        add_lora(model, 3, 6.0, targets, seed=0)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".b." in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.gradient_checkpointing = checkpointing
    return model


def passed(model: Transformer, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Hidden states, and gradients of all that has any."""
    with monkeypatch.context() as patch:
        patch.setattr(
            trainer_module, "_ways", lambda model, lengths: (PackedAttention(lengths, model.device), ops)
        )
        tokens = [torch.arange(n) * 7 % 60 for n in (9, 2, 30, 17)]
        batch = Batch(tokens, [torch.arange(1, len(each)) for each in tokens])
        hidden = hidden_states(model, batch)
        with torch.no_grad():
            assert torch.equal(hidden_states(model, batch), hidden)
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    (hidden * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden": hidden.detach(), **found}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapted", ADAPTED)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gradients_that_are_written_out_are_those_of_autograd(
    family, adapted, checkpointing, halves, monkeypatch
):
    wanted = passed(made(family, adapted, checkpointing), PLAIN, monkeypatch)
    found = passed(made(family, adapted, checkpointing), halves, monkeypatch)
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        assert (found[name] - each).norm() <= 1e-12 * each.norm(), name


def test_what_adapters_add_is_not_lost_in_what_rounding_takes_away(halves):
    """Early in a training it is less than half of the last digit that the residual has in bfloat16."""
    model = made("llama", "all weights", False).bfloat16()
    add_lora(model, 3, 6.0, {"down_proj"}, seed=0)
    layer, generator = model.blocks()[0], torch.Generator().manual_seed(1)
    x = (torch.randn(4000, model.spec.hidden_size, generator=generator) * 4).bfloat16()
    attended = torch.zeros(len(x), model.spec.q_size, dtype=x.dtype)
    assert halves.halves is not None
    assert layer.down.lora is not None
    b = layer.down.lora.b["down_proj"]
    with torch.no_grad():
        before = halves.halves.after(layer, x, attended)
        b.copy_(torch.randn(b.shape, generator=generator) * 1e-3)
        after = halves.halves.after(layer, x, attended)
        mlp = PLAIN.swiglu(layer.gate_up(layer.post_attention_layernorm(x), F.linear)).double()
        added = 2.0 * mlp @ layer.down.lora.a["down_proj"].double().T @ b.double().T
    assert added.std() < 0.05 * (x.abs().double() * 2**-9).mean()
    arrived = ((after.double() - before.double()) * added).sum() / (added * added).sum()
    assert 0.7 < arrived < 1.3
