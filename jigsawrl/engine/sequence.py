"""One sample on its way through the engine, and whose it is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from jigsawrl.engine.types import (
    FinishReason,
    Generated,
    Pass,
    Request,
    SampleKey,
    SampleOutput,
    SamplingParams,
    Tokenizer,
)


@dataclass(eq=False)
class Owner:
    """The pipeline that a sample is drawn for: with its weights, in its order, for its listeners."""

    number: int = 0
    """Never given twice in one engine; what is cached is cached for this number."""
    eos: Collection[int] = ()
    on_pass: Callable[[Pass], None] | None = None
    version: int = 0
    paused: bool = False
    asleep: bool = False
    arrivals: int = 0
    """The number of its next sample."""
    ended: list[SampleOutput] = field(default_factory=list)
    """Samples that have ended and that nobody has taken."""

    @property
    def waits(self) -> bool:
        """Whether its samples stay out of the batch."""
        return self.paused or self.asleep


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one sample and how many of them the cache holds.

    Always: computed <= len(tokens); blocks hold at least `computed` tokens and waste less than one block, or what a
    burst of decode steps on a GPU was given and did not need.
    A sequence that lost its blocks (preempted) has computed = 0 and simply runs its tokens again.
    """

    request_id: str
    key: SampleKey
    params: SamplingParams
    tokens: list[int]
    prompt_length: int
    generated: Generated
    random_key: int
    arrival: int
    owner: Owner = field(default_factory=Owner)
    forks: list[Sequence] = field(default_factory=list)
    """Samples of the same prompt that wait for this one's prefill to share it."""
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int = -1
    """Its row in the runner's block table while it runs."""
    decode: Callable[[int], str] | None = None
    """Only where stop strings are watched for."""
    tail: str = ""
    finish_reason: FinishReason | None = None

    @property
    def pending(self) -> int:
        """Tokens not yet in the cache; 1 while decoding."""
        return len(self.tokens) - self.computed

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.generated.token_ids.append(token)
        self.generated.logprobs.append(logprob)
        self.generated.versions.append(version)

    def check_finished(self, eos: Collection[int]) -> None:
        """Sets the finish reason if the last token ended this sample."""
        token, params = self.tokens[-1], self.params
        if (token in eos and not params.ignore_eos) or token in params.stop_token_ids or self._stopped(token):
            self.finish_reason = "stop"
        elif len(self.generated.token_ids) >= params.max_tokens:
            self.finish_reason = "length"

    def _stopped(self, token: int) -> bool:
        if self.decode is None:
            return False
        longest = max(map(len, self.params.stop))
        text = self.tail + self.decode(token)
        self.tail = text[-longest:]
        return any(stop in text for stop in self.params.stop)

    def output(self) -> SampleOutput:
        return SampleOutput(self.request_id, self.key, self.generated, self.finish_reason or "abort")


def sequences_of(
    request: Request, tokenizer: Tokenizer, room: int, arrivals: int, owner: Owner | None = None
) -> list[Sequence]:
    """A request's samples, numbered on from `arrivals`; a ValueError if they can never fit into `room` positions."""
    prompt, params, partial = request.prompt_token_ids, request.params, request.partial or Generated()
    if not prompt or len(prompt) + params.max_tokens > room:
        raise ValueError(
            f"request {request.request_id}: {len(prompt)} prompt tokens and up to {params.max_tokens} new "
            f"ones do not fit into {room} positions"
        )
    if request.partial is not None and len(request.keys) != 1:
        raise ValueError(f"request {request.request_id}: a partial goes on as one sample")
    if len(partial.token_ids) >= params.max_tokens:
        raise ValueError(f"request {request.request_id}: the partial has used its {params.max_tokens} tokens")
    sequences = []
    for arrival, key in enumerate(request.keys, arrivals):
        sequence = Sequence(
            request_id=request.request_id,
            key=key,
            params=params,
            tokens=[*prompt, *partial.token_ids],
            prompt_length=len(prompt),
            generated=Generated(list(partial.token_ids), list(partial.logprobs), list(partial.versions)),
            random_key=key.hashed(),
            arrival=arrival,
            owner=owner or Owner(),
        )
        if params.stop:
            sequence.decode = tokenizer.stream()
            for token in partial.token_ids:
                sequence.tail += sequence.decode(token)
        sequences.append(sequence)
    return sequences
