"""A fit warns of logs that say what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from verl_logs import COMMAND, log, step

from jigsawrl.graph.fit import fit_traces
from jigsawrl.graph.hardware import hardware_named
from jigsawrl.graph.traces import Trace
from jigsawrl.graph.verl_trace import read_verl_log
from jigsawrl.simulator.fitted import believed, judge
from jigsawrl.simulator.plausible import doubts


def trace(folder: Path, *lines: str) -> Trace:
    (found,) = read_verl_log(log(folder, COMMAND, *lines))
    return found


def warnings(found: Trace, hardware: str = "h100") -> tuple[str, ...]:
    (fitted,) = judge(fit_traces([found], "p", "test", hardware), [found], True)
    return fitted.warnings


def test_a_plausible_log_is_fitted_without_a_warning(tmp_path):
    found = trace(tmp_path, *(step(number) for number in range(1, 5)))
    assert warnings(found) == ()
    assert believed(found, "h100", False) == "read 4 of 4 steps, 1,024 sequences, tp 4, 8 GPUs, h100 assumed"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gen": 2.0, "step": 70.0}, "timing_s/gen is 2 s"),
        ({"update_actor": 0.5, "step": 94.0}, "timing_s/update_actor is 0.5 s"),
        ({"ref": 0.1, "step": 110.9}, "timing_s/ref is 0.1 s"),
        ({"step": 70.0}, "do they overlap"),
        ({"step": 300.0}, "belong to no stage"),
    ],
)
def test_seconds_that_cannot_be_are_warned_of(tmp_path, changed, said):
    found = trace(tmp_path, *(step(number, **changed) for number in range(1, 5)))
    assert any(said in each for each in warnings(found))


def test_a_fit_that_is_far_off_is_warned_of(tmp_path):
    gens = (59.0, 20.0, 130.0, 22.0, 120.0, 21.0)
    found = trace(tmp_path, *(step(at, gen=gen, step=70 + gen) for at, gen in enumerate(gens, 1)))
    assert any("fit of rollout is" in each and "off on average" in each for each in warnings(found))
    errors = {"rollout": 2.79, "update": 0.24}
    said = [each for each in doubts(found, hardware_named("h100"), errors) if "off on average" in each]
    assert said == ["the fit of rollout is 279% off on average; do not plan with it"]


def test_few_steps_are_warned_of(tmp_path):
    assert any("only 1 usable step;" in each for each in warnings(trace(tmp_path, step(1))))
    assert any("only 2 usable steps;" in each for each in warnings(trace(tmp_path, step(1), step(2))))


def test_gpus_that_settings_and_throughput_tell_otherwise_are_warned_of(tmp_path):
    (found,) = read_verl_log(
        log(tmp_path, COMMAND.replace("nnodes=1", "nnodes=2"), *(step(number) for number in (1, 2, 3)))
    )
    assert found.gpus == 16
    assert any("perf/throughput says 8" in each for each in warnings(found))
