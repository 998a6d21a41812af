"""Hugging Face folders in and out: safetensors only, no code and no pickle from a model folder."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from jigsawrl import durable
from jigsawrl.errors import JigsawError
from jigsawrl.foreign import FLOAT32_MAX, shown
from jigsawrl.model.lora import TARGETS, add_lora, linears, load_lora_state, lora_state, merged_weight
from jigsawrl.model.spec import read_spec
from jigsawrl.model.tokenizer_files import FILES
from jigsawrl.model.transformer import Linear, Transformer, rope_tables
from jigsawrl.model.weights import INDEX, check_weights, read_header, weight_files
from jigsawrl.regular import read_json_object

DTYPE_KEY = "torch_dtype"
"""The key of config.json with the type of the weights: every transformers reads it, `dtype` only newer ones."""
SHARD_BYTES = 4 * 1024**3
BESIDE_WEIGHTS = tuple(name for name in FILES if name != "config.json")


def load_model(folder: Path, dtype: torch.dtype, device: str | torch.device = "cpu") -> Transformer:
    """The model in a Hugging Face folder. Every parameter must be there, with the right shape and finite values."""
    spec = read_spec(folder)
    check_weights(folder, spec)
    with torch.device("meta"):
        model = Transformer(spec)
    for module in model.modules():  # not `to_empty`, which would import sympy, half a second in every process
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(empty))
    fill_buffers(model)
    load_weights(model, iterate_weights(folder), str(folder))
    check_finite(model, folder)
    return model


@torch.no_grad()
def check_finite(model: Transformer, folder: Path) -> None:
    """A JigsawError where a weight is NaN or infinite, be it because the model's type cannot hold it."""
    for name, view in places(model).items():
        # A sum takes one pass and no memory; finite numbers can overflow in it, so it only casts suspicion.
        if not math.isfinite(view.sum(dtype=torch.float32)) and not view.isfinite().all():
            kind = str(model.dtype).removeprefix("torch.")
            raise JigsawError(
                f"model.path: {name!r} in {folder} holds a value that is not a finite number in {kind}"
            )


def fill_buffers(model: Transformer) -> None:
    """Position tables, which no file holds."""
    cos, sin = rope_tables(model.spec)
    model.cos, model.sin = cos.to(model.device), sin.to(model.device)


def iterate_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors handle is no dict
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError, MemoryError) as error:
            raise JigsawError(f"model.path: {path} cannot be read ({error})") from None


