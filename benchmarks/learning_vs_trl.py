"""Does a pipeline learn as fast as TRL's GRPOTrainer: reward by rollout, from the same start?

Both sides train the same tiny model on all sums and differences of numbers up to 30, rewarded for the exact answer:
from the same base, with the same prompts in the same order, 16 prompts of 8 samples a rollout, the same loss (GRPO,
clip 0.2, no KL) and the same AdamW with a constant learning rate. A seed decides the order of the prompts and the
samples, for which each side has random numbers of its own. Two configurations are run: `plain`, one update a rollout,
and `minibatches`, two epochs of four minibatches.

What is compared is the area under the learning curve: the mean reward of all rollouts, the first one included. The
gap is TRL's area less ours, over TRL's; the larger gap of the two configurations counts. Time is not measured: every
seed runs in a process of its own, with one thread.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common import CORES, arguments, at_least_one, claim, clean_stdout, report, say
from rich.console import Console
from rich.table import Table

PROMPTS, SAMPLES, MAX_TOKENS, MAX_PROMPT = 16, 8, 6, 16
TASK = {"kind": "arithmetic", "max_number": 30, "operations": ["+", "-"], "size": 2 * 31**2}
BASE_SEED = 0
BASE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "warmup_steps": 1500, "warmup_noise": 0.47}
FIRST_REWARD = 0.18
"""What the mean of the first rollouts is expected to be: a start that is neither hopeless nor nearly done."""
SEEDS = 16
EPSILON = 1e-8
BETAS = (0.9, 0.999)
MAX_GRAD_NORM = 1.0
CLIP = 0.2


@dataclass(frozen=True, slots=True)
class Configuration:
    """How a rollout is learned from, and how many there are."""

    epochs: int
    minibatches: int
    lr: float
    rollouts: int


CONFIGURATIONS = {
    "minibatches": Configuration(epochs=2, minibatches=4, lr=2e-4, rollouts=70),
    "plain": Configuration(epochs=1, minibatches=1, lr=3e-4, rollouts=200),
}
Curves = dict[str, dict[str, list[float]]]
"""Mean reward of every rollout, by configuration and side."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=at_least_one, help=f"how many; by default {SEEDS}, with --quick 2")
    options = parser.parse_args()
    count = options.seeds or (2 if options.quick else SEEDS)
    seeds = range(options.seed * SEEDS, options.seed * SEEDS + count)
    part = 0.1 if options.quick else 1.0
    with clean_stdout() as console, tempfile.TemporaryDirectory(prefix="jigsawrl-bench-") as scratch:
        folders = [Path(scratch) / str(seed) for seed in seeds]
        with ProcessPoolExecutor(CORES, get_context("spawn"), max_tasks_per_child=1) as pool:
            base = pool.submit(make_base, Path(scratch) / "base").result()
            rewards = pool.map(both_sides, seeds, [base] * count, folders, [part] * count)
            curves = dict(zip(seeds, rewards, strict=True))
        found = {name: compare([each[name] for each in curves.values()]) for name in CONFIGURATIONS}
        print_tables(console, found, curves)
        first = statistics.mean(
            rewards[0] for each in curves.values() for sides in each.values() for rewards in sides.values()
        )
        claims = {
            "learning_gap": claim(max(each["gap"] for each in found.values()), at_most=0.02),
            "first_reward_off": claim(abs(first - FIRST_REWARD), at_most=0.03),
        }
        report(
            console,
            "learning_vs_trl",
            options.seed,
            claims,
            quick=options.quick,
            first_reward=first,
            configurations=found,
            rewards=curves,
        )


