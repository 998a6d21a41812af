"""The same pipelines under several policies, for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mixes import CALC, SUMS, write_mix

from jigsawrl.telemetry.runreport import run_report

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str
    out: Path


def compare(folder: Path, *options: str, **runs: dict[str, Any]) -> Done:
    command = [sys.executable, "-m", "jigsawrl", "compare", str(write_mix(folder, **runs)), *options]
    done = subprocess.run(
        [*command, "--out", str(folder / "out")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "80"},
    )
    return Done(done.returncode, done.stdout, done.stderr, folder / "out")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The second one's wait for the first is long beside what processes take to come and go."""
    options = ("--policies", "serial,jigsaw", "--json")
    runs = {"a": SUMS | {"steps": 10}, "b": CALC | {"steps": 2}}
    return compare(tmp_path_factory.mktemp("compare"), *options, **runs)


@pytest.fixture(scope="module")
def found(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return dict(json.loads(line))


def test_every_policy_has_its_run_and_all_learn_the_same(done: Done, found: dict[str, Any]) -> None:
    assert [each["policy"] for each in found["policies"]] == ["serial", "jigsaw"]
    for each in found["policies"]:
        assert (done.out / each["policy"] / "report.html").is_file()
        assert {name: (one["ended"], one["steps"]) for name, one in each["pipelines"].items()} == {
            "a": ("finished", 10),
            "b": ("finished", 2),
        }
        assert all(one["same_rewards"] for one in each["pipelines"].values())


def test_each_is_held_against_serial(found: dict[str, Any]) -> None:
    serial, other = found["policies"]
    assert (found["against"], serial["ratio"]) == ("serial", 1.0)
    assert other["ratio"] == pytest.approx(other["tokens_per_second"] / serial["tokens_per_second"])
    assert found["best"] == ("jigsaw" if other["ratio"] > 1 else "serial")
    assert min(one["slowdown"] for one in serial["pipelines"].values()) == pytest.approx(1.0, abs=0.1)
    assert max(one["slowdown"] for one in serial["pipelines"].values()) > 1.2


def test_models_are_warmed_up_once(done: Done) -> None:
    assert done.stderr.count("warming it up") == 2
    for name in "ab":
        first, second = (done.out / policy / name / "base" for policy in ("serial", "jigsaw"))
        weights = "model.safetensors"
        assert (first / weights).read_bytes() == (second / weights).read_bytes()


def test_the_figures_and_the_page_are_written(done: Done, found: dict[str, Any]) -> None:
    assert {path.name for path in done.out.iterdir()} == {"serial", "jigsaw", "compare.html", "compare.json"}
    written = json.loads((done.out / "compare.json").read_text())
    assert written | {"out": str(done.out)} == found
    page = (done.out / "compare.html").read_text()
    assert 'id="timeline-serial"' in page
    assert 'id="timeline-jigsaw"' in page


def test_the_report_of_each_agrees_with_the_table(done: Done, found: dict[str, Any]) -> None:
    for each in found["policies"]:
        made = run_report(done.out / each["policy"])
        for figure in ("seconds", "tokens", "tokens_per_second"):
            assert made.report.as_dict()[figure] == each[figure]
        for pipeline in made.report.pipelines:
            fate = each["pipelines"][pipeline.name]
            assert (pipeline.seconds, pipeline.tokens) == (fate["seconds"], fate["tokens"])
            assert (pipeline.reward_first, pipeline.reward_last) == (
                fate["reward_first"],
                fate["reward_last"],
            )
        assert made.log.setup == each["setup_seconds"] > 0


def test_one_that_fails_is_named_and_the_others_are_compared(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("score = None\nraise ValueError('no such answer')\n")
    (tmp_path / "data.jsonl").write_text(
        "".join(f'{{"prompt": "{n}=", "answer": "{n}"}}\n' for n in range(8))
    )
    reward = {"path": str(tmp_path / "rewards.py:score")}
    task = {"kind": "data", "path": str(tmp_path / "data.jsonl"), "reward": reward}
    small = {**SUMS, "steps": 1, "model": {"tiny": {**SUMS["model"]["tiny"], "warmup_steps": 0}}}
    done = compare(tmp_path, "--policies", "concurrent", a=small, b={**small, "task": task})
    assert done.code == 1, done.stderr
    page = " ".join(done.stdout.split())
    assert "vs concurrent" in page
    assert "concurrent: b failed: " in page
    assert "a 1/1 reward" in page
    (run,) = json.loads((done.out / "compare.json").read_text())["policies"]
    assert {name: one["ended"] for name, one in run["pipelines"].items()} == {"a": "finished", "b": "failed"}
