import json
import math
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jigsawrl.errors import JigsawError
from jigsawrl.telemetry.metrics import Metrics


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard itself shows."""
    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def log_steps(folder: Path, first: int, last: int, value: float, resume_step: int | None) -> None:
    with Metrics(folder, resume_step=resume_step) as metrics:
        for step in range(first, last + 1):
            metrics.log(step, {"reward/mean": value})


def test_a_step_is_in_the_files_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.log(
        1, {"reward/mean": 0.5, "perf/tokens": 12, "actor/loss": torch.tensor(0.25), "x": np.float32(2)}
    )
    assert lines(tmp_path) == [
        {"step": 1, "reward/mean": 0.5, "perf/tokens": 12, "actor/loss": 0.25, "x": 2.0}
    ]
    assert scalars(tmp_path, "reward/mean") == [(1, 0.5)]
    assert scalars(tmp_path, "perf/tokens") == [(1, 12.0)]


def test_resuming_removes_what_comes_after_the_checkpoint_everywhere(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, 7, 0.25, None)
    log_steps(tmp_path, 5, 6, 0.5, resume_step=4)
    log_steps(tmp_path, 6, 8, 0.75, resume_step=5)
    expected = [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.25), (5, 0.5), (6, 0.75), (7, 0.75), (8, 0.75)]
    assert [(line["step"], line["reward/mean"]) for line in lines(tmp_path)] == expected
    assert scalars(tmp_path, "reward/mean") == expected


def test_starting_anew_forgets_an_earlier_attempt(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 3, 0.25, None)
    log_steps(tmp_path, 0, 1, 0.5, None)
    assert [(line["step"], line["reward/mean"]) for line in lines(tmp_path)] == [(0, 0.5), (1, 0.5)]
    assert scalars(tmp_path, "reward/mean") == [(0, 0.5), (1, 0.5)]


def test_resuming_after_the_last_line_rewrites_nothing(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, 3, 0.25, None)
    before = os.stat(tmp_path / "metrics.jsonl").st_ino
    log_steps(tmp_path, 4, 4, 0.5, resume_step=3)
    assert os.stat(tmp_path / "metrics.jsonl").st_ino == before
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(0, 6), cut=st.integers(0, 40), resume=st.none() | st.integers(0, 8))
def test_what_is_left_after_any_kill_and_resume_is_whole_and_in_order(
    tmp_path: Path, count: int, cut: int, resume: int | None
) -> None:
    written = b"".join(b'{"step":%d,"reward/mean":0.5}\n' % step for step in range(1, count + 1))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(written[: max(0, len(written) - cut)])
    whole = len([line for line in path.read_bytes().split(b"\n") if line.endswith(b"}")])
    Metrics(tmp_path, tensorboard=False, resume_step=resume).close()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, min(whole, resume or 0) + 1))
    assert not path.read_bytes() or path.read_bytes().endswith(b"\n")
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_numbers_that_are_not_finite_stay_valid_json_and_visible(tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        metrics.log(1, {"actor/loss": math.nan, "actor/kl": -math.inf, "reward/mean": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line == {
        "step": 1,
        "actor/loss": None,
        "actor/kl": None,
        "reward/mean": 0.5,
        "non_finite": {"actor/loss": "nan", "actor/kl": "-inf"},
    }
    [(step, value)] = scalars(tmp_path, "actor/loss")
    assert step == 1
    assert math.isnan(value)


# Imports once, then forks a writer for each number on its input: the step to resume from.
WRITER = """
import os, sys
from pathlib import Path
import jigsawrl.telemetry.tensorboard
from jigsawrl.telemetry.metrics import Metrics
for line in iter(sys.stdin.readline, ""):
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        os.write(1, b"dead\\n")
        continue
    step = int(line)
    metrics = Metrics(Path(sys.argv[1]), resume_step=step)
    os.write(1, b"%d\\n" % os.getpid())
    while True:
        step += 1
        metrics.log(step, {f"figure/{i}": step + 0.5 for i in range(30)})
        os.write(1, b"%d\\n" % step)
os._exit(0)
"""


def test_killed_and_resumed_again_and_again_every_step_is_there_once(tmp_path: Path) -> None:
    resume = 0
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        for finished in (3, 40, 1, 17):
            print(resume, file=writers.stdin, flush=True)
            pid = int(writers.stdout.readline())
            for _ in range(finished):
                step = int(writers.stdout.readline())
            os.kill(pid, signal.SIGKILL)
            while (line := writers.stdout.readline()) != "dead\n":
                assert line, "the writers are gone"
            resume = step - 1
        writers.stdin.close()
    Metrics(tmp_path, resume_step=resume).close()
    expected = [(step, step + 0.5) for step in range(1, resume + 1)]
    assert [(line["step"], line["figure/7"]) for line in lines(tmp_path)] == expected
    assert scalars(tmp_path, "figure/7") == expected


def test_wandb_without_its_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(JigsawError, match=r'pip install "jigsawrl\[wandb\]"'):
        Metrics(tmp_path, tensorboard=False, wandb={"project": "p"})


class FakeWandb(types.ModuleType):
    """Records what the real package would be told."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []

    def init(self, **options: Any) -> "FakeWandb":
        if options["project"] == "forbidden":
            raise self.Error("no API key")
        self.calls.append(("init", options))
        return self

    def define_metric(self, name: str, **options: Any) -> None:
        self.calls.append(("define_metric", (name, options)))

    def log(self, values: dict[str, float]) -> None:
        self.calls.append(("log", values))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_a_resumed_run_goes_on_with_its_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for resume_step in (None, 1, None):
        with Metrics(tmp_path, tensorboard=False, wandb={"project": "p"}, resume_step=resume_step) as metrics:
            metrics.log(2, {"reward/mean": 0.5})
    inits = [options for call, options in wandb.calls if call == "init"]
    first, resumed, anew = (options["id"] for options in inits)
    assert first == resumed != anew
    assert inits[0] == {
        "dir": str(tmp_path),
        "id": first,
        "name": tmp_path.name,
        "project": "p",
        "resume": "allow",
    }
    assert wandb.calls[1:5] == [
        ("define_metric", ("step", {})),
        ("define_metric", ("*", {"step_metric": "step"})),
        ("log", {"step": 2, "reward/mean": 0.5}),
        ("finish", None),
    ]


def test_wandb_that_does_not_start_is_an_error_for_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    with pytest.raises(JigsawError, match=r"no API key\n.*WANDB_MODE=offline"):
        Metrics(tmp_path, tensorboard=False, wandb={"project": "forbidden"})


def test_tensorboard_without_its_package_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jigsawrl.telemetry.tensorboard", None)
    with pytest.raises(JigsawError, match="pip install tensorboardX"):
        Metrics(tmp_path)
