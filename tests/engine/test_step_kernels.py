"""The kernels of a decode step and of prompts against float32, on fresh random numbers, for every batch size that
decoding has a graph for; where there is no GPU, on numpy and for some of them."""

from __future__ import annotations

import copy
import random
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from adapted_models import DEVICE, KINDS, adapted, bfloat16_model, causal, distance, in_float32, noise
from small_models import random_model
from triton_on_numpy import kernels_on_numpy

from jigsawrl.engine.attention import KVCache
from jigsawrl.engine.sampler import keyed_uniforms
from jigsawrl.model.lora import TARGETS, Lora, adapters_on

ON_GPU = torch.cuda.is_available()
if ON_GPU and torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs an NVIDIA GPU of the Hopper kind or newer, or none", allow_module_level=True)

with kernels_on_numpy(unless=ON_GPU):
    from jigsawrl.engine.cuda.adapters import AdapterScratch, Stack, beside, expand, shrink
    from jigsawrl.engine.cuda.chunks import FEW as FEW_TOKENS
    from jigsawrl.engine.cuda.chunks import ChunkAttention
    from jigsawrl.engine.cuda.cuts import Cut
    from jigsawrl.engine.cuda.decoder import LADDER
    from jigsawrl.engine.cuda.linear import Scratch, linear
    from jigsawrl.engine.cuda.prefill import Chunks, packed
    from jigsawrl.engine.cuda.step import DecodeStep, Rows
    from jigsawrl.engine.cuda.streamed import streamed
    from jigsawrl.engine.cuda.tilings import (
        HEAD,
        HEAD_TILE,
        MOST_ADAPTED_ROWS,
        MOST_ROWS,
        PLAIN,
        RESIDUAL,
        RINGS,
        SWIGLU,
        ring,
        tiling,
        tiling_beside_adapters,
    )

SLOTS = LADDER if ON_GPU else (1, 24, 64, 96)
FEW = [size for size in SLOTS if size <= MOST_ROWS]
SHAPES = {
    "0.5B": (896, 64, 14, 2, 4864),
    "1.5B": (1536, 128, 12, 2, 8960),
    **({"7B": (3584, 128, 28, 4, 18944)} if ON_GPU else {}),
}
"""Hidden size, head size, heads, key heads and inner size of Qwen2.5's."""


