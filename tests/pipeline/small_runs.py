"""Small real runs that several tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jigsawrl.config import RunConfig
from jigsawrl.config.runfile import checked
from jigsawrl.pipeline.calls import Call
from jigsawrl.pipeline.execution_env import ExecutionEnv, StandaloneEnv
from jigsawrl.pipeline.loop import Result, run
from jigsawrl.pipeline.workers import Handle, Workers
from jigsawrl.telemetry.progress import Progress

SUMS = {"kind": "arithmetic", "max_number": 6, "size": 49}
COLD = {"path": "tiny", "tiny": {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "warmup_steps": 0}}
"""Built in no time; it has learned nothing."""
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2}
UNTRAINED = {"path": "tiny", "tiny": {**SMALL, "warmup_steps": 0}}


def config(**changes: Any) -> RunConfig:
    """A run of a few seconds; sections in `changes` are merged into it."""
    data: dict[str, Any] = {
        "name": "test",
        "threads": 1,
        "steps": 3,
        "device": "cpu",
        "model": {"path": "tiny", "tiny": {**SMALL, "warmup_steps": 80, "warmup_noise": 0.3}},
        "task": SUMS,
        "rollout": {"prompts_per_step": 8, "samples": 4, "max_tokens": 6, "max_prompt_tokens": 64},
        "trainer": {"lr": 1e-3},
        "telemetry": {"tensorboard": False},
    }
    for key, value in changes.items():
        merge = isinstance(value, dict) and isinstance(data.get(key), dict) and key not in ("model", "task")
        data[key] = {**data[key], **value} if merge else value
    return checked(data)


def train(out: Path, resume: bool = False, env: ExecutionEnv | None = None, **changes: Any) -> Result:
    with Progress(json=True) as progress:
        return run(config(**changes), out, resume, progress, env)


class Noting(StandaloneEnv):
    """Notes the prompt of every sequence of every minibatch."""

    def __init__(self) -> None:
        self.minibatches: list[list[str]] = []

    def workers(self, config: RunConfig, base: Path, device: str) -> Workers:
        workers = super().workers(config, base, device)
        return Workers([NotingHandle(handle, self) for handle in workers.handles], workers.engine)


class NotingHandle:
    def __init__(self, handle: Handle, noting: Noting) -> None:
        self.handle = handle
        self.noting = noting
        self.close = handle.close

    def start(self, method: str, *args: Any) -> Call:
        if method == "forward_backward":
            (batch,) = args
            prompts = [str(t[: p[0]].tolist()) for t, p in zip(batch.tokens, batch.trained, strict=True)]
            self.noting.minibatches.append(prompts)
        return self.handle.start(method, *args)


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def learned(out: Path) -> list[dict[str, float]]:
    """The metrics that must be equal between two runs: all but the times."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in metrics(out)
    ]
