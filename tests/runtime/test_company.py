"""What neighbours do to each other is learned from phases that really ran side by side, and from nothing else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph.planning import UNSEEN, WORKER, job
from hypothesis import given
from hypothesis import strategies as st
from mixes import SUMS, Watching, write_mix

from jigsawrl.config.pipelines import load_mix
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.interference import CORES, H200, Crowd, Interference, Occupant
from jigsawrl.graph.outlook import Outlook
from jigsawrl.graph.profile import load_profile
from jigsawrl.policies.named import POLICIES
from jigsawrl.runtime import learning, mind
from jigsawrl.runtime.company import Company, Stretch, after
from jigsawrl.runtime.launch import run_mix
from jigsawrl.runtime.messages import Began, Over
from jigsawrl.runtime.mind import Mind
from jigsawrl.runtime.replay import replayed
from jigsawrl.simulator.from_config import scene_of

PAIR: Crowd = ("compute", ("compute",))
HALF = Occupant("compute", 0.5)
SEQUENCES = 128


def beside(table: Interference, seconds: float, crowd: Crowd = PAIR) -> Company:
    """A phase that spent so long in a crowd, on as large a share as all others."""
    share = 1 / (1 + len(crowd[1]))
    speed = table.speed(Occupant(crowd[0], share), [Occupant(each, share) for each in crowd[1]])
    return Company({crowd: Stretch(seconds, seconds * speed)})


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
        table = after(table, beside(table, together * took), took, took, alone)
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
    company = Company({crowd: Stretch(part, part / 2) for crowd, part in zip(crowds, parts, strict=False)})
    table = after(H200, company, sum(parts), took, took * math.exp(off))
    for felt in table.learned.values():
        assert 0.5 <= felt.factor <= 1.5


@pytest.mark.parametrize(("part", "times"), [(0.0, 0), (0.1, 0), (0.5, 1)])
def test_who_was_hardly_in_company_learns_nothing_from_it(part: float, times: int) -> None:
    table = after(H200, beside(H200, part * 4.0), 4.0, 4.0, 1.0)
    assert len(table.learned) - len(H200.learned) == times
    assert (table is H200) == (times == 0)


def test_one_outlier_among_many_is_forgotten() -> None:
    table, speed = H200, H200.speed(HALF, [HALF])
    for _ in range(10):
        table = after(table, beside(table, 1.0), 1.0, 1.0, speed)
    table = after(table, beside(table, 1.0), 1.0, 1.0, 1e-3)
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
) -> Mind:
    """Pipelines share one worker, where any two of them are `factor` times as fast as the table says."""
    rng = np.random.default_rng(0)
    made = Mind(POLICIES[policy], table, 1, WORKER.device_bytes, units)
    told = {name: tuple(map(int, each.forecast.quantiles())) for name, each in known.items()}
    for name, each in known.items():
        made.join(name, each)
        made.hear(name, Began(steps, 0))
    now, left, since = 0.0, dict[str, float](), dict[str, float]()
    while True:
        made.decide()
        running = [p for p in made.world.pipelines.values() if p.status == "running"]
        if not running:
            return made
        for pipeline in running:
            if pipeline.name not in left:
                alone = known[pipeline.name]
                whole = (
                    alone.rollout_seconds(1, 1) if pipeline.phase == "rollout" else alone.training_seconds(1)
                )
                left[pipeline.name], since[pipeline.name] = whole * float(rng.lognormal(0, 0.1)), now
        speed = factor * table.speed(HALF, [HALF]) if len(running) > 1 else 1.0
        first = min(running, key=lambda p: left[p.name])
        now += left[first.name] / speed
        for pipeline in running:
            left[pipeline.name] -= left[first.name] if pipeline is not first else 0.0
        del left[first.name]
        took = (now - since[first.name],)
        made.world.advance(now)
        made.hear(first.name, Over(first.phase, first.step, took, 1, told[first.name]))


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5])
def test_a_run_learns_what_its_pipelines_do_to_each_other(factor: float) -> None:
    known = {"a": outlook("a"), "b": outlook("b")}
    now = lived("concurrent", factor, **known)
    table = now.followed_table()
    assert table.speed(HALF, [HALF]) == pytest.approx(factor * H200.speed(HALF, [HALF]), rel=0.15)
    assert now.world.lanes.table.speed(HALF, [HALF]) == pytest.approx(table.speed(HALF, [HALF]), rel=0.1)
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


# A machine as it is


def shared(folder: Path, out: str, policy: str, profile: Path | None = None) -> Path:
    """Two pipelines on one worker of all cores; the profile that came of it."""
    large: dict[str, Any] = {
        **SUMS,
        "model": {"tiny": {**SUMS["model"]["tiny"], "warmup_steps": 1}},
        "rollout": {**SUMS["rollout"], "prompts_per_step": 32, "samples": 8},
    }
    file = write_mix(folder, policy, a=large, b=large)
    known = {"profile": str(profile)} if profile is not None else {}
    file.write_text(json.dumps({**json.loads(file.read_text()), "workers": 1, **known}))
    bases = folder / "alone" if profile is not None else None
    outcome = run_mix(load_mix(file), folder / out, False, Watching(), bases)
    assert {each.how for each in outcome.pipelines} == {"finished"}
    return folder / out / "profile.json"


@pytest.mark.slow
@pytest.mark.alone
def test_what_a_run_learned_of_sharing_is_saved_with_it_and_the_next_one_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread each they do not need the half of the cores that they leave to each other."""
    for module in (learning, mind):  # the phases here are short
        monkeypatch.setattr(module, "BETWEEN_S", 0.0)
    alone = shared(tmp_path, "alone", "serial")
    assert load_profile(alone).interference is None
    first = shared(tmp_path, "first", "concurrent", alone)
    learned = load_profile(first).interference
    assert learned is not None
    assert learned.name == CORES.name
    assert learned.learned[PAIR].times > 1
    assert learned.speed(HALF, [HALF]) > 0.7
    assert scene_of(load_mix(tmp_path / "mix.yaml", [f"profile={first}"])).table == learned
    again = shared(tmp_path, "again", "concurrent", first)
    more = load_profile(again).interference
    assert more is not None
    assert more.learned[PAIR].times > learned.learned[PAIR].times + 1
    for run in (first, again):
        decisions = list(replayed(run.parent))
        assert len(decisions) > 10
        assert all(decision.same for decision in decisions)
