"""An engine and the weights that it samples from, on one worker: the half of an actor that rolls out."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch

from jigsawrl.engine.decoding import told_of_decoding
from jigsawrl.engine.types import Pass, RolloutBackend, SampleOutput
from jigsawrl.model.folder import load_adapter, load_model
from jigsawrl.model.lora import add_lora
from jigsawrl.model.tokenizer import load_tokenizer
from jigsawrl.model.transformer import Transformer
from jigsawrl.telemetry.events import PassRecorder, PassSpan, Substage

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig

TAIL_FRACTION = 1 / 8
"""Below this part of a rollout's largest batch the few sequences left are its tail."""

A = TypeVar("A", bound="Generating")
P = ParamSpec("P")
R = TypeVar("R")


def awake(method: Callable[Concatenate[A, P], R]) -> Callable[Concatenate[A, P], R]:
    """For what needs the actor's state."""

    @wraps(method)
    def checked(actor: A, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if actor.asleep:
            raise RuntimeError(f"the actor sleeps: wake_up first, then {method.__name__}")
        return method(actor, *args, **kwargs)

    return checked


class Generating:
    """`base` is the model folder that training starts from. Whoever is one sets its engine up."""

    engine: RolloutBackend
    room: int
    """The longest sequence that the engine takes."""

    def __init__(self, config: RunConfig, base: Path, device: str, worker: int = 0) -> None:
        self.config = config
        self.base = base
        self.worker = worker
        self.device = torch.device(device)
        self.dtype = compute_dtype(config, self.device)
        self.model = self._model()
        self.lora = self._add_lora()
        self.spans: list[PassSpan] = []
        self.recorder = PassRecorder(self.spans.append)
        self.most_decoding = 0
        self.asleep = False
        self.between: Callable[[], None] = lambda: None
        """Called between a training's micro-batches: whoever shares its device may want it elsewhere."""
        self.after_pass: Callable[[], None] = lambda: None
        """Called after each of the engine's passes, where no other process asks it to do things in between."""

    # What is set up once

    def _model(self) -> Transformer:
        return load_model(self.base, self.dtype, self.device)

    def _add_lora(self) -> tuple[int, float] | None:
        lora = self.config.model.lora
        if lora is None:
            return None
        if lora.path:
            return load_adapter(self.model, Path(lora.path))
        add_lora(self.model, lora.rank, lora.alpha, set(lora.targets), self.config.seed)
        return lora.rank, lora.alpha

    def _engine(self) -> tuple[RolloutBackend, int]:
        """The rollout backend, and the longest sequence it takes."""
        rollout, spec = self.config.rollout, self.model.spec
        tokenizer = load_tokenizer(self.base, self.config.model.trust_remote_code)
        if rollout.backend == "vllm":
            from jigsawrl.engine.vllm_backend import VllmEngine

            engine = VllmEngine(self.model, self.base, tokenizer, self.config, on_pass=self._passed)
            return engine, engine.room
        from jigsawrl.engine.engine import Engine
        from jigsawrl.engine.memory import cache_blocks

        blocks = cache_blocks(self.config, spec, self.dtype, self.device)
        own = Engine(
            self.model,
            tokenizer,
            num_blocks=blocks,
            block_size=rollout.block_size,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            deterministic=self.config.deterministic,
            on_pass=self._passed,
        )
        return own, min(spec.max_positions, blocks * rollout.block_size)

    # Rollout

    def longest_sequence(self) -> int:
        return self.room

    def decoding(self) -> str | None:
        """Which code decodes, for the user; None on a CPU and in vLLM, which have one way each."""
        from jigsawrl.engine.shared import Member

        if self.device.type != "cuda" or not isinstance(self.engine, Member):
            return None
        gpu, runner = torch.cuda.get_device_name(self.device), self.engine.shared.runner
        return told_of_decoding(gpu, runner.why_not_kernels)

    def busy_seconds(self, threads: int | None = None) -> float:
        """Seconds that this process was at work, ever, and from now on with so many threads.

        On a CPU, others on its cores do not count.
        """
        busy = time.process_time() if self.device.type == "cpu" else time.perf_counter()
        if threads is not None and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        return busy

    def abort(self) -> list[SampleOutput]:
        """Ends all that the engine is at, and returns what there is of it."""
        return self.engine.abort()

    def end_rollout(self) -> list[PassSpan]:
        """The engine's passes since the last rollout ended."""
        self.recorder.flush()
        spans, self.spans[:] = list(self.spans), []
        self.most_decoding = 0
        return spans

    def _passed(self, passed: Pass) -> None:
        kind: Substage = "prefill"
        if passed.decode_tokens >= passed.prefill_tokens:
            self.most_decoding = max(self.most_decoding, passed.decode_tokens)
            few = passed.decode_tokens <= self.most_decoding * TAIL_FRACTION
            kind = "tail" if few and passed.prefill_tokens == 0 else "decode"
        tokens = passed.prefill_tokens + passed.decode_tokens
        self.recorder.add(kind, passed.started, passed.ended, tokens=tokens, sequences=passed.decode_tokens)
        self.after_pass()

    def close(self) -> None:
        self.engine.close()


def compute_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    if config.model.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if config.model.dtype == "float32" else torch.bfloat16
