"""Measuring pipelines before they are planned."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SUMS = """
steps: 500
model: {tiny: {layers: 2, hidden: 64, heads: 4, kv_heads: 2, warmup_steps: 20}}
task: {kind: arithmetic, max_number: 6, size: 49}
rollout: {prompts_per_step: 8, samples: 4, max_tokens: 6}
telemetry: {tensorboard: false}
"""


def jigsaw(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jigsawrl", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.alone
def test_a_profile_is_measured_and_foresees_the_run(tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(SUMS)
    (tmp_path / "mix.yaml").write_text("workers: 2\npipelines:\n  a: {run: sums.yaml, steps: 8}\n")
    made = jigsaw(tmp_path, "profile", "mix.yaml", "--out", "mine.json", "--steps", "4")
    assert made.returncode == 0, made.stderr
    assert "1 pipelines" in made.stdout
    told = jigsaw(tmp_path, "simulate", "mix.yaml", "--profile", "mine.json", "--json")
    assert told.returncode == 0, told.stderr
    foreseen = json.loads(told.stdout)
    assert foreseen["hardware"] == "cpu"
    real = jigsaw(tmp_path, "run", "mix.yaml", "profile=mine.json", "--out", "out", "--json")
    assert real.returncode == 0, real.stderr
    seconds = json.loads(real.stdout)["seconds"]
    assert seconds / 4 < foreseen["seconds"] < 4 * seconds  # tiny steps on a busy machine
    learned = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert list(learned["workloads"]) == ["a"]


@pytest.mark.slow
def test_an_interrupted_one_measures_nothing_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(SUMS)
    command = [sys.executable, "-m", "jigsawrl", "profile", "sums.yaml", "--steps", "5000"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "1/5000" in line:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130, rest
    assert rest.splitlines()[-1] == "jigsaw: interrupted; nothing was measured"
    assert not (tmp_path / "profile.json").exists()


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(SUMS)
    (tmp_path / "notes.json").write_text("notes")
    for out in ("notes.json", "notes.txt", "notes.json/mine.json", "."):
        refused = jigsaw(tmp_path, "profile", "sums.yaml", "--out", out)
        assert refused.returncode == 2
        assert refused.stderr.startswith("jigsaw: ")
    assert (tmp_path / "notes.json").read_text() == "notes"
