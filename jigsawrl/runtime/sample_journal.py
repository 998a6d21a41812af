"""What the engines have sampled of rollouts in flight, in the node's store: after a death it is not sampled again.

    NAME/sampled/7    samples of rollout 7 that ended, some in each version
    NAME/paused/7     those under way, with the tokens that they had a moment ago

A pipeline that comes back asks for the same samples again. What ended is answered from here and what was under way
goes on from where it was; environments see the same actions again. A sample is known by its key and its prompt, so
where an environment answers differently this time, its episode is sampled again. So is whatever cannot be read. A
rollout is forgotten when its training has ended.

An entry is plain numbers and JSON, which run nothing when they are read:

    tensors   tokens, logprobs, versions    of all samples, one after the other
    meta      samples                       of each: its key, the digest of its prompt, how it ended, its length
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from jigsawrl.engine.types import FinishReason, Generated, Request, SampleKey, SampleOutput
from jigsawrl.phases.ids import PhaseId
from jigsawrl.store.store import Store
from jigsawrl.telemetry.events import now

SOONEST_S = 0.25
"""Between two times that something is put: what is lost with less is quickly sampled again."""
PART = 0.02
"""Of a rollout's time so far, likewise: so there are few versions, however long it takes."""
MOST_VERSIONS = 10_000
DIGEST_BYTES = 16
_SAMPLES = "samples"
_TYPES = {"tokens": torch.int64, "logprobs": torch.float64, "versions": torch.int64}
_Number = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
_Digest = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * DIGEST_BYTES}}}$")]
_ROWS = TypeAdapter(list[tuple[_Number, str, _Number, _Number, _Number, _Digest, FinishReason, _Number]])


@dataclass(frozen=True, slots=True)
class Piece:
    """A sample of one prompt."""

    key: SampleKey
    prompt: bytes
    """Its digest."""
    generated: Generated
    finish_reason: FinishReason


@dataclass(slots=True)
class _Rollout:
    """What is known of one rollout's samples."""

    known: dict[tuple[SampleKey, bytes], Piece] = field(default_factory=dict)
    """Sampled before this process began."""
    waiting: list[Piece] = field(default_factory=list)
    """Ended, and not in the store yet."""
    version: int = 0
    """The next one of those that ended."""
    stored: bool = False


