"""One pipeline step, rollout and GRPO update, against TRL's GRPOTrainer.

Both sides start from the same Hugging Face folder in float32 and get the same prompts, number of samples, token
limit, reward function, learning rate and loss (GRPO, no KL, clip 0.2, one update a step). The lengths of the
answers are the model's own doing: the embedding of the end token is scaled until the model ends an answer after 60
tokens on average. Nothing else changes with it, since an answer is over once the token is drawn.

Steps alternate: TRL makes one, then we make one. Before that each side is tried with one thread and with all cores,
and TRL also with its batch cut into micro-batches, with both attention implementations and with transformers'
continuous batching; the fastest settings are the ones measured. With --quick nothing is tried, and only the smaller
model is timed. Ours keeps its defaults otherwise. Our rewards go through the sandbox of child processes, as always;
TRL calls the function.
"""

from __future__ import annotations

import copy
import json
import math
import random
import string
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import (
    CORES,
    Settings,
    Spread,
    arguments,
    claim,
    clean_stdout,
    figure,
    report,
    shown,
    thread_choices,
    tune,
    write_model,
)
from reward import share_of_letters
from rich.console import Console
from rich.table import Table

from jigsawrl.config import RunConfig
from jigsawrl.config.runfile import checked
from jigsawrl.engine.engine import Engine
from jigsawrl.engine.types import Request, SampleKey, SamplingParams
from jigsawrl.model.folder import export_model, load_model, places
from jigsawrl.model.tokenizer import load_tokenizer
from jigsawrl.model.transformer import Transformer
from jigsawrl.pipeline.execution_env import StandaloneEnv
from jigsawrl.pipeline.journal import Journal
from jigsawrl.pipeline.loop import Pipeline
from jigsawrl.pipeline.losses import aggregation_weights
from jigsawrl.pipeline.rollout import rollout_of
from jigsawrl.pipeline.trajectory import make_batch
from jigsawrl.pipeline.workers import start_workers
from jigsawrl.telemetry.progress import Progress
from jigsawrl.trainer.batch import Batch
from jigsawrl.trainer.trainer import evaluate

MEAN_LENGTH, MAX_TOKENS, MAX_PROMPT = 60, 256, 32
LEARNING_RATE = 1e-6
TRL_AXES: dict[str, Sequence[Any]] = {
    "micro-batches": (1, 2, 4, 8),
    "attention": ("sdpa", "eager"),
    "generation": ("generate", "continuous"),
}
ANSWERS = 64
"""From so many answers the mean length is foreseen."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    prompts: int
    samples: int
    rounds: dict[str, int]

    @property
    def batch(self) -> int:
        return self.prompts * self.samples


FULL = Size(prompts=8, samples=8, rounds={"0.3M": 15, "10M": 7})
QUICK = Size(prompts=8, samples=8, rounds={"0.3M": 5})


@dataclass(slots=True)
class Steps:
    """Seconds and answer lengths of one side's measured steps."""

    seconds: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    longest: list[float] = field(default_factory=list)

    def add(self, seconds: float, mean_length: float, longest: float) -> None:
        self.seconds.append(seconds)
        self.lengths.append(mean_length)
        self.longest.append(longest)


def main() -> None:
    options = arguments(__doc__).parse_args()
    size = QUICK if options.quick else FULL
    claims: dict[str, dict[str, Any]] = {}
    models: dict[str, Any] = {}
    with clean_stdout() as console, tempfile.TemporaryDirectory(prefix="jigsawrl-bench-") as scratch:
        for name in size.rounds:
            models[name] = compare(name, size, options, Path(scratch) / name)
        print_tables(console, models, size)
        slowest = min(m["speedup"]["median"] for m in models.values())
        claims["speedup_vs_trl"] = claim(slowest, at_least=3)
        error = max(m["grpo_loss_error"] for m in models.values())
        claims["grpo_loss_error"] = claim(error, at_most=1e-5)
        report(console, "pipeline_vs_trl", options.seed, claims, quick=options.quick, models=models)


