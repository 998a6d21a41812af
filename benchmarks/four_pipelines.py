"""The four real pipelines of the CPU benchmarks: two that compute, two agents that wait for their tool, and a way to
run them under any policy with the command that people use."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from common import SHAPES

from jigsawrl.config.runfile import checked
from jigsawrl.pipeline.warmup import prepare_base

LIMIT_S = 900.0


def pipelines(scale: float, seed: int) -> dict[str, dict[str, Any]]:
    """Run files by name; `scale` times the steps of a full run."""
    steps = {name: max(1, round(scale * full)) for name, full in STEPS.items()}
    single = {"kind": "arithmetic", "max_number": 9, "size": 100}
    agent = {"kind": "calculator", "max_number": 99, "size": 256, "max_turns": 3}
    short = {"prompts_per_step": 32, "samples": 8, "max_tokens": 4}
    turns = {"prompts_per_step": 16, "samples": 8, "max_tokens": 24, "stop": ["]"]}
    runs: dict[str, dict[str, Any]] = {
        "sums": {"task": single, "rollout": short},
        "differences": {
            "task": {**single, "operations": ["-"]},
            "rollout": short,
            "algorithm": {"advantage": "rloo"},
        },
        "calculator": {"task": {**agent, "latency": 0.4, "latency_jitter": 0.4}, "rollout": turns},
        "slow-calculator": {
            "task": {**agent, "latency": 0.8, "latency_jitter": 0.8},
            "rollout": turns,
            "algorithm": {"advantage": "dr_grpo"},
        },
    }
    for name, run in runs.items():
        run |= {
            "seed": seed,
            "steps": steps[name],
            "trainer": {"lr": 3e-4},
            "telemetry": {"tensorboard": False},
        }
        run["checkpoint"] = {"every": 1000}
    return runs


STEPS = {"sums": 90, "differences": 90, "calculator": 8, "slow-calculator": 5}
"""Of a full run: each takes about as long alone as the others."""


WARM_UP = {"0.3M": 60, "10M": 2}
"""Steps; the larger model only has to take its time."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all four."""

    seconds: float
    tokens: int
    finished: dict[str, float]
    """When each was done, from the first phase of any."""
    scheduler_seconds: float
    out: Path

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Four:
    """Run files in a folder, with models that are warm already."""

    def __init__(self, folder: Path, scale: float, seed: int, size: str = "0.3M") -> None:
        self.folder = folder
        self.count = 0
        runs = pipelines(scale, seed)
        for name, run in runs.items():
            home = folder / "models" / name
            home.mkdir(parents=True)
            shape = {**SHAPES[size], "warmup_steps": WARM_UP[size]}
            tiny = {**run, "name": name, "model": {"path": "tiny", "tiny": shape}}
            run["model"] = {"path": str(prepare_base(checked(tiny), home, lambda text: None))}
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(run))
        mix = {"workers": 2, "pipelines": {name: {"run": f"{name}.yaml"} for name in runs}}
        (folder / "four.yaml").write_text(yaml.safe_dump(mix))

    def run(self, policy: str, workers: int = 2, *overrides: str) -> Run:
        self.count += 1
        out = self.folder / f"{self.count}-{policy}-{workers}"
        command = [
            sys.executable,
            "-m",
            "jigsawrl",
            "run",
            str(self.folder / "four.yaml"),
            f"policy={policy}",
        ]
        command += [f"workers={workers}", *overrides, "--out", str(out), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode != 0:
            raise RuntimeError(f"{policy} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        result = json.loads(done.stdout)
        each = result["pipelines"]
        return Run(
            result["seconds"],
            sum(pipeline["tokens"] for pipeline in each.values()),
            {name: pipeline["seconds"] for name, pipeline in each.items()},
            result["scheduler_seconds"],
            out,
        )


def alone(serial: Run) -> dict[str, float]:
    """Seconds of each pipeline alone, from a run in which they came one after the other."""
    order = sorted(serial.finished, key=lambda name: serial.finished[name])
    times, before = {}, 0.0
    for name in order:
        times[name] = serial.finished[name] - before
        before = serial.finished[name]
    return times
