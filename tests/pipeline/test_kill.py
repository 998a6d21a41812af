"""A run that is killed and resumed ends in the very same weights."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import learned

from jigsawrl.telemetry.logreader import read_run
from jigsawrl.underway import is_under_way

RUN_FILE = """
name: killed
seed: 3
steps: 14
deterministic: true
threads: 1
device: cpu
model:
  tiny: {layers: 2, hidden: 64, heads: 4, kv_heads: 2, warmup_steps: 40, warmup_noise: 0.2}
task: {kind: calculator, max_number: 9, size: 32, latency: 0.005, latency_jitter: 0.02, max_turns: 3}
rollout: {prompts_per_step: 8, samples: 4, max_tokens: 16, stop: ["]"]}
algorithm: {advantage: gae, kl_coef: 0.01, minibatches: 2, dynamic_sampling: {max_rounds: 2}}
trainer: {lr: 1.0e-3, schedule: cosine}
checkpoint: {every: 3, keep: 2}
"""


def start(folder: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jigsawrl", "run", str(folder / "run.yaml"), "--out", str(out), *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder
    )


def finish(process: subprocess.Popen[bytes]) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output.decode()
    return output.decode()


def left_behind(group: int) -> list[str]:
    """Processes of a process group that are still there."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


@pytest.mark.slow
def test_sigkill_at_random_moments_and_resume_give_the_same_weights_bit_for_bit(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    began = time.monotonic()
    finish(start(tmp_path, tmp_path / "whole"))
    duration = time.monotonic() - began
    rng = random.Random()
    kills: list[float] = []
    killed = tmp_path / "killed"
    while len(kills) < 5:
        process = start(tmp_path, killed, "--resume")
        moment = rng.uniform(0.05, 0.9) * duration
        try:
            process.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            kills.append(moment)
        else:
            if kills:
                break
            shutil.rmtree(killed)  # it was faster than the first one, beside which something else ran
    finish(start(tmp_path, killed, "--resume"))
    whole, resumed = (tmp_path / name / "model" / "model.safetensors" for name in ("whole", "killed"))
    assert kills
    assert resumed.read_bytes() == whole.read_bytes(), f"killed after {kills} of {duration} seconds"
    assert learned(killed) == learned(tmp_path / "whole")


@pytest.mark.slow
def test_no_process_outlives_a_killed_run(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    process = start(tmp_path, tmp_path / "out", "workers=2", "steps=1000")
    assert process.stdout is not None
    for line in process.stdout:
        if b"1/1000" in line:
            break
    assert len(left_behind(process.pid)) > 3  # the loop, two workers, their environments
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    process.stdout.read()  # ends when the last process that could write to it closes it
    deadline = time.monotonic() + 10
    while left_behind(process.pid) and time.monotonic() < deadline:
        os.sched_yield()  # a process is seen for a moment after its files are closed
    assert left_behind(process.pid) == []
    assert [(one.event, one.failure) for one in read_run(tmp_path / "out").incidents] == [("killed", True)]


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_and_the_run_goes_on_from_there(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    process = start(tmp_path, tmp_path / "out", "steps=1000", "checkpoint.every=500")
    assert process.stdout is not None
    for line in process.stdout:
        if b"1/1000" in line:
            break
    out = tmp_path / "out"
    assert is_under_way(out)
    assert read_run(out).incidents == []
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert not is_under_way(out)
    assert [(one.event, one.failure) for one in read_run(out).incidents] == [("interrupted", False)]
    assert process.returncode == 130, rest.decode()
    (checkpoint,) = (tmp_path / "out" / "checkpoints").iterdir()
    done = json.loads((checkpoint / "manifest.json").read_text())["step"]
    assert "stopping: the step is finished and saved; press Ctrl-C again to stop at once" in rest.decode()
    assert f"stopped after step {done}; go on with --resume" in rest.decode()
    output = finish(start(tmp_path, tmp_path / "out", f"steps={done + 1}", "--resume"))
    assert f"resuming after step {done}" in output