def compare(name: str, size: Size, options: Any, folder: Path) -> dict[str, Any]:
    """Everything about one model."""
    folder.mkdir()
    prompts = make_prompts(size.prompts, options.seed)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    base = write_base(folder, name, prompts, options.seed)
    config = our_config(base, data, size, options.seed)
    # Quick runs have no time to try things out: all cores on both sides.
    threads = thread_choices(options.threads)[:1] if options.quick else thread_choices(options.threads)
    with closing(Ours(config, base, folder / "run")) as ours:
        theirs = Trl(base, prompts, size, folder / "trl", options.seed)
        loss, loss_error, gradient_error = same_loss(ours, theirs)
        our_settings, _ = tune({"threads": threads}, ours.seconds, repeats=1 if options.quick else 3)
        axes: dict[str, Sequence[Any]] = {"threads": threads}
        if not options.quick:
            axes = {**TRL_AXES, **axes}
        their_settings, tried = tune(axes, theirs.seconds)
        our_steps, their_steps = alternate(ours, our_settings, theirs, their_settings, size.rounds[name])
    ratios = [t / o for o, t in zip(our_steps.seconds, their_steps.seconds, strict=True)]
    return {
        "speedup": Spread.of(ratios).as_json(),
        "ours": figures(our_steps, our_settings),
        "trl": {**figures(their_steps, their_settings), "settings_tried": tried},
        "grpo_loss": loss,
        "grpo_loss_error": loss_error,
        "gradient_error": gradient_error,
        "parameters": sum(p.numel() for p in ours.model.parameters()),
    }


def figures(steps: Steps, settings: Settings) -> dict[str, Any]:
    return {
        "seconds_a_step": Spread.of(steps.seconds).as_json(),
        "length_mean": sum(steps.lengths) / len(steps.lengths),
        "length_max": max(steps.longest),
        "settings": settings,
    }


# The model and its lengths


def make_prompts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    alphabet = string.ascii_lowercase + " "
    return ["".join(rng.choices(alphabet, k=rng.randint(8, MAX_PROMPT))) for _ in range(count)]


