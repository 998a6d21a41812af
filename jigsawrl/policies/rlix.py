"""RLix: stages by priority on one shared pool; training first, rollouts give way and share what is left.

A training takes its whole home and pauses the engines there. Free engines go to the rollout that lags most behind
its part: parts are in proportion to what remains of each (the gap ratio). A worker runs one thing at a time.
"""

from __future__ import annotations

from jigsawrl.policies.starts import in_engines, start_on
from jigsawrl.policies.state import Action, Change, Pause, Pipeline, Resume, Start, State


class Rlix:
    name = "rlix"

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        if any(not phase.generates for phase in state.running()):
            return []
        waiting = [phase for phase in state.ready() if not phase.generates]
        start = start_on(state, waiting[0], waiting[0].home) if waiting else None
        if start is not None:
            running = [lane for lane in state.lanes.lanes.values() if not lane.paused]
            return [*(Pause(lane.id) for lane in running), start]
        actions: list[Action] = [Resume(lane.id) for lane in state.lanes.lanes.values() if lane.paused]
        # A training that finds no memory waits for the rollouts that hold it; no new ones until then.
        return actions if waiting else [*actions, *self._rollouts(state)]

    def _rollouts(self, state: State) -> list[Start]:
        """Hands the free engines to the waiting rollouts, each its part and at least one."""
        waiting = [phase for phase in state.ready() if phase.generates]
        free = [worker for worker, lanes in enumerate(state.lanes.on_worker) if not lanes]
        starts: list[Start] = []
        while waiting and free:
            phase = max(waiting, key=lambda each: (_work(each.pipeline), each.id))
            part = _work(phase.pipeline) / sum(_work(each.pipeline) for each in waiting)
            waiting.remove(phase)
            engines = in_engines([worker for worker in free if worker in phase.home], phase.pipeline.tp)
            count = max(1, round(part * len(engines)))
            start = start_on(state, phase, [worker for place in engines[:count] for worker in place])
            if start is not None:
                starts.append(start)
                free = [worker for worker in free if worker not in start.workers]
        return starts


def _work(pipeline: Pipeline) -> float:
    """Worker-seconds of its rollout."""
    return pipeline.outlook.rollout_seconds(1, pipeline.tp) * pipeline.tp
