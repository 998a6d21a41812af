"""Ctrl-C once: steps are finished and saved. Twice: now. Nothing is left in either case."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from mixes import CALC, SUMS, Results, result, run_here, start, write_mix

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("group", [False, True], ids=["the command", "the whole process group"])
def test_ctrl_c_finishes_steps_saves_and_resume_goes_on(group: bool, alone: Results, tmp_path: Path) -> None:
    out = tmp_path / "out"
    mix = write_mix(tmp_path, "jigsaw", a=SUMS, b={**CALC, "checkpoint": {"every": 1000}})
    command = start(mix, out)
    command.wait_for_step("b", 1)
    command.signal(signal.SIGINT, group)
    code, pipelines = command.answer()
    assert code == 130
    assert pipelines["b"]["ended"] == "interrupted"
    (saved,) = (out / "b" / "checkpoints").iterdir()
    assert saved.name == f"step-{pipelines['b']['steps']:06d}"
    command.assert_nothing_is_left()
    run_here(mix, out, resume=True)
    assert {name: result(out / name) for name in "ab"} == alone


@pytest.mark.parametrize("moment", ["while processes are set up", "while a step is made"])
def test_ctrl_c_twice_ends_everything_at_once(moment: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    slow = {**CALC, "steps": 1000, "task": {**CALC["task"], "latency": 20.0}}
    command = start(write_mix(tmp_path, "concurrent", a={**SUMS, "steps": 1000}, b=slow), out)
    if moment == "while a step is made":
        command.wait_for_step("a", 1)
        command.signal(signal.SIGINT, group=True)
        command.wait_for(lambda: "stopping: " in command.said(), "an answer to the first Ctrl-C")
        command.signal(signal.SIGINT, group=True)
    else:
        command.wait_for(lambda: len(command.alive()) > 2, "a fork server")
        command.signal(signal.SIGINT, group=True)
        command.signal(signal.SIGTERM, group=True)  # counts the same; two SIGINT at once would be one
    pressed = time.monotonic()
    code, _, err = command.end(timeout=30)
    assert code == 130, err
    assert "stopped at once; go on with --resume" in err
    assert "Traceback" not in err
    assert time.monotonic() - pressed < 15
    command.assert_nothing_is_left()
