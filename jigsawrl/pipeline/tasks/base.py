"""What a task is: numbered prompts, and either a reward function or an environment that judges the answers.

Everything in a prompt is JSON-serialisable, because it travels to user code in other processes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

JSON = Any

OnError = Literal["zero", "stop"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: plain `text` or chat `messages`; both None where an environment's `reset` gives it.

    `index` is the position in the task and keys the sampling. `extra` holds the other columns of a data row, or
    the options that an environment's `reset` takes besides the seed.
    """

    index: int
    text: str | None
    messages: list[dict[str, str]] | None
    ground_truth: JSON
    data_source: str
    extra: dict[str, JSON]


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A reward function to run in processes of its own; `target` is `file.py:function` or `module:function`."""

    target: str
    params: dict[str, JSON]
    timeout: float
    on_error: OnError
    processes: int


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """An environment class to run in processes of its own; one instance lives for one episode."""

    target: str
    params: dict[str, JSON]
    timeout: float
    on_error: OnError
    processes: int
    max_turns: int
    system_prompt: str | None


class Task(Protocol):
    """Prompts by index, the same for the same configuration and seed on every machine.

    Exactly one of `reward` and `environment` is set.
    """

    @property
    def reward(self) -> RewardSpec | None: ...

    @property
    def environment(self) -> EnvironmentSpec | None: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...

    def demonstration(self, index: int) -> str | None:
        """A text that continues the prompt rightly (for a warm-up); None where none is known."""
        ...


@dataclass(frozen=True, slots=True)
class ListedTask:
    """A task whose prompts are all known from the start; prompt i stands at position i."""

    prompts: list[Prompt]
    reward: RewardSpec | None = None
    environment: EnvironmentSpec | None = None
    demonstrate: Callable[[Prompt], str] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def demonstration(self, index: int) -> str | None:
        return self.demonstrate(self.prompts[index]) if self.demonstrate else None