class SampleJournal:
    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.rollouts: dict[PhaseId, _Rollout] = {}
        for entry in store.names(f"{name}/sampled/") + store.names(f"{name}/paused/"):
            index = entry.rpartition("/")[2]
            if index.isdecimal():
                self._read(PhaseId(name, "rollout", int(index)), entry)
        self.began = self.put = now()
        self.vocabulary: int | None = None
        """How many tokens the model has, once it is known."""

    def _read(self, id: PhaseId, name: str) -> None:
        rollout = self.rollouts.setdefault(id, _Rollout(stored=True))
        for version in self.store.versions(name):
            entry = self.store.get(name, version)
            for piece in unpacked(entry.tensors, entry.meta) if entry is not None else ():
                rollout.known.setdefault((piece.key, piece.prompt), piece)
            rollout.version = max(rollout.version, version + 1)

    def begin(self) -> None:
        """Of a rollout."""
        self.began = self.put = now()

    def answered(self, request: Request) -> tuple[list[SampleOutput], list[Request]]:
        """What is known of its samples already, and what is still to be asked for."""
        rollout = self.rollouts.get(rollout_of(request.keys[0]))
        if rollout is None or not rollout.known:
            return [], [request]
        prompt = digest(request.prompt_token_ids)
        outputs: list[SampleOutput] = []
        requests: list[Request] = []
        unknown: list[SampleKey] = []
        for key in request.keys:
            piece = rollout.known.pop((key, prompt), None)
            if piece is None or not self._may_be(piece.generated, request):
                unknown.append(key)
            elif piece.finish_reason == "abort":
                requests.append(replace(request, keys=[key], partial=piece.generated))
            else:
                outputs.append(SampleOutput(request.request_id, key, piece.generated, piece.finish_reason))
        if unknown:
            requests.append(replace(request, keys=unknown))
        return outputs, requests

    def _may_be(self, generated: Generated, request: Request) -> bool:
        """Whether an engine could have sampled that."""
        tokens = generated.token_ids
        known = self.vocabulary is None or max(tokens, default=0) < self.vocabulary
        return known and 0 < len(tokens) <= request.params.max_tokens

    def note(self, request: Request, output: SampleOutput) -> None:
        """A sample has ended."""
        self.rollouts.setdefault(rollout_of(output.key), _Rollout()).waiting.append(piece_of(request, output))

    def is_due(self) -> bool:
        return now() - self.put > max(SOONEST_S, PART * (now() - self.began))

    def keep(self, running: Sequence[tuple[Request, SampleOutput]]) -> None:
        """Puts what ended, and in the place of what was under way what is so now.

        Engines speak from time to time, and their last word may be about an episode's turn before the one that is
        asked for now.
        """
        under_way: dict[PhaseId, dict[SampleKey, Piece]] = {}
        for request, output in sorted(running, key=sampled_tokens):  # who moved is known to two engines
            if request.request_id == output.request_id:
                under_way.setdefault(rollout_of(output.key), {})[output.key] = piece_of(request, output)
        for id, rollout in self.rollouts.items():
            if rollout.waiting:
                self._put("sampled", id, rollout.waiting, MOST_VERSIONS)
                rollout.version += 1
                rollout.waiting = []
        for id, pieces in under_way.items():
            self._put("paused", id, list(pieces.values()), 1)
        self.put = now()

    def _put(self, what: str, id: PhaseId, pieces: Sequence[Piece], keep: int) -> None:
        rollout = self.rollouts.setdefault(id, _Rollout())
        name = f"{id.pipeline}/{what}/{id.index}"
        self.store.put(name, rollout.version, *packed(pieces), keep=keep, checked=True)
        rollout.stored = True

    def forget(self, id: PhaseId) -> None:
        """What came of this rollout is kept elsewhere."""
        rollout = self.rollouts.pop(id, None)
        if rollout is not None and rollout.stored:
            self.store.drop(f"{id.pipeline}/sampled/{id.index}")
            self.store.drop(f"{id.pipeline}/paused/{id.index}")


def rollout_of(key: SampleKey) -> PhaseId:
    """The rollout that a sample is of: a key's step is the number of those that were made before."""
    return PhaseId(key.pipeline, "rollout", key.step + 1)


def sampled_tokens(sample: tuple[Request, SampleOutput]) -> int:
    return len(sample[1].generated.token_ids)


def piece_of(request: Request, output: SampleOutput) -> Piece:
    return Piece(output.key, digest(request.prompt_token_ids), output.generated, output.finish_reason)


def digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


def packed(pieces: Sequence[Piece]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the meta of an entry."""
    made = [piece.generated for piece in pieces]
    tensors = {
        "tokens": _joined((each.token_ids for each in made), int),
        "logprobs": _joined((each.logprobs for each in made), float),
        "versions": _joined((each.versions for each in made), int),
    }
    rows = [
        [*astuple(piece.key), piece.prompt.hex(), piece.finish_reason, len(piece.generated.token_ids)]
        for piece in pieces
    ]
    return tensors, {_SAMPLES: rows}


def unpacked(tensors: dict[str, Tensor], meta: dict[str, Any]) -> list[Piece]:
    """The samples of an entry; none where it holds anything else, or anything besides."""
    try:
        rows = _ROWS.validate_python(meta.get(_SAMPLES))
    except ValidationError:
        return []
    lengths = [row[-1] for row in rows]
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    expected = {name: (dtype, (sum(lengths),)) for name, dtype in _TYPES.items()}
    if set(meta) != {_SAMPLES} or kinds != expected:
        return []
    if any((tensors[name] < 0).any() for name in ("tokens", "versions")):
        return []
    parts = zip(*(tensors[name].split(lengths) for name in _TYPES), strict=True)
    made = [Generated(*(part.tolist() for part in of_one)) for of_one in parts]
    return [
        Piece(SampleKey(seed, name, step, prompt, sample), bytes.fromhex(digest), generated, reason)
        for (seed, name, step, prompt, sample, digest, reason, _), generated in zip(rows, made, strict=True)
    ]


def _joined(lists: Iterable[Sequence[float]], kind: type[float]) -> Tensor:
    return torch.from_numpy(np.fromiter(chain.from_iterable(lists), kind))
