"""What a run with several pipelines refuses: one clear message, exit code 2, nothing written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_helpers import Case, Outcome, outcomes_of, python, without_torch
from mixes import SUMS, run_here, write_mix

from jigsawrl.errors import JigsawError

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


@pytest.mark.slow
def test_a_folder_that_a_run_is_using_is_refused(tmp_path: Path) -> None:
    mix, out = write_mix(tmp_path, a={**SUMS, "steps": 2}), tmp_path / "out"
    said: list[str] = []

    def on_step(name: str, step: int) -> None:
        if not said:
            done = python(dict(os.environ), "-m", "jigsawrl", "run", str(mix), "--out", str(out), "--resume")
            said.append(f"{done.returncode} {done.stderr}")

    outcome = run_here(mix, out, on_step)
    assert said == [f"2 jigsaw: {out}: another run is using it; let it end, or choose another with --out\n"]
    assert [each.how for each in outcome.pipelines] == ["finished"]
    with pytest.raises(JigsawError, match="holds a run already"):
        run_here(mix, out)
