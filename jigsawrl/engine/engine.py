"""The engine: requests in, samples out; its verbs are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch

from jigsawrl.engine.block_manager import BlockManager
from jigsawrl.engine.runner import Runner
from jigsawrl.engine.sampler import keyed_uniforms, sample
from jigsawrl.engine.scheduler import Scheduled, Scheduler
from jigsawrl.engine.sequence import Sequence, sequences_of
from jigsawrl.engine.types import Pass, Request, SampleKey, SampleOutput, Tokenizer
from jigsawrl.model.folder import fill_buffers, load_weights
from jigsawrl.model.transformer import Transformer
from jigsawrl.store.memory import is_released, reclaim, release
from jigsawrl.telemetry.events import now

if TYPE_CHECKING:
    from jigsawrl.engine.cuda.decoder import Decoder


class Engine:
    """Continuous batching over a paged cache, on the model object that it is given.

    The model may be the trainer's own: then new weights are simply there, and `update_weights` only drops what was
    computed with the old ones and records the new version.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        deterministic: bool = False,
        on_pass: Callable[[Pass], None] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.version = 0
        self.blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.blocks, max_num_seqs, max_num_batched_tokens)
        self.runner = Runner(model, num_blocks, block_size, max_num_seqs, deterministic)
        self.on_pass = on_pass
        self.arrivals = 0
        self.home = model.device
        self.nudged = False

    def add_request(self, request: Request) -> None:
        self._check_awake()
        room = min(self.blocks.num_blocks * self.blocks.block_size, self.model.spec.max_positions)
        first, *others = sequences_of(request, self.tokenizer, room, self.arrivals)
        self.arrivals += 1 + len(others)
        first.forks = others
        self.scheduler.add(first)

    def has_unfinished(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[SampleOutput]:
        """One pass: every running sequence gets a token, or a piece of its prompt is run.

        With kernels for decoding, sequences that only decode get a few tokens in one go.
        """
        self._check_awake()
        batch = self.scheduler.schedule()
        finished: list[Sequence] = []
        if self.runner.decoder is not None:
            decoding = [item.sequence for item in batch if item.decodes]
            batch = [item for item in batch if not item.decodes]
            if decoding:
                finished += self._burst(self.runner.decoder, decoding, alone=not batch)
        if batch:
            finished += self._pass(batch)
        self.nudged = False
        return [sequence.output() for sequence in finished]

    def _burst(self, decoder: Decoder, decoding: list[Sequence], alone: bool) -> list[Sequence]:
        from jigsawrl.engine.cuda.burst import LONGEST, Burst

        burst = Burst(decoder, self.scheduler, self.tokenizer.eos_token_ids, self.version, self.on_pass)
        return burst.run(decoding, LONGEST if alone else 1, hurried=lambda: self.nudged)

    def _pass(self, batch: list[Scheduled]) -> list[Sequence]:
        started = now()
        due = [item.sequence for item in batch if item.tokens == item.sequence.pending]
        decoding = sum(item.tokens == 1 and item.sequence.computed > 0 for item in batch)
        logits = self.runner.run(batch)
        self._advance(batch)
        finished = self._sample(due, logits)
        if self.on_pass is not None:
            tokens = sum(item.tokens for item in batch)
            self.on_pass(Pass(started, now(), tokens - decoding, decoding))
        return finished

    def _check_awake(self) -> None:
        if self.runner.cache is None:
            raise RuntimeError("the engine sleeps: wake_up first")

    def nudge(self) -> None:
        """Ends a burst of decode steps soon; a pass never waits for anything."""
        self.nudged = True

    def _advance(self, batch: list[Scheduled]) -> None:
        for item in batch:
            sequence, before = item.sequence, item.sequence.computed
            sequence.computed += item.tokens
            if sequence.computed // self.blocks.block_size > before // self.blocks.block_size:
                self.blocks.remember(sequence, before)

    def _sample(self, due: list[Sequence], logits: torch.Tensor) -> list[Sequence]:
        """Draws the next token of every due sequence and of the forks that waited for its prompt."""
        sequences = list(due)
        rows = list(range(len(due)))
        copies: list[tuple[int, int]] = []
        for row, parent in enumerate(due):
            for child in parent.forks:
                sequences.append(child)
                rows.append(row)
                if self.scheduler.can_fork(parent):
                    copy = self.blocks.fork(parent, child)
                    if copy is not None:
                        copies.append(copy)
                    self.scheduler.start(child)
                else:
                    self.scheduler.requeue(child)
            parent.forks = []
        if not sequences:
            return []
        if copies:
            assert self.runner.cache is not None
            self.runner.cache.copy_blocks(copies)
        if len(rows) > len(due):
            logits = logits.index_select(0, torch.tensor(rows, device=logits.device))
        self._draw(sequences, logits)
        finished = [sequence for sequence in sequences if sequence.finish_reason is not None]
        for sequence in finished:
            if sequence.row >= 0:
                self.scheduler.stop(sequence)
            else:
                self.scheduler.waiting.remove(sequence)
        return finished

    @torch.inference_mode()
    def _draw(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        keys = np.array([s.random_key for s in sequences], dtype=np.uint64)
        positions = np.array([len(s.tokens) for s in sequences], dtype=np.int64)
        uniforms = torch.from_numpy(keyed_uniforms(keys, positions))
        tokens, logprobs = sample(logits, [s.params for s in sequences], uniforms)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.append(token, logprob, self.version)
            sequence.check_finished(self.tokenizer.eos_token_ids)

    def generate(self, requests: Iterable[Request]) -> list[SampleOutput]:
        """Runs requests to their end; outputs in the order of the requests and their keys."""
        order: dict[tuple[str, SampleKey], int] = {}
        for request in requests:
            self.add_request(request)
            for key in request.keys:
                order[request.request_id, key] = len(order)
        outputs: list[SampleOutput] = []
        while self.has_unfinished():
            outputs += self.step()
        return sorted(outputs, key=lambda output: order[output.request_id, output.key])

    def abort(self, request_ids: Seq[str] | None = None) -> list[SampleOutput]:
        """Ends requests (None: all) and returns their partial tokens and log-probs."""
        wanted = None if request_ids is None else set(request_ids)
        outputs: list[SampleOutput] = []
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if wanted is not None and sequence.request_id not in wanted:
                continue
            if sequence.row >= 0:
                self.scheduler.stop(sequence)
            else:
                self.scheduler.waiting.remove(sequence)
            for ended in (sequence, *sequence.forks):
                ended.finish_reason = "abort"
                outputs.append(ended.output())
        return outputs

    def partials(self) -> list[SampleOutput]:
        """What there is of every unfinished sample that has any; they go on."""
        sequences = [*self.scheduler.running, *self.scheduler.waiting]
        return [sequence.output() for sequence in sequences if sequence.generated.token_ids]

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | None, weight_version: int) -> None:
        """New weights under Hugging Face's names, or None where the model object has them already.

        Nothing computed with the old ones is used again: running samples go on, their prefix is run anew.
        """
        self._preempt_all()
        self.blocks.forget_all()
        if weights is not None:
            load_weights(self.model, weights, f"weight version {weight_version}")
        self.version = weight_version

    def sleep(self, level: int = 1) -> None:
        """Gives the cache back; level 1 keeps the weights in host memory, level 2 drops them for new ones to come.

        The model's parameters stay the same objects, so whoever shares them still does.
        """
        self._preempt_all()
        self.blocks.forget_all()
        self.runner.release()
        if level == 1:
            self.model.to("cpu")
        elif level == 2:
            release(self._weights())
        else:
            raise ValueError(f"sleep level {level}: 1 or 2")

    def wake_up(self, tags: Seq[str] | None = None) -> None:
        """Undoes `sleep` for "weights", "kv_cache" or, by default, both."""
        tags = ("weights", "kv_cache") if tags is None else tags
        if "weights" in tags:
            if is_released(self.model.embed_tokens):
                reclaim(self._weights())
                fill_buffers(self.model)
            else:
                self.model.to(self.home)
        if "kv_cache" in tags and self.runner.cache is None:
            self.runner.allocate()

    def _weights(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _preempt_all(self) -> None:
        for sequence in list(self.scheduler.running):
            self.scheduler.preempt(sequence)

    def close(self) -> None:
        """Drops every sequence and the cache."""
        self.abort()
        self.runner.release()
