"""What neighbours do to each other is learned from phases that really ran side by side, and from nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from graph.planning import UNSEEN, WORKER, job
from hypothesis import given
from hypothesis import strategies as st
from scheduler.hearing import hear

from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.interference import CORES, H200, Crowd, Interference, Occupant
from jigsawrl.graph.outlook import Outlook
from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.named import POLICIES
from jigsawrl.scheduler.colocation import Colocation, Followed, after
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import DriverBegan, PhaseDone

PAIR: Crowd = ("compute", ("compute",))
HALF = Occupant("compute", 0.5)
SEQUENCES = 128


def beside(table: Interference, seconds: float, crowd: Crowd = PAIR) -> Colocation:
    """A phase that spent so long in a crowd, on as large a share as all others."""
    share = 1 / (1 + len(crowd[1]))
    speed = table.speed(Occupant(crowd[0], share), [Occupant(each, share) for each in crowd[1]])
    return Colocation({crowd: seconds}, {crowd: seconds * speed})


@given(
    truth=st.floats(0.2, 1.7),
    together=st.floats(0.5, 1.0),
    noise=st.floats(0.0, 0.2),
    seed=st.integers(0, 1000),
)
def test_a_pair_is_learned_through_noise_from_phases_that_it_was_together_for_a_part_of(
    truth: float, together: float, noise: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    speed = min(1.0, H200.speed(HALF, [HALF]) * truth)
    table = H200
    for _ in range(100):
        took = float(rng.uniform(1, 10))
        alone = took * (together * speed + 1 - together) * float(rng.lognormal(0, noise))
        table = after(table, Followed(beside(table, together * took), took, took, alone))
        assert 0 < table.speed(HALF, [HALF]) <= 1
    assert abs(table.speed(HALF, [HALF]) - speed) < 0.02 + 0.5 * noise / together
    assert table.learned.keys() == {*H200.learned, PAIR}


@given(
    off=st.floats(-20, 20),
    took=st.floats(-1, 1e6),
    parts=st.lists(st.floats(1e-6, 1), min_size=1, max_size=3),
)
def test_no_phase_moves_a_speed_far_and_none_ever_beyond_its_bounds(
    off: float, took: float, parts: list[float]
) -> None:
    crowds: list[Crowd] = [PAIR, ("tail", ("compute",)), ("bulk", ("bulk", "tail"))]
    seconds = dict(zip(crowds, parts, strict=False))
    colocation = Colocation(seconds, {crowd: part / 2 for crowd, part in seconds.items()})
    table = after(H200, Followed(colocation, sum(parts), took, took * math.exp(off)))
    for felt in table.learned.values():
        assert 0.5 <= felt.factor <= 1.5


@pytest.mark.parametrize(("part", "times"), [(0.0, 0), (0.1, 0), (0.5, 1)])
def test_nothing_is_learned_from_a_phase_that_was_hardly_co_located(part: float, times: int) -> None:
    table = after(H200, Followed(beside(H200, part * 4.0), 4.0, 4.0, 1.0))
    assert len(table.learned) - len(H200.learned) == times
    assert (table is H200) == (times == 0)


def test_one_outlier_among_many_is_forgotten() -> None:
    table, speed = H200, H200.speed(HALF, [HALF])
    for _ in range(10):
        table = after(table, Followed(beside(table, 1.0), 1.0, 1.0, speed))
    table = after(table, Followed(beside(table, 1.0), 1.0, 1.0, 1e-3))
    assert table.speed(HALF, [HALF]) > 0.9 * speed


# A machine on which neighbours are as they are


def outlook(name: str, derived: bool = False) -> Outlook:
    made = job(name, seed=ord(name), sigma=0.5)
    costs = replace(made.costs, rollout_fixed_seconds=0.0, sync=0.0, derived=derived)
    lengths = np.sort(made.lengths(UNSEEN))
    lengths = lengths[:: max(1, len(lengths) // SEQUENCES)]
    return Outlook(made.shape, costs, WORKER, Forecast.from_prior(lengths, made.shape.max_tokens))


def lived(
    policy: str,
    factor: float,
    *,
    steps: int = 60,
    table: Interference = H200,
    units: int = 1,
    **known: Outlook,
) -> SchedulerCore:
    """Pipelines share one worker, where any two of them are `factor` times as fast as the table says."""
    rng = np.random.default_rng(0)
    made = SchedulerCore(POLICIES[policy], table, 1, WORKER.device_bytes, units)
    told = {name: tuple(map(int, each.forecast.quantiles())) for name, each in known.items()}
    for name, each in known.items():
        made.join(name, each)
        hear(made, name, DriverBegan(steps, 0))
    now, left, since = 0.0, dict[PhaseId, float](), dict[PhaseId, float]()
    while True:
        made.decide()
        running = made.state.running()
        if not running:
            return made
        for phase in running:
            if phase.id not in left:
                alone = known[phase.id.pipeline]
                whole = alone.rollout_seconds(1, 1) if phase.generates else alone.training_seconds(1)
                left[phase.id], since[phase.id] = whole * float(rng.lognormal(0, 0.1)), now
        speed = factor * table.speed(HALF, [HALF]) if len(running) > 1 else 1.0
        first = min(running, key=lambda phase: left[phase.id])
        now += left[first.id] / speed
        for phase in running:
            left[phase.id] -= left[first.id] if phase is not first else 0.0
        del left[first.id]
        name, took = first.id.pipeline, (now - since[first.id],)
        hear(made, name, PhaseDone(first.kind, first.index, took, 1, told[name]), at=now)


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5])
def test_a_run_learns_what_its_pipelines_do_to_each_other(factor: float) -> None:
    known = {"a": outlook("a"), "b": outlook("b")}
    now = lived("concurrent", factor, **known)
    table = now.followed_table()
    assert table.speed(HALF, [HALF]) == pytest.approx(factor * H200.speed(HALF, [HALF]), rel=0.15)
    assert now.state.lanes.table.speed(HALF, [HALF]) == pytest.approx(table.speed(HALF, [HALF]), rel=0.1)
    assert table.speed(HALF) == H200.speed(HALF)


def test_who_takes_turns_learns_nothing_of_neighbours() -> None:
    assert lived("serial", 0.5, a=outlook("a"), b=outlook("b")).followed_table() is H200


def test_without_knowing_what_phases_take_alone_nobody_is_blamed() -> None:
    known = {"a": outlook("a", derived=True), "b": outlook("b", derived=True)}
    assert lived("concurrent", 0.5, steps=10, **known).followed_table() is H200


def test_a_core_that_can_only_be_shared_by_turns_is_divided_as_arithmetic_has_it() -> None:
    known = {"a": outlook("a"), "b": outlook("b")}
    assert lived("concurrent", 0.7, steps=10, table=CORES, **known).followed_table() is CORES
    assert lived("concurrent", 0.7, steps=10, table=CORES, units=2, **known).followed_table().learned
