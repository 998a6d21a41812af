"""What a run says where there is no terminal, before and while its first step is made."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import COLD, config, train

from jigsawrl.api import launch
from jigsawrl.errors import JigsawError
from jigsawrl.telemetry import heartbeat
from jigsawrl.telemetry.progress import Progress
from jigsawrl.underway import under_way


class Listening(Progress):
    """Keeps what the run says that it is at."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[tuple[int, str, int, int]] = []

    def doing(self, name: str, step: int, what: str, done: int = 0, of: int = 0) -> None:
        self.at.append((step, what, done, of))


TURNS = {"kind": "calculator", "max_number": 9, "size": 32, "latency": 0.0, "max_turns": 2}


@pytest.mark.parametrize("task", [{"kind": "arithmetic"}, TURNS])
def test_a_run_says_what_it_is_and_then_what_it_is_at_and_how_many_samples_are_done(
    task: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Listening() as progress:
        launch(config(steps=1, model=COLD, task=task), tmp_path / "run", False, progress)
    first, at = capsys.readouterr().out.splitlines()[0], progress.at
    assert first == f"test: a tiny model, task {task['kind']}, 1 step on 1 worker, into {tmp_path / 'run'}"
    assert at[0] == (0, "set-up", 0, 0)
    counts = [done for step, what, done, of in at if (step, what, of) == (1, "generation", 32)]
    assert counts == sorted(counts)
    assert counts[-1] == 32
    assert [what for _, what, _, _ in at if what != "generation"] == [
        "set-up",
        "advantages",
        "update",
        "weight sync",
        "checkpoints",
        "export",
    ]


def test_with_json_a_run_says_it_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BETWEEN_S", 0.0)
    with Progress(json=True) as progress:
        launch(config(steps=1, model=COLD), tmp_path / "run", False, progress)
        progress.doing("test", 1, "generation", 3, 32)
        progress.beat()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("test: a tiny model, task arithmetic, 1 step")
    assert "3 of 32 samples done" in err


def test_a_folder_that_a_process_is_at_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=1, model=COLD)
    with under_way(tmp_path / "run"), pytest.raises(JigsawError, match="runs what is in it; let it end"):
        launch(config(steps=2, model=COLD), tmp_path / "run", True, Progress())
    launch(config(steps=2, model=COLD), tmp_path / "run", True, Progress())
