"""In deterministic mode no result depends on the number of threads or cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SMALL, config, learned, train

from jigsawrl.pipeline.warmup import prepare_base

THREADS = (1, 2, 3, 4, 8)
"""More than this machine may have cores: torch starts as many threads as it is told to."""
WIDE = {"layers": 2, "hidden": 192, "heads": 4, "kv_heads": 2, "warmup_steps": 6, "warmup_noise": 0.3}
"""Wide enough that torch cuts its products and sums differently for 1, 3 and 8 threads."""


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def many(threads: int, **changes: Any) -> dict[str, Any]:
    """A run of three steps whose sums are long enough to be cut for several threads."""
    rollout = {"prompts_per_step": 16, "samples": 8, "max_tokens": 8}
    return {"deterministic": True, "threads": threads, "rollout": rollout, **changes}


def bits(out: Path) -> tuple[list[dict[str, float]], bytes, bytes]:
    base, model = (out / name / "model.safetensors" for name in ("base", "model"))
    return learned(out), base.read_bytes(), model.read_bytes()


@pytest.mark.parametrize("trained", [{}, {"lora": {"rank": 4}}], ids=["full", "lora"])
def test_a_run_learns_the_same_with_any_number_of_threads(trained: dict[str, Any], tmp_path: Path) -> None:
    model = {"path": "tiny", "tiny": {**SMALL, "warmup_steps": 40, "warmup_noise": 0.3}, **trained}
    found = []
    for threads in THREADS:
        train(tmp_path / str(threads), **many(threads, model=model))
        found.append(bits(tmp_path / str(threads)))
    assert found == found[:1] * len(THREADS)


def test_a_run_goes_on_to_the_same_result_with_another_number_of_threads(tmp_path: Path) -> None:
    train(tmp_path / "whole", **many(3, steps=4))
    train(tmp_path / "parts", **many(8, steps=2))
    train(tmp_path / "parts", resume=True, **many(2, steps=4))
    assert bits(tmp_path / "parts") == bits(tmp_path / "whole")


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_tiny_base_of_a_seed_is_the_same_with_any_number_of_threads(
    deterministic: bool, tmp_path: Path
) -> None:
    found = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        settings = config(deterministic=deterministic, model={"path": "tiny", "tiny": WIDE})
        base = prepare_base(settings, tmp_path / str(threads), lambda message: None)
        found.append((base / "model.safetensors").read_bytes())
        assert torch.get_num_threads() == threads
    assert found == found[:1] * len(THREADS)


def test_a_run_says_that_it_computes_with_one_thread_where_more_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "many", steps=1, **many(8))
    assert "computes with one CPU thread; threads: 8 is not used" in capsys.readouterr().err
    train(tmp_path / "one", steps=1, **many(1))
    assert "CPU thread" not in capsys.readouterr().err
