"""Fuzz targets: data files, what environments say, and what rewards return."""

from __future__ import annotations

import json
import math
import random
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fuzzing.check import Case, Target
from fuzzing.values import NUMBERS, TEXTS, as_json, damaged, damaged_bytes, nasty
from jigsawrl.model.tiny import write_tiny
from jigsawrl.model.tokenizer import Tokenizer, UnusableText, load_tokenizer
from jigsawrl.pipeline import rewards
from jigsawrl.pipeline.advantages import AdvantageInputs, compute_advantages
from jigsawrl.pipeline.chat import Dialogue
from jigsawrl.pipeline.environments.pool import StepResult, read_reset, read_step
from jigsawrl.pipeline.sandbox import Failure
from jigsawrl.pipeline.sandbox_host import value_field
from jigsawrl.pipeline.tasks import load_task
from jigsawrl.pipeline.trajectory import Trajectory, groups_of, rewards_of, rollout_metrics
from jigsawrl.telemetry.jsonl import encode

ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "7+5=", "answer": "12", "data_source": "sums"},
    {
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "7+5?", "name": "a"},
        ],
        "reward_model": {"style": "rule", "ground_truth": "12"},
        "extra_info": {"index": 0, "deep": [[{"a": [1.5, None]}]]},
    },
)
SURROGATES = ("\ud800", "a\udfff", "\ud83d", "\ude00\ud83d")
ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae")


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        write_tiny(Path(folder), layers=1, hidden=16, heads=2, kv_heads=1, seed=0)
        return load_tokenizer(Path(folder), trust_remote_code=False)


def use(path: Path, **settings: Any) -> None:
    """What a run does with data: rows become prompts, prompts tokens, columns what a reward is sent."""
    reward = SimpleNamespace(path="r.py:f", params={}, timeout=5.0, on_error="zero", processes=1)
    columns = {"prompt": "prompt", "ground_truth": None, "data_source": None, "system_prompt": None}
    task = load_task(
        SimpleNamespace(kind="data", path=str(path), format="auto", reward=reward, **columns | settings), 0
    )
    dialogue = Dialogue(tokenizer())
    for index in range(len(task)):
        prompt = task[index]
        dialogue.prompt_tokens(prompt)
        json.dumps([prompt.ground_truth, prompt.extra, prompt.data_source], ensure_ascii=False).encode()


def data_jsonl(rng: random.Random, folder: Path) -> Case:
    """A damaged JSONL file."""
    path = folder / "data.jsonl"
    lines = []
    for _ in range(rng.randint(1, 3)):
        row = rng.choice(ROWS)
        lines.append(as_json(rng, damaged(rng, row) if rng.random() < 0.7 else row))
    data = b"\n".join(lines)
    path.write_bytes(damaged_bytes(rng, data) if rng.random() < 0.3 else data)
    settings = {"system_prompt": "Be brief."} if rng.random() < 0.2 else {}
    if rng.random() < 0.2:
        settings[rng.choice(("prompt", "ground_truth", "data_source"))] = rng.choice(TEXTS)
    return lambda: use(path, **settings)


def data_parquet(rng: random.Random, folder: Path) -> Case:
    """A parquet file of odd columns, or with a damaged footer."""
    path = folder / "data.parquet"
    columns: dict[str, Any] = {"prompt": pa.array(["7+5=", "1+1="])}
    for name in rng.sample(("prompt", "answer", "extra_info", "x.y", ""), 2):
        columns[name] = _column(rng)
    table = pa.table(columns)
    if rng.random() < 0.1:
        table = table.slice(0, 0)
    pq.write_table(table, path, version="2.6", coerce_timestamps=None)
    if rng.random() < 0.4:
        data = path.read_bytes()
        at = max(4, len(data) - 8) if rng.random() < 0.5 else 0
        path.write_bytes(data[:at] + damaged_bytes(rng, data[at:], 1))
    return lambda: use(path)


def _column(rng: random.Random) -> pa.Array:
    match rng.randrange(8):
        case 0:
            return pa.array([b"\xff\xfe", None], pa.binary())
        case 1:
            return pa.array([math.nan, math.inf])
        case 2:
            return pa.array([[("a", 1)], [("a", 2), ("a", 3)]], pa.map_(pa.string(), pa.int64()))
        case 3:
            return pa.array([-(2**62), 2**62], pa.timestamp(rng.choice(("ms", "us", "ns"))))
        case 4:
            deep: Any = 1
            for _ in range(rng.choice((3, 60, 99, 101, 120))):
                deep = [deep]
            return pa.array([deep, None])
        case 5:
            odd = pa.array(["ab", "cd"]).buffers()
            return pa.StringArray.from_buffers(2, odd[1], pa.py_buffer(b"\xed\xa0\x80\xff"))
        case 6:
            return pa.array([2**40, -(2**40)], pa.duration(rng.choice(("s", "us", "ns"))))
        case _:
            return pa.array([None, None])


