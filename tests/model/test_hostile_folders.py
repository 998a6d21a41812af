"""Model folders that lie, hang or explode: each is refused in one line, in little time and memory."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import random_model

from jigsawrl.config.files import read_model
from jigsawrl.errors import JigsawError
from jigsawrl.model.folder import export_adapter, export_model, load_adapter, load_model, places
from jigsawrl.model.lora import add_lora
from jigsawrl.model.spec import read_spec
from jigsawrl.model.tiny import write_tiny
from jigsawrl.model.tokenizer import UnusableText, load_tokenizer
from jigsawrl.model.weights import expected_shapes

Spoil = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", layers=2, hidden=16, heads=4, kv_heads=2, seed=0)


def refusal(folder: Path) -> str:
    """What is said of the folder before anything heavy is imported, or else when the model is loaded."""
    with pytest.raises(JigsawError) as caught:
        load_all(folder)
    message = str(caught.value)
    assert message.startswith("model.path: ")
    assert len(message.splitlines()) == 1
    assert len(message) < 500 + 2 * len(str(folder))
    return message


def load_all(folder: Path) -> None:
    read_model(folder, False)
    load_tokenizer(folder, False)
    load_model(folder, torch.float32)


def config(**changes: Any) -> Spoil:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def spoil_tokens(name: str, token: int, large: Path) -> None:
    """Gives a token of a tokenizer's file this id."""
    path = large / name
    content = json.loads(path.read_text()) if path.exists() else {}
    if name == "tokenizer.json":
        vocabulary = content["model"]["vocab"]
        vocabulary[next(iter(vocabulary))] = token
    elif name == "tokenizer_config.json":
        content["added_tokens_decoder"] = {str(token): {"content": "<far>"}}
    else:
        content["<far>"] = token
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize("token", [1 << 24, (1 << 32) - 1, 10**40])
def test_a_token_far_beyond_any_vocabulary_is_refused_before_room_is_made_for_all_below_it(
    folder: Path, name: str, token: int
) -> None:
    spoil_tokens(name, token, folder)
    assert f"{folder / name} has a token whose id is " in refusal(folder)


def test_a_tokenizers_file_that_fails_when_it_is_read_is_refused(folder: Path) -> None:
    (folder / "added_tokens.json").symlink_to("/proc/self/mem")
    assert f"{folder / 'added_tokens.json'} cannot be read" in refusal(folder)