@pytest.fixture(autouse=not ON_GPU)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step asks of torch, for a GPU that is not there."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, pin_memory=False, **named: empty(*given, **named))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@cache
def scratch_of(hidden: int) -> Scratch:
    numbers = {"dtype": torch.float32, "device": DEVICE}
    return Scratch(
        slots=256,
        scaled=torch.empty(256, hidden, dtype=torch.bfloat16, device=DEVICE),
        squares=torch.empty(hidden // 16, 256, **numbers),
        maxima=torch.empty(2048, 256, **numbers),
        sums=torch.empty(2048, 256, **numbers),
        partials=torch.empty(16 * MOST_ADAPTED_ROWS * 8192, **numbers),
        counters=torch.zeros(8192, dtype=torch.int32, device=DEVICE),
    )


@pytest.mark.parametrize("count", FEW)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_products_and_what_follows_them_are_those_of_float32(shape, count):
    hidden, size, heads, kv_heads, inner = shape
    scratch = scratch_of(hidden)
    scratch.scaled.fill_(float("nan"))
    scratch.squares.fill_(float("nan"))
    # A residual product leaves what the next norm needs ...
    attended, w_o, stream, norm = (
        noise(count, heads * size),
        noise(hidden, heads * size, scale=0.03),
        noise(count, hidden),
        noise(hidden),
    )
    wanted = stream.float() + attended.float() @ w_o.float().T
    tiles = linear(
        attended, w_o, count, RESIDUAL, tiling(count, *w_o.shape, RESIDUAL), scratch,
        residual=stream, next_norm=norm,
    )  # fmt: skip
    assert distance(stream, wanted) < 4e-3
    assert distance(scratch.scaled[:count], stream.float() * norm.float()) < 4e-3
    normed = F.rms_norm(stream.float(), (hidden,), norm.float(), 1e-6)
    # ... and products of normed rows divide by it.
    w_qkv, bias = (
        noise((heads + 2 * kv_heads) * size, hidden, scale=0.03),
        noise((heads + 2 * kv_heads) * size),
    )
    out = torch.full((count, len(w_qkv)), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    linear(
        scratch.scaled, w_qkv, count, PLAIN, tiling(count, *w_qkv.shape, PLAIN), scratch,
        out=out, bias=bias, eps=1e-6, norm_tiles=tiles,
    )  # fmt: skip
    assert distance(out, normed @ w_qkv.float().T + bias.float()) < 6e-3
    w_gate_up = noise(2 * inner, hidden, scale=0.03)
    out = torch.full((count, inner), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    linear(
        scratch.scaled, w_gate_up, count, SWIGLU, tiling(count, *w_gate_up.shape, SWIGLU), scratch,
        out=out, eps=1e-6, norm_tiles=tiles,
    )  # fmt: skip
    gate, up = (normed @ w_gate_up.float().T).chunk(2, dim=1)
    assert distance(out, F.silu(gate) * up) < 8e-3
    w_down, before = noise(hidden, inner, scale=0.03), stream.float()
    linear(
        out, w_down, count, RESIDUAL, tiling(count, *w_down.shape, RESIDUAL), scratch,
        residual=stream, next_norm=norm,
    )  # fmt: skip
    assert distance(stream, before + out.float() @ w_down.float().T) < 4e-3
    assert int(scratch.counters.abs().sum()) == 0


def large(matrix: tuple[int, int]) -> bool:
    """Whether numpy takes many seconds for a product with it."""
    return not ON_GPU and matrix[0] * matrix[1] > 100_000_000


@pytest.mark.parametrize(
    ("matrix", "count"),
    [
        pytest.param(matrix, count, marks=pytest.mark.long if large(matrix) else ())
        for matrix, known in RINGS.items()
        for count in (FEW if ON_GPU else known)
        if ring(count, *matrix) is not None
    ],
    ids=str,
)
@pytest.mark.parametrize("yields", [False, True])
def test_products_from_a_ring_are_those_of_float32(matrix, count, yields):
    how, (outputs, inputs), hidden = ring(count, *matrix), matrix, min(matrix)
    epilogue = SWIGLU if outputs > 4 * inputs else RESIDUAL if outputs == hidden else PLAIN
    scratch = scratch_of(hidden)
    scratch.scaled.fill_(float("nan"))
    x, w = noise(64, inputs), noise(outputs, inputs, scale=0.03)
    x[count:] = float("nan")
    product = x[:count].float() @ w.float().T
    if epilogue == RESIDUAL:
        stream, norm = noise(64, outputs), noise(outputs)
        before, wanted = stream.clone(), stream[:count].float() + product
        tiles = streamed(x, w, count, epilogue, how, scratch, residual=stream, next_norm=norm, yields=yields)
        assert distance(stream[:count], wanted) < 4e-3
        assert torch.equal(stream[count:], before[count:])
        assert distance(scratch.scaled[:count], stream[:count].float() * norm.float()) < 4e-3
        squares = stream[:count].float().square().sum(1)
        assert distance(scratch.squares[:tiles, :count].sum(0), squares) < 1e-5
    else:
        norm_tiles, bias = 24, noise(outputs) if epilogue == PLAIN else None
        scratch.squares[:norm_tiles] = 50 * torch.rand(norm_tiles, 256, device=DEVICE)
        size = scratch.squares[:norm_tiles, :count].sum(0) / inputs
        wanted = product * torch.rsqrt(size + 1e-6)[:, None]
        out = torch.full((64, outputs if bias is not None else outputs // 2), float("nan"), device=DEVICE)
        out = out.bfloat16()
        more = {"eps": 1e-6, "norm_tiles": norm_tiles, "yields": yields}
        streamed(x, w, count, epilogue, how, scratch, out=out, bias=bias, **more)
        gate, up = wanted.chunk(2, dim=1)
        wanted = F.silu(gate) * up if bias is None else wanted + bias.float()
        assert distance(out[:count], wanted) < 8e-3
        assert out[count:].isnan().all()
    assert int(scratch.counters.abs().sum()) == 0


def noisy_lora(inputs: int, parts: dict[str, int], targets: set[str], rank: int, scale: float) -> Lora:
    lora = Lora(inputs, parts, targets, rank, scale).to(DEVICE, torch.bfloat16)
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.copy_(noise(*parameter.shape, scale=0.1))
    return lora


def with_adapters(x: torch.Tensor, y: torch.Tensor, loras: list[Lora], who: list[int]) -> torch.Tensor:
    """What float32 makes of rows x and the base's y where row i is adapted by who[i], -1 by nobody."""
    out = y.clone()
    for row, adapter in enumerate(who):
        if adapter >= 0:
            lora = copy.deepcopy(loras[adapter]).float()
            out[row] = lora(x[row : row + 1], y[row : row + 1], F.linear)[0]
    return out


@pytest.mark.parametrize("count", [1, 8, 24, 64, 96, 160, MOST_ADAPTED_ROWS] if ON_GPU else [1, 24, 96])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@torch.no_grad()
def test_products_with_a_mix_of_adapters_are_those_of_float32(shape, count):
    hidden, size, heads, kv_heads, inner = shape
    scratch, norm, before = scratch_of(hidden), noise(hidden), noise(count, hidden)
    matrices = {
        PLAIN: ({"q_proj": heads * size, "k_proj": kv_heads * size, "v_proj": kv_heads * size}, hidden),
        SWIGLU: ({"gate_proj": inner, "up_proj": inner}, hidden),
        RESIDUAL: ({"down_proj": hidden}, inner),
    }
    kinds = [(4, 2.0, {"q_proj", "v_proj", "up_proj"}), (16, 1.0, set(TARGETS)), (40, 0.25, set(TARGETS))]
    rows = torch.randperm(count, device=DEVICE).int()
    for epilogue, (parts, inputs) in matrices.items():
        w, x = noise(sum(parts.values()), inputs, scale=0.03), noise(count, inputs)
        loras = [noisy_lora(inputs, parts, targets, rank, scale) for rank, scale, targets in kinds]
        stack = Stack({7 + i: {w: lora} for i, lora in enumerate(loras) if len(lora.a)})
        who = [random.Random(count).randrange(-1, 3) for _ in range(count)]
        who = [-1 if 7 + i not in stack.slots else i for i in who]
        slot_of = torch.zeros(count, dtype=torch.int32, device=DEVICE)
        slot_of[rows.long()] = torch.tensor([stack.slots.get(7 + i, -1) for i in who], dtype=torch.int32).to(
            DEVICE
        )
        adapters = beside(stack.matrices[w], stack.rank, rows, slot_of, AdapterScratch.of(stack, count))
        wanted = with_adapters(x.float(), x.float() @ w.float().T, loras, who)
        out = x @ w.T
        shrink(x, adapters, count)
        expand(out, adapters, count)
        assert distance(out, wanted) < 6e-3
        out = torch.full((count, len(w)), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        stream = before.clone()
        how = tiling_beside_adapters(count, *w.shape, epilogue)
        linear(
            x, w, count, epilogue, how, scratch,
            out=out, residual=stream, next_norm=norm, adapters=adapters,
        )  # fmt: skip
        if epilogue == RESIDUAL:
            assert distance(stream, before.float() + wanted) < 6e-3
        elif epilogue == SWIGLU:
            gate, up = wanted.chunk(2, dim=1)
            assert distance(out.flatten()[: count * inner].view(count, inner), F.silu(gate) * up) < 1e-2
        else:
            assert distance(out, wanted) < 6e-3


def in_slot(stack: Stack, w: torch.Tensor, owner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What someone has there of `a` and `b`."""
    matrices, slot = stack.matrices[w], stack.slots[owner]
    slots, rank = len(matrices.scales), stack.rank
    return matrices.a.view(-1, slots, rank, w.shape[1])[:, slot], matrices.b.view(-1, slots, rank)[:, slot]


def test_a_slot_that_is_filled_again_holds_the_new_adapters_and_nothing_of_the_old():
    parts = {"gate_proj": 128, "up_proj": 128}
    w, other = noise(256, 64), noise(256, 64)
    stack = Stack(
        {
            1: {w: noisy_lora(64, parts, {"gate_proj", "up_proj"}, 16, 2.0)},
            2: {other: noisy_lora(64, parts, {"up_proj"}, 4, 1.0)},
        }
    )
    for targets, rank, scale in (
        ({"gate_proj", "up_proj"}, 16, 2.0),
        ({"up_proj"}, 16, 2.0),
        ({"up_proj"}, 3, 2.0),
        ({"gate_proj", "up_proj"}, 3, 0.5),
    ):
        lora = noisy_lora(64, parts, targets, rank, scale)
        stack.fill(1, {w: lora})
        fresh = Stack({1: {w: lora}, 2: {other: noisy_lora(64, parts, {"up_proj"}, 16, 1.0)}})
        for each, wanted in zip(in_slot(stack, w, 1), in_slot(fresh, w, 1), strict=True):
            assert torch.equal(each, wanted)
        assert stack.matrices[w].scales[stack.slots[1]] == scale
    stack.fill(1, {})
    stack.fill(3, {other: noisy_lora(64, parts, {"gate_proj"}, 8, 1.0)})
    assert not any(each.any() for each in in_slot(stack, w, 3))


@pytest.mark.parametrize("count", FEW)
def test_the_head_leaves_each_tiles_maximum_and_sum(count):
    hidden, vocabulary = 896, 151_936 if ON_GPU else 12_800
    scratch = scratch_of(hidden)
    w, x = noise(vocabulary, hidden, scale=0.03), noise(count, hidden)
    scratch.squares[0, :count] = x.float().square().sum(1)
    rows = torch.randperm(256, device=DEVICE)[:count].int()
    temperatures = torch.rand(256, device=DEVICE) + 0.5
    temperatures[rows[0]] = 0
    logits = torch.full((count, vocabulary), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    linear(
        x, w, count, HEAD, tiling(count, *w.shape, HEAD), scratch,
        out=logits, eps=1e-6, norm_tiles=1, rows=rows, temperatures=temperatures,
    )  # fmt: skip
    normed = F.rms_norm(x.float(), (hidden,), None, 1e-6)
    assert distance(logits, normed @ w.float().T) < 6e-3
    heat = torch.where(temperatures[rows.long()] == 0, 1.0, temperatures[rows.long()])
    tiles = (logits.float() / heat[:, None]).view(count, -1, HEAD_TILE)
    highest = tiles.amax(2)
    torch.testing.assert_close(scratch.maxima[: tiles.shape[1], :count].T, highest)
    sums = (tiles - highest[:, :, None]).exp().sum(2)
    torch.testing.assert_close(scratch.sums[: tiles.shape[1], :count].T, sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "cut",
    [
        Cut(64, 1, 64, 3, 2),
        Cut(64, 1, 64, 7, 0),
        Cut(64, 4, 128, 5, 1),
        Cut(256, 16, 64, 5, 2),
        Cut(512, 8, 128, 5, 1),
        Cut(64, 1, 128, 3, 0, streamed=True),
        Cut(64, 4, 128, 2, 0, streamed=True),
        Cut(64, 4, 64, 2, 0, streamed=True),
        Cut(64, 3, 64, 4, 0, streamed=True),
        Cut(64, 12, 64, 2, 0, streamed=True),
        Cut(64, 4, 128, 3, 0, streamed=True),
        Cut(256, 16, 64, 4, 0, streamed=True),
    ],
    ids=str,
)
@pytest.mark.parametrize(("family", "heads"), KINDS)
@torch.inference_mode()
def test_attention_is_that_of_float32_and_writes_only_the_new_keys_and_values(family, heads, cut):
    model = bfloat16_model(family, num_hidden_layers=1, **heads)
    spec, size, rng = model.spec, 16, random.Random(cut.splits)
    contexts = [0, 1, 15, 16, 17, 64, 1000, 3001] + [rng.randrange(600) for _ in range(40 if ON_GPU else 4)]
    blocks = [-(-(context + 1) // size) for context in contexts]
    total = sum(blocks)
    cache = KVCache(spec, total + 1, size, torch.bfloat16, DEVICE)
    cache.keys.normal_()
    cache.values.normal_()
    rows = Rows(64, 256, total, DEVICE)
    step = DecodeStep(model, cache, rows, 64)
    ids, at = torch.randperm(total), 0
    order = rng.sample(range(64), len(contexts))
    for slot, (row, context, count) in enumerate(zip(order, contexts, blocks, strict=True)):
        rows.tables[row, :count] = ids[at : at + count].int()
        rows.positions[row] = context
        step.inputs[slot] = row
        at += count
    step.qkv.normal_()
    step.attended.fill_(float("nan"))
    keys, values = cache.keys[0].clone(), cache.values[0].clone()
    layer = model.blocks()[0]
    step._attend(0, layer, len(contexts), cut)
    for slot, (row, context) in enumerate(zip(order, contexts, strict=True)):
        qkv = step.qkv[slot].float().view(1, -1, spec.head_dim)
        q, k, v = qkv.split((spec.heads, spec.kv_heads, spec.kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(q, (spec.head_dim,), layer.q_norm.weight.float(), spec.norm_eps)
            k = F.rms_norm(k, (spec.head_dim,), layer.k_norm.weight.float(), spec.norm_eps)
        cos, sin = model.cos[context], model.sin[context]
        q = q * cos + q.roll(spec.head_dim // 2, -1) * sin
        k = k * cos + k.roll(spec.head_dim // 2, -1) * sin
        line = rows.tables[row, : context // size + 1].long()
        slots = (line[:, None] * size + torch.arange(size, device=DEVICE)).flatten()[: context + 1]
        keys.view(-1, spec.kv_heads, spec.head_dim)[slots[-1]] = k[0].bfloat16()
        values.view(-1, spec.kv_heads, spec.head_dim)[slots[-1]] = v[0].bfloat16()
        past_k = cache.tokens[0][0][slots].float()
        past_v = cache.tokens[0][1][slots].float()
        expected = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            past_k.transpose(0, 1)[None],
            past_v.transpose(0, 1)[None],
            enable_gqa=True,
        )
        assert distance(step.attended[slot].view(spec.heads, -1), expected[0, :, 0]) < 8e-3
    torch.testing.assert_close(cache.keys[0], keys, rtol=2e-2, atol=2e-2)
    changed = (cache.values[0] != values).sum()
    assert int(changed) == 0
    assert int(step.part_counters.abs().sum()) == 0, "the next layer counts its parts from zero"


GROUPS = [(8, 1, 64), (12, 2, 128)]
if ON_GPU:
    GROUPS += [(4, 4, 64), (14, 2, 64), (28, 4, 128), (5, 5, 128)]
"""Heads, key heads and head size."""


SPANS = [(0, 1), (0, 16), (15, 2), (16, 1), (63, 65), (500, 30), (2999, 1), (0, 2000), (3000, 200)]
"""Cached tokens and new ones; the first seven make a pass of few tokens."""


@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
@pytest.mark.parametrize("heads", GROUPS, ids=str)
@torch.inference_mode()
def test_attention_of_chunks_is_that_of_float32_over_their_prefix_and_writes_only_their_keys(heads, few):
    count, kv_heads, head_dim = heads
    sizes = {"num_attention_heads": count, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    spec, size, rng = random_model("llama", num_hidden_layers=1, **sizes).spec, 16, random.Random(count)
    spans = SPANS[:7]
    if not few:
        spans = SPANS + [(rng.randrange(300), rng.randrange(1, 100)) for _ in range(20)]
    assert (sum(length for _, length in spans) <= FEW_TOKENS) == few
    each = [-(-(context + length) // size) for context, length in spans]
    cache = KVCache(spec, sum(each) + 1, size, torch.bfloat16, DEVICE)
    cache.keys.normal_()
    cache.values.normal_()
    ids = iter(torch.randperm(sum(each)).tolist())
    blocks = [[next(ids) for _ in range(number)] for number in each]
    places = [
        (torch.tensor(line)[:, None] * size + torch.arange(size)).flatten()[: context + length]
        for line, (context, length) in zip(blocks, spans, strict=True)
    ]
    contexts, lengths = np.array(spans).T
    positions = np.concatenate([np.arange(c, c + n) for c, n in spans])
    new = torch.cat([place[context:] for place, (context, _) in zip(places, spans, strict=True)])
    chunks = Chunks(lengths, contexts, np.full(len(spans), -1), blocks)
    rows = len(positions)
    flat, tiles = packed(np.zeros(rows, np.int64), positions, new.numpy(), chunks, spec)
    flat = flat.to(DEVICE)
    attend = ChunkAttention(
        spec, cache, flat[rows : 2 * rows], flat[2 * rows : 3 * rows],
        flat[4 * rows : 8 * rows].view(rows, 4)[:tiles], flat[8 * rows :],
    )  # fmt: skip
    # Views of wider rows, as the model's are.
    qkv = noise(rows, count + 2 * kv_heads, head_dim)
    q, k, v = qkv.split((count, kv_heads, kv_heads), dim=1)
    keys, values = cache.tokens[0][0].clone(), cache.tokens[0][1].clone()
    keys[new.to(DEVICE)], values[new.to(DEVICE)] = k, v
    out, start = attend(0, q, k, v), 0
    assert torch.equal(cache.tokens[0][0], keys)
    assert torch.equal(cache.tokens[0][1], values)
    for (context, length), place in zip(spans, places, strict=True):
        seen = torch.arange(context + length) <= torch.arange(context, context + length)[:, None]
        expected = F.scaled_dot_product_attention(
            q[start : start + length].float().transpose(0, 1)[None],
            keys[place.to(DEVICE)].float().transpose(0, 1)[None],
            values[place.to(DEVICE)].float().transpose(0, 1)[None],
            attn_mask=seen.to(DEVICE),
            enable_gqa=True,
        )[0].transpose(0, 1)
        assert distance(out[start : start + length], expected) < 8e-3, (context, length)
        start += length


@pytest.mark.parametrize(("adapters", "yields"), [(0, False), (0, True), (3, False), (3, True)])
@pytest.mark.parametrize("slots", SLOTS)
@torch.inference_mode()
def test_a_whole_step_is_the_forward_of_each_rows_own_model(slots, adapters, yields):
    family, heads = KINDS[slots % 3]
    base = bfloat16_model(family, **heads)
    models = [base, *(adapted(base, number) for number in range(adapters))]
    references, size, rng = [in_float32(model) for model in models], 16, random.Random(slots)
    count = max(1, slots - 1)
    contexts = [rng.randrange(80) for _ in range(count)]
    cache = KVCache(base.spec, 6 * count + 1, size, torch.bfloat16, DEVICE)
    rows = Rows(slots, 256, 6 * count, DEVICE)
    step = DecodeStep(base, cache, rows, slots)
    places: dict[int, int] = {}
    if adapters:
        stack = Stack({i + 1: adapters_on(base, model) for i, model in enumerate(models[1:])})
        step.adapt(stack)
        places = stack.slots
    words = base.spec.vocab_size
    sequences = [torch.randint(0, words, (context + 1,), device=DEVICE) for context in contexts]
    whose = [rng.randrange(len(models)) for _ in sequences]
    for row, (sequence, owner) in enumerate(zip(sequences, whose, strict=True)):
        blocks = torch.arange(row * 6, row * 6 + 6, device=DEVICE)
        held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def attend(layer, q, k, v, held=held):
            held[layer] = (k, v)
            return causal(layer, q, k, v)

        models[owner](sequence, torch.arange(len(sequence), device=DEVICE), attend)
        place = (blocks[:, None] * size + torch.arange(size, device=DEVICE)).flatten()[: len(sequence) - 1]
        for layer, (k, v) in held.items():
            cache.write(layer, place, k[:-1], v[:-1])
        rows.tables[row, :6] = blocks.int()
        last = len(sequence) - 1
        rows.tokens[row], rows.positions[row] = sequence[-1].int(), last
        rows.keys[row] = rng.randrange(2**62)
        rows.adapters[row] = places.get(owner, -1)
        step.inputs[row] = row
    cut = Cut(64, 4, 64, 5, 2) if slots < 32 else Cut(64, 1, 64, 3, 2)
    step.launch(slots, cut, choose=True, yields=yields)
    errors = []
    for row, (sequence, owner) in enumerate(zip(sequences, whose, strict=True)):
        reference = references[owner]
        hidden = reference(sequence, torch.arange(len(sequence), device=DEVICE), causal)[-1]
        errors.append(distance(step.logits[row], reference.head @ hidden))
    assert max(errors) < 0.03
    assert rows.positions[:count].tolist() == [context + 1 for context in contexts]
    assert rows.tokens[:count].tolist() == step.tokens[:count].tolist()
    assert torch.equal(step.results[0], step.outputs.cpu()), "the host has them as well"
    if count < slots:
        assert rows.positions[rows.idle] == 0


@pytest.mark.parametrize("spread", [0.1, 3.0])
@torch.inference_mode()
def test_tokens_are_where_the_keyed_number_falls_and_logprobs_those_of_the_softmax(spread):
    model = bfloat16_model("llama", vocab_size=151_936, num_hidden_layers=1, **KINDS[2][1])
    count = 256 if ON_GPU else 32
    rows = Rows(count, 8, 1, DEVICE)
    step = DecodeStep(model, KVCache(model.spec, 2, 16, torch.bfloat16, DEVICE), rows, count)
    keys = np.random.default_rng(0).integers(0, 2**64, count, dtype=np.uint64)
    step.inputs.copy_(torch.arange(count))
    rows.keys[:count] = torch.from_numpy(keys.view(np.int64))
    rows.positions[:count] = torch.arange(count)
    rows.temperatures[:count] = torch.where(torch.arange(count) % 8 == 0, 0.0, 0.6 + torch.rand(count))
    heat = rows.temperatures[:count].double()
    greedy = heat == 0
    step.logits.normal_().mul_(spread)
    step._tiles(count)
    step._choose(count)
    logits = step.logits.double() / torch.where(greedy, 1.0, heat)[:, None]
    logprobs, tokens = logits.log_softmax(1), step.tokens.long()
    torch.testing.assert_close(
        step.logprobs.double(), logprobs.gather(1, tokens[:, None])[:, 0], atol=1e-4, rtol=1e-4
    )
    assert torch.equal(logits.gather(1, tokens[:, None])[greedy, 0], logits.amax(1)[greedy])
    numbers = torch.from_numpy(keyed_uniforms(keys, np.arange(count) + 1)).to(DEVICE).double()
    upper = logprobs.exp().cumsum(1).gather(1, tokens[:, None])[:, 0]
    lower = upper - logprobs.gather(1, tokens[:, None])[:, 0].exp()
    inside = (lower - 1e-5 <= numbers) & (numbers <= upper + 1e-5)
    assert bool(inside[~greedy].all())