def compare(curves: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """The areas of one configuration, and the gap with the standard error of its differences between seeds."""
    areas = {side: [statistics.mean(each[side]) for each in curves] for side in ("ours", "trl")}
    mean = statistics.mean(areas["trl"])
    gaps = [(trl - ours) / mean for ours, trl in zip(areas["ours"], areas["trl"], strict=True)]
    return {
        "gap": statistics.mean(gaps),
        "gap_error": standard_error(gaps),
        "area": {side: statistics.mean(values) for side, values in areas.items()},
        "area_error": {side: standard_error(values) for side, values in areas.items()},
        "areas": areas,
    }


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


# One seed


def both_sides(seed: int, base: Path, folder: Path, part: float) -> Curves:
    """In a process of its own: all configurations on both sides, of which `part` of the rollouts are run."""
    import torch

    torch.set_num_threads(1)
    curves: Curves = {}
    with clean_stdout():
        for name, full in CONFIGURATIONS.items():
            rollouts = max(2, round(full.rollouts * part))
            some = Configuration(full.epochs, full.minibatches, full.lr, rollouts)
            ours = our_rewards(some, base, seed, folder / f"{name}-ours")
            curves[name] = {"ours": ours, "trl": trl_rewards(some, base, seed, folder / f"{name}-trl")}
    areas = (
        f"{name} {statistics.mean(c['ours']):.3f} {statistics.mean(c['trl']):.3f}"
        for name, c in curves.items()
    )
    say(f"seed {seed}, area under the curve, ours and TRL's: {', '.join(areas)}")
    return curves


def settings(seed: int, **more: Any) -> Any:
    from jigsawrl.config.runfile import checked

    return checked({"name": "learning", "seed": seed, "threads": 1, "device": "cpu", "task": TASK, **more})


def make_base(folder: Path) -> Path:
    """The model that both sides start from, with any seed."""
    from jigsawrl.pipeline.warmup import prepare_base

    config = settings(BASE_SEED, model={"path": "tiny", "tiny": BASE})
    with clean_stdout():
        return prepare_base(config, folder, lambda _: None)


def our_rewards(configuration: Configuration, base: Path, seed: int, out: Path) -> list[float]:
    """A run as `jigsaw run` makes it."""
    import json

    from jigsawrl.pipeline.loop import run
    from jigsawrl.telemetry.progress import Progress

    config = settings(
        seed,
        steps=configuration.rollouts,
        model={"path": str(base), "dtype": "float32"},
        rollout={
            "prompts_per_step": PROMPTS,
            "samples": SAMPLES,
            "max_tokens": MAX_TOKENS,
            "max_prompt_tokens": MAX_PROMPT,
        },
        algorithm={
            "advantage": "grpo",
            "loss": "ppo",
            "aggregation": "sequence_mean",
            "clip_low": CLIP,
            "clip_high": CLIP,
            "epochs": configuration.epochs,
            "minibatches": configuration.minibatches,
        },
        trainer={
            "lr": configuration.lr,
            "betas": BETAS,
            "eps": EPSILON,
            "weight_decay": 0.0,
            "max_grad_norm": MAX_GRAD_NORM,
        },
        checkpoint={"every": 10_000},
        telemetry={"tensorboard": False},
    )
    with Progress(json=True) as progress:
        run(config, out, False, progress)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward/mean"] for line in lines]


def trl_rewards(configuration: Configuration, base: Path, seed: int, out: Path) -> list[float]:
    """GRPOTrainer, whose `steps` are updates: a rollout is made for every `epochs` times `minibatches` of them."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from jigsawrl.pipeline.prompts import PromptSource
    from jigsawrl.pipeline.tasks import load_task
    from jigsawrl.pipeline.tasks.arithmetic import exact_match

    task = load_task(settings(seed).task, seed)
    source = PromptSource(list(range(len(task))), seed)
    order = [source.take(PROMPTS) for _ in range(configuration.rollouts)]
    rewards: list[float] = []

    def score(prompts: list[str], completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
        """Called once a rollout, for all of its samples."""
        assert prompts[::SAMPLES] == [task[index].text for index in order[len(rewards)]]
        scores = [
            exact_match("arithmetic", text, truth)
            for text, truth in zip(completions, ground_truth, strict=True)
        ]
        rewards.append(statistics.mean(scores))
        return scores

    rows = [task[index] for indices in order for index in indices]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager"),
        processing_class=AutoTokenizer.from_pretrained(base),
        reward_funcs=score,
        args=GRPOConfig(
            output_dir=str(out),
            use_cpu=True,
            bf16=False,
            seed=seed,
            max_steps=configuration.rollouts * configuration.epochs * configuration.minibatches,
            num_iterations=configuration.epochs,
            steps_per_generation=configuration.minibatches,
            per_device_train_batch_size=PROMPTS * SAMPLES // configuration.minibatches,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            num_generations=SAMPLES,
            max_completion_length=MAX_TOKENS,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            epsilon=CLIP,
            loss_type="grpo",
            scale_rewards="group",
            learning_rate=configuration.lr,
            lr_scheduler_type="constant",
            warmup_steps=0,
            optim="adamw_torch",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPSILON,
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            shuffle_dataset=False,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": row.text, "ground_truth": row.ground_truth} for row in rows]
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    assert len(rewards) == configuration.rollouts
    return rewards


# The report


def print_tables(console: Console, found: dict[str, dict[str, Any]], curves: dict[int, Curves]) -> None:
    title = f"area under the learning curve, {len(curves)} seeds, mean and standard error"
    table = Table("configuration", "ours", "TRL", "gap", title=title, title_justify="left")
    for name, each in found.items():
        sides = (f"{each['area'][side]:.3f} ± {each['area_error'][side]:.3f}" for side in ("ours", "trl"))
        table.add_row(name, *sides, f"{each['gap']:+.1%} ± {each['gap_error']:.1%}")
    console.print(table)
    table = Table("seed", title="by seed: area and last tenth of the rollouts", title_justify="left")
    for name in found:
        table.add_column(f"{name}: ours")
        table.add_column("TRL")
    for seed, each in curves.items():
        cells = [shown(each[name][side]) for name in found for side in ("ours", "trl")]
        table.add_row(str(seed), *cells)
    console.print(table)


def shown(rewards: Sequence[float]) -> str:
    tail = rewards[-max(1, len(rewards) // 10) :]
    return f"{statistics.mean(rewards):.3f}, {statistics.mean(tail):.3f}"


if __name__ == "__main__":
    main()
