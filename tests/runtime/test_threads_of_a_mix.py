"""A deterministic pipeline learns alone, with any number of threads, what it learns among others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixes import STEPS, SUMS, result, run_here, write_mix

from jigsawrl.config.runfile import checked
from jigsawrl.pipeline.loop import run
from jigsawrl.telemetry.progress import Progress

THREADS = {"full": (2, 3, 8), "adapters": (1, 4)}
LONG: dict[str, Any] = {**SUMS, "rollout": {"prompts_per_step": 16, "samples": 8, "max_tokens": 8}}
RUNS: dict[str, dict[str, Any]] = {
    "full": {**LONG, "threads": 4},
    "adapters": {**LONG, "threads": 3, "model": {**LONG["model"], "lora": {"rank": 4}}},
}


@pytest.mark.slow
def test_a_pipeline_learns_alone_with_any_number_of_threads_what_it_learns_beside_another(
    tmp_path: Path,
) -> None:
    """One worker of two cores, where there are two: there a pipeline could compute with two threads."""
    file = write_mix(tmp_path, "jigsaw", **RUNS)
    file.write_text(file.read_text().replace('"workers": 2', '"workers": 1'))
    outcome = run_here(file, tmp_path / "out")
    assert [(each.how, each.steps) for each in outcome.pipelines] == [("finished", STEPS)] * 2
    before = torch.get_num_threads()
    try:
        for name, counts in THREADS.items():
            for threads in counts:
                alone = tmp_path / f"{name}-{threads}"
                settings = checked({**RUNS[name], "name": name, "device": "cpu", "threads": threads})
                with Progress(json=True) as progress:
                    run(settings, alone, False, progress)
                assert result(alone) == result(tmp_path / "out" / name), f"{name}, {threads} threads"
    finally:
        torch.set_num_threads(before)
