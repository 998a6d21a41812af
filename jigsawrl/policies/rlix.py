"""RLix: stages by priority on one shared pool; training first, rollouts give way and share what is left.

A training takes its whole home and pauses the engines there. Free engines go to the rollout that lags most behind
its part: parts are in proportion to what remains of each (the gap ratio). A worker runs one thing at a time.
"""

from __future__ import annotations

from jigsawrl.policies.starts import bytes_for, in_engines, start_on
from jigsawrl.policies.state import Action, Event, Pause, Pipeline, Resume, Start, State


class Rlix:
    name = "rlix"

    def decide(self, state: State, events: list[Event]) -> list[Action]:
        training = [p for p in state.pipelines.values() if p.phase == "training"]
        if any(p.status == "running" for p in training):
            return []
        waiting = sorted((p for p in training if p.status == "ready"), key=lambda p: (p.since, p.name))
        start = start_on(state, waiting[0], waiting[0].home) if waiting else None
        if start is not None:
            running = [lane for lane in state.lanes.lanes.values() if not lane.paused]
            return [*(Pause(lane.id) for lane in running), start]
        actions: list[Action] = [Resume(lane.id) for lane in state.lanes.lanes.values() if lane.paused]
        # A training that finds no memory waits for the rollouts that hold it; no new ones until then.
        return actions if waiting else [*actions, *self._rollouts(state)]

    def _rollouts(self, state: State) -> list[Start]:
        """Hands the free engines to the waiting rollouts, each its part and at least one."""
        waiting = [p for p in state.ready() if p.phase == "rollout"]
        free = [
            worker for worker, lanes in enumerate(state.lanes.on_worker) if not lanes and state.alive[worker]
        ]
        starts: list[Start] = []
        while waiting and free:
            pipeline = max(waiting, key=lambda p: (self._work(p), p.name))
            part = self._work(pipeline) / sum(map(self._work, waiting))
            engines = in_engines([worker for worker in free if worker in pipeline.home], pipeline.tp)
            if not engines:
                waiting.remove(pipeline)
                continue
            count = max(1, round(part * len(engines)))
            places = engines[:count]
            waiting.remove(pipeline)
            needed = bytes_for(pipeline, "rollout", count, pipeline.tp)
            if all(state.fits(place, needed) for place in places):
                starts.append(Start(pipeline.name, places))
                taken = {worker for place in places for worker in place}
                free = [worker for worker in free if worker not in taken]
        return starts

    def _work(self, pipeline: Pipeline) -> float:
        """Worker-seconds of its rollout."""
        return pipeline.outlook.rollout_seconds(1, pipeline.tp) * pipeline.tp
