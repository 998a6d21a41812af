"""What is predicted of a pipeline follows what its phases turn out to be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from graph.planning import UNSEEN, WORKER, job

from jigsawrl.config import RunConfig
from jigsawrl.config.pipelines import PipelineConfig
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.interference import SIGNATURES
from jigsawrl.graph.outlook import Outlook
from jigsawrl.phases.ids import PhaseKind
from jigsawrl.runtime.first_outlook import first_outlook
from jigsawrl.scheduler.events import PhaseDone
from jigsawrl.scheduler.learning import BETWEEN_S, Learned, Seen

ENGINES = 2


def outlook(lengths: np.ndarray | None = None, slower: float = 1.0) -> Outlook:
    made = job("a", seed=1, sigma=0.5, slow=slower)
    costs = replace(made.costs, derived=True)
    forecast = made.forecast if lengths is None else Forecast.from_prior(lengths, made.shape.max_tokens)
    return Outlook(made.shape, costs, replace(WORKER, name="cpu"), forecast)


def at_work(known: Outlook, phase: PhaseKind) -> float:
    segments = known.engine(ENGINES, 1).segments if phase == "rollout" else known.training(ENGINES)
    return sum(each.seconds for each in segments if SIGNATURES[each.kind] not in ("host", "link"))


def step(truth: Outlook, lengths: np.ndarray, overhead: float) -> tuple[Seen, Seen]:
    """As a machine makes it for which `truth` holds."""
    busy = {phase: at_work(truth, phase) for phase in ("rollout", "training")}
    told = tuple(int(each) for each in lengths)
    rollout = PhaseDone("rollout", 1, (busy["rollout"],) * ENGINES, ENGINES, told)
    training = PhaseDone("training", 1, (busy["training"],) * ENGINES, ENGINES)
    return (
        Seen(rollout, busy["rollout"] + overhead, alone=True, by_turns=True),
        Seen(training, busy["training"] + overhead, alone=True, by_turns=True),
    )


def test_after_one_step_the_next_is_foreseen() -> None:
    """Lengths were four times as long as thought, and the machine half as fast: each is learned for itself."""
    lengths = np.ceil(job("a", seed=1, sigma=0.5).lengths(UNSEEN) * 4)[:128]
    truth = outlook(lengths, slower=2.0)
    learned = Learned(outlook())
    before = learned.outlook.solo_seconds(ENGINES)
    for seen in step(truth, lengths, overhead=0.25):
        assert learned.ended(seen, now=1.0)
    phases = ("rollout", "training")
    assert at_work(truth, "rollout") > 2 * at_work(outlook(), "rollout")
    for phase in phases:
        assert at_work(learned.outlook, phase) == pytest.approx(at_work(truth, phase), rel=0.25)
    assert learned.outlook.solo_seconds(ENGINES) > 1.5 * before
    assert learned.outlook.costs.rollout_fixed_seconds == pytest.approx(0.25)


def test_phases_that_follow_each_other_at_once_are_learned_from_together() -> None:
    lengths = np.full(64, 100.0)
    learned = Learned(outlook(lengths))
    first, _ = step(outlook(lengths), lengths, overhead=0.1)
    assert learned.ended(first, now=1.0)
    known = learned.outlook
    late = Seen(first.over, first.seconds + 1.0, alone=True)
    assert not learned.ended(late, now=1.0 + BETWEEN_S / 2)
    assert not learned.ended(first, now=1.0 + BETWEEN_S / 1.5)
    assert learned.outlook is known
    assert learned.ended(late, now=1.0 + BETWEEN_S)
    mean = 0.1 + 2 / 3
    assert learned.outlook.costs.rollout_fixed_seconds == pytest.approx((0.1 + mean) / 2)


def test_nothing_is_learned_of_a_training_without_anything_to_train_on() -> None:
    learned = Learned(outlook())
    known = learned.outlook
    empty = PhaseDone("training", 1, (1e-3,) * ENGINES, ENGINES, empty=True)
    assert learned.ended(Seen(empty, 1e-3, alone=True), now=1.0) is None
    assert learned.outlook is known
    _, training = step(outlook(slower=2.0), np.full(64, 100.0), overhead=0.1)
    assert learned.ended(training, now=1.0)  # the first that counts
    assert at_work(learned.outlook, "training") > 1.5 * at_work(known, "training")


def test_the_lengths_of_all_of_them_are_remembered() -> None:
    short, long = np.full(64, 100.0), np.full(64, 900.0)
    learned = Learned(outlook(short))
    steps = {tuple(each): step(outlook(each), each, overhead=0.1)[0] for each in (short, long)}
    learned.ended(steps[tuple(short)], now=1.0)
    for now in (1.1, 1.2, 1.0 + BETWEEN_S):
        learned.ended(steps[tuple(long if now < 1.2 else short)], now=now)
    workload = learned.workload()
    assert workload is not None
    assert [max(each) for each in workload.quantiles] == [100.0, 900.0, 100.0, 100.0]
    assert learned.outlook.forecast.quantiles().max() > 150


def test_one_slow_phase_among_many_is_no_new_truth() -> None:
    lengths = np.full(64, 100.0)
    truth = outlook(lengths)
    learned = Learned(outlook(lengths))
    rollout, _ = step(truth, lengths, overhead=0.0)
    for number in range(6):
        assert learned.ended(rollout, now=3 * BETWEEN_S * number)
    over = replace(rollout.over, step=7, busy=(50 * max(rollout.over.busy),) * 2)
    slow = Seen(over, 1e3, alone=False, by_turns=True)
    learned.ended(slow, now=3 * BETWEEN_S * 6)
    assert at_work(learned.outlook, "rollout") < 1.5 * at_work(truth, "rollout")
    assert learned.outlook.costs.errors["rollout"] > 0.3, "but it is distrusted"


def test_a_profile_foresees_by_all_steps_that_it_knows() -> None:
    """A first step without a long answer would make all of them seem short."""
    lengths = [np.full(64, 30.0), np.append(np.full(63, 30.0), 480.0)]
    learned = Learned(outlook(lengths[0]))
    for number, each in enumerate(lengths):
        learned.ended(step(outlook(each), each, overhead=0.0)[0], now=9.0 * number)
    run = RunConfig.model_validate({"task": {"kind": "arithmetic"}, "rollout": {"max_tokens": 512}})
    known = learned.workload()
    assert known is not None
    foreseen = first_outlook("a", run, PipelineConfig(run="a.yaml"), WORKER, 1, known).forecast.quantiles()
    assert 90 < foreseen.max() < 480
    assert foreseen[64] == pytest.approx(30)


def test_on_a_gpu_a_phase_beside_others_says_nothing_of_its_time_alone() -> None:
    lengths = np.full(64, 100.0)
    known = outlook(lengths)
    learned = Learned(Outlook(known.shape, known.costs, WORKER, known.forecast))
    rollout, _ = step(outlook(lengths, slower=3.0), lengths, overhead=0.0)
    rollout = replace(rollout, by_turns=False)
    learned.ended(replace(rollout, alone=False), now=1.0)
    assert at_work(learned.outlook, "rollout") == pytest.approx(at_work(known, "rollout"))
    learned.ended(rollout, now=9.0)
    assert at_work(learned.outlook, "rollout") > 1.5 * at_work(known, "rollout")


def test_a_gang_that_took_turns_on_one_worker_is_not_thought_to_have_waited() -> None:
    truth = outlook()
    on_one = sum(s.seconds for s in truth.training(1) if SIGNATURES[s.kind] not in ("host", "link"))
    learned = Learned(truth)
    over = PhaseDone("training", 1, (on_one / 2,) * 2, 1)
    assert learned.ended(Seen(over, on_one + 0.1, alone=True, by_turns=True, on_each=2), now=1.0)
    assert learned.outlook.costs.sync == pytest.approx(0.1)
    assert learned.outlook.training_seconds(1) - 0.1 == pytest.approx(on_one, rel=0.05)
