"""Small scheduling problems whose optimum CP-SAT can prove, and which the simulator plays by the same rules.

A phase runs on any number of workers, for a time that depends on how many: a fixed part and a part that they divide.
It holds memory on each of them, and whatever fits in memory runs side by side at full speed. So a schedule is a set
of workers and a start for every phase, phases of a pipeline one after the other, and on every worker at no time more
memory than it has. Times are whole seconds and memory is whole units in both models, so the two agree to the last
digit. Pausing or resizing a lane could not help here, and there is no tail to move.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from jigsawrl.graph.cost import Costs, DecodeCost, LinearCost
from jigsawrl.graph.forecast import Forecast
from jigsawrl.graph.hardware import Hardware
from jigsawrl.graph.interference import Curve, Interference, Signature
from jigsawrl.graph.memory import ACTIVATIONS_NOW
from jigsawrl.graph.shape import ModelShape, PipelineShape
from jigsawrl.policies.starts import needs
from jigsawrl.policies.state import Action, Change, PhaseKind, Place, Start, State, Wait
from jigsawrl.simulator.jobs import Job

UNIT = 8192 * ACTIVATIONS_NOW
"""Bytes; the activations of a training step with one hidden unit and no layers."""
MEMORY = 1000
"""Units of each worker."""
SEQUENCES = 12
"""Of a rollout: dealt out evenly to one, two, three or four engines."""
TOKENS = 100
"""Of every response."""
STATE_BYTES = 16
"""Of a parameter's gradient and optimizer."""

_LEVEL: Curve = ((0.0, 1.0), (1.0, 1.0))
_KINDS: tuple[Signature, ...] = ("tail", "bulk", "compute", "link")
FREE = Interference(
    name="free",
    source="by construction: nothing slows anything down",
    alone=dict.fromkeys(_KINDS, _LEVEL),
    beside={(a, b): _LEVEL for a in _KINDS for b in _KINDS},
)
WORKER = Hardware(
    "small worker",
    flops=1e15,
    memory_bandwidth=1e12,
    device_bytes=float(MEMORY * UNIT),
    host_bytes=1e15,
    link_bandwidth=1e30,
    host_bandwidth=1e30,
    network_bandwidth=1e30,
    price=1.0,
    source="made up",
)


@dataclass(frozen=True, slots=True)
class Work:
    """A phase: whole seconds that are fixed and that workers divide, and units of memory on each of them."""

    fixed: int
    divided: int
    memory: int
    memory_divided: int = 0

    def seconds(self, workers: int) -> int:
        return self.fixed + self.divided // workers

    def units(self, workers: int) -> int:
        return self.memory + self.memory_divided // workers


@dataclass(frozen=True, slots=True)
class Task:
    """A pipeline of `steps` equal steps."""

    name: str
    steps: int
    rollout: Work
    training: Work
    parameter_bytes: int

    def work(self, phase: PhaseKind) -> Work:
        return self.rollout if phase == "rollout" else self.training

    def job(self) -> Job:
        """The same for the simulator; what is foreseen is what happens."""
        weights = self.rollout.memory * UNIT
        model = ModelShape(
            self.name, weights / self.parameter_bytes, 0, self.training.memory, 1, 1, self.parameter_bytes
        )
        nothing = LinearCost(0.0, 0.0, 0.0)
        costs = Costs(
            model=model,
            hardware=WORKER,
            gpus=1,
            tp=1,
            decoding=DecodeCost(0.0, self.rollout.divided / (SEQUENCES * TOKENS), 0.0),
            prefilling=nothing,
            logprob=nothing,
            ref=nothing,
            grad=LinearCost(self.training.fixed, self.training.divided / (SEQUENCES * TOKENS), 0.0),
            optim=0.0,
            sync=0.0,
            rollout_fixed_seconds=self.rollout.fixed,
        )
        shape = PipelineShape(
            self.name, model, SEQUENCES, 1, 0.0, TOKENS, steps=self.steps, old_logprobs=False
        )
        lengths = np.full(SEQUENCES, float(TOKENS))
        return Job(shape, costs, lambda step: lengths, Forecast.from_prior(lengths, shape.max_tokens))


@dataclass(frozen=True, slots=True)
class Instance:
    seed: int
    workers: int
    tasks: tuple[Task, ...]


def draw(seed: int) -> Instance:
    """2 to 4 pipelines of 1 to 3 steps on 2 to 4 workers."""
    rng = random.Random(seed)
    workers = rng.randint(2, 4)
    tasks: list[Task] = []
    pipelines = rng.randint(2, 4)
    while len(tasks) < pipelines:
        weights, parameter_bytes = 12 * rng.randint(8, 50), rng.choice((2, 8, 16))
        rollout = Work(rng.randint(0, 20), 12 * rng.randint(1, 10), weights)
        state = weights * (parameter_bytes + STATE_BYTES) // parameter_bytes
        training = Work(rng.randint(0, 10), 12 * rng.randint(1, 10), rng.randint(20, 400), state)
        if training.units(workers) <= MEMORY:
            tasks.append(Task("abcd"[len(tasks)], rng.randint(1, 3), rollout, training, parameter_bytes))
    return Instance(seed, workers, tuple(tasks))


