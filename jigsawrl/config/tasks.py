"""The `task` section: one model per kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jigsawrl.config.fields import (
    Count,
    Distinct,
    NotNegative,
    Params,
    Place,
    Seconds,
    Settings,
    Target,
    Text,
    at_most,
)

OnError = Literal["zero", "stop"]
Processes = Annotated[Count, at_most(256)]
Turns = Annotated[Count, at_most(10_000)]
Size = Annotated[Count, at_most(1_000_000)]
Latency = Annotated[NotNegative, at_most(100_000)]
Operations = Annotated[tuple[Literal["+", "-", "*"], ...], Field(min_length=1), Distinct]


class RewardConfig(Settings):
    """A reward function of the user's, run in processes of its own."""

    path: Target
    """Where the function is: `file.py:function` or `module:function`; it leaves out a sample by returning None."""
    timeout: Seconds = 30.0
    """Seconds that one call may take."""
    on_error: OnError = "zero"
    """A call that fails: counts as reward zero (`zero`), or ends the run (`stop`)."""
    processes: Processes = 2
    """Processes that run the function."""
    params: Params = Field(default={})
    """Further keyword arguments of the function."""


class _Sandboxed(Settings):
    env_timeout: Seconds = 30.0
    """Seconds that one call may take."""
    on_error: OnError = "zero"
    """A call that fails: ends the episode with reward zero (`zero`), or the run (`stop`)."""
    processes: Processes = 2
    """Processes that run the task's code."""


class ArithmeticTask(Settings):
    """Sums for the tiny model: the prompt `7+5=` wants `12`."""

    kind: Literal["arithmetic"] = "arithmetic"
    """Which task: arithmetic."""
    max_number: Annotated[int, Field(strict=True, ge=1, le=10**9)] = 20
    """Largest number in a sum."""
    operations: Operations = ("+",)
    """Operations that occur: +, -, *."""
    size: Size = 512
    """Number of prompts."""


class DataTask(Settings):
    """Prompts from a file, judged by a reward function."""

    kind: Literal["data"] = "data"
    """Which task: data."""
    path: Place
    """A JSONL file, a parquet file, or the folder of a saved Hugging Face dataset."""
    format: Literal["auto", "jsonl", "parquet", "hf"] = "auto"
    """How to read it; auto: by the name."""
    prompt: Text = "prompt"
    """Column with the prompt: text, or chat messages."""
    ground_truth: Text | None = None
    """Column with the right answer; null: reward_model.ground_truth, else ground_truth, else answer."""
    data_source: Text | None = None
    """Column with the name of the source; null: data_source where there is one."""
    system_prompt: str | None = None
    """System message put before every prompt."""
    reward: RewardConfig
    """The reward function: {path: file.py:function}."""


class ReasoningGymTask(_Sandboxed):
    """A task of reasoning-gym, with its own scoring."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Which task: reasoning_gym."""
    name: Text
    """Name of the dataset, such as chain_sum."""
    params: Params = Field(default={})
    """Difficulty settings of the dataset, such as max_terms."""
    size: Size = 1000
    """Number of prompts."""
    system_prompt: str | None = None
    """System message put before every prompt."""


class CalculatorTask(_Sandboxed):
    """The bundled agentic task: sums to be solved with a calculator tool that takes its time."""

    kind: Literal["calculator"] = "calculator"
    """Which task: calculator."""
    latency: Latency = 0.05
    """Seconds that the tool takes for an answer."""
    latency_jitter: Latency = 0.0
    """Seconds added at most to the latency, at random."""
    max_number: Annotated[int, Field(strict=True, ge=1, le=10**9)] = 20
    """Largest number in a sum."""
    operations: Operations = ("+",)
    """Operations that occur: +, -, *."""
    size: Size = 512
    """Number of prompts."""
    max_turns: Turns = 4
    """Turns of the model in one episode."""


class TextArenaTask(_Sandboxed):
    """A game of textarena by name."""

    kind: Literal["textarena"] = "textarena"
    """Which task: textarena."""
    name: Text
    """Name of the game, such as GuessTheNumber-v0."""
    params: Params = Field(default={})
    """Settings of the game."""
    size: Size = 512
    """Number of different games."""
    max_turns: Turns = 16
    """Turns of the model in one episode."""
    system_prompt: str | None = None
    """System message put before the game's first observation."""


class EnvironmentTask(_Sandboxed):
    """A text environment of the user's, with `reset` and `step`, which gets the turn that max_tokens cuts off too."""

    kind: Literal["environment"] = "environment"
    """Which task: environment."""
    path: Target
    """Where the class is: `file.py:Class` or `module:Class`."""
    params: Params = Field(default={})
    """Keyword arguments of the class."""
    size: Size = 512
    """Number of different seeds for `reset`."""
    max_turns: Turns = 16
    """Turns of the model in one episode."""
    system_prompt: str | None = None
    """System message put before the first observation."""


EpisodeTask = CalculatorTask | TextArenaTask | EnvironmentTask
"""Those in which the model may have several turns."""

TaskConfig = Annotated[
    ArithmeticTask | DataTask | ReasoningGymTask | EpisodeTask,
    Field(discriminator="kind"),
]
