"""vLLM as a rollout backend: its engine in this process, stepped by the rollout like jigsawrl's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from jigsawrl.engine.sequence import Sequence, sequences_of
from jigsawrl.engine.types import Look, Pass, Request, SampleOutput, SamplingParams, Tokenizer
from jigsawrl.engine.vllm_start import eager, start, undisturbed
from jigsawrl.errors import JigsawError
from jigsawrl.model.folder import places
from jigsawrl.model.lora import linears, merged_weight
from jigsawrl.model.transformer import Transformer
from jigsawrl.telemetry.events import now

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig

EVERYTHING = frozenset({"weights", "kv_cache"})


class VllmEngine:
    """A vLLM engine with its own copy of the model's weights, from which it samples at once.

    Each sample is a vLLM request of its own; the prompt they have in common is found in vLLM's prefix cache. The
    seed comes from the sample's key and its position, so neither the order of arrival nor the neighbours matter
    (up to rounding, which depends on the batch). Tokens, stop strings and budgets are kept here, in the same
    `Sequence` as jigsawrl's engine has: vLLM is only ever asked to go on from the tokens there are.

    Log-probs are those that `Generated` promises, except where a temperature other than 1 meets top-p, top-k or
    min-p: then vLLM only knows them after the cut, among the tokens that were kept.
    Where the run file cuts at temperature 1, every request has to have temperature 1 or 0.

    On a CPU `sleep` frees nothing; vLLM has no way to.
    """

    def __init__(
        self,
        model: Transformer,
        base: Path,
        tokenizer: Tokenizer,
        config: RunConfig,
        on_pass: Callable[[Pass], None] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.on_pass = on_pass
        self.version = 0
        self.yields = False
        self.running: dict[str, Sequence] = {}
        self.held: list[Sequence] = []
        """Samples that wait for the end of a sleep."""
        self.asleep: frozenset[str] = frozenset()
        self.submitted = 0
        self.silent_since: float | None = None
        on_cpu = model.device.type == "cpu"
        # vLLM packs a copy of a tied head on CPUs and forgets it when weights are reloaded: there it is untied.
        self.head_apart = on_cpu and model.spec.tied
        self.kernels: Callable[[], AbstractContextManager[Any]] = eager if on_cpu else nullcontext
        self.owns_group = not dist.is_initialized()
        with undisturbed():
            self.llm, self.room = start(model, base, config, self.head_apart)
        self.update_weights(None, 0)

    def add_request(self, request: Request) -> None:
        for sequence in sequences_of(request, self.tokenizer, self.room, self.submitted):
            self._submit(sequence)

    def _submit(self, sequence: Sequence) -> None:
        """Asks vLLM to go on from the sequence's tokens, or holds it while vLLM sleeps."""
        if self.asleep:
            self.held.append(sequence)
            return
        from vllm.inputs import tokens_input

        name = str(self.submitted)
        self.submitted += 1
        params = vllm_params(sequence, self.tokenizer)
        self.llm.add_request(name, tokens_input(list(sequence.tokens)), params)
        sequence.computed = 0
        self.running[name] = sequence

    def has_unfinished(self) -> bool:
        return bool(self.running or self.held)

    def nudge(self) -> None:
        """A step never waits for anything."""

    def step(self, look: Look | None = None) -> list[SampleOutput]:
        """One of vLLM's steps, which are brief."""
        if self.asleep:
            raise RuntimeError("the engine sleeps: wake_up first")
        started = now() if self.silent_since is None else self.silent_since
        with self.kernels():
            outputs = self.llm.step()
        finished: list[SampleOutput] = []
        prefilled = decoded = 0
        for output in outputs:
            sequence = self.running[output.request_id]
            if sequence.computed == 0:
                prefilled += len(sequence.tokens) - (output.num_cached_tokens or 0)
            else:
                decoded += 1
            self._append(sequence, output.outputs[0])
            if sequence.finish_reason is not None:
                del self.running[output.request_id]
                finished.append(sequence.output())
                if not output.finished:  # a stop string, of which vLLM knows nothing
                    self.llm.abort_request([output.request_id])
            elif output.finished:
                raise RuntimeError(f"vLLM ended a sample by itself: {output.outputs[0].finish_reason}")
        self._passed(started, prefilled, decoded)
        return finished

    def _append(self, sequence: Sequence, delta: Any) -> None:
        for token, logprobs in zip(delta.token_ids, delta.logprobs, strict=True):
            if sequence.finish_reason is None:
                sequence.append(token, logprobs[token].logprob, self.version)
                sequence.check_finished(self.tokenizer.eos_token_ids)
        sequence.computed = len(sequence.tokens) - 1

    def _passed(self, started: float, prefilled: int, decoded: int) -> None:
        """Reports a step; one that only ran part of a prompt is reported with the step that ends the prompt."""
        if prefilled + decoded == 0:
            self.silent_since = started
            return
        self.silent_since = None
        if self.on_pass is not None:
            self.on_pass(Pass(started, now(), prefilled, decoded))

    def abort(self, request_ids: Seq[str] | None = None) -> list[SampleOutput]:
        """Ends requests (None: all) and returns their partial tokens and log-probs."""
        ended = self._withdraw(None if request_ids is None else set(request_ids))
        for sequence in ended:
            sequence.finish_reason = "abort"
        return [sequence.output() for sequence in ended]

    def partials(self) -> list[SampleOutput]:
        """What there is of every unfinished sample that has any; they go on."""
        return [each.output() for each in [*self.running.values(), *self.held] if each.generated.token_ids]

    def _withdraw(self, request_ids: set[str] | None = None) -> list[Sequence]:
        """Takes samples away from vLLM; they have all their tokens with them."""
        wanted = lambda sequence: request_ids is None or sequence.request_id in request_ids
        names = [name for name, sequence in self.running.items() if wanted(sequence)]
        self.llm.abort_request(names)
        found = [self.running.pop(name) for name in names] + [s for s in self.held if wanted(s)]
        if not self.running:
            self.silent_since = None
        self.held = [sequence for sequence in self.held if not wanted(sequence)]
        return found

    def update_weights(self, weights: Iterable[tuple[str, Tensor]] | None, weight_version: int) -> None:
        """New weights under Hugging Face's names, or None for those that the model object has now.

        Nothing computed with the old ones is used again: running samples go on, their prefix is run anew.
        """
        unfinished = self._withdraw()
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM still uses blocks of its cache, and weights can only change when it does not"
            )
        missing = set(places(self.model))
        named = model_weights(self.model) if weights is None else weights
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._for_vllm(named, missing)})
        if missing:
            raise JigsawError(
                f"weight version {weight_version} lacks {len(missing)} weights, such as {min(missing)!r}"
            )
        self.version = weight_version
        for sequence in unfinished:
            self._submit(sequence)

    def _for_vllm(
        self, weights: Iterable[tuple[str, Tensor]], missing: set[str]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            missing.discard(name)
            if name == "lm_head.weight" and self.model.spec.tied:
                continue  # a tied head is stored twice by some tools
            yield name, tensor
            if name == "model.embed_tokens.weight" and self.head_apart:
                yield "lm_head.weight", tensor

    def sleep(self, level: int = 1) -> None:
        """Gives the cache back; level 1 keeps the weights in host memory, level 2 drops them for new ones to come."""
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}: 1 or 2")
        if self.asleep:
            return
        self.held = self._withdraw()
        self.llm.sleep(level)
        self.asleep = EVERYTHING

    def wake_up(self, tags: Seq[str] | None = None) -> None:
        """Undoes `sleep` for "weights", "kv_cache" or, by default, both."""
        due = self.asleep.intersection(EVERYTHING if tags is None else tags)
        if not due:
            return
        self.llm.wake_up(sorted(due))
        self.asleep -= due
        if not self.asleep:
            for sequence in self._withdraw():
                self._submit(sequence)

    def close(self) -> None:
        """Drops every sample and vLLM's engine."""
        self.abort()
        if self.owns_group:
            self.llm.engine_core.shutdown()
        else:  # its own shutdown would end the process group too, which the workers still use
            self.llm.engine_core._finalizer.detach()
            self.llm.model_executor.shutdown()


def vllm_params(sequence: Sequence, tokenizer: Tokenizer) -> Any:
    """vLLM's parameters for the rest of a sample. Stop strings are watched for outside vLLM."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmParams

    params: SamplingParams = sequence.params
    ends = [] if params.ignore_eos else sorted(tokenizer.eos_token_ids)
    return VllmParams(
        max_tokens=params.max_tokens - len(sequence.generated.token_ids),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=seed_of(sequence.random_key, len(sequence.tokens)),
        stop_token_ids=[*ends, *params.stop_token_ids],
        ignore_eos=True,  # the ends are all named above
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def seed_of(random_key: int, position: int) -> int:
    """63 bits for the tokens of a sample from this position on."""
    digest = hashlib.blake2b(f"{random_key}\0{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def model_weights(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The model's weights under Hugging Face's names, adapters merged in."""
    merged: dict[str, Tensor] = {}
    for prefix, linear in linears(model):
        if linear.lora is not None:
            parts = merged_weight(linear).split(list(linear.parts.values()))
            merged |= {f"{prefix}.{p}.weight": w for p, w in zip(linear.parts, parts, strict=True)}
    for name, tensor in places(model).items():
        yield name, merged.get(name, tensor)
