"""The quickstart's task: one-line sums such as `7+5=`, rewarded for exactly the right number."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.pipeline.tasks.base import JSON, ListedTask, Prompt, RewardSpec

OPERATIONS = ("+", "-", "*")
_LARGEST = 10**9


@dataclass(frozen=True, slots=True)
class Problem:
    left: int
    operation: str
    right: int

    @property
    def expression(self) -> str:
        return f"{self.left}{self.operation}{self.right}"

    @property
    def answer(self) -> int:
        if self.operation == "+":
            return self.left + self.right
        if self.operation == "-":
            return self.left - self.right
        return self.left * self.right


def draw_problems(max_number: int, operations: Collection[str], size: int, seed: int) -> list[Problem]:
    """`size` problems over the numbers 0 to max_number; none comes twice before all there are have come once."""
    chosen = [operation for operation in OPERATIONS if operation in operations]
    if not chosen or not 0 <= max_number <= _LARGEST:
        raise JigsawError(
            f"task: needs operations among {' '.join(OPERATIONS)} and max_number from 0 to {_LARGEST}"
        )
    numbers = max_number + 1
    there_are = numbers * numbers * len(chosen)
    drawn = random.Random(seed).sample(range(there_are), min(size, there_are))
    problems = []
    for position in range(size):
        pair, operation = divmod(drawn[position % len(drawn)], len(chosen))
        left, right = divmod(pair, numbers)
        problems.append(Problem(left, chosen[operation], right))
    return problems


def load(config: Any, seed: int) -> ListedTask:
    """Prompt `7+5=`, answer `12`."""
    problems = draw_problems(config.max_number, config.operations, config.size, seed)
    prompts = [
        Prompt(index, f"{problem.expression}=", None, str(problem.answer), "arithmetic", {})
        for index, problem in enumerate(problems)
    ]
    reward = RewardSpec(f"{__name__}:exact_match", {}, timeout=30.0, on_error="stop", processes=1)
    return ListedTask(prompts, reward=reward, demonstrate=lambda prompt: str(prompt.ground_truth))


def exact_match(data_source: str, solution_str: str, ground_truth: str, extra_info: JSON = None) -> float:
    """1 for the ground truth and nothing else (space around it does not count), 0 otherwise."""
    return float(solution_str.strip() == ground_truth)
