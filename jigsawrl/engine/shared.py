r"""One engine for many pipelines on one frozen base: their sequences run in one batch, each with its own adapters.

    member a --\                                        /--> samples of a
    member b ----> scheduler -> pass over the base  ----+--> samples of b
    member c --/     (blocks)   + each row's adapters   \--> samples of c

A member is to its pipeline what an engine of its own would be, and what it draws is what that one would draw. Only
`nudge` may be called from any thread; whoever else shares the engine holds a lock around all other calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from jigsawrl.engine.block_manager import BlockManager
from jigsawrl.engine.cuda.burst import LONGEST, ROUND, Burst
from jigsawrl.engine.runner import Runner
from jigsawrl.engine.sampler import keyed_uniforms, sample
from jigsawrl.engine.scheduler import Scheduled, Scheduler
from jigsawrl.engine.sequence import Owner, Sequence, sequences_of
from jigsawrl.engine.types import Look, Pass, Request, SampleOutput, Tokenizer
from jigsawrl.model.folder import fill_buffers
from jigsawrl.model.lora import adapters_on, linears, load_lora_state
from jigsawrl.model.transformer import Transformer
from jigsawrl.store.memory import is_released, reclaim, release
from jigsawrl.telemetry.events import now

if TYPE_CHECKING:
    from jigsawrl.engine.cuda.decoder import Decoder


class SharedEngine:
    """Continuous batching over a paged cache, on the base model that it is given."""

    def __init__(
        self,
        base: Transformer,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        deterministic: bool = False,
    ) -> None:
        self.base = base
        self.blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.blocks, max_num_seqs, max_num_batched_tokens)
        self.runner = Runner(base, num_blocks, block_size, max_num_seqs, deterministic)
        self.members: dict[str, Member] = {}
        self.joined = 0
        self.nudged = False
        self.yields = False
        """Whether decode steps leave room to others on the device, where there are kernels that can."""

    def join(
        self,
        name: str,
        model: Transformer,
        tokenizer: Tokenizer,
        on_pass: Callable[[Pass], None] | None = None,
    ) -> Member:
        """A new member with the adapters of a model that shares this base (see `share_base`), if it has any."""
        if any(linear.lora is not None for _, linear in linears(self.base)):
            raise ValueError("a base with adapters of its own cannot be shared: see share_base")
        return Member(self, name, model, tokenizer, on_pass)

    def has_unfinished(self) -> bool:
        """Whether a step would do anything: there are samples of members that are neither paused nor asleep."""
        return not self.scheduler.is_idle()

    def step(self, look: Callable[[], bool] | None = None) -> dict[str, list[SampleOutput]]:
        """Moves every running sequence on, and returns the samples that have ended by the member's name; `look` as in
        `RolloutBackend`, but for the samples, which members have."""
        self.advance(look)
        return {name: member.take() for name, member in self.members.items() if member.ended}

    def advance(self, look: Callable[[], bool] | None = None) -> None:
        """One pass: every running sequence gets a token, or a piece of its prompt is run.

        With kernels for decoding, sequences that only decode get a few tokens in one go, and more with a `look`.
        """
        batch = self.scheduler.schedule()
        if self.runner.decoder is not None:
            decoding = [item.sequence for item in batch if item.decodes]
            batch = [item for item in batch if not item.decodes]
            if decoding:
                self._burst(self.runner.decoder, decoding, alone=not batch, look=look)
        if batch:
            self._pass(batch)
        self.nudged = False

    def nudge(self) -> None:
        """Ends a burst of decode steps soon; a pass never waits for anything."""
        self.nudged = True

    def _burst(
        self, decoder: Decoder, decoding: list[Sequence], alone: bool, look: Callable[[], bool] | None
    ) -> None:
        decoder.yields = self.yields
        burst = Burst(decoder, self.scheduler, self._ended)
        steps = 1 if not alone else ROUND if look is None else LONGEST
        burst.run(decoding, steps, lambda: self.nudged, look or (lambda: True))

    def _ended(self, sequence: Sequence) -> None:
        sequence.owner.ended.append(sequence.output())

    def _pass(self, batch: list[Scheduled]) -> None:
        started = now()
        due = [item.sequence for item in batch if item.tokens == item.sequence.pending]
        counts: dict[Owner, tuple[int, int]] = {}
        for item in batch:
            prefilled, decoded = counts.get(item.sequence.owner, (0, 0))
            if item.tokens == 1 and item.sequence.computed > 0:
                decoded += 1
            else:
                prefilled += item.tokens
            counts[item.sequence.owner] = (prefilled, decoded)
        logits = self.runner.run(batch)
        self._note(batch)
        self._sample(due, logits)
        ended = now()
        for owner, (prefilled, decoded) in counts.items():
            if owner.on_pass is not None:
                owner.on_pass(Pass(started, ended, prefilled, decoded))

    def _note(self, batch: list[Scheduled]) -> None:
        """What was run is in the cache, and can be found there."""
        for item in batch:
            sequence, before = item.sequence, item.sequence.computed
            sequence.computed += item.tokens
            if sequence.computed // self.blocks.block_size > before // self.blocks.block_size:
                self.blocks.remember(sequence, before)

    def _sample(self, due: list[Sequence], logits: Tensor) -> None:
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
            return
        if copies:
            assert self.runner.cache is not None
            self.runner.cache.copy_blocks(copies)
        if len(rows) > len(due):
            logits = logits.index_select(0, torch.tensor(rows, device=logits.device))
        self._draw(sequences, logits)
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self.scheduler.drop(sequence)
                self._ended(sequence)

    @torch.inference_mode()
    def _draw(self, sequences: list[Sequence], logits: Tensor) -> None:
        keys = np.array([s.random_key for s in sequences], dtype=np.uint64)
        positions = np.array([len(s.tokens) for s in sequences], dtype=np.int64)
        uniforms = torch.from_numpy(keyed_uniforms(keys, positions))
        tokens, logprobs = sample(logits, [s.params for s in sequences], uniforms)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.append(token, logprob, sequence.owner.version)
            sequence.check_finished(sequence.owner.eos)

    def settle(self) -> None:
        """The cache is there while anyone is awake."""
        awake = any(not member.asleep for member in self.members.values())
        if not awake:
            self.runner.release()
        elif self.runner.cache is None:
            self.runner.allocate()


class Member(Owner):
    """A pipeline's part in a shared engine; a `RolloutBackend`.

    The model may be the trainer's own: then new weights are simply there, and `update_weights` only drops what was
    computed with the old ones and records the new version.
    """

    def __init__(
        self,
        shared: SharedEngine,
        name: str,
        model: Transformer,
        tokenizer: Tokenizer,
        on_pass: Callable[[Pass], None] | None,
    ) -> None:
        if name in shared.members:
            raise ValueError(f"there is a member {name} already")
        super().__init__(number=shared.joined, eos=tokenizer.eos_token_ids, on_pass=on_pass)
        self.shared = shared
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.home = model.device
        self._take_adapters()
        shared.joined += 1
        shared.members[name] = self
        shared.settle()

    @property
    def yields(self) -> bool:
        return self.shared.yields

    @yields.setter
    def yields(self, yields: bool) -> None:
        self.shared.yields = yields

    def add_request(self, request: Request) -> None:
        self._check_awake()
        blocks, scheduler = self.shared.blocks, self.shared.scheduler
        room = min(blocks.num_blocks * blocks.block_size, self.model.spec.max_positions)
        arrival = scheduler.next_arrival(self)
        first, *others = sequences_of(request, self.tokenizer, room, arrival, self)
        self.arrivals = arrival + 1 + len(others)
        first.forks = others
        scheduler.add(first)

    def has_unfinished(self) -> bool:
        return bool(self.ended or self.shared.scheduler.of(self))

    def step(self, look: Look | None = None) -> list[SampleOutput]:
        """A step of everybody; returns this member's samples that have ended, in this one or in others' steps."""
        self._check_awake()
        self.shared.advance(None if look is None else lambda: look(self.take()))
        return self.take()

    def take(self) -> list[SampleOutput]:
        """Samples that have ended and were not taken before."""
        ended, self.ended = self.ended, []
        return ended

    def nudge(self) -> None:
        """Ends a burst of decode steps soon; a pass never waits for anything."""
        self.shared.nudge()

    def pause(self) -> None:
        """Leaves this member's sequences out of the batch; they stay where they are, unless others need the room."""
        self.paused = True

    def go_on(self) -> None:
        self.paused = False

    def abort(self, request_ids: Seq[str] | None = None) -> list[SampleOutput]:
        """Ends requests (None: all) and returns their partial tokens and log-probs."""
        wanted = None if request_ids is None else set(request_ids)
        outputs: list[SampleOutput] = []
        for sequence in self.shared.scheduler.of(self):
            if wanted is not None and sequence.request_id not in wanted:
                continue
            self.shared.scheduler.drop(sequence)
            for ended in (sequence, *sequence.forks):
                ended.finish_reason = "abort"
                outputs.append(ended.output())
        return outputs

    def partials(self) -> list[SampleOutput]:
        """What there is of every unfinished sample that has any; they go on."""
        return [s.output() for s in self.shared.scheduler.of(self) if s.generated.token_ids]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]] | None, weight_version: int) -> None:
        """New weights, or None where the model object has them already.

        Nothing computed with the old ones is used again: running samples go on, their prefix is run anew.
        """
        self._drop_computed()
        if weights is not None:
            self._load(weights, weight_version)
        self._take_adapters()
        self.version = weight_version

    def sleep(self, level: int = 1) -> None:
        """Gives its part of the cache back, and with the last member the cache goes.

        Level 1 keeps the weights in host memory, level 2 drops them for new ones to come; a shared base stays.
        The model's parameters stay the same objects, so whoever shares them still does.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}: 1 or 2")
        self._drop_computed()
        self.shared.runner.adapt(self.number, {})
        self.asleep = True
        self.shared.settle()
        for module in self._own_modules():
            if level == 1:
                module.to("cpu")
            else:
                release([*module.parameters(), *module.buffers()])

    def wake_up(self, tags: Seq[str] | None = None) -> None:
        """Undoes `sleep` for "weights", "kv_cache" or, by default, both."""
        tags = ("weights", "kv_cache") if tags is None else tags
        if "weights" in tags:
            for module in self._own_modules():
                if any(map(is_released, module.parameters())):
                    reclaim([*module.parameters(), *module.buffers()])
                    if isinstance(module, Transformer):
                        fill_buffers(module)
                else:
                    module.to(self.home)
            self._take_adapters()
        if "kv_cache" in tags:
            self.asleep = False
            self.shared.settle()

    def close(self) -> None:
        """Leaves, with all its sequences; the last one takes the cache along."""
        self.abort()
        self._drop_computed()
        self.shared.members.pop(self.name, None)
        self.shared.runner.adapt(self.number, {})
        self.shared.settle()

    def _check_awake(self) -> None:
        if self.asleep:
            raise RuntimeError("the engine sleeps: wake_up first")

    def _drop_computed(self) -> None:
        """Nothing that was computed for this member is used again."""
        scheduler = self.shared.scheduler
        for sequence in [s for s in scheduler.running if s.owner is self]:
            scheduler.preempt(sequence)
        self.shared.blocks.forget(self)

    def _take_adapters(self) -> None:
        self.shared.runner.adapt(self.number, adapters_on(self.shared.base, self.model))

    def _load(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """Adapter weights under PEFT's names."""
        load_lora_state(self.model, dict(weights))

    def _own_modules(self) -> list[nn.Module]:
        """What this member has for itself."""
        return [linear.lora for _, linear in linears(self.model) if linear.lora is not None]
