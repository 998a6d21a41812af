"""Adapters on a base that several models share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_models import random_model

from jigsawrl.model.lora import Lora, adapters_on, add_lora, lora_state, share_base
from jigsawrl.model.transformer import Transformer
from jigsawrl.trainer.packed import PackedAttention

TOKENS = torch.arange(1, 12)


def hidden(model: Transformer) -> torch.Tensor:
    return model(TOKENS, torch.arange(len(TOKENS)), PackedAttention([len(TOKENS)], model.device))


def test_two_models_on_one_base_hold_it_once_and_train_only_their_own_adapters():
    base = random_model("qwen2", tie_word_embeddings=False)
    base.gradient_checkpointing = True
    add_lora(base, rank=2, alpha=4.0, targets={"o_proj"}, seed=3)
    plain = share_base(base)
    first, second = share_base(base), share_base(base)
    add_lora(first, rank=2, alpha=4.0, targets={"q_proj", "down_proj"}, seed=0)
    add_lora(second, rank=4, alpha=4.0, targets={"up_proj"}, seed=1)
    before = hidden(first).detach()
    assert torch.equal(before, hidden(base))
    assert torch.equal(before, hidden(plain))
    assert first.gradient_checkpointing
    bases = {name: tensor for name, tensor in base.state_dict(keep_vars=True).items() if ".lora." not in name}
    assert dict(plain.state_dict(keep_vars=True)).keys() == bases.keys()
    for model in (plain, first, second):
        state = model.state_dict(keep_vars=True)
        assert all(state[name] is tensor for name, tensor in bases.items())
        assert model.cos is base.cos
    for model in (first, second):
        hidden(model).square().sum().backward()
        trained = {name for name, p in model.named_parameters() if p.grad is not None}
        assert trained == {name for name, p in model.named_parameters() if ".lora." in name}
        with torch.no_grad():
            for tensor in lora_state(model).values():
                tensor.add_(0.1)
    assert not torch.equal(hidden(first), before)
    assert not torch.equal(hidden(second), hidden(first))
    assert torch.equal(hidden(plain), before)


def test_adapters_are_found_by_the_matrix_they_stand_beside():
    base = random_model()
    model = share_base(base)
    add_lora(model, rank=2, alpha=4.0, targets={"v_proj", "up_proj"}, seed=0)
    layers, own = base.blocks(), model.blocks()
    assert adapters_on(base, model) == {
        layers[0].qkv.weight: own[0].qkv.lora,
        layers[0].gate_up.weight: own[0].gate_up.lora,
        layers[1].qkv.weight: own[1].qkv.lora,
        layers[1].gate_up.weight: own[1].gate_up.lora,
    }
    with pytest.raises(ValueError, match=r"does not share model\.layers\.0\.self_attn"):
        adapters_on(base, random_model())


@pytest.mark.parametrize("of_x", [True, False])
def test_the_gradients_of_adapters_are_those_of_their_formula(of_x):
    torch.manual_seed(0)
    parts = {"q_proj": 6, "k_proj": 4, "v_proj": 4}
    lora = Lora(5, parts, {"q_proj", "v_proj"}, rank=2, scale=1.5).double()
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.normal_()
    x, weight = torch.randn(7, 5).double().requires_grad_(of_x), torch.randn(14, 5).double()
    inputs = [*([x] if of_x else []), *lora.parameters()]
    out = lora(x, F.linear(x, weight), F.linear)
    by_formula = lora(x, F.linear(x, weight), lambda *products: F.linear(*products))
    torch.testing.assert_close(out, by_formula)
    slope = torch.randn(7, 14).double()
    mine = torch.autograd.grad(out, inputs, slope)
    theirs = torch.autograd.grad(by_formula, inputs, slope)
    torch.testing.assert_close(mine, theirs)