def write_base(folder: Path, name: str, prompts: list[str], seed: int) -> Path:
    """A random model that ends its answers after MEAN_LENGTH tokens on average, long ones cut at MAX_TOKENS."""
    raw = write_model(folder / "raw", name, seed)
    model, tokenizer = load_model(raw, torch.float32), load_tokenizer(raw, trust_remote_code=False)
    eos = tokenizer.eos_token_id
    with torch.no_grad():
        ending = model.embed_tokens[eos].clone()
        model.embed_tokens[eos] = 0
        answers = unending_answers(model, tokenizer, [tokenizer.encode(p) for p in prompts], seed)
        others = [i for i in range(len(model.head)) if i != eos]

        def read(batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
            return (hidden @ model.head[others].T).logsumexp(dim=1)

        end = evaluate(model, answers, 4096, lambda batch, hidden: hidden @ ending)
        rest = evaluate(model, answers, 4096, read)
        model.embed_tokens[eos] = ending * end_scale(end.view(-1, MAX_TOKENS), rest.view(-1, MAX_TOKENS))
    export_model(model, raw, folder / "base")
    return folder / "base"


def unending_answers(model: Transformer, tokenizer: Any, prompts: list[list[int]], seed: int) -> Batch:
    """What the model would say if nothing ended it."""
    samples = ANSWERS // len(prompts)
    engine = Engine(model, tokenizer, num_blocks=ANSWERS * (MAX_TOKENS + MAX_PROMPT) // 16)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    requests = [
        Request(str(i), prompt, params, [SampleKey(seed, "lengths", 0, i, s) for s in range(samples)])
        for i, prompt in enumerate(prompts)
    ]
    tokens, trained = [], []
    for output in engine.generate(requests):
        prompt = prompts[output.key.prompt]
        tokens.append(torch.tensor(prompt + output.generated.token_ids))
        trained.append(torch.arange(len(prompt), len(prompt) + MAX_TOKENS))
    return Batch(tokens, trained)


def end_scale(end: torch.Tensor, others: torch.Tensor) -> float:
    """The factor on the end token's logit that makes the mean length MEAN_LENGTH.

    `end` are its logits and `others` the log-sum of all others' at each place [answers, MAX_TOKENS].
    """

    def mean_length(scale: float) -> float:
        goes_on = torch.sigmoid(others - scale * end)
        return 1 + float(goes_on[:, :-1].cumprod(dim=1).sum(dim=1).mean())

    low, high = 0.0, 16.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_length(middle) > MEAN_LENGTH else (low, middle)
    return (low + high) / 2


# Our side


def our_config(base: Path, data: Path, size: Size, seed: int) -> RunConfig:
    reward = Path(__file__).with_name("reward.py")
    return checked(
        {
            "name": "benchmark",
            "seed": seed,
            "steps": 10_000,
            "device": "cpu",
            "model": {"path": str(base), "dtype": "float32"},
            "task": {
                "kind": "data",
                "path": str(data),
                "reward": {"path": f"{reward}:share_of_letters", "on_error": "stop"},
            },
            "rollout": {
                "prompts_per_step": size.prompts,
                "samples": size.samples,
                "max_tokens": MAX_TOKENS,
                "max_prompt_tokens": MAX_PROMPT,
            },
            "algorithm": {"advantage": "grpo", "loss": "ppo", "clip_low": 0.2, "clip_high": 0.2},
            "trainer": {"lr": LEARNING_RATE, "max_grad_norm": 1.0},
            "telemetry": {"tensorboard": False},
        }
    )


class Ours:
    """The pipeline as `jigsaw run` drives it, without checkpoints."""

    def __init__(self, config: RunConfig, base: Path, out: Path) -> None:
        out.mkdir()
        self.workers = start_workers(config, base, "cpu")
        tokenizer = load_tokenizer(base, trust_remote_code=False)
        longest = self.workers.first("longest_sequence")
        self.rollouts = rollout_of(config, tokenizer, self.workers.engine, longest)
        prompts = list(range(config.rollout.prompts_per_step))
        self.pipeline = Pipeline(config, self.workers, self.rollouts, prompts, StandaloneEnv())
        self.journal = Journal(config, out, StandaloneEnv().events(out), 0, False, Progress(json=True))

    @property
    def model(self) -> Transformer:
        return self.workers.handles[0].actor.model  # type: ignore[attr-defined]

    def step(self, settings: Settings) -> tuple[float, dict[str, float]]:
        torch.set_num_threads(settings["threads"])
        started = time.perf_counter()
        self.journal.begin(self.pipeline.done + 1)
        values = self.pipeline.step(self.journal)
        self.journal.end(values)
        return time.perf_counter() - started, values

    def seconds(self, settings: Settings) -> float:
        return self.step(settings)[0]

    def close(self) -> None:
        self.journal.close("finished")
        self.rollouts.close()
        self.workers.close()


# TRL's side


class Trl:
    """GRPOTrainer with the same work, in any of the settings it is tried with."""

    def __init__(self, base: Path, prompts: list[str], size: Size, out: Path, seed: int) -> None:
        self.base, self.prompts, self.size, self.out, self.seed = base, prompts, size, out, seed

    def trainer(self, settings: Settings, steps: int) -> Any:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        cuts = settings.get("micro-batches", 1)
        continuous = settings.get("generation") == "continuous"
        room = -(-(MAX_PROMPT + MAX_TOKENS) // 32) * self.size.batch
        config = GRPOConfig(
            output_dir=str(self.out),
            use_cpu=True,
            bf16=False,
            seed=self.seed,
            max_steps=steps,
            per_device_train_batch_size=self.size.batch // cuts,
            gradient_accumulation_steps=cuts,
            gradient_checkpointing=False,
            num_generations=self.size.samples,
            max_completion_length=MAX_TOKENS,
            temperature=1.0,
            beta=0.0,
            num_iterations=1,
            epsilon=0.2,
            loss_type="grpo",
            scale_rewards="group",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            shuffle_dataset=False,
            use_transformers_continuous_batching=continuous,
            transformers_continuous_batching_config=(
                {"page_size": 32, "num_blocks": room, "max_batch_tokens": 256} if continuous else None
            ),
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        return GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                self.base, dtype=torch.float32, attn_implementation=settings.get("attention", "sdpa")
            ),
            processing_class=AutoTokenizer.from_pretrained(self.base),
            reward_funcs=share_of_letters,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": self.prompts}),
        )

    def run(
        self, settings: Settings, steps: int, after_step: Callable[[int, float, dict[str, list[float]]], None]
    ) -> None:
        """Trains; `after_step` gets the number of the step, its seconds and the trainer's metrics."""
        from transformers import PrinterCallback, TrainerCallback

        trainer = self.trainer(settings, steps)
        trainer.remove_callback(PrinterCallback)

        class Clock(TrainerCallback):
            started = 0.0

            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                torch.set_num_threads(settings["threads"])
                self.started = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                seconds = time.perf_counter() - self.started
                after_step(state.global_step, seconds, trainer._metrics["train"])

        trainer.add_callback(Clock())
        trainer.train()

    def seconds(self, settings: Settings) -> float:
        """Of one step, the second: the first one is warm-up."""
        taken: list[float] = []
        self.run(settings, 2, lambda step, seconds, metrics: taken.append(seconds))
        return taken[-1]


def alternate(
    ours: Ours, our_settings: Settings, theirs: Trl, their_settings: Settings, rounds: int
) -> tuple[Steps, Steps]:
    """A step of theirs, a step of ours, and so on; the first pair is not counted."""
    our_steps, their_steps = Steps(), Steps()

    def after_step(step: int, seconds: float, metrics: dict[str, list[float]]) -> None:
        mine, values = ours.step(our_settings)
        if step > 1:
            their_steps.add(
                seconds, metrics["completions/mean_length"][-1], metrics["completions/max_length"][-1]
            )
            our_steps.add(mine, values["response_length/mean"], values["response_length/max"])

    theirs.run(their_settings, rounds + 1, after_step)
    return our_steps, their_steps


# The loss


def same_loss(ours: Ours, theirs: Trl) -> tuple[float, float, float]:
    """Our loss, its distance from TRL's on one batch, and the relative distance of the gradients.

    Both models hold the base's weights still. The old log-probs are off by noise, so that ratios differ from 1 and
    some are clipped.
    """
    generator = torch.Generator().manual_seed(theirs.seed)
    trajectories = ours.rollouts.run(ours.pipeline.source.take(theirs.size.prompts), 0)
    batch = make_batch(trajectories)
    lengths = batch.lengths
    values = batch.values
    noise = torch.randn(int(lengths.sum()), generator=generator) * 0.3
    values["old_logprobs"] = values["engine_logprobs"] + noise
    scores = torch.randn(len(batch), generator=generator)
    values["advantages"] = scores.repeat_interleave(lengths)
    values["weights"] = aggregation_weights("sequence_mean", lengths, MAX_TOKENS).float()
    loss = ours.workers.forward_backward("forward_backward", batch)["loss"]

    trainer = theirs.trainer({}, 1)
    model = trainer.model.eval()
    their_loss = trainer._compute_loss(model, padded(batch, scores))
    their_loss.backward()
    mirror = copy.deepcopy(ours.model)
    for mine, parameter in zip(mirror.parameters(), ours.model.parameters(), strict=True):
        assert parameter.grad is not None
        mine.data, parameter.grad = parameter.grad, None
    squares = reference = 0.0
    for name, gradient in places(mirror).items():
        theirs_too = model.get_parameter(name).grad
        if "embed_tokens" in name:  # transformers keeps the padding token's input embedding as it is
            rows = torch.arange(len(gradient)) != model.config.pad_token_id
            gradient, theirs_too = gradient[rows], theirs_too[rows]
        squares += float((gradient - theirs_too).square().sum())
        reference += float(theirs_too.square().sum())
    return loss, abs(loss - their_loss.item()), math.sqrt(squares / reference)


def padded(batch: Batch, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """The batch as TRL lays it out: prompts padded on the left, answers on the right."""
    starts = [int(trained[0]) for trained in batch.trained]
    widest, longest = max(starts), max(len(trained) for trained in batch.trained)
    shape = (len(batch), widest), (len(batch), longest)
    inputs = {
        "prompt_ids": torch.zeros(shape[0], dtype=torch.int64),
        "prompt_mask": torch.zeros(shape[0], dtype=torch.int64),
        "completion_ids": torch.zeros(shape[1], dtype=torch.int64),
        "completion_mask": torch.zeros(shape[1], dtype=torch.int64),
        "old_per_token_logps": torch.zeros(shape[1]),
        "advantages": advantages,
    }
    old = batch.values["old_logprobs"].split(batch.lengths.tolist())
    for i, (tokens, start) in enumerate(zip(batch.tokens, starts, strict=True)):
        answer = tokens[start:]
        inputs["prompt_ids"][i, widest - start :] = tokens[:start]
        inputs["prompt_mask"][i, widest - start :] = 1
        inputs["completion_ids"][i, : len(answer)] = answer
        inputs["completion_mask"][i, : len(answer)] = 1
        inputs["old_per_token_logps"][i, : len(answer)] = old[i]
    return inputs


def print_tables(console: Console, models: dict[str, Any], size: Size) -> None:
    table = Table(
        title=f"one step: {size.prompts} prompts x {size.samples} samples, rollout + GRPO update, {CORES} cores",
        caption="medians over interleaved steps, in brackets the quartiles",
    )
    for column in ("model", "side", "seconds a step", "length mean", "length max", "settings"):
        table.add_column(column, justify="left" if column in ("model", "side", "settings") else "right")
    for name, model in models.items():
        for side in ("ours", "trl"):
            row = model[side]
            table.add_row(
                name,
                side,
                str(spread(row["seconds_a_step"])),
                f"{row['length_mean']:.1f}",
                f"{row['length_max']:.0f}",
                shown(row["settings"]),
            )
        table.add_row("", "speedup", str(spread(model["speedup"])), end_section=True)
    console.print(table)
    for name, model in models.items():
        console.print(
            f"{name}: GRPO loss {model['grpo_loss']:.6f}, off TRL's by {figure(model['grpo_loss_error'])}; "
            f"gradients differ by {figure(model['gradient_error'])} of their norm"
        )


def spread(document: dict[str, float]) -> Spread:
    return Spread(document["median"], document["quartile_1"], document["quartile_3"])


if __name__ == "__main__":
    main()
