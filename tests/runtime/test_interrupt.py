"""Ctrl-C once: steps are finished and saved. Twice: now. Nothing is left in either case."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from mixes import (
    CALC,
    SUMS,
    Results,
    assert_figures_agree,
    assert_nothing_is_left,
    result,
    run_here,
    start,
    write_mix,
)

from jigsawrl.cli_runs import as_dict
from jigsawrl.telemetry.logreader import read_run

pytestmark = pytest.mark.slow

RARELY_SAVED = {**CALC, "checkpoint": {"every": 1000}}


def press(times: int) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_finishes_steps_saves_and_resume_goes_on(alone: Results, tmp_path: Path) -> None:
    out = tmp_path / "out"
    mix = write_mix(tmp_path, "jigsaw", prompt=True, a=SUMS, b=RARELY_SAVED)
    _, b = run_here(mix, out, lambda name, step: press((name, step) == ("b", 1))).pipelines
    assert (b.how, b.reason) == ("interrupted", f"stopped after step {b.steps}; go on with --resume")
    (saved,) = (out / "b" / "checkpoints").iterdir()
    assert saved.name == f"step-{b.steps:06d}"
    assert_nothing_is_left(out)
    assert_figures_agree(out, as_dict(run_here(mix, out, resume=True)))
    assert {name: result(out / name) for name in "ab"} == alone


def test_ctrl_c_in_a_terminal_reaches_all_processes_and_does_the_same(alone: Results, tmp_path: Path) -> None:
    out = tmp_path / "out"
    slow = {**RARELY_SAVED, "task": {**CALC["task"], "latency": 1.0}}
    command = start(write_mix(tmp_path, "rlix", a=SUMS, b=slow), out)
    command.wait_for_step("b", 1)
    command.signal(signal.SIGINT, group=True)
    code, pipelines = command.answer()
    assert (code, pipelines["b"]["ended"]) == (130, "interrupted")
    command.assert_nothing_is_left()
    run_here(write_mix(tmp_path, "rlix", a=SUMS, b=RARELY_SAVED), out, resume=True)
    assert {name: result(out / name) for name in "ab"} == alone


def test_ctrl_c_twice_ends_everything_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    slow = {**CALC, "task": {**CALC["task"], "latency": 60.0}}
    mix = write_mix(tmp_path, "concurrent", a={**SUMS, "steps": 1000}, b=slow)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="stopped at once; go on with --resume"):
        run_here(mix, out, lambda name, step: press(2))
    assert time.monotonic() - began < 30  # the tools take longer
    assert {(one.event, one.failure) for one in read_run(out).incidents} == {("interrupted", False)}
    assert_nothing_is_left(out)


def test_ctrl_c_twice_ends_everything_while_processes_are_set_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = start(write_mix(tmp_path, "concurrent", a=SUMS, b=CALC), out)
    command.wait_for(lambda: len(command.alive()) > 2, "a fork server")
    command.signal(signal.SIGINT, group=True)
    command.signal(signal.SIGTERM, group=True)  # counts the same; two SIGINT at once would be one
    code, _, err = command.end(timeout=30)
    assert code == 130, err
    assert "go on with --resume" in err or "goes on with --resume" in err  # before there is a scheduler
    assert "jigsaw: \n" not in err
    assert "Traceback" not in err
    command.assert_nothing_is_left()
