"""A program: one world and what happens to it, drawn from a seed. It can be written down, and shortened."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from typing import Any

from soak.core.kinds import GRAPHS, PREDICTED, predicted

from jigsawrl.phases.turns import ORDERS
from jigsawrl.policies.named import POLICIES
from jigsawrl.policies.starts import engine_bytes

Step = list[Any]
"""After how many events more, what happens, and to whom."""

ANYTHING = "anything"
"""A policy that does whatever it may."""
WEIGHTS = {
    ANYTHING: 24,
    "serial": 12,
    "concurrent": 12,
    "rollout-mux": 12,
    "rlix": 12,
    "rollmux": 12,
    "greedy": 12,
    "jigsaw": 12,
}
"""How often each policy is drawn."""
assert WEIGHTS.keys() == POLICIES.keys() | {ANYTHING}
FAULTS = {
    "die": 22,
    "hang": 9,
    "lose": 6,
    "return": 9,
    "pause": 6,
    "resume": 8,
    "cancel": 7,
    "jump": 6,
    "slow": 8,
    "twice": 12,
    "timer": 3,
    "reorder": 3,
}


@dataclass(frozen=True, slots=True)
class Program:
    seed: int
    """Of durations and delays."""
    policy: str
    table: str
    workers: int
    units: int
    rollout_workers: int | None
    device_bytes: float
    steps: list[Step]

    def written(self) -> str:
        """As JSON that a person can paste."""
        head = {key: value for key, value in asdict(self).items() if key != "steps"}
        steps = ",\n  ".join(json.dumps(step) for step in self.steps)
        return json.dumps(head)[:-1] + ', "steps": [\n  ' + steps + "\n]}\n"


def read_program(text: str) -> Program:
    return Program(**json.loads(text))


def draw_program(seed: int, policy: str | None = None) -> Program:
    draw = random.Random(seed)
    policy = policy or draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    table = draw.choice(["h200", "cores"])
    workers = draw.choice([1, 2, 2, 3, 4, 4, 6, 8])
    units = 1 if table == "cores" and draw.random() < 0.7 else draw.choice([4, 16])
    pools = draw.randint(1, workers - 1) if workers > 1 and draw.random() < 0.25 else None
    joins = [_join(draw, n, table, workers, pools) for n in range(draw.choice([1, 2, 2, 3, 3, 4, 5]))]
    tight = max(_most_bytes(join, table, workers, pools) for join in joins)
    budget = tight * draw.choice([1.0001, 1.0001, 1.1, 1.3, 1.6, 2.0, 100.0])
    return Program(seed, policy, table, workers, units, pools, budget, _steps(draw, joins, workers))


def _join(draw: random.Random, number: int, table: str, workers: int, pools: int | None) -> Step:
    for _ in range(100):
        kind = draw.randrange(PREDICTED)
        shape = predicted(kind, table).shape
        hurries = shape.deadline is not None or shape.max_slowdown is not None
        if shape.tp <= (pools or workers) and (not hurries or draw.random() < 0.3):
            break
    tp = shape.tp
    ranks = workers if draw.random() < 0.7 else tp * draw.randint(1, max(1, workers // tp))
    where = draw.choice([0, 0, draw.randrange(workers)])
    if pools is not None:
        ranks, where = tp * draw.randint(1, pools // tp), 0
    graph = draw.choice(["synchronous"] * 4 + list(GRAPHS))
    wrong = 2.0 ** draw.uniform(-5, 5) if draw.random() < 0.5 else 1.0
    learns = draw.random() < 0.25
    late = 0 if number == 0 or draw.random() < 0.6 else draw.randint(1, 40)
    return [late, "join", f"p{number}", kind, graph, draw.randint(1, 6), ranks, where, wrong, learns]


def _most_bytes(join: Step, table: str, workers: int, pools: int | None) -> float:
    """That any of its phases takes on a worker, wherever it runs."""
    known, ranks = predicted(join[3], table), join[6]
    tp, widths = known.shape.tp, range(1, workers + 1)
    if pools is not None:
        apart = [known.memory_trained(tp, width).training_apart for width in widths]
        return max([*apart, *(engine_bytes(known, width, tp) for width in widths)])
    rollouts = [known.memory(engines, tp, home).rollout for engines in widths for home in widths]
    trainings = [known.memory_trained(tp, width).training for width in widths]
    return max([*rollouts, *trainings, *(known.memory(ranks, 1, width).awake for width in widths)])


def _steps(draw: random.Random, joins: list[Step], workers: int) -> list[Step]:
    names = [join[2] for join in joins]
    calm = draw.choice([1, 3, 6])
    happens = [
        [draw.randint(0, 2 * calm), *_fault(draw, names, workers)]
        for _ in range(draw.choice([10, 40, 60, 90]))
    ]
    first = [join for join in joins if join[0] == 0]
    for join in joins:
        if join[0]:
            happens.insert(draw.randint(0, len(happens)), join)
    return [*first, *happens]


def _fault(draw: random.Random, names: list[str], workers: int) -> Step:
    what = draw.choices(list(FAULTS), list(FAULTS.values()))[0]
    name = draw.choice(names)
    match what:
        case "lose" | "return":
            return [what, draw.randrange(workers)]
        case "jump":
            return [what, draw.choice([-1, 1]) * 10.0 ** draw.uniform(-2, 4)]
        case "slow":
            return [what, name, 10.0 ** draw.uniform(-2, 2)]
        case "cancel" | "die":
            return [what, name, draw.random() < 0.5]
        case "timer":
            return [what]
        case "reorder":
            return [what, draw.choice(sorted(ORDERS))]
    return [what, name]
