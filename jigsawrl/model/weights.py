"""What a model folder's weights say of themselves, compared with its config.json before any memory is reserved.

Reads the headers of the safetensors files only, and imports no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import shown
from jigsawrl.model.spec import ModelSpec
from jigsawrl.regular import open_regular, read_json_object

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 32 << 20
"""Several times the header of the largest model that `MAX_LAYERS` allows."""
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of one weight, of the types that training can begin from."""
OTHER_DTYPES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
OTHER_DTYPES |= {"I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
ROPE_TABLE = "rotary_emb.inv_freq"
"""End of the name of a table that older files hold, and that is computed here."""


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights, without those of an adapter."""
    return [p for p in sorted(folder.glob("*.safetensors")) if not p.name.startswith("adapter_")]


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Hugging Face's name of every weight -> its shape."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    linears = {
        "self_attn.q_proj": (spec.q_size, hidden, spec.qkv_bias),
        "self_attn.k_proj": (spec.kv_size, hidden, spec.qkv_bias),
        "self_attn.v_proj": (spec.kv_size, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, spec.q_size, spec.o_bias),
        "mlp.gate_proj": (inner, hidden, False),
        "mlp.up_proj": (inner, hidden, False),
        "mlp.down_proj": (hidden, inner, False),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if spec.qk_norm:
        layer |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    for name, (rows, columns, bias) in linears.items():
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    shapes["model.norm.weight"] = (hidden,)
    for index in range(spec.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_weights(folder: Path, spec: ModelSpec) -> None:
    """A JigsawError unless the weights are those that config.json describes, in files that are whole."""
    check_index(folder)
    expected = expected_shapes(spec)
    found: set[str] = set()
    files = weight_files(folder)
    if not files:
        raise JigsawError(f"model.path: {folder} has no .safetensors file (pickled weights are not loaded)")
    for path in files:
        for name, dtype, shape in read_header(path):
            if name in found:
                raise JigsawError(f"model.path: {path} holds {shown(name)}, which another file holds too")
            found.add(name)
            tied_head = name == "lm_head.weight" and spec.tied
            if name.endswith(ROPE_TABLE):
                continue
            wanted = (spec.vocab_size, spec.hidden_size) if tied_head else expected.get(name)
            if wanted is None:
                raise JigsawError(
                    f"model.path: {path} holds {shown(name)}, which this kind of model does not have"
                )
            if dtype not in DTYPES:
                raise JigsawError(
                    f"model.path: {name!r} in {path} is of type {dtype}; weights must be one of {', '.join(DTYPES)}"
                )
            if shape != wanted:
                raise JigsawError(
                    f"model.path: {name!r} in {path} is {shown(list(shape))}, config.json says {list(wanted)}"
                )
    if missing := expected.keys() - found:
        raise JigsawError(
            f"model.path: {folder} lacks {len(missing)} weights, such as {min(missing)!r}, "
            "which its config.json says that the model has"
        )


def check_index(folder: Path) -> None:
    """A JigsawError unless every file that the index names, if there is one, lies in the folder."""
    index = folder / INDEX
    if not os.path.lexists(index):
        return
    shards = read_json_object(index, "model.path").get("weight_map", {})
    names = list(shards.values()) if isinstance(shards, dict) else [shards]
    for name in names:
        if not _is_file_name(name):
            raise JigsawError(
                f"model.path: {index} has a weight_map with {shown(name)}, which is not the name of a file beside it"
            )
    missing = sorted(name for name in set(names) if not (folder / name).is_file())
    if missing:
        raise JigsawError(f"model.path: {folder} lacks {missing[0]}, named by {INDEX}; copy it there")


def _is_file_name(name: Any) -> bool:
    plain = isinstance(name, str) and name.isprintable() and len(name.encode()) < 256
    return plain and name not in ("", ".", "..") and Path(name).name == name


def read_header(path: Path, key: str = "model.path") -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The name, type and shape of each tensor in a file that holds all that its header promises.

    `key` is the setting that names the file's folder.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise JigsawError(f"{key}: {path} is cut off or no safetensors file; download it again")
            if length > MAX_HEADER_BYTES:
                raise JigsawError(f"{key}: {path} has a header of {length} bytes, far beyond that of a model")
            header = json.loads(file.read(length).decode())
    except OSError as error:
        raise JigsawError(f"{key}: {path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise JigsawError(f"{key}: {path} has a header that is not JSON; download it again") from None
    if not isinstance(header, dict):
        raise JigsawError(f"{key}: {path} has a header that is not a JSON object; download it again")
    header.pop("__metadata__", None)
    at = 0
    entries = []
    for name, entry in header.items():
        read = _entry(entry)
        if read is None:
            raise JigsawError(f"{key}: {path} has a header that does not describe {shown(name)}")
        entries.append((*read, name))
    for begin, end, dtype, shape, name in sorted(entries):
        if begin != at:
            raise JigsawError(
                f"{key}: {path} has a header in which {shown(name)} begins at byte {begin}, and not at {at}, "
                "where the tensor before it ends"
            )
        at = end
        yield name, dtype, shape
    if at != size - 8 - length:
        raise JigsawError(
            f"{key}: {path} holds {size - 8 - length} bytes of weights where its header says {at}; "
            "download it again"
        )


def _entry(entry: Any) -> tuple[int, int, str, tuple[int, ...]] | None:
    """(begin, end, type, shape) of one tensor of a header; None where they do not go together."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            return None
    width = (DTYPES | OTHER_DTYPES).get(dtype)
    plain = all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1 << 48 for each in shape
    )
    if width is None or not plain or len(shape) > 8 or end - begin != math.prod(shape) * width:
        return None
    return begin, end, dtype, tuple(shape)
