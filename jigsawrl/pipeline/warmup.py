"""The tiny model's start: built on the spot, then shown demonstrations of which many are wrong.

After it the model knows the form of an answer but not which answer is right: something for RL to find out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jigsawrl.errors import JigsawError
from jigsawrl.model.folder import export_model, load_model
from jigsawrl.model.tiny import write_tiny
from jigsawrl.model.tokenizer import Tokenizer, load_tokenizer
from jigsawrl.pipeline.base import base_folder
from jigsawrl.pipeline.chat import Dialogue
from jigsawrl.pipeline.environments.pool import Environments
from jigsawrl.pipeline.prompts import PromptSource, keyed
from jigsawrl.pipeline.sandbox import Failure
from jigsawrl.pipeline.tasks import load_task
from jigsawrl.pipeline.tasks.base import Task
from jigsawrl.trainer.batch import Batch
from jigsawrl.trainer.logprobs import token_logprobs
from jigsawrl.trainer.optimizer import OptimizerSettings
from jigsawrl.trainer.trainer import Metrics, Trainer, trained_tokens

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig

BATCH, LEARNING_RATE = 64, 1e-3


def prepare_base(config: RunConfig, out: Path, message: Callable[[str], None]) -> Path:
    """The folder that training starts from: the user's, or a tiny model made once in the run folder."""
    base = base_folder(config, out)
    if config.model.path != "tiny":
        return base
    tiny = config.model.tiny
    assert tiny is not None
    if (base / "config.json").is_file():
        return base
    raw = out / ".base.raw"
    shutil.rmtree(raw, ignore_errors=True)
    write_tiny(
        raw,
        layers=tiny.layers,
        hidden=tiny.hidden,
        heads=tiny.heads,
        kv_heads=tiny.kv_heads,
        seed=config.seed,
    )
    model = load_model(raw, torch.float32)
    if tiny.warmup_steps:
        size = sum(p.numel() for p in model.parameters())
        message(
            f"building a model of {size / 1e6:.1f}M parameters and warming it up, {tiny.warmup_steps} steps"
        )
        trainer = Trainer(
            model,
            OptimizerSettings(
                LEARNING_RATE, schedule="cosine", warmup_steps=10, total_steps=tiny.warmup_steps
            ),
            micro_batch_tokens=1 << 16,
        )
        demonstrations = Demonstrations(config, load_tokenizer(raw, trust_remote_code=False))
        with one_thread():
            for step in range(tiny.warmup_steps):
                trainer.forward_backward(demonstrations.batch(step, tiny.warmup_noise), imitate(model.head))
                trainer.optim_step()
    export_model(model, raw, base)
    shutil.rmtree(raw)
    return base


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums cut for more threads round differently, and a seed gives one base on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Demonstrations:
    """Batches of prompts with an answer: the right one or, as noise, another prompt's."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        task = load_task(config.task, config.seed)
        self.answers = [task.demonstration(i) for i in range(len(task))]
        if any(answer is None for answer in self.answers):
            raise JigsawError(
                f"model.tiny.warmup_steps: task {config.task.kind} has no demonstrations to warm up on; "
                "set it to 0, or model.path to a trained model"
            )
        self.prompts = opening_tokens(task, Dialogue(tokenizer, config.rollout.date), config.seed)
        self.source = PromptSource(list(range(len(task))), config.seed)

    def batch(self, step: int, noise: float) -> Batch:
        tokens: list[Tensor] = []
        trained: list[Tensor] = []
        for index in self.source.take(min(BATCH, len(self.prompts))):
            chosen = index
            if keyed("noise", self.config.seed, step, index, bits=32) < noise * 2**32:
                chosen = keyed("other", self.config.seed, step, index) % len(self.answers)
            answer = [*self.tokenizer.encode(self.answers[chosen] or ""), self.tokenizer.eos_token_id]
            prompt = self.prompts[index]
            tokens.append(torch.tensor(prompt + answer))
            trained.append(torch.arange(len(prompt), len(prompt) + len(answer)))
        return Batch(tokens, trained)


def opening_tokens(task: Task, dialogue: Dialogue, seed: int) -> list[list[int]]:
    """Tokens of every prompt; an environment is asked for its first observation."""
    if task.environment is None:
        return [dialogue.prompt_tokens(task[i]) for i in range(len(task))]
    environments = Environments(task.environment)
    try:
        futures = [
            environments.reset(str(i), keyed("environment", seed, i, bits=31), task[i].extra)
            for i in range(len(task))
        ]
        observations = [future.result() for future in futures]
    finally:
        environments.close()
    texts: list[str] = []
    for observation in observations:
        if isinstance(observation, Failure):
            raise JigsawError(f"the environment could not be reset: {observation.message}")
        texts.append(observation)
    return [dialogue.first_tokens(text, task.environment.system_prompt) for text in texts]


def imitate(head: Tensor) -> Callable[[Batch, Tensor], tuple[Tensor, Metrics]]:
    """Cross-entropy of the demonstrations, averaged over tokens."""

    def objective(micro: Batch, hidden: Tensor) -> tuple[Tensor, Metrics]:
        logprobs, _ = token_logprobs(hidden, head, trained_tokens(micro), 1.0, entropy_gradient=False)
        return -logprobs.mean(), {}

    return objective