def odd_value(rng: random.Random, depth: int = 2) -> Any:
    """What user code may return: numbers, texts and containers of them, NumPy's too."""
    match rng.randrange(9 if depth else 6):
        case 0 | 1:
            return rng.choice(NUMBERS)
        case 2:
            return rng.choice((*TEXTS, *SURROGATES))
        case 3:
            return rng.choice(
                (
                    np.float32(0.5),
                    np.float64(1e39),
                    np.bool_(True),
                    np.arange(3),
                    np.int64(-5),
                    np.float16("inf"),
                )
            )
        case 4:
            return rng.choice((1j, object(), {1, 2}, b"x", print, 3e38, -3e38, 3.5e38))
        case 5:
            return nasty(rng)
        case 6:
            return [odd_value(rng, depth - 1) for _ in range(rng.randint(0, 5))]
        case 7:
            return tuple(odd_value(rng, depth - 1) for _ in range(rng.randint(3, 6)))
        case _:
            names = (*TEXTS, *SURROGATES, "score", "mean", "errors", "none", "std", 3, None, True)
            return {rng.choice(names): odd_value(rng, depth - 1) for _ in range(rng.randint(0, 5))}


def carried(value: Any) -> Any:
    """The value as the process of user code sends it and this one reads it."""
    reply = json.loads(f"{{{value_field(value)}}}".encode())
    return reply["value"] if "value" in reply else Failure("raised", reply["error"])


def reward_values(rng: random.Random, folder: Path) -> Case:
    """Odd rewards of both signatures, to the metrics of their step and the advantages of their samples."""
    count = rng.randint(1, 6)
    values: list[Any] = []
    for _ in range(count):
        value = odd_value(rng)
        if rng.random() < 0.5:
            value = {"score": odd_value(rng, 0), **(value if isinstance(value, dict) else {"extra": value})}
        if rng.random() < 0.02:
            value = {"score": 1.0} | {str(n): n for n in range(5000)}
        values.append(value)
    together = [odd_value(rng, 0) for _ in range(count)] if rng.random() < 0.8 else odd_value(rng)

    def case() -> None:
        for scores in (
            [rewards.read_score(carried(value)) for value in values],
            rewards.read_scores(carried(together), count),
        ):
            check_scores(scores)

    return case


def check_scores(scores: list[rewards.Score]) -> None:
    """Metrics and advantages are finite, and errors have a line."""
    samples = []
    for index, score in enumerate(scores):
        sample = Trajectory(index % 2, index, [1, 2, 3], 1, [1, 2], [-0.5, -0.25], [0, 0])
        sample.reward, sample.error, sample.extra = score.value, score.error, score.extra
        samples.append(sample)
        if score.error is not None:
            assert len(score.error.splitlines()) == 1, score.error
            assert len(score.error) < 500
            score.error.encode()
    row = json.loads(encode({"step": 1, **rollout_metrics(samples)}))
    assert "non_finite" not in row, row
    usable = [sample for sample in samples if sample.reward is not None]
    if usable:
        lengths = torch.tensor([len(sample.trained) for sample in usable])
        values = torch.full((int(lengths.sum()),), 0.5)
        inputs = AdvantageInputs(rewards_of(usable), groups_of(usable), lengths, values=values)
        for kind in ADVANTAGES:
            result = compute_advantages(kind, inputs)
            assert result.advantages.isfinite().all(), (kind, inputs.rewards)
            assert result.returns is None or result.returns.isfinite().all()


def environment_values(rng: random.Random, folder: Path) -> Case:
    """What `reset` and `step` return, to the tokens that the model reads."""
    first, then = odd_value(rng), odd_value(rng)
    if rng.random() < 0.6:
        text = rng.choice((*TEXTS, *SURROGATES))
        then = [text, odd_value(rng, 0), rng.choice((True, False, 1, None)), rng.choice(({}, None, 3))]
        first = text if rng.random() < 0.5 else (text, {})

    def case() -> None:
        dialogue = Dialogue(tokenizer())
        for read in (read_reset, read_step):
            value = carried(first if read is read_reset else then)
            outcome = value if isinstance(value, Failure) else read(value)
            if isinstance(outcome, Failure):
                assert len(outcome.message.splitlines()) <= 1, outcome.message
                continue
            try:
                if isinstance(outcome, StepResult):
                    dialogue.turn_tokens(outcome.observation, 1)
                else:
                    dialogue.first_tokens(outcome, None)
            except UnusableText:  # becomes the sample's error
                continue

    return case


TARGETS: list[Target] = [data_jsonl, data_parquet, reward_values, environment_values]
