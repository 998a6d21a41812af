"""The reward of reasoning-gym's tasks. The package, slow to import, comes with this module and not with a call."""

import functools
import json
import re
from typing import Any

import reasoning_gym  # noqa: F401

from jigsawrl.pipeline.tasks.base import JSON
from jigsawrl.pipeline.tasks.reasoning_gym import create, unpack

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(
    data_source: str,
    solution_str: str,
    ground_truth: JSON,
    extra_info: JSON,
    name: str,
    params: dict[str, JSON],
) -> float:
    """The package's score, 0 to 1, of the last <answer>...</answer>, or without one of the whole text, stripped."""
    answers = _ANSWER.findall(solution_str)
    answer = (answers[-1] if answers else solution_str).strip()
    scorer = _scorer(name, json.dumps(params, sort_keys=True))
    return float(scorer.score_answer(answer, unpack(extra_info["entry"])))


@functools.cache
def _scorer(name: str, params: str) -> Any:
    return create(name, json.loads(params), size=1, seed=0)
