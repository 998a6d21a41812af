"""Do pipelines that share a GPU learn what they learn alone?

Four pipelines with models made and warmed up on the spot, two that answer at once and two agents with a tool, are
trained one after the other (`serial`: each has the machine to itself) and then all together (`jigsaw`). On a GPU sums
are not taken in the same order twice, so rewards are compared and not tokens: the mean of the last quarter of the
steps must be that of the solo run, less a tolerance for the noise of a few hundred samples a step. Where there is no
GPU it runs on the CPU, and says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml
from common import CORES, arguments, claim, clean_stdout, positive, report, say
from rich.table import Table

from jigsawrl.config.runfile import checked
from jigsawrl.pipeline.warmup import prepare_base

LIMIT_S = 540.0
TOLERANCE = 0.05
"""Of rewards between 0 and 1: three standard errors are at most 0.017 for 20 steps of 400 samples, and 0.054 for 3 of
256, which is what is left of the agents' with `--part 0.5`."""
LEAST_GAIN = 0.1
"""Of the mean reward, that every pipeline must have made at last: one that learns nothing proves nothing."""
SHAPE = {"layers": 2, "hidden": 128, "heads": 2, "kv_heads": 1}
"""Small, so that it is soon warmed up, with heads of a size that the GPU's kernels know."""


def pipelines(device: str, scale: float, seed: int) -> dict[str, dict[str, Any]]:
    sums = {"kind": "arithmetic", "max_number": 9, "size": 100}
    agent = {"kind": "calculator", "max_number": 99, "size": 256, "max_turns": 3}
    short = {"prompts_per_step": 50, "samples": 8, "max_tokens": 4}
    turns = {"prompts_per_step": 32, "samples": 8, "max_tokens": 24, "stop": ["]"]}
    waits = {"latency": 0.2, "latency_jitter": 0.2}
    runs: dict[str, dict[str, Any]] = {
        "sums": {"steps": 80, "task": sums, "rollout": short},
        "differences": {"steps": 80, "task": {**sums, "operations": ["-"]}, "rollout": short},
        "calculator": {"steps": 30, "task": {**agent, **waits}, "rollout": turns},
        "products": {"steps": 30, "task": {**agent, **waits, "operations": ["*"]}, "rollout": turns},
    }
    runs["differences"]["algorithm"] = {"advantage": "rloo"}
    runs["products"]["algorithm"] = {"advantage": "dr_grpo"}
    for run in runs.values():
        run["steps"] = max(4, round(scale * run["steps"]))
        noise = 0.65 if run["rollout"] is short else 0.4
        warm = {"warmup_noise": noise, "warmup_steps": round(300 * max(0.2, scale))}
        run["model"] = {"path": "tiny", "tiny": {**SHAPE, **warm}}
        run |= {"seed": seed, "trainer": {"lr": 3e-4, "schedule": "linear"}, "device": device}
        run |= {"checkpoint": {"every": 1000}, "telemetry": {"tensorboard": False}}
    return runs


def warmed_up(name: str, run: dict[str, Any], folder: Path) -> Path:
    """The folder of a pipeline's model, made by a process of its own."""
    import torch

    torch.set_num_threads(1)  # models this small gain nothing by more
    return prepare_base(checked({**run, "name": name}), folder, lambda _: None)


def trained(folder: Path, policy: str, workers: int) -> tuple[float, dict[str, list[float]]]:
    """Seconds, and each pipeline's rewards by step."""
    out = folder / policy
    command = [sys.executable, "-m", "jigsawrl", "run", str(folder / "mix.yaml"), f"policy={policy}"]
    command += [f"workers={workers}", "--out", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{policy} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout)
    rewards = {}
    for name in result["pipelines"]:
        lines = (out / name / "metrics.jsonl").read_text().splitlines()
        rewards[name] = [json.loads(line)["reward/mean"] for line in lines]
    return result["seconds"], rewards


def last(rewards: list[float]) -> float:
    """The mean of the last quarter."""
    tail = rewards[-max(1, len(rewards) // 4) :]
    return sum(tail) / len(tail)


def first(rewards: list[float]) -> float:
    head = rewards[: max(1, len(rewards) // 16)]
    return sum(head) / len(head)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--part", type=positive, default=1.0, help="of the steps")
    options = parser.parse_args()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        say("torch finds no GPU: on the CPU, which takes minutes")
    with clean_stdout() as console, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        runs = pipelines(device, 0.1 if options.quick else options.part, options.seed)
        say("warming up four models")
        with ProcessPoolExecutor(CORES, get_context("spawn")) as pool:
            bases = [
                pool.submit(warmed_up, name, run, folder / "models" / name) for name, run in runs.items()
            ]
        for (pipeline, run), base in zip(runs.items(), bases, strict=True):
            run["model"] = {"path": str(base.result())}
            (folder / f"{pipeline}.yaml").write_text(yaml.safe_dump(run))
        mix = {"pipelines": {pipeline: {"run": f"{pipeline}.yaml"} for pipeline in runs}}
        (folder / "mix.yaml").write_text(yaml.safe_dump(mix))
        solo_seconds, solo = trained(folder, "serial", 1)
        seconds, together = trained(folder, "jigsaw", 1)
        table = Table(title=f"mean reward, {device}", title_justify="left")
        for column in ("pipeline", "steps", "at first", "alone, at last", "together, at last"):
            table.add_column(column, justify="left" if column == "pipeline" else "right")
        for pipeline, rewards in together.items():
            figures = (first(rewards), last(solo[pipeline]), last(rewards))
            table.add_row(pipeline, str(len(rewards)), *(f"{figure:.3f}" for figure in figures))
        console.print(table)
        console.print(f"one after the other {solo_seconds:.1f} s, together {seconds:.1f} s")
        reached = sum(last(together[each]) >= last(solo[each]) - TOLERANCE for each in runs)
        gained = min(last(rewards) - first(rewards) for rewards in together.values())
        report(
            console,
            "gpu_learning",
            options.seed,
            {
                "reached_solo_reward": claim(reached, at_least=len(runs)),
                "least_gain": claim(gained, at_least=LEAST_GAIN),
            },
            device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
            tolerance=TOLERANCE,
            rewards={"alone": solo, "together": together},
            seconds={"alone": solo_seconds, "together": seconds},
        )


if __name__ == "__main__":
    main()
