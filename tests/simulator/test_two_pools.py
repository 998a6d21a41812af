"""Two pools in the simulator: each phase on its workers under every policy that takes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graph.planning import WORKER, job

from jigsawrl.graph.interference import CORES, H200
from jigsawrl.phases.rounds import Turn, round_seconds
from jigsawrl.policies.named import POLICIES
from jigsawrl.simulator.simulation import Failure, Simulation
from jigsawrl.telemetry.timeline import read_spans

ROLLOUT, TRAINING = {0, 1}, {2, 3}
TRAINS = ("reward", "logprob", "grad", "optim", "sync")


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "rlix"])
@pytest.mark.parametrize("table", [CORES, H200])
@pytest.mark.parametrize("pin", [None, (0,), (1,)])
def test_every_phase_keeps_to_its_pool(policy: str, table: object, pin: tuple[int, ...] | None) -> None:
    jobs = [job(name, seed=ord(name), steps=3) for name in "abc"]
    jobs[1] = replace(jobs[1], rollout_workers=pin)
    lost = [Failure(0, 20.0, 40.0), Failure(3, 60.0, 80.0)]
    simulation = Simulation(POLICIES[policy], jobs, WORKER, 4, table, rollout_workers=2, failures=lost)  # type: ignore[arg-type]
    outcome = simulation.run()
    assert len(outcome.finished) == 3
    for span in read_spans(outcome.log):
        if span.substage in ("prefill", "decode", "tail"):
            assert set(span.workers) <= (set(pin) if pin and span.pipeline == "b" else ROLLOUT)
        elif span.substage in ("logprob", "grad", "optim"):
            assert set(span.workers) <= TRAINING


def test_a_group_in_turns_takes_as_long_as_its_rounds() -> None:
    """Of jobs that are alike, and whose samples are as long as one thinks."""
    steps = 10
    jobs = [job(name, steps=steps, sigma=0.0) for name in "ab"]
    simulation = Simulation(POLICIES["rollmux"], jobs, WORKER, 2, CORES, rollout_workers=1)
    seconds = simulation.run().seconds
    pipeline = simulation.core.state.pipelines["a"]
    rollout, training = pipeline.rollout_seconds(), pipeline.training_seconds()
    turn = Turn("", rollout, rollout, training, 0.0, rollout + training, float("inf"))
    each = round_seconds([turn, turn], [(0,), (0,)], shared=False)
    assert seconds == pytest.approx(steps * each + min(rollout, training), rel=0.1)