def test_large_numbers_that_are_no_tokens_are_allowed(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 10**30}))
    load_all(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"num_hidden_layers": 1_000_000},
            "has num_hidden_layers 1000000; it must be a whole number from 1 to 4096",
        ),
        (
            {"num_hidden_layers": 4096},
            "lacks 36846 weights, such as 'model.layers.10.input_layernorm.weight'",
        ),
        ({"num_hidden_layers": True}, "has num_hidden_layers True; it must be a whole number"),
        ({"num_hidden_layers": 0}, "has num_hidden_layers 0"),
        ({"hidden_size": -1}, "has hidden_size -1"),
        ({"hidden_size": 2**40}, "has hidden_size 1099511627776"),
        ({"hidden_size": 1 << 20}, "config.json says [98, 1048576]"),
        ({"hidden_size": 10**400}, "has hidden_size 1000"),
        ({"hidden_size": 16.5}, "has hidden_size 16.5"),
        ({"hidden_size": [16] * 10_000}, "has hidden_size [16, 16"),
        ({"num_attention_heads": 0}, "has num_attention_heads 0"),
        (
            {"num_attention_heads": 3},
            "has num_attention_heads 3, which is no multiple of num_key_value_heads 2",
        ),
        ({"num_key_value_heads": 0}, "has num_key_value_heads 0"),
        ({"head_dim": 0}, "has head_dim 0"),
        ({"hidden_size": 2, "head_dim": None}, "has an odd head_dim, 1"),
        ({"vocab_size": 0}, "has vocab_size 0"),
        ({"vocab_size": None}, "has vocab_size None"),
        ({"max_position_embeddings": 2**40}, "has max_position_embeddings 1099511627776"),
        ({"max_position_embeddings": 2**26}, "set it there to at most 33554432"),
        ({"rms_norm_eps": math.nan}, "has rms_norm_eps nan; it must be a number above 0"),
        ({"rms_norm_eps": "1e-5"}, "has rms_norm_eps '1e-5'"),
        ({"rope_theta": math.nan, "rope_parameters": {}}, "has rope_theta nan"),
        ({"rope_parameters": {"rope_theta": -1}}, "has rope_theta -1"),
        ({"rope_parameters": [1]}, "has rope_parameters [1]; it must be an object"),
        ({"rope_parameters": {"rope_type": "linear"}}, "has rope factor None; it must be a number above 0"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, "has rope_parameters of type ['linear']"),
        ({"tie_word_embeddings": "no"}, "has tie_word_embeddings 'no'; it must be true or false"),
        (
            {"layer_types": [["full_attention"]] * 2},
            "says layer_types [['full_attention'], ['full_attention']]",
        ),
        ({"model_type": ["llama"]}, "says model_type ['llama']"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "x"},
            "has max_window_layers 'x'",
        ),
        ({"auto_map": "x"}, "has auto_map 'x'; it must be an object"),
        ({"mlp_bias": {"a": [1] * 1000}}, "says mlp_bias {'a': [1"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(folder: Path, change: dict[str, Any], says: str) -> None:
    config(**change)(folder)
    assert says in refusal(folder)


def index(content: Any) -> Spoil:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def header(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Another header before the same bytes."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        content = json.loads(data[8 : 8 + length])
        change(content)
        text = json.dumps(content).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return edit


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    def edit(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")

    return edit


def grown(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 40))
        file.truncate(1 << 41)


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (index([]), "index.json is not a JSON object"),
        (index({"weight_map": None}), "has a weight_map with None, which is not the name of a file"),
        (index({"weight_map": ["a"]}), "has a weight_map with ['a']"),
        (index({"weight_map": {"a": 3}}), "has a weight_map with 3"),
        (index({"weight_map": {"a": "../model/model.safetensors"}}), "has a weight_map with '../model/model"),
        (index({"weight_map": {"a": "/etc/passwd"}}), "has a weight_map with '/etc/passwd'"),
        (index({"weight_map": {"a": "x" * 5000}}), "has a weight_map with 'xxx"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[" * 100_000), "is not valid JSON"),
        (grown, "has a header of 1099511627776 bytes, far beyond that of a model"),
        (cut, "bytes of weights where its header says"),
        (header(lambda h: h[NORM].update(shape=[1 << 40])), f"does not describe '{NORM}'"),
        (header(lambda h: h[NORM].update(shape=[-4, -4])), f"does not describe '{NORM}'"),
        (header(lambda h: h[NORM].update(data_offsets=[0, 64])), "begins at byte 0, and not at"),
        (header(lambda h: h[NORM].update(data_offsets=["0", 64])), f"does not describe '{NORM}'"),
        (header(lambda h: h.update({NORM: None})), f"does not describe '{NORM}'"),
        (header(lambda h: h.pop(NORM)), "bytes of weights where its header says"),
        (weights(lambda s: s.pop(NORM)), f"lacks 1 weights, such as '{NORM}'"),
        (
            weights(lambda s: s.update(odd=torch.zeros(2))),
            "holds 'odd', which this kind of model does not have",
        ),
        (
            weights(lambda s: s.update({NORM: s[NORM].long()})),
            "is of type I64; weights must be one of F64, F32",
        ),
        (weights(lambda s: s.update({NORM: s[NORM][:8]})), "is [8], config.json says [16]"),
        (weights(lambda s: s[NORM].fill_(math.nan)), f"'{NORM}' in"),
        (weights(lambda s: s.update({NORM: s[NORM].double() * 1e39})), "not a finite number in float32"),
    ],
)
def test_weights_that_are_not_what_they_seem_are_refused(folder: Path, spoil: Spoil, says: str) -> None:
    spoil(folder)
    assert says in refusal(folder)


def test_large_finite_weights_are_weights(folder: Path) -> None:
    """Their sum overflows."""
    weights(lambda s: s[NORM].fill_(3e38))(folder)
    assert load_model(folder, torch.float32).norm.weight[0] == torch.tensor(3e38)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_expected_weights_are_those_of_the_model(family: str, tied: bool) -> None:
    own = {"head_dim": 24, "attention_bias": True} if family == "qwen3" else {}
    model = random_model(family, tie_word_embeddings=tied, **own)
    held = {name: tuple(view.shape) for name, view in places(model).items()}
    assert expected_shapes(model.spec) == held
    assert model.spec.parameters == sum(map(math.prod, held.values()))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "other.safetensors",
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
def test_what_is_no_file_is_refused_and_not_waited_for(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(name)
    message = refusal(folder)
    assert name in message
    assert "cannot be read (" in message


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a": ' + "[" * 200 + "]" * 200 + "}", "\xff", "3", "null", ""]
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_settings_that_are_no_settings_are_refused(folder: Path, name: str, content: str) -> None:
    (folder / name).write_bytes(content.encode("latin-1"))
    assert name in refusal(folder)


@pytest.mark.parametrize("eos", [10**6, -1, "1", 1.0, True, [[1]], {"a": 1}, [1, 98]])
def test_an_end_that_is_no_token_of_the_model_is_refused(folder: Path, eos: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert "has eos_token_id" in refusal(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t["model"]["vocab"].update({"a": "b"}),
        lambda t: t["model"].update(merges=[["x", "y"]]),
        lambda t: t.update(model=None),
        lambda t: t.update(added_tokens=[{"id": 0}]),
        lambda t: t["model"]["vocab"].update({"a": -1}),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    assert "has no tokenizer that can be read" in refusal(folder)


def test_a_token_beyond_the_vocabulary_of_the_model_is_refused_where_a_text_has_it(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["+"] = 5000
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder, False)
    assert len(tokenizer.encode("7-5=")) == 4
    with pytest.raises(UnusableText, match=r"token 5000 \('\+'\), and the model knows only 98"):
        tokenizer.encode("7+5=")
    with pytest.raises(UnusableText, match="half of a UTF-16 surrogate pair"):
        tokenizer.encode("7\ud8005=")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 1 / 0 }}", "refuses a conversation of user: division by zero"),
        ("{{ messages[9].content.x.y }}", "refuses a conversation of user"),
        ("{{ raise_exception('no\n\nway') }}", "refuses a conversation of user: no way"),
        (
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "refuses a conversation of user: maximum recursion",
        ),
        ("{% for", "refuses a conversation of user"),
        ("{{ range(999999999) | length }}", "refuses a conversation of user: Range too big"),
        ("{{ 'a' * 10000000000 }}", "wants more than 256 MiB of memory"),
        (
            "{% set a = namespace(t='ab') %}{% for i in range(60) %}{% set a.t = a.t ~ a.t %}{% endfor %}",
            "wants more",
        ),
        (
            "{% for i in range(60000) %}{% for j in range(60000) %}{% for k in range(60000) %}"
            "{% endfor %}{% endfor %}{% endfor %}",
            "did not end within 1 s of computing",
        ),
    ],
)
def test_a_chat_template_that_fails_hangs_or_explodes_is_refused(
    folder: Path, template: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jigsawrl.model.chat_template.CPU_SECONDS", 1)
    monkeypatch.setattr("jigsawrl.model.chat_template.MEMORY_BYTES", 256 << 20)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder, False)
    with pytest.raises(JigsawError, match=r"^the model's chat template .*") as caught:
        tokenizer.render([{"role": "user", "content": "hi"}])
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_chat_template_that_is_no_text_is_refused(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": 3}))
    assert "has chat_template 3; it must be text" in refusal(folder)


def test_an_adapter_that_lies_is_refused_before_memory_is_reserved(tmp_path: Path) -> None:
    model = random_model()
    export_model(model, tmp_path, tmp_path / "base")
    add_lora(model, 4, 8.0, {"q_proj"}, seed=0)
    adapter = tmp_path / "adapter"
    export_adapter(model, tmp_path / "base", 4, 8.0, adapter)
    good = json.loads((adapter / "adapter_config.json").read_text())
    for change, says in (
        ({"r": 10**12}, "has r 1000000000000, and adapter_model.safetensors has 4"),
        ({"r": "4"}, "has r '4'"),
        ({"lora_alpha": math.nan}, "has lora_alpha nan"),
        ({"lora_alpha": None}, "has lora_alpha None"),
        ({"target_modules": [["q_proj"]]}, "is not a plain LoRA adapter"),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps(good | change))
        with pytest.raises(JigsawError) as caught:
            load_adapter(random_model(), adapter)
        assert says in str(caught.value)
    (adapter / "adapter_config.json").write_text(json.dumps(good))
    (adapter / "adapter_model.safetensors").unlink()
    os.mkfifo(adapter / "adapter_model.safetensors")
    with pytest.raises(JigsawError, match=r"adapter_model.safetensors cannot be read \(not a regular file\)"):
        load_adapter(random_model(), adapter)


def test_a_spec_is_read_the_same_way_everywhere(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(JigsawError, match=r"config.json cannot be read \(not a regular file\)"):
        read_spec(folder)
