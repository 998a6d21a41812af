"""Samples of a step as an entry of the store, and back: plain numbers and JSON, which run nothing when they are read.

tensors   tokens, logprobs, versions    of all samples, one after the other
meta      samples                       of each: its key, the digest of its prompt, how it ended, its length
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from jigsawrl.engine.types import FinishReason, Generated, SampleKey

DIGEST_BYTES = 16
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_REASONS = frozenset(get_args(FinishReason))
_SAMPLES = "samples"
_TYPES = {"tokens": torch.int64, "logprobs": torch.float64, "versions": torch.int64}
_CODES = {torch.int64: "q", torch.float64: "d"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A sample of one prompt."""

    key: SampleKey
    prompt: bytes
    """Its digest."""
    generated: Generated
    finish_reason: FinishReason


def packed(pieces: Sequence[Piece]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the meta of an entry."""
    made = [piece.generated for piece in pieces]
    tensors = {
        "tokens": _joined([each.token_ids for each in made], "tokens"),
        "logprobs": _joined([each.logprobs for each in made], "logprobs"),
        "versions": _joined([each.versions for each in made], "versions"),
    }
    rows = [
        [*astuple(piece.key), piece.prompt.hex(), piece.finish_reason, len(piece.generated.token_ids)]
        for piece in pieces
    ]
    return tensors, {_SAMPLES: rows}


def unpacked(tensors: dict[str, Tensor], meta: dict[str, Any]) -> list[Piece]:
    """The samples of an entry; none where it holds anything else, or anything besides."""
    rows = meta.get(_SAMPLES)
    if set(meta) != {_SAMPLES} or not isinstance(rows, list) or set(tensors) != set(_TYPES):
        return []
    count = len(tensors["tokens"].flatten())
    if any(tensors[name].dtype != dtype or tensors[name].shape != (count,) for name, dtype in _TYPES.items()):
        return []
    if not all(_is_row(row) for row in rows) or sum(row[-1] for row in rows) != count:
        return []
    if count and (int(tensors["tokens"].min()) < 0 or int(tensors["versions"].min()) < 0):
        return []
    tokens, logprobs, versions = (tensors[name].tolist() for name in _TYPES)
    pieces, end = [], 0
    for *key, digest, reason, length in rows:
        begin, end = end, end + length
        made = Generated(tokens[begin:end], logprobs[begin:end], versions[begin:end])
        pieces.append(Piece(SampleKey(*key), bytes.fromhex(digest), made, reason))
    return pieces


def _is_row(row: Any) -> bool:
    if not isinstance(row, list) or len(row) != 8:
        return False
    seed, pipeline, step, prompt, sample, digest, reason, length = row
    numbers = seed, step, prompt, sample, length
    return (
        all(type(number) is int and 0 <= number < 2**63 for number in numbers)
        and isinstance(pipeline, str)
        and isinstance(digest, str)
        and _DIGEST.fullmatch(digest) is not None
        and isinstance(reason, str)
        and reason in _REASONS
    )


def _joined(lists: Sequence[Sequence[float]], name: str) -> Tensor:
    dtype = _TYPES[name]
    values: array[Any] = array(_CODES[dtype])
    for each in lists:
        values.extend(each)
    return torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
