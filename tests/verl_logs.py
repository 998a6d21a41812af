"""Writes verl's console logs."""

from __future__ import annotations

from pathlib import Path

from jigsawrl.graph.traces import Trace
from jigsawrl.graph.verl_trace import read_verl_log

METRICS = {
    "actor/pg_loss": "-1.71e-08",
    "actor/kl_loss": "nan",
    "critic/score/mean": "0.57",
    "response_length/mean": "290.1",
    "response_length/max": "4096.0",
    "response_length/min": "12.0",
    "response_length/clip_ratio": "0.01",
    "prompt_length/mean": "104.2",
    "num_turns/mean": "2.0",
    "timing_s/gen": "59.0",
    "timing_s/old_log_prob": "12.2",
    "timing_s/ref": "18.2",
    "timing_s/update_actor": "35.6",
    "timing_s/step": "129.0",
    "perf/total_num_tokens": "403763",
    "perf/throughput": "391.244",
}
PLAIN = " - ".join(f"{key}:{value}" for key, value in METRICS.items())
NUMPY = " - ".join(f"{key}:np.float64({value})" for key, value in METRICS.items())
RAY = "(TaskRunner pid=3125) "
COLOURED = "\x1b[36m(main_task pid=19799, ip=10.0.0.1)\x1b[0m "
BAR = f"{RAY}\rTraining Progress:  10%|\u2588 | 1/10 [02:09<19:21, 129.0s/it]"
COMMAND = (
    "+ python3 -m verl.trainer.main_ppo 'data.train_files=['\\''/data/gsm8k.parquet'\\'']' data.train_batch_size=256 "
    "actor_rollout_ref.rollout.n=4 actor_rollout_ref.model.path=/models/Qwen3-4B trainer.n_gpus_per_node=8 "
    "trainer.nnodes=1 actor_rollout_ref.rollout.tensor_model_parallel_size=4"
)


def log(folder: Path, *lines: str, name: str = "gsm8k_qwen3-4b.log") -> Path:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read(folder: Path, *lines: str, name: str = "gsm8k_qwen3-4b.log") -> Trace:
    """The only run in a log of these lines."""
    (trace,) = read_verl_log(log(folder, *lines, name=name))
    return trace


def step(number: int, **changed: float | str) -> str:
    """A step line, with other values for metrics that are named by the last part of their keys."""
    values = {key: str(changed.get(key.rpartition("/")[2], value)) for key, value in METRICS.items()}
    return f"{RAY}step:{number} - " + " - ".join(f"{key}:{value}" for key, value in values.items())