def places(model: Transformer) -> dict[str, Tensor]:
    """Hugging Face's name of every weight -> the view of ours that holds it."""
    found: dict[str, Tensor] = {"model.embed_tokens.weight": model.embed_tokens.data}
    if model.lm_head is not None:
        found["lm_head.weight"] = model.lm_head.data
    found["model.norm.weight"] = model.norm.weight.data
    for i, layer in enumerate(model.blocks()):
        prefix = f"model.layers.{i}"
        found[f"{prefix}.input_layernorm.weight"] = layer.input_layernorm.weight.data
        found[f"{prefix}.post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight.data
        if layer.q_norm is not None and layer.k_norm is not None:
            found[f"{prefix}.self_attn.q_norm.weight"] = layer.q_norm.weight.data
            found[f"{prefix}.self_attn.k_norm.weight"] = layer.k_norm.weight.data
        for block, linear in (("self_attn", layer.qkv), ("self_attn", layer.o)):
            found.update(_parts(f"{prefix}.{block}", linear, linear.weight.data))
        for linear in (layer.gate_up, layer.down):
            found.update(_parts(f"{prefix}.mlp", linear, linear.weight.data))
    return found


def _parts(prefix: str, linear: Linear, weight: Tensor) -> dict[str, Tensor]:
    rows = list(linear.parts.values())
    found = {f"{prefix}.{p}.weight": w for p, w in zip(linear.parts, weight.split(rows), strict=True)}
    if linear.bias is not None:
        biases = linear.bias.data.split(rows)
        found.update({f"{prefix}.{p}.bias": b for p, b in zip(linear.parts, biases, strict=True)})
    return found


@torch.no_grad()
def load_weights(model: Transformer, weights: Iterable[tuple[str, Tensor]], source: str) -> None:
    targets = places(model)
    missing = set(targets)
    own_head: Tensor | None = None
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            if name == "lm_head.weight":
                own_head = tensor  # some tools store a tied head beside the embedding that it is
                continue
            if name.endswith("rotary_emb.inv_freq"):
                continue
            raise JigsawError(f"model.path: {source} holds {name!r}, which this kind of model does not have")
        if target.shape != tensor.shape:
            raise JigsawError(
                f"model.path: {name!r} in {source} is {list(tensor.shape)}, "
                f"config.json says {list(target.shape)}"
            )
        target.copy_(tensor)
        missing.discard(name)
    if missing:
        raise JigsawError(f"model.path: {source} lacks {len(missing)} weights, such as {min(missing)!r}")
    if own_head is not None and not torch.equal(own_head.to(model.embed_tokens), model.embed_tokens):
        raise JigsawError(
            f"model.path: {source} says tie_word_embeddings, and holds an 'lm_head.weight' that is not its "
            "'model.embed_tokens.weight'; set tie_word_embeddings to false in its config.json"
        )


def export_model(model: Transformer, source: Path, out: Path) -> None:
    """Writes a Hugging Face folder, adapters merged in; `source` gives the tokenizer. All or nothing."""
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    _copy_companions(source, aside)
    config = {key: value for key, value in model.spec.raw.items() if key not in ("dtype", DTYPE_KEY)}
    config[DTYPE_KEY] = str(model.dtype).removeprefix("torch.")
    (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {name: view.contiguous().cpu() for name, view in places(model).items()}
    for prefix, linear in _adapted(model):
        weights.update(
            {n: w.contiguous().cpu() for n, w in _parts(prefix, linear, merged_weight(linear)).items()}
        )
    _save_sharded(weights, aside)
    _replace(aside, out)


def export_adapter(model: Transformer, base: Path, rank: int, alpha: float, out: Path) -> None:
    """Writes the adapters in PEFT's format."""
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    _copy_companions(base, aside)
    parts = {part for _, linear in _adapted(model) for part in (linear.lora.a if linear.lora else ())}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.absolute()),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(parts),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (aside / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    state = {name: tensor.contiguous().cpu() for name, tensor in lora_state(model).items()}
    _save(state, aside / "adapter_model.safetensors")
    _replace(aside, out)


def load_adapter(model: Transformer, folder: Path) -> tuple[int, float]:
    """Adds the adapter of a PEFT folder to the model; returns its rank and alpha."""
    path, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config = read_json_object(path, "model.lora.path", "so it is not a PEFT adapter folder")
    plain = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    odd = [key for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern") if config.get(key)]
    targets = config.get("target_modules")
    if not plain or odd or not isinstance(targets, list) or not all(each in TARGETS for each in targets):
        raise JigsawError(
            f"model.lora.path: {path} is not a plain LoRA adapter on {', '.join(TARGETS)}"
            + (f" (it sets {', '.join(odd)})" if odd else "")
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    ranks = {s[0] for n, _, s in read_header(weights, "model.lora.path") if n.endswith("lora_A.weight") and s}
    if isinstance(rank, bool) or not isinstance(rank, int) or ranks != {rank}:
        found = ", ".join(map(str, sorted(ranks)[:3])) or "no adapters"
        raise JigsawError(f"model.lora.path: {path} has r {shown(rank)}, and {weights.name} has {found}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= FLOAT32_MAX:
        raise JigsawError(
            f"model.lora.path: {path} has lora_alpha {shown(alpha)}; it must be a number above 0"
        )
    add_lora(model, rank, float(alpha), set(targets), seed=0)
    try:
        load_lora_state(model, load_file(weights))
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise JigsawError(f"model.lora.path: {folder}: {error}") from None
    return rank, float(alpha)


def _adapted(model: Transformer) -> list[tuple[str, Linear]]:
    return [(prefix, linear) for prefix, linear in linears(model) if linear.lora is not None]


def _copy_companions(source: Path, out: Path) -> None:
    for name in BESIDE_WEIGHTS:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def _save(weights: dict[str, Tensor], path: Path) -> None:
    with durable.usual_mode(path):
        save_file(weights, path, metadata={"format": "pt"})


def _save_sharded(weights: dict[str, Tensor], out: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        _save(shards[0], out / "model.safetensors")
        return
    index: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _save(shard, out / file)
        index.update(dict.fromkeys(shard, file))
    total = sum(t.nbytes for t in weights.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (out / INDEX).write_text(text + "\n", encoding="utf-8")


def _replace(aside: Path, out: Path) -> None:
    """Puts a finished folder in its place; what stood there before goes only then."""
    for path in [*aside.iterdir(), aside]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    aside.rename(out)
    shutil.rmtree(old, ignore_errors=True)
