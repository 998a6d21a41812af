"""What a pipeline's processes were told to run is not what those after a death were told."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

from scheduler.hearing import set_up
from scheduler.test_core import OUTLOOKS, STEPS

from jigsawrl.graph.interference import CORES
from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.named import POLICIES
from jigsawrl.runtime.scheduler import Scheduler
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import DriverBegan, Heard, PhaseDone, PipelineLost


def test_last_words_of_a_dead_driver_that_went_on_by_itself_do_not_count_for_the_next() -> None:
    for lost in (False, True):
        core = SchedulerCore(POLICIES["jigsaw"], CORES, 1, 1e12)
        for name in "bc":
            core.join(name, OUTLOOKS[name])
        set_up(core, STEPS, "b", "c")
        core.decide()
        for phase in core.permitted():
            phase.permitted = True
        members = {name: SimpleNamespace(paused=set()) for name in "bc"}
        scheduler = MagicMock(members=members, core=core)
        last_words: list[Heard] = [("c", PhaseDone("rollout", 1, (0.1,), 1, (100,) * 8, went_on=0.0))]
        scheduler.events = [*last_words, ("c", PipelineLost())] if lost else last_words
        Scheduler._decide(scheduler)
        told = {phase.id for phase in core.state.pipelines["c"].phases.values() if phase.permitted}
        assert told == {PhaseId("c", "training", 1)}
        core.handle(1.0, [("c", DriverBegan(STEPS, 0))])
        now = {phase.id for phase in core.permitted() if phase.permitted and phase.pipeline.name == "c"}
        assert now == (set() if lost else told)
