"""Room for pipelines' states on the workers: whose is awake where, whose must sleep, which phase had better wait.
Pure.

Actors of a pipeline are alike on all workers, so one number speaks for each of them. A running phase counts with all
that it needs, a pipeline that only waits with its state; the states that have waited longest go to sleep first.
Workers that are alike have one `Memory` in common; those that only generate have one each, since a pipeline may keep
to some of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jigsawrl.graph.outlook import Outlook
from jigsawrl.phases.ids import PhaseKind
from jigsawrl.policies.starts import covered_bytes, engine_bytes
from jigsawrl.policies.state import Action, Migrate, Phase, Place, Start, Swap
from jigsawrl.scheduler.state import SchedulerState

FIRST_SWAP_BYTES_S, SWAP_BYTES_S = 5e9, 40e9
"""Bytes of a state that fall asleep and wake up again in a second: the first time, when the store's pages have to be
made and pinned, and from then on (of a 1.5B model on an H200, 36 GB with its cache, in 7 s and in 0.9 s)."""


@dataclass(slots=True)
class Memory:
    """The memory of workers that are alike, and the states in it."""

    limit: float
    """Bytes that a worker has."""
    workers: Place
    kind: str | None = None
    """`rollout` or `training` where its workers only generate or only train; None: they do both."""
    states: dict[str, float] = field(default_factory=dict)
    """Bytes of each pipeline's state, awake."""
    awake: dict[str, None] = field(default_factory=dict)
    """Pipelines whose state is awake; the one that last ran, or was set up, the longest ago comes first."""
    slept: set[str] = field(default_factory=set)
    """Pipelines whose state has been asleep before."""

    def holds(self, generates: bool) -> bool:
        """Whether phases that generate, or that do not, run on its workers."""
        return self.kind is None or (self.kind == "rollout") == generates

    def wakes(self, name: str) -> None:
        """Notes that the pipeline runs, or is set up."""
        self.awake.pop(name, None)
        self.awake[name] = None

    def sleeps(self, name: str) -> None:
        self.awake.pop(name, None)
        self.slept.add(name)

    def swap_seconds(self, names: Iterable[str]) -> float:
        """Seconds that these states take to fall asleep and to wake up again."""
        return sum(
            self.states[name] / (SWAP_BYTES_S if name in self.slept else FIRST_SWAP_BYTES_S) for name in names
        )

    def to_sleep(self, running: set[str], held: float, needed: float = 0.0) -> list[str] | None:
        """Which of the states that do not run must sleep, so that `needed` bytes fit beside what runs and holds
        `held`.

        None: it does not fit even then.
        """
        idle = [name for name in self.awake if name not in running]
        for count in range(len(idle) + 1):
            if held + needed + sum(self.states[name] for name in idle[count:]) <= self.limit:
                return idle[:count]
        return None


