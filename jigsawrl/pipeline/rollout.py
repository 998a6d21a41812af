"""One step's rollout: prompts in, rewarded trajectories out.

    prompts --> engine --> completions --> rewards          (single turn: a group is rewarded while others decode)
    resets  --> engine --> action --> environment --+
                  ^------- observation tokens ------+       (multi-turn: environments step while others decode)

The engine never waits for user code: finished samples leave, observations come back whenever they are ready.
"""

from __future__ import annotations

import datetime
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from jigsawrl.engine.types import Generation, Request, SampleKey, SampleOutput, SamplingParams
from jigsawrl.errors import JigsawError
from jigsawrl.model.tokenizer import UnusableText
from jigsawrl.pipeline.chat import Dialogue
from jigsawrl.pipeline.environments.pool import Environments, StepResult
from jigsawrl.pipeline.prompts import keyed
from jigsawrl.pipeline.rewards import Rewards, Score, as_number, number_problem
from jigsawrl.pipeline.sandbox import Failure
from jigsawrl.pipeline.tasks import load_task
from jigsawrl.pipeline.tasks.base import EnvironmentSpec, Task
from jigsawrl.pipeline.trajectory import Trajectory
from jigsawrl.telemetry.events import now

if TYPE_CHECKING:
    from jigsawrl.config import RunConfig
    from jigsawrl.model.tokenizer import Tokenizer

OnWait = Callable[[Literal["tool", "reward"], float, float], None]
"""Told (sub-stage, start, end) whenever the engine had nothing to do but wait for a tool or a reward."""

OnEnded = Callable[[int, int], None]
"""Told how many samples of a rollout have ended, and of how many, whenever some have."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    seed: int
    pipeline: str
    samples: int
    params: SamplingParams
    max_prompt_tokens: int
    max_positions: int
    date: datetime.date | None
    """What a chat template writes as today's; None: the clock's."""


def rollout_of(config: RunConfig, tokenizer: Tokenizer, engine: Generation, longest: int) -> Rollout:
    """A pipeline's rollouts, on an engine that takes sequences up to the longest."""
    rollout = config.rollout
    params = SamplingParams(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
    )
    settings = RolloutSettings(
        config.seed, config.name, rollout.samples, params, rollout.max_prompt_tokens, longest, rollout.date
    )
    return Rollout(engine, tokenizer, load_task(config.task, config.seed), settings)


