"""verl's console logs, as several versions write them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.errors import JigsawError
from jigsawrl.graph.reconstruct import reconstructed_lengths
from jigsawrl.graph.verl_log import read_verl_log

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


def log(folder: Path, *lines: str, name: str = "gsm8k_qwen3-4b.log") -> Path:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    "line",
    [
        f"step:1 - {PLAIN}",
        f"{RAY}step:1 - {NUMPY}",
        f"{COLOURED}step:1 - {PLAIN}",
        f"Training Progress:  10%|\u2588 | 1/10\r{RAY}step:1 - {PLAIN} [repeated 2x across cluster]",
        f"2025-06-01 10:00:00 INFO step:1 - {PLAIN}",
        f"> {RAY}step:1 - {PLAIN}",
        "step:1\n" + "\n".join(f" - {key}:{value}" for key, value in METRICS.items()),
        json.dumps(
            {"step": 1, "data": {key: float(value) for key, value in METRICS.items() if value != "nan"}}
        ),
    ],
)
def test_a_step_is_read_however_it_is_written(tmp_path, line):
    trace = read_verl_log(log(tmp_path, "noise: no step here", line, "more noise"))
    (step,) = trace.steps
    assert (step.step, step.gen, step.ref, step.update_actor) == (1, 59.0, 18.2, 35.6)
    assert step.seconds == 129.0
    assert trace.gpus == 8
    assert trace.model.name == "qwen3-4b"
    assert step.reconstructed
    assert len(step.lengths) == 1024
    assert step.lengths.mean() == pytest.approx(290.1, rel=0.01)
    assert step.lengths.max() == 4096


def test_settings_tell_the_model_and_the_sizes(tmp_path):
    settings_ = [
        f"{RAY}{{'actor_rollout_ref': {{'model': {{'path': '/models/Qwen2.5-7B-Instruct'}},",
        f"{RAY}   'rollout': {{'gpu_memory_utilization': 0.6, 'n': 5,",
        f"{RAY}               'tensor_model_parallel_size': 2, 'val_kwargs': {{'n': 1}}}}}},",
        f"{RAY}   'actor': {{'fsdp_config': {{'param_offload': True}}}},",
        f"{RAY} 'data': {{'max_response_length': 1024, 'train_batch_size': 64}},",
    ]
    trace = read_verl_log(log(tmp_path, *settings_, f"{RAY}step:3 - {PLAIN}", name="run.log"))
    assert trace.model.name == "qwen2.5-7b"
    assert (trace.samples, trace.tp, trace.sequences) == (5, 2, 320)
    assert trace.memory_share == 0.6
    assert trace.offloaded


def test_a_run_that_was_resumed_counts_each_step_once(tmp_path):
    again = PLAIN.replace("timing_s/gen:59.0", "timing_s/gen:61.0")
    trace = read_verl_log(log(tmp_path, f"step:1 - {PLAIN}", f"step:2 - {PLAIN}", f"step:2 - {again}"))
    assert [(step.step, step.gen) for step in trace.steps] == [(1, 59.0), (2, 61.0)]


def test_a_last_line_that_is_being_written_is_left_out(tmp_path):
    path = log(tmp_path, f"step:1 - {PLAIN}")
    with open(path, "a") as file:
        file.write(f"step:2 - {PLAIN}"[:150])
    assert [step.step for step in read_verl_log(path).steps] == [1]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "is empty"),
        (["hello", "global_step:1 - x:2"], "none of its 2 lines"),
        (["hello", "step:1 - actor/loss:1.0"], "line 2"),
        (["a", "b", f"step:1 - {PLAIN}".replace("gen:59.0", "gen:-4.0")], "line 3"),
        (["a", f"step:1 - {PLAIN}".replace("gen:59.0", "gen:nan")], "line 2"),
        ([f"step:1 - {PLAIN}".replace("gen:59.0", "gen:soon")], "line 1"),
    ],
)
def test_a_log_that_cannot_be_used_names_its_line(tmp_path, lines, said):
    with pytest.raises(JigsawError) as error:
        read_verl_log(log(tmp_path, *lines))
    assert "gsm8k_qwen3-4b.log" in str(error.value)
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) <= 3


def test_a_log_without_a_model_says_how_to_name_it(tmp_path):
    with pytest.raises(JigsawError, match="qwen3-4b"):
        read_verl_log(log(tmp_path, f"step:1 - {PLAIN}", name="train.log"))


def test_bytes_that_are_no_text_are_no_crash(tmp_path):
    path = tmp_path / "qwen3-4b.log"
    path.write_bytes(bytes(range(256)) * 50)
    with pytest.raises(JigsawError):
        read_verl_log(path)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 600), st.floats(0, 1), st.integers(2, 9000), st.floats(0, 1), st.floats(0, 0.6))
def test_made_up_lengths_keep_mean_and_bounds(count, where, longest, low, clipped):
    shortest = 1 + low * (longest - 1) / 2
    mean = shortest + where * (longest - shortest)
    lengths = reconstructed_lengths(count, mean, longest, shortest, clipped)
    assert len(lengths) == count
    assert lengths.min() >= np.floor(shortest)
    assert lengths.max() <= longest
    if count > 20 and 0.05 < where < 0.95:
        assert lengths.mean() == pytest.approx(mean, rel=0.05, abs=1)


def test_made_up_lengths_have_the_clipped_share():
    lengths = reconstructed_lengths(1024, 1360, 8192, 100, 0.012)
    assert (lengths >= 8190).mean() == pytest.approx(0.012, abs=0.005)
    assert lengths.mean() == pytest.approx(1360, rel=0.01)
    assert 500 < np.median(lengths) < 1200