class MemoryAdmission:
    """Decides which pipelines' states get room."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        kinds: list[tuple[Place, str | None]] = [(state.workers, None)]
        if state.apart:
            generate = [((each,), "rollout") for each in state.layout.rollout]
            kinds = [*generate, (state.layout.training, "training")]
        self.memories = tuple(Memory(state.device_bytes, workers, kind) for workers, kind in kinds)
        self.loading: list[str] = []
        """Pipelines that wait for room to be set up."""
        self.coming: set[str] = set()
        """Pipelines that have room and are not set up yet: their state cannot sleep."""
        self.swapping: set[tuple[str, PhaseKind | None]] = set()
        """States on their way to sleep: no phase takes their room before they are there."""

    def join(self, name: str, outlook: Outlook, rollout_home: Place) -> None:
        """The pipeline's state will need room. Where a state is sharded over all workers, its phases load and unload
        it themselves."""
        for memory in self.memories:
            count = len(memory.workers)
            if not outlook.shape.whole:
                memory.states[name] = 0.0
            elif memory.kind is None:
                memory.states[name] = outlook.memory(count, 1, count).awake
            elif memory.kind == "training":
                memory.states[name] = outlook.memory(count, 1, count).host
            elif not set(rollout_home).isdisjoint(memory.workers):
                memory.states[name] = engine_bytes(outlook, len(rollout_home), 1)

    def leave(self, name: str) -> None:
        """The pipeline's processes are gone."""
        self.coming.discard(name)
        self.loading = [each for each in self.loading if each != name]
        self.swapping = {each for each in self.swapping if each[0] != name}
        for memory in self.memories:
            memory.awake.pop(name, None)
            memory.slept.discard(name)

    def of(self, name: str) -> list[Memory]:
        """The memories that the pipeline's state is in."""
        return [memory for memory in self.memories if name in memory.states]

    def of_phase(self, phase: Phase) -> list[Memory]:
        """The memories that its pipeline's state is in while this phase runs."""
        return [memory for memory in self.of(phase.pipeline.name) if memory.holds(phase.generates)]

    def is_awake(self, name: str) -> bool:
        """Whether there is room for all of its state, and it has it."""
        return all(name in memory.awake for memory in self.of(name))

    def wakes(self, phase: Phase) -> None:
        """Notes that the phase runs now."""
        for memory in self.of_phase(phase):
            memory.wakes(phase.pipeline.name)

    def load(self) -> list[Swap]:
        """Gives room to pipelines that are to be set up, in turn: returns which states sleep for them, and their own
        loading; nothing where there is no room."""
        actions: list[Swap] = []
        while self.loading:
            name, own = self.loading[0], self.of(self.loading[0])
            if any(self.in_the_way(memory, memory.states[name]) is None for memory in own):
                break
            actions += [*self.sleep(name), Swap(name, out=False)]
            for memory in own:
                memory.wakes(name)
            self.coming.add(name)
            self.loading.pop(0)
        return actions

    def sleep(self, newcomer: str = "") -> list[Swap]:
        """Puts states to sleep that do not run and are in the way, also in that of a newcomer."""
        actions: list[Swap] = []
        for memory in self.memories:
            for name in self.in_the_way(memory, memory.states.get(newcomer, 0.0)) or ():
                for each in self.of(name):
                    if each.kind == memory.kind:
                        each.sleeps(name)
                self.swapping.add((name, memory.kind))
                actions.append(Swap(name, out=True, phase=memory.kind))
        return actions

    def later(self, actions: list[Action]) -> dict[str, float]:
        """Pipelines that had better wait with what they start or move, and until when each of them does at most.

        Others' states would have to sleep for them, and some phase ends before that is done and leaves room enough;
        or even that is not enough, since other states are coming: until infinity, for something is heard before.
        """
        found: dict[str, float] = {}
        begun: list[Start | Migrate] = []
        for move in [action for action in actions if isinstance(action, Migrate)]:
            if self._moves_at_once([*begun, move], move):
                begun.append(move)
            else:
                found[move.pipeline] = float("inf")
        for start in [action for action in actions if isinstance(action, Start)]:
            phase = self.state.phase(start.phase)
            for memory in self.of_phase(phase):
                sleepers = self.in_the_way(memory, begun=[*begun, start])
                if sleepers is None:
                    found[start.pipeline] = float("inf")
                    break
                until = phase.since + memory.swap_seconds(sleepers)
                if sleepers and self._comes_by_itself(memory, [*begun, start]) < until:
                    found[start.pipeline] = until
            if start.pipeline not in found:
                begun.append(start)
        return found

    def has_room_for_more(self, starts: list[Start]) -> bool:
        """Whether no state is in the way of what these permits may cover besides the phases that they start."""
        pipelines = self.state.pipelines
        more = sum(
            max(0.0, covered_bytes(pipelines[start.pipeline], start) - self.state.bytes_for(start))
            for start in starts
            if start.auto_continue
        )
        return more == 0 or all(self.in_the_way(memory, more, starts) == [] for memory in self.memories)

    def _moves_at_once(self, begun: list[Start | Migrate], move: Migrate) -> bool:
        """Whether there is room where a tail goes: it does not wait until states are asleep."""
        for memory in self.of(move.pipeline):
            falling = sum(memory.states.get(name, 0.0) for name, kind in self.swapping if kind == memory.kind)
            if memory.holds(generates=True) and self.in_the_way(memory, falling, begun) != []:
                return False
        return True

    def _comes_by_itself(self, memory: Memory, begun: list[Start | Migrate]) -> float:
        """When a phase should end after which no state has to sleep for these."""
        lanes = self.state.lanes
        ends = [
            lanes.now + max(lanes.seconds_left(lanes.lanes[key]) for key in phase.lanes)
            for phase in self.state.running()
            if phase.lanes and self.in_the_way(memory, begun=begun, ended=phase) == []
        ]
        return min(ends, default=float("inf"))

    def in_the_way(
        self,
        memory: Memory,
        needed: float = 0.0,
        begun: Sequence[Start | Migrate] = (),
        ended: Phase | None = None,
    ) -> list[str] | None:
        """Which pipelines' states must sleep so that `needed` bytes are free, if the phases of `begun` had begun or
        moved and `ended` had ended; None: that would not be enough."""
        state = self.state
        on: dict[str, set[int]] = {name: set() for name in self.coming}
        held, gone = list(state.held), set(ended.lanes if ended else ())
        gone.update(key for move in begun if isinstance(move, Migrate) for key in state.leaves(move))
        for phase in state.running():
            stays = [key for key in phase.lanes if key not in gone]
            if stays and memory.holds(phase.generates):
                workers = [state.lanes.lanes[key].workers for key in stays]
                on.setdefault(phase.id.pipeline, set()).update(*workers)
        for move in begun:
            generates = isinstance(move, Migrate) or state.phase(move.phase).generates
            if memory.holds(generates):
                on.setdefault(move.pipeline, set()).update(move.workers)
            more = state.bytes_for(move)
            for worker in move.workers:
                held[worker] += more
        for key in gone:
            for worker in state.lanes.lanes[key].workers:
                held[worker] -= state.uses[key].bytes
        for name, there in on.items():  # it is awake where it does not run too
            size = memory.states.get(name, 0.0)
            for worker in set(memory.workers) - there if size else ():
                held[worker] += size
        return memory.to_sleep(set(on), max(held[worker] for worker in memory.workers), needed)