@dataclass(frozen=True, slots=True)
class Piece:
    """A phase of a schedule."""

    pipeline: str
    step: int
    phase: PhaseKind
    start: int
    seconds: int
    workers: Place


@dataclass(frozen=True, slots=True)
class Optimum:
    seconds: int
    proven: bool
    bound: float
    pieces: tuple[Piece, ...]


def solve(instance: Instance, limit: float, below: int, threads: int = 1) -> Optimum | None:
    """The shortest schedule, knowing one that takes `below` seconds; None if not even that was found in time."""
    model = cp_model.CpModel()
    horizon = below
    end = model.new_int_var(0, horizon, "end")
    on_worker: list[list[tuple[cp_model.IntervalVar, int]]] = [[] for _ in range(instance.workers)]
    spans: list[
        tuple[str, int, PhaseKind, cp_model.IntVar, list[cp_model.IntVar], list[cp_model.IntVar]]
    ] = []
    energy, alone = [], []
    for task in instance.tasks:
        before: cp_model.IntVar | int = 0
        for step in range(1, task.steps + 1):
            for phase in PHASES:
                work = task.work(phase)
                start = model.new_int_var(0, horizon, "")
                stop = model.new_int_var(0, horizon, "")
                model.add(start >= before)
                uses = [model.new_bool_var("") for _ in range(instance.workers)]
                widths = [model.new_bool_var("") for _ in range(instance.workers)]
                model.add_exactly_one(widths)
                model.add(sum(uses) == sum((n + 1) * widths[n] for n in range(instance.workers)))
                for n, chosen in enumerate(widths):
                    seconds, units = work.seconds(n + 1), work.units(n + 1)
                    if units > MEMORY:
                        model.add(chosen == 0)
                        continue
                    model.add(stop == start + seconds).only_enforce_if(chosen)
                    energy.append((n + 1) * seconds * units * chosen)
                    if 2 * units > MEMORY:
                        alone.append((n + 1) * seconds * chosen)
                    here_all = []
                    for worker, used in enumerate(uses):
                        here = model.new_bool_var("")
                        model.add_bool_and(chosen, used).only_enforce_if(here)
                        model.add_bool_or(~chosen, ~used, here)
                        span = model.new_optional_interval_var(start, seconds, stop, here, "")
                        on_worker[worker].append((span, units))
                        here_all.append(here)
                    model.add(sum(here_all) == n + 1).only_enforce_if(chosen)
                spans.append((task.name, step, phase, start, uses, widths))
                before = stop
        model.add(end >= before)
    for found in on_worker:
        model.add_cumulative([span for span, _ in found], [units for _, units in found], MEMORY)
    model.add(sum(energy) <= end * MEMORY * instance.workers)  # follows, and helps to prove
    model.add(sum(alone) <= end * instance.workers)
    first = spans[0][4]
    for left, right in itertools.pairwise(first):  # workers are all alike
        model.add_implication(right, left)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit
    solver.parameters.num_workers = threads
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    pieces = []
    for name, step, phase, start, uses, _ in spans:
        workers = tuple(worker for worker, used in enumerate(uses) if solver.value(used))
        task = next(task for task in instance.tasks if task.name == name)
        seconds = task.work(phase).seconds(len(workers))
        pieces.append(Piece(name, step, phase, solver.value(start), seconds, workers))
    return Optimum(
        round(solver.objective_value),
        status == cp_model.OPTIMAL,
        solver.best_objective_bound,
        tuple(sorted(pieces, key=lambda piece: (piece.start, piece.pipeline))),
    )


PHASES: tuple[PhaseKind, PhaseKind] = ("rollout", "training")


class Replay:
    """A policy that plays a schedule: if the simulator ends when the schedule does, the two models agree."""

    name = "replay"

    def __init__(self, optimum: Optimum) -> None:
        self.pieces = {(p.pipeline, p.step, p.phase): p for p in optimum.pieces}

    def decide(self, state: State, changes: list[Change]) -> list[Action]:
        actions: list[Action] = []
        held = list(state.held)
        for phase in state.ready():
            piece = self.pieces[phase.id.pipeline, phase.index, phase.kind]
            if piece.start > state.now + 1e-6:
                actions.append(Wait(float(piece.start)))
                continue
            places = (piece.workers,) if piece.phase == "training" else tuple((w,) for w in piece.workers)
            for worker in piece.workers:
                held[worker] += needs(phase, places)
            if all(held[worker] <= state.device_bytes for worker in piece.workers):
                actions.append(Start(phase.id, places, 1 / len(state.pipelines)))
        return actions
