"""Fuzz targets: the files of a model folder, read, checked and loaded as a run does it."""

from __future__ import annotations

import json
import os
import random
import struct
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from fuzzing.check import Case, Target
from fuzzing.values import TEXTS, as_json, damaged, damaged_bytes, nasty
from jigsawrl.config.files import read_model
from jigsawrl.model.config_keys import unknown_keys
from jigsawrl.model.folder import load_model
from jigsawrl.model.tiny import write_tiny
from jigsawrl.model.tokenizer import load_tokenizer
from jigsawrl.pipeline.chat import Dialogue
from jigsawrl.trainer.packed import PackedAttention

transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast  # noqa: B018 - imported now, in no case's time
SPECIAL = (
    "config.json",
    "tokenizer_config.json",
    "generation_config.json",
    "tokenizer.json",
    "model.safetensors",
)
MORE_CONFIG: tuple[dict[str, Any], ...] = (
    {},
    {"model_type": "mistral", "sliding_window": 64},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    {"model_type": "qwen3", "attention_bias": True, "layer_types": ["full_attention"]},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "original_max_position_embeddings": 16,
    },
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"bos_token": "<eos>", "add_bos_token": True},
    {"extra_special_tokens": ["<think>"]},
    {"tokenizer_class": "LlamaTokenizerFast"},
    {"chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"},
    {"added_tokens_decoder": {"2": {"content": "x", "special": True}}},
)
GENERATION: tuple[dict[str, Any], ...] = ({}, {"eos_token_id": [1, 2], "bos_token_id": 0, "temperature": 0.5})
GOOD_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant: {% endif %}"
)
PIECES = """
{{ messages[0]['content'] }} | {{ messages }} | {{ bos_token }} | {{ 1 / 0 }} | {{ 'a' * 3 }} | {{ x.y }} | {{ 7 }}
{{ messages[-1].role | upper }} | {{ raise_exception('no') }} | {{ messages | tojson }} | {{ strftime_now('%d') }}
{{ range(10**6) | list }} | {% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }} | {% set a = [1] * 9 %}{{ a }}
{{ '%s %s' % 1 }} | {{ ''.__class__.__mro__ }} | {% generation %}a{% endgeneration %} | {% break %} | {# | {% | {{
{{ messages[0].content.split('+')[9] }} | {{ 'x'.encode('utf-16') }} | {{ none + 1 }} | {{ messages[7] }} | }} | %}
{{ messages.append(1) }} | {{ cycler }} | {{ lipsum() }} | {{ dict(a=1) | dictsort }} | {{ namespace(a=1).a }}
{{ '\\ud800' }} | {{ '\\x00' }} | {% include 'x' %} | {% extends 'y' %} | {% import 'z' as z %} | {{ 9 ** 9 ** 3 }}
"""


@lru_cache(maxsize=1)
def good_files() -> dict[str, bytes]:
    """The files of a small model."""
    with TemporaryDirectory() as folder:
        write_tiny(Path(folder), layers=1, hidden=16, heads=2, kv_heads=1, seed=0)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write_good(folder: Path) -> None:
    for name, content in good_files().items():
        (folder / name).write_bytes(content)


def parsed(name: str) -> dict[str, Any]:
    return dict(json.loads(good_files()[name]))


def use(folder: Path) -> None:
    """What a run does with a model folder: it is checked, its tokenizer and model are loaded and computed with."""
    spec = read_model(folder, False)
    list(unknown_keys(spec.raw))
    tokenizer = load_tokenizer(folder, False)
    tokens = tokenizer.encode("7+5=")
    tokenizer.decode(tokens)
    model = load_model(folder, torch.float32)
    count = min(4, len(tokens), spec.max_positions)
    with torch.no_grad():
        model(torch.tensor(tokens[:count]), torch.arange(count), PackedAttention([count], model.device))


def model_config(rng: random.Random, folder: Path) -> Case:
    """A damaged config.json."""
    write_good(folder)
    content = parsed("config.json") | rng.choice(MORE_CONFIG)
    (folder / "config.json").write_bytes(as_json(rng, damaged(rng, content)))
    return lambda: use(folder)


