"""What goes into an engine and what comes out: sampling parameters, requests, outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a sample ends; names as in vLLM."""

    max_tokens: int
    """Generated tokens in all, those of a resumed partial included."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Ends a sample when its text contains one of these; the tokens that spelled it are kept."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Names one sample of one prompt in one step; all its randomness comes from this and the position."""

    seed: int
    pipeline: str
    step: int
    prompt: int
    sample: int

    def hashed(self) -> int:
        """64 bits that are the same on every machine."""
        text = f"{self.seed}\0{self.pipeline}\0{self.step}\0{self.prompt}\0{self.sample}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(slots=True)
class Generated:
    """Sampled tokens, each with its log-prob and the version of the weights that drew it.

    The log-prob is that of the whole vocabulary's softmax at the sampling temperature, before top-k, top-p and
    min-p cut it: the quantity a trainer recomputes.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Request:
    """Some samples of one prompt. With `partial`, a single sample goes on from where an `abort` left it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    keys: Sequence[SampleKey]
    partial: Generated | None = None


@dataclass(slots=True)
class SampleOutput:
    """One finished or aborted sample."""

    request_id: str
    key: SampleKey
    generated: Generated
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Pass:
    """One trip through the model: how many tokens of prompts and of samples it carried."""

    started: float
    ended: float
    prefill_tokens: int
    decode_tokens: int


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def eos_token_ids(self) -> Collection[int]: ...

    def stream(self) -> Callable[[int], str]:
        """A function that takes tokens one by one and returns the text each one completes."""


class Generation(Protocol):
    """What a rollout asks of an engine, or of several."""

    def add_request(self, request: Request) -> None:
        """Queues the samples of one prompt; a request that can never fit is a ValueError."""

    def has_unfinished(self) -> bool: ...

    def step(self) -> list[SampleOutput]:
        """Moves every running sample on a little; returns the ones that ended."""

    def nudge(self) -> None:
        """From any thread: the caller of `step` has something else to see to, so it should not wait long."""

    def close(self) -> None: ...


Look = Callable[[list[SampleOutput]], bool]
"""Given the samples that have ended by now; returns whether there is something else to see to."""


class RolloutBackend(Generation, Protocol):
    """An engine as its actor sees it; jigsawrl's own and vLLM's stand behind it."""

    version: int
    yields: bool
    """Whether it leaves room to others on its device, if it can; what it generates does not depend on it."""

    def step(self, look: Look | None = None) -> list[SampleOutput]:
        """An engine that keeps its device waiting between steps may go on for longer where there is a `look`, and
        calls it now and then while the device is at work."""

    def abort(self, request_ids: Sequence[str] | None = None) -> list[SampleOutput]:
        """Ends these requests (None: all) and returns what they have so far."""

    def partials(self) -> list[SampleOutput]:
        """What there is of every unfinished sample that has any; they go on."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]] | None, weight_version: int) -> None:
        """From the next token on these weights are used (None: the shared model's); older caches are dropped."""

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None: ...
