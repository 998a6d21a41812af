"""Reward functions, in either of the two signatures that people have, run in processes of their own.

    compute_score(data_source, solution_str, ground_truth, extra_info, **params) -> number, None or dict with "score"
    reward_func(prompts, completions, **columns, **params) -> list of numbers, any of them None

They are told apart by their parameter names; either may be async. The first is called for one answer at a time,
the second for all answers to one prompt.

None in the place of a number says that the reward does not apply to the answer, as in TRL: its sample is left out of
all that is learned and of the metrics of the reward. It is not a 0, and not an error. An answer that the token limit
has cut off is scored like any other, by what there is of it.

A number must be finite and fit into float32, the type that rewards are computed in; any other value is an error of
its sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import FLOAT32_MAX, shown, without_surrogates
from jigsawrl.pipeline.sandbox import Failure, Sandbox, Signature, then
from jigsawrl.pipeline.tasks.base import Prompt, RewardSpec

MAX_EXTRAS = 256
"""Numbers beside its score that one answer may have, and that become metrics of one step."""
MAX_EXTRA_NAME = 100


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one answer: None where it does not apply, 0 with an `error` where it could not be had.

    `extra` holds the other finite numbers of a dict, which become metrics.
    """

    value: float | None
    error: str | None = None
    extra: dict[str, float] = field(default_factory=dict)


class Rewards:
    """Scores answers; always in the order they were given, whichever is ready first.

    What a failing answer gives is the spec's `on_error`: a score of 0 with the error, or a JigsawError for the group.
    """

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        self._sandbox = Sandbox(spec.target, spec.params, processes=spec.processes, timeout=spec.timeout)
        self._signature: Signature | None = None

    def check(self) -> None:
        """Waits until the function is loaded; JigsawError where it cannot be, or has neither signature."""
        self._checked()

    def submit(self, prompt: Prompt, completions: Sequence[str]) -> Future[list[Score]]:
        """Scores the answers to one prompt. JigsawError at once where the function wants a column there is not."""
        signature = self._checked()
        if "solution_str" in signature.parameters:
            calls = [self._passed(signature, _verl_arguments(prompt, text)) for text in completions]
            return then(
                self._sandbox.map(calls), lambda results: self._decided([read_score(r) for r in results])
            )
        passed = self._passed(signature, _trl_arguments(prompt, completions))
        call = self._sandbox.call(None, passed)
        return then(call, lambda result: self._decided(read_scores(result, len(completions))))

    def uncontained(self) -> str | None:
        """Why user code runs in no PID namespace, or None where it runs in one."""
        return self._sandbox.uncontained()

    def close(self) -> None:
        self._sandbox.close()

    def _checked(self) -> Signature:
        if self._signature is None:
            signature = self._sandbox.check()
            if not {"solution_str", "completions"} & set(signature.parameters):
                raise JigsawError(
                    f"reward {self._spec.target} takes ({', '.join(signature.parameters)}); it must be one of\n"
                    "compute_score(data_source, solution_str, ground_truth, extra_info=None)\n"
                    "reward_func(prompts, completions, **columns)"
                )
            self._signature = signature
        return self._signature

    def _passed(self, signature: Signature, arguments: dict[str, Any]) -> dict[str, Any]:
        """What the function has a parameter for; what the run file sets in `params` goes before the columns."""
        missing = set(signature.required) - arguments.keys() - self._spec.params.keys()
        if missing:
            raise JigsawError(
                f"reward {self._spec.target} wants {', '.join(sorted(missing))}, which the data does not have\n"
                f"It can have: {', '.join(sorted(arguments))}; or set it in the reward's params"
            )
        return {
            name: value
            for name, value in arguments.items()
            if (signature.any_keyword or name in signature.parameters) and name not in self._spec.params
        }

    def _decided(self, scores: list[Score]) -> list[Score]:
        errors = [score.error for score in scores if score.error is not None]
        if errors and self._spec.on_error == "stop":
            raise JigsawError(f"reward {self._spec.target} failed: {errors[0]}")
        return scores


def _verl_arguments(prompt: Prompt, text: str) -> dict[str, Any]:
    """verl's `extra_info` column where the data has one, else all columns."""
    return {
        "data_source": prompt.data_source,
        "solution_str": text,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra.get("extra_info", prompt.extra),
    }


def _trl_arguments(prompt: Prompt, completions: Sequence[str]) -> dict[str, Any]:
    """Every column as a list; for a chat prompt, prompts and completions are lists of messages."""
    columns = {"ground_truth": prompt.ground_truth, "data_source": prompt.data_source} | prompt.extra
    arguments: dict[str, Any] = {name: [value] * len(completions) for name, value in columns.items()}
    if prompt.messages is None:
        return arguments | {"prompts": [prompt.text] * len(completions), "completions": list(completions)}
    answers = [[{"role": "assistant", "content": text}] for text in completions]
    return arguments | {"prompts": [prompt.messages] * len(completions), "completions": answers}


def read_score(result: Any) -> Score:
    """One result of the first signature."""
    if isinstance(result, Failure):
        return _failed(result)
    if not isinstance(result, dict):
        return _number_score(result, {})
    if "score" not in result:
        return Score(0.0, f"returned a dict without 'score': {shown(result)}")
    extra = {name: value for name, value in result.items() if name != "score" and is_finite(value)}
    if (problem := _extra_problem(extra)) is not None:
        return Score(0.0, problem)
    return _number_score(result["score"], {name: float(value) for name, value in extra.items()})


def read_scores(result: Any, count: int) -> list[Score]:
    """One result of the second signature, which is for `count` answers."""
    if isinstance(result, Failure):
        return [_failed(result)] * count
    if not isinstance(result, list) or len(result) != count:
        problem = f"must return a list of {count} numbers, one for each completion; returned {shown(result)}"
        return [Score(0.0, problem)] * count
    return [_number_score(value, {}) for value in result]


def _failed(failure: Failure) -> Score:
    return Score(0.0, without_surrogates(failure.message))


def _number_score(value: Any, extra: dict[str, float]) -> Score:
    if value is None:
        return Score(None)
    number = as_number(value)
    if number is None:
        return Score(0.0, f"returned {number_problem(value)}", extra)
    return Score(number, None, extra)


def _extra_problem(extra: dict[str, Any]) -> str | None:
    """Why the numbers beside a score cannot become metrics."""
    if len(extra) > MAX_EXTRAS:
        return f"returned {len(extra)} numbers beside 'score'; at most {MAX_EXTRAS} can become metrics"
    for name, value in extra.items():
        if not name.isprintable() or not 0 < len(name) <= MAX_EXTRA_NAME:
            return (
                f"returned a number named {shown(name)}; the name of a metric has 1 to {MAX_EXTRA_NAME} characters, "
                "all of them printable"
            )
        if as_number(value) is None:
            return f"returned for {name!r} {number_problem(value)}"
    return None


def is_finite(value: Any) -> bool:
    """Whether JSON carried a finite number (true is 1), be it too large for a float."""
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def as_number(value: Any) -> float | None:
    """A finite number that JSON carried (true is 1) and that float32 can hold, or None."""
    return float(value) if is_finite(value) and abs(value) <= FLOAT32_MAX else None


def number_problem(value: Any) -> str:
    """A value that is no number for `as_number`, and why it is not."""
    if is_finite(value):
        return (
            f"{shown(value)}, which float32 cannot hold; divide it, so that it is at most {FLOAT32_MAX:.2g}"
        )
    return f"{shown(value)}, which is not a finite number"
