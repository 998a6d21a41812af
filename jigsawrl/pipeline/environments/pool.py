"""Many episodes of a text environment at a time, in processes of their own.

An environment is a class; one instance plays one episode:

    __init__(**params)
    reset(seed=..., **options) -> observation, or (observation, info)
    step(action) -> observation, reward, done, info     (or gymnasium's five, with terminated and truncated)
    close()                                             (optional)

The reward of an episode is the sum of its steps' rewards. A step may give None, which adds nothing; an episode in
which every step gave None has no reward, and is left out of all that is learned. In an observation, a lone surrogate
(text that has no UTF-8) becomes U+FFFD, the replacement character. Every turn of the model comes to
`step`: one that the token limit has cut off comes with the text that there is, as a cut answer comes to a reward
function, its reward counts, and it is the last one, whatever `done` says.

Its methods may be async: then all instances of a process share one thread, and overlap where they await. Sync
methods of different instances run in different threads of one process, and must not share state unguarded.
An episode whose process ends (because of another one) is made again elsewhere by repeating its actions.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jigsawrl.errors import JigsawError
from jigsawrl.foreign import shown, without_surrogates
from jigsawrl.pipeline.rewards import as_number, number_problem
from jigsawrl.pipeline.sandbox import Failure, Sandbox, then
from jigsawrl.pipeline.tasks.base import EnvironmentSpec

_THREADS = 128  # steps of sync environments at a time in one process; they mostly wait for their tools


@dataclass(frozen=True, slots=True)
class StepResult:
    observation: str
    reward: float | None
    done: bool
    info: dict[str, Any]


class Environments:
    """Episodes by name. With `on_error: stop` a failure is raised from the future as a JigsawError instead."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._sandbox = Sandbox(
            spec.target,
            spec.params,
            processes=spec.processes,
            timeout=spec.timeout,
            threads=_THREADS,
            methods=("reset", "step"),
        )

    def check(self) -> None:
        """Waits until the class is loaded; JigsawError where it cannot be, or is no environment."""
        self._sandbox.check()

    def reset(self, episode: str, seed: int, options: dict[str, Any]) -> Future[str | Failure]:
        """Starts an episode; its name must not be in use. The result is the first observation.

        The first call waits until the class is loaded, and raises what `check` raises.
        """
        self.check()
        call = self._sandbox.call("reset", {**options, "seed": seed}, key=episode)
        return then(call, lambda result: self._read(result, read_reset))

    def step(self, episode: str, action: str) -> Future[StepResult | Failure]:
        """After a failure, every further step of the episode gives that failure."""
        call = self._sandbox.call("step", {"action": action}, key=episode)
        return then(call, lambda result: self._read(result, read_step))

    def release(self, episode: str) -> None:
        """Ends an episode, finished or not, and frees its name."""
        self._sandbox.drop(episode)

    def uncontained(self) -> str | None:
        """Why user code runs in no PID namespace, or None where it runs in one."""
        return self._sandbox.uncontained()

    def close(self) -> None:
        self._sandbox.close()

    def _read(self, result: Any, read: Callable[[Any], Any]) -> Any:
        outcome = result if isinstance(result, Failure) else read(result)
        if not isinstance(outcome, Failure):
            return outcome
        message = without_surrogates(outcome.message)
        if self._spec.on_error == "stop":
            raise JigsawError(f"environment {self._spec.target} failed: {message}")
        return Failure(outcome.kind, message)


def read_reset(result: Any) -> str | Failure:
    """What `reset` returned, as JSON carried it (tuples are lists)."""
    match result:
        case str() as observation:
            return without_surrogates(observation)
        case [str() as observation, dict() | None]:
            return without_surrogates(observation)
    return Failure("raised", f"reset must return text, or (text, dict); it returned {shown(result)}")


def read_step(result: Any) -> StepResult | Failure:
    """What `step` returned, as JSON carried it (tuples are lists)."""
    match result:
        case [str() as observation, reward, bool() as done, dict() | None as info]:
            pass
        case [str() as observation, reward, bool() as terminated, bool() as truncated, dict() | None as info]:
            done = terminated or truncated
        case _:
            return Failure(
                "raised", f"step must return (text, reward, done, dict); it returned {shown(result)}"
            )
    number = as_number(reward)
    if number is None and reward is not None:
        return Failure("raised", f"step gave the reward {number_problem(reward)}")
    return StepResult(without_surrogates(observation), number, done, info or {})
