"""Room for pipelines' states on the workers: who is awake where, who must sleep, who had better wait. Pure.

It asks the world what runs. Workers that are alike have one `Memory` in common; those that only roll out have one
each, since a pipeline may keep to some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jigsawrl.graph.outlook import Outlook
from jigsawrl.policies.starts import engine_bytes, needs
from jigsawrl.policies.state import Phase, Place, Start, Swap
from jigsawrl.runtime.memory import Memory
from jigsawrl.runtime.world import World


@dataclass(slots=True)
class Rooms:
    world: World
    rollout_workers: int | None
    """The first ones, that only roll out; None: all do everything."""
    memories: tuple[Memory, ...] = field(init=False)
    coming: set[str] = field(default_factory=set)
    """Pipelines that have room, and are not set up yet: they cannot sleep."""

    def __post_init__(self) -> None:
        first, everyone = self.rollout_workers, self.world.workers
        kinds: list[tuple[Place, Phase | None]] = [(everyone, None)]
        if first is not None:
            kinds = [*(((each,), "rollout") for each in everyone[:first]), (everyone[first:], "training")]
        limit = self.world.device_bytes
        self.memories = tuple(Memory(limit, workers=each, phase=phase) for each, phase in kinds)

    def join(self, name: str, outlook: Outlook, rollout_home: Place) -> None:
        """Its state will need room."""
        for memory in self.memories:
            count = len(memory.workers)
            if memory.phase is None:
                memory.states[name] = outlook.memory(count, 1, count).awake
            elif memory.phase == "training":
                memory.states[name] = outlook.memory(count, 1, count).host
            elif not set(rollout_home).isdisjoint(memory.workers):
                memory.states[name] = engine_bytes(outlook, len(rollout_home), 1)

    def leave(self, name: str) -> None:
        """Its processes are gone."""
        self.coming.discard(name)
        for memory in self.memories:
            memory.forget(name)

    def of(self, name: str, phase: Phase | None = None) -> list[Memory]:
        """The memories that its state is in, or that of the actors of one phase."""
        return [
            memory
            for memory in self.memories
            if name in memory.states and (phase is None or memory.phase in (None, phase))
        ]

    def is_awake(self, name: str) -> bool:
        """Whether there is room for all of its state, and it has it."""
        return all(name in memory.awake for memory in self.of(name))

    def wakes(self, name: str, phase: Phase | None = None) -> None:
        for memory in self.of(name, phase):
            memory.wakes(name, self.world.lanes.now)

    def load(self, name: str) -> list[Swap]:
        """Gives room to one that is to be set up: who sleeps for it, and its coming. Nothing where there is none."""
        own = self.of(name)
        if any(self._in_the_way(memory, memory.states[name]) is None for memory in own):
            return []
        actions = [*self.sleep(name), Swap(name, out=False)]
        self.wakes(name)
        self.coming.add(name)
        return actions

    def sleep(self, newcomer: str | None = None) -> list[Swap]:
        """Those that do not run and are in the way, also of one that comes."""
        actions: list[Swap] = []
        for memory in self.memories:
            needed = memory.states.get(newcomer, 0.0) if newcomer else 0.0
            for name in self._in_the_way(memory, needed) or ():
                for each in self.of(name, memory.phase):
                    each.sleeps(name)
                actions.append(Swap(name, out=True, phase=memory.phase))
        return actions

    def later(self, starts: list[Start]) -> dict[str, float]:
        """Those of these starts for which others would have to sleep, where somebody else ends before that is done
        and leaves room enough; and until when each of them waits at most."""
        found: dict[str, float] = {}
        begun: list[Start] = []
        for start in starts:
            pipeline = self.world.pipelines[start.pipeline]
            for memory in self.of(pipeline.name, pipeline.phase):
                sleepers = self._in_the_way(memory, begun=[*begun, start])
                until = pipeline.since + memory.seconds(sleepers or ())
                if sleepers and self._comes_by_itself(memory, [*begun, start]) < until:
                    found[pipeline.name] = until
            if pipeline.name not in found:
                begun.append(start)
        return found

    def _comes_by_itself(self, memory: Memory, begun: list[Start]) -> float:
        """When somebody's phase should end after which nobody has to sleep for these."""
        lanes = self.world.lanes
        ends = [
            lanes.now + max(lanes.seconds_left(lanes.lanes[key]) for key in pipeline.lanes)
            for pipeline in self.world.pipelines.values()
            if pipeline.lanes and self._in_the_way(memory, begun=begun, ended=pipeline.name) == []
        ]
        return min(ends, default=float("inf"))

    def _in_the_way(
        self, memory: Memory, needed: float = 0.0, begun: Sequence[Start] = (), ended: str | None = None
    ) -> list[str] | None:
        """Who must sleep so that so many bytes are free, if these phases had begun and that pipeline's had ended;
        None: that would not be enough."""
        world = self.world
        running = {
            pipeline.name
            for pipeline in world.pipelines.values()
            if pipeline.status == "running" and memory.phase in (None, pipeline.phase)
        }
        running = running - {ended} | {start.pipeline for start in begun}
        holds = list(world.held)
        for start in begun:
            for worker in (worker for place in start.places for worker in place):
                holds[worker] += needs(world.pipelines[start.pipeline], start.places)
        for key in world.pipelines[ended].lanes if ended else ():
            for worker in world.lanes.lanes[key].workers:
                holds[worker] -= world.running[key].bytes
        held = max(holds[worker] for worker in memory.workers)
        if memory.phase == "rollout":  # some may roll out on other workers only, and are awake here too
            held = max(held, sum(memory.states.get(name, 0.0) for name in running))
        held += sum(memory.states.get(name, 0.0) for name in self.coming)
        return memory.to_sleep(running | self.coming, held, needed)
