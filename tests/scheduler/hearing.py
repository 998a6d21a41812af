"""A scheduler core that is told what drivers would tell it."""

from __future__ import annotations

from jigsawrl.phases.ids import PhaseId
from jigsawrl.policies.state import Phase
from jigsawrl.scheduler.core import SchedulerCore
from jigsawrl.scheduler.events import DriverBegan, LoadRequest, SchedulerEvent


def hear(core: SchedulerCore, name: str, *events: SchedulerEvent, at: float | None = None) -> None:
    """Nothing is decided yet."""
    core.hear(core.state.lanes.now if at is None else at, [(name, event) for event in events])


def set_up(core: SchedulerCore, steps: int, *names: str) -> None:
    """Pipelines that have joined are set up, one after the other."""
    for name in names:
        core.handle(core.state.lanes.now, [(name, LoadRequest())])
        hear(core, name, DriverBegan(steps, 0))


def phase(core: SchedulerCore, name: str, kind: str, step: int) -> Phase:
    return core.state.phase(PhaseId(name, kind, step))


def runs(core: SchedulerCore, name: str) -> tuple[str, int] | None:
    """Kind and step of the phase that a pipeline runs."""
    pipeline = core.state.pipelines.get(name)
    return next(((each.kind, each.index) for each in pipeline.running), None) if pipeline else None
