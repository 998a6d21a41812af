"""Talking to a run that is under way."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mixes import assert_figures_agree

from jigsawrl.errors import JigsawError
from jigsawrl.runtime import control
from jigsawrl.runtime.control import Control, ask
from jigsawrl.telemetry.logreader import read_run
from jigsawrl.underway import under_way

SUMS = """
steps: {steps}
threads: 1
model: {{tiny: {{layers: 2, hidden: 64, heads: 4, kv_heads: 2, warmup_steps: 40, warmup_noise: 0.3}}}}
task: {{kind: arithmetic, max_number: 6, size: 49}}
rollout: {{prompts_per_step: 8, samples: 4, max_tokens: 6}}
trainer: {{lr: 1.0e-3}}
telemetry: {{tensorboard: false}}
"""


def jigsaw(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jigsawrl", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def events(run: Path) -> list[dict]:
    path = run / "events.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def until(found, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.slow
def test_a_pipeline_joins_another_is_paused_resumed_and_cancelled(tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text(SUMS.format(steps=5000))
    (tmp_path / "short.yaml").write_text(SUMS.format(steps=3))
    (tmp_path / "mix.yaml").write_text("workers: 1\npipelines:\n  long: {run: long.yaml}\n")
    run = tmp_path / "out"
    command = [sys.executable, "-m", "jigsawrl", "run", "mix.yaml", "--out", "out", "--json"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        until(lambda: any(e["event"] == "step" for e in events(run)))
        assert jigsaw(tmp_path, "pause", "out", "long").returncode == 0
        submitted = jigsaw(tmp_path, "submit", "out", "short.yaml")
        assert "short: to come" in submitted.stdout
        (tmp_path / "gpu.yaml").write_text(SUMS.format(steps=3) + "device: cuda\n")
        elsewhere = jigsaw(tmp_path, "submit", "out", "gpu.yaml")
        assert elsewhere.returncode == 2
        assert "are cores; set device: cpu or auto" in elsewhere.stderr
        again = jigsaw(tmp_path, "submit", "out", "short.yaml")
        assert again.returncode == 0
        assert "short was submitted before, and is there already; nothing is changed" in again.stdout
        other = jigsaw(tmp_path, "submit", "out", "short.yaml", "--steps", "4")
        assert other.returncode == 2
        assert "there is a pipeline short already" in other.stderr
        until(lambda: any(e["event"] == "finished" and e["pipeline"] == "short" for e in events(run)))
        paused = next(e["t"] for e in events(run) if e["event"] == "pause")
        meanwhile = [
            e
            for e in events(run)
            if e["event"] == "predicted" and e["pipeline"] == "long" and e["t"] > paused
        ]
        assert not meanwhile  # no phase of it began
        assert "long: under way" in jigsaw(tmp_path, "resume", "out", "long").stdout
        resumed = [e["t"] for e in events(run) if e["event"] == "resume"][-1]
        until(lambda: any(e["event"] == "step" and e["t"] > resumed for e in events(run)))
        assert jigsaw(tmp_path, "cancel", "out", "nobody").returncode == 2
        assert jigsaw(tmp_path, "cancel", "out", "long").returncode == 0
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert_figures_agree(run, json.loads(output))
    assert read_run(run).incidents == []  # all of it was its user's will
    result = json.loads(output)["pipelines"]
    assert result["long"]["ended"] == "cancelled"
    assert result["short"]["ended"] == "finished"
    assert result["short"]["steps"] == 3
    assert "has ended" in jigsaw(tmp_path, "pause", "out", "long").stderr
    # What was submitted belongs to the run from now on.
    resumed_run = jigsaw(
        tmp_path, "run", "mix.yaml", "pipelines.long.steps=5000", "--out", "out", "--resume", "--dry-run"
    )
    assert resumed_run.returncode == 0
    assert json.loads((run / "submitted.json").read_text())["short"]["priority"] == 0


def test_nonsense_is_answered_and_forgotten(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(SEVERAL)

    def answer(request: dict) -> dict:
        if request["do"] == "refuse":
            raise JigsawError("no")
        return {"pipelines": {}, "echo": request["do"]}

    with Control(tmp_path, answer):
        assert ask(tmp_path, do="hello")["echo"] == "hello"
        with pytest.raises(JigsawError, match="no"):
            ask(tmp_path, do="refuse")
        with pytest.raises(JigsawError, match="not understood"):
            ask(tmp_path, what="else")
    with pytest.raises(JigsawError, match="has ended; nothing to talk to"):
        ask(tmp_path, do="hello")
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(JigsawError, match="neither a run of several pipelines nor a cluster"):
        ask(tmp_path, do="hello")


ONE = "task: {kind: arithmetic}\n"
SEVERAL = "workers: 1\npipelines:\n  long: {run: long.yaml}\n"


def said_of(run: Path, do: str = "pause") -> str:
    with pytest.raises(JigsawError) as raised:
        ask(run, do=do, pipeline="sums")
    return str(raised.value).removeprefix(f"{run}: ")


def test_a_run_of_one_pipeline_says_so_and_what_to_do_and_that_it_has_ended_only_when_it_has(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.yaml").write_text(ONE)
    stop = "Ctrl-C where it was started ends it after its step, and 'jigsaw run FILE --resume' goes on from there"
    hint = "\n(a run whose file has `pipelines` can be told more while it runs)"
    with under_way(tmp_path):
        assert {
            do: said_of(tmp_path, do).removesuffix(hint) for do in ("pause", "resume", "cancel", "submit")
        } == {
            "pause": f"has one pipeline and cannot be paused; {stop}",
            "resume": "has one pipeline, which is under way and not paused",
            "cancel": f"has one pipeline and cannot be cancelled from here; {stop}",
            "submit": "has one pipeline and takes no other; start a run of its own for what you submit",
        }
    assert said_of(tmp_path) == "has ended; nothing to talk to"


def test_a_run_of_several_that_is_being_set_up_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "START_S", 0.1)
    (tmp_path / "config.yaml").write_text(SEVERAL)
    with under_way(tmp_path):
        assert said_of(tmp_path) == "is still being set up; try again in a moment"
        (tmp_path / "control.json").write_text(json.dumps({"socket": "jigsawrl-nobody", "pid": 1}))
        assert said_of(tmp_path) == "is still being set up; try again in a moment"
    assert said_of(tmp_path) == "was killed; nothing to talk to. It goes on with --resume"
    (tmp_path / "control.json").unlink()
    assert said_of(tmp_path) == "has ended; nothing to talk to"


def test_the_folder_of_one_pipeline_of_a_run_names_that_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(SEVERAL)
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "config.yaml").write_text(ONE)
    with under_way(tmp_path):
        assert (
            said_of(tmp_path / "long") == f"is one pipeline of a run; name the folder of the run: {tmp_path}"
        )


def test_a_run_that_was_killed_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "control.json").write_text(json.dumps({"socket": "jigsawrl-nobody", "pid": 1}))
    with pytest.raises(JigsawError, match="--resume"):
        ask(tmp_path, do="hello")
