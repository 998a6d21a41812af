"""What a run with several pipelines refuses: one clear message, exit code 2, nothing written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_helpers import Case, Outcome, outcomes_of, python, without_torch
from config_helpers import refusal
from mixes import SUMS, run_here, write_mix

from jigsawrl.api import train
from jigsawrl.cli_profile import profile
from jigsawrl.cli_runs import run_several
from jigsawrl.config import load_run_file
from jigsawrl.errors import JigsawError
from jigsawrl.model.tiny import write_tiny

CORES = len(os.sched_getaffinity(0))
FILES = (
    ("sums.yaml", json.dumps(SUMS)),
    ("missing.yaml", "workers: 1\npipelines: {a: {run: sums.yaml}, b: {run: nowhere.yaml}}\n"),
    ("workload.yaml", "workers: 1\npipelines: {a: {run: sums.yaml}, b: {workload: gsm8k_qwen3-4b}}\n"),
    ("crowd.yaml", f"workers: {CORES + 1}\npipelines: {{a: {{run: sums.yaml}}}}\n"),
    ("good.yaml", "workers: 1\npipelines: {a: {run: sums.yaml}}\n"),
    ("policy.yaml", "workers: 1\npolicy: best\npipelines: {a: {run: sums.yaml}}\n"),
    ("full/notes.txt", "mine\n"),
    ("run/config.yaml", "name: good\nworkers: 1\npipelines: {a: {run: other.yaml}}\n"),
)
REFUSED = {
    "missing run file": Case(
        "run missing.yaml --out out", 2, "{folder}/nowhere.yaml: there is no such run file"
    ),
    "workload": Case(
        "run workload.yaml --out out", 2, "pipelines.b: a workload of a profile can only be simulated"
    ),
    "cores": Case(
        "run crowd.yaml --out out", 2, f"workers: {CORES + 1} are asked for, and there are {CORES} cores"
    ),
    "policy": Case("run policy.yaml --out out", 2, "policy"),
    "other files": Case("run good.yaml --out full", 2, "full: is not empty, and holds no run"),
    "a run": Case("run good.yaml --out run", 2, "run: holds a run already; continue it with --resume"),
    "another run": Case(
        "run good.yaml --out run --resume",
        2,
        "run: holds a run with other settings: pipelines.a.run was 'other.yaml'",
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return outcomes_of(REFUSED, FILES, tmp_path_factory, without_torch(tmp_path_factory))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_before_anything_is_written(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    outcome, case = outcomes[name], REFUSED[name]
    wanted = case.stderr.replace("{folder}", str(outcome.folder))
    assert (outcome.code, outcome.stdout, outcome.written) == (case.code, "", set())
    assert outcome.stderr.startswith(f"jigsaw: {wanted}"), outcome.stderr
    assert outcome.stderr.count("\n") <= 3


def test_the_process_of_the_scheduler_needs_no_torch(tmp_path_factory: pytest.TempPathFactory) -> None:
    done = python(
        dict(os.environ), "-c", "import jigsawrl.runtime.launch, sys; print('torch' in sys.modules)"
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.fixture
def windowed(tmp_path: Path) -> Path:
    """A run file of a model with a sliding window of 64 tokens, and a key that nobody knows."""
    model = write_tiny(tmp_path / "model", layers=1, hidden=16, heads=2, kv_heads=1, seed=0)
    raw = json.loads((model / "config.json").read_text())
    changes = {"model_type": "mistral", "sliding_window": 64, "novelty": 1}
    (model / "config.json").write_text(json.dumps(raw | changes))
    run = {**SUMS, "model": {"path": "model"}, "rollout": {**SUMS["rollout"], "max_prompt_tokens": 60}}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    return tmp_path / "run.yaml"


def test_what_does_not_fit_into_the_window_of_a_model_is_refused_in_every_kind_of_run(
    windowed: Path, tmp_path: Path
) -> None:
    mix = tmp_path / "mix.yaml"
    mix.write_text("workers: 1\npipelines: {a: {run: run.yaml}}\n")
    run = json.loads(windowed.read_text())
    run["model"]["path"] = str(tmp_path / "model")
    before = set(tmp_path.iterdir())
    said = [
        refusal(load_run_file, windowed),
        refusal(lambda: train(**run, out=tmp_path / "out")),
        refusal(run_several, mix, [], tmp_path / "out", False, True, False),
        refusal(run_several, mix, [], tmp_path / "out", False, False, False),
        refusal(profile, windowed, tmp_path / "profile.json", 1, None),
    ]
    wanted = "max_prompt_tokens 60, is more than the sliding_window of 64 tokens of the model in"
    assert all(wanted in each for each in said), said
    assert [each.startswith("pipelines.") for each in said] == [False, False, True, True, True]
    assert set(tmp_path.iterdir()) == before


def test_a_key_that_is_ignored_is_said_once_before_a_mix(
    windowed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {**json.loads(windowed.read_text()), "rollout": SUMS["rollout"] | {"max_prompt_tokens": 16}}
    windowed.write_text(json.dumps(run))
    mix = tmp_path / "mix.yaml"
    mix.write_text("workers: 1\npipelines: {a: {run: run.yaml}, b: {run: run.yaml}}\n")
    assert run_several(mix, [], None, False, True, False)[0] == 0
    said = capsys.readouterr().err
    model = tmp_path / "model"
    assert said == (
        f"jigsaw: {model}/config.json: ignored, as transformers ignores them: attention_bias, novelty\n"
    )


@pytest.mark.slow
def test_a_folder_that_a_run_is_using_is_refused(tmp_path: Path) -> None:
    mix, out = write_mix(tmp_path, a={**SUMS, "steps": 2}), tmp_path / "out"
    said: list[str] = []

    def on_step(name: str, step: int) -> None:
        if not said:
            done = python(dict(os.environ), "-m", "jigsawrl", "run", str(mix), "--out", str(out), "--resume")
            said.append(f"{done.returncode} {done.stderr}")

    outcome = run_here(mix, out, on_step)
    me = os.getpid()
    wanted = (
        f"process {me} runs what is in it; let it end, stop it with 'kill {me}', or choose another folder"
    )
    assert said == [f"2 jigsaw: {out}: {wanted} with --out\n"]
    assert [each.how for each in outcome.pipelines] == ["finished"]
    with pytest.raises(JigsawError, match="holds a run already"):
        run_here(mix, out)