def model_weights(rng: random.Random, folder: Path) -> Case:
    """Damaged weights: their header, their bytes, the index."""
    write_good(folder)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    match rng.choice(("header", "header", "length", "bytes", "index")):
        case "header":
            text = as_json(rng, damaged(rng, json.loads(data[8 : 8 + length])))
            path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        case "length":
            odd = rng.choice(
                (0, 1, 2, length + 1, length * 2, len(data), len(data) - 8, 1 << 31, 1 << 63, 2**64 - 1)
            )
            path.write_bytes(struct.pack("<Q", odd) + data[8:])
        case "bytes":
            path.write_bytes(damaged_bytes(rng, data))
        case "index":
            index = {
                "metadata": {"total_size": 1},
                "weight_map": dict.fromkeys(("a", "b"), "model.safetensors"),
            }
            (folder / "model.safetensors.index.json").write_bytes(as_json(rng, damaged(rng, index)))
    return lambda: use(folder)


def model_tokenizer(rng: random.Random, folder: Path) -> Case:
    """Damaged files of the tokenizer."""
    write_good(folder)
    settings = parsed("tokenizer_config.json") | rng.choice(SETTINGS)
    generation = parsed("generation_config.json") | rng.choice(GENERATION)
    special = {"eos_token": "<eos>", "pad_token": {"content": "<pad>", "special": True}}
    match rng.choice(("settings", "settings", "generation", "tokenizer", "tokenizer", "special", "added")):
        case "settings":
            settings = damaged(rng, settings)
        case "generation":
            generation = damaged(rng, generation)
        case "tokenizer":
            content = parsed("tokenizer.json")
            if rng.random() < 0.5:  # most of its places are characters of the vocabulary
                vocab = content["model"].pop("vocab")
                content = damaged(rng, content)
                if isinstance(content, dict) and isinstance(content.get("model"), dict):
                    content["model"]["vocab"] = vocab
            else:
                content = damaged(rng, content)
            (folder / "tokenizer.json").write_bytes(as_json(rng, content))
        case "special":
            (folder / "special_tokens_map.json").write_bytes(as_json(rng, damaged(rng, special)))
        case "added":
            (folder / "added_tokens.json").write_bytes(as_json(rng, damaged(rng, {"<x>": 98, "<y>": 2})))
    (folder / "tokenizer_config.json").write_bytes(as_json(rng, settings))
    (folder / "generation_config.json").write_bytes(as_json(rng, generation))
    text = rng.choice(TEXTS)

    def case() -> None:
        tokenizer = load_tokenizer(folder, False)
        tokenizer.decode(tokenizer.encode(text))
        Dialogue(tokenizer).first_tokens(text, rng.choice((None, "Be brief.")))

    return case


def model_chat_template(rng: random.Random, folder: Path) -> Case:
    """A chat template of odd pieces."""
    write_good(folder)
    pieces = [piece for line in PIECES.strip().split("\n") for piece in line.split(" | ")]
    parts = GOOD_TEMPLATE.split("]")
    for _ in range(rng.randint(0, 2)):
        parts.insert(rng.randint(0, len(parts)), rng.choice(pieces))
    text = "]".join(parts)
    data = text.encode("utf-8", "surrogatepass")
    (folder / "chat_template.jinja").write_bytes(damaged_bytes(rng, data) if rng.random() < 0.3 else data)

    def case() -> None:
        dialogue = Dialogue(load_tokenizer(folder, False))
        tokens = dialogue.first_tokens("7+5=", None)
        dialogue.turn_tokens("right", tokens[-1] if tokens else 1)

    return case


def model_folder(rng: random.Random, folder: Path) -> Case:
    """Pipes, devices, loops, folders and other files' content in the places of a model's files."""
    write_good(folder)
    for _ in range(rng.randint(1, 2)):
        path = folder / rng.choice(
            (*SPECIAL, "chat_template.jinja", "x.safetensors", "vocab.json", "merges.txt")
        )
        if path.is_dir() and not path.is_symlink():
            continue
        path.unlink(missing_ok=True)
        match rng.choice(("pipe", "device", "loop", "folder", "gone", "other", "value", "secret")):
            case "pipe":
                os.mkfifo(path)
            case "device":
                path.symlink_to(
                    rng.choice(("/dev/zero", "/dev/full", "/dev/null", "/proc/self/mem", "/dev/stdin"))
                )
            case "loop":
                path.symlink_to(path.name)
            case "folder":
                path.mkdir()
            case "other":
                path.write_bytes(rng.choice(list(good_files().values())))
            case "value":
                path.write_bytes(as_json(rng, nasty(rng)))
            case "secret":
                path.write_bytes(b"x")
                path.chmod(0)
    return lambda: use(folder)


TARGETS: list[Target] = [model_config, model_weights, model_tokenizer, model_folder, model_chat_template]