class Rollout:
    """Drives an engine through the episodes of a task."""

    def __init__(
        self,
        engine: Generation,
        tokenizer: Tokenizer,
        task: Task,
        settings: RolloutSettings,
        on_wait: OnWait = lambda *_: None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.dialogue = Dialogue(tokenizer, settings.date)
        self.task = task
        self.settings = settings
        self.on_wait = on_wait
        self.on_ended: OnEnded = lambda *_: None
        self.rewards = Rewards(task.reward) if task.reward is not None else None
        self.environments = Environments(task.environment) if task.environment is not None else None

    def check(self) -> None:
        """JigsawError if the user's reward or environment cannot be loaded: before a step, not in it."""
        for user_code in (self.rewards, self.environments):
            if user_code is not None:
                user_code.check()

    def uncontained(self) -> str | None:
        """Why the user's rewards and environments run in no PID namespace, or None where they run in one."""
        user_code = self.environments or self.rewards
        return None if user_code is None else user_code.uncontained()

    def run(self, prompts: Sequence[int], step: int) -> list[Trajectory]:
        """Every sample of these prompts, in the order of prompts and samples."""
        if self.environments is not None:
            assert self.task.environment is not None
            episodes = _Episodes(self, self.environments, self.task.environment, step)
            return episodes.run(prompts)
        return self._single_turn(prompts, step)

    def close(self) -> None:
        if self.rewards is not None:
            self.rewards.close()
        if self.environments is not None:
            self.environments.close()

    def keys(self, prompt: int, step: int) -> list[SampleKey]:
        settings = self.settings
        return [SampleKey(settings.seed, settings.pipeline, step, prompt, i) for i in range(settings.samples)]

    def _single_turn(self, prompts: Sequence[int], step: int) -> list[Trajectory]:
        assert self.rewards is not None
        groups: dict[int, list[Trajectory]] = {}
        for index in prompts:
            tokens = self.dialogue.prompt_tokens(self.task[index])
            self.engine.add_request(Request(str(index), tokens, self.settings.params, self.keys(index, step)))
            groups[index] = [
                Trajectory(index, i, list(tokens), len(tokens)) for i in range(self.settings.samples)
            ]
        left = dict.fromkeys(prompts, self.settings.samples)
        samples = sum(left.values())
        scores: dict[int, Future[list[Score]]] = {}
        while self.engine.has_unfinished():
            for output in self.engine.step():
                index = output.key.prompt
                record(groups[index][output.key.sample], output)
                left[index] -= 1
                if left[index] == 0:
                    texts = [self.text(t.tokens[t.prompt_length :]) for t in groups[index]]
                    scores[index] = self.rewards.submit(self.task[index], texts)
                self.on_ended(samples - sum(left.values()), samples)
        waiting = now()
        for index in prompts:
            for trajectory, score in zip(groups[index], scores[index].result(), strict=True):
                trajectory.reward, trajectory.error, trajectory.extra = score.value, score.error, score.extra
        self.on_wait("reward", waiting, now())
        return [trajectory for index in prompts for trajectory in groups[index]]

    def prompt_lengths(self) -> list[int]:
        """Tokens of every prompt of the task; none for an environment, whose prompts come with `reset`."""
        if self.environments is not None:
            return []
        return [self._prompt_length(index) for index in range(len(self.task))]

    def _prompt_length(self, index: int) -> int:
        try:
            length = len(self.dialogue.prompt_tokens(self.task[index]))
        except JigsawError as error:
            raise JigsawError(f"prompt {index} (the first is 0) cannot be used: {error}") from None
        if not length:
            raise JigsawError(f"prompt {index} (the first is 0) cannot be used: it has no tokens")
        return length

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def record(trajectory: Trajectory, output: SampleOutput) -> None:
    generated = output.generated
    trajectory.add_turn(generated.token_ids, generated.logprobs, generated.versions)
    trajectory.truncated = output.finish_reason == "length"


class _Episodes:
    """The multi-turn episodes of one step."""

    def __init__(
        self, rollout: Rollout, environments: Environments, spec: EnvironmentSpec, step: int
    ) -> None:
        self.rollout = rollout
        self.environments = environments
        self.spec = spec
        self.step = step
        self.arrived: queue.SimpleQueue[tuple[SampleKey, Future[Any]]] = queue.SimpleQueue()
        self.episodes: dict[SampleKey, Trajectory] = {}
        self.opening: dict[int, dict[SampleKey, list[int]]] = {}
        self.live = 0

    def run(self, prompts: Sequence[int]) -> list[Trajectory]:
        engine = self.rollout.engine
        keys = [key for index in prompts for key in self.rollout.keys(index, self.step)]
        for key in keys:
            seed = keyed("environment", key.seed, key.prompt, bits=31)
            self.episodes[key] = Trajectory(key.prompt, key.sample, [], 0)
            self._await(key, self.environments.reset(name(key), seed, self.rollout.task[key.prompt].extra))
        self.live = len(keys)
        while self.live:
            if engine.has_unfinished():
                for output in engine.step():
                    self._turn_ended(output)
                self._take_arrived(block=False)
            else:
                waiting = now()
                self._take_arrived(block=True)
                self.rollout.on_wait("tool", waiting, now())
        return [self.episodes[key] for key in keys]

    def _await(self, key: SampleKey, future: Future[Any]) -> None:
        def arrive(done: Future[Any]) -> None:
            self.arrived.put((key, done))
            self.rollout.engine.nudge()

        future.add_done_callback(arrive)

    def _take_arrived(self, block: bool) -> None:
        """Handles what environments have answered; with `block`, waits for the first answer.

        Every call has a time limit of its own, so an answer always comes.
        """
        while True:
            try:
                key, future = self.arrived.get(block=block)
            except queue.Empty:
                return
            block = False
            result = future.result()
            if isinstance(result, Failure):
                self._failed(key, result)
            elif isinstance(result, StepResult):
                self._stepped(key, result)
            else:
                self._opened(key, result)

    def _opened(self, key: SampleKey, observation: str) -> None:
        try:
            tokens = self.rollout.dialogue.first_tokens(observation, self.spec.system_prompt)
        except UnusableText as error:
            self._failed(key, Failure("raised", f"the first observation cannot be used: {error}"))
            return
        limit = self.rollout.settings.max_prompt_tokens
        if len(tokens) > limit:
            raise JigsawError(
                f"rollout.max_prompt_tokens is {limit}, but the environment's first observation for prompt "
                f"{key.prompt} has {len(tokens)} tokens"
            )
        if not tokens:
            self._failed(key, Failure("raised", "the first observation is empty, and a prompt needs a token"))
            return
        episode = self.episodes[key]
        episode.tokens, episode.prompt_length = list(tokens), len(tokens)
        self._group_is_ready(key.prompt, key, tokens)

    def _group_is_ready(self, prompt: int, key: SampleKey, tokens: list[int] | None) -> None:
        """Samples that open with the same observation share its prefill, so a prompt's samples start together."""
        group = self.opening.setdefault(prompt, {})
        group[key] = tokens or []
        if len(group) < self.rollout.settings.samples:
            return
        by_tokens: dict[tuple[int, ...], list[SampleKey]] = {}
        for member in sorted(group, key=lambda k: k.sample):
            if group[member]:
                by_tokens.setdefault(tuple(group[member]), []).append(member)
        for start, keys in by_tokens.items():
            request = Request(f"{prompt}/{keys[0].sample}", list(start), self.rollout.settings.params, keys)
            self.rollout.engine.add_request(request)

    def _turn_ended(self, output: SampleOutput) -> None:
        record(self.episodes[output.key], output)
        action = self.rollout.text(output.generated.token_ids)
        self._await(output.key, self.environments.step(name(output.key), action))

    def _stepped(self, key: SampleKey, result: StepResult) -> None:
        episode, settings = self.episodes[key], self.rollout.settings
        if result.reward is not None:
            total = (episode.reward or 0.0) + result.reward
            if as_number(total) is None:
                self._failed(key, Failure("raised", f"its rewards add up to {number_problem(total)}"))
                return
            episode.reward = total
        if result.done or episode.truncated:
            self._end(key)
            return
        try:
            turn = self.rollout.dialogue.turn_tokens(result.observation, episode.tokens[-1])
        except UnusableText as error:
            self._failed(key, Failure("raised", f"an observation cannot be used: {error}"))
            return
        length = len(episode.tokens) + len(turn)
        budget = min(settings.params.max_tokens - len(episode.trained), settings.max_positions - length)
        if episode.turns >= self.spec.max_turns or budget < 1:
            episode.truncated = True
            self._end(key)
            return
        episode.tokens += turn
        params = replace(settings.params, max_tokens=budget)
        request = Request(f"{key.prompt}/{key.sample}/{episode.turns}", list(episode.tokens), params, [key])
        self.rollout.engine.add_request(request)

    def _failed(self, key: SampleKey, failure: Failure) -> None:
        if self.spec.on_error == "stop":
            raise JigsawError(
                f"task.on_error is stop, and the environment of prompt {key.prompt} failed: {failure.message}"
            )
        episode = self.episodes[key]
        episode.error, episode.reward = failure.message, 0.0
        if not episode.tokens:
            self._group_is_ready(key.prompt, key, None)
        self._end(key)

    def _end(self, key: SampleKey) -> None:
        self.environments.release(name(key))
        self.live -= 1
        self.rollout.on_ended(len(self.episodes) - self.live, len(self.episodes))


def name(key: SampleKey) -> str:
    """An episode's name in the pool."""
    return f"{key.step}/{key.prompt}/{key.sample}"
